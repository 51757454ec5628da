"""Collecting experience: a scan of acting and stepping over all agents at once."""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marl import episodes, groups, rewards
from marl.agents.learner import ActFn, ActInput
from marl.dispatch import TeamSpec, acting_keys, acting_noise, lift
from marl.envs.vector import VectorEnv, VectorState
from marl.episodes import Episode, Episodes
from marl.experience import TeamRollout
from marl.groups import Group


class Carry(NamedTuple):
    """What acting goes on from."""

    obs: Any  # by agent id, [B, ...]
    env: VectorState
    active: jax.Array  # [A, B] bool: acts on `obs`
    reset: jax.Array  # [B] bool: the step before ended the episode
    memory: Any  # per group
    episode: Episode


class Step(NamedTuple):
    """One step of every environment: fields of `TeamRollout` without T, and what episodes count."""

    steps: Any
    final_obs: Any
    final_action_mask: Any
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    active: jax.Array
    final_active: jax.Array
    episode_over: jax.Array
    global_state: Any
    final_global_state: Any
    shaped_reward: Any  # [A, B], or () where nobody wants them
    success: Any  # [B], or () where the environment knows no success


class Faults(NamedTuple):
    """The first step of a rollout in which something was not finite; T if nothing was not."""

    observation: jax.Array  # [A] int32
    reward: jax.Array  # [A] int32


class StepKeys(NamedTuple):
    """The randomness of one step."""

    act: jax.Array  # [A]
    noise: Any  # per group, what acting draws from these, [S, N, B, ...]
    env: jax.Array  # [B + 1]


def step_keys(spec: TeamSpec, env: VectorEnv, pair: jax.Array) -> StepKeys:
    """From a pair of keys [2], of acting and of the environments."""
    keys = acting_keys(spec, pair[0])
    return StepKeys(keys, acting_noise(spec, keys, env.num_envs), env.step_keys(pair[1]))


def start(spec: TeamSpec, env: VectorEnv, key: jax.Array) -> Carry:
    """Fresh episodes in every environment."""
    obs, state = env.reset(key)
    return Carry(
        obs=obs,
        env=state,
        active=jnp.ones((len(spec.agents), env.num_envs), bool),
        reset=jnp.ones((env.num_envs,), bool),
        memory=lift(spec).learner.initial_memory(env.num_envs),
        episode=episodes.start(spec, env.num_envs),
    )


def collect(
    spec: TeamSpec,
    env: VectorEnv,
    length: int,
    key: jax.Array,
    state: Any,
    carry: Carry,
    env_steps: jax.Array,
    hparams: Any,
) -> tuple[Carry, TeamRollout, Episodes, Faults]:
    """`length` steps of every environment, with statistics of the episodes that finished."""
    memory, reset = carry.memory, carry.reset
    if env.reset_pool:
        key, key_pool = jax.random.split(key)
        carry = carry._replace(env=env.refresh(key_pool, carry.env))
    step = partial(_training_step, spec, env, state, hparams, env_steps)
    # all at once: inside the scan each split would be a loop of small kernels
    keys = jax.vmap(partial(step_keys, spec, env))(jax.random.split(key, (length, 2)))
    carry, out = jax.lax.scan(step, carry, keys)
    episode, finished = episodes.after_rollout(spec, carry.episode, out)
    if spec.terms.shaped:
        own = rewards.of_team(hparams)
        learned = rewards.with_shaped(out.reward, out.shaped_reward, own, env_steps)
        out = out._replace(reward=learned)
    of_learning = TeamRollout._fields
    fields = {name: value for name, value in out._asdict().items() if name in of_learning}
    reset = jnp.concatenate([reset[None], out.episode_over[:-1]])
    rollout = TeamRollout(memory=memory, env_steps=env_steps, reset=reset, **fields)
    return carry._replace(episode=episode), rollout, finished, _faults(spec, out)


def _training_step(
    spec: TeamSpec,
    env: VectorEnv,
    state: Any,
    hparams: Any,
    env_steps: jax.Array,
    carry: Carry,
    keys: StepKeys,
) -> tuple[Carry, Step]:
    act = lift(spec).learner.act
    return act_and_step(spec, env, act, keys, state, carry, hparams, env_steps)


def _faults(spec: TeamSpec, steps: Step) -> Faults:
    """Per agent, the first of `steps` [T, ...] in which what it saw or got was not finite."""
    built = lift(spec).groups
    finite = [_finite_obs(group, x.obs) for group, x in zip(built, steps.steps, strict=True)]
    order = [position for group in built for position in group.positions]
    seen = jnp.concatenate(finite, 1)[:, np.argsort(order)]
    reward = jnp.all(jnp.isfinite(steps.reward) | ~steps.active, -1)
    first = [jnp.sum(jnp.cumprod(x.astype(jnp.int32), 0), 0) for x in (seen, reward)]
    return Faults(*first)


def _finite_obs(group: Group, obs: Any) -> jax.Array:
    """[T, S * N] bool: whether a member's observations [T, S, N, B, ...] are finite."""
    size = len(group.positions)
    flat = [x.reshape(x.shape[0], size, -1) for x in jax.tree.leaves(obs)]
    finite = [jnp.all(jnp.isfinite(x), -1) for x in flat if jnp.issubdtype(x.dtype, jnp.floating)]
    return reduce(jnp.logical_and, finite, jnp.ones((flat[0].shape[0], size), bool))


def act_and_step(
    spec: TeamSpec,
    env: VectorEnv,
    act: ActFn,
    keys: StepKeys,
    state: Any,
    carry: Carry,
    hparams: Any,
    env_steps: Any = float("inf"),
) -> tuple[Carry, Step]:
    """One step of every environment; `act` is the team's, or of the same signature.

    `env_steps` [] are those taken so far; by default schedules of exploration are at their end.
    """
    inputs = act_input(spec, env, carry)._replace(env_steps=env_steps, noise=keys.noise)
    out = act(keys.act, state, inputs, hparams)
    reads_state = spec.state is not None
    global_state = env.global_state(carry.env) if reads_state else ()
    timestep, env_state = env.step_with(keys.env, carry.env, out.action)

    reward, terminated, truncated, active = (
        by_agent(spec, tree)
        for tree in (timestep.reward, timestep.terminated, timestep.truncated, timestep.active)
    )
    over = timestep.episode_over
    reward = reward.astype(jnp.float32)
    shaped = _shaped(spec, timestep.info) if spec.terms.shaped else ()
    # at an episode's end only who was cut off is still there to be looked at
    final_active = jnp.where(over, truncated & carry.active, active)
    step = Step(
        steps=out.extras,
        final_obs=visible(spec, timestep.final_obs, final_active),
        final_action_mask=stacked(spec, timestep.final_extras["action_mask"])
        if spec.final_masks and inputs.action_mask is not None
        else tuple(None for _ in lift(spec).groups),
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        active=carry.active,
        final_active=final_active,
        episode_over=over,
        global_state=global_state,
        final_global_state=timestep.final_extras["global_state"] if reads_state else (),
        shaped_reward=shaped,
        success=episodes.success_of(timestep.info),
    )
    carry = Carry(
        obs=timestep.obs,
        env=env_state,
        active=active,
        reset=over,
        memory=out.memory,
        episode=carry.episode,
    )
    return carry, step


def act_input(spec: TeamSpec, env: VectorEnv, carry: Carry) -> ActInput:
    """What the team acts on; observations, masks and memories are per group."""
    masks = stacked(spec, env.action_mask(carry.env))
    obs = visible(spec, carry.obs, carry.active)
    return ActInput(obs, masks, carry.memory, carry.reset, active=by_group(spec, carry.active))


def by_group(spec: TeamSpec, x: jax.Array) -> tuple[jax.Array, ...]:
    """[A, B] as [S, N, B] per group."""
    return tuple(
        groups.take(x, group.positions).reshape(*group.shape, -1) for group in lift(spec).groups
    )


def stacked(spec: TeamSpec, by_id: Any) -> Any:
    """A dict by agent id of [B, ...] as one tree [S, N, B, ...] per group; None stays None."""
    if by_id is None:
        return None
    by_position = [by_id[agent.name] for agent in spec.agents]
    return tuple(groups.stack(group, by_position) for group in lift(spec).groups)


def visible(spec: TeamSpec, obs: Any, active: jax.Array) -> Any:
    """Observations per group; zeros for inactive agents (`active` [A, B]), which are never read."""

    def show(x: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - 3)), x, jnp.zeros_like(x))

    return tuple(
        jax.tree.map(partial(show, mask=mask), tree)
        for mask, tree in zip(by_group(spec, active), stacked(spec, obs), strict=True)
    )


def by_agent(spec: TeamSpec, tree: Any) -> jax.Array:
    """A dict of [B] by agent id as [A, B] in declared order."""
    return jnp.stack([tree[agent.name] for agent in spec.agents])


def _shaped(spec: TeamSpec, info: Any) -> jax.Array:
    """[A, B]: what the environment calls shaped rewards."""
    return by_agent(spec, info["shaped_reward"]).astype(jnp.float32)
