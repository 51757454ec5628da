"""Checkpoints: exact round trips, refusal of other structures, and what survives a bad disk."""

import json
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marl import checkpoint
from marl.envs.errors import UsageError


class State(NamedTuple):
    key: Any
    params: Any
    step: Any


def make_state(width=3):
    return State(
        key=jax.random.key(7),
        params={
            "actor": {"w": jnp.arange(2.0 * width).reshape(2, width), "b/c": jnp.ones(width)},
            "critic": [jnp.bfloat16(1.5) * jnp.ones(4, jnp.bfloat16), jnp.array([True, False])],
            "image": jnp.arange(4, dtype=jnp.uint8),
            "nothing": (),
            "none": None,
        },
        step=jnp.int32(5),
    )


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(x) == jax.random.key_impl(y)
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def quiet():
    """Collects what is reported."""
    return []


def test_a_state_comes_back_bit_for_bit(tmp_path):
    state = make_state()
    path = checkpoint.save(tmp_path, 100, state, {"agents": ["a", "b"]})
    assert_equal(checkpoint.restore(path, state), state)
    assert_equal(checkpoint.restore(path, jax.eval_shape(make_state)), state)
    manifest = checkpoint.read_manifest(path)
    assert manifest["agents"] == ["a", "b"]
    assert manifest["step"] == 100
    assert set(manifest["versions"]) == {"marl", "jax", "numpy"}


DTYPES = [
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "int32",
    "int8",
    "int4",
    "uint8",
    "bool",
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 1, 4)])
def test_every_dtype_and_shape_round_trips(tmp_path, dtype, shape):
    values = jnp.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2, dtype)
    path = checkpoint.save(tmp_path, 1, values, {})
    restored = checkpoint.restore(path, values)
    assert isinstance(restored, jax.Array)
    assert_equal(restored, values)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_round_trip_with_their_implementation(tmp_path, impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 2)
    path = checkpoint.save(tmp_path, 1, {"key": keys}, {})
    restored = checkpoint.restore(path, {"key": keys})
    assert_equal(restored, {"key": keys})
    assert jnp.array_equal(jax.random.normal(restored["key"][0]), jax.random.normal(keys[0]))


def test_a_key_of_another_implementation_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, 1, jax.random.key(0, impl="rbg"), {})
    with pytest.raises(UsageError, match=r"the checkpoint has key<rbg>\[\], expected key<fry>\[\]"):
        checkpoint.restore(path, jax.random.key(0))


def test_numbers_and_numpy_arrays_stay_what_they_are(tmp_path):
    tree = {"n": 3, "x": 0.1, "b": True, "a": np.arange(3), "s": np.float64(0.1)}
    restored = checkpoint.restore(checkpoint.save(tmp_path, 1, tree, {}), tree)
    assert {name: type(value) for name, value in restored.items()} == {
        name: type(value) for name, value in tree.items()
    }
    assert restored["x"] == 0.1 and restored["s"] == 0.1 and restored["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("tree", [(), {}, {"a": None, "b": ()}])
def test_a_tree_without_leaves_round_trips(tmp_path, tree):
    assert checkpoint.restore(checkpoint.save(tmp_path, 1, tree, {}), tree) == tree


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
arrays = st.builds(
    lambda shape, dtype, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from([np.float32, np.uint8, np.bool_, np.int64]),
    st.integers(0, 99),
)
trees = st.recursive(
    arrays,
    lambda inner: st.dictionaries(names, inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(tree=trees)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_tree_with_any_names_round_trips(tmp_path, tree):
    assert_equal(checkpoint.restore(checkpoint.save(tmp_path, 1, tree, {}), tree), tree)


def test_another_structure_is_refused_with_the_differences(tmp_path):
    path = checkpoint.save(tmp_path, 1, make_state(), {})
    with pytest.raises(UsageError) as error:
        checkpoint.restore(path, make_state(width=4))
    assert "w']: the checkpoint has float32[2, 3], expected float32[2, 4]" in str(error.value)
    other = make_state()._replace(params={"actor": jnp.ones(2)})
    with pytest.raises(UsageError) as error:
        checkpoint.restore(path, other)
    assert "the checkpoint has nothing, expected float32[2]" in str(error.value)
    assert "the checkpoint has uint8[4], expected nothing" in str(error.value)
    with pytest.raises(UsageError, match=r"has int32\[\], expected float32\[\]"):
        checkpoint.restore(path, make_state()._replace(step=jnp.float32(5)))


def test_many_differences_are_cut_to_one_screen(tmp_path):
    path = checkpoint.save(tmp_path, 1, {}, {})
    with pytest.raises(UsageError, match="and 94 more") as error:
        checkpoint.restore(path, [jnp.ones(())] * 100)
    assert len(str(error.value).splitlines()) < 10


def test_the_newest_are_kept(tmp_path):
    for step in (5, 20, 100, 1000):
        checkpoint.save(tmp_path, step, {}, {}, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step_000000000100",
        "step_000000001000",
    ]
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000000001000"


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    checkpoint.save(tmp_path, 5, jnp.float32(1), {})
    path = checkpoint.save(tmp_path, 5, jnp.float32(2), {})
    assert checkpoint.restore(path, jnp.float32(0)) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_without_checkpoints_has_no_latest(tmp_path):
    assert checkpoint.latest(tmp_path / "missing") is None
    (tmp_path / "notes").mkdir()
    assert checkpoint.latest(tmp_path) is None


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def flip(path):
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


DAMAGES = [
    ("arrays.npz", cut),
    ("arrays.npz", flip),
    ("arrays.npz", os.remove),
    ("manifest.json", cut),
    ("manifest.json", os.remove),
    ("manifest.json", lambda path: path.write_text("{}")),
    ("manifest.json", lambda path: path.write_bytes(b"\xff\xfe")),
]


@pytest.mark.parametrize(("file", "damage"), DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(tmp_path, quiet, file, damage):
    good = checkpoint.save(tmp_path, 1, make_state(), {})
    bad = checkpoint.save(tmp_path, 2, make_state(), {})
    damage(bad / file)
    with pytest.raises(checkpoint.CorruptCheckpoint, match="step_000000000002"):
        checkpoint.restore(bad, make_state())
    assert checkpoint.latest(tmp_path, quiet.append) == good
    assert len(quiet) == 1 and "step_000000000002" in quiet[0]
    with pytest.warns(UserWarning, match="step_000000000002"):
        assert checkpoint.latest(tmp_path) == good


def test_falling_back_does_not_delete_what_is_written_next(tmp_path, quiet):
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, {}, {}, keep=1)
    cut(tmp_path / "step_000000000030" / "arrays.npz")
    path = checkpoint.save(tmp_path, 25, {}, {}, keep=1)
    assert checkpoint.latest(tmp_path, quiet.append) == path


def test_a_checkpoint_of_another_format_is_refused_as_such(tmp_path):
    path = checkpoint.save(tmp_path, 1, {}, {})
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(checkpoint._sealed(manifest | {"format": 99}))
    with pytest.raises(UsageError, match="format 99"):
        checkpoint.restore(path, {})


class FullDisk:
    """Makes the n-th call of a function fail as a full disk does."""

    def __init__(self, function, fails_at):
        self.function, self.left = function, fails_at

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise OSError(28, "No space left on device")
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize(
    ("owner", "name", "fails_at"),
    [
        (np, "savez", 1),
        (os, "fsync", 1),
        (os, "fsync", 2),
        (os, "fsync", 3),
        (checkpoint, "_sealed", 1),
        (type(checkpoint.Path()), "rename", 1),
        (type(checkpoint.Path()), "mkdir", 2),
    ],
)
def test_a_full_disk_leaves_earlier_checkpoints(
    tmp_path, monkeypatch, owner, name, fails_at, same_step
):
    state = make_state()
    first = checkpoint.save(tmp_path, 1, state, {})
    with monkeypatch.context() as patch:
        failing = FullDisk(getattr(owner, name), fails_at)
        patch.setattr(owner, name, lambda *args, **kwargs: failing(*args, **kwargs))
        with pytest.raises(UsageError, match="No space left on device; earlier ones are intact"):
            checkpoint.save(tmp_path, 1 if same_step else 2, state, {}, keep=1)
    assert checkpoint.latest(tmp_path) == first
    assert_equal(checkpoint.restore(first, state), state)
    assert list(tmp_path.iterdir()) == [first], "nothing half-written stays behind"


def test_a_run_killed_between_two_renames_keeps_its_checkpoint(tmp_path):
    path = checkpoint.save(tmp_path, 1, jnp.float32(1), {})
    path.rename(tmp_path / ".old_step_000000000001")
    (tmp_path / ".tmp_2_123").mkdir()
    checkpoint.save(tmp_path, 2, jnp.float32(2), {})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "step_000000000001",
        "step_000000000002",
    ]


def test_objects_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="holds arrays and numbers"):
        checkpoint.save(tmp_path, 1, {"f": object()}, {})
    with pytest.raises(ValueError, match="sha256"):
        checkpoint.save(tmp_path, 1, {}, {"sha256": ""})
    assert list(tmp_path.iterdir()) == []


def test_loading_never_runs_code(tmp_path):
    path = checkpoint.save(tmp_path, 1, jnp.ones(2), {})
    np.savez(path / "arrays.npz", leaf=np.array([print], dtype=object))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"] = checkpoint._checksum(path / "arrays.npz")
    (path / "manifest.json").write_text(checkpoint._sealed(manifest))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        checkpoint.restore(path, jnp.ones(2))
