"""Schedules over environment steps. The kind is config; start, end and horizon are hparams."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

KINDS = ("constant", "linear", "cosine")


def schedule(
    kind: str, start: jax.Array, end: jax.Array, horizon: jax.Array, env_steps: jax.Array
) -> jax.Array:
    """The value at `env_steps`: from `start` to `end` over `horizon` steps, then `end`.

    Args:
      kind: one of `KINDS`; "constant" stays at `start`.
      start, end: [] values.
      horizon: [] environment steps.
      env_steps: [] environment steps taken so far.
    """
    if kind == "constant":
        return start
    fraction = jnp.clip(env_steps / jnp.maximum(horizon, 1.0), 0.0, 1.0)
    if kind == "cosine":
        fraction = 0.5 * (1.0 - jnp.cos(jnp.pi * fraction))
    return start + fraction * (end - start)


class Scheduled(NamedTuple):
    """Values of the schedules in this update, [] each."""

    learning_rate: jax.Array
    entropy_coef: jax.Array


def of_update(config: Any, hparams: Any, env_steps: jax.Array) -> Scheduled:
    """What the schedules say after `env_steps`."""

    def at(kind: str, start: jax.Array, end: jax.Array) -> jax.Array:
        return schedule(kind, start, end, hparams.schedule_steps, env_steps)

    return Scheduled(
        at(config.learning_rate_schedule, hparams.learning_rate, hparams.learning_rate_end),
        at(config.entropy_schedule, hparams.entropy_coef, hparams.entropy_coef_end),
    )
