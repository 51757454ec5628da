"""Losses by hand, against rlax, and with poison where nothing may be read."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from marl.agents import losses

NAN = np.nan


def test_weighted_mean_by_hand():
    # (1 * 1 + 4 * 0.5) / 1.5 = 2; the unweighted sample is not read
    x, weight = jnp.array([1.0, 4.0, NAN]), jnp.array([1.0, 0.5, 0.0])
    np.testing.assert_allclose(losses.weighted_mean(x, weight), 2.0)


def test_weighted_mean_of_nothing_is_zero():
    assert losses.weighted_mean(jnp.array([NAN, 1.0]), jnp.zeros(2)) == 0.0


def test_gradient_of_weighted_mean_reads_no_unweighted_sample():
    weight = jnp.array([1.0, 3.0, 0.0])
    gradient = jax.grad(losses.weighted_mean)(jnp.array([1.0, 2.0, NAN]), weight)
    np.testing.assert_allclose(gradient, [0.25, 0.75, 0.0])


def test_standardise_by_hand():
    # mean (1 + 3) / 2 = 2, variance (1 + 1) / 2 = 1; the unweighted 100 takes no part
    x, weight = jnp.array([1.0, 3.0, 100.0]), jnp.array([1.0, 1.0, 0.0])
    np.testing.assert_allclose(losses.standardise(x, weight), [-1.0, 1.0, 98.0], rtol=1e-6)
    # weights count: mean (0 * 3 + 4) / 4 = 1, variance (3 * 1 + 9) / 4 = 3
    x, weight = jnp.array([0.0, 4.0]), jnp.array([3.0, 1.0])
    expected = np.array([-1.0, 3.0]) / np.sqrt(3.0)
    np.testing.assert_allclose(losses.standardise(x, weight), expected, rtol=1e-6)


def test_standardise_ignores_nan_without_weight_and_survives_equal_samples():
    x, weight = jnp.array([2.0, 2.0, NAN]), jnp.array([1.0, 1.0, 0.0])
    np.testing.assert_array_equal(losses.standardise(x, weight)[:2], [0.0, 0.0])


# ratio 1.5, 0.5 and 1.1 with epsilon 0.2:
CLIPPED = [
    (1.5, 2.0, -2.4),  # -min(1.5 * 2, 1.2 * 2)
    (0.5, 2.0, -1.0),  # -min(0.5 * 2, 0.8 * 2)
    (1.5, -2.0, 3.0),  # -min(1.5 * -2, 1.2 * -2)
    (0.5, -2.0, 1.6),  # -min(0.5 * -2, 0.8 * -2)
    (1.1, 2.0, -2.2),  # inside the range
    (1.0, 3.0, -3.0),
]


def test_clipped_surrogate_by_hand():
    ratio, advantage, expected = jnp.asarray(CLIPPED).T
    loss = losses.clipped_surrogate(jnp.log(ratio), advantage, 0.2)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_clipped_surrogate_stops_where_it_is_clipped():
    ratio, advantage, _ = jnp.asarray(CLIPPED).T
    gradient = jax.vmap(jax.grad(losses.clipped_surrogate), (0, 0, None))(
        jnp.log(ratio), advantage, 0.2
    )
    # d/d(log ratio) of -ratio * A, but 0 where a gain is clipped away
    np.testing.assert_allclose(gradient, [0.0, -1.0, 3.0, 0.0, -2.2, -3.0], rtol=1e-6)


@settings(max_examples=30)
@given(
    arrays(np.float32, 8, elements=st.floats(-2, 2, width=32)),
    arrays(np.float32, 8, elements=st.floats(-5, 5, width=32)),
    st.floats(0, 1),
)
def test_clipped_surrogate_equals_rlax(log_ratio, advantage, epsilon):
    expected = rlax.clipped_surrogate_pg_loss(
        jnp.exp(log_ratio), jnp.asarray(advantage), jnp.float32(epsilon)
    )
    ours = jnp.mean(losses.clipped_surrogate(log_ratio, advantage, jnp.float32(epsilon)))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_value_loss_by_hand():
    # (3 - 1)^2 / 2 = 2
    np.testing.assert_allclose(losses.value_loss(jnp.float32(3.0), jnp.float32(1.0)), 2.0)


@pytest.mark.parametrize(
    "value, old_value, target, expected",
    [
        (3.0, 0.0, 2.0, 1.125),  # kept at 0.5: max((3-2)^2, (0.5-2)^2) / 2 = 2.25 / 2
        (3.0, 0.0, 0.0, 4.5),  # max(9, 0.25) / 2
        (-3.0, 0.0, -2.0, 1.125),  # the same from below
        (0.25, 0.0, 1.0, 0.28125),  # inside the range: 0.75^2 / 2
    ],
)
def test_clipped_value_loss_by_hand(value, old_value, target, expected):
    loss = losses.clipped_value_loss(*map(jnp.float32, (value, old_value, target, 0.5)))
    np.testing.assert_allclose(loss, expected)


HUBER = [
    # value, target, delta, loss, its gradient
    (3.0, 1.0, 1.0, 1.5, 1.0),  # 1 * (2 - 1 / 2)
    (-3.0, 1.0, 1.0, 3.5, -1.0),  # 1 * (4 - 1 / 2)
    (3.0, 1.0, 10.0, 2.0, 2.0),  # 2^2 / 2
    (3.0, 1.0, 2.0, 2.0, 2.0),  # where both agree
    (13.0, 1.0, 10.0, 70.0, 10.0),  # 10 * (12 - 10 / 2)
    (13.0, 1.0, np.inf, 72.0, 12.0),
    (1.0, 1.0, 1.0, 0.0, 0.0),
]


@pytest.mark.parametrize("value, target, delta, expected, slope", HUBER)
def test_huber_loss_by_hand(value, target, delta, expected, slope):
    given = tuple(map(jnp.float32, (value, target, delta)))
    np.testing.assert_allclose(losses.huber_loss(*given), expected)
    np.testing.assert_allclose(jax.grad(losses.huber_loss)(*given), slope)


def test_clipped_huber_loss_by_hand():
    # errors 1 and, kept at 0.5, -1.5; with delta 0.5 the larger is 0.5 * (1.5 - 0.25)
    loss = partial(losses.huber_loss, delta=jnp.float32(0.5))
    found = losses.clipped_value_loss(*map(jnp.float32, (3.0, 0.0, 2.0, 0.5)), loss)
    np.testing.assert_allclose(found, 0.625)


def test_clipped_value_loss_without_limit_is_the_plain_one():
    value, target = jnp.array([3.0, -7.0]), jnp.array([1.0, 2.0])
    loss = losses.clipped_value_loss(value, jnp.zeros(2), target, jnp.inf)
    np.testing.assert_array_equal(loss, losses.value_loss(value, target))


@settings(max_examples=50)
@given(st.floats(-20, 20, width=32))
def test_kl_is_never_negative(log_ratio):
    assert losses.approximate_kl(jnp.float32(log_ratio)) >= 0.0


def test_kl_is_unbiased():
    """E_old[(r - 1) - log r] is KL(old || new): with old = (1/2, 1/2) and new = (1/4, 3/4)."""
    old, new = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    estimate = np.sum(old * np.asarray(losses.approximate_kl(jnp.log(new / old))))
    np.testing.assert_allclose(estimate, np.sum(old * np.log(old / new)), rtol=1e-6)
    assert losses.approximate_kl(jnp.float32(0.0)) == 0.0


def test_explained_variance():
    target, ones = jnp.array([1.0, 2.0, 3.0]), jnp.ones(3)
    np.testing.assert_allclose(losses.explained_variance(target, target, ones), 1.0)
    np.testing.assert_allclose(losses.explained_variance(target + 5.0, target, ones), 1.0)
    np.testing.assert_allclose(
        losses.explained_variance(jnp.full(3, 2.0), target, ones), 0.0, atol=1e-6
    )
    # residual (1, 2, 3) - (3, 2, 1) = (-2, 0, 2), four times the variance of the target
    np.testing.assert_allclose(losses.explained_variance(target[::-1], target, ones), -3.0)


def test_explained_variance_reads_no_unweighted_sample():
    value, target = jnp.array([1.0, 2.5, NAN]), jnp.array([1.0, 3.0, 7.0])
    weight = jnp.array([1.0, 1.0, 0.0])
    # residual (0, 0.5): variance 1/16; target variance 1
    np.testing.assert_allclose(losses.explained_variance(value, target, weight), 15 / 16)
