"""DQN with memory: sequences of replay, by hand and against acting step by step."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import (
    Case,
    all_finite,
    assert_identical,
    make_rollout,
    relative_difference,
    stack,
    take,
)
from ppo_reference import SPACE, ReferenceAdam, Trained
from q_reference import transitions

from marl.agents import dqn, q_learning, sequences
from marl.agents.learner import ActInput
from marl.agents.networks import Network
from marl.agents.optimizer import NetworkState
from marl.agents.q_learning import State
from marl.envs.errors import UsageError
from marl.envs.spaces import Discrete

close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
HPARAMS = {"learning_rate": 0.01, "gamma": 0.9, "tau": 0.3, "adam_epsilon": 1e-2}
BATCH = 4
# windows of six steps; returns are of what is left of them
SIZES = {
    "burn-in, two steps": {"core": "gru", "burn_in": 2, "sequence_length": 3},
    "two steps": {"core": "lstm", "sequence_length": 5, "double": False, "dueling": True},
    "one step": {"core": "lstm", "burn_in": 1, "sequence_length": 5},
    "three steps": {"core": "gru", "sequence_length": 4},
}


def case(**config):
    sizes = {"hidden_sizes": (8,), "core_size": 6}
    return Case(dqn, dqn.Config(**sizes | config), SPACE, Discrete(4), (), masked=True)


def with_large_weights(state):
    """So that memory matters; and a target network that is another."""
    larger = jax.tree.map(lambda x: 2.0 * x, state.network.params)
    target = jax.tree.map(lambda x: 0.1 - 0.8 * x, larger)
    return state._replace(network=state.network._replace(params=larger), target_params=target)


@pytest.fixture(scope="module", params=SIZES)
def trained(request):
    return Trained(case(**SIZES[request.param]), prepare=with_large_weights, **HPARAMS)


def parts_of(config):
    return q_learning.make_parts("dqn", config, SPACE, Discrete(4), config.core, config.core_size)


def step_by_step(trained, params, rollout):
    """Values of what was seen and of what steps led to [T, B, n], as acting has them."""
    parts = parts_of(trained.case.config)
    run = jax.jit(partial(sequences.act, parts.network, params))
    memory, found = rollout.memory, []
    for t in range(len(rollout.reward)):
        flags = {"reset": rollout.reset[t], "active": rollout.weight[t] > 0}
        q, memory = run(parts.features(rollout.obs[t]), ActInput(None, None, memory, **flags))
        after = ActInput(None, None, memory, np.zeros(BATCH, bool))
        found.append((q, run(parts.features(rollout.final_obs[t]), after)[0]))
    return (np.stack(x) for x in zip(*found, strict=True))


def reference_targets(trained, rollout):
    """[L, B]: window by window, step by step."""
    config, gamma = trained.case.config, float(trained.hparams.gamma)
    _, online = step_by_step(trained, trained.state.network.params, rollout)
    _, target = step_by_step(trained, trained.state.target_params, rollout)
    judge = online if config.double else target
    first, length = config.burn_in, config.sequence_length
    n_step = len(rollout.reward) - first - length + 1
    found = np.zeros((length, BATCH))
    for t, b in np.ndindex(length, BATCH):
        total, discount = 0.0, 1.0
        for at in range(first + t, first + t + n_step):
            total += discount * rollout.reward[at, b]
            discount *= gamma
            if rollout.terminated[at, b] or rollout.truncated[at, b]:
                break
        best = np.where(rollout.final_action_mask[at, b], judge[at, b], -np.inf).argmax()
        bootstrap = 0.0 if rollout.terminated[at, b] else discount * target[at, b, best]
        found[t, b] = total + bootstrap
    return found


def reference_gradients(trained, rollout, target):
    """Of half the mean squared error, acting step by step from the memory that burn-in left."""
    parts, params = parts_of(trained.case.config), trained.state.network.params
    first, length = trained.case.config.burn_in, trained.case.config.sequence_length

    def at(params, memory, t):
        flags = {"reset": rollout.reset[t], "active": rollout.weight[t] > 0}
        inputs = ActInput(None, None, memory, **flags)
        return sequences.act(parts.network, params, parts.features(rollout.obs[t]), inputs)

    start = rollout.memory
    for t in range(first):
        start = at(params, start, t)[1]

    def loss(params):
        memory, total = start, 0.0
        for t in range(first, first + length):
            q, memory = at(params, memory, t)
            taken = jnp.take_along_axis(q, rollout.action[t][:, None], -1)[:, 0]
            total += jnp.sum(0.5 * rollout.weight[t] * (taken - target[t - first]) ** 2)
        return total / rollout.weight[first : first + length].sum()

    return jax.jit(jax.grad(loss))(params)


def test_an_update_equals_a_second_implementation(trained):
    """Targets, metrics, gradients and the step."""
    rollout, config = trained.rollout, trained.case.config
    own = slice(config.burn_in, config.burn_in + config.sequence_length)
    live = rollout.weight[own] > 0
    assert np.any(rollout.reset[own]) and not np.all(live)
    target = reference_targets(trained, rollout)
    learned = jax.jit(partial(dqn.sequences_of, parts_of(config)))
    close(learned(trained.state, rollout, trained.hparams.gamma).target[live], target[live])
    q, _ = step_by_step(trained, trained.state.network.params, rollout)
    taken = np.take_along_axis(q[own], rollout.action[own][..., None], -1)[..., 0]
    error = (taken - target)[live]
    after, metrics = trained.after()
    close(metrics["loss"], 0.5 * np.mean(error**2))
    close(metrics["td_error"], np.mean(np.abs(error)))
    close(metrics["q_mean"], np.mean(taken[live]))
    grads, h = reference_gradients(trained, rollout, target), trained.hparams
    adam = ReferenceAdam(*map(float, (h.learning_rate, h.adam_epsilon, h.max_grad_norm)))
    expected, norm = adam.step(trained.state.network.params, grads)
    close(metrics["grad_norm"], norm)
    assert relative_difference(after.network.params, expected) <= 1e-4
    assert relative_difference(after.network.params, trained.state.network.params) > 1e-2


def test_a_reset_flag_that_is_off_by_one_is_caught(trained):
    """Values are those that acting has only where flags stand where they stood."""
    rollout, config = trained.rollout, trained.case.config
    right, _ = trained.after()
    for by in (1, -1):
        wrong, _ = trained.after(reset=np.roll(rollout.reset, by, axis=0))
        assert relative_difference(wrong.network.params, right.network.params) > 1e-4
    over = rollout.terminated | rollout.truncated  # of this step, not of the one before
    wrong, _ = trained.after(reset=over)
    assert relative_difference(wrong.network.params, right.network.params) > 1e-4
    learned = jax.jit(partial(dqn.sequences_of, parts_of(config)))
    shifted = rollout._replace(reset=np.roll(rollout.reset, 1, axis=0))
    target, other = (
        np.asarray(learned(trained.state, x, trained.hparams.gamma).target)
        for x in (rollout, shifted)
    )
    assert np.max(np.abs(target - other)) > 1e-3


def test_the_stored_memory_is_read(trained):
    zeros = jax.tree.map(np.zeros_like, trained.rollout.memory)
    other, _ = trained.after(memory=zeros)
    right, _ = trained.after()
    assert relative_difference(other.network.params, right.network.params) > 1e-3


def test_nothing_is_read_behind_ends_or_of_who_is_out(trained):
    """Nor of steps whose values nobody bootstraps from."""
    rollout = trained.rollout
    dead, over = rollout.weight == 0, rollout.terminated

    def spoilt(x, where, value=np.nan):
        x = np.array(x)
        x[where] = value
        return x

    changed = {
        "obs": spoilt(rollout.obs, dead),
        "action": spoilt(rollout.action, dead, 77),
        "final_obs": spoilt(rollout.final_obs, dead | over),
        "reward": spoilt(rollout.reward, dead),
    }
    clean, dirty = trained.after(), trained.after(**changed)
    assert all_finite(dirty)
    assert_identical(dirty, clean)


def test_vmap_over_agents_is_a_loop(trained):
    found, keys = trained.case, jax.random.split(jax.random.key(3), 2)
    act = jax.jit(trained.learner.act)
    rates = [found.hparams(**HPARAMS | {"learning_rate": rate}) for rate in (1e-3, 1e-2)]
    states = [
        with_large_weights(trained.learner.init(key, h)) for key, h in zip(keys, rates, strict=True)
    ]
    rollouts = [
        make_rollout(found, act, state, h, seed)
        for seed, (state, h) in enumerate(zip(states, rates, strict=True))
    ]
    update = jax.jit(jax.vmap(trained.learner.update))
    together, _ = update(keys, stack(states), stack(rollouts), stack(rates))
    for n, state in enumerate(states):
        alone, _ = trained.update(keys[n], state, rollouts[n], rates[n])
        assert relative_difference(take(together, n), alone) <= 1e-5


# By hand: a network that remembers the sum of what it saw, worth as much, or what it lacks to 10


def unroll(params, seen, memory, reset, active):
    q, memories = [], []
    for t in range(len(seen)):
        memory = np.where(reset[t], 0.0, memory)
        memory = np.where(active[t], memory + seen[t], memory)
        memories.append(memory)
        q.append(params * np.stack([memory, 10.0 - memory], -1))
    return jnp.asarray(np.stack(q)), jnp.asarray(np.stack(memories))


def by_hand(burn_in, length, double=True, **ends):
    """Samples of one window of four steps, from a memory of 5; the third step begins an episode.

    Memory after each step: 5 + 1 = 6, 6 + 2 = 8, then 4 and 4 + 8 = 12. What steps led to adds 2,
    -6 (the end of the first episode), 8 and 16: 8, 2, 12, 28.
    """
    config = dqn.Config(core="gru", burn_in=burn_in, sequence_length=length, double=double)
    network = Network(init=None, apply=None, unroll=unroll)
    parts = q_learning.Parts(config, Discrete(2), network, lambda x: x, None)
    column = partial(np.array, dtype=np.float32)
    rollout = transitions(
        obs=column([[1], [2], [4], [8]]),
        action=np.zeros((4, 1), np.int32),
        memory=column([5]),
        final_obs=column([[2], [-6], [8], [16]]),
        reward=column([[1], [2], [3], [4]]),
        reset=np.array([[False], [False], [True], [False]]),
        **{name: np.array([[False], [True], [False], [False]]) for name in ends},
    )
    state = State(NetworkState(np.float32(1.0), ()), np.float32(2.0), np.int32(0))
    return dqn.sequences_of(parts, state, rollout, jnp.float32(0.5))


def test_targets_by_hand():
    # values of what steps led to, of the target network, twice as much: 16, 2 (10 - 2) = 16, 24, 56
    # two-step returns: 1 + 2/2 + 16/4; truncated at once: 2 + 16/2; 3 + 4/2 + 56/4
    np.testing.assert_allclose(by_hand(0, 3, truncated=1).target[:, 0], [6.0, 10.0, 19.0])
    np.testing.assert_allclose(by_hand(0, 3, False, truncated=1).target[:, 0], [6.0, 10.0, 19.0])
    # terminated: 1 + 2/2; 2
    np.testing.assert_allclose(by_hand(0, 3, terminated=1).target[:, 0], [2.0, 2.0, 19.0])
    # one-step returns: 1 + 16/2; 2 + 16/2; 3 + 24/2; 4 + 56/2
    np.testing.assert_allclose(by_hand(0, 4, truncated=1).target[:, 0], [9.0, 10.0, 15.0, 32.0])


def test_burn_in_by_hand():
    samples = by_hand(1, 2, truncated=1)
    np.testing.assert_allclose(samples.target[:, 0], [10.0, 19.0])
    np.testing.assert_allclose(samples.steps.memory, [[6.0]])
    np.testing.assert_array_equal(samples.steps.reset[:, 0], [False, True])
    np.testing.assert_allclose(samples.features[:, 0], [2.0, 4.0])


def test_what_it_wants_and_refuses():
    learner = case(core="gru", sequence_length=4, burn_in=6).learner()
    assert learner.window == 10 and learner.q_values is None
    assert case().learner().window == 1
    with pytest.raises(UsageError, match="core = 'lstm' learns from sequences of replay, and seq"):
        dqn.Config(core="lstm")
    assert case(sequence_length=4).learner().window == 1
