"""`marl.train`: the host loop around the compiled program.

The program runs in chunks. Between chunks the host logs, evaluates, writes checkpoints, shows
progress and can stop; none of that changes what is trained.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marl import contents, experiment, health, logging, replay, xla
from marl.envs.errors import UsageError
from marl.interrupts import stop_on_signal
from marl.program import Metrics, Program, ProgramSpec, program
from marl.record import record
from marl.run import Run
from marl.settings import Settings
from marl.specs import Team, same_environment
from marl.watchdog import Watchdog


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
    checkpoint_replay: bool = True,
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
      checkpoint_replay: False leaves the replay buffer out of checkpoints. They are smaller, and a
        run that goes on from one fills the buffer anew: resuming is then not exact.
      out: run directory; None keeps everything in memory until `run.save`.
      config: the resolved configuration to record in the run directory.
      progress: show it.
      on_nan: what a non-finite observation, reward, loss or parameter does: "stop" ends the run
        at the chunk's end, with the agent, quantity and step in the message; "skip" undoes the
        update of the agents it reached, gives samples of it no weight, and goes on.
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
    settings = Settings.of(
        total_steps=total_steps,
        seed=seed,
        num_seeds=num_seeds,
        num_envs=num_envs,
        rollout_length=rollout_length,
        reset_pool=reset_pool,
        log_interval=log_interval,
        on_nan=on_nan,
        eval_interval=eval_interval,
        eval_episodes=eval_episodes,
        checkpoint_interval=checkpoint_interval,
        keep_checkpoints=keep_checkpoints,
        checkpoint_replay=checkpoint_replay,
    )
    settings.check(team)
    if resume is None and out is not None:
        experiment.check_new(out)
    elif resume is not None and out is not None and Path(out) != Path(resume):
        raise UsageError(f"out = {out} and resume = {resume}: a run goes on in its own directory")
    shown = logging.make_progress(progress)
    settings.say_rounding(shown.message)
    spec = ProgramSpec.of(team, settings)
    run = Run(
        team, spec, seed, config or record(team, settings._asdict()), settings.checkpoint_replay
    )
    _start(run, program(spec), settings.steps, resume, shown)
    if resume is None and out is not None:
        run.attach(out)  # after compiling: a run stopped before that leaves nothing behind
    if run.path is not None and (note := contents.note(run.state, settings.checkpoint_replay)):
        shown.message(note)
    try:
        _loop(run, program(spec), settings, shown)
    finally:
        shown.close()
    return run


def _start(run: Run, compiled: Program, total_steps: int, resume: Any, shown: Any) -> None:
    """The run's first state: fresh, or that of the newest checkpoint."""
    hparams = run.team.group_hparams()
    keys = seed_keys(run.seed, run.spec.num_seeds)
    shapes = jax.eval_shape(compiled.init_function, keys, hparams)
    needed = replay.bytes_needed(run.spec.team.replay, run.spec.num_envs, shapes.replay)
    replay.check_memory(needed, replay.available_memory())
    if resume is not None:
        run.check_resumable(resume, shown.message)
    if not compiled.is_compiled:
        with shown.compiling("the training program"), stop_on_signal() as stop:
            compiled.compile(keys, hparams)
        if stop.is_set():  # an exception would be lost inside XLA's own callbacks
            raise KeyboardInterrupt
    state = compiled.init(keys, hparams)
    run.horizon, run.state = total_steps, state
    if resume is not None:
        run.resume(resume, shown.message)
    if run.horizon < total_steps:
        shown.message(
            f"schedules keep the horizon they began with, {run.horizon:,} steps: from there on "
            "they stay at their end, and where that is a learning rate of 0 nothing is learned"
        )
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


def _loop(run: Run, compiled: Program, settings: Settings, shown: Any) -> None:
    every, steps = settings.intervals, settings.steps_per_update
    done = run.updates
    shown.start(settings.steps, done * steps)
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
                _evaluate(run, settings.eval_episodes, shown)
            if every.due(every.checkpoint, done):
                run.checkpoint(settings.keep_checkpoints)
        run.interrupted = done < every.total
        run.checkpoint(settings.keep_checkpoints)  # before anything else can fail
        if not run.interrupted and not stop.is_set():
            _evaluate(run, settings.eval_episodes, shown)
    shown.close()
    saved = run.finish()
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
    kept = "" if run.spec.team.replay is None else "; what replay holds of it has no weight"
    shown.message(f"{fault}; {skipped} updates of agents were undone in this chunk{kept}")


def _evaluate(run: Run, episodes: int, shown: Any) -> None:
    if run.evaluations:
        run.log_evaluation(episodes)
        return
    with shown.compiling(f"and playing {episodes} evaluation episodes"):
        run.log_evaluation(episodes)
