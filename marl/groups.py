"""Groups: agents of one structure, stacked. The only `vmap` over agents.

The agents of a group are arranged in S sharing sets of N members each; a set has one parameter set.
Arrays of a group lead with [S, N]; states and hparams with [S]. A group of one set is not vmapped.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.envs.spaces import Box, SpaceTree


class Group(NamedTuple):
    """Agents that are stacked together; static."""

    sets: tuple[tuple[int, ...], ...]  # positions in env.agents: S sharing sets of N members
    learner: Any  # `Learner`, or of a group of critics that the team holds `Critic`
    identified: bool  # whether a one-hot of the member is added to the observation
    scopes: tuple[tuple[Any, ...], ...]  # per member, set by set: what its critic reads
    contexts: tuple[tuple[int, ...], ...]  # per member: whose actions its Q-critic reads
    joint: bool  # whether every member's critic reads the same, so that no agent axis is needed
    vectorise: bool
    held: bool = False  # whether the team holds the critics of these actors

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the members in env.agents, set by set."""
        return tuple(position for members in self.sets for position in members)

    @property
    def shape(self) -> tuple[int, int]:
        """(S, N)."""
        return len(self.sets), len(self.sets[0])


def stack(group: Group, by_position: Sequence[Any] | Mapping[int, Any]) -> Any:
    """Trees of the members [...] to one tree [S, N, ...]."""
    return stack_members(group, [by_position[position] for position in group.positions])


def stack_members(group: Group, members: Sequence[Any]) -> Any:
    """Trees in the order of `group.positions` to one tree [S, N, ...]."""
    return jax.tree.map(lambda *xs: jnp.stack(xs).reshape(*group.shape, *xs[0].shape), *members)


def unstack(group: Group, tree: Any) -> dict[int, Any]:
    """One tree [S, N, ...] to trees [...] by position."""
    return {
        position: jax.tree.map(lambda x, s=s, n=n: x[s, n], tree)
        for s, members in enumerate(group.sets)
        for n, position in enumerate(members)
    }


def of_position(built: Sequence[Group], trees: Sequence[Any], position: int) -> Any:
    """One agent's part of what groups have, [S, ...] each: its hparams, or its state."""
    for group, tree in zip(built, trees[: len(built)], strict=True):
        for index, members in enumerate(group.sets):
            if position in members:
                return jax.tree.map(lambda x, i=index: x[i], tree)
    raise AssertionError(f"no group holds position {position}")


def over_sets(group: Group, function: Callable[..., Any], in_axes: Any, *args: Any) -> Any:
    """Apply `function` to every sharing set; results lead with [S]. `in_axes` as for `jax.vmap`."""
    if len(group.sets) > 1:
        return jax.vmap(function, in_axes=in_axes)(*args)
    args = tuple(of_set(arg, axes, 0) for arg, axes in zip(args, in_axes, strict=True))
    return jax.tree.map(lambda x: x[None], function(*args))


def over_members(group: Group, function: Callable[..., Any], in_axes: Any, *args: Any) -> Any:
    """Apply `function` to every member of one set; results lead with [N]."""
    num_members = group.shape[1]
    if num_members > 1 and group.vectorise:
        return jax.vmap(function, in_axes=in_axes)(*args)
    results = [
        function(*(of_set(arg, axes, n) for arg, axes in zip(args, in_axes, strict=True)))
        for n in range(num_members)
    ]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *results)


def of_set(tree: Any, axes: Any, index: Any) -> Any:
    """What `vmap` would hand to element `index`: `axes` is None, an axis, or a prefix of `tree`."""
    if axes is None:
        return tree
    if isinstance(axes, int):
        take = jax.lax.index_in_dim if isinstance(index, int) else jax.lax.dynamic_index_in_dim
        return jax.tree.map(lambda x: take(x, index, axes, keepdims=False), tree)
    return type(tree)(*(of_set(part, axis, index) for part, axis in zip(tree, axes, strict=True)))


def take(x: jax.Array, positions: Sequence[int]) -> jax.Array:
    """`x[positions]` along the first axis; of neighbours a slice, which is cheaper to compile."""
    first, size = positions[0], len(positions)
    if list(positions) == list(range(first, first + size)):
        return x[first : first + size]
    return x[jnp.asarray(positions)]


def fold(group: Group, tree: Any) -> Any:
    """[T, S, N, B, ...] to [T, S, B * N, ...]: the members of a set stand last in its batch."""
    num_sets, num_members = group.shape

    def fold_leaf(x: jax.Array) -> jax.Array:
        x = x if num_members == 1 else jnp.moveaxis(x, 2, 3)
        return x.reshape(x.shape[0], num_sets, -1, *x.shape[4:])

    return jax.tree.map(fold_leaf, tree)


def unfold(group: Group, x: jax.Array) -> jax.Array:
    """[S, T, B * N] to [S, N, T, B]: the members of folded batches apart."""
    x = x.reshape(*x.shape[:2], -1, group.shape[1])
    return jnp.moveaxis(x, 3, 1)


def identify(group: Group, obs: Any, member: jax.Array, batch: tuple[int, ...]) -> Any:
    """Add who is acting to observations [*batch, ...], where parameters are shared.

    Args:
      group: the group of the observations.
      obs: PyTree of [*batch, ...].
      member: one-hot of the member within its set, broadcastable to [*batch, N].
      batch: the leading axes.

    Returns:
      `obs` itself, or `{"agent_id": [*batch, N], "obs": obs}` where the group is identified.
    """
    return with_id(obs, member, batch) if group.identified else obs


def with_id(obs: Any, one_hot: jax.Array, batch: tuple[int, ...]) -> Any:
    """Observations [*batch, ...] of `identified_space`; `one_hot` broadcasts to [*batch, N]."""
    return {"agent_id": jnp.broadcast_to(one_hot, (*batch, one_hot.shape[-1])), "obs": obs}


def identified_space(space: SpaceTree, num_members: int) -> SpaceTree:
    """What an agent sees that is told which member of its sharing set it is."""
    return {"agent_id": Box((num_members,), 0.0, 1.0), "obs": space}


def member_one_hot(group: Group) -> jax.Array:
    """[N, N]: row n is the one-hot of member n of a set."""
    return jnp.eye(group.shape[1])


def folded_one_hot(group: Group, batch_size: int) -> jax.Array:
    """[B * N, N]: the one-hot of the member that stands at each place of a folded batch."""
    num_members = group.shape[1]
    return jnp.tile(member_one_hot(group), (batch_size // num_members, 1))


def position_keys(key: jax.Array, positions: Sequence[int]) -> jax.Array:
    """One key per position, the same however agents are grouped."""
    return jax.vmap(partial(jax.random.fold_in, key))(jnp.asarray(positions))
