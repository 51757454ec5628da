"""A program with nothing but numpy and jax plays as the trained team does."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl
from marl import episodes, evaluation, rollout
from marl.envs.errors import UsageError
from marl.envs.vector import VectorEnv
from marl.export import export

SCRIPT = """
    import sys
    sys.modules["marl"] = None  # importing it fails
    import jax
    import numpy as np

    folder, recorded, out = sys.argv[1:]
    arrays = np.load(f"{folder}/policy.npz")
    weights, memory = (
        {name.split("/", 1)[1]: arrays[name] for name in arrays.files if name.startswith(part)}
        for part in ("weights/", "memory/")
    )
    with open(f"{folder}/stochastic.jaxfn", "rb") as file:
        act = jax.export.deserialize(file.read()).call
    steps = np.load(recorded)
    agents = sorted(name[4:] for name in steps.files if name.startswith("obs/"))
    actions = {agent: [] for agent in agents}
    fresh = memory
    for t, key in enumerate(steps["key"]):
        memory = fresh if steps["reset"][t] else memory
        obs = {agent: steps[f"obs/{agent}"][t] for agent in agents}
        mask = {name[5:]: steps[name][t] for name in steps.files if name.startswith("mask/")}
        action, memory = act(weights, key, obs, memory, mask, dict.fromkeys(agents, np.True_))
        for agent in agents:
            actions[agent].append(np.asarray(action[agent]))
    np.savez(out, **actions)
"""


@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("toy/masked", {"core": "lstm", "core_size": 6}),
        ("toy/masked", {"core": "gru", "core_size": 6, "shared_network": True}),
        ("jaxmarl/MPE_simple_tag_v3", {}),
    ],
)
def test_exported_actions_are_the_policy_s(env_id, options, tmp_path):
    env = marl.make(env_id)
    options = dict(hidden_sizes=(8,), num_epochs=1, num_minibatches=1) | options
    team = marl.team(env, "ppo", **options)
    sizes = dict(num_envs=2, rollout_length=8, eval_episodes=2, progress=False)
    run = marl.train(env, team, 16, **sizes)
    key = jax.random.key(4)
    recorded, expected, returns = play(run, key, steps=100)
    evaluated = evaluation.evaluate(
        team.env, team.spec, run.state.team, run.state.hparams, episodes=1, key=key
    )
    assert [evaluated["returns"][agent]["mean"] for agent in team.agents] == returns.tolist()
    folder = export(run, tmp_path / "policy")
    np.savez(tmp_path / "steps.npz", **recorded)
    out = tmp_path / "actions.npz"
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), folder, tmp_path / "steps.npz", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with np.load(out) as actions:
        for agent in team.agents:
            np.testing.assert_array_equal(actions[agent], expected[agent])
            assert len(set(expected[agent].tolist())) > 1
    with pytest.raises(UsageError, match="not empty"):
        export(run, folder)


def play(run, key, steps: int):
    """Keys, observations, masks and actions of the steps that `marl eval` takes, and their returns.

    One environment, stochastic.
    """
    team, (hparams, state) = run.team, (run.state.hparams, run.state.team)
    env = VectorEnv(team.env, 1)
    key_reset, key_steps = jax.random.split(key)

    def step(carry, index):
        pair = jax.random.split(jax.random.fold_in(key_steps, index))
        keys = rollout.step_keys(team.spec, env, pair)
        act = team.learner.act
        after, step = rollout.act_and_step(team.spec, env, act, keys, state, carry, hparams)
        episode, ended = episodes.after_step(team.spec, carry.episode, step)
        seen = (jax.random.key_data(pair[0]), carry.reset, carry.obs, env.action_mask(carry.env))
        acted = [jax.tree.map(lambda x: x[..., 0], part.action) for part in step.steps]
        return after._replace(episode=episode), (
            seen,
            acted,
            ended.returns[0],
            step.episode_over[0],
        )

    def scan(key):
        return jax.lax.scan(step, rollout.start(team.spec, env, key), jnp.arange(steps))[1]

    (keys, reset, obs, mask), acted, returns, over = jax.device_get(jax.jit(scan)(key_reset))
    recorded = {"key": keys, "reset": reset[:, 0]} | {
        f"obs/{agent}": obs[agent][:, 0] for agent in team.agents
    }
    if mask is not None:
        recorded |= {f"mask/{agent}": mask[agent][:, 0] for agent in team.agents}
    actions = {}
    for group, found in zip(team.lifted.groups, acted, strict=True):
        flat = found.reshape(steps, -1)
        actions |= {team.agents[p]: flat[:, i] for i, p in enumerate(group.positions)}
    return recorded, actions, returns[np.argmax(over)]
