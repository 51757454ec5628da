"""Collecting experience: a scan of acting and stepping over all agents at once."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl import groups, rewards
from marl.agents.learner import ActFn, ActInput
from marl.dispatch import TeamSpec, lift
from marl.envs.vector import VectorEnv, VectorState
from marl.experience import TeamRollout
from marl.groups import Group


class Carry(NamedTuple):
    """What acting goes on from."""

    obs: Any  # by agent id, [B, ...]
    env: VectorState
    active: jax.Array  # [A, B] bool: acts on `obs`
    reset: jax.Array  # [B] bool: the step before ended the episode
    memory: Any  # per group
    team_return: jax.Array  # [reward teams, B]: pooled, unscaled rewards of the running episode


class Episodes(NamedTuple):
    """Sums over finished episodes; divide by `finished`."""

    finished: jax.Array  # [] float32: how many
    length: jax.Array  # [] float32
    returns: jax.Array  # [A]: raw rewards of the steps each agent was active in
    team_returns: jax.Array  # [reward teams]
    success: Any  # [], or () where the environment knows no success


class Step(NamedTuple):
    """One step of every environment: the fields of `TeamRollout` without T, and `ended`."""

    steps: Any
    final_obs: Any
    reset: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    active: jax.Array
    episode_over: jax.Array
    global_state: Any
    final_global_state: Any
    ended: Any  # `Ended`, or () in a rollout


class Faults(NamedTuple):
    """The first step of a rollout in which something was not finite; T if nothing was not."""

    observation: jax.Array  # [A] int32
    reward: jax.Array  # [A] int32


class Ended(NamedTuple):
    """Of each environment's running episode; counts where the step's `episode_over` is true."""

    length: jax.Array  # [B]
    returns: jax.Array  # [B, A]
    team_returns: jax.Array  # [B, reward teams]
    success: Any  # [B], or () where the environment knows no success


def start(spec: TeamSpec, env: VectorEnv, key: jax.Array) -> Carry:
    """Fresh episodes in every environment."""
    obs, state = env.reset(key)
    num_agents, num_teams = len(spec.agents), len(spec.reward_teams.members)
    return Carry(
        obs=obs,
        env=state,
        active=jnp.ones((num_agents, env.num_envs), bool),
        reset=jnp.ones((env.num_envs,), bool),
        memory=lift(spec).learner.initial_memory(env.num_envs),
        team_return=jnp.zeros((num_teams, env.num_envs)),
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
    memory = carry.memory
    if env.reset_pool:
        key, key_pool = jax.random.split(key)
        carry = carry._replace(env=env.refresh(key_pool, carry.env))
    step = partial(_training_step, spec, env, state, hparams)
    carry, (out, episodes, finite) = jax.lax.scan(step, carry, jax.random.split(key, (length, 2)))
    fields = {name: value for name, value in out._asdict().items() if name != "ended"}
    rollout = TeamRollout(memory=memory, env_steps=env_steps, **fields)
    faults = jax.tree.map(lambda x: jnp.sum(jnp.cumprod(x.astype(jnp.int32), 0), 0), finite)
    return carry, rollout, jax.tree.map(lambda x: jnp.sum(x, 0), episodes), faults


def _training_step(
    spec: TeamSpec, env: VectorEnv, state: Any, hparams: Any, carry: Carry, keys: jax.Array
) -> tuple[Carry, tuple[Step, Episodes, Faults]]:
    """Sums of the episodes that ended leave the scan, not their steps."""
    act = lift(spec).learner.act
    carry, step = act_and_step(spec, env, act, keys, state, carry, hparams)
    over = step.episode_over

    def total(x: jax.Array) -> jax.Array:
        mask = over.reshape(over.shape + (1,) * (x.ndim - 1))
        return jnp.sum(jnp.where(mask, x, 0).astype(jnp.float32), 0)

    episodes = Episodes(
        finished=total(jnp.ones_like(over)), **jax.tree.map(total, step.ended)._asdict()
    )
    return carry, (step._replace(ended=()), episodes, _finite(spec, step))


def _finite(spec: TeamSpec, step: Step) -> Faults:
    """Per agent, whether what it saw and got in this step is finite; bools in place of steps."""
    built = lift(spec).groups
    finite = [_finite_obs(group, steps.obs) for group, steps in zip(built, step.steps, strict=True)]
    order = [position for group in built for position in group.positions]
    seen = jnp.concatenate(finite)[jnp.argsort(jnp.asarray(order))]
    reward = jnp.all(jnp.isfinite(step.reward) | ~step.active, -1)
    return Faults(seen, reward)


def _finite_obs(group: Group, obs: Any) -> jax.Array:
    """[S * N] bool: whether a member's observations [S, N, B, ...] are finite."""
    size = len(group.positions)
    flat = [x.reshape(size, -1) for x in jax.tree.leaves(obs)]
    floats = [x for x in flat if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.isfinite(jnp.concatenate(floats, 1)), 1) if floats else jnp.ones(size, bool)


def act_and_step(
    spec: TeamSpec,
    env: VectorEnv,
    act: ActFn,
    keys: jax.Array,
    state: Any,
    carry: Carry,
    hparams: Any,
) -> tuple[Carry, Step]:
    """One step of every environment; `act` is the team's, or of the same signature.

    `keys` [2] are of acting and of the environments.
    """
    lifted = lift(spec)
    key_act, key_env = keys
    inputs = act_input(spec, env, carry)
    out = act(key_act, state, inputs, hparams)
    reads_state = spec.state is not None
    global_state = env.global_state(carry.env) if reads_state else ()
    timestep, env_state = env.step(key_env, carry.env, out.action)

    reward, terminated, truncated, active = (
        by_agent(spec, tree)
        for tree in (timestep.reward, timestep.terminated, timestep.truncated, timestep.active)
    )
    over = timestep.episode_over
    reward = reward.astype(jnp.float32)
    team_return = carry.team_return + _team_reward(spec, reward, carry.active)
    # at an episode's end only who was cut off is still there to be looked at
    final_active = jnp.where(over, truncated & carry.active, active)
    final_obs = visible(spec, timestep.final_obs, final_active)
    step = Step(
        steps=out.extras,
        final_obs=tuple(groups.stack(group, final_obs) for group in lifted.groups),
        reset=carry.reset,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        active=carry.active,
        episode_over=over,
        global_state=global_state,
        final_global_state=timestep.final_extras["global_state"] if reads_state else (),
        ended=_ended(spec, timestep, team_return),
    )
    carry = Carry(
        obs=timestep.obs,
        env=env_state,
        active=active,
        reset=over,
        memory=out.memory,
        team_return=jnp.where(over, 0.0, team_return),
    )
    return carry, step


def act_input(spec: TeamSpec, env: VectorEnv, carry: Carry) -> ActInput:
    """What the team acts on; observations and masks by position."""
    mask = env.action_mask(carry.env)
    masks = None if mask is None else [mask[agent.name] for agent in spec.agents]
    obs = visible(spec, carry.obs, carry.active)
    return ActInput(obs, masks, carry.memory, carry.reset)


def visible(spec: TeamSpec, obs: Any, active: jax.Array) -> list[Any]:
    """Observations [B, ...] by position; zeros for inactive agents, whose own are never read."""

    def show(x: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - 1)), x, jnp.zeros_like(x))

    return [
        jax.tree.map(partial(show, mask=active[position]), obs[agent.name])
        for position, agent in enumerate(spec.agents)
    ]


def by_agent(spec: TeamSpec, tree: Any) -> jax.Array:
    """A dict of [B] by agent id as [A, B] in declared order."""
    return jnp.stack([tree[agent.name] for agent in spec.agents])


def _team_reward(spec: TeamSpec, reward: jax.Array, active: jax.Array) -> jax.Array:
    """[reward teams, B]: pooled rewards."""
    pooled = rewards.pool(spec.reward_teams, reward, active)
    return pooled[jnp.asarray([members[0] for members in spec.reward_teams.members])]


def _ended(spec: TeamSpec, timestep: Any, team_return: jax.Array) -> Ended:
    episode = timestep.info["episode"]
    return Ended(
        length=episode.length,
        returns=by_agent(spec, episode.returns).T,
        team_returns=team_return.T,
        success=timestep.info.get("success", ()),
    )
