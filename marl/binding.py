"""From the options a user gives to an algorithm, its config and its hparams."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from marl.agents import registry
from marl.agents.learner import Learner
from marl.agents.validation import hparams_in_range
from marl.envs.errors import UsageError, nearest
from marl.replay import Replay

# beside what knows of no other agents, algorithms that know of teams and runs
ALGORITHMS = registry.ALGORITHMS | {"frozen": "marl.frozen"}
REPLAY_OPTIONS = tuple(name for name in Replay._fields if name != "sequence")


def resolve_algorithm(learner: Any) -> Any:
    if isinstance(learner, str):
        return registry.algorithm(learner, ALGORITHMS)
    if isinstance(learner, Learner):
        return ReadyLearner(learner)
    missing = [name for name in ("Config", "Hparams", "make") if not hasattr(learner, name)]
    if missing:
        raise UsageError(
            f"learner {learner!r} has no {', '.join(missing)}; give a name, a Learner, or a module "
            "or object with Config, Hparams and make"
        )
    try:
        hash(learner)
    except TypeError:
        raise UsageError(
            f"learner {learner!r} does not hash; compiled programs are kept by learner, so make it "
            "a module, or a frozen dataclass"
        ) from None
    return learner


@dataclass(frozen=True)
class _NoConfig:
    pass


class _NoHparams(NamedTuple):
    pass


@dataclass(frozen=True)
class ReadyLearner:
    """An algorithm around a learner that is already bound to its spaces."""

    learner: Learner
    Config = _NoConfig
    Hparams = _NoHparams

    def make(self, config, observation_space, action_space, critic_space) -> Learner:
        del config, observation_space, action_space, critic_space
        return self.learner


def bind_options(algorithm: Any, name: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Flat options as the algorithm's (config, hparams).

    Raises:
      UsageError: an option is unknown, of the wrong type or out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(algorithm.Config)}
    config, floats = {}, {}
    for option, value in options.items():
        if option in fields:
            config[option] = _config_value(option, value, fields[option])
        elif option in algorithm.Hparams._fields:
            floats[option] = value
        else:
            choices = (*algorithm.Hparams._fields, *fields)
            raise UsageError(
                f"learner {_name(name)} has no option {option!r}; {nearest(option, choices, 40)}"
            )
    hparams = algorithm.Hparams(**floats)
    hparams_in_range(hparams, getattr(algorithm, "BOUNDS", None))
    bound = algorithm.Config(**config)
    try:
        hash(bound)
    except TypeError:
        raise UsageError(
            f"the Config of learner {_name(name)} does not hash: {bound}; make it a frozen "
            "dataclass, with tuples for lists"
        ) from None
    return bound, hparams


def bind_replay(options: Mapping[str, Any]) -> Replay:
    """The team's replay buffer from the options a user gives.

    Raises:
      UsageError: an option is unknown or not a whole number.
    """
    found = {}
    for name, value in options.items():
        if name not in REPLAY_OPTIONS:
            raise UsageError(f"replay has no option {name!r}; {nearest(name, REPLAY_OPTIONS)}")
        whole = isinstance(value, int | float) and float(value).is_integer()
        if not whole or isinstance(value, bool):
            raise UsageError(f"replay.{name} = {value!r} is not a whole number; give one")
        found[name] = int(value)
    return Replay(**found)


def _config_value(option: str, value: Any, field: Any) -> Any:
    """`value` as the field's type: lists become tuples, whole floats integers, NumPy's Python's."""
    value = value.item() if isinstance(value, np.generic) else value
    expected = type(field.default)
    if expected is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(int(v) if isinstance(v, float) and v.is_integer() else v for v in value)
    if expected is int and isinstance(value, float) and value.is_integer():
        return int(value)
    wrong = not isinstance(value, expected) or (expected is int and isinstance(value, bool))
    if wrong and field.default is not dataclasses.MISSING:
        raise UsageError(
            f"{option} = {value!r} is a {type(value).__name__}; "
            f"give a {expected.__name__}, as in {option} = {field.default!r}"
        )
    return value


def _name(learner: Any) -> str:
    return repr(learner if isinstance(learner, str) else getattr(learner, "__name__", learner))
