"""Checks that configs share; each raises UsageError with the value and what is valid."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from marl.envs.errors import UsageError, nearest


def one_of(name: str, value: Any, choices: Iterable[str]) -> None:
    """`value` must be one of `choices`."""
    known = tuple(choices)
    if value not in known:
        raise UsageError(f"{name} = {value!r} is not known; {nearest(str(value), known)}")


def at_least(name: str, value: float, lowest: float) -> None:
    """`value` must be `lowest` or more."""
    if not value >= lowest:
        raise UsageError(f"{name} = {value} is out of range; give {lowest} or more")


def positive_integers(name: str, values: tuple[Any, ...]) -> None:
    """Every entry of `values` must be an integer of at least 1."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} = {list(values)} has {value!r}; give integers of at least 1")


def divisible(name: str, value: int, divisor_name: str, divisor: int) -> None:
    """`value` must be a multiple of `divisor`."""
    if value % divisor:
        raise UsageError(
            f"{name} = {value} is not divisible by {divisor_name} = {divisor}; "
            "change one of them so that every minibatch has the same size"
        )


def in_single_precision(name: str, value: float) -> None:
    """Raise UsageError where 32 bits make infinity of a finite `value`, or 0 of another number."""
    with np.errstate(over="ignore", under="ignore"):
        single = float(np.float32(value))
    if math.isinf(single) != math.isinf(value) or (single == 0) != (value == 0):
        raise UsageError(
            f"{name} = {value} is {single} in the 32 bits that programs compute with; give a "
            "number between 1e-38 and 3e38"
        )


# the highest value of an hparam in which infinity would switch nothing off
FINITE = float(np.finfo(np.float32).max)


def hparams_in_range(hparams: Any, bounds: Mapping[str, tuple[float, float]] | None) -> None:
    """Every float must lie in its (lowest, highest) of `bounds`; others in (0, FINITE).

    Of an algorithm that has no bounds at all they may be infinite.
    """
    highest = math.inf if bounds is None else FINITE
    for name, value in hparams._asdict().items():
        low, high = (bounds or {}).get(name, (0.0, highest))
        if isinstance(value, bool) or not isinstance(value, Real):
            raise UsageError(f"{name} = {value!r} is a {type(value).__name__}; give a number")
        in_single_precision(name, float(value))
        if not low <= float(value) <= high:
            end = "inf)" if high == FINITE else f"{high}]"
            raise UsageError(f"{name} = {value} is out of range; give a number in [{low}, {end}")
