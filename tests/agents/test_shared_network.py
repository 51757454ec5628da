"""Actor and critic in one network: beside two networks that begin with the same weights."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import Case, assert_identical, relative_difference
from ppo_reference import SPACE, Trained

from marl.agents import a2c, actor_critic, ppo, state_values
from marl.agents.learner import CriticSpace
from marl.agents.optimizer import NetworkState, make_optimizer
from marl.agents.statistics import RunningStatistics
from marl.envs.errors import UsageError
from marl.envs.spaces import Box, Discrete

close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
# so large an epsilon makes a step of Adam proportional to the gradient, and nothing is clipped
LINEAR = {
    "learning_rate": 1e3,
    "adam_epsilon": 1e4,
    "max_grad_norm": np.inf,
    "value_coef": 0.7,
    "entropy_coef": 0.05,
    "gamma": 0.9,
}
VALUES = {"normalize_observations": True, "value_normalization": "popart", "value_loss": "huber"}
ONE_STEP = {"num_epochs": 1, "num_minibatches": 1}
CASES = {
    "ppo": (ppo, ONE_STEP | VALUES | {"clip_values": True}),
    "ppo-gru": (ppo, ONE_STEP | {"core": "gru", "sequence_length": 3, "burn_in": 1}),
    "ppo-lstm": (ppo, ONE_STEP | VALUES | {"core": "lstm"}),
    "a2c": (a2c, VALUES),
    "a2c-gru": (a2c, {"core": "gru"}),
}


def case(algorithm, **config):
    sizes = {"hidden_sizes": (8,), "core_size": 6} | config
    return Case(algorithm, algorithm.Config(**sizes), SPACE, Discrete(4), SPACE, masked=True)


def heads_with_weight(state):
    """So that both heads pull at what they share: those of policies start near 0."""
    network = dict(state.actor.params["network"])
    network["linear_1"] = {"w": 30.0 * network["linear_1"]["w"], "b": network["linear_1"]["b"]}
    statistics = state.value_statistics
    if isinstance(statistics, RunningStatistics):
        statistics = RunningStatistics(*map(jnp.float32, (40.0, 0.7, 2.5)))
    actor = state.actor._replace(params=state.actor.params | {"network": network})
    return state._replace(actor=actor, value_statistics=statistics)


def apart(network):
    """Parameters of an actor's and of a critic's network, of those of the one."""
    common = {name: w for name, w in network.items() if name not in ("linear_1", "linear_2")}
    heads = (network["linear_1"], network["linear_2"])
    return tuple(common | {"linear_1": head} for head in heads)


def as_two(state, hparams, networks):
    """The state of two networks that compute what the one does."""
    actor, critic = networks
    trees = {"network": actor, "log_std": state.actor.params["log_std"]}, critic
    optimizer = make_optimizer(hparams, hparams.learning_rate)
    actor, critic = (NetworkState(params, optimizer.init(params)) for params in trees)
    return state._replace(actor=actor, critic=critic, critic_obs_statistics=state.obs_statistics)


@pytest.fixture(scope="module", params=CASES)
def pair(request):
    """One network and two, and what each learned from what the one acted."""
    algorithm, config = CASES[request.param]
    hparams = LINEAR
    one = Trained(
        case(algorithm, shared_network=True, **config), prepare=heads_with_weight, **hparams
    )
    two = Trained(case(algorithm, **config), **hparams)
    two.state = as_two(one.state, one.hparams, apart(one.state.actor.params["network"]))
    rollout = one.rollout
    return one, two, rollout._replace(critic_obs=rollout.obs, critic_memory=rollout.memory)


def moved(after, before):
    return jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, after, before)


def test_an_update_sums_the_gradients_of_two_networks(pair):
    one, two, rollout = pair
    after, metrics = one.update(jax.random.key(0), one.state, rollout, one.hparams)
    other, expected = two.update(jax.random.key(0), two.state, rollout, two.hparams)
    found = moved(after.actor.params["network"], one.state.actor.params["network"])
    actor = moved(other.actor.params["network"], two.state.actor.params["network"])
    critic = moved(other.critic.params, two.state.critic.params)
    heads = {"linear_1": actor["linear_1"], "linear_2": critic["linear_1"]}
    for name, change in found.items():
        summed = heads.get(name) or jax.tree.map(np.add, actor[name], critic[name])
        scale = max(np.max(np.abs(x)) for x in jax.tree.leaves(summed))
        assert scale > 1e-6
        for x, y in zip(*map(jax.tree.leaves, (change, summed)), strict=True):
            np.testing.assert_allclose(x / scale, y / scale, atol=2e-3, err_msg=name)
    for name in set(metrics) - {"actor_grad_norm"}:
        close(metrics[name], expected[name], err_msg=name)
    assert set(expected) - set(metrics) == {"critic_grad_norm"}
    assert_identical(after.obs_statistics, other.obs_statistics)
    assert relative_difference(after.value_statistics, other.value_statistics) <= 1e-4


def test_values_are_those_of_acting(pair):
    """So no pass over the rollout is needed for them; two networks need one."""
    one, two, rollout = pair
    parts = actor_critic.make_parts(two.case.config, SPACE, Discrete(4), CriticSpace(SPACE))
    evaluate = jax.jit(partial(state_values.evaluate, parts))
    _, values = evaluate(two.state, rollout, two.hparams)
    np.testing.assert_allclose(rollout.extras["value"], values.output, rtol=1e-4, atol=1e-5)
    value, other = (jax.jit(x.learner.value)(x.state, rollout.obs) for x in (one, two))
    np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5)
    changed = rollout.extras | {"value": rollout.extras["value"] + 1.0}
    _, metrics = one.update(jax.random.key(0), one.state, rollout, one.hparams)
    _, other = one.update(
        jax.random.key(0), one.state, rollout._replace(extras=changed), one.hparams
    )
    assert abs(other["value_mean"] - metrics["value_mean"]) > 0.5


def test_without_layers_to_share_it_is_two_networks():
    """Over epochs of minibatches, where values are clipped around what they were in acting."""
    config = {"num_epochs": 3, "num_minibatches": 2, "hidden_sizes": (), "clip_values": True}
    config |= {"value_normalization": "running"}
    hparams = {"learning_rate": 0.05, "max_grad_norm": np.inf, "value_clip_epsilon": 0.05}
    hparams |= {"adam_epsilon": 1e-2}
    one = Trained(case(ppo, shared_network=True, **config), **hparams)
    two = Trained(case(ppo, **config), **hparams)
    network = one.state.actor.params["network"]
    heads = {"linear": network["linear"]}, {"linear": network["linear_1"]}
    two.state = as_two(one.state, one.hparams, heads)
    rollout = one.rollout._replace(critic_obs=one.rollout.obs)
    after, metrics = one.update(jax.random.key(0), one.state, rollout, one.hparams)
    other, expected = two.update(jax.random.key(0), two.state, rollout, two.hparams)
    found = after.actor.params["network"]
    expected_params = {
        "linear": other.actor.params["network"]["linear"],
        "linear_1": other.critic.params["linear"],
    }
    assert relative_difference(found, expected_params) <= 1e-4
    close(metrics["value_loss"], expected["value_loss"])
    assert relative_difference(found, network) > 0.1


REFUSED = {
    "another's eyes": ({}, CriticSpace(Box((5,))), "reads what the actor reads"),
    "held": ({}, None, "nobody else can hold"),
    "two sizes": ({"critic_hidden_sizes": (4,)}, CriticSpace(SPACE), r"critic_hidden_sizes = \(4,"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_network_cannot_be_is_refused(name):
    config, critic_space, message = REFUSED[name]
    for algorithm in (ppo, a2c):
        with pytest.raises(UsageError, match=message):
            found = algorithm.Config(shared_network=True, **config)
            algorithm.make(found, SPACE, Discrete(4), critic_space)
