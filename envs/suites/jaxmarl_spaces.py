"""JaxMARL's spaces as this package's, told apart by their fields; jaxmarl is not imported."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from marl.envs.errors import UsageError
from marl.envs.spaces import Box, Discrete, MultiDiscrete, Space


def action_space(declared: Any) -> Space:
    """The space of an agent's actions, which is taken as declared."""
    if hasattr(declared, "num_categories"):
        return MultiDiscrete(tuple(np.asarray(declared.num_categories).tolist()))
    if hasattr(declared, "n"):
        return Discrete(declared.n)
    if hasattr(declared, "low"):
        shape = _shape(declared)
        return Box(shape, _bound(declared.low, shape), _bound(declared.high, shape))
    raise UsageError(f"no action space of this package corresponds to {declared!r}")


def observation_space(declared: Any, real: Any) -> Any:
    """The space of what `reset` returns, whose shapes and dtypes are `real`.

    Declared bounds are kept where the declared shape is the real one and the dtype can hold them.
    """
    if isinstance(real, Mapping):
        below = declared if isinstance(declared, Mapping) else {}
        return {name: observation_space(below.get(name), leaf) for name, leaf in real.items()}
    if hasattr(declared, "num_categories") and _shape(declared) == real.shape:
        nvec = tuple(np.asarray(declared.num_categories).tolist())
        return MultiDiscrete(nvec, dtype=real.dtype.name)
    if hasattr(declared, "low") and _shape(declared) == real.shape:
        low, high = (_bound(bound, real.shape) for bound in (declared.low, declared.high))
        if _fits(low, real.dtype) and _fits(high, real.dtype):
            return Box(real.shape, low, high, real.dtype.name)
    return Box(real.shape, dtype=real.dtype.name)


def _shape(declared: Any) -> tuple[int, ...]:
    """The declared shape; Hanabi declares a bare integer."""
    return tuple(int(n) for n in np.atleast_1d(np.asarray(declared.shape, np.int64)))


def _bound(bound: Any, shape: tuple[int, ...]) -> float | tuple[float, ...]:
    """One number where all elements have the same bound, else one per element in C order."""
    values = np.broadcast_to(np.asarray(bound, np.float64), shape).reshape(-1)
    return float(values[0]) if np.all(values == values[0]) else tuple(values.tolist())


def _fits(bound: float | tuple[float, ...], dtype: Any) -> bool:
    """Whether the dtype can hold the bounds."""
    if not jax.numpy.issubdtype(dtype, jax.numpy.integer):
        return True
    info = np.iinfo(dtype)
    return bool(np.all((np.asarray(bound) >= info.min) & (np.asarray(bound) <= info.max)))
