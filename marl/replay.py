"""One replay buffer for a team, on flashbax: a ring per environment, sampled once for all agents.

A row is one step of one environment: what every agent saw, did, got and was led to, and what those
with memory remembered before it. What critics read of other agents is put together from samples,
never stored.
"""

import os
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.agents.validation import at_least
from marl.envs.errors import UsageError
from marl.experience import TeamRollout

# where the environments' axis B stands in the fields of a `TeamRollout`, whose first axis is T
_ENVS_AXIS = {
    "memory": 3,
    "steps": 3,
    "final_obs": 3,
    "final_action_mask": 3,
    "reset": 1,
    "reward": 2,
    "terminated": 2,
    "truncated": 2,
    "active": 2,
    "final_active": 2,
    "episode_over": 1,
    "global_state": 1,
    "final_global_state": 1,
}


class Replay(NamedTuple):
    """The buffer of a team and how it is used; static.

    Sizes are in transitions: one step of one environment, all agents together.
    """

    capacity: int = 100_000
    batch_size: int = 128  # windows per gradient step
    updates_per_rollout: int = 1  # gradient steps after each rollout
    learning_starts: int = 1_000  # environment steps before the first gradient step
    n_step: int = 1  # rewards before the bootstrap
    sequence: int = 1  # steps of a window that have such returns; what the learners want, no option

    @property
    def window(self) -> int:
        """Steps of a window."""
        return self.sequence + self.n_step - 1

    def check(self, num_envs: int, rollout_length: int) -> None:
        """Raise UsageError where sizes are out of range, or do not fit each other."""
        for name, value in self._asdict().items():
            at_least(f"replay.{name}", value, 0 if name == "learning_starts" else 1)
        shortest = num_envs * max(rollout_length, self.window)
        if self.capacity < shortest:
            window = "n_step"
            if self.sequence > 1:
                window = "burn_in + sequence_length + n_step - 1"
            raise UsageError(
                f"replay.capacity = {self.capacity:,} is less than num_envs * max(rollout_length, "
                f"{window}) = {shortest:,}, one rollout of every environment; give more"
            )

    def rows(self, num_envs: int) -> int:
        """Rows of each environment's ring."""
        return self.capacity // num_envs

    def least(self, num_envs: int) -> int:
        """Transitions that the buffer holds when it is first learned from, or more."""
        starts = max(self.learning_starts, num_envs * self.window)
        return min(starts, num_envs * self.rows(num_envs))


def make_buffer(replay: Replay, num_envs: int) -> Any:
    """The flashbax buffer, whose state may be vmapped over seeds."""
    import flashbax

    return flashbax.make_trajectory_buffer(
        max_length_time_axis=replay.rows(num_envs),
        min_length_time_axis=replay.window,
        sample_batch_size=replay.batch_size,
        add_batch_size=num_envs,
        sample_sequence_length=replay.window,
        period=1,
    )


def ready(replay: Replay, num_envs: int, state: Any, env_steps: jax.Array) -> jax.Array:
    """[] bool: whether a buffer in `state` may be learned from after `env_steps`.

    Both `env_steps` and the transitions in the buffer reach `learning_starts`, or the buffer is
    full. The two are one number, unless a run went on from a checkpoint without its buffer.
    """
    held = state.current_index * num_envs
    filled = state.is_full | (held >= replay.least(num_envs))
    return filled & (env_steps >= replay.learning_starts)


def rows_of(rollout: TeamRollout) -> dict[str, Any]:
    """A rollout as rows [B, T, ...]; what only its own learners want back is left out."""
    steps = tuple(step._replace(extras=(), memory=()) for step in rollout.steps)
    memory = tuple(step.memory for step in rollout.steps)
    fields = rollout._replace(steps=steps, memory=memory)._asdict()
    return {
        name: jax.tree.map(lambda x, axis=axis: jnp.moveaxis(x, axis, 0), fields[name])
        for name, axis in _ENVS_AXIS.items()
    }


def drawn(buffer: Any, state: Any, keys: jax.Array) -> jax.Array:
    """Where the windows stand that `buffer.sample` takes with each of `keys` [G]: [G, M, n] int32.

    For `taken`. The numbers of many samples at once cost about as much as those of one.
    """
    shape = jax.tree.leaves(state.experience)[0].shape[:2]
    places = jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)
    numbered = state.replace(experience=places)
    return jax.vmap(lambda key: buffer.sample(numbered, key).experience)(keys)


def taken(state: Any, places: jax.Array) -> Any:
    """The rows [M, n, ...] that stand at `places` [M, n] of a buffer; memories of the first."""

    def take(places: jax.Array, x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:]).at[places].get(mode="promise_in_bounds")

    return {
        name: jax.tree.map(partial(take, places[:, :1] if name == "memory" else places), rows)
        for name, rows in state.experience.items()
    }


def windows_of(rows: dict[str, Any], env_steps: jax.Array) -> TeamRollout:
    """Sampled rows [M, n, ...] as a rollout of n steps in M environments."""
    fields = {
        name: jax.tree.map(lambda x, axis=axis: jnp.moveaxis(x, 0, axis), rows[name])
        for name, axis in _ENVS_AXIS.items()
    }
    fields["memory"] = jax.tree.map(lambda x: x[0], fields["memory"])
    return TeamRollout(env_steps=env_steps, **fields)


def num_bytes(state: Any) -> int:
    """Of a buffer's state, or of its shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def check_memory(needed: int, available: int | None) -> None:
    """Raise UsageError where a buffer of `needed` bytes does not fit in what is `available`."""
    if available is None or needed <= available:
        return
    raise UsageError(
        f"the replay buffer needs {needed:,} bytes and the device has {available:,}; lower "
        "replay.capacity (transitions of all environments together), or num_seeds"
    )


def available_memory() -> int | None:
    """Bytes of the first device's memory that may be used; None where it does not say."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        found = device.memory_stats() or {}
        limit = found.get("bytes_limit")
        return None if limit is None else limit - found.get("bytes_in_use", 0)
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
