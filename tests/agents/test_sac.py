"""SAC: against a second implementation, weights, masks, temperature, targets, known optima."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import (
    act_input,
    all_finite,
    assert_identical,
    random_mask,
    relative_difference,
    sampled,
)
from q_critic_cases import (
    BOX,
    CRITIC_SPACE,
    OBSERVATIONS,
    Bench,
    QCase,
    assert_vmap_is_a_loop,
    bandit,
    live_columns,
    poisoned,
)
from sac_reference import reference_update

from marl.agents import policies, q_critic, sac
from marl.agents.learner import CriticSpace
from marl.envs.errors import UsageError
from marl.envs.spaces import Box, Discrete, MultiDiscrete

SMALL = sac.Config(hidden_sizes=(8,), activation="tanh")
CHANGES = {
    "critic_learning_rate_scale": 2.0,
    "temperature_learning_rate_scale": 3.0,
    "initial_temperature": 0.3,
}
CASES = {
    "box": QCase(sac, SMALL, BOX, hparams=CHANGES),
    "discrete": QCase(sac, SMALL, Discrete(4), masked=True, hparams=CHANGES),
    "multi": QCase(sac, SMALL, MultiDiscrete((2, 3)), True, CHANGES | {"max_grad_norm": 0.2}),
}


@pytest.fixture(scope="module")
def benches():
    """Each case when it is first asked for."""
    found = {}

    def bench(name):
        if name not in found:
            found[name] = Bench(CASES[name])
        return found[name]

    return bench


@pytest.fixture(scope="module", params=CASES)
def bench(request, benches):
    return benches(request.param)


def test_an_update_equals_a_second_implementation(bench):
    key = jax.random.key(11)
    after, metrics = bench.update(key, bench.state, bench.windows, bench.hparams)
    actor, critic, temperature, expected = reference_update(
        bench.case, bench.hparams, bench.state, bench.windows, key
    )
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-5)
    jax.tree.map(close, after.actor.params, actor)
    jax.tree.map(close, after.critic.params, critic)
    close(after.temperature.params, temperature)
    for name, value in expected.items():
        close(metrics[name], value, err_msg=name)
    close(metrics["temperature"], np.exp(bench.state.temperature.params))


def test_targets_move_by_tau(bench):
    after, _ = bench.after()
    jax.tree.map(
        lambda old, new, found: np.testing.assert_allclose(
            found, 0.9 * old + 0.1 * new, rtol=1e-5, atol=1e-7
        ),
        bench.state.target_critic,
        after.critic.params,
        after.target_critic,
    )


def test_nobody_reads_what_has_no_weight_or_lies_behind_an_end(bench):
    state, metrics = bench.after()
    windows = poisoned(bench.windows)
    poisoned_state, poisoned_metrics = bench.after(**windows._asdict())
    assert all_finite(poisoned_state) and all_finite(poisoned_metrics)
    assert_identical(state, poisoned_state)
    assert_identical(metrics, poisoned_metrics)


def test_what_has_weight_is_read(bench):
    """The critic's target and loss depend on every field, so that the test above is one."""
    state, _ = bench.after()
    for name in ("critic_obs", "final_obs", "final_critic_obs", "context", "next_context"):
        other = jax.tree.map(lambda x: x[:, ::-1], getattr(bench.windows, name))
        changed, _ = bench.after(**{name: other})
        assert relative_difference(changed.critic.params, state.critic.params) > 0.0, name


def test_vmap_over_agents_is_a_loop(bench):
    assert_vmap_is_a_loop(bench)


def test_one_step_windows_are_plain_targets(benches):
    """r + gamma V(final), which equals a longer window that is cut after its first step."""
    bench = benches("discrete")
    first = jax.tree.map(lambda x: x[:1], bench.windows._replace(env_steps=(), shuffle_key=()))
    cut = first.truncated | ~first.terminated
    kept = {"env_steps": bench.windows.env_steps, "shuffle_key": bench.windows.shuffle_key}
    one, _ = bench.after(**first._replace(**kept)._asdict())
    truncated = np.concatenate([cut, bench.windows.truncated[1:]])
    longer, _ = bench.after(truncated=truncated)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, one.critic.params, longer.critic.params)


def test_a_joint_critic_input_equals_a_tiled_one(benches):
    """Two agents folded into the batch: [T, B / 2] of what they see alike, or [T, B]."""
    bench = benches("discrete")
    names = ("critic_obs", "final_critic_obs")
    joint = {n: jax.tree.map(lambda x: x[:, ::2], getattr(bench.windows, n)) for n in names}
    tiled = jax.tree.map(lambda x: np.repeat(x, 2, axis=1), joint)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, bench.after(**joint)[0], bench.after(**tiled)[0])


def test_critics_depend_on_every_action(bench):
    """MASAC's critic reads others' actions; twins differ."""
    windows, space = bench.windows, bench.case.action_space
    value = jax.jit(partial(sac.q_value, bench.parts))
    given = bench.state, windows.critic_obs, windows.action
    q = value(*given, windows.context)
    assert q.shape == (2, *windows.reward.shape) and np.all(q[0] != q[1])
    kind, aim = windows.context
    for other in (((kind + 1) % 3, aim), (kind, 4.0 - aim)):
        assert np.all(np.asarray(value(*given, other)) != q)
    own = sampled(99, space, windows.reward.shape)
    assert np.any(np.asarray(value(*given[:2], own, windows.context)) != q)


def test_actions_are_scaled_by_their_bounds(benches):
    """A critic reads the middle of a Box as 0 and its bounds as -1 and 1."""
    low, high = BOX.bounds()
    rows = np.stack([low, 0.5 * (low + high), high])
    np.testing.assert_allclose(policies.to_unit(BOX, rows), [[-1] * 2, [0] * 2, [1] * 2])
    np.testing.assert_allclose(policies.from_unit(BOX, policies.to_unit(BOX, rows)), rows)
    fixed = Box((2, 1), low=(0.0, 3.0), high=(1.0, 3.0))  # one element cannot move
    np.testing.assert_allclose(policies.to_unit(fixed, np.array([[[1.0], [3.0]]])), [[1.0, 0.0]])
    np.testing.assert_allclose(policies.from_unit(fixed, jnp.ones((4, 2)))[0], [[1.0], [3.0]])
    space = CriticSpace(CRITIC_SPACE.observations, {"a": Box((1, 2)), "b": Box((1,), 2.0, 4.0)})
    critic = sac.make_parts(SMALL, OBSERVATIONS, BOX, space).critic
    context = {"a": np.full((5, 1, 2), 7.0), "b": np.full((5, 1), 4.0)}
    observations = sampled(0, space.observations, (5,))
    vector = q_critic._features(critic, observations, context, jnp.full((5, 2), 0.25)).vector
    np.testing.assert_allclose(vector[:, 5:], np.tile([7.0, 7.0, 1.0, 0.25, 0.25], (5, 1)))


@pytest.mark.parametrize("name", ["discrete", "multi"])
def test_illegal_choices_have_no_influence(benches, name):
    """Not in the actor's loss nor in targets: the values of illegal choices are free."""
    bench = benches(name)
    size = bench.windows.action_mask.shape[-1]
    mask = np.ones(size, bool)
    mask[0] = False
    masks = np.broadcast_to(mask, bench.windows.action_mask.shape)
    head = bench.state.critic.params["linear_1"]
    bias = head["b"].at[:, 0].add(100.0)
    windows = bench.windows._replace(
        action_mask=masks, final_action_mask=masks, action=np.ones_like(bench.windows.action)
    )
    view = q_critic.windows(windows, jnp.float32(0.9)).now
    results = []
    for params in (
        bench.state.critic.params,
        bench.state.critic.params | {"linear_1": head | {"b": bias}},
    ):
        results.append(
            sac.soft_value(
                bench.parts, jax.random.key(0), bench.state.actor.params, params, view, 0.3
            )
        )
    live = np.stack(results)[..., live_columns()]
    np.testing.assert_allclose(live[0], live[1], rtol=1e-5)


def inputs_for(bench, seed=5, count=64):
    space = bench.case.action_space
    mask = random_mask(seed, space, (count,)) if bench.case.masked else None
    return act_input(sampled(seed, OBSERVATIONS, (count,)), mask)


def test_actions_are_legal_and_stored_without_extras(bench):
    inputs, space = inputs_for(bench), bench.case.action_space
    given = jax.random.key(0), bench.state, inputs, bench.hparams
    for act in (bench.learner.act, bench.learner.act_greedy, bench.learner.next_action):
        output = jax.jit(act)(*given)
        action = np.asarray(output.action)
        assert output.extras == () and output.memory == ()
        assert action.shape == (64, *space.shape) and action.dtype == space.dtype
        if isinstance(space, Box):
            low, high = space.bounds()
            assert np.all(action >= low) and np.all(action <= high)
        else:
            chosen = np.atleast_2d(action.T).T + np.cumsum((0, *getattr(space, "nvec", (0,))[:-1]))
            assert np.all(np.take_along_axis(inputs.action_mask, chosen, -1))


@pytest.mark.parametrize("scale, sign", [(5.0, -1.0), (-5.0, 1.0)])
def test_the_temperature_falls_where_the_entropy_is_above_its_target(benches, scale, sign):
    """Target -scale per element: far below the entropy, then far above."""
    bench = benches("box")
    hparams = bench.with_hparams(target_entropy_scale=scale)
    before = bench.init(jax.random.key(0), hparams)
    after, _ = bench.update(jax.random.key(0), before, bench.windows, hparams)
    move = float(after.temperature.params - before.temperature.params)
    np.testing.assert_allclose(move, sign * 0.03, rtol=1e-2)  # Adam's first step is the whole rate


def test_a_temperature_that_is_not_learned_is_the_hparam():
    config = sac.Config(hidden_sizes=(8,), learn_temperature=False)
    bench = Bench(QCase(sac, config, Discrete(3)))
    assert bench.state.temperature == ()
    for value in (0.1, 2.0):
        hparams = bench.with_hparams(initial_temperature=value)
        _, metrics = bench.update(jax.random.key(0), bench.state, bench.windows, hparams)
        np.testing.assert_allclose(metrics["temperature"], value, rtol=1e-6)


@pytest.mark.parametrize("mean", [8.0, -40.0])
def test_gradients_are_finite_at_the_bounds(benches, mean):
    """float32 tanh is 1 there: recorded actions at the bounds, and a saturated policy."""
    bench = benches("box")
    params = bench.state.actor.params
    bias = jnp.array([mean, mean, 3.0, 3.0])
    params = params | {"linear_1": params["linear_1"] | {"b": bias}}
    state = bench.state._replace(actor=bench.state.actor._replace(params=params))
    low, high = BOX.bounds()
    action = np.broadcast_to(high if mean > 0 else low, bench.windows.action.shape)
    windows = bench.windows._replace(action=action)
    after, metrics = bench.update(jax.random.key(0), state, windows, bench.hparams)
    assert all_finite(after) and all_finite(metrics)
    assert metrics["actor_grad_norm"] > 0.0
    output = bench.learner.act(jax.random.key(0), state, inputs_for(bench), bench.hparams)
    assert np.any(np.isin(output.action[:, 0], (-1.0, 1.0)))


class Bandit:
    """A learner that reads random data of a bandit in one scan."""

    def __init__(self, config, space, reward, updates=1500, **hparams):
        given = config, OBSERVATIONS, space, CriticSpace(OBSERVATIONS)
        learner, self.parts = sac.make(*given), sac.make_parts(*given)
        floats = sac.Hparams(learning_rate=3e-3, tau=0.05, **hparams)
        self.hparams = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), floats)

        def step(state, key):
            keys = jax.random.split(key, 3)
            if isinstance(space, Box):
                action = jax.random.uniform(keys[0], (1, 64, 1), minval=-1.0, maxval=2.0)
            else:
                action = jax.random.randint(keys[0], (1, 64), 0, space.n)
            return learner.update(
                keys[2], state, bandit(keys[1], action, reward(action)), self.hparams
            )

        @jax.jit
        def train(key):
            keys = jax.random.split(key, updates)
            return jax.lax.scan(step, learner.init(key, self.hparams), keys)

        self.state, self.metrics = train(jax.random.key(1))
        self.inputs = act_input(sampled(0, OBSERVATIONS, (256,)))
        self.learner = learner


def test_a_box_bandit_is_solved():
    """The greedy action is the best one, and the entropy is on its target, -1."""
    space = Box((1,), -1.0, 2.0)
    solved = Bandit(
        sac.Config(hidden_sizes=(32,)),
        space,
        lambda action: -jnp.square(action[..., 0] - 0.3),
        temperature_learning_rate_scale=3.0,
    )
    given = jax.random.key(0), solved.state, solved.inputs, solved.hparams
    greedy = jax.jit(solved.learner.act_greedy)(*given).action
    np.testing.assert_allclose(np.mean(greedy), 0.3, atol=0.08)
    np.testing.assert_allclose(np.mean(solved.metrics["entropy"][-200:]), -1.0, atol=0.2)


def test_a_discrete_bandit_is_solved():
    """The optimum at temperature alpha is the softmax of rewards / alpha."""
    rewards, alpha = jnp.array([0.0, 1.0, 0.5]), 0.5
    config = sac.Config(hidden_sizes=(32,), learn_temperature=False)
    solved = Bandit(config, Discrete(3), lambda action: rewards[action], initial_temperature=alpha)
    outputs, _ = sac._outputs(solved.parts, solved.state.actor.params, solved.inputs.obs)
    probs = np.exp(policies.log_probabilities(Discrete(3), outputs, None))
    np.testing.assert_allclose(np.mean(probs, 0), jax.nn.softmax(rewards / alpha), atol=0.03)


@pytest.mark.parametrize(
    "space, words",
    [
        (Box((2,), low=(-1.0, -np.inf), high=1.0), "low = (-1.0, -inf), high = 1.0"),
        (Box((2,)), "use ppo"),
        ({"a": Discrete(2), "b": Box((1,), 0, 1)}, "use ppo"),
        ((Discrete(2),), "Discrete(2)"),
    ],
)
def test_other_action_spaces_are_refused(space, words):
    with pytest.raises(UsageError) as error:
        sac.make(SMALL, OBSERVATIONS, space, CRITIC_SPACE)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "given", [{"num_critics": 0}, {"torso": "x"}, {"hidden_sizes": (0,)}, {"activation": "x"}]
)
def test_configs_are_checked(given):
    with pytest.raises(UsageError):
        sac.Config(**given)
