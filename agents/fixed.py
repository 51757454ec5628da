"""Policies that never learn: `random`, `noop`, and `scripted`, around a function of one's own.

They are learners whose state is empty and whose update is the identity, so that they take part in
teams as any other: as opponents, as baselines, as agents that stand still.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.agents.learner import ActInput, ActOutput, CriticSpace, Learner, Rollout
from marl.agents.policies import Policy
from marl.envs import spaces
from marl.envs.errors import UsageError
from marl.envs.spaces import Box, SpaceTree

# (action space, key, inputs) -> actions [B, ...]
Choose = Callable[[SpaceTree, jax.Array, ActInput], Any]


@dataclass(frozen=True)
class NoConfig:
    """There is nothing to choose."""


class NoHparams(NamedTuple):
    """There are no floats."""


@dataclass(frozen=True)
class Fixed:
    """An algorithm that acts by `choose`; it compares by value, as compiled programs are kept."""

    name: str
    choose: Choose

    Config = NoConfig
    Hparams = NoHparams
    CRITIC = None  # no critic of its own

    @property
    def __name__(self) -> str:
        return self.name

    def make(
        self,
        config: NoConfig,
        observation_space: SpaceTree,
        action_space: SpaceTree,
        critic_space: CriticSpace | None,
    ) -> Learner:
        """The policy for any action space; nothing else is read."""
        del config, observation_space, critic_space
        draw = partial(act, self.choose, action_space)
        return Learner(
            init=init,
            initial_memory=initial_memory,
            act=draw,
            act_greedy=draw,  # a uniform policy has no mode, and a function is taken at its word
            update=update,
            experience="rollout",
            next_action=draw,
        )


def init(key: jax.Array, hparams: NoHparams) -> tuple[()]:
    """A fixed policy remembers nothing."""
    del key, hparams
    return ()


def initial_memory(batch_size: int) -> Any:
    """A fixed policy remembers nothing."""
    del batch_size
    return ()


def act(
    choose: Choose,
    action_space: SpaceTree,
    key: jax.Array,
    state: tuple[()],
    inputs: ActInput,
    hparams: NoHparams,
) -> ActOutput:
    """What the policy chooses, [B, ...]."""
    del state, hparams
    return ActOutput(choose(action_space, key, inputs), memory=inputs.memory, extras=())


def update(
    key: jax.Array, state: tuple[()], experience: Rollout, hparams: NoHparams
) -> tuple[tuple[()], dict[str, jax.Array]]:
    """Nothing is learned."""
    del key, experience, hparams
    return state, {}


def _choose_random(space: SpaceTree, key: jax.Array, inputs: ActInput) -> Any:
    """Uniform over legal choices and within bounds; a Box without bounds is standard normal.

    Where a mask allows no choice, all count.
    """
    key_choice, key_box = jax.random.split(key)
    policy, outputs = _indifferent(space, inputs)
    choices = policy.sample(key_choice, *outputs, inputs.action_mask).action
    keys = jax.random.split(key_box, inputs.reset.shape[0])
    boxes = jax.vmap(partial(spaces.sample, space=space))(keys)
    return spaces.map_spaces(
        lambda leaf, box, choice: box if isinstance(leaf, Box) else choice, space, boxes, choices
    )


def _choose_noop(space: SpaceTree, key: jax.Array, inputs: ActInput) -> Any:
    """The first legal choice (0 without masks), and the numbers within the bounds nearest to 0."""
    del key
    policy, outputs = _indifferent(space, inputs)
    return policy.mode(*outputs, inputs.action_mask)


def _indifferent(space: SpaceTree, inputs: ActInput) -> tuple[Policy, tuple[jax.Array, jax.Array]]:
    """A policy and the outputs [B, ...] under which it prefers nothing."""
    policy = Policy(space, "normal")
    batch = inputs.reset.shape[0]
    return policy, (jnp.zeros((batch, policy.num_outputs)), jnp.zeros(policy.num_scales))


random = Fixed("random", _choose_random)
noop = Fixed("noop", _choose_noop)


def scripted(function: Callable[[jax.Array, Any, Any], Any]) -> Fixed:
    """The algorithm that acts by `function(key, obs, action_mask) -> action`.

    Args:
      function: pure and traceable, for one observation without a batch axis; `action_mask` is None
        where the environment has no masks. The action has the structure and shapes of the action
        space. The algorithm compares by it: define it once, not anew for every team.

    Raises:
      UsageError: when it first acts, if the action is none of the space.
    """
    name = getattr(function, "__name__", type(function).__name__)
    return Fixed(name, _Script(function))


@dataclass(frozen=True)
class _Script:
    """A user's function over a batch."""

    function: Callable[[jax.Array, Any, Any], Any]

    def __call__(self, space: SpaceTree, key: jax.Array, inputs: ActInput) -> Any:
        keys = jax.random.split(key, inputs.reset.shape[0])
        action = jax.vmap(self.function)(keys, inputs.obs, inputs.action_mask)
        expected = spaces.shape_dtype(space, keys.shape)
        matches = jax.tree.structure(action) == jax.tree.structure(expected) and all(
            jnp.shape(x) == y.shape
            for x, y in zip(jax.tree.leaves(action), jax.tree.leaves(expected), strict=True)
        )
        if not matches:
            given = jax.tree.map(lambda x: jnp.shape(x)[1:], action)
            raise UsageError(
                f"the scripted policy {self.function!r} gave actions of shape {given}, and the "
                f"action space is {spaces.describe(space)}; return one action of that space"
            )
        return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), action, expected)
