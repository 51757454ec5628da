"""Count starts that hang: `python benchmarks/hangs.py`.

Trains PPO with a joint critic for a few updates, many times, each in a new process on all cores;
then again with XLA's concurrency-optimised scheduler, which this library turns off, turned on.
"""

import argparse
import os
import subprocess
import sys

SCHEDULER = "xla_cpu_enable_concurrency_optimized_scheduler"
PROGRAM = """
import marl
env = marl.make("jaxmarl/MPE_simple_spread_v3", num_agents={agents}, num_landmarks={agents})
team = marl.team(env, "ppo", critic="all")
marl.train(env, team, total_steps=20 * 16 * 128, num_envs=16, rollout_length=128, progress=False)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=20, help="of each number of agents")
    parser.add_argument("--agents", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that mean a hang")
    options = parser.parse_args()
    print("| scheduler | agents | starts | hung |", "|---|---|---|---|", sep="\n", flush=True)
    for name, flags in (("as the library sets it", None), ("XLA's", f"--{SCHEDULER}=true")):
        for agents in options.agents:
            hung = sum(hangs(agents, flags, options.timeout) for _ in range(options.starts))
            print(f"| {name} | {agents} | {options.starts} | {hung} |", flush=True)


def hangs(agents: int, flags: str | None, timeout: float) -> bool:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({} if flags is None else {"XLA_FLAGS": flags})
    command = [sys.executable, "-c", PROGRAM.format(agents=agents)]
    try:
        subprocess.run(
            command, env=environment, timeout=timeout, check=True, stdout=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return True
    return False


if __name__ == "__main__":
    main()
