"""Random numbers that are drawn ahead: the same bits as those that acting draws itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl.agents.policies import Policy
from marl.envs.spaces import Box, Discrete, MultiDiscrete


@pytest.mark.parametrize("space", [Discrete(4), MultiDiscrete((3, 2)), Box((2,), -1, 1)])
def test_noise_that_is_drawn_ahead_gives_the_same_bits(space):
    policy = Policy({"a": space, "b": Discrete(3)})
    outputs = jax.random.normal(jax.random.key(1), (5, policy.num_outputs))
    log_std = jnp.zeros(policy.num_scales)
    key = jax.random.key(2)
    ahead = policy.sample_from(policy.draw(key, (5,)), outputs, log_std, None)
    at_once = policy.sample(key, outputs, log_std, None)
    jax.tree.map(np.testing.assert_array_equal, ahead, at_once)
    if isinstance(space, Discrete):  # what JAX's own sampler draws from the leaf's key
        own = jax.random.categorical(jax.random.split(key)[0], outputs[:, :4])
        np.testing.assert_array_equal(at_once.action["a"], own)
