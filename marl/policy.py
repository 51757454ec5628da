"""A trained team as a function of observations."""

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.agents.learner import ActInput
from marl.dispatch import TeamSpec, acting_keys, lift
from marl.envs import spaces
from marl.envs.errors import UsageError
from marl.rollout import by_group, stacked, visible


class Policy(NamedTuple):
    """`action, memory = policy(key, obs, memory)` for one environment; all dicts by agent id.

    Safe under `jit` and `vmap`. Call `initial_memory` at the start of an episode.
    """

    env: Any
    spec: TeamSpec
    state: Any
    hparams: Any
    mode: str = "stochastic"

    def initial_memory(self) -> Any:
        """The memory at an episode's start; empty for feed-forward networks."""
        return lift(self.spec).learner.initial_memory(1)

    def __call__(
        self,
        key: jax.Array,
        obs: Any,
        memory: Any = None,
        action_mask: Any = None,
        active: Any = None,
    ) -> tuple[Any, Any]:
        """Choose actions.

        Args:
          key: of stochastic actions.
          obs: by agent id, without a batch axis.
          memory: from the call before; None at an episode's start.
          action_mask: `env.action_mask(state)`; needed where the environment has masks.
          active: by agent id, who acts; None for everyone. Actions of others mean nothing.

        Returns:
          Actions by agent id, and the memory for the next call.
        """
        missing = [agent.name for agent in self.spec.agents if agent.name not in obs]
        if missing:
            raise UsageError(
                f"obs has {', '.join(obs)}; observations of {', '.join(missing)} are missing"
            )
        if action_mask is None and _has_masks(self.env):
            raise UsageError(
                "this environment allows some actions only; pass action_mask=env.action_mask(state)"
            )
        for name, given in (("action_mask", action_mask), ("active", active)):
            absent = [a.name for a in self.spec.agents if given is not None and a.name not in given]
            if absent:
                raise UsageError(f"{name} lacks {', '.join(absent)}")
        for agent in self.spec.agents:
            _check_shape(agent.name, self.env.observation_spaces[agent.name], obs[agent.name])
        memory = self.initial_memory() if memory is None else memory
        act = _act(self.spec, self.mode)
        return act(key, self.state, obs, memory, action_mask, active, self.hparams)


def _check_shape(agent: str, space: Any, obs: Any) -> None:
    """Raise UsageError unless `obs` has the shapes of one observation, without a batch axis."""
    expected = jax.tree.map(lambda x: x.shape, spaces.shape_dtype(space))
    given = jax.tree.map(jnp.shape, obs)
    if given != expected:
        raise UsageError(
            f"obs of {agent} has shape {given}; expected {expected}, without a batch axis "
            "(vmap over one)"
        )


@lru_cache(maxsize=32)
def _has_masks(env: Any) -> bool:
    _, state = jax.eval_shape(env.reset, jax.random.key(0))
    return bool(jax.tree.leaves(jax.eval_shape(env.action_mask, state)))


@lru_cache(maxsize=32)
def _act(spec: TeamSpec, mode: str) -> Any:
    return jax.jit(partial(act_once, spec, mode))


def act_once(
    spec: TeamSpec,
    mode: str,
    key: jax.Array,
    state: Any,
    obs: Any,
    memory: Any,
    action_mask: Any,
    active: Any,
    hparams: Any,
) -> tuple[Any, Any]:
    """What `Policy` does, as a function of arrays."""
    batched_obs, batched_mask = jax.tree.map(lambda x: jnp.asarray(x)[None], (obs, action_mask))
    everyone = {agent.name: True for agent in spec.agents} if active is None else active
    acting = jnp.stack([jnp.asarray(everyone[agent.name])[None] for agent in spec.agents])
    inputs = ActInput(
        obs=visible(spec, batched_obs, acting),
        action_mask=stacked(spec, batched_mask),
        memory=memory,
        reset=jnp.zeros((1,), bool),
        active=by_group(spec, acting),
    )
    learner = lift(spec).learner
    act = learner.act_greedy if mode == "greedy" else learner.act
    out = act(acting_keys(spec, key), state, inputs, hparams)
    return jax.tree.map(lambda x: x[0], out.action), out.memory
