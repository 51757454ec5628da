"""Probe environments: each is solved only if one particular part of a learner works.

`Probe(kind)` has `num_agents` agents that do not interact, each with its own draws: one agent makes
it a single-agent problem. With discount g, under the best policy:

    kind         an agent sees          reward                            value           return
    constant     0                      1                                 1               1
    observation  a draw s of {-1, 1}    s                                 s               0 (mean)
    delayed      0, then 1              0, then 1                         g, then 1       1
    action       0                      1 if action == 1, else -1         1               1
    both         a draw s of {-1, 1}    1 if action == (s > 0), else -1   1               1
    continuous   a draw s of {-.5, .5}  -(action - s)^2                   0               0
    memory       s of {-1, 1}, 0, 0     0, 0, then as in `both`           g^2, g, 1       1
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.envs.errors import UsageError, nearest
from marl.envs.interface import TimeStep
from marl.envs.spaces import Box, Discrete, Space

# kind -> steps of an episode, size of the drawn sign (0: nothing is drawn)
KINDS = {
    "constant": (1, 0.0),
    "observation": (1, 1.0),
    "delayed": (2, 0.0),
    "action": (1, 0.0),
    "both": (1, 1.0),
    "continuous": (1, 0.5),
    "memory": (3, 1.0),
}


class Count(NamedTuple):
    """State of an environment that only counts its steps."""

    step: jax.Array  # [] int32

    @classmethod
    def zero(cls) -> "Count":
        return cls(jnp.zeros((), jnp.int32))


class Drawn(NamedTuple):
    """State of an environment that draws something afresh in each step."""

    step: jax.Array  # [] int32
    draw: Any  # PyTree of arrays


def together(
    obs: Any, reward: dict[str, Any], over: Any, cut: Any = False, info: Any = ()
) -> TimeStep:
    """A step of an episodic environment whose agents all go on until the episode's end.

    Args:
      obs: observations by agent that the step led to.
      reward: [] by agent.
      over: [] bool, the episode ends.
      cut: [] bool, an end is a truncation.
      info: any PyTree.
    """
    over, cut = jnp.asarray(over, bool), jnp.asarray(cut, bool)
    return TimeStep(
        obs=obs,
        reward={agent: jnp.asarray(r, jnp.float32) for agent, r in reward.items()},
        terminated=dict.fromkeys(reward, over & ~cut),
        truncated=dict.fromkeys(reward, over & cut),
        active=dict.fromkeys(reward, ~over),
        episode_over=over,
        final_obs=obs,
        final_extras=(),
        info=info,
    )


@dataclass(frozen=True)
class Probe:
    """See the table above; `kind` is one of `KINDS`."""

    kind: str
    num_agents: int = 1

    def __post_init__(self):
        if self.kind not in KINDS:
            raise UsageError(f"no probe {self.kind!r}: {nearest(self.kind, KINDS)}")

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(f"agent_{i}" for i in range(self.num_agents))

    @property
    def observation_spaces(self) -> dict[str, Box]:
        return dict.fromkeys(self.agents, Box((1,), low=-1, high=1))

    @property
    def action_spaces(self) -> dict[str, Space]:
        space = Box((1,), low=-1, high=1) if self.kind == "continuous" else Discrete(2)
        return dict.fromkeys(self.agents, space)

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], Drawn]:
        sign = jax.random.rademacher(key, (self.num_agents,), jnp.float32) * KINDS[self.kind][1]
        state = Drawn(step=jnp.zeros((), jnp.int32), draw=sign)
        return self._observe(state), state

    def step(
        self, key: jax.Array, state: Drawn, action: dict[str, jax.Array]
    ) -> tuple[TimeStep, Drawn]:
        del key
        reached = state._replace(step=state.step + 1)
        over = reached.step >= KINDS[self.kind][0]
        reward = {
            agent: self._reward(action[agent], state.draw[i], over)
            for i, agent in enumerate(self.agents)
        }
        return together(self._observe(reached), reward, over), reached

    def action_mask(self, state: Drawn) -> None:
        return None

    def global_state(self, state: Drawn) -> None:
        return None

    def _observe(self, state: Drawn) -> dict[str, jax.Array]:
        if self.kind == "delayed":
            shown = jnp.broadcast_to(jnp.minimum(state.step, 1), (self.num_agents,))
        else:
            shown = jnp.where(state.step == 0, state.draw, 0.0)
        shown = shown.astype(jnp.float32)
        return {agent: shown[i, None] for i, agent in enumerate(self.agents)}

    def _reward(self, action: jax.Array, sign: jax.Array, last: jax.Array) -> jax.Array:
        if self.kind == "constant":
            return jnp.ones(())
        if self.kind == "observation":
            return sign
        if self.kind == "delayed":
            return last.astype(jnp.float32)
        if self.kind == "action":
            return jnp.where(action == 1, 1.0, -1.0)
        if self.kind == "continuous":
            return -jnp.square(action[0] - sign)
        matches = jnp.where((action == 1) == (sign > 0), 1.0, -1.0)
        return jnp.where(last, matches, 0.0)
