"""TD3 and DDPG: against a second implementation, delay, noise, weights, targets, a bandit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import act_input, all_finite, assert_identical, relative_difference, sampled
from ppo_reference import reference_mlp
from q_critic_cases import (
    BATCH,
    BOX,
    CRITIC_SPACE,
    OBSERVATIONS,
    Bench,
    QCase,
    assert_vmap_is_a_loop,
    bandit,
    live_columns,
    optimised,
    pick,
    poisoned,
    reference_critics,
    reference_inputs,
    reference_returns,
    scaled,
)

from marl.agents import ddpg, q_critic, td3
from marl.agents.learner import CriticSpace
from marl.envs.errors import UsageError
from marl.envs.spaces import Box, Discrete, MultiDiscrete

SMALL = {"hidden_sizes": (8,), "activation": "tanh"}
CHANGES = {"critic_learning_rate_scale": 2.0, "saturation_coef": 0.5}
CASES = {
    "td3": QCase(td3, td3.Config(**SMALL), BOX, hparams=CHANGES | {"noise_clip": 0.2}),
    "ddpg": QCase(ddpg, ddpg.Config(**SMALL), BOX, hparams=CHANGES | {"max_grad_norm": 0.1}),
}


@pytest.fixture(scope="module")
def benches():
    """Each case when it is first asked for; both have taken one step."""
    found = {}

    def bench(name):
        if name not in found:
            found[name] = Bench(CASES[name])
        return found[name]

    return bench


@pytest.fixture(scope="module", params=CASES)
def bench(request, benches):
    return benches(request.param)


def reference_update(hparams, state, windows, key):
    """The critics' step, and the actor's, on live columns alone."""
    h = hparams
    returns = reference_returns(windows, float(h.gamma))
    last = [step for _, _, step in returns]
    total, discount = np.array([returns[b][:2] for b in live_columns()]).T
    now = reference_inputs(pick(windows.critic_obs, 0), pick(windows.context, 0))
    final = reference_inputs(pick(windows.final_critic_obs, last), pick(windows.next_context, last))
    noise = h.target_noise * jax.random.normal(key, (BATCH, 2))[jnp.array(live_columns())]
    action = np.tanh(reference_mlp(state.target_actor, pick(windows.final_obs, last)))
    action = np.clip(action + np.clip(noise, -h.noise_clip, h.noise_clip), -1, 1)
    q = reference_critics(state.target_critic, np.concatenate([final, action], -1))[..., 0]
    target = total + discount * np.min(q, 0)

    def critic_loss(params):
        inputs = np.concatenate([now, scaled(pick(windows.action, 0))], -1)
        q = reference_critics(params, inputs)[..., 0]
        return jnp.sum(jnp.mean(0.5 * (q - target) ** 2, -1))

    def actor_loss(params, critic):
        output = reference_mlp(params, pick(windows.obs, 0))
        q = reference_critics(critic, jnp.concatenate([now, jnp.tanh(output)], -1))[0, ..., 0]
        return jnp.mean(0.5 * jnp.mean(output**2, -1) - q)

    loss, grads = jax.value_and_grad(critic_loss)(state.critic.params)
    critic = optimised(state.critic, grads, 2.0 * h.learning_rate, h)
    policy_loss, grads = jax.value_and_grad(actor_loss)(state.actor.params, critic)
    actor = optimised(state.actor, grads, h.learning_rate, h)
    return actor, critic, {"critic_loss": loss, "policy_loss": policy_loss}


def test_an_update_equals_a_second_implementation(bench):
    """Of TD3 the second, in which the actor moves too."""
    key = jax.random.key(11)
    assert bench.state.steps == 1
    after, metrics = bench.update(key, bench.state, bench.windows, bench.hparams)
    actor, critic, expected = reference_update(bench.hparams, bench.state, bench.windows, key)
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-5)
    jax.tree.map(close, after.actor.params, actor)
    jax.tree.map(close, after.critic.params, critic)
    for name, value in expected.items():
        close(metrics[name], value, err_msg=name)


def test_targets_move_by_tau(bench):
    after, _ = bench.after()
    for target, network in (("target_critic", "critic"), ("target_actor", "actor")):
        jax.tree.map(
            lambda old, new, found: np.testing.assert_allclose(
                found, 0.9 * old + 0.1 * new, rtol=1e-5, atol=1e-7
            ),
            getattr(bench.state, target),
            getattr(after, network).params,
            getattr(after, target),
        )


def test_the_actor_waits_for_the_critics(benches):
    """With a delay of 2 actor and targets move in steps 2, 4, ...; the critics in every one."""
    bench = benches("td3")
    state = bench.init(jax.random.key(0), bench.hparams)
    for step in range(1, 5):
        before, given = state, (state, bench.windows, bench.hparams)
        state, metrics = bench.update(jax.random.key(step), *given)
        assert state.steps == step and np.isfinite(metrics["policy_loss"])
        assert relative_difference(before.critic, state.critic) > 0.0
        for name in ("actor", "target_actor", "target_critic"):
            moved = relative_difference(getattr(before, name), getattr(state, name)) > 0.0
            assert moved == (step % 2 == 0), name


def test_nobody_reads_what_has_no_weight_or_lies_behind_an_end(bench):
    state, metrics = bench.after()
    windows = poisoned(bench.windows)
    poisoned_state, poisoned_metrics = bench.after(**windows._asdict())
    assert all_finite(poisoned_state) and all_finite(poisoned_metrics)
    assert_identical(state, poisoned_state)
    assert_identical(metrics, poisoned_metrics)


def test_vmap_over_agents_is_a_loop(bench):
    assert_vmap_is_a_loop(bench)


def test_critics_depend_on_every_action(bench):
    """MADDPG's critic reads others' actions."""
    windows = bench.windows
    value = jax.jit(partial(td3.q_value, bench.parts))
    given = bench.state, windows.critic_obs, windows.action
    q = value(*given, windows.context)
    assert q.shape == (bench.case.config.num_critics, *windows.reward.shape)
    kind, aim = windows.context
    for other in (((kind + 1) % 3, aim), (kind, 4.0 - aim)):
        assert np.all(np.asarray(value(*given, other)) != q)
    assert np.all(np.asarray(value(*given[:2], windows.action + 0.3, windows.context)) != q)


def test_the_actor_learns_with_others_actions_as_recorded(bench):
    """The next context is the target's alone: the first actor step does not see it."""
    terminated = np.ones_like(bench.windows.terminated)
    one, _ = bench.after(terminated=terminated)
    kind, aim = bench.windows.next_context
    other, _ = bench.after(terminated=terminated, next_context=((kind + 1) % 3, aim))
    assert_identical(one, other)
    kind, aim = bench.windows.context
    other, _ = bench.after(terminated=terminated, context=((kind + 1) % 3, aim))
    assert relative_difference(one.actor.params, other.actor.params) > 0.0


COUNT = 4000


@pytest.fixture(scope="module")
def noisy():
    """Actions of a fresh TD3, whose actor is close to 0: the middle of the Box."""
    config = td3.Config(**SMALL, exploration_schedule="linear")
    learner = td3.make(config, OBSERVATIONS, BOX, CRITIC_SPACE)
    hparams = td3.Hparams(
        exploration_noise=0.2, schedule_steps=100.0, target_noise=0.3, noise_clip=0.4
    )
    hparams = jax.tree.map(jnp.float32, hparams)
    state = jax.jit(learner.init)(jax.random.key(0), hparams)
    inputs = act_input(sampled(0, OBSERVATIONS, (COUNT,)))
    jitted = {name: jax.jit(getattr(learner, name)) for name in ("act", "act_greedy")}
    jitted["next_action"] = jax.jit(learner.next_action)

    def draw(name, **changes):
        given = state, inputs._replace(**changes), hparams
        output = jitted[name](jax.random.key(1), *given)
        assert output.extras == () and output.memory == ()
        assert output.action.shape == (COUNT, 2) and output.action.dtype == jnp.float32
        return scaled(np.asarray(output.action, np.float64))

    return draw


@pytest.mark.parametrize("env_steps, expected", [(0.0, 0.2), (50.0, 0.1), (np.inf, 0.0)])
def test_exploration_is_gaussian_noise_that_may_decay(noisy, env_steps, expected):
    noise = noisy("act", env_steps=np.float32(env_steps)) - noisy("act_greedy")
    np.testing.assert_allclose(np.std(noise, 0), expected, rtol=0.05, atol=1e-6)
    np.testing.assert_allclose(np.mean(noise, 0), 0.0, atol=0.02)


def test_next_actions_are_the_target_policys_smoothed_ones(noisy):
    """A fresh target is the actor itself; the noise is clipped."""
    noise = noisy("next_action") - noisy("act_greedy")
    np.testing.assert_allclose(np.max(np.abs(noise), 0), 0.4, rtol=1e-4)
    unclipped = np.abs(noise) < 0.4 - 1e-4
    # P(|z| < 4 / 3) = 0.8176
    np.testing.assert_allclose(np.mean(unclipped), 0.8176, atol=0.02)


def test_ddpg_asks_for_the_target_actors_own_action(benches):
    bench = benches("ddpg")
    inputs = act_input(sampled(0, OBSERVATIONS, (16,)))
    output = bench.learner.next_action(jax.random.key(0), bench.state, inputs, bench.hparams)
    expected = np.tanh(reference_mlp(bench.state.target_actor, inputs.obs))
    np.testing.assert_allclose(scaled(np.asarray(output.action)), expected, atol=1e-5)


@pytest.mark.parametrize("mean", [8.0, -40.0])
def test_gradients_are_finite_at_the_bounds(bench, mean):
    params = bench.state.actor.params
    params = params | {"linear_1": params["linear_1"] | {"b": jnp.array([mean, mean])}}
    fresh = q_critic.fresh(bench.hparams, params)
    state = bench.state._replace(actor=fresh, target_actor=params)
    low, high = BOX.bounds()
    action = np.broadcast_to(high if mean > 0 else low, bench.windows.action.shape)
    windows = bench.windows._replace(action=action)
    after, metrics = bench.update(jax.random.key(0), state, windows, bench.hparams)
    assert all_finite(after) and all_finite(metrics)
    # the penalty on outputs leads back from where tanh has no slope
    moved = after.actor.params["linear_1"]["b"] - state.actor.params["linear_1"]["b"]
    assert np.all(np.sign(moved) == -np.sign(mean))
    output = bench.learner.act(
        jax.random.key(0), state, act_input(sampled(0, OBSERVATIONS, (64,))), bench.hparams
    )
    assert np.all((output.action >= low) & (output.action <= high))


@pytest.mark.parametrize("algorithm", [td3, ddpg], ids=["td3", "ddpg"])
def test_a_bandit_is_solved(algorithm):
    """The best action 0.3 of random ones in [-1, 2]."""
    space, config = Box((1,), -1.0, 2.0), algorithm.Config(hidden_sizes=(32,), activation="silu")
    learner = algorithm.make(config, OBSERVATIONS, space, CriticSpace(OBSERVATIONS))
    floats = algorithm.Hparams(learning_rate=3e-3, tau=0.05)
    hparams = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), floats)

    def step(state, key):
        keys = jax.random.split(key, 3)
        action = jax.random.uniform(keys[0], (1, 64, 1), minval=-1.0, maxval=2.0)
        windows = bandit(keys[1], action, -jnp.square(action[..., 0] - 0.3))
        return learner.update(keys[2], state, windows, hparams)

    @jax.jit
    def greedy(key):
        state, _ = jax.lax.scan(step, learner.init(key, hparams), jax.random.split(key, 1500))
        inputs = act_input(sampled(0, OBSERVATIONS, (256,)))
        return learner.act_greedy(key, state, inputs, hparams).action

    np.testing.assert_allclose(np.mean(greedy(jax.random.key(1))), 0.3, atol=0.08)


def test_ddpg_is_td3_with_other_defaults():
    assert ddpg.make is td3.make and ddpg.Hparams._fields == td3.Hparams._fields
    config, hparams = ddpg.Config(), ddpg.Hparams()
    assert (config.num_critics, config.policy_delay, hparams.target_noise) == (1, 1, 0.0)
    assert set(ddpg.Config.__dataclass_fields__) == set(td3.Config.__dataclass_fields__)


@pytest.mark.parametrize(
    "space, words",
    [
        (Discrete(5), "env.kwargs.action_type=Continuous"),
        (MultiDiscrete((2, 3)), "sac"),
        ({"a": Box((2,), 0.0, 1.0)}, "one bounded Box"),
        (Box((2,), low=0.0), "low = 0.0, high = inf"),
    ],
)
def test_other_action_spaces_are_refused(space, words):
    with pytest.raises(UsageError) as error:
        td3.make(td3.Config(), OBSERVATIONS, space, CRITIC_SPACE)
    assert words in str(error.value)


@pytest.mark.parametrize("given", [{"policy_delay": 0}, {"exploration_schedule": "x"}])
def test_configs_are_checked(given):
    with pytest.raises(UsageError):
        td3.Config(**given)
