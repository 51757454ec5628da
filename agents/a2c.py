"""Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783), synchronous: one step per rollout.

It is PPO without epochs, minibatches and clipping; with memory, a rollout is one sequence. Adam
steps where the authors use RMSProp, and actor and critic are two networks, unless `shared_network`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from marl.agents import (
    actor_critic,
    losses,
    schedules,
    state_values,
)
from marl.agents.actor_critic import Gradients, Parts, State
from marl.agents.learner import Critic, CriticSpace, Learner, Rollout
from marl.agents.schedules import Scheduled
from marl.agents.state_values import Values
from marl.agents.validation import FINITE
from marl.envs.spaces import SpaceTree

CRITIC = "value"


@dataclass(frozen=True)
class Config:
    """What changes shapes or control flow."""

    hidden_sizes: tuple[int, ...] = (64, 64)
    critic_hidden_sizes: tuple[int, ...] = ()  # empty: like the actor's
    activation: str = "tanh"
    torso: str = "mlp"
    image_encoder: str = "cnn"
    shared_network: bool = False  # actor and critic are one network with two heads
    core: str = "none"  # memory of actor and critic, after the torso: "gru" or "lstm"
    core_size: int = 64
    head_sizes: tuple[int, ...] = ()  # hidden layers after torso and core, of policy and value each
    box_policy: str = "tanh_normal"
    learning_rate_schedule: str = "constant"
    entropy_schedule: str = "constant"
    normalize_advantages: bool = False
    normalize_observations: bool = False
    value_normalization: str = "none"  # by "running" statistics, or those of "popart"
    value_loss: str = "squared"

    def __post_init__(self):
        actor_critic.check_config(self)
        state_values.check_config(self)


class Hparams(NamedTuple):
    """Floats, each of which may differ per agent and never recompiles anything."""

    learning_rate: Any = 7e-4
    learning_rate_end: Any = 0.0  # where a schedule ends
    critic_learning_rate_scale: Any = 1.0  # the critic's learning rate over the actor's
    schedule_steps: Any = 0.0  # horizon of schedules in environment steps; 0: the run's total
    gamma: Any = 0.99
    gae_lambda: Any = 1.0  # 1: returns up to the rollout's end, as the authors have them
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
    "initial_std": (1e-6, FINITE),
    "max_grad_norm": (1e-6, float("inf")),
    "adam_epsilon": (1e-12, 1.0),
    "huber_delta": (1e-6, float("inf")),
}


def make(
    config: Config,
    observation_space: SpaceTree,
    action_space: SpaceTree,
    critic_space: CriticSpace | None,
) -> Learner:
    """A2C for any PyTree of observations, and of Discrete, MultiDiscrete and Box actions.

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
        **state_values.memory_functions(parts),
    )


critic_options = actor_critic.critic_options


def make_critic(config: Config, critic_space: CriticSpace) -> Critic:
    """A2C's critic by itself, for a team that holds it."""
    parts = actor_critic.make_parts(config, None, None, critic_space)
    return Critic(
        init=partial(actor_critic.init, parts),
        value=partial(state_values.value, parts),
        update=partial(_update, parts),
    )


def update(
    parts: Parts, key: jax.Array, state: State, experience: Rollout, hparams: Hparams
) -> tuple[State, dict[str, jax.Array]]:
    """One gradient step of the actor and one of the critic, on the whole rollout."""
    del key
    state, _, metrics = _update(parts, state, experience, hparams)
    return state, metrics


def _update(
    parts: Parts, state: State, experience: Rollout, hparams: Hparams
) -> tuple[State, jax.Array, dict[str, jax.Array]]:
    """The networks that there are; also the advantages [T, B] before normalisation."""
    scheduled = schedules.of_update(parts.config, hparams, experience.env_steps)
    advantage, values = experience.advantage, None
    gradients, metrics = Gradients(), {}
    if parts.critic_reader is not None:
        own_advantage, values = state_values.evaluate(parts, state, experience, hparams)
        advantage = own_advantage if advantage is None else advantage
    if parts.actor is not None:
        grads, metrics = jax.grad(_actor_loss, argnums=1, has_aux=True)(
            parts, state.actor.params, state, experience, advantage, values, hparams, scheduled
        )
        metrics["actor_grad_norm"] = optax.tree.norm(grads)
        metrics |= scheduled._asdict()
        gradients = gradients._replace(actor=grads)
    if values is not None and not parts.shared:
        grads, metrics["value_loss"] = jax.grad(_critic_loss, argnums=1, has_aux=True)(
            parts, state.critic.params, state, values, hparams
        )
        metrics["critic_grad_norm"] = optax.tree.norm(grads)
        gradients = gradients._replace(critic=grads)
    metrics |= {} if values is None else values.metrics
    learned = actor_critic.apply_gradients(state, gradients, hparams, scheduled.learning_rate)
    moved = state_values.move_statistics(parts, learned, experience, values)
    return moved, advantage, metrics


def _actor_loss(
    parts: Parts,
    params: Any,
    state: State,
    rollout: Rollout,
    advantage: jax.Array,
    values: Values | None,
    hparams: Hparams,
    scheduled: Scheduled,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The policy gradient and the entropy bonus (section 4 of the paper).

    Of a shared network the loss of its values too.
    """
    assert parts.policy is not None
    config, weight = parts.config, rollout.weight
    if config.normalize_advantages:
        advantage = losses.standardise(advantage, weight)
    if rollout.advantage_weight is not None:
        advantage = advantage * rollout.advantage_weight
    features = losses.live(actor_critic.actor_features(parts, state, rollout.obs), weight)
    action, raw = losses.live((rollout.action, rollout.extras["raw"]), weight)
    steps = actor_critic.actor_steps(parts, rollout)
    outputs, value = actor_critic.policy_outputs(parts, params, features, steps)
    log_prob = parts.policy.log_prob(*outputs, rollout.action_mask, action, raw)
    policy_loss = -losses.weighted_mean(log_prob * losses.live(advantage, weight), weight)
    entropy = losses.weighted_mean(parts.policy.entropy(*outputs, rollout.action_mask), weight)
    loss = policy_loss - scheduled.entropy_coef * entropy
    metrics = {"policy_loss": policy_loss, "entropy": entropy}
    if value is None:
        return loss, metrics
    assert values is not None
    metrics["value_loss"] = _value_loss(parts, value, state, values, hparams)
    return loss + hparams.value_coef * metrics["value_loss"], metrics


def _critic_loss(
    parts: Parts, params: Any, state: State, values: Values, hparams: Hparams
) -> tuple[jax.Array, jax.Array]:
    features = losses.live(values.features, values.weight)
    output = actor_critic.critic_output(parts, params, features, values.steps)
    loss = _value_loss(parts, output, state, values, hparams)
    return hparams.value_coef * loss, loss


def _value_loss(
    parts: Parts, output: jax.Array, state: State, values: Values, hparams: Hparams
) -> jax.Array:
    target = state_values.normalise_value(state, values.target)
    loss_of = state_values.loss_function(parts.config, hparams)
    return losses.weighted_mean(loss_of(output, target), values.weight)
