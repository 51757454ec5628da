"""The update of a team: every group learns from its slice of one rollout, or of replay samples."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from marl import experience, groups, sequential, team_critics
from marl.agents.learner import ActInput
from marl.experience import Seen, TeamRollout
from marl.groups import Group

if TYPE_CHECKING:
    from marl.dispatch import TeamSpec


MIXERS = ("none", "vdn", "qmix")
UPDATE_ORDERS = ("simultaneous", "sequential")
# options that say which steps a mixer learns from, and in which minibatches
CUT = ("num_epochs", "num_minibatches", "sequence_length", "burn_in")


def on_replay(group: Group) -> bool:
    """Whether the group learns from replay samples, not from rollouts."""
    return group.learner.experience == "replay"


def window_of(spec: "TeamSpec", window: int, samples: TeamRollout) -> int:
    """Steps of `samples` that a learner of this `window` takes: others may want longer ones."""
    assert spec.replay is not None
    return len(samples.reward) - spec.replay.sequence + window


def has_values(group: Group) -> bool:
    """Whether the group's learner has action values that a mixer can mix."""
    return group.learner.q_values is not None or remembers(group)


def remembers(group: Group) -> bool:
    """Whether the group's action values are those of a network with memory."""
    return group.learner.q_unroll is not None


def is_mixed(spec: "TeamSpec", group: Group) -> bool:
    """Whether `marl.mixing` learns for the group, and not its learner's own update."""
    return spec.mixer != "none" and has_values(group)


def update(
    spec: "TeamSpec",
    built: tuple[Group, ...],
    held: tuple[Group, ...],
    key: jax.Array,
    state: tuple[Any, ...],
    rollout: TeamRollout,
    hparams: tuple[Any, ...],
) -> tuple[Any, Any]:
    """An update of every group that learns from rollouts; metrics per group, [S] each.

    `state` has those of the groups, then those of the groups of critics that the team holds.
    """
    which = [
        index
        for index, group in enumerate(built)
        if not on_replay(group) and not is_mixed(spec, group)
    ]
    key_update, key_shuffle = jax.random.split(key)
    result, seen = experience.outcome(spec.reward_teams, rollout), _seen(built, rollout, ())
    states = list(state)
    advantages: dict[int, jax.Array] = {}
    of_critic: dict[int, dict[str, jax.Array]] = {}
    if held:
        states[len(built) :], advantages, of_critic = team_critics.update(
            built, held, state[len(built) :], rollout, result, seen, key_shuffle, hparams
        )
    experiences = {
        index: experience.of_group(
            built[index], rollout, index, result, seen, key_shuffle, advantages
        )
        for index in which
    }
    in_turn = sequential.which(spec, built) if spec.update_order == "sequential" else ()
    at_once = {index: own for index, own in experiences.items() if index not in in_turn}
    metrics = _learn(built, key_update, states, at_once, hparams)
    if in_turn:
        turns = {index: experiences[index] for index in in_turn}
        found = sequential.update(
            spec,
            built,
            key_update,
            rollout.update,
            rollout.episode_over.shape,
            states,
            turns,
            hparams,
        )
        for index in in_turn:
            states[index], metrics[index] = found.states[index], found.metrics[index]
    for index in which:
        metrics[index] |= team_critics.metrics_of(built[index], of_critic)
    return tuple(states), tuple(metrics)


def replay_step(
    spec: "TeamSpec",
    built: tuple[Group, ...],
    key: jax.Array,
    state: tuple[Any, ...],
    samples: TeamRollout,
    hparams: tuple[Any, ...],
) -> tuple[Any, Any]:
    """One gradient step of every group that learns from replay, on the same samples.

    `samples` are B windows, of which a group takes as many steps as it wants. What other agents
    would do next is asked of everybody's states at the start of the step.
    """
    which = [
        index for index, group in enumerate(built) if on_replay(group) and not is_mixed(spec, group)
    ]
    key_update, key_shuffle = jax.random.split(key)
    following: list[Any] = []
    if any(built[index].contexts[0] for index in which):
        key_next = jax.random.fold_in(key, 2)  # 0 and 1 are what `split` gives above
        following = next_actions(spec, built, key_next, state, samples, hparams)
    result, seen = experience.outcome(spec.reward_teams, samples), _seen(built, samples, following)
    experiences = {}
    for index in which:
        group = built[index]
        own, axes = experience.of_group(group, samples, index, result, seen, key_shuffle, {})
        length = window_of(spec, group.learner.window, samples)
        experiences[index] = experience.shortened(own, length), axes
    states = list(state)
    metrics = _learn(built, key_update, states, experiences, hparams)
    return tuple(states), tuple(metrics)


def _seen(built: tuple[Group, ...], rollout: TeamRollout, following: Any) -> Seen:
    return Seen(
        obs=experience.by_position(built, [steps.obs for steps in rollout.steps]),
        final_obs=experience.by_position(built, rollout.final_obs),
        action=experience.by_position(built, [steps.action for steps in rollout.steps]),
        next_action=following,
    )


def _learn(
    built: tuple[Group, ...],
    key: jax.Array,
    states: list[Any],
    experiences: Mapping[int, Any],
    hparams: tuple[Any, ...],
) -> list[dict[str, jax.Array]]:
    """Update the groups that have experience, each at once; `states` are replaced in place."""
    metrics: list[dict[str, jax.Array]] = [{} for _ in built]
    for index, (own, axes) in experiences.items():
        group = built[index]
        keys = groups.position_keys(key, [members[0] for members in group.sets])
        arguments = (keys, states[index], own, hparams[index])
        states[index], metrics[index] = groups.over_sets(
            group, group.learner.update, (0, 0, axes, 0), *arguments
        )
    return metrics


def next_actions(
    spec: "TeamSpec",
    built: tuple[Group, ...],
    key: jax.Array,
    state: tuple[Any, ...],
    rollout: TeamRollout,
    hparams: tuple[Any, ...],
) -> list[Any]:
    """Actions [T, B, ...] by position, of everybody at the states that each step led to.

    Learners with target policies give those; the others act as they would.
    """
    agent_keys = groups.position_keys(key, range(len(spec.agents)))
    found: dict[int, Any] = {}
    length, batch = rollout.episode_over.shape
    for index, group in enumerate(built):
        mode = "act" if group.learner.next_action is None else "next_action"

        def flat(x: jax.Array) -> jax.Array:  # [T, S, N, B, ...] to [S, N, T * B, ...]
            x = jnp.moveaxis(x, 0, 2)
            return x.reshape(*x.shape[:2], length * batch, *x.shape[4:])

        obs, mask = jax.tree.map(flat, (rollout.final_obs[index], rollout.final_action_mask[index]))
        memory = memories(group, length * batch)
        inputs = ActInput(obs, mask, memory, jnp.zeros(length * batch, bool), rollout.env_steps)
        keys = groups.take(agent_keys, group.positions).reshape(group.shape)
        out = act_group(group, mode, keys, state[index], inputs, hparams[index])
        actions = jax.tree.map(
            lambda x: x.reshape(*x.shape[:2], length, batch, *x.shape[3:]), out.action
        )
        found |= groups.unstack(group, actions)
    return [found[position] for position in range(len(spec.agents))]


def memories(group: Group, batch_size: int) -> Any:
    """Memories [S, N, B, ...] of fresh episodes."""
    one = group.learner.initial_memory(batch_size)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*group.shape, *x.shape)), one)


def critic_memories(built: tuple[Group, ...], num_envs: int) -> tuple[Any, ...]:
    """Per group, [S, ...]: memories of critics at the start of episodes; () if none has one.

    Their batch is that of their input, [num_envs] where that is joint, else [num_envs * N].
    """

    def of_group(group: Group) -> Any:
        if group.learner.critic_memory is None:
            return ()
        one = group.learner.critic_memory(num_envs * (1 if group.joint else group.shape[1]))
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (len(group.sets), *x.shape)), one)

    found = tuple(of_group(group) for group in built)
    return found if jax.tree.leaves(found) else ()


def next_critic_memories(
    spec: "TeamSpec", built: tuple[Group, ...], state: tuple[Any, ...], rollout: TeamRollout
) -> tuple[Any, ...]:
    """What `critic_memories` are after a rollout, under the states after its update."""
    if not rollout.critic_memory:
        return ()
    result, seen = experience.outcome(spec.reward_teams, rollout), _seen(built, rollout, ())
    nobody = jax.random.key(0)  # nothing is shuffled
    memories = []
    for index, group in enumerate(built):
        if group.learner.next_critic_memory is None:
            memories.append(())
            continue
        own, axes = experience.of_group(group, rollout, index, result, seen, nobody, {})
        following = group.learner.next_critic_memory
        memories.append(groups.over_sets(group, following, (0, axes), state[index], own))
    return tuple(memories)


def act_group(
    group: Group, mode: str, keys: jax.Array, state: Any, inputs: ActInput, hparams: Any
) -> Any:
    """A function of the learner with the signature of `act`, over all members [S, N, B, ...]."""
    axes = (0, 0, _input_axes(inputs), 0)
    act_set = partial(_act_set, group, mode)
    return groups.over_sets(group, act_set, axes, keys, state, inputs, hparams)


def _act_set(group: Group, mode: str, keys, state, inputs: ActInput, hparams) -> Any:
    """The members of one sharing set [N, B, ...]: their inputs differ, their parameters do not."""

    def act_member(key, member, inputs):
        obs = groups.identify(group, inputs.obs, member, inputs.reset.shape)
        return getattr(group.learner, mode)(key, state, inputs._replace(obs=obs), hparams)

    axes = (0, 0, _input_axes(inputs))
    one_hot = groups.member_one_hot(group)
    return groups.over_members(group, act_member, axes, keys, one_hot, inputs)


def _input_axes(inputs: ActInput) -> Any:
    """The axis of S, or of N, in each field of an `ActInput`."""
    optional = (inputs.action_mask, inputs.noise, inputs.active)
    mask, noise, active = (None if x is None else 0 for x in optional)
    fields: Any = (0, mask, 0, None, None, noise, active)
    return ActInput(*fields)
