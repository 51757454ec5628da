"""Configuration: what an experiment is made of, from presets, YAML files and `key=value`.

The only file that knows YAML. Later layers win: defaults, the base that a file names with
`preset:`, the file, the command line. Merging follows the usual rule (mappings key by key,
anything else replaced) with four exceptions, each because the plain rule would mix two intents:

  env.id               another environment starts with no `env.kwargs`
  team.learner.name    another learner starts with its own defaults, also those of `team.replay`
  critic, sharing, reward_teams    a partition of the agents is one value, replaced as a whole
  team.overrides       the order of the globs has a meaning: see `marl.options.order_overrides`
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from marl.envs.errors import UsageError, nearest
from marl.options import check_team, coerce, merge, order_overrides, plain, shown
from marl.schema import SHORTHANDS, Config, TeamConfig, check_ranges, checked


def presets() -> dict[str, str]:
    """The shipped presets by name, each with the first line of its comment."""
    found = {}
    for entry in sorted(resources.files("marl.configs").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".yaml"):
            first = entry.read_text(encoding="utf-8").splitlines()[0]
            found[entry.name.removesuffix(".yaml")] = first.lstrip("# ").strip()
    return found


def load(source: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The configuration of a preset or YAML file, changed by `key=value` strings.

    Raises:
      UsageError: an unknown preset, file or key, a value of the wrong type or out of range.
    """
    merged: dict[str, Any] = {}
    for layer, origin in _file_layers(source):
        try:
            merged = merge(merged, checked(layer))
        except UsageError as error:
            raise UsageError(f"{origin}: {error}") from None
    return from_dict(merge(merged, checked(_command_line_layer(overrides))))


def from_dict(values: Mapping[str, Any]) -> Config:
    """A checked `Config` of nested mappings; interpolations (`${training.seed}`) are resolved."""
    try:
        node = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(checked(values)))
        resolved = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise UsageError(f"the configuration cannot be resolved: {_line(error)}") from None
    values = checked(cast(dict[str, Any], resolved))
    sections = {f.name: f.type(**values[f.name]) for f in dataclasses.fields(Config)}  # type: ignore[operator]
    config = Config(**sections)
    if not config.env.id:
        raise UsageError("no environment is given; write env=suite/name, see `marl envs`")
    config.team = TeamConfig(**check_team(vars(config.team)))
    check_ranges(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain dicts and lists."""
    return plain(dataclasses.asdict(config))


def to_yaml(config: Config | Mapping[str, Any]) -> str:
    """YAML text that `load` reads back to an equal configuration."""
    values = to_dict(config) if isinstance(config, Config) else plain(config)
    try:
        return OmegaConf.to_yaml(OmegaConf.create(values))
    except OmegaConfBaseException as error:
        raise UsageError(f"the configuration cannot be written as YAML: {_line(error)}") from None


def _file_layers(source: str | Path) -> list[tuple[dict[str, Any], str]]:
    """The file's chain of bases, the most basic first, each with the name to blame in messages."""
    layers: list[tuple[dict[str, Any], str]] = []
    following: tuple[str | Path, Path | None] | None = (source, None)
    while following is not None:
        text, origin, folder = _read(*following)
        chain = [name for _, name in reversed(layers)]
        if origin in chain:
            raise UsageError(
                f"presets name each other in a circle: {' -> '.join([*chain, origin])}"
            )
        layer = _parse(text, origin)
        base = layer.pop("preset", None)
        if base is not None and not isinstance(base, str):
            raise UsageError(f"{origin}: 'preset' names one preset or YAML file; got {shown(base)}")
        layers.insert(0, (layer, origin))
        following = None if base is None else (base, folder)
    return layers


def _read(source: str | Path, folder: Path | None) -> tuple[str, str, Path | None]:
    """Text, name and folder of a preset or YAML file; a base's path is relative to `folder`."""
    name, known = str(source), presets()
    if name in known:
        text = (resources.files("marl.configs") / f"{name}.yaml").read_text(encoding="utf-8")
        return text, f"preset {name}", None
    path = Path(folder or "", Path(name).expanduser())
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a preset or a YAML file")
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        raise UsageError(f"unknown preset {name!r}; {nearest(name, known)}; or name a .yaml file")
    try:
        return path.read_text(encoding="utf-8"), str(path), path.parent
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file; expected YAML in UTF-8") from None


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        node = OmegaConf.create(text) if text.strip() else OmegaConf.create()
        values = OmegaConf.to_container(node, resolve=False)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{origin}{where}: not valid YAML: {_problem(error)}") from None
    except OmegaConfBaseException as error:
        raise UsageError(f"{origin}: {_line(error)}") from None
    if not isinstance(node, DictConfig) or not isinstance(values, dict):
        raise UsageError(
            f"{origin}: expected keys and values, such as 'env: jaxmarl/MPE_simple_v3'"
        )
    return values  # type: ignore[return-value]


def _command_line_layer(settings: Iterable[str]) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    for text in settings:
        path, value = _parse_setting(text)
        if path[:2] == ("team", "overrides"):
            overrides = order_overrides(
                overrides, coerce("team.overrides", _nest(path[2:], value), dict)
            )
            continue
        if ".".join(path) in SHORTHANDS and not isinstance(value, Mapping):
            path = (*path, SHORTHANDS[".".join(path)])
        node = layer
        for name in path[:-1]:
            if not isinstance(node.setdefault(name, {}), dict):
                raise UsageError(f"{text!r}: {name!r} has the value {shown(node[name])} already")
            node = node[name]
        node[path[-1]] = value
    if overrides:
        layer.setdefault("team", {})["overrides"] = overrides
    return layer


def _nest(path: tuple[str, ...], value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def _parse_setting(text: str) -> tuple[tuple[str, ...], Any]:
    """`team.overrides."a,b".gamma=0.9` -> ("team", "overrides", "a,b", "gamma"), 0.9."""
    name = r"(?:\"[^\"]+\"|'[^']+'|[^.=\"'\s]+)"
    match = re.fullmatch(rf"({name}(?:\.{name})*)\s*=(.*)", text.strip(), re.DOTALL)
    if match is None:
        example = "training.total_steps=1e6"
        raise UsageError(f"{text!r} is not of the form key=value, such as {example}")
    key, value = match[1], match[2].strip()
    if not value:
        raise UsageError(f"{key!r} has no value; write {key}=null for none")
    try:
        node = OmegaConf.from_dotlist([f"value={value}"])
    except YAMLError as error:
        hint = ", or quote it" if value[0] in "*@&!%" else ""
        raise UsageError(f"{key}={value}: not valid YAML{hint}: {_problem(error)}") from None
    except OmegaConfBaseException as error:
        raise UsageError(f"{key}={value}: {_line(error)}") from None
    path = tuple(part.strip("\"'") for part in re.findall(name, key))
    return path, OmegaConf.to_container(node, resolve=False)["value"]  # type: ignore[call-overload, index]


def _problem(error: YAMLError) -> str:
    return str(getattr(error, "problem", None) or getattr(error, "context", None) or _line(error))


def _line(error: Exception) -> str:
    return str(error).splitlines()[0]
