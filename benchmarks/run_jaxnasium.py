"""Time a learner of jaxnasium on the same work, in its own environment. Run through `compare.py`.

What cannot be made equal: its SAC takes its own samples for the steps of the critics, of the actor
and of the temperature, all steps of one before those of the next; here every step moves all three.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxnasium
import numpy as np
import optax
from common import arguments, cpu_seconds, report, uses_replay
from jaxnasium.algorithms import DQN, PPO, PQN, SAC
from jaxnasium.algorithms.architectures import MLP


def main() -> None:
    work = arguments(__doc__)
    env = jaxnasium.make(work.env, **work.env_kwargs)
    trainer = trainer_of(work)

    def train(key):
        agent, metrics = trainer.train(key, env)
        return eqx.filter(agent, eqx.is_array), metrics

    keys = [jax.random.PRNGKey(seed) for seed in range(work.repeats)]
    trace, lowered = cpu_seconds_of(lambda: jax.jit(train).lower(keys[0]))
    compile, compiled = cpu_seconds_of(lowered.compile)
    runs = []
    for key in keys:
        seconds, (agent, metrics) = cpu_seconds(lambda k=key: compiled(k))
        runs.append(seconds)
    last = -max(1, trainer.num_iterations // 20)
    returns = np.stack([np.asarray(x) for x in jax.tree.leaves(metrics)], -1)[last:]
    steps = trainer.num_iterations * work.num_envs * work.rollout_length
    if uses_replay(work):
        steps += max(work.learning_starts, work.batch_size)
    found = counts(work, trainer, next(iter(agent.agents.values())))
    note = f"return {np.nanmean(returns):.2f}"
    report("jaxnasium 0.1.1", steps, trace, compile, runs, found, note)


def trainer_of(work: argparse.Namespace) -> Any:
    shared = {
        "total_timesteps": work.total_steps,
        "num_envs": work.num_envs,
        "normalize_observations": False,
        "normalize_rewards": False,
        "gamma": 0.99,
        "log_function": None,
        "critic_kwargs": {"body": _body(work)},
    }
    if not uses_replay(work):
        shared |= {
            "num_steps": work.rollout_length,
            "num_minibatches": work.minibatches,
            "num_epochs": work.epochs,
            "learning_rate_start": 2.5e-4,
            "warmup_steps": 0,
        }
    else:
        shared |= {
            "update_every": work.num_envs * work.rollout_length,
            "batch_size": work.batch_size,
            "replay_buffer_size": work.capacity,
            "warmup_steps": work.learning_starts,
            "tau": 0.005,
        }
    return {"ppo": _ppo, "pqn": _pqn, "dqn": _dqn, "sac": _sac}[work.learner](work, shared)


def _ppo(work: argparse.Namespace, shared: dict[str, Any]) -> Any:
    return PPO(
        learning_rate_end=0.0,
        ent_coef_start=0.01,
        ent_coef_end=None,
        gae_lambda=0.95,
        max_grad_norm=0.5,
        clip_coef=0.2,
        clip_coef_vf=0.2,
        vf_coef=0.25,
        actor_kwargs={"body": _body(work)},
        **shared,
    )


def _pqn(work: argparse.Namespace, shared: dict[str, Any]) -> Any:
    return PQN(exploration_fraction=0.2, **shared)


def _dqn(work: argparse.Namespace, shared: dict[str, Any]) -> Any:
    return DQN(num_updates=work.gradient_steps, exploration_fraction=0.5, **shared)


def _sac(work: argparse.Namespace, shared: dict[str, Any]) -> Any:
    return SAC(
        critics_num_updates=work.gradient_steps,
        actor_num_updates=work.gradient_steps,
        alpha_num_updates=work.gradient_steps,
        learning_rate_actor_start=3e-4,
        learning_rate_alpha_start=3e-4,
        target_entropy_scale_end=None,
        init_alpha=1.0,
        actor_kwargs={"body": _body(work)},
        **shared,
    )


def _body(work: argparse.Namespace) -> Any:
    sizes = tuple(work.hidden_sizes)
    if work.layer_norm:
        return eqx.Partial(NormMLP, sizes=sizes)
    activation = {"tanh": jnp.tanh, "relu": jax.nn.relu}[work.activation]
    return MLP.with_params(hidden_sizes=sizes, activation=activation)


class NormMLP(eqx.Module):
    """Layers with a layer norm between product and activation, which jaxnasium does not have."""

    layers: list[eqx.nn.Linear]
    norms: list[eqx.nn.LayerNorm]
    out_features: int = eqx.field(static=True)

    def __init__(self, in_features: int, *, key: jax.Array, sizes: tuple[int, ...]):
        widths = (in_features, *sizes)
        keys = jax.random.split(key, len(sizes))
        pairs = zip(widths[:-1], sizes, keys, strict=True)
        self.layers = [eqx.nn.Linear(a, b, key=k) for a, b, k in pairs]
        self.norms = [eqx.nn.LayerNorm(size) for size in sizes]
        self.out_features = sizes[-1]

    def __call__(self, x, *, key=None):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = jax.nn.relu(norm(layer(x)))
        return x


def counts(work: argparse.Namespace, trainer: Any, agent: Any) -> dict[str, Any]:
    """What was done, of the first agent: from what training left."""
    state = agent.optimizer_state
    if work.learner == "sac":
        networks = {"actor": agent.actor, "critic": agent.critics, "temperature": agent.alpha}
        names = {"actor": "actor", "critic": "critics", "temperature": "alpha"}
        optimizers = {name: state[key] for name, key in names.items()}
    elif work.learner == "ppo":  # one optimiser of both
        networks = {"actor": agent.actor, "critic": agent.critic}
        optimizers = dict.fromkeys(networks, state)
    else:
        networks, optimizers = {"q": agent.critic}, {"q": state}
    samples = trainer.batch_size if uses_replay(work) else trainer.minibatch_size
    return {
        "gradient_steps": {name: _steps(optimizer) for name, optimizer in optimizers.items()},
        "samples": samples,
        "parameters": {name: _size(network) for name, network in networks.items()},
    }


def _steps(optimizer: Any) -> int:
    return max(int(count) for _, count in optax.tree.get_all_with_path(optimizer, "count"))


def _size(network: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(network) if eqx.is_inexact_array(x))


def cpu_seconds_of(function):
    started = time.process_time()
    result = function()
    return time.process_time() - started, result


if __name__ == "__main__":
    main()
