"""Memory cores: what recurrent networks remember. Knows haiku, as `networks` does.

A core reads what the torso made of an observation. What it does of that alone is one product over
all steps; only the product with the memory is inside the scan. As in `networks`, weights are
[outputs, inputs] and the batch stands last inside.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from marl.agents.orthogonal import orthogonal

CORES = ("none", "gru", "lstm")


class LSTMMemory(NamedTuple):
    """[..., size] each."""

    hidden: jax.Array
    cell: jax.Array


def initial_memory(core: str, size: int, batch_size: int) -> Any:
    """Zeros: the memory [batch_size, size] at the start of an episode."""
    zeros = jnp.zeros((batch_size, size))
    return zeros if core == "gru" else LSTMMemory(zeros, zeros)


def unroll(
    core: str, size: int, x: jax.Array, memory: Any, reset: jax.Array, active: jax.Array
) -> tuple[jax.Array, Any]:
    """Run a core over T steps of B sequences; inside `hk.transform`.

    Args:
      core, size: which one, and the size of its memory.
      x: [inputs, T * B] what it reads.
      memory: [B, size] leaves, before the first step.
      reset: [T, B] bool: the memory is that of a fresh episode before this step.
      active: [T, B] bool: steps that are not leave the memory as it was.

    Returns:
      The outputs [size, T * B], and the memory after each step, [T, B, size] leaves.
    """
    length, batch = reset.shape
    kind = _KINDS[core]
    w, w_memory, b = _Weights(core, kind, size)(x.shape[0])
    read = jnp.moveaxis((w @ x + b[:, None]).reshape(-1, length, batch), 1, 0)
    memory = jax.tree.map(jnp.transpose, memory)  # [size, B] from here on
    _, (outputs, memories) = jax.lax.scan(
        partial(_body, kind.step, w_memory), memory, (read, reset, active)
    )
    outputs = jnp.moveaxis(outputs, 0, 1).reshape(size, length * batch)
    return outputs, jax.tree.map(lambda m: jnp.swapaxes(m, 1, 2), memories)


def _body(
    step: Callable[..., tuple[jax.Array, Any]], w: jax.Array, memory: Any, inputs: Any
) -> tuple[Any, tuple[jax.Array, Any]]:
    """One step of the scan; `w` [gates * size, size]."""
    read, reset, active = inputs
    memory = jax.tree.map(lambda m: jnp.where(reset, 0.0, m), memory)
    output, moved = step(w, read, memory)
    memory = jax.tree.map(lambda new, old: jnp.where(active, new, old), moved, memory)
    return memory, (output, memory)


def _gru(w: jax.Array, read: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cho et al. 2014 (arXiv:1406.1078), with the reset gate after the product, as in cuDNN.

    So one product with the memory gives all gates.
    """
    size = h.shape[0]
    product = w @ h
    reset, update = jnp.split(jax.nn.sigmoid(read[: 2 * size] + product[: 2 * size]), 2)
    candidate = jnp.tanh(read[2 * size :] + reset * product[2 * size :])
    h = candidate + update * (h - candidate)
    return h, h


def _lstm(w: jax.Array, read: jax.Array, memory: LSTMMemory) -> tuple[jax.Array, LSTMMemory]:
    """Hochreiter & Schmidhuber 1997, with forget gates (Gers et al. 2000)."""
    gates = read + w @ memory.hidden
    size = memory.cell.shape[0]
    enter, forget, leave = jnp.split(jax.nn.sigmoid(gates[: 3 * size]), 3)
    cell = forget * memory.cell + enter * jnp.tanh(gates[3 * size :])
    hidden = leave * jnp.tanh(cell)
    return hidden, LSTMMemory(hidden, cell)


class _Kind(NamedTuple):
    num_gates: int
    step: Callable[..., tuple[jax.Array, Any]]  # (w, read, memory) -> (output, memory)
    second_bias: float  # where the bias of the second gate starts


_KINDS = {
    "gru": _Kind(3, _gru, 0.0),
    "lstm": _Kind(4, _lstm, 1.0),  # forget gates start open: Jozefowicz et al. 2015, section 2.2
}


class _Weights(hk.Module):
    """Of all gates, one upon the other; each gate's own are orthogonal."""

    def __init__(self, name: str, kind: _Kind, size: int):
        super().__init__(name=name)
        self.kind, self.size = kind, size

    def __call__(self, num_inputs: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        num_gates = self.kind.num_gates
        total = num_gates * self.size

        def by_gate(shape: Any, dtype: Any) -> jax.Array:
            keys = jax.random.split(hk.next_rng_key(), num_gates)
            gates = jax.vmap(lambda key: orthogonal(key, (self.size, shape[1]), 1.0))(keys)
            return gates.reshape(shape).astype(dtype)

        def bias(shape: Any, dtype: Any) -> jax.Array:
            second = jnp.arange(total) // self.size == 1
            return jnp.where(second, self.kind.second_bias, 0.0).astype(dtype)

        return (
            hk.get_parameter("w", (total, num_inputs), init=by_gate),
            hk.get_parameter("w_memory", (total, self.size), init=by_gate),
            hk.get_parameter("b", (total,), init=bias),
        )
