"""Parallel environments reset themselves exactly as single ones do."""

import jax
import jax.numpy as jnp
import numpy as np
from scripted_env import RandomEnd

from marl.envs.features import Hidden
from marl.envs.interface import AutoReset, restart
from marl.envs.probes import Probe
from marl.envs.vector import VectorEnv

B, T = 4, 12


def act(value):
    return {"a": jnp.full((B,), value, jnp.int32)}


def test_vector_step_equals_single_steps():
    single = AutoReset(RandomEnd())
    env = VectorEnv(single, B)
    _, state = env.reset(jax.random.key(0))
    step, ends = jax.jit(env.step), 0
    for key in jax.random.split(jax.random.key(1), T):
        timestep, after = step(key, state, act(1))
        *keys, key_reset = jax.random.split(key, B + 1)
        reset_keys = jax.random.split(key_reset, B)
        for b in range(B):
            mine = jax.tree.map(lambda x, b=b: x[b], (timestep, after.env, state.env))
            expected, reached = single.advance(keys[b], mine[2], {"a": jnp.asarray(1)})
            expected = restart(expected, reached, single.env.reset(reset_keys[b]))
            jax.tree.map(np.testing.assert_array_equal, mine[:2], expected)
        ends += int(timestep.episode_over.sum())
        state = after
    assert 0 < ends < B * T


def test_final_obs_is_not_the_reset_observation():
    env = VectorEnv(AutoReset(RandomEnd()), B)
    _, state = env.reset(jax.random.key(0))
    step = jax.jit(env.step)
    seen = []
    for key in jax.random.split(jax.random.key(1), T):
        timestep, state = step(key, state, act(1))
        changed = (timestep.obs["a"] != timestep.final_obs["a"])[:, 0]
        np.testing.assert_array_equal(changed, timestep.episode_over)
        assert timestep.active["a"].all()
        starts = np.asarray(timestep.obs["a"])[np.asarray(timestep.episode_over), 0]
        np.testing.assert_array_equal(np.asarray(state.env.step) == 0, timestep.episode_over)
        seen.extend(starts.tolist())
    assert len(seen) > B and len(set(seen)) == len(seen)  # every episode starts anew


def test_resets_are_computed_only_where_an_episode_ended():
    calls = []
    env = VectorEnv(AutoReset(RandomEnd(on_reset=lambda draw: calls.append(draw))), B)
    step = jax.jit(env.step)
    _, state = jax.jit(env.reset)(jax.random.key(0))
    jax.effects_barrier()
    assert len(calls) == B
    for _ in range(3):
        _, state = step(jax.random.key(1), state, act(0))
    jax.effects_barrier()
    assert len(calls) == B
    timestep, _ = step(jax.random.key(1), state, act(1))
    jax.effects_barrier()
    assert timestep.episode_over.any() and len(calls) == 2 * B


def test_pool_gives_the_starts_and_refresh_draws_it_anew():
    env = VectorEnv(AutoReset(RandomEnd()), num_envs=B, reset_pool=3)
    _, state = env.reset(jax.random.key(0))
    step = jax.jit(env.step)
    pools, starts = [], []
    for round_key in jax.random.split(jax.random.key(5), 2):
        state = env.refresh(round_key, state)
        pool = set(np.asarray(state.pool[0]["a"])[:, 0].tolist())
        assert len(pool) == 3
        pools.append(pool)
        for key in jax.random.split(round_key, T):
            timestep, state = step(key, state, act(1))
            new = np.asarray(timestep.obs["a"])[np.asarray(timestep.episode_over), 0].tolist()
            assert set(new) <= pool
            starts.extend(new)
    assert not pools[0] & pools[1]
    assert len(set(starts)) > 3  # episodes start from different draws


def test_the_first_observations_differ():
    obs, _ = VectorEnv(AutoReset(RandomEnd()), B).reset(jax.random.key(0))
    assert len(set(np.asarray(obs["a"])[:, 0].tolist())) == B


def test_masks_states_and_extras_have_the_batch_axis():
    env = VectorEnv(AutoReset(Hidden(), final_extras=("action_mask", "global_state")), B)
    _, state = env.reset(jax.random.key(0))
    assert env.action_mask(state) is None and env.global_state(state).shape == (B, 2)
    action = dict.fromkeys(env.env.agents, jnp.zeros((B,), jnp.int32))
    before = env.global_state(state)
    timestep, state = env.step(jax.random.key(3), state, action)
    extras = timestep.final_extras
    assert extras["action_mask"] is None
    np.testing.assert_array_equal(extras["global_state"], before)  # of the final state
    assert (extras["global_state"] != env.global_state(state)).any()  # not of the next episode


def test_an_environment_that_resets_itself_is_stepped_as_it_is():
    class Own:
        def __init__(self):
            self.inner = AutoReset(Probe("observation", num_agents=1))
            self.reset = self.inner.reset

        def step(self, key, state, action):
            return self.inner.step(key, state, action)

    env = VectorEnv(Own(), B)
    _, state = env.reset(jax.random.key(0))
    action = {"agent_0": jnp.zeros((B,), jnp.int32)}
    assert not isinstance(env.env, AutoReset)
    for key in jax.random.split(jax.random.key(1), 3):
        timestep, state = env.step(key, state, action)
        assert timestep.episode_over.all() and not state.env.step.any()
