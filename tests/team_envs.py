"""Environments that tests of teams need and nobody else."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from marl.envs.delegation import delegating
from marl.envs.features import Continuing
from marl.envs.interface import AutoReset, TimeStep
from marl.envs.probes import Count, Drawn, together
from marl.envs.spaces import Box, Discrete


@dataclass(frozen=True)
class Renamed:
    """An episodic environment whose agents go by other names, in the same order."""

    env: Any
    names: tuple[str, ...]

    @property
    def agents(self):
        return self.names

    @property
    def observation_spaces(self):
        return self._rename(self.env.observation_spaces)

    @property
    def action_spaces(self):
        return self._rename(self.env.action_spaces)

    def reset(self, key):
        obs, state = self.env.reset(key)
        return self._rename(obs), state

    def step(self, key, state, action):
        original = {old: action[new] for old, new in self._pairs()}
        timestep, state = self.env.step(key, state, original)
        per_agent = ("obs", "reward", "terminated", "truncated", "active", "final_obs")
        renamed = {name: self._rename(getattr(timestep, name)) for name in per_agent}
        return timestep._replace(**renamed), state

    def action_mask(self, state):
        mask = self.env.action_mask(state)
        return None if mask is None else self._rename(mask)

    def global_state(self, state):
        return self.env.global_state(state)

    def _pairs(self):
        return zip(self.env.agents, self.names, strict=True)

    def _rename(self, tree):
        return {new: tree[old] for old, new in self._pairs()}


# Who acts in each step of a `Shift`, and what it pays; 0 where nobody may look.
SHIFT_ACTIVE = {
    "ann": (1, 1, 1, 1, 1, 1),  # truncated at the end
    "bob": (1, 1, 1, 0, 0, 0),  # terminated in step 2
    "cid": (1, 1, 0, 0, 1, 1),  # away for two steps, terminated at the end
}
SHIFT_REWARD = {
    "ann": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
    "bob": (10.0, 20.0, 30.0, 0.0, 0.0, 0.0),
    "cid": (100.0, 200.0, 0.0, 0.0, 300.0, 400.0),
}


@dataclass(frozen=True)
class Shift:
    """Six steps after a script, in which agents die, go, come back, and end in different ways.

    Agent i sees [i + 1, steps taken + 1] and never may take action 0; the global state is the
    number of steps taken. With `poison` everything that must not be read is NaN: observations and
    rewards of who is out, final observations of who terminated; and who is out may do nothing.
    """

    poison: bool = False

    agents = ("ann", "bob", "cid")

    @property
    def observation_spaces(self):
        return dict.fromkeys(self.agents, Box((2,)))

    @property
    def action_spaces(self):
        return dict.fromkeys(self.agents, Discrete(3))

    def reset(self, key):
        return self._observe(jnp.int32(0), dict.fromkeys(self.agents, True)), Count.zero()

    def step(self, key, state, action):
        t = state.step
        over = t + 1 >= 6
        active = {agent: self._active(agent, t + 1) & ~over for agent in self.agents}
        never = jnp.zeros((), bool)
        cut = {"ann": over, "bob": never, "cid": never}
        obs = self._observe(t + 1, {agent: active[agent] | cut[agent] for agent in self.agents})
        timestep = TimeStep(
            obs=obs,
            reward={agent: self._reward(agent, t) for agent in self.agents},
            terminated={"ann": never, "bob": t == 2, "cid": over},
            truncated=cut,
            active=active,
            episode_over=over,
            final_obs=obs,
            final_extras=(),
            info=(),
        )
        return timestep, Count(t + 1)

    def action_mask(self, state):
        legal = jnp.asarray([False, True, True])
        out = legal & (not self.poison)
        return {
            agent: jnp.where(self._active(agent, state.step), legal, out) for agent in self.agents
        }

    def global_state(self, state):
        return state.step[None].astype(jnp.float32)

    def _active(self, agent, t):
        return jnp.asarray(SHIFT_ACTIVE[agent], bool)[t]

    def _reward(self, agent, t):
        paid = jnp.asarray(SHIFT_REWARD[agent], jnp.float32)[t]
        return jnp.where(self._active(agent, t) | (not self.poison), paid, jnp.nan)

    def _observe(self, steps, shown):
        hidden = jnp.nan if self.poison else -1.0
        return {
            agent: jnp.where(shown[agent], jnp.stack([i + 1.0, steps + 1.0]), hidden)
            for i, agent in enumerate(self.agents)
        }


@dataclass(frozen=True)
class SideBySide:
    """One-step episodic environments of one agent each, which end together, as one environment."""

    envs: tuple[tuple[str, Any], ...]  # (name of its agent here, environment)

    @property
    def agents(self):
        return tuple(name for name, _ in self.envs)

    @property
    def observation_spaces(self):
        return {name: next(iter(env.observation_spaces.values())) for name, env in self.envs}

    @property
    def action_spaces(self):
        return {name: next(iter(env.action_spaces.values())) for name, env in self.envs}

    def reset(self, key):
        keys = jax.random.split(key, len(self.envs))
        started = {name: env.reset(k) for k, (name, env) in zip(keys, self.envs, strict=True)}
        obs = {name: next(iter(obs.values())) for name, (obs, _) in started.items()}
        return obs, {name: state for name, (_, state) in started.items()}

    def step(self, key, state, action):
        obs, reward, reached = {}, {}, {}
        for name, env in self.envs:
            (agent,) = env.agents
            timestep, reached[name] = env.step(key, state[name], {agent: action[name]})
            obs[name], reward[name] = timestep.obs[agent], timestep.reward[agent]
        return together(obs, reward, True), reached

    def action_mask(self, state):
        return None

    def global_state(self, state):
        return None


def shift(poison: bool = False) -> AutoReset:
    return AutoReset(Shift(poison))


@dataclass(frozen=True)
class LongAndShort:
    """One agent; half of the episodes take 1 step and pay 0 in all, half take 9 steps and pay 9."""

    agents = ("agent",)

    @property
    def observation_spaces(self):
        return {"agent": Box((1,))}

    @property
    def action_spaces(self):
        return {"agent": Discrete(2)}

    def reset(self, key):
        long = jax.random.bernoulli(key).astype(jnp.float32)
        return self._observe(), Drawn(step=jnp.zeros((), jnp.int32), draw=long)

    def step(self, key, state, action):
        reached = state._replace(step=state.step + 1)
        over = reached.step >= jnp.where(state.draw > 0, 9, 1)
        return together(self._observe(), {"agent": state.draw}, over), reached

    def action_mask(self, state):
        return None

    def global_state(self, state):
        return None

    def _observe(self):
        return {"agent": jnp.ones((1,))}


@delegating(stateful=False)
@dataclass(frozen=True)
class Poisoned:
    """`agent_1` sees a NaN at step `at` of each environment; the state counts all steps."""

    at: int
    env: Any = Continuing(limit=1000)

    def reset(self, key):
        obs, state = self.env.reset(key)
        return self._poison(obs, state), state

    def step(self, key, state, action):
        timestep, state = self.env.step(key, state, action)
        obs = self._poison(timestep.obs, state)
        return timestep._replace(obs=obs, final_obs=obs), state

    def _poison(self, obs, state):
        bad = jnp.where(state.step == self.at, jnp.nan, obs["agent_1"])
        return {**obs, "agent_1": bad}
