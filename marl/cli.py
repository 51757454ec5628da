"""The command line. Imports what a command needs when the command runs, so that help is quick."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from marl.envs.errors import NotFinite, UsageError

SETTINGS = """
key=value settings are those of a preset or YAML file, with dots between the levels:

  env=jaxmarl/MPE_simple_tag_v3                     another environment
  env.kwargs.action_type=Continuous                 an argument of the environment
  team.critic=all                                   self, all, state, or [adversary_*, self]
  team.sharing=group                                none, group, or team.sharing.NAME=[agent_*]
  team.learner.learning_rate=1e-3                   any option of the learner
  'team.overrides.adversary_*.learning_rate=1e-4'   of some agents; the later match wins
  'team.overrides.agent_*.learner=frozen' 'team.overrides.agent_*.run=runs/prey'
                                                    play agents of another run, which do not learn
  training.total_steps=2e6 training.num_seeds=4
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0; 1: not finite; 2: bad input; 130: interrupted)."""
    given = _parser().parse_args(argv)
    command = COMMANDS[given.command]
    parser = argparse.ArgumentParser(
        prog=f"marl {given.command}",
        description=command.summary,
        epilog=command.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.arguments(parser)
    options = parser.parse_intermixed_args(given.arguments)
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules of the user in this folder, as `python -m` finds them
    try:
        return command.run(options)
    except UsageError as error:
        print(f"marl {given.command}: {error}", file=sys.stderr)
        return 2
    except NotFinite as error:
        print(f"marl {given.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"marl {given.command}: interrupted", file=sys.stderr)
        return 130


class Command(NamedTuple):
    """One sub-command."""

    summary: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {c.summary}" for name, c in COMMANDS.items())
    examples = (
        "  marl train mappo_mpe_spread\n"
        "  marl train ippo env=jaxmarl/MPE_simple_tag_v3 training.total_steps=2e6\n"
        "  marl eval runs/tag --episodes 100"
    )
    parser = argparse.ArgumentParser(
        prog="marl",
        description="Multi-agent reinforcement learning in JAX.",
        epilog=f"commands:\n{commands}\n\nexamples:\n{examples}\n\n"
        "`marl COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="versions, and the XLA flag set"
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        from marl.xla import FLAG

        for name in ("marl", "jax", "jaxlib", "dm-haiku", "optax", "jaxmarl"):
            try:
                print(f"{name} {version(name)}")
            except PackageNotFoundError:
                print(f"{name} is not installed")
        print(f"on CPU, XLA_FLAGS gets --{FLAG}=false unless it names that flag")
        parser.exit()


def _source_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "experiment",
        nargs="*",
        metavar="PRESET|FILE.yaml|key=value",
        help="a preset or a YAML file, then changes to it",
    )


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    _source_arguments(parser)
    parser.add_argument("--out", metavar="DIR", help="run directory (runs/<preset>-<date>-<time>)")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run in DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _train(options: argparse.Namespace) -> int:
    from marl import config, experiment

    progress = not options.quiet
    if options.resume is not None:
        if options.out is not None:
            raise UsageError("--resume goes on in its own directory; leave --out away")
        source, settings = _split(options.experiment)
        if source is not None:
            raise UsageError(
                f"--resume takes the experiment from {options.resume}; leave {source!r} away"
            )
        run = experiment.resume(options.resume, settings, progress)
        return _finish(run, options.resume, options.quiet)
    source, settings = _needed_source(options.experiment, "train")
    loaded = config.load(source, settings)
    out = options.out or experiment.default_directory(source)
    return _finish(experiment.train(loaded, out, progress), out, options.quiet)


def _finish(run: Any, directory: Any, quiet: bool) -> int:
    if run.interrupted:
        print(
            f"interrupted after {run.env_steps:,} steps; saved to {directory}. Go on with\n"
            f"  marl train --resume {directory}",
            file=sys.stderr,
        )
        return 130
    if not quiet:
        results = {
            name: value for name, value in run.evaluations[-1].items() if name != "env_steps"
        }
        print("\n".join(_lines(results)))
        print(f"\nthe run is in {directory}; play more episodes with\n  marl eval {directory}")
    return 0


def _split(experiment: Sequence[str]) -> tuple[str | None, list[str]]:
    """The preset or file, if the first argument is one, and the settings."""
    if experiment and ("=" not in experiment[0] or experiment[0].endswith((".yaml", ".yml"))):
        return experiment[0], list(experiment[1:])
    return None, list(experiment)


def _needed_source(experiment: Sequence[str], command: str) -> tuple[str, list[str]]:
    source, settings = _split(experiment)
    if source is None:
        from marl import config

        raise UsageError(
            f"name a preset or a YAML file first, as in `marl {command} mappo_mpe_spread`; "
            f"presets are {', '.join(config.presets())}"
        )
    return source, settings


def _describe(options: argparse.Namespace) -> int:
    from marl import config, experiment

    print(experiment.describe(config.load(*_needed_source(options.experiment, "describe"))))
    return 0


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="env=...",
        help="play in another environment with the same agents and spaces, or other env.kwargs",
    )
    parser.add_argument("--best", action="store_true", help="the best weights, not the last")
    parser.add_argument("--episodes", type=_positive, default=100, metavar="N", help="of each kind")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the episodes")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, no more")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def _eval(options: argparse.Namespace) -> int:
    from marl import experiment
    from marl.logging import strict

    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result alone
        run = experiment.load(options.run, options.settings, _report)
        results = run.evaluate(options.episodes, options.seed, best=options.best)
    if options.json:
        print(json.dumps(strict(results), allow_nan=False))
    else:
        print("\n".join(_lines(results)))
    return 0


def _report(text: str) -> None:
    print(text, file=sys.stderr)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--out", metavar="DIR", required=True, help="a new folder")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which of the run's seeds")
    parser.add_argument("--best", action="store_true", help="the best weights, not the last")


def _export(options: argparse.Namespace) -> int:
    from marl import experiment, export

    out = export.export(
        experiment.load(options.run, report=_report), options.out, options.seed, options.best
    )
    print(f"wrote {', '.join(sorted(path.name for path in out.iterdir()))} to {out}")
    return 0


def _lines(results: Mapping[str, Any], indent: str = "") -> list[str]:
    """Nested results, a line each; a list has one entry per seed."""
    lines = []
    for name, value in results.items():
        label = f"{indent}{name:{24 - len(indent)}}"
        if isinstance(value, list):
            for seed, entry in enumerate(value):
                lines += [f"{indent}{name}, seed {seed}", *_lines(entry, indent + "  ")]
        elif isinstance(value, Mapping) and set(value) == {"mean", "std"}:
            lines.append(f"{label} {_number(value['mean'])} (std {_number(value['std'])})")
        elif isinstance(value, Mapping):
            lines += [f"{indent}{name}", *_lines(value, indent + "  ")] if value else []
        else:
            lines.append(f"{label} {_number(value)}")
    return lines


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "none" if value is None else str(value)


def _envs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", nargs="?", metavar="SUITE", help="one suite; all by default")


def _envs(options: argparse.Namespace) -> int:
    from marl.envs import registry

    suites = [options.suite] if options.suite else list(registry.SUITES)
    entries = [entry for suite in suites for entry in registry.listing(suite)]
    width = max(len(entry.id) for entry in entries)
    for entry in entries:
        note = f"not here: {entry.unavailable}" if entry.unavailable else entry.note
        print(f"{entry.id:{width}}  {note}".rstrip())
    return 0


def _presets(options: argparse.Namespace) -> int:
    from marl import config

    found = config.presets()
    width = max(map(len, found))
    for name, about in found.items():
        print(f"{name:{width}}  {about}")
    return 0


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


COMMANDS = {
    "train": Command("train a team, or go on with a run", _train_arguments, _train, SETTINGS),
    "eval": Command("play episodes with a trained team", _eval_arguments, _eval),
    "export": Command(
        "write a trained team for programs without this library", _export_arguments, _export
    ),
    "describe": Command(
        "show groups, critics and parameters before anything compiles",
        _source_arguments,
        _describe,
        SETTINGS,
    ),
    "envs": Command("list environments", _envs_arguments, _envs),
    "presets": Command("list presets", _no_arguments, _presets),
}


if __name__ == "__main__":
    sys.exit(main())
