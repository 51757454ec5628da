"""Per-sample losses and the weighted mean that reduces them; no agents or configs in here."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def weighted_mean(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Mean of `x` over the samples with weight, 0 if there are none; others are never read."""
    return jnp.sum(jnp.where(weight > 0, x * weight, 0.0)) / jnp.maximum(jnp.sum(weight), 1e-8)


def live(tree: Any, weight: jax.Array) -> Any:
    """`tree` [*weight.shape, ...] where there is weight, else 0, for what goes into a network.

    Masking a loss is not enough: the gradient of what a dead sample holds is NaN, if that is.
    """

    def clean(x: jax.Array) -> jax.Array:
        mask = jnp.reshape(weight > 0, weight.shape + (1,) * (x.ndim - weight.ndim))
        return jnp.where(mask, x, jnp.zeros((), x.dtype))

    return jax.tree.map(clean, tree)


def standardise(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Shift and scale to mean 0 and variance 1 over the samples with weight."""
    mean = weighted_mean(x, weight)
    variance = weighted_mean(jnp.square(x - mean), weight)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-8)


def clipped_surrogate(
    log_ratio: jax.Array, advantage: jax.Array, clip_epsilon: jax.Array
) -> jax.Array:
    """PPO's clipped objective as a loss (Schulman et al. 2017, arXiv:1707.06347, equation 7)."""
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_epsilon, 1.0 + clip_epsilon)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def value_loss(value: jax.Array, target: jax.Array) -> jax.Array:
    """Half the squared error."""
    return 0.5 * jnp.square(value - target)


def huber_loss(value: jax.Array, target: jax.Array, delta: jax.Array) -> jax.Array:
    """Half the squared error up to `delta`, from there on a line (Huber 1964); inf is no limit."""
    error = value - target
    near = jnp.clip(error, -delta, delta)
    return near * (error - 0.5 * near)


def clipped_value_loss(
    value: jax.Array,
    old_value: jax.Array,
    target: jax.Array,
    clip_epsilon: jax.Array,
    loss: Callable[[jax.Array, jax.Array], jax.Array] = value_loss,
) -> jax.Array:
    """The larger loss of `value` and of `value` kept within `clip_epsilon` of `old_value`."""
    clipped = old_value + jnp.clip(value - old_value, -clip_epsilon, clip_epsilon)
    return jnp.maximum(loss(value, target), loss(clipped, target))


def approximate_kl(log_ratio: jax.Array) -> jax.Array:
    """Per-sample estimate of KL(old || new): (ratio - 1) - log ratio, which is never negative."""
    return jnp.expm1(log_ratio) - log_ratio


def explained_variance(value: jax.Array, target: jax.Array, weight: jax.Array) -> jax.Array:
    """1 - Var(target - value) / Var(target): 1 is perfect, 0 no better than the mean."""
    residual = target - value
    spread = jnp.square(target - weighted_mean(target, weight))
    error = jnp.square(residual - weighted_mean(residual, weight))
    return 1.0 - weighted_mean(error, weight) / (weighted_mean(spread, weight) + 1e-8)
