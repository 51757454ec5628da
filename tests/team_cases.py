"""What tests of teams share: test doubles, small programs, and comparisons.

Axes as in `marl.dispatch`: T steps, A agents, B environments, S sharing sets of N agents.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl
from marl import rollout
from marl.agents import ppo
from marl.agents.learner import Learner
from marl.envs.vector import VectorEnv
from marl.experience import TeamRollout
from marl.program import Program, ProgramSpec, RunState, program
from marl.specs import Team
from marl.training import seed_keys


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Half the compile time, for every module that imports this: LLVM optimises less.

    What XLA fuses, and so the order of sums, stays as it is.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


SMALL = {"hidden_sizes": (8,), "num_epochs": 2, "num_minibatches": 2}
# For programs that are fused differently. Where a gradient is nearly 0, Adam's usual epsilon turns
# its rounding error into a step; this one does not.
SMOOTH = {"adam_epsilon": 1e-2, "learning_rate": 1e-2}


class Spy:
    """An algorithm around another: counts Python calls (traces), and adds to the metrics.

    Args:
      report: (learner, state, experience, hparams) -> more metrics, of the state before `update`.
      learns: False leaves out the update, so that there is little to compile.
      algorithm: with Config, Hparams and make.
    """

    def __init__(
        self,
        report: Callable[..., dict[str, Any]] | None = None,
        learns: bool = True,
        algorithm: Any = ppo,
    ):
        self.Config, self.Hparams, self._make = (
            algorithm.Config,
            algorithm.Hparams,
            algorithm.make,
        )
        self._report, self._learns = report, learns
        self.calls: Counter[str] = Counter()

    def make(self, config, observation_space, action_space, critic_space):
        learner = self._make(config, observation_space, action_space, critic_space)
        self.calls["make"] += 1

        def act(key, state, inputs, hparams):
            self.calls["act"] += 1
            return learner.act(key, state, inputs, hparams)

        def act_greedy(key, state, inputs, hparams):
            self.calls["act_greedy"] += 1
            return learner.act_greedy(key, state, inputs, hparams)

        def update(key, state, experience, hparams):
            self.calls["update"] += 1
            new_state, metrics = state, {}
            if self._learns:
                new_state, metrics = learner.update(key, state, experience, hparams)
            if self._report is not None:
                metrics = metrics | self._report(learner, state, experience, hparams)
            return new_state, metrics

        return learner._replace(act=act, act_greedy=act_greedy, update=update)


def report_experience(learner, state, experience, hparams) -> dict[str, Any]:
    """What a learner was given, as a metric."""
    return {"experience": experience}


def bound(learner: Learner, hparams: Any) -> Learner:
    """`learner` with hparams of its own, which is what a ready learner has."""
    fixed = jax.tree.map(jnp.float32, hparams)
    return learner._replace(
        init=lambda key, _: learner.init(key, fixed),
        act=lambda key, state, inputs, _: learner.act(key, state, inputs, fixed),
        act_greedy=lambda key, state, inputs, _: learner.act_greedy(key, state, inputs, fixed),
        update=lambda key, state, rollout, _: learner.update(key, state, rollout, fixed),
    )


def small_team(env: Any, learner: Any = "ppo", **options: Any) -> Team:
    return marl.team(env, learner, **(SMALL | options))


def compiled(team: Team, num_envs: int = 4, rollout_length: int = 8, **options: Any) -> Program:
    sizes = {"reset_pool": 0, "num_seeds": 1, "max_updates": 5} | options
    return program(ProgramSpec(team.env, team.spec, num_envs, rollout_length, **sizes))


def first_state(team: Team, trainer: Program, seed: int = 0) -> RunState:
    return trainer.init(seed_keys(seed, trainer.spec.num_seeds), team.group_hparams())


def trained(team: Team, trainer: Program, updates: int, seed: int = 0) -> tuple[RunState, Any]:
    """The state after `updates`, and metrics [updates, ...]."""
    state, metrics = trainer.chunk(first_state(team, trainer, seed), updates)
    return state, jax.tree.map(lambda x: x[:updates], metrics)


def play(team: Team, num_envs: int = 4, length: int = 8, seed: int = 0) -> tuple[Any, TeamRollout]:
    """A fresh team's states, and a rollout that they played."""
    env = VectorEnv(team.env, num_envs)
    hparams = team.group_hparams()

    @jax.jit
    def first(key):
        key_init, key_reset, key_steps = jax.random.split(key, 3)
        state = team.learner.init(key_init, hparams)
        carry = rollout.start(team.spec, env, key_reset)
        steps = jnp.float32(100.0)
        collected = rollout.collect(team.spec, env, length, key_steps, state, carry, steps, hparams)
        return state, collected[1]

    return first(jax.random.key(seed))


def updater(team: Team, key: int = 7) -> Callable[..., tuple[Any, Any]]:
    """`update(states, team_rollout, hparams) -> (states, metrics)` with a fixed key, compiled."""
    return jax.jit(lambda s, r, h: team.learner.update(jax.random.key(key), s, r, h))


def agent_states(team: Team, state: Any) -> dict[str, Any]:
    return {agent: team.agent_state(state, agent) for agent in team.agents}


def by_agent(team: Team, metrics: Any, name: str) -> dict[str, np.ndarray]:
    """A metric of the form [updates, S, T, B * N, ...] by agent, [updates, T, B, ...]."""
    found = {}
    for group, values in zip(team.lifted.groups, metrics, strict=True):
        num_members = group.shape[1]
        for index, members in enumerate(group.sets):
            mine = np.asarray(values[name])[:, index]
            mine = mine.reshape(*mine.shape[:2], -1, num_members, *mine.shape[3:])
            for place, position in enumerate(members):
                found[team.agents[position]] = mine[:, :, :, place]
    return found


def relative_difference(one: Any, other: Any) -> float:
    """Largest difference over a leaf divided by the leaf's largest element; NaN counts as inf."""

    def leaf(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        if not a.size or np.array_equal(a, b):
            return 0.0
        difference = np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-12)
        return float("inf") if np.isnan(difference) else float(difference)

    return max(jax.tree.leaves(jax.tree.map(leaf, one, other)), default=0.0)


def assert_identical(one: Any, other: Any) -> None:
    """The same structure and the same bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(_plain(a), _plain(b))


def identical(one: Any, other: Any) -> bool:
    return all(
        np.array_equal(_plain(a), _plain(b))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def all_finite(tree: Any) -> bool:
    return all(bool(np.all(np.isfinite(np.asarray(x)))) for x in jax.tree.leaves(tree))


def _plain(x: Any) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)
