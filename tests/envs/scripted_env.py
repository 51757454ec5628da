"""Test doubles: environments that play a table, echo actions, or end at random."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from marl.envs.interface import TimeStep
from marl.envs.probes import Count, Drawn, together
from marl.envs.spaces import Box, Discrete


class Unmasked:
    """No masks, no global state."""

    def action_mask(self, state):
        return None

    def global_state(self, state):
        return None


@dataclass(frozen=True)
class Scripted(Unmasked):
    """Step t gives row t of each table, [T][agent]; the episode ends with the last row.

    An agent sees the number of steps taken.
    """

    agents: tuple[str, ...]
    reward: tuple[tuple[float, ...], ...]
    terminated: tuple[tuple[bool, ...], ...]
    truncated: tuple[tuple[bool, ...], ...]
    active: tuple[tuple[bool, ...], ...]

    @property
    def observation_spaces(self):
        return dict.fromkeys(self.agents, Box((1,)))

    @property
    def action_spaces(self):
        return dict.fromkeys(self.agents, Discrete(2))

    def reset(self, key):
        return self._observe(Count.zero()), Count.zero()

    def step(self, key, state, action):
        reached = Count(state.step + 1)
        obs = self._observe(reached)
        timestep = TimeStep(
            obs=obs,
            reward=self._row("reward", state, jnp.float32),
            terminated=self._row("terminated", state, bool),
            truncated=self._row("truncated", state, bool),
            active=self._row("active", state, bool),
            episode_over=reached.step >= len(self.reward),
            final_obs=obs,
            final_extras=(),
            info={"success": reached.step >= len(self.reward), "step": reached.step},
        )
        return timestep, reached

    def _row(self, name: str, state: Count, dtype: Any):
        row = jnp.asarray(getattr(self, name), dtype)[state.step]
        return {agent: row[i] for i, agent in enumerate(self.agents)}

    def _observe(self, state):
        return {agent: state.step[None].astype(jnp.float32) for agent in self.agents}


@dataclass(frozen=True)
class Echo(Unmasked):
    """One agent, "a", whose action comes back as `info`."""

    space: Any

    agents = ("a",)

    @property
    def observation_spaces(self):
        return {"a": Box((1,))}

    @property
    def action_spaces(self):
        return {"a": self.space}

    def reset(self, key):
        return {"a": jnp.zeros((1,))}, Count.zero()

    def step(self, key, state, action):
        obs = {"a": jnp.zeros((1,))}
        return together(obs, {"a": jnp.zeros(())}, False, info=action["a"]), state


@dataclass(frozen=True)
class RandomEnd(Unmasked):
    """One agent, "a", sees a fresh normal draw; half of the steps end the episode."""

    on_reset: Any = None  # called on the host by every reset

    agents = ("a",)

    @property
    def observation_spaces(self):
        return {"a": Box((1,))}

    @property
    def action_spaces(self):
        return {"a": Discrete(2)}

    def reset(self, key):
        state = Drawn(step=jnp.zeros((), jnp.int32), draw=jax.random.normal(key, (1,)))
        if self.on_reset is not None:
            jax.debug.callback(self.on_reset, state.draw)
        return {"a": state.draw}, state

    def step(self, key, state, action):
        key_end, key_draw = jax.random.split(key)
        reached = Drawn(step=state.step + 1, draw=jax.random.normal(key_draw, (1,)))
        over = jax.random.bernoulli(key_end) & (action["a"] == 1)
        return together({"a": reached.draw}, {"a": state.draw[0]}, over), reached
