"""SMAX: deaths, wins, defeats and timeouts, from states set by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl.envs import registry

KEY = jax.random.key(0)


def noop(env, value=0):
    return {
        agent: jnp.full(space.shape, value, space.dtype)
        for agent, space in env.action_spaces.items()
    }


@pytest.fixture(scope="module")
def battle():
    """3m against the built-in enemies: (env, compiled step, a fresh state)."""
    env = registry.make("jaxmarl/HeuristicEnemySMAX", scenario="3m").env
    _, state = env.reset(KEY)
    return env, jax.jit(env.step), state


STOP = 4


def change(state, **units):
    """The state with other fields in SMAX's own state."""
    inner = state.env.state.replace(**units)
    return state._replace(env=state.env.replace(state=inner))


def health(state, **values):
    """`health(state, ally_0=0)`: units 0..2 are allies, 3..5 enemies."""
    units = state.env.state.unit_health
    for unit, value in values.items():
        team, index = unit.split("_")
        units = units.at[int(index) + (3 if team == "enemy" else 0)].set(value)
    return change(state, unit_health=units)


NO_ENEMIES = {f"enemy_{i}": 0.0 for i in range(3)}
NO_ALLIES = {f"ally_{i}": 0.0 for i in range(3)}


def flags(by_agent):
    return [bool(by_agent[f"ally_{i}"]) for i in range(3)]


def test_a_dead_ally_is_inactive_and_shares_the_win(battle):
    env, step, state = battle
    assert env.agents == ("ally_0", "ally_1", "ally_2")
    timestep, state = step(KEY, health(state, ally_0=0.0), noop(env, STOP))
    assert flags(timestep.terminated) == [True, False, False]
    assert flags(timestep.active) == [False, True, True]
    assert not timestep.episode_over and not timestep.info["success"]
    timestep, state = step(KEY, state, noop(env, STOP))
    assert flags(timestep.terminated) == [False] * 3
    assert flags(timestep.active) == [False, True, True]
    np.testing.assert_array_equal(timestep.obs["ally_0"], 0)
    timestep, _ = step(KEY, health(state, **NO_ENEMIES), noop(env, STOP))
    assert timestep.episode_over and timestep.info["success"]
    assert flags(timestep.terminated) == [False, True, True]
    assert flags(timestep.truncated) == [False] * 3
    assert timestep.reward["ally_0"] == timestep.reward["ally_1"] == 1.0


def test_a_defeat_terminates_without_success(battle):
    env, step, state = battle
    for dead in (NO_ALLIES, NO_ALLIES | NO_ENEMIES):
        timestep, _ = step(KEY, health(state, **dead), noop(env, STOP))
        assert timestep.episode_over and not timestep.info["success"]
        assert flags(timestep.terminated) == [True] * 3
        assert flags(timestep.truncated) == [False] * 3


def test_a_timeout_truncates_the_survivors(battle):
    env, step, state = battle
    timestep, _ = step(KEY, change(state, step=jnp.asarray(99)), noop(env, STOP))
    assert not timestep.episode_over
    late = change(state, step=jnp.asarray(100))
    timestep, _ = step(KEY, health(late, ally_1=0.0), noop(env, STOP))
    assert timestep.episode_over and not timestep.info["success"]
    assert flags(timestep.terminated) == [False, True, False]
    assert flags(timestep.truncated) == [True, False, True]


def test_a_win_in_the_last_step_is_a_win(battle):
    env, step, state = battle
    late = change(state, step=jnp.asarray(100))
    timestep, _ = step(KEY, health(late, **NO_ENEMIES), noop(env, STOP))
    assert timestep.info["success"] and flags(timestep.terminated) == [True] * 3


def test_the_world_state_is_the_global_state_and_masks_are_bool(battle):
    env, step, state = battle
    obs, _ = env._built.env.reset(KEY)
    assert "world_state" in obs and "world_state" not in env.reset(KEY)[0]
    np.testing.assert_array_equal(env.global_state(state), obs["world_state"])
    _, dead = step(KEY, health(state, ally_0=0.0), noop(env, STOP))
    masks = env.action_mask(dead)
    assert masks["ally_0"].dtype == bool and masks["ally_0"].shape == (8,)
    assert np.flatnonzero(masks["ally_0"]).tolist() == [STOP]
    assert masks["ally_1"][:5].all()
