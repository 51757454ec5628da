"""Environments in other forms become dicts by agent id."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted_env import Unmasked

from marl.envs.errors import UsageError
from marl.envs.features import Masked
from marl.envs.games import Roster
from marl.envs.interface import AutoReset, TimeStep
from marl.envs.naming import ListedAgents, SingleAgent, by_name
from marl.envs.probes import Count
from marl.envs.registry import validate
from marl.envs.spaces import Box, Discrete
from marl.envs.vector import VectorEnv
from marl.envs.wrappers import with_statistics

KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Alone:
    """A single-agent environment without a word about agents: two steps, reward = the action."""

    observation_space = Box((1,), 0, 2)
    action_space = Discrete(3)

    def reset(self, key):
        return jnp.zeros((1,)), Count.zero()

    def step(self, key, state, action):
        reached = Count(state.step + 1)
        obs, over = reached.step[None].astype(jnp.float32), reached.step >= 2
        reward = action.astype(jnp.float32)
        never = jnp.zeros((), bool)
        return TimeStep(obs, reward, over, never, None, over, obs, (), ()), reached


@dataclasses.dataclass(frozen=True)
class Listed(Unmasked):
    """An environment whose first level is a tuple of the three agents of `roster`."""

    roster: Roster
    container: type = tuple

    @property
    def agents(self):
        return self.roster.agents

    @property
    def observation_spaces(self):
        return self._list(self.roster.observation_spaces)

    @property
    def action_spaces(self):
        return self._list(self.roster.action_spaces)

    def reset(self, key):
        obs, state = self.roster.reset(key)
        return self._list(obs), state

    def step(self, key, state, action):
        assert type(action) is self.container
        timestep, state = self.roster.step(key, state, dict(zip(self.agents, action, strict=True)))
        per_agent = ("obs", "terminated", "truncated", "active", "final_obs")
        listed = {name: self._list(getattr(timestep, name)) for name in per_agent}
        reward = jnp.stack([timestep.reward[agent] for agent in self.agents])
        return timestep._replace(reward=reward, **listed), state

    def action_mask(self, state):
        return self._list({agent: jnp.arange(2) >= 0 for agent in self.agents})

    def _list(self, named):
        values = [named[agent] for agent in self.agents]
        return (
            self.container(*values)
            if hasattr(self.container, "_fields")
            else self.container(values)
        )


class Pair(NamedTuple):
    """A NamedTuple of agents."""

    z_first: object
    a_last: object


def test_a_single_agent_is_called_agent():
    env = by_name(AutoReset(Alone()))
    assert env == AutoReset(SingleAgent(Alone())) and env.agents == ("agent",)
    validate(with_statistics(env))
    vector = VectorEnv(with_statistics(env), 2)
    obs, state = vector.reset(KEY)
    assert obs["agent"].shape == (2, 1)
    assert vector.action_mask(state) is None and vector.global_state(state) is None
    for over in (False, True):
        timestep, state = vector.step(KEY, state, {"agent": jnp.asarray([1, 2])})
        assert timestep.episode_over.tolist() == [over] * 2
        assert timestep.terminated["agent"].tolist() == [over] * 2
        assert timestep.active["agent"].tolist() == [True] * 2
        assert timestep.reward["agent"].tolist() == [1, 2]
    assert timestep.info["episode"].returns["agent"].tolist() == [2, 4]
    assert timestep.obs["agent"].tolist() == [[0], [0]]
    assert timestep.final_obs["agent"].tolist() == [[2], [2]]


@pytest.mark.parametrize("container", [tuple, list, Pair])
def test_a_list_has_the_declared_order(container):
    roster = Roster(names=("z_first", "a_last"), by_action=True)
    env = by_name(AutoReset(Listed(roster, container)))
    assert isinstance(env.env, ListedAgents) and env.agents == ("z_first", "a_last")
    assert hash(env) == hash(by_name(AutoReset(Listed(roster, container))))
    validate(env)
    obs, state = env.reset(KEY)
    assert (obs["z_first"], obs["a_last"]) == (0, 1)
    for actions, reward in [((1, 1), (0, 1)), ((1, 0), (0, 0))]:
        action = dict(zip(env.agents, map(jnp.asarray, actions), strict=True))
        timestep, _ = jax.jit(env.step)(KEY, state, action)
        assert (timestep.reward["z_first"], timestep.reward["a_last"]) == reward
    assert set(env.action_mask(state)) == {"z_first", "a_last"}


def test_masks_of_the_final_state_are_named_too():
    roster = Roster(names=("z", "a"))
    env = by_name(AutoReset(Listed(roster), final_extras=("action_mask",)))
    _, state = env.reset(KEY)
    action = dict.fromkeys(env.agents, jnp.asarray(0))
    timestep, _ = env.step(KEY, state, action)
    np.testing.assert_array_equal(timestep.final_extras["action_mask"]["z"], [True, True])


def test_dicts_are_returned_unchanged():
    env = AutoReset(Masked())
    assert by_name(env).env is env.env
    assert by_name(env.env) is env.env


def test_other_first_levels_are_refused():
    class Stacked(Listed):
        def reset(self, key):
            obs, state = self.roster.reset(key)
            return jnp.stack([obs[agent] for agent in self.agents]), state

    class Short(Listed):
        def reset(self, key):
            obs, state = super().reset(key)
            return obs[:-1], state

    with pytest.raises(UsageError, match="must return a dict by agent id"):
        by_name(Stacked(Roster()))
    with pytest.raises(UsageError, match="11 observations for the 12 agents"):
        by_name(Short(Roster()))
