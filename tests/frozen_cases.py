"""Runs to freeze agents from: written without training, with weights that are all different."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import marl
from marl import checkpoint, directory
from marl.policy import Policy
from marl.program import ProgramSpec, program
from marl.record import record
from marl.run import Run
from marl.settings import Settings
from marl.specs import Team
from marl.training import seed_keys

SIZES = {"num_envs": 2, "rollout_length": 8, "log_interval": 1, "eval_episodes": 2}
QUICK = {"xla_backend_optimization_level": 0}


def source(path: Path, team: Team, seed: int = 0, num_seeds: int = 1) -> Run:
    """A run of `team` in `path`, whose floats are random numbers."""
    rest = {"reset_pool": 0, "on_nan": "stop", "eval_interval": 0}
    rest |= {"checkpoint_interval": 0, "keep_checkpoints": 3, "total_steps": 160}
    settings = Settings.of(seed=seed, num_seeds=num_seeds, checkpoint_replay=True, **SIZES, **rest)
    spec = ProgramSpec.of(team, settings)
    run = Run(team, spec, seed, record(team, settings._asdict()))
    run.horizon = settings.steps
    init = jax.jit(program(spec).init_function, compiler_options=QUICK)
    state = init(seed_keys(seed, num_seeds), team.group_hparams())
    run.state = state._replace(team=stirred(state.team, seed))
    run.save(path)
    return run


def move_on(run: Run, seed: int) -> None:
    """Another checkpoint, one update later, of other weights."""
    number, team = run.state.update + 1, stirred(run.state.team, seed)
    run.state = run.state._replace(update=number, team=team)
    run.checkpoint(keep=3)
    run.finish()


def put_apart_best(run: Run, seed: int) -> Any:
    """Best weights of a seed (by index), which are not the last ones; returns them."""
    weights = run.weights(seed)
    weights = weights._replace(team=stirred(weights.team, 100 + seed))
    checkpoint.save(run.path / directory.BEST / f"seed_{seed}", 16, weights, {}, 1)
    return weights


def stirred(tree: Any, seed: int) -> Any:
    """Other floats: parameters of either sign, and statistics that stay positive."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    keys = jax.random.split(jax.random.key(1000 + seed), len(paths))

    def stir(key: jax.Array, name: str, x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        noise = jax.random.normal(key, x.shape)
        return x + noise if "params" in name else jnp.abs(x) + 0.1 * jnp.abs(noise)

    named = [
        (key, jax.tree_util.keystr(path), x) for key, (path, x) in zip(keys, paths, strict=True)
    ]
    return jax.tree.unflatten(structure, [stir(*leaf) for leaf in named])


def fresh_policy(team: Team, mode: str = "stochastic") -> Policy:
    """The policy of a team that nobody trained."""
    hparams = team.group_hparams()
    state = jax.jit(team.learner.init, compiler_options=QUICK)(jax.random.key(0), hparams)
    return Policy(team.env, team.spec, state, hparams, mode)


def actions(policy: Any, number: int = 6, seed: int = 0) -> Any:
    """Actions by agent id, [number, ...], on random observations."""
    env = policy.env
    keys = jax.random.split(jax.random.key(seed), number)

    def act(key: jax.Array) -> Any:
        key_reset, key_act = jax.random.split(key)
        obs, state = env.reset(key_reset)
        noise = jax.random.normal(key_reset, (64,))
        obs = jax.tree.map(lambda x: _moved(x, noise), obs)
        return policy(key_act, obs, action_mask=env.action_mask(state))[0]

    found = [act(key) for key in keys]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *found)


def _moved(x: jax.Array, noise: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x + noise[: x.size].reshape(x.shape)


def two(env_id: str = "toy/probe_both", learner: Any = "ppo", **options: Any) -> Team:
    """A small team of two equal agents."""
    env = marl.make(env_id, num_agents=2)
    return marl.team(env, learner, hidden_sizes=(8,), **options)
