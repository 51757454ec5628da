"""Updates of value decomposition, against a second implementation."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixing_cases import BLIND, ENV, PAIR, TOLERANCE, given_for, mixed_team, reference_update
from team_cases import (
    agent_states,
    all_finite,
    assert_identical,
    identical,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
)

from marl import learning
from marl.agents import dqn, networks, pqn

GOLDEN = {
    "dqn-vdn": (ENV, dqn, "vdn", {}),
    "dqn-qmix": (ENV, dqn, "qmix", {"double": False}),
    "dqn-qmix-of-observations": (BLIND, dqn, "qmix", {}),
    "dqn-vdn-shared": (ENV, dqn, "vdn", {"sharing": PAIR}),
    "pqn-vdn": (ENV, pqn, "vdn", {}),
    "pqn-qmix": (ENV, pqn, "qmix", {}),
    "pqn-qmix-shared": (BLIND, pqn, "qmix", {"sharing": PAIR}),
}


@pytest.fixture(scope="module", params=GOLDEN)
def golden(request):
    """A name, `Given`, its compiled update, and what that made of it."""
    env, algorithm, mixer, options = GOLDEN[request.param]
    given = given_for(mixed_team(env, algorithm, mixer, **options))
    update = given.updater()
    return request.param, given, update, given.after(update)


def test_an_update_equals_a_second_implementation(golden):
    """Of three agents of two kinds, in which each network, and the mixer, is clipped by itself."""
    name, given, _, ((state, mixers), _) = golden
    algorithm, options = GOLDEN[name][1], GOLDEN[name][3]
    double = algorithm is dqn and options.get("double", True)
    steps = 1 if algorithm is dqn else 2
    expected = reference_update(given, (0, 1, 2), double, steps)
    for key, params in expected.items():
        before, after = (
            mixer if key == "mixer" else jax.tree.map(lambda x, s=key[1]: x[s], groups[key[0]])
            for groups, mixer in ((given.state, given.mixers[0]), (state, mixers[0]))
        )
        if params == ():
            assert before == after == ()
            continue
        assert relative_difference(after.network.params, params) <= TOLERANCE
        assert relative_difference(before.network.params, params) > 100 * TOLERANCE
        if algorithm is dqn:
            target = optax.incremental_update(params, before.target_params, 0.3)
            assert relative_difference(after.target_params, target) <= TOLERANCE
        else:
            assert after.target_params == ()


def test_what_inactive_agents_did_changes_nobody(golden):
    """Actions, rewards, flags and masks; and what they saw, which their own network never learns.

    Without a global state a mixer reads members' observations, of which those of who is out are
    zeros from the start: see the test with poison.
    """
    name, given, update, clean = golden
    rollout = given.rollout
    # "solo" is not mixed: as without a mixer, it bootstraps from wherever it was led to
    active, final = rollout.active, rollout.final_active | (np.arange(4) == 3)[:, None]

    def of_groups(trees, live, value):
        """Other values [T, S, N, B, ...] where `live` [T, A, B] is false."""

        def leaf(x, index):
            group = given.team.lifted.groups[index]
            own = live[:, list(group.positions)].reshape(*x.shape[:4])
            x = np.array(x)
            x[~own] = value
            return x

        return tuple(
            jax.tree.map(partial(leaf, index=index), tree) for index, tree in enumerate(trees)
        )

    obs, final_obs = [steps.obs for steps in rollout.steps], rollout.final_obs
    if "of-observations" not in name and GOLDEN[name][0] is ENV:
        obs, final_obs = of_groups(obs, active, 99.0), of_groups(final_obs, final, 99.0)
    action = of_groups([steps.action for steps in rollout.steps], active, 7)
    dirty = given.after(
        update,
        steps=tuple(
            steps._replace(obs=seen, action=done)
            for steps, seen, done in zip(rollout.steps, obs, action, strict=True)
        ),
        final_obs=final_obs,
        final_action_mask=of_groups(rollout.final_action_mask, final, False),
        reward=jnp.where(active, rollout.reward, jnp.nan),
        terminated=rollout.terminated | ~active,
        truncated=rollout.truncated | ~active,
    )
    assert all_finite(dirty)
    assert_identical(dirty, clean)
    other = rollout.steps[0]._replace(action=1 - rollout.steps[0].action)
    assert not identical(given.after(update, steps=(other, *rollout.steps[1:])), clean)


def test_steps_without_any_member_teach_nothing(golden):
    _, given, update, _ = golden
    quiet = given.rollout.active & (np.arange(4) == 3)[:, None]
    (state, mixers), metrics = given.after(update, active=quiet)
    before, after = (agent_states(given.team, x) for x in (given.state, state))
    for agent in ("ann", "big", "cid"):
        assert_identical(after[agent].network.params, before[agent].network.params)
    assert not identical(after["solo"].network.params, before["solo"].network.params)
    if mixers[0] != ():
        assert_identical(mixers[0].network.params, given.mixers[0].network.params)
    assert metrics[1]["loss"] == 0


def alone(given, key=7):
    """States after an update of the same team without a mixer."""
    team = dataclasses.replace(given.team.spec, mixer="none")
    built, key = given.team.lifted.groups, jax.random.key(key)
    learn = partial(learning.replay_step, team, built, key)
    if team.replay is None:
        learn = partial(learning.update, team, built, (), key)
    return jax.jit(learn)(given.state, given.rollout, given.team.group_hparams())[0]


def assert_alone(given, state, expected):
    found, wanted, before = (
        agent_states(given.team, x)["solo"] for x in (state, expected, given.state)
    )
    assert relative_difference(found, wanted) <= TOLERANCE
    assert relative_difference(before.network.params, wanted.network.params) > 100 * TOLERANCE


def test_an_agent_alone_in_its_team_learns_as_without_a_mixer(golden):
    _, given, _, ((state, _), _) = golden
    assert_alone(given, state, alone(given))


def test_an_agent_alone_in_its_team_sees_minibatches_as_without_a_mixer():
    given = given_for(mixed_team(ENV, pqn, "vdn", num_minibatches=3))
    (state, _), _ = given.after(given.updater())
    assert_alone(given, state, alone(given))


# The mixer


@pytest.fixture(scope="module")
def mixer():
    """Gradients by the values [M, 3], for the seed of parameters, states [M, 5] and values."""
    network = networks.make_mixer(3)

    @jax.jit
    def slopes(seed):
        keys = jax.random.split(jax.random.key(seed), 4)
        values = 3.0 * jax.random.normal(keys[0], (16, 3))
        state = 2.0 * jax.random.normal(keys[1], (16, 5))
        params = network.init(keys[2], values, state)
        leaves, structure = jax.tree.flatten(params)
        noise = jax.random.split(keys[3], len(leaves))
        params = structure.unflatten(
            [x + jax.random.normal(key, x.shape) for key, x in zip(noise, leaves, strict=True)]
        )
        return jax.grad(lambda x: jnp.sum(network.apply(params, x, state)))(values)

    return network, slopes


@settings(max_examples=50)
@given(seed=st.integers(0, 2**31 - 1))
def test_a_mixture_never_falls_when_a_value_rises(mixer, seed):
    slopes = np.asarray(mixer[1](seed))
    assert np.all(slopes >= 0) and np.any(slopes > 0)


def test_a_mixer_starts_near_the_sum(mixer):
    network, _ = mixer
    generator = np.random.default_rng(0)
    values, state = (generator.normal(size=(64, n)).astype("f") for n in (3, 5))
    params = network.init(jax.random.key(0), values, state)
    mixed = network.apply(params, 0.1 * values, state)
    np.testing.assert_allclose(mixed, 0.1 * values.sum(-1), atol=0.03)
