"""One update of a whole team after a rollout: learners on rollouts, on replay, and mixers."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl import learning, nonfinite, replay
from marl.dispatch import TeamSpec, lift
from marl.experience import TeamRollout


class TeamState(NamedTuple):
    """What the next update of a team needs."""

    groups: tuple[Any, ...]  # learner states per group, [S, ...], then those of held critics
    mixers: Any  # per reward team, its mixing network; () without mixers
    replay: Any  # state of the replay buffer, or () without one


class Learned(NamedTuple):
    """An update's outcome."""

    state: TeamState
    metrics: tuple[dict[str, jax.Array], ...]  # per group, [S]; NaN where nothing was learned
    counts: tuple[jax.Array, ...]  # per group, [] bool: whether it learned


def update(
    spec: TeamSpec,
    num_envs: int,
    key: jax.Array,
    state: TeamState,
    rollout: TeamRollout,
    hparams: tuple[Any, ...],
    skip_nan: bool = False,
) -> Learned:
    """One update of the groups on rollouts, then gradient steps of those on replay.

    With `skip_nan` samples that are not finite are left out, and a metric says how many.
    """
    lifted = lift(spec)
    found: Any
    groups, found = lifted.learner.update(key, state.groups, rollout, hparams)
    mixers = state.mixers
    if _mixes(spec, on_replay=False):
        from marl import decomposition  # networks take their time to import

        (groups, mixers), others = decomposition.update(
            spec, lifted.groups, key, groups, mixers, rollout, hparams
        )
        found = _merged(found, others)
    if spec.replay is None:
        counts = tuple(jnp.bool_(True) for _ in lifted.groups)
        return Learned(TeamState(groups, mixers, ()), found, counts)
    buffer = replay.make_buffer(spec.replay, num_envs)
    rows = buffer.add(state.replay, replay.rows_of(rollout))
    seen = rollout.env_steps + rollout.episode_over.size
    ready = replay.ready(spec.replay, num_envs, rows, seen)
    now = (rollout.env_steps, rollout.reward_factor)
    steps = partial(_gradient_steps, spec, buffer, skip_nan, key, rows, *now, hparams)
    shapes = jax.eval_shape(steps, (groups, mixers))[1]
    nothing = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan), shapes)
    (groups, mixers), others = jax.lax.cond(
        ready, steps, lambda learned: (learned, nothing), (groups, mixers)
    )
    counts = tuple(ready | (not learning.on_replay(group)) for group in lifted.groups)
    return Learned(TeamState(groups, mixers, rows), _merged(found, others), counts)


def _gradient_steps(
    spec: TeamSpec,
    buffer: Any,
    skip_nan: bool,
    key: jax.Array,
    rows: Any,
    env_steps: jax.Array,
    reward_factor: Any,
    hparams: Any,
    learned: tuple[Any, Any],
) -> tuple[tuple[Any, Any], Any]:
    """`updates_per_rollout` steps, each on its own samples; metrics are their means."""
    assert spec.replay is not None
    built = lift(spec).groups

    def step(
        learned: tuple[Any, Any], drawn: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[Any, Any], Any]:
        groups, mixers = learned
        key_step, places = drawn
        samples = replay.windows_of(replay.taken(rows, places), env_steps)
        samples = samples._replace(reward_factor=reward_factor)
        if skip_nan:
            samples = nonfinite.left_out(spec, built, samples)
        groups, found = learning.replay_step(spec, built, key_step, groups, samples, hparams)
        if _mixes(spec, on_replay=True):
            from marl import decomposition

            (groups, mixers), others = decomposition.replay_step(
                spec, built, groups, mixers, samples, hparams
            )
            found = _merged(found, others)
        if skip_nan:
            found = _merged(found, nonfinite.shares(built, samples))
        return (groups, mixers), found

    # 0 and 1 are taken: `split` gives those two in learning.update; 2 in learning.replay_step
    keys = jax.random.split(jax.random.fold_in(key, 3), spec.replay.updates_per_rollout)
    pairs = jax.vmap(jax.random.split)(keys)
    places = replay.drawn(buffer, rows, pairs[:, 0])
    learned, metrics = jax.lax.scan(step, learned, (pairs[:, 1], places))
    return learned, jax.tree.map(lambda x: jnp.mean(x, 0), metrics)


def _mixes(spec: TeamSpec, on_replay: bool) -> bool:
    """Whether some groups, all on replay or all on rollouts, are learned through a mixer."""
    return any(
        learning.is_mixed(spec, group) and learning.on_replay(group) == on_replay
        for group in lift(spec).groups
    )


def _merged(metrics: Any, others: Any) -> tuple[dict[str, jax.Array], ...]:
    """Per group, the metrics of both."""
    return tuple(a | b for a, b in zip(metrics, others, strict=True))
