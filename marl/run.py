"""A training run: its state and metrics, and what can be done with it afterwards."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from marl import checkpoint, contents, directory, evaluation, experiment, health
from marl import config as configuration
from marl.directory import CONFIG, EVALUATIONS, FAILURE, METRICS, SUMMARY, RunDirectory
from marl.envs.errors import NotFinite, UsageError
from marl.policy import Policy
from marl.program import Metrics, ProgramSpec, RunState, program
from marl.report import evaluation_row, training_row
from marl.specs import Team

# the keys of training are split from the seed's, which gives the same keys as folding in 0, 1, ...
_EVALUATION = 1 << 20


class Weights(NamedTuple):
    """What acting takes, of one seed or of all: the fields of the same names of `RunState`."""

    team: Any
    hparams: Any


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
      checkpoint_replay: whether the replay buffer is in the checkpoints that are written.
      left_out: fields of the state that the checkpoint lacked which it was loaded from, and their
        bytes; they are () in `state`.
    """

    def __init__(
        self,
        team: Team,
        spec: ProgramSpec,
        seed: int,
        config: Mapping[str, Any],
        checkpoint_replay: bool = True,
    ):
        self.team, self.spec, self.seed, self.config = team, spec, seed, dict(config)
        self.checkpoint_replay = checkpoint_replay
        self.left_out: dict[str, int] = {}
        self.state: RunState | Any = None
        self.horizon = 0  # environment steps at which schedules end
        self.metrics: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.interrupted = False
        self.path: Path | None = None
        self._directory: RunDirectory | None = None  # None as long as nothing is written
        self._best: dict[int, float] = {}  # best score of an evaluation, per seed

    @property
    def updates(self) -> int:
        """Updates done."""
        return int(np.asarray(self.state.update).reshape(-1)[0])

    @property
    def env_steps(self) -> int:
        """Environment steps done, of one seed."""
        return self.updates * self.spec.num_envs * self.spec.rollout_length

    def weights(self, seed: int = 0, best: bool = False) -> Weights:
        """What acting takes, of one seed (by index): the last, or those of its best evaluation."""
        num_seeds = self.spec.num_seeds
        if not 0 <= seed < num_seeds:
            raise UsageError(f"seed = {seed} is out of range; this run has {num_seeds}, from 0 on")
        weights = Weights(self.state.team, self.state.hparams)
        if num_seeds > 1:
            weights = jax.tree.map(lambda x: x[seed], weights)
        if not best:
            return weights
        if self.path is None:
            raise UsageError("the best weights are kept in a run directory; train with out=...")
        return checkpoint.restore(directory.best(self.path, seed), weights)

    def policy(self, *, greedy: bool = False, seed: int = 0, best: bool = False) -> Policy:
        """The trained team as a function: `action, memory = policy(key, obs, memory)`.

        Args:
          greedy: take the mode of each agent's policy instead of sampling.
          seed: which of the run's seeds, by index.
          best: the weights of that seed's best evaluation instead of the last.
        """
        weights = self.weights(seed, best)
        mode = "greedy" if greedy else "stochastic"
        return Policy(self.team.env, self.team.spec, weights.team, weights.hparams, mode)

    def evaluate(
        self,
        episodes: int = 100,
        seed: int = 0,
        modes: Sequence[str] = evaluation.MODES,
        best: bool = False,
    ) -> dict[str, Any]:
        """Play whole episodes with every trained seed.

        Args:
          episodes: per seed and mode, rounded up to a multiple of the parallel environments.
          seed: of the evaluation's environments and actions.
          modes: "stochastic", "greedy" or both.
          best: play the best weights instead of the last.

        Returns:
          By mode, what `marl.evaluation.evaluate` gives; a list with one entry per seed where the
          run has several.
        """
        results: dict[str, Any] = {}
        for mode in (modes,) if isinstance(modes, str) else modes:
            by_seed = [
                evaluation.evaluate(
                    self.team.env,
                    self.team.spec,
                    *self.weights(index, best),
                    episodes=episodes,
                    key=jax.random.fold_in(jax.random.key(seed), _EVALUATION + index),
                    mode=mode,
                )
                for index in range(self.spec.num_seeds)
            ]
            results[mode] = by_seed[0] if self.spec.num_seeds == 1 else by_seed
        return results

    def save(self, path: str | Path) -> Path:
        """Write the run to a new directory, from which `marl.load` and `--resume` take it."""
        if self.state.carry is None:
            raise UsageError("this run was loaded into another environment and cannot be saved")
        experiment.check_new(path)
        self.attach(path)
        assert self._directory is not None
        for file, found in ((METRICS, self.metrics), (EVALUATIONS, self.evaluations)):
            for row in found:
                self._directory.row(file, row)
        self.checkpoint(keep=1)
        self.finish()
        return Path(path)

    def attach(self, path: str | Path) -> None:
        """Write to the new run directory `path` from now on."""
        self.path = Path(path)
        self._directory = RunDirectory.create(self.path, self.config)
        from marl import policy_files  # which reads runs

        policy_files.keep(self.team, self.path)

    def resume(self, path: str | Path, report: Callable[[str], Any]) -> None:
        """Go on from the newest whole checkpoint of a run directory; later rows are dropped.

        What the checkpoint lacks stays as it is in the fresh state, and that is reported.
        """
        self.path = Path(path)
        self.restore(report)
        if self.left_out:
            assert self.spec.team.replay is not None
            report(contents.not_exact(self.left_out, self.spec.team.replay, self.spec.num_envs))
            self.left_out = {}
        self._directory = RunDirectory(self.path, self.env_steps)
        self.metrics, self.evaluations = directory.rows(self.path)
        for row in self.evaluations:
            self.note_best(row)

    def check_resumable(self, path: str | Path, report: Callable[[str], Any]) -> Path:
        """The newest whole checkpoint of a run directory, if it is of this team."""
        found = directory.newest(Path(path), report)
        manifest = checkpoint.read_manifest(found)
        for name, mine in (("agents", list(self.team.agents)), ("num_seeds", self.spec.num_seeds)):
            if manifest[name] != mine:
                raise UsageError(
                    f"checkpoint {found} has {name} = {manifest[name]} and this run {mine}; "
                    "use the environment and team that it was trained with"
                )
        return found

    def restore(self, report: Callable[[str], Any], part: tuple[str, ...] | None = None) -> None:
        """Take the state of the newest whole checkpoint, or the fields `part` of it.

        The horizon of schedules stays that of the run's first total, and does not move.
        """
        assert self.path is not None
        found = self.check_resumable(self.path, report)
        manifest = checkpoint.read_manifest(found)
        self.left_out = manifest.get("left_out", {})
        if self.left_out:
            part = tuple(f for f in part or RunState._fields if f not in self.left_out)
        self.state = checkpoint.restore(found, self.state, part)
        self.horizon = manifest["horizon"]

    def log(self, pending: Metrics, env_steps: int, seconds: float) -> None:
        """Add a row for the updates since the last one."""
        self._add(self.metrics, METRICS, training_row(self.team, pending, env_steps, seconds))

    def log_evaluation(self, episodes: int) -> None:
        """Evaluate, add the result as a row, and keep the best."""
        results = self.evaluate(episodes, seed=self.seed)
        for index in self.note_best(results):
            if self._directory is not None:
                manifest = self._manifest() | {"score": self._best[index]}
                self._directory.best(index, self.env_steps, self.weights(index), manifest)
        self._add(self.evaluations, EVALUATIONS, evaluation_row(results, self.env_steps))

    def checkpoint(self, keep: int) -> None:
        """Write a checkpoint to the run directory, if there is one, beside training."""
        if self._directory is not None:
            kept, left_out = self._kept()
            manifest = self._manifest() | {"left_out": left_out}
            self._directory.checkpoint(self.env_steps, kept, manifest, keep)

    def _kept(self) -> tuple[RunState, dict[str, int]]:
        """What checkpoints take of the state, and what they leave out."""
        kept, left_out = contents.of(self.state, self.checkpoint_replay)
        return kept, left_out | self.left_out

    def finish(self) -> Path | None:
        """Everything on the disk, and the summary."""
        if self._directory is not None:
            self._directory.close()
            self._directory.json(SUMMARY, self._summary())
        return self.path

    def fail(self, fault: health.Fault) -> NoReturn:
        """Leave evidence of what was not finite, and raise it. Checkpoints stay as they are."""
        replay = "the same configuration and seed"
        if self._directory is not None:
            self._directory.close()
            if checkpoint.latest(self._directory.path / directory.CHECKPOINTS) is not None:
                replay = f"marl train --resume {self.path}"
            self._directory.json(FAILURE, health.as_json(fault, replay))
        raise NotFinite(health.advice(fault, replay))

    def _manifest(self) -> dict[str, Any]:
        return {
            "agents": list(self.team.agents),
            "num_seeds": self.spec.num_seeds,
            "horizon": self.horizon,
        }

    def note_best(self, results: Mapping[str, Any]) -> list[int]:
        """Seeds (by index) whose evaluation is their best so far."""
        by_seed = results.get("stochastic", [])
        better = []
        for index, result in enumerate(by_seed if isinstance(by_seed, list) else [by_seed]):
            score = evaluation.score(result)
            if score is not None and score > self._best.get(index, -math.inf):
                self._best[index] = score
                better.append(index)
        return better

    def _add(self, rows: list[dict[str, Any]], file: str, row: dict[str, Any]) -> None:
        rows.append(row)
        if self._directory is not None:
            self._directory.row(file, row)

    def _summary(self) -> dict[str, Any]:
        return {
            "env_steps": self.env_steps,
            "updates": self.updates,
            "interrupted": self.interrupted,
            "agents": list(self.team.agents),
            **contents.summary(*self._kept()),
            "best": {f"seed_{index}": score for index, score in sorted(self._best.items())},
            "metrics": self.metrics[-1] if self.metrics else None,
            "evaluation": self.evaluations[-1] if self.evaluations else None,
        }


def load(
    path: str | Path,
    env: Any = None,
    team: Team | None = None,
    report: Callable[[str], Any] = warnings.warn,
) -> Run:
    """A saved run with the state of its newest whole checkpoint.

    Args:
      path: the run directory.
      env: the environment, where it was an object without an id; or another one whose agents,
        spaces and global state are the same, to evaluate the team in.
      team: the team, where its learner was an object without a name.
      report: takes what was wrong with damaged checkpoints.
    """
    path = experiment.run_directory(path)
    recorded = configuration.load(path / CONFIG)
    if team is None:
        _, team = experiment.rebuild(recorded, path, env)
    spec = ProgramSpec.of(team, recorded.training)
    keep_replay = recorded.checkpoint.replay
    run = Run(team, spec, recorded.training.seed, configuration.to_dict(recorded), keep_replay)
    keys = jax.random.split(jax.random.key(0), spec.num_seeds)
    run.state = jax.eval_shape(program(spec).init_function, keys, team.group_hparams())
    run.path = path
    # another environment has another state, and what was running in it is of no use here
    if env is None:
        run.restore(report)
    else:
        run.state = run.state._replace(carry=None)
        run.restore(report, ("key", "update", "team", "hparams"))
    if run.left_out:
        run.state = run.state._replace(replay=())
    run.metrics, run.evaluations = directory.rows(path)
    for row in run.evaluations:
        run.note_best(row)
    return run
