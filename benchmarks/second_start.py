"""CPU seconds of a second start: `python benchmarks/second_start.py`.

From the start of the process to the end of the first training steps, of a program that was compiled
by an earlier process; beside it what importing JaxMARL takes. Medians, alternating.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys

TRAIN = """
import marl
env = marl.make("jaxmarl/MPE_simple_spread_v3")
team = marl.team(env, "ppo")
marl.train(env, team, total_steps=16 * 128, num_envs=16, rollout_length=128, progress=False)
"""
PROGRAMS = {"import jaxmarl": "import jaxmarl", "second start": TRAIN}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    cpu_seconds(TRAIN)  # the first start, which compiles
    found: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds):
        for name, program in PROGRAMS.items():
            found[name].append(cpu_seconds(program))
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    for name, seconds in medians.items():
        print(f"{name}: {seconds:.2f} CPU s")
    print(f"ratio: {medians['second start'] / medians['import jaxmarl']:.2f}")


def cpu_seconds(program: str) -> float:
    """User and system seconds of a process that runs `program`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
