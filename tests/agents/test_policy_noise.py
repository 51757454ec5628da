"""Random numbers that are drawn ahead: the same bits as those that acting draws itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import CASES, act_input, random_mask, relative_difference, sampled

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


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.learner().draw])
def test_a_learner_acts_on_what_was_drawn_ahead(name):
    """Another key does not matter then."""
    case = CASES[name]
    learner, hparams, batch = case.learner(), case.hparams_of(1), 6
    state = learner.init(jax.random.key(0), hparams)
    mask = random_mask(2, case.action_space, (batch,)) if case.masked else None
    memory = learner.initial_memory(batch)
    inputs = act_input(sampled(1, case.observation_space, (batch,)), mask, memory)
    act, keys = jax.jit(learner.act), jax.random.split(jax.random.key(3))
    ahead = inputs._replace(noise=learner.draw(keys[0], batch))
    drawn_within = act(keys[0], state, inputs, hparams)
    assert relative_difference(act(keys[1], state, ahead, hparams), drawn_within) < 1e-6


def test_learners_that_explore_draw_ahead():
    without = {name for name, case in CASES.items() if case.explores and not case.learner().draw}
    assert without == {"random"}
