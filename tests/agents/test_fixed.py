"""Policies that never learn: what random draws, what noop does, functions of one's own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_experience import is_legal
from learner_cases import act_input, sampled

from marl.agents import fixed
from marl.agents.learner import CriticSpace
from marl.envs.errors import UsageError
from marl.envs.spaces import Box, Discrete, MultiDiscrete

BATCH = 4096
SPACE = Box((3,))


def acted(algorithm, space, mask=None, batch=BATCH, key=0, mode="act"):
    learner = algorithm.make(algorithm.Config(), SPACE, space, CriticSpace(SPACE))
    inputs = act_input(sampled(0, SPACE, (batch,)), mask)
    act = jax.jit(getattr(learner, mode))
    output = act(jax.random.key(key), (), inputs, algorithm.Hparams())
    assert output.extras == () and output.memory == ()
    return jax.tree.map(np.asarray, output.action)


def shares(actions, n):
    return np.bincount(actions, minlength=n) / len(actions)


def test_random_is_uniform_over_what_is_legal():
    """Four standard deviations of a share of 1/2 are 0.03."""
    mask = {
        "one": np.tile(np.array([True, False, True, True]), (BATCH, 1)),
        "two": np.tile(np.array([True, True, False, True, False]), (BATCH, 1)),
    }
    space = {"one": Discrete(4, "int8"), "two": MultiDiscrete((2, 3))}
    action = acted(fixed.random, space, mask)
    assert action["one"].dtype == np.int8 and is_legal(space, action, mask)
    close = partial(np.testing.assert_allclose, atol=0.03)
    close(shares(action["one"], 4), [1 / 3, 0, 1 / 3, 1 / 3])
    close(shares(action["two"][:, 0], 2), [0.5, 0.5])
    close(shares(action["two"][:, 1], 3), [0, 1, 0])
    close(shares(acted(fixed.random, Discrete(4)), 4), [0.25] * 4)
    nothing = np.zeros((BATCH, 4), bool)
    close(shares(acted(fixed.random, Discrete(4), nothing), 4), [0.25] * 4)


def test_random_fills_bounds_and_is_normal_without():
    space = {
        "aim": Box((2,), low=(-1.0, 0.0), high=(1.0, 5.0)),
        "free": Box((1, 2)),
        "half": Box((1,), low=0.0),
        "pixel": Box((1,), 0, 3, "uint8"),
    }
    action = acted(fixed.random, space)
    assert {name: x.dtype.name for name, x in action.items()} == {
        name: leaf.dtype for name, leaf in space.items()
    }
    low, high = space["aim"].bounds()
    assert np.all(action["aim"] >= low) and np.all(action["aim"] <= high)
    np.testing.assert_allclose(action["aim"].mean(0), [0.0, 2.5], atol=0.1)
    np.testing.assert_allclose(action["aim"].std(0), (high - low) / np.sqrt(12), rtol=0.05)
    assert action["free"].shape == (BATCH, 1, 2)
    np.testing.assert_allclose(action["free"].std(0), 1.0, atol=0.05)
    np.testing.assert_allclose(np.mean(action["half"] == 0.0), 0.5, atol=0.03)
    np.testing.assert_allclose(shares(action["pixel"][:, 0], 4), [0.25] * 4, atol=0.03)


def test_parts_of_a_random_action_are_independent():
    action = acted(fixed.random, (Discrete(2), Discrete(2), Box((2,), 0.0, 1.0)))
    rows = np.stack([action[0], action[1], *action[2].T])
    np.testing.assert_allclose(np.corrcoef(rows), np.eye(4), atol=0.07)


@pytest.mark.parametrize("mode", ["act", "act_greedy", "next_action"])
def test_random_draws_in_evaluation_too(mode):
    one, other = (acted(fixed.random, Discrete(4), key=key, mode=mode) for key in (0, 1))
    assert np.any(one != other)


def test_noop_is_the_first_legal_choice_and_what_is_nearest_to_zero():
    space = {
        "aim": Box((2,), low=(-1.0, 2.0), high=(1.0, 5.0)),
        "free": Box((1, 2)),
        "one": Discrete(4),
        "two": MultiDiscrete((2, 3)),
    }
    mask = {
        "aim": None,
        "free": None,
        "one": np.array([[True] * 4, [False, False, True, True], [False] * 4]),
        "two": np.array([[True] * 5, [False, True, False, True, True], [False] * 5]),
    }
    expected = {
        "aim": [[0.0, 2.0]] * 3,
        "free": [[[0.0, 0.0]]] * 3,
        "one": [0, 2, 0],
        "two": [[0, 0], [1, 1], [0, 0]],
    }
    for key in (0, 1):
        jax.tree.map(
            np.testing.assert_array_equal,
            acted(fixed.noop, space, mask, batch=3, key=key),
            {name: np.array(value) for name, value in expected.items()},
        )
    unmasked = acted(fixed.noop, space, batch=3)
    assert not np.any(unmasked["one"]) and not np.any(unmasked["two"])


def follow(key, obs, action_mask):
    """The place of the largest number; with masks, the last legal choice."""
    if action_mask is None:
        return jnp.argmax(obs)
    return 2 - jnp.argmax(action_mask[::-1])


def test_a_script_sees_one_observation_its_mask_and_a_key_of_its_own():
    obs = sampled(0, SPACE, (5,))
    chase = fixed.scripted(follow)
    action = acted(chase, Discrete(3, "int16"), batch=5)
    np.testing.assert_array_equal(action, np.argmax(obs, -1))
    assert action.dtype == np.int16
    mask = np.array([[True, False, False], [True, True, False]] * 2)
    np.testing.assert_array_equal(acted(chase, Discrete(3), mask, batch=4), [0, 1, 0, 1])

    def noise(key, obs, action_mask):
        return {"a": jax.random.normal(key, (2,))}

    drawn = acted(fixed.scripted(noise), {"a": Box((2,))}, batch=100)["a"]
    assert len(np.unique(drawn)) == 200


def test_an_algorithm_is_a_value():
    assert fixed.scripted(follow) == fixed.scripted(follow) != fixed.random
    assert hash(fixed.scripted(follow)) == hash(fixed.scripted(follow))
    assert fixed.random != fixed.noop
    assert [x.__name__ for x in (fixed.random, fixed.noop, fixed.scripted(follow))] == [
        "random",
        "noop",
        "follow",
    ]


@pytest.mark.parametrize(
    "action, message",
    [
        (
            lambda: jnp.zeros((2,)),
            "gave actions of shape (2,), and the action space is Discrete(3)",
        ),
        (lambda: {"a": 0}, "gave actions of shape {'a': ()}, and the action space is Discrete(3)"),
    ],
)
def test_a_script_that_gives_no_action_is_refused(action, message):
    def wrong(key, obs, action_mask):
        return action()

    with pytest.raises(UsageError) as caught:
        acted(fixed.scripted(wrong), Discrete(3), batch=2)
    assert "the scripted policy" in str(caught.value) and message in str(caught.value)
