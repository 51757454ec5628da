"""Critic scopes: what each agent's critic reads.

A scope is a tuple of sources: "self" (the agent's own observation, with its id where parameters are
shared), the position of an agent in env.agents, or "state" (the environment's global state). Its
order is that of env.agents; in a scope that begins with "self" the others follow by the kind of
their observation, then by position, so that agents of one kind see scopes of one structure.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from marl import groups
from marl.envs import spaces
from marl.envs.errors import UsageError, nearest
from marl.groups import Group
from marl.patterns import matching

Source = str | int
Scope = tuple[Source, ...]
SCOPES = ("self", "all", "state")


def kind(algorithm: Any) -> str | None:
    """What an algorithm's critic gives: "value", "q", or None without one."""
    return getattr(algorithm, "CRITIC", "value")


def parse(critic: Any, where: str, agents: Sequence[str]) -> tuple[str, ...]:
    """The user's critic scope as a tuple of "self", "all", "state" and agent ids.

    Raises:
      UsageError: a word is neither a scope nor matches an agent.
    """
    if not isinstance(critic, str | list | tuple):
        raise UsageError(
            f"{where} = {critic!r} is a {type(critic).__name__}; give {', '.join(SCOPES)}, or a "
            "list of agents and these words"
        )
    words = (critic,) if isinstance(critic, str) else tuple(critic)
    if not words:
        raise UsageError(f"{where} is empty; {nearest('', (*SCOPES, *agents))}")
    tokens: list[str] = []
    for word in words:
        if word in SCOPES:
            tokens.append(word)
            continue
        found = matching(word, agents)
        if not found:
            raise UsageError(
                f"{where} = {word!r} is neither a scope nor an agent; "
                f"{nearest(word, (*SCOPES, *agents))}"
            )
        tokens.extend(found)
    return tuple(dict.fromkeys(tokens))


def resolve(
    tokens: tuple[str, ...],
    position: int,
    own_first: bool,
    agents: Sequence[str],
    kinds: Sequence[Any],
    members: Sequence[int] = (),
) -> Scope:
    """The sources that an agent's critic reads.

    Args:
      tokens: from `parse`.
      position: of the agent in `agents`.
      own_first: put the agent's own observation first; needed when a critic's parameters are shared
        by agents that are paid differently, who else would all get one value.
      agents: ids in declared order.
      kinds: per agent, anything that is equal for agents with the same observation structure.
      members: of the agent's sharing set, who must all see scopes of one structure.
    """
    if tokens == ("self",):
        return ("self",)
    own_first = own_first or "self" in tokens
    seen = set(range(len(agents))) if "all" in tokens else set()
    seen |= {index for index, agent in enumerate(agents) if agent in tokens}
    ordered: list[Source] = sorted(seen)
    if own_first:
        first_of_kind = [kinds.index(kind) for kind in kinds]
        # "self" stands for the agent's own entry, unless others of its set have no such entry
        own = {position} if seen.issuperset(members) else set()
        others = sorted(seen - own, key=lambda index: (first_of_kind[index], index))
        ordered = ["self", *others]
    return (*ordered, "state") if "state" in tokens else tuple(ordered)


def observation_space(scope: Scope, own: Any, raw: Sequence[Any], state: Any) -> tuple[Any, ...]:
    """The space of a critic's observations: one space per source.

    Args:
      scope: the sources.
      own: the agent's own space, identified where parameters are shared.
      raw: spaces by position.
      state: space of the global state, or None.
    """
    space = {"self": own, "state": state}
    return tuple(space[source] if isinstance(source, str) else raw[source] for source in scope)


def state_space(env: Any) -> Any:
    """The space of `env.global_state`, or None where the environment has none."""
    _, state = jax.eval_shape(env.reset, jax.random.key(0))
    shapes = jax.eval_shape(env.global_state, state)
    return jax.tree.map(lambda x: spaces.Box(x.shape, dtype=x.dtype.name), shapes)


def build(group: Group, own: Any, observations: Sequence[Any], state: Any) -> Any:
    """The critic's input over a rollout: a tuple with one tree per source.

    Args:
      group: whose critic it is.
      own: the members' own observations, folded and identified, [T, S, B * N, ...].
      observations: by position, [T, B, ...].
      state: global state [T, B, ...], or ().

    Returns:
      [T, B, ...] where every member's critic reads the same, else [T, S, B * N, ...].
    """

    def read(source: Source) -> Any:
        return state if isinstance(source, str) else observations[source]

    if group.joint:
        return tuple(read(source) for source in group.scopes[0])
    built = []
    for place, source in enumerate(group.scopes[0]):
        if source == "self":
            built.append(own)
            continue
        members = [read(scope[place]) for scope in group.scopes]
        stacked = groups.stack_members(group, members)  # [S, N, T, B, ...]
        by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), stacked)
        built.append(groups.fold(group, by_time))
    return tuple(built)


def context_positions(scope: Scope, position: int) -> tuple[int, ...]:
    """Whose actions a Q-critic reads beside its own agent's: those of the agents it sees."""
    return tuple(source for source in scope if isinstance(source, int) and source != position)


def build_context(group: Group, actions: Sequence[Any]) -> Any:
    """What Q-critics read of actions [T, B, ...] by position: [T, S, B * N, ...]; or ()."""
    if not group.contexts[0] or not actions:
        return ()

    def gathered(place: int) -> Any:
        stacked = groups.stack_members(group, [actions[c[place]] for c in group.contexts])
        return groups.fold(group, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), stacked))

    return tuple(gathered(place) for place in range(len(group.contexts[0])))


def identify_folded(group: Group, obs: Any) -> Any:
    """Add who is acting to folded observations [T, S, B * N, ...]."""
    batch = jax.tree.leaves(obs)[0].shape[:3]
    return groups.identify(group, obs, groups.folded_one_hot(group, batch[2]), batch)
