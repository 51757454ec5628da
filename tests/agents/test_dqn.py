"""DQN: against a second implementation, windows, double Q, the target network, weights."""

from functools import partial

import jax
import jax.numpy as jnp
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
from ppo_reference import Trained
from q_reference import (
    SPACE,
    case_of,
    inputs,
    linear_state,
    reference_descent,
    reference_q,
    trained_on_chain,
    transitions,
)

from marl.agents import dqn, q_learning
from marl.agents.learner import CriticSpace
from marl.envs.errors import UsageError
from marl.envs.spaces import Discrete

HPARAMS = {"learning_rate": 0.01, "gamma": 0.9, "tau": 0.3, "schedule_steps": 100.0}


def with_another_target(state):
    """A target network that is not the online one, as in the middle of training."""
    return state._replace(target_params=jax.tree.map(lambda x: 0.3 - 1.5 * x, state.target_params))


@pytest.fixture(scope="module", params=[True, False], ids=["double", "plain"])
def trained(request):
    case = case_of(dqn, double=request.param, target_update_interval=2)
    return Trained(case, prepare=with_another_target, **HPARAMS)


def reference_targets(trained, rollout):
    """Window by window, step by step."""
    gamma, state = float(trained.hparams.gamma), trained.state
    found = []
    for b in range(rollout.reward.shape[1]):
        total, discount = 0.0, 1.0
        for t in range(rollout.reward.shape[0]):
            total += discount * float(rollout.reward[t, b])
            discount *= gamma
            if rollout.terminated[t, b] or rollout.truncated[t, b]:
                break
        legal = np.flatnonzero(rollout.final_action_mask[t, b])
        online, target = (
            np.asarray(reference_q(params, rollout.final_obs[t, b]))
            for params in (state.network.params, state.target_params)
        )
        judge = online if trained.case.config.double else target
        best = max(legal, key=lambda action, judge=judge: judge[action])
        found.append(total + (0.0 if rollout.terminated[t, b] else discount * target[best]))
    return np.array(found, np.float32)


def test_an_update_equals_a_second_implementation(trained):
    """Windows of six steps: one terminated, one truncated, two cut; one has no weight."""
    weight = trained.rollout.weight.copy()
    weight[0, 2] = 0.0
    live = weight[0] > 0
    after, metrics = trained.after(weight=weight)
    params, expected = reference_descent(
        trained.state.network.params,
        trained.hparams,
        trained.rollout.obs[0][live],
        trained.rollout.action[0][live],
        reference_targets(trained, trained.rollout)[live],
        steps=1,
    )
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, after.network.params, params)
    expected |= {"learning_rate": 0.01, "epsilon": 0.05}
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        close(metrics[name], value, err_msg=name)


def test_only_the_first_steps_of_windows_are_learned_from(trained):
    """Nor is anything read behind the end of an episode, or of states that nobody bootstraps."""
    rollout = trained.rollout
    obs, action, final_obs = (np.array(x) for x in (rollout.obs, rollout.action, rollout.final_obs))
    reward = rollout.reward.copy()
    obs[1:], action[1:] = np.nan, 99
    reward[3:, 0] = reward[4:, 1] = np.nan  # ends at steps 2 and 3
    final_obs[:, 0] = np.nan  # terminated
    final_obs[:3, 1] = final_obs[4:, 1] = final_obs[:5, 2:] = np.nan
    changed = {"obs": obs, "action": action, "final_obs": final_obs, "reward": reward}
    assert_identical(trained.after(**changed), trained.after())


def test_windows_without_weight_change_nothing(trained):
    weight = np.ones_like(trained.rollout.weight)
    weight[0, 1:3] = 0.0

    def poisoned(x, other):
        x = np.array(x)
        x[:, 1:3] = other
        return x

    rollout = trained.rollout
    changed = {name: poisoned(getattr(rollout, name), np.nan) for name in ("obs", "final_obs")}
    changed |= {
        "reward": poisoned(rollout.reward, np.nan),
        "action": poisoned(rollout.action, -7),
        "final_action_mask": poisoned(rollout.final_action_mask, False),
    }
    clean, metrics = trained.after(weight=weight)
    dirty, dirty_metrics = trained.after(weight=weight, **changed)
    assert all_finite(dirty) and all_finite(dirty_metrics)
    assert_identical((clean, metrics), (dirty, dirty_metrics))


def test_samples_without_any_weight_teach_nothing(trained):
    weight = np.zeros_like(trained.rollout.weight)
    state, metrics = trained.after(weight=weight, reward=trained.rollout.reward * np.nan)
    assert all_finite(metrics) and metrics["loss"] == metrics["grad_norm"] == 0.0
    assert_identical(state.network.params, trained.state.network.params)


def test_weights_scale_a_samples_share(trained):
    """A window of weight 2 counts like two of weight 1."""
    twice = np.ones_like(trained.rollout.weight)
    twice[0] = [2.0, 1.0, 1.0, 0.0]
    copied = {
        name: np.array(getattr(trained.rollout, name))
        for name in ("obs", "action", "final_obs", "final_action_mask", "reward")
    } | {name: getattr(trained.rollout, name).copy() for name in ("terminated", "truncated")}
    for x in copied.values():
        x[:, 3] = x[:, 0]
    one, metrics = trained.after(weight=twice)
    other, copied_metrics = trained.after(weight=np.ones_like(twice), **copied)
    assert relative_difference(one, other) <= 1e-4
    for name in metrics:
        np.testing.assert_allclose(metrics[name], copied_metrics[name], rtol=1e-4, err_msg=name)


def expected_target(tau, online, target):
    return jax.tree.map(
        lambda new, old: np.float32(tau) * np.asarray(new) + np.float32(1 - tau) * np.asarray(old),
        online,
        target,
    )


def test_the_target_moves_by_tau_every_second_step(trained):
    first, _ = trained.after()
    assert first.steps == 1 and first.steps.dtype == jnp.int32
    assert_identical(first.target_params, trained.state.target_params)
    given = jax.random.key(0), first, trained.rollout, trained.hparams
    second, _ = trained.update(*given)
    assert second.steps == 2
    expected = expected_target(0.3, second.network.params, first.target_params)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), second.target_params, expected
    )
    assert relative_difference(second.target_params, first.target_params) > 1e-3


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_the_target_stays_or_is_copied(trained, tau):
    """From the step before a move; exactly, to the last bit."""
    state = trained.state._replace(steps=jnp.int32(1))
    hparams = trained.hparams._replace(tau=jnp.float32(tau))
    after, _ = trained.update(jax.random.key(0), state, trained.rollout, hparams)
    assert_identical(after.target_params, after.network.params if tau else state.target_params)


def test_apply_gradients_is_the_step_of_an_update(trained):
    """With the gradients of the loss: the same network, count and target."""
    learner, rollout, hparams = trained.learner, trained.rollout, trained.hparams
    state = trained.state._replace(steps=jnp.int32(1))
    target = reference_targets(trained, rollout)

    @jax.jit
    def step(state):
        def loss(params):
            q = learner.q_values(params, rollout.obs[0])
            error = q_learning.chosen(q, rollout.action[0]) - target
            return 0.5 * jnp.mean(error**2)

        return learner.apply_gradients(state, jax.grad(loss)(state.network.params), hparams)

    expected, _ = trained.update(jax.random.key(0), state, rollout, hparams)
    assert relative_difference(step(state), expected) <= 1e-4


def test_vmap_over_agents_is_a_loop(trained):
    case, keys = trained.case, jax.random.split(jax.random.key(3), 3)
    act = jax.jit(trained.learner.act)
    rates = [
        case.hparams(**HPARAMS | {"learning_rate": rate, "adam_epsilon": 1e-3, "tau": 0.5})
        for rate in (1e-3, 3e-3, 1e-2)
    ]
    states = [trained.learner.init(key, h) for key, h in zip(keys, rates, strict=True)]
    rollouts = [
        make_rollout(case, act, state, h, seed)
        for seed, (state, h) in enumerate(zip(states, rates, strict=True))
    ]
    together = stack(states)
    update = jax.jit(jax.vmap(trained.learner.update))
    for _ in range(2):
        together, _ = update(keys, together, stack(rollouts), stack(rates))
    for n, state in enumerate(states):
        for _ in range(2):
            state, _ = trained.update(keys[n], state, rollouts[n], rates[n])
        assert relative_difference(take(together, n), state) <= 1e-5


def by_hand(double, mask, **fields):
    """Targets of two windows of two steps; online values 1, 3, 2, target values 10, 5, 7."""
    config = dqn.Config(double=double, hidden_sizes=())
    parts = q_learning.make_parts("dqn", config, SPACE, Discrete(3))
    rollout = transitions(
        reward=np.array([[1.0, 2.0], [4.0, 8.0]], np.float32),
        final_obs=np.zeros((2, 2, 3), np.float32),
        final_action_mask=mask,
        **fields,
    )
    state = linear_state([1.0, 3.0, 2.0], [10.0, 5.0, 7.0])
    return dqn.targets(parts, state, rollout, jnp.float32(0.5))


def test_double_q_learning_lets_the_online_network_choose():
    # r_0 + r_1 / 2 + value / 4: the online network takes action 1, worth 5; the best is worth 10
    np.testing.assert_allclose(by_hand(True, None), [3 + 1.25, 6 + 1.25])
    np.testing.assert_allclose(by_hand(False, None), [3 + 2.5, 6 + 2.5])


def test_illegal_actions_are_not_bootstrapped_from():
    # at the last step of window 0 only 2 is legal, of window 1 only 0 and 1
    mask = np.zeros((2, 2, 3), bool)
    mask[1, 0, 2] = mask[1, 1, :2] = True
    np.testing.assert_allclose(by_hand(True, mask), [3 + 1.75, 6 + 1.25])
    np.testing.assert_allclose(by_hand(False, mask), [3 + 1.75, 6 + 2.5])


def test_windows_end_with_the_episode():
    # window 0 is truncated at once: 1 + 7 / 2, legal there is only 2; window 1 is terminated: 2
    mask = np.ones((2, 2, 3), bool)
    mask[0, 0, :2] = False
    ends = np.zeros((2, 2, 2), bool)
    ends[0, 0, 0] = ends[1, 0, 1] = True
    for double in (True, False):
        found = by_hand(double, mask, truncated=ends[0], terminated=ends[1])
        np.testing.assert_allclose(found, [4.5, 2.0])


def test_others_are_told_what_the_target_network_would_do():
    learner = dqn.make(dqn.Config(hidden_sizes=()), SPACE, Discrete(3), CriticSpace(()))
    state = linear_state([1.0, 3.0, 2.0], [10.0, 5.0, 7.0])
    mask = np.array([[True, True, True], [False, True, True]])
    output = learner.next_action(jax.random.key(0), state, inputs(2, mask), dqn.Hparams())
    np.testing.assert_array_equal(output.action, [0, 2])


@pytest.mark.parametrize("double, dueling", [(True, False), (False, True)])
def test_learns_the_values_of_the_best_policy(double, dueling):
    config = dqn.Config(double=double, dueling=dueling, hidden_sizes=(16,))
    found, expected = trained_on_chain(dqn, config, 1500, learning_rate=3e-3, tau=0.05)
    np.testing.assert_allclose(found, expected, atol=0.03)


def test_what_it_wants_and_refuses():
    assert dqn.CRITIC is None and case_of(dqn).learner().experience == "replay"
    with pytest.raises(UsageError, match="target_update_interval = 0 is out of range"):
        dqn.Config(target_update_interval=0)
