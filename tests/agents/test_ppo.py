"""PPO: against a second implementation, weights, statistics, outside advantages, minibatches."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import Case, all_finite, assert_identical
from ppo_reference import (
    ALL_NORMALISED,
    HIDDEN,
    SPACE,
    ReferenceAdam,
    Trained,
    changed_networks,
    discrete,
    reference_mlp,
    reference_update,
)

from marl.agents import minibatches, ppo, state_values
from marl.agents.actor_critic import Gradients
from marl.agents.statistics import RunningStatistics
from marl.envs.spaces import Box


def with_statistics(state):
    """Statistics as they may be in the middle of training."""
    mean, variance = jnp.array([0.5, -1.0, 0.0]), jnp.array([4.0, 1.0, 0.2])
    obs = RunningStatistics(jnp.float32(40.0), mean, variance)
    value = RunningStatistics(jnp.float32(40.0), jnp.float32(0.7), jnp.float32(2.5))
    critic_obs = obs._replace(mean=obs.mean + 0.3)
    return state._replace(
        obs_statistics=obs, critic_obs_statistics=critic_obs, value_statistics=value
    )


@pytest.fixture(scope="module")
def plain():
    return Trained(discrete(num_epochs=1), learning_rate=0.01)


def everything(**config):
    """Everything on, and steps so large that every clip bites."""
    case = discrete(num_epochs=3, **ALL_NORMALISED, **config)
    changes = {
        "learning_rate": 0.05,
        "critic_learning_rate_scale": 2.0,
        "clip_epsilon": 0.05,
        "value_clip_epsilon": 0.1,
        "huber_delta": 0.3,
        "max_grad_norm": 0.1,
        "adam_epsilon": 1e-2,
        "gamma": 0.9,
        "gae_lambda": 0.8,
    }
    return Trained(case, prepare=with_statistics, **changes)


@pytest.fixture(scope="module")
def full():
    return everything()


@pytest.fixture(scope="module")
def huber():
    return everything(value_loss="huber")


def test_the_first_gradient_step_starts_at_ratio_one(plain):
    _, metrics = plain.after()
    assert abs(metrics["approx_kl"]) < 1e-9 and metrics["clip_fraction"] == 0.0
    # standardised advantages have mean 0, so the loss of ratio 1 is 0
    assert abs(metrics["policy_loss"]) < 1e-5


@pytest.fixture(scope="module", params=["plain", "full", "huber"])
def trained(request):
    return request.getfixturevalue(request.param)


@functools.cache
def reference(trained):
    return reference_update(trained.case.config, trained.hparams, trained.state, trained.rollout)


def test_an_update_equals_a_second_implementation(trained):
    after, metrics = trained.after()
    actor, critic, expected, _ = reference(trained)
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-5)
    jax.tree.map(close, after.actor.params, actor)
    jax.tree.map(close, after.critic.params, critic)
    for name, value in expected.items():
        close(metrics[name], value, err_msg=name)


def test_the_second_implementation_is_tried_where_clips_bite(full):
    _, metrics = full.after()
    assert 0.1 < metrics["clip_fraction"] < 0.9
    assert metrics["actor_grad_norm"] > full.hparams.max_grad_norm
    assert metrics["approx_kl"] > 1e-4


def merged(before, x, live):
    """Prior and new samples in one pass, in float64."""
    x = np.asarray(x, np.float64)[live]
    count, mean = float(before.total), np.asarray(before.mean, np.float64)
    total = count + len(x)
    new_mean = (count * mean + x.sum(0)) / total
    prior = count * (np.asarray(before.variance, np.float64) + (mean - new_mean) ** 2)
    return total, new_mean, (prior + ((x - new_mean) ** 2).sum(0)) / total


def test_statistics_move_once_after_the_last_epoch(full):
    after, _ = full.after()
    live = np.asarray(full.rollout.weight) > 0
    target = reference(full)[3]
    for name, x in [
        ("obs_statistics", full.rollout.obs),
        ("critic_obs_statistics", full.rollout.critic_obs),
        ("value_statistics", target),
    ]:
        expected = merged(getattr(full.state, name), x, live)
        for found, value in zip(getattr(after, name), expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_value_is_in_the_units_of_the_return(full):
    stats = full.state.critic_obs_statistics
    obs = (full.rollout.critic_obs - stats.mean) / jnp.sqrt(stats.variance + 1e-4)
    output = reference_mlp(full.state.critic.params, jnp.clip(obs, -10, 10))[..., 0]
    expected = np.asarray(output) * np.sqrt(2.5 + 1e-4) + 0.7
    value = jax.jit(full.learner.value)(full.state, full.rollout.critic_obs)
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


def in_dead_rows(rollout, x, other):
    x = np.array(x)
    x[rollout.weight == 0] = other
    return x


def test_rows_without_weight_change_nothing(trained):
    """Poison in what is not read, other finite values in what networks see."""
    rollout = trained.rollout
    other = partial(in_dead_rows, rollout)
    changed = {
        "obs": other(rollout.obs, 3.0),
        "critic_obs": other(rollout.critic_obs, -2.0),
        "final_critic_obs": other(rollout.final_critic_obs, 5.0),
        "action": other(rollout.action, 0),
        "action_mask": other(rollout.action_mask, True),
        "reward": other(rollout.reward, np.nan),
        "extras": rollout.extras | {"log_prob": other(rollout.extras["log_prob"], np.nan)},
    }
    state, metrics = trained.after()
    poisoned, poisoned_metrics = trained.after(**changed)
    assert all_finite(poisoned) and all_finite(poisoned_metrics)
    assert_identical(state, poisoned)
    assert_identical(metrics, poisoned_metrics)


def test_a_given_advantage_without_weight_is_not_read(plain):
    advantage = -plain.rollout.reward
    poisoned = in_dead_rows(plain.rollout, advantage, np.nan)
    state, _ = plain.after(advantage=advantage)
    assert_identical(state, plain.after(advantage=poisoned)[0])


def test_a_rollout_without_any_weight_teaches_nothing(full):
    state, metrics = full.after(weight=np.zeros_like(full.rollout.weight))
    assert all_finite(metrics)
    assert_identical(state.actor.params, full.state.actor.params)
    assert_identical(state.critic.params, full.state.critic.params)
    for name in ("obs_statistics", "critic_obs_statistics", "value_statistics"):
        assert_identical(getattr(state, name), getattr(full.state, name))


def test_a_given_advantage_replaces_the_actors_and_leaves_the_critics(plain):
    state, _ = plain.after()
    given, _ = plain.after(advantage=-plain.rollout.reward)
    assert_identical(state.critic, given.critic)
    assert not np.allclose(
        state.actor.params["network"]["linear"]["w"], given.actor.params["network"]["linear"]["w"]
    )


def test_a_learner_whose_team_holds_the_critic(plain):
    case = plain.case
    learner = ppo.make(case.config, case.observation_space, case.action_space, None)
    assert learner.value is None
    fresh = jax.jit(learner.init)(jax.random.key(0), plain.hparams)
    assert fresh.critic == () and fresh.value_statistics == ()
    assert_identical(fresh.actor, plain.state.actor)
    advantage = plain.rollout.reward
    rollout = plain.rollout._replace(
        advantage=advantage, critic_obs=(), final_critic_obs=(), reward=plain.rollout.reward * 0
    )
    state, metrics = jax.jit(learner.update)(jax.random.key(0), fresh, rollout, plain.hparams)
    with_critic, _ = plain.after(advantage=advantage)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), state.actor, with_critic.actor
    )
    assert state.critic == () and "value_loss" not in metrics


def test_advantage_weight_comes_after_normalisation(plain):
    """Twice the weight is twice the policy's gradient, which normalisation would undo."""
    no_entropy = plain.hparams._replace(entropy_coef=jnp.float32(0.0))
    results = []
    for weight in (1.0, 2.0, 0.0):
        weights = np.full(plain.rollout.weight.shape, weight, np.float32)
        rollout = plain.rollout._replace(advantage_weight=weights)
        results.append(plain.update(jax.random.key(0), plain.state, rollout, no_entropy))
    norms = [metrics["actor_grad_norm"] for _, metrics in results]
    np.testing.assert_allclose(norms[1], 2 * norms[0], rtol=1e-5)
    assert norms[2] == 0.0
    unweighted, _ = plain.update(jax.random.key(0), plain.state, plain.rollout, no_entropy)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), results[0][0], unweighted
    )
    for state, _ in results[1:]:
        assert_identical(state.critic, results[0][0].critic)


CRITIC_INPUTS = ("critic_obs", "final_critic_obs")


def test_a_joint_critic_equals_a_tiled_one(plain):
    """Two agents folded into the batch, one reward: the critic may run on [T, B] or [T, B * 2]."""
    fold, rollout = 2, plain.rollout
    terminated, truncated = np.zeros((2, *rollout.reward.shape), bool)
    terminated[3, :2] = truncated[1, 2:] = True
    assert np.any(rollout.weight == 0)  # of one of two agents: the critic's sample counts by half
    common = {
        "reward": np.repeat(rollout.reward[:, ::fold], fold, axis=1),
        "terminated": terminated,
        "truncated": truncated,
    }
    joint_obs = {name: getattr(rollout, name)[:, ::fold] for name in CRITIC_INPUTS}
    tiled_obs = {name: np.repeat(x, fold, axis=1) for name, x in joint_obs.items()}
    one, metrics = plain.after(**common, **joint_obs)
    other, tiled_metrics = plain.after(**common, **tiled_obs)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, one.actor.params, other.actor.params)
    jax.tree.map(close, one.critic.params, other.critic.params)
    for name in metrics:
        close(metrics[name], tiled_metrics[name], err_msg=name)


def test_a_joint_critic_reads_no_dead_agents_reward():
    """Its target is the mean over those that count."""
    target = jnp.array([[1.0, 3.0, np.nan, 5.0, np.nan, np.nan]])
    weight = jnp.array([[1.0, 1.0, 0.0, 1.0, 0.0, 0.0]])
    mean, share = state_values._unfold(target, weight, 2)
    np.testing.assert_allclose(mean, [[2.0, 5.0, 0.0]])
    np.testing.assert_allclose(share, [[1.0, 0.5, 0.0]])


def test_apply_gradients_is_one_clipped_step_of_adam(plain):
    """Twice, so that moments are kept; what has no gradient stays."""
    apply, hparams = jax.jit(plain.learner.apply_gradients), plain.hparams
    generator = np.random.default_rng(0)
    names = {"actor": hparams.learning_rate, "critic": hparams.learning_rate * 2.0}
    hparams = hparams._replace(critic_learning_rate_scale=jnp.float32(2.0))
    for (name, rate), other in zip(names.items(), ("critic", "actor"), strict=True):
        state, params = plain.state, getattr(plain.state, name).params
        adam = ReferenceAdam(float(rate), float(hparams.adam_epsilon), float(hparams.max_grad_norm))
        for size in (1.0, 1e-3):
            grads = jax.tree.map(
                lambda x, s=size: (s * generator.normal(size=x.shape)).astype(np.float32), params
            )
            state = apply(state, Gradients(**{name: grads}), hparams)
            params, _ = adam.step(params, grads)
        close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
        jax.tree.map(close, getattr(state, name).params, params)
        assert_identical(getattr(state, other), getattr(plain.state, other))


@pytest.mark.parametrize("size", [24, 12])
def test_every_sample_is_seen_once_an_epoch(size):
    config = ppo.Config(num_epochs=3, num_minibatches=4)
    key = jax.random.key(0)
    actor, critic = minibatches.shuffled(key, config, 24, size)
    for indices, samples in ((actor, 24), (critic, size)):
        assert indices.shape == (12, samples // 4)
        epochs = np.asarray(indices).reshape(3, samples)
        np.testing.assert_array_equal(np.sort(epochs, -1), np.tile(np.arange(samples), (3, 1)))
        assert not np.array_equal(epochs[0], epochs[1])
    if size == 24:
        np.testing.assert_array_equal(actor, critic)  # actor and critic see the same samples
    assert minibatches.shuffled(key, config, 24, 0)[1] is None


@pytest.fixture(scope="module")
def saturated():
    """Four minibatches; the Gaussian has mean 8 and standard deviation 4 before squashing."""
    config = ppo.Config(**HIDDEN | {"num_epochs": 2, "num_minibatches": 4})
    case = Case(ppo, config, SPACE, Box((2,), low=(-1.0, 0.0), high=(1.0, 5.0)), SPACE)

    def saturate(state):
        network = state.actor.params["network"]
        head = sorted(network)[-1]
        bias = np.full_like(network[head]["b"], 8.0)
        network = network | {head: network[head] | {"b": bias}}
        params = {"network": network, "log_std": np.full(2, np.log(4.0), np.float32)}
        return state._replace(actor=state.actor._replace(params=params))

    return Trained(case, prepare=saturate, learning_rate=0.01)


def test_the_order_comes_from_the_shuffle_key_alone(saturated):
    one, _ = saturated.after()
    given = saturated.state, saturated.rollout, saturated.hparams
    other_key, _ = saturated.update(jax.random.key(1), *given)
    other_order, _ = saturated.after(shuffle_key=jax.random.key(9))
    assert_identical(one, other_key)
    assert changed_networks(one, other_order) == {"actor", "critic"}


def test_a_saturated_squashed_policy_learns_finite_numbers(saturated):
    """F6."""
    assert np.any(saturated.rollout.action[..., 0] == 1.0)
    state, metrics = saturated.after()
    assert all_finite(state) and all_finite(metrics)
    assert metrics["actor_grad_norm"] > 0.0
