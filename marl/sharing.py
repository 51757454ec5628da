"""Sharing sets: which agents have one parameter set."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from marl import patterns
from marl.agents.validation import one_of
from marl.envs.errors import UsageError


class Resolved(NamedTuple):
    """One agent's options after all overrides."""

    algorithm: Any
    config: Any
    hparams: Any
    critic: tuple[str, ...]
    sharing: str  # "none", "group", or the name of a set


def named_sets(sharing: Any, agents: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The default sharing of all agents, and the set of each agent that the user named."""
    if isinstance(sharing, str):
        one_of("sharing", sharing, ("none", "group"))
        return sharing, {}
    for name in ("none", "group"):
        if name in sharing:
            raise UsageError(f"sharing.{name} is a word of its own; call the set otherwise")
    sets = patterns.partition(sharing, agents, "sharing")
    return "none", {agent: name for name, members in sets.items() for agent in members}


def sharing_sets(
    agents: Sequence[str],
    resolved: Sequence[Resolved],
    observations: Sequence[Any],
    actions: Sequence[Any],
) -> tuple[tuple[int, ...], ...]:
    """A partition of positions. Members of one set must be alike in everything they learn with."""
    sets: dict[Any, list[int]] = {}
    for p, agent in enumerate(resolved):
        kind = (agent.algorithm, agent.config, observations[p], actions[p], agent.critic)
        if agent.sharing == "none":
            sets[("own", p)] = [p]
        elif agent.sharing == "group":
            sets.setdefault(("group", kind), []).append(p)
        else:
            sets.setdefault(("named", agent.sharing), []).append(p)
    for members in sets.values():
        first = members[0]
        for p in members[1:]:
            _check_alike(
                (agents[first], resolved[first], observations[first], actions[first]),
                (agents[p], resolved[p], observations[p], actions[p]),
                resolved[first].sharing,
            )
    return tuple(tuple(members) for members in sets.values())


def _config_differences(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    """(field, left, right) of two configs of one class; the configs themselves of two classes."""
    if type(a) is not type(b):
        return [("config", a, b)]
    names = [field.name for field in dataclasses.fields(a)]
    return [(name, getattr(a, name), getattr(b, name)) for name in names]


def _check_alike(first: tuple, other: tuple, how: str) -> None:
    """Raise UsageError where two agents of a sharing set differ."""
    (name, a, observation, action), (other_name, b, other_observation, other_action) = first, other
    differences = [
        (what, left, right)
        for what, left, right in (
            ("learner", a.algorithm, b.algorithm),
            *_config_differences(a.config, b.config),
            ("critic", a.critic, b.critic),
            ("observation space", observation[1:], other_observation[1:]),
            ("action space", action[1:], other_action[1:]),
        )
        if left != right
    ] + [
        (option, value, b.hparams._asdict().get(option))
        for option, value in a.hparams._asdict().items()
        if value != b.hparams._asdict().get(option)
    ]
    if differences:
        what, left, right = differences[0]
        raise UsageError(
            f"{name} and {other_name} share parameters (sharing = {how}) but differ in {what}: "
            f"{left} and {right}; make them equal, or put one in a sharing set of its own "
            f"(overrides: {{{other_name}: {{sharing: none}}}})"
        )
