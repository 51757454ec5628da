"""JaxMARL's peculiarities, each met by the adapter; the right values come from JaxMARL itself."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl.envs import registry
from marl.envs.errors import UsageError
from marl.envs.spaces import Box, Discrete, MultiDiscrete
from marl.envs.suites.jaxmarl_table import TABLE, UNAVAILABLE

KEY = jax.random.key(0)


def noop(env, value=0):
    return {
        agent: jnp.full(space.shape, value, space.dtype)
        for agent, space in env.action_spaces.items()
    }


def test_the_table_has_every_id():
    registry.make("jaxmarl/MPE_simple_v3")
    import jaxmarl

    assert set(TABLE) | set(UNAVAILABLE) == set(jaxmarl.registered_envs)


@pytest.fixture(scope="module")
def spread():
    env = registry.make("jaxmarl/MPE_simple_spread_v3")
    return env, jax.jit(env.step), jax.jit(env.env._built.env.step_env)


def test_mpe_is_truncated_at_step_26_and_keeps_its_final_observation(spread):
    env, step, raw_step = spread
    obs, state = env.reset(KEY)
    raw = state.env
    for t, key in enumerate(jax.random.split(jax.random.key(1), 26), start=1):
        action = noop(env, t % 5)
        timestep, state = step(key, state, action)
        expected, raw, *_ = raw_step(jax.random.split(key)[0], raw, action)
        over = t == 26
        assert timestep.episode_over == over
        for agent in env.agents:
            assert timestep.truncated[agent] == over and not timestep.terminated[agent]
            assert timestep.active[agent]
            np.testing.assert_allclose(timestep.final_obs[agent], expected[agent], atol=1e-6)
            assert np.allclose(timestep.obs[agent], expected[agent], atol=1e-6) != over
    assert state.env.step == 0


def test_the_next_episode_differs_from_the_last(spread):
    env, step, _ = spread
    _, state = env.reset(KEY)
    near_end = state._replace(env=state.env.replace(step=jnp.asarray(25)))
    starts = [step(key, near_end, noop(env))[0] for key in jax.random.split(KEY, 3)]
    assert all(s.episode_over for s in starts)
    positions = {tuple(np.asarray(s.obs["agent_0"]).tolist()) for s in starts}
    assert len(positions) == 3


def test_a_time_limit_may_terminate():
    env = registry.make("jaxmarl/MPE_simple_v3", max_steps=0, time_limit="terminate")
    assert env != registry.make("jaxmarl/MPE_simple_v3", max_steps=0)
    _, state = env.reset(KEY)
    timestep, _ = env.step(KEY, state, noop(env))
    assert timestep.episode_over
    assert timestep.terminated == {"agent_0": True} and timestep.truncated == {"agent_0": False}


def test_one_agent_is_a_team():
    env = registry.make("jaxmarl/MPE_simple_v3")
    assert env.agents == ("agent_0",)
    assert env.observation_spaces == {"agent_0": Box((4,))}
    assert env.action_spaces == {"agent_0": Discrete(5)}


def test_telling_ends_the_riddle_and_its_limit_truncates():
    env = registry.make("jaxmarl/switch_riddle").env
    assert env.observation_spaces["agent_0"] == MultiDiscrete((2, 2))
    step = jax.jit(env.step)
    _, state = env.reset(KEY)
    told, _ = step(KEY, state, noop(env, 2))
    assert told.episode_over and all(told.terminated.values())
    assert not any(told.truncated.values()) and told.reward["agent_0"] == -1
    for t in range(1, 7):
        timestep, state = step(KEY, state, noop(env))
        assert timestep.episode_over == (t == 6) == timestep.truncated["agent_1"]
        assert not timestep.terminated["agent_1"]


def test_the_best_that_prisoners_can_do():
    """540 of the 729 orders in which three agents may be called: all have been there in six steps.

    The second one to come turns the light on; the third tells, who finds it on and is new. Nobody
    can do better, since telling pays only after all have been in the room.
    """
    env = registry.make("jaxmarl/switch_riddle", time_limit="terminate").env
    orders = jnp.array(list(itertools.product(range(3), repeat=6)))

    def play(order):
        def one(carry, called):
            state, been, over = carry
            state = state._replace(env=state.env.replace(agent_in_room=called))
            lit, new = state.env.bulb_state, ~been[called]
            action = jnp.where(new & lit, 2, jnp.where(new & jnp.any(been), 1, 0))
            actions = {agent: action for agent in env.agents}  # that of who is in the room counts
            timestep, state = env.step(KEY, state, actions)
            reward = jnp.where(over, 0.0, timestep.reward["agent_0"])
            return (state, been.at[called].set(True), over | timestep.episode_over), reward

        start = (env.reset(KEY)[1], jnp.zeros(3, bool), jnp.array(False))
        return jnp.sum(jax.lax.scan(one, start, order)[1])

    returns = jax.jit(jax.vmap(play))(orders)
    assert set(returns.tolist()) == {0.0, 1.0} and jnp.sum(returns) == 540
    complete = [len(set(order)) == 3 for order in orders.tolist()]
    assert complete == (returns == 1).tolist()


@pytest.mark.parametrize(
    "name, agents",
    [
        ("MPE_simple_crypto_v3", ("eve_0", "alice_0", "bob_0")),
        ("MPE_simple_speaker_listener_v4", ("speaker_0", "listener_0")),
    ],
)
def test_agents_have_the_declared_order(name, agents):
    env = registry.make(f"jaxmarl/{name}")
    assert env.agents == agents != tuple(sorted(agents))
    assert tuple(env.observation_spaces) == agents


def test_integer_rewards_become_floats():
    env = registry.make("jaxmarl/MPE_simple_tag_v3")
    _, state = env.reset(KEY)
    raw = env.env._built.env
    _, _, rewards, _, _ = jax.eval_shape(raw.step_env, KEY, state.env, noop(env))
    assert rewards["adversary_0"].dtype == jnp.int32  # else this test is out of date
    timestep, _ = jax.eval_shape(env.step, KEY, state, noop(env))
    assert {r.dtype.name for r in timestep.reward.values()} == {"float32"}


def test_overcooked_has_the_shapes_it_returns():
    env = registry.make("jaxmarl/overcooked", layout="cramped_room")
    assert env.env._built.env.observation_space("agent_0").shape == (5, 4, 26)
    assert env.observation_spaces["agent_0"] == Box((4, 5, 26), dtype="uint8")
    obs, state = jax.eval_shape(env.reset, KEY)
    assert obs["agent_0"].shape == (4, 5, 26) and obs["agent_0"].dtype == jnp.uint8
    timestep, _ = jax.eval_shape(env.step, KEY, state, noop(env))
    assert set(timestep.info) == {"shaped_reward"}
    assert timestep.info["shaped_reward"]["agent_1"].dtype == jnp.float32


def test_layouts_go_by_name():
    square = registry.make("jaxmarl/overcooked", layout="coord_ring")
    assert square.observation_spaces["agent_0"] == Box((5, 5, 26), 0, 255, "uint8")


@pytest.mark.slow
def test_layouts_of_the_second_overcooked_go_by_name():
    env = registry.make("jaxmarl/overcooked_v2", layout="coord_ring")
    assert env.observation_spaces["agent_1"].shape[:2] == (5, 5)


@pytest.mark.parametrize(
    "name, leaves",
    [
        ("storm", {"inventory": (5,), "observations": (5, 5, 16)}),
        ("storm_2p", {"inventory": (6,), "observation": (5, 5, 10)}),
        pytest.param("storm_np", (5, 5, 14), marks=pytest.mark.slow),
    ],
)
def test_storm_is_split_by_agent(name, leaves):
    env = registry.make(f"jaxmarl/{name}")
    assert env.agents == ("agent_0", "agent_1")
    obs, state = env.reset(KEY)
    raw, _ = env.env._built.env.reset(KEY)
    for i, agent in enumerate(env.agents):
        mine = [raw["observations"][i]] if name == "storm" else jax.tree.leaves(raw[i])
        ours = [obs[agent]["observations"]] if name == "storm" else jax.tree.leaves(obs[agent])
        for a, b in zip(mine, ours, strict=True):
            np.testing.assert_array_equal(a, b)
    shapes = jax.tree.map(lambda x: x.shape, obs["agent_0"])
    assert shapes == leaves
    timestep, _ = jax.eval_shape(env.step, KEY, state, noop(env))
    assert set(timestep.reward) == set(timestep.terminated) == set(env.agents)


def test_storm_inventories_have_the_agents_last():
    env = registry.make("jaxmarl/storm").env
    _, state = env.reset(KEY)
    inner = state.env.replace(agent_inventories=jnp.asarray([[1, 2], [3, 4]], jnp.int8))
    raw = env._built.env.get_obs(inner)
    obs = env._built.observe(raw)
    assert obs["agent_0"]["inventory"][:2].tolist() == [1, 2]
    assert obs["agent_1"]["inventory"][:2].tolist() == [3, 4]


@pytest.mark.slow
def test_hanabi_masks_are_its_legal_moves():
    env = registry.make("jaxmarl/hanabi")
    assert env.observation_spaces["agent_0"].shape == (658,)
    _, state = env.reset(KEY)
    masks = env.action_mask(state)
    assert masks["agent_0"].dtype == bool
    waiting = [agent for agent in env.agents if np.flatnonzero(masks[agent]).tolist() == [20]]
    assert len(waiting) == 1  # only one of them is to move
    timestep, _ = jax.eval_shape(env.step, KEY, state, noop(env))
    assert set(timestep.reward) == set(env.agents)


def test_coin_game_ends_with_the_outer_episode():
    env = registry.make("jaxmarl/coin_game", num_inner_steps=2, num_outer_steps=2).env
    assert env.agents == ("0", "1")
    step = jax.jit(env.step)
    _, state = env.reset(KEY)
    for inner, outer in [(False, False), (True, False), (False, False), (True, True)]:
        timestep, state = step(KEY, state, noop(env))
        assert timestep.info == {"inner_episode_done": inner}
        assert timestep.episode_over == timestep.truncated["0"] == outer


@pytest.mark.parametrize(
    "name, kwargs, message",
    [
        ("MPE_simple_tag_v3", {"max_step": 3}, "no argument 'max_step': did you mean 'max_steps'"),
        ("MPE_simple_tag_v3", {"num_agents": 3}, "no argument 'num_agents'.*num_adversaries"),
        ("MPE_simple_facmac_3a_v1", {"max_steps": 3}, "'max_steps': .*choose from time_limit"),
        ("HeuristicEnemySMAX", {"scenario": "3n"}, "no scenario '3n': did you mean '3m'"),
        ("HeuristicEnemySMAX", {"scenario": 3}, "no scenario 3: .*2s3z"),
        ("HeuristicEnemySMAX", {"map_widht": 3}, "did you mean 'map_width'"),
        ("overcooked", {"layout": "cramped"}, "no layout 'cramped': did you mean 'cramped_room'"),
        ("overcooked_v2", {"layout": "cramped"}, "cannot be built with.*Invalid layout"),
        ("switch_riddle", {"num_agents": 2}, "minimum number of agents"),
        ("storm_2p", {"num_agents": 3}, "cannot be built with {'num_agents': 3}"),
    ],
)
def test_wrong_arguments_are_named(name, kwargs, message):
    with pytest.raises(UsageError, match=message):
        registry.make(f"jaxmarl/{name}", **kwargs)


def test_lists_from_a_configuration_become_arrays():
    env = registry.make("jaxmarl/HeuristicEnemySMAX", scenario="3m", unit_type_health=[45.0] * 6)
    assert env == registry.make(
        "jaxmarl/HeuristicEnemySMAX", unit_type_health=[45.0] * 6, scenario="3m"
    )
    _, state = jax.eval_shape(env.reset, KEY)
    assert state.env.state.unit_health.shape == (6,)


@pytest.mark.slow
def test_mabrax_truncates_at_its_limit_and_splits_off_the_shared_reward():
    env = registry.make("jaxmarl/walker2d_2x3", episode_length=3).env
    step = jax.jit(env.step)
    _, state = env.reset(KEY)
    for t in (1, 2, 3):
        timestep, state = step(KEY, state, noop(env))
        assert timestep.episode_over == (t == 3)
        assert set(timestep.reward) == {"agent_0", "agent_1"} and timestep.info == {}
    assert timestep.truncated["agent_0"] and not timestep.terminated["agent_0"]


@pytest.mark.slow
def test_building_brax_leaves_no_log_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    registry.make("jaxmarl/halfcheetah_6x1", episode_length=7)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("evaporating", [False, True])
def test_jaxnav_truncates_who_is_still_on_the_way(evaporating):
    env = registry.make("jaxmarl/jaxnav", max_steps=2, evaporating=evaporating).env
    _, state = env.reset(KEY)
    there = state.env.pos.at[0].set(state.env.goal[0])
    _, state = env.step(KEY, state._replace(env=state.env.replace(pos=there)), noop(env))
    timestep, _ = env.step(KEY, state, noop(env))
    assert timestep.episode_over
    assert timestep.truncated["agent_1"] and not timestep.terminated["agent_1"]
    assert not timestep.truncated["agent_0"]
    assert timestep.terminated["agent_0"] != evaporating
