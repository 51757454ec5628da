"""PPO: the ratio before the first step, a second implementation, weights, statistics, schedules."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import CASES, Case, all_finite, assert_identical, make_rollout, stack, take

from marl.agents import actor_critic, ppo
from marl.agents.actor_critic import Gradients
from marl.agents.learner import CriticSpace
from marl.agents.statistics import RunningStatistics
from marl.envs.errors import UsageError
from marl.envs.spaces import Box, Discrete

HIDDEN = {"hidden_sizes": (8,), "num_minibatches": 1}
ALL_NORMALISED = {"normalize_observations": True, "normalize_values": True, "clip_values": True}
SPACE = Box((3,))


def discrete(**config):
    return Case(ppo, ppo.Config(**HIDDEN | config), SPACE, Discrete(4), SPACE, masked=True)


class Trained:
    """A learner, its compiled functions, a fresh state and a rollout that this state acted."""

    def __init__(self, case, seed=0, prepare=lambda state: state, **hparams):
        self.case, self.learner = case, case.learner()
        self.hparams = case.hparams(**hparams)
        self.update = jax.jit(self.learner.update)
        fresh = jax.jit(self.learner.init)(jax.random.key(seed), self.hparams)
        self.state = prepare(fresh)
        self.rollout = make_rollout(case, jax.jit(self.learner.act), self.state, self.hparams, seed)

    def after(self, **changes):
        """(state, metrics) after one update from the rollout with other fields."""
        rollout = self.rollout._replace(**changes)
        return self.update(jax.random.key(0), self.state, rollout, self.hparams)


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


@pytest.fixture(scope="module")
def full():
    """Everything on, and steps so large that every clip bites."""
    case = discrete(num_epochs=3, **ALL_NORMALISED)
    changes = {
        "learning_rate": 0.05,
        "critic_learning_rate_scale": 2.0,
        "clip_epsilon": 0.05,
        "value_clip_epsilon": 0.1,
        "max_grad_norm": 0.1,
        "adam_epsilon": 1e-2,
        "gamma": 0.9,
        "gae_lambda": 0.8,
    }
    return Trained(case, prepare=with_statistics, **changes)


def test_the_first_gradient_step_starts_at_ratio_one(plain):
    _, metrics = plain.after()
    assert abs(metrics["approx_kl"]) < 1e-9 and metrics["clip_fraction"] == 0.0
    # standardised advantages have mean 0, so the loss of ratio 1 is 0
    assert abs(metrics["policy_loss"]) < 1e-5


# --- a second implementation


def reference_mlp(params, x):
    """Layers in the order of their names, tanh between them."""
    *hidden, head = (params[name] for name in sorted(params))
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ head["w"] + head["b"]


def reference_gae(rollout, value, next_value, gamma, gae_lambda):
    reward, terminated, truncated = map(
        np.asarray, (rollout.reward, rollout.terminated, rollout.truncated)
    )
    advantage = np.zeros(reward.shape)
    for b in range(reward.shape[1]):
        following = 0.0
        for t in reversed(range(reward.shape[0])):
            alive = 0.0 if terminated[t, b] else 1.0
            goes_on = 0.0 if terminated[t, b] or truncated[t, b] else 1.0
            delta = reward[t, b] + gamma * alive * next_value[t, b] - value[t, b]
            following = delta + gamma * gae_lambda * goes_on * following
            advantage[t, b] = following
    return advantage


class ReferenceAdam:
    """Kingma & Ba 2015, algorithm 1, on gradients clipped by their global norm."""

    def __init__(self, learning_rate, epsilon, max_norm):
        self.learning_rate, self.epsilon, self.max_norm = learning_rate, epsilon, max_norm
        self.t, self.m, self.v = 0, 0.0, 0.0

    def step(self, params, grads):
        leaves, treedef = jax.tree.flatten(params)
        sizes = np.cumsum([leaf.size for leaf in leaves])[:-1]
        flat = np.concatenate([np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(grads)])
        norm = np.sqrt(np.sum(flat**2))
        flat = flat * min(1.0, self.max_norm / norm)
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * flat
        self.v = 0.999 * self.v + 0.001 * flat**2
        corrected = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        moves = -self.learning_rate * corrected[0] / (np.sqrt(corrected[1]) + self.epsilon)
        moved = [
            jnp.asarray(leaf + move.reshape(leaf.shape), jnp.float32)
            for leaf, move in zip(leaves, np.split(moves, sizes), strict=True)
        ]
        return jax.tree.unflatten(treedef, moved), norm


def reference_update(config, hparams, state, rollout):
    """PPO of one minibatch, for Discrete actions and vector observations, without a scan."""
    h = jax.tree.map(float, hparams)
    live = np.asarray(rollout.weight) > 0

    def normal(stats, x):
        if not isinstance(stats, RunningStatistics):
            return x
        return jnp.clip((x - stats.mean) / jnp.sqrt(stats.variance + 1e-4), -10, 10)

    shift, scale = 0.0, 1.0
    if config.normalize_values:
        shift = float(state.value_statistics.mean)
        scale = np.sqrt(float(state.value_statistics.variance) + 1e-4)
    obs = normal(state.obs_statistics, rollout.obs)
    critic_obs, final_obs = (
        normal(state.critic_obs_statistics, x)
        for x in (rollout.critic_obs, rollout.final_critic_obs)
    )
    old, following = (
        np.asarray(reference_mlp(state.critic.params, x)[..., 0], np.float64)
        for x in (critic_obs, final_obs)
    )
    value = old * scale + shift
    advantage = reference_gae(rollout, value, following * scale + shift, h.gamma, h.gae_lambda)
    target = advantage + value
    standard = (advantage - advantage[live].mean()) / np.sqrt(advantage[live].var() + 1e-8)
    target_in_units = (target - shift) / scale

    def log_probs(params):
        logits = reference_mlp(params["network"], obs)
        logits = jnp.where(rollout.action_mask, logits, -1e9)
        return logits - jax.scipy.special.logsumexp(logits, -1, keepdims=True)

    def actor_loss(params):
        every = log_probs(params)
        chosen = jnp.take_along_axis(every, rollout.action[..., None], -1)[..., 0]
        ratio = jnp.exp(chosen - rollout.extras["log_prob"])[live]
        gain = jnp.minimum(
            ratio * standard[live],
            jnp.clip(ratio, 1 - h.clip_epsilon, 1 + h.clip_epsilon) * standard[live],
        )
        entropy = -jnp.sum(jnp.exp(every) * every, -1)[live]
        policy_loss = -jnp.mean(gain)
        return policy_loss - h.entropy_coef * jnp.mean(entropy), policy_loss

    def critic_loss(params):
        output = reference_mlp(params, critic_obs)[..., 0]
        error = (output - target_in_units) ** 2
        if config.clip_values:
            near = jnp.clip(output, old - h.value_clip_epsilon, old + h.value_clip_epsilon)
            error = jnp.maximum(error, (near - target_in_units) ** 2)
        loss = jnp.mean(0.5 * error[live])
        return h.value_coef * loss, loss

    actor, critic = state.actor.params, state.critic.params
    rates = h.learning_rate, h.learning_rate * h.critic_learning_rate_scale
    adams = [ReferenceAdam(rate, h.adam_epsilon, h.max_grad_norm) for rate in rates]
    metrics = {"policy_loss": [], "value_loss": [], "actor_grad_norm": [], "critic_grad_norm": []}
    gradients = [jax.jit(jax.grad(loss, has_aux=True)) for loss in (actor_loss, critic_loss)]
    for _ in range(config.num_epochs):
        grads, loss = gradients[0](actor)
        actor, norm = adams[0].step(actor, grads)
        metrics["policy_loss"].append(loss)
        metrics["actor_grad_norm"].append(norm)
        grads, loss = gradients[1](critic)
        critic, norm = adams[1].step(critic, grads)
        metrics["value_loss"].append(loss)
        metrics["critic_grad_norm"].append(norm)
    means = {name: np.mean(np.asarray(values)) for name, values in metrics.items()}
    return actor, critic, means, target


@pytest.fixture(scope="module", params=["plain", "full"])
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


# --- statistics


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


# --- samples without weight


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
        "action_mask": other(rollout.action_mask, False),
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


# --- advantages from outside


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


# --- agents that share a critic's input

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
    mean, share = actor_critic._unfold(target, weight, 2)
    np.testing.assert_allclose(mean, [[2.0, 5.0, 0.0]])
    np.testing.assert_allclose(share, [[1.0, 0.5, 0.0]])


# --- every float matters


BASE = {
    "learning_rate": 0.05,
    "learning_rate_end": 0.01,
    "schedule_steps": 100.0,
    "clip_epsilon": 0.05,
    "value_clip_epsilon": 0.1,
    "entropy_coef": 0.02,
    "max_grad_norm": 0.5,
    "adam_epsilon": 1e-2,
}
# name -> (another value, the networks that it changes)
CHANGES = {
    "learning_rate": (0.03, {"actor", "critic"}),
    "learning_rate_end": (0.03, {"actor", "critic"}),
    "critic_learning_rate_scale": (2.0, {"critic"}),
    "schedule_steps": (200.0, {"actor", "critic"}),
    "gamma": (0.5, {"actor", "critic"}),
    "gae_lambda": (0.5, {"actor", "critic"}),
    "clip_epsilon": (0.2, {"actor"}),
    "value_clip_epsilon": (0.01, {"critic"}),
    "entropy_coef": (0.2, {"actor"}),
    "entropy_coef_end": (0.2, {"actor"}),
    "value_coef": (1.0, {"critic"}),
    "max_grad_norm": (0.1, {"actor", "critic"}),
    "adam_epsilon": (1e-3, {"actor", "critic"}),
    "initial_std": (0.5, set()),  # read by `init` alone
}


@pytest.fixture(scope="module")
def scheduled():
    """`after(variants, env_steps)`: one vmapped program over hparams, everything else equal."""
    schedules = {"learning_rate_schedule": "linear", "entropy_schedule": "linear"}
    trained = Trained(discrete(num_epochs=3, **ALL_NORMALISED, **schedules), **BASE)
    update = jax.jit(jax.vmap(trained.learner.update, in_axes=(None, None, None, 0)))

    def after(variants, env_steps=50.0):
        padded = variants + [{}] * (len(CHANGES) + 1 - len(variants))  # one shape, one program
        hparams = [trained.case.hparams(**BASE | changes) for changes in padded]
        states, metrics = update(
            jax.random.key(0),
            trained.state,
            trained.rollout._replace(env_steps=np.float32(env_steps)),
            stack(hparams),
        )
        return [take((states, metrics), i) for i in range(len(variants))]

    return trained, after


def changed_networks(one, other):
    """Which of actor and critic have other parameters."""
    pairs = {name: (getattr(one, name).params, getattr(other, name).params) for name in CHANGED}
    return {
        name
        for name, trees in pairs.items()
        if any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, trees), strict=True))
    }


CHANGED = ("actor", "critic")


def test_every_float_changes_what_it_should(scheduled):
    _, after = scheduled
    assert set(CHANGES) == set(ppo.Hparams._fields)
    (base, _), *others = after([{}, *({name: value} for name, (value, _) in CHANGES.items())])
    for (name, (_, expected)), (state, _) in zip(CHANGES.items(), others, strict=True):
        assert changed_networks(base, state) == expected, name


def test_initial_std_is_that_of_the_first_policy():
    case = CASES["ppo-box"]
    state = jax.jit(case.learner().init)(jax.random.key(0), case.hparams(initial_std=0.25))
    np.testing.assert_allclose(np.exp(state.actor.params["log_std"]), [0.25, 0.25], rtol=1e-6)


def test_schedules_follow_env_steps(scheduled):
    _, after = scheduled
    constant = {"learning_rate": 0.03, "learning_rate_end": 0.03}
    coefficient = {"entropy_coef": 0.01, "entropy_coef_end": 0.01}
    (halfway, metrics), (expected, _) = after([{}, constant | coefficient])
    # half of 100 steps: the mean of 0.05 and 0.01, and of 0.02 and 0
    np.testing.assert_allclose(metrics["learning_rate"], 0.03)
    np.testing.assert_allclose(metrics["entropy_coef"], 0.01)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, halfway.actor.params, expected.actor.params)
    jax.tree.map(close, halfway.critic.params, expected.critic.params)


def test_a_schedule_that_ended_at_zero_stops_learning(scheduled):
    trained, after = scheduled
    ((state, metrics),) = after([{"learning_rate_end": 0.0}], env_steps=1e6)
    assert metrics["learning_rate"] == 0.0 and metrics["entropy_coef"] == 0.0
    assert changed_networks(state, trained.state) == set()


def test_an_infinite_max_grad_norm_is_no_clipping(scheduled):
    _, after = scheduled
    (off, metrics), (huge, _), (small, _) = after(
        [{"max_grad_norm": np.inf}, {"max_grad_norm": 1e9}, {"max_grad_norm": 0.1}]
    )
    assert all_finite(off) and metrics["actor_grad_norm"] > 0.1
    assert_identical(off, huge)
    assert changed_networks(off, small) == {"actor", "critic"}


def test_apply_gradients_is_the_step_of_update(plain):
    """One epoch of one minibatch, so the first of Adam's moments gives the gradient back."""
    after, _ = plain.after()
    moment = after.actor.optimizer[1][0].mu
    clipped = jax.tree.map(lambda m: np.asarray(m) / np.float32(0.1), moment)
    apply = jax.jit(plain.learner.apply_gradients)
    state = apply(plain.state, Gradients(actor=clipped), plain.hparams)
    assert_identical(state.critic, plain.state.critic)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, state.actor.params, after.actor.params)
    scale = plain.hparams._replace(critic_learning_rate_scale=jnp.float32(0.0))
    ones = jax.tree.map(np.ones_like, plain.state.critic.params)
    state = apply(plain.state, Gradients(critic=ones), scale)
    assert_identical(state.critic.params, plain.state.critic.params)
    assert_identical(state.actor, plain.state.actor)


# --- minibatches


@pytest.mark.parametrize("size", [24, 12])
def test_every_sample_is_seen_once_an_epoch(size):
    config = ppo.Config(num_epochs=3, num_minibatches=4)

    def batch(size):
        fields = [np.zeros(size)] * len(ppo.Batch._fields)
        return ppo.Batch(*fields)

    key = jax.random.key(0)
    actor, critic = ppo._shuffled(key, config, batch(24), batch(size))
    for indices, samples in ((actor, 24), (critic, size)):
        assert indices.shape == (12, samples // 4)
        epochs = np.asarray(indices).reshape(3, samples)
        np.testing.assert_array_equal(np.sort(epochs, -1), np.tile(np.arange(samples), (3, 1)))
        assert not np.array_equal(epochs[0], epochs[1])
    if size == 24:
        np.testing.assert_array_equal(actor, critic)  # actor and critic see the same samples
    assert ppo._shuffled(key, config, batch(24), None)[1] is None


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


# --- what cannot be built


@pytest.mark.parametrize(
    "config, message",
    [
        ({"num_epochs": 0}, "num_epochs = 0 is out of range; give 1 or more"),
        ({"num_minibatches": 0}, "num_minibatches = 0 is out of range; give 1 or more"),
        ({"activation": "tahn"}, "activation = 'tahn' is not known; did you mean 'tanh'?"),
        ({"torso": "mpl"}, "torso = 'mpl' is not known; did you mean 'mlp'?"),
        ({"image_encoder": "resnet"}, "choose from cnn, flatten"),
        ({"box_policy": "beta"}, "choose from tanh_normal, normal"),
        ({"learning_rate_schedule": "linaer"}, "did you mean 'linear'"),
        ({"entropy_schedule": "step"}, "choose from constant, linear, cosine"),
        ({"torso": "simba", "hidden_sizes": ()}, "give hidden_sizes at least one entry"),
        ({"clip_values": True}, "set normalize_values = true too, or leave clip_values off"),
    ],
)
def test_a_config_that_cannot_be_is_refused(config, message):
    with pytest.raises(UsageError) as caught:
        ppo.Config(**config)
    assert message in str(caught.value)


def test_check_refuses_a_batch_that_does_not_divide():
    learner = discrete(num_minibatches=4).learner()
    learner.check((6, 2))
    with pytest.raises(UsageError) as caught:
        learner.check((5, 2))
    assert str(caught.value) == (
        "num_envs * rollout_length = 10 is not divisible by num_minibatches = 4; "
        "change one of them so that every minibatch has the same size"
    )


def test_spaces_that_cannot_be_learned_are_refused():
    with pytest.raises(TypeError, match="expected a Box, Discrete or MultiDiscrete"):
        ppo.make(ppo.Config(), SPACE, {"a": 3}, CriticSpace(SPACE))
