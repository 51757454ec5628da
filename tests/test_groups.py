"""Stacking agents: where each agent's data stands, and that a loop and a `vmap` agree on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl import groups
from marl.groups import Group


def make_group(sets, vectorise=True, identified=True):
    members = tuple(position for positions in sets for position in positions)
    scopes = tuple(("self",) for _ in members)
    return Group(
        sets,
        learner=None,
        identified=identified,
        contexts=((),) * sum(map(len, sets)),
        scopes=scopes,
        joint=False,
        vectorise=vectorise,
    )


PAIRS = make_group(((4, 0), (1, 3)))  # two sharing sets of two agents, of five or more agents


def agents(num_agents, *shape):
    """By position, a tree whose every element tells the position and the place within it."""
    size = int(np.prod(shape))
    return [
        {"x": jnp.arange(size).reshape(shape) + 100 * position, "y": (jnp.float32(position),)}
        for position in range(num_agents)
    ]


def test_stack_has_sets_first_and_members_second():
    stacked = groups.stack(PAIRS, agents(5, 3))
    np.testing.assert_array_equal(stacked["y"][0], [[4, 0], [1, 3]])
    assert stacked["x"].shape == (2, 2, 3)
    np.testing.assert_array_equal(stacked["x"][1, 0], [100, 101, 102])


@given(st.permutations(range(6)), st.sampled_from([(6, 1), (3, 2), (2, 3), (1, 6)]))
def test_unstack_is_the_inverse_of_stack(order, shape):
    sets = tuple(map(tuple, np.reshape(order, shape).tolist()))
    group, given_trees = make_group(sets), agents(6, 2)
    returned = groups.unstack(group, groups.stack(group, given_trees))
    assert set(returned) == set(range(6))
    for position, tree in returned.items():
        np.testing.assert_array_equal(tree["x"], given_trees[position]["x"])
        assert tree["y"][0] == position


def test_fold_puts_members_last_within_the_batch():
    """[T, S, N, B] = [1, 2, 2, 3]: the batch of a set is env 0 of both members, then env 1, ..."""
    by_agent = [10 * position + jnp.arange(3) for position in range(5)]  # [B]: position, env
    folded = groups.fold(PAIRS, groups.stack(PAIRS, by_agent)[None])
    np.testing.assert_array_equal(folded, [[[40, 0, 41, 1, 42, 2], [10, 30, 11, 31, 12, 32]]])


def test_folded_one_hots_stand_where_the_members_stand():
    one_hot = groups.folded_one_hot(PAIRS, batch_size=6)
    np.testing.assert_array_equal(np.argmax(one_hot, -1), [0, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(np.sum(one_hot, -1), 1)


def test_fold_without_sharing_only_drops_the_member_axis():
    single = make_group(((2,), (0,)))
    x = jnp.arange(2 * 2 * 1 * 3 * 4).reshape(2, 2, 1, 3, 4)
    np.testing.assert_array_equal(groups.fold(single, x), x[:, :, 0])


@pytest.mark.parametrize("sets", [((0,), (1,), (2,)), ((1,),)], ids=["three", "one"])
def test_over_sets_gives_each_set_its_own_and_all_the_common(sets):
    group = make_group(sets)
    x = jnp.arange(2.0 * len(sets)).reshape(len(sets), 2)
    y = jnp.arange(5.0 * len(sets)).reshape(5, len(sets))  # the axis of sets is 1
    common = {"z": jnp.float32(7)}
    calls = []

    def function(x, y, common):
        calls.append(x.shape)
        return {"sum": jnp.sum(x) + jnp.sum(y) + common["z"], "x": x}

    out = groups.over_sets(group, function, (0, 1, None), x, y, common)
    for index in range(len(sets)):
        expected = x[index].sum() + y[:, index].sum() + 7
        np.testing.assert_allclose(out["sum"][index], expected)
        np.testing.assert_array_equal(out["x"][index], x[index])
    assert calls == [(2,)]  # one call: vmapped, or a group of one


@pytest.mark.parametrize("vectorise", [True, False])
def test_over_members_is_the_same_as_a_loop(vectorise):
    group = make_group(((0, 1, 2),), vectorise)
    x, shared = jnp.arange(6.0).reshape(3, 2), jnp.float32(2)
    calls = []

    def function(x, shared):
        calls.append(x.shape)
        return x * shared

    out = groups.over_members(group, function, (0, None), x, shared)
    np.testing.assert_array_equal(out, x * 2)
    assert calls == [(2,)] * (1 if vectorise else 3)


def test_identify_adds_the_member_only_where_parameters_are_shared():
    obs = jnp.ones((3, 4))
    identified = groups.identify(PAIRS, obs, jnp.asarray([0.0, 1.0]), (3,))
    np.testing.assert_array_equal(identified["agent_id"], [[0, 1]] * 3)
    assert identified["obs"] is obs
    alone = make_group(((0,), (1,)), identified=False)
    assert groups.identify(alone, obs, jnp.ones((1,)), (3,)) is obs


def test_jit_does_not_reorder_agents():
    """Dict keys come back sorted from jit; positions are what counts."""
    given_trees = agents(12, 1)
    group = make_group(tuple((position,) for position in reversed(range(12))))
    returned = jax.jit(lambda trees: groups.unstack(group, groups.stack(group, trees)))(given_trees)
    for position, tree in returned.items():
        assert tree["y"][0] == position
