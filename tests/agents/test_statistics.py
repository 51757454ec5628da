"""Statistics merged batch by batch equal those of one pass."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from marl.agents import statistics

BATCHES, T, B, D = 3, 4, 2, 3
merge = jax.jit(statistics.merge)

samples = arrays(np.float32, (BATCHES, T, B, D), elements=st.floats(-100, 100, width=32))
weights = arrays(np.float32, (BATCHES, T, B), elements=st.sampled_from([0.0, 0.25, 1.0]))


def one_pass(x, weight):
    """(count, mean, variance) over everything, in float64."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    x, weight = x.reshape(-1, x.shape[-1]), weight.reshape(-1)
    mean = np.average(x, 0, weight)
    return weight.sum(), mean, np.average((x - mean) ** 2, 0, weight)


@settings(max_examples=60)
@given(samples, weights)
def test_merging_batches_equals_one_pass(x, weight):
    merged = statistics.init((D,))
    for batch, batch_weight in zip(x, weight, strict=True):
        merged = merge(merged, batch, batch_weight)
    if weight.sum() == 0:
        np.testing.assert_array_equal(merged.variance, 1.0)
        return
    count, mean, variance = one_pass(x, weight)
    np.testing.assert_allclose(merged.total, count)
    np.testing.assert_allclose(merged.mean, mean, atol=1e-3)
    np.testing.assert_allclose(merged.variance, variance, rtol=1e-4, atol=1e-2)


@settings(max_examples=30)
@given(samples, st.permutations(range(BATCHES)))
def test_the_order_of_batches_does_not_matter(x, order):
    one, other = statistics.init((D,)), statistics.init((D,))
    ones = np.ones((T, B), np.float32)
    for position, permuted in enumerate(order):
        one, other = merge(one, x[position], ones), merge(other, x[permuted], ones)
    np.testing.assert_allclose(one.mean, other.mean, atol=1e-3)
    np.testing.assert_allclose(one.variance, other.variance, rtol=1e-4, atol=1e-2)


def test_the_first_merge_is_exact():
    # columns (1, 3) and (10, 10): means 2 and 10, variances 1 and 0; init's variance 1 is forgotten
    merged = merge(statistics.init((2,)), jnp.array([[1.0, 10.0], [3.0, 10.0]]), jnp.ones(2))
    np.testing.assert_array_equal(merged.total, 2.0)
    np.testing.assert_array_equal(merged.mean, [2.0, 10.0])
    np.testing.assert_array_equal(merged.variance, [1.0, 0.0])


def test_the_second_merge_by_hand():
    # 1 and 3, then 8: mean 4, variance (9 + 1 + 16) / 3
    merged = merge(statistics.init(), jnp.array([1.0, 3.0]), jnp.ones(2))
    merged = merge(merged, jnp.array([8.0]), jnp.ones(1))
    np.testing.assert_allclose(merged.mean, 4.0)
    np.testing.assert_allclose(merged.variance, 26 / 3, rtol=1e-6)


def test_samples_without_weight_are_not_read():
    x = np.random.default_rng(0).normal(size=(T, B, D)).astype(np.float32)
    weight = np.ones((T, B), np.float32)
    weight[1, 0] = weight[2, 1] = 0.0
    poisoned = np.where(weight[..., None] > 0, x, np.nan)
    start = merge(statistics.init((D,)), x + 3.0, np.ones((T, B), np.float32))
    for ours, poison in zip(merge(start, x, weight), merge(start, poisoned, weight), strict=True):
        np.testing.assert_array_equal(ours, poison)


def test_a_batch_without_weight_changes_nothing():
    start = merge(statistics.init((D,)), np.eye(D, dtype=np.float32), np.ones(D, np.float32))
    after = merge(start, np.full((T, B, D), np.nan, np.float32), np.zeros((T, B), np.float32))
    for before, now in zip(start, after, strict=True):
        np.testing.assert_array_equal(before, now)


def test_large_offsets_do_not_cancel():
    """E[x^2] - E[x]^2 in float32 would give nonsense here."""
    x = (1e4 + np.arange(8) % 2).astype(np.float32)[:, None]
    merged = statistics.init((1,))
    for half in (x[:4], x[4:]):
        merged = merge(merged, half, np.ones(4, np.float32))
    np.testing.assert_allclose(merged.variance, 0.25, rtol=1e-2)


@settings(max_examples=30)
@given(
    arrays(np.float32, D, elements=st.floats(-100, 100, width=32)),
    arrays(np.float32, D, elements=st.floats(0, 100, width=32)),
    arrays(np.float32, D, elements=st.floats(-100, 100, width=32)),
)
def test_denormalise_is_the_inverse(mean, variance, x):
    stats = statistics.RunningStatistics(jnp.float32(1.0), jnp.asarray(mean), jnp.asarray(variance))
    back = statistics.denormalise(stats, statistics.normalise(stats, x))
    np.testing.assert_allclose(back, x, rtol=1e-4, atol=1e-3)


def test_normalised_samples_have_mean_0_and_variance_1():
    x = np.random.default_rng(0).normal(5.0, 3.0, size=(64, D)).astype(np.float32)
    normal = statistics.normalise(merge(statistics.init((D,)), x, np.ones(64, np.float32)), x)
    np.testing.assert_allclose(np.mean(normal, 0), 0.0, atol=1e-4)
    np.testing.assert_allclose(np.var(normal, 0), 1.0, atol=1e-3)


def test_normalising_with_nothing_seen_changes_nothing():
    x = np.array([-3.0, 0.0, 7.0], np.float32)
    np.testing.assert_allclose(statistics.normalise(statistics.init((D,)), x), x, rtol=1e-4)


def test_a_constant_input_stays_finite():
    stats = merge(statistics.init((1,)), np.full((5, 1), 2.0, np.float32), np.ones(5, np.float32))
    assert abs(float(statistics.normalise(stats, jnp.full(1, 2.0))[0])) < 1e-3
