"""PPO and PQN with memory: they learn from what they acted with, and value what they remember."""

from functools import partial

import jax
import numpy as np
import pytest
from learner_cases import Case, all_finite, relative_difference, take
from ppo_reference import SPACE, Trained, changed_networks

from marl.agents import actor_critic, ppo, pqn, q_learning, sequences, state_values
from marl.agents.learner import CriticSpace
from marl.envs.spaces import Discrete

CORES = ("gru", "lstm")
close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
# where a gradient is nearly 0, Adam's usual epsilon turns its rounding error into a step
SMOOTH = {"learning_rate": 0.02, "adam_epsilon": 1e-2}


def case(**config):
    sizes = {"num_epochs": 1, "num_minibatches": 1, "hidden_sizes": (8,), "core_size": 6}
    return Case(ppo, ppo.Config(**sizes | config), SPACE, Discrete(4), SPACE, masked=True)


def with_larger_weights(state):
    """So that memory matters to what is chosen: heads of policies start near 0."""
    larger = jax.tree.map(lambda x: 3.0 * x, state.actor.params["network"])
    larger["linear_1"]["w"] = larger["linear_1"]["w"] * 30.0
    params = state.actor.params | {"network": larger}
    return state._replace(actor=state.actor._replace(params=params))


def parts_of(found):
    return actor_critic.make_parts(found.config, SPACE, Discrete(4), CriticSpace(SPACE))


@pytest.fixture(scope="module", params=CORES)
def trained(request):
    return Trained(case(core=request.param), prepare=with_larger_weights, **SMOOTH)


def shifted(reset, by):
    moved = np.roll(reset, by, axis=0)
    assert not np.array_equal(moved, reset)
    return moved


def ratio_error(trained, rollout):
    """How far probabilities of the actions are from those they were chosen with."""
    log_prob = jax.jit(trained.learner.log_prob)(trained.state, rollout)
    live = rollout.weight > 0
    return np.max(np.abs(np.exp(np.asarray(log_prob) - rollout.extras["log_prob"]) - 1.0)[live])


def test_a_reset_flag_that_is_off_by_one_is_caught(trained):
    """The policy that learns is the policy that acted only where flags stand where they stood."""
    rollout = trained.rollout
    assert np.any(rollout.reset[1:]) and np.any(rollout.terminated)
    assert ratio_error(trained, rollout) <= 1e-5
    for by in (1, -1):
        assert ratio_error(trained, rollout._replace(reset=shifted(rollout.reset, by))) > 1e-3
    over = rollout.terminated | rollout.truncated  # of this step, not of the one before
    assert ratio_error(trained, rollout._replace(reset=over)) > 1e-3


def test_an_update_starts_at_ratio_one(trained):
    _, metrics = trained.after()
    assert abs(metrics["approx_kl"]) < 1e-9 and metrics["clip_fraction"] == 0.0
    _, metrics = trained.after(reset=shifted(trained.rollout.reset, 1))
    assert metrics["approx_kl"] > 1e-5


def test_memory_is_read_from_the_rollout(trained):
    """Of the actor and of the critic each its own."""
    rollout = trained.rollout
    state, _ = trained.after()
    for name, network in (("memory", "actor"), ("critic_memory", "critic")):
        zeros = jax.tree.map(np.zeros_like, getattr(rollout, name))
        other, _ = trained.after(advantage=rollout.reward, **{name: zeros})
        same, _ = trained.after(advantage=rollout.reward)
        assert changed_networks(other, same) == {network}
    assert changed_networks(state, trained.state) == {"actor", "critic"}


def starts_of_episodes(rollout):
    """Every environment begins an episode at step 3, where the second chunk does."""
    reset = rollout.reset.copy()
    reset[3] = True
    return reset


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("burn_in", [0, 2])
def test_chunks_learn_what_whole_sequences_do(core, burn_in):
    """Losses where chunks carry memory, and all of it where episodes begin with the chunks."""
    whole = Trained(case(core=core), prepare=with_larger_weights, **SMOOTH)
    chunked = Trained(
        case(core=core, sequence_length=3, burn_in=burn_in), prepare=with_larger_weights, **SMOOTH
    )
    _, metrics = whole.after()
    _, found = chunked.after()
    for name in ("policy_loss", "entropy", "approx_kl", "value_loss", "explained_variance"):
        close(found[name], metrics[name], err_msg=name)
    assert abs(found["actor_grad_norm"] - metrics["actor_grad_norm"]) > 1e-5  # cut in time
    reset = starts_of_episodes(whole.rollout)
    state, _ = whole.after(reset=reset)
    other, _ = chunked.after(reset=reset)
    assert relative_difference(other, state) <= 1e-4


@pytest.mark.parametrize("core", CORES)
def test_a_rollout_of_one_chunk_is_the_whole_sequence(core):
    one, other = (Trained(case(core=core, sequence_length=n), **SMOOTH) for n in (0, 6))
    (state, metrics), (found, found_metrics) = one.after(), other.after()
    assert relative_difference(found, state) <= 1e-6
    assert relative_difference(found_metrics, metrics) <= 1e-5


def test_gradients_flow_through_time(trained):
    """What is done in the last step alone moves what reads the first observation."""
    rollout, params = trained.rollout, trained.state.actor.params
    parts = parts_of(trained.case)

    def last_output(vector):
        steps = actor_critic.actor_steps(parts, rollout)
        features = actor_critic.actor_features(parts, trained.state, rollout.obs)
        features = features._replace(vector=vector)
        (outputs, _), _ = actor_critic.policy_outputs(parts, params, features, steps)
        return outputs[-1].sum()

    grad = np.asarray(jax.grad(last_output)(rollout.obs))
    reaches = np.any(grad != 0, -1)
    begins = [max(np.flatnonzero(column), default=0) for column in rollout.reset.T]
    live = rollout.weight > 0
    for env, begin in enumerate(begins):
        np.testing.assert_array_equal(reaches[:, env], (np.arange(6) >= begin) & live[:, env])


def test_what_a_step_led_to_is_valued_with_the_memory_before_the_reset(trained):
    """By hand: the episode is cut in the middle, and its memory goes into the final value."""
    rollout, state, parts = trained.rollout, trained.state, parts_of(trained.case)
    hparams = trained.hparams._replace(gae_lambda=np.float32(0.0))
    assert rollout.truncated[3, 1] and rollout.reset[4, 1]
    _, values = jax.jit(partial(state_values.evaluate, parts))(state, rollout, hparams)
    run = jax.jit(partial(sequences.act, parts.critic, state.critic.params))
    memory, expected = take(jax.tree.map(lambda m: m[None], rollout.critic_memory), 0), {}
    for t in range(6):
        flags = {"reset": rollout.reset[t], "active": rollout.weight[t] > 0}
        features = partial(actor_critic.critic_features, parts, state)
        inputs = sequences.ActInput(None, None, memory, **flags)
        output, memory = run(features(rollout.critic_obs[t]), inputs)
        close(values.output[t], output[:, 0])
        final = sequences.ActInput(None, None, memory, np.zeros(4, bool))
        expected[t] = run(features(rollout.final_critic_obs[t]), final)[0][:, 0]
    gamma = float(hparams.gamma)
    for t, env in ((3, 1), (1, 1), (5, 3)):  # truncated, goes on, the rollout's end
        target = rollout.reward[t, env] + gamma * expected[t][env]
        close(values.target[t, env], target)
    close(values.target[2, 0], rollout.reward[2, 0])  # terminated


def test_the_critics_memory_goes_on_in_the_next_rollout(trained):
    """Two halves, the second from the memory after the first, are valued as the whole."""
    rollout, state, parts = trained.rollout, trained.state, parts_of(trained.case)
    evaluate = jax.jit(partial(state_values.evaluate, parts))
    _, whole = evaluate(state, rollout, trained.hparams)
    by_time = set(rollout._fields) - {"memory", "critic_memory", "env_steps", "shuffle_key"}
    halves = [
        rollout._replace(
            **{n: jax.tree.map(lambda x, h=h: x[h], getattr(rollout, n)) for n in by_time}
        )
        for h in (slice(3), slice(3, 6))
    ]
    memory = jax.jit(trained.learner.next_critic_memory)(state, halves[0])
    for leaf, like in zip(*map(jax.tree.leaves, (memory, rollout.critic_memory)), strict=True):
        assert leaf.shape == like.shape
    _, second = evaluate(state, halves[1]._replace(critic_memory=memory), trained.hparams)
    close(second.output, whole.output[3:])
    assert (
        np.max(np.abs(evaluate(state, halves[1], trained.hparams)[1].output - second.output)) > 1e-3
    )


def test_a_value_by_itself_is_that_of_an_episodes_start(trained):
    rollout, state, parts = trained.rollout, trained.state, parts_of(trained.case)
    reset = np.ones_like(rollout.reset)
    _, values = state_values.evaluate(parts, state, rollout._replace(reset=reset), trained.hparams)
    close(trained.learner.value(state, rollout.critic_obs), values.output)
    close(trained.learner.value(state, rollout.critic_obs[2]), values.output[2])


def test_nan_in_what_an_inactive_agent_sees_reaches_nothing(trained):
    dead = (trained.rollout.weight == 0)[..., None]
    state, metrics = trained.after()
    poisoned, found = trained.after(obs=np.where(dead, np.nan, trained.rollout.obs))
    assert all_finite(poisoned) and all_finite(found)
    assert relative_difference((poisoned, found), (state, metrics)) == 0.0


def test_a_joint_critic_equals_a_tiled_one(trained):
    """Two agents folded into the batch with one reward: its memory is one too."""
    fold, rollout = 2, trained.rollout
    first = {name: getattr(rollout, name)[:, ::fold] for name in ("critic_obs", "final_critic_obs")}
    memory = jax.tree.map(lambda m: m[::fold], rollout.critic_memory)
    common = {
        name: np.repeat(getattr(rollout, name)[:, ::fold], fold, axis=1)
        for name in ("reward", "terminated", "truncated", "reset", "weight")
    }
    state, metrics = trained.after(**common, **first, critic_memory=memory)
    tiled = {name: np.repeat(x, fold, axis=1) for name, x in first.items()}
    tiled_memory = jax.tree.map(lambda m: np.repeat(m, fold, axis=0), memory)
    other, found = trained.after(**common, **tiled, critic_memory=tiled_memory)
    assert relative_difference(other, state) <= 1e-4
    for name in metrics:
        close(found[name], metrics[name], err_msg=name)


def test_pqn_reads_what_a_step_led_to_with_the_memory_before_the_reset():
    """One-step targets by hand, from acting step by step."""
    config = pqn.Config(core="gru", core_size=6, hidden_sizes=(8,), num_minibatches=1)
    of_pqn = Case(pqn, config, SPACE, Discrete(4), (), masked=True)
    found = Trained(of_pqn, gamma=0.9, q_lambda=0.0)
    parts = q_learning.make_parts("pqn", config, SPACE, Discrete(4), "gru", 6)
    rollout, params = found.rollout, found.state.network.params
    run = jax.jit(partial(sequences.act, parts.network, params))
    memory, expected = rollout.memory, []
    for t in range(6):
        flags = {"reset": rollout.reset[t], "active": rollout.weight[t] > 0}
        inputs = sequences.ActInput(None, None, memory, **flags)
        memory = run(parts.features(rollout.obs[t]), inputs)[1]
        after = sequences.ActInput(None, None, memory, np.zeros(4, bool))
        q, _ = run(parts.features(rollout.final_obs[t]), after)
        best = np.where(rollout.final_action_mask[t], q, -np.inf).max(-1)
        expected.append(rollout.reward[t] + 0.9 * best * ~rollout.terminated[t])
    steps = sequences.whole(parts.network, rollout.memory, rollout.reset, rollout.weight)
    features = parts.features(rollout.obs)
    memories = sequences.memories_of(parts.network, params, features, steps)
    target = pqn.targets(parts, found.state, rollout, memories, found.hparams)
    close(target, expected)
    q, _ = sequences.run(parts.network, params, features, steps)
    error = np.asarray(q_learning.chosen(q, rollout.action)) - target
    _, metrics = found.update(
        jax.random.key(0), found.state, rollout, found.hparams._replace(learning_rate=0.0)
    )
    live = rollout.weight > 0
    close(metrics["td_error"], np.mean(np.abs(error[live])))
