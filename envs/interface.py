"""The environment interface: Gymnasium's conventions, made functional and multi-agent.

    obs, state = env.reset(key)
    timestep, state = env.step(key, state, action)

Observations, actions, rewards, `terminated`, `truncated` and `active` are dicts by agent id;
below an agent stands any PyTree. One step of one agent, and what the fields say about it:

    obs_t --action_t--> reward_t, final_obs_t          the transition that is learned from
                        obs_{t+1}                      what the next action is chosen from

    inside an episode      obs_{t+1} is final_obs_t
    at the episode's end   obs_{t+1} is the first observation of the next episode

`terminated` says that nothing follows for this agent (no bootstrap); `truncated` that something
would have followed (bootstrap from `final_obs`). Each belongs to one agent. `episode_over` is one
bool for the environment; at an episode's end every agent that was active is one or the other.
`active` says who acts on `obs`; every agent is active after a reset, and an agent that is out
while the episode goes on is inactive until it is active again.

Two kinds of object share this interface. An *episodic* environment leaves resetting to its
caller: its `step` returns the observation it reached as both `obs` and `final_obs`.
`AutoReset(env)` makes an *environment* of it, which is what training takes. Write an episodic one;
wrap it once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from marl.envs.spaces import SpaceTree


class TimeStep(NamedTuple):
    """What one step gives back. Dicts by agent id but for `episode_over` and the two extras."""

    obs: Any  # what the next action is chosen from
    reward: Any  # [] float32 per agent
    terminated: Any  # [] bool per agent: its return ends here
    truncated: Any  # [] bool per agent: it was cut off here
    active: Any  # [] bool per agent: acts on `obs`
    episode_over: jax.Array  # [] bool
    final_obs: Any  # the observation the transition led to
    final_extras: Any  # {"action_mask": ..., "global_state": ...} of the final state, as asked for
    # any PyTree; `success` ([] bool, valid at the episode's end) is reported by evaluation, and
    # `shaped_reward` ([] float32 per agent) may be learned from (see `marl.team`)
    info: Any


@runtime_checkable
class Environment(Protocol):
    """A multi-agent environment: pure methods, safe under `jit` and `vmap`.

    Environments compare and hash by value, since compiled programs are memoised on them.
    """

    @property
    def agents(self) -> tuple[str, ...]:
        """Agent ids in declared order (which is not the sorted order that JAX gives dict keys)."""
        ...

    @property
    def observation_spaces(self) -> Mapping[str, SpaceTree]:
        """Per agent, the true shapes and dtypes of what `reset` and `step` return."""
        ...

    @property
    def action_spaces(self) -> Mapping[str, SpaceTree]: ...

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """First observations by agent, and the environment's state."""
        ...

    def step(self, key: jax.Array, state: Any, action: Any) -> tuple[TimeStep, Any]: ...

    def action_mask(self, state: Any) -> Any:
        """Per agent, a PyTree like its actions of bool arrays (True: allowed); None without masks.

        A Discrete(n) leaf has a mask [n]; a MultiDiscrete leaf one of [sum(nvec)]; a Box None.
        """
        ...

    def global_state(self, state: Any) -> Any:
        """An array (or PyTree of arrays) for centralised critics, or None where there is none."""
        ...


@dataclass(frozen=True)
class AutoReset:
    """Resets an episodic environment inside the step that ends its episode, keeping `final_obs`.

    Args:
      env: an episodic environment, whose `step` leaves resetting to the caller.
      final_extras: which of "action_mask", "global_state" of the final state to put into
        `final_extras`; whoever bootstraps from a critic that reads them asks for them.
    """

    env: Any
    final_extras: tuple[str, ...] = ()

    @property
    def agents(self) -> tuple[str, ...]:
        return self.env.agents

    @property
    def observation_spaces(self) -> Mapping[str, SpaceTree]:
        return self.env.observation_spaces

    @property
    def action_spaces(self) -> Mapping[str, SpaceTree]:
        return self.env.action_spaces

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        return self.env.reset(key)

    def step(self, key: jax.Array, state: Any, action: Any) -> tuple[TimeStep, Any]:
        key_step, key_reset = jax.random.split(key)
        timestep, state = self.advance(key_step, state, action)
        fresh = self.env.reset(key_reset)
        return restart(timestep, state, fresh)

    def advance(self, key: jax.Array, state: Any, action: Any) -> tuple[TimeStep, Any]:
        """The episodic step, with the extras of the state it reached; no reset yet."""
        timestep, state = self.env.step(key, state, action)
        extras = {name: getattr(self.env, name)(state) for name in self.final_extras}
        return timestep._replace(final_obs=timestep.obs, final_extras=extras or ()), state

    def action_mask(self, state: Any) -> Any:
        return self.env.action_mask(state)

    def global_state(self, state: Any) -> Any:
        return self.env.global_state(state)


def restart(timestep: TimeStep, state: Any, fresh: tuple[Any, Any]) -> tuple[TimeStep, Any]:
    """Where the episode is over, continue from `fresh = (obs, state)` with every agent active."""
    over = timestep.episode_over
    obs, state = jax.tree.map(lambda a, b: jnp.where(over, a, b), fresh, (timestep.obs, state))
    active = jax.tree.map(lambda alive: alive | over, timestep.active)
    return timestep._replace(obs=obs, active=active), state
