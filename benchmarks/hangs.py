"""Count starts that hang: `python benchmarks/hangs.py`.

Trains a few updates, many times, each in a new process on all cores: PPO with a joint critic, and
agents of several shapes with two seeds. Then again with XLA's concurrency-optimised scheduler,
which this library turns off, turned on.
"""

import argparse
import os
import subprocess
import sys

SCHEDULER = "xla_cpu_enable_concurrency_optimized_scheduler"
TRAIN = """
import marl
env = marl.make({env})
team = marl.team(env, "ppo", critic="all", reward_teams="all")
marl.train(env, team, total_steps=20 * 16 * 128, num_seeds={num_seeds}, progress=False)
"""
SPREAD = '"jaxmarl/MPE_simple_spread_v3", num_agents={0}, num_landmarks={0}'
PROGRAMS = {
    "3 agents": TRAIN.format(env=SPREAD.format(3), num_seeds=1),
    "6 agents": TRAIN.format(env=SPREAD.format(6), num_seeds=1),
    "4 unequal agents, 2 seeds": TRAIN.format(env='"toy/heterogeneous"', num_seeds=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=20, help="of each program")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that mean a hang")
    options = parser.parse_args()
    print("| scheduler | program | starts | hung |", "|---|---|---|---|", sep="\n", flush=True)
    for name, flags in (("as the library sets it", None), ("XLA's", f"--{SCHEDULER}=true")):
        for program, code in PROGRAMS.items():
            hung = sum(hangs(code, flags, options.timeout) for _ in range(options.starts))
            print(f"| {name} | {program} | {options.starts} | {hung} |", flush=True)


def hangs(code: str, flags: str | None, timeout: float) -> bool:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({} if flags is None else {"XLA_FLAGS": flags})
    command = [sys.executable, "-c", code]
    try:
        subprocess.run(
            command, env=environment, timeout=timeout, check=True, stdout=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return True
    return False


if __name__ == "__main__":
    main()
