"""Known optima: independent PPO finds them in 5 of 5 seeds, vmapped in one program each.

Returns are those of the stochastic policy in the last rollouts, values those of its critic.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    bound,
    compiled,
    first_state,
    quick_compilation,  # noqa: F401 (a fixture)
)
from team_envs import SideBySide

import marl
from marl.agents import ppo
from marl.agents.learner import CriticSpace
from marl.envs.interface import AutoReset, TimeStep
from marl.envs.probes import KINDS, Probe
from marl.envs.spaces import Box, Discrete

NUM_SEEDS = 5
COMMON = {
    "hidden_sizes": (16,),
    "learning_rate": 0.01,
    "gamma": 0.9,
    "num_epochs": 4,
    "num_minibatches": 1,
}
OPTIONS = COMMON | {"entropy_coef": 0.0}


def learn(env, updates, num_envs=16, rollout_length=8, learner="ppo", **options):
    """The team, its state [seeds, ...], and returns [seeds] by agent of the last tenth."""
    team = marl.team(env, learner, **(OPTIONS | options))
    return team, *learned(team, updates, num_envs, rollout_length)


def learned(team, updates, num_envs=16, rollout_length=8):
    """Of a team, its state [seeds, ...], and returns [seeds] by agent of the last tenth."""
    sizes = {"num_seeds": NUM_SEEDS, "max_updates": updates}
    trainer = compiled(team, num_envs, rollout_length, **sizes)
    state, metrics = trainer.chunk(first_state(team, trainer), updates)
    late = jax.tree.map(lambda x: np.asarray(x[-updates // 10 :]).sum(0), metrics.episodes)
    returns = late.returns / late.finished[:, None]
    return state, {agent: returns[:, i] for i, agent in enumerate(team.agents)}


def values(team, state, agent, obs):
    """[seeds, len(obs)]: of the agent's critic, whose input is `obs` [len(obs), ...]."""
    position = team.agents.index(agent)
    for group, group_state in zip(team.lifted.groups, state.team, strict=True):
        for index, members in enumerate(group.sets):
            if position in members:
                own = jax.tree.map(lambda x, i=index: x[:, i], group_state)
                critic_obs = (jnp.asarray(obs, jnp.float32),)
                return np.asarray(jax.vmap(group.learner.value, (0, None))(own, critic_obs))
    raise AssertionError(agent)


# By kind of probe: values by observation, and the best return; `memory` is below
PROBES = {
    "constant": ({0: 1.0}, 1.0),
    "observation": ({-1: -1.0, 1: 1.0}, None),
    "action": ({0: 1.0}, 1.0),
    "both": ({-1: 1.0, 1: 1.0}, 1.0),
    "delayed": ({0: 0.9, 1: 1.0}, 1.0),
    "continuous": ({-0.5: 0.0, 0.5: 0.0}, 0.0),
}


@pytest.fixture(scope="module")
def one_step():
    """The probes of one step, learned side by side."""
    kinds = [kind for kind, (length, _) in KINDS.items() if length == 1 and kind != "continuous"]
    return learn(AutoReset(SideBySide(tuple((kind, Probe(kind)) for kind in kinds))), 60)


@pytest.mark.parametrize("kind", PROBES)
def test_probe(kind, request):
    if kind in ("delayed", "continuous"):
        updates = 200 if kind == "continuous" else 60
        agent, found = "agent_0", learn(marl.make(f"toy/probe_{kind}"), updates)
    else:
        agent, found = kind, request.getfixturevalue("one_step")
    team, state, returns = found
    expected, best = PROBES[kind]
    value = values(team, state, agent, [[obs] for obs in expected])
    np.testing.assert_allclose(value, [list(expected.values())] * NUM_SEEDS, atol=0.05)
    if best is not None:
        assert np.all(returns[agent] >= best - 0.05)


MEMORIES = {
    "none": {},
    "gru": {"sequence_length": 4, "burn_in": 2},  # episodes of 3 steps begin anywhere in it
    "lstm": {},
}


ON_REPLAY = {"capacity": 2000, "batch_size": 64, "learning_starts": 128, "updates_per_rollout": 8}


@pytest.mark.parametrize("learner", ["ppo", "pqn", "dqn"])
@pytest.mark.parametrize("core", MEMORIES)
def test_memory(core, learner):
    """A cue in the first step, the decision in the third, which looks the same whatever it was.

    So without memory no policy's mean return is other than 0.
    """
    env, memory = marl.make("toy/probe_memory"), {"core": core, "core_size": 16, **MEMORIES[core]}
    greedy = {"epsilon_end": 0.0, "schedule_steps": 100 * 16 * 8, "exploration_fraction": 0.5}
    own = COMMON | {"ppo": {"entropy_coef": 0.0}, "pqn": greedy}.get(learner, {})
    if learner == "dqn":
        own = {name: COMMON[name] for name in ("hidden_sizes", "learning_rate", "gamma")} | greedy
        own |= {"tau": 0.05, "replay": ON_REPLAY}
        if core == "lstm":
            memory |= {"sequence_length": 6}
    found = marl.team(env, learner, **(own | memory))
    _, returns = learned(found, 150)
    if core == "none":
        assert np.all(np.abs(returns["agent_0"]) < 0.2)
    else:
        assert np.all(returns["agent_0"] >= 0.95)


def test_memory_in_one_network():
    env, memory = marl.make("toy/probe_memory"), {"core_size": 16, **MEMORIES["gru"]}
    own = COMMON | {"entropy_coef": 0.0, "shared_network": True, "core": "gru"}
    _, returns = learned(marl.team(env, "ppo", **(own | memory)), 150)
    assert np.all(returns["agent_0"] >= 0.95)


def test_cooperative_matrix_game():
    _, _, returns = learn(marl.make("toy/cooperative"), 60)
    for found in returns.values():
        assert found.shape == (NUM_SEEDS,) and np.all(found >= 0.95)


def test_heterogeneous():
    """Images, composites, MultiDiscrete and Box; agents of three kinds, 4 each at best.

    What comes next is drawn afresh in each step, so there is nothing to look forward to.
    """
    env = marl.make("toy/heterogeneous")
    options = {"image_encoder": "flatten", "num_minibatches": 4, "gamma": 0.0}
    team, _, returns = learn(env, 60, **options)
    assert len(team.lifted.groups) == 3
    for found in returns.values():
        assert np.all(found >= 0.95 * 4)


def test_values_of_a_dozen_agents_are_their_own():
    """Agent i always gets i: agents 10 and 11 too, whose names sort before agent 2's."""
    env = marl.make("toy/roster")
    team, state, returns = learn(env, 100, rollout_length=2, value_normalization="running")
    for i, agent in enumerate(env.agents):
        assert np.all(returns[agent] == i)
        np.testing.assert_allclose(values(team, state, agent, [[i]]), i, atol=0.05 * max(i, 1))


def test_a_truncated_return_goes_on():
    """Pays 1 for ever, cut after 2 steps: worth 1 / (1 - 0.9) = 10, or 1.45 if that ended it."""
    env = marl.make("toy/time_limit", limit=2)
    team, state, _ = learn(env, 250, rollout_length=4, gae_lambda=1.0)
    for agent in env.agents:
        np.testing.assert_allclose(values(team, state, agent, [[1.0]]), 10.0, rtol=0.05)


def test_action_masks():
    env = marl.make("toy/masked")
    _, _, returns = learn(env, 100, rollout_length=6)
    for found in returns.values():
        assert np.all(found >= 1.9)


def test_a_critic_of_the_global_state():
    """The coin shows in the global state [s, 1 - s] alone."""
    env = marl.make("toy/hidden")
    team, state, _ = learn(env, 60, critic="state")
    for agent in env.agents:
        found = values(team, state, agent, [[0, 1], [1, 0]])
        np.testing.assert_allclose(found, [[0.0, 1.0]] * NUM_SEEDS, atol=0.05)


@pytest.mark.parametrize("death", ["auto", pytest.param("terminal", marks=pytest.mark.slow)])
def test_who_dies_for_its_team_gets_the_prize(death):
    """The hero learns to die only if its return goes on without it."""
    env = marl.make("toy/sacrifice", wage=0.1)
    options = {"reward_teams": "all", "death": death, "critic": "state", "gamma": 0.99}
    _, _, returns = learn(env, 150, **options)
    if death == "auto":
        assert np.all(returns["friend"] >= 0.95 * 2)
    else:
        assert np.all(returns["friend"] <= 0.1)


# Users' own environments and learners


@dataclass(frozen=True)
class Bandit:
    """A single-agent environment, without `agents` or anything keyed: arm 1 of 3 pays."""

    observation_space = Box((2,), 0, 1)
    action_space = Discrete(3)

    def reset(self, key):
        return jnp.ones(2), jnp.zeros((), jnp.int32)

    def step(self, key, state, action):
        obs, yes, no = jnp.ones(2), jnp.ones((), bool), jnp.zeros((), bool)
        reward = (action == 1).astype(jnp.float32)
        timestep = TimeStep(
            obs=obs,
            reward=reward,
            terminated=yes,
            truncated=no,
            active=no,
            episode_over=yes,
            final_obs=obs,
            final_extras=(),
            info=(),
        )
        return timestep, state + 1


BANDIT = AutoReset(Bandit())


def test_a_single_agent_environment_and_a_learner_of_ones_own(tmp_path, monkeypatch):
    """By the names that a user gives them on the command line: a module of its own."""
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "my_learner.py").write_text("from marl.agents.ppo import Config, Hparams, make\n")
    monkeypatch.syspath_prepend(tmp_path)
    team, _, returns = learn(BANDIT, 60, learner="my_package.my_learner")
    assert team.agents == ("agent",)
    assert np.all(returns["agent"] >= 0.95)


def test_a_ready_learner():
    space = Bandit.observation_space
    config = ppo.Config(hidden_sizes=(8,), num_minibatches=1)
    learner = ppo.make(config, space, Bandit.action_space, CriticSpace((space,)))
    team = marl.team(BANDIT, bound(learner, ppo.Hparams(learning_rate=0.01)))
    trainer = compiled(team, max_updates=60)
    _, metrics = trainer.chunk(first_state(team, trainer), 60)
    early, late = (x.sum() for x in (metrics.episodes.returns[:5], metrics.episodes.returns[-5:]))
    assert late > 1.5 * early  # a fresh policy gets 1/3
