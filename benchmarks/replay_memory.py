"""Memory of the joint replay buffer by critic scope: `python benchmarks/replay_memory.py`.

Bytes of the buffer's arrays, from their shapes, and the peak memory of a process that trains: full
buffers, one update after them. Ten agents of simple_spread by default.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import argparse
import json
import resource
import subprocess
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=10)
    parser.add_argument("--learner", default="sac")
    parser.add_argument("--capacity", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--one", help="measure this critic scope, in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options)))
        return
    print("| critic | buffer MB | peak MB |\n|---|---|---|")
    found = []
    for scope in ("self", "all"):
        command = [sys.executable, __file__, *sys.argv[1:], "--one", scope]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"| {scope} | {found[-1]['buffer']:.1f} | {found[-1]['peak']:.0f} |")
    own, joint = found
    ratios = [joint[name] / own[name] for name in ("buffer", "peak")]
    print(f"| ratio | {ratios[0]:.2f} | {ratios[1]:.2f} |")


def measure(options: argparse.Namespace) -> dict[str, float]:
    import jax

    import marl
    from marl import replay
    from marl.program import ProgramSpec, program

    kwargs = {"num_agents": options.agents, "num_landmarks": options.agents}
    env = marl.make("jaxmarl/MPE_simple_spread_v3", action_type="Continuous", **kwargs)
    sizes = {"capacity": options.capacity, "batch_size": options.batch_size}
    sizes["learning_starts"] = 0
    team = marl.team(env, options.learner, critic=options.one, replay=sizes)
    num_envs, rollout_length = 16, 8
    updates = options.capacity // (num_envs * rollout_length) + 1
    spec = ProgramSpec(team.env, team.spec, num_envs, rollout_length, 0, 1, updates)
    trainer, hparams = program(spec), team.group_hparams()
    state = trainer.init(jax.random.split(jax.random.key(0), 1), hparams)
    buffer = replay.num_bytes(state.replay)
    jax.block_until_ready(trainer.chunk(state, updates))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"buffer": buffer / 1e6, "peak": peak / 1024}


if __name__ == "__main__":
    main()
