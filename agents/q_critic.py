"""What actor-critic learners on replay have in common: an ensemble of Q-critics and its targets.

A Q-critic reads the critic's observation, other agents' actions (its *context*) and, where the own
action is a Box, that action; where it is Discrete or MultiDiscrete, it gives a value per own choice
instead, and the value of an action is the sum over its components. Bounded Box actions are scaled
to [-1, 1], integers are one-hot.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from marl.agents import losses, networks, policies, returns, schedules
from marl.agents.learner import CriticSpace, Rollout
from marl.agents.networks import Features, Network, NetworkSpec
from marl.agents.optimizer import NetworkState, make_optimizer, step_network
from marl.agents.validation import at_least
from marl.envs import spaces
from marl.envs.errors import UsageError
from marl.envs.spaces import Box, Discrete, MultiDiscrete, Space, SpaceTree


class QCritic(NamedTuple):
    """An ensemble of Q-critics; static, as captured by a learner's `make`."""

    network: Network
    action_space: Space  # the agent's own
    critic_space: CriticSpace
    image_encoder: str
    num_critics: int


class Parts(NamedTuple):
    """What a learner's `make` captures: static, never inside a state."""

    config: Any  # `sac.Config` or `td3.Config`
    observation_space: SpaceTree
    action_space: Any  # one Space
    actor: Network
    critic: QCritic


class View(NamedTuple):
    """What an agent and its critic see of one state."""

    obs: Any  # [B, ...]
    action_mask: Any  # [B, ...] or None
    critic_obs: Any  # [B, ...]
    context: Any  # [B, ...] other agents' actions, or ()


class Batch(NamedTuple):
    """One sample per window; where its weight is 0, everything is."""

    now: View
    action: jax.Array  # [B, ...]
    reward: jax.Array  # [B] discounted sum over the window
    discount: jax.Array  # [B] of the value of `following`; 0 where the episode terminated
    following: View  # the state that the return bootstraps from
    weight: jax.Array  # [B]


def make_parts(
    config: Any,
    observation_space: SpaceTree,
    action_space: Space,
    critic_space: CriticSpace,
    num_outputs: int,
) -> Parts:
    """Networks for one agent's spaces; the actor has `num_outputs`."""

    def network(hidden_sizes: tuple[int, ...], size: int, scale: float) -> Network:
        spec = NetworkSpec(hidden_sizes, config.activation, config.torso, size, scale)
        return networks.make_network(spec)

    choices = 1 if isinstance(action_space, Box) else _num_choices(action_space)
    critic = QCritic(
        network=network(config.critic_hidden_sizes or config.hidden_sizes, choices, 1.0),
        action_space=action_space,
        critic_space=critic_space,
        image_encoder=config.image_encoder,
        num_critics=config.num_critics,
    )
    return Parts(
        config=config,
        observation_space=observation_space,
        action_space=action_space,
        actor=network(config.hidden_sizes, num_outputs, 0.01),
        critic=critic,
    )


def check_networks(config: Any) -> None:
    """Raise UsageError where a field of `config` that names networks is out of range."""
    networks.check_config(config)
    at_least("num_critics", config.num_critics, 1)


def check_bounds(name: str, space: Box) -> None:
    """Raise UsageError where the learner `name` cannot squash actions into the bounds of a Box."""
    if not policies.squashable(space):
        raise UsageError(
            f"{name} squashes actions into their bounds, and this {spaces.describe(space)} has "
            f"low = {space.low}, high = {space.high}; give every element finite bounds (a wrapper "
            "can), or use ppo, which takes actions without bounds"
        )


def actor_features(parts: Parts, obs: Any) -> Features:
    """The actor's input."""
    return networks.features(parts.observation_space, obs, parts.config.image_encoder)


def init_actor(parts: Parts, key: jax.Array) -> Any:
    """Fresh parameters of the actor."""
    zeros = networks.zero_features(parts.observation_space, parts.config.image_encoder)
    return parts.actor.init(key, zeros)


def init(critic: QCritic, key: jax.Array) -> Any:
    """Fresh parameters, with a leading axis [num_critics]."""
    observations, context = (spaces.zeros(space, (1,)) for space in critic.critic_space)
    own = (
        policies.to_unit(critic.action_space, spaces.zeros(critic.action_space, (1,)))
        if (isinstance(critic.action_space, Box))
        else None
    )
    features = _features(critic, observations, context, own)
    keys = jax.random.split(key, critic.num_critics)
    return jax.vmap(critic.network.init, in_axes=(0, None))(keys, features)


def fresh(hparams: Any, params: Any) -> NetworkState:
    """Parameters with the optimiser's initial state."""
    optimizer = make_optimizer(hparams, hparams.learning_rate)
    return NetworkState(params, optimizer.init(params))


def copied(params: Any) -> Any:
    """Target parameters; a buffer that stands twice in a state could not be donated."""
    return jax.tree.map(jnp.copy, params)


def outputs(
    critic: QCritic, params: Any, critic_obs: Any, context: Any, own: jax.Array | None = None
) -> jax.Array:
    """What each critic gives, [num_critics, ..., choices]; of a Box there is one choice.

    Args:
      critic_obs, context: [..., *space] of the critic's space.
      own: [..., size] the own action of a Box, scaled to [-1, 1]; None for integers.
    """
    features = _features(critic, critic_obs, context, own)
    # A copy for each critic, laid out as the networks take it: else the gradient of the action is
    # one product over critics and units, for which XLA first transposes what it multiplies
    num_critics = jax.tree.leaves(params)[0].shape[0]
    columns = jnp.moveaxis(features.vector, -1, 0)
    columns = jax.lax.optimization_barrier(jnp.broadcast_to(columns, (num_critics, *columns.shape)))
    copies = Features(jnp.moveaxis(columns, 1, -1), features.images)
    axes: Any = (0, None)  # of a vector and of images
    return jax.vmap(critic.network.apply, in_axes=(0, Features(*axes)))(params, copies)


def action_values(
    critic: QCritic, params: Any, critic_obs: Any, context: Any, action: jax.Array
) -> jax.Array:
    """Values [num_critics, ...] of own actions [..., *space] as an environment takes them."""
    space = critic.action_space
    if isinstance(space, Box):
        own = policies.to_unit(space, action)
        return outputs(critic, params, critic_obs, context, own)[..., 0]
    chosen = networks.features(space, action).vector  # one-hot per component
    return jnp.sum(outputs(critic, params, critic_obs, context) * chosen, -1)


def q_value(
    parts: Parts, state: Any, critic_obs: Any, action: jax.Array, context: Any
) -> jax.Array:
    """Values [num_critics, ...] that a learner's state gives to own actions [..., *space]."""
    return action_values(parts.critic, state.critic.params, critic_obs, context, action)


def windows(rollout: Rollout, gamma: jax.Array) -> Batch:
    """The samples of `returns.n_step` that B windows [T, B] of consecutive steps make.

    What lies behind the step that ends a return is never read.

    Args:
      rollout: [T, B, ...]; the batch of what critics read may be smaller, [T, B / N].
      gamma: [] discount.
    """
    reward, discount, last = returns.n_step(
        rollout.reward, rollout.terminated, rollout.truncated, gamma
    )
    columns = jnp.arange(reward.shape[0])
    weight = rollout.weight[0]

    def at(step: Any, *trees: Any) -> Any:
        def leaf(x: jax.Array) -> jax.Array:
            return losses.live(x[step, columns // (columns.size // x.shape[1])], weight)

        return jax.tree.map(leaf, trees)

    now = rollout.obs, rollout.action_mask, rollout.critic_obs, rollout.context
    following = (
        rollout.final_obs,
        rollout.final_action_mask,
        rollout.final_critic_obs,
        rollout.next_context,
    )
    return Batch(
        now=View(*at(0, *now)),
        action=at(0, rollout.action)[0],
        reward=losses.live(reward, weight),
        discount=losses.live(discount, weight),
        following=View(*at(last, *following)),
        weight=weight,
    )


def learning_rate(config: Any, hparams: Any, env_steps: jax.Array) -> jax.Array:
    """The actor's learning rate [] at `env_steps`, by `config.learning_rate_schedule`."""
    return schedules.schedule(
        config.learning_rate_schedule,
        hparams.learning_rate,
        hparams.learning_rate_end,
        hparams.schedule_steps,
        env_steps,
    )


def target(batch: Batch, following: jax.Array) -> jax.Array:
    """Targets [B] of the critic, given the value [B] of the state that each bootstraps from."""
    return batch.reward + jnp.where(batch.discount > 0, batch.discount * following, 0.0)


def learn(
    critic: QCritic,
    network: NetworkState,
    batch: Batch,
    targets: jax.Array,
    hparams: Any,
    learning_rate: jax.Array,
) -> tuple[NetworkState, dict[str, jax.Array]]:
    """One gradient step of every critic towards `targets` [B]; the loss is the critics' sum."""

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        view = batch.now
        found = action_values(critic, params, view.critic_obs, view.context, batch.action)
        errors = jnp.sum(losses.value_loss(found, targets), 0)
        return losses.weighted_mean(errors, batch.weight), jnp.mean(found, 0)

    (value, found), grads = jax.value_and_grad(loss, has_aux=True)(network.params)
    metrics = {
        "critic_loss": value,
        "q_mean": losses.weighted_mean(found, batch.weight),
        "critic_grad_norm": optax.tree.norm(grads),
    }
    return step_network(network, grads, hparams, learning_rate), metrics


def track(target_params: Any, params: Any, tau: jax.Array) -> Any:
    """Target parameters, moved by the fraction `tau` towards the learned ones (Polyak)."""
    return jax.tree.map(lambda old, new: old + tau * (new - old), target_params, params)


def _features(critic: QCritic, critic_obs: Any, context: Any, own: jax.Array | None) -> Features:
    observations, others = critic.critic_space
    treedef = jax.tree.structure(others, is_leaf=spaces.is_space)
    pairs = list(zip(spaces.leaves(others), treedef.flatten_up_to(context), strict=True))
    found = [networks.features(observations, critic_obs, critic.image_encoder)]
    found += [networks.features(*_flat(space, action)) for space, action in pairs]
    vectors = [part.vector for part in found] + ([] if own is None else [own])
    columns = [jnp.moveaxis(x, -1, 0) for x in vectors]
    return Features(jnp.moveaxis(jnp.concatenate(columns, 0), 0, -1), found[0].images)


def _flat(space: Space, action: jax.Array) -> tuple[Space, jax.Array]:
    """An action as a critic reads it: a Box as a vector, scaled if it has bounds."""
    if not isinstance(space, Box):
        return space, action
    if policies.squashable(space):
        return Box((space.size,)), policies.to_unit(space, action)
    batch = action.shape[: action.ndim - len(space.shape)]
    return Box((space.size,)), action.reshape(*batch, -1)


def _num_choices(space: Discrete | MultiDiscrete) -> int:
    return space.n if isinstance(space, Discrete) else sum(space.nvec)
