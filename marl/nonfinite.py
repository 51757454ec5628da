"""Replay samples that are not finite, where a run goes on in spite of them (`on_nan="skip"`).

A buffer keeps what was not finite until it is overwritten. A window that holds it is of no use to
the agent it belongs to, nor to those whose critic, reward team or mixer reads it; to all others it
is as good as any. What is drawn of it gets no weight: a learner's update never sees it.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from marl import groups, learning
from marl.experience import TeamRollout
from marl.groups import Group

if TYPE_CHECKING:
    from marl.dispatch import TeamSpec


def left_out(spec: "TeamSpec", built: tuple[Group, ...], samples: TeamRollout) -> TeamRollout:
    """`samples` of T steps in B windows with 0 for what is not finite, and `usable` without it."""
    length, num_agents, batch = samples.reward.shape
    sees, is_paid, reads_state = _reads(spec)
    paid = jnp.all(jnp.isfinite(samples.reward) | ~samples.active, 0)
    states = samples.global_state, samples.final_global_state
    usable = (
        ~_any_of(sees, ~_seen(built, samples))
        & ~_any_of(is_paid, ~paid)
        & (_finite(states, (length, batch)) | ~jnp.asarray(reads_state)[:, None])
    )
    cleaned = {
        name: jax.tree.map(_clean, getattr(samples, name))
        for name in ("steps", "memory", "final_obs", "reward", "global_state", "final_global_state")
    }
    usable = jnp.broadcast_to(usable, (length, num_agents, batch))
    return samples._replace(usable=usable, **cleaned)


def shares(built: tuple[Group, ...], samples: TeamRollout) -> tuple[dict[str, jax.Array], ...]:
    """Per group on replay a metric [S]: the share of the windows that are left out."""
    share = jnp.mean((~samples.usable).astype(jnp.float32), (0, 2))
    return tuple(
        {"left_out": jnp.mean(groups.take(share, group.positions).reshape(group.shape), 1)}
        if learning.on_replay(group)
        else {}
        for group in built
    )


def _seen(built: tuple[Group, ...], samples: TeamRollout) -> jax.Array:
    """[A, B] bool: whether all that an agent saw, did and remembered in a window is finite."""
    length, _, batch = samples.reward.shape
    finite: list[jax.Array] = []
    order: list[int] = []
    parts = samples.steps, samples.final_obs, samples.memory
    for group, steps, final_obs, memory in zip(built, *parts, strict=True):
        shape = *group.shape, batch
        seen = _finite((steps.obs, steps.action, final_obs), (length, *shape))
        knew = _finite(jax.tree.map(lambda x: x[None], memory), (1, *shape))
        finite.append((seen & knew).reshape(-1, batch))
        order += group.positions
    return jnp.concatenate(finite)[np.argsort(order)]


def _finite(tree: Any, shape: tuple[int, ...]) -> jax.Array:
    """[*axes] bool: whether floats in leaves [T, *axes, ...] are finite; `shape` is (T, *axes)."""
    found = jnp.ones(shape[1:], bool)
    for x in jax.tree.leaves(tree):
        if jnp.issubdtype(x.dtype, jnp.floating):
            found &= jnp.all(jnp.isfinite(x).reshape(*shape, -1), (0, -1))
    return found


def _clean(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _any_of(reads: np.ndarray, bad: jax.Array) -> jax.Array:
    """[A, B] bool: whether an agent reads (`reads` [A, A]) one of whom something is bad [A, B]."""
    return jnp.any(reads[:, :, None] & bad[None], 1)


def _reads(spec: "TeamSpec") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whose observations and actions an agent learns from [A, A], whose rewards [A, A], and
    whether from the global state [A]."""
    num_agents = len(spec.agents)
    sees, is_paid = np.eye(num_agents, dtype=bool), np.eye(num_agents, dtype=bool)
    reads_state = np.array(["state" in agent.scope for agent in spec.agents])
    for position, agent in enumerate(spec.agents):
        sees[position, [source for source in agent.scope if not isinstance(source, str)]] = True
    for members in spec.reward_teams.members:
        is_paid[np.ix_(members, members)] = True
        if spec.mixer != "none" and len(members) > 1:
            sees[np.ix_(members, members)] = True
            reads_state[list(members)] |= spec.mixer == "qmix"
    return sees, is_paid, reads_state
