"""Orthogonal initialisation (Saxe et al. 2013, arXiv:1312.6120), one matrix at a time.

On CPU a batched `jnp.linalg.qr` (of agents, or seeds, that are vmapped) splits its batch over XLA's
thread pool, and waits for the parts inside a worker of that pool: two such calls at once, on two
cores, wait for ever. A single matrix is decomposed where it is called, so batches are looped over.
"""

import math

import jax
import jax.numpy as jnp


def orthogonal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    """A matrix [*shape], rows being all axes but the last, drawn uniformly and times `scale`.

    Of rows and columns those that are fewer are orthogonal to one another and of length `scale`.
    """
    columns, rows = shape[-1], math.prod(shape[:-1])
    few, many = sorted((columns, rows))
    found = orthonormal(jax.random.normal(key, (many, few)).T)  # [few, many]
    return scale * (found.T if columns < rows else found).reshape(shape)


@jax.custom_batching.sequential_vmap
def orthonormal(rows: jax.Array) -> jax.Array:
    """Rows [n, m], n <= m, of length 1 and orthogonal, that span what `rows` do.

    The Q of a QR decomposition with positive diagonal of R.
    """
    q, r = jnp.linalg.qr(rows.T)
    return (q * jnp.sign(jnp.diag(r))).T
