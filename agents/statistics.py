"""Running mean and variance, merged batch by batch to the one-pass result."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RunningStatistics(NamedTuple):
    """Mean and variance of everything merged so far."""

    total: jax.Array  # [] float32: total weight
    mean: jax.Array  # [D]
    variance: jax.Array  # [D], of the population


def init(shape: tuple[int, ...] = ()) -> RunningStatistics:
    """Nothing seen: mean 0 and variance 1."""
    return RunningStatistics(jnp.zeros(()), jnp.zeros(shape), jnp.ones(shape))


def merge(statistics: RunningStatistics, x: jax.Array, weight: jax.Array) -> RunningStatistics:
    """Merge a weighted batch (Chan et al. 1979, equation 2.1).

    Args:
      statistics: of shape [D].
      x: [..., D].
      weight: [...]; samples of weight 0 are never read.
    """
    axes = tuple(range(weight.ndim))
    w = weight.reshape(weight.shape + (1,) * (x.ndim - weight.ndim))
    x = jnp.where(w > 0, x, 0.0)
    batch_total = jnp.sum(weight)
    safe = jnp.maximum(batch_total, 1e-8)
    batch_mean = jnp.sum(w * x, axes) / safe
    batch_variance = jnp.sum(w * jnp.square(x - batch_mean), axes) / safe
    total = statistics.total + batch_total
    share = batch_total / jnp.maximum(total, 1e-8)
    delta = batch_mean - statistics.mean
    mean = statistics.mean + share * delta
    variance = (
        (1.0 - share) * statistics.variance
        + share * batch_variance
        + share * (1.0 - share) * jnp.square(delta)
    )
    seen = batch_total > 0
    return RunningStatistics(
        total=total,
        mean=jnp.where(seen, mean, statistics.mean),
        variance=jnp.where(seen, variance, statistics.variance),
    )


def normalise(statistics: RunningStatistics, x: jax.Array) -> jax.Array:
    """(x - mean) / std, with a floor under the variance."""
    return (x - statistics.mean) * jax.lax.rsqrt(statistics.variance + 1e-4)


def denormalise(statistics: RunningStatistics, x: jax.Array) -> jax.Array:
    """The inverse of `normalise`."""
    return x * jnp.sqrt(statistics.variance + 1e-4) + statistics.mean


def change_of_units(old: RunningStatistics, new: RunningStatistics) -> tuple[jax.Array, jax.Array]:
    """(scale, shift) such that `scale * x + shift` is to `new` what `x` is to `old`.

    Both denormalise to the same. Where nothing moved it is exactly (1, 0).
    """
    scale = jnp.sqrt((old.variance + 1e-4) / (new.variance + 1e-4))
    return scale, normalise(new, old.mean)
