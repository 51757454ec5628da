"""Time a learner of this library. Run it through `compare.py`, or alone."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from common import arguments, cpu_seconds, report, uses_replay

import marl
from marl.agents.optimizer import NetworkState
from marl.program import ProgramSpec, program


def main() -> None:
    work = arguments(__doc__)
    team, spec = program_of(work)
    updates = spec.max_updates
    compiled, hparams = program(spec), team.group_hparams()
    timings = compiled.compile(jax.random.split(jax.random.key(0), 1), hparams)
    runs = []
    for seed in range(work.repeats):
        state = compiled.init(jax.random.split(jax.random.key(seed), 1), hparams)
        seconds, (state, metrics) = cpu_seconds(lambda s=state: compiled.chunk(s, updates))
        runs.append(seconds)
    episodes = metrics.episodes
    last = -max(1, updates // 20)
    returns = jnp.sum(episodes.returns[last:], 0) / jnp.sum(episodes.finished[last:])
    steps = updates * work.num_envs * work.rollout_length
    note = f"return {float(jnp.mean(returns)):.2f}, critic {work.critic}"
    found = counts(work, team, state.team[0])
    report("marl", steps, timings.trace, timings.compile, runs, found, note)


def program_of(work: argparse.Namespace) -> tuple[Any, ProgramSpec]:
    """The team that does `work`, and the program that trains it to its end."""
    env = marl.make(f"jaxmarl/{work.env}", **work.env_kwargs)
    steps = work.total_steps + (work.learning_starts if uses_replay(work) else 0)
    updates = steps // (work.num_envs * work.rollout_length)
    networks = {
        "hidden_sizes": tuple(work.hidden_sizes),
        "activation": work.activation,
        "torso": "mlp_norm" if work.layer_norm else "mlp",
    }
    options = networks | _options(work) | {"schedule_steps": steps}
    team = marl.team(env, work.learner, **options)
    return team, ProgramSpec(team.env, team.spec, work.num_envs, work.rollout_length, 0, 1, updates)


def _options(work: argparse.Namespace) -> dict[str, Any]:
    passes = {"num_epochs": work.epochs, "num_minibatches": work.minibatches}
    if work.learner == "ppo":
        rates = {"learning_rate": 2.5e-4, "learning_rate_schedule": "linear"}
        return passes | rates | {"critic": work.critic}
    if work.learner == "pqn":
        return passes
    size = work.num_envs * work.rollout_length
    replay = {
        "capacity": work.capacity,
        "batch_size": work.batch_size,
        "updates_per_rollout": work.gradient_steps,
        "learning_starts": work.learning_starts + size,  # the first rollout that is learned from
    }
    if work.learner == "dqn":
        return {"replay": replay, "double": False}
    return {"replay": replay, "max_grad_norm": 10.0, "critic": work.critic}


def counts(work: argparse.Namespace, team: Any, state: Any) -> dict[str, Any]:
    """What was done, of the first group's first agent: from the state that training left."""
    found = {
        _NAMES.get(name, name): network
        for name, network in state._asdict().items()
        if isinstance(network, NetworkState)
    }
    if uses_replay(work):
        samples = team.spec.replay.batch_size
    else:
        samples = work.num_envs * work.rollout_length // work.minibatches
    return {
        "gradient_steps": {name: _steps(network.optimizer) for name, network in found.items()},
        "samples": samples,
        "parameters": {name: _size(network.params) for name, network in found.items()},
    }


_NAMES = {"network": "q"}


def _steps(optimizer: Any) -> int:
    return max(int(count[0]) for _, count in optax.tree.get_all_with_path(optimizer, "count"))


def _size(params: Any) -> int:
    return sum(x[0].size for x in jax.tree.leaves(params))


if __name__ == "__main__":
    main()
