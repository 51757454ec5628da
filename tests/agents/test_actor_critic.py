"""What actor-critic learners share: how inputs are normalised, how networks are sized."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import CASES

from marl.agents import actor_critic, ppo
from marl.agents.learner import CriticSpace
from marl.agents.statistics import RunningStatistics
from marl.envs.spaces import Box, Discrete, MultiDiscrete

SPACE = {"kind": Discrete(2), "parts": MultiDiscrete((2, 2)), "speed": Box((3,))}
OBS = {
    "kind": jnp.array([1]),
    "parts": jnp.array([[0, 1]]),
    "speed": jnp.array([[5.0, 1e6, -1e6]]),
}


@pytest.fixture(scope="module")
def normalising():
    config = ppo.Config(hidden_sizes=(8,), normalize_observations=True)
    return actor_critic.make_parts(config, SPACE, Discrete(2), CriticSpace(SPACE))


def state_with(statistics):
    """A state of which features read the statistics alone."""
    return actor_critic.State((), (), statistics, statistics, ())


def test_numbers_are_normalised_and_categories_are_not(normalising):
    statistics = RunningStatistics(jnp.float32(9.0), jnp.full(9, 3.0), jnp.full(9, 4.0))
    # (5 - 3) / 2, then the limits; one-hot parts stay 0 and 1
    expected = [[0, 1, 1, 0, 0, 1, 1.0, 10.0, -10.0]]
    for features in (actor_critic.actor_features, actor_critic.critic_features):
        vector = features(normalising, state_with(statistics), OBS).vector
        np.testing.assert_allclose(vector, expected, rtol=1e-4)


def test_without_statistics_nothing_is_normalised(normalising):
    vector = actor_critic.actor_features(normalising, state_with(()), OBS).vector
    np.testing.assert_array_equal(vector, [[0, 1, 1, 0, 0, 1, 5.0, 1e6, -1e6]])


@pytest.mark.parametrize("critic_sizes, expected", [((), [8, 4]), ((6,), [6]), ((5, 3), [5, 3])])
def test_the_critic_has_sizes_of_its_own(critic_sizes, expected):
    config = ppo.Config(hidden_sizes=(8, 4), critic_hidden_sizes=critic_sizes)
    learner = ppo.make(config, SPACE, Discrete(2), CriticSpace(SPACE))
    hparams = CASES["ppo-discrete"].hparams()
    state = jax.eval_shape(learner.init, jax.random.key(0), hparams)
    sizes = {
        name: [params[layer]["b"].shape[0] for layer in sorted(params)]
        for name, params in [
            ("actor", state.actor.params["network"]),
            ("critic", state.critic.params),
        ]
    }
    assert sizes == {"actor": [8, 4, 2], "critic": [*expected, 1]}
