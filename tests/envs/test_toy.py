"""The optima that the toy environments' docstrings promise."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl.envs import registry
from marl.envs.errors import UsageError
from marl.envs.probes import KINDS
from marl.envs.wrappers import with_statistics

ROUNDS = 40


def returns(env, policy, steps=ROUNDS, seed=0):
    """Mean return per agent of the episodes that end within `steps`; policy(obs, mask) acts."""
    env = with_statistics(env)

    def step(carry, key):
        obs, state = carry
        action = policy(obs, env.action_mask(state))
        timestep, state = env.step(key, state, action)
        return (timestep.obs, state), (timestep.episode_over, timestep.info["episode"].returns)

    key_reset, key_steps = jax.random.split(jax.random.key(seed))
    start = env.reset(key_reset)
    _, (over, totals) = jax.lax.scan(step, start, jax.random.split(key_steps, steps))
    return {agent: float(np.mean(np.asarray(x)[np.asarray(over)])) for agent, x in totals.items()}


def always(action):
    return lambda obs, mask: dict.fromkeys(obs, jnp.asarray(action))


def play(game, row, column):
    env = registry.make(f"toy/{game}")
    return returns(env, lambda obs, mask: {"row": row, "column": column}, steps=2)


@pytest.mark.parametrize(
    "game, row, column, expected",
    [
        ("cooperative", 0, 0, (1, 1)),
        ("cooperative", 1, 1, (0.5, 0.5)),
        ("cooperative", 0, 1, (0, 0)),
        ("climbing", 0, 0, (11, 11)),
        ("climbing", 1, 0, (-30, -30)),
        ("climbing", 2, 1, (0, 0)),
        ("climbing", 1, 2, (6, 6)),
        ("penalty", 0, 0, (10, 10)),
        ("penalty", 2, 2, (10, 10)),
        ("penalty", 0, 2, (-100, -100)),
        ("prisoners_dilemma", 0, 0, (3, 3)),
        ("prisoners_dilemma", 0, 1, (0, 5)),
        ("prisoners_dilemma", 1, 0, (5, 0)),
        ("prisoners_dilemma", 1, 1, (1, 1)),
    ],
)
def test_matrix_games(game, row, column, expected):
    assert play(game, jnp.asarray(row), jnp.asarray(column)) == {
        "row": expected[0],
        "column": expected[1],
    }


def test_matrices_of_different_shapes_are_refused():
    with pytest.raises(UsageError, match="differ in shape"):
        registry.make("toy/matrix", rows=[[1, 2]], columns=[[1], [2]])
    env = registry.make("toy/matrix", rows=[[1, 2, 3]], columns=[[4, 5, 6]])
    assert env.action_spaces["row"].n == 1 and env.action_spaces["column"].n == 3


@pytest.mark.parametrize(
    ("payoff", "matrix"),
    [(None, [[0, 1], [1, 8]]), ([[0, 4], [4, 8]], [[0, 4], [4, 8]])],
)
def test_the_first_player_chooses_the_matrix_of_the_two_step_game(payoff, matrix):
    env = registry.make("toy/two_step", **({} if payoff is None else {"payoff": payoff}))
    for where, then, other in itertools.product((0, 1), repeat=3):

        def policy(obs, mask, where=where, then=then, other=other):
            first = jnp.where(obs["first"] == 0, where, then)
            return {"first": first, "second": jnp.where(obs["second"] == 0, 1 - where, other)}

        best = matrix[then][other] if where == 1 else 7
        assert returns(env, policy, steps=4) == {"first": best, "second": best}


def test_both_players_of_the_two_step_game_see_where_they_are():
    env = registry.make("toy/two_step", safe=3.0).env
    for where in (0, 1):
        obs, state = env.reset(jax.random.key(0))
        assert obs == {"first": 0, "second": 0} and env.global_state(state).tolist() == [1, 0, 0]
        for step in (0, 1):
            action = {"first": jnp.int32(where), "second": jnp.int32(0)}
            timestep, state = env.step(jax.random.key(0), state, action)
            assert timestep.obs == {"first": 1 + where, "second": 1 + where}
            assert env.global_state(state).argmax() == 1 + where
            assert timestep.episode_over == timestep.terminated["second"] == (step == 1)
            paid = (1 if where else 3) if step == 1 else 0
            assert timestep.reward == {"first": paid, "second": paid}
    with pytest.raises(UsageError, match="two rows of two numbers"):
        registry.make("toy/two_step", payoff=[[1, 2, 3], [4, 5, 6]])


def test_roster_pays_by_position_whatever_the_names():
    expected = {f"a{i}": i for i in range(12)}
    assert returns(registry.make("toy/roster"), always(0), steps=1) == expected
    env = registry.make("toy/roster", names=["z", "b", "a"], by_action=True)
    assert env.agents == ("z", "b", "a")
    assert returns(env, always(1), steps=1) == {"z": 0, "b": 1, "a": 2}
    assert returns(env, always(0), steps=1) == {"z": 0, "b": 0, "a": 0}
    obs, _ = env.reset(jax.random.key(0))
    assert {agent: float(x[0]) for agent, x in obs.items()} == {"z": 0, "b": 1, "a": 2}


def match(obs, mask):
    return {agent: (x[0] > 0).astype(jnp.int32) for agent, x in obs.items()}


@pytest.mark.parametrize(
    "kind, policy, best",
    [
        ("constant", always(0), 1),
        ("delayed", always(0), 1),
        ("action", always(1), 1),
        ("both", match, 1),
        ("continuous", lambda obs, mask: obs, 0),
    ],
)
def test_probes_reach_their_optimum(kind, policy, best):
    env = registry.make(f"toy/probe_{kind}", num_agents=2)
    assert returns(env, policy) == {"agent_0": best, "agent_1": best}


def test_probes_punish_other_policies():
    assert returns(registry.make("toy/probe_action"), always(0))["agent_0"] == -1
    assert abs(returns(registry.make("toy/probe_both"), always(1))["agent_0"]) < 0.6
    continuous = registry.make("toy/probe_continuous")
    assert returns(continuous, always([0.0]))["agent_0"] == -0.25


def test_probe_agents_have_their_own_draws():
    env = registry.make("toy/probe_observation", num_agents=3)
    keys = jax.random.split(jax.random.key(0), 64)
    obs, state = jax.jit(jax.vmap(env.reset))(keys)
    draws = np.stack([obs[agent][:, 0] for agent in env.agents])
    assert set(np.unique(draws)) == {-1, 1}
    assert np.all(np.abs(np.corrcoef(draws)[np.triu_indices(3, 1)]) < 0.5)
    action = dict.fromkeys(env.agents, jnp.zeros((64,), jnp.int32))
    timestep, _ = jax.jit(jax.vmap(env.step))(keys, state, action)
    rewards = np.stack([timestep.reward[agent] for agent in env.agents])
    np.testing.assert_array_equal(rewards, draws)


def test_memory_probe_shows_the_cue_once_and_pays_at_the_end():
    env = registry.make("toy/probe_memory").env
    obs, state = env.reset(jax.random.key(0))
    cue = float(obs["agent_0"][0])
    for last in (False, False, True):
        action = {"agent_0": jnp.asarray(int(cue > 0))}
        timestep, state = env.step(jax.random.key(1), state, action)
        assert timestep.obs["agent_0"] == 0 and timestep.episode_over == last
        assert timestep.reward["agent_0"] == (1 if last else 0)
    assert cue in (-1, 1) and len(KINDS) == 7


def test_heterogeneous_agents_reach_their_optimum():
    def play(obs, mask):
        column = {
            agent: jnp.argmax(obs[agent]["image"][0, :, 0]) for agent in ("scout_0", "scout_1")
        }
        pilot = {"mode": obs["pilot"][0].astype(jnp.int32), "thrust": obs["pilot"][1:]}
        wrong = (column["scout_1"] + 1) % 3
        return column | {"scout_1": wrong, "pilot": pilot, "crew": obs["crew"]}

    env = registry.make("toy/heterogeneous")
    assert returns(env, play) == {"scout_0": 4, "scout_1": 0, "pilot": 4, "crew": 4}


@pytest.mark.parametrize("poison", [False, True])
def test_death_pays_for_active_steps(poison):
    env = registry.make("toy/death", death=2, length=4, poison=poison)
    assert returns(env, always(0), steps=8) == {"early": 2, "late": 4}
    _, state = env.env.reset(jax.random.key(0))
    alive, terminated, poisoned = [], [], []
    for _ in range(4):
        timestep, state = env.env.step(jax.random.key(0), state, None)
        alive.append(bool(timestep.active["early"]))
        terminated.append(bool(timestep.terminated["early"]))
        poisoned.append(bool(jnp.isnan(timestep.reward["early"])))
        assert jnp.isnan(timestep.obs["early"][0]) == (poison and not alive[-1])
    assert alive == [True, False, False, False]
    assert terminated == [False, True, False, False]
    assert poisoned == [False, False, poison, poison]


def test_sacrifice_wins_for_the_team():
    env = registry.make("toy/sacrifice")
    assert returns(env, always(1), steps=8) == {"hero": 0, "friend": 2}
    lived = returns(env, always(0), steps=8)
    assert lived["hero"] == pytest.approx(0.4) and lived["friend"] == 0


def test_continuing_task_is_only_truncated():
    env = registry.make("toy/time_limit", reward=2.0, limit=3)
    assert returns(env, always(0), steps=9) == {"agent_0": 6, "agent_1": 6}
    _, state = env.reset(jax.random.key(0))
    for end in (False, False, True, False):
        timestep, state = env.step(jax.random.key(0), state, None)
        assert timestep.truncated["agent_0"] == timestep.episode_over == end
        assert not timestep.terminated["agent_0"]


def test_masked_optimum_and_the_price_of_ignoring_masks():
    def best(obs, mask):
        return {agent: jnp.argmax(m * jnp.arange(1, 5)) for agent, m in mask.items()}

    env = registry.make("toy/masked")
    assert returns(env, best) == dict.fromkeys(env.agents, pytest.approx(2.0))
    assert returns(env, always(3)) == dict.fromkeys(env.agents, -19)


def test_only_the_global_state_shows_the_hidden_reward():
    env = registry.make("toy/hidden")
    paid = []
    for key in jax.random.split(jax.random.key(0), 16):
        obs, state = env.reset(key)
        timestep, _ = env.step(key, state, None)
        assert obs["agent_0"] == 1
        assert timestep.reward["agent_0"] == env.global_state(state)[0]
        paid.append(float(timestep.reward["agent_0"]))
    assert set(paid) == {0, 1}


def test_image_optimum():
    def best(obs, mask):
        return {agent: (image[0, 3, 0] > 0).astype(jnp.int32) for agent, image in obs.items()}

    env = registry.make("toy/image")
    assert returns(env, best) == {"agent_0": 1, "agent_1": 1}
    assert 0 < returns(env, always(0))["agent_0"] < 1
