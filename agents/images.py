"""The encoder of image observations. Knows haiku, as `networks` does."""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from marl.agents.orthogonal import orthogonal


def encode(image: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Three 3x3 convolutions over an image of any size, flattened: [..., H, W, C] -> [..., F].

    Pixels (integers with at most four channels) are scaled to [0, 1]; planes of features are not.
    Large images are halved by a stride of 2.
    """
    x = image.astype(jnp.float32)
    if jnp.issubdtype(image.dtype, jnp.integer) and image.shape[-1] <= 4:
        x = x / 255.0
    for channels in (32, 32, 32):
        stride = 2 if min(x.shape[-3:-1]) > 8 else 1
        x = activation(_Conv3x3(channels, stride)(x))
    return x.reshape(*x.shape[:-3], -1)


class _Conv3x3(hk.Module):
    """A padded 3x3 convolution.

    On a CPU XLA runs convolutions inside loops many times slower than matrix products, so there it
    is nine shifted slices and one product; elsewhere `lax.conv`. The parameters are the same.
    """

    def __init__(self, channels: int, stride: int):
        super().__init__()
        self.channels, self.stride = channels, stride

    def __call__(self, x: jax.Array) -> jax.Array:
        w = hk.get_parameter("w", (9 * x.shape[-1], self.channels), init=_orthogonal)
        b = hk.get_parameter("b", (self.channels,), init=jnp.zeros)
        product = _conv_slices if jax.default_backend() == "cpu" else _conv_lax
        return product(x, w, self.stride) + b


def _conv_slices(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
    height, width = x.shape[-3:-1]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(1, 1), (1, 1), (0, 0)])
    shifted = [
        padded[..., i : i + height : stride, j : j + width : stride, :]
        for i in range(3)
        for j in range(3)
    ]
    return jnp.concatenate(shifted, -1) @ w


def _conv_lax(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
    batch, channels = x.shape[:-3], x.shape[-1]
    out = jax.lax.conv_general_dilated(
        x.reshape(-1, *x.shape[-3:]),
        w.reshape(3, 3, channels, -1),
        (stride, stride),
        ((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return out.reshape(*batch, *out.shape[1:])


def _orthogonal(shape: Any, dtype: Any) -> jax.Array:
    return orthogonal(hk.next_rng_key(), tuple(shape), np.sqrt(2)).astype(dtype)
