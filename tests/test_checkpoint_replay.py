"""Checkpoints with and without the replay buffer: sizes, and what resuming then is."""

import json
import shutil

import jax
import numpy as np
import pytest
from team_cases import (
    SMOOTH,
    assert_identical,
    identical,
    quick_compilation,  # noqa: F401 (a fixture)
)

import marl
from marl import checkpoint, cli, config, contents
from marl.agents import dqn, ppo, sac
from marl.envs.errors import UsageError
from marl.replay import Replay

ENV = marl.make("toy/probe_both", num_agents=2)
STEPS = 8  # of one update
SIZES = {"num_envs": 2, "rollout_length": 4, "log_interval": 1, "eval_episodes": 2}
# the third update is the first to learn
BUFFER = {"learning_starts": 20, "updates_per_rollout": 3, "batch_size": 8, "capacity": 6000}
OVERHEAD = 800  # bytes of an array's headers in a .npz, and of its name twice


def small(learner=dqn, **options):
    return marl.team(ENV, learner, **{"hidden_sizes": (8,), "replay": BUFFER} | SMOOTH | options)


def train(updates, team=None, **options):
    options = SIZES | {"progress": False, "checkpoint_interval": STEPS} | options
    return marl.train(ENV, small() if team is None else team, updates * STEPS, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four updates, with the buffer in their checkpoints and without it. Tests only read them."""
    folder = tmp_path_factory.mktemp("runs")
    often = {"keep_checkpoints": 9, "eval_interval": 2 * STEPS}
    return {
        keep: train(4, out=folder / f"replay_{keep}", checkpoint_replay=keep, **often)
        for keep in (True, False)
    }


@pytest.fixture
def without(runs, tmp_path):
    """A copy of the run whose checkpoints are without the buffer, which a test may change."""
    return shutil.copytree(runs[False].path, tmp_path / "run")


def newest(path):
    return checkpoint.latest(path / "checkpoints")


def manifest(path):
    return checkpoint.read_manifest(newest(path))


def arrays(path):
    with np.load(path / checkpoint.ARRAYS) as found:
        return {name: found[name] for name in found.files}


def buffer_size(run):
    return sum(x.nbytes for x in jax.tree.leaves(run.state.replay))


# What is written, and how large it is


def test_the_option_changes_nothing_that_is_trained(runs):
    assert_identical(runs[True].state, runs[False].state)
    best = [sorted((run.path / "best").rglob("step_*")) for run in runs.values()]
    assert len(best[0]) == 1
    for one, other in zip(*best, strict=True):
        assert one.name == other.name
        assert_identical(arrays(one), arrays(other))


def test_only_the_buffer_is_left_out(runs):
    whole, part = (arrays(newest(run.path)) for run in runs.values())
    assert {name for name in whole if not name.startswith("leaf.replay")} == set(part)
    for name in part:
        np.testing.assert_array_equal(whole[name], part[name])
    sizes = [(newest(run.path) / checkpoint.ARRAYS).stat().st_size for run in runs.values()]
    saved, num_arrays = sizes[0] - sizes[1], len(whole) - len(part)
    assert 0 <= saved - buffer_size(runs[True]) <= OVERHEAD * num_arrays
    assert buffer_size(runs[True]) > 5 * sizes[1]


@pytest.mark.parametrize("keep", [True, False])
def test_a_manifest_says_how_large_what_is(runs, keep):
    run = runs[keep]
    found = manifest(run.path)
    buffer = {"replay": buffer_size(run)}
    assert found["left_out"] == ({} if keep else buffer)
    assert found["bytes"].get("replay", 0) == (buffer["replay"] if keep else 0)
    weights = sum(x.nbytes for x in jax.tree.leaves(run.state.team))
    assert found["bytes"]["team"] == weights and found["bytes"]["update"] == 4
    assert found["bytes"]["key"] == jax.random.key_data(run.state.key).nbytes
    total = sum(found["bytes"].values())
    written = (newest(run.path) / checkpoint.ARRAYS).stat().st_size
    assert 0 <= written - total <= OVERHEAD * len(found["leaves"])
    summary = json.loads((run.path / "summary.json").read_text())
    replay = buffer["replay"] if keep else 0
    assert summary["checkpoint_bytes"] == {"total": total, "replay": replay}
    assert summary["resume_is_exact"] is keep


def test_a_team_without_a_buffer_has_nothing_to_leave_out(tmp_path, capsys):
    team = small(ppo, num_minibatches=1, num_epochs=1, replay={})
    train(1, team, out=tmp_path / "run", checkpoint_replay=False, progress=True)
    assert "checkpoint" not in capsys.readouterr().err
    assert manifest(tmp_path / "run")["left_out"] == {}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["checkpoint_bytes"]["replay"] == 0 and summary["resume_is_exact"]


def test_a_run_says_how_large_its_checkpoints_will_be(tmp_path, capsys):
    run = train(1, progress=True)
    assert "checkpoint" not in capsys.readouterr().err  # nothing is written
    total = sum(checkpoint.num_bytes(run.state).values())
    rest = contents.size(total - buffer_size(run))
    train(1, out=tmp_path / "whole", progress=True)
    assert (
        f"a checkpoint holds {contents.size(total)}, 252 kB of it the replay buffer; "
        "checkpoint.replay=false leaves that out\n"
    ) in capsys.readouterr().err
    train(1, out=tmp_path / "part", progress=True, checkpoint_replay=False)
    assert (
        f"a checkpoint holds {rest}, without the replay buffer (252 kB): resuming will not be exact"
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9_940, "9.9 kB"),
        (9_960, "10 kB"),
        (999_600, "1.0 MB"),
        (412_345_678, "412 MB"),
        (1.5e9, "1.5 GB"),
        (2e15, "2000 TB"),
    ],
)
def test_sizes_in_words(num_bytes, words):
    assert contents.size(num_bytes) == words


def test_anything_but_true_and_false_is_refused(tmp_path):
    with pytest.raises(UsageError, match="checkpoint_replay = 'no'; give True or False"):
        train(1, checkpoint_replay="no", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Resuming with the buffer


def test_resuming_a_mixed_team_gives_the_bits_of_an_uninterrupted_run(tmp_path):
    """Optimisers, targets, temperature, buffer and rows; windows of three steps."""
    overrides = {"agent_1": {"learner": ppo, "hidden_sizes": (8,), "num_minibatches": 2}}
    team = small(sac, critic="all", overrides=overrides, replay=BUFFER | {"n_step": 3})
    whole = train(6, team, out=tmp_path / "whole", keep_checkpoints=9)
    path = shutil.copytree(whole.path, tmp_path / "run")
    for later in sorted((path / "checkpoints").iterdir())[4:]:
        shutil.rmtree(later)
    resumed = train(6, team, out=path, resume=path)
    assert_identical(whole.state, resumed.state)
    assert_identical(arrays(newest(whole.path)), arrays(newest(path)))
    for one, other in zip(whole.metrics, resumed.metrics, strict=True):
        assert one | {"time/seconds": 0} == other | {"time/seconds": 0}


# Resuming without


def test_a_run_goes_on_without_its_buffer_and_says_so(runs, without, capsys):
    """Learning waits for as many transitions as at the start: until the third update."""
    before = runs[False].state
    run = train(8, out=without, resume=without, progress=True)
    assert (
        "resuming is not exact: the replay buffer (252 kB) was left out of the checkpoint. It "
        "starts empty, and learning from it goes on once it holds 20 transitions"
    ) in capsys.readouterr().err
    assert int(run.state.replay.current_index) == 4 * 4 and not bool(run.state.replay.is_full)
    losses = ["loss/agent_0" in row for row in run.metrics]
    assert losses == [False, False, True, True, False, False, True, True]
    assert run.state.team[0].steps.tolist() == [12, 12]
    assert not identical(run.state.team[0].network.params, before.team[0].network.params)
    assert manifest(without)["bytes"]["replay"] > 0  # by default it is kept
    resumed = train(9, out=without, resume=without, progress=True)
    assert "not exact" not in capsys.readouterr().err
    assert int(resumed.state.replay.current_index) == 5 * 4


def test_everything_else_is_restored(runs, without):
    """Before anything is learned anew, the team is the one that was saved."""
    run = train(5, out=without, resume=without, checkpoint_replay=False)
    assert_identical(run.state.team, runs[False].state.team)
    assert (
        run.updates == 5 and manifest(without)["left_out"] == manifest(runs[False].path)["left_out"]
    )
    rows = [row["env_steps"] for row in run.metrics]
    assert rows == [8, 16, 24, 32, 40]


def test_a_run_without_its_buffer_loads_and_is_saved_as_such(runs, tmp_path):
    run = marl.load(runs[False].path)
    assert run.state.replay == () and run.left_out == {"replay": buffer_size(runs[False])}
    assert_identical(run.weights(), runs[False].weights())
    assert run.evaluate(episodes=2)["greedy"] == runs[False].evaluate(episodes=2)["greedy"]
    path = run.save(tmp_path / "again")
    assert manifest(path)["left_out"] == run.left_out
    assert manifest(path)["bytes"] == manifest(runs[False].path)["bytes"]
    summary = json.loads((path / "summary.json").read_text())
    assert summary["checkpoint_bytes"]["replay"] == 0 and not summary["resume_is_exact"]
    assert train(6, out=path, resume=path).updates == 6


@pytest.mark.parametrize("keep", [True, False])
def test_saving_a_run_in_memory(runs, keep, tmp_path):
    path = train(4, checkpoint_replay=keep).save(tmp_path / "run")
    assert config.load(path / "config.yaml").checkpoint.replay is keep
    assert manifest(path)["left_out"] == manifest(runs[keep].path)["left_out"]
    loaded = marl.load(path)
    assert loaded.checkpoint_replay is keep
    if keep:
        assert_identical(loaded.state.replay, runs[True].state.replay)


def test_the_command_line_turns_it_off_and_on_again(runs, tmp_path, capsys):
    path = str(shutil.copytree(runs[True].path, tmp_path / "run"))
    longer = "training.total_steps=40"
    assert cli.main(["train", "--resume", path, longer, "checkpoint.replay=false"]) == 0
    err = capsys.readouterr().err
    assert "going on with training.total_steps=40 (was 32)" in err
    assert "checkpoint.replay=false (was true)" in err and "not exact" not in err
    assert "without the replay buffer" in err
    assert config.load(tmp_path / "run" / "config.yaml").checkpoint.replay is False
    assert manifest(tmp_path / "run")["left_out"]
    assert cli.main(["eval", path, "--episodes", "2"]) == 0
    assert cli.main(["export", path, "--out", str(tmp_path / "exported")]) == 0
    capsys.readouterr()
    on = ["training.total_steps=48", "checkpoint.replay=true"]
    assert cli.main(["train", "--resume", path, *on]) == 0
    err = capsys.readouterr().err
    assert "checkpoint.replay=true (was false)" in err and "resuming is not exact" in err
    assert manifest(tmp_path / "run")["left_out"] == {}


@pytest.mark.parametrize(
    ("sizes", "num_envs", "least"),
    [
        (Replay(learning_starts=20, capacity=100), 2, 20),
        (Replay(learning_starts=0, capacity=100, n_step=5), 3, 15),
        (Replay(learning_starts=1000, capacity=17), 2, 16),
    ],
)
def test_how_much_a_buffer_holds_when_it_is_learned_from(sizes, num_envs, least):
    assert sizes.least(num_envs) == least
