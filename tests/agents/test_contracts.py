"""What every learner keeps to, checked on one table of learners."""

import inspect
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_experience import counted, is_legal, make_experience, poisoned
from learner_cases import (
    CASES,
    Case,
    act_input,
    all_finite,
    assert_identical,
    make_rollout,
    random_mask,
    random_memory,
    relative_difference,
    sampled,
    stack,
    take,
)

from marl.agents.learner import Learner, Rollout
from marl.agents.registry import ALGORITHMS, algorithm
from marl.envs import spaces

AGENTS, UPDATES = 3, 5
BATCH = 4  # environments; everywhere the same, so that programs are shared


class Bench(NamedTuple):
    """A case, its compiled functions, and several agents that learned from their own rollouts."""

    case: Case
    learner: Learner
    init: Any
    act: Any
    greedy: Any
    update: Any
    traces: list[str]  # one entry each time `update` was traced
    keys: jax.Array  # [AGENTS]
    hparams: list[Any]
    states: list[Any]  # as initialised
    rollouts: list[Rollout]
    updated: list[list[Any]]  # per agent, the state after 1, 2, ... updates
    metrics: list[Any]  # per agent, of the first update


@pytest.fixture(scope="module", params=CASES)
def bench(request):
    case, traces = CASES[request.param], []
    learner = case.learner()
    init, act, greedy = map(jax.jit, (learner.init, learner.act, learner.act_greedy))
    update = jax.jit(counted(learner.update, traces))
    keys = jax.random.split(jax.random.key(7), AGENTS)
    hparams = [case.hparams_of(agent) for agent in range(AGENTS)]
    states = [init(key, h) for key, h in zip(keys, hparams, strict=True)]
    rollouts = [
        make_experience(case, act, state, h, seed)
        for seed, (state, h) in enumerate(zip(states, hparams, strict=True))
    ]
    updated, metrics = [], []
    for key, state, rollout, h in zip(keys, states, rollouts, hparams, strict=True):
        history = []
        for step in range(UPDATES):
            state, found = update(key, state, rollout, h)
            history.append(state)
            metrics += [found] if step == 0 else []
        updated.append(history)
    functions = init, act, greedy, update
    return Bench(
        case, learner, *functions, traces, keys, hparams, states, rollouts, updated, metrics
    )


@pytest.fixture(scope="module")
def vectorised(bench):
    """The same agents under `vmap`: (initial states, update)."""
    hparams = stack(bench.hparams)
    states = jax.jit(jax.vmap(bench.learner.init))(bench.keys, hparams)
    update = jax.jit(jax.vmap(bench.learner.update))
    return states, partial(update, bench.keys), hparams


def arguments(function):
    """Names of the positional arguments that a caller still gives."""
    return [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]


def test_every_named_learner_is_in_the_table():
    assert {case.algorithm for case in CASES.values()} == set(map(algorithm, ALGORITHMS))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_argument_order_is_law(case):
    expected = {
        "init": ["key", "hparams"],
        "initial_memory": ["batch_size"],
        "act": ["key", "state", "inputs", "hparams"],
        "act_greedy": ["key", "state", "inputs", "hparams"],
        "update": ["key", "state", "experience", "hparams"],
        "value": ["state", "critic_obs"],
        "log_prob": ["state", "experience"],
        "q_values": ["params", "obs"],
        "q_unroll": ["params", "obs", "memory", "reset", "active"],
        "apply_gradients": ["state", "grads", "hparams"],
        "next_action": ["key", "state", "inputs", "hparams"],
        "check": ["batch_shape"],
        "critic_memory": ["batch_size"],
        "draw": ["key", "batch_size"],
        "next_critic_memory": ["state", "experience"],
    }
    assert set(expected) | {"experience", "window"} == set(Learner._fields)
    assert (learner := case.learner()).experience in ("rollout", "replay")
    for name, names in expected.items():
        function = getattr(learner, name)
        assert function is None or arguments(function) == names
    given = ["config", "observation_space", "action_space", "critic_space"]
    assert arguments(case.algorithm.make) == given


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_config_and_hparams_are_values(case):
    config, hparams = case.algorithm.Config(), case.algorithm.Hparams()
    assert config == case.algorithm.Config() and hash(config) == hash(case.algorithm.Config())
    with pytest.raises(AttributeError):
        config.hidden_sizes = ()
    assert all(isinstance(value, float) for value in hparams)
    for name, (low, high) in getattr(case.algorithm, "BOUNDS", {}).items():
        assert low <= getattr(hparams, name) <= high


def test_the_second_call_does_not_trace(bench):
    """Many calls, other values of every hyperparameter, other agents: one program."""
    assert bench.traces == ["traced"]
    changed = jax.tree.map(lambda x: x * 0.5, bench.hparams[0])
    bench.update(bench.keys[1], bench.states[2], bench.rollouts[1], changed)
    assert bench.traces == ["traced"]


def test_every_float_differs_per_agent_and_matters(bench):
    """Half its value gives another state, action or metric to one of the agents at least."""

    def outcome(n, hparams):
        state, rollout = bench.updated[n][-1], bench.rollouts[n]
        inputs = inputs_for(bench.case, n)._replace(env_steps=rollout.env_steps)
        return (
            bench.init(bench.keys[n], hparams),
            bench.act(bench.keys[n], state, inputs, hparams),
            bench.update(bench.keys[n], state, rollout, hparams),
        )

    base = [outcome(n, hparams) for n, hparams in enumerate(bench.hparams)]
    for name, values in bench.case.floats.items():
        assert len(values) == AGENTS and len(set(values)) > 1
        assert any(
            relative_difference(outcome(n, h._replace(**{name: 0.5 * getattr(h, name)})), base[n])
            for n, h in enumerate(bench.hparams)
        ), name


def test_every_float_of_every_learner_is_in_the_table():
    for name in ALGORITHMS:
        found = [case.floats for case in CASES.values() if case.algorithm is algorithm(name)]
        assert set().union(*found) == set(algorithm(name).Hparams._fields), name


def test_nobody_reads_what_has_no_weight(bench):
    """The same bits whatever it holds."""
    given = bench.rollouts[2]
    state, metrics = bench.update(
        bench.keys[2], bench.states[2], poisoned(bench.case, given), bench.hparams[2]
    )
    assert_identical(state, bench.updated[2][0])
    assert_identical(metrics, bench.metrics[2])


def test_a_state_is_arrays(bench):
    for state in (bench.states[0], bench.updated[0][-1]):
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
        assert all_finite(state)


def test_a_state_keeps_its_structure(bench):
    """Structure, shapes, dtypes and weak types: a scan carries it, a second call hits the cache."""

    def scanned(state, rollout, hparams):
        def step(state, key):
            return bench.learner.update(key, state, rollout, hparams)

        return jax.lax.scan(step, state, bench.keys)

    given = bench.states[0], bench.rollouts[0], bench.hparams[0]
    after, metrics = jax.eval_shape(scanned, *given)
    one, _ = jax.eval_shape(bench.learner.update, bench.keys[0], *given)
    before = jax.eval_shape(bench.learner.init, bench.keys[0], bench.hparams[0])
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for leaf, scan_leaf, one_leaf in zip(*map(jax.tree.leaves, (before, after, one)), strict=True):
        assert leaf.shape == scan_leaf.shape == one_leaf.shape
        assert leaf.dtype == scan_leaf.dtype == one_leaf.dtype
        assert not leaf.weak_type and not one_leaf.weak_type
    assert all(leaf.shape == (UPDATES - 2,) for leaf in jax.tree.leaves(metrics))


def test_metrics_are_finite_scalars(bench):
    for metrics in bench.metrics:
        assert isinstance(metrics, dict) and bool(metrics) == bench.case.learns
        for name, value in metrics.items():
            assert value.shape == () and value.dtype == jnp.float32, name
            assert math.isfinite(value), name


def test_an_update_learns_and_repeats(bench):
    before, after = bench.states[2], bench.updated[2][0]
    assert (relative_difference(before, after) > 0.0) == bench.case.learns
    again, _ = bench.update(bench.keys[2], before, bench.rollouts[2], bench.hparams[2])
    assert_identical(after, again)


@pytest.mark.parametrize(
    "bench",
    [
        pytest.param(name, marks=[pytest.mark.slow] if number else [])
        for number, name in enumerate(CASES)
    ],
    indirect=True,
    scope="module",
)
def test_jit_changes_nothing(bench):
    rollout = jax.tree.map(jnp.asarray, bench.rollouts[0])
    state, metrics = bench.learner.update(bench.keys[0], bench.states[0], rollout, bench.hparams[0])
    assert relative_difference(state, bench.updated[0][0]) <= 1e-5
    assert metrics.keys() == bench.metrics[0].keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, bench.metrics[0][name], rtol=1e-3, atol=1e-5)


def test_vmap_over_agents_is_a_loop(bench, vectorised):
    states, update, hparams = vectorised
    assert_identical(states, stack(bench.states))
    rollouts = stack(bench.rollouts)
    for step in range(UPDATES):
        states, metrics = update(states, rollouts, hparams)
        if step in (0, UPDATES - 1):
            for agent in range(AGENTS):
                own = take(states, agent)
                assert relative_difference(own, bench.updated[agent][step]) <= 1e-5
        if step == 0:
            for name, values in metrics.items():
                expected = [found[name] for found in bench.metrics]
                np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-5)


def inputs_for(case, seed):
    """What `BATCH` environments hand to `act`."""
    mask = random_mask(seed, case.action_space, (BATCH,)) if case.masked else None
    memory = random_memory(seed, case.learner().initial_memory, BATCH)
    return act_input(sampled(seed, case.observation_space, (BATCH,)), mask, memory)


def test_vmapped_actions_are_those_of_a_loop(bench, vectorised):
    states, _, hparams = vectorised
    inputs = [inputs_for(bench.case, seed) for seed in range(AGENTS)]
    acted = jax.jit(jax.vmap(bench.learner.act))(bench.keys, states, stack(inputs), hparams)
    for n, alone in enumerate(inputs):
        expected = bench.act(bench.keys[n], bench.states[n], alone, bench.hparams[n])
        assert relative_difference(take(acted, n), expected) <= 1e-5


def test_an_agent_with_nan_rewards_harms_nobody_else(bench, vectorised):
    """Isolation: the others' states stay the same to the last bit."""
    states, update, hparams = vectorised
    rollouts = stack(bench.rollouts)
    poisoned = rollouts._replace(reward=rollouts.reward.copy())
    poisoned.reward[1] = np.nan
    clean, _ = update(states, rollouts, hparams)
    dirty, _ = update(states, poisoned, hparams)
    for n in (0, 2):
        assert_identical(take(clean, n), take(dirty, n))
    assert all_finite(take(dirty, 1)) != bench.case.learns


def assert_like(space, action):
    """Shapes and dtypes of the space."""
    expected = spaces.shape_dtype(space, (BATCH,))
    assert jax.tree.structure(action) == jax.tree.structure(expected)
    for leaf, value in zip(*map(jax.tree.leaves, (expected, action)), strict=True):
        assert value.shape == leaf.shape and value.dtype == leaf.dtype


def test_acting_depends_on_the_key(bench):
    given = bench.updated[2][-1], inputs_for(bench.case, 5), bench.hparams[2]
    one, again, *others = (
        bench.act(key, *given) for key in (bench.keys[0], bench.keys[0], *bench.keys[1:])
    )
    assert_like(bench.case.action_space, one.action)
    assert_identical(one, again)
    moved = any(relative_difference(one.action, other.action) > 0.0 for other in others)
    assert moved == bench.case.explores


def test_evaluation_is_deterministic(bench):
    given = bench.states[0], inputs_for(bench.case, 5), bench.hparams[0]
    one, other = (bench.greedy(key, *given).action for key in bench.keys[:2])
    assert_like(bench.case.action_space, one)
    assert (relative_difference(one, other) == 0.0) == bench.case.greedy


def test_masks_are_respected(bench):
    case, state, hparams = bench.case, bench.updated[1][-1], bench.hparams[1]
    if not case.masked:
        pytest.skip("no masks")
    for rollout in bench.rollouts:
        assert is_legal(case.action_space, rollout.action, rollout.action_mask)
    inputs = inputs_for(case, 6)
    functions = [bench.act, bench.greedy]
    if bench.learner.next_action is not None:
        functions.append(jax.jit(bench.learner.next_action))
    for function in functions:
        action = function(bench.keys[0], state, inputs, hparams).action
        assert_like(case.action_space, action)
        assert is_legal(case.action_space, action, inputs.action_mask)


def test_log_prob_is_that_of_acting(bench):
    """The policy that learns is the policy that acted: PPO's ratio is 1 before the first step.

    After updates that moved parameters and statistics, with masks, squashing and dead agents.
    """
    if bench.learner.log_prob is None:
        pytest.skip("no log_prob")
    state = bench.updated[2][-1]
    rollout = make_rollout(bench.case, bench.act, state, bench.hparams[2], seed=9)
    log_prob = jax.jit(bench.learner.log_prob)(state, rollout)
    live = rollout.weight > 0
    assert not np.all(live)
    ratio = np.exp(np.asarray(log_prob) - rollout.extras["log_prob"])
    np.testing.assert_allclose(ratio[live], 1.0, atol=1e-5)


def test_initial_memory_has_the_batch_in_front(bench):
    for initial in (bench.learner.initial_memory, bench.learner.critic_memory):
        for leaf in jax.tree.leaves(() if initial is None else initial(5)):
            assert leaf.shape[0] == 5
