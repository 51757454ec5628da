"""What both sides of a comparison share: CPU seconds, peak memory, one JSON line of results.

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


def arguments(description: str) -> argparse.Namespace:
    """The work: environment, sizes, repeats."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--env", default="MPE_simple_spread_v3")
    parser.add_argument("--env-kwargs", type=json.loads, default={})
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--rollout-length", type=int, default=128)
    parser.add_argument("--total-steps", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--critic", default="self", help="marl only: critic scope")
    return parser.parse_args()


def cpu_seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds that `function` takes, and what it returns."""
    import jax

    started = time.process_time()
    result = jax.block_until_ready(function())
    return time.process_time() - started, result


def report(
    peer: str, env_steps: int, trace: float, compile: float, runs: list[float], note: str = ""
) -> None:
    """Print one line: trace and compile in CPU seconds, steps per CPU second, peak memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {
        "peer": peer,
        "trace": round(trace, 2),
        "compile": round(compile, 2),
        "steps_per_cpu_second": round(env_steps / statistics.median(runs)),
        "peak_mb": round(peak),
        "note": note,
        "versions": {name: version(name) for name in ("jax", "jaxlib", "jaxmarl")},
    }
    print(json.dumps(row), flush=True)
