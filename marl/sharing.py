"""Sharing sets: which agents have one parameter set, and which have one critic."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marl import patterns
from marl.agents.validation import one_of
from marl.envs.errors import UsageError

PARTS = ("actor", "critic")
_WORDS = ("none", "group")
_CRITIC_WORDS = (*_WORDS, "reward_team")


class Resolved(NamedTuple):
    """One agent's options after all overrides."""

    algorithm: Any
    config: Any
    hparams: Any
    critic: tuple[str, ...]
    sharing: str  # "none", "group", or the name of a set
    critic_sharing: str | None  # the same or "reward_team"; None: as the actor
    reward_scale: float
    given: Mapping[str, str | None]  # the override that gives an option; None: the team's options


class Named(NamedTuple):
    """The user's `sharing`, for actors or for critics."""

    default: str | None  # of agents in no named set; None: critics as their actors
    set_of: dict[str, str]  # the named set of each agent that is in one

    def of(self, agent: str) -> str | None:
        return self.set_of.get(agent, self.default)


def by_part(sharing: Any, where: str) -> tuple[Any, Any]:
    """`sharing` of actors and of critics, as the user gave them; None: critics as their actors."""
    if not isinstance(sharing, Mapping) or not set(PARTS) & set(sharing):
        return sharing, None
    others = [name for name in sharing if name not in PARTS]
    if others:
        raise UsageError(
            f"{where} has {', '.join(map(str, others))} beside {' and '.join(PARTS)}; these two "
            f"are words of their own, so give the sets under them: {where}.actor.{others[0]}"
        )
    return sharing.get("actor", "none"), sharing.get("critic")


def named_sets(sharing: Any, agents: Sequence[str]) -> tuple[Named, Named]:
    """Who shares actors, and who shares critics."""
    actor, critic = by_part(sharing, "sharing")
    apart = isinstance(sharing, Mapping) and bool(set(PARTS) & set(sharing))
    where = "sharing.actor" if apart else "sharing"
    actors = _named(actor, agents, where, _WORDS, "none")
    return actors, _named(critic, agents, "sharing.critic", _CRITIC_WORDS, None)


def _named(
    sharing: Any, agents: Sequence[str], where: str, words: tuple[str, ...], default: str | None
) -> Named:
    if sharing is None or isinstance(sharing, str):
        if sharing is not None:
            one_of(where, sharing, words)
        return Named(sharing, {})
    for name in words:
        if isinstance(sharing, Mapping) and name in sharing:
            raise UsageError(f"{where}.{name} is a word of its own; call the set otherwise")
    sets = patterns.partition(sharing, agents, where)
    set_of = {agent: name for name, members in sets.items() for agent in members}
    return Named(default, set_of)


def resolve(sharing: Any, agent: str, actors: Named, critics: Named) -> tuple[str, str | None]:
    """One agent's (sharing, critic_sharing) from the value of its option.

    Raises:
      UsageError: it is neither a word nor the name of a set.
    """
    actor, critic = by_part(sharing, f"sharing of {agent}")
    one_of(f"sharing of {agent}", actor, (*_WORDS, *dict.fromkeys(actors.set_of.values())))
    if critic is not None:
        sets = dict.fromkeys(critics.set_of.values())
        one_of(f"sharing of the critic of {agent}", critic, (*_CRITIC_WORDS, *sets))
    return actor, critic


def sharing_sets(
    agents: Sequence[str],
    resolved: Sequence[Resolved],
    observations: Sequence[Any],
    actions: Sequence[Any],
) -> tuple[tuple[int, ...], ...]:
    """A partition of positions. Members of one set must be alike in everything they learn with."""
    sets: dict[Any, list[int]] = {}
    for p, agent in enumerate(resolved):
        scope = agent.critic if agent.critic_sharing is None else None
        kind = (agent.algorithm, agent.config, observations[p], actions[p], scope)
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


def critic_sets(
    agents: Sequence[str],
    resolved: Sequence[Resolved],
    observations: Sequence[Any],
    actor_sets: Sequence[tuple[int, ...]],
    team_of: Mapping[int, int],
) -> tuple[tuple[int, ...], ...]:
    """A partition of positions: who has one critic. Agents that do not say have their actor's."""
    apart = any(agent.critic_sharing == "reward_team" for agent in resolved)
    if apart and len(set(team_of.values())) == len(agents) > 1:
        raise UsageError(
            "sharing.critic = 'reward_team' shares a critic in each reward team, and each agent is "
            "alone in its own; put two in one, as in reward_teams = 'all'"
        )
    sets: dict[Any, list[int]] = {}
    for index, members in enumerate(actor_sets):
        for p in members:
            agent = resolved[p]
            own = agent.critic_sharing == agent.sharing == "none"
            if agent.critic_sharing is None or own:
                sets.setdefault(("actor", index), []).append(p)
                continue
            _check_has_critic(agents[p], agent)
            options = agent.algorithm.critic_options(agent.config, agent.hparams)
            paid = (agent.critic, agent.reward_scale)
            kind = (agent.algorithm, tuple(options.items()), observations[p], *paid)
            keys = {
                "none": ("own", p),
                "group": ("group", kind),
                "reward_team": ("team", team_of[p]),
            }
            key = keys.get(agent.critic_sharing, ("named", agent.critic_sharing))
            sets.setdefault(key, []).append(p)
    ordered = sorted(tuple(sorted(members)) for members in sets.values())
    for members in ordered:
        if len(members) > 1 and any(resolved[p].critic_sharing is not None for p in members):
            _check_one_critic([(agents[p], resolved[p]) for p in members])
    return tuple(ordered)


def _check_has_critic(name: str, agent: Resolved) -> None:
    if not (hasattr(agent.algorithm, "make_critic") and hasattr(agent.algorithm, "critic_options")):
        raise UsageError(
            f"sharing.critic = {agent.critic_sharing!r}: the critic of {name} cannot be shared "
            "apart from its actor; only learners with state values can (ppo, a2c)"
        )


def _check_one_critic(members: Sequence[tuple[str, Resolved]]) -> None:
    """Raise UsageError where agents that share a critic differ in what it depends on."""
    (name, first), *others = members
    for other, agent in others:
        what: str = "learner"
        left: Any = _word(first.algorithm)
        right: Any = _word(agent.algorithm)
        if first.algorithm is agent.algorithm:
            options = [
                r.algorithm.critic_options(r.config, r.hparams) | {"reward_scale": r.reward_scale}
                for r in (first, agent)
            ]
            different = [key for key in options[0] if not _equal(*(o[key] for o in options))]
            if first.critic == agent.critic and not different:
                continue
            what, left, right = "critic", first.critic, agent.critic
            if different:
                what = different[0]
                left, right = (values[what] for values in options)
        raise UsageError(
            f"{name} and {other} share a critic but differ in {what}: {left} and {right}; make "
            f"them equal, or give one a critic of its own (overrides: {{{other}: {{sharing: "
            "{critic: none}}})"
        )


def _word(algorithm: Any) -> str:
    return getattr(algorithm, "__name__", type(algorithm).__name__).rsplit(".", 1)[-1]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b


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
            *([("critic", a.critic, b.critic)] if a.critic_sharing is None else []),
            ("reward_scale", a.reward_scale, b.reward_scale),
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
