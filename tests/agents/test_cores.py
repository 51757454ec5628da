"""Memory cores against plain NumPy, step by step; how rollouts are cut into sequences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import random_memory

from marl.agents import networks, ppo, sequences
from marl.agents.networks import Features, NetworkSpec
from marl.agents.ppo import CriticBatch
from marl.agents.sequences import Steps
from marl.envs.errors import UsageError

T, B, D, SIZE = 6, 3, 2, 4
CORES = ("gru", "lstm")
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(w, read, h):
    product = h @ w.T
    r = sigmoid(read[:, :SIZE] + product[:, :SIZE])
    z = sigmoid(read[:, SIZE : 2 * SIZE] + product[:, SIZE : 2 * SIZE])
    n = np.tanh(read[:, 2 * SIZE :] + r * product[:, 2 * SIZE :])
    h = (1 - z) * n + z * h
    return h, h


def lstm(w, read, memory):
    gates = read + memory[0] @ w.T
    i, f, o, g = (gates[:, k * SIZE : (k + 1) * SIZE] for k in range(4))
    cell = sigmoid(f) * memory[1] + sigmoid(i) * np.tanh(g)
    hidden = sigmoid(o) * np.tanh(cell)
    return hidden, (hidden, cell)


def reference(core, params, vector, memory, reset, active):
    """Outputs and memories, by loops over steps and sequences."""
    step = {"gru": gru, "lstm": lstm}[core]
    weights = params[core]
    outputs, memories = [], []
    for t in range(vector.shape[0]):
        x = np.tanh(vector[t] @ params["linear"]["w"].T + params["linear"]["b"])
        for leaf in jax.tree.leaves(memory):
            leaf[reset[t]] = 0.0
        output, moved = step(weights["w_memory"], x @ weights["w"].T + weights["b"], memory)
        for leaf, new in zip(*map(jax.tree.leaves, (memory, moved)), strict=True):
            leaf[active[t]] = new[active[t]]
        outputs.append(output @ params["linear_1"]["w"].T + params["linear_1"]["b"])
        memories.append(jax.tree.map(np.copy, memory))
    return np.stack(outputs), jax.tree.map(lambda *xs: np.stack(xs), *memories)


class Bench:
    """A network with a core, noise in its parameters, and sequences."""

    def __init__(self, core):
        spec = NetworkSpec((5,), num_outputs=3, core=core, core_size=SIZE)
        self.network = networks.make_network(spec)
        generator = np.random.default_rng(0)
        fresh = self.network.init(jax.random.key(0), Features(jnp.zeros((1, D)), ()))
        self.params = jax.tree.map(
            lambda x: np.asarray(x + 0.3 * generator.normal(size=x.shape), np.float32), fresh
        )
        self.vector = generator.normal(size=(T, B, D)).astype(np.float32)
        self.features = Features(self.vector, ())
        self.memory = random_memory(1, self.network.initial_memory, B)
        self.reset, self.active = np.zeros((T, B), bool), np.ones((T, B), bool)
        self.reset[3, 0] = self.reset[0, 1] = True
        self.active[2:4, 2] = self.active[3, 0] = False
        self.unroll = jax.jit(self.network.unroll)
        self.steps = sequences.whole(self.network, self.memory, self.reset, self.active)

    def run(self, params, **steps):
        return sequences.run(self.network, params, self.features, self.steps._replace(**steps))


@pytest.fixture(scope="module", params=CORES)
def bench(request):
    return Bench(request.param), request.param


def test_a_core_is_that_of_a_second_implementation(bench):
    """From a memory, with resets, with steps that leave it alone, and both in one."""
    bench, core = bench
    found, memories = bench.unroll(
        bench.params, bench.features, bench.memory, bench.reset, bench.active
    )
    memory = tuple(bench.memory) if core == "lstm" else bench.memory
    plain = jax.tree.map(np.copy, memory)
    expected, after = reference(core, bench.params, bench.vector, plain, bench.reset, bench.active)
    close(found, expected)
    for one, other in zip(*map(jax.tree.leaves, (memories, after)), strict=True):
        close(one, other)
        np.testing.assert_array_equal(one[2, 2], one[1, 2])  # kept
        assert np.all(one[3, 0] == 0.0)  # reset, then kept


def test_fresh_weights(bench):
    """Orthogonal gate by gate; an LSTM starts with its forget gates open."""
    bench, core = bench
    params = bench.network.init(jax.random.key(3), Features(jnp.zeros((1, D)), ()))[core]
    for gate in np.split(np.asarray(params["w_memory"]), len(params["b"]) // SIZE):
        close(gate @ gate.T, np.eye(SIZE), atol=1e-5)
    assert params["w"].shape == (len(params["b"]), 5)
    expected = np.zeros(len(params["b"]))
    if core == "lstm":
        expected[SIZE : 2 * SIZE] = 1.0
    np.testing.assert_array_equal(params["b"], expected)


def test_steps_apart_go_on_from_a_memory_each(bench):
    """From the memory of every step, the step after it: its reset is not applied."""
    bench, _ = bench
    _, memories = bench.run(bench.params)
    found = sequences.run_apart(bench.network, bench.params, bench.features, memories)
    for t in (1, 3):
        memory = jax.tree.map(lambda m, t=t: m[t], memories)
        flags = np.zeros((1, B), bool)
        one = Features(bench.vector[t : t + 1], ())
        close(found[t], bench.unroll(bench.params, one, memory, flags, ~flags)[0][0])


def batch_of(bench, memories, **config):
    """Minibatch samples of the bench's rollout; `target` says which step each is."""
    names = 100 * np.arange(T)[:, None] + np.arange(B)
    batch = CriticBatch(bench.features, bench.steps, names, names, bench.active)
    return sequences.samples(batch, memories, ppo.Config(core="gru", **config))


@pytest.mark.parametrize("length", [1, 2, 3, 6, 0])
def test_chunks_are_cut_along_time_and_mix_no_environments(bench, length):
    bench, _ = bench
    _, memories = bench.run(bench.params)
    batch = batch_of(bench, memories, sequence_length=length)
    size = length or T
    names = np.asarray(batch.target)
    assert names.shape == (size, T // size * B)
    np.testing.assert_array_equal(np.diff(names, axis=0), 100)  # neighbours in time
    np.testing.assert_array_equal(names[0] // 100, np.repeat(np.arange(0, T, size), B))
    time, env = names // 100, names % 100
    np.testing.assert_array_equal(batch.steps.reset, bench.reset[time, env])
    np.testing.assert_array_equal(batch.steps.active, bench.active[time, env])
    live = bench.active[time, env][..., None]
    np.testing.assert_array_equal(
        batch.features.vector, np.where(live, bench.vector[time, env], 0.0)
    )
    chosen = sequences.select(batch, np.array([2, 0]))
    np.testing.assert_array_equal(chosen.target, names[:, [2, 0]])
    np.testing.assert_array_equal(chosen.steps.reset, batch.steps.reset[:, [2, 0]])


@pytest.mark.parametrize("burn_in", [0, 2])
def test_chunks_that_carry_memory_are_the_whole_sequence(bench, burn_in):
    bench, _ = bench
    outputs, memories = bench.run(bench.params)
    batch = batch_of(bench, memories, sequence_length=2, burn_in=burn_in)
    assert bool(batch.steps.burn_in) == (burn_in > 0)
    found, _ = sequences.run(bench.network, bench.params, batch.features, batch.steps)
    time, env = np.asarray(batch.target) // 100, np.asarray(batch.target) % 100
    live = bench.active[time, env]
    close(found[live], outputs[time, env][live])


def test_burn_in_refreshes_what_moved_parameters_made_stale(bench):
    """Two chunks, the first all burn-in of the second: as if the whole rollout ran again.

    But for gradients: none flows into the burn-in.
    """
    bench, _ = bench
    _, memories = bench.run(bench.params)
    moved = jax.tree.map(lambda x: 1.5 * x, bench.params)
    expected = np.asarray(bench.run(moved)[0])
    live = bench.active[3:]

    def second(params, burn_in):
        batch = batch_of(bench, memories, sequence_length=3, burn_in=burn_in)
        return sequences.run(bench.network, params, batch.features, batch.steps)[0][:, B:]

    close(second(moved, 3)[live], expected[3:][live], rtol=1e-4)
    assert np.max(np.abs(np.asarray(second(moved, 0))[live] - expected[3:][live])) > 1e-2

    def of_given(params):
        after = jax.tree.map(lambda m: m[2], bench.run(moved)[1])
        rest = Features(np.where(live[..., None], bench.vector[3:], 0.0), ())
        return bench.network.unroll(params, rest, after, bench.reset[3:], live)[0]

    grads = [
        jax.grad(lambda p, f=f: jnp.sum(f(p)))(moved)
        for f in (partial(second, burn_in=3), of_given)
    ]
    jax.tree.map(partial(close, rtol=1e-3, atol=1e-4), *grads)


def test_feed_forward_samples_are_steps():
    names = np.arange(T * B).reshape(T, B)
    batch = CriticBatch(Features(names[..., None], ()), (), names, names, names)
    found = sequences.samples(batch, (), ppo.Config())
    np.testing.assert_array_equal(found.target, np.arange(T * B))
    np.testing.assert_array_equal(sequences.select(found, np.array([4, 2])).target, [4, 2])


BAD = {
    "core": ({"core": "rnn"}, "core = 'rnn' is not known"),
    "size": ({"core": "gru", "core_size": 0}, "core_size = 0 is out of range"),
    "length": ({"core": "gru", "sequence_length": -1}, "sequence_length = -1 is out of range"),
    "long": (
        {"core": "gru", "sequence_length": 2, "burn_in": 3},
        "burn_in = 3 is longer than sequence_length = 2",
    ),
    "whole": ({"core": "gru", "burn_in": 3}, "burn_in = 3 is longer than sequence_length = 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_configs_that_do_not_fit(case):
    config, message = BAD[case]
    with pytest.raises(UsageError) as error:
        ppo.Config(**config)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sequence_length": 3}, "rollout_length = 8 is not divisible by sequence_length = 3"),
        (
            {"sequence_length": 4, "num_minibatches": 3},
            "num_envs * (rollout_length / sequence_length) = 8 is not divisible by "
            "num_minibatches = 3",
        ),
        ({"num_minibatches": 8}, "= 4 is not divisible by num_minibatches = 8"),
        ({"sequence_length": 2, "num_minibatches": 16}, None),
    ],
)
def test_rollouts_that_do_not_divide(config, message):
    config = ppo.Config(core="lstm", **config)
    if message is None:
        sequences.check_minibatches(config, (8, 4))
        return
    with pytest.raises(UsageError) as error:
        sequences.check_minibatches(config, (8, 4))
    assert message in str(error.value)


def test_a_memory_has_the_batch_second():
    """So that minibatches select everything alike."""
    network = networks.make_network(NetworkSpec((5,), core="lstm", core_size=SIZE))
    steps = sequences.whole(network, network.initial_memory(B), np.zeros((T, B)), np.ones((T, B)))
    assert isinstance(steps, Steps)
    assert {leaf.shape[1] for leaf in jax.tree.leaves(steps)} == {B}
