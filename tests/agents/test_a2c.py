"""A2C: against PPO of one step and by hand, outside advantages, joint critics, a known optimum."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import CASES, Case, all_finite, assert_identical
from ppo_reference import (
    SPACE,
    ReferenceAdam,
    Trained,
    changed_networks,
    reference_gae,
    reference_mlp,
)

from marl.agents import a2c, ppo
from marl.agents.learner import ActInput, CriticSpace
from marl.envs.errors import UsageError
from marl.envs.spaces import Discrete

SMALL = {"hidden_sizes": (8,)}
EVERYTHING = {
    "normalize_advantages": True,
    "normalize_observations": True,
    "value_normalization": "running",
    "learning_rate_schedule": "linear",
    "entropy_schedule": "cosine",
}
HPARAMS = {
    "learning_rate": 0.01,
    "learning_rate_end": 0.003,
    "schedule_steps": 80.0,
    "critic_learning_rate_scale": 2.0,
    "gamma": 0.9,
    "gae_lambda": 0.8,
    "entropy_coef": 0.05,
    "value_coef": 0.7,
    "max_grad_norm": 0.1,
    "adam_epsilon": 1e-2,
}


def discrete(**config):
    return Case(a2c, a2c.Config(**SMALL | config), SPACE, Discrete(4), SPACE, masked=True)


@pytest.fixture(scope="module")
def plain():
    return Trained(discrete(), learning_rate=0.01, adam_epsilon=1e-3)


def as_ppo(case):
    """The same networks under PPO that takes one step on everything."""
    config = dict.fromkeys(("num_epochs", "num_minibatches"), 1)
    config |= {name: getattr(case.config, name) for name in case.config.__dataclass_fields__}
    return case._replace(algorithm=ppo, config=ppo.Config(**config))


@pytest.fixture(scope="module", params=["composite", "discrete", "raw_advantages"])
def pair(request):
    """A2C, and PPO of one step; they start from one state and learn from one rollout."""
    if request.param == "composite":
        case = CASES["ppo-composite"]._replace(
            algorithm=a2c, config=a2c.Config(**SMALL | EVERYTHING)
        )
    else:
        config = EVERYTHING if request.param == "discrete" else {"value_normalization": "running"}
        case = discrete(**config)
    return Trained(case, **HPARAMS), Trained(as_ppo(case), **HPARAMS)


def test_it_is_ppo_of_one_step(pair):
    """At ratio 1 the clipped objective has the policy gradient, for every space and option."""
    one, other = pair
    assert_identical(one.state, other.state)
    assert_identical(one.rollout.action, other.rollout.action)
    (state, metrics), (expected, found) = one.after(), other.after()
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-6)
    jax.tree.map(close, state, expected)
    assert found.keys() - metrics.keys() == {"approx_kl", "clip_fraction"}
    for name in metrics.keys() - {"policy_loss"}:
        close(metrics[name], found[name], err_msg=name)


def test_an_update_by_hand(plain):
    """Default hparams: returns up to the end of an episode or of the rollout, one step of Adam."""
    h, rollout = jax.tree.map(float, plain.hparams), plain.rollout
    assert h.gae_lambda == 1.0
    live = np.asarray(rollout.weight) > 0
    actor, critic = plain.state.actor.params, plain.state.critic.params
    value, following = (
        np.asarray(reference_mlp(critic, x)[..., 0])
        for x in (rollout.critic_obs, rollout.final_critic_obs)
    )
    advantage = reference_gae(rollout, value, following, h.gamma, 1.0)

    def actor_loss(params):
        logits = reference_mlp(params["network"], rollout.obs)
        logits = jax.nn.log_softmax(jnp.where(rollout.action_mask, logits, -1e9))
        chosen = jnp.take_along_axis(logits, rollout.action[..., None], -1)[..., 0]
        policy_loss = -jnp.mean((chosen * advantage)[live])
        entropy = jnp.mean(-jnp.sum(jnp.exp(logits) * logits, -1)[live])
        found = {"policy_loss": policy_loss, "entropy": entropy}
        return policy_loss - h.entropy_coef * entropy, found

    def critic_loss(params):
        error = reference_mlp(params, rollout.critic_obs)[..., 0] - (advantage + value)
        loss = jnp.mean(0.5 * jnp.square(error)[live])
        return h.value_coef * loss, {"value_loss": loss}

    after, metrics = plain.after()
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-5)
    for name, loss, params in [("actor", actor_loss, actor), ("critic", critic_loss, critic)]:
        grads, expected = jax.grad(loss, has_aux=True)(params)
        adam = ReferenceAdam(h.learning_rate, h.adam_epsilon, h.max_grad_norm)
        params, expected[f"{name}_grad_norm"] = adam.step(params, grads)
        jax.tree.map(close, getattr(after, name).params, params)
        for key, found in expected.items():
            close(metrics[key], found, err_msg=key)


def test_there_is_no_ratio(plain):
    """What the policy that acted thought of its actions is not read."""
    extras = plain.rollout.extras | {"log_prob": plain.rollout.extras["log_prob"] * np.nan}
    assert_identical(plain.after()[0], plain.after(extras=extras)[0])


def test_a_given_advantage_replaces_the_actors_and_leaves_the_critics(plain):
    state, _ = plain.after()
    advantage = -plain.rollout.reward
    given, _ = plain.after(advantage=advantage)
    assert changed_networks(state, given) == {"actor"}
    poisoned = np.where(plain.rollout.weight > 0, advantage, np.nan)
    assert_identical(given, plain.after(advantage=poisoned)[0])


def test_a_learner_whose_team_holds_the_critic(plain):
    case, advantage = plain.case, plain.rollout.reward
    learner = a2c.make(case.config, case.observation_space, case.action_space, None)
    assert learner.value is None
    fresh = jax.jit(learner.init)(jax.random.key(0), plain.hparams)
    assert fresh.critic == ()
    assert_identical(fresh.actor, plain.state.actor)
    rollout = plain.rollout._replace(
        advantage=advantage, critic_obs=(), final_critic_obs=(), reward=advantage * 0
    )
    state, metrics = jax.jit(learner.update)(jax.random.key(0), fresh, rollout, plain.hparams)
    with_critic, _ = plain.after(advantage=advantage)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, state.actor, with_critic.actor)
    assert state.critic == () and "value_loss" not in metrics


def test_advantage_weight_scales_the_policys_gradient(plain):
    no_entropy = plain.hparams._replace(entropy_coef=jnp.float32(0.0))
    norms = []
    for weight in (1.0, 2.0, 0.0):
        weights = np.full(plain.rollout.weight.shape, weight, np.float32)
        rollout = plain.rollout._replace(advantage_weight=weights)
        state, metrics = plain.update(jax.random.key(0), plain.state, rollout, no_entropy)
        norms.append(metrics["actor_grad_norm"])
    np.testing.assert_allclose(norms[1], 2 * norms[0], rtol=1e-5)
    assert norms[2] == 0.0
    assert changed_networks(state, plain.state) == {"critic"}


def test_a_joint_critic_equals_a_tiled_one(plain):
    """Two agents folded into the batch, one reward: the critic may run on [T, B] or [T, B * 2]."""
    rollout, cut = plain.rollout, np.zeros((2, *plain.rollout.reward.shape), bool)
    cut[0, 3, :2] = cut[1, 1, 2:] = True
    common = {
        "reward": np.repeat(rollout.reward[:, ::2], 2, axis=1),
        "terminated": cut[0],
        "truncated": cut[1],
    }
    joint = {n: getattr(rollout, n)[:, ::2] for n in ("critic_obs", "final_critic_obs")}
    tiled = {name: np.repeat(x, 2, axis=1) for name, x in joint.items()}
    (one, metrics), (other, found) = plain.after(**common, **joint), plain.after(**common, **tiled)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, (one, metrics), (other, found))


def test_a_rollout_without_any_weight_teaches_nothing(plain):
    state, metrics = plain.after(weight=np.zeros_like(plain.rollout.weight))
    assert all_finite(metrics)
    assert changed_networks(state, plain.state) == set()


def test_it_learns_to_choose_what_it_sees():
    """A reward of 1 for the action that the observation names; a random policy gets 1 / 3."""
    space = Discrete(3)
    learner = a2c.make(a2c.Config(hidden_sizes=(16,)), space, space, CriticSpace(space))
    hparams = CASES["a2c"].hparams(learning_rate=0.01, entropy_coef=0.0)
    template = Trained(
        Case(a2c, a2c.Config(hidden_sizes=(16,)), space, space, space), learning_rate=0.01
    ).rollout
    over = jnp.ones((1, 64), bool)

    def step(state, key):
        key_obs, key_act = jax.random.split(key)
        obs = jax.random.randint(key_obs, (1, 64), 0, space.n)
        inputs = (obs[0], None, (), over[0], 0.0)
        acted = learner.act(key_act, state, ActInput(*inputs), hparams)
        action, extras = jax.tree.map(lambda x: x[None], (acted.action, acted.extras))
        reward = (action == obs).astype(jnp.float32)
        rollout = template._replace(
            obs=obs,
            action=action,
            extras=extras,
            critic_obs=obs,
            final_critic_obs=obs,
            reward=reward,
            terminated=over,
            truncated=~over,
            weight=jnp.ones((1, 64)),
        )
        return learner.update(key, state, rollout, hparams)[0], jnp.mean(reward)

    @jax.jit
    def train(key):
        return jax.lax.scan(step, learner.init(key, hparams), jax.random.split(key, 300))[1]

    for seed in range(3):
        rewards = train(jax.random.key(seed))
        assert np.mean(rewards[:5]) < 0.5 and np.mean(rewards[-20:]) > 0.95


@pytest.mark.parametrize(
    "config, message",
    [
        ({"hidden_sizes": (0,)}, "hidden_sizes = [0] has 0; give integers of at least 1"),
        ({"activation": "tahn"}, "activation = 'tahn' is not known; did you mean 'tanh'?"),
        ({"torso": "mpl"}, "torso = 'mpl' is not known; did you mean 'mlp'"),
        ({"value_normalization": "popar"}, "is not known; did you mean 'popart'?"),
        ({"value_loss": "l2"}, "choose from squared, huber"),
        ({"entropy_schedule": "step"}, "choose from constant, linear, cosine"),
        ({"torso": "simba", "hidden_sizes": ()}, "give hidden_sizes at least one entry"),
    ],
)
def test_a_config_that_cannot_be_is_refused(config, message):
    with pytest.raises(UsageError) as caught:
        a2c.Config(**config)
    assert message in str(caught.value)
