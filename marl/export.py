"""`marl export`: a trained team for programs that do not have this library.

    policy.npz          the weights, plain arrays by name
    policy.json         agents, spaces, and what the functions take and give
    stochastic.jaxfn    the act functions, as `jax.export` serialises them
    greedy.jaxfn

A function takes `(weights, key, obs, memory, action_mask, active)` and gives `(action, memory)`:
    weights       {name: array} of policy.npz
    key           [2] uint32, `jax.random.key_data` of a key
    obs           {agent: observation}, without a batch axis
    memory        {name: array}; that of an episode's start is in policy.npz too, as "memory/..."
    action_mask   {agent: mask}, or {} where the environment has none
    active        {agent: bool}
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marl.envs import spaces
from marl.envs.errors import UsageError
from marl.evaluation import MODES
from marl.policy import Policy, act_once
from marl.run import Run

ARRAYS, DESCRIPTION = "policy.npz", "policy.json"
FORMAT = 1


def export(run: Run, out: str | Path, seed: int = 0, best: bool = False) -> Path:
    """Write the team of one seed to the new folder `out`.

    Raises:
      UsageError: the folder is not empty or cannot be written.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty; name another folder")
    policy = run.policy(seed=seed, best=best)
    memory = _named(policy.initial_memory())
    weights = _used(policy, _named(policy.state), memory)
    arrays = {f"weights/{name}": x for name, x in weights.items()}
    arrays |= {f"memory/{name}": x for name, x in memory.items()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for mode in MODES:
            exported = _exported(policy._replace(mode=mode), weights, memory)
            (out / f"{mode}.jaxfn").write_bytes(exported.serialize())
        plain: dict[str, Any] = {name: np.asarray(x) for name, x in arrays.items()}
        np.savez(out / ARRAYS, **plain)
        text = json.dumps(_description(policy, run), indent=2)
        (out / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"could not write to {out}: {error.strerror or error}") from error
    return out


def _named(tree: Any) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _used(policy: Policy, weights: dict, memory: dict) -> dict[str, jax.Array]:
    """The weights that acting reads: no optimiser, and no critic but a head of a shared network."""
    kept: set[int] = set()
    for mode in MODES:
        exported = _exported(policy._replace(mode=mode), weights, memory)
        kept |= set(exported.module_kept_var_idx)
    return {name: weights[name] for i, name in enumerate(sorted(weights)) if i in kept}


def _exported(policy: Policy, weights: dict, memory: dict) -> Any:
    """The act function over plain dicts; hparams that acting reads are constants in it."""
    state_tree = jax.tree.structure(policy.state)
    memory_tree = jax.tree.structure(policy.initial_memory())
    state = _named(policy.state)
    memory_names = list(memory)  # JAX rebuilds dicts in sorted order

    def weight(given: dict, name: str) -> jax.Array:
        return given[name] if name in given else jnp.zeros_like(state[name])

    def act(weights, key, obs, memory, action_mask, active):
        action, after = act_once(
            policy.spec,
            policy.mode,
            jax.random.wrap_key_data(key),
            jax.tree.unflatten(state_tree, [weight(weights, name) for name in state]),
            obs,
            jax.tree.unflatten(memory_tree, [memory[name] for name in memory_names]),
            action_mask or None,
            active,
            policy.hparams,
        )
        return action, dict(zip(memory_names, jax.tree.leaves(after), strict=True))

    env = policy.env
    obs, env_state = jax.eval_shape(env.reset, jax.random.key(0))
    mask = jax.eval_shape(env.action_mask, env_state)
    arguments = (
        _shapes(weights),
        jax.ShapeDtypeStruct((2,), jnp.uint32),
        obs,
        _shapes(memory),
        {} if mask is None else mask,
        dict.fromkeys(env.agents, jax.ShapeDtypeStruct((), bool)),
    )
    return jax.export.export(jax.jit(act))(*arguments)


def _shapes(arrays: dict) -> dict:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}


def _description(policy: Policy, run: Run) -> dict[str, Any]:
    env = policy.env
    return {
        "format": FORMAT,
        "jax": jax.__version__,
        "platforms": [jax.default_backend()],
        "agents": {
            agent: {
                "observation": spaces.describe(env.observation_spaces[agent]),
                "action": spaces.describe(env.action_spaces[agent]),
            }
            for agent in env.agents
        },
        "environment": run.config["env"],
        "env_steps": run.env_steps,
        "functions": {mode: f"{mode}.jaxfn" for mode in MODES},
        "arguments": ["weights", "key", "obs", "memory", "action_mask", "active"],
        "results": ["action", "memory"],
    }
