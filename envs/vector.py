"""Parallel environments: the only `vmap` over environments.

Resetting inside every step costs about as much as stepping. Two ways around it:
  fresh reset   the resets of a step are computed only if an episode of the batch ended in it
  reset pool    K resets are drawn when `refresh` is called (once per rollout), and an episode
                starts from one of them at random; for episodes that end at different times
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.envs.interface import AutoReset, TimeStep, restart


class VectorState(NamedTuple):
    """State of the parallel environments."""

    env: Any  # [B, ...] state of each environment
    pool: Any  # (obs, state), each [K, ...], or () without a reset pool


class VectorEnv(NamedTuple):
    """`num_envs` copies of `env`, with a leading axis B on everything but `agents`."""

    env: Any
    num_envs: int
    reset_pool: int = 0

    def reset(self, key: jax.Array) -> tuple[Any, VectorState]:
        key_env, key_pool = jax.random.split(key)
        obs, state = jax.vmap(self.env.reset)(jax.random.split(key_env, self.num_envs))
        return obs, self.refresh(key_pool, VectorState(env=state, pool=()))

    def refresh(self, key: jax.Array, state: VectorState) -> VectorState:
        """Draw the reset pool anew; nothing without one."""
        if not self.reset_pool:
            return state
        pool = jax.vmap(self.env.reset)(jax.random.split(key, self.reset_pool))
        return state._replace(pool=pool)

    def step(self, key: jax.Array, state: VectorState, action: Any) -> tuple[TimeStep, VectorState]:
        return self.step_with(self.step_keys(key), state, action)

    def step_keys(self, key: jax.Array) -> jax.Array:
        """[B + 1]: the keys of a step of each environment, and of their resets."""
        return jax.random.split(key, self.num_envs + 1)

    def step_with(
        self, keys: jax.Array, state: VectorState, action: Any
    ) -> tuple[TimeStep, VectorState]:
        """`step` with keys that were split before: many at once cost less than one by one."""
        keys, key_reset = keys[:-1], keys[-1]
        if not isinstance(self.env, AutoReset):
            timestep, env_state = jax.vmap(self.env.step)(keys, state.env, action)
            return timestep, state._replace(env=env_state)
        timestep, env_state = jax.vmap(self.env.advance)(keys, state.env, action)
        timestep, env_state = jax.lax.cond(
            jnp.any(timestep.episode_over),
            self._restart,
            _keep,
            key_reset,
            timestep,
            env_state,
            state.pool,
        )
        return timestep, state._replace(env=env_state)

    def action_mask(self, state: VectorState) -> Any:
        return jax.vmap(self.env.action_mask)(state.env)

    def global_state(self, state: VectorState) -> Any:
        return jax.vmap(self.env.global_state)(state.env)

    def _restart(self, key, timestep, env_state, pool):
        if self.reset_pool:
            index = jax.random.randint(key, (self.num_envs,), 0, self.reset_pool)
            fresh = jax.tree.map(lambda x: x[index], pool)
        else:
            fresh = jax.vmap(self.env.reset)(jax.random.split(key, self.num_envs))
        return jax.vmap(restart)(timestep, env_state, fresh)


def _keep(key, timestep, env_state, pool):
    del key, pool
    return timestep, env_state
