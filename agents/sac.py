"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905), with a temperature that is learned.

A bounded Box has a Gaussian squashed by tanh, whose actions and entropies are those of actions
scaled to [-1, 1]. Discrete and MultiDiscrete actions (Christodoulou 2019, arXiv:1910.07207) take
expectations over the legal choices instead of samples.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from marl.agents import losses, networks, policies, q_critic, schedules
from marl.agents.learner import ActInput, ActOutput, CriticSpace, Learner, Rollout
from marl.agents.optimizer import NetworkState, step_network
from marl.agents.policies import Policy
from marl.agents.q_critic import Parts, View
from marl.agents.validation import FINITE, one_of
from marl.envs import spaces
from marl.envs.errors import UsageError
from marl.envs.spaces import Box, SpaceTree

CRITIC = "q"
q_value = q_critic.q_value


@dataclass(frozen=True)
class Config:
    """What changes shapes or control flow."""

    hidden_sizes: tuple[int, ...] = (64, 64)
    critic_hidden_sizes: tuple[int, ...] = ()  # empty: like the actor's
    activation: str = "relu"
    torso: str = "mlp"
    image_encoder: str = "cnn"
    num_critics: int = 2
    learn_temperature: bool = True
    learning_rate_schedule: str = "constant"

    def __post_init__(self):
        q_critic.check_networks(self)
        one_of("learning_rate_schedule", self.learning_rate_schedule, schedules.KINDS)


class Hparams(NamedTuple):
    """Floats, each of which may differ per agent and never recompiles anything."""

    learning_rate: Any = 3e-4
    learning_rate_end: Any = 0.0  # where a schedule ends
    critic_learning_rate_scale: Any = 1.0  # the critic's learning rate over the actor's
    temperature_learning_rate_scale: Any = 1.0
    schedule_steps: Any = 0.0  # horizon of schedules in environment steps; 0: the run's total
    gamma: Any = 0.99
    tau: Any = 0.005  # the fraction by which target parameters move
    initial_temperature: Any = 1.0  # the temperature itself where it is not learned
    target_entropy_scale: Any = 1.0  # of a Box: the target entropy is minus this per element
    # of integers: the target over the entropy of the uniform policy. The paper's 0.98 leaves a
    # policy next to uniform, and here that noise is part of every other agent's environment
    discrete_target_entropy_scale: Any = 0.5
    max_grad_norm: Any = float("inf")  # inf: off
    adam_epsilon: Any = 1e-8


# (lowest, highest) value of an hparam; those not named here must be >= 0 and finite
BOUNDS = {
    "gamma": (0.0, 1.0),
    "tau": (0.0, 1.0),
    "initial_temperature": (1e-8, FINITE),
    "discrete_target_entropy_scale": (0.0, 1.0),
    "max_grad_norm": (1e-6, float("inf")),
    "adam_epsilon": (1e-12, 1.0),
}

# the standard deviation before squashing lies in (exp(-5), exp(2))
_LOWEST_LOG_STD, _HIGHEST_LOG_STD = -5.0, 2.0


class State(NamedTuple):
    """What the next step of one agent (or sharing set) needs."""

    actor: NetworkState
    critic: NetworkState  # params with a leading axis [num_critics]
    target_critic: Any  # like critic.params
    temperature: Any  # NetworkState of log alpha, [] float32; () where it is not learned


def make(
    config: Config,
    observation_space: SpaceTree,
    action_space: SpaceTree,
    critic_space: CriticSpace,
) -> Learner:
    """SAC for any PyTree of observations, and one bounded Box, Discrete or MultiDiscrete action.

    Raises UsageError for any other action space.
    """
    parts = make_parts(config, observation_space, action_space, critic_space)
    sample = partial(act, parts)
    return Learner(
        init=partial(init, parts),
        initial_memory=networks.no_memory,
        draw=partial(draw, parts),
        act=sample,
        act_greedy=partial(act_greedy, parts),
        update=partial(update, parts),
        experience="replay",
        next_action=sample,
    )


def make_parts(
    config: Config,
    observation_space: SpaceTree,
    action_space: SpaceTree,
    critic_space: CriticSpace,
) -> Parts:
    """Networks for one agent's spaces; the same checks as `make`."""
    if not spaces.is_space(action_space):
        raise UsageError(
            "sac takes one bounded Box, Discrete or MultiDiscrete as action space, and this is "
            f"{spaces.describe(action_space)}; use ppo, which takes any mixture of them"
        )
    if isinstance(action_space, Box):
        q_critic.check_bounds("sac", action_space)
    policy = _policy(action_space)
    size = policy.num_outputs + policy.num_scales
    return q_critic.make_parts(config, observation_space, action_space, critic_space, size)


def init(parts: Parts, key: jax.Array, hparams: Hparams) -> State:
    """A fresh state."""
    key_actor, key_critic = jax.random.split(key)
    critic = q_critic.init(parts.critic, key_critic)
    log_temperature = jnp.log(hparams.initial_temperature)
    fresh = partial(q_critic.fresh, hparams)
    return State(
        actor=fresh(q_critic.init_actor(parts, key_actor)),
        critic=fresh(critic),
        target_critic=q_critic.copied(critic),
        temperature=fresh(log_temperature) if parts.config.learn_temperature else (),
    )


def draw(parts: Parts, key: jax.Array, batch_size: int) -> tuple[jax.Array, ...]:
    """The random numbers [B, ...] that `act` takes."""
    return _policy(parts.action_space).draw(key, (batch_size,))


def act(
    parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Hparams
) -> ActOutput:
    """Sample actions [B]; of next actions, those of the current policy."""
    del hparams
    outputs = _outputs(parts, state.actor.params, inputs.obs)
    noise = draw(parts, key, inputs.reset.shape[0]) if inputs.noise is None else inputs.noise
    drawn = _policy(parts.action_space).sample_from(noise, *outputs, inputs.action_mask).action
    return ActOutput(action=_action(parts, drawn), memory=inputs.memory, extras=())


def act_greedy(
    parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Hparams
) -> ActOutput:
    """The mode of the policy (for a squashed Gaussian: the squashed mean)."""
    del key, hparams
    outputs = _outputs(parts, state.actor.params, inputs.obs)
    mode = _policy(parts.action_space).mode(*outputs, inputs.action_mask)
    return ActOutput(action=_action(parts, mode), memory=inputs.memory, extras=())


def update(
    parts: Parts, key: jax.Array, state: State, experience: Rollout, hparams: Hparams
) -> tuple[State, dict[str, jax.Array]]:
    """One gradient step of the critics, then of the actor and of the temperature."""
    key_target, key_actor = jax.random.split(key)
    rate = q_critic.learning_rate(parts.config, hparams, experience.env_steps)
    batch = q_critic.windows(experience, hparams.gamma)
    temperature = _temperature(state, hparams)
    following, _ = soft_value(
        parts, key_target, state.actor.params, state.target_critic, batch.following, temperature
    )
    critic, metrics = q_critic.learn(
        parts.critic,
        state.critic,
        batch,
        q_critic.target(batch, following),
        hparams,
        rate * hparams.critic_learning_rate_scale,
    )

    def actor_loss(params: Any) -> tuple[jax.Array, jax.Array]:
        value, entropy = soft_value(parts, key_actor, params, critic.params, batch.now, temperature)
        return -losses.weighted_mean(value, batch.weight), entropy

    (loss, entropy), grads = jax.value_and_grad(actor_loss, has_aux=True)(state.actor.params)
    surplus = entropy - _target_entropy(parts, batch.now.action_mask, hparams)
    metrics |= {
        "policy_loss": loss,
        "entropy": losses.weighted_mean(entropy, batch.weight),
        "temperature": temperature,
        "actor_grad_norm": optax.tree.norm(grads),
        "learning_rate": rate,
    }
    gradient = losses.weighted_mean(surplus, batch.weight)
    state = State(
        actor=step_network(state.actor, grads, hparams, rate),
        critic=critic,
        target_critic=q_critic.track(state.target_critic, critic.params, hparams.tau),
        temperature=_step_temperature(state.temperature, gradient, hparams, rate),
    )
    return state, metrics


def soft_value(
    parts: Parts, key: jax.Array, actor: Any, critic: Any, view: View, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """V = E[min_j Q_j(s, a) - alpha log pi(a | s)] (equation 3), and the policy's entropy.

    Others' actions are those of `view`. Differentiable in the actor's parameters: by
    reparameterisation where the action is a Box, where one sample stands for the expectation.

    Args:
      actor, critic: parameters.
      view: [B, ...].
      temperature: [] alpha.

    Returns:
      Value and entropy, each [B].
    """
    mean, log_std = _outputs(parts, actor, view.obs)
    seen = view.critic_obs, view.context
    if isinstance(parts.action_space, Box):
        drawn = _policy(parts.action_space).sample(key, mean, log_std, None)
        values = q_critic.outputs(parts.critic, critic, *seen, drawn.action)[..., 0]
        # not `min`: its gradient divides by how often the least value occurs, which is never where
        # XLA computes the values twice and rounds them differently
        least = jnp.argmin(values, 0) == jnp.arange(values.shape[0])[:, None]
        lowest = jnp.sum(jnp.where(least, values, 0.0), 0)
        return lowest - temperature * drawn.log_prob, -drawn.log_prob
    log_probs = policies.log_probabilities(parts.action_space, mean, view.action_mask)
    probs = jnp.exp(log_probs)
    entropy = -jnp.sum(probs * log_probs, -1)
    values = _lowest(parts, q_critic.outputs(parts.critic, critic, *seen), probs)
    return jnp.sum(probs * values, -1) + temperature * entropy, entropy


def _lowest(parts: Parts, values: jax.Array, probs: jax.Array) -> jax.Array:
    """The values [..., choices] of the critics [num_critics, ..., choices] to learn from.

    For Discrete, the lowest of each action. Values per component of a MultiDiscrete are known up to
    constants that cancel in the sum, of which a minimum would make something: there they are those
    of the critic that expects least.
    """
    if isinstance(parts.action_space, spaces.Discrete):
        return jnp.min(values, 0)
    least = jnp.argmin(jnp.sum(probs * values, -1), 0)
    return jnp.take_along_axis(values, least[None, ..., None], 0)[0]


def _policy(space: spaces.Space) -> Policy:
    """Distributions over actions; those of a Box are scaled to [-1, 1]."""
    return Policy(Box((space.size,), -1.0, 1.0) if isinstance(space, Box) else space)


def _outputs(parts: Parts, params: Any, obs: Any) -> tuple[jax.Array, jax.Array]:
    """What `Policy` takes: means or logits, and the log of standard deviations, bounded."""
    outputs = parts.actor.apply(params, q_critic.actor_features(parts, obs))
    outputs = jnp.moveaxis(outputs, -1, 0)
    mean, log_std = jnp.split(outputs, [_policy(parts.action_space).num_outputs], 0)
    # slope 1 at 0, and gradients everywhere
    bound = jnp.where(log_std > 0, _HIGHEST_LOG_STD, -_LOWEST_LOG_STD)
    log_std = bound * jnp.tanh(log_std / bound)
    return jnp.moveaxis(mean, 0, -1), jnp.moveaxis(log_std, 0, -1)


def _action(parts: Parts, action: jax.Array) -> jax.Array:
    """From the policy's units to those of the environment."""
    space = parts.action_space
    return policies.from_unit(space, action) if isinstance(space, Box) else action


def _temperature(state: State, hparams: Hparams) -> jax.Array:
    if not isinstance(state.temperature, NetworkState):
        return hparams.initial_temperature
    return jnp.exp(state.temperature.params)


def _step_temperature(
    temperature: Any, gradient: jax.Array, hparams: Hparams, learning_rate: jax.Array
) -> Any:
    """Down where the policy's entropy is above its target (equation 18).

    As in the authors' code the loss is linear in log alpha, and the surplus is its gradient.
    """
    if not isinstance(temperature, NetworkState):
        return temperature
    rate = learning_rate * hparams.temperature_learning_rate_scale
    return step_network(temperature, gradient, hparams, rate)


def _target_entropy(parts: Parts, mask: Any, hparams: Hparams) -> jax.Array:
    """Of a Box a constant []; of integers a share of the largest entropy over legal choices [B]."""
    space = parts.action_space
    if isinstance(space, Box):
        return -hparams.target_entropy_scale * space.size
    policy = _policy(space)
    uniform = jnp.zeros(policy.num_outputs if mask is None else mask.shape)
    return hparams.discrete_target_entropy_scale * policy.entropy(uniform, jnp.zeros(0), mask)
