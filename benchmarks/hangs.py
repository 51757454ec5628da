"""Count starts that hang: `python benchmarks/hangs.py`.

Trains a few updates, many times, each in a new process on all cores: PPO with a joint critic, and
agents of several shapes with two seeds. Then again with XLA's concurrency-optimised scheduler,
which this library turns off, turned on. A process hangs when it lives but uses no CPU time: wall
clocks would count a busy machine.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

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
    parser.add_argument("--idle", type=float, default=30.0, help="seconds idle that mean a hang")
    options = parser.parse_args()
    print("| scheduler | program | starts | hung |", "|---|---|---|---|", sep="\n", flush=True)
    for name, flags in (("as the library sets it", None), ("XLA's", f"--{SCHEDULER}=true")):
        for program, code in PROGRAMS.items():
            hung = sum(hangs(code, flags, options.idle) for _ in range(options.starts))
            print(f"| {name} | {program} | {options.starts} | {hung} |", flush=True)


def hangs(code: str, flags: str | None, idle: float) -> bool:
    """Whether a new process running `code` spends `idle` seconds on less than 1% of one core."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({} if flags is None else {"XLA_FLAGS": flags})
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    used = 0.0
    while True:
        try:
            if process.wait(idle):
                raise SystemExit(f"a start failed with exit code {process.returncode}")
            return False
        except subprocess.TimeoutExpired:
            before, used = used, cpu_seconds(process.pid)
            if used - before < idle / 100:
                process.kill()
                process.wait()
                return True


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process, from Linux's table of processes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
