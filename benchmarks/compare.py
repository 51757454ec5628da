"""Measure this library beside jaxnasium 0.1.1 on the same work: `python benchmarks/compare.py`.

The peer gets a virtual environment of its own. Both are pinned to one core and alternate; the table
has the medians. Arguments that are not named below go to both sides (see `common.arguments`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEER = ["jaxnasium[algs]==0.1.1", "jaxmarl==0.2.0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    parser.add_argument("--core", type=int, default=os.cpu_count() - 1)
    parser.add_argument("--peer-venv", type=Path, default=HERE / ".venv-jaxnasium")
    options, work = parser.parse_known_args()
    peer_python = options.peer_venv / "bin" / "python"
    if not peer_python.exists():
        venv.create(options.peer_venv, with_pip=True)
        subprocess.run([peer_python, "-m", "pip", "install", "-q", *PEER], check=True)
    rows: dict[str, list[dict]] = {}
    for _ in range(options.rounds):
        for python, script in ((sys.executable, "run_marl.py"), (peer_python, "run_jaxnasium.py")):
            row = run(["taskset", "-c", str(options.core), str(python), str(HERE / script), *work])
            rows.setdefault(row["peer"], []).append(row)
    print(table(rows))
    print(same_work(rows))


def run(command: list[str]) -> dict:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=HERE)
    print(done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def same_work(rows: dict[str, list[dict]]) -> str:
    """What both sides counted; raises where it differs."""
    first, second = (found[0]["counts"] for found in rows.values())
    if first != second:
        raise SystemExit(f"the two sides did not do the same work: {rows}")
    return "each side: " + json.dumps(first)


def table(rows: dict[str, list[dict]]) -> str:
    """Medians, and each column's ratio to the peer's."""
    columns = ("trace", "compile", "steps_per_cpu_second", "peak_mb")
    medians = {
        peer: {c: statistics.median(row[c] for row in found) for c in columns}
        for peer, found in rows.items()
    }
    lines = ["| | trace + compile CPU s | env steps / CPU s | peak MB |", "|---|---|---|---|"]
    for peer, m in medians.items():
        lines.append(
            f"| {peer} | {m['trace']:.1f} + {m['compile']:.1f} "
            f"| {m['steps_per_cpu_second']:,.0f} | {m['peak_mb']:,.0f} |"
        )
    ours, theirs = medians.values()
    compiling = (ours["trace"] + ours["compile"]) / (theirs["trace"] + theirs["compile"])
    speed = ours["steps_per_cpu_second"] / theirs["steps_per_cpu_second"]
    memory = ours["peak_mb"] / theirs["peak_mb"]
    lines.append(f"| ratio | {compiling:.2f} | {speed:.2f} | {memory:.2f} |")
    found = next(iter(rows.values()))[0]["versions"]
    lines.append("\n" + ", ".join(f"{name} {number}" for name, number in found.items()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
