"""From what a team saw to what each group's learner learns from."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl import critics, groups, rewards
from marl.agents.learner import Rollout
from marl.groups import Group


class GroupSteps(NamedTuple):
    """What one group saw and did; [T, S, N, B, ...] over a rollout, without T in one step."""

    obs: Any
    action: Any
    action_mask: Any  # None without masks
    extras: Any  # of the learner's ActOutput
    memory: Any = ()  # before the step, of learners on replay


class RewardFactor(NamedTuple):
    """What learning makes of pooled rewards: reward * factor, cut at -limit and limit."""

    factor: jax.Array  # [A]
    limit: jax.Array  # [A]; inf where nothing is cut

    def of(self, reward: jax.Array) -> jax.Array:
        """Of rewards [..., A, B]; what is not finite stays so."""
        scaled, limit = reward * self.factor[:, None], self.limit[:, None]
        return jnp.where(jnp.isfinite(scaled), jnp.clip(scaled, -limit, limit), scaled)


class TeamRollout(NamedTuple):
    """T steps of all agents in B environments; agents in declared order along A."""

    steps: tuple[GroupSteps, ...]  # per group
    final_obs: tuple[Any, ...]  # per group, [T, S, N, B, ...]: what each transition led to
    final_action_mask: tuple[Any, ...]  # per group: what is legal there; None where nobody asks
    memory: Any  # per group, before the first step
    reset: jax.Array  # [T, B] bool
    reward: jax.Array  # [T, A, B] float32: what is learned from, before pooling
    terminated: jax.Array  # [T, A, B] bool
    truncated: jax.Array  # [T, A, B] bool
    active: jax.Array  # [T, A, B] bool: before the step
    final_active: jax.Array  # [T, A, B] bool: in the state that the step led to
    episode_over: jax.Array  # [T, B] bool
    global_state: Any  # [T, B, ...], or () where no critic reads it
    final_global_state: Any
    env_steps: jax.Array  # [] float32
    update: Any = 0  # [] int32: updates done before, one number for all seeds of a run
    usable: Any = None  # [T, A, B] bool: may be learned from; None where everything may
    critic_memory: Any = ()  # per group, [S, ...]: critics' before the first step; () without any
    reward_factor: Any = None  # `RewardFactor` of pooled rewards; None where they stay


# By type, the fields that lead with T, and those that hold for all steps: every field is in one.
LED_BY_TIME: dict[type, tuple[str, ...]] = {
    TeamRollout: (
        *("steps", "final_obs", "final_action_mask", "reset", "reward", "terminated", "truncated"),
        *("active", "final_active", "episode_over", "global_state", "final_global_state"),
        "usable",
    ),
    Rollout: (
        *("obs", "action", "action_mask", "extras", "reset", "critic_obs", "final_critic_obs"),
        *("final_obs", "final_action_mask", "context", "next_context", "reward", "terminated"),
        *("truncated", "weight", "advantage", "advantage_weight"),
    ),
}
TIMELESS: dict[type, tuple[str, ...]] = {
    TeamRollout: ("memory", "env_steps", "update", "critic_memory", "reward_factor"),
    Rollout: ("memory", "env_steps", "shuffle_key", "critic_memory"),
}


def shortened(rollout: Any, length: int) -> Any:
    """The first `length` steps of a `TeamRollout`, or of a group's `Rollout`."""
    fields = {name: getattr(rollout, name) for name in LED_BY_TIME[type(rollout)]}
    return rollout._replace(**jax.tree.map(lambda x: x[:length], fields))


def learned_from(rollout: TeamRollout) -> jax.Array:
    """[T, A, B] bool: the steps of agents that have weight."""
    return rollout.active if rollout.usable is None else rollout.active & rollout.usable


def by_position(built: tuple[Group, ...], trees: Sequence[Any]) -> list[Any]:
    """Trees [T, S, N, B, ...] per group to trees [T, B, ...] by position."""
    found: dict[int, Any] = {}
    for group, tree in zip(built, trees, strict=True):
        leading = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), tree)
        found |= groups.unstack(group, leading)
    return [found[position] for position in sorted(found)]


def outcome(teams: rewards.RewardTeams, rollout: TeamRollout) -> rewards.Outcome:
    """What learning sees of a rollout's rewards and ends."""
    result = rewards.outcome(
        teams,
        rollout.reward,
        rollout.terminated,
        rollout.truncated,
        rollout.active,
        rollout.episode_over,
    )
    if rollout.reward_factor is None:
        return result
    return result._replace(reward=rollout.reward_factor.of(result.reward))


class Seen(NamedTuple):
    """What critics read of all agents: trees [T, B, ...] by position."""

    obs: Sequence[Any]
    final_obs: Sequence[Any]
    action: Sequence[Any]  # () where no critic reads actions
    next_action: Sequence[Any]  # at final_obs


def of_group(
    group: Group,
    rollout: TeamRollout,
    index: int,
    result: rewards.Outcome,
    seen: Seen,
    shuffle_key: jax.Array,
    advantages: Mapping[int, jax.Array],
) -> tuple[Rollout, Any]:
    """One group's experience [T, S, B * N, ...], and the axis of S in each field for `vmap`.

    `advantages` [T, B] by position are those that critics of the team give.
    """
    steps, num_members = rollout.steps[index], group.shape[1]
    of_agents = partial(_of_agents, group)

    def folded(tree: Any) -> Any:
        return groups.fold(group, tree)

    own = critics.identify_folded(group, folded(steps.obs))
    own_final = critics.identify_folded(group, folded(rollout.final_obs[index]))
    critic_obs, final_critic_obs, advantage = (), (), None
    if group.held:
        advantage = stack_by_time(group, advantages)
    else:
        state, final_state = rollout.global_state, rollout.final_global_state
        critic_obs = critics.build(group, own, seen.obs, state)
        final_critic_obs = critics.build(group, own_final, seen.final_obs, final_state)
    experience = Rollout(
        obs=own,
        action=folded(steps.action),
        action_mask=folded(steps.action_mask),
        extras=folded(steps.extras),
        memory=_fold_memory(group, rollout.memory[index]),
        reset=jnp.repeat(rollout.reset, num_members, axis=1),
        critic_obs=critic_obs,
        final_critic_obs=final_critic_obs,
        final_obs=own_final,
        final_action_mask=folded(rollout.final_action_mask[index]),
        context=critics.build_context(group, seen.action),
        next_context=critics.build_context(group, seen.next_action),
        reward=of_agents(result.reward),
        terminated=of_agents(result.terminated),
        truncated=of_agents(result.truncated),
        weight=of_agents(learned_from(rollout)).astype(jnp.float32),
        advantage=advantage,
        advantage_weight=None,
        env_steps=rollout.env_steps,
        shuffle_key=shuffle_key,
        critic_memory=rollout.critic_memory[index] if rollout.critic_memory else (),
    )
    critic_axis = None if group.joint else 1
    return experience, _axes(
        obs=1,
        action=1,
        action_mask=None if steps.action_mask is None else 1,
        extras=1,
        memory=0,
        critic_obs=critic_axis,
        final_critic_obs=critic_axis,
        final_obs=1,
        final_action_mask=None if rollout.final_action_mask[index] is None else 1,
        advantage=None if advantage is None else 1,
        critic_memory=0,
        context=1,
        next_context=1,
        reward=1,
        terminated=1,
        truncated=1,
        weight=1,
    )


def of_critics(
    group: Group,
    rollout: TeamRollout,
    result: rewards.Outcome,
    seen: Seen,
    shuffle_key: jax.Array,
) -> tuple[Rollout, Any]:
    """What a group of critics that the team holds learns from; without anything of actors."""
    own, own_final = (), ()
    if "self" in group.scopes[0]:
        own, own_final = (
            critics.identify_folded(group, stack_by_time(group, x))
            for x in (seen.obs, seen.final_obs)
        )
    state, final_state = rollout.global_state, rollout.final_global_state
    unused = dict.fromkeys(Rollout._fields)
    experience = unused | {
        "critic_obs": critics.build(group, own, seen.obs, state),
        "final_critic_obs": critics.build(group, own_final, seen.final_obs, final_state),
        "reward": _of_agents(group, result.reward),
        "terminated": _of_agents(group, result.terminated),
        "truncated": _of_agents(group, result.truncated),
        "weight": _of_agents(group, learned_from(rollout)).astype(jnp.float32),
        "env_steps": rollout.env_steps,
        "shuffle_key": shuffle_key,
    }
    critic_axis = None if group.joint else 1
    axes = _axes(
        critic_obs=critic_axis,
        final_critic_obs=critic_axis,
        reward=1,
        terminated=1,
        truncated=1,
        weight=1,
    )
    return Rollout(**experience), axes  # type: ignore[arg-type]


def stack_by_time(group: Group, by_position: Any) -> Any:
    """Trees [T, B, ...] by position to one tree [T, S, B * N, ...]."""
    stacked = groups.stack(group, by_position)  # [S, N, T, B, ...]
    return groups.fold(group, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), stacked))


def _of_agents(group: Group, x: jax.Array) -> jax.Array:
    """[T, A, B] to [T, S, B * N]."""
    own = groups.take(jnp.swapaxes(x, 0, 1), group.positions)
    own = jnp.swapaxes(own, 0, 1).reshape(x.shape[0], *group.shape, x.shape[2])
    return groups.fold(group, own)


def _axes(**of_sets: int | None) -> Any:
    """The axis of S in each field of a `Rollout`; None where all sets have the same."""
    return Rollout(**(dict.fromkeys(Rollout._fields) | of_sets))  # type: ignore[arg-type]


def _fold_memory(group: Group, memory: Any) -> Any:
    """[S, N, B, ...] to [S, B * N, ...]."""
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 1, 2).reshape(group.shape[0], -1, *x.shape[3:]), memory
    )
