"""Updates one agent after another (HAPPO: Kuba et al. 2022, arXiv:2109.11251, algorithm 4).

Sharing sets learn in a fresh random order each update. The advantages of each are weighted by how
much more likely those of its reward team that went before now are to act as they did: the product
of their new over their old probabilities. An agent alone in its team is weighted by 1.

The order is drawn from the number of the update alone, so that it is one for all seeds of a run:
vmapped seeds then run one branch of the `switch` over groups, and not all of them.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from marl import groups
from marl.agents.learner import Learner, Rollout
from marl.groups import Group

if TYPE_CHECKING:
    from marl.dispatch import TeamSpec


class Turns(NamedTuple):
    """What the groups that learn in turn have learned so far; also the loop's carry."""

    states: dict[int, Any]  # by index of the group, [S, ...]
    metrics: dict[int, dict[str, jax.Array]]  # the same, [S]
    log_ratio: jax.Array  # [reward teams, T, B]: of those that had their turn, new to old


def able(built: tuple[Group, ...]) -> list[tuple[int, ...]]:
    """Sharing sets that may learn in turn: of policies that learn from rollouts."""
    return [
        members
        for group in built
        if group.learner.experience == "rollout" and group.learner.log_prob is not None
        for members in group.sets
    ]


def which(spec: "TeamSpec", built: tuple[Group, ...]) -> tuple[int, ...]:
    """Indices of the groups that learn in turn: in teams of several sets that may."""
    together: set[int] = set()
    for team in spec.reward_teams.members:
        turns = [members for members in able(built) if set(members).intersection(team)]
        together |= {p for members in turns for p in members} if len(turns) > 1 else set()
    return tuple(i for i, group in enumerate(built) if together.intersection(group.positions))


def update(
    spec: "TeamSpec",
    built: tuple[Group, ...],
    key: jax.Array,
    number: jax.Array,
    steps: tuple[int, ...],
    state: Any,
    experiences: Mapping[int, tuple[Any, Any]],
    hparams: tuple[Any, ...],
) -> Turns:
    """Learn set after set.

    Args:
      key: of the update; each set's comes from its first position.
      number: [] int32 of the update, from which the order is drawn.
      state: learner states by group.
      steps: (T, B).
      experiences: by index of each group that learns in turn, its experience and the axis of S in
        each field, with the advantages before they are weighted.
    """
    sets = [(index, s) for index in experiences for s in range(len(built[index].sets))]
    turns = sorted(sets, key=lambda turn: built[turn[0]].sets[turn[1]])  # however they are grouped
    learners = {
        index: partial(_learn_set, spec, built[index], key, *experiences[index], hparams[index])
        for index in experiences
    }
    branches = [partial(_turn, index, learn) for index, learn in learners.items()]
    branch_of = jnp.asarray([list(experiences).index(index) for index, _ in turns])
    set_of = jnp.asarray([s for _, s in turns])

    def body(carry: Turns, turn: jax.Array) -> tuple[Turns, None]:
        return jax.lax.switch(branch_of[turn], branches, set_of[turn], carry), None

    states = {index: state[index] for index in experiences}
    log_ratio = jnp.zeros((len(spec.reward_teams.members), *steps))
    metrics = {}
    for index, learn in learners.items():
        shapes = jax.eval_shape(learn, jnp.int32(0), states[index], log_ratio)[1]
        metrics[index] = _zeros(shapes, len(built[index].sets))
    return jax.lax.scan(body, Turns(states, metrics, log_ratio), order(number, len(turns)))[0]


def order(number: jax.Array, size: int) -> jax.Array:
    """A random order of 0 ... size - 1 for the update `number`."""
    return jax.random.permutation(jax.random.fold_in(jax.random.key(0), number), size)


def _zeros(shapes: Any, num_sets: int) -> Any:
    """Room for the metrics of every set [S]."""
    return jax.tree.map(lambda x: jnp.zeros((num_sets, *x.shape), x.dtype), shapes)


def _turn(index: int, learn: Any, which_set: jax.Array, carry: Turns) -> Turns:
    """One set of the group at `index` learns."""
    state, metrics, log_ratio = learn(which_set, carry.states[index], carry.log_ratio)

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(old, new, which_set, 0)

    return Turns(
        carry.states | {index: jax.tree.map(write, carry.states[index], state)},
        carry.metrics | {index: jax.tree.map(write, carry.metrics[index], metrics)},
        log_ratio,
    )


def _learn_set(
    spec: "TeamSpec",
    group: Group,
    key: jax.Array,
    experience: Rollout,
    axes: Rollout,
    hparams: Any,
    which_set: jax.Array,
    states: Any,
    log_ratio: jax.Array,
) -> tuple[Any, dict[str, jax.Array], jax.Array]:
    """The next state of one set, its metrics, and `log_ratio` with what it changed."""
    firsts = jnp.asarray([members[0] for members in group.sets])
    team_of = jnp.asarray([[_team_of(spec, p) for p in members] for members in group.sets])
    teams = team_of[which_set]  # [N]
    state, own_hparams = groups.of_set((states, hparams), 0, which_set)
    own = groups.of_set(experience, axes, which_set)
    weight = jnp.exp(jnp.moveaxis(log_ratio[teams], 0, -1))  # [T, B, N], which folds to [T, B * N]
    own = own._replace(advantage_weight=weight.reshape(own.weight.shape))
    learner: Learner = group.learner
    assert learner.log_prob is not None
    before = learner.log_prob(state, own)
    key = jax.random.fold_in(key, firsts[which_set])
    state, metrics = learner.update(key, state, own, own_hparams)
    change = learner.log_prob(state, own) - before
    # an update that is not finite is undone, or ends the run: to those after it nothing changed
    change = jnp.where((own.weight > 0) & jnp.isfinite(change), change, 0.0)
    by_member = jnp.moveaxis(change.reshape(weight.shape), -1, 0)
    return state, metrics, log_ratio.at[teams].add(by_member)


def _team_of(spec: "TeamSpec", position: int) -> int:
    return next(i for i, team in enumerate(spec.reward_teams.members) if position in team)
