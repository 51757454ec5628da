"""Advantages and returns against plain loops and rlax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from marl.agents import returns

T, B = 7, 4
gae = jax.jit(returns.gae)
q_lambda = jax.jit(returns.q_lambda)
n_step = jax.jit(returns.n_step)


def loop_gae(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """The definition, one column and one step at a time, in float64."""
    advantage = np.zeros((T, B))
    for b in range(B):
        following = 0.0
        for t in reversed(range(T)):
            bootstrap = 0.0 if terminated[t, b] else gamma * float(next_value[t, b])
            delta = float(reward[t, b]) + bootstrap - float(value[t, b])
            cut = terminated[t, b] or truncated[t, b]
            following = delta + (0.0 if cut else gamma * gae_lambda * following)
            advantage[t, b] = following
    return advantage, advantage + np.asarray(value, np.float64)


@pytest.fixture(scope="module")
def rollout():
    """Column 0 is terminated, 1 truncated, 2 cut by the rollout's end, 3 all of these."""
    generator = np.random.default_rng(0)
    reward, value, next_value = generator.normal(size=(3, T, B)).astype(np.float32)
    terminated, truncated = np.zeros((T, B), bool), np.zeros((T, B), bool)
    terminated[2, 0] = terminated[4, 3] = True
    truncated[3, 1] = truncated[1, 3] = True
    return reward, value, next_value, terminated, truncated


@pytest.mark.parametrize("gamma, gae_lambda", [(0.9, 0.8), (1.0, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_equals_a_plain_loop(rollout, gamma, gae_lambda):
    for ours, loop in zip(
        gae(*rollout, gamma, gae_lambda), loop_gae(*rollout, gamma, gae_lambda), strict=True
    ):
        np.testing.assert_allclose(ours, loop, rtol=1e-5, atol=1e-5)


def test_by_hand():
    # gamma = lambda = 1/2; step 1 is terminated, step 2 truncated and bootstraps from 4.
    # A_2 = 1 + 4/2 - 1 = 2          (the rollout's end: nothing follows)
    # A_1 = 2 + 0 - 1 = 1            (terminated: next_value 100 is not read, A_2 neither)
    # A_0 = 3 + 2/2 - 2 + A_1/4 = 2.25
    advantage, target = gae(
        jnp.array([3.0, 2.0, 1.0]),
        jnp.array([2.0, 1.0, 1.0]),
        jnp.array([2.0, 100.0, 4.0]),
        jnp.array([False, True, False]),
        jnp.array([False, False, True]),
        0.5,
        0.5,
    )
    np.testing.assert_allclose(advantage, [2.25, 1.0, 2.0])
    np.testing.assert_allclose(target, [4.25, 2.0, 3.0])


def test_equals_rlax_where_it_applies():
    """rlax knows a discount per step and one row of values: no truncation inside the rollout."""
    generator = np.random.default_rng(1)
    reward = generator.normal(size=T).astype(np.float32)
    values = generator.normal(size=T + 1).astype(np.float32)
    terminated = np.arange(T) == 3
    expected = rlax.truncated_generalized_advantage_estimation(
        jnp.asarray(reward), jnp.where(terminated, 0.0, 0.97), 0.9, jnp.asarray(values)
    )
    truncated = np.zeros(T, bool)
    advantage, _ = gae(reward, values[:-1], values[1:], terminated, truncated, 0.97, 0.9)
    np.testing.assert_allclose(advantage, expected, rtol=1e-5, atol=1e-6)


def test_a_terminal_value_is_never_read(rollout):
    reward, value, next_value, terminated, truncated = rollout
    poisoned = np.where(terminated, np.nan, next_value)
    np.testing.assert_array_equal(
        gae(reward, value, poisoned, terminated, truncated, 0.9, 0.8),
        gae(reward, value, next_value, terminated, truncated, 0.9, 0.8),
    )


def test_nothing_crosses_an_episodes_end(rollout):
    """Poison after the cut of columns 0 and 1 leaves everything up to it as it was."""
    reward, *rest = rollout
    poisoned = reward.copy()
    poisoned[3:, 0] = poisoned[4:, 1] = np.nan
    clean, dirty = gae(reward, *rest, 0.9, 0.8)[0], gae(poisoned, *rest, 0.9, 0.8)[0]
    np.testing.assert_array_equal(clean[:3, 0], dirty[:3, 0])
    np.testing.assert_array_equal(clean[:4, 1], dirty[:4, 1])
    assert np.isnan(dirty[3, 0]) and np.isnan(dirty[4, 1])


numbers = arrays(np.float32, (T, B), elements=st.floats(-10, 10, width=32))
flags = arrays(bool, (T, B))


@settings(max_examples=30)
@given(numbers, numbers, numbers, flags, flags, st.floats(0, 1), st.floats(0, 1))
def test_any_rollout_equals_the_loop(
    reward, value, next_value, terminated, truncated, gamma, gae_lambda
):
    rollout = reward, value, next_value, terminated, truncated
    advantage, target = gae(*rollout, gamma, gae_lambda)
    expected, expected_target = loop_gae(*rollout, gamma, gae_lambda)
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(target, expected_target, rtol=1e-4, atol=1e-3)


@settings(max_examples=30)
@given(numbers, numbers, numbers, flags, flags, st.floats(0, 1))
def test_without_discount_the_target_is_the_reward(
    reward, value, next_value, terminated, truncated, gae_lambda
):
    _, target = gae(reward, value, next_value, terminated, truncated, 0.0, gae_lambda)
    np.testing.assert_allclose(target, reward, atol=1e-5)


@settings(max_examples=30)
@given(numbers, numbers, st.floats(0, 1))
def test_with_lambda_one_the_target_is_the_discounted_sum(reward, value, gamma):
    """One episode per column, terminated at the end: values play no part in the target."""
    terminated = np.broadcast_to(np.arange(T)[:, None] == T - 1, (T, B))
    next_value = np.concatenate([value[1:], np.full((1, B), np.nan, np.float32)])
    _, target = gae(reward, value, next_value, terminated, np.zeros((T, B), bool), gamma, 1.0)
    for t in range(T):
        discounts = gamma ** np.arange(T - t)
        expected = np.sum(discounts[:, None] * reward[t:], 0)
        np.testing.assert_allclose(target[t], expected, rtol=1e-4, atol=1e-3)


@settings(max_examples=30)
@given(numbers, numbers, numbers, flags, flags)
def test_columns_do_not_mix(reward, value, next_value, terminated, truncated):
    rollout = reward, value, next_value, terminated, truncated
    swapped = tuple(x[:, ::-1] for x in rollout)
    np.testing.assert_array_equal(gae(*rollout, 0.9, 0.8)[0][:, ::-1], gae(*swapped, 0.9, 0.8)[0])


def mixture(reward, next_value, terminated, truncated, gamma, trace_decay):
    """Each lambda return as the weighted sum of n-step returns that it is, in float64."""
    found = np.zeros((T, B))
    for t, b in np.ndindex(T, B):
        total, share = 0.0, 1.0
        for k in range(t, T):
            total += gamma ** (k - t) * float(reward[k, b])
            if terminated[k, b]:
                found[t, b] += share * total
                break
            last = truncated[k, b] or k == T - 1
            bootstrapped = total + gamma ** (k - t + 1) * float(next_value[k, b])
            found[t, b] += (share if last else share * (1 - trace_decay)) * bootstrapped
            if last:
                break
            share *= trace_decay
    return found


@settings(max_examples=30)
@given(numbers, numbers, flags, flags, st.floats(0, 1), st.floats(0, 1))
def test_a_lambda_return_is_a_mixture_of_n_step_returns(
    reward, next_value, terminated, truncated, gamma, trace_decay
):
    rollout = reward, next_value, terminated, truncated, gamma, trace_decay
    np.testing.assert_allclose(q_lambda(*rollout), mixture(*rollout), rtol=1e-4, atol=1e-3)


def test_lambda_returns_by_hand():
    # gamma = lambda = 1/2; step 1 is terminated, step 3 truncated, 4 the last
    # G_4 = 1 + 6/2 = 4; G_3 = 2 + 2/2 = 3; G_2 = 1 + (3/2 + 8/2)/2 = 3.75; G_1 = 5
    # G_0 = 3 + (5/2 + 4/2)/2 = 5.25
    found = q_lambda(
        jnp.array([3.0, 5.0, 1.0, 2.0, 1.0]),
        jnp.array([4.0, 100.0, 8.0, 2.0, 6.0]),
        jnp.array([False, True, False, False, False]),
        jnp.array([False, False, False, True, False]),
        0.5,
        0.5,
    )
    np.testing.assert_allclose(found, [5.25, 5.0, 3.75, 3.0, 4.0])


def test_lambda_returns_equal_rlax_where_it_applies():
    """No truncation inside the rollout; rlax takes values of the states themselves."""
    reward, next_value = np.random.default_rng(2).normal(size=(2, T)).astype(np.float32)
    terminated, truncated = np.arange(T) == 3, np.zeros(T, bool)
    discounts = jnp.where(terminated, 0.0, 0.97)
    expected = rlax.lambda_returns(jnp.asarray(reward), discounts, jnp.asarray(next_value), 0.8)
    found = q_lambda(reward, next_value, terminated, truncated, 0.97, 0.8)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_what_lies_behind_an_end_is_not_read(rollout):
    reward, _, next_value, terminated, truncated = (x[:, :2].copy() for x in rollout)
    clean = q_lambda(reward, next_value, terminated, truncated, 0.9, 0.8)
    totals = n_step(reward, terminated, truncated, 0.9)
    reward[3:, 0] = reward[4:, 1] = next_value[2:, 0] = next_value[4:, 1] = np.nan
    dirty = q_lambda(reward, next_value, terminated, truncated, 0.9, 0.8)
    np.testing.assert_array_equal(clean[:3, 0], dirty[:3, 0])
    np.testing.assert_array_equal(clean[:4, 1], dirty[:4, 1])
    assert np.all(np.isnan(dirty[3:, 0])) and np.all(np.isnan(dirty[4:, 1]))
    for one, other in zip(totals, n_step(reward, terminated, truncated, 0.9), strict=True):
        np.testing.assert_array_equal(one, other)


def test_n_step_by_hand():
    # columns: cut after three steps; terminated at step 1; truncated at step 0; both at step 2
    reward = jnp.array([[1.0] * 4, [2.0] * 4, [4.0] * 4])
    terminated, truncated = np.zeros((3, 4), bool), np.zeros((3, 4), bool)
    terminated[1, 1] = terminated[2, 3] = truncated[2, 3] = truncated[0, 2] = True
    total, discount, last = n_step(reward, terminated, truncated, 0.5)
    np.testing.assert_allclose(total, [3.0, 2.0, 1.0, 3.0])
    np.testing.assert_allclose(discount, [0.125, 0.0, 0.5, 0.0])
    np.testing.assert_array_equal(last, [2, 1, 0, 2])
    one = n_step(reward[:1], terminated[:1], truncated[:1], 0.5)
    for found, expected in zip(one, ([1.0] * 4, [0.5] * 4, [0] * 4), strict=True):
        np.testing.assert_allclose(found, expected)


@settings(max_examples=30)
@given(numbers, flags, flags, st.floats(0, 1))
def test_n_step_equals_the_loop(reward, terminated, truncated, gamma):
    total, discount, last = n_step(reward, terminated, truncated, gamma)
    for b in range(B):
        ends = np.flatnonzero(terminated[:, b] | truncated[:, b])
        end = ends[0] if len(ends) else T - 1
        expected = sum(gamma**k * float(reward[k, b]) for k in range(end + 1))
        assert last[b] == end
        np.testing.assert_allclose(total[b], expected, rtol=1e-4, atol=1e-3)
        after = 0.0 if terminated[end, b] else gamma ** (end + 1)
        np.testing.assert_allclose(discount[b], after, rtol=1e-4, atol=1e-6)
