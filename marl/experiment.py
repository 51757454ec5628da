"""From a configuration to a run: what the command line does, for Python too."""

import json
import tempfile
import warnings
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from marl import config as configuration
from marl import logging
from marl.config import Config
from marl.directory import CHECKPOINTS, CONFIG, SUMMARY, frozen_overrides
from marl.envs.errors import UsageError
from marl.options import order_overrides, shown

MAY_CHANGE = ("training.total_steps", "training.log_interval", "evaluation", "checkpoint")


def build(config: Config) -> tuple[Any, Any]:
    """The environment and the team of a new run."""
    import marl

    env = marl.make(config.env.id, **config.env.kwargs)
    options = dict(vars(config.team))
    learner = dict(options.pop("learner"))
    return env, marl.team(env, learner.pop("name"), **options, **learner)


def rebuild(config: Config, directory: Path, env: Any = None) -> tuple[Any, Any]:
    """Those of the run in `directory`, also where a new run of that `config` would be refused.

    `env` is the environment, where it is one without an id. Frozen agents are those that the run
    keeps.
    """
    import marl
    from marl import specs

    env = marl.make(config.env.id, **config.env.kwargs) if env is None else env
    request = dict(vars(config.team))
    learner = dict(request["learner"])
    request |= {"learner": learner.pop("name"), "learner_options": learner}
    request["overrides"] = order_overrides(request["overrides"], frozen_overrides(directory))
    return env, specs.rebuild(env, request)


def training_arguments(config: Config) -> dict[str, Any]:
    """What `marl.train` takes beside the environment and the team."""
    return vars(config.training) | {
        "eval_interval": config.evaluation.interval,
        "eval_episodes": config.evaluation.episodes,
        "checkpoint_interval": config.checkpoint.interval,
        "keep_checkpoints": config.checkpoint.keep,
        "checkpoint_replay": config.checkpoint.replay,
        "config": configuration.to_dict(config),
    }


def describe(config: Config) -> str:
    """The environment, the team and the length of training, before anything compiles."""
    from marl.settings import Settings

    env, team = build(config)
    training, arguments = config.training, training_arguments(config)
    del arguments["config"]
    Settings.of(**arguments).check(team)
    update = training.num_envs * training.rollout_length
    updates = -(-training.total_steps // update)
    lines = [
        f"environment {config.env.id}" + (f" {config.env.kwargs}" if config.env.kwargs else ""),
        team.describe(),
        "",
        f"training: {training.total_steps:,} steps are {updates:,} updates of "
        f"{training.num_envs} environments x {training.rollout_length} steps",
    ]
    return "\n".join(lines)


def train(config: Config, out: str | Path, progress: bool = True) -> Any:
    """Train what `config` says in the new run directory `out`; returns the run."""
    import marl

    check_new(out)
    env, team = build(config)
    return marl.train(env, team, out=out, progress=progress, **training_arguments(config))


def resume(directory: str | Path, settings: Iterable[str] = (), progress: bool = True) -> Any:
    """Go on with the run in `directory`, with `key=value` changes to how long and what is written.

    Raises:
      UsageError: there is no run, or a setting would make it another experiment.
    """
    import marl

    file = run_directory(directory) / CONFIG
    settings = list(settings)
    before, config = configuration.load(file), configuration.load(file, settings)
    changed = _differences(configuration.to_dict(before), configuration.to_dict(config))
    fixed = [key for key in changed if not key.startswith(MAY_CHANGE)]
    if fixed:
        raise UsageError(
            f"{', '.join(fixed)} cannot change when a run is resumed; what can is "
            f"{', '.join(MAY_CHANGE)}. Start a new run for another experiment"
        )
    _check_unfinished(Path(directory), config.training.total_steps)
    env, team = rebuild(config, Path(directory))
    arguments = training_arguments(config)
    if changed:
        _write(file, configuration.to_yaml(config))
        changes = (f"{key}={_at(config, key)} (was {_at(before, key)})" for key in changed)
        logging.make_progress(progress).message(f"going on with {', '.join(changes)}")
    return marl.train(env, team, out=directory, resume=directory, progress=progress, **arguments)


def load(
    directory: str | Path,
    settings: Iterable[str] = (),
    report: Callable[[str], Any] = warnings.warn,
) -> Any:
    """The run in `directory`, in another environment where `settings` (`env=...`) say so."""
    import marl

    settings = list(settings)
    if not settings:
        return marl.load(directory, report=report)
    file = run_directory(directory) / CONFIG
    before, config = configuration.load(file), configuration.load(file, settings)
    changed = _differences(configuration.to_dict(before), configuration.to_dict(config))
    fixed = [key for key in changed if not key.startswith("env.")]
    if fixed:
        raise UsageError(f"{', '.join(fixed)} cannot change in an evaluation; what can is env")
    env = marl.make(config.env.id, **config.env.kwargs)
    return marl.load(directory, env=env, report=report)


def _check_unfinished(directory: Path, total_steps: int) -> None:
    from marl import checkpoint

    newest = checkpoint.latest(directory / CHECKPOINTS, report=lambda text: None)
    done = 0 if newest is None else checkpoint.read_manifest(newest)["step"]
    file = directory / SUMMARY
    summary = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    # a run that was killed after its last checkpoint still lacks its last evaluation
    complete = summary.get("env_steps") == done and not summary["interrupted"]
    if done >= total_steps and complete:
        raise UsageError(
            f"the run in {directory} has done {done:,} of {total_steps:,} steps; to go on with it, "
            f"give more, such as training.total_steps={2 * done}"
        )


def _write(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def run_directory(directory: str | Path) -> Path:
    """`directory`, if it holds a run."""
    path = Path(directory)
    if not path.is_dir():
        raise UsageError(f"there is no run directory {path}")
    if not (path / CONFIG).is_file():
        raise UsageError(f"{path} is not a run directory: it has no {CONFIG}")
    return path


def check_new(out: str | Path) -> None:
    """Refuse a run directory that something is in already."""
    path = Path(out)
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise UsageError(f"{part} is a file; name a folder for the run")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(
            f"the run directory {path} exists and is not empty; name another, or go on with the "
            f"run in it: marl train --resume {path}"
        )
    existing = next(part for part in (path, *path.parents) if part.exists())
    try:
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        raise UsageError(
            f"nothing can be written to {existing} ({error.strerror}); name another folder for "
            "the run, or make this one writable"
        ) from None


def default_directory(source: str) -> Path:
    """`runs/<preset>-<date>-<time>`."""
    return Path("runs") / f"{Path(source).stem}-{datetime.now():%Y%m%d-%H%M%S}"


def _at(config: Config, key: str) -> str:
    """The value of `section.name`."""
    section, name = key.split(".")
    return shown(getattr(getattr(config, section), name))


def _differences(before: Any, after: Any, prefix: str = "") -> list[str]:
    """Keys, joined by dots, whose values differ."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if before == after else [prefix]
    found = []
    for key in [*before, *(key for key in after if key not in before)]:
        path = f"{prefix}.{key}" if prefix else str(key)
        found += _differences(before.get(key), after.get(key), path)
    return found
