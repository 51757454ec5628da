"""Time independent PPO of this library. Run it through `compare.py`, or alone."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import jax.numpy as jnp
from common import arguments, cpu_seconds, report

import marl
from marl.program import ProgramSpec, program


def main() -> None:
    work = arguments(__doc__)
    env = marl.make(f"jaxmarl/{work.env}", **work.env_kwargs)
    team = marl.team(
        env,
        "ppo",
        critic=work.critic,
        learning_rate=2.5e-4,
        learning_rate_schedule="linear",
        schedule_steps=work.total_steps,
    )
    updates = work.total_steps // (work.num_envs * work.rollout_length)
    spec = ProgramSpec(team.env, team.spec, work.num_envs, work.rollout_length, 0, 1, updates)
    compiled = program(spec)
    hparams = team.group_hparams()
    timings = compiled.compile(jax.random.split(jax.random.key(0), 1), hparams)
    runs = []
    for seed in range(work.repeats):
        state = compiled.init(jax.random.split(jax.random.key(seed), 1), hparams)
        seconds, (_, metrics) = cpu_seconds(lambda s=state: compiled.chunk(s, updates))
        runs.append(seconds)
    episodes = metrics.episodes
    returns = jnp.sum(episodes.returns[-5:], 0) / jnp.sum(episodes.finished[-5:])
    steps = updates * work.num_envs * work.rollout_length
    note = f"return {float(jnp.mean(returns)):.2f}, critic {work.critic}"
    report("marl", steps, timings.trace, timings.compile, runs, note)


if __name__ == "__main__":
    main()
