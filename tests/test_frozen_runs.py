"""Runs with frozen agents: they keep what these act by, and need no other run afterwards."""

import json
import shutil

import jax
import numpy as np
import pytest
from frozen_cases import SIZES, actions, fresh_policy, move_on, source, two
from team_cases import (
    assert_identical,
    identical,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    small_team,
)

import marl
from marl import checkpoint, cli, config, experiment
from marl.envs.errors import UsageError
from marl.export import export
from marl.logging import read_rows

ENV = marl.make("toy/probe_both", num_agents=2)
STEPS = 16  # of one update


def against(run, **options):
    """PPO against a frozen agent of `run`."""
    overrides = {"agent_1": {"learner": "frozen", "run": str(run), **options}}
    return small_team(ENV, learning_rate=0.05, overrides=overrides)


def train(team, updates, **options):
    return marl.train(ENV, team, updates * STEPS, progress=False, **(SIZES | options))


def weights(run):
    return run.team.agent_state(run.state.team, "agent_1")


@pytest.fixture(scope="module")
def opponent(tmp_path_factory):
    return source(tmp_path_factory.mktemp("runs") / "opponent", small_team(ENV))


@pytest.fixture(scope="module")
def whole(opponent, tmp_path_factory):
    """Four updates in one go. Tests only read it."""
    return train(against(opponent.path), 4, out=tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture
def begun(tmp_path, whole):
    """Two updates against a run that is then gone."""
    run = source(tmp_path / "opponent", small_team(ENV))
    begun = train(against(run.path), 2, out=tmp_path / "begun")
    shutil.rmtree(run.path)
    assert_identical(weights(begun), weights(whole))
    return begun


def test_a_run_goes_on_exactly_when_the_other_one_is_gone(begun, whole):
    run = experiment.resume(begun.path, [f"training.total_steps={4 * STEPS}"], progress=False)
    assert_identical(run.state.team, whole.state.team)
    assert relative_difference(run.state.team, begun.state.team) > 0
    assert config.load(begun.path / "config.yaml").team.overrides["agent_1"]["run"] == str(
        begun.path.parent / "opponent"
    )


def test_a_run_is_loaded_played_and_exported_when_the_other_one_is_gone(begun, tmp_path):
    loaded = marl.load(begun.path)
    assert_identical(actions(loaded.policy()), actions(begun.policy()))
    assert_identical(weights(loaded), weights(begun))
    assert loaded.team.spec == begun.team.spec and loaded.team.hparams == begun.team.hparams
    assert str(begun.path.parent / "opponent") in loaded.team.describe()
    folder = export(loaded, tmp_path / "policy")
    arrays = np.load(folder / "policy.npz")
    given = {
        n.removeprefix("weights/"): arrays[n] for n in arrays.files if n.startswith("weights/")
    }
    act = jax.export.deserialize((folder / "stochastic.jaxfn").read_bytes()).call
    obs, _ = ENV.reset(jax.random.key(2))
    everyone = dict.fromkeys(ENV.agents, True)
    for seed in range(5):
        key = jax.random.key(seed)
        action, _ = act(given, jax.random.key_data(key), obs, {}, {}, everyone)
        assert_identical(action, begun.policy()(key, obs)[0])
    assert sum("actor.params" in name for name in given) == 4, "the frozen agent's are in it"


def test_what_is_kept_stays_when_the_other_run_moves_on(tmp_path):
    other = source(tmp_path / "other", small_team(ENV))
    run = train(against(other.path), 1, out=tmp_path / "run")
    move_on(other, seed=3)
    assert_identical(weights(marl.load(run.path)), weights(run))
    newest = fresh_policy(against(other.path))
    assert not identical(weights(run), newest.state[1])
    # also where the team is made anew, in Python
    again = train(against(other.path), 2, resume=run.path)
    assert_identical(weights(again), weights(run))


def test_the_folder_of_a_policy_can_be_given_for_the_run(whole, opponent):
    folder = whole.path / "frozen" / "agent_1"
    team = against(folder)
    assert_identical(fresh_policy(team).state[1], jax.tree.map(lambda x: x[None], weights(whole)))
    assert team.spec == whole.team.spec
    for options in ({"agent": "agent_1"}, {"best": True, "seed": 3}):
        assert against(folder, **options).hparams == team.hparams
    assert against(folder, greedy=True).spec.agents[1].config.greedy
    with pytest.raises(UsageError, match="the policy of agent_1, not 'agent_0'"):
        against(folder, agent="agent_0")
    with pytest.raises(UsageError, match="observation space of agent_1 there is Box"):
        marl.team(marl.make("toy/heterogeneous"), "frozen", run=str(folder))


def test_an_agent_that_was_frozen_there_too(whole, opponent):
    """And the learner beside it, though the run that it played against plays no part any more."""
    team = marl.team(ENV, "frozen", run=str(whole.path))
    found = actions(fresh_policy(team), 20)
    assert_identical(found, actions(whole.policy(), 20))
    assert [group.shape for group in team.lifted.groups] == [(2, 1)], "of one learner and config"
    text = team.describe()
    for agent in ENV.agents:
        assert f"policy        {agent}: {agent} of {whole.path} at step {4 * STEPS} (ppo)" in text
    frozen_before = marl.team(ENV, "frozen", run=str(opponent.path), greedy=True)
    assert "(ppo, greedy)" in frozen_before.describe()


def test_what_was_greedy_there_stays_greedy(opponent, tmp_path):
    run = source(tmp_path / "run", against(opponent.path, greedy=True))
    for path in (run.path, run.path / "frozen" / "agent_1"):
        assert marl.team(ENV, "frozen", run=str(path)).spec.agents[1].config.greedy
    assert not marl.team(ENV, "frozen", run=str(run.path)).spec.agents[0].config.greedy


def test_a_run_in_memory_keeps_them_once_it_is_saved(opponent, tmp_path):
    run = train(against(opponent.path), 1)
    run.save(tmp_path / "saved")
    assert_identical(weights(marl.load(tmp_path / "saved")), weights(run))


def test_several_seeds_play_against_the_same_policy(opponent, tmp_path):
    run = train(against(opponent.path), 1, num_seeds=2, out=tmp_path / "run")
    one = weights(train(against(opponent.path), 1))
    for seed in (0, 1):
        found = run.team.agent_state(run.weights(seed).team, "agent_1")
        assert_identical(found, one)
        assert_identical(run.team.agent_state(run.weights(seed, best=True).team, "agent_1"), one)
    loaded = marl.load(run.path)
    assert_identical(actions(loaded.policy(seed=1)), actions(run.policy(seed=1)))


def test_copies_that_are_damaged_or_gone_are_missed(begun):
    folder = begun.path / "frozen" / "agent_1"
    arrays = checkpoint.latest(folder) / checkpoint.ARRAYS
    arrays.write_bytes(arrays.read_bytes()[:-10])
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(UsageError) as error:
        marl.load(begun.path)
    assert "agent_1 cannot be frozen" in str(error.value) and str(folder) in str(error.value)
    shutil.rmtree(begun.path / "frozen")
    with pytest.raises(UsageError, match="agent_1 cannot be frozen .* there is no folder"):
        marl.load(begun.path)


TINY = (
    "env=toy/probe_both",
    "env.kwargs.num_agents=2",
    "training.num_envs=2",
    "training.rollout_length=8",
    "training.log_interval=1",
    "evaluation.episodes=2",
    "team.learner.hidden_sizes=[8]",
    "team.learner.num_minibatches=1",
)


def test_the_command_line_trains_against_a_run_and_goes_on_without_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    source(tmp_path / "runs" / "prey", two())
    override = ["team.overrides.*_1.learner=frozen", "team.overrides.*_1.run=runs/prey"]
    arguments = ["mappo", *TINY, *override, "training.total_steps=16"]
    assert cli.main(["describe", *arguments]) == 0
    assert "policy        agent_1: agent_1 of runs/prey at step 0 (ppo)" in capsys.readouterr().out
    assert cli.main(["train", *arguments, "--out", "runs/new", "--quiet"]) == 0
    assert config.load("runs/new/config.yaml").team.overrides["*_1"] == {
        "learner": "frozen",
        "run": "runs/prey",
    }
    shutil.rmtree("runs/prey")
    assert cli.main(["train", "--resume", "runs/new", "training.total_steps=32", "--quiet"]) == 0
    assert [row["env_steps"] for row in read_rows(tmp_path / "runs/new/metrics.jsonl")] == [16, 32]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["eval", "../runs/new", "--episodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["greedy"]["episodes"] == 2
    assert cli.main(["train", *arguments, "--out", "other", "--quiet"]) == 2
    assert "cannot be frozen from run = 'runs/prey'" in capsys.readouterr().err


@pytest.mark.slow
def test_maddpg_trains_against_frozen_prey(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source(tmp_path / "runs" / "prey", experiment.build(config.load("iddpg"))[1])
    small = ["training.num_envs=2", "training.total_steps=64", "evaluation.episodes=2"]
    small += [
        "team.replay.batch_size=4",
        "team.replay.learning_starts=8",
        "training.log_interval=4",
    ]
    override = ["team.overrides.agent_*.learner=frozen", "team.overrides.agent_*.run=runs/prey"]
    assert cli.main(["train", "maddpg", *small, *override, "--out", "runs/new", "--quiet"]) == 0
    row = read_rows(tmp_path / "runs/new/metrics.jsonl")[-1]
    assert np.isfinite(row["critic_loss/adversary_0"])
    assert not any("loss/agent_0" in name for name in row)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["team.overrides.*_1.learner=frosen"], "did you mean 'frozen'"),
        (["team.overrides.*_1.learner=frozen"], "agent_1 is frozen and has no run"),
        (
            ["team.overrides.*_1.learner=frozen", "team.overrides.*_1.rum=x"],
            "did you mean 'team.overrides.*_1.run'",
        ),
        (["team.learner=frozen", "team.learner.best=3"], "true or false"),
    ],
)
def test_mistakes_on_the_command_line(settings, expected, capsys):
    tiny = TINY[:2] if "team.learner=frozen" in settings else TINY
    assert cli.main(["describe", "ippo", *tiny, *settings]) == 2
    assert expected in capsys.readouterr().err


def test_predators_of_one_algorithm_train_against_prey_of_another_run(
    tmp_path, monkeypatch, capsys
):
    """The line of the documentation, as far as compiling."""
    monkeypatch.chdir(tmp_path)
    loaded = config.load("iddpg")
    source(tmp_path / "runs" / "prey", experiment.build(loaded)[1])
    override = ["team.overrides.agent_*.learner=frozen", "team.overrides.agent_*.run=runs/prey"]
    assert cli.main(["describe", "maddpg", *override]) == 0
    out = capsys.readouterr().out
    assert "agent_0: agent_0 of runs/prey at step 0 (ddpg)" in out
    assert "adversary_0, adversary_1, adversary_2, agent_0 (one input for all) and the" in out
