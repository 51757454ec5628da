"""What pooled rewards are multiplied by before they are learned from.

Each agent has a `reward_scale`. With `normalize_rewards` rewards are also divided by the standard
deviation of discounted returns so far, R_t = gamma * R_{t-1} + r_t from 0 on, as `VecNormalize` of
OpenAI's baselines does, and cut at `LIMIT` deviations, as there: after long without rewards the
deviation is small, and the first one would be huge. `reward_scale` multiplies what is left.
Deviations belong to a reward team and are of its pooled reward; steps in which no member is active
do not count. A rollout is divided by the deviation that has it in.

Axes: A agents, R reward teams, T steps of B environments.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marl import experience, groups, rewards
from marl.agents import statistics
from marl.agents.statistics import RunningStatistics
from marl.experience import RewardFactor, TeamRollout

if TYPE_CHECKING:
    from marl.dispatch import TeamSpec


LIMIT = 10.0  # deviations that a reward may have


class Returns(NamedTuple):
    """What has been seen of returns."""

    running: jax.Array  # [R, B]: of the episodes that go on
    statistics: RunningStatistics  # [R] each


def init(spec: "TeamSpec", num_envs: int) -> Any:
    """Nothing seen; () for a team that does not normalise."""
    if not spec.terms.normalised:
        return ()
    num_teams = len(spec.reward_teams.members)
    fresh = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_teams,)), statistics.init())
    return Returns(jnp.zeros((num_teams, num_envs)), fresh)


def after(
    spec: "TeamSpec", built: Any, returns: Any, rollout: TeamRollout, hparams: tuple[Any, ...]
) -> tuple[Any, RewardFactor | None]:
    """The returns with a rollout, and what is made of its rewards, [A]; None where they stay."""
    if not (spec.terms.scaled or spec.terms.normalised):
        return returns, None
    own = rewards.of_team(hparams)
    if not spec.terms.normalised:
        return returns, RewardFactor(own.scale, jnp.full_like(own.scale, jnp.inf))
    gammas = _gammas(spec, built, hparams)
    returns = _merged(spec, returns, rollout, jnp.stack([0.0 if g is None else g for g in gammas]))
    divided = _divided(gammas, returns)
    factor = jnp.where(divided, 1 / deviation(returns.statistics), 1.0)
    limit = jnp.where(divided, LIMIT, jnp.inf)
    team_of = np.asarray(_team_of(spec))
    return returns, RewardFactor(own.scale * factor[team_of], own.scale * limit[team_of])


def reported(spec: "TeamSpec", built: Any, returns: Returns, hparams: tuple[Any, ...]) -> jax.Array:
    """[R]: the deviation that a team's rewards are divided by; NaN where they stay."""
    divided = _divided(_gammas(spec, built, hparams), returns)
    return jnp.where(divided, deviation(returns.statistics), jnp.nan)


def _divided(gammas: list[Any], returns: Returns) -> jax.Array:
    """[R] bool: where nobody in a team has a gamma, or its returns do not vary, rewards stay."""
    return jnp.asarray([gamma is not None for gamma in gammas]) & varies(returns.statistics)


def varies(seen: RunningStatistics) -> jax.Array:
    """[R] bool: whether returns have varied beyond their rounding error; else rewards stay."""
    return seen.variance > 1e-6 * jnp.square(seen.mean)


def deviation(seen: RunningStatistics) -> jax.Array:
    """[R]: 1 where returns have not varied."""
    return jnp.sqrt(jnp.where(varies(seen), seen.variance, 1.0))


def _merged(spec: "TeamSpec", returns: Returns, rollout: TeamRollout, gamma: jax.Array) -> Returns:
    teams = spec.reward_teams
    firsts = [members[0] for members in teams.members]
    pooled = rewards.pool(teams, rollout.reward, rollout.active)[:, np.asarray(firsts)]
    someone = [jnp.any(rollout.active[:, np.asarray(members)], 1) for members in teams.members]
    finite = jnp.isfinite(pooled)
    counts = jnp.stack(someone, 1) & finite
    pooled = jnp.where(finite, pooled, 0.0)
    result = experience.outcome(teams, rollout)
    ends = [
        (result.terminated | result.truncated)[:, members[0]]
        if len(members) == 1
        else rollout.episode_over
        for members in teams.members
    ]

    def step(running: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, over = now
        running = gamma[:, None] * running + reward
        return jnp.where(over, 0.0, running), running

    running, seen = jax.lax.scan(step, returns.running, (pooled, jnp.stack(ends, 1)))
    by_team = (jnp.moveaxis(x, 1, 0) for x in (seen, counts.astype(jnp.float32)))
    return Returns(running, jax.vmap(statistics.merge)(returns.statistics, *by_team))


def _gammas(spec: "TeamSpec", built: Any, hparams: tuple[Any, ...]) -> list[jax.Array | None]:
    """Per reward team."""
    return [_gamma(built, hparams, members) for members in spec.reward_teams.members]


def _gamma(built: Any, hparams: tuple[Any, ...], members: tuple[int, ...]) -> jax.Array | None:
    """[] of a reward team: that of its first member that has one."""
    found = [groups.of_position(built, hparams, position) for position in members]
    return next((own.gamma for own in found if "gamma" in own._fields), None)


def _team_of(spec: "TeamSpec") -> list[int]:
    """The reward team of each position."""
    members = spec.reward_teams.members
    pairs = sorted((position, team) for team, own in enumerate(members) for position in own)
    return [team for _, team in pairs]
