"""Critics that the team holds apart from actors: shared by other agents than the actor is.

Each set of agents has one state value, whoever their actors are. Sets of one structure are stacked
in groups of their own, and learn before the actors, from the same rollout.

Axes: S critic sets of N members in a group.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from marl import experience, groups, rewards
from marl.experience import Seen, TeamRollout
from marl.groups import Group


def init(
    built: tuple[Group, ...], held: tuple[Group, ...], key: jax.Array, hparams: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Per group of critics `held`, states [S, ...]; a set's key comes from its first position."""
    states = []
    for group in held:
        keys = groups.position_keys(key, [members[0] for members in group.sets])
        own = _hparams(built, group, hparams)
        states.append(groups.over_sets(group, group.learner.init, (0, 0), keys, own))
    return tuple(states)


def update(
    built: tuple[Group, ...],
    held: tuple[Group, ...],
    state: tuple[Any, ...],
    rollout: TeamRollout,
    result: rewards.Outcome,
    seen: Seen,
    shuffle_key: jax.Array,
    hparams: tuple[Any, ...],
) -> tuple[tuple[Any, ...], dict[int, jax.Array], dict[int, dict[str, jax.Array]]]:
    """Learn from one rollout.

    Returns:
      The next states; advantages [T, B] under the states that came in, by the position of who has a
      critic of the team; and that critic's metrics [], by position.
    """
    states = []
    advantages: dict[int, jax.Array] = {}
    metrics: dict[int, dict[str, jax.Array]] = {}
    for group, group_state in zip(held, state, strict=True):
        own, axes = experience.of_critics(group, rollout, result, seen, shuffle_key)
        arguments = (group_state, own, _hparams(built, group, hparams))
        moved, advantage, found = groups.over_sets(
            group, group.learner.update, (0, axes, 0), *arguments
        )
        states.append(moved)
        advantages |= groups.unstack(group, groups.unfold(group, advantage))
        for index, members in enumerate(group.sets):
            one = {name: values[index] for name, values in found.items()}
            metrics |= dict.fromkeys(members, one)
    return tuple(states), advantages, metrics


def metrics_of(group: Group, found: Mapping[int, dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """What critics of the team report, [S], for a group of actors; {} where they hold theirs.

    Of agents that share an actor and not a critic, the mean over their critics.
    """
    if not group.held:
        return {}

    def mean(name: str, members: tuple[int, ...]) -> jax.Array:
        return jnp.mean(jnp.stack([found[position][name] for position in members]))

    names = found[group.positions[0]]
    return {name: jnp.stack([mean(name, members) for members in group.sets]) for name in names}


def _hparams(built: tuple[Group, ...], group: Group, hparams: tuple[Any, ...]) -> Any:
    """[S]: those of each set's first member, which are those of all where a critic reads them."""
    firsts = [groups.of_position(built, hparams, members[0]) for members in group.sets]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *firsts)
