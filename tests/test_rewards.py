"""Reward teams and deaths, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl import rewards
from marl.rewards import RewardTeams

T, A, B = 4, 4, 1
PAIRS = RewardTeams(("odd", "even"), ((1, 3), (0, 2)))
ALONE = RewardTeams(("a", "b", "c", "d"), ((0,), (1,), (2,), (3,)))
NAN = np.nan


def steps(*rows):
    """[T, A] as [T, A, 1]."""
    return jnp.asarray(rows)[..., None]


REWARD = steps(
    [1.0, 10.0, 100.0, 1000.0],
    [2.0, 20.0, NAN, 2000.0],
    [3.0, NAN, NAN, 3000.0],
    [NAN, NAN, NAN, 4000.0],
)
ACTIVE = steps(
    [True, True, True, True],
    [True, True, False, True],
    [True, False, False, True],
    [False, False, False, True],
)


@pytest.mark.parametrize(
    ("pooling", "even", "odd"),
    [
        ("mean", [101.0 / 2, 2.0, 3.0, 0.0], [505.0, 1010.0, 3000.0, 4000.0]),
        ("sum", [101.0, 2.0, 3.0, 0.0], [1010.0, 2020.0, 3000.0, 4000.0]),
    ],
)
def test_pooling_is_over_the_active_members(pooling, even, odd):
    pooled = rewards.pool(PAIRS._replace(pooling=pooling), REWARD, ACTIVE)[..., 0]
    for position, expected in enumerate([even, odd, even, odd]):
        np.testing.assert_allclose(pooled[:, position], expected)


@pytest.mark.parametrize("pooling", rewards.POOLINGS)
def test_agents_alone_in_their_team_get_their_own(pooling):
    pooled = rewards.pool(ALONE._replace(pooling=pooling), REWARD, ACTIVE)
    np.testing.assert_array_equal(pooled, jnp.where(ACTIVE, REWARD, 0.0))


def test_other_teams_are_never_read():
    broken = REWARD.at[:, 3].set(NAN)
    pooled = rewards.pool(PAIRS, broken, ACTIVE)
    assert np.all(np.isfinite(pooled[:, (0, 2)]))
    assert np.all(np.isnan(pooled[:, (1, 3)]))


def outcome(teams, terminated, truncated, active, over):
    zeros = jnp.zeros(np.shape(active) + (1,))
    return rewards.outcome(
        teams,
        zeros,
        steps(*terminated),
        steps(*truncated),
        steps(*active),
        jnp.asarray(over)[:, None],
    )


# Three agents. 0 dies in step 1; 1 lives to the end, in step 3; 2 is away in step 1 and dies at
# the end. `cut` says whether 1 is then truncated.
ACTIVE3 = [[True, True, True], [True, True, False], [False, True, True], [False, True, True]]
OVER3 = [False, False, False, True]
NOTHING = [False] * 3


def ends(cut):
    terminated = [NOTHING, [True, False, False], NOTHING, [False, not cut, True]]
    truncated = [NOTHING, NOTHING, NOTHING, [False, cut, False]]
    return terminated, truncated


@pytest.mark.parametrize("cut", [True, False])
def test_death_terminal_ends_each_return_with_its_agent(cut):
    teams = RewardTeams(("all",), ((0, 1, 2),), death="terminal")
    result = outcome(teams, *ends(cut), ACTIVE3, OVER3)
    # who was out before the end is cut off from the next episode by a termination
    expected = [NOTHING, [True, False, False], NOTHING, [True, not cut, True]]
    np.testing.assert_array_equal(result.terminated[..., 0], expected)
    np.testing.assert_array_equal(result.truncated[..., 0], [NOTHING] * 3 + [[False, cut, False]])


@pytest.mark.parametrize("cut", [True, False])
def test_death_continue_runs_to_the_end_of_the_episode(cut):
    """One member that was cut off makes the end a truncation for the team."""
    teams = RewardTeams(("all",), ((0, 1, 2),), death="continue")
    result = outcome(teams, *ends(cut), ACTIVE3, OVER3)
    np.testing.assert_array_equal(result.terminated[..., 0], [NOTHING] * 3 + [[not cut] * 3])
    np.testing.assert_array_equal(result.truncated[..., 0], [NOTHING] * 3 + [[cut] * 3])


def test_auto_continues_inside_a_team_and_ends_outside():
    teams = RewardTeams(("pair", "alone"), ((0, 2), (1,)))
    assert [teams.continues(team) for team in (0, 1)] == [True, False]
    result = outcome(teams, *ends(cut=True), ACTIVE3, OVER3)
    # agent 1, which is cut off, is not in the pair: their end is a termination
    np.testing.assert_array_equal(result.terminated[..., 0], [NOTHING] * 3 + [[True, False, True]])
    np.testing.assert_array_equal(result.truncated[..., 0], [NOTHING] * 3 + [[False, True, False]])
    forced = [teams._replace(death=death).continues(1) for death in ("continue", "terminal")]
    assert forced == [True, False]


def test_flags_of_inactive_agents_are_not_read():
    """An environment may go on saying "terminated" of the dead, and truncate them at the end."""
    terminated = [NOTHING, [True, False, False], [True, False, True], [True, False, True]]
    truncated = [NOTHING, NOTHING, NOTHING, [True, False, False]]
    for death in ("terminal", "continue"):
        teams = RewardTeams(("all",), ((0, 1, 2),), death=death)
        active = [[True] * 3, [True] * 3, [False, True, False], [False, True, False]]
        result = outcome(teams, terminated, truncated, active, OVER3)
        assert not np.any(result.truncated)
        assert np.all(result.terminated[3])
        assert not np.any(result.terminated[2])


@given(
    st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=5, max_size=5),
    st.sampled_from(rewards.POOLINGS),
)
def test_pooling_matches_a_plain_loop(active, pooling):
    generator = np.random.default_rng(0)
    reward = generator.normal(size=(5, 3)).astype(np.float32)
    teams = RewardTeams(("x", "y"), ((2, 0), (1,)), pooling)
    pooled = rewards.pool(teams, steps(*reward), steps(*active))[..., 0]
    for t in range(5):
        for members in teams.members:
            paid = [reward[t, p] for p in members if active[t][p]]
            total = sum(paid)
            expected = total if pooling == "sum" else total / max(len(paid), 1)
            for p in members:
                assert pooled[t, p] == pytest.approx(expected, abs=1e-6)
