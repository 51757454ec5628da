"""The order in which samples are learned from."""

from typing import Any

import jax
import jax.numpy as jnp


def shuffled(
    key: jax.Array, config: Any, actor_size: int, critic_size: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Sample indices [num_epochs * num_minibatches, samples per minibatch] of actor and critic.

    Sizes are numbers of samples, 0 for None; of equal ones the order is the same.
    """

    def indices(key: jax.Array, size: int) -> jax.Array:
        orders = permutations(key, config.num_epochs, size)
        return orders.reshape(config.num_epochs * config.num_minibatches, -1)

    actor = indices(key, actor_size) if actor_size else None
    if not critic_size or actor_size == critic_size:
        return actor, actor if critic_size else None
    return actor, indices(jax.random.fold_in(key, 1) if actor_size else key, critic_size)


def permutations(key: jax.Array, number: int, size: int) -> jax.Array:
    """Random orders [number, size] of 0 ... size - 1, from one sort of integers.

    The low bits of each word are the index, the rest is random: sorting plain integers is six times
    faster on a CPU than sorting pairs. Where the 32 - log2(size) random bits of two samples are
    equal they stay in order, which only matters where a minibatch ends between them.
    """
    width = (size - 1).bit_length()
    words = jax.random.bits(key, (number, size)) >> width << width
    order = jnp.sort(words | jnp.arange(size, dtype=jnp.uint32))
    return (order & jnp.uint32(2**width - 1)).astype(jnp.int32)
