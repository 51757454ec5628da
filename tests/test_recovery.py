"""Kills and damage: a run loses what came after its last checkpoint, and nothing else."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from marl import checkpoint

KILLS = int(os.environ.get("MARL_TEST_KILLS", "4"))
DAMAGES = int(os.environ.get("MARL_TEST_DAMAGES", "50"))
SETTINGS = [
    "ippo",
    "env=toy/cooperative",
    "team.learner.hidden_sizes=[8]",
    "team.learner.num_minibatches=1",
    "team.learner.num_epochs=1",
    "training.num_envs=2",
    "training.rollout_length=8",
    "training.num_seeds=2",
    "training.log_interval=4",
    "training.total_steps=64000",
    "checkpoint.interval=640",
    "evaluation.interval=32000",
    "evaluation.episodes=8",
]


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "marl.cli", "train", *arguments, "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def arrays(run: Path) -> dict[str, np.ndarray]:
    newest = checkpoint.latest(run / "checkpoints")
    assert newest is not None
    with np.load(newest / checkpoint.ARRAYS) as found:
        return {name: found[name] for name in found.files}


def rows(run: Path, file: str) -> list[dict]:
    lines = (run / file).read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An uninterrupted run."""
    run = tmp_path_factory.mktemp("whole") / "run"
    finish(start(*SETTINGS, "--out", str(run)))
    return run


def assert_equal_runs(run: Path, other: Path) -> None:
    left, right = arrays(run), arrays(other)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)
    for file in ("metrics.jsonl", "evaluations.jsonl"):
        assert rows(run, file) == rows(other, file)


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * KILLS)
def test_a_run_killed_again_and_again_ends_like_one_that_was_not(whole, tmp_path):
    """The delays reach from before the first checkpoint to after the last; a run that gets to its
    end is compared, and another begins."""
    chance = random.Random(0)
    kills, run = 0, tmp_path / "run_0"
    process = start(*SETTINGS, "--out", str(run))
    while kills < KILLS:
        newest = checkpoint.latest(run / "checkpoints", lambda text: None)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            now = checkpoint.latest(run / "checkpoints", lambda text: None)
            if now is not None and now != newest:  # it trains: kill it at any moment from here
                time.sleep(chance.random() * 0.3)
                break
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
            process = start("--resume", str(run))
            continue
        finish(process)
        assert_equal_runs(run, whole)
        run = tmp_path / f"run_{kills}"
        process = start(*SETTINGS, "--out", str(run))
    finish(process)
    assert_equal_runs(run, whole)


@pytest.mark.slow
def test_damaged_checkpoints_are_found_and_the_one_before_is_used(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    newest, before = sorted((run / "checkpoints").glob("step_*"))[-1:-3:-1]
    chance = random.Random(1)
    for _ in range(DAMAGES):
        file = newest / chance.choice([checkpoint.ARRAYS, checkpoint.MANIFEST])
        intact = file.read_bytes()
        damaged = bytearray(intact)
        if chance.random() < 0.5:
            damaged = damaged[: chance.randrange(len(damaged))]
        else:
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        reports: list[str] = []
        assert checkpoint.latest(run / "checkpoints", reports.append) == before
        assert len(reports) == 1 and str(newest) in reports[0]
        file.write_bytes(intact)
    assert checkpoint.latest(run / "checkpoints") == newest
