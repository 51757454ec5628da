"""PPO a second time, as plainly as it can be written, and what its tests share."""

import jax
import jax.numpy as jnp
import numpy as np
from learner_cases import Case, make_rollout

from marl.agents import ppo
from marl.agents.statistics import RunningStatistics
from marl.envs.spaces import Box, Discrete

HIDDEN = {"hidden_sizes": (8,), "num_minibatches": 1}
ALL_NORMALISED = {
    "normalize_observations": True,
    "value_normalization": "running",
    "clip_values": True,
}
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


def changed_networks(one, other):
    """Which of actor and critic have other parameters."""
    pairs = {
        name: (getattr(one, name).params, getattr(other, name).params)
        for name in ("actor", "critic")
    }
    return {
        name
        for name, trees in pairs.items()
        if any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, trees), strict=True))
    }


def reference_mlp(params, x):
    """Layers in the order of their names, tanh between them."""
    *hidden, head = (params[name] for name in sorted(params))
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"].T + layer["b"])
    return x @ head["w"].T + head["b"]


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
    if config.value_normalization != "none":
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
        found = {
            "policy_loss": policy_loss,
            "entropy": jnp.mean(entropy),
            "approx_kl": jnp.mean(ratio - 1 - jnp.log(ratio)),
            "clip_fraction": jnp.mean(
                (ratio < 1 - h.clip_epsilon) | (ratio > 1 + h.clip_epsilon), dtype=float
            ),
        }
        return policy_loss - h.entropy_coef * jnp.mean(entropy), found

    def loss_of(output):
        size = jnp.abs(output - target_in_units)
        squared, line = 0.5 * size**2, h.huber_delta * (size - 0.5 * h.huber_delta)
        is_line = (config.value_loss == "huber") & (size > h.huber_delta)
        return jnp.where(is_line, line, squared)

    def critic_loss(params):
        output = reference_mlp(params, critic_obs)[..., 0]
        loss = loss_of(output)
        if config.clip_values:
            near = jnp.clip(output, old - h.value_clip_epsilon, old + h.value_clip_epsilon)
            loss = jnp.maximum(loss, loss_of(near))
        loss = jnp.mean(loss[live])
        return h.value_coef * loss, {"value_loss": loss}

    actor, critic = state.actor.params, state.critic.params
    rates = h.learning_rate, h.learning_rate * h.critic_learning_rate_scale
    adams = [ReferenceAdam(rate, h.adam_epsilon, h.max_grad_norm) for rate in rates]
    gradients = [jax.jit(jax.grad(loss, has_aux=True)) for loss in (actor_loss, critic_loss)]
    metrics = []
    for _ in range(config.num_epochs):
        grads, found = gradients[0](actor)
        actor, norm = adams[0].step(actor, grads)
        critic_grads, critic_found = gradients[1](critic)
        critic, critic_norm = adams[1].step(critic, critic_grads)
        norms = {"actor_grad_norm": norm, "critic_grad_norm": critic_norm}
        metrics.append(found | critic_found | norms)
    means = {name: np.mean([float(found[name]) for found in metrics]) for name in metrics[0]}
    return actor, critic, means, target
