"""Spaces: what an observation or an action may be.

A space is a frozen value: it compares and hashes by its contents, so that compiled programs can be
memoised on it. A *composite* is any PyTree (dict, tuple, list, NamedTuple) whose leaves are spaces;
`signature` turns one into a hashable value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SpaceTree = Any  # a PyTree whose leaves are Space


@dataclass(frozen=True)
class Box:
    """Arrays of one shape; every element lies in [low, high].

    `low` and `high` are a float for all elements, or a tuple with one float per element in C order.
    """

    shape: tuple[int, ...]
    low: float | tuple[float, ...] = -np.inf
    high: float | tuple[float, ...] = np.inf
    dtype: str = "float32"

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype).name)
        for name in ("low", "high"):
            bound = np.asarray(getattr(self, name), np.float64)
            if bound.ndim == 0:
                object.__setattr__(self, name, float(bound))
            elif bound.size == self.size:
                object.__setattr__(self, name, tuple(bound.reshape(-1).tolist()))
            else:
                raise ValueError(
                    f"Box {name} has {bound.size} elements and the shape {self.shape} has "
                    f"{self.size}; give one number, or one per element"
                )
        if np.any(np.asarray(self.low) > np.asarray(self.high)):
            raise ValueError(f"Box has low = {self.low} above high = {self.high}")

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def bounded(self) -> bool:
        """Whether every element has a finite lower and upper bound."""
        return bool(np.all(np.isfinite(self.low)) and np.all(np.isfinite(self.high)))

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bound, each an array of this space's shape, float32."""
        low, high = (
            np.broadcast_to(np.asarray(bound, np.float32), self.size).reshape(self.shape)
            for bound in (self.low, self.high)
        )
        return low, high


@dataclass(frozen=True)
class Discrete:
    """The integers 0 .. n-1, as a scalar."""

    n: int
    dtype: str = "int32"

    def __post_init__(self):
        object.__setattr__(self, "n", int(self.n))
        object.__setattr__(self, "dtype", np.dtype(self.dtype).name)
        if self.n < 1:
            raise ValueError(f"Discrete has n = {self.n}; at least 1 is needed")

    @property
    def shape(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class MultiDiscrete:
    """A vector of integers; element i lies in 0 .. nvec[i]-1."""

    nvec: tuple[int, ...]
    dtype: str = "int32"

    def __post_init__(self):
        object.__setattr__(self, "nvec", tuple(int(n) for n in self.nvec))
        object.__setattr__(self, "dtype", np.dtype(self.dtype).name)
        if not self.nvec or min(self.nvec) < 1:
            raise ValueError(f"MultiDiscrete has nvec = {self.nvec}; every entry must be >= 1")

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)


Space = Box | Discrete | MultiDiscrete


def is_space(x: Any) -> bool:
    return isinstance(x, Box | Discrete | MultiDiscrete)


def leaves(space: SpaceTree) -> list[Space]:
    """The leaf spaces in PyTree order; raises TypeError where a leaf is not a space."""
    found = jax.tree.leaves(space, is_leaf=is_space)
    for leaf in found:
        if not is_space(leaf):
            raise TypeError(f"expected a Box, Discrete or MultiDiscrete, got {leaf!r}")
    return found


def map_spaces(function: Callable[..., Any], space: SpaceTree, *rest: Any) -> Any:
    """`jax.tree.map` over the leaves of a composite; `rest` are PyTrees below the same nodes."""
    return jax.tree.map(function, space, *rest, is_leaf=is_space)


def signature(space: SpaceTree) -> tuple[Any, ...]:
    """A hashable value, equal for two composites exactly when they are the same space."""
    found, treedef = jax.tree.flatten(space, is_leaf=is_space)
    return (treedef, *found)


def from_signature(value: tuple[Any, ...]) -> SpaceTree:
    """The composite that `signature` was made from."""
    treedef, *found = value
    return jax.tree.unflatten(treedef, found)


def shape_dtype(space: SpaceTree, batch: tuple[int, ...] = ()) -> Any:
    """`jax.ShapeDtypeStruct` per leaf, with leading axes `batch`."""
    return map_spaces(lambda s: jax.ShapeDtypeStruct((*batch, *s.shape), np.dtype(s.dtype)), space)


def zeros(space: SpaceTree, batch: tuple[int, ...] = ()) -> Any:
    """A PyTree of zeros that has the shapes and dtypes of `space`, with leading axes `batch`."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape_dtype(space, batch))


def sample(key: jax.Array, space: SpaceTree) -> Any:
    """One uniform draw; elements of a Box without bounds are standard normal."""
    found, treedef = jax.tree.flatten(space, is_leaf=is_space)
    keys = jax.random.split(key, max(len(found), 1))
    return jax.tree.unflatten(
        treedef, [_sample_leaf(k, s) for k, s in zip(keys, found, strict=False)]
    )


def _sample_leaf(key: jax.Array, space: Space) -> jax.Array:
    dtype = np.dtype(space.dtype)
    if isinstance(space, Discrete):
        return jax.random.randint(key, (), 0, space.n).astype(dtype)
    if isinstance(space, MultiDiscrete):
        return jax.random.randint(key, space.shape, 0, jnp.asarray(space.nvec)).astype(dtype)
    if not space.bounded:
        return jnp.clip(jax.random.normal(key, space.shape), *space.bounds()).astype(dtype)
    low, high = space.bounds()
    if np.issubdtype(dtype, np.floating):
        return jax.random.uniform(key, space.shape, minval=low, maxval=high).astype(dtype)
    return jnp.floor(
        jax.random.uniform(key, space.shape, minval=low, maxval=high + np.float32(1))
    ).astype(dtype)


def describe(space: SpaceTree) -> str:
    """A short text for people: `Box(18)`, `Discrete(5)`, `{'image': Box(4, 5, 26) uint8}`."""
    return str(map_spaces(_Text, space)) if not is_space(space) else _describe_leaf(space)


class _Text(str):
    """A leaf's description whose `repr` has no quotes, so that composites print readably."""

    def __new__(cls, space: Space):
        return super().__new__(cls, _describe_leaf(space))

    def __repr__(self) -> str:
        return str(self)


def _describe_leaf(space: Space) -> str:
    if isinstance(space, Discrete):
        return f"Discrete({space.n})"
    if isinstance(space, MultiDiscrete):
        return f"MultiDiscrete({', '.join(map(str, space.nvec))})"
    kind = "" if space.dtype == "float32" else f" {space.dtype}"
    return f"Box({', '.join(map(str, space.shape))}){kind}"
