"""Teams of agents that have actor and critic in one network, from `marl.team` on."""

import pytest
from team_cases import (
    SMOOTH,
    all_finite,
    compiled,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    trained,
)
from team_envs import shift

import marl
from marl.envs.errors import UsageError

SACRIFICE = marl.make("toy/sacrifice")
SHIFT = shift()
POOLED = {"reward_teams": "all", "shared_network": True}
REFUSED = {
    "another's eyes": ({"critic": ["friend"]}, "critic = friend of hero is not what its actor"),
    "all eyes": ({"critic": "all"}, "critic = all of hero is not what its actor reads"),
    "held": ({"sharing": {"critic": "reward_team"}}, "sharing.critic = 'reward_team' shares the"),
    "a rate": ({"critic_learning_rate_scale": 2.0}, "critic_learning_rate_scale = 2.0 of hero"),
    "sizes": ({"critic_hidden_sizes": (4,)}, r"critic_hidden_sizes = \(4,\) sizes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_network_cannot_be_is_refused(name):
    options, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        marl.team(SACRIFICE, "ppo", **(POOLED | options))


def test_one_agent_s_team_sees_no_more_than_it():
    marl.team(marl.make("toy/probe_memory"), "ppo", critic="all", shared_network=True)


def test_a_critic_that_is_named_as_oneself_is_one_s_own():
    override = {"hero": {"critic": ["hero"]}}
    marl.team(SACRIFICE, "ppo", **POOLED, overrides=override)


@pytest.mark.parametrize("learner", ["ppo", "a2c"])
def test_vmapped_agents_equal_a_loop(learner):
    """PPO in turns with memory; A2C with parameters and statistics in common."""
    options = POOLED | SMOOTH | {"hidden_sizes": (6,)}
    if learner == "ppo":
        options |= {"update_order": "sequential", "core": "gru", "core_size": 5, "num_epochs": 2}
    else:
        options |= {"sharing": "group", "normalize_observations": True}
    team, looped = (marl.team(SHIFT, learner, vectorise=v, **options) for v in (True, False))
    (one, _), (other, _) = (trained(t, compiled(t), 2) for t in (team, looped))
    assert all_finite(one.team)
    for agent in team.agents:
        mine, its = team.agent_state(one.team, agent), looped.agent_state(other.team, agent)
        assert mine.critic == ()
        assert relative_difference(mine, its) <= 1e-5
