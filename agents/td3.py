"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477).

`ddpg` is the same with other defaults. Noise and actions inside are in units of actions scaled to
[-1, 1].
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.agents import losses, networks, policies, q_critic, schedules
from marl.agents.learner import ActInput, ActOutput, CriticSpace, Learner, Rollout
from marl.agents.optimizer import NetworkState, step_network
from marl.agents.q_critic import Batch, Parts
from marl.agents.validation import at_least, one_of
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
    policy_delay: int = 2  # critic steps per step of the actor and of the targets
    learning_rate_schedule: str = "constant"
    exploration_schedule: str = "constant"

    def __post_init__(self):
        q_critic.check_networks(self)
        at_least("policy_delay", self.policy_delay, 1)
        one_of("learning_rate_schedule", self.learning_rate_schedule, schedules.KINDS)
        one_of("exploration_schedule", self.exploration_schedule, schedules.KINDS)


class Hparams(NamedTuple):
    """Floats, each of which may differ per agent and never recompiles anything."""

    learning_rate: Any = 3e-4
    learning_rate_end: Any = 0.0  # where a schedule ends
    critic_learning_rate_scale: Any = 1.0  # the critic's learning rate over the actor's
    schedule_steps: Any = 0.0  # horizon of schedules in environment steps; 0: the run's total
    gamma: Any = 0.99
    tau: Any = 0.005  # the fraction by which target parameters move
    exploration_noise: Any = 0.1  # standard deviation, with actions scaled to [-1, 1]
    exploration_noise_end: Any = 0.0
    target_noise: Any = 0.2  # standard deviation of the target policy's smoothing; 0: off
    noise_clip: Any = 0.5  # the largest noise of the target policy; inf: off
    saturation_coef: Any = 0.0  # of the squared actor outputs before tanh; 0: off
    max_grad_norm: Any = float("inf")  # inf: off
    adam_epsilon: Any = 1e-8


# (lowest, highest) value of an hparam; those not named here must be >= 0 and finite
BOUNDS = {
    "gamma": (0.0, 1.0),
    "tau": (0.0, 1.0),
    "max_grad_norm": (1e-6, float("inf")),
    "noise_clip": (0.0, float("inf")),
    "adam_epsilon": (1e-12, 1.0),
}


class State(NamedTuple):
    """What the next step of one agent (or sharing set) needs."""

    actor: NetworkState
    critic: NetworkState  # params with a leading axis [num_critics]
    target_actor: Any  # like actor.params
    target_critic: Any  # like critic.params
    steps: jax.Array  # [] int32: gradient steps taken


def make(
    config: Config,
    observation_space: SpaceTree,
    action_space: SpaceTree,
    critic_space: CriticSpace,
) -> Learner:
    """TD3 for any PyTree of observations and a bounded Box as action space.

    Raises UsageError for any other action space.
    """
    parts = make_parts(config, observation_space, action_space, critic_space)
    return Learner(
        init=partial(init, parts),
        initial_memory=networks.no_memory,
        draw=partial(draw, parts),
        act=partial(act, parts),
        act_greedy=partial(act_greedy, parts),
        update=partial(update, parts),
        experience="replay",
        next_action=partial(next_action, parts),
    )


def make_parts(
    config: Config,
    observation_space: SpaceTree,
    action_space: SpaceTree,
    critic_space: CriticSpace,
) -> Parts:
    """Networks for one agent's spaces; the same checks as `make`."""
    if not isinstance(action_space, Box):
        raise UsageError(
            "td3 and ddpg take one bounded Box as action space, and this is "
            f"{spaces.describe(action_space)}; many environments can be switched (MPE: "
            "env.kwargs.action_type=Continuous), or use sac (Discrete, MultiDiscrete) or ppo"
        )
    q_critic.check_bounds("td3 (like ddpg)", action_space)
    return q_critic.make_parts(
        config, observation_space, action_space, critic_space, action_space.size
    )


def init(parts: Parts, key: jax.Array, hparams: Hparams) -> State:
    """A fresh state."""
    key_actor, key_critic = jax.random.split(key)
    actor = q_critic.init_actor(parts, key_actor)
    critic = q_critic.init(parts.critic, key_critic)
    return State(
        actor=q_critic.fresh(hparams, actor),
        critic=q_critic.fresh(hparams, critic),
        target_actor=q_critic.copied(actor),
        target_critic=q_critic.copied(critic),
        steps=jnp.zeros((), jnp.int32),
    )


def draw(parts: Parts, key: jax.Array, batch_size: int) -> jax.Array:
    """The random numbers [B, size] that `act` takes."""
    return jax.random.normal(key, (batch_size, parts.action_space.size))


def act(
    parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Hparams
) -> ActOutput:
    """The actor's actions [B] with Gaussian noise, within the bounds."""
    noise = draw(parts, key, inputs.reset.shape[0]) if inputs.noise is None else inputs.noise
    mean = jnp.tanh(_outputs(parts, state.actor.params, inputs.obs))
    unit = mean + _exploration_noise(parts, hparams, inputs.env_steps) * noise
    action = policies.from_unit(parts.action_space, jnp.clip(unit, -1.0, 1.0))
    return ActOutput(action=action, memory=inputs.memory, extras=())


def act_greedy(
    parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Hparams
) -> ActOutput:
    """The actor's actions [B]."""
    del key, hparams
    unit = jnp.tanh(_outputs(parts, state.actor.params, inputs.obs))
    action = policies.from_unit(parts.action_space, unit)
    return ActOutput(action=action, memory=inputs.memory, extras=())


def next_action(
    parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Hparams
) -> ActOutput:
    """The target policy's actions [B], smoothed."""
    unit = _target_unit(parts, key, state, inputs.obs, hparams)
    action = policies.from_unit(parts.action_space, unit)
    return ActOutput(action=action, memory=inputs.memory, extras=())


def update(
    parts: Parts, key: jax.Array, state: State, experience: Rollout, hparams: Hparams
) -> tuple[State, dict[str, jax.Array]]:
    """One gradient step of the critics; every `policy_delay` steps one of the actor and targets."""
    config = parts.config
    rate = q_critic.learning_rate(config, hparams, experience.env_steps)
    batch = q_critic.windows(experience, hparams.gamma)
    view = batch.following
    action = _target_unit(parts, key, state, view.obs, hparams)
    following = jnp.min(
        q_critic.outputs(parts.critic, state.target_critic, view.critic_obs, view.context, action)[
            ..., 0
        ],
        0,
    )
    critic, metrics = q_critic.learn(
        parts.critic,
        state.critic,
        batch,
        q_critic.target(batch, following),
        hparams,
        rate * hparams.critic_learning_rate_scale,
    )
    state = state._replace(critic=critic, steps=state.steps + 1)
    metrics["learning_rate"] = rate
    metrics["exploration_noise"] = _exploration_noise(parts, hparams, experience.env_steps)
    step = partial(_step_actor, parts, hparams, rate, batch)
    if config.policy_delay == 1:
        state, metrics["policy_loss"] = step(state)
    else:
        state, metrics["policy_loss"] = jax.lax.cond(
            state.steps % config.policy_delay == 0,
            step,
            lambda state: (state, _actor_loss(parts, hparams, batch, state, state.actor.params)),
            state,
        )
    return state, metrics


def _step_actor(
    parts: Parts, hparams: Hparams, learning_rate: jax.Array, batch: Batch, state: State
) -> tuple[State, jax.Array]:
    """One gradient step of the actor, after which the targets move."""
    loss, grads = jax.value_and_grad(partial(_actor_loss, parts, hparams, batch, state))(
        state.actor.params
    )
    actor = step_network(state.actor, grads, hparams, learning_rate)
    state = state._replace(
        actor=actor,
        target_actor=q_critic.track(state.target_actor, actor.params, hparams.tau),
        target_critic=q_critic.track(state.target_critic, state.critic.params, hparams.tau),
    )
    return state, loss


def _actor_loss(
    parts: Parts, hparams: Hparams, batch: Batch, state: State, params: Any
) -> jax.Array:
    """Minus the first critic's value of the actor's action; others' actions are as recorded."""
    view = batch.now
    output = _outputs(parts, params, view.obs)
    values = q_critic.outputs(
        parts.critic,
        jax.tree.map(lambda x: x[:1], state.critic.params),
        view.critic_obs,
        view.context,
        jnp.tanh(output),
    )
    saturation = hparams.saturation_coef * jnp.mean(jnp.square(output), -1)
    return losses.weighted_mean(saturation - values[0, ..., 0], batch.weight)


def _exploration_noise(parts: Parts, hparams: Hparams, env_steps: jax.Array) -> jax.Array:
    return schedules.schedule(
        parts.config.exploration_schedule,
        hparams.exploration_noise,
        hparams.exploration_noise_end,
        hparams.schedule_steps,
        env_steps,
    )


def _outputs(parts: Parts, params: Any, obs: Any) -> jax.Array:
    """The actor's outputs [..., size] before tanh."""
    return parts.actor.apply(params, q_critic.actor_features(parts, obs))


def _target_unit(
    parts: Parts, key: jax.Array, state: State, obs: Any, hparams: Hparams
) -> jax.Array:
    """The target policy's actions [..., size] in [-1, 1], with clipped noise (equation 14)."""
    mean = jnp.tanh(_outputs(parts, state.target_actor, obs))
    noise = hparams.target_noise * jax.random.normal(key, mean.shape)
    noise = jnp.clip(noise, -hparams.noise_clip, hparams.noise_clip)
    return jnp.clip(mean + noise, -1.0, 1.0)
