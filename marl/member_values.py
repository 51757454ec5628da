"""The action values of the agents that a mixer mixes: what they saw and did, and their networks.

Networks read observations where those of `marl.agents` read features, and may remember; samples are
as `marl.agents.sequences` has them, with the N members of a sharing set folded apart. Axes: S
sharing sets of N members, T steps of B environments, M samples.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from marl import experience, groups, mixing, rewards
from marl.agents import losses, q_learning, sequences
from marl.agents.networks import Network
from marl.agents.q_learning import Memories
from marl.experience import Seen, TeamRollout
from marl.groups import Group
from marl.mixing import Mixed

if TYPE_CHECKING:
    from marl.dispatch import TeamSpec


class Own(NamedTuple):
    """A rollout of one mixed group."""

    obs: Any  # [S, T, B, N, ...]
    action: jax.Array  # [S, T, B, N]
    final_obs: Any
    final_mask: Any  # None without masks
    memory: Any  # [S, B, N, ...] before the first step; () without memory
    active: jax.Array  # [S, T, B, N] bool


class View(NamedTuple):
    """A rollout as value decomposition reads it."""

    own: tuple[Own, ...]  # per mixed group
    state: Any  # per mixed team, [T * B, D] what its mixer reads; () where it reads nothing
    final_state: Any
    result: rewards.Outcome  # [T, A, B]


class Taken(NamedTuple):
    """What a group's values of the actions taken are made of."""

    features: Any  # observations [M, N, ...], or of sequences [L, M, N, ...]
    action: jax.Array  # like them
    steps: Any = ()  # `sequences.Steps`, or ()


def view(spec: "TeamSpec", built: tuple[Group, ...], parts: Mixed, rollout: TeamRollout) -> View:
    """What is read of a rollout."""
    observations = experience.by_position(built, [steps.obs for steps in rollout.steps])
    finals = experience.by_position(built, rollout.final_obs)
    result = experience.outcome(spec.reward_teams, rollout)
    seen = Seen(observations, finals, (), ())

    def states(observations: Sequence[Any], global_state: Any) -> tuple[Any, ...]:
        return tuple(
            () if network is None else mixing.states(spec, members, observations, global_state)
            for network, members in zip(parts.networks, parts.teams, strict=True)
        )

    return View(
        own=tuple(_own(built[index], rollout, index, result, seen) for index in parts.groups),
        state=states(observations, rollout.global_state),
        final_state=states(finals, rollout.final_global_state),
        result=result,
    )


def _own(
    group: Group, rollout: TeamRollout, index: int, result: rewards.Outcome, seen: Seen
) -> Own:
    key = jax.random.key(0)  # nobody draws from it
    found, _ = experience.of_group(group, rollout, index, result, seen, key, {})
    num_sets, num_members = group.shape

    def apart(x: jax.Array) -> jax.Array:  # [T, S, B * N, ...] to [S, T, B, N, ...]
        x = jnp.swapaxes(x, 0, 1)
        return x.reshape(*x.shape[:2], -1, num_members, *x.shape[3:])

    fields = found.obs, jax.tree.leaves(found.action)[0], found.final_obs, found.final_action_mask
    obs, action, final_obs, final_mask = jax.tree.map(apart, fields)
    memory = jax.tree.map(
        lambda x: x.reshape(num_sets, -1, num_members, *x.shape[2:]), found.memory
    )
    return Own(obs, action, final_obs, final_mask, memory, apart(found.weight) > 0)


def by_position(built: tuple[Group, ...], parts: Mixed, values: Sequence[jax.Array]) -> Any:
    """[S, ..., N] of each mixed group to [M] by position, all other axes in one."""
    return {
        position: value[s, ..., n].reshape(-1)
        for index, value in zip(parts.groups, values, strict=True)
        for s, members in enumerate(built[index].sets)
        for n, position in enumerate(members)
    }


def network_of(group: Group) -> Network:
    """The values of a set's members; observations [M, N, ...], or [L, M, N, ...], are its features.

    Flags of steps are [L, M] where they are those of all members, else [L, M, N].
    """
    learner = group.learner
    if learner.q_unroll is None:
        return Network(init=None, apply=learner.q_values)
    return Network(init=None, apply=None, unroll=partial(_unroll, learner.q_unroll))


def _unroll(
    q_unroll: Any, params: Any, obs: Any, memory: Any, reset: jax.Array, active: jax.Array
) -> tuple[jax.Array, Any]:
    shape = jax.tree.leaves(obs)[0].shape[:3]  # [L, M, N]

    def of_all(flags: jax.Array) -> jax.Array:
        flags = flags if flags.ndim == 3 else flags[..., None]
        return jnp.broadcast_to(flags, shape).reshape(shape[0], -1)

    found = q_unroll(
        params,
        jax.tree.map(lambda x: x.reshape(shape[0], -1, *x.shape[3:]), obs),
        jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), memory),
        of_all(reset),
        of_all(active),
    )
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[2:]), found)


def taken(group: Group, params: Any, samples: Taken) -> jax.Array:
    """[S, (L,) M, N]: values of the actions taken."""

    def of_set(params: Any, samples: Taken) -> jax.Array:
        q, _ = sequences.run(network_of(group), params, samples.features, samples.steps)
        return q_learning.chosen(q, samples.action)

    return groups.over_sets(group, of_set, (0, 0), params, samples)


def memories(group: Group, state: Any, own: Own, reset: jax.Array) -> Memories:
    """[S, T, B, N, ...]: what the networks of members remember after each step."""

    def of_set(state: Any, own: Own) -> Memories:
        network = network_of(group)
        steps = sequences.whole(network, own.memory, reset, own.active)

        def after(params: Any) -> Any:
            return sequences.memories_of(network, params, own.obs, steps)

        has_target = bool(jax.tree.leaves(state.target_params))
        return Memories(
            after(state.network.params), after(state.target_params) if has_target else ()
        )

    return groups.over_sets(group, of_set, (0, 0), state, own)


def sampled(group: Group, config: Any, own: Own, reset: jax.Array, memories: Memories) -> Taken:
    """[S, ...]: what minibatches of a rollout are drawn from."""

    def of_set(own: Own, memories: Memories) -> Taken:
        steps = sequences.whole(network_of(group), own.memory, reset, own.active)
        return sequences.samples(Taken(own.obs, own.action, steps), memories.online, config)

    return groups.over_sets(group, of_set, (0, 0), own, memories)


def of_windows(group: Group, which: slice, own: Own, reset: jax.Array, memories: Memories) -> Taken:
    """[S, L, B, N, ...]: the steps `which` of windows, with the memory that those before left."""

    def of_set(own: Own, memories: Memories) -> Taken:
        network = network_of(group)
        obs, action = jax.tree.map(lambda x: x[which], (own.obs, own.action))
        if not sequences.is_recurrent(network):
            return Taken(obs, action)
        active = own.active[which]
        whole = sequences.whole(network, own.memory, reset, own.active)
        burned_in = jax.tree.map(lambda m: m[: which.start], memories.online)
        memory = sequences.last(burned_in) if which.start else whole.memory
        return Taken(
            losses.live(obs, active), action, sequences.Steps(memory, reset[which], active)
        )

    return groups.over_sets(group, of_set, (0, 0), own, memories)


def selected(group: Group, samples: Taken, indices: jax.Array) -> Taken:
    """[S, ...]: the samples with these indices."""
    return groups.over_sets(group, lambda x: sequences.select(x, indices), (0,), samples)


def following(group: Group, double: bool, state: Any, own: Own, memories: Memories) -> jax.Array:
    """[S, T, B, N]: values of the greedy actions where each step led to, with the memory it left.

    Of the target network where there is one.
    """

    def of_set(state: Any, own: Own, memories: Memories) -> jax.Array:
        network, mask = network_of(group), own.final_mask
        legal = None if mask is None else jax.tree.leaves(mask)[0]
        run = partial(sequences.run_apart, network, features=own.final_obs)
        online = run(state.network.params, memories=memories.online)
        if not jax.tree.leaves(state.target_params):
            return q_learning.greedy_value(online, legal)
        target = run(state.target_params, memories=memories.target)
        if not double:
            return q_learning.greedy_value(target, legal)
        return q_learning.chosen(target, q_learning.greedy_action(online, legal))

    return groups.over_sets(group, of_set, (0, 0, 0), state, own, memories)
