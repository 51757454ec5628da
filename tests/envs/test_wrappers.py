"""Wrappers against arithmetic by hand; rewards of inactive agents are NaN throughout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_env import Echo, Scripted

from marl.envs import wrappers
from marl.envs.errors import UsageError
from marl.envs.games import Roster
from marl.envs.interface import AutoReset
from marl.envs.oddities import Death
from marl.envs.spaces import Box, Discrete

NAN = float("nan")
NO = (False, False, False)

# x acts throughout; y dies in the first step; z is out for the second step and comes back
SCRIPT = Scripted(
    agents=("x", "y", "z"),
    reward=((1.0, 10.0, 100.0), (2.0, NAN, NAN), (4.0, NAN, 400.0)),
    terminated=((False, True, False), NO, (True, False, True)),
    truncated=(NO, NO, NO),
    active=((True, False, False), (True, False, True), NO),
)
KEY = jax.random.key(0)


def play(env, steps):
    """The time steps of `steps` steps with action 0."""
    step = jax.jit(env.step)
    _, state = env.reset(KEY)
    action = dict.fromkeys(env.agents, jnp.zeros((), jnp.int32))
    timesteps = []
    for _ in range(steps):
        timestep, state = step(KEY, state, action)
        timesteps.append(jax.device_get(timestep))
    return timesteps


@pytest.mark.parametrize(
    "env",
    [
        AutoReset(wrappers.EpisodeStatistics(SCRIPT)),
        wrappers.EpisodeStatistics(AutoReset(SCRIPT)),
    ],
    ids=["inside", "outside"],
)
def test_statistics_count_active_steps_only(env):
    first, second, third, fourth, *_, last = play(env, 6)
    assert first.info["episode"].returns == {"x": 1, "y": 10, "z": 100}
    assert second.info["episode"].returns == {"x": 3, "y": 10, "z": 100}
    assert third.episode_over and third.info["success"]
    assert third.info["episode"].returns == {"x": 7, "y": 10, "z": 500}
    assert third.info["episode"].length == 3
    assert fourth.info["episode"].returns == {"x": 1, "y": 10, "z": 100}
    assert fourth.info["episode"].length == 1
    assert fourth.info["env"]["step"] == 1
    assert last.info["episode"].returns == {"x": 7, "y": 10, "z": 500}


def test_with_statistics_stays_below_auto_reset_and_keeps_final_extras():
    env = wrappers.with_statistics(AutoReset(SCRIPT, final_extras=("global_state",)))
    assert env == AutoReset(wrappers.EpisodeStatistics(SCRIPT), final_extras=("global_state",))
    assert wrappers.with_statistics(SCRIPT) == wrappers.EpisodeStatistics(SCRIPT)
    assert play(env, 1)[0].final_extras == {"global_state": None}


def test_statistics_of_poisoned_death():
    env = wrappers.with_statistics(AutoReset(Death(death=2, length=5, poison=True)))
    last = play(env, 5)[-1]
    assert last.info["episode"].returns == {"early": 2, "late": 5}


def test_time_limit_truncates_who_is_active_and_not_terminated():
    first, second = play(wrappers.TimeLimit(SCRIPT, 2), 2)
    assert not first.episode_over and first.terminated["y"]
    assert second.episode_over
    assert second.truncated == {"x": True, "y": False, "z": False}
    assert second.terminated == {"x": False, "y": False, "z": False}
    assert second.active == {"x": False, "y": False, "z": False}
    (only,) = play(wrappers.TimeLimit(SCRIPT, 1), 1)
    assert only.truncated == {"x": True, "y": False, "z": True}
    assert only.terminated == {"x": False, "y": True, "z": False}


@pytest.mark.parametrize("max_steps", [3, 10])
def test_time_limit_leaves_an_end_of_its_own(max_steps):
    *_, last = play(wrappers.TimeLimit(SCRIPT, max_steps), 3)
    assert last.episode_over
    assert last.terminated == {"x": True, "y": False, "z": True}
    assert not any(last.truncated.values())


def test_time_limit_counts_anew_after_a_reset():
    over = [bool(t.episode_over) for t in play(AutoReset(wrappers.TimeLimit(SCRIPT, 2)), 6)]
    assert over == [False, True] * 3


def test_time_limit_refuses_what_resets_itself():
    with pytest.raises(UsageError, match=r"AutoReset\(TimeLimit"):
        wrappers.TimeLimit(AutoReset(SCRIPT), 3)
    with pytest.raises(UsageError, match="max_steps = 0"):
        wrappers.TimeLimit(SCRIPT, 0)


def test_pooling_takes_the_mean_over_active_members():
    first, second, third = play(wrappers.RewardPooling(SCRIPT, (("x", "y"),)), 3)
    assert first.reward == {"x": 5.5, "y": 5.5, "z": 100}
    assert second.reward["x"] == second.reward["y"] == 2 and np.isnan(second.reward["z"])
    assert third.reward == {"x": 4, "y": 4, "z": 400}


def test_pooling_sums_and_gives_zero_where_nobody_acts():
    first, second, third = play(wrappers.RewardPooling(SCRIPT, {"t": ["y", "z"]}, how="sum"), 3)
    assert first.reward == {"x": 1, "y": 110, "z": 110}
    assert second.reward == {"x": 2, "y": 0, "z": 0}
    assert third.reward == {"x": 4, "y": 400, "z": 400}


def test_pooling_refuses_unknown_and_repeated_agents():
    with pytest.raises(UsageError, match="no agent 'w'"):
        wrappers.RewardPooling(SCRIPT, (("x", "w"),))
    with pytest.raises(UsageError, match="'x' is in more than one"):
        wrappers.RewardPooling(SCRIPT, (("x", "y"), ("x",)))
    with pytest.raises(UsageError, match="'max'"):
        wrappers.RewardPooling(SCRIPT, (("x", "y"),), how="max")


BOUNDS = Box((2,), low=(0.0, -2.0), high=(1.0, 4.0))


def test_rescaled_actions_reach_the_bounds_and_leave_discrete_leaves():
    env = wrappers.RescaleActions(Echo({"move": BOUNDS, "speak": Discrete(3)}))
    assert env.action_spaces["a"] == {"move": Box((2,), -1, 1), "speak": Discrete(3)}
    _, state = env.reset(KEY)
    for move, expected in [(-1, (0, -2)), (0, (0.5, 1)), (1, (1, 4)), (7, (1, 4))]:
        action = {"move": jnp.full((2,), move, jnp.float32), "speak": jnp.asarray(2)}
        timestep, _ = env.step(KEY, state, {"a": action})
        np.testing.assert_array_equal(timestep.info["move"], np.float32(expected))
        assert timestep.info["speak"] == 2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=2))
def test_rescaled_actions_stay_in_bounds(given_action):
    env = wrappers.RescaleActions(Echo(BOUNDS))
    _, state = env.reset(KEY)
    timestep, _ = env.step(KEY, state, {"a": jnp.asarray(given_action, jnp.float32)})
    low, high = BOUNDS.bounds()
    assert np.all(timestep.info >= low) and np.all(timestep.info <= high)


def test_rescaling_needs_bounds():
    with pytest.raises(UsageError, match="finite bounds"):
        wrappers.RescaleActions(Echo(Box((2,))))


def test_agent_id_has_the_declared_order():
    env = wrappers.AgentId(AutoReset(Roster()))
    obs, _ = env.reset(KEY)
    (timestep,) = play(env, 1)
    for i, agent in enumerate(env.agents):
        for seen in (obs, timestep.obs, timestep.final_obs):
            np.testing.assert_array_equal(seen[agent]["agent_id"], np.eye(12)[i])
            assert seen[agent]["obs"] == i
        assert env.observation_spaces[agent]["agent_id"].shape == (12,)


def test_wrappers_compose_and_hash_by_value():
    def build():
        limited = wrappers.TimeLimit(SCRIPT, 2)
        pooled = wrappers.RewardPooling(wrappers.AgentId(limited), (("x", "y"),))
        return wrappers.with_statistics(AutoReset(pooled))

    assert build() == build() and hash(build()) == hash(build())
    second = play(build(), 2)[1]
    assert second.info["episode"].returns == {"x": 5.5 + 2, "y": 5.5, "z": 100}
