"""What an algorithm binds to an agent, and what an override to another learner leaves behind."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    compiled,
    quick_compilation,  # noqa: F401 (a fixture)
    small_team,
    trained,
)

import marl
from marl.agents.learner import ActOutput, Given, Learner
from marl.envs.errors import UsageError

FOUR = marl.make("toy/probe_both", num_agents=4)


class Bound(NamedTuple):
    start: Given
    scale: float = 2.0


class NoHparams(NamedTuple):
    pass


@dataclasses.dataclass(frozen=True)
class Binding:
    """An algorithm that asks what it is bound to."""

    learner: Any

    Config = dataclasses.make_dataclass("Config", [("word", str, "")], frozen=True)
    Hparams = NoHparams
    CRITIC = None

    def bind(self, env, agent, config, hparams):
        number = env.agents.index(agent)
        arrays = {"x": np.full((3,), number, np.int32)}
        return config, Bound(Given(arrays, str(number), f"number {number}"), 2.0 + number)

    def make(self, config, observation_space, action_space, critic_space):
        return self.learner


def test_any_algorithm_may_bind_to_its_agent():
    """What it is given reaches `init`, per agent, and is not kept in the hparams of a run."""

    def init(key, hparams):
        return {"sum": jnp.sum(hparams.start["x"]) * hparams.scale, "x": hparams.start["x"]}

    def act(key, state, inputs, hparams):
        return ActOutput(jnp.zeros(inputs.reset.shape, jnp.int32), (), ())

    learner = Learner(init, lambda n: (), act, act, lambda k, s, e, h: (s, {}))
    team = marl.team(FOUR, Binding(learner), sharing="group")
    assert [group.shape for group in team.lifted.groups] == [(4, 1)]
    state, _ = trained(team, compiled(team, 2, 2), 1)
    np.testing.assert_array_equal(state.team[0]["sum"], [0, 9, 24, 45])
    assert state.team[0]["x"].dtype == jnp.int32
    assert state.hparams[0].start == () and state.hparams[0].scale.shape == (4,)
    assert "start         agent_3: number 3" in team.describe()


@pytest.mark.parametrize("learner", ["dqn", "random"])
def test_a_critic_of_the_team_does_not_reach_learners_without_one(learner):
    team = small_team(FOUR, critic="all", overrides={"agent_1": {"learner": learner}})
    scopes = {agent.name: agent.scope for agent in team.spec.agents}
    assert scopes["agent_1"] == ("self",) and len(scopes["agent_0"]) == 4
    for critic in ({"learner": learner, "critic": "all"}, {"critic": "all"}):
        overrides = {"agent_1": {"learner": learner}} | {"agent_*": critic}
        with pytest.raises(UsageError, match="has no critic, so critic = "):
            small_team(FOUR, overrides=overrides)


def test_another_learner_with_a_critic_keeps_the_team_s():
    team = small_team(FOUR, critic="all", overrides={"agent_1": {"learner": "a2c"}})
    assert len(team.spec.agents[1].scope) == 4


def test_numbers_of_numpy_are_taken_as_python_s():
    options = {"core": "gru", "core_size": np.int64(5), "shared_network": np.bool_(True)}
    config = small_team(FOUR, **options).spec.agents[0].config
    assert config.core_size == 5 and config.shared_network is True
    hash(config)
    with pytest.raises(UsageError, match=r"core_size = 5.5 is a float; give a int"):
        small_team(FOUR, core="gru", core_size=np.float64(5.5))


@pytest.mark.parametrize("option", ["agent_ids", "vectorise"])
def test_what_is_no_bool_is_not_taken_for_one(option):
    with pytest.raises(UsageError, match=f"{option} = 'no'; give True or False"):
        marl.team(FOUR, "ppo", **{option: "no"})
