"""Frozen policies: they act as they did where they were trained, in groups, and never learn."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frozen_cases import actions, fresh_policy, move_on, put_apart_best, source, two
from off_policy_cases import KINDS, small, some
from team_cases import (
    agent_states,
    assert_identical,
    compiled,
    identical,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    small_team,
    trained,
)
from team_envs import shift

import marl
from marl import evaluation, learning, program
from marl.agents.learner import ActInput
from marl.envs.errors import UsageError

MIXED = marl.make("toy/heterogeneous")  # scout_0, scout_1, pilot, crew
FOUR = marl.make("toy/probe_both", num_agents=4)
NORMALISED = {"normalize_observations": True, "image_encoder": "flatten"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Two seeds of three kinds; the scouts act with one parameter set, and know who they are."""
    team = small_team(MIXED, sharing="group", **NORMALISED)
    return source(tmp_path_factory.mktemp("runs") / "shared", team, num_seeds=2)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Four equal agents with parameters of their own."""
    return source(tmp_path_factory.mktemp("runs") / "own", small_team(FOUR))


def frozen(run: Any, env: Any = None, **options: Any) -> Any:
    """A team of nothing but frozen agents."""
    return marl.team(run.team.env if env is None else env, "frozen", run=str(run.path), **options)


def of(pattern: str, run: Any, **options: Any) -> dict[str, Any]:
    """Overrides by which some agents are frozen."""
    return {pattern: {"learner": "frozen", "run": str(run.path), **options}}


@pytest.mark.parametrize("mode", evaluation.MODES)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_acts_as_in_its_run_bit_for_bit(shared, mode, seed):
    team = frozen(shared, seed=seed)
    expected = actions(shared.policy(greedy=mode == "greedy", seed=seed))
    assert_identical(actions(fresh_policy(team, mode)), expected)
    other = actions(shared.policy(greedy=mode == "greedy", seed=1 - seed))
    assert not identical(expected, other)


def test_greedy_is_by_the_mode_wherever_it_acts(shared):
    team = frozen(shared, greedy=True)
    expected = actions(shared.policy(greedy=True))
    for mode in evaluation.MODES:
        assert_identical(actions(fresh_policy(team, mode)), expected)
    assert not identical(actions(fresh_policy(frozen(shared))), expected)


def test_the_best_weights_are_those_of_the_best_evaluation(shared):
    put_apart_best(shared, seed=1)
    last, best = (fresh_policy(frozen(shared, seed=1, best=best)) for best in (False, True))
    assert_identical(actions(best), actions(shared.policy(seed=1, best=True)))
    assert not identical(actions(best), actions(last))


def test_an_agent_acts_as_another_one_with_that_one_s_id(shared):
    team = frozen(shared, overrides={"scout_0": {"agent": "scout_1"}})
    policy = fresh_policy(team, "greedy")
    ids = [np.asarray(team.agent_state(policy.state, f"scout_{i}").agent_id) for i in (0, 1)]
    np.testing.assert_array_equal(ids, [[0, 1], [0, 1]])
    keys = jax.random.split(jax.random.key(1), 50)
    obs, _ = jax.vmap(MIXED.reset)(keys)
    image = jax.random.randint(keys[1], (50, 3, 3, 1), 0, 3).astype(jnp.uint8)
    seen = {"constant": 3 * jax.random.normal(keys[0], (50, 1)), "image": image}
    obs |= {"scout_0": seen, "scout_1": seen}
    found, known = (jax.vmap(p)(keys, obs)[0] for p in (policy, shared.policy(greedy=True)))
    np.testing.assert_array_equal(found["scout_0"], known["scout_1"])
    assert np.any(np.asarray(known["scout_0"]) != known["scout_1"])


def test_sharing_and_a_critic_of_the_team_do_not_reach_it(shared):
    team = small_team(
        MIXED, sharing="group", critic="all", overrides=of("scout_*", shared), **NORMALISED
    )
    assert [group.shape for group in team.lifted.groups][0] == (2, 1)
    assert team.spec.agents[0].scope == ("self",) and len(team.spec.agents[2].scope) == 4
    with pytest.raises(UsageError, match="take scout_1 out of sharing.scouts"):
        small_team(MIXED, sharing={"scouts": ["scout_*"]}, overrides=of("scout_1", shared))


def test_agents_that_shared_without_ids_get_none(tmp_path):
    run = source(tmp_path / "run", two(sharing="group", agent_ids=False))
    policy = fresh_policy(frozen(run))
    assert policy.state[0].agent_id == ()
    assert_identical(actions(policy, 20), actions(run.policy(), 20))


def test_what_acting_does_not_read_stays_behind(shared):
    team = frozen(shared)
    names = list(fresh_policy(team).state[0].weights)
    assert any("actor.params" in name for name in names)
    assert any("statistics" in name for name in names)
    assert not any(word in name for name in names for word in ("critic", "optimizer", "value"))


@pytest.mark.parametrize(
    ("learner", "options"),
    [("dqn", {}), ("pqn", {}), ("a2c", {}), ("sac", {}), ("ppo", {"shared_network": True})],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_learners_of_all_kinds_can_be_frozen(learner, options, tmp_path):
    run = source(tmp_path / "run", two(learner=learner, **options))
    for mode in evaluation.MODES:
        found = actions(fresh_policy(frozen(run), mode), 20)
        assert_identical(found, actions(run.policy(greedy=mode == "greedy"), 20))


def test_exploration_is_at_the_end_of_its_schedule(tmp_path):
    """Epsilon goes from 1 to 0: in a first rollout a frozen DQN is greedy already."""
    run = source(tmp_path / "run", two(learner="dqn", epsilon_start=1.0, epsilon_end=0.0))
    team = frozen(run)
    group, state = team.lifted.groups[0], fresh_policy(team).state[0]
    obs = jax.random.normal(jax.random.key(1), (2, 1, 50, 1))
    keys = jax.random.split(jax.random.key(0), (2, 1))
    inputs = ActInput(obs, None, (), jnp.zeros(50, bool), env_steps=jnp.float32(0))
    outs = [
        learning.act_group(
            group, mode, keys, state, inputs, program.floats(team.group_hparams())[0]
        )
        for mode in ("act", "act_greedy")
    ]
    assert_identical(outs[0].action, outs[1].action)
    assert len(np.unique(outs[0].action)) > 1


def test_a_group_is_vmapped_and_equals_the_loop(own):
    three = of("agent_0,agent_1,agent_2", own)
    teams = [small_team(FOUR, overrides=three, vectorise=vectorise) for vectorise in (True, False)]
    assert [group.shape for group in teams[0].lifted.groups] == [(3, 1), (1, 1)]
    assert len(teams[1].lifted.groups) == 4
    ends = []
    for team in teams:
        state, metrics = trained(team, compiled(team), 3)
        ends.append((agent_states(team, state.team), metrics.episodes))
    assert_identical(ends[0][0]["agent_0"], ends[1][0]["agent_0"])
    assert relative_difference(ends[0][0], ends[1][0]) < 1e-5
    np.testing.assert_array_equal(ends[0][1].returns, ends[1][1].returns)


def test_it_never_learns_while_the_others_do(own):
    team = small_team(FOUR, learning_rate=0.1, overrides=of("agent_0", own) | of("agent_2", own))
    trainer = compiled(team)
    before = fresh_policy(team).state
    state, metrics = trained(team, trainer, 3)
    frozen_group, others = state.team
    assert_identical(frozen_group, before[0])
    assert_identical(
        team.agent_state(state.team, "agent_2"), jax.tree.map(lambda x: x[1], before[0])
    )
    assert relative_difference(others.actor.params, before[1].actor.params) > 0.1
    assert metrics.learner[0] == {} and np.all(metrics.finite[0])


def test_another_checkpoint_acts_otherwise_and_compiles_nothing(own, tmp_path):
    run = source(tmp_path / "run", small_team(FOUR), seed=5)
    first = frozen(run)
    before = actions(fresh_policy(first), 20)
    move_on(run, seed=6)
    second = frozen(run)
    after = actions(fresh_policy(second), 20)
    assert not identical(before, after)
    assert_identical(after, actions(run.policy(), 20))
    assert_identical(actions(fresh_policy(first), 20), before)
    assert first.spec == second.spec and first.hparams != second.hparams
    assert compiled(first) is compiled(second)
    league = marl.team(FOUR, "frozen", run=str(own.path), overrides=of("agent_1", run))
    assert [group.shape for group in league.lifted.groups] == [(4, 1)]


def test_masks_reach_it(tmp_path):
    """Action 0 is never legal. The environment is an object without an id."""
    env = shift()
    run = source(tmp_path / "run", small_team(env))
    found = actions(fresh_policy(frozen(run)), 30)
    assert_identical(found, actions(run.policy(), 30))
    assert {int(a) for x in found.values() for a in x} == {1, 2}


MEMORY = '''
from dataclasses import dataclass
from typing import NamedTuple
import jax.numpy as jnp
from marl.agents.learner import ActOutput, Learner

@dataclass(frozen=True)
class Config:
    pass

class Hparams(NamedTuple):
    start: float = 1.0

def make(config, observation_space, action_space, critic_space):
    """Acts 0, 1, 0, 1, ... from where its state says, and remembers in floats."""
    def act(key, state, inputs, hparams):
        action = (inputs.memory + state["start"]).astype(jnp.int32) % 2
        return ActOutput(action, inputs.memory + 1, ())
    def init(key, hparams):
        return {"start": hparams.start * 1.0, "unused": jnp.zeros(3)}
    return Learner(init, lambda n: jnp.zeros(n), act, act, lambda k, s, e, h: (s, {}))
'''


def test_memory_passes_through(tmp_path, monkeypatch):
    (tmp_path / "counting_learner.py").write_text(MEMORY)
    monkeypatch.syspath_prepend(tmp_path)
    env = marl.make("toy/probe_both", num_agents=2)
    run = source(tmp_path / "run", marl.team(env, "counting_learner"))
    run.state = run.state._replace(
        team=({"start": jnp.asarray([0.0, 1.0]), "unused": jnp.zeros((2, 3))},)
    )
    run.checkpoint(keep=1)
    run.finish()
    policy = fresh_policy(frozen(run))
    assert list(policy.state[0].weights) == [".state['start']"]
    obs, _ = env.reset(jax.random.key(0))
    memory, played = policy.initial_memory(), []
    for _ in range(3):
        action, memory = policy(jax.random.key(0), obs, memory)
        played.append([int(action["agent_0"]), int(action["agent_1"])])
    assert played == [[0, 1], [1, 0], [0, 1]]


def test_joint_critics_read_what_it_would_do_next(tmp_path):
    """A frozen DDPG's next action is what it does, noise and all, not what its target would do."""
    run = source(tmp_path / "run", small(KINDS, "ddpg", sharing={"reds": ["red_*"]}))
    team = small(KINDS, "ddpg", critic="all", overrides=of("blue", run))
    states, rollout = some(team)
    key, built, hparams = jax.random.key(3), team.lifted.groups, team.group_hparams()
    index = next(i for i, group in enumerate(built) if group.positions == (1,))
    assert built[1 - index].contexts[0] == (1, 2)
    found = learning.next_actions(team.spec, built, key, states, rollout, hparams)[1]
    obs = rollout.final_obs[index][:, 0, 0].reshape(6, 3)
    inputs = ActInput(obs, None, (), jnp.zeros(6, bool))
    state, own_key = jax.tree.map(lambda x: x[0], states[index]), jax.random.fold_in(key, 1)
    acted = built[index].learner.act(own_key, state, inputs, ()).action
    np.testing.assert_allclose(found.reshape(6, 2), acted, rtol=1e-5)
    assert not any("target" in name for name in state.weights)
    assert (
        relative_difference(acted, built[index].learner.act_greedy(key, state, inputs, ()).action)
        > 0
    )


BAD = {
    "no run": ({}, ["agent_0 is frozen and has no run", "learner: frozen, run: runs/prey"]),
    "no such folder": (
        {"run": "runs/nowhere"},
        ["agent_0 cannot be frozen from run = 'runs/nowhere'", "there is no folder /", "give the"],
    ),
    "not a run": ({"run": "."}, ["is not a run directory", "config.yaml"]),
    "not a policy": ({"run": "RUN/checkpoints"}, ["holds no policy; give the directory of a run"]),
    "no such agent": (
        {"run": "RUN", "agent": "agent_9"},
        ["has no agent 'agent_9'", "did you mean 'agent_", "choose from agent_0, agent_1"],
    ),
    "no such seed": ({"run": "RUN", "seed": 1}, ["seed = 1 is out of range; that run has 1"]),
    "negative seed": ({"run": "RUN", "seed": -1}, ["seed = -1 is out of range"]),
    "nothing was best": ({"run": "RUN", "best": True}, ["no best weights of seed 0"]),
    "no such option": ({"run": "RUN", "gredy": True}, ["'gredy'", "did you mean 'greedy'"]),
    "not a word": ({"run": 3}, ["run = 3 is a int; give a str"]),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_frozen_is_refused(name, own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, expected = BAD[name]
    given = {
        key: value.replace("RUN", str(own.path)) if isinstance(value, str) else value
        for key, value in options.items()
    }
    with pytest.raises(UsageError) as error:
        small_team(FOUR, overrides={"agent_0": {"learner": "frozen", **given}})
    for text in expected:
        assert text in str(error.value)


def test_other_spaces_are_refused(own, shared, tmp_path):
    with pytest.raises(UsageError) as error:
        small_team(MIXED, overrides=of("pilot", own, agent="agent_0"))
    for text in (
        "observation space of agent_0 there is Box(shape=(1,)",
        "of pilot here Box(shape=(3,)",
    ):
        assert text in str(error.value)
    env = marl.make("toy/roster", names=("a", "b"))
    run = source(tmp_path / "run", small_team(env))
    assert frozen(run, marl.make("toy/roster", names=("a", "b", "c")), agent="a").agents == (
        "a",
        "b",
        "c",
    )
    continuous = marl.make("toy/probe_continuous", num_agents=1)
    with pytest.raises(
        UsageError, match=r"action space of a there is Discrete\(n=2.*agent_0 here Box"
    ):
        frozen(run, continuous, agent="a")


def test_what_nobody_can_make_again_is_refused(tmp_path):
    env = marl.make("toy/probe_both", num_agents=2)
    ready = marl.team(env, "random").lifted.groups[0].learner
    run = source(tmp_path / "run", marl.team(env, ready))
    with pytest.raises(UsageError, match=r"a learner object \(Learner\) that has no name"):
        frozen(run)
