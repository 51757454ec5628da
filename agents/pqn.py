"""Parallelised Q-networks (Gallici et al. 2024, arXiv:2407.04811): Q-learning on rollouts.

Many environments and layer normalisation stand in for a replay buffer and a target network. The
targets are Q(lambda) returns, computed once per rollout. Adam steps where the authors use RAdam.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.agents import losses, minibatches, q_learning, returns, sequences
from marl.agents.learner import CriticSpace, Learner, Rollout
from marl.agents.q_learning import METRICS, Parts, Samples, State
from marl.agents.validation import at_least
from marl.envs.spaces import SpaceTree

CRITIC = None  # no critic of its own


@dataclass(frozen=True)
class Config:
    """What changes shapes or control flow."""

    num_epochs: int = 4
    num_minibatches: int = 4
    dueling: bool = False
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "relu"
    torso: str = "mlp_norm"  # without a target network it is the layer norm that keeps Q stable
    image_encoder: str = "cnn"
    core: str = "none"  # memory, after the torso: "gru" or "lstm"
    core_size: int = 64
    sequence_length: int = 0  # steps that gradients flow back through; 0: the whole rollout
    burn_in: int = 0  # steps before a sequence that refresh its memory, without gradients
    learning_rate_schedule: str = "constant"

    def __post_init__(self):
        at_least("num_epochs", self.num_epochs, 1)
        at_least("num_minibatches", self.num_minibatches, 1)
        q_learning.check_config(self)
        sequences.check_config(self)


class Hparams(NamedTuple):
    """Floats, each of which may differ per agent and never recompiles anything."""

    learning_rate: Any = 2.5e-4
    learning_rate_end: Any = 0.0  # where a schedule ends
    schedule_steps: Any = 0.0  # horizon of schedules in environment steps; 0: the run's total
    gamma: Any = 0.99
    q_lambda: Any = 0.65  # 0: one-step targets, 1: sums of rewards up to the rollout's end
    epsilon_start: Any = 1.0
    epsilon_end: Any = 0.05
    exploration_fraction: Any = 0.2  # share of `schedule_steps` after which epsilon is at its end
    max_grad_norm: Any = 10.0  # inf: off
    adam_epsilon: Any = 1e-5


# (lowest, highest) value of an hparam; those not named here must be >= 0 and finite
BOUNDS = {
    "gamma": (0.0, 1.0),
    "q_lambda": (0.0, 1.0),
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
    """PQN for any PyTree of observations and one Discrete action.

    Args:
      config: static choices.
      observation_space, action_space: the agent's own.
      critic_space: not read, as there is no critic.

    Raises:
      UsageError: for any other action space.
    """
    del critic_space
    given = observation_space, action_space, config.core, config.core_size
    parts = q_learning.make_parts("pqn", config, *given)
    recurrent = sequences.is_recurrent(parts.network)
    return Learner(
        init=partial(init, parts),
        initial_memory=parts.network.initial_memory,
        draw=partial(q_learning.draw, parts),
        act=partial(q_learning.act, parts),
        act_greedy=partial(q_learning.act_greedy, parts),
        update=partial(update, parts),
        experience="rollout",
        q_values=None if recurrent else partial(q_learning.q_values, parts),
        q_unroll=partial(q_learning.q_unroll, parts) if recurrent else None,
        apply_gradients=q_learning.apply_gradients,
        check=partial(sequences.check_minibatches, config),
    )


def init(parts: Parts, key: jax.Array, hparams: Hparams) -> State:
    """A fresh state."""
    return State(q_learning.init_network(parts, key, hparams), target_params=(), steps=())


def update(
    parts: Parts, key: jax.Array, state: State, experience: Rollout, hparams: Hparams
) -> tuple[State, dict[str, jax.Array]]:
    """`num_epochs` passes over the rollout in minibatches."""
    del key  # the order of samples comes from `experience.shuffle_key`
    config, weight = parts.config, experience.weight
    rate = q_learning.learning_rate(config, hparams, experience.env_steps)
    features = losses.live(parts.features(experience.obs), weight)
    steps = sequences.whole(parts.network, experience.memory, experience.reset, weight)
    memories = sequences.memories_of(parts.network, state.network.params, features, steps)
    samples = Samples(
        features=features,
        action=q_learning.leaf(parts, experience.action),
        target=targets(parts, state, experience, memories, hparams),
        weight=weight,
        steps=steps,
    )
    samples = sequences.samples(samples, memories, config)
    size = samples.weight.shape[-1]
    orders = minibatches.permutations(experience.shuffle_key, config.num_epochs, size)
    indices = orders.reshape(config.num_epochs * config.num_minibatches, -1)
    step = partial(_minibatch_step, parts, hparams, rate, samples)
    state, rows = jax.lax.scan(step, state, indices)
    metrics = dict(zip(METRICS, jnp.mean(rows, 0), strict=True))
    metrics["learning_rate"] = rate
    metrics["epsilon"] = q_learning.epsilon(hparams, experience.env_steps)
    return state, metrics


def targets(
    parts: Parts, state: State, experience: Rollout, memories: Any, hparams: Hparams
) -> jax.Array:
    """Targets [T, B], from one pass over what all transitions led to.

    With memory, each is read with that of `memories` [T, B, ...] which its step left.
    """
    params, features = state.network.params, parts.features(experience.final_obs)
    q = sequences.run_apart(parts.network, params, features, memories)
    mask = q_learning.leaf(parts, experience.final_action_mask)
    return returns.q_lambda(
        experience.reward,
        q_learning.greedy_value(q, mask),
        experience.terminated,
        experience.truncated,
        hparams.gamma,
        hparams.q_lambda,
    )


def _minibatch_step(
    parts: Parts,
    hparams: Hparams,
    rate: jax.Array,
    samples: Samples,
    state: State,
    indices: jax.Array,
) -> tuple[State, jax.Array]:
    """One gradient step; the body of the scan. Metrics are in the order of `METRICS`."""
    batch = sequences.select(samples, indices)
    grads, metrics = q_learning.gradients(parts, state.network.params, batch)
    state = q_learning.apply_gradients(state, grads, hparams, rate)
    # one vector leaves the scan, not one array per metric: fewer kernels to compile
    return state, jnp.stack([metrics[name] for name in METRICS])
