"""State values of a whole rollout, and the statistics of what was seen in it.

Used by on-policy learners with a critic, and by critics that a team holds.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.agents import losses, returns, statistics
from marl.agents.actor_critic import Parts, State, critic_features, critic_output
from marl.agents.learner import Rollout
from marl.agents.networks import Features
from marl.agents.statistics import RunningStatistics


class Values(NamedTuple):
    """Of a whole rollout, from one pass of the critic; B is the critic's own batch here."""

    features: Features  # [T, B, ...], normalised
    output: jax.Array  # [T, B] in units of the critic's output
    target: jax.Array  # [T, B] in units of the return
    weight: jax.Array  # [T, B]
    metrics: dict[str, jax.Array]


def value(parts: Parts, state: State, critic_obs: Any) -> jax.Array:
    """State values [...] in the units of the return."""
    features = critic_features(parts, state, critic_obs)
    return denormalise_value(state, critic_output(parts, state.critic.params, features))


def evaluate(
    parts: Parts, state: State, rollout: Rollout, hparams: Any
) -> tuple[jax.Array, Values]:
    """Advantages [T, B] of the actor's batch, and the critic's values and targets.

    Where N agents are folded into the actor's batch and the critic's input is common to them, the
    critic runs once on [T, B / N] and its value counts for each; the agents have one reward then,
    and the critic's target is the mean of theirs.
    """
    features = critic_features(parts, state, rollout.critic_obs)
    final = critic_features(parts, state, rollout.final_critic_obs)
    # one after the other by one program, which is half as much to compile
    both = jax.tree.map(lambda x, y: jnp.stack([x, y]), features, final)
    output, next_output = jax.lax.map(partial(critic_output, parts, state.critic.params), both)
    fold = rollout.reward.shape[1] // output.shape[1]
    estimate, following = (
        jnp.repeat(denormalise_value(state, x), fold, axis=1) for x in (output, next_output)
    )
    advantage, target = returns.gae(
        rollout.reward,
        estimate,
        following,
        rollout.terminated,
        rollout.truncated,
        hparams.gamma,
        hparams.gae_lambda,
    )
    metrics = {
        "explained_variance": losses.explained_variance(estimate, target, rollout.weight),
        "value_mean": losses.weighted_mean(estimate, rollout.weight),
    }
    target, weight = _unfold(target, rollout.weight, fold)
    return advantage, Values(features, output, target, weight, metrics)


def _unfold(target: jax.Array, weight: jax.Array, fold: int) -> tuple[jax.Array, jax.Array]:
    """Targets [T, B * N] averaged over the N folded agents, and the share of them that counts."""
    if fold == 1:
        return jnp.where(weight > 0, target, 0.0), weight  # NaN would reach the loss's gradient
    targets = target.reshape(target.shape[0], -1, fold)
    weights = weight.reshape(weight.shape[0], -1, fold)
    total = jnp.sum(weights, -1)
    mean = jnp.sum(jnp.where(weights > 0, targets * weights, 0.0), -1) / jnp.maximum(total, 1e-8)
    return mean, total / fold


def move_statistics(parts: Parts, state: State, rollout: Rollout, values: Values | None) -> State:
    """Merge a rollout into the statistics, once, after the last epoch."""
    config = parts.config
    if config.normalize_observations and parts.actor_reader is not None:
        vector = parts.actor_reader.features(rollout.obs).vector
        merged = statistics.merge(state.obs_statistics, vector, rollout.weight)
        state = state._replace(obs_statistics=merged)
    if values is None or parts.critic_reader is None:
        return state
    if config.normalize_observations:
        vector = parts.critic_reader.features(rollout.critic_obs).vector
        merged = statistics.merge(state.critic_obs_statistics, vector, values.weight)
        state = state._replace(critic_obs_statistics=merged)
    if config.normalize_values:
        merged = statistics.merge(state.value_statistics, values.target, values.weight)
        state = state._replace(value_statistics=merged)
    return state


def normalise_value(state: State, x: jax.Array) -> jax.Array:
    """From units of the return to those of the critic's output."""
    if not isinstance(state.value_statistics, RunningStatistics):
        return x
    return statistics.normalise(state.value_statistics, x)


def denormalise_value(state: State, x: jax.Array) -> jax.Array:
    """From units of the critic's output to those of the return."""
    if not isinstance(state.value_statistics, RunningStatistics):
        return x
    return statistics.denormalise(state.value_statistics, x)
