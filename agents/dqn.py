"""Deep Q-networks (Mnih et al. 2015, doi:10.1038/nature14236) on replay, with n-step targets.

Double Q-learning (van Hasselt et al. 2016, arXiv:1509.06461) and dueling networks (Wang et al.
2016, arXiv:1511.06581) are config. Errors are squared, and gradients clipped by their norm, where
Mnih et al. clip each error.

With memory windows are sequences (R2D2, Kapturowski et al. 2019, "Recurrent experience replay in
distributed reinforcement learning"): from the memory that replay holds of the first step both
networks run through `burn_in` steps, and the `sequence_length` steps after them are learned from.
Windows are drawn uniformly and values are not rescaled, where R2D2 has priorities and rescales.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from marl.agents import losses, q_learning, returns, sequences
from marl.agents.learner import ActInput, ActOutput, CriticSpace, Learner, Rollout
from marl.agents.q_learning import Memories, Parts, Samples, State
from marl.agents.validation import at_least
from marl.envs.spaces import SpaceTree

CRITIC = None  # no critic of its own


@dataclass(frozen=True)
class Config:
    """What changes shapes or control flow."""

    double: bool = True  # the online network chooses the action whose target value bootstraps
    dueling: bool = False
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "relu"
    torso: str = "mlp"
    image_encoder: str = "cnn"
    core: str = "none"  # memory, after the torso: "gru" or "lstm"
    core_size: int = 64
    sequence_length: int = 0  # with memory: steps of a window that are learned from
    burn_in: int = 0  # steps of a window before them, without gradients
    target_update_interval: int = 1  # gradient steps between two moves of the target network
    learning_rate_schedule: str = "constant"

    def __post_init__(self):
        at_least("target_update_interval", self.target_update_interval, 1)
        q_learning.check_config(self)
        sequences.check_windows(self)


class Hparams(NamedTuple):
    """Floats, each of which may differ per agent and never recompiles anything."""

    learning_rate: Any = 2.5e-4
    learning_rate_end: Any = 0.0  # where a schedule ends
    schedule_steps: Any = 0.0  # horizon of schedules in environment steps; 0: the run's total
    gamma: Any = 0.99
    tau: Any = 0.005  # share of the online network in each move of the target network
    epsilon_start: Any = 1.0
    epsilon_end: Any = 0.05
    exploration_fraction: Any = 0.5  # share of `schedule_steps` after which epsilon is at its end
    max_grad_norm: Any = 10.0  # inf: off
    adam_epsilon: Any = 1e-5


# (lowest, highest) value of an hparam; those not named here must be >= 0 and finite
BOUNDS = {
    "gamma": (0.0, 1.0),
    "tau": (0.0, 1.0),
    "epsilon_start": (0.0, 1.0),
    "epsilon_end": (0.0, 1.0),
    "exploration_fraction": (0.0, 1.0),
    "max_grad_norm": (1e-6, float("inf")),
    "adam_epsilon": (1e-12, 1.0),
}


def make(
    config: Config,
    observation_space: SpaceTree,
    action_space: SpaceTree,
    critic_space: CriticSpace | None,
) -> Learner:
    """DQN for any PyTree of observations and one Discrete action.

    Args:
      config: static choices.
      observation_space, action_space: the agent's own.
      critic_space: not read, as there is no critic.

    Raises:
      UsageError: for any other action space.
    """
    del critic_space
    given = observation_space, action_space, config.core, config.core_size
    parts = q_learning.make_parts("dqn", config, *given)
    recurrent = sequences.is_recurrent(parts.network)
    return Learner(
        init=partial(init, parts),
        initial_memory=parts.network.initial_memory,
        draw=partial(q_learning.draw, parts),
        act=partial(q_learning.act, parts),
        act_greedy=partial(q_learning.act_greedy, parts),
        update=partial(update, parts),
        experience="replay",
        window=config.burn_in + config.sequence_length if recurrent else 1,
        q_values=None if recurrent else partial(q_learning.q_values, parts),
        q_unroll=partial(q_learning.q_unroll, parts) if recurrent else None,
        apply_gradients=partial(apply_gradients, config),
        next_action=partial(next_action, parts),
    )


def init(parts: Parts, key: jax.Array, hparams: Hparams) -> State:
    """A fresh state, whose target network is a copy of the online one."""
    network = q_learning.init_network(parts, key, hparams)
    # copies, as a buffer that stands twice in a state could not be donated
    target_params = jax.tree.map(jnp.copy, network.params)
    return State(network=network, target_params=target_params, steps=jnp.zeros((), jnp.int32))


def next_action(
    parts: Parts, key: jax.Array, state: State, inputs: ActInput, hparams: Hparams
) -> ActOutput:
    """The legal actions [B] of the largest Q of the target network."""
    target = state.network._replace(params=state.target_params)
    return q_learning.act_greedy(parts, key, state._replace(network=target), inputs, hparams)


def update(
    parts: Parts, key: jax.Array, state: State, experience: Rollout, hparams: Hparams
) -> tuple[State, dict[str, jax.Array]]:
    """One gradient step on the first steps of B windows, or with memory on sequences of them."""
    del key
    learned = sequences_of if sequences.is_recurrent(parts.network) else first_steps
    samples = learned(parts, state, experience, hparams.gamma)
    grads, metrics = q_learning.gradients(parts, state.network.params, samples)
    rate = q_learning.learning_rate(parts.config, hparams, experience.env_steps)
    metrics["learning_rate"] = rate
    metrics["epsilon"] = q_learning.epsilon(hparams, experience.env_steps)
    return apply_gradients(parts.config, state, grads, hparams, rate), metrics


def first_steps(parts: Parts, state: State, experience: Rollout, gamma: jax.Array) -> Samples:
    """The first steps [B] of windows."""
    return Samples(
        features=losses.live(parts.features(_at(experience.obs, 0)), experience.weight[0]),
        action=q_learning.leaf(parts, experience.action)[0],
        target=targets(parts, state, experience, gamma),
        weight=experience.weight[0],
    )


def targets(parts: Parts, state: State, experience: Rollout, gamma: jax.Array) -> jax.Array:
    """Targets [B] of the windows' first steps, from the state each window's return ends in."""
    total, discount, last = returns.n_step(
        experience.reward, experience.terminated, experience.truncated, gamma
    )
    final_obs, mask = (_at(x, last) for x in (experience.final_obs, experience.final_action_mask))
    value = _following(parts, state, final_obs, mask, Memories((), ()))
    # `where`: what lies behind an end is never read, not even if it is NaN
    return total + jnp.where(discount > 0, discount * value, 0.0)


def _following(
    parts: Parts, state: State, final_obs: Any, final_mask: Any, memories: Memories
) -> jax.Array:
    """[...]: values of the greedy actions where steps led to, with the memory that these left."""
    mask = q_learning.leaf(parts, final_mask)
    value = partial(sequences.run_apart, parts.network, features=parts.features(final_obs))
    target = value(state.target_params, memories=memories.target)
    if not parts.config.double:
        return q_learning.greedy_value(target, mask)
    online = value(state.network.params, memories=memories.online)
    return q_learning.chosen(target, q_learning.greedy_action(online, mask))


def sequences_of(parts: Parts, state: State, experience: Rollout, gamma: jax.Array) -> Samples:
    """The sequences [L, B] of windows, from the memory that burn-in leaves.

    Both networks start from the memory that acting had before the window.
    """
    first, weight = parts.config.burn_in, experience.weight
    features = losses.live(parts.features(experience.obs), weight)
    steps = sequences.whole(parts.network, experience.memory, experience.reset, weight)
    memories = Memories(
        *(
            sequences.memories_of(parts.network, params, features, steps)
            for params in (state.network.params, state.target_params)
        )
    )
    own = slice(first, first + parts.config.sequence_length)
    burned_in = jax.tree.map(lambda m: m[:first], memories.online)
    return Samples(
        features=jax.tree.map(lambda x: x[own], features),
        action=q_learning.leaf(parts, experience.action)[own],
        target=sequence_targets(parts, state, experience, memories, gamma),
        weight=weight[own],
        steps=sequences.Steps(
            memory=sequences.last(burned_in) if first else steps.memory,
            reset=experience.reset[own],
            active=steps.active[own],
        ),
    )


def sequence_targets(
    parts: Parts, state: State, experience: Rollout, memories: Memories, gamma: jax.Array
) -> jax.Array:
    """Targets [L, B] of the steps of sequences, each a return of n steps.

    The n - 1 steps of a window behind its sequence are only there for the last of these.
    """
    first, length = parts.config.burn_in, parts.config.sequence_length
    rest = experience.final_obs, experience.final_action_mask, memories
    value = _following(parts, state, *jax.tree.map(lambda x: x[first:], rest))
    flags = experience.reward, experience.terminated, experience.truncated
    reward, terminated, truncated = (x[first:] for x in flags)
    return returns.n_steps(reward, value, terminated, truncated, gamma, length)


def apply_gradients(
    config: Config,
    state: State,
    grads: Any,
    hparams: Hparams,
    learning_rate: jax.Array | None = None,
) -> State:
    """One optimiser step of the online network, which the target network follows when it is time.

    Every `target_update_interval` steps the target moves by `tau` towards the online network.
    """
    state = q_learning.apply_gradients(state, grads, hparams, learning_rate)
    steps = state.steps + 1
    moved = optax.incremental_update(state.network.params, state.target_params, hparams.tau)
    if config.target_update_interval > 1:
        now = steps % config.target_update_interval == 0
        moved = jax.tree.map(partial(jnp.where, now), moved, state.target_params)
    return state._replace(target_params=moved, steps=steps)


def _at(tree: Any, step: Any) -> Any:
    """[T, B, ...] to [B, ...]: one step for all windows, or `step` [B] of each."""
    return jax.tree.map(lambda x: x[step] if isinstance(step, int) else _pick(x, step), tree)


def _pick(x: jax.Array, step: jax.Array) -> jax.Array:
    return x[0] if x.shape[0] == 1 else x[step, jnp.arange(x.shape[1])]
