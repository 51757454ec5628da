"""Orthogonal initialisation: haiku's matrices, without a batched call into LAPACK."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl.agents.orthogonal import orthogonal, orthonormal

SHAPES = [(64, 18), (18, 64), (64, 64), (64, 300), (3, 3, 4, 16), (1, 64), (64, 1), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_what_haiku_gives(shape):
    given = hk.transform(lambda: hk.initializers.Orthogonal(1.5)(shape, jnp.float32))
    ours = hk.transform(lambda: orthogonal(hk.next_rng_key(), shape, 1.5))
    key = jax.random.key(3)
    found = np.asarray(ours.apply({}, key))
    np.testing.assert_allclose(found, given.apply({}, key), atol=1e-5)
    matrix = found.reshape(-1, shape[-1])
    matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    np.testing.assert_allclose(matrix @ matrix.T, 2.25 * np.eye(len(matrix)), atol=5e-6)


def test_nearly_dependent_rows_still_come_out_orthogonal():
    base = jax.random.normal(jax.random.key(0), (1, 50))
    rows = base + 1e-3 * jax.random.normal(jax.random.key(1), (8, 50))
    found = np.asarray(orthonormal(rows))
    np.testing.assert_allclose(found @ found.T, np.eye(8), atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 8), (8, 16), (64, 18)])
def test_a_batch_has_the_bits_of_each_alone(shape):
    keys = jax.random.split(jax.random.key(0), 3)
    batch = jax.jit(jax.vmap(lambda key: orthogonal(key, shape, 1.0)))(keys)
    alone = jax.jit(lambda key: orthogonal(key, shape, 1.0))
    for key, found in zip(keys, batch, strict=True):
        np.testing.assert_array_equal(alone(key), found)


def test_no_batch_of_matrices_is_decomposed_at_once():
    """LAPACK's kernel of a batch waits in a thread pool; two at once, on two cores, for ever."""
    batched = jax.vmap(jax.vmap(lambda key: orthogonal(key, (8, 4), 1.0)))
    keys = jax.random.split(jax.random.key(0), (2, 3))
    text = str(jax.make_jaxpr(batched)(keys))
    decomposed = [line for line in text.splitlines() if "geqrf" in line or " qr[" in line]
    assert decomposed and all("f32[2," not in line and "f32[3," not in line for line in decomposed)
