"""`critic=[self, state]`: a shared critic reads who it is for, then the global state."""

import jax
import numpy as np
import pytest
from team_cases import (
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    small_team,
)
from team_envs import SHIFT_ACTIVE, shift

from marl import experience
from marl.experience import Seen

LENGTH = 6  # one episode
ACTIVE = np.asarray(list(SHIFT_ACTIVE.values()), bool).T  # [T, A]
SHARED = {
    "with their actor": "group",
    "by a reward team": {"actor": "none", "critic": "reward_team"},
}


def critic_of(team):
    """The team's only critic: its group, its state, and what it reads [T, A, ...]."""
    states, rollout = play(team, 1, LENGTH)
    built, held = team.lifted.groups, team.lifted.critics
    seen = Seen(
        obs=experience.by_position(built, [steps.obs for steps in rollout.steps]),
        final_obs=experience.by_position(built, rollout.final_obs),
        action=(),
        next_action=(),
    )
    result, key = experience.outcome(team.spec.reward_teams, rollout), jax.random.key(0)
    if held:
        own, _ = experience.of_critics(held[0], rollout, result, seen, key)
    else:
        own, _ = experience.of_group(built[0], rollout, 0, result, seen, key, {})
    group, state = (held[0], states[-1]) if held else (built[0], states[0])
    first = jax.tree.map(lambda x: x[0], state)
    axis = 0 if group.joint else 1  # of its only set, where there is one
    sources = own.critic_obs if not axis else jax.tree.map(lambda x: x[:, 0], own.critic_obs)
    return group, first, sources


@pytest.fixture(scope="module", params=SHARED)
def critic(request):
    """A critic of all three agents, in one reward team."""
    sharing = SHARED[request.param]
    team = small_team(shift(True), critic=["state", "self"], sharing=sharing, reward_teams="all")
    return critic_of(team)


def test_own_observation_and_id_come_first_then_the_state(critic):
    own, state = critic[2]
    np.testing.assert_array_equal(own["agent_id"], np.broadcast_to(np.eye(3), (LENGTH, 3, 3)))
    steps = np.arange(LENGTH)
    seen = np.stack(np.broadcast_arrays(np.arange(1, 4), steps[:, None] + 1), -1)
    np.testing.assert_array_equal(own["obs"], np.where(ACTIVE[..., None], seen, 0))
    np.testing.assert_array_equal(state, np.broadcast_to(steps[:, None, None], (LENGTH, 3, 1)))


def test_who_is_out_is_zeros_and_its_id(critic):
    own, state = critic[2]
    out = ~ACTIVE
    assert out.any() and not np.any(np.asarray(own["obs"])[out])
    np.testing.assert_array_equal(np.asarray(own["agent_id"])[out].sum(-1), 1)
    assert np.all(np.asarray(state)[out] > 0), "the state is read all the same"


def test_values_differ_between_agents(critic):
    group, state, sources = critic
    values = np.asarray(group.learner.value(state, sources))  # [T, A]
    assert values.shape == (LENGTH, 3) and np.all(np.isfinite(values))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.all(np.abs(values[:, one] - values[:, other]) > 1e-4)


def test_the_state_alone_gives_all_one_value():
    """One reward, one input: the critic runs once, without an agent axis."""
    team = small_team(shift(True), critic="state", sharing="group", reward_teams="all")
    group, state, (read,) = critic_of(team)
    assert group.joint and group.learner.value(state, (read,)).shape == (LENGTH, 1)


def test_a_critic_of_ones_own_has_no_id():
    """It would be one number for ever; the order is the same."""
    team = small_team(shift(True), critic=["self", "state"])
    _, _, (own, state) = critic_of(team)
    assert own.shape == (LENGTH, 1, 2) and state.shape == (LENGTH, 1, 1)
