"""Schedules by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl.agents.schedules import KINDS, schedule


def at(kind, steps, start=4.0, end=2.0, horizon=100.0):
    return float(schedule(kind, *map(jnp.float32, (start, end, horizon, steps))))


@pytest.mark.parametrize(
    "kind, steps, expected",
    [
        ("constant", 0, 4.0),
        ("constant", 1e6, 4.0),
        ("linear", 0, 4.0),
        ("linear", 25, 3.5),
        ("linear", 100, 2.0),
        ("linear", 1e6, 2.0),
        ("cosine", 0, 4.0),
        ("cosine", 50, 3.0),
        ("cosine", 25, 4.0 - (1.0 - np.sqrt(0.5))),  # 2 * (1 - cos(pi/4)) / 2 below the start
        ("cosine", 1e6, 2.0),
    ],
)
def test_by_hand(kind, steps, expected):
    np.testing.assert_allclose(at(kind, steps), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_horizon_of_zero_is_finite(kind):
    assert at(kind, 0, horizon=0.0) == 4.0
    assert at(kind, 10, horizon=0.0) == (4.0 if kind == "constant" else 2.0)


@settings(max_examples=30)
@given(st.sampled_from(KINDS), st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e3))
def test_stays_between_start_and_end(kind, start, end, steps):
    value = at(kind, steps, start, end)
    assert min(start, end) - 1e-3 <= value <= max(start, end) + 1e-3


def test_horizons_may_differ_per_agent():
    horizon = jnp.array([10.0, 20.0])
    values = jax.vmap(lambda h: schedule("linear", 1.0, 0.0, h, jnp.float32(5.0)))(horizon)
    np.testing.assert_allclose(values, [0.5, 0.75])
