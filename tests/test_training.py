"""`marl.train`: rows, rounding, intervals, resuming, seeds, and how much leaves the program."""

import math
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    SMOOTH,
    all_finite,
    assert_identical,
    compiled,
    first_state,
    identical,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    small_team,
)

import marl
from marl import program
from marl.envs.errors import UsageError
from marl.logging import read_rows
from marl.settings import Settings
from marl.training import seed_keys

ENV = marl.make("toy/probe_both", num_agents=2)
STEPS = 8  # of one update
SHAPE = {"num_envs": 2, "rollout_length": 4}
SIZES = SHAPE | {"log_interval": 2, "eval_episodes": 2}
LINEAR = {"learning_rate": 1e-2, "learning_rate_schedule": "linear"}


def train(updates, team=None, **options):
    team = small_team(ENV, **LINEAR) if team is None else team
    return marl.train(ENV, team, updates * STEPS, **(SIZES | {"progress": False} | options))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six updates in one go, with a checkpoint and an evaluation every two. Tests only read it."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    often = {"eval_interval": 2 * STEPS, "checkpoint_interval": 2 * STEPS, "keep_checkpoints": 9}
    return train(6, out=out, **often)


def without_time(rows):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def test_rows_are_complete_and_finite(whole):
    assert [row["env_steps"] for row in whole.metrics] == [16, 32, 48]
    for row in whole.metrics:
        assert row["episodes"] == 16 and row["episode_length"] == 1
        for agent in ENV.agents:
            for name in ("return", "policy_loss", "value_loss", "entropy", "approx_kl"):
                assert math.isfinite(row[f"{name}/{agent}"])
            assert -1 <= row[f"return/{agent}"] <= 1
        assert all(np.all(np.isfinite(value)) for value in row.values())
    assert without_time(read_rows(whole.path / "metrics.jsonl")) == without_time(whole.metrics)


def test_every_row_has_the_same_names_and_every_agent_each_quantity(whole):
    assert len({tuple(row) for row in whole.metrics}) == 1
    quantities = {name.split("/")[0] for name in whole.metrics[0] if name.endswith("/agent_0")}
    assert {f"{name}/agent_1" for name in quantities} <= set(whole.metrics[0])


def test_evaluations_come_at_their_interval_and_at_the_end(whole):
    assert [row["env_steps"] for row in whole.evaluations] == [16, 32, 48]
    assert set(whole.evaluations[0]) >= {"env_steps", "stochastic", "greedy"}
    assert read_rows(whole.path / "evaluations.jsonl") == whole.evaluations


@pytest.mark.parametrize("log_interval", [2, 3])
def test_intervals_change_nothing_that_is_trained(whole, log_interval):
    quiet = train(6, log_interval=log_interval)
    assert_identical(quiet.state, whole.state)
    assert len(quiet.evaluations) == 1
    assert quiet.evaluations[-1] == whole.evaluations[-1]
    assert len(quiet.metrics) == 6 // log_interval


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(whole):
    assert_identical(train(6).state, whole.state)
    assert not identical(train(6, seed=1).state.team, whole.state.team)


def stopped_after(run, steps, path):
    """A copy of the directory of `run` as a crash left it: nothing was saved after `steps`."""
    shutil.copytree(run.path, path)
    checkpoints = sorted((path / "checkpoints").iterdir())
    for checkpoint in checkpoints:
        if int(checkpoint.name.split("_")[1]) > steps:
            shutil.rmtree(checkpoint)
    assert len(list((path / "checkpoints").iterdir())) < len(checkpoints)
    return path


def test_resuming_gives_the_bits_of_an_uninterrupted_run(whole, tmp_path):
    """A learning-rate schedule goes on from where it was."""
    path = stopped_after(whole, 2 * STEPS, tmp_path / "run")
    resumed = train(6, out=path, resume=path, eval_interval=2 * STEPS)
    assert_identical(resumed.state, whole.state)
    assert without_time(resumed.metrics) == without_time(whole.metrics)
    assert resumed.evaluations == whole.evaluations
    rows = without_time(read_rows(path / "metrics.jsonl"))
    assert rows == without_time(whole.metrics)
    assert marl.load(path).updates == 6


def test_resuming_with_a_longer_total_and_a_constant_schedule(tmp_path):
    """Agents here share parameters, and episodes start from a pool of resets."""
    team, pool = small_team(ENV, sharing="group", num_minibatches=4), {"reset_pool": 3}
    train(2, team, out=tmp_path / "run", **pool)
    resumed = train(6, team, out=tmp_path / "run", resume=tmp_path / "run", **pool)
    straight = train(6, team, **pool)
    assert all_finite(straight.state.team) and straight.metrics[0]["episodes"] == 16
    assert_identical(resumed.state.team, straight.state.team)
    assert_identical(resumed.state.carry, straight.state.carry)


def test_the_horizon_of_a_schedule_does_not_move_when_the_total_does(whole, tmp_path):
    """Resumed for longer, the learning rate still reaches its end at the first total."""
    path = stopped_after(whole, 4 * STEPS, tmp_path / "run")
    longer = train(8, out=path, resume=path)
    assert longer.horizon == 6 * STEPS
    assert_identical(
        longer.metrics[2]["learning_rate/agent_0"], longer.metrics[2]["learning_rate/agent_1"]
    )
    assert without_time(longer.metrics)[:3] == without_time(whole.metrics)
    assert longer.metrics[3]["learning_rate/agent_0"] == 0
    assert float(longer.state.hparams[0].schedule_steps[0]) == 6 * STEPS


def test_resuming_several_seeds(tmp_path):
    path = tmp_path / "run"
    options = {"num_seeds": 3, "checkpoint_interval": 2 * STEPS, "keep_checkpoints": 9}
    straight = train(6, out=path, **options)
    stopped = stopped_after(straight, 4 * STEPS, tmp_path / "stopped")
    resumed = train(6, out=stopped, resume=stopped, **options)
    assert_identical(resumed.state, straight.state)
    row = resumed.metrics[-1]
    assert len(row["return/agent_0"]) == len(row["policy_loss/agent_1"]) == 3
    assert row["policy_loss/agent_0"][0] != row["policy_loss/agent_0"][1]
    with pytest.raises(UsageError, match="num_seeds = 3"):
        train(6, out=stopped, resume=stopped, num_seeds=1)


def test_three_vmapped_seeds_equal_three_runs():
    """Initial states, keys and environments have the same bits; then at most 1e-5 apart."""
    team = small_team(ENV, **LINEAR | SMOOTH | {"schedule_steps": 1000})
    together, alone = (
        compiled(team, **SHAPE, max_updates=2, num_seeds=num_seeds) for num_seeds in (3, 1)
    )
    assert_identical(seed_keys(4, 3)[1], seed_keys(5, 1)[0])

    def of(trainer, seed):
        start = jax.tree.map(jnp.copy, first_state(team, trainer, seed))
        one, _ = trainer.chunk(first_state(team, trainer, seed), 1)
        three, _ = trainer.chunk(jax.tree.map(jnp.copy, one), 2)
        five, _ = trainer.chunk(three, 2)
        return start, one, five

    vmapped = of(together, 4)
    for index in range(3):
        single = of(alone, 4 + index)
        start, one, five = (jax.tree.map(lambda x, i=index: x[i], state) for state in vmapped)
        assert_identical(start, single[0])
        for mine, theirs in ((one, single[1]), (five, single[2])):
            assert_identical((mine.key, mine.update), (theirs.key, theirs.update))
            assert_identical(mine.carry.obs, theirs.carry.obs)  # so they acted alike
            assert relative_difference(mine.team, theirs.team) <= 1e-5
    assert not identical(vmapped[0].team, jax.tree.map(lambda x: x[::-1], vmapped[0].team))


# Totals and sizes


def test_a_total_of_two_and_a_half_batches_trains_three_and_says_so(capsys):
    run = train(2.5, progress=True)
    assert run.updates == 3 and run.env_steps == 24
    assert "total_steps = 20 is 2.5 updates of 8 steps; training 3 updates = 24 steps" in (
        capsys.readouterr().err
    )


def test_a_total_of_whole_batches_says_nothing_of_rounding(capsys):
    train(3, progress=True)
    assert "updates of" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("total", "updates"), [(8, 1), (8.0, 1), (9, 2), (16, 2), (20, 3), (1e3, 125)]
)
def test_total_updates(total, updates):
    rest = dict.fromkeys(Settings._fields, 0) | {"num_envs": 2, "rollout_length": 4}
    assert Settings(**rest | {"total_steps": total}).updates == updates


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"total_steps": 7}, ("total_steps = 7", "num_envs * rollout_length = 2 * 4 = 8", "give")),
        ({"total_steps": 0}, ("total_steps = 0", "less than one update")),
        ({"num_envs": 5, "rollout_length": 3}, ("= 15 is not divisible by num_minibatches = 2",)),
        ({"num_envs": 0}, ("num_envs = 0 is out of range", "1 or more")),
        ({"rollout_length": -1}, ("rollout_length = -1",)),
        ({"num_seeds": 0}, ("num_seeds = 0",)),
        ({"log_interval": 0}, ("log_interval = 0",)),
        (
            {"num_envs": 1e12, "total_steps": 1e15},
            ("num_envs * rollout_length = 1,000,", "at most"),
        ),
        ({"total_steps": 1e30}, ("total_steps = 1,000,", "updates of 8 steps; give at most")),
        ({"env": marl.make("toy/probe_both")}, ("another environment", "marl.team(env, ...)")),
        ({"env": marl.make("toy/cooperative")}, ("another environment",)),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(options, words, tmp_path):
    arguments = {"total_steps": 80, **SIZES} | options
    env = arguments.pop("env", ENV)
    with pytest.raises(UsageError) as error:
        marl.train(env, small_team(ENV), out=tmp_path / "run", progress=False, **arguments)
    for word in words:
        assert word in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_place_that_cannot_be_written_to_is_refused_before_compiling(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(UsageError, match=rf"nothing can be written to {tmp_path} \(Permission"):
        marl.train(ENV, small_team(ENV), 80, out=tmp_path / "a" / "run", progress=False, **SIZES)
    assert not (tmp_path / "a").exists()


def test_an_equal_environment_will_do():
    """Environments compare by value, so it need not be the same object."""
    again = marl.make("toy/probe_both", num_agents=2)
    run = marl.train(again, small_team(ENV, **LINEAR), STEPS, progress=False, **SIZES)
    assert run.updates == 1


# What leaves the compiled program (J4)


def output_bytes(max_updates, num_envs=2, rollout_length=4):
    team = small_team(ENV)
    trainer = compiled(team, num_envs, rollout_length, max_updates=max_updates)
    keys, hparams = seed_keys(0, 1), team.group_hparams()
    state = jax.eval_shape(trainer.init_function, keys, hparams)
    chunk = partial(program._chunk, trainer.spec)
    return chunk, state, jax.eval_shape(chunk, state, 1)[1]


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_a_few_scalars_per_update_leave_the_program():
    few, many = (size(output_bytes(updates)[2]) for updates in (10, 1000))
    per_update = (many - few) / 990
    assert per_update == few / 10
    assert per_update <= 4 * 100  # a hundred scalars of two agents
    larger = size(output_bytes(10, num_envs=16, rollout_length=64)[2])
    assert larger == few  # nothing with axes of time or environments


@pytest.mark.slow
def test_the_compiled_programs_memory_grows_as_little():
    """XLA's own account: outputs and temporaries of programs of 10 and of 1000 updates."""
    sizes = []
    for updates in (10, 1000):
        chunk, state, rows = output_bytes(updates)
        analysis = jax.jit(chunk).lower(state, jnp.int32(1)).compile().memory_analysis()
        sizes.append((analysis.output_size_in_bytes, analysis.temp_size_in_bytes, size(rows)))
    (output, temporary, rows), (more_output, more_temporary, more_rows) = sizes
    assert more_output - output == more_rows - rows
    assert more_temporary - temporary <= 2 * (more_rows - rows)
