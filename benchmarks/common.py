"""What both sides of a comparison share: the work, CPU seconds, peak memory, one row of results.

CPU seconds are of all threads of the process, user and system: on a shared machine the wall clock
measures other people's work.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

# the work of each learner, where the command line names nothing else
_ON_ROLLOUTS = {"rollout_length": 128, "epochs": 4, "minibatches": 4, "total_steps": 200_000}
_ON_REPLAY = {
    "batch_size": 256,
    "capacity": 50_000,
    "learning_starts": 5_120,
}
WORK: dict[str, dict[str, Any]] = {
    "ppo": _ON_ROLLOUTS | {"activation": "tanh"},
    "pqn": _ON_ROLLOUTS | {"total_steps": 614_400},
    "dqn": _ON_REPLAY | {"rollout_length": 16, "gradient_steps": 8, "total_steps": 307_200},
    "sac": _ON_REPLAY
    | {"rollout_length": 8, "gradient_steps": 8, "total_steps": 40_960}
    | {"env_kwargs": {"action_type": "Continuous"}},
}


def arguments(description: str) -> argparse.Namespace:
    """The work: learner, environment, sizes, repeats."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--learner", choices=sorted(WORK), default="ppo")
    parser.add_argument("--env", default="MPE_simple_spread_v3")
    parser.add_argument("--env-kwargs", type=json.loads, default={})
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--rollout-length", type=int)
    parser.add_argument("--total-steps", type=int, help="environment steps with learning")
    parser.add_argument("--hidden-sizes", type=int, nargs="*", default=[64, 64])
    parser.add_argument("--activation", choices=("tanh", "relu"), default="relu")
    parser.add_argument("--layer-norm", action="store_true", help="before each activation")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--critic", default="self", help="marl only: critic scope")
    on_rollouts = parser.add_argument_group("ppo, pqn")
    on_rollouts.add_argument("--epochs", type=int)
    on_rollouts.add_argument("--minibatches", type=int)
    on_replay = parser.add_argument_group("dqn, sac: gradient steps come after each rollout")
    on_replay.add_argument("--batch-size", type=int)
    on_replay.add_argument("--gradient-steps", type=int)
    on_replay.add_argument("--capacity", type=int, help="transitions")
    on_replay.add_argument("--learning-starts", type=int, help="steps before --total-steps")
    parser.set_defaults(**WORK[parser.parse_known_args()[0].learner])
    work = parser.parse_args()
    size = work.num_envs * work.rollout_length
    if uses_replay(work) and work.learning_starts % size:
        parser.error(f"--learning-starts must be whole rollouts, a multiple of {size}")
    return work


def uses_replay(work: argparse.Namespace) -> bool:
    return work.learner in ("dqn", "sac")


def cpu_seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds that `function` takes, and what it returns."""
    import jax

    started = time.process_time()
    result = jax.block_until_ready(function())
    return time.process_time() - started, result


def report(
    peer: str,
    env_steps: int,
    trace: float,
    compile: float,
    runs: list[float],
    counts: dict[str, Any],
    note: str = "",
) -> None:
    """Print one line: trace and compile in CPU seconds, steps per CPU second, peak memory.

    `counts` is what says that two sides did the same work: `compare.py` wants them equal.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {
        "peer": peer,
        "trace": round(trace, 2),
        "compile": round(compile, 2),
        "steps_per_cpu_second": round(env_steps / statistics.median(runs)),
        "peak_mb": round(peak),
        "counts": {"env_steps": env_steps} | counts,
        "note": note,
        "versions": {name: version(name) for name in ("jax", "jaxlib", "jaxmarl")},
    }
    print(json.dumps(row), flush=True)
