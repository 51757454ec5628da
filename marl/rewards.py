"""Reward teams: whose rewards are pooled, when a return ends, and what is added to rewards."""

from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marl.agents.schedules import schedule
from marl.agents.validation import at_least
from marl.envs.errors import UsageError, nearest

POOLINGS = ("mean", "sum")
DEATHS = ("auto", "continue", "terminal")


class RewardTeams(NamedTuple):
    """A partition of the agents; static and hashable."""

    names: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]  # positions in env.agents
    pooling: str = "mean"
    death: str = "auto"

    def continues(self, team: int) -> bool:
        """Whether a member's return runs on after its death, to the episode's end."""
        if self.death == "auto":
            return len(self.members[team]) > 1
        return self.death == "continue"


class Terms(NamedTuple):
    """What is learned from beside the rewards as they are; static."""

    shaped: bool = False  # the environment's shaped rewards are added, with a weight that falls


class RewardHparams(NamedTuple):
    """The floats of `Terms`: one more entry after the groups' hparams, where a term is on."""

    shaped_weight: Any = 0.0  # [] of shaped rewards, at the start
    shaped_steps: Any = 0.0  # [] environment steps in which it falls to 0


class Outcome(NamedTuple):
    """What learning sees of the agents' steps, each [T, A, B] with agents in declared order."""

    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array


def bind_shaped(options: Mapping[str, Any]) -> RewardHparams:
    """The floats of the user's `shaped_reward`; `shaped_steps` is 0 where it is off.

    Raises:
      UsageError: an option is unknown, missing or out of range.
    """
    if not isinstance(options, Mapping):
        raise UsageError(
            f"shaped_reward = {options!r} is a {type(options).__name__}; write {{'steps': 1e6}}: "
            "environment steps until its weight is 0"
        )
    for name, value in options.items():
        if name not in ("steps", "weight"):
            raise UsageError(
                f"shaped_reward has no option {name!r}; {nearest(name, ('steps', 'weight'))}"
            )
        if isinstance(value, bool) or not isinstance(value, Real):
            raise UsageError(f"shaped_reward.{name} = {value!r}; give a number")
        at_least(f"shaped_reward.{name}", float(value), 0)
    if options and "steps" not in options:
        raise UsageError(
            "shaped_reward has no steps; give the environment steps until its weight is 0, as in "
            "shaped_reward.steps = 1e6 (inf: it stays; 0: no shaped rewards)"
        )
    weight, steps = options.get("weight", 1.0), options.get("steps", 0)
    return RewardHparams(shaped_weight=float(weight), shaped_steps=float(steps))


def with_shaped(
    reward: jax.Array, shaped: jax.Array, hparams: RewardHparams, env_steps: jax.Array
) -> jax.Array:
    """Rewards [T, A, B] and shaped ones, at the weight of `env_steps` [], which falls linearly."""
    weight = schedule(
        "linear", hparams.shaped_weight, jnp.float32(0), hparams.shaped_steps, env_steps
    )
    return reward + weight * shaped


def pool(teams: RewardTeams, reward: jax.Array, active: jax.Array) -> jax.Array:
    """Rewards [..., A, B] of each agent's team; those of inactive agents are never read.

    A team's reward is the mean (or sum) over its active members, and 0 when none is active.
    """
    total = _sum_over_team(teams, jnp.where(active, reward, 0.0))
    if teams.pooling == "sum" or len(teams.members) == reward.shape[-2]:
        return total
    return total / jnp.maximum(_sum_over_team(teams, active.astype(jnp.float32)), 1.0)


def outcome(
    teams: RewardTeams,
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    active: jax.Array,
    episode_over: jax.Array,
) -> Outcome:
    """Pooled rewards, and where each agent's return ends.

    With death "terminal" an agent's return ends when it does. With "continue" it runs to the end of
    the episode on the pooled reward; that end is a truncation if any member was truncated in it.
    Agents alone in their team get their own reward, unpooled.

    Args:
      teams: the partition.
      reward, terminated, truncated, active: [T, A, B]; `active` before the step.
      episode_over: [T, B].
    """
    over = episode_over[..., None, :]
    cut_off = _sum_over_team(teams, (truncated & active & over).astype(jnp.float32)) > 0
    continues = np.zeros((reward.shape[-2], 1), bool)
    for team, members in enumerate(teams.members):
        continues[list(members)] = teams.continues(team)
    # an episode's end cuts the recursion of everyone, also of who was out before it
    own_terminated = (terminated & active) | (over & ~(truncated & active))
    own_truncated = truncated & active & ~terminated
    return Outcome(
        reward=pool(teams, reward, active),
        terminated=jnp.where(continues, over & ~cut_off, own_terminated),
        truncated=jnp.where(continues, over & cut_off, own_truncated),
    )


def _sum_over_team(teams: RewardTeams, x: jax.Array) -> jax.Array:
    """For each agent the sum of `x` [..., A, B] over its team; what others hold is never read."""
    if all(len(members) == 1 for members in teams.members):
        return x
    team_of = np.zeros(x.shape[-2], np.int32)
    for team, members in enumerate(teams.members):
        team_of[list(members)] = team
    by_agent = jnp.moveaxis(x, -2, 0)
    totals = jax.ops.segment_sum(by_agent, team_of, len(teams.members))
    return jnp.moveaxis(totals[team_of], 0, -2)
