"""A run directory: the files of a run, each written whole or appended row by row.

config.yaml  metrics.jsonl  evaluations.jsonl  summary.json  failure.json (after a NaN)
checkpoints/step_*       the newest few states of training
best/seed_*/step_*       each seed's weights at its best evaluation
frozen/AGENT/step_*      what frozen agents act by: copies out of other runs
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import jax
import jax.numpy as jnp

from marl import checkpoint
from marl import config as configuration
from marl.background import Background
from marl.envs.errors import UsageError
from marl.logging import JsonLines, read_rows, strict

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
CONFIG, SUMMARY, FAILURE = "config.yaml", "summary.json", "failure.json"
CHECKPOINTS, BEST, FROZEN = "checkpoints", "best", "frozen"


class RunDirectory:
    """Writes one run's files. Checkpoints are written beside training, in a thread."""

    def __init__(self, path: Path, resume_at: int | None = None):
        self.path = path
        self._rows = {name: JsonLines(path / name, resume_at) for name in (METRICS, EVALUATIONS)}
        self._background = Background()

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> "RunDirectory":
        """A new directory with the configuration in it."""
        text = configuration.to_yaml(config)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / CONFIG).write_text(text, encoding="utf-8")
            return cls(path)
        except OSError as error:
            raise UsageError(f"could not write to {path}: {error.strerror or error}") from error

    def row(self, file: str, row: Mapping[str, Any]) -> None:
        """Append a row to `METRICS` or `EVALUATIONS`."""
        self._rows[file].write(row)

    def checkpoint(self, step: int, state: Any, manifest: Mapping[str, Any], keep: int) -> None:
        """Write a checkpoint; the state is copied first, as training takes its memory."""
        self._save(self.path / CHECKPOINTS, step, state, manifest, keep)

    def best(self, seed: int, step: int, weights: Any, manifest: Mapping[str, Any]) -> None:
        """Put apart one seed's best weights."""
        self._save(self.path / BEST / f"seed_{seed}", step, weights, manifest, 1)

    def _save(
        self, folder: Path, step: int, tree: Any, manifest: Mapping[str, Any], keep: int
    ) -> None:
        copy = jax.tree.map(jnp.copy, tree)
        self._background.submit(checkpoint.save, folder, step, copy, manifest, keep)

    def json(self, file: str, values: Mapping[str, Any]) -> None:
        """Write `SUMMARY` or `FAILURE`."""
        temporary = self.path / f".{file}.tmp"
        try:
            temporary.write_text(json.dumps(strict(values), indent=2) + "\n", encoding="utf-8")
            temporary.replace(self.path / file)
        except OSError as error:
            raise UsageError(f"could not write to {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """Wait for what is being written; raises its error."""
        self._background.close()


def newest(path: Path, report: Any = warnings.warn) -> Path:
    """The newest whole checkpoint of a run directory."""
    found = checkpoint.latest(path / CHECKPOINTS, report)
    if found is None:
        raise UsageError(f"{path} holds no whole checkpoint to go on from")
    return found


def best(path: Path, seed: int, report: Any = warnings.warn) -> Path:
    """The best weights of one seed (by index)."""
    found = checkpoint.latest(path / BEST / f"seed_{seed}", report)
    if found is None:
        raise UsageError(
            f"{path} holds no best weights of seed {seed}; evaluations during training keep them"
        )
    return found


def frozen(path: Path, agent: str) -> Path:
    """Where the policy of a frozen agent is kept."""
    return path / FROZEN / quote(agent, safe="")


def frozen_overrides(path: Path) -> dict[str, dict[str, str]]:
    """Overrides by which the frozen agents of a run act by what its directory keeps."""
    folder = path / FROZEN
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return {unquote(kept.name): {"run": str(kept)} for kept in found}


def rows(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics and evaluations that were written so far."""
    return read_rows(path / METRICS), read_rows(path / EVALUATIONS)
