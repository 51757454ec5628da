"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) with a clipped objective.

Actor and critic have separate networks, optimisers and gradient clipping. Values of a whole rollout
come from one pass after it. Statistics that normalise observations and values are frozen from acting
to the last epoch and move once after it, so that the first probability ratio of an update is 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from marl.agents import losses, networks, policies, returns, schedules, statistics
from marl.agents.learner import ActInput, ActOutput, CriticSpace, Learner, Rollout
from marl.agents.networks import Features, Network, NetworkSpec
from marl.agents.policies import Policy
from marl.agents.statistics import RunningStatistics
from marl.agents.validation import at_least, divisible, one_of
from marl.envs.errors import UsageError
from marl.envs.spaces import SpaceTree


@dataclass(frozen=True)
class Config:
    """What changes shapes or control flow."""

    num_epochs: int = 4
    num_minibatches: int = 4
    hidden_sizes: tuple[int, ...] = (64, 64)
    critic_hidden_sizes: tuple[int, ...] = ()  # empty: like the actor's
    activation: str = "tanh"
    torso: str = "mlp"
    image_encoder: str = "cnn"
    box_policy: str = "tanh_normal"
    learning_rate_schedule: str = "constant"
    entropy_schedule: str = "constant"
    normalize_advantages: bool = True
    normalize_observations: bool = False
    normalize_values: bool = False
    clip_values: bool = False

    def __post_init__(self):
        at_least("num_epochs", self.num_epochs, 1)
        at_least("num_minibatches", self.num_minibatches, 1)
        one_of("activation", self.activation, networks.ACTIVATIONS)
        one_of("torso", self.torso, networks.TORSOS)
        one_of("image_encoder", self.image_encoder, networks.IMAGE_ENCODERS)
        one_of("box_policy", self.box_policy, policies.BOX_POLICIES)
        one_of("learning_rate_schedule", self.learning_rate_schedule, schedules.KINDS)
        one_of("entropy_schedule", self.entropy_schedule, schedules.KINDS)
        if self.torso == "simba" and not self.hidden_sizes:
            raise UsageError("torso = 'simba' needs a width: give hidden_sizes at least one entry")
        if self.clip_values and not self.normalize_values:
            raise UsageError(
                "clip_values clips in units of the normalised value and would depend on the reward's "
                "scale without it; set normalize_values = true as well, or leave clip_values off"
            )


class Hparams(NamedTuple):
    """Floats, each of which may differ per agent and never recompiles anything."""

    learning_rate: Any = 2.5e-4
    learning_rate_end: Any = 0.0  # where a schedule ends
    critic_learning_rate_scale: Any = 1.0  # the critic's learning rate over the actor's
    schedule_steps: Any = 0.0  # horizon of schedules in environment steps; 0: the run's total
    gamma: Any = 0.99
    gae_lambda: Any = 0.95
    clip_epsilon: Any = 0.2
    value_clip_epsilon: Any = 0.2
    entropy_coef: Any = 0.01
    entropy_coef_end: Any = 0.0
    value_coef: Any = 0.5
    max_grad_norm: Any = 0.5  # inf: off
    adam_epsilon: Any = 1e-5
    initial_std: Any = 1.0  # of Gaussian policies, before squashing

    # (lowest, highest) value of each; what is not named must be >= 0
    bounds = {"gamma": (0.0, 1.0), "gae_lambda": (0.0, 1.0), "initial_std": (1e-6, float("inf"))}


class NetworkState(NamedTuple):
    """A network and its optimiser."""

    params: Any
    optimizer: optax.OptState


class State(NamedTuple):
    """What the next step of one agent (or sharing set) needs."""

    actor: NetworkState  # params: {"network": ..., "log_std": [num_scales]}
    critic: Any  # NetworkState, or () when the team holds the critic
    obs_statistics: Any  # RunningStatistics [D] of the actor's input, or ()
    critic_obs_statistics: Any  # the same of the critic's input
    value_statistics: Any  # RunningStatistics [] of value targets, or ()


class Batch(NamedTuple):
    """One actor's samples [M, ...], flattened over time and environments."""

    features: Features
    action: Any
    raw: tuple[jax.Array, ...]
    mask: Any
    log_prob: jax.Array
    advantage: jax.Array
    weight: jax.Array


class CriticBatch(NamedTuple):
    """One critic's samples [M, ...]; fewer than the actor's where agents share the critic's input."""

    features: Features
    target: jax.Array  # in units of the critic's output
    old_value: jax.Array
    weight: jax.Array


class Parts(NamedTuple):
    """What `make` captures: static, rebuilt at trace time, never inside a state."""

    config: Config
    policy: Policy
    actor: Network
    critic: Network
    actor_features: Callable[[Any], Features]
    critic_features: Callable[[Any], Features]
    actor_zeros: Features
    critic_zeros: Features | None
    actor_continuous: Any  # [D] bool: elements of the features that may be normalised
    critic_continuous: Any


def make(
    config: Config,
    observation_space: SpaceTree,
    action_space: SpaceTree,
    critic_space: CriticSpace | None,
) -> Learner:
    """PPO for any PyTree of observations, and of Discrete, MultiDiscrete and Box actions.

    Args:
      config: static choices.
      observation_space, action_space: the agent's own.
      critic_space: what the critic reads; None when the team holds the critic, and `advantage` of
        every rollout is then given from outside.
    """
    policy = Policy(action_space, config.box_policy)
    critic_obs_space = critic_space.observations if critic_space is not None else None
    encoder = config.image_encoder
    parts = Parts(
        config=config,
        policy=policy,
        actor=networks.make_network(_spec(config, config.hidden_sizes, policy.num_outputs, 0.01)),
        critic=networks.make_network(
            _spec(config, config.critic_hidden_sizes or config.hidden_sizes, 1, 1.0)
        ),
        actor_features=partial(networks.features, observation_space, image_encoder=encoder),
        critic_features=partial(networks.features, critic_obs_space, image_encoder=encoder),
        actor_zeros=networks.zero_features(observation_space, encoder),
        critic_zeros=None
        if critic_space is None
        else networks.zero_features(critic_obs_space, encoder),
        actor_continuous=networks.continuous_mask(observation_space, encoder),
        critic_continuous=networks.continuous_mask(critic_obs_space, encoder),
    )
    return Learner(
        init=partial(init, parts),
        initial_memory=lambda batch_size: (),
        act=partial(act, parts),
        act_greedy=partial(act_greedy, parts),
        update=partial(update, parts),
        experience="rollout",
        value=None if critic_space is None else partial(value, parts),
        log_prob=partial(log_prob, parts),
        apply_gradients=partial(apply_gradients, parts),
        check=partial(check, config),
    )


def check(config: Config, batch_shape: tuple[int, int], env_batch: int) -> None:
    """Raise UsageError where rollouts of `batch_shape` (T, B) do not divide into minibatches.

    `env_batch` is B without the agents folded into it: what a critic's input may have.
    """
    divisible(
        "num_envs * rollout_length",
        batch_shape[0] * env_batch,
        "num_minibatches",
        config.num_minibatches,
    )


def init(parts: Parts, key: jax.Array, hparams: Hparams) -> State:
    """A fresh state."""
    key_actor, key_critic = jax.random.split(key)
    config = parts.config
    optimizer = _optimizer(hparams, hparams.learning_rate)
    actor = {
        "network": parts.actor.init(key_actor, parts.actor_zeros),
        "log_std": jnp.full((parts.policy.num_scales,), jnp.log(hparams.initial_std)),
    }
    has_critic = parts.critic_zeros is not None
    critic = parts.critic.init(key_critic, parts.critic_zeros) if has_critic else None
    obs_size = parts.actor_zeros.vector.shape[-1:]
    critic_size = parts.critic_zeros.vector.shape[-1:] if has_critic else ()
    normalize_critic = config.normalize_observations and has_critic
    return State(
        actor=NetworkState(actor, optimizer.init(actor)),
        critic=NetworkState(critic, optimizer.init(critic)) if has_critic else (),
        obs_statistics=statistics.init(obs_size) if config.normalize_observations else (),
        critic_obs_statistics=statistics.init(critic_size) if normalize_critic else (),
        value_statistics=statistics.init() if config.normalize_values else (),
    )


def act(
    parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Hparams
) -> ActOutput:
    """Sample actions [B]; extras carry the log-probability and the samples before squashing."""
    del hparams
    outputs = _policy_outputs(parts, state.actor.params, state, parts.actor_features(inputs.obs))
    drawn = parts.policy.sample(key, *outputs, inputs.action_mask)
    extras = {"log_prob": drawn.log_prob, "raw": drawn.raw}
    return ActOutput(action=drawn.action, memory=inputs.memory, extras=extras)


def act_greedy(
    parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Hparams
) -> ActOutput:
    """The mode of the policy."""
    del key, hparams
    outputs = _policy_outputs(parts, state.actor.params, state, parts.actor_features(inputs.obs))
    action = parts.policy.mode(*outputs, inputs.action_mask)
    return ActOutput(action=action, memory=inputs.memory, extras=())


def value(parts: Parts, state: State, critic_obs: Any) -> jax.Array:
    """State values [...] in the units of the return."""
    raw = _critic_output(parts, state.critic.params, state, parts.critic_features(critic_obs))
    return _denormalise(state, raw)


def log_prob(parts: Parts, state: State, experience: Rollout) -> jax.Array:
    """Log-probability [T, B] of the rollout's actions under `state`."""
    outputs = _policy_outputs(
        parts, state.actor.params, state, parts.actor_features(experience.obs)
    )
    return parts.policy.log_prob(
        *outputs, experience.action_mask, experience.action, experience.extras["raw"]
    )


def apply_gradients(
    parts: Parts,
    state: NetworkState,
    grads: Any,
    hparams: Hparams,
    learning_rate: jax.Array | None = None,
) -> NetworkState:
    """One clipped Adam step of one network (`state.actor` or `state.critic`)."""
    del parts
    rate = hparams.learning_rate if learning_rate is None else learning_rate
    updates, optimizer = _optimizer(hparams, rate).update(grads, state.optimizer)
    return NetworkState(optax.apply_updates(state.params, updates), optimizer)


def update(
    parts: Parts, key: jax.Array, state: State, experience: Rollout, hparams: Hparams
) -> tuple[State, dict[str, jax.Array]]:
    """`num_epochs` passes over the rollout in minibatches; one order of samples for all agents."""
    del key
    config = parts.config
    learning_rate = schedules.schedule(
        config.learning_rate_schedule,
        hparams.learning_rate,
        hparams.learning_rate_end,
        hparams.schedule_steps,
        experience.env_steps,
    )
    entropy_coef = schedules.schedule(
        config.entropy_schedule,
        hparams.entropy_coef,
        hparams.entropy_coef_end,
        hparams.schedule_steps,
        experience.env_steps,
    )
    actor_batch, critic_batch, values = _prepare(parts, state, experience, hparams)
    step = partial(
        _minibatch_step,
        parts,
        state,
        hparams,
        (learning_rate, entropy_coef),
        actor_batch,
        critic_batch,
    )
    indices = _shuffled(experience.shuffle_key, config, actor_batch.weight.shape[0])
    critic_indices = indices
    if critic_batch is not None and critic_batch.weight.shape != actor_batch.weight.shape:
        critic_indices = _shuffled(experience.shuffle_key, config, critic_batch.weight.shape[0])
    (actor, critic), metrics = jax.lax.scan(
        step, (state.actor, state.critic), (indices, critic_indices)
    )
    metrics = jax.tree.map(jnp.mean, metrics)
    metrics |= {"learning_rate": learning_rate, "entropy_coef": entropy_coef, **values.metrics}
    state = _move_statistics(parts, state._replace(actor=actor, critic=critic), experience, values)
    return state, metrics


class _Values(NamedTuple):
    """Of a whole rollout: what the update of statistics and the metrics need."""

    target: jax.Array | None  # in units of the return
    weight: jax.Array
    metrics: dict[str, jax.Array]


def _prepare(
    parts: Parts, state: State, rollout: Rollout, hparams: Hparams
) -> tuple[Batch, CriticBatch | None, _Values]:
    """Values and advantages in one pass over the rollout, flattened to batches [T * B]."""
    advantage, critic_batch = rollout.advantage, None
    values = _Values(None, rollout.weight, {})
    if parts.critic_zeros is not None:
        own_advantage, critic_batch, values = _evaluate(parts, state, rollout, hparams)
        advantage = own_advantage if advantage is None else advantage
    if parts.config.normalize_advantages:
        advantage = losses.standardise(advantage, rollout.weight)
    if rollout.advantage_weight is not None:
        advantage = advantage * rollout.advantage_weight
    batch = Batch(
        features=_normalise_features(
            parts.actor_continuous, state.obs_statistics, parts.actor_features(rollout.obs)
        ),
        action=rollout.action,
        raw=rollout.extras["raw"],
        mask=rollout.action_mask,
        log_prob=rollout.extras["log_prob"],
        advantage=advantage,
        weight=rollout.weight,
    )
    return _flatten(batch), critic_batch, values


def _evaluate(
    parts: Parts, state: State, rollout: Rollout, hparams: Hparams
) -> tuple[jax.Array, CriticBatch, _Values]:
    features = _critic_inputs(parts, state, rollout.critic_obs)
    final = _critic_inputs(parts, state, rollout.final_critic_obs)
    output = _apply_critic(parts, state.critic.params, features)
    next_output = _apply_critic(parts, state.critic.params, final)
    fold = rollout.reward.shape[1] // output.shape[1]
    estimate, following = (
        jnp.repeat(_denormalise(state, x), fold, axis=1) for x in (output, next_output)
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
    batch = CriticBatch(features, _normalise_target(state, target), output, weight)
    return advantage, _flatten(batch), _Values(target, weight, metrics)


def _unfold(target: jax.Array, weight: jax.Array, fold: int) -> tuple[jax.Array, jax.Array]:
    """Targets [T, B * N] of agents with one critic input, averaged over the N folded agents."""
    if fold == 1:
        return target, weight
    targets = target.reshape(*target.shape[:1], -1, fold)
    weights = weight.reshape(*weight.shape[:1], -1, fold)
    total = jnp.sum(weights, -1)
    mean = jnp.sum(jnp.where(weights > 0, targets * weights, 0.0), -1) / jnp.maximum(total, 1e-8)
    return mean, total / fold


def _minibatch_step(
    parts: Parts,
    frozen: State,
    hparams: Hparams,
    scheduled: tuple[jax.Array, jax.Array],
    actor_batch: Batch,
    critic_batch: CriticBatch | None,
    networks_state: tuple[NetworkState, Any],
    indices: tuple[jax.Array, jax.Array],
) -> tuple[tuple[NetworkState, Any], dict[str, jax.Array]]:
    """One gradient step of the actor and one of the critic; the body of the scan."""
    actor, critic = networks_state
    learning_rate, entropy_coef = scheduled
    batch = jax.tree.map(lambda x: x[indices[0]], actor_batch)
    grads, metrics = jax.grad(_actor_loss, argnums=1, has_aux=True)(
        parts, actor.params, batch, hparams.clip_epsilon, entropy_coef
    )
    metrics["actor_grad_norm"] = optax.global_norm(grads)
    actor = apply_gradients(parts, actor, grads, hparams, learning_rate)
    if critic_batch is None:
        return (actor, critic), metrics
    batch = jax.tree.map(lambda x: x[indices[1]], critic_batch)
    grads, metrics["value_loss"] = jax.grad(_critic_loss, argnums=1, has_aux=True)(
        parts, critic.params, batch, hparams
    )
    metrics["critic_grad_norm"] = optax.global_norm(grads)
    rate = learning_rate * hparams.critic_learning_rate_scale
    critic = apply_gradients(parts, critic, grads, hparams, rate)
    return (actor, critic), metrics


def _actor_loss(
    parts: Parts, params: Any, batch: Batch, clip_epsilon: jax.Array, entropy_coef: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    outputs = (parts.actor.apply(params["network"], batch.features), params["log_std"])
    new_log_prob = parts.policy.log_prob(*outputs, batch.mask, batch.action, batch.raw)
    entropy = parts.policy.entropy(*outputs, batch.mask)
    # an unweighted sample may hold anything: its ratio is set to 1 before the exponential
    log_ratio = jnp.where(batch.weight > 0, new_log_prob - batch.log_prob, 0.0)
    surrogate = losses.clipped_surrogate(log_ratio, batch.advantage, clip_epsilon)
    policy_loss = losses.weighted_mean(surrogate, batch.weight)
    entropy = losses.weighted_mean(entropy, batch.weight)
    clipped = jnp.abs(jnp.expm1(log_ratio)) > clip_epsilon
    metrics = {
        "policy_loss": policy_loss,
        "entropy": entropy,
        "approx_kl": losses.weighted_mean(losses.approximate_kl(log_ratio), batch.weight),
        "clip_fraction": losses.weighted_mean(clipped.astype(jnp.float32), batch.weight),
    }
    return policy_loss - entropy_coef * entropy, metrics


def _critic_loss(
    parts: Parts, params: Any, batch: CriticBatch, hparams: Hparams
) -> tuple[jax.Array, jax.Array]:
    output = _apply_critic(parts, params, batch.features)
    if parts.config.clip_values:
        loss = losses.clipped_value_loss(
            output, batch.old_value, batch.target, hparams.value_clip_epsilon
        )
    else:
        loss = losses.value_loss(output, batch.target)
    loss = losses.weighted_mean(loss, batch.weight)
    return hparams.value_coef * loss, loss


def _move_statistics(parts: Parts, state: State, rollout: Rollout, values: _Values) -> State:
    """Merge this rollout into the statistics, once, after the last epoch."""
    config = parts.config
    if config.normalize_observations:
        vector = parts.actor_features(rollout.obs).vector
        state = state._replace(
            obs_statistics=statistics.merge(state.obs_statistics, vector, rollout.weight)
        )
    if values.target is None:
        return state
    if config.normalize_observations:
        vector = parts.critic_features(rollout.critic_obs).vector
        merged = statistics.merge(state.critic_obs_statistics, vector, values.weight)
        state = state._replace(critic_obs_statistics=merged)
    if config.normalize_values:
        merged = statistics.merge(state.value_statistics, values.target, values.weight)
        state = state._replace(value_statistics=merged)
    return state


def _spec(config: Config, hidden_sizes: tuple[int, ...], outputs: int, scale: float) -> NetworkSpec:
    return NetworkSpec(tuple(hidden_sizes), config.activation, config.torso, outputs, scale)


def _optimizer(hparams: Hparams, learning_rate: jax.Array) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(hparams.max_grad_norm),
        optax.adam(learning_rate, eps=hparams.adam_epsilon),
    )


def _policy_outputs(
    parts: Parts, params: Any, state: State, features: Features
) -> tuple[jax.Array, jax.Array]:
    features = _normalise_features(parts.actor_continuous, state.obs_statistics, features)
    return parts.actor.apply(params["network"], features), params["log_std"]


def _critic_inputs(parts: Parts, state: State, critic_obs: Any) -> Features:
    features = parts.critic_features(critic_obs)
    return _normalise_features(parts.critic_continuous, state.critic_obs_statistics, features)


def _apply_critic(parts: Parts, params: Any, features: Features) -> jax.Array:
    return parts.critic.apply(params, features)[..., 0]


def _critic_output(parts: Parts, params: Any, state: State, features: Features) -> jax.Array:
    features = _normalise_features(parts.critic_continuous, state.critic_obs_statistics, features)
    return _apply_critic(parts, params, features)


def _normalise_features(continuous: Any, stats: Any, features: Features) -> Features:
    if not isinstance(stats, RunningStatistics):
        return features
    normal = jnp.clip(statistics.normalise(stats, features.vector), -10.0, 10.0)
    return features._replace(vector=jnp.where(continuous, normal, features.vector))


def _normalise_target(state: State, target: jax.Array) -> jax.Array:
    if not isinstance(state.value_statistics, RunningStatistics):
        return target
    return statistics.normalise(state.value_statistics, target)


def _denormalise(state: State, output: jax.Array) -> jax.Array:
    if not isinstance(state.value_statistics, RunningStatistics):
        return output
    return statistics.denormalise(state.value_statistics, output)


def _shuffled(key: jax.Array, config: Config, size: int) -> jax.Array:
    """[num_epochs * num_minibatches, size / num_minibatches]: a fresh permutation per epoch."""
    keys = jax.random.split(key, config.num_epochs)
    orders = jax.vmap(lambda k: jax.random.permutation(k, size))(keys)
    return orders.reshape(config.num_epochs * config.num_minibatches, -1)


def _flatten(tree: Any) -> Any:
    """[T, B, ...] to [T * B, ...]."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)
