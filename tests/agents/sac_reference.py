"""SAC a second time, as plainly as it can be written: joint actions are summed over."""

import itertools
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from ppo_reference import reference_mlp
from q_critic_cases import (
    BATCH,
    live_columns,
    optimised,
    pick,
    reference_critics,
    reference_inputs,
    reference_returns,
    scaled,
)

from marl.envs.spaces import Box, Discrete


def reference_box_value(noise, actor, critics, obs, mask, inputs, alpha):
    """One reparameterised sample, with the density of actions in [-1, 1]."""
    del mask
    mean, log_std = jnp.split(reference_mlp(actor, obs), 2, -1)
    log_std = jnp.where(log_std > 0, 2 * jnp.tanh(log_std / 2), 5 * jnp.tanh(log_std / 5))
    unit = jnp.tanh(mean + jnp.exp(log_std) * noise)
    log_prob = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - jnp.log(1 - unit**2)
    log_prob = jnp.sum(log_prob, -1)
    q = reference_critics(critics, jnp.concatenate([inputs, unit], -1))[..., 0]
    return jnp.minimum(q[0], q[1]) - alpha * log_prob, -log_prob


def reference_integer_value(sizes, actor, critics, obs, mask, inputs, alpha):
    """A sum over all joint actions; an illegal one has probability 0."""
    ends = np.cumsum(sizes)[:-1]
    logits = jnp.where(mask, reference_mlp(actor, obs), -jnp.inf)
    parts = [jax.nn.softmax(x) for x in jnp.split(logits, ends, -1)]
    q = [jnp.split(x, ends, -1) for x in reference_critics(critics, inputs)]
    probs, values = [], []
    for joint in itertools.product(*map(range, sizes)):
        probs.append(
            reduce(jnp.multiply, [part[..., a] for part, a in zip(parts, joint, strict=True)])
        )
        values.append([sum(x[..., a] for x, a in zip(one, joint, strict=True)) for one in q])
    probs, values = jnp.stack(probs, -1), jnp.moveaxis(jnp.array(values), 0, -1)
    safe = jnp.where(probs > 0, probs, 1.0)
    entropy = -jnp.sum(probs * jnp.log(safe), -1)
    if len(sizes) == 1:
        expected = jnp.sum(probs * jnp.minimum(values[0], values[1]), -1)
    else:
        each = jnp.sum(probs * values, -1)
        expected = jnp.minimum(each[0], each[1])
    return expected + alpha * entropy, entropy


def reference_value(space, key):
    if isinstance(space, Box):
        noise = jax.random.normal(key, (BATCH, space.size))[jnp.array(live_columns())]
        return partial(reference_box_value, noise)
    sizes = (space.n,) if isinstance(space, Discrete) else space.nvec
    return partial(reference_integer_value, sizes)


def reference_q(space, params, inputs, action):
    """Values [2, B] of the actions taken."""
    if isinstance(space, Box):
        inputs = jnp.concatenate([inputs, scaled(action)], -1)
        return reference_critics(params, inputs)[..., 0]
    q = reference_critics(params, inputs)
    rows = np.arange(len(action))
    if isinstance(space, Discrete):
        return q[:, rows, action]
    return q[:, rows, action[:, 0]] + q[:, rows, 2 + action[:, 1]]


def reference_target_entropy(space, mask):
    if isinstance(space, Box):
        return -2.0
    if isinstance(space, Discrete):
        return 0.5 * np.log(mask.sum(-1))
    return 0.5 * (np.log(mask[:, :2].sum(-1)) + np.log(mask[:, 2:].sum(-1)))


def reference_update(case, hparams, state, windows, key):
    """The critics' step, then the actor's and the temperature's, on live columns alone."""
    space, h = case.action_space, hparams
    keys = jax.random.split(key)
    returns = reference_returns(windows, float(h.gamma))
    last = [step for _, _, step in returns]
    total, discount = np.array([returns[b][:2] for b in live_columns()]).T
    alpha = np.exp(state.temperature.params)
    now = reference_inputs(pick(windows.critic_obs, 0), pick(windows.context, 0))
    final = reference_inputs(pick(windows.final_critic_obs, last), pick(windows.next_context, last))
    obs, final_obs = pick(windows.obs, 0), pick(windows.final_obs, last)
    mask, final_mask = (
        pick(x, step) if case.masked else None
        for x, step in ((windows.action_mask, 0), (windows.final_action_mask, last))
    )
    following, _ = reference_value(space, keys[0])(
        state.actor.params, state.target_critic, final_obs, final_mask, final, alpha
    )
    target = total + discount * np.asarray(following)

    def critic_loss(params):
        q = reference_q(space, params, now, pick(windows.action, 0))
        return jnp.sum(jnp.mean(0.5 * (q - target) ** 2, -1))

    def actor_loss(params, critic):
        value, entropy = reference_value(space, keys[1])(params, critic, obs, mask, now, alpha)
        return -jnp.mean(value), entropy

    loss, grads = jax.value_and_grad(critic_loss)(state.critic.params)
    rate = float(h.learning_rate)
    critic = optimised(state.critic, grads, 2.0 * rate, h)
    (policy_loss, entropy), grads = jax.value_and_grad(actor_loss, has_aux=True)(
        state.actor.params, critic
    )
    actor = optimised(state.actor, grads, rate, h)
    surplus = np.mean(np.asarray(entropy) - reference_target_entropy(space, mask))
    temperature = optimised(state.temperature, surplus, 3.0 * rate, h)
    metrics = {"critic_loss": loss, "policy_loss": policy_loss, "entropy": np.mean(entropy)}
    return actor, critic, temperature, metrics
