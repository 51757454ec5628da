"""PQN: against a second implementation, Q(lambda) targets, weights, minibatches."""

from functools import partial

import jax
import numpy as np
import pytest
from learner_cases import (
    all_finite,
    assert_identical,
    make_rollout,
    relative_difference,
    stack,
    take,
)
from ppo_reference import ReferenceAdam, Trained
from q_reference import (
    SPACE,
    case_of,
    linear_state,
    reference_descent,
    reference_q,
    trained_on_chain,
    transitions,
)

from marl.agents import pqn, q_learning
from marl.envs.errors import UsageError
from marl.envs.spaces import Discrete

HPARAMS = {"learning_rate": 0.01, "gamma": 0.9, "q_lambda": 0.7, "schedule_steps": 400.0}


@pytest.fixture(scope="module")
def trained():
    return Trained(case_of(pqn, num_epochs=2, num_minibatches=1), **HPARAMS)


@pytest.fixture(scope="module")
def minibatches():
    return Trained(case_of(pqn, num_epochs=2, num_minibatches=3), **HPARAMS)


def reference_targets(trained, rollout):
    """Each target as the mixture of n-step returns that it is; float64."""
    gamma, decay = float(trained.hparams.gamma), float(trained.hparams.q_lambda)
    q = np.asarray(reference_q(trained.state.network.params, rollout.final_obs), np.float64)
    following = np.where(rollout.final_action_mask, q, -np.inf).max(-1)
    found = np.zeros(rollout.reward.shape)
    for t, b in np.ndindex(*found.shape):
        total, discount, share = 0.0, 1.0, 1.0
        for k in range(t, len(found)):
            total += discount * float(rollout.reward[k, b])
            discount *= gamma
            if rollout.terminated[k, b]:
                found[t, b] += share * total
                break
            last = rollout.truncated[k, b] or k == len(found) - 1
            kept = share if last else share * (1 - decay)
            found[t, b] += kept * (total + discount * following[k, b])
            if last:
                break
            share *= decay
    return found.astype(np.float32)


def test_an_update_equals_a_second_implementation(trained):
    after, metrics = trained.after()
    live = trained.rollout.weight > 0
    assert not np.all(live)
    params, expected = reference_descent(
        trained.state.network.params,
        trained.hparams,
        trained.rollout.obs[live],
        trained.rollout.action[live],
        reference_targets(trained, trained.rollout)[live],
        steps=2,
    )
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-5)
    jax.tree.map(close, after.network.params, params)
    # 50 of 400 * 0.2 steps on the way from 1 to 0.05
    expected |= {"learning_rate": 0.01, "epsilon": 1.0 - 0.95 * 50 / 80}
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        close(metrics[name], value, err_msg=name)


@pytest.fixture(scope="module", params=["trained", "minibatches"])
def either(request):
    return request.getfixturevalue(request.param)


def test_rows_without_weight_change_nothing(either):
    rollout = either.rollout

    def other(x, value):
        x = np.array(x)
        x[rollout.weight == 0] = value
        return x

    changed = {name: other(getattr(rollout, name), np.nan) for name in ("obs", "final_obs")}
    changed |= {
        "action": other(rollout.action, 99),
        "reward": other(rollout.reward, np.nan),
        "action_mask": other(rollout.action_mask, False),
        "final_action_mask": other(rollout.final_action_mask, False),
    }
    clean, dirty = either.after(), either.after(**changed)
    assert all_finite(dirty)
    assert_identical(clean, dirty)


def test_a_rollout_without_any_weight_teaches_nothing(either):
    weight = np.zeros_like(either.rollout.weight)
    state, metrics = either.after(weight=weight, reward=either.rollout.reward * np.nan)
    assert all_finite(metrics) and metrics["loss"] == metrics["grad_norm"] == 0.0
    assert_identical(state.network.params, either.state.network.params)


def test_the_order_comes_from_the_shuffle_key_alone(minibatches):
    one, _ = minibatches.after()
    given = minibatches.state, minibatches.rollout, minibatches.hparams
    assert_identical(one, minibatches.update(jax.random.key(1), *given)[0])
    other, _ = minibatches.after(shuffle_key=jax.random.key(9))
    assert relative_difference(one.network.params, other.network.params) > 1e-4


def test_there_is_no_target_network(trained):
    assert trained.state.target_params == () and trained.state.steps == ()
    assert any("norm" in name for name in trained.state.network.params)


def by_hand(mask=None, q_lambda=0.5, **fields):
    """Targets of three steps, gamma 1/2; each state has the values 2, 8, 4."""
    parts = q_learning.make_parts("pqn", pqn.Config(hidden_sizes=()), SPACE, Discrete(3))
    rollout = transitions(
        reward=np.array([[1.0], [2.0], [3.0]], np.float32),
        final_obs=np.zeros((3, 1, 3), np.float32),
        final_action_mask=mask,
        **fields,
    )
    hparams = pqn.Hparams(gamma=0.5, q_lambda=q_lambda)
    return pqn.targets(parts, linear_state([2.0, 8.0, 4.0]), rollout, (), hparams)[:, 0]


def test_targets_by_hand():
    # G_2 = 3 + 8/2 = 7; G_1 = 2 + (7/2 + 8/2)/2 = 5.75; G_0 = 1 + (5.75/2 + 8/2)/2 = 4.4375
    np.testing.assert_allclose(by_hand(), [4.4375, 5.75, 7.0])
    np.testing.assert_allclose(by_hand(q_lambda=0.0), [5.0, 6.0, 7.0])
    np.testing.assert_allclose(by_hand(q_lambda=1.0), [1 + 5.5 / 2, 2 + 7 / 2, 7.0])


def test_illegal_actions_are_not_bootstrapped_from():
    # legal after step 0: 0 (worth 2); after 1: 0 and 2 (worth 4); after 2: all (worth 8)
    mask = np.array([[[True, False, False]], [[True, False, True]], [[True, True, True]]])
    # G_1 = 2 + (7/2 + 4/2)/2 = 4.75; G_0 = 1 + (4.75/2 + 2/2)/2 = 2.6875
    np.testing.assert_allclose(by_hand(mask), [2.6875, 4.75, 7.0])


def test_vmap_over_agents_is_a_loop(minibatches):
    case, keys = minibatches.case, jax.random.split(jax.random.key(3), 2)
    act = jax.jit(minibatches.learner.act)
    rates = [
        case.hparams(**HPARAMS | {"learning_rate": rate, "adam_epsilon": 1e-3, "q_lambda": decay})
        for rate, decay in [(1e-3, 0.9), (1e-2, 0.5)]
    ]
    states = [minibatches.learner.init(key, h) for key, h in zip(keys, rates, strict=True)]
    rollouts = [
        make_rollout(case, act, state, h, seed)
        for seed, (state, h) in enumerate(zip(states, rates, strict=True))
    ]
    update = jax.jit(jax.vmap(minibatches.learner.update))
    together, _ = update(keys, stack(states), stack(rollouts), stack(rates))
    for n, state in enumerate(states):
        alone, _ = minibatches.update(keys[n], state, rollouts[n], rates[n])
        assert relative_difference(take(together, n), alone) <= 1e-5


def test_apply_gradients_is_one_clipped_step_of_adam(trained):
    params, hparams = trained.state.network.params, trained.hparams
    generator = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: 9 * generator.normal(size=x.shape).astype(np.float32), params)
    state = jax.jit(trained.learner.apply_gradients)(trained.state, grads, hparams)
    floats = map(float, (hparams.learning_rate, hparams.adam_epsilon, hparams.max_grad_norm))
    expected, norm = ReferenceAdam(*floats).step(params, grads)
    assert norm > hparams.max_grad_norm
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, state.network.params, expected)


def test_learns_the_values_of_the_best_policy():
    config = pqn.Config(num_epochs=2, num_minibatches=2, hidden_sizes=(16,))
    found, expected = trained_on_chain(pqn, config, 500, learning_rate=3e-3)
    np.testing.assert_allclose(found, expected, atol=0.03)


def test_what_it_wants_and_refuses():
    learner = case_of(pqn, num_minibatches=3).learner()
    assert pqn.CRITIC is None and learner.experience == "rollout"
    learner.check((6, 4))
    with pytest.raises(UsageError, match="num_envs \\* rollout_length = 20 is not divisible by"):
        learner.check((5, 4))
    for name in ("num_epochs", "num_minibatches"):
        with pytest.raises(UsageError, match=f"{name} = 0 is out of range"):
            pqn.Config(**{name: 0})
