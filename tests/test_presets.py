"""Every preset builds, and trains for two updates (which fails where something is not finite)."""

import json

import pytest

from marl import cli, config
from marl.envs import registry

SMALL = ["training.num_envs=4", "training.rollout_length=8", "training.total_steps=64"]
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


@pytest.mark.slow
@pytest.mark.parametrize("preset", list(parameters()))
def test_presets_train(preset, tmp_path):
    out = tmp_path / "run"
    settings = [preset, *SMALL, "evaluation.episodes=2", "--quiet", "--out", str(out)]
    assert cli.main(["train", *settings]) == 0
    assert json.loads((out / "summary.json").read_text())["env_steps"] == 64


def test_cooks_learn_from_shaped_rewards_for_half_of_the_run():
    loaded = config.load("ippo_overcooked_cramped_room")
    assert 0.4 < loaded.team.shaped_reward["steps"] / loaded.training.total_steps < 0.6
