"""Toy environments that use one feature of the interface each: time limit, masks, global state.

All agents of one environment are alike; what is best, and what it is worth, is known.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from marl.envs.interface import TimeStep
from marl.envs.probes import Count, Drawn, together
from marl.envs.spaces import Box, Discrete, SpaceTree


@dataclass(frozen=True)
class Continuing:
    """Pays `reward` in every step and is only ever truncated, after `limit` steps.

    The value of its one constant observation is reward / (1 - gamma).
    """

    reward: float = 1.0
    limit: int = 8
    num_agents: int = 2

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(f"agent_{i}" for i in range(self.num_agents))

    @property
    def observation_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Box((1,), 0, 1))

    @property
    def action_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Discrete(2))

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], Count]:
        del key
        return self._observe(), Count.zero()

    def step(self, key: jax.Array, state: Count, action: Any) -> tuple[TimeStep, Count]:
        del key, action
        reached = Count(state.step + 1)
        reward = dict.fromkeys(self.agents, jnp.asarray(self.reward))
        over = reached.step >= self.limit
        return together(self._observe(), reward, over, cut=True), reached

    def action_mask(self, state: Count) -> None:
        return None

    def global_state(self, state: Count) -> None:
        return None

    def _observe(self) -> dict[str, jax.Array]:
        return {agent: jnp.ones((1,), jnp.float32) for agent in self.agents}


@dataclass(frozen=True)
class Masked:
    """Actions 0..3 of which two are legal: 0 and 1, then 1 and 2, then 2 and 3.

    A legal action a pays a / 3, an illegal one -10. The best return is 2 for each agent, and one
    that ignores the masks and always takes action 3 gets -19.
    """

    num_agents: int = 2

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(f"agent_{i}" for i in range(self.num_agents))

    @property
    def observation_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Box((4,), 0, 1))

    @property
    def action_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Discrete(4))

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], Count]:
        del key
        return self._observe(Count.zero()), Count.zero()

    def step(
        self, key: jax.Array, state: Count, action: dict[str, jax.Array]
    ) -> tuple[TimeStep, Count]:
        del key
        reached, legal = Count(state.step + 1), self._legal(state)
        reward = {
            agent: jnp.where(legal[action[agent]], action[agent] / 3, -10.0)
            for agent in self.agents
        }
        return together(self._observe(reached), reward, reached.step >= 3), reached

    def action_mask(self, state: Count) -> dict[str, jax.Array]:
        return dict.fromkeys(self.agents, self._legal(state))

    def global_state(self, state: Count) -> None:
        return None

    def _legal(self, state: Count) -> jax.Array:
        """[4] bool; after the last step, as in the last."""
        first = jnp.minimum(state.step, 2)
        return (jnp.arange(4) == first) | (jnp.arange(4) == first + 1)

    def _observe(self, state: Count) -> dict[str, jax.Array]:
        return dict.fromkeys(self.agents, jax.nn.one_hot(state.step, 4, dtype=jnp.float32))


@dataclass(frozen=True)
class Hidden:
    """One step that pays a coin's side, 0 or 1, to every agent; only the global state shows it.

    An agent sees the constant 1, whose value is 1/2; the value of the global state [s, 1 - s] is s.
    """

    num_agents: int = 2

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(f"agent_{i}" for i in range(self.num_agents))

    @property
    def observation_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Box((1,), 0, 1))

    @property
    def action_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Discrete(2))

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], Drawn]:
        coin = jax.random.bernoulli(key).astype(jnp.float32)
        return self._observe(), Drawn(step=jnp.zeros((), jnp.int32), draw=coin)

    def step(self, key: jax.Array, state: Drawn, action: Any) -> tuple[TimeStep, Drawn]:
        del key, action
        reward = dict.fromkeys(self.agents, state.draw)
        return together(self._observe(), reward, True), state._replace(step=state.step + 1)

    def action_mask(self, state: Drawn) -> None:
        return None

    def global_state(self, state: Drawn) -> jax.Array:
        return jnp.stack([state.draw, 1 - state.draw])

    def _observe(self) -> dict[str, jax.Array]:
        return {agent: jnp.ones((1,), jnp.float32) for agent in self.agents}


@dataclass(frozen=True)
class Image:
    """One step: a uint8 image [4, 4, 1] is bright on the left (0) or on the right (1).

    An agent gets 1 for naming the side of its own image, else 0; the best return is 1.
    """

    num_agents: int = 2

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(f"agent_{i}" for i in range(self.num_agents))

    @property
    def observation_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Box((4, 4, 1), 0, 255, dtype="uint8"))

    @property
    def action_spaces(self) -> dict[str, SpaceTree]:
        return dict.fromkeys(self.agents, Discrete(2))

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], Drawn]:
        sides = jax.random.randint(key, (self.num_agents,), 0, 2)
        state = Drawn(step=jnp.zeros((), jnp.int32), draw=sides)
        return self._observe(state), state

    def step(
        self, key: jax.Array, state: Drawn, action: dict[str, jax.Array]
    ) -> tuple[TimeStep, Drawn]:
        del key
        reward = {agent: action[agent] == state.draw[i] for i, agent in enumerate(self.agents)}
        return together(self._observe(state), reward, True), state._replace(step=state.step + 1)

    def action_mask(self, state: Drawn) -> None:
        return None

    def global_state(self, state: Drawn) -> None:
        return None

    def _observe(self, state: Drawn) -> dict[str, jax.Array]:
        bright = (jnp.arange(4) // 2 == state.draw[:, None]).astype(jnp.uint8) * jnp.uint8(255)
        images = jnp.broadcast_to(bright[:, None, :, None], (self.num_agents, 4, 4, 1))
        return {agent: images[i] for i, agent in enumerate(self.agents)}
