"""What learners of action values share: epsilon, acting, legal actions, refused spaces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from q_reference import SPACE, inputs, linear_state

from marl.agents import dqn, losses, pqn, q_learning
from marl.agents.learner import CriticSpace
from marl.agents.q_learning import chosen, greedy_action, greedy_value
from marl.envs.errors import UsageError
from marl.envs.spaces import Box, Discrete, MultiDiscrete

ALGORITHMS = {"dqn": dqn, "pqn": pqn}
BATCH = 20_000


def hparams(**changes):
    changes = {"epsilon_start": 0.8, "epsilon_end": 0.2, "schedule_steps": 1000.0} | changes
    return dqn.Hparams(exploration_fraction=0.5)._replace(**changes)


@pytest.mark.parametrize(
    "env_steps, expected",
    [(0.0, 0.8), (250.0, 0.5), (500.0, 0.2), (700.0, 0.2), (float("inf"), 0.2)],
)
def test_epsilon_falls_linearly_and_stays(env_steps, expected):
    np.testing.assert_allclose(q_learning.epsilon(hparams(), env_steps), expected, rtol=1e-6)


@pytest.mark.parametrize("changes", [{"schedule_steps": 0.0}, {"exploration_fraction": 0.0}])
def test_epsilon_without_a_horizon_is_at_its_end(changes):
    for env_steps in (1.0, float("inf")):
        found = q_learning.epsilon(hparams(**changes), jnp.float32(env_steps))
        np.testing.assert_allclose(found, 0.2, rtol=1e-6)


def test_chosen_by_hand():
    q = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    np.testing.assert_array_equal(chosen(q, jnp.array([2, 0])), [3.0, 4.0])
    np.testing.assert_array_equal(chosen(q, jnp.array([-1, 3])), [0.0, 0.0])
    gradient = jax.grad(lambda q: jnp.sum(chosen(q, jnp.array([2, 0]))))(q)
    np.testing.assert_array_equal(gradient, [[0, 0, 1], [1, 0, 0]])


def test_only_legal_actions_count():
    q = jnp.array([[1.0, 9.0, 3.0], [-4.0, -2.0, -6.0], [1.0, 2.0, 3.0]])
    mask = np.array([[True, False, True], [True, False, False], [False, False, False]])
    np.testing.assert_array_equal(greedy_action(q, mask), [2, 0, 2])  # all where none is legal
    np.testing.assert_array_equal(greedy_value(q, mask), [3.0, -4.0, 3.0])
    np.testing.assert_array_equal(greedy_action(q, None), [1, 1, 2])
    np.testing.assert_array_equal(greedy_value(q, None), [9.0, -2.0, 3.0])
    as_integers = mask.astype(np.int32)
    np.testing.assert_array_equal(greedy_value(q, as_integers), greedy_value(q, mask))


def test_inputs_without_weight_are_zeros():
    given = q_learning.Features(jnp.full((2, 3), jnp.nan), (jnp.full((2, 1, 1, 2), 7, jnp.uint8),))
    found = losses.live(given, jnp.array([0.0, 0.5]))
    np.testing.assert_array_equal(found.vector[0], 0.0)
    assert np.all(np.isnan(found.vector[1]))
    np.testing.assert_array_equal(found.images[0].ravel(), [0, 0, 7, 7])
    assert found.images[0].dtype == jnp.uint8


@pytest.fixture(scope="module")
def acting():
    """(act, act_greedy) of values 1, 4, 3, 2: compiled once, for BATCH environments."""
    config = dqn.Config(hidden_sizes=())
    learner = dqn.make(config, SPACE, Discrete(4), CriticSpace(()))
    state = linear_state([1.0, 4.0, 3.0, 2.0])

    def bound(function):
        jitted = jax.jit(function)
        return lambda given, **changes: jitted(jax.random.key(0), state, given, hparams(**changes))

    return bound(learner.act), bound(learner.act_greedy)


def frequencies(output):
    return np.bincount(np.asarray(output.action), minlength=4) / BATCH


def masks(*legal):
    return np.broadcast_to(np.isin(np.arange(4), legal), (BATCH, 4))


@pytest.mark.parametrize("env_steps, epsilon", [(0.0, 0.8), (250.0, 0.5), (np.inf, 0.2)])
def test_exploring_is_uniform_over_legal_actions(acting, env_steps, epsilon):
    """Illegal: the best action. Of the rest 2 is the best, and 0 and 3 have epsilon / 3 each."""
    act, _ = acting
    output = act(inputs(BATCH, masks(0, 2, 3), env_steps))
    assert output.memory == () and output.extras == ()
    expected = [epsilon / 3, 0.0, 1.0 - epsilon * 2 / 3, epsilon / 3]
    # four standard deviations of a frequency are at most 0.015
    np.testing.assert_allclose(frequencies(output), expected, atol=0.015)
    assert frequencies(output)[1] == 0.0


def test_epsilon_zero_is_greedy_and_one_is_uniform(acting):
    act, _ = acting
    given = inputs(BATCH, masks(0, 1, 2, 3), 0.0)
    np.testing.assert_array_equal(frequencies(act(given, epsilon_start=0.0)), [0, 1, 0, 0])
    uniform = frequencies(act(given, epsilon_start=1.0))
    np.testing.assert_allclose(uniform, 0.25, atol=0.015)


def test_greedy_takes_the_best_legal_action(acting):
    _, act_greedy = acting
    for legal, best in [((0, 1, 2, 3), 1), ((0, 3), 3), ((0,), 0), ((), 1)]:
        np.testing.assert_array_equal(act_greedy(inputs(BATCH, masks(*legal))).action, best)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_one_action_may_stand_in_a_pytree(name):
    algorithm = ALGORITHMS[name]
    config = algorithm.Config(hidden_sizes=())
    learner = algorithm.make(config, SPACE, {"move": (Discrete(3, "uint8"),)}, None)
    state, mask = linear_state([1.0, 3.0, 2.0]), np.array([[True, False, True]] * 2)
    for function in (learner.act, learner.act_greedy):
        floats = algorithm.Hparams(epsilon_end=0.0)
        given = inputs(2, {"move": (mask,)})
        action = function(jax.random.key(0), state, given, floats).action["move"][0]
        np.testing.assert_array_equal(action, [2, 2])
        assert action.dtype == jnp.uint8
    q = learner.q_values(state.network.params, np.zeros((5, 2, 3), np.float32))
    np.testing.assert_array_equal(q, np.broadcast_to([1.0, 3.0, 2.0], (5, 2, 3)))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    "space, described, advice",
    [
        (Box((2,)), "Box(2)", "use ppo or sac"),
        (MultiDiscrete((2, 3)), "MultiDiscrete(2, 3)", "use ppo"),
        ((Discrete(2), Discrete(3)), "(Discrete(2), Discrete(3))", "use ppo"),
        ({"aim": Box((1,)), "go": Discrete(2)}, "{'aim': Box(1), 'go': Discrete(2)}", "use ppo"),
        ((), "()", "use ppo"),
    ],
)
def test_other_action_spaces_are_refused(name, space, described, advice):
    algorithm = ALGORITHMS[name]
    with pytest.raises(UsageError) as caught:
        algorithm.make(algorithm.Config(), SPACE, space, CriticSpace(()))
    assert str(caught.value) == (
        f"learner {name!r} takes one Discrete action, and the action space is {described}; {advice}"
    )


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hidden_sizes": (8, 0)}, "hidden_sizes = [8, 0] has 0"),
        ({"activation": "reluu"}, "activation = 'reluu' is not known; did you mean 'relu'"),
        ({"torso": "mlp_nrm"}, "did you mean 'mlp_norm'"),
        ({"torso": "simba", "hidden_sizes": ()}, "give hidden_sizes at least one entry"),
        ({"image_encoder": "vit"}, "image_encoder = 'vit' is not known"),
        ({"learning_rate_schedule": "step"}, "learning_rate_schedule = 'step' is not known"),
    ],
)
def test_wrong_configs_are_refused(name, fields, message):
    with pytest.raises(UsageError) as caught:
        ALGORITHMS[name].Config(**fields)
    assert message in str(caught.value)
