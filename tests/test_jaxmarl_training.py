"""Every JaxMARL environment that can be built here trains for two iterations."""

import jax
import numpy as np
import pytest
from team_cases import (
    all_finite,
    compiled,
    quick_compilation,  # noqa: F401 (a fixture)
    trained,
)

import marl
from marl import program
from marl.envs import registry
from marl.envs.suites.jaxmarl_table import TABLE

SIZES = {"num_envs": 2, "rollout_length": 4, "log_interval": 1, "eval_episodes": 1}
OPTIONS = {"hidden_sizes": (8,), "num_epochs": 1, "num_minibatches": 1}
# Those that also have to be right about something: integer rewards and observations, declared
# shapes that are wrong, one agent, agents that are not declared in alphabetical order.
NAMED = {
    "MPE_simple_tag_v3": "rewards int32 and float32",
    "overcooked": "observations uint8, declared with another shape",
    "coin_game": "observations int8",
    "switch_riddle": "observations int32",
    "MPE_simple_v3": "one agent",
    "MPE_simple_crypto_v3": "declared eve, alice, bob",
    "MPE_simple_speaker_listener_v4": "declared speaker, listener",
}
FAST = "MPE_simple_v3"


@pytest.fixture(autouse=True)
def forget_each(forget_programs):
    """Many large programs in one module: forget each after its test."""
    yield
    program.program.cache_clear()
    jax.clear_caches()


def two_iterations(name, **options):
    env = marl.make(f"jaxmarl/{name}")
    team = marl.team(env, "ppo", **(OPTIONS | options))
    state, metrics = trained(team, compiled(team, 2, 4, max_updates=2), 2)
    assert team.agents == tuple(env.agents)
    assert all_finite(state.team) and all_finite(metrics.learner)
    assert np.all(np.isfinite(metrics.episodes.returns))
    return team, state


def buildable():
    """Names with their marks; nothing is built while tests are collected."""
    unavailable = {entry.id for entry in registry.listing("jaxmarl") if entry.unavailable}
    for name in TABLE:
        marks = [] if name == FAST else [pytest.mark.slow]
        if f"jaxmarl/{name}" in unavailable:
            marks.append(pytest.mark.skip(reason="cannot be built here"))
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", list(buildable()))
def test_two_iterations(name):
    two_iterations(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_two_iterations_of_a_centralised_shared_team(name):
    """All observations joined, whatever their dtypes, and parameters shared where agents allow."""
    options = {"critic": ["self", "all"], "sharing": "group", "normalize_observations": True}
    team, _ = two_iterations(name, **options, reward_teams="all")
    assert {agent for group in team.lifted.groups for agent in group.positions} == set(
        range(len(team.agents))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SMAX", "HeuristicEnemySMAX"])
def test_two_iterations_with_the_global_state(name):
    """`world_state` stands among SMAX's observations: it is nobody's, and every critic's."""
    env = marl.make(f"jaxmarl/{name}", scenario="3m")
    team = marl.team(env, "ppo", critic="state", sharing="group", reward_teams="all", **OPTIONS)
    assert "world_state" not in team.agents and all(group.joint for group in team.lifted.groups)
    run = marl.train(env, team, 16, progress=False, **SIZES)
    assert all_finite(run.state.team)
    if name == "HeuristicEnemySMAX":
        assert 0 <= run.evaluations[-1]["greedy"]["success"] <= 1
