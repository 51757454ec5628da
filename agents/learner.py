"""The learner: a single-agent reinforcement learning algorithm as a NamedTuple of pure functions.

A learner knows nothing of other agents. A team `vmap`s it over agents, folds the agents that share
parameters into its batch, and hands it a critic input that may come from anywhere.

Axes: T time steps, B parallel environments; where parameters are shared by N agents these stand
folded last in the batch, so that B below is then (number of environments) * N. Argument order is
law: `key` first, `state` second, data, `hparams` last.

An *algorithm* is anything with the attributes `Config`, `Hparams` and `make` (a module will do):
`Config` a frozen dataclass of what changes shapes or control flow, `Hparams` a NamedTuple of
floats, all with defaults, and `make(config, observation_space, action_space, critic_space)`, which
returns a `Learner`. The optional mapping `BOUNDS` has (lowest, highest) values of hparams; those
not named there are finite and at least 0, and infinity is legal where it is the highest. The
optional attribute `CRITIC` says what its critic takes: "value" (the default) for state values, "q"
for action values of other agents' actions too, None for a learner without a critic of its own. An
algorithm whose critic may be held apart from its actors has `make_critic(config, critic_space)`,
which returns a `Critic`, and `critic_options(config, hparams)`, a dict of what that depends on; its
`make` then takes None for `critic_space`.

The optional function `bind(env, agent, config, hparams)` completes both for one agent of an
environment while a team is built, from files for instance, and returns what `make` and the
learner's functions then get: a config that hashes, and a NamedTuple of floats and `Given` arrays.
What an algorithm binds to an agent is that agent's own: it is never shared.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax

from marl.envs.spaces import SpaceTree


class ActInput(NamedTuple):
    """What an agent acts on."""

    obs: Any  # [B, ...] PyTree of the observation space
    action_mask: Any  # PyTree like the action, [B, n] bool per Discrete leaf; None without masks
    memory: Any  # [B, ...] of `initial_memory`; () for feed-forward networks
    reset: jax.Array  # [B] bool: the previous step ended the episode
    env_steps: Any = float("inf")  # [] environment steps taken; inf: schedules are at their end
    noise: Any = None  # [B, ...] of `draw`; None: draw it from the key
    active: Any = None  # [B] bool: who acts, the others keep their memory; None for everyone


class ActOutput(NamedTuple):
    """What acting gives back."""

    action: Any  # [B, ...] PyTree of the action space
    memory: Any  # [B, ...] for the next step
    extras: Any  # [B, ...] what `update` wants back of this step (log-probability, ...)


@dataclass(frozen=True)
class Given:
    """An hparam that is no float: arrays that `bind` found for an agent. Compares by `digest`.

    `init` gets the arrays in its place, and puts what the learner needs into the state; from then
    on `()` stands there.
    """

    arrays: Any = field(compare=False, repr=False)  # PyTree, not a single array
    digest: str
    origin: str = field(compare=False)  # where they come from, for people


class CriticSpace(NamedTuple):
    """What a critic reads: observations, and for Q-critics other agents' actions."""

    observations: SpaceTree
    context_actions: SpaceTree = ()


class Rollout(NamedTuple):
    """T steps of B environments.

    What a learner on replay takes are B windows of T steps, drawn at random. T is the learner's
    `window` and the n - 1 steps that n-step returns add. With a window of 1 only the first step is
    learned from.

    `critic_obs` and `final_critic_obs` may have a smaller batch than the rest, [T, B / N], when the
    N agents folded into it have one critic input and one reward: the critic then runs once.
    """

    obs: Any  # [T, B, ...]
    action: Any  # [T, B, ...]
    action_mask: Any  # [T, B, ...] the masks that were used, or None
    extras: Any  # [T, B, ...] of `ActOutput`
    memory: Any  # [B, ...] the memory before the first step
    reset: jax.Array  # [T, B] bool: the step before this one ended the episode
    critic_obs: Any  # [T, B, ...] or [T, B / N, ...]
    final_critic_obs: Any  # like critic_obs: of the state each transition led to
    final_obs: Any  # like obs: what each transition led to
    final_action_mask: Any  # like action_mask: what is legal there; None without masks
    context: Any  # [T, B, ...] other agents' actions, for Q-critics; () otherwise
    next_context: Any  # [T, B, ...] their next actions at final_critic_obs; () otherwise
    reward: jax.Array  # [T, B] float32
    terminated: jax.Array  # [T, B] bool
    truncated: jax.Array  # [T, B] bool
    weight: jax.Array  # [T, B] float32: 1 for steps the agent was active in, else 0
    advantage: Any  # None, or [T, B] to be used instead of the learner's own
    advantage_weight: jax.Array | None  # [T, B], multiplied in after normalisation; None for ones
    env_steps: jax.Array  # [] float32: environment steps taken before this rollout
    shuffle_key: jax.Array  # [] key of the minibatch permutation, equal for all agents of a batch
    critic_memory: Any = ()  # the critic's before the first step, with the batch of critic_obs


class InitFn(Protocol):
    def __call__(self, key: jax.Array, hparams: Any) -> Any:
        """A fresh state: parameters, optimiser states, statistics. No functions inside."""
        ...


class MemoryFn(Protocol):
    def __call__(self, batch_size: int) -> Any:
        """The memory of `batch_size` fresh episodes; () for feed-forward networks."""
        ...


class DrawFn(Protocol):
    def __call__(self, key: jax.Array, batch_size: int) -> Any:
        """The random numbers [B, ...] that `act` would draw from `key`."""
        ...


class NextMemoryFn(Protocol):
    def __call__(self, state: Any, experience: Rollout) -> Any:
        """The critic's memory after a rollout, where the next one begins.

        Critics are not asked while acting. So after an update the team asks for this, hands it back
        as `critic_memory` of the next rollout, and starts from `critic_memory` of the learner. The
        first `reset` of the next rollout says whether the episode goes on.
        """
        ...


class ActFn(Protocol):
    def __call__(self, key: jax.Array, state: Any, inputs: ActInput, hparams: Any) -> ActOutput:
        """Choose actions [B]. Never learns; statistics inside the state do not move."""
        ...


class UpdateFn(Protocol):
    def __call__(
        self, key: jax.Array, state: Any, experience: Any, hparams: Any
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Learn from `experience`; returns the next state and scalar metrics."""
        ...


class ValueFn(Protocol):
    def __call__(self, state: Any, critic_obs: Any) -> jax.Array:
        """State values [...] in the units of the return, for critic observations [..., D].

        Of a critic with memory: those of the first observations of episodes.
        """
        ...


class LogProbFn(Protocol):
    def __call__(self, state: Any, experience: Rollout) -> jax.Array:
        """Log-probability of the actions of a rollout under `state`, [T, B]."""
        ...


class QValuesFn(Protocol):
    def __call__(self, params: Any, obs: Any) -> jax.Array:
        """Differentiable values [..., n] of each action, for observations [..., *space]."""
        ...


class QUnrollFn(Protocol):
    def __call__(
        self, params: Any, obs: Any, memory: Any, reset: jax.Array, active: jax.Array
    ) -> tuple[jax.Array, Any]:
        """As `q_values`, of a network with memory, over T steps of B sequences.

        From observations [T, B, *space], the memory [B, ...] before the first step, and flags [T,
        B], of which those of `ActInput` are one step: values [T, B, n], and the memory [T, B, ...]
        after each step.
        """
        ...


class ApplyGradientsFn(Protocol):
    def __call__(self, state: Any, grads: Any, hparams: Any) -> Any:
        """One optimiser step with gradients that somebody else computed."""
        ...


class CheckFn(Protocol):
    def __call__(self, batch_shape: tuple[int, int]) -> None:
        """Raise UsageError where rollouts of (T, number of environments) cannot be learned from."""
        ...


class Learner(NamedTuple):
    """A single-agent learning algorithm bound to its spaces.

    `update` is composed of the functions below it, which a team may call instead; those a learner
    does not have are None.
    """

    init: InitFn
    initial_memory: MemoryFn
    act: ActFn  # explores
    act_greedy: ActFn  # the mode of the policy, for evaluation
    update: UpdateFn
    experience: str = "rollout"  # what `update` takes: "rollout", or "replay" samples
    window: int = 1  # on replay: steps that it learns from or remembers by; n-step returns add more
    value: ValueFn | None = None
    log_prob: LogProbFn | None = None
    q_values: QValuesFn | None = None
    q_unroll: QUnrollFn | None = None  # instead of `q_values`, of a network with memory
    apply_gradients: ApplyGradientsFn | None = None
    next_action: ActFn | None = None  # of the target policy, for other agents' Q-critics
    check: CheckFn | None = None
    draw: DrawFn | None = None  # lets a team draw for all steps of a rollout at once
    critic_memory: MemoryFn | None = None  # of a critic with memory
    next_critic_memory: NextMemoryFn | None = None


class CriticUpdateFn(Protocol):
    def __call__(
        self, state: Any, experience: Rollout, hparams: Any
    ) -> tuple[Any, jax.Array, dict[str, jax.Array]]:
        """Learn from `experience`, of which nothing of actors is read.

        Returns the next state, the advantages [T, B] under the state that came in, and metrics.
        """
        ...


class Critic(NamedTuple):
    """State values by themselves: a critic that a team holds, apart from actors."""

    init: InitFn
    value: ValueFn
    update: CriticUpdateFn


class Algorithm(Protocol):
    """What `marl.team` takes: a module or object that makes learners."""

    @property
    def Config(self) -> type: ...  # noqa: N802

    @property
    def Hparams(self) -> type: ...  # noqa: N802

    def make(
        self,
        config: Any,
        observation_space: SpaceTree,
        action_space: SpaceTree,
        critic_space: CriticSpace | None,
    ) -> Learner: ...
