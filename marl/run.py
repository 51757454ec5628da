"""A training run: its state, metrics and directory, and what can be done with it afterwards."""

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from marl import checkpoint, evaluation, experiment, health
from marl import config as configuration
from marl.background import Background
from marl.envs.errors import NotFinite, UsageError
from marl.logging import JsonLines, read_rows, strict
from marl.policy import Policy
from marl.program import Metrics, ProgramSpec, RunState, program
from marl.report import evaluation_row, training_row
from marl.specs import Team

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
CONFIG, SUMMARY, FAILURE, BEST = "config.yaml", "summary.json", "failure.json", "best"


class Run:
    """One training run, possibly of several seeds. Made by `marl.train` and `marl.load`.

    Attributes:
      team: the team that was trained.
      spec: what its program depends on.
      state: `RunState`; leads with [seeds] when there are several.
      metrics: rows of training metrics.
      evaluations: rows of evaluations.
      path: the run directory, or None while everything is in memory.
      interrupted: whether training was stopped before its end.
    """

    def __init__(self, team: Team, spec: ProgramSpec, seed: int, config: Mapping[str, Any]):
        self.team, self.spec, self.seed, self.config = team, spec, seed, dict(config)
        self.state: RunState | Any = None
        self.horizon = 0  # environment steps at which schedules end
        self.metrics: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.interrupted = False
        self.path: Path | None = None
        self._files: dict[str, JsonLines] = {}
        self._background = Background()
        self._best: dict[int, float] = {}  # best score of an evaluation, per seed

    @property
    def updates(self) -> int:
        """Updates done."""
        return int(np.asarray(self.state.update).reshape(-1)[0])

    @property
    def env_steps(self) -> int:
        """Environment steps done, of one seed."""
        return self.updates * self.spec.num_envs * self.spec.rollout_length

    def seed_state(self, seed: int = 0) -> tuple[Any, Any]:
        """The team's state and hparams of one seed (by index)."""
        num_seeds = self.spec.num_seeds
        if not 0 <= seed < num_seeds:
            raise UsageError(
                f"seed = {seed} is out of range; this run has {num_seeds}, counted from 0"
            )
        if num_seeds == 1:
            return self.state.team, self.state.hparams
        return jax.tree.map(lambda x: x[seed], (self.state.team, self.state.hparams))

    def policy(self, *, greedy: bool = False, seed: int = 0) -> Policy:
        """The trained team as a function: `action, memory = policy(key, obs, memory)`."""
        state, hparams = self.seed_state(seed)
        return Policy(
            self.team.env, self.team.spec, state, hparams, "greedy" if greedy else "stochastic"
        )

    def evaluate(
        self, episodes: int = 100, seed: int = 0, modes: Sequence[str] = ("stochastic", "greedy")
    ) -> dict[str, Any]:
        """Play whole episodes with every trained seed.

        Args:
          episodes: per seed and mode, rounded up to a multiple of the parallel environments.
          seed: of the evaluation's environments and actions.
          modes: "stochastic", "greedy" or both.

        Returns:
          By mode, what `marl.evaluation.evaluate` gives; a list with one entry per seed where the
          run has several.
        """
        results: dict[str, Any] = {}
        for mode in modes:
            by_seed = []
            for index in range(self.spec.num_seeds):
                state, hparams = self.seed_state(index)
                key = jax.random.fold_in(jax.random.key(seed), index)
                by_seed.append(
                    evaluation.evaluate(
                        self.team.env,
                        self.team.spec,
                        state,
                        hparams,
                        episodes=episodes,
                        key=key,
                        mode=mode,
                    )
                )
            results[mode] = by_seed[0] if self.spec.num_seeds == 1 else by_seed
        return results

    def save(self, path: str | Path) -> Path:
        """Write the run to a new directory, from which `marl.load` and `--resume` take it."""
        self.attach(path)
        for row in self.metrics:
            self._files[METRICS].write(row)
        for row in self.evaluations:
            self._files[EVALUATIONS].write(row)
        return Path(self.finish(keep=1) or path)

    def attach(self, path: str | Path) -> None:
        """Make `path` the run directory: an empty or new one, in which the configuration is put."""
        path = Path(path)
        experiment.check_new(path)
        text = configuration.to_yaml(self.config)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / CONFIG).write_text(text, encoding="utf-8")
            self._open(path)
        except OSError as error:
            raise UsageError(f"could not write to {path}: {error.strerror or error}") from error

    def reattach(self, path: str | Path, report: Callable[[str], Any]) -> None:
        """Go on from the newest whole checkpoint of a run directory; later rows are dropped."""
        path = Path(path)
        self.restore(path, report)
        self._open(path, self.env_steps)
        self.metrics = read_rows(path / METRICS)
        self.evaluations = read_rows(path / EVALUATIONS)
        for row in self.evaluations:
            self._note_best(row)

    def restore(self, path: Path, report: Callable[[str], Any]) -> None:
        """Take the state of the newest whole checkpoint; hparams are those asked for now.

        The horizon of schedules stays that of the run's first total, and does not move.
        """
        newest = checkpoint.latest(path / "checkpoints", report)
        if newest is None:
            raise UsageError(f"{path} holds no whole checkpoint to go on from")
        manifest = checkpoint.read_manifest(newest)
        for name, mine in (("agents", list(self.team.agents)), ("num_seeds", self.spec.num_seeds)):
            if manifest[name] != mine:
                raise UsageError(
                    f"checkpoint {newest} has {name} = {manifest[name]} and this run {mine}; "
                    "use the environment and team that it was trained with"
                )
        self.state = checkpoint.restore(newest, self.state)
        self.horizon = manifest["horizon"]

    def log(self, pending: Sequence[Metrics], env_steps: int, seconds: float) -> None:
        """Add a row for the updates since the last one."""
        self._add(self.metrics, METRICS, training_row(self.team, pending, env_steps, seconds))

    def log_evaluation(self, episodes: int) -> None:
        """Evaluate, add the result as a row, and keep the best."""
        results = self.evaluate(episodes, seed=self.seed)
        self._keep_best(results)
        self._add(self.evaluations, EVALUATIONS, evaluation_row(results, self.env_steps))

    def checkpoint(self, keep: int = 3) -> None:
        """Write a checkpoint to the run directory, if there is one, beside training."""
        if self.path is None:
            return
        directory = self.path / "checkpoints"
        copy = jax.tree.map(jnp.copy, self.state)  # the next chunk takes the state's memory
        step, manifest = self.env_steps, self._manifest()
        self._background.submit(checkpoint.save, directory, step, copy, manifest, keep)

    def finish(self, keep: int) -> Path | None:
        """The last checkpoint and the summary, on the disk."""
        self.checkpoint(keep)
        self._background.close()
        if self.path is not None:
            self._write_json(SUMMARY, self._summary())
        return self.path

    def fail(self, fault: health.Fault) -> NoReturn:
        """Leave evidence of what was not finite, and raise it. Checkpoints stay as they are."""
        self._background.close()
        replay = "the same configuration and seed"
        if self.path is not None:
            if checkpoint.latest(self.path / "checkpoints") is not None:
                replay = f"marl train --resume {self.path}"
            self._write_json(FAILURE, health.as_json(fault, replay))
        raise NotFinite(health.advice(fault, replay))

    def _manifest(self) -> dict[str, Any]:
        return {
            "agents": list(self.team.agents),
            "num_seeds": self.spec.num_seeds,
            "horizon": self.horizon,
        }

    def _note_best(self, results: Mapping[str, Any]) -> list[int]:
        """Seeds (by index) whose evaluation is their best so far."""
        by_seed = results["stochastic"]
        better = []
        for index, result in enumerate([by_seed] if self.spec.num_seeds == 1 else by_seed):
            score = evaluation.score(result)
            if score is not None and score > self._best.get(index, -math.inf):
                self._best[index] = score
                better.append(index)
        return better

    def _keep_best(self, results: Mapping[str, Any]) -> None:
        """Put apart the state of each seed whose evaluation is its best so far."""
        for index in self._note_best(results):
            if self.path is not None:
                copy = jax.tree.map(jnp.copy, self.seed_state(index))
                manifest = self._manifest() | {"score": self._best[index]}
                directory = self.path / BEST / f"seed_{index}"
                step = self.env_steps
                self._background.submit(checkpoint.save, directory, step, copy, manifest, 1)

    def _add(self, rows: list[dict[str, Any]], file: str, row: dict[str, Any]) -> None:
        rows.append(row)
        if file in self._files:
            self._files[file].write(row)

    def _open(self, path: Path, resume_at: int | None = None) -> None:
        self.path = path
        self._files = {name: JsonLines(path / name, resume_at) for name in (METRICS, EVALUATIONS)}

    def _summary(self) -> dict[str, Any]:
        return {
            "env_steps": self.env_steps,
            "updates": self.updates,
            "interrupted": self.interrupted,
            "agents": list(self.team.agents),
            "best": {f"seed_{index}": score for index, score in sorted(self._best.items())},
            "metrics": self.metrics[-1] if self.metrics else None,
            "evaluation": self.evaluations[-1] if self.evaluations else None,
        }

    def _write_json(self, name: str, values: Mapping[str, Any]) -> None:
        assert self.path is not None
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(json.dumps(strict(values), indent=2) + "\n", encoding="utf-8")
        temporary.replace(self.path / name)


def load(path: str | Path, env: Any = None, team: Team | None = None) -> Run:
    """A saved run with the state of its newest whole checkpoint.

    Args:
      path: the run directory.
      env: the environment, where it was an object without an id.
      team: the team, where its learner was an object without a name.
    """
    path = Path(path)
    if not (path / CONFIG).is_file():
        raise UsageError(f"{path} holds no run: there is no {path / CONFIG}")
    recorded = configuration.load(path / CONFIG)
    if team is None:
        _, team = experiment.build(recorded, env)
    training = recorded.training
    spec = ProgramSpec(
        team.env,
        team.spec,
        training.num_envs,
        training.rollout_length,
        training.reset_pool,
        training.num_seeds,
        training.log_interval,
        training.on_nan == "skip",
    )
    run = Run(team, spec, training.seed, configuration.to_dict(recorded))
    keys = jax.random.split(jax.random.key(0), training.num_seeds)
    run.state = jax.eval_shape(program(spec).init_function, keys, team.group_hparams())
    run.restore(path, warnings.warn)
    run.path = path
    run.metrics, run.evaluations = read_rows(path / METRICS), read_rows(path / EVALUATIONS)
    return run
