"""What learners of action values have in common: networks, epsilon-greedy acting, the loss.

They take one Discrete action and act on the largest Q among the actions that are legal; where a
mask allows none, all count.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from marl.agents import losses, networks, schedules, sequences
from marl.agents.learner import ActInput, ActOutput
from marl.agents.networks import Features, Network, NetworkSpec
from marl.agents.optimizer import NetworkState, make_optimizer, step_network
from marl.agents.validation import one_of
from marl.envs import spaces
from marl.envs.errors import UsageError
from marl.envs.spaces import Box, Discrete, SpaceTree


class State(NamedTuple):
    """What the next step of one agent (or sharing set) needs."""

    network: NetworkState  # the online network
    target_params: Any  # like network.params, or () without a target network
    steps: Any  # [] int32 gradient steps taken, or () without a target network


class Parts(NamedTuple):
    """What a learner's `make` captures: static, never inside a state."""

    config: Any  # with the fields of `dqn.Config` that name networks and schedules
    action_space: SpaceTree  # a PyTree of one Discrete
    network: Network
    features: Callable[[Any], Features]
    zeros: Features  # of a batch of one


class Samples(NamedTuple):
    """What a gradient step learns from: M steps, or with memory M sequences [L, M, ...]."""

    features: Features  # [M, ...]
    action: jax.Array  # [M] int
    target: jax.Array  # [M] what the Q of `action` should be
    weight: jax.Array  # [M]
    steps: Any = ()  # `sequences.Steps`, or ()


class Memories(NamedTuple):
    """What networks remember after each step, [T, B, ...]; () without memory, or the network."""

    online: Any
    target: Any


# names of the metrics of `gradients`
METRICS = ("loss", "q_mean", "td_error", "grad_norm")


def check_config(config: Any) -> None:
    """Raise UsageError where a field that names a network or schedule is not valid."""
    networks.check_config(config)
    one_of("learning_rate_schedule", config.learning_rate_schedule, schedules.KINDS)


def make_parts(
    name: str,
    config: Any,
    observation_space: SpaceTree,
    action_space: SpaceTree,
    core: str = "none",
    core_size: int = 0,
) -> Parts:
    """The network of the learner called `name`; raises UsageError for other than one Discrete."""
    found = spaces.leaves(action_space)
    if len(found) != 1 or not isinstance(found[0], Discrete):
        boxes = bool(found) and all(isinstance(leaf, Box) for leaf in found)
        raise UsageError(
            f"learner {name!r} takes one Discrete action, and the action space is "
            f"{spaces.describe(action_space)}; use {'ppo or sac' if boxes else 'ppo'}"
        )
    spec = NetworkSpec(
        config.hidden_sizes,
        config.activation,
        config.torso,
        num_outputs=found[0].n,
        dueling=config.dueling,
        core=core,
        core_size=core_size,
    )
    return Parts(
        config=config,
        action_space=action_space,
        network=networks.make_network(spec),
        features=partial(networks.features, observation_space, image_encoder=config.image_encoder),
        zeros=networks.zero_features(observation_space, config.image_encoder),
    )


def init_network(parts: Parts, key: jax.Array, hparams: Any) -> NetworkState:
    """A fresh network with its optimiser."""
    params = parts.network.init(key, parts.zeros)
    optimizer = make_optimizer(hparams, hparams.learning_rate)
    return NetworkState(params, optimizer.init(params))


def draw(parts: Parts, key: jax.Array, batch_size: int) -> jax.Array:
    """The random numbers [B, 1 + n] of `act`: whether to explore, and where to."""
    (choice,) = spaces.leaves(parts.action_space)
    assert isinstance(choice, Discrete)
    return jax.random.uniform(key, (batch_size, 1 + choice.n))


def act(parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Any) -> ActOutput:
    """Epsilon-greedy actions [B]: with probability epsilon, uniform over the legal ones."""
    q, memory = _act_values(parts, state, inputs)
    mask = leaf(parts, inputs.action_mask)
    noise = draw(parts, key, q.shape[0]) if inputs.noise is None else inputs.noise
    explore = noise[..., 0] < epsilon(hparams, inputs.env_steps)
    # the argmax of noise is a uniform draw, and `greedy_action` knows what is legal
    random = greedy_action(noise[..., 1:], mask)
    return _acted(parts, memory, jnp.where(explore, random, greedy_action(q, mask)))


def act_greedy(
    parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Any
) -> ActOutput:
    """The legal actions [B] of the largest Q."""
    del key, hparams
    q, memory = _act_values(parts, state, inputs)
    return _acted(parts, memory, greedy_action(q, leaf(parts, inputs.action_mask)))


def _act_values(parts: Parts, state: State, inputs: ActInput) -> tuple[jax.Array, Any]:
    """Values [B, n] of each action, and the memory after the step."""
    features = parts.features(inputs.obs)
    return sequences.act(parts.network, state.network.params, features, inputs)


def _acted(parts: Parts, memory: Any, action: jax.Array) -> ActOutput:
    action = spaces.map_spaces(lambda space: action.astype(space.dtype), parts.action_space)
    return ActOutput(action=action, memory=memory, extras=())


def epsilon(hparams: Any, env_steps: jax.Array) -> jax.Array:
    """[] the probability of a random action after `env_steps`; inf: the schedule is at its end."""
    horizon = hparams.exploration_fraction * hparams.schedule_steps
    start, end = hparams.epsilon_start, hparams.epsilon_end
    return schedules.schedule("linear", start, end, horizon, env_steps)


def q_values(parts: Parts, params: Any, obs: Any) -> jax.Array:
    """Values [..., n] of each action, for observations [..., *space]."""
    return parts.network.apply(params, parts.features(obs))


def q_unroll(
    parts: Parts, params: Any, obs: Any, memory: Any, reset: jax.Array, active: jax.Array
) -> tuple[jax.Array, Any]:
    """Values [T, B, n] and memories [T, B, ...] of a network with memory (see `QUnrollFn`)."""
    return parts.network.unroll(params, parts.features(obs), memory, reset, active)


def leaf(parts: Parts, tree: Any) -> Any:
    """The one array of an action or of a mask; None without masks."""
    if tree is None:
        return None
    return jax.tree.structure(parts.action_space, is_leaf=spaces.is_space).flatten_up_to(tree)[0]


def chosen(q: jax.Array, action: jax.Array) -> jax.Array:
    """The values [...] in q [..., n] of the actions [...] taken; 0 for what is no action."""
    taken = action[..., None] == jnp.arange(q.shape[-1])  # no gather, whose gradient scatters
    return jnp.sum(jnp.where(taken, q, 0.0), -1)


def greedy_action(q: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The legal actions [...] of the largest values in q [..., n]; `mask` is like q, or None."""
    return jnp.argmax(_legal(q, mask), -1)


def greedy_value(q: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The largest values [...] of legal actions in q [..., n]; `mask` is like q, or None."""
    legal = _legal(q, mask)
    return reduce(jnp.maximum, [legal[..., i] for i in range(q.shape[-1])])


def _legal(q: jax.Array, mask: jax.Array | None) -> jax.Array:
    if mask is None:
        return q
    mask = mask.astype(bool)
    return jnp.where(mask | ~jnp.any(mask, -1, keepdims=True), q, -jnp.inf)


def gradients(parts: Parts, params: Any, samples: Samples) -> tuple[Any, dict[str, jax.Array]]:
    """Gradients of half the weighted mean squared error, and `METRICS`."""
    grads, metrics = jax.grad(_loss, argnums=1, has_aux=True)(parts, params, samples)
    return grads, metrics | {"grad_norm": optax.tree.norm(grads)}


def _loss(parts: Parts, params: Any, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
    weight = samples.weight
    q, _ = sequences.run(parts.network, params, samples.features, samples.steps)
    estimate = chosen(q, samples.action)
    error = jnp.where(weight > 0, estimate - samples.target, 0.0)
    loss = losses.weighted_mean(0.5 * jnp.square(error), weight)
    metrics = {
        "loss": loss,
        "q_mean": losses.weighted_mean(estimate, weight),
        "td_error": losses.weighted_mean(jnp.abs(error), weight),
    }
    return loss, metrics


def learning_rate(config: Any, hparams: Any, env_steps: jax.Array) -> jax.Array:
    """[] the learning rate after `env_steps`."""
    start, end = hparams.learning_rate, hparams.learning_rate_end
    kind = config.learning_rate_schedule
    return schedules.schedule(kind, start, end, hparams.schedule_steps, env_steps)


def apply_gradients(
    state: State, grads: Any, hparams: Any, learning_rate: jax.Array | None = None
) -> State:
    """One optimiser step of the online network.

    `grads` are like `state.network.params`; `learning_rate` [] comes from a schedule, None for the
    hparam.
    """
    rate = hparams.learning_rate if learning_rate is None else learning_rate
    return state._replace(network=step_network(state.network, grads, hparams, rate))
