"""Learners on replay in teams: equal results, mixed teams, faults and refusals."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from off_policy_cases import KINDS, ONE_STEP, TOLERANCE, small
from team_cases import (
    SMOOTH,
    agent_states,
    all_finite,
    assert_identical,
    compiled,
    first_state,
    identical,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
)
from team_envs import Poisoned

import marl
from marl import groups
from marl.agents import ddpg, dqn, ppo, sac, td3
from marl.envs.errors import NotFinite, UsageError
from marl.envs.interface import AutoReset

# Vmapped groups, and the same as a loop


def outcome(team, num_envs, length):
    """By agent: initial states, actions of the first rollout, states after 1 and 5 updates."""
    trainer = compiled(team, num_envs, length)
    start = first_state(team, trainer)
    found = {"initial": agent_states(team, jax.tree.map(jnp.copy, start.team))}
    state, _ = trainer.chunk(start, 1)
    rows = state.replay.experience["steps"]
    found["actions"] = {
        agent: groups.unstack(group, jnp.moveaxis(steps.action, (2, 3), (0, 1)))[position]
        for group, steps in zip(team.lifted.groups, rows, strict=True)
        for position, agent in enumerate(team.agents)
        if position in group.positions
    }
    found["after 1"] = agent_states(team, jax.tree.map(jnp.copy, state.team))
    state, metrics = trainer.chunk(state, 4)
    found["after 5"] = agent_states(team, jax.tree.map(jnp.copy, state.team))
    assert all_finite(jax.tree.map(lambda x: x[:4], metrics.learner))
    return found


def assert_equal(one, other, agents=None):
    """As the design defines it."""
    for agent in one["initial"] if agents is None else agents:
        assert_identical(one["initial"][agent], other["initial"][agent])
        assert_identical(one["actions"][agent], other["actions"][agent])
        assert len(np.unique(one["actions"][agent])) > 1
        for when in ("after 1", "after 5"):
            assert relative_difference(one[when][agent], other[when][agent]) <= TOLERANCE, when
            assert not identical(one[when][agent], one["initial"][agent])


@pytest.mark.slow
def test_vmapped_centralised_critics_equal_the_same_team_as_a_loop():
    """MASAC of three alike agents: contexts of vmapped agents have an axis of agents."""
    env = marl.make("toy/probe_continuous", num_agents=3)
    sizes = ONE_STEP | {"updates_per_rollout": 2, "batch_size": 32}
    vmapped, looped = (
        small(env, sac, critic="all", vectorise=vectorise, replay=sizes, **SMOOTH)
        for vectorise in (True, False)
    )
    assert [len(team.lifted.groups) for team in (vmapped, looped)] == [1, 3]
    assert_equal(outcome(vmapped, 4, 8), outcome(looped, 4, 8))


@pytest.mark.slow
def test_vmapped_dqn_equals_the_same_team_as_a_loop():
    """DQN as it comes, but for Adam's epsilon."""
    tag = marl.make("jaxmarl/MPE_simple_tag_v3")
    sizes = {"learning_starts": 0, "batch_size": 64, "capacity": 1000}
    vmapped, looped = (
        marl.team(tag, dqn, vectorise=vectorise, replay=sizes, **SMOOTH)
        for vectorise in (True, False)
    )
    assert [len(team.lifted.groups) for team in (vmapped, looped)] == [2, 4]
    assert_equal(outcome(vmapped, 4, 32), outcome(looped, 4, 32))


# Mixed teams

PAIR = marl.make("toy/probe_both", num_agents=2)  # the agents do not interact
PPO = {"learner": ppo, "hidden_sizes": (8,), "num_epochs": 2, "num_minibatches": 2} | SMOOTH
DQN = {"learner": dqn, "hidden_sizes": (8,)} | SMOOTH


@pytest.fixture(scope="module")
def pairs():
    """What became of PPO and DQN side by side, and of each with its like."""

    def of(*options):
        overrides = dict(zip(PAIR.agents, options, strict=True))
        sizes = ONE_STEP | {"updates_per_rollout": 2} if DQN in options else {}
        team = marl.team(PAIR, ppo, overrides=overrides, replay=sizes, vectorise=False)
        return outcome_of_pair(team)

    return of(PPO, DQN), of(PPO, PPO), of(DQN, DQN)


def outcome_of_pair(team):
    trainer = compiled(team, 4, 4)
    state, _ = trainer.chunk(first_state(team, trainer), 1)
    one = agent_states(team, jax.tree.map(jnp.copy, state.team))
    state, _ = trainer.chunk(state, 4)
    return one, agent_states(team, jax.tree.map(jnp.copy, state.team))


def test_agents_learn_beside_others_as_they_do_among_their_like(pairs):
    """Every learner takes its slice of one rollout, or of one sample, whoever else is there."""
    mixed, of_ppo, of_dqn = pairs
    for when in range(2):  # after 1 and after 5 updates
        for agent, alike in zip(PAIR.agents, (of_ppo, of_dqn), strict=True):
            assert relative_difference(mixed[when][agent], alike[when][agent]) <= TOLERANCE
    assert not identical(mixed[0]["agent_0"], mixed[1]["agent_0"])
    assert mixed[0]["agent_1"].steps == 2 and mixed[1]["agent_1"].steps == 10


@pytest.mark.slow
def test_learners_of_every_kind_learn_in_one_environment():
    """DQN on bytes, PPO on a dict of actions, SAC on integers with a critic that reads them all."""
    env = marl.make("toy/heterogeneous")
    tiny = {"hidden_sizes": (4,)}
    overrides = {
        "scout_*": {"learner": dqn, "image_encoder": "flatten"} | tiny,
        "pilot": {"learner": ppo, "num_minibatches": 1, "num_epochs": 1} | tiny,
        "crew": {"learner": sac, "critic": ["self", "scout_*", "pilot"]} | tiny,
    }
    overrides["crew"]["image_encoder"] = "flatten"
    team = marl.team(env, ppo, overrides=overrides, replay=ONE_STEP | {"learning_starts": 24})
    crew = team.lifted.groups[-1]
    assert crew.contexts == ((0, 1, 2),)
    trainer = compiled(team, 4, 4)
    start = first_state(team, trainer)
    before = agent_states(team, jax.tree.map(jnp.copy, start.team))
    state, metrics = trainer.chunk(start, 1)
    after = agent_states(team, jax.tree.map(jnp.copy, state.team))
    # PPO does not wait for the others
    moved = {agent: not identical(before[agent], after[agent]) for agent in team.agents}
    assert moved == {"scout_0": False, "scout_1": False, "pilot": True, "crew": False}
    state, metrics = trainer.chunk(state, 3)
    metrics = jax.tree.map(lambda x: x[:3], metrics)
    for agent, own in agent_states(team, state.team).items():
        assert not identical(own, before[agent])
    assert all_finite((state.team, metrics.learner)) and all(map(np.all, metrics.finite))


# What is not finite


@pytest.mark.parametrize(
    ("learner", "critic", "learning_starts"),
    [
        (dqn, "self", 0),
        (sac, "all", 10**6),  # it is not read yet
        pytest.param(sac, "all", 0, marks=pytest.mark.slow),
    ],
)
def test_stop_names_agent_quantity_and_step(learner, critic, learning_starts, tmp_path):
    env = AutoReset(Poisoned(at=37))
    sizes = ONE_STEP | {"learning_starts": learning_starts}
    team = small(env, learner, critic=critic, replay=sizes)
    numbers = dict(num_envs=2, rollout_length=8, log_interval=2, eval_episodes=2, progress=False)
    out = tmp_path / "run"
    with pytest.raises(NotFinite, match="observation of agent_1 is not finite at step 37 "):
        marl.train(env, team, 2 * 8 * 8, out=out, checkpoint_interval=1, **numbers)
    failure = json.loads((out / "failure.json").read_text())
    assert failure["agents"] == ["agent_1"] and failure["step"] == 37
    restored = marl.load(out, env=env, team=team)
    assert restored.env_steps == 2 * 8 * 4 and all_finite(restored.weights().team)


# Refusals


@pytest.mark.parametrize(
    ("env", "learner", "options", "words"),
    [
        (PAIR, dqn, {"critic": "all"}, ("'dqn'", "agent_0", "no critic", "critic = all", "sac")),
        (PAIR, dqn, {"critic": "state"}, ("critic = 'state'", "global state")),
        (KINDS, dqn, {}, ("'dqn'", "Discrete", "sac")),
        (PAIR, td3, {}, ("td3", "Box", "Discrete", "sac")),
        (PAIR, ddpg, {}, ("ddpg", "Box", "Discrete", "sac")),
        (KINDS, sac, {"critic": "green"}, ("critic = 'green'", "red_0", "blue")),
    ],
)
def test_what_does_not_fit_a_learner_is_refused_at_build_time(env, learner, options, words):
    with pytest.raises(UsageError) as error:
        marl.team(env, learner, **options)
    for word in words:
        assert word in str(error.value)
