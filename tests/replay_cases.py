"""An environment that says which step it is."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from marl.envs.interface import TimeStep
from marl.envs.probes import Drawn
from marl.envs.spaces import Box, Discrete


@dataclass(frozen=True)
class Ledger:
    """Two agents that see [clock, 0, number of the environment]; the clock is never reset.

    Of every eight steps, step 2 ends an episode by termination and step 7 by truncation. Step c
    leads to [c, 1, number], and pays ann c + 1 and bob -(c + 1), and both 100 more for action 1.
    Bob's observations are bytes.
    """

    agents = ("ann", "bob")

    @property
    def observation_spaces(self):
        return {"ann": Box((3,)), "bob": Box((3,), 0, 255, dtype="uint8")}

    @property
    def action_spaces(self):
        return dict.fromkeys(self.agents, Discrete(2))

    def reset(self, key):
        state = Drawn(jnp.int32(0), jax.random.randint(key, (), 0, 256))
        return self._observe(state, 0), state

    def step(self, key, state, action):
        c = state.step
        end = dict.fromkeys(self.agents, c % 8 == 2), dict.fromkeys(self.agents, c % 8 == 7)
        paid = {agent: sign * (c + 1.0) for agent, sign in (("ann", 1), ("bob", -1))}
        reached = state._replace(step=c + 1)
        timestep = TimeStep(
            obs=self._observe(reached, 0),
            reward={agent: paid[agent] + 100.0 * action[agent] for agent in self.agents},
            terminated=end[0],
            truncated=end[1],
            active=dict.fromkeys(self.agents, jnp.ones((), bool)),
            episode_over=(c % 8 == 2) | (c % 8 == 7),
            final_obs=self._observe(state, 1),
            final_extras=(),
            info=(),
        )
        return timestep, reached

    def action_mask(self, state):
        return None

    def global_state(self, state):
        return None

    def _observe(self, state, final):
        obs = jnp.stack([state.step, jnp.int32(final), state.draw])
        return {"ann": obs.astype(jnp.float32), "bob": obs.astype(jnp.uint8)}
