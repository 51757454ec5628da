"""Spaces are values: they compare, hash, validate and sample."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl.envs import spaces
from marl.envs.frozen import freeze, thaw
from marl.envs.spaces import Box, Discrete, MultiDiscrete


def test_equal_spaces_are_one_key():
    pairs = [
        (Box((2,), 0, 1), Box([2], 0.0, 1.0, np.float32)),
        (Box((2,), np.zeros(2), np.ones(2)), Box((2,), (0.0, 0.0), [1, 1])),
        (Discrete(np.int64(4)), Discrete(4)),
        (MultiDiscrete(np.array([2, 3])), MultiDiscrete((2, 3))),
    ]
    for one, other in pairs:
        assert one == other and hash(one) == hash(other)
    assert Box((2,), 0, 1) != Box((2,), 0, 1, "uint8")
    assert Box((2,)) != Box((2, 1)) and Discrete(3) != Discrete(4)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Box((2,), low=1.0, high=0.0), "above high"),
        (lambda: Box((2,), low=(0.0, 0.0, 0.0)), "3 elements"),
        (lambda: Discrete(0), "n = 0"),
        (lambda: MultiDiscrete(()), "nvec"),
        (lambda: MultiDiscrete((2, 0)), "nvec"),
    ],
)
def test_impossible_spaces_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


COMPOSITE = {"b": Box((2,), -1, 1), "a": (Discrete(3), [MultiDiscrete((2, 5))])}


def test_signature_is_the_space():
    value = spaces.signature(COMPOSITE)
    assert hash(value) == hash(spaces.signature(dict(reversed(COMPOSITE.items()))))
    assert spaces.from_signature(value) == COMPOSITE
    assert value != spaces.signature({**COMPOSITE, "b": Box((2,), -1, 2)})
    assert value != spaces.signature({**COMPOSITE, "a": [Discrete(3), [MultiDiscrete((2, 5))]]})


def test_what_is_not_a_space_is_refused():
    with pytest.raises(TypeError, match="'left'"):
        spaces.leaves({"a": Discrete(2), "b": "left"})


def test_zeros_and_descriptions():
    zeros = spaces.zeros(COMPOSITE, batch=(7,))
    assert zeros["b"].shape == (7, 2) and zeros["a"][0].shape == (7,)
    assert zeros["a"][1][0].dtype == jnp.int32
    assert spaces.describe(COMPOSITE) == "{'a': (Discrete(3), [MultiDiscrete(2, 5)]), 'b': Box(2)}"
    assert spaces.describe(Box((4, 5, 1), 0, 255, "uint8")) == "Box(4, 5, 1) uint8"


@settings(max_examples=25, deadline=None)
@given(
    low=st.integers(-3, 3),
    extent=st.integers(0, 4),
    dtype=st.sampled_from(["float32", "int32", "int8"]),
    seed=st.integers(0, 1000),
)
def test_samples_lie_in_the_box(low, extent, dtype, seed):
    space = Box((3, 2), low, low + extent, dtype)
    sample = spaces.sample(jax.random.key(seed), space)
    assert sample.shape == space.shape and sample.dtype == dtype
    assert np.all(sample >= low) and np.all(sample <= low + extent)


def test_samples_keep_a_single_bound():
    space = Box((100,), low=(0.0, -np.inf) * 50)
    sample = np.asarray(spaces.sample(jax.random.key(0), space))
    assert np.all(sample[::2] >= 0) and np.any(sample[1::2] < 0)


def test_integer_samples_reach_both_bounds():
    for space, expected in [
        (Box((), 0, 255, "uint8"), (0, 255)),
        (Box((), 0, 2, "int32"), (0, 2)),
        (Discrete(3), (0, 2)),
    ]:
        keys = jax.random.split(jax.random.key(0), 4000)
        drawn = np.asarray(jax.vmap(lambda key, s=space: spaces.sample(key, s))(keys))
        assert (drawn.min(), drawn.max()) == expected


def test_samples_of_a_composite_are_independent():
    sample = spaces.sample(jax.random.key(0), {"x": Box((50,), 0, 1), "y": Box((50,), 0, 1)})
    assert np.all(sample["x"] != sample["y"])
    draws = spaces.sample(jax.random.key(1), MultiDiscrete((2,) * 30 + (7,) * 30))
    assert set(np.asarray(draws[:30]).tolist()) == {0, 1} and draws[30:].max() > 3


def test_frozen_arguments_come_back_and_hash_by_value():
    given = {"a": [1, (2, {"b": "c"})], "m": np.arange(6.0).reshape(2, 3), "n": None}
    frozen = freeze(given)
    assert hash(frozen) == hash(freeze({"n": None, "m": np.array(given["m"]), "a": given["a"]}))
    assert frozen != freeze({**given, "a": (1, (2, {"b": "c"}))})
    back = thaw(frozen)
    assert back["a"] == given["a"]
    np.testing.assert_array_equal(back["m"], given["m"])
