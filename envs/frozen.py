"""Keyword arguments as hashable values, so that environments compare and hash by what made them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marl.envs.errors import UsageError


class _Frozen(NamedTuple):
    """A value that does not hash by itself, by kind and hashable content."""

    kind: str  # "dict", "list", "tuple" or "array"
    content: tuple[Any, ...]


def freeze(value: Any) -> Any:
    """A hashable stand-in for dicts, lists, tuples and arrays, nested as they may be.

    Raises:
      UsageError: a part of `value` does not hash.
    """
    if isinstance(value, dict):
        return _Frozen("dict", tuple((key, freeze(value[key])) for key in sorted(value)))
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        kind = "list" if isinstance(value, list) else "tuple"
        return _Frozen(kind, tuple(freeze(item) for item in value))
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        return _Frozen("array", (array.dtype.str, array.shape, array.tobytes()))
    try:
        hash(value)
    except TypeError:
        raise UsageError(
            f"an environment is known by its arguments, and {type(value).__name__} does not hash: "
            f"{str(value)[:80]}; give numbers, strings, lists, dicts or arrays"
        ) from None
    return value


def thaw(value: Any) -> Any:
    """What `freeze` was given; arrays come back as JAX arrays."""
    if not isinstance(value, _Frozen):
        return value
    if value.kind == "dict":
        return {key: thaw(item) for key, item in value.content}
    if value.kind == "array":
        dtype, shape, data = value.content
        return jnp.asarray(np.frombuffer(data, np.dtype(dtype)).reshape(shape))
    items = [thaw(item) for item in value.content]
    return items if value.kind == "list" else tuple(items)
