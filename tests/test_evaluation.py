"""Evaluation: whole episodes, the same number from each environment, raw rewards."""

import jax
import numpy as np
import pytest
from team_cases import (
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    small_team,
)
from team_envs import LongAndShort, shift

import marl
from marl import evaluation
from marl.envs.interface import AutoReset


def evaluate(team, state, episodes, mode="stochastic", seed=0, **options):
    return evaluation.evaluate(
        team.env,
        team.spec,
        state,
        team.group_hparams(),
        episodes=episodes,
        key=jax.random.key(seed),
        mode=mode,
        **options,
    )


def fresh(env, **options):
    team = small_team(env, **options)
    init = jax.jit(team.learner.init, compiler_options={"xla_backend_optimization_level": 0})
    return team, init(jax.random.key(0), team.group_hparams())


@pytest.fixture(scope="module")
def long_and_short():
    return fresh(AutoReset(LongAndShort()))


def test_short_episodes_do_not_crowd_out_long_ones(long_and_short):
    """Half of the episodes take 9 steps. Of the first to finish, one in ten would."""
    result = evaluate(*long_and_short, episodes=512)  # 128 environments of 4 each
    assert (result["episodes"], result["unfinished"]) == (512, 0)
    # mean 5, standard deviation 4: four standard errors are 0.71
    assert result["length"]["mean"] == pytest.approx(5, abs=0.71)
    assert result["length"]["std"] == pytest.approx(4, abs=0.3)
    returns = result["returns"]["agent"]
    assert returns["mean"] == pytest.approx(9 * (result["length"]["mean"] - 1) / 8)


def test_unfinished_episodes_are_counted_and_left_out(long_and_short):
    """Within 9 steps an environment ends its four episodes only if none is long."""
    result = evaluate(*long_and_short, episodes=512, max_steps=8)
    assert result["episodes"] + result["unfinished"] == 512
    assert 0 < result["episodes"] < 512
    assert result["length"] == {"mean": 1.0, "std": 0.0}
    assert result["returns"]["agent"]["mean"] == 0.0
    none = evaluate(*long_and_short, episodes=512, max_steps=0)
    assert (none["episodes"], none["unfinished"]) == (0, 512)
    assert none["returns"]["agent"] == {"mean": None, "std": None}


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (100, 100), (128, 128), (129, 130)])
def test_episodes_are_rounded_up_to_the_parallel_environments(asked, given):
    per_env = -(-asked // 128)
    assert per_env * -(-asked // per_env) == given
    if asked in (1, 129):
        team, state = fresh(marl.make("toy/cooperative"))
        assert evaluate(team, state, asked)["episodes"] == given


def test_rewards_are_raw_and_unpooled_and_teams_are_reported():
    """Rewards pooled by sum for learning; agent i of the roster still gets i."""
    names = [f"a{i}" for i in range(12)]
    team, state = fresh(
        marl.make("toy/roster"),
        reward_teams={"first": ["a0", "a1"], "rest": ["a?", "a1?"][1:]},
        reward_pooling="sum",
    )
    result = evaluate(team, state, 4)
    for i, agent in enumerate(names):
        assert result["returns"][agent] == {"mean": i, "std": 0.0}
    assert result["team_returns"] == {
        "first": {"mean": 1.0, "std": 0.0},
        "rest": {"mean": 21.0, "std": 0.0},
    }


def test_returns_of_who_dies_stop_there():
    """By hand from the script: 21, 60 and 1000; and what pooling by mean makes of them."""
    team, state = fresh(shift(poison=True), reward_teams="all")
    result = evaluate(team, state, 4)
    assert {agent: x["mean"] for agent, x in result["returns"].items()} == {
        "ann": 21.0,
        "bob": 60.0,
        "cid": 1000.0,
    }
    assert result["team_returns"]["all"]["mean"] == 37 + 74 + 16.5 + 4 + 152.5 + 203
    assert result["length"] == {"mean": 6.0, "std": 0.0}


def test_greedy_takes_the_mode_and_stochastic_samples():
    team, state = fresh(marl.make("toy/probe_action"))  # +1 for action 1, else -1
    greedy, again = (evaluate(team, state, 128, "greedy", seed) for seed in (0, 1))
    assert greedy == again and greedy["returns"]["agent_0"]["std"] == 0.0
    stochastic = [evaluate(team, state, 128, seed=seed) for seed in (0, 0, 1)]
    assert stochastic[0] == stochastic[1] != stochastic[2]
    for result in stochastic:  # a fresh policy tosses a coin: four standard errors are 0.35
        assert abs(result["returns"]["agent_0"]["mean"]) < 0.4


def test_success_is_reported_where_the_environment_knows_it():
    team, state = fresh(marl.make("toy/sacrifice"))  # the hero's death is the success
    greedy, stochastic = (evaluate(team, state, 128, mode) for mode in ("greedy", "stochastic"))
    assert greedy["success"] in (0.0, 1.0)
    assert 0.2 < stochastic["success"] < 0.8
    friend = stochastic["returns"]["friend"]["mean"]
    assert friend == pytest.approx(2 * stochastic["success"])
    no_success, state = fresh(marl.make("toy/cooperative"))
    assert "success" not in evaluate(no_success, state, 1)


def test_evaluation_is_the_same_whatever_training_looked_like():
    """Play before it, in other sizes, leaves no trace."""
    team, state = fresh(marl.make("toy/probe_both"))
    before = evaluate(team, state, 128)
    play(team, num_envs=3, length=2)
    assert evaluate(team, state, 128) == before
    assert np.isfinite(before["returns"]["agent_0"]["mean"])
