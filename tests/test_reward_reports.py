"""Rows of metrics say what rewards were learned with."""

import jax
import numpy as np
import pytest
from team_cases import (
    SMALL,
    compiled,
    quick_compilation,  # noqa: F401 (a fixture)
    trained,
)
from test_shaped_rewards import ENV

import marl
from marl import program
from marl.report import training_row

NUM_ENVS, LENGTH = 2, 6
TERMS = {
    "shaped_reward": {"steps": 36, "weight": 3},  # 3, 2, 1 in updates of 12 steps
    "normalize_rewards": True,
    "reward_teams": {"pair": ["bob", "cid"]},
    "overrides": {"ann": {"learner": "random"}},  # without a gamma: nothing is divided
}


@pytest.fixture(scope="module")
def found():
    """A team, its state after three updates, and their metrics; of two seeds."""
    team = marl.team(ENV, "ppo", **TERMS, **SMALL)
    state, metrics = trained(team, compiled(team, NUM_ENVS, LENGTH, num_seeds=2), 3)
    return team, state, jax.tree.map(np.asarray, metrics)


def row_of(team, metrics, which):
    return training_row(team, jax.tree.map(lambda x: x[which], metrics), 36, 1.0)


def test_the_weight_of_shaped_rewards_is_reported(found):
    team, _, metrics = found
    for update, weight in enumerate([3, 2, 1]):
        row = row_of(team, metrics, slice(update, update + 1))
        np.testing.assert_allclose(row["shaped_weight"], [weight, weight])
    np.testing.assert_allclose(row_of(team, metrics, slice(1, 3))["shaped_weight"], [1.5, 1.5])


def test_the_deviation_that_rewards_are_divided_by_is_reported(found):
    team, state, metrics = found
    row = row_of(team, metrics, slice(2, 3))
    assert [name for name in row if name.startswith("return_std")] == ["return_std/pair"]
    index = team.spec.reward_teams.names.index("pair")
    variance = np.asarray(state.returns.statistics.variance)[:, index]
    np.testing.assert_allclose(row["return_std/pair"], np.sqrt(variance), rtol=1e-6)
    each = [row_of(team, metrics, slice(i, i + 1))["return_std/pair"] for i in range(3)]
    mean = row_of(team, metrics, slice(0, 3))["return_std/pair"]
    np.testing.assert_allclose(mean, np.mean(each, 0), rtol=1e-6)
    assert len({x[0] for x in each}) == 3


def test_nothing_is_reported_of_what_is_off():
    team = marl.team(ENV, "ppo", **SMALL)
    spec = program.ProgramSpec(team.env, team.spec, NUM_ENVS, LENGTH, 0, 1, 1)

    def step(key):
        state = program.init_state(spec, key, team.group_hparams())
        return program.train_step(spec, state.update, state)[1]

    assert jax.eval_shape(step, jax.random.key(0)).rewards == program.RewardMetrics((), ())
