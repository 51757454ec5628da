"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) with a clipped objective.

Values of a whole rollout come from one pass after it, or from acting where actor and critic are one
network. Minibatches are drawn from one permutation
per epoch, which a team makes equal for all agents: of steps, or with memory of whole sequences.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from marl.agents import (
    actor_critic,
    losses,
    minibatches,
    schedules,
    sequences,
    state_values,
)
from marl.agents.actor_critic import Gradients, Parts, State
from marl.agents.learner import Critic, CriticSpace, Learner, Rollout
from marl.agents.networks import Features
from marl.agents.schedules import Scheduled
from marl.agents.state_values import Values
from marl.agents.validation import FINITE, at_least
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
    shared_network: bool = False  # actor and critic are one network with two heads
    core: str = "none"  # memory of actor and critic, after the torso: "gru" or "lstm"
    core_size: int = 64
    head_sizes: tuple[int, ...] = ()  # hidden layers after torso and core, of policy and value each
    sequence_length: int = 0  # steps that gradients flow back through; 0: the whole rollout
    burn_in: int = 0  # steps before a sequence that refresh its memory, without gradients
    box_policy: str = "tanh_normal"
    learning_rate_schedule: str = "constant"
    entropy_schedule: str = "constant"
    normalize_advantages: bool = True
    normalize_observations: bool = False
    value_normalization: str = "none"  # by "running" statistics, or those of "popart"
    value_loss: str = "squared"
    clip_values: bool = False

    def __post_init__(self):
        at_least("num_epochs", self.num_epochs, 1)
        at_least("num_minibatches", self.num_minibatches, 1)
        actor_critic.check_config(self)
        state_values.check_config(self)
        if self.clip_values and self.value_normalization == "none":
            raise UsageError(
                "clip_values clips in units of the normalised value, and would depend on the scale "
                "of rewards without it; set value_normalization = 'running' or 'popart' too, or "
                "leave clip_values off"
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
    huber_delta: Any = 10.0  # of value_loss = "huber": where it becomes linear
    entropy_coef: Any = 0.01
    entropy_coef_end: Any = 0.0
    value_coef: Any = 0.5
    max_grad_norm: Any = 0.5  # inf: off
    adam_epsilon: Any = 1e-5
    initial_std: Any = 1.0  # of Gaussian policies, before squashing


# (lowest, highest) value of an hparam; those not named here must be >= 0 and finite
BOUNDS = {
    "gamma": (0.0, 1.0),
    "gae_lambda": (0.0, 1.0),
    "clip_epsilon": (0.0, float("inf")),
    "value_clip_epsilon": (0.0, float("inf")),
    "initial_std": (1e-6, FINITE),
    "max_grad_norm": (1e-6, float("inf")),
    "adam_epsilon": (1e-12, 1.0),
    "huber_delta": (1e-6, float("inf")),
}


def _metric_names(parts: Parts) -> tuple[str, ...]:
    """Of a minibatch, in the order of its vector."""
    actor = ("policy_loss", "entropy", "approx_kl", "clip_fraction", "actor_grad_norm")
    critic = ("value_loss",) if parts.shared else ("value_loss", "critic_grad_norm")
    return (*(actor if parts.actor else ()), *(critic if parts.critic_reader else ()))


class Batch(NamedTuple):
    """One actor's samples: M steps [M, ...], or with memory M sequences [L, M, ...]."""

    features: Features
    steps: Any  # `sequences.Steps`, or ()
    action: Any
    raw: tuple[jax.Array, ...]
    mask: Any
    log_prob: jax.Array
    advantage: jax.Array
    weight: jax.Array


class CriticBatch(NamedTuple):
    """One critic's samples, as the actor's; fewer where agents share its input."""

    features: Any  # () of a shared network
    steps: Any
    target: jax.Array  # in units of the critic's output
    old_value: jax.Array
    weight: jax.Array


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
      critic_space: what the critic reads; None when the team holds the critic (`make_critic`), and
        `advantage` of every rollout is then given from outside.
    """
    parts = actor_critic.make_parts(config, observation_space, action_space, critic_space)
    return Learner(
        init=partial(actor_critic.init, parts),
        initial_memory=partial(actor_critic.initial_memory, parts),
        draw=partial(actor_critic.draw, parts),
        act=partial(actor_critic.act, parts),
        act_greedy=partial(actor_critic.act_greedy, parts),
        update=partial(update, parts),
        experience="rollout",
        value=None if critic_space is None else partial(state_values.value, parts),
        log_prob=partial(actor_critic.log_prob, parts),
        apply_gradients=actor_critic.apply_gradients,
        check=partial(sequences.check_minibatches, config),
        **state_values.memory_functions(parts),
    )


critic_options = actor_critic.critic_options


def make_critic(config: Config, critic_space: CriticSpace) -> Critic:
    """PPO's critic by itself, for a team that holds it."""
    parts = actor_critic.make_parts(config, None, None, critic_space)
    return Critic(
        init=partial(actor_critic.init, parts),
        value=partial(state_values.value, parts),
        update=partial(_update, parts),
    )


def update(
    parts: Parts, key: jax.Array, state: State, experience: Rollout, hparams: Hparams
) -> tuple[State, dict[str, jax.Array]]:
    """`num_epochs` passes over the rollout in minibatches."""
    del key  # the order of samples comes from `experience.shuffle_key`
    state, _, metrics = _update(parts, state, experience, hparams)
    return state, metrics


def _update(
    parts: Parts, state: State, experience: Rollout, hparams: Hparams
) -> tuple[State, jax.Array, dict[str, jax.Array]]:
    """The networks that there are; also the advantages [T, B] before normalisation."""
    config = parts.config
    scheduled = schedules.of_update(config, hparams, experience.env_steps)
    advantage, values = experience.advantage, None
    if parts.critic_reader is not None:
        own_advantage, values = state_values.evaluate(parts, state, experience, hparams)
        advantage = own_advantage if advantage is None else advantage
    batch = None if parts.actor is None else _actor_batch(parts, state, experience, advantage)
    critic_batch = None if values is None else _critic_batch(parts, state, values)
    step = partial(_minibatch_step, parts, hparams, scheduled, batch, critic_batch)
    sizes = (0 if x is None else x.weight.shape[-1] for x in (batch, critic_batch))
    indices = minibatches.shuffled(experience.shuffle_key, config, *sizes)
    state, rows = jax.lax.scan(step, state, indices)
    metrics = dict(zip(_metric_names(parts), jnp.mean(rows, 0), strict=True))
    metrics |= scheduled._asdict() if batch else {}
    metrics |= {} if values is None else values.metrics
    return state_values.move_statistics(parts, state, experience, values), advantage, metrics


def _actor_batch(parts: Parts, state: State, rollout: Rollout, advantage: jax.Array) -> Batch:
    if parts.config.normalize_advantages:
        advantage = losses.standardise(advantage, rollout.weight)
    if rollout.advantage_weight is not None:
        advantage = advantage * rollout.advantage_weight
    assert parts.actor is not None
    features = actor_critic.actor_features(parts, state, rollout.obs)
    steps = actor_critic.actor_steps(parts, rollout)
    batch = Batch(
        features=features,
        steps=steps,
        action=rollout.action,
        raw=rollout.extras["raw"],
        mask=rollout.action_mask,
        log_prob=rollout.extras["log_prob"],
        advantage=advantage,
        weight=rollout.weight,
    )
    params = state.actor.params["network"]
    if parts.shared:
        memories = rollout.extras["memory"]
    else:
        memories = sequences.memories_of(parts.actor, params, features, steps)
    return sequences.samples(batch, memories, parts.config)


def _critic_batch(parts: Parts, state: State, values: Values) -> CriticBatch:
    batch = CriticBatch(
        features=values.features,
        steps=values.steps,
        target=state_values.normalise_value(state, values.target),
        old_value=values.output,
        weight=values.weight,
    )
    return sequences.samples(batch, values.memories, parts.config)


def _minibatch_step(
    parts: Parts,
    hparams: Hparams,
    scheduled: Scheduled,
    actor_samples: Batch | None,
    critic_samples: CriticBatch | None,
    state: State,
    indices: tuple[jax.Array | None, jax.Array | None],
) -> tuple[State, jax.Array]:
    """One gradient step of the networks that there are; the body of the scan.

    Metrics are those of `_metric_names`.
    """
    batch, critic_batch = (
        None if x is None else sequences.select(x, i)
        for x, i in zip((actor_samples, critic_samples), indices, strict=True)
    )
    grads, metrics = Gradients(), {}
    if batch is not None:
        actor_grads, metrics = jax.grad(_actor_loss, argnums=1, has_aux=True)(
            parts, state.actor.params, batch, critic_batch, hparams, scheduled.entropy_coef
        )
        metrics["actor_grad_norm"] = optax.tree.norm(actor_grads)
        grads = grads._replace(actor=actor_grads)
    if critic_batch is not None and not parts.shared:
        critic_grads, metrics["value_loss"] = jax.grad(_critic_loss, argnums=1, has_aux=True)(
            parts, state.critic.params, critic_batch, hparams
        )
        metrics["critic_grad_norm"] = optax.tree.norm(critic_grads)
        grads = grads._replace(critic=critic_grads)
    state = actor_critic.apply_gradients(state, grads, hparams, scheduled.learning_rate)
    # one vector leaves the scan, not one array per metric: fewer kernels to compile
    return state, jnp.stack([metrics[name] for name in _metric_names(parts)])


def _actor_loss(
    parts: Parts,
    params: Any,
    batch: Batch,
    critic_batch: CriticBatch | None,
    hparams: Hparams,
    entropy_coef: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of the actor's network, with that of values where it has them."""
    outputs, value = actor_critic.policy_outputs(parts, params, batch.features, batch.steps)
    loss, metrics = _policy_loss(parts, outputs, batch, hparams.clip_epsilon, entropy_coef)
    if value is None:
        return loss, metrics
    assert critic_batch is not None  # of the same samples: of equal sizes the order is the same
    metrics["value_loss"] = _value_loss(parts, value, critic_batch, hparams)
    return loss + hparams.value_coef * metrics["value_loss"], metrics


def _policy_loss(
    parts: Parts,
    outputs: tuple[jax.Array, jax.Array],
    batch: Batch,
    clip_epsilon: jax.Array,
    entropy_coef: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    assert parts.policy is not None
    new_log_prob = parts.policy.log_prob(*outputs, batch.mask, batch.action, batch.raw)
    # an unweighted sample may hold anything: its ratio is set to 1 before the exponential
    log_ratio = jnp.where(batch.weight > 0, new_log_prob - batch.log_prob, 0.0)
    surrogate = losses.clipped_surrogate(log_ratio, batch.advantage, clip_epsilon)
    policy_loss = losses.weighted_mean(surrogate, batch.weight)
    entropy = losses.weighted_mean(parts.policy.entropy(*outputs, batch.mask), batch.weight)
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
    output = actor_critic.critic_output(parts, params, batch.features, batch.steps)
    loss = _value_loss(parts, output, batch, hparams)
    return hparams.value_coef * loss, loss


def _value_loss(parts: Parts, output: jax.Array, batch: CriticBatch, hparams: Hparams) -> jax.Array:
    loss_of = state_values.loss_function(parts.config, hparams)
    if parts.config.clip_values:
        loss = losses.clipped_value_loss(
            output, batch.old_value, batch.target, hparams.value_clip_epsilon, loss_of
        )
    else:
        loss = loss_of(output, batch.target)
    return losses.weighted_mean(loss, batch.weight)
