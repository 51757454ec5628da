"""State values of a whole rollout, and the statistics of what was seen in it.

Used by on-policy learners with a critic, and by critics that a team holds.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.agents import losses, networks, returns, sequences, statistics
from marl.agents.actor_critic import (
    Parts,
    State,
    actor_steps,
    critic_features,
    critic_output,
    critic_params,
)
from marl.agents.learner import Rollout
from marl.agents.networks import Features
from marl.agents.statistics import RunningStatistics
from marl.agents.validation import one_of

NORMALIZATIONS = ("none", "running", "popart")
LOSSES = ("squared", "huber")


class Values(NamedTuple):
    """Of a whole rollout, from one pass of the critic; B is the critic's own batch here.

    Those of a shared network are what it gave while acting.
    """

    features: Any  # `Features` [T, B, ...], normalised; () of a shared network
    output: jax.Array  # [T, B] in units of the critic's output
    target: jax.Array  # [T, B] in units of the return
    weight: jax.Array  # [T, B]
    steps: Any  # `sequences.Steps` of the critic, or ()
    memories: Any  # [T, B, ...] the critic's after each step, or ()
    metrics: dict[str, jax.Array]


def check_config(config: Any) -> None:
    """Raise UsageError where a field that says how values are learned is not valid."""
    one_of("value_normalization", config.value_normalization, NORMALIZATIONS)
    one_of("value_loss", config.value_loss, LOSSES)


def loss_function(config: Any, hparams: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The loss of each (value, target), both in units of the critic's output."""
    if config.value_loss == "huber":
        return partial(losses.huber_loss, delta=hparams.huber_delta)
    return losses.value_loss


def value(parts: Parts, state: State, critic_obs: Any) -> jax.Array:
    """State values [...] in the units of the return; with memory, at the start of episodes."""
    features, params = critic_features(parts, state, critic_obs), critic_params(parts, state)
    if not sequences.is_recurrent(parts.critic):
        return denormalise_value(state, critic_output(parts, params, features, ()))
    batch = features.vector.shape[:-1]
    flat = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[len(batch) :]), features)
    fresh = jax.tree.map(lambda m: m[None], parts.critic.initial_memory(flat.vector.shape[1]))
    output = sequences.run_apart(parts.critic, params, flat, fresh)
    return denormalise_value(state, output[..., -1].reshape(batch))


def evaluate(
    parts: Parts, state: State, rollout: Rollout, hparams: Any
) -> tuple[jax.Array, Values]:
    """Advantages [T, B] of the actor's batch, and the critic's values and targets.

    Where N agents are folded into the actor's batch and the critic's input is common to them, the
    critic runs once on [T, B / N] and its value counts for each; the agents have one reward then,
    and the critic's target is the mean of theirs.
    """
    final = critic_features(parts, state, rollout.final_critic_obs)
    fold = rollout.reward.shape[1] // final.vector.shape[1]
    features: Any = ()
    if parts.shared:
        steps = actor_steps(parts, rollout)
        output, memories = rollout.extras["value"], rollout.extras["memory"]
        next_output = _next_output(parts, state, final, memories)
    else:
        features = critic_features(parts, state, rollout.critic_obs)
        steps = critic_steps(parts, rollout, fold)
        output, next_output, memories = _outputs(parts, state, features, final, steps)
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
    return advantage, Values(features, output, target, weight, steps, memories, metrics)


def _outputs(
    parts: Parts, state: State, features: Features, final: Features, steps: Any
) -> tuple[jax.Array, jax.Array, Any]:
    """The critic's outputs [T, B] of observations and of what each step led to, and memories."""
    params = state.critic.params
    if sequences.is_recurrent(parts.critic):
        output, memories = sequences.run(parts.critic, params, features, steps)
        return output[..., -1], _next_output(parts, state, final, memories), memories
    # one after the other by one program, which is half as much to compile
    both = jax.tree.map(lambda x, y: jnp.stack([x, y]), features, final)
    run = partial(critic_output, parts, params, steps=steps)
    output, next_output = jax.lax.map(run, both)
    return output, next_output, ()


def _next_output(parts: Parts, state: State, final: Features, memories: Any) -> jax.Array:
    """The critic's outputs [T, B] of what each step led to.

    It is read with the memory that the step left, whether or not the episode ended there: a
    truncated one goes on in what it is worth.
    """
    params = critic_params(parts, state)
    return sequences.run_apart(parts.critic, params, final, memories)[..., -1]


def critic_steps(parts: Parts, rollout: Rollout, fold: int) -> Any:
    """What the critic needs of a rollout beside features: `sequences.Steps`, or ().

    Of `fold` agents with one critic, its memory moves in steps in which any of them was active.
    """
    if not sequences.is_recurrent(parts.critic):
        return ()
    weight = jnp.max(rollout.weight.reshape(rollout.weight.shape[0], -1, fold), -1)
    reset = rollout.reset[:, ::fold]
    return sequences.whole(parts.critic, rollout.critic_memory, reset, weight)


def memory_functions(parts: Parts) -> dict[str, Any]:
    """Those fields of a `Learner` that only critics with memory have."""
    if parts.critic_reader is None or parts.shared or not sequences.is_recurrent(parts.critic):
        return {}
    return {
        "critic_memory": parts.critic.initial_memory,
        "next_critic_memory": partial(next_memory, parts),
    }


def next_memory(parts: Parts, state: State, experience: Rollout) -> Any:
    """The critic's memory after a rollout, where the next one begins."""
    features = critic_features(parts, state, experience.critic_obs)
    fold = experience.reward.shape[1] // features.vector.shape[1]
    steps = critic_steps(parts, experience, fold)
    memories = sequences.memories_of(parts.critic, state.critic.params, features, steps)
    return jax.tree.map(lambda m: m[0], sequences.last(memories))


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
    if config.normalize_observations and not parts.shared:
        vector = parts.critic_reader.features(rollout.critic_obs).vector
        merged = statistics.merge(state.critic_obs_statistics, vector, values.weight)
        state = state._replace(critic_obs_statistics=merged)
    if config.value_normalization != "none":
        merged = statistics.merge(state.value_statistics, values.target, values.weight)
        if config.value_normalization == "popart":
            state = _preserve_values(parts, state, merged)
        state = state._replace(value_statistics=merged)
    return state


def _preserve_values(parts: Parts, state: State, merged: RunningStatistics) -> State:
    """A critic whose values under `merged` are what they were (arXiv:1602.07714, proposition 1).

    Adam's moments stay: were they rescaled too, both would be, and their quotient is the step.
    """
    change = statistics.change_of_units(state.value_statistics, merged)
    params = networks.rescale_outputs(critic_params(parts, state), *change)
    if parts.shared:
        params = state.actor.params | {"network": params}
        return state._replace(actor=state.actor._replace(params=params))
    return state._replace(critic=state.critic._replace(params=params))


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
