"""What on-policy learners with an actor and a critic have in common.

Actor and critic have separate networks, optimisers and gradient clipping. With `shared_network`
they are one network with two heads, in all that follows the actor's: its last output is the
value. Statistics that normalise observations and values are frozen while acting and learning, and
move once after an update, so that the policy that learns is the policy that acted.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.agents import networks, policies, schedules, sequences, statistics
from marl.agents.learner import ActInput, ActOutput, CriticSpace, Rollout
from marl.agents.networks import Features, Network, NetworkSpec
from marl.agents.optimizer import NetworkState, make_optimizer, step_network
from marl.agents.policies import Policy
from marl.agents.statistics import RunningStatistics
from marl.agents.validation import one_of
from marl.envs import spaces
from marl.envs.errors import UsageError
from marl.envs.spaces import SpaceTree


class State(NamedTuple):
    """What the next step of one agent (or sharing set) needs."""

    actor: Any  # NetworkState of {"network": ..., "log_std": [num_scales]}; () in a critic alone
    critic: Any  # NetworkState; () when the team holds the critic, or it is in the actor's network
    obs_statistics: Any  # RunningStatistics [D] of the actor's input, or ()
    critic_obs_statistics: Any  # the same of the critic's input, where it has a network
    value_statistics: Any  # RunningStatistics [] of value targets, or ()


class Reader(NamedTuple):
    """How a network reads its observations."""

    features: Callable[[Any], Features]
    zeros: Features  # of a batch of one
    continuous: Any  # [D] bool: elements of the vector that may be normalised


class Parts(NamedTuple):
    """What a learner's `make` captures: static, never inside a state.

    A learner whose critic the team holds has no `critic_reader`; a critic by itself has no `policy`
    and no `actor_reader`. In a shared network `critic` is `actor`.
    """

    config: Any  # with the fields of `ppo.Config` that name networks and normalisation
    policy: Policy | None
    actor: Network | None
    critic: Network
    actor_reader: Reader | None
    critic_reader: Reader | None

    @property
    def shared(self) -> bool:
        """Whether actor and critic are one network."""
        return self.config.shared_network


def check_config(config: Any) -> None:
    """Raise UsageError where a field that names a network, policy or schedule is not valid."""
    networks.check_config(config)
    sequences.check_config(config)
    one_of("box_policy", config.box_policy, policies.BOX_POLICIES)
    one_of("learning_rate_schedule", config.learning_rate_schedule, schedules.KINDS)
    one_of("entropy_schedule", config.entropy_schedule, schedules.KINDS)
    if config.shared_network and config.critic_hidden_sizes:
        raise UsageError(
            f"critic_hidden_sizes = {config.critic_hidden_sizes} sizes a critic's network, and "
            "with shared_network = True it is the actor's; give hidden_sizes alone, or leave "
            "shared_network off"
        )


def make_parts(
    config: Any,
    observation_space: SpaceTree | None,
    action_space: SpaceTree | None,
    critic_space: CriticSpace | None,
) -> Parts:
    """Networks for one agent's spaces; without its own spaces, those of a critic alone.

    Raises:
      UsageError: where a shared network would have to read something else for its value, or the
        team holds the critic.
    """
    if config.shared_network:
        _check_shared(observation_space, critic_space)

    def network(hidden_sizes: tuple[int, ...], num_outputs: int, scale: float) -> Network:
        spec = NetworkSpec(hidden_sizes, config.activation, config.torso, num_outputs, scale)
        spec = spec._replace(value_head=config.shared_network, head_sizes=config.head_sizes)
        return networks.make_network(spec._replace(core=config.core, core_size=config.core_size))

    def reader(space: SpaceTree) -> Reader:
        return Reader(
            features=partial(networks.features, space, image_encoder=config.image_encoder),
            zeros=networks.zero_features(space, config.image_encoder),
            continuous=networks.continuous_mask(space, config.image_encoder),
        )

    policy = None if action_space is None else Policy(action_space, config.box_policy)
    actor = None if policy is None else network(config.hidden_sizes, policy.num_outputs, 0.01)
    shared = actor if config.shared_network else None
    return Parts(
        config=config,
        policy=policy,
        actor=actor,
        critic=shared or network(config.critic_hidden_sizes or config.hidden_sizes, 1, 1.0),
        actor_reader=None if observation_space is None else reader(observation_space),
        critic_reader=None if critic_space is None else reader(critic_space.observations),
    )


def _check_shared(observation_space: SpaceTree | None, critic_space: CriticSpace | None) -> None:
    if critic_space is None or observation_space is None:
        raise UsageError(
            "with shared_network = True the critic is a part of the actor's network, which nobody "
            "else can hold; leave sharing.critic away, or shared_network off"
        )
    if spaces.leaves(critic_space.observations) != spaces.leaves(observation_space):
        raise UsageError(
            "with shared_network = True the critic reads what the actor reads, its own "
            "observation; leave critic at 'self', or shared_network off"
        )


def init(parts: Parts, key: jax.Array, hparams: Any) -> State:
    """A fresh state of the networks that there are."""
    key_actor, key_critic = jax.random.split(key)
    config, optimizer = parts.config, make_optimizer(hparams, hparams.learning_rate)
    actor: Any = ()
    if parts.actor is not None and parts.actor_reader is not None and parts.policy is not None:
        params = {
            "network": parts.actor.init(key_actor, parts.actor_reader.zeros),
            "log_std": jnp.full((parts.policy.num_scales,), jnp.log(hparams.initial_std)),
        }
        actor = NetworkState(params, optimizer.init(params))
    critic: Any = ()
    if parts.critic_reader is not None and not parts.shared:
        params = parts.critic.init(key_critic, parts.critic_reader.zeros)
        critic = NetworkState(params, optimizer.init(params))

    def fresh(reader: Reader | None) -> Any:
        if reader is None or not config.normalize_observations:
            return ()
        return statistics.init(reader.zeros.vector.shape[-1:])

    return State(
        actor=actor,
        critic=critic,
        obs_statistics=fresh(parts.actor_reader),
        critic_obs_statistics=() if parts.shared else fresh(parts.critic_reader),
        value_statistics=statistics.init()
        if config.value_normalization != "none" and parts.critic_reader is not None
        else (),
    )


# of a config and of hparams: what only the actor reads; a critic's learning rate is scaled
_ACTORS_OWN = {
    "box_policy",
    "clip_epsilon",
    "critic_learning_rate_scale",
    "entropy_coef",
    "entropy_coef_end",
    "entropy_schedule",
    "hidden_sizes",
    "initial_std",
    "learning_rate",
    "learning_rate_end",
    "normalize_advantages",
}


def critic_options(config: Any, hparams: Any) -> dict[str, Any]:
    """What a critic depends on, by name; agents that share one apart from actors agree in it."""
    options = dataclasses.asdict(config) | hparams._asdict()
    scale = hparams.critic_learning_rate_scale
    options = {name: value for name, value in options.items() if name not in _ACTORS_OWN}
    return options | {
        "critic_hidden_sizes": config.critic_hidden_sizes or config.hidden_sizes,
        "learning_rate * critic_learning_rate_scale": hparams.learning_rate * scale,
        "learning_rate_end * critic_learning_rate_scale": hparams.learning_rate_end * scale,
    }


def initial_memory(parts: Parts, batch_size: int) -> Any:
    """The actor's memory of fresh episodes."""
    assert parts.actor is not None
    return parts.actor.initial_memory(batch_size)


def draw(parts: Parts, key: jax.Array, batch_size: int) -> tuple[jax.Array, ...]:
    """The random numbers [B, ...] that `act` takes."""
    assert parts.policy is not None
    return parts.policy.draw(key, (batch_size,))


def act(parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Any) -> ActOutput:
    """Sample actions [B]; extras carry the log-probability and the samples before squashing.

    Those of a shared network also its value, and the memory after the step.
    """
    del hparams
    assert parts.policy is not None
    outputs, value, memory = _act_outputs(parts, state, inputs)
    noise = draw(parts, key, inputs.reset.shape[0]) if inputs.noise is None else inputs.noise
    drawn = parts.policy.sample_from(noise, *outputs, inputs.action_mask)
    extras = {"log_prob": drawn.log_prob, "raw": drawn.raw}
    extras |= {"value": value, "memory": memory} if parts.shared else {}
    return ActOutput(action=drawn.action, memory=memory, extras=extras)


def act_greedy(
    parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Any
) -> ActOutput:
    """The mode of the policy."""
    del key, hparams
    assert parts.policy is not None
    outputs, _, memory = _act_outputs(parts, state, inputs)
    action = parts.policy.mode(*outputs, inputs.action_mask)
    return ActOutput(action=action, memory=memory, extras=())


def _act_outputs(
    parts: Parts, state: State, inputs: ActInput
) -> tuple[tuple[jax.Array, jax.Array], Any, Any]:
    """What `Policy` takes, the value [B] of a shared network or None, the memory after the step."""
    assert parts.actor is not None
    params, features = state.actor.params, actor_features(parts, state, inputs.obs)
    outputs, memory = sequences.act(parts.actor, params["network"], features, inputs)
    outputs, value = _heads(parts, outputs)
    return (outputs, params["log_std"]), value, memory


def _heads(parts: Parts, outputs: jax.Array) -> tuple[jax.Array, Any]:
    """Of the actor's network: what is the policy's, and of a shared one the value [...] or None."""
    return (outputs[..., :-1], outputs[..., -1]) if parts.shared else (outputs, None)


def log_prob(parts: Parts, state: State, experience: Rollout) -> jax.Array:
    """Log-probability [T, B] of the rollout's actions under `state`."""
    assert parts.policy is not None
    features = actor_features(parts, state, experience.obs)
    steps = actor_steps(parts, experience)
    outputs, _ = policy_outputs(parts, state.actor.params, features, steps)
    return parts.policy.log_prob(
        *outputs, experience.action_mask, experience.action, experience.extras["raw"]
    )


def actor_steps(parts: Parts, rollout: Rollout) -> Any:
    """What the actor needs of a rollout beside features: `sequences.Steps`, or ()."""
    assert parts.actor is not None
    return sequences.whole(parts.actor, rollout.memory, rollout.reset, rollout.weight)


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
    assert parts.actor_reader is not None
    return _normalise(parts.actor_reader, state.obs_statistics, obs)


def critic_features(parts: Parts, state: State, critic_obs: Any) -> Features:
    """The critic's input, normalised."""
    assert parts.critic_reader is not None, "the team holds this learner's critic"
    stats = state.obs_statistics if parts.shared else state.critic_obs_statistics
    return _normalise(parts.critic_reader, stats, critic_obs)


def policy_outputs(
    parts: Parts, params: Any, features: Features, steps: Any
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """What `Policy` takes: the network's outputs and log_std; `steps` of `sequences`.

    Beside it the values [...] of a shared network, in units of its output, else None.
    """
    assert parts.actor is not None
    outputs, _ = sequences.run(parts.actor, params["network"], features, steps)
    outputs, value = _heads(parts, outputs)
    return (outputs, params["log_std"]), value


def critic_output(parts: Parts, params: Any, features: Features, steps: Any) -> jax.Array:
    """Values [...] in units of the critic's output, by `critic_params`; `steps` of `sequences`."""
    return sequences.run(parts.critic, params, features, steps)[0][..., -1]


def critic_params(parts: Parts, state: State) -> Any:
    """Parameters of the network that gives values."""
    return state.actor.params["network"] if parts.shared else state.critic.params


def _normalise(reader: Reader, stats: Any, obs: Any) -> Features:
    features = reader.features(obs)
    if not isinstance(stats, RunningStatistics):
        return features
    normal = jnp.clip(statistics.normalise(stats, features.vector), -10.0, 10.0)
    return features._replace(vector=jnp.where(reader.continuous, normal, features.vector))
