"""Patterns over agent ids: `*` and `?`, or a list `"agent_0, agent_1"`; nothing else is special."""

import re
from collections.abc import Mapping, Sequence

from marl.envs.errors import UsageError


def matching(pattern: str, agents: Sequence[str]) -> list[str]:
    """The agents that a pattern names, in declared order."""
    if not isinstance(pattern, str):
        raise UsageError(f"{pattern!r} is a {type(pattern).__name__}; agents are named by text")
    words = [word.strip().strip("\"'") for word in pattern.strip("\"'").split(",")]
    expressions = [
        re.escape(word).replace(r"\*", ".*").replace(r"\?", ".") for word in words if word
    ]
    return [agent for agent in agents if any(re.fullmatch(e, agent) for e in expressions)]


def matching_some(pattern: str, agents: Sequence[str], where: str) -> list[str]:
    """Like `matching`; raises UsageError where nothing matches."""
    found = matching(pattern, agents)
    words = [word.strip() for word in pattern.strip("\"'").split(",")]
    for word in words if len(words) > 1 and all(words) else [pattern]:
        if not matching(word, agents):
            raise UsageError(
                f"{where} {word!r} match nothing; this environment has {', '.join(agents)}"
            )
    return found


def partition(
    sets: Mapping[str, Sequence[str]], agents: Sequence[str], where: str
) -> dict[str, list[str]]:
    """Named sets of patterns as named sets of agents; raises UsageError where two sets overlap."""
    if not isinstance(sets, Mapping):
        raise UsageError(
            f"{where} = {sets!r} is a {type(sets).__name__}; give one of its words, or a mapping "
            "of names to lists of agents"
        )
    owner: dict[str, str] = {}
    for name, patterns in sets.items():
        if not patterns:
            raise UsageError(
                f"{where}.{name} = {patterns!r} names no agents; give some of "
                f"{', '.join(agents)}, or leave {name} away"
            )
        words = [patterns] if isinstance(patterns, str) else patterns
        for word in words:
            for agent in matching_some(word, agents, f"{where}.{name}: agents"):
                if owner.setdefault(agent, name) != name:
                    raise UsageError(
                        f"{where}: {agent} is in {owner[agent]!r} and in {name!r}; "
                        "an agent belongs to one set at most"
                    )
    return {name: [agent for agent in agents if owner.get(agent) == name] for name in sets}
