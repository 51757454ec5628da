"""What is not finite is named, or skipped; other agents never see it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_envs import Poisoned

import marl
from marl.envs.errors import NotFinite
from marl.envs.interface import AutoReset

STEP = 777  # of each environment, counted from 0
SIZES = dict(num_envs=2, rollout_length=16, log_interval=8, eval_episodes=2, progress=False)
TOTAL = 2 * 16 * 64


@pytest.fixture(scope="module")
def make_team():
    def make(at: int):
        env = AutoReset(Poisoned(at))
        options = dict(hidden_sizes=(4,), num_epochs=1, num_minibatches=1)
        return env, marl.team(env, "ppo", **options)

    return make


def test_stop_names_agent_quantity_and_step(make_team, tmp_path):
    env, team = make_team(STEP)
    out = tmp_path / "run"
    with pytest.raises(NotFinite, match=rf"observation of agent_1 is not finite at step {STEP} "):
        marl.train(env, team, TOTAL, out=out, checkpoint_interval=1, **SIZES)
    failure = json.loads((out / "failure.json").read_text())
    assert failure["agents"] == ["agent_1"] and failure["step"] == STEP
    assert failure["replay"].startswith("marl train --resume")
    restored = marl.load(out, env=env, team=team)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(restored.weights()))
    assert restored.env_steps <= 2 * STEP


def test_skip_goes_on_and_the_other_agent_never_saw_it(make_team):
    runs = {at: marl.train(*make_team(at), TOTAL, on_nan="skip", **SIZES) for at in (STEP, 10**6)}
    poisoned, clean = (run.weights().team[0] for run in runs.values())
    for bad, good in zip(jax.tree.leaves(poisoned), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(bad[0], good[0])  # agent_0
        assert np.isfinite(bad[1]).all()  # agent_1
    params = (poisoned.actor.params, clean.actor.params)
    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a[1], b[1])), *params)
    assert not all(jax.tree.leaves(same)), "agent_1 skipped an update"
