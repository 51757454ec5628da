"""The dispatcher: how agents are grouped, named, ordered or seeded never shows in their results.

"Equal" is what the design says: initial states, keys and the first rollout's actions have the same
bits; after 1 and after 5 updates the largest difference of a leaf is at most 1e-5 of its largest
element. Everything goes through the real train step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from team_cases import (
    SMALL,
    SMOOTH,
    Spy,
    agent_states,
    assert_identical,
    by_agent,
    compiled,
    first_state,
    identical,
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    small_team,
    trained,
    updater,
)
from team_envs import Renamed, shift

import marl
from marl.agents import ppo
from marl.agents.learner import ActInput, CriticSpace, Rollout
from marl.envs.games import Roster
from marl.envs.interface import AutoReset
from marl.envs.vector import VectorEnv
from marl.report import training_row
from marl.training import seed_keys

TOLERANCE = 1e-5
AS_IT_COMES = {"num_envs": 4, "rollout_length": 32}  # samples for 4 minibatches


def report_action(learner, state, experience, hparams):
    return {"action": experience.action}


def outcome(team, seed=0, **sizes):
    """By agent: initial states, first rollout's actions, and states after 1 and after 5 updates."""
    trainer = compiled(team, **sizes)
    start = first_state(team, trainer, seed)
    found = {"keys": jnp.copy(start.key), "initial": agent_states(team, start.team)}
    state, metrics = trainer.chunk(start, 1)
    found["metrics"] = jax.tree.map(lambda x: np.asarray(x[:1]), metrics)
    found["actions"] = by_agent(team, found["metrics"].learner, "action")
    found["after 1"] = agent_states(team, jax.tree.map(jnp.copy, state.team))
    state, _ = trainer.chunk(state, 4)
    found["after 5"] = agent_states(team, state.team)
    return found


def assert_equal(one, other, roles=None):
    """Equal as the design defines it; `roles` pairs names of `one` with names of `other`."""
    roles = dict(zip(one["initial"], one["initial"], strict=True)) if roles is None else roles
    assert_identical(one["keys"], other["keys"])
    for mine, yours in roles.items():
        assert_identical(one["initial"][mine], other["initial"][yours])
        assert_identical(one["actions"][mine], other["actions"][yours])
        for when in ("after 1", "after 5"):
            assert relative_difference(one[when][mine], other[when][yours]) <= TOLERANCE, when
            assert not identical(one[when][mine], one["initial"][mine])


@pytest.fixture(scope="module")
def tag():
    return marl.make("jaxmarl/MPE_simple_tag_v3")


@pytest.mark.parametrize(
    ("critic", "sharing"),
    [
        ("all", "none"),
        ("self", "group"),
        pytest.param("self", "none", marks=pytest.mark.slow),
        pytest.param("all", "group", marks=pytest.mark.slow),
    ],
)
def test_vmapped_groups_equal_the_same_team_as_a_loop(tag, critic, sharing):
    """PPO as it comes: default hparams and networks."""
    vmapped, looped = (
        marl.team(tag, Spy(report_action), critic=critic, sharing=sharing, vectorise=vectorise)
        for vectorise in (True, False)
    )
    assert len(vmapped.lifted.groups) == 2  # three adversaries, one agent
    assert len(looped.lifted.groups) == (2 if sharing == "group" else 4)
    assert_equal(outcome(vmapped, **AS_IT_COMES), outcome(looped, **AS_IT_COMES))


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["self", "all"])
def test_renaming_agents_of_a_mixed_environment_changes_nothing(tag, critic):
    """Declared z_first .. a_last: JAX sorts these names the other way round."""
    names = ("z_first", "m_second", "k_third", "a_last")
    renamed = AutoReset(Renamed(tag.env, names))
    teams = (marl.team(env, Spy(report_action), critic=critic) for env in (tag, renamed))
    one, other = (outcome(team, **AS_IT_COMES) for team in teams)
    assert_equal(one, other, roles=dict(zip(tag.agents, names, strict=True)))


TWELVE = tuple(f"a{i}" for i in range(12))  # a10 sorts before a2
COUNTDOWN = tuple(f"agent_{99 - i}" for i in range(12))  # sorted, they stand the other way round


@pytest.fixture(scope="module")
def twelve():
    """Team and outcome of a dozen alike agents, by their names. Agent i sees i, and may get i."""

    def report(learner, state, experience, hparams):
        reward = experience.reward[..., None]
        return {"action": experience.action, "obs": experience.obs, "reward": reward}

    # of so small a network a bias may cross 0 with some seeds, and its largest element say nothing
    spy, sizes = Spy(report), {"num_envs": 2, "rollout_length": 4, "seed": 3}
    teams = {
        names: small_team(AutoReset(Roster(names, by_action=True)), spy, **SMOOTH)
        for names in (TWELVE, COUNTDOWN)
    }
    return {names: (team, outcome(team, **sizes)) for names, team in teams.items()}


def test_renaming_a_dozen_agents_changes_nothing(twelve):
    assert sorted(TWELVE) != list(TWELVE) and sorted(COUNTDOWN) == list(reversed(COUNTDOWN))
    roles = dict(zip(TWELVE, COUNTDOWN, strict=True))
    assert_equal(twelve[TWELVE][1], twelve[COUNTDOWN][1], roles)


@pytest.mark.parametrize("names", [TWELVE, COUNTDOWN], ids=["a0..a11", "agent_99..agent_88"])
def test_agents_beyond_ten_keep_their_data(twelve, names):
    """What reaches agent i's learner, and its row of metrics, is agent i's."""
    team, found = twelve[names]
    metrics = found["metrics"]._replace(learner=({},))
    obs, reward = (by_agent(team, found["metrics"].learner, name) for name in ("obs", "reward"))
    row = training_row(team, metrics, env_steps=8, seconds=0.0)
    for i, agent in enumerate(names):
        assert np.all(obs[agent] == i)
        paid = np.where(found["actions"][agent] == 1, i, 0)
        np.testing.assert_array_equal(reward[agent][..., 0], paid)
        assert row[f"return/{agent}"] == pytest.approx(paid.mean())
    assert len({row[f"return/{agent}"] for agent in names}) > 6


@pytest.fixture(scope="module")
def four():
    """Four alike agents, whose rewards are pooled in pairs of neighbours: (0, 1) and (2, 3)."""
    env = AutoReset(Roster(("d", "a", "c", "b"), by_action=True))
    team = small_team(env, overrides={"a": {"learning_rate": 1e-2}, "c": {"gamma": 0.5}})
    state, experience = play(team, num_envs=4)
    return team, updater(team), state, experience


@settings(max_examples=12)
@given(order=st.permutations(range(4)))
def test_permuting_agents_permutes_an_update(four, order):
    team, update, state, experience = four
    order = np.asarray(order)
    hparams = team.group_hparams()

    def of_sets(tree):  # states and hparams [S, ...]
        return jax.tree.map(lambda x: x[order], tree)

    def of_steps(tree):  # [T, S, N, B, ...] and [T, A, B]
        return jax.tree.map(lambda x: x[:, order], tree)

    names = ("steps", "final_obs", "reward", "terminated", "truncated", "active")
    moved = experience._replace(**{name: of_steps(getattr(experience, name)) for name in names})
    expected, _ = update(state, experience, hparams)
    found, _ = update(of_sets(state), moved, of_sets(hparams))
    assert relative_difference(found, of_sets(expected)) <= TOLERANCE
    if list(order) != sorted(order):
        assert relative_difference(found, expected) > 100 * TOLERANCE


def test_a_team_of_one_equals_the_single_agent_learner():
    """The same learner in a loop written by hand, over an environment of one agent."""
    env = marl.make("toy/probe_both")
    (agent,) = env.agents
    num_envs, length, updates = 3, 4, 3
    team = small_team(env)
    trainer = compiled(team, num_envs, length)
    state, _ = trained(team, trainer, updates)

    learner = ppo.make(
        ppo.Config(**SMALL),
        env.observation_spaces[agent],
        env.action_spaces[agent],
        CriticSpace((env.observation_spaces[agent],)),
    )
    hparams = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), ppo.Hparams())
    worlds = VectorEnv(env, num_envs)
    act, update, step = (jax.jit(f) for f in (learner.act, learner.update, worlds.step))
    key_init, key_reset, key_run = jax.random.split(seed_keys(0, 1)[0], 3)
    own = jax.jit(learner.init)(jax.random.fold_in(key_init, 0), hparams)
    obs, world = jax.jit(worlds.reset)(key_reset)
    over = jnp.ones(num_envs, bool)
    for number in range(updates):
        key_collect, key_update = jax.random.split(jax.random.fold_in(key_run, number))
        rows = []
        for key_act, key_env in jax.random.split(key_collect, (length, 2)):
            inputs = ActInput(obs[agent], None, (), over)
            out = act(jax.random.fold_in(key_act, 0), own, inputs, hparams)
            timestep, world = step(key_env, world, {agent: out.action})
            final = timestep.final_obs[agent]
            ends = (timestep.terminated[agent], timestep.truncated[agent])
            rows.append((obs[agent], out, over, timestep.reward[agent], *ends, final))
            obs, over = timestep.obs, timestep.episode_over
        seen, outs, resets, reward, terminated, truncated, finals = jax.tree.map(
            lambda *xs: jnp.stack(xs), *rows
        )
        experience = Rollout(
            obs=seen,
            action=outs.action,
            action_mask=None,
            extras=outs.extras,
            memory=(),
            reset=resets,
            critic_obs=(seen,),
            final_critic_obs=(finals,),
            final_obs=finals,
            final_action_mask=None,
            context=(),
            next_context=(),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            weight=jnp.ones((length, num_envs)),
            advantage=None,
            advantage_weight=None,
            env_steps=jnp.float32(number * num_envs * length),
            shuffle_key=jax.random.split(key_update)[1],
        )
        own, _ = update(key_update, own, experience, hparams)
    assert relative_difference(team.agent_state(state.team, agent), own) <= TOLERANCE


# Per-agent hparams. Schedules and value clipping are on, so that every float has its effect.
CONFIG = SMALL | {
    "num_epochs": 4,
    "learning_rate_schedule": "linear",
    "entropy_schedule": "linear",
    "value_normalization": "running",
    "value_loss": "huber",
    "clip_values": True,
}
BASE = SMOOTH | {
    "schedule_steps": 400.0,
    "entropy_coef": 0.1,
    "clip_epsilon": 0.05,
    "max_grad_norm": np.inf,
}
VALUES = {
    "learning_rate": (3e-3, 1e-2, 3e-2),
    "learning_rate_end": (0.0, 1e-3, 1e-2),
    "critic_learning_rate_scale": (0.5, 1.0, 2.0),
    "schedule_steps": (150.0, 400.0, 1000.0),
    "gamma": (0.5, 0.99, 1.0),
    "gae_lambda": (0.0, 0.95, 1.0),
    "clip_epsilon": (0.02, 0.05, 0.2),
    "value_clip_epsilon": (1e-4, 0.2, 0.4),
    "huber_delta": (0.01, 10.0, 0.1),
    "entropy_coef": (0.0, 0.1, 1.0),
    "entropy_coef_end": (0.0, 0.1, 1.0),
    "value_coef": (0.1, 0.5, 2.0),
    "max_grad_norm": (1e-3, 0.1, np.inf),
    "adam_epsilon": (1e-3, 1e-2, 1e-1),
}


@pytest.fixture(scope="module")
def three():
    """One update of a fixed rollout: of a team of three, and of each of them alone.

    Returns functions of hparams ([3] arrays, or numbers) that give the states after it.
    """
    team = small_team(shift(), **CONFIG | BASE)
    states, rollout = play(team)
    rollout = rollout._replace(reward=rollout.reward / 100)
    update = updater(team, key=7)
    own, learner = team.env.observation_spaces["ann"], ppo
    alone = jax.jit(
        learner.make(
            ppo.Config(**CONFIG), own, team.env.action_spaces["ann"], CriticSpace((own,))
        ).update
    )
    over = rollout.episode_over

    def of(position, hparams):
        obs, action, mask, extras, _ = jax.tree.map(lambda x: x[:, position, 0], rollout.steps[0])
        active = rollout.active[:, position]
        truncated = rollout.truncated[:, position] & active
        experience = Rollout(
            obs=obs,
            action=action,
            action_mask=mask,
            extras=extras,
            memory=(),
            reset=rollout.reset,
            critic_obs=(obs,),
            final_critic_obs=(rollout.final_obs[0][:, position, 0],),
            final_obs=rollout.final_obs[0][:, position, 0],
            final_action_mask=None,
            context=(),
            next_context=(),
            reward=jnp.where(active, rollout.reward[:, position], 0.0),
            terminated=(rollout.terminated[:, position] & active) | (over & ~truncated),
            truncated=truncated,
            weight=active.astype(jnp.float32),
            advantage=None,
            advantage_weight=None,
            env_steps=rollout.env_steps,
            shuffle_key=jax.random.split(jax.random.key(7))[1],
        )
        state = team.agent_state(states, team.agents[position])
        return alone(jax.random.key(0), state, experience, hparams)[0]

    (base,) = team.group_hparams()
    return base, lambda hparams: update(states, rollout, (hparams,))[0][0], of


def test_every_float_of_ppo_is_among_the_values():
    """But the one that only initialisation reads."""
    assert set(VALUES) == set(ppo.Hparams._fields) - {"initial_std"}


@pytest.mark.parametrize("name", VALUES)
def test_per_agent_hparams_are_what_each_learner_has_alone(three, name):
    base, together, of = three
    hparams = base._replace(**{name: jnp.asarray(VALUES[name], jnp.float32)})
    found, unchanged = together(hparams), together(base)
    for position in range(3):
        own = jax.tree.map(lambda x, i=position: x[i], hparams)
        mine, plain = (jax.tree.map(lambda x, i=position: x[i], y) for y in (found, unchanged))
        assert relative_difference(mine, of(position, own)) <= TOLERANCE
        if getattr(hparams, name)[position] != getattr(base, name)[position]:
            assert not identical((mine.actor, mine.critic), (plain.actor, plain.critic))
