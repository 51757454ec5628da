"""Trace and compile CPU seconds by number of agents: `python benchmarks/growth.py`.

Of the whole training program, and of the environment's own reset and step alone.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import argparse
import json
import statistics
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[3, 12])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", type=int, help="measure this number of agents, in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    rows: dict[int, list[dict[str, float]]] = {agents: [] for agents in options.agents}
    for _ in range(options.rounds):
        for agents, found in rows.items():
            command = [sys.executable, __file__, "--one", str(agents)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    print("| agents | environment alone, CPU s | training program, CPU s |\n|---|---|---|")
    for agents, found in rows.items():
        env, program = (statistics.median(row[k] for row in found) for k in ("env", "program"))
        print(f"| {agents} | {env:.1f} | {program:.1f} |")


def measure(agents: int) -> dict[str, float]:
    import jax

    import marl
    from marl import xla
    from marl.envs.vector import VectorEnv
    from marl.program import ProgramSpec, program

    xla.prepare()
    env = marl.make("jaxmarl/MPE_simple_spread_v3", num_agents=agents, num_landmarks=agents)
    worlds, key = VectorEnv(env, 16), jax.random.key(0)
    started = time.process_time()
    _, state = jax.jit(worlds.reset).lower(key).compile()(key)
    action = {agent: jax.numpy.zeros(16, int) for agent in env.agents}
    jax.jit(worlds.step).lower(key, state, action).compile()
    alone = time.process_time() - started
    team = marl.team(env, "ppo")
    compiled = program(ProgramSpec(team.env, team.spec, 16, 128, 0, 1, 10))
    timings = compiled.compile(jax.random.split(key, 1), team.group_hparams())
    return {"env": alone, "program": timings.trace + timings.compile}


if __name__ == "__main__":
    main()
