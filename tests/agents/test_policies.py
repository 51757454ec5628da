"""Policies: samples, densities, entropies, masks, and Gaussians squashed to the bounds."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import all_finite, random_mask

from marl.agents import losses
from marl.agents.policies import Policy
from marl.envs import spaces
from marl.envs.spaces import Box, Discrete, MultiDiscrete

BOUNDED = Box((2,), low=(-1.0, 0.0), high=(1.0, 5.0))
SPACES = {
    "discrete": Discrete(4),
    "discrete-int8": Discrete(3, "int8"),
    "multi": MultiDiscrete((2, 3)),
    "bounded": BOUNDED,
    "unbounded": Box((3,)),
    "half-bounded": Box((2,), low=0.0),
    "matrix": Box((2, 2), -2.0, 2.0),
    "integers": Box((2,), -3, 3, "int32"),
    "composite": {
        "b": (Discrete(3), Box((1,))),
        "a": [MultiDiscrete((2, 2)), Box((2, 1), -1.0, 0.5)],
    },
}
SAMPLES = 256


class Drawn(NamedTuple):
    policy: Policy
    outputs: jax.Array  # [SAMPLES, num_outputs]
    log_std: jax.Array
    mask: Any
    sample: Any
    log_prob: jax.Array
    entropy: jax.Array
    mode: Any


@functools.cache
def draw(space_name, box_policy="tanh_normal", masked=False):
    """One sample for each of many outputs, and everything that is known about it."""
    space = SPACES[space_name]
    policy = Policy(space, box_policy)
    generator = np.random.default_rng(0)
    outputs = jnp.asarray(generator.normal(size=(SAMPLES, policy.num_outputs)), jnp.float32)
    log_std = jnp.asarray(generator.normal(size=policy.num_scales) * 0.3, jnp.float32)
    mask = random_mask(1, space, (SAMPLES,)) if masked else None

    @jax.jit
    def everything(key):
        sample = policy.sample(key, outputs, log_std, mask)
        log_prob = policy.log_prob(outputs, log_std, mask, sample.action, sample.raw)
        entropy = policy.entropy(outputs, log_std, mask)
        return sample, log_prob, entropy, policy.mode(outputs, log_std, mask)

    return Drawn(policy, outputs, log_std, mask, *everything(jax.random.key(0)))


@pytest.fixture(scope="module", params=SPACES)
def drawn(request):
    return draw(request.param)


@pytest.fixture(scope="module", params=["discrete", "multi", "composite"])
def masked(request):
    return draw(request.param, masked=True)


def assert_inside(space, action, batch=(SAMPLES,)):
    """Shapes, dtypes and bounds of the action space."""

    def check(leaf, value):
        assert value.shape == (*batch, *leaf.shape) and value.dtype == leaf.dtype
        if isinstance(leaf, Box):
            low, high = leaf.bounds()
        else:
            low, high = 0, np.asarray(leaf.n if isinstance(leaf, Discrete) else leaf.nvec) - 1
        assert np.all(np.asarray(value) >= low) and np.all(np.asarray(value) <= high)

    spaces.map_spaces(check, space, action)


def test_samples_and_modes_lie_in_the_space(drawn):
    assert_inside(drawn.policy.space, drawn.sample.action)
    assert_inside(drawn.policy.space, drawn.mode)


def test_log_prob_of_a_sample_is_the_stored_one(drawn):
    assert drawn.log_prob.shape == drawn.entropy.shape == (SAMPLES,)
    np.testing.assert_allclose(drawn.log_prob, drawn.sample.log_prob, rtol=1e-5, atol=1e-5)
    assert all_finite((drawn.log_prob, drawn.entropy))


def test_illegal_actions_are_never_chosen(masked):
    found = spaces.leaves(masked.policy.space)
    treedef = jax.tree.structure(masked.policy.space, is_leaf=spaces.is_space)
    masks = treedef.flatten_up_to(masked.mask)
    for actions in (masked.sample.action, masked.mode):
        for leaf, action, mask in zip(found, treedef.flatten_up_to(actions), masks, strict=True):
            if not isinstance(leaf, Box):
                assert np.all(legality(leaf, np.asarray(action), np.asarray(mask)))


def legality(leaf, action, mask):
    """Whether each component of an action [batch, ...] has a true bit in the mask."""
    if isinstance(leaf, Discrete):
        return np.take_along_axis(mask, action[:, None], -1)
    starts = np.cumsum((0, *leaf.nvec[:-1]))
    return np.take_along_axis(mask, action + starts, -1)


def test_log_prob_of_a_masked_sample_is_the_stored_one(masked):
    np.testing.assert_allclose(masked.log_prob, masked.sample.log_prob, rtol=1e-5, atol=1e-5)
    assert all_finite((masked.log_prob, masked.entropy))


def log_softmax(logits, mask=None):
    logits = np.asarray(logits, np.float64)
    logits = logits if mask is None else np.where(mask, logits, -np.inf)
    return logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))


def entropy_of(log_probs):
    return -np.sum(np.where(np.isfinite(log_probs), np.exp(log_probs) * log_probs, 0.0), -1)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("with_mask", [False, True])
def test_discrete_by_brute_force(with_mask):
    drawn = draw("discrete", masked=with_mask)
    expected = log_softmax(drawn.outputs, drawn.mask)
    chosen = np.take_along_axis(expected, np.asarray(drawn.sample.action)[:, None], -1)[:, 0]
    np.testing.assert_allclose(drawn.log_prob, chosen, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(drawn.entropy, entropy_of(expected), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(drawn.mode, np.argmax(expected, -1))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_multi_discrete_is_independent_components():
    drawn = draw("multi", masked=True)
    parts = [
        log_softmax(drawn.outputs[:, part], np.asarray(drawn.mask)[:, part])
        for part in (slice(0, 2), slice(2, 5))
    ]
    action = np.asarray(drawn.sample.action)
    chosen = sum(
        np.take_along_axis(part, action[:, i : i + 1], -1)[:, 0] for i, part in enumerate(parts)
    )
    np.testing.assert_allclose(drawn.log_prob, chosen, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(drawn.entropy, sum(map(entropy_of, parts)), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(drawn.mode, np.stack([np.argmax(p, -1) for p in parts], -1))
    # probabilities of all six actions sum to one
    actions = jnp.asarray(list(itertools.product(range(2), range(3))), jnp.int32)[:, None]
    log_probs = drawn.policy.log_prob(
        drawn.outputs, drawn.log_std, None, jnp.broadcast_to(actions, (6, SAMPLES, 2)), ()
    )
    np.testing.assert_allclose(np.sum(np.exp(log_probs), 0), 1.0, rtol=1e-5)


@pytest.mark.parametrize("name, box_policy", [("unbounded", "tanh_normal"), ("bounded", "normal")])
def test_gaussian_by_hand(name, box_policy):
    drawn = draw(name, box_policy)
    mean, std = np.asarray(drawn.outputs, np.float64), np.exp(np.asarray(drawn.log_std))
    z = (np.asarray(drawn.sample.raw[0]) - mean) / std
    expected = np.sum(-0.5 * z**2 - np.log(std) - 0.5 * np.log(2 * np.pi), -1)
    np.testing.assert_allclose(drawn.log_prob, expected, rtol=1e-4, atol=1e-4)
    entropy = np.sum(0.5 * np.log(2 * np.pi * np.e * std**2))
    np.testing.assert_allclose(drawn.entropy, entropy, rtol=1e-5)
    # the action is the sample, or that sample moved to the nearest bound
    low, high = SPACES[name].bounds()
    np.testing.assert_allclose(drawn.sample.action, np.clip(drawn.sample.raw[0], low, high))
    np.testing.assert_allclose(drawn.mode, np.clip(drawn.outputs, low, high))


@pytest.mark.parametrize("mean, std", [(0.0, 0.5), (1.0, 1.0), (-0.7, 2.0)])
def test_the_squashed_density_integrates_to_one(mean, std):
    """Over the *actions*, (-2, 3) x (0, 0.1): so the slope of the squashing is in the density."""
    low, high = np.array([-2.0, 0.0]), np.array([3.0, 0.1])
    policy = Policy(Box((2,), tuple(low), tuple(high)))
    points = 600
    raw = np.linspace(mean - 7 * std, mean + 7 * std, points)
    action = low + 0.5 * (np.tanh(raw[:, None]) + 1.0) * (high - low)
    grid = np.stack(np.meshgrid(raw, raw, indexing="ij"), -1).astype(np.float32)
    log_prob = jax.jit(policy.log_prob)(
        jnp.full((points, points, 2), mean), jnp.full(2, jnp.log(std)), None, grid, (grid,)
    )
    density = np.exp(np.asarray(log_prob, np.float64))
    total = np.trapezoid(np.trapezoid(density, action[:, 1]), action[:, 0])
    np.testing.assert_allclose(total, 1.0, rtol=1e-2)


def test_the_squashed_action_is_the_rescaled_tanh():
    drawn = draw("bounded")
    low, high = BOUNDED.bounds()
    middle, half = (low + high) / 2, (high - low) / 2
    np.testing.assert_allclose(
        drawn.sample.action, middle + half * np.tanh(drawn.sample.raw[0]), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(drawn.mode, middle + half * np.tanh(drawn.outputs), atol=1e-5)


def test_samples_have_the_probabilities_of_the_policy():
    policy, count = Policy((Discrete(3), Box((1,)))), 20_000
    outputs = jnp.tile(jnp.array([0.0, 1.0, -1.0, 2.0]), (count, 1))
    log_std = jnp.log(jnp.array([0.5]))
    sample = jax.jit(policy.sample)(jax.random.key(0), outputs, log_std, None)
    frequency = np.bincount(sample.action[0], minlength=3) / count
    np.testing.assert_allclose(frequency, np.exp(log_softmax([0.0, 1.0, -1.0])), atol=0.02)
    np.testing.assert_allclose(np.mean(sample.action[1]), 2.0, atol=0.03)
    np.testing.assert_allclose(np.std(sample.action[1]), 0.5, atol=0.03)


def test_equal_leaves_are_drawn_independently():
    policy, count = Policy((Box((1,)), Box((1,)), MultiDiscrete((2, 2)))), 4000
    outputs = jnp.zeros((count, policy.num_outputs))
    sample = jax.jit(policy.sample)(jax.random.key(0), outputs, jnp.zeros(2), None)
    one, two, three = sample.action
    columns = np.stack([one[:, 0], two[:, 0], three[:, 0], three[:, 1]])
    correlation = np.corrcoef(columns) - np.eye(4)
    assert np.max(np.abs(correlation)) < 0.08


def test_a_composite_is_the_sum_of_its_leaves():
    composite = draw("composite")
    # PyTree order: a[0] MultiDiscrete (4 outputs), a[1] Box (2), b[0] Discrete (3), b[1] Box (1)
    parts = [slice(0, 4), slice(4, 6), slice(6, 9), slice(9, 10)]
    scales = [slice(0, 0), slice(0, 2), slice(0, 0), slice(2, 3)]
    raws = [(), composite.sample.raw[:1], (), composite.sample.raw[1:]]
    total, entropy = np.zeros(SAMPLES), np.zeros(SAMPLES)
    for leaf, part, scale, action, raw in zip(
        spaces.leaves(composite.policy.space),
        parts,
        scales,
        jax.tree.leaves(composite.sample.action),
        raws,
        strict=True,
    ):
        policy = Policy(leaf)
        given = composite.outputs[:, part], composite.log_std[scale], None
        total += np.asarray(jax.jit(policy.log_prob)(*given, action, raw))
        entropy += np.asarray(jax.jit(policy.entropy)(*given))
    np.testing.assert_allclose(composite.log_prob, total, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(composite.entropy, entropy, rtol=1e-5)


@pytest.mark.parametrize(
    "space, mask",
    [
        (Discrete(4), [[0, 0, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]),
        (MultiDiscrete((2, 3)), [[0, 1, 0, 0, 1], [1, 0, 1, 1, 0], [1] * 5, [0] * 5]),
    ],
    ids=["discrete", "multi"],
)
def test_masks_leave_everything_finite(space, mask):
    """One, two, all and no actions legal; illegal logits are NaN, which nobody may read."""
    policy, mask = Policy(space), np.asarray(mask, bool)
    outputs, log_std = jnp.where(mask, 0.3, jnp.nan), jnp.zeros(0)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_and_parts(outputs):
        action = policy.sample(jax.random.key(0), outputs, log_std, mask).action
        log_prob = policy.log_prob(outputs, log_std, mask, action, ())
        entropy = policy.entropy(outputs, log_std, mask)
        return jnp.sum(log_prob) + jnp.sum(entropy), (action, log_prob, entropy)

    gradient, (action, log_prob, entropy) = gradient_and_parts(outputs)
    assert_inside(space, action, (4,))
    assert all_finite((gradient, log_prob, entropy))
    assert np.all(np.asarray(gradient)[~mask] == 0.0)
    sizes = [4] if isinstance(space, Discrete) else [2, 3]
    uniform = np.sum(np.log(sizes))
    expected = [0.0, np.log(2.0), uniform, uniform]  # a row without a legal action is uniform
    np.testing.assert_allclose(entropy, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_prob, -np.asarray(expected), rtol=1e-5, atol=1e-6)


def test_a_saturated_policy_stays_finite():
    """F6: float32 tanh is 1 here; the log-probability comes from the sample before squashing."""
    policy, means, count = Policy(BOUNDED), jnp.array([8.0, -8.0, 40.0]), 512
    log_std = jnp.full(2, jnp.log(4.0))

    def loss(parameters, sample):
        log_prob = policy.log_prob(*parameters, None, sample.action, sample.raw)
        surrogate = losses.clipped_surrogate(log_prob - sample.log_prob, 1.0, 0.2)
        return jnp.mean(surrogate) - 0.01 * jnp.mean(policy.entropy(*parameters, None))

    @jax.jit
    @jax.vmap
    def everything(mean):
        parameters = jnp.full((count, 2), mean), log_std
        sample = policy.sample(jax.random.key(0), *parameters, None)
        found = jax.value_and_grad(loss)(parameters, sample)
        return sample, found, policy.mode(*parameters, None)[0]

    sample, (value, gradient), mode = everything(means)
    first = np.asarray(sample.action[..., 0])
    assert np.all(np.any(np.abs(first) == 1.0, -1))  # samples at the very bounds
    assert_inside(BOUNDED, sample.action, (3, count))
    assert all_finite((value, gradient, sample.log_prob))
    entropy = 2 * 0.5 * np.log(2 * np.pi * np.e * 16.0)
    np.testing.assert_allclose(value, -1.0 - 0.01 * entropy, rtol=1e-5)
    np.testing.assert_allclose(mode, [[1.0, 5.0], [-1.0, 0.0], [1.0, 5.0]], atol=1e-5)


def test_vmap_over_agents_is_a_loop():
    """F7: distributions are built under vmap."""
    space, agents, batch = SPACES["composite"], 4, 5
    policy = Policy(space)
    keys = jax.random.split(jax.random.key(0), agents)
    outputs = jax.random.normal(jax.random.key(1), (agents, batch, policy.num_outputs))
    log_std = jax.random.normal(jax.random.key(2), (agents, policy.num_scales))
    mask = random_mask(3, space, (agents, batch))

    @jax.jit
    def one(key, outputs, log_std, mask):
        sample = policy.sample(key, outputs, log_std, mask)
        given = outputs, log_std, mask
        log_prob = policy.log_prob(*given, sample.action, sample.raw)
        return sample.action, (log_prob, policy.entropy(*given)), policy.mode(*given)

    action, numbers, mode = jax.jit(jax.vmap(one))(keys, outputs, log_std, mask)
    loop = [
        one(*jax.tree.map(lambda x, n=n: x[n], (keys, outputs, log_std, mask)))
        for n in range(agents)
    ]
    found = action, numbers, mode
    assert numbers[0].shape == (agents, batch)
    for n, looped in enumerate(loop):
        for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(looped), strict=True):
            np.testing.assert_allclose(ours[n], expected, rtol=1e-5, atol=1e-6)
