"""Value normalisation, PopArt and the Huber loss, by hand: units, statistics, what is preserved."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import Case, all_finite, assert_identical, relative_difference, sampled
from ppo_reference import SPACE, Trained

from marl.agents import a2c, actor_critic, networks, ppo, state_values, statistics
from marl.agents.learner import CriticSpace, Rollout
from marl.agents.state_values import Values
from marl.agents.statistics import RunningStatistics
from marl.envs.spaces import Box, Discrete

close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
IMAGE = {"image": Box((3, 4, 2), 0, 255, "uint8"), "speed": Box((2,))}
CRITICS = {
    "mlp": (SPACE, {}),
    "linear": (SPACE, {"hidden_sizes": ()}),
    "deep": (SPACE, {"hidden_sizes": (4,) * 11}),  # "linear_11" sorts before "linear_2"
    "mlp_norm": (SPACE, {"torso": "mlp_norm"}),
    "simba": (SPACE, {"torso": "simba"}),
    "cnn": (IMAGE, {}),
    "gru": (SPACE, {"core": "gru", "core_size": 5}),
    "lstm": (IMAGE, {"core": "lstm", "core_size": 5, "torso": "simba"}),
}


def known(total, mean, std):
    """Statistics of that standard deviation, the floor under the variance included."""
    return RunningStatistics(*map(jnp.float32, (total, mean, std**2 - 1e-4)))


def test_a_change_of_units_by_hand():
    # 3 is 2 * 3 + 1 = 7 of the return, which is (7 - 5) / 4 = 0.5 to the other: 3 * 0.5 - 1
    scale, shift = statistics.change_of_units(known(9, 1, 2), known(9, 5, 4))
    np.testing.assert_allclose([scale, shift], [0.5, -1.0], rtol=1e-6)


def test_a_change_to_the_same_units_is_exactly_none():
    same = known(9, 0.3, 1.7)
    np.testing.assert_array_equal(statistics.change_of_units(same, same), [1.0, 0.0])


def a_critic(name):
    """Parts, a state with statistics of its own, and observations of a critic alone."""
    space, options = CRITICS[name]
    config = ppo.Config(value_normalization="popart", **({"hidden_sizes": (8, 8)} | options))
    parts = actor_critic.make_parts(config, None, None, CriticSpace(space))
    hparams = jax.tree.map(jnp.float32, ppo.Hparams())
    state = jax.jit(partial(actor_critic.init, parts))(jax.random.key(0), hparams)
    # biases start at 0, where a factor that they lack would not show
    moved = jax.tree.map(lambda x: x + 0.1 * (x.ndim == 1), state.critic.params)
    critic = state.critic._replace(params=moved)
    state = state._replace(critic=critic, value_statistics=known(10, 0.5, 2.0))
    return parts, state, sampled(0, space, (3, 4))


@pytest.mark.parametrize("name", CRITICS)
def test_outputs_are_preserved_and_only_the_last_layer_moves(name):
    parts, state, obs = a_critic(name)

    @jax.jit
    def move(state, obs, target):
        values = Values((), (), target, jnp.ones_like(target), (), (), {})
        moved = state_values.move_statistics(parts, state, None, values)
        return moved, state_values.value(parts, state, obs), state_values.value(parts, moved, obs)

    target = np.random.default_rng(1).normal(50.0, 30.0, (3, 4)).astype(np.float32)
    moved, before, after = move(state, obs, target)
    assert moved.value_statistics.mean > 20 and np.ptp(before) > 1e-3
    close(after, before)
    assert_identical(moved.critic.optimizer, state.critic.optimizer)
    params, others = state.critic.params, moved.critic.params
    changed = {
        layer
        for layer in params
        if any(np.any(params[layer][leaf] != others[layer][leaf]) for leaf in params[layer])
    }
    (head,) = changed
    assert params[head]["b"].shape == (1,)


def test_outputs_are_rescaled_by_hand():
    params = {"linear": {"w": jnp.array([[2.0]]), "b": jnp.array([3.0])}}
    moved = networks.rescale_outputs(params, 0.5, -1.0)["linear"]
    assert moved["w"] == 1.0 and moved["b"] == 0.5


# Of all steps the reward is 1 and the end; steps 3 and 4 of column 0 have no weight.
LAST = {"normalize_advantages": False, "hidden_sizes": (8,)}
ONE_STEP = {ppo: {"num_epochs": 1, "num_minibatches": 1}, a2c: {}}


def outputs_half(state):
    """A critic that gives 0.5, which is 0.5 * 2 + 3 = 4 of the return."""
    params = jax.tree.map(jnp.zeros_like, state.critic.params)
    head = max(params)
    params[head]["b"] = jnp.full(1, 0.5)
    critic = state.critic._replace(params=params)
    return state._replace(critic=critic, value_statistics=known(1, 3, 2))


def after_ones(algorithm, prepare=outputs_half, hparams=(), **config):
    """A learner, and (state, metrics) of updates in which every return is 1."""
    config = algorithm.Config(**LAST | ONE_STEP[algorithm] | config)
    case = Case(algorithm, config, SPACE, Discrete(4), SPACE, masked=True)
    trained = Trained(case, prepare=prepare, **dict(hparams))
    reward = np.where(trained.rollout.weight > 0, 1.0, np.nan).astype(np.float32)
    over = np.ones_like(trained.rollout.terminated)
    changes = {"reward": reward, "terminated": over, "truncated": ~over}
    return trained, trained.rollout._replace(**changes)


@pytest.mark.parametrize("algorithm", [ppo, a2c])
@pytest.mark.parametrize(
    "normalization, value_loss, expected",
    [
        # the target 1 is (1 - 3) / 2 = -1 to the critic, which gives 0.5: an error of 1.5
        ("running", "squared", 1.125),  # 1.5^2 / 2
        ("running", "huber", 0.625),  # 0.5 * (1.5 - 0.5 / 2)
        ("popart", "huber", 0.625),
    ],
)
def test_an_update_by_hand(algorithm, normalization, value_loss, expected):
    config = {"value_normalization": normalization, "value_loss": value_loss}
    trained, rollout = after_ones(algorithm, hparams={"huber_delta": 0.5}, **config)
    state, metrics = trained.update(jax.random.key(0), trained.state, rollout, trained.hparams)
    np.testing.assert_allclose(metrics["value_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["value_mean"], 4.0, rtol=1e-5)
    # 22 steps with weight: mean (3 + 22) / 23, variance (4 + 4 * 22 / 23) / 23
    found = state.value_statistics
    np.testing.assert_allclose(found.total, 23.0)
    np.testing.assert_allclose(found.mean, 25 / 23, rtol=1e-6)
    np.testing.assert_allclose(found.variance, (4 - 1e-4 + 4 * 22 / 23) / 23, rtol=1e-4)


def test_advantages_are_in_units_of_the_return():
    """The loss of a policy at ratio 1 is minus the mean advantage, 1 - 4."""
    trained, rollout = after_ones(ppo, value_normalization="running")
    _, metrics = trained.update(jax.random.key(0), trained.state, rollout, trained.hparams)
    np.testing.assert_allclose(metrics["policy_loss"], 3.0, rtol=1e-5)


def test_the_huber_loss_without_normalisation_is_of_raw_errors():
    """0.5 itself against 1."""

    def prepare(state):
        return outputs_half(state)._replace(value_statistics=())

    trained, rollout = after_ones(a2c, prepare, hparams={"huber_delta": 0.25}, value_loss="huber")
    _, metrics = trained.update(jax.random.key(0), trained.state, rollout, trained.hparams)
    np.testing.assert_allclose(metrics["value_loss"], 0.25 * (0.5 - 0.125), rtol=1e-5)


@pytest.mark.parametrize("normalization", ["running", "popart"])
def test_constant_returns_are_finite(normalization):
    """Their variance is 0; the mean is learned at once, and what the critic says stays finite."""
    trained, rollout = after_ones(a2c, lambda state: state, value_normalization=normalization)
    state = trained.state
    for _ in range(3):
        state, metrics = trained.update(jax.random.key(0), state, rollout, trained.hparams)
        assert all_finite((state, metrics))
    np.testing.assert_allclose(state.value_statistics.mean, 1.0, rtol=1e-6)
    assert state.value_statistics.variance < 1e-12 and state.value_statistics.total == 66.0


@pytest.mark.parametrize("algorithm, epochs", [(ppo, 3), (a2c, None)])
def test_popart_is_running_statistics_and_a_critic_that_says_what_it_said(algorithm, epochs):
    """After an update of any number of minibatches; the rest of the state is the same."""
    config = {"num_epochs": epochs, "num_minibatches": 2} if epochs else {}
    sizes = {"hidden_sizes": (8,), "value_loss": "huber"}
    found = {}
    for name in ("running", "popart"):
        options = algorithm.Config(value_normalization=name, **sizes | config)
        trained = Trained(Case(algorithm, options, SPACE, Discrete(4), SPACE, masked=True))
        state = trained.state._replace(value_statistics=known(5, 3, 2))
        rollout = trained.rollout._replace(reward=10 * trained.rollout.reward)
        moved, _ = trained.update(jax.random.key(0), state, rollout, trained.hparams)
        found[name] = moved
    running, popart = found["running"], found["popart"]
    assert relative_difference(popart.value_statistics, running.value_statistics) <= 1e-6
    assert abs(popart.value_statistics.variance - 4.0) > 1.0
    under_old = running._replace(value_statistics=known(5, 3, 2))
    value = jax.jit(trained.learner.value)
    obs = rollout.critic_obs
    close(value(popart, obs), value(under_old, obs))
    assert relative_difference(value(running, obs), value(under_old, obs)) > 1e-2
    for one, other in ((popart.actor, running.actor), (popart.critic[1], running.critic[1])):
        assert relative_difference(one, other) <= 1e-6


def test_a_rollout_without_weight_leaves_the_critic_as_it_is():
    parts, state, _ = a_critic("mlp")
    nothing = Values((), (), jnp.full((2, 2), jnp.nan), jnp.zeros((2, 2)), (), (), {})
    assert_identical(state_values.move_statistics(parts, state, None, nothing), state)


@pytest.mark.parametrize("normalization", ["none", "running", "popart"])
def test_large_returns_are_learned_in_few_steps(normalization):
    """50, 100 and 300 have mean 150, standard deviation 108; without units they are far away."""
    space, returns = Discrete(3), jnp.array([50.0, 100.0, 300.0])
    config = a2c.Config(hidden_sizes=(8,), value_normalization=normalization)
    critic = a2c.make_critic(config, CriticSpace(space))
    hparams = jax.tree.map(jnp.float32, a2c.Hparams(learning_rate=0.01))
    obs = jnp.arange(12).reshape(2, 6) % 3
    over = jnp.ones((2, 6), bool)
    rollout = Rollout(**dict.fromkeys(Rollout._fields))._replace(
        critic_obs=obs,
        final_critic_obs=obs,
        reward=returns[obs],
        terminated=over,
        truncated=~over,
        weight=jnp.ones((2, 6)),
        env_steps=jnp.float32(0.0),
    )

    @jax.jit
    def train(key):
        state, _ = jax.lax.scan(
            lambda state, _: (critic.update(state, rollout, hparams)[0], None),
            critic.init(key, hparams),
            length=500,
        )
        return critic.value(state, jnp.arange(3))

    error = np.max(np.abs(train(jax.random.key(0)) - returns) / returns)
    assert (error < 0.05) == (normalization != "none")
