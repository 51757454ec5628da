"""Reward teams: whose rewards are pooled, and when a member's return ends."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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


class Outcome(NamedTuple):
    """What learning sees of the agents' steps, each [T, A, B] with agents in declared order."""

    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array


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
