"""From an action space to distributions over it.

A policy network gives one vector per sample; `Policy` reads it as one distribution per leaf of the
action space, independent given the observation. Distributions live and die inside one call;
samples, log-probabilities and entropies come out, so that everything may be vmapped.

A bounded Box under "tanh_normal" is a Gaussian squashed into the bounds by tanh; the sample before
squashing (`raw`) is kept, which makes the log-probability finite at the bounds. Any other Box, and
"normal", is a plain Gaussian, clipped into the bounds when it acts.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import numpy as np

from marl.envs import spaces
from marl.envs.spaces import Box, Discrete, MultiDiscrete, Space, SpaceTree

BOX_POLICIES = ("tanh_normal", "normal")
_MASKED = (
    -1e9
)  # finite: an all-masked row stays a distribution, gradients and entropies stay finite


class Sample(NamedTuple):
    """What sampling a policy gives."""

    action: Any  # [...] PyTree of the action space
    raw: tuple[jax.Array, ...]  # per Box leaf, the Gaussian sample before squashing or clipping
    log_prob: jax.Array  # [...]


class Policy(NamedTuple):
    """Distributions over one action space. `mask` is a PyTree like the action, or None."""

    space: SpaceTree
    box_policy: str = "tanh_normal"

    @property
    def num_outputs(self) -> int:
        """Length of the vector the policy network gives."""
        return sum(_num_outputs(leaf) for leaf in spaces.leaves(self.space))

    @property
    def num_scales(self) -> int:
        """Length of `log_std`: one element per element of a Box."""
        return sum(leaf.size for leaf in spaces.leaves(self.space) if isinstance(leaf, Box))

    def draw(self, key: jax.Array, batch: tuple[int, ...]) -> tuple[jax.Array, ...]:
        """The random numbers [*batch, ...] that `batch` samples take, one array per leaf."""
        found = spaces.leaves(self.space)
        keys = [key] if len(found) == 1 else jax.random.split(key, len(found))
        return tuple(_draw(k, leaf, batch) for k, leaf in zip(keys, found, strict=True))

    def sample(self, key: jax.Array, outputs: jax.Array, log_std: jax.Array, mask: Any) -> Sample:
        """Draw actions for `outputs` [..., num_outputs]."""
        return self.sample_from(self.draw(key, outputs.shape[:-1]), outputs, log_std, mask)

    def sample_from(
        self, noise: tuple[jax.Array, ...], outputs: jax.Array, log_std: jax.Array, mask: Any
    ) -> Sample:
        """`sample` with random numbers from `draw`."""
        actions, raws, log_probs = [], [], []
        for drawn, (leaf, out, scale, leaf_mask) in zip(
            noise, self._split(outputs, log_std, mask), strict=True
        ):
            value = _sample(drawn, leaf, out, scale, leaf_mask)
            if isinstance(leaf, Box):
                raws.append(value)
            log_probs.append(self._leaf_log_prob(leaf, out, scale, leaf_mask, value))
            actions.append(self._leaf_action(leaf, value))
        return Sample(self._join(actions), tuple(raws), _sum(log_probs))

    def mode(self, outputs: jax.Array, log_std: jax.Array, mask: Any) -> Any:
        """The most likely action (for a squashed Gaussian: the squashed mean)."""
        actions = [
            self._leaf_action(leaf, _mode(leaf, out, leaf_mask))
            for leaf, out, _, leaf_mask in self._split(outputs, log_std, mask)
        ]
        return self._join(actions)

    def log_prob(
        self, outputs: jax.Array, log_std: jax.Array, mask: Any, action: Any, raw: tuple
    ) -> jax.Array:
        """Log-probability [...] of `action`; Box leaves are read from `raw`."""
        treedef = jax.tree.structure(self.space, is_leaf=spaces.is_space)
        raws = iter(raw)
        total = jnp.zeros(outputs.shape[:-1])
        for (leaf, out, scale, leaf_mask), value in zip(
            self._split(outputs, log_std, mask), treedef.flatten_up_to(action), strict=True
        ):
            value = next(raws) if isinstance(leaf, Box) else value
            total += self._leaf_log_prob(leaf, out, scale, leaf_mask, value)
        return total

    def entropy(self, outputs: jax.Array, log_std: jax.Array, mask: Any) -> jax.Array:
        """Entropy [...] summed over leaves; of a squashed Gaussian, that of the Gaussian itself."""
        return _sum([_entropy(*parts) for parts in self._split(outputs, log_std, mask)])

    def _split(self, outputs, log_std, mask):
        """(leaf, its outputs, its log_std, its mask) for each leaf."""
        found = spaces.leaves(self.space)
        treedef = jax.tree.structure(self.space, is_leaf=spaces.is_space)
        masks = [None] * len(found) if mask is None else treedef.flatten_up_to(mask)
        parts, start, scale_start = [], 0, 0
        for leaf, leaf_mask in zip(found, masks, strict=True):
            size = _num_outputs(leaf)
            num_scales = leaf.size if isinstance(leaf, Box) else 0
            scale = log_std[..., scale_start : scale_start + num_scales]
            parts.append((leaf, outputs[..., start : start + size], scale, leaf_mask))
            start, scale_start = start + size, scale_start + num_scales
        return parts

    def _squashed(self, leaf: Space) -> bool:
        return self.box_policy == "tanh_normal" and squashable(leaf)

    def _leaf_action(self, leaf: Space, value: jax.Array) -> jax.Array:
        if not isinstance(leaf, Box):
            return value.astype(leaf.dtype)
        if self._squashed(leaf):
            return from_unit(leaf, jnp.tanh(value))
        return _fit(leaf, value.reshape(*value.shape[:-1], *leaf.shape))

    def _leaf_log_prob(self, leaf, out, scale, mask, value) -> jax.Array:
        if isinstance(leaf, Discrete):
            return distrax.Categorical(logits=_masked(out, mask)).log_prob(value)
        if isinstance(leaf, MultiDiscrete):
            log_probs = [
                distrax.Categorical(logits=logits).log_prob(value[..., i])
                for i, logits in enumerate(_components(leaf, out, mask))
            ]
            return _sum(log_probs)
        mean, scale, value = _elements_first(out, scale, value)
        log_prob = distrax.Normal(mean, jnp.exp(scale)).log_prob(value)
        if self._squashed(leaf):
            # log of the derivative of the rescaled tanh, stable for large values
            slope = 2.0 * (np.log(2.0) - value - jax.nn.softplus(-2.0 * value))
            low, high = (bound.reshape(-1, *[1] * (out.ndim - 1)) for bound in leaf.bounds())
            log_prob = log_prob - slope - np.log(np.maximum(0.5 * (high - low), 1e-8))
        return jnp.sum(log_prob, 0)

    def _join(self, actions: list[jax.Array]) -> Any:
        return jax.tree.unflatten(jax.tree.structure(self.space, is_leaf=spaces.is_space), actions)


def squashable(space: Space) -> bool:
    """Whether `space` is a Box whose elements all have a lower and an upper bound."""
    if not isinstance(space, Box):
        return False
    low, high = space.bounds()
    with np.errstate(over="ignore"):
        return bool(np.all(np.isfinite(high - low)))


def from_unit(space: Box, unit: jax.Array) -> jax.Array:
    """Actions [..., *shape] of a bounded Box, from their elements scaled to [-1, 1] [..., size]."""
    low, high = space.bounds()
    unit = unit.reshape(*unit.shape[:-1], *space.shape)
    return _fit(space, low + 0.5 * (unit + 1.0) * (high - low))


def to_unit(space: Box, action: jax.Array) -> jax.Array:
    """The inverse of `from_unit`; an element that can only have one value becomes 0."""
    low, high = (bound.reshape(-1) for bound in space.bounds())
    half = 0.5 * (high - low)
    batch = action.shape[: action.ndim - len(space.shape)]
    offset = action.reshape(*batch, -1).astype(jnp.float32) - (low + half)
    return jnp.where(half > 0, offset / np.where(half > 0, half, 1.0), 0.0)


def log_probabilities(
    space: Discrete | MultiDiscrete, outputs: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """Log-probability [..., num_outputs] of every choice, normalised within each component.

    That of an illegal choice is so low that its probability is 0, and finite.
    """
    if isinstance(space, Discrete):
        return jax.nn.log_softmax(_masked(outputs, mask))
    parts = [jax.nn.log_softmax(logits) for logits in _components(space, outputs, mask)]
    return jnp.concatenate(parts, -1)


def _fit(space: Box, value: jax.Array) -> jax.Array:
    """Values [..., *shape] within the bounds, in the dtype of `space`."""
    value = jnp.clip(value, *space.bounds())
    if not jnp.issubdtype(space.dtype, jnp.floating):
        value = jnp.round(value)
    return value.astype(space.dtype)


def _sum(xs: Sequence[jax.Array]) -> jax.Array:
    return reduce(jnp.add, xs)


def _num_outputs(space: Space) -> int:
    if isinstance(space, Discrete):
        return space.n
    return sum(space.nvec) if isinstance(space, MultiDiscrete) else space.size


def _masked(logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Logits of one choice, no illegal one read; uniform in a row where none is legal."""
    if mask is None:
        return logits
    mask = mask.astype(bool)
    return jnp.where(mask, logits, jnp.where(jnp.any(mask, -1, keepdims=True), _MASKED, 0.0))


def _components(space: MultiDiscrete, out: jax.Array, mask: jax.Array | None) -> list[jax.Array]:
    """Masked logits of each element of a MultiDiscrete."""
    ends = np.cumsum(space.nvec)[:-1]
    masks = [None] * len(space.nvec) if mask is None else jnp.split(mask, ends, -1)
    return [_masked(o, m) for o, m in zip(jnp.split(out, ends, -1), masks, strict=True)]


def _draw(key: jax.Array, space: Space, batch: tuple[int, ...]) -> jax.Array:
    """Gumbel noise of every choice, or normal noise of every element of a Box."""
    if isinstance(space, Discrete):
        return jax.random.gumbel(key, (*batch, space.n))
    if isinstance(space, MultiDiscrete):
        keys = jax.random.split(key, len(space.nvec))
        parts = [jax.random.gumbel(k, (*batch, n)) for k, n in zip(keys, space.nvec, strict=True)]
        return jnp.concatenate(parts, -1)
    # the same numbers in one dimension: XLA vectorises along the last axis only, and this is short
    shape = (*batch, space.size)
    return jax.random.normal(key, (math.prod(shape),)).reshape(shape)


def _sample(noise: jax.Array, space: Space, out, scale, mask) -> jax.Array:
    """The most likely value after adding noise: a draw from the softmax (Gumbel 1954)."""
    if isinstance(space, Discrete):
        return jnp.argmax(_masked(out, mask) + noise, -1)
    if isinstance(space, MultiDiscrete):
        drawn = jnp.split(noise, np.cumsum(space.nvec)[:-1], -1)
        parts = zip(_components(space, out, mask), drawn, strict=True)
        return jnp.stack([jnp.argmax(logits + added, -1) for logits, added in parts], -1)
    mean, scale, noise = _elements_first(out, scale, noise)
    return jnp.moveaxis(mean + jnp.exp(scale) * noise, 0, -1)


def _elements_first(*arrays: jax.Array) -> list[jax.Array]:
    """Arrays of the elements of a Box, broadcast, as [size, ...]: long axes last, as in `_draw`."""
    return [jnp.moveaxis(x, -1, 0) for x in jnp.broadcast_arrays(*arrays)]


def _mode(space: Space, out, mask) -> jax.Array:
    if isinstance(space, Discrete):
        return jnp.argmax(_masked(out, mask), -1)
    if isinstance(space, MultiDiscrete):
        parts = [jnp.argmax(logits, -1) for logits in _components(space, out, mask)]
        return jnp.stack(parts, -1)
    return out


def _entropy(space: Space, out, scale, mask) -> jax.Array:
    if isinstance(space, Discrete):
        return distrax.Categorical(logits=_masked(out, mask)).entropy()
    if isinstance(space, MultiDiscrete):
        parts = [
            distrax.Categorical(logits=logits).entropy() for logits in _components(space, out, mask)
        ]
        return _sum(parts)
    entropy = distrax.Normal(out, jnp.exp(scale)).entropy()
    return jnp.sum(jnp.broadcast_to(entropy, out.shape), -1)
