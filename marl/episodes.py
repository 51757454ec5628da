"""Statistics of episodes: step by step where each episode counts, or of a whole rollout at once."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from marl import groups, rewards

if TYPE_CHECKING:
    from marl.dispatch import TeamSpec
    from marl.rollout import Step


class Episode(NamedTuple):
    """Each environment's running episode."""

    length: jax.Array  # [B] int32
    returns: jax.Array  # [A, B]: raw rewards of the steps each agent was active in
    team_returns: jax.Array  # [reward teams, B]: pooled, unscaled rewards
    shaped_returns: Any = ()  # [A, B]: the same of shaped rewards, or () where nobody wants them


class Episodes(NamedTuple):
    """Sums over finished episodes; divide by `finished`."""

    finished: jax.Array  # [] float32: how many
    length: jax.Array  # [] float32
    returns: jax.Array  # [A]: raw rewards of the steps each agent was active in
    team_returns: jax.Array  # [reward teams]
    success: Any  # [], or () where the environment knows no success
    shaped_returns: Any = ()  # [A], or ()


class Ended(NamedTuple):
    """Of each environment's running episode; counts where the step's `episode_over` is true."""

    length: jax.Array  # [B]
    returns: jax.Array  # [B, A]
    team_returns: jax.Array  # [B, reward teams]
    success: Any  # [B], or () where the environment knows no success
    shaped_returns: Any = ()  # [B, A], or ()


def start(spec: "TeamSpec", num_envs: int) -> Episode:
    """Of episodes without a step."""
    num_agents, num_teams = len(spec.agents), len(spec.reward_teams.members)
    return Episode(
        length=jnp.zeros(num_envs, jnp.int32),
        returns=jnp.zeros((num_agents, num_envs)),
        team_returns=jnp.zeros((num_teams, num_envs)),
        shaped_returns=jnp.zeros((num_agents, num_envs)) if spec.terms.shaped else (),
    )


def success_of(info: Any) -> Any:
    """[B], or () where the environment knows no success."""
    return info["success"] if isinstance(info, Mapping) and "success" in info else ()


def after_step(spec: "TeamSpec", episode: Episode, step: "Step") -> tuple[Episode, Ended]:
    """The running episodes after `step`, afresh where it ended them, and what they had then."""
    with_step = jax.tree.map(jnp.add, episode, _gained(spec, step))
    ended = Ended(
        length=with_step.length,
        returns=with_step.returns.T,
        team_returns=with_step.team_returns.T,
        success=step.success,
        shaped_returns=jax.tree.map(jnp.transpose, with_step.shaped_returns),
    )
    return jax.tree.map(lambda x: jnp.where(step.episode_over, 0, x), with_step), ended


def after_rollout(spec: "TeamSpec", episode: Episode, steps: "Step") -> tuple[Episode, Episodes]:
    """The running episodes after `steps` [T, ...], and sums over those that ended in them.

    Whatever comes before the last end in an environment belongs to an episode that ended, so no
    step has to wait for the one before.
    """
    over = steps.episode_over
    numbered = jnp.arange(len(over), dtype=jnp.int32)[:, None]
    last = jnp.max(jnp.where(over, numbered, -1), 0)  # [B]
    some, belongs = last >= 0, numbered <= last

    def within(x: jax.Array) -> jax.Array:
        return belongs.reshape(len(over), *(1,) * (x.ndim - 2), -1)

    def rest(running: jax.Array, gained: jax.Array) -> jax.Array:
        return jnp.where(some, 0, running) + jnp.sum(jnp.where(within(gained), 0, gained), 0)

    def total(running: jax.Array, gained: jax.Array) -> jax.Array:
        ended = jnp.where(some, running, 0) + jnp.sum(jnp.where(within(gained), gained, 0), 0)
        return jnp.sum(ended.astype(jnp.float32), -1)

    gained = _gained(spec, steps)
    successes = jax.tree.map(lambda x: jnp.where(over, x, 0), steps.success)
    finished = Episodes(
        finished=jnp.sum(over, dtype=jnp.float32),
        success=jax.tree.map(partial(jnp.sum, dtype=jnp.float32), successes),
        **jax.tree.map(total, episode, gained)._asdict(),
    )
    return jax.tree.map(rest, episode, gained), finished


def _gained(spec: "TeamSpec", step: "Step") -> Episode:
    """What steps [..., A, B] add to their episodes; the rewards of who is out may be NaN."""
    pooled = rewards.pool(spec.reward_teams, step.reward, step.active)
    firsts = [members[0] for members in spec.reward_teams.members]
    return Episode(
        length=jnp.ones_like(step.episode_over, jnp.int32),
        returns=jnp.where(step.active, step.reward, 0.0),
        team_returns=jnp.moveaxis(groups.take(jnp.moveaxis(pooled, -2, 0), firsts), 0, -2),
        shaped_returns=jax.tree.map(lambda x: jnp.where(step.active, x, 0.0), step.shaped_reward),
    )
