"""Rows of metrics: what leaves the compiled program, by name.

A key is `quantity` or `quantity/agent`. Values are numbers; lists with one entry per seed where a
run has several. What has no value (no episode finished) is left out, never 0.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from marl.program import Metrics, RewardMetrics
from marl.specs import Team


def training_row(team: Team, metrics: Metrics, env_steps: int, seconds: float) -> dict[str, Any]:
    """One row over several updates.

    Args:
      team: whose metrics these are.
      metrics: [updates, ...], or [updates, seeds, ...].
      env_steps: environment steps done so far.
      seconds: of wall time since training started.
    """
    row: dict[str, Any] = {"env_steps": env_steps, **_episodes(team, metrics.episodes)}
    for group, group_metrics in zip(team.lifted.groups, metrics.learner, strict=True):
        for name, values in group_metrics.items():
            mean = _finite_mean(values)  # [S] or [seeds, S]
            for index, members in enumerate(group.sets):
                value = mean[..., index]
                if np.isnan(value).all():  # nothing was learned yet
                    continue
                for position in members:
                    row[f"{name}/{team.agents[position]}"] = _plain(value)
    row |= _rewards(team, metrics.rewards)
    return row | {"time/seconds": round(seconds, 3)}


def _episodes(team: Team, episodes: Any) -> dict[str, Any]:
    sums = jax.tree.map(lambda x: x.sum(0), episodes)
    count = sums.finished
    row = {"episodes": _plain(count)}
    if not np.all(count > 0):
        return row
    row["episode_length"] = _plain(sums.length / count)
    for position, agent in enumerate(team.agents):
        row[f"return/{agent}"] = _plain(sums.returns[..., position] / count)
        if jax.tree.leaves(sums.shaped_returns):
            row[f"shaped_return/{agent}"] = _plain(sums.shaped_returns[..., position] / count)
    for index, name in enumerate(team.spec.reward_teams.names):
        if len(team.spec.reward_teams.members[index]) > 1:
            row[f"team_return/{name}"] = _plain(sums.team_returns[..., index] / count)
    if jax.tree.leaves(sums.success):
        row["success"] = _plain(sums.success / count)
    return row


def _rewards(team: Team, found: RewardMetrics) -> dict[str, Any]:
    """What rewards were learned with, [updates, ...]."""
    row = {}
    if jax.tree.leaves(found.shaped_weight):
        row["shaped_weight"] = _plain(found.shaped_weight.mean(0))
    if jax.tree.leaves(found.return_std):
        mean = _finite_mean(found.return_std)
        for index, name in enumerate(team.spec.reward_teams.names):
            if not np.isnan(mean[..., index]).all():
                row[f"return_std/{name}"] = _plain(mean[..., index])
    return row


def evaluation_row(results: Mapping[str, Any], env_steps: int) -> dict[str, Any]:
    """One evaluation as a row."""
    return {"env_steps": env_steps, **results}


def _finite_mean(values: np.ndarray) -> np.ndarray:
    """Mean over updates, without those that were not finite and were skipped; NaN without any."""
    finite = np.isfinite(values)
    total = np.where(finite, values, 0).sum(0)
    return np.divide(total, finite.sum(0), out=np.full(total.shape, np.nan), where=finite.any(0))


def _plain(x: Any) -> Any:
    return np.asarray(x, np.float64).tolist()
