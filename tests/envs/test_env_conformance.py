"""Every environment of every suite keeps the interface's promises over episodes of random play."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl.envs import registry, spaces
from marl.envs.suites.jaxmarl_table import TABLE
from marl.envs.toy import TOYS
from marl.envs.vector import VectorEnv
from marl.envs.wrappers import with_statistics

STEPS, B = 32, 2
TOY = [(f"toy/{name}", {}) for name in TOYS if name != "matrix"]
JAXMARL = [
    ("jaxmarl/MPE_simple_v3", {}),
    ("jaxmarl/MPE_simple_tag_v3", {"max_steps": 10}),
    ("jaxmarl/switch_riddle", {}),
]
ALIKE = (  # same classes as other toy environments
    *("toy/cooperative", "toy/penalty", "toy/prisoners_dilemma", "toy/probe_constant"),
    *("toy/probe_observation", "toy/probe_delayed", "toy/probe_action", "toy/probe_both"),
)
LENGTHS = {  # arguments that make an episode end within STEPS
    **{name: {"max_steps": 10} for name, row in TABLE.items() if row.family == "mpe"},
    **{name: {"episode_length": 12} for name, row in TABLE.items() if row.family == "mabrax"},
    **{name: {"num_inner_steps": 5} for name in ("storm", "storm_2p", "storm_np")},
    "SMAX": {"max_steps": 12, "scenario": "3m"},
    "HeuristicEnemySMAX": {"max_steps": 12, "scenario": "2s3z"},
    "overcooked": {"max_steps": 9},
    "overcooked_v2": {"max_steps": 9},
    "coin_game": {"num_inner_steps": 4, "num_outer_steps": 2, "cnn": True},
    "jaxnav": {"max_steps": 9, "evaporating": True},
}
SLOW = [(f"jaxmarl/{name}", LENGTHS.get(name, {})) for name in TABLE] + [
    ("jaxmarl/SMAX", {"action_type": "continuous", "max_steps": 12, "scenario": "3m"}),
    ("jaxmarl/MPE_simple_world_comm_v3", {"action_type": "Discrete"}),
    ("jaxmarl/jaxnav", {"act_type": "Discrete", "max_steps": 9}),
    ("jaxmarl/hanabi", {"num_agents": 3}),
    ("jaxmarl/storm", {"num_agents": 3, "num_inner_steps": 5}),
]


def name_of(case):
    id, kwargs = case
    return id + "".join(f"-{value}" for value in kwargs.values() if isinstance(value, str))


def params(fast, slow):
    marked = [pytest.param(c, id=f"{name_of(c)}-slow", marks=pytest.mark.slow) for c in slow]
    return [pytest.param(c, id=name_of(c)) for c in fast] + marked


TO_PLAY = [case for case in TOY if case[0] not in ALIKE] + JAXMARL


def build(case):
    return with_statistics(registry.make(case[0], **case[1]))


@lru_cache(maxsize=1)
def play(id, arguments):
    """Random legal play: ([STEPS, B] time steps, active before each step, masks, key actions)."""
    env = build((id, dict(arguments)))
    vector = VectorEnv(env, B)

    def step(carry, key):
        state, active = carry
        key_act, key_step = jax.random.split(key)
        mask = vector.action_mask(state)
        keys = jax.random.split(key_act, B)
        action = {
            agent: jax.vmap(lambda k, i=i, a=agent: draw(jax.random.fold_in(k, i), env, a))(keys)
            for i, agent in enumerate(env.agents)
        }
        if mask is not None:
            action = {a: jax.vmap(legal)(keys, m) for a, m in mask.items()}
        timestep, state = vector.step(key_step, state, action)
        return (state, timestep.active), (timestep, active, mask)

    obs, state = vector.reset(jax.random.key(0))
    active = {agent: jnp.ones((B,), bool) for agent in env.agents}
    keys = jax.random.split(jax.random.key(1), STEPS)
    run = jax.jit(lambda state: jax.lax.scan(step, (state, active), keys))
    (after, _), history = run(state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    return env, obs, jax.device_get(history)


def draw(key, env, agent):
    return spaces.sample(key, env.action_spaces[agent])


def legal(key, mask):
    return jax.random.categorical(key, jnp.where(mask, 0.0, -1e9)).astype(jnp.int32)


@pytest.mark.parametrize("case", params(TOY + JAXMARL, SLOW))
def test_declares_what_it_returns(case):
    env = build(case)
    registry.validate(env)
    assert env == build(case) and hash(env) == hash(build(case))
    assert isinstance(env, registry.AutoReset)


@pytest.mark.parametrize("case", params(TO_PLAY, SLOW))
def test_random_episodes_keep_the_promises(case):
    env, first_obs, (timestep, active, masks) = play(case[0], tuple(case[1].items()))
    over = timestep.episode_over
    assert over.any(), "no episode ended"
    lengths = timestep.info["episode"].length
    assert lengths[over].min() >= 1
    for agent in env.agents:
        before, after = active[agent], timestep.active[agent]
        terminated, truncated = timestep.terminated[agent], timestep.truncated[agent]
        assert not (terminated & truncated).any()
        assert not ((terminated | truncated) & ~before).any()
        np.testing.assert_array_equal((terminated | truncated)[over], before[over])
        assert not truncated[~over].any()
        np.testing.assert_array_equal(after[~over], (before & ~terminated)[~over])
        assert after[over].all()
        assert np.isfinite(timestep.reward[agent][before]).all()
        check_observation(env, agent, timestep, before, over)
        check_returns(timestep, before, agent)
        if masks is not None:
            assert masks[agent].any(axis=-1).all()
    assert set(first_obs) == set(env.agents)


def check_observation(env, agent, timestep, before, over):
    """In bounds and finite while the agent acts; `obs` is `final_obs` inside an episode."""
    space = env.observation_spaces[agent]
    obs, final = timestep.obs[agent], timestep.final_obs[agent]
    for leaf, x, last in zip(
        spaces.leaves(space), *map(jax.tree.leaves, (obs, final)), strict=True
    ):
        acts = timestep.active[agent]
        np.testing.assert_allclose(x[~over], last[~over], rtol=1e-5, atol=1e-6)
        for seen in (x[acts], last[before & acts]):
            assert seen.dtype == leaf.dtype and np.isfinite(seen).all()
            if isinstance(leaf, spaces.Box):
                low, high = leaf.bounds()
                assert (seen >= low).all() and (seen <= high).all()
            elif isinstance(leaf, spaces.MultiDiscrete):
                assert (seen >= 0).all() and (seen < np.asarray(leaf.nvec)).all()


def check_returns(timestep, before, agent):
    """The episode's return is the sum of its rewards, counted while the agent was active."""
    reward = np.where(before, timestep.reward[agent], 0.0)
    total = np.zeros(B)
    for t in range(STEPS):
        total = total + reward[t]
        np.testing.assert_allclose(
            timestep.info["episode"].returns[agent][t], total, rtol=1e-4, atol=1e-4
        )
        total = np.where(timestep.episode_over[t], 0.0, total)


@pytest.mark.parametrize("name", ["death", "masked", "hidden"])
def test_jit_changes_nothing(name):
    env = build((f"toy/{name}", {}))
    _, state = env.reset(jax.random.key(0))
    action = {agent: draw(jax.random.key(3), env, agent) for agent in env.agents}
    eager = env.step(jax.random.key(1), state, action)
    compiled = jax.jit(env.step)(jax.random.key(1), state, action)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), eager, compiled)
