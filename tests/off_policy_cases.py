"""A team of two kinds for the tests of learners on replay."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from team_cases import (
    Spy,
    play,
)

import marl
from marl import learning
from marl.agents import sac
from marl.envs.interface import AutoReset
from marl.envs.probes import Drawn, together
from marl.envs.spaces import Box, Discrete

TOLERANCE = 1e-5
ONE_STEP = {"learning_starts": 0, "batch_size": 8, "capacity": 200}


class Watched(Spy):
    """An algorithm that learns from replay, watched by a `Spy`."""

    def __init__(self, report=None, learns=True, algorithm=sac):
        super().__init__(report, learns, algorithm)
        self.CRITIC = algorithm.CRITIC


def small(env, learner, **options):
    return marl.team(env, learner, **{"hidden_sizes": (8,), "replay": ONE_STEP} | options)


# A team of two kinds: reds P and a blue Q, whose actions differ too


@dataclass(frozen=True)
class Kinds:
    """Agents P, Q, P see 2, 3 and 2 draws; P act with one number, Q with two; two-step episodes."""

    discrete: bool = False  # Q chooses one of three instead
    agents = ("red_0", "blue", "red_1")

    @property
    def observation_spaces(self):
        return {"red_0": Box((2,)), "blue": Box((3,)), "red_1": Box((2,))}

    @property
    def action_spaces(self):
        red, blue = Box((1,), -1, 1), Discrete(3) if self.discrete else Box((2,), 0, 4)
        return {"red_0": red, "blue": blue, "red_1": red}

    def reset(self, key):
        state = Drawn(jnp.int32(0), jax.random.normal(key, (7,)))
        return self._observe(state), state

    def step(self, key, state, action):
        reached = Drawn(state.step + 1, jax.random.normal(key, (7,)))
        reward = {agent: jnp.mean(action[agent]) - state.draw[0] for agent in self.agents}
        return together(self._observe(reached), reward, reached.step >= 2, cut=True), reached

    def action_mask(self, state):
        return None

    def global_state(self, state):
        return None

    def _observe(self, state):
        red_0, blue, red_1 = jnp.split(state.draw, (2, 5))
        return {"red_0": red_0, "blue": blue, "red_1": red_1}


KINDS = AutoReset(Kinds())
REDS_SHARE = {"sharing": {"reds": ["red_*"]}}


def some(team, num_envs=2, length=3):
    """States and a rollout of random numbers: there is nothing to compile."""
    init = jax.eval_shape(team.learner.init, jax.random.key(0), team.group_hparams())
    _, rollout = jax.eval_shape(lambda: play(team, num_envs, length))
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(draw.uniform(0, 1, x.shape), x.dtype), (init, rollout)
    )


def learned(team, states, rollout):
    """What `replay_step` reports per group, with a rollout for samples."""
    key, hparams = jax.random.key(0), team.group_hparams()
    return learning.replay_step(team.spec, team.lifted.groups, key, states, rollout, hparams)[1]


def report_samples(learner, state, experience, hparams):
    return {"experience": experience._replace(shuffle_key=())}
