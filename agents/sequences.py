"""Recurrent networks on experience: sequences, and the memory before each.

A rollout [T, B] is cut along time into chunks of L steps; sequences are [L, C * B], the C chunks of
an environment apart from each other and never mixed with another's. The memory before a chunk is
what the parameters before the update had there: `Memories` come from one pass over the rollout. As
parameters move it grows stale; burn-in runs the last steps before the chunk again with those that
learn, and no gradient flows into it. The first chunk has the memory it was acted with.

Windows of replay are sequences already, and begin with the memory that was stored with them.

Where a network is feed-forward there is nothing of all that: `Steps` are (), and samples are steps.
Features are whatever a network reads, with the axes of the batch in front.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marl.agents import losses
from marl.agents.cores import CORES
from marl.agents.learner import ActInput
from marl.agents.networks import Features, Network
from marl.agents.validation import at_least, divisible, one_of
from marl.envs.errors import UsageError


class Steps(NamedTuple):
    """What a recurrent network needs beside the features of M sequences of L steps."""

    memory: Any  # [1, M, ...] before the first step; M is the second axis of all that is here
    reset: jax.Array  # [L, M] bool: the step before this one ended the episode
    active: jax.Array  # [L, M] bool: others leave the memory as it was
    burn_in: Any = ()  # `BurnIn`, or () without


class BurnIn(NamedTuple):
    """The K steps before each of M sequences."""

    steps: Steps  # without a burn-in of their own
    features: Features  # [K, M, ...]
    applies: jax.Array  # [1, M] bool: not where a sequence is the first of its rollout


def check_config(config: Any) -> None:
    """Raise UsageError where a field that sizes cores, or sequences of rollouts, is not valid."""
    one_of("core", config.core, CORES)
    at_least("core_size", config.core_size, 1)
    if not hasattr(config, "sequence_length"):
        return
    _check_lengths(config)
    if config.burn_in > config.sequence_length:
        raise UsageError(
            f"burn_in = {config.burn_in} is longer than sequence_length = "
            f"{config.sequence_length}; the steps of a burn-in are those of the sequence before"
        )


def check_windows(config: Any) -> None:
    """Raise UsageError where a field that sizes cores, or windows of replay, is not valid."""
    one_of("core", config.core, CORES)
    at_least("core_size", config.core_size, 1)
    _check_lengths(config)
    if config.core != "none" and not config.sequence_length:
        raise UsageError(
            f"core = {config.core!r} learns from sequences of replay, and sequence_length = 0; "
            "give the steps that gradients flow back through, as in sequence_length = 16"
        )


def _check_lengths(config: Any) -> None:
    at_least("sequence_length", config.sequence_length, 0)
    at_least("burn_in", config.burn_in, 0)


def check_minibatches(config: Any, batch_shape: tuple[int, int]) -> None:
    """Raise UsageError where rollouts of (T, number of environments) do not divide."""
    length, num_envs = batch_shape
    parts = "num_minibatches", config.num_minibatches
    if config.core == "none":
        divisible("num_envs * rollout_length", length * num_envs, *parts)
        return
    own = config.sequence_length or length
    if length % own:
        raise UsageError(
            f"rollout_length = {length} is not divisible by sequence_length = {own}; rollouts are "
            "cut into sequences of equal length, so change one of them"
        )
    name = "num_envs * (rollout_length / sequence_length)"
    divisible(name, num_envs * (length // own), *parts)


def is_recurrent(network: Network) -> bool:
    return network.unroll is not None


def act(
    network: Network, params: Any, features: Features, inputs: ActInput
) -> tuple[jax.Array, Any]:
    """One step: outputs [B, n] and the memory [B, ...] after it."""
    if not is_recurrent(network):
        return network.apply(params, features), inputs.memory
    active = jnp.ones_like(inputs.reset) if inputs.active is None else inputs.active
    reset, active, features = jax.tree.map(lambda x: x[None], (inputs.reset, active, features))
    outputs, memories = network.unroll(params, features, inputs.memory, reset, active)
    return outputs[0], jax.tree.map(lambda m: m[0], memories)


def run(network: Network, params: Any, features: Features, steps: Any) -> tuple[jax.Array, Any]:
    """Outputs [L, M, n] and memories [L, M, ...] after each step.

    Of a feed-forward network outputs [..., n] and (), whatever the axes of `features`.
    """
    if not is_recurrent(network):
        return network.apply(params, features), ()
    memory = steps.memory
    if steps.burn_in:
        still, burn = jax.lax.stop_gradient(params), steps.burn_in
        warm = last(run(network, still, burn.features, burn.steps)[1])
        memory = jax.tree.map(lambda new, old: _where(burn.applies, new, old), warm, memory)
    first = jax.tree.map(lambda m: m[0], memory)
    return network.unroll(params, features, first, steps.reset, steps.active)


def run_apart(network: Network, params: Any, features: Features, memories: Any) -> jax.Array:
    """Outputs [T, B, n] of steps that each go on from a memory of its own, [T, B, ...]."""
    if not is_recurrent(network):
        return network.apply(params, features)
    batch = jax.tree.leaves(features)[0].shape[:2]

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(1, -1, *x.shape[2:])

    fresh = jnp.zeros((1, batch[0] * batch[1]), bool)
    steps = Steps(jax.tree.map(flat, memories), reset=fresh, active=~fresh)
    outputs, _ = run(network, params, jax.tree.map(flat, features), steps)
    return outputs.reshape(*batch, *outputs.shape[2:])


def whole(network: Network, memory: Any, reset: jax.Array, weight: jax.Array) -> Any:
    """`Steps` of a whole rollout [T, B] that begins with `memory` [B, ...]."""
    if not is_recurrent(network):
        return ()
    return Steps(jax.tree.map(lambda m: m[None], memory), reset, weight > 0)


def memories_of(network: Network, params: Any, features: Features, steps: Any) -> Any:
    """Memories [L, M, ...] after each step; () of feed-forward networks, which do not run."""
    return run(network, params, features, steps)[1] if is_recurrent(network) else ()


def last(memories: Any) -> Any:
    """The memory [1, M, ...] after the last step."""
    return jax.tree.map(lambda m: m[-1:], memories)


def samples(batch: Any, memories: Any, config: Any) -> Any:
    """What minibatches are drawn from, of a NamedTuple of a rollout, with leaves [T, B, ...].

    Its field `steps` is what `whole` gives, and `memories` [T, B, ...] are those after each step.
    Where `steps` are () samples are steps [T * B, ...]. Else they are sequences [L, C * B, ...]; in
    steps that are not active their `features` are zeros, so that nothing reaches a gradient.
    """
    if not isinstance(batch.steps, Steps):
        return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), batch)
    steps = batch.steps
    features = losses.live(batch.features, steps.active)
    length, num_envs = steps.reset.shape
    own = config.sequence_length or length
    starts = range(0, length, own)
    befores = jax.tree.map(lambda m, x: jnp.concatenate([m, x]), steps.memory, memories)

    def at(times: Sequence[int]) -> Any:
        """The memories [1, C * B, ...] before these steps."""
        return jax.tree.map(lambda m: jnp.concatenate([m[t : t + 1] for t in times], 1), befores)

    chunks = jax.tree.map(partial(cut, own), batch._replace(features=features, steps=()))
    reset, active = cut(own, steps.reset), cut(own, steps.active)
    found = Steps(at(starts), reset, active)
    if config.burn_in and len(starts) > 1:
        tail = partial(_end_of_the_chunk_before, config.burn_in, num_envs)
        earlier = at([max(start - config.burn_in, 0) for start in starts])
        burn_in = BurnIn(
            steps=Steps(earlier, tail(reset), tail(active)),
            features=jax.tree.map(tail, chunks.features),
            applies=jnp.arange(len(starts) * num_envs)[None] >= num_envs,
        )
        found = found._replace(burn_in=burn_in)
    return chunks._replace(steps=found)


def select(batch: Any, indices: Any) -> Any:
    """The samples with these indices, of what `samples` gives."""
    sequences = isinstance(batch.steps, Steps)
    return jax.tree.map(lambda x: x[:, indices] if sequences else x[indices], batch)


def cut(length: int, x: jax.Array) -> jax.Array:
    """[T, B, ...] to [length, C * B, ...]: chunk c of environment b stands at c * B + b."""
    chunks = x.reshape(-1, length, *x.shape[1:])
    return jnp.moveaxis(chunks, 0, 1).reshape(length, -1, *x.shape[2:])


def _end_of_the_chunk_before(steps: int, num_envs: int, x: jax.Array) -> jax.Array:
    """The last `steps` of the chunk before each of [L, C * B, ...]; of the first, any others."""
    return jnp.roll(x[-steps:], num_envs, axis=1)


def _where(which: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(which.reshape(*which.shape, *(1,) * (new.ndim - which.ndim)), new, old)
