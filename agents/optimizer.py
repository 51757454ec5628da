"""A network with its optimiser, which is rebuilt from traced floats whenever it steps."""

from typing import Any, NamedTuple

import jax
import optax


class NetworkState(NamedTuple):
    """A network and its optimiser."""

    params: Any
    optimizer: optax.OptState


def make_optimizer(hparams: Any, learning_rate: jax.Array) -> optax.GradientTransformation:
    """Adam on gradients clipped by their global norm, from traced floats.

    It works on all parameters as one vector: a few large kernels instead of many small ones.
    """
    chain = optax.chain(
        optax.clip_by_global_norm(hparams.max_grad_norm),
        optax.adam(learning_rate, eps=hparams.adam_epsilon),
    )
    return optax.flatten(chain)


def step_network(
    network: NetworkState, grads: Any, hparams: Any, learning_rate: jax.Array
) -> NetworkState:
    """One optimiser step of one network."""
    optimizer = make_optimizer(hparams, learning_rate)
    updates, optimizer_state = optimizer.update(grads, network.optimizer)
    return NetworkState(optax.apply_updates(network.params, updates), optimizer_state)
