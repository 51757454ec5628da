"""Wrappers: small frozen values around an environment, composed and never subclassed.

Every wrapper takes an episodic environment or an auto-resetting one, but for `TimeLimit`, which
ends episodes and so goes inside `AutoReset`. `inside` puts a wrapper below an `AutoReset`, where it
is cheapest: `VectorEnv` then still resets the whole batch at once.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marl.envs import spaces
from marl.envs.delegation import delegating
from marl.envs.errors import UsageError, nearest
from marl.envs.interface import AutoReset, TimeStep


def inside(env: Any, wrap: Callable[[Any], Any]) -> Any:
    """`wrap(env)`, below the `AutoReset` if `env` is one (which keeps its `final_extras`)."""
    if isinstance(env, AutoReset):
        return dataclasses.replace(env, env=wrap(env.env))
    return wrap(env)


def with_statistics(env: Any) -> Any:
    """`env` with episode returns and lengths in its `info` (see `EpisodeStatistics`)."""
    return inside(env, EpisodeStatistics)


def all_active(env: Any) -> dict[str, jax.Array]:
    """`active` after a reset: every agent acts."""
    return {agent: jnp.ones((), bool) for agent in env.agents}


class EpisodeInfo(NamedTuple):
    """The running episode; that of the whole episode where the step's `episode_over` is true."""

    returns: dict[str, jax.Array]  # [] float32 per agent: rewards of the steps it was active in
    length: jax.Array  # [] int32: steps


class StatisticsState(NamedTuple):
    """State of `EpisodeStatistics`."""

    env: Any  # the inner state
    episode: EpisodeInfo  # up to and including the last step; zeros at an episode's start
    active: dict[str, jax.Array]  # [] bool per agent: acts in the next step


@delegating(stateful=True)
@dataclass(frozen=True)
class EpisodeStatistics:
    """Counts returns and lengths; rewards of inactive agents (which may be NaN) never enter.

    `info` becomes `{"episode": EpisodeInfo, "env": the inner info}`, and has "success" and
    "shaped_reward" of the inner info where there are any.
    """

    env: Any

    def reset(self, key: jax.Array) -> tuple[Any, StatisticsState]:
        obs, state = self.env.reset(key)
        return obs, StatisticsState(env=state, episode=self._zeros(), active=all_active(self))

    def step(
        self, key: jax.Array, state: StatisticsState, action: Any
    ) -> tuple[TimeStep, StatisticsState]:
        timestep, env_state = self.env.step(key, state.env, action)
        returns = {
            agent: total + jnp.where(state.active[agent], timestep.reward[agent], 0.0)
            for agent, total in state.episode.returns.items()
        }
        episode = EpisodeInfo(returns=returns, length=state.episode.length + 1)
        info = {"episode": episode, "env": timestep.info}
        if isinstance(timestep.info, Mapping):
            known = ("success", "shaped_reward")
            info |= {name: timestep.info[name] for name in known if name in timestep.info}
        kept = jax.tree.map(
            lambda zero, x: jnp.where(timestep.episode_over, zero, x), self._zeros(), episode
        )
        state = StatisticsState(env=env_state, episode=kept, active=timestep.active)
        return timestep._replace(info=info), state

    def _zeros(self) -> EpisodeInfo:
        returns = {agent: jnp.zeros((), jnp.float32) for agent in self.env.agents}
        return EpisodeInfo(returns=returns, length=jnp.zeros((), jnp.int32))


class TimeLimitState(NamedTuple):
    """State of `TimeLimit`."""

    env: Any  # the inner state
    step: jax.Array  # [] int32: steps taken in this episode
    active: dict[str, jax.Array]  # [] bool per agent: acts in the next step


@delegating(stateful=True)
@dataclass(frozen=True)
class TimeLimit:
    """Ends an episode of an episodic environment after `max_steps`, which is a truncation."""

    env: Any
    max_steps: int

    def __post_init__(self):
        if isinstance(self.env, AutoReset):
            raise UsageError(
                "TimeLimit got an environment that already resets itself; put the limit below: "
                "AutoReset(TimeLimit(env, max_steps))"
            )
        if self.max_steps < 1:
            raise UsageError(f"TimeLimit has max_steps = {self.max_steps}; at least 1 is needed")

    def reset(self, key: jax.Array) -> tuple[Any, TimeLimitState]:
        obs, state = self.env.reset(key)
        return obs, TimeLimitState(
            env=state, step=jnp.zeros((), jnp.int32), active=all_active(self)
        )

    def step(
        self, key: jax.Array, state: TimeLimitState, action: Any
    ) -> tuple[TimeStep, TimeLimitState]:
        timestep, env_state = self.env.step(key, state.env, action)
        step = state.step + 1
        cut = (step >= self.max_steps) & ~timestep.episode_over
        over = timestep.episode_over | cut
        truncated = {
            agent: flag | (cut & state.active[agent] & ~timestep.terminated[agent])
            for agent, flag in timestep.truncated.items()
        }
        active = {agent: flag & ~over for agent, flag in timestep.active.items()}
        timestep = timestep._replace(truncated=truncated, active=active, episode_over=over)
        return timestep, TimeLimitState(env=env_state, step=step, active=active)


@delegating(stateful=False)
@dataclass(frozen=True)
class RescaleActions:
    """Agents act in [-1, 1] on every Box leaf; the environment gets its own bounds.

    Actions outside [-1, 1] are clipped. Leaves that are not a Box pass unchanged.
    """

    env: Any

    def __post_init__(self):
        for agent, space in self.env.action_spaces.items():
            for leaf in spaces.leaves(space):
                floating = np.issubdtype(np.dtype(leaf.dtype), np.floating)
                if isinstance(leaf, spaces.Box) and not (leaf.bounded and floating):
                    raise UsageError(
                        f"RescaleActions got {spaces.describe(leaf)} in [{leaf.low}, {leaf.high}] "
                        f"as an action of {agent}; it needs floats with finite bounds"
                    )

    @property
    def action_spaces(self) -> dict[str, Any]:
        inner = self.env.action_spaces
        return {agent: spaces.map_spaces(_unit_box, space) for agent, space in inner.items()}

    def step(self, key: jax.Array, state: Any, action: Any) -> tuple[TimeStep, Any]:
        scaled = {
            agent: spaces.map_spaces(_to_bounds, space, action[agent])
            for agent, space in self.env.action_spaces.items()
        }
        return self.env.step(key, state, scaled)


def _unit_box(space: spaces.Space) -> spaces.Space:
    return dataclasses.replace(space, low=-1, high=1) if isinstance(space, spaces.Box) else space


def _to_bounds(space: spaces.Space, action: jax.Array) -> jax.Array:
    if not isinstance(space, spaces.Box):
        return action
    low, high = space.bounds()
    share = (jnp.clip(action, -1.0, 1.0) + 1) / 2
    return jnp.clip(low + share * (high - low), low, high).astype(space.dtype)


@delegating(stateful=False)
@dataclass(frozen=True)
class AgentId:
    """Observations become `{"agent_id": one-hot [num_agents] float32, "obs": the original}`.

    The one-hot's order is that of `env.agents`.
    """

    env: Any

    @property
    def observation_spaces(self) -> dict[str, Any]:
        one_hot = spaces.Box((len(self.env.agents),), low=0, high=1)
        return {
            agent: {"agent_id": one_hot, "obs": space}
            for agent, space in self.env.observation_spaces.items()
        }

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        obs, state = self.env.reset(key)
        return self._identify(obs), state

    def step(self, key: jax.Array, state: Any, action: Any) -> tuple[TimeStep, Any]:
        timestep, state = self.env.step(key, state, action)
        obs, final_obs = self._identify(timestep.obs), self._identify(timestep.final_obs)
        return timestep._replace(obs=obs, final_obs=final_obs), state

    def _identify(self, obs: Any) -> dict[str, Any]:
        ids = np.eye(len(self.env.agents), dtype=np.float32)
        return {
            agent: {"agent_id": jnp.asarray(ids[i]), "obs": obs[agent]}
            for i, agent in enumerate(self.env.agents)
        }


class PoolingState(NamedTuple):
    """State of `RewardPooling`."""

    env: Any  # the inner state
    active: dict[str, jax.Array]  # [] bool per agent: acts in the next step


@delegating(stateful=True)
@dataclass(frozen=True)
class RewardPooling:
    """Every member of a team gets the team's pooled reward, whether it is active or not.

    Args:
      env: the environment.
      teams: agent ids per team, as a dict's values or a list of lists; others keep their own.
      how: "mean" or "sum", over the members that were active in the step; zero if there were none.
    """

    env: Any
    teams: tuple[tuple[str, ...], ...]
    how: str = "mean"

    def __post_init__(self):
        teams = self.teams.values() if isinstance(self.teams, Mapping) else self.teams
        object.__setattr__(self, "teams", tuple(tuple(team) for team in teams))
        if self.how not in ("mean", "sum"):
            raise UsageError(f"RewardPooling has how = {self.how!r}; choose from mean, sum")
        members = [agent for team in self.teams for agent in team]
        for agent in members:
            if agent not in self.env.agents:
                raise UsageError(f"no agent {agent!r} to pool: {nearest(agent, self.env.agents)}")
            if members.count(agent) > 1:
                raise UsageError(f"agent {agent!r} is in more than one reward team")

    def reset(self, key: jax.Array) -> tuple[Any, PoolingState]:
        obs, state = self.env.reset(key)
        return obs, PoolingState(env=state, active=all_active(self))

    def step(
        self, key: jax.Array, state: PoolingState, action: Any
    ) -> tuple[TimeStep, PoolingState]:
        timestep, env_state = self.env.step(key, state.env, action)
        reward = dict(timestep.reward)
        for team in self.teams:
            pooled = self._pool(timestep.reward, state.active, team)
            reward |= dict.fromkeys(team, pooled)
        timestep = timestep._replace(reward=reward)
        return timestep, PoolingState(env=env_state, active=timestep.active)

    def _pool(self, reward: Any, active: Any, team: tuple[str, ...]) -> jax.Array:
        alive = jnp.stack([active[agent] for agent in team])
        total = jnp.where(alive, jnp.stack([reward[agent] for agent in team]), 0.0).sum()
        return total / jnp.maximum(alive.sum(), 1) if self.how == "mean" else total
