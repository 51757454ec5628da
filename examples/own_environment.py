"""An environment of one's own: two agents on a ring are paid when they meet.

python examples/own_environment.py
PYTHONPATH=examples marl train ippo env=own_environment:make_env training.total_steps=2e5
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

import marl
from marl.envs.interface import AutoReset, TimeStep
from marl.envs.spaces import Discrete
from marl.envs.wrappers import TimeLimit


class MeetingState(NamedTuple):
    positions: jax.Array  # [2] int32, in the order of the agents


@dataclass(frozen=True)
class Meeting:
    """Each agent stays or walks one place around a ring; meeting pays 1 to both and ends it."""

    size: int = 9
    agents = ("blue", "green")

    @property
    def observation_spaces(self):
        place = Discrete(self.size)
        return {agent: {"own": place, "other": place} for agent in self.agents}

    @property
    def action_spaces(self):
        return {agent: Discrete(3) for agent in self.agents}

    def reset(self, key):
        first, distance = jax.random.randint(key, (2,), jnp.array([0, 1]), self.size)
        state = MeetingState(jnp.stack([first, (first + distance) % self.size]))
        return self._observe(state), state

    def step(self, key, state, action):
        del key  # nothing here is random
        moves = jnp.stack([action[agent] for agent in self.agents]) - 1
        state = MeetingState((state.positions + moves) % self.size)
        met = state.positions[0] == state.positions[1]
        obs = self._observe(state)
        timestep = TimeStep(
            obs=obs,
            reward=self._same(met.astype(jnp.float32)),
            terminated=self._same(met),
            truncated=self._same(jnp.array(False)),
            active=self._same(~met),
            episode_over=met,
            final_obs=obs,
            final_extras=(),
            info={"success": met},
        )
        return timestep, state

    def action_mask(self, state):
        return None  # every action is allowed

    def global_state(self, state):
        return state.positions.astype(jnp.float32) / self.size

    def _observe(self, state):
        blue, green = state.positions
        return {"blue": {"own": blue, "other": green}, "green": {"own": green, "other": blue}}

    def _same(self, x):
        return {agent: x for agent in self.agents}


def make_env(size=9, max_steps=8):
    """What training takes: an environment that resets itself."""
    return AutoReset(TimeLimit(Meeting(size), max_steps))


def main(total_steps=100_000):
    env = make_env()
    run = marl.train(env, marl.team(env, "ppo", learning_rate=1e-3), total_steps=total_steps)
    print("episodes in which they met:", run.evaluations[-1]["stochastic"]["success"])


if __name__ == "__main__":
    main()
