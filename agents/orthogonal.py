"""Orthogonal initialisation (Saxe et al. 2013, arXiv:1312.6120) without LAPACK.

On CPU `jnp.linalg.qr` of a batch (agents, or seeds, that are vmapped) waits inside a worker of
XLA's thread pool for other workers of the same pool: two of them at once, on two cores, wait for
ever. What is here is plain arithmetic, which cannot.
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


def orthonormal(rows: jax.Array) -> jax.Array:
    """Gram-Schmidt: rows [n, m], n <= m, of length 1 and orthogonal, that span what `rows` do.

    The Q of a QR decomposition with positive diagonal of R. Each row is projected twice, which is
    enough for orthogonality to rounding (Giraud et al. 2005).
    """

    def step(found: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, vector = row
        for _ in range(2):
            # not as products of matrices, which round one way alone and another in a batch
            along = jnp.sum(found * vector, -1, keepdims=True)
            vector = vector - jnp.sum(along * found, 0)
        unit = vector / jnp.linalg.norm(vector)
        return jax.lax.dynamic_update_index_in_dim(found, unit, index, 0), None

    indices = jnp.arange(rows.shape[0])
    return jax.lax.scan(step, jnp.zeros_like(rows), (indices, rows))[0]
