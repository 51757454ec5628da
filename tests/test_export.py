"""A program with nothing but numpy and jax plays as the trained team does."""

import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import marl
from marl.envs.errors import UsageError
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
    for t, key in enumerate(steps["key"]):
        obs = {agent: steps[f"obs/{agent}"][t] for agent in agents}
        mask = {name[5:]: steps[name][t] for name in steps.files if name.startswith("mask/")}
        action, memory = act(weights, key, obs, memory, mask, dict.fromkeys(agents, np.True_))
        for agent in agents:
            actions[agent].append(np.asarray(action[agent]))
    np.savez(out, **actions)
"""


@pytest.mark.parametrize("env_id", ["toy/masked", "jaxmarl/MPE_simple_tag_v3"])
def test_exported_actions_are_the_policy_s(env_id, tmp_path):
    env = marl.make(env_id)
    team = marl.team(env, "ppo", hidden_sizes=(8,), num_epochs=1, num_minibatches=1)
    sizes = dict(num_envs=2, rollout_length=8, eval_episodes=2, progress=False)
    run = marl.train(env, team, 16, **sizes)
    recorded, expected = play(env, run.policy(), steps=100)
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


def play(env, policy, steps: int):
    """Keys, observations and masks of some steps, and the actions that the policy chose."""
    step, has_masks = jax.jit(env.step), None
    obs, state = env.reset(jax.random.key(0))
    recorded: dict[str, list] = {"key": []}
    actions: dict[str, list] = {}
    memory = policy.initial_memory()
    for t in range(steps):
        key_act, key_env = jax.random.split(jax.random.fold_in(jax.random.key(1), t))
        mask = env.action_mask(state)
        has_masks = mask is not None
        action, memory = policy(key_act, obs, memory, mask)
        recorded["key"].append(jax.random.key_data(key_act))
        for agent in env.agents:
            recorded.setdefault(f"obs/{agent}", []).append(obs[agent])
            if has_masks:
                recorded.setdefault(f"mask/{agent}", []).append(mask[agent])
            actions.setdefault(agent, []).append(action[agent])
        timestep, state = step(key_env, state, action)
        obs = timestep.obs
    stacked = {name: np.stack(x) for name, x in recorded.items()}
    return stacked, {agent: np.stack(x) for agent, x in actions.items()}
