"""Every preset builds, and trains for two updates (which fails where something is not finite)."""

import json

import numpy as np
import pytest

from marl import cli, config
from marl.envs import registry

SMALL = ["training.num_envs=4", "training.rollout_length=16", "training.total_steps=128"]
FEW_SEQUENCES = dict.fromkeys(
    ("ippo_overcooked_v2", "mappo_switch_riddle"), ["team.learner.num_minibatches=2"]
)
SLOW = ("ippo_mabrax_halfcheetah",)  # half a minute to trace
UNAVAILABLE = {entry.id: entry.unavailable for entry in registry.listing("jaxmarl")}


def parameters():
    for name in sorted(config.presets()):
        reason = UNAVAILABLE.get(config.load(name).env.id, "")
        marks = [pytest.mark.skipif(bool(reason), reason=f"it {reason}")]
        yield pytest.param(name, marks=[*marks, *[pytest.mark.slow] * (name in SLOW)])


@pytest.mark.parametrize("preset", list(parameters()))
def test_presets_build(preset, capsys):
    assert cli.main(["describe", preset]) == 0
    assert "agents in" in capsys.readouterr().out


def train(preset, out):
    settings = [preset, *SMALL, *FEW_SEQUENCES.get(preset, []), "evaluation.episodes=2"]
    assert cli.main(["train", *settings, "--quiet", "--out", str(out)]) == 0
    assert json.loads((out / "summary.json").read_text())["env_steps"] == 128
    (checkpoint,) = (out / "checkpoints").glob("*/arrays.npz")
    return dict(np.load(checkpoint))


@pytest.mark.slow
@pytest.mark.parametrize("preset", list(parameters()))
def test_presets_train_to_the_same_bits(preset, tmp_path):
    """Two runs with one seed, of a program that is compiled once."""
    one, other = (train(preset, tmp_path / name) for name in ("one", "other"))
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_cooks_learn_from_shaped_rewards_for_half_of_the_run():
    loaded = config.load("ippo_overcooked_cramped_room")
    assert 0.4 < loaded.team.shaped_reward["steps"] / loaded.training.total_steps < 0.6
