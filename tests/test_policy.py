"""A trained team as a function: what evaluation does, one environment at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    assert_identical,
    quick_compilation,  # noqa: F401 (a fixture)
    small_team,
)
from team_envs import shift

import marl
from marl import evaluation
from marl.agents.learner import ActInput
from marl.dispatch import acting_keys
from marl.envs.errors import UsageError
from marl.policy import Policy
from marl.rollout import stacked

SIZES = {"num_envs": 2, "rollout_length": 4, "eval_episodes": 2, "progress": False}
MIXED = marl.make("toy/heterogeneous")


def fresh(env, **options):
    """A fresh team and the policies it makes, by mode."""
    team = small_team(env, **options)
    hparams = team.group_hparams()
    init = jax.jit(team.learner.init, compiler_options={"xla_backend_optimization_level": 0})
    state = init(jax.random.key(0), hparams)
    policies = {
        mode: Policy(team.env, team.spec, state, hparams, mode) for mode in evaluation.MODES
    }
    return team, policies


@pytest.fixture(scope="module")
def mixed():
    """Agents of three kinds; the scouts act with one parameter set."""
    return fresh(MIXED, sharing="group", image_encoder="flatten")


@pytest.fixture(scope="module")
def masked():
    return fresh(shift())


@pytest.fixture(scope="module")
def run():
    """Two trained seeds."""
    env = marl.make("toy/probe_continuous", num_agents=2)
    return marl.train(env, small_team(env, learning_rate=0.01), 16, num_seeds=2, **SIZES)


@pytest.mark.parametrize("mode", evaluation.MODES)
def test_a_policy_acts_as_the_team_does(mixed, mode):
    team, policies = mixed
    obs, _ = MIXED.reset(jax.random.key(1))
    key, policy = jax.random.key(2), policies[mode]
    action, memory = policy(key, obs)
    learner = team.learner
    seen = stacked(team.spec, jax.tree.map(lambda x: x[None], obs))
    inputs = ActInput(seen, None, learner.initial_memory(1), jnp.zeros(1, bool))
    act = jax.jit(learner.act_greedy if mode == "greedy" else learner.act)
    expected = act(acting_keys(team.spec, key), policy.state, inputs, policy.hparams)
    assert set(action) == set(MIXED.agents)
    assert_identical(action, jax.tree.map(lambda x: x[0], expected.action))
    assert jax.tree.structure(memory) == jax.tree.structure(expected.memory)


def test_actions_belong_to_the_action_spaces(mixed):
    obs, state = MIXED.reset(jax.random.key(1))
    action, _ = mixed[1]["stochastic"](jax.random.key(2), obs)
    assert action["scout_0"].shape == () and 0 <= action["scout_0"] < 3
    assert action["pilot"]["thrust"].shape == (2,) and np.all(
        np.abs(action["pilot"]["thrust"]) <= 1
    )
    assert action["crew"].shape == (2,) and action["crew"].dtype == jnp.int32
    timestep, _ = MIXED.step(jax.random.key(3), state, action)
    assert set(timestep.reward) == set(MIXED.agents)


def test_a_policy_of_each_seed_of_a_run(run):
    obs, _ = run.team.env.reset(jax.random.key(1))
    actions = [
        run.policy(seed=seed)(jax.random.key(key), obs)[0]["agent_1"]
        for seed, key in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    np.testing.assert_array_equal(actions[0], actions[1])
    assert actions[0] != actions[2] and actions[0] != actions[3]
    assert_identical(run.policy(seed=1).state, jax.tree.map(lambda x: x[1], run.state.team))
    greedy = run.policy(greedy=True)
    assert_identical(greedy(jax.random.key(0), obs), greedy(jax.random.key(1), obs))
    with pytest.raises(UsageError, match="seed = 2 is out of range; this run has 2"):
        run.policy(seed=2)


def test_a_policy_may_be_vmapped_and_jitted(mixed):
    policy = mixed[1]["stochastic"]
    keys = jax.random.split(jax.random.key(0), 3)
    obs, _ = jax.vmap(MIXED.reset)(keys)
    many, _ = jax.jit(jax.vmap(policy))(keys, obs)
    one, _ = policy(keys[1], jax.tree.map(lambda x: x[1], obs))
    for agent in ("scout_0", "scout_1", "crew"):
        np.testing.assert_array_equal(many[agent][1], one[agent])
    np.testing.assert_allclose(many["pilot"]["thrust"][1], one["pilot"]["thrust"], rtol=1e-5)


def test_memory_goes_in_and_out(mixed):
    policy = mixed[1]["stochastic"]
    obs, _ = MIXED.reset(jax.random.key(1))
    first, memory = policy(jax.random.key(2), obs)
    again, _ = policy(jax.random.key(2), obs, policy.initial_memory())
    assert_identical(first, again)
    policy(jax.random.key(3), obs, memory)


def test_masks_are_asked_for_and_obeyed(masked):
    env, policy = masked[0].env, masked[1]["stochastic"]
    obs, state = env.reset(jax.random.key(0))
    with pytest.raises(UsageError, match=r"pass action_mask=env.action_mask\(state\)"):
        policy(jax.random.key(0), obs)
    mask = env.action_mask(state)
    seen = {int(policy(jax.random.key(i), obs, action_mask=mask)[0]["ann"]) for i in range(20)}
    assert seen == {1, 2}


def test_who_is_out_is_not_looked_at(masked):
    env, policy = masked[0].env, masked[1]["stochastic"]
    obs, state = env.reset(jax.random.key(0))
    mask, key = env.action_mask(state), jax.random.key(0)
    active = {"ann": True, "bob": False, "cid": True}
    action, _ = policy(key, obs, action_mask=mask, active=active)
    poisoned, _ = policy(key, obs | {"bob": obs["bob"] * jnp.nan}, action_mask=mask, active=active)
    assert_identical(action, poisoned)


def test_a_missing_agent_is_named(mixed):
    obs, _ = MIXED.reset(jax.random.key(1))
    with pytest.raises(UsageError) as error:
        mixed[1]["greedy"](jax.random.key(0), {k: v for k, v in obs.items() if k != "crew"})
    message = str(error.value)
    assert "observations of crew are missing" in message and "pilot" in message


def test_a_saved_policy_acts_the_same(run, tmp_path):
    env = run.team.env
    loaded = marl.load(run.save(tmp_path / "run"))
    obs, _ = env.reset(jax.random.key(1))
    for seed in (0, 1):
        before, after = (x.policy(seed=seed)(jax.random.key(4), obs) for x in (run, loaded))
        assert_identical(before, after)
