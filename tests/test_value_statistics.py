"""Whose returns the statistics of values are of, in a team; and PopArt in every kind of critic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    all_finite,
    compiled,
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    small_team,
    trained,
    updater,
)
from team_envs import shift

import marl
from marl.agents.statistics import RunningStatistics
from marl.envs.errors import UsageError

OWN = {"sharing": "none"}
SHARED = {"sharing": "group"}
TEAM = {"critic": "all", "reward_teams": "all", "sharing": {"critic": "reward_team"}}
# Eight steps of the shift: an episode of six, and two steps of the next. NaN: out, and not counted.
OUT = np.nan
REWARDS = np.array(
    [
        [1, 2, 3, 4, 5, 6, 1, 2],
        [10, 20, 30, OUT, OUT, OUT, 10, 20],
        [100, 200, OUT, OUT, 300, 400, 100, 200],
    ]
)
POOLED = np.array([37, 74, 16.5, 4, 152.5, 203, 37, 74])  # the mean of those who are not out
ACTIVE = np.array([3, 3, 2, 1, 2, 2, 3, 3])  # how many are not


def moments(x, weight):
    mean = np.average(x, weights=weight)
    return mean, np.average((x - mean) ** 2, weights=weight)


def own(rewards):
    return moments(rewards[~np.isnan(rewards)], None)


EXPECTED = {
    "own": (OWN, [own(rewards) for rewards in REWARDS]),
    "shared": (SHARED, [own(REWARDS)]),
    "team": (TEAM, [moments(POOLED, ACTIVE)]),
    "team and none": (TEAM | {"sharing": "none"}, [moments(POOLED, ~np.isnan(r)) for r in REWARDS]),
}


def critics_of(state):
    """The states of the critics: of the team where it holds them, else of the one group."""
    return state[-1]


@pytest.mark.parametrize("name", EXPECTED)
def test_statistics_are_of_the_returns_of_those_who_share_the_critic(name):
    """Without a future a return is a reward; NaN stands where nothing may be read."""
    options, expected = EXPECTED[name]
    config = {"gamma": 0.0, "value_normalization": "popart", "num_epochs": 3}
    team = small_team(shift(poison=True), **options, **config)
    state, rollout = play(team)
    after, _ = updater(team)(state, rollout, team.group_hparams())
    found = critics_of(after).value_statistics
    np.testing.assert_allclose(found.mean, [mean for mean, _ in expected], rtol=1e-4)
    np.testing.assert_allclose(found.variance, [variance for _, variance in expected], rtol=1e-4)
    assert all_finite(after)


@pytest.mark.parametrize("learner", ["ppo", "a2c"])
@pytest.mark.parametrize("options", [OWN, SHARED, TEAM], ids=["own", "shared", "team"])
def test_popart_leaves_every_critic_saying_what_it_said(learner, options):
    """In units of the return the last layer is that of running statistics before they moved."""
    found = {}
    for name in ("running", "popart"):
        team = marl.team(shift(), learner, hidden_sizes=(8,), value_normalization=name, **options)
        state, rollout = play(team)
        sets = critics_of(state).value_statistics.mean.shape
        old = RunningStatistics(*(jnp.full(sets, x) for x in (5.0, 3.0, 4.0)))
        state = (*state[:-1], critics_of(state)._replace(value_statistics=old))
        after, _ = updater(team)(state, rollout, team.group_hparams())
        found[name] = critics_of(after)
    running, popart = found["running"], found["popart"]
    new = popart.value_statistics
    assert relative_difference(new, running.value_statistics) <= 1e-6
    assert np.all(np.abs(new.mean - 3.0) > 0.1)
    before, moved = running.critic.params["linear_1"], popart.critic.params["linear_1"]
    scale = jnp.sqrt(new.variance + 1e-4)[:, None]
    weights, bias = scale[..., None] * moved["w"], scale * moved["b"] + new.mean[:, None]
    old_scale = np.sqrt(4.0 + 1e-4)
    assert relative_difference(weights, old_scale * before["w"]) <= 1e-5
    np.testing.assert_allclose(bias, old_scale * before["b"] + 3.0, rtol=1e-4, atol=1e-3)
    first, others = (x.critic.params["linear"] for x in (running, popart))
    assert relative_difference(first, others) <= 1e-6


def test_recurrent_critics_with_popart_are_vmapped_as_they_are_looped():
    env = marl.make("toy/roster", names=["a", "b", "c", "d"])
    options = {
        "core": "gru",
        "core_size": 5,
        "num_epochs": 1,
        "value_normalization": "popart",
        "value_loss": "huber",
        "sharing": {"x": ["a", "b"], "y": ["c", "d"]},
        "overrides": {"c": {"huber_delta": 0.1}, "d": {"huber_delta": 0.1}},
    }
    vmapped, looped = (small_team(env, **options, vectorise=v) for v in (True, False))
    one, other = (trained(team, compiled(team), 5)[0].team for team in (vmapped, looped))
    assert len(one) == 1 and len(other) == 2
    for index in range(2):
        mine, alone = (
            jax.tree.map(lambda x, i=index: x[i], one[0]),
            jax.tree.map(lambda x: x[0], other[index]),
        )
        assert relative_difference(mine, alone) <= 1e-5


def test_members_of_a_shared_critic_agree_in_how_it_learns():
    for options, words in (
        ({"huber_delta": 1.0}, "huber_delta"),
        ({"value_loss": "huber"}, "value_loss"),
        ({"value_normalization": "popart"}, "value_normalization"),
    ):
        with pytest.raises(UsageError, match=words):
            marl.team(shift(), "ppo", **TEAM, overrides={"bob": options})
