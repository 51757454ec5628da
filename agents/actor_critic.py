"""What on-policy learners with an actor and a critic have in common.

Actor and critic have separate networks, optimisers and gradient clipping. Statistics that normalise
observations and values are frozen while acting and learning, and move once after an update, so that
the policy that learns is the policy that acted.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.agents import losses, networks, returns, statistics
from marl.agents.learner import ActInput, ActOutput, CriticSpace, Rollout
from marl.agents.networks import Features, Network, NetworkSpec
from marl.agents.optimizer import NetworkState, make_optimizer, step_network
from marl.agents.policies import Policy
from marl.agents.statistics import RunningStatistics
from marl.envs.spaces import SpaceTree


class State(NamedTuple):
    """What the next step of one agent (or sharing set) needs."""

    actor: NetworkState  # params: {"network": ..., "log_std": [num_scales]}
    critic: Any  # NetworkState, or () when the team holds the critic
    obs_statistics: Any  # RunningStatistics [D] of the actor's input, or ()
    critic_obs_statistics: Any  # the same of the critic's input
    value_statistics: Any  # RunningStatistics [] of value targets, or ()


class Reader(NamedTuple):
    """How a network reads its observations."""

    features: Callable[[Any], Features]
    zeros: Features  # of a batch of one
    continuous: Any  # [D] bool: elements of the vector that may be normalised


class Parts(NamedTuple):
    """What a learner's `make` captures: static, never inside a state."""

    config: Any  # with the fields of `ppo.Config` that name networks and normalisation
    policy: Policy
    actor: Network
    critic: Network
    actor_reader: Reader
    critic_reader: Reader | None  # None when the team holds the critic


class Values(NamedTuple):
    """Of a whole rollout, from one pass of the critic; B is the critic's own batch here."""

    features: Features  # [T, B, ...], normalised
    output: jax.Array  # [T, B] in units of the critic's output
    target: jax.Array  # [T, B] in units of the return
    weight: jax.Array  # [T, B]
    metrics: dict[str, jax.Array]


def make_parts(
    config: Any,
    observation_space: SpaceTree,
    action_space: SpaceTree,
    critic_space: CriticSpace | None,
) -> Parts:
    """Networks for one agent's spaces."""
    policy = Policy(action_space, config.box_policy)

    def network(hidden_sizes: tuple[int, ...], num_outputs: int, scale: float) -> Network:
        spec = NetworkSpec(hidden_sizes, config.activation, config.torso, num_outputs, scale)
        return networks.make_network(spec)

    return Parts(
        config=config,
        policy=policy,
        actor=network(config.hidden_sizes, policy.num_outputs, 0.01),
        critic=network(config.critic_hidden_sizes or config.hidden_sizes, 1, 1.0),
        actor_reader=_reader(observation_space, config.image_encoder),
        critic_reader=None
        if critic_space is None
        else _reader(critic_space.observations, config.image_encoder),
    )


def _reader(space: SpaceTree, image_encoder: str) -> Reader:
    return Reader(
        features=partial(networks.features, space, image_encoder=image_encoder),
        zeros=networks.zero_features(space, image_encoder),
        continuous=networks.continuous_mask(space, image_encoder),
    )


def init(parts: Parts, key: jax.Array, hparams: Any) -> State:
    """A fresh state."""
    key_actor, key_critic = jax.random.split(key)
    config, reader = parts.config, parts.critic_reader
    optimizer = make_optimizer(hparams, hparams.learning_rate)
    actor = {
        "network": parts.actor.init(key_actor, parts.actor_reader.zeros),
        "log_std": jnp.full((parts.policy.num_scales,), jnp.log(hparams.initial_std)),
    }
    critic: Any = ()
    if reader is not None:
        params = parts.critic.init(key_critic, reader.zeros)
        critic = NetworkState(params, optimizer.init(params))

    def fresh(reader: Reader | None) -> Any:
        if reader is None or not config.normalize_observations:
            return ()
        return statistics.init(reader.zeros.vector.shape[-1:])

    return State(
        actor=NetworkState(actor, optimizer.init(actor)),
        critic=critic,
        obs_statistics=fresh(parts.actor_reader),
        critic_obs_statistics=fresh(reader),
        value_statistics=statistics.init() if config.normalize_values else (),
    )


def initial_memory(batch_size: int) -> Any:
    """Feed-forward networks remember nothing."""
    del batch_size
    return ()


def act(parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Any) -> ActOutput:
    """Sample actions [B]; extras carry the log-probability and the samples before squashing."""
    del hparams
    outputs = policy_outputs(parts, state.actor.params, actor_features(parts, state, inputs.obs))
    drawn = parts.policy.sample(key, *outputs, inputs.action_mask)
    extras = {"log_prob": drawn.log_prob, "raw": drawn.raw}
    return ActOutput(action=drawn.action, memory=inputs.memory, extras=extras)


def act_greedy(
    parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Any
) -> ActOutput:
    """The mode of the policy."""
    del key, hparams
    outputs = policy_outputs(parts, state.actor.params, actor_features(parts, state, inputs.obs))
    action = parts.policy.mode(*outputs, inputs.action_mask)
    return ActOutput(action=action, memory=inputs.memory, extras=())


def value(parts: Parts, state: State, critic_obs: Any) -> jax.Array:
    """State values [...] in the units of the return."""
    features = critic_features(parts, state, critic_obs)
    return denormalise_value(state, critic_output(parts, state.critic.params, features))


def log_prob(parts: Parts, state: State, experience: Rollout) -> jax.Array:
    """Log-probability [T, B] of the rollout's actions under `state`."""
    features = actor_features(parts, state, experience.obs)
    outputs = policy_outputs(parts, state.actor.params, features)
    return parts.policy.log_prob(
        *outputs, experience.action_mask, experience.action, experience.extras["raw"]
    )


class Gradients(NamedTuple):
    """What `apply_gradients` takes; None for a network that stays as it is."""

    actor: Any = None  # like state.actor.params
    critic: Any = None  # like state.critic.params


def apply_gradients(
    state: State, grads: Gradients, hparams: Any, learning_rate: jax.Array | None = None
) -> State:
    """One optimiser step of the networks that have gradients.

    `learning_rate` [] is the actor's, from a schedule; None for the hparam. The critic's is that
    times `critic_learning_rate_scale`.
    """
    rate = hparams.learning_rate if learning_rate is None else learning_rate
    if grads.actor is not None:
        state = state._replace(actor=step_network(state.actor, grads.actor, hparams, rate))
    if grads.critic is not None:
        rate = rate * hparams.critic_learning_rate_scale
        state = state._replace(critic=step_network(state.critic, grads.critic, hparams, rate))
    return state


def actor_features(parts: Parts, state: State, obs: Any) -> Features:
    """The actor's input, normalised."""
    return _normalise(parts.actor_reader, state.obs_statistics, obs)


def critic_features(parts: Parts, state: State, critic_obs: Any) -> Features:
    """The critic's input, normalised."""
    assert parts.critic_reader is not None, "the team holds this learner's critic"
    return _normalise(parts.critic_reader, state.critic_obs_statistics, critic_obs)


def policy_outputs(parts: Parts, params: Any, features: Features) -> tuple[jax.Array, jax.Array]:
    """What `Policy` takes: the network's outputs and log_std."""
    return parts.actor.apply(params["network"], features), params["log_std"]


def critic_output(parts: Parts, params: Any, features: Features) -> jax.Array:
    """Values [...] in units of the critic's output."""
    return parts.critic.apply(params, features)[..., 0]


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
    if config.normalize_observations:
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


def _normalise(reader: Reader, stats: Any, obs: Any) -> Features:
    features = reader.features(obs)
    if not isinstance(stats, RunningStatistics):
        return features
    normal = jnp.clip(statistics.normalise(stats, features.vector), -10.0, 10.0)
    return features._replace(vector=jnp.where(reader.continuous, normal, features.vector))
