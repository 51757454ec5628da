"""Options as plain values: their types, what a learner takes, how layers of them merge.

Nothing here knows YAML or OmegaConf; keys are named as the user wrote them.
"""

import copy
import dataclasses
import difflib
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from marl.envs.errors import UsageError

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a name",
    tuple: "a list such as [64, 64]",
    dict: "a mapping of names to values",
}
# YAML's own spelling has a dot before it
_NUMBERS = [sign + word for sign in ("", "+", "-") for word in ("inf", "nan")]
REPLACED = ("critic", "sharing", "reward_teams")  # a partition of the agents is one value
# beside the learner's options
TEAM_OVERRIDES = {"learner": str, "critic": Any, "sharing": Any, "reward_scale": float}


def coerce(key: str, value: Any, kind: Any) -> Any:
    """`value` as a `kind`, where nothing is lost by it; text with `${` is left for resolving.

    Raises:
      UsageError: the value is of another type, or not whole where an integer is wanted.
    """
    if kind is Any or (isinstance(value, str) and "${" in value):
        return value
    if kind is tuple and isinstance(value, list | tuple):
        return list(value)
    if kind is dict and isinstance(value, Mapping):
        return dict(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind in (int, float):
        return _number(key, value, kind)
    if kind is str and isinstance(value, str):
        return value
    raise UsageError(f"{key}={shown(value)}: expected {KINDS[kind]}{_hint(value)}")


def _number(key: str, value: Any, kind: type) -> Any:
    if isinstance(value, str) and value.lower() in _NUMBERS:
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{key}={shown(value)}: expected {KINDS[kind]}{_hint(value)}")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise UsageError(f"{key} has {len(str(abs(value)))} digits: give a number up to 1e308")
    if math.isnan(value) or (kind is int and math.isinf(value)):
        raise UsageError(f"{key}={shown(value)}: expected {KINDS[kind]}, and {value} is none")
    if kind is float:
        return value
    if int(value) != value:
        raise UsageError(f"{key}={shown(value)}: expected a whole number")
    return int(value)


def _hint(value: Any) -> str:
    if not isinstance(value, bool):
        return f", got {type(value).__name__}" if value is not None else ", got nothing (null)"
    words = "on, yes or true" if value else "off, no or false"
    example = "on" if value else "off"
    return f". YAML reads unquoted {words} as a boolean; to give the word, quote it: '{example}'"


def shown(value: Any) -> str:
    """A value as a user would write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def unknown_key(
    prefix: str, name: Any, known: Iterable[str], elsewhere: Iterable[str] = ()
) -> UsageError:
    """The error for a key that does not exist: the nearest one, and what may stand there.

    Args:
      prefix: the section with its dot, such as "training."; "" at the top.
      name: what was given below it.
      known: the names that section has.
      elsewhere: complete keys of other sections, for what stands in the wrong one.
    """
    known = list(known)
    close = [prefix + other for other in difflib.get_close_matches(str(name), known, cutoff=0.6)]
    homes = [key for key in elsewhere if key.rpartition(".")[2] == name]
    hint = f"did you mean {' or '.join(map(repr, homes or close))}? " if homes or close else ""
    listing = f"{prefix[:-1] or 'the configuration'} takes {', '.join(known)}"
    return UsageError(f"unknown key '{prefix}{name}'; {hint}{listing}")


def merge(base: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """`layer` on top of `base`; neither is changed. The exceptions are in `marl.config`."""
    base = copy.deepcopy(dict(base))
    env, team = base.get("env", {}), base.get("team", {})
    layer_env, layer_team = layer.get("env", {}), dict(layer.get("team", {}))
    if layer_env.get("id", env.get("id")) != env.get("id"):
        env.pop("kwargs", None)
    old, new = team.get("learner", {}), layer_team.get("learner", {})
    if new.get("name", old.get("name")) != old.get("name"):
        for own in ("learner", "replay"):  # sizes of a buffer go with the learner that wants it
            team.pop(own, None)
    for partition in REPLACED:
        if partition in layer_team:
            team.pop(partition, None)
    if "overrides" in layer_team:
        layer_team["overrides"] = order_overrides(
            team.pop("overrides", {}), layer_team["overrides"]
        )
    if layer_team:
        layer = {**layer, "team": layer_team}
    return _merge_mappings(base, layer)


def _merge_mappings(base: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in layer.items():
        under = merged.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge_mappings(under, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def order_overrides(
    base: Mapping[str, Mapping[str, Any]], layer: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Overrides by agent glob in the order they apply: all of `layer` after all of `base`."""
    entries = {glob: dict(options) for glob, options in base.items()}
    for glob, options in layer.items():
        if not isinstance(options, Mapping):
            key = f"team.overrides.{glob}"
            raise UsageError(f"{key} needs options below it, such as {key}.learning_rate=1e-4")
        for option, value in options.items():
            entries = _override_last(entries, glob, option, value)
    return entries


def _override_last(
    entries: dict[str, dict[str, Any]], glob: str, option: str, value: Any
) -> dict[str, dict[str, Any]]:
    """One option that takes effect after everything in `entries`."""
    if glob not in entries:
        return {**entries, glob: {option: value}}
    globs = list(entries)
    later = globs[globs.index(glob) + 1 :]
    if not any(option in entries[other] for other in later):
        return {**entries, glob: {**entries[glob], option: value}}
    rest = {name: kept for name, kept in entries[glob].items() if name != option}
    if not rest:
        return {**{g: o for g, o in entries.items() if g != glob}, glob: {option: value}}
    # The rest stays where it is, and a mapping has no key twice: spell the same agents anew.
    return _override_last({**entries, glob: rest}, f"{glob},{glob}", option, value)


def learner_options(name: str) -> dict[str, Any]:
    """A registered learner's options with their kinds: its Config's fields and its Hparams'."""
    from marl.binding import resolve_algorithm

    learner = resolve_algorithm(name)
    missing = [part for part in ("Config", "Hparams", "make") if not hasattr(learner, part)]
    if missing:
        raise UsageError(f"learner {name!r} is a module without {', '.join(missing)}")
    fields = dataclasses.fields(learner.Config)
    kinds: dict[str, Any] = {field.name: _kind(field) for field in fields}
    return kinds | dict.fromkeys(learner.Hparams._fields, float)


def _kind(field: dataclasses.Field) -> Any:
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return type(default) if type(default) in KINDS else Any


def check_team(team: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `team` with every option's type checked, per learner and per override.

    Raises:
      UsageError: an unknown learner, option or choice, or a value of the wrong type.
    """
    name = coerce("team.learner.name", team["learner"].get("name"), str)
    learner = check_options("team.learner.", team["learner"], name, {"name": str})
    overrides = {
        glob: _check_override(glob, options, name) for glob, options in team["overrides"].items()
    }
    for partition, kind in (("critic", list), ("reward_teams", dict)):
        check_partition(f"team.{partition}", team[partition], kind)
    check_sharing("team.sharing", team["sharing"])
    shaped = {
        name: coerce(f"team.shaped_reward.{name}", value, float)
        for name, value in team["shaped_reward"].items()
    }
    return {**team, "learner": learner, "overrides": overrides, "shaped_reward": shaped}


def check_options(
    prefix: str, options: Mapping[str, Any], learner: str, others: Mapping[str, Any]
) -> dict[str, Any]:
    """Options of the learner of that name, and of `others` (name -> kind), with types checked.

    Those of a learner that was given as an object are known to whoever has the object.
    """
    from marl.record import nameless

    if nameless(learner):
        return dict(options)
    kinds = dict(others) | learner_options(learner)
    for option in options:
        if option not in kinds:
            raise unknown_key(prefix, option, kinds)
    return {option: coerce(prefix + option, v, kinds[option]) for option, v in options.items()}


def _check_override(glob: str, options: Mapping[str, Any], team_learner: str) -> dict[str, Any]:
    prefix = f"team.overrides.{glob}."
    learner = coerce(prefix + "learner", options.get("learner", team_learner), str)
    if "critic" in options:
        check_partition(prefix + "critic", options["critic"], list)
    return check_options(prefix, options, learner, TEAM_OVERRIDES)


def check_partition(key: str, value: Any, kind: type) -> None:
    """A word, a list of agents, or a mapping of names to those; `marl.team` reads it."""
    if isinstance(value, str):
        return
    if kind is dict and isinstance(value, Mapping):
        for name, agents in value.items():
            check_partition(f"{key}.{name}", agents, list)
    elif not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        form = "a list of agents" if kind is list else "a mapping of names to lists of agents"
        raise UsageError(f"{key}={shown(value)}: expected a word or {form}{_hint(value)}")


def check_sharing(key: str, value: Any) -> None:
    """A partition of the agents, or one of actors and one of critics."""
    if isinstance(value, Mapping) and set(value) <= {"actor", "critic"}:
        for part, partition in value.items():
            check_partition(f"{key}.{part}", partition, dict)
    else:
        check_partition(key, value, dict)


def plain(values: Any) -> Any:
    """Mappings as dicts, sequences and arrays as lists, all the way down."""
    if isinstance(values, Mapping):
        return {key: plain(value) for key, value in values.items()}
    if hasattr(values, "tolist"):
        return values.tolist()
    return [plain(value) for value in values] if isinstance(values, list | tuple) else values
