"""PPO's floats, schedules and configs: each does what it says, and no more."""

from functools import partial

import jax
import numpy as np
import pytest
from learner_cases import CASES, all_finite, assert_identical, stack, take
from ppo_reference import ALL_NORMALISED, SPACE, Trained, changed_networks, discrete

from marl.agents import ppo
from marl.agents.learner import CriticSpace
from marl.envs.errors import UsageError

BASE = {
    "learning_rate": 0.05,
    "learning_rate_end": 0.01,
    "schedule_steps": 100.0,
    "clip_epsilon": 0.05,
    "value_clip_epsilon": 0.1,
    "entropy_coef": 0.02,
    "max_grad_norm": 0.5,
    "adam_epsilon": 1e-2,
}
# name -> (another value, the networks that it changes)
CHANGES = {
    "learning_rate": (0.03, {"actor", "critic"}),
    "learning_rate_end": (0.03, {"actor", "critic"}),
    "critic_learning_rate_scale": (2.0, {"critic"}),
    "schedule_steps": (200.0, {"actor", "critic"}),
    "gamma": (0.5, {"actor", "critic"}),
    "gae_lambda": (0.5, {"actor", "critic"}),
    "clip_epsilon": (0.2, {"actor"}),
    "value_clip_epsilon": (0.01, {"critic"}),
    "huber_delta": (0.1, {"critic"}),
    "entropy_coef": (0.2, {"actor"}),
    "entropy_coef_end": (0.2, {"actor"}),
    "value_coef": (1.0, {"critic"}),
    "max_grad_norm": (0.1, {"actor", "critic"}),
    "adam_epsilon": (1e-3, {"actor", "critic"}),
    "initial_std": (0.5, set()),  # read by `init` alone
}


@pytest.fixture(scope="module")
def scheduled():
    """`after(variants, env_steps)`: one vmapped program over hparams, everything else equal."""
    schedules = {"learning_rate_schedule": "linear", "entropy_schedule": "linear"}
    trained = Trained(
        discrete(num_epochs=3, value_loss="huber", **ALL_NORMALISED, **schedules), **BASE
    )
    update = jax.jit(jax.vmap(trained.learner.update, in_axes=(None, None, None, 0)))

    def after(variants, env_steps=50.0):
        padded = variants + [{}] * (len(CHANGES) + 1 - len(variants))  # one shape, one program
        hparams = [trained.case.hparams(**BASE | changes) for changes in padded]
        states, metrics = update(
            jax.random.key(0),
            trained.state,
            trained.rollout._replace(env_steps=np.float32(env_steps)),
            stack(hparams),
        )
        return [take((states, metrics), i) for i in range(len(variants))]

    return trained, after


def test_every_float_changes_what_it_should(scheduled):
    _, after = scheduled
    assert set(CHANGES) == set(ppo.Hparams._fields)
    (base, _), *others = after([{}, *({name: value} for name, (value, _) in CHANGES.items())])
    for (name, (_, expected)), (state, _) in zip(CHANGES.items(), others, strict=True):
        assert changed_networks(base, state) == expected, name


def test_initial_std_is_that_of_the_first_policy():
    case = CASES["ppo-box"]
    state = jax.jit(case.learner().init)(jax.random.key(0), case.hparams(initial_std=0.25))
    np.testing.assert_allclose(np.exp(state.actor.params["log_std"]), [0.25, 0.25], rtol=1e-6)


def test_schedules_follow_env_steps(scheduled):
    _, after = scheduled
    constant = {"learning_rate": 0.03, "learning_rate_end": 0.03}
    coefficient = {"entropy_coef": 0.01, "entropy_coef_end": 0.01}
    (halfway, metrics), (expected, _) = after([{}, constant | coefficient])
    # half of 100 steps: the mean of 0.05 and 0.01, and of 0.02 and 0
    np.testing.assert_allclose(metrics["learning_rate"], 0.03)
    np.testing.assert_allclose(metrics["entropy_coef"], 0.01)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, halfway.actor.params, expected.actor.params)
    jax.tree.map(close, halfway.critic.params, expected.critic.params)


def test_a_schedule_that_ended_at_zero_stops_learning(scheduled):
    trained, after = scheduled
    ((state, metrics),) = after([{"learning_rate_end": 0.0}], env_steps=1e6)
    assert metrics["learning_rate"] == 0.0 and metrics["entropy_coef"] == 0.0
    assert changed_networks(state, trained.state) == set()


def test_an_infinite_max_grad_norm_is_no_clipping(scheduled):
    _, after = scheduled
    (off, metrics), (huge, _), (small, _) = after(
        [{"max_grad_norm": np.inf}, {"max_grad_norm": 1e9}, {"max_grad_norm": 0.1}]
    )
    assert all_finite(off) and metrics["actor_grad_norm"] > 0.1
    assert_identical(off, huge)
    assert changed_networks(off, small) == {"actor", "critic"}


@pytest.mark.parametrize(
    "config, message",
    [
        ({"num_epochs": 0}, "num_epochs = 0 is out of range; give 1 or more"),
        ({"num_minibatches": 0}, "num_minibatches = 0 is out of range; give 1 or more"),
        ({"activation": "tahn"}, "activation = 'tahn' is not known; did you mean 'tanh'?"),
        ({"torso": "mpl"}, "torso = 'mpl' is not known; did you mean 'mlp'?"),
        ({"image_encoder": "resnet"}, "choose from cnn, flatten"),
        ({"box_policy": "beta"}, "choose from tanh_normal, normal"),
        ({"learning_rate_schedule": "linaer"}, "did you mean 'linear'"),
        ({"value_normalization": "popar"}, "is not known; did you mean 'popart'?"),
        ({"value_normalization": "yes"}, "choose from none, running, popart"),
        ({"value_loss": "hubert"}, "value_loss = 'hubert' is not known; did you mean 'huber'?"),
        ({"entropy_schedule": "step"}, "choose from constant, linear, cosine"),
        ({"torso": "simba", "hidden_sizes": ()}, "give hidden_sizes at least one entry"),
        ({"clip_values": True}, "set value_normalization = 'running' or 'popart' too, or"),
    ],
)
def test_a_config_that_cannot_be_is_refused(config, message):
    with pytest.raises(UsageError) as caught:
        ppo.Config(**config)
    assert message in str(caught.value)


def test_check_refuses_a_batch_that_does_not_divide():
    learner = discrete(num_minibatches=4).learner()
    learner.check((6, 2))
    with pytest.raises(UsageError) as caught:
        learner.check((5, 2))
    assert str(caught.value) == (
        "num_envs * rollout_length = 10 is not divisible by num_minibatches = 4; "
        "change one of them so that every minibatch has the same size"
    )


def test_spaces_that_cannot_be_learned_are_refused():
    with pytest.raises(TypeError, match="expected a Box, Discrete or MultiDiscrete"):
        ppo.make(ppo.Config(), SPACE, {"a": 3}, CriticSpace(SPACE))
