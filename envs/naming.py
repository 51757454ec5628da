"""Bringing environments to one form: dicts by agent id at the first level."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from marl.envs.delegation import delegating
from marl.envs.errors import UsageError
from marl.envs.interface import AutoReset, TimeStep
from marl.envs.wrappers import inside

AGENT = "agent"  # the id of a single-agent environment's only agent


def by_name(env: Any) -> Any:
    """`env` with dicts by agent id, whatever its first level is.

    - Without `agents` it has a single agent, and nothing in it is keyed: it becomes one agent whose
      id is "agent". Its spaces may be called `observation_space` and `action_space`.
    - Observations in a list or tuple have the order of `env.agents`; so have then the actions,
      rewards, spaces and all else that is per agent (rewards and flags may be arrays [N]).
    - Otherwise `env` itself is returned.

    Raises:
      UsageError: the observations are not by agent in any of these ways.
    """
    if isinstance(env, AutoReset):
        return inside(env, by_name)
    if not hasattr(env, "agents"):
        return SingleAgent(env)
    obs, _ = jax.eval_shape(env.reset, jax.random.key(0))
    if isinstance(obs, dict):
        return env
    if isinstance(obs, list | tuple):
        if len(obs) != len(env.agents):
            raise UsageError(
                f"reset returned a {type(obs).__name__} of {len(obs)} observations for the "
                f"{len(env.agents)} agents {', '.join(env.agents)}; give one per agent, in order"
            )
        return ListedAgents(env, jax.tree.structure(obs, is_leaf=lambda x: x is not obs))
    raise UsageError(
        f"reset returned {type(obs).__name__} observations; with agents "
        f"{', '.join(map(str, env.agents))} it must return a dict by agent id, or a list or tuple "
        "in that order"
    )


@delegating(stateful=False)
@dataclass(frozen=True)
class SingleAgent:
    """A single-agent environment as a team of one, whose agent is called "agent"."""

    env: Any

    @property
    def agents(self) -> tuple[str, ...]:
        return (AGENT,)

    @property
    def observation_spaces(self) -> dict[str, Any]:
        return {AGENT: _either(self.env, "observation_space", "observation_spaces")}

    @property
    def action_spaces(self) -> dict[str, Any]:
        return {AGENT: _either(self.env, "action_space", "action_spaces")}

    def reset(self, key: jax.Array) -> tuple[dict[str, Any], Any]:
        obs, state = self.env.reset(key)
        return {AGENT: obs}, state

    def step(self, key: jax.Array, state: Any, action: dict[str, Any]) -> tuple[TimeStep, Any]:
        timestep, state = self.env.step(key, state, action[AGENT])
        active = getattr(timestep, "active", None)
        if active is None:
            active = ~timestep.episode_over
        return (
            TimeStep(
                obs={AGENT: timestep.obs},
                reward={AGENT: timestep.reward},
                terminated={AGENT: timestep.terminated},
                truncated={AGENT: timestep.truncated},
                active={AGENT: active},
                episode_over=timestep.episode_over,
                final_obs={AGENT: timestep.final_obs},
                final_extras=timestep.final_extras,
                info=_with_named(timestep.info, lambda x: {AGENT: x}),
            ),
            state,
        )

    def action_mask(self, state: Any) -> dict[str, Any] | None:
        method = getattr(self.env, "action_mask", None)
        mask = None if method is None else method(state)
        return None if mask is None else {AGENT: mask}

    def global_state(self, state: Any) -> Any:
        method = getattr(self.env, "global_state", None)
        return None if method is None else method(state)


def _with_named(info: Any, named: Callable[[Any], Any]) -> Any:
    """`info` with what it has per agent by agent id."""
    if isinstance(info, Mapping) and "shaped_reward" in info:
        return {**info, "shaped_reward": named(info["shaped_reward"])}
    return info


def _either(env: Any, first: str, second: str) -> Any:
    return getattr(env, first) if hasattr(env, first) else getattr(env, second)


@delegating(stateful=False)
@dataclass(frozen=True)
class ListedAgents:
    """An environment whose first level is a list or tuple in the order of `agents`."""

    env: Any
    container: Any  # the treedef of that list or tuple

    @property
    def observation_spaces(self) -> dict[str, Any]:
        return self._named(self.env.observation_spaces)

    @property
    def action_spaces(self) -> dict[str, Any]:
        return self._named(self.env.action_spaces)

    def reset(self, key: jax.Array) -> tuple[dict[str, Any], Any]:
        obs, state = self.env.reset(key)
        return self._named(obs), state

    def step(self, key: jax.Array, state: Any, action: dict[str, Any]) -> tuple[TimeStep, Any]:
        listed = jax.tree.unflatten(self.container, [action[agent] for agent in self.env.agents])
        timestep, state = self.env.step(key, state, listed)
        per_agent = ("obs", "reward", "terminated", "truncated", "active", "final_obs")
        named = {name: self._named(getattr(timestep, name)) for name in per_agent}
        extras = timestep.final_extras
        if isinstance(extras, dict) and extras.get("action_mask") is not None:
            extras = extras | {"action_mask": self._named(extras["action_mask"])}
        info = _with_named(timestep.info, self._named)
        return timestep._replace(**named, final_extras=extras, info=info), state

    def action_mask(self, state: Any) -> dict[str, Any] | None:
        mask = self.env.action_mask(state)
        return None if mask is None else self._named(mask)

    def _named(self, per_agent: Any) -> dict[str, Any]:
        """By agent id, from a dict, or from a list, tuple or array in the order of `agents`."""
        if isinstance(per_agent, dict):
            return per_agent
        return {agent: per_agent[index] for index, agent in enumerate(self.env.agents)}
