"""`marl.train`: the host loop around the compiled program.

The program runs in chunks. Between chunks the host logs, evaluates, writes checkpoints, shows
progress and can stop; none of that changes what is trained.
"""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marl import experiment, health, logging, xla
from marl.agents.validation import one_of
from marl.envs.errors import UsageError
from marl.program import Metrics, Program, ProgramSpec, program
from marl.record import record
from marl.run import Run
from marl.specs import Team, same_environment
from marl.watchdog import Watchdog


class Schedule(NamedTuple):
    """When the host does something, in updates; 0 means only at the end.

    Everything happens where a row of metrics ends: a run that goes on from a checkpoint then writes
    the rows that it would have written.
    """

    log: int
    evaluate: int
    checkpoint: int
    total: int

    @classmethod
    def of(cls, log: int, evaluate: int, checkpoint: int, total: int) -> "Schedule":
        """Intervals rounded up to whole rows."""
        return cls(log, -(-evaluate // log) * log, -(-checkpoint // log) * log, total)

    def next_stop(self, done: int) -> int:
        """The first update after `done` at which the host has something to do."""
        return min(done - done % self.log + self.log, self.total)

    def due(self, every: int, done: int) -> bool:
        """Whether it is time for something that the end does anyway."""
        return bool(every) and done % every == 0 and done < self.total


def train(
    env: Any,
    team: Team,
    total_steps: float,
    *,
    seed: int = 0,
    num_seeds: int = 1,
    num_envs: int = 16,
    rollout_length: int = 128,
    reset_pool: int = 0,
    log_interval: int = 10,
    eval_interval: int = 0,
    eval_episodes: int = 100,
    checkpoint_interval: int = 0,
    keep_checkpoints: int = 3,
    out: Any = None,
    config: Mapping[str, Any] | None = None,
    progress: bool = True,
    on_nan: str = "stop",
    resume: Any = None,
) -> Run:
    """Train a team.

    Args:
      env: the environment that `team` was made for.
      team: from `marl.team`.
      total_steps: environment steps of each seed, rounded up to whole updates of
        `num_envs * rollout_length` steps (and said when it is rounded).
      seed: of everything random. Seeds `seed, seed + 1, ...` are trained when `num_seeds` > 1.
      num_seeds: independent runs, vmapped in one program.
      num_envs: parallel environments per seed.
      rollout_length: steps between two updates.
      reset_pool: start episodes from one of so many resets drawn per rollout; 0 draws each anew.
      log_interval: updates per row of metrics.
      eval_interval, eval_episodes: environment steps between evaluations (0: one at the end), and
        their episodes. Intervals are rounded up to whole rows of metrics.
      checkpoint_interval, keep_checkpoints: environment steps between checkpoints (0: one at the
        end), and how many are kept.
      out: run directory; None keeps everything in memory until `run.save`.
      config: the resolved configuration to record in the run directory.
      progress: show it.
      on_nan: what a non-finite observation, reward, loss or parameter does: "stop" ends the run
        at the chunk's end, with the agent, quantity and step in the message; "skip" undoes the
        update of the agents it reached, and goes on.
      resume: directory of a run to go on with; it is written to as well.

    Returns:
      The run. After Ctrl-C or SIGTERM it is saved, returned as it stands, and `interrupted`.

    Raises:
      UsageError: what was asked for does not fit together; nothing was written.
      NotFinite: with `on_nan="stop"`.
    """
    xla.prepare()
    if not same_environment(env, team):
        raise UsageError(
            "this team was made for another environment; call marl.team(env, ...) on it"
        )
    sizes = {"num_envs": num_envs, "rollout_length": rollout_length, "num_seeds": num_seeds}
    for name, value in {**sizes, "log_interval": log_interval}.items():
        if value < 1:
            raise UsageError(f"{name} = {value} is out of range; give 1 or more")
    steps = num_envs * rollout_length
    total = total_updates(total_steps, steps, num_envs, rollout_length)
    team.check((rollout_length, num_envs))
    shown = logging.make_progress(progress)
    if total * steps != total_steps:
        shown.message(
            f"total_steps = {total_steps:,.0f} is {total_steps / steps:.1f} updates of {steps:,} "
            f"steps; training {total:,} updates = {total * steps:,} steps"
        )
    one_of("on_nan", on_nan, ("stop", "skip"))
    spec = ProgramSpec(
        team.env,
        team.spec,
        num_envs,
        rollout_length,
        reset_pool,
        num_seeds,
        log_interval,
        on_nan == "skip",
    )
    if config is None:
        config = record(
            team,
            {
                "total_steps": int(total_steps),
                "seed": seed,
                **sizes,
                "reset_pool": reset_pool,
                "log_interval": log_interval,
                "on_nan": on_nan,
                "eval_interval": eval_interval,
                "eval_episodes": eval_episodes,
                "checkpoint_interval": checkpoint_interval,
                "keep_checkpoints": keep_checkpoints,
            },
        )
    run = Run(team, spec, seed, config)
    if out is not None and resume is None:
        experiment.check_new(out)
    _start(run, program(spec), total * steps, resume, shown)
    if out is not None and resume is None:
        run.attach(out)  # after compiling: a run stopped before that leaves nothing behind
    every = Schedule.of(
        log_interval, -(-eval_interval // steps), -(-checkpoint_interval // steps), total
    )
    _loop(run, program(spec), every, eval_episodes, keep_checkpoints, shown)
    return run


def total_updates(total_steps: float, steps: int, num_envs: int, rollout_length: int) -> int:
    """Updates that make at least `total_steps`; raises UsageError below one."""
    if total_steps < steps:
        raise UsageError(
            f"total_steps = {total_steps:,.0f} is less than one update, which takes "
            f"num_envs * rollout_length = {num_envs} * {rollout_length} = {steps:,} steps; "
            "give more steps, or fewer environments or shorter rollouts"
        )
    return -(-int(total_steps) // steps)


def _start(run: Run, compiled: Program, total_steps: int, resume: Any, shown: Any) -> None:
    """The run's first state: fresh, or that of the newest checkpoint."""
    hparams = run.team.group_hparams()
    keys = seed_keys(run.seed, run.spec.num_seeds)
    if not compiled.is_compiled:
        with shown.compiling("the training program"):
            compiled.compile(keys, hparams)
    state = compiled.init(keys, hparams)
    run.horizon, run.state = total_steps, state
    if resume is not None:
        run.resume(resume, shown.message)
    run.state = run.state._replace(hparams=_with_horizon(state.hparams, run.horizon))


def seed_keys(seed: int, num_seeds: int) -> jax.Array:
    """One key per seed `seed, seed + 1, ...`."""
    return jax.vmap(jax.random.key)(seed + jnp.arange(num_seeds, dtype=jnp.uint32))


def _with_horizon(hparams: Any, total_steps: int) -> Any:
    """Schedules without a horizon of their own end with the run."""

    def fill(group: Any) -> Any:
        if "schedule_steps" not in getattr(group, "_fields", ()):
            return group
        own = group.schedule_steps
        return group._replace(schedule_steps=jnp.where(own > 0, own, float(total_steps)))

    return tuple(fill(group) for group in hparams)


def _loop(
    run: Run, compiled: Program, every: Schedule, episodes: int, keep: int, shown: Any
) -> None:
    steps = run.spec.num_envs * run.spec.rollout_length
    done = run.updates
    shown.start(every.total * steps, done * steps)
    started = time.monotonic()
    dog = Watchdog(shown.message)
    with stop_on_signal() as stop:
        while done < every.total and not stop.is_set():
            num = every.next_stop(done) - done
            with dog.watching(f"a chunk of {num} updates"):
                run.state, metrics = compiled.chunk(run.state, num)
                metrics = jax.tree.map(lambda x, n=num: np.asarray(x[:n]), metrics)
            _check_health(run, metrics, done, shown)
            done += num
            run.log(metrics, done * steps, time.monotonic() - started)
            shown.update(done * steps, run.metrics[-1])
            if every.due(every.evaluate, done):
                _evaluate(run, episodes, shown)
            if every.due(every.checkpoint, done):
                run.checkpoint(keep)
    run.interrupted = done < every.total
    if not run.interrupted:
        _evaluate(run, episodes, shown)
    shown.close()
    saved = run.finish(keep)
    if saved is not None:
        shown.message(f"{'stopped early; ' * run.interrupted}saved to {saved}")


def _check_health(run: Run, metrics: Metrics, first_update: int, shown: Any) -> None:
    """Stop, or say what was skipped, where a chunk was not finite."""
    fault = health.find(run.team, run.spec, metrics, first_update)
    if fault is None:
        return
    if not run.spec.skip_nan:
        shown.close()
        run.fail(fault)
    skipped = sum(int((~finite).sum()) for finite in metrics.finite)
    shown.message(f"{fault}; {skipped} updates of agents were undone in this chunk")


def _evaluate(run: Run, episodes: int, shown: Any) -> None:
    if run.evaluations:
        run.log_evaluation(episodes)
        return
    with shown.compiling(f"and playing {episodes} evaluation episodes"):
        run.log_evaluation(episodes)


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM set the event instead of ending the process; a second one ends it."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(signum: int, frame: Any) -> None:
        del frame
        if stop.is_set():
            signal.signal(signum, previous[signum])
            signal.raise_signal(signum)
        stop.set()

    previous: dict[int, Any] = {
        number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
