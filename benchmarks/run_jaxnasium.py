"""Time jaxnasium's PPO on the same work, in its own environment. Run it through `compare.py`."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxnasium
import numpy as np
from common import arguments, cpu_seconds, report
from jaxnasium.algorithms import PPO
from jaxnasium.algorithms.architectures import MLP


def main() -> None:
    work = arguments(__doc__)
    env = jaxnasium.make(work.env, **work.env_kwargs)
    body = MLP.with_params(hidden_sizes=(64, 64), activation=jnp.tanh)
    trainer = PPO(
        total_timesteps=work.total_steps,
        num_envs=work.num_envs,
        num_steps=work.rollout_length,
        num_minibatches=4,
        num_epochs=4,
        learning_rate_start=2.5e-4,
        learning_rate_end=0.0,
        ent_coef_start=0.01,
        ent_coef_end=None,
        gamma=0.99,
        gae_lambda=0.95,
        max_grad_norm=0.5,
        clip_coef=0.2,
        clip_coef_vf=0.2,
        vf_coef=0.25,
        warmup_steps=0,
        normalize_observations=False,
        normalize_rewards=False,
        log_function=None,
        actor_kwargs={"body": body},
        critic_kwargs={"body": body},
    )

    def train(key):
        agent, metrics = trainer.train(key, env)
        return eqx.filter(agent, eqx.is_array), metrics

    keys = [jax.random.PRNGKey(seed) for seed in range(work.repeats)]
    trace, lowered = cpu_seconds_of(lambda: jax.jit(train).lower(keys[0]))
    compile, compiled = cpu_seconds_of(lowered.compile)
    runs = []
    for key in keys:
        seconds, (_, metrics) = cpu_seconds(lambda k=key: compiled(k))
        runs.append(seconds)
    returns = np.stack([np.asarray(x) for x in jax.tree.leaves(metrics)], -1)[-5:]
    steps = trainer.num_iterations * work.num_envs * work.rollout_length
    report("jaxnasium 0.1.1", steps, trace, compile, runs, f"return {np.nanmean(returns):.2f}")


def cpu_seconds_of(function):
    import time

    started = time.process_time()
    result = function()
    return time.process_time() - started, result


if __name__ == "__main__":
    main()
