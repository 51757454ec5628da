"""Reward teams: whose rewards are pooled, when a return ends, and what is added to rewards."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marl import patterns
from marl.agents.schedules import schedule
from marl.agents.validation import at_least, in_single_precision, one_of
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

    def why_alone(self, agents: Sequence[str], leave: str) -> str:
        """Why no team has two agents, and what to do: `leave` what wants that."""
        if len(agents) == 1:
            return f"this environment has one agent, {agents[0]}; leave {leave}"
        found = zip(self.names, self.members, strict=True)
        given = [f"{name}: {agents[own[0]]}" for name, own in found if name not in agents]
        if given:
            return (
                f"each of reward_teams has one agent ({', '.join(given)}); give one of them two, "
                f"or leave {leave}"
            )
        return (
            "every agent is alone in its reward team; put two in one, as in reward_teams = 'all', "
            f"or leave {leave}"
        )


class Terms(NamedTuple):
    """What is learned from beside the rewards as they are; static."""

    shaped: bool = False  # the environment's shaped rewards are added, with a weight that falls
    scaled: bool = False  # pooled rewards are multiplied by a number
    normalised: bool = False  # and divided by the standard deviation of returns so far


class RewardHparams(NamedTuple):
    """The floats of `Terms`: one more entry after the groups' hparams, where a term is on."""

    shaped_weight: Any = 0.0  # [] of shaped rewards, at the start
    shaped_steps: Any = 0.0  # [] environment steps in which it falls to 0
    scale: Any = ()  # [A] of pooled rewards


class Outcome(NamedTuple):
    """What learning sees of the agents' steps, each [T, A, B] with agents in declared order."""

    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array


def parse_teams(
    reward_teams: Any, agents: Sequence[str]
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Names and positions; agents that the user did not name stand alone."""
    if isinstance(reward_teams, str):
        one_of("reward_teams", reward_teams, ("none", "all"))
        sets = {"all": list(agents)} if reward_teams == "all" else {}
    else:
        sets = patterns.partition(reward_teams, agents, "reward_teams")
    for name in sets:
        if name in agents and sets[name] != [name]:
            raise UsageError(
                f"reward_teams.{name} has the name of an agent; call the team otherwise"
            )
    taken = {agent for members in sets.values() for agent in members}
    sets |= {agent: [agent] for agent in agents if agent not in taken}
    members = tuple(tuple(agents.index(agent) for agent in found) for found in sets.values())
    return tuple(sets), members


def check_scale(scale: Any, agent: str) -> None:
    """Raise UsageError unless `scale` is a positive number."""
    number = isinstance(scale, Real) and not isinstance(scale, bool)
    if not number or not 0 < float(scale) < float("inf"):
        raise UsageError(f"reward_scale = {scale!r} of {agent}; give a positive number")
    in_single_precision(f"reward_scale of {agent}", float(scale))


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
        if name == "weight" and float(value) == float("inf"):
            raise UsageError("shaped_reward.weight = inf; give a finite number")
        in_single_precision(f"shaped_reward.{name}", float(value))
    if options and "steps" not in options:
        raise UsageError(
            "shaped_reward has no steps; give the environment steps until its weight is 0, as in "
            "shaped_reward.steps = 1e6 (inf: it stays; 0: no shaped rewards)"
        )
    weight, steps = options.get("weight", 1.0), options.get("steps", 0)
    return RewardHparams(shaped_weight=float(weight), shaped_steps=float(steps))


def of_team(hparams: Sequence[Any]) -> RewardHparams:
    """The entry after the groups' hparams, in a team with `Terms` that are on."""
    found = hparams[-1]
    assert isinstance(found, RewardHparams), "a team without terms has none"
    return found


def shaped_weight(hparams: RewardHparams, env_steps: jax.Array) -> jax.Array:
    """[]: what shaped rewards are multiplied by at `env_steps` []; it falls linearly."""
    return schedule(
        "linear", hparams.shaped_weight, jnp.float32(0), hparams.shaped_steps, env_steps
    )


def with_shaped(
    reward: jax.Array, shaped: jax.Array, hparams: RewardHparams, env_steps: jax.Array
) -> jax.Array:
    """Rewards [T, A, B] and shaped ones, at the weight of `env_steps` []."""
    return reward + shaped_weight(hparams, env_steps) * shaped


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
