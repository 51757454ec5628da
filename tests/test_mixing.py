"""VDN and QMIX in teams: groups, training, what can be learned, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from mixing_cases import ENV, PAIR, TOLERANCE, Given, Workshop, given_for, mixed_team
from team_cases import (
    agent_states,
    all_finite,
    assert_identical,
    compiled,
    first_state,
    identical,
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
)

import marl
from marl import decomposition, mixing, program
from marl.agents import dqn, ppo, pqn
from marl.envs.errors import UsageError
from marl.envs.interface import AutoReset
from marl.training import seed_keys

# Groups


def as_loop(given, looped):
    """The same of a team without vmapped groups: each of its groups is one sharing set."""
    state, rollout, sets = given.state, given.rollout, list(given.sets())

    def of(trees, axis):
        return tuple(jax.tree.map(lambda x, s=s: np.take(x, [s], axis), trees[g]) for g, s in sets)

    members = [positions for group in looped.lifted.groups for positions in group.sets]
    assert members == [given.sets()[key] for key in sorted(sets, key=lambda k: given.sets()[k])]
    sets.sort(key=lambda key: given.sets()[key])
    rollout = rollout._replace(
        steps=of(rollout.steps, 1),
        final_obs=of(rollout.final_obs, 1),
        final_action_mask=of(rollout.final_action_mask, 1),
        memory=looped.learner.initial_memory(rollout.reset.shape[1]),
    )
    return Given(looped, of(state, 0), given.mixers, rollout)


def repeated(given, steps=(1, 5)):
    """By agent, states after so many updates; and mixers."""
    update, learned, found = given.updater(), (given.state, given.mixers), []
    for number in range(1, 1 + steps[-1]):
        learned, _ = update(*learned, given.rollout, given.team.group_hparams())
        if number in steps:
            found.append((agent_states(given.team, learned[0]), learned[1]))
    return found


@pytest.mark.parametrize(
    ("algorithm", "mixer", "options"),
    [
        (dqn, "qmix", {}),
        (pqn, "vdn", {"sharing": PAIR, "num_minibatches": 3}),
        pytest.param(dqn, "vdn", {"sharing": PAIR}, marks=pytest.mark.slow),
        pytest.param(pqn, "qmix", {"num_minibatches": 3}, marks=pytest.mark.slow),
    ],
)
def test_vmapped_groups_equal_the_same_team_as_a_loop(algorithm, mixer, options):
    vmapped, looped = (
        mixed_team(ENV, algorithm, mixer, **options, vectorise=vectorise)
        for vectorise in (True, False)
    )
    given = given_for(vmapped)
    start = agent_states(vmapped, given.state), given.mixers
    for found, expected in zip(repeated(given), repeated(as_loop(given, looped)), strict=True):
        assert relative_difference(found, expected) <= TOLERANCE
        assert relative_difference(found, start) > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "mixer"), [(dqn, "vdn"), (pqn, "qmix")])
def test_a_team_trains_the_same_vmapped_and_as_a_loop(algorithm, mixer):
    """From the same bits, through the real train step; in these episodes an agent dies."""
    found = []
    for vectorise in (True, False):
        team = mixed_team(ENV, algorithm, mixer, vectorise=vectorise)
        trainer = compiled(team)
        state = first_state(team, trainer)
        start = jax.tree.map(jnp.copy, (agent_states(team, state.team), state.mixers))
        state, _ = trainer.chunk(state, 5)
        found.append((start, (agent_states(team, state.team), state.mixers)))
    (start, after), (other_start, other) = found
    assert_identical(start, other_start)
    assert relative_difference(after, other) <= TOLERANCE
    assert relative_difference(after, start) > 100 * TOLERANCE


BOTH = {  # a team on replay, and one on rollouts
    "reward_teams": {"pupils": ["ann", "cid"], "others": ["big", "solo"]},
    "overrides": {
        agent: {"learner": pqn, "hidden_sizes": (8,), "num_minibatches": 2}
        for agent in ("big", "solo")
    },
}


def test_teams_on_replay_and_on_rollouts_go_side_by_side():
    given = given_for(mixed_team(ENV, dqn, "qmix", **BOTH))
    pupils, others = given.mixers
    assert pupils.target_params != () and others.target_params == ()
    spec, built, hparams = given.team.spec, given.team.lifted.groups, given.team.group_hparams()
    updates = {
        "pupils": partial(decomposition.replay_step, spec, built),
        "others": partial(decomposition.update, spec, built, jax.random.key(0)),
    }
    for name, update in updates.items():
        (state, mixers), _ = jax.jit(update)(given.state, given.mixers, given.rollout, hparams)
        before, after = (agent_states(given.team, x) for x in (given.state, state))
        changed = {agent for agent in before if not identical(before[agent], after[agent])}
        assert changed == set(BOTH["reward_teams"][name])
        same = [identical(x, y) for x, y in zip(given.mixers, mixers, strict=True)]
        assert same == [name != "pupils", name != "others"]


# Through training


def test_observations_of_who_is_out_are_never_read():
    """NaN or not, of an agent that dies, whose observations a mixer reads while it lives."""
    found = []
    for poison in (False, True):
        team = mixed_team(AutoReset(Workshop(shows_state=False, poison=poison)), dqn, "qmix")
        state, rollout = play(team, num_envs=4, length=4)
        if not found:  # the environment is no part of an update
            given = given_for(team, length=4, num_envs=4)
            update = given.updater()
        assert not np.all(rollout.active[:, 2]) and np.all(rollout.active[:, 0])
        given = given._replace(rollout=rollout)
        found.append((state, given.after(update)))
    assert all_finite(found)
    # two programs played: what they draw may differ in the last bit
    assert relative_difference(*found) <= TOLERANCE


def test_schedules_and_target_networks_of_a_mixer_are_its_agents():
    team = mixed_team(
        ENV,
        dqn,
        "qmix",
        target_update_interval=2,
        learning_rate_schedule="linear",
        schedule_steps=100.0,
    )
    given = given_for(team)
    update = given.updater()
    (state, (mixer, _)), _ = given.after(update)
    before = given.mixers[0]
    assert_identical(mixer.target_params, before.target_params)
    assert_identical(state[0].target_params, given.state[0].target_params)
    (_, (second, _)), _ = update(state, (mixer, ()), given.rollout, team.group_hparams())
    moved = optax.incremental_update(second.network.params, before.target_params, 0.3)
    assert relative_difference(second.target_params, moved) <= TOLERANCE

    def step(env_steps):
        (_, (after, _)), _ = given.after(update, env_steps=np.float32(env_steps))
        difference = jax.tree.map(jnp.subtract, after.network.params, before.network.params)
        return ravel_pytree(difference)[0]

    assert np.all(step(100.0) == 0) and np.any(step(0.0) != 0)
    np.testing.assert_allclose(step(0.0), 2 * step(50.0), atol=1e-6)


@pytest.mark.slow
def test_resuming_goes_on_with_the_mixers(tmp_path):
    """Of two teams, on replay and on rollouts; bit by bit."""
    options = BOTH | {"schedule_steps": 1000.0}
    options["overrides"] = {
        agent: changes | {"schedule_steps": 1000.0} for agent, changes in BOTH["overrides"].items()
    }
    team = mixed_team(ENV, dqn, "qmix", **options)
    sizes = {"num_envs": 4, "rollout_length": 8, "eval_episodes": 2, "progress": False}
    train = partial(marl.train, ENV, team, log_interval=2, **sizes)
    first = train(4 * 32, out=tmp_path / "run")
    assert [type(x).__name__ for x in first.state.mixers] == ["MixerState", "MixerState"]
    mixers = jax.tree.map(np.asarray, first.state.mixers)
    resumed = train(8 * 32, out=tmp_path / "run", resume=tmp_path / "run")
    straight = train(8 * 32)
    for before, after in zip(mixers, straight.state.mixers, strict=True):
        assert not identical(before, after)
    assert_identical(resumed.state, straight.state)


def test_mixers_are_part_of_a_runs_state():
    for mixer, kinds in (("vdn", ["tuple"] * 2), ("qmix", ["MixerState", "tuple"])):
        team = mixed_team(ENV, dqn, mixer)
        state = jax.eval_shape(compiled(team).init_function, seed_keys(0, 1), team.group_hparams())
        assert [type(x).__name__ for x in state.mixers] == kinds
        assert "rewards: crew pools (mean) ann, big, cid" in team.describe()


# What can be learned

ADDITIVE, PAPER = ((0.0, 4.0), (4.0, 8.0)), ((0.0, 1.0), (1.0, 8.0))
UNIFORM = {"epsilon_end": 1.0, "gamma": 0.99, "learning_rate": 1e-3, "hidden_sizes": (32,)}
SIZES = {"num_seeds": 3, "num_envs": 16, "log_interval": 100, "progress": False}
LEARNERS = {
    dqn: {
        "tau": 0.05,
        "replay": {
            "capacity": 4096,
            "batch_size": 64,
            "updates_per_rollout": 4,
            "learning_starts": 256,
        },
    },
    pqn: {"num_epochs": 2, "num_minibatches": 2, "q_lambda": 0.0},
}
LENGTHS = {dqn: 2, pqn: 4}


@pytest.mark.parametrize(
    ("algorithm", "mixer", "payoff", "best"),
    [
        (dqn, "none", ADDITIVE, 7.0),
        (dqn, "vdn", ADDITIVE, 8.0),
        (dqn, "qmix", PAPER, 8.0),
        pytest.param(dqn, "vdn", PAPER, 7.0, marks=pytest.mark.slow),
        pytest.param(dqn, "qmix", ADDITIVE, 8.0, marks=pytest.mark.slow),
        pytest.param(pqn, "none", ADDITIVE, 7.0, marks=pytest.mark.slow),
        pytest.param(pqn, "vdn", ADDITIVE, 8.0, marks=pytest.mark.slow),
        pytest.param(pqn, "vdn", PAPER, 7.0, marks=pytest.mark.slow),
        pytest.param(pqn, "qmix", ADDITIVE, 8.0, marks=pytest.mark.slow),
        pytest.param(pqn, "qmix", PAPER, 8.0, marks=pytest.mark.slow),
    ],
)
def test_the_two_step_game_ends_where_the_theory_says(algorithm, mixer, payoff, best):
    """While everybody explores, independent values are means over the other's actions.

    In the second matrix the risky action is then worth 6 (of ADDITIVE) to each, less than 7 for
    sure. A sum is exact there; of PAPER its least squares say 6.5. What is monotonic says 8.
    """
    env = marl.make("toy/two_step", payoff=payoff)
    options = UNIFORM | LEARNERS[algorithm]
    team = marl.team(env, algorithm, mixer=mixer, reward_teams="all", **options)
    run = marl.train(env, team, 20_000, rollout_length=LENGTHS[algorithm], **SIZES)
    greedy = run.evaluations[-1]["greedy"]
    assert len(greedy) == 3
    for seed in greedy:
        assert seed["returns"]["first"]["mean"] == seed["returns"]["second"]["mean"] == best


# Errors

BAD = {
    "unknown": ({"mixer": "qmx"}, "qmix"),
    "nobody in a team": ({"reward_teams": "none"}, "put two in one, as in reward_teams = 'all'"),
    "teams that agents are anyway": (
        {"reward_teams": {"ann": ["ann"]}},
        "every agent is alone in its reward team; put two in one, as in reward_teams = 'all', or",
    ),
    "one in a team": (
        {"reward_teams": {"crew": ["ann"]}},
        r"each of reward_teams has one agent \(crew: ann\); give one of them two",
    ),
    "ppo in a mixed team": (
        {"overrides": {"big": {"learner": ppo}}},
        "reward team crew; big have none",
    ),
    "two discounts": (
        {"overrides": {"cid": {"gamma": 0.5}}},
        "gamma differs among ann, big, cid",
    ),
    "two rates of targets": (
        {"overrides": {"big": {"tau": 0.5}}},
        "tau differs among ann, big, cid",
    ),
    "one set in two teams": (
        {"sharing": {"both": ["ann", "solo"]}},
        "must be in one reward team under a mixer; ann, solo are not",
    ),
    "deaths that end returns": ({"death": "terminal"}, "mixer needs death = 'continue'"),
    "replay and rollouts": (
        {"overrides": {"big": {"learner": pqn}}},
        "reward team crew has learners of several kinds",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_mixed_is_refused(name):
    options, message = BAD[name]
    with pytest.raises(UsageError, match=message):
        mixed_team(ENV, dqn, **({"mixer": "vdn"} | options))


def test_one_agent_has_nobody_to_be_mixed_with():
    env = marl.make("toy/probe_memory")
    with pytest.raises(UsageError, match="has one agent, agent_0; leave mixer at 'none'"):
        marl.team(env, "dqn", mixer="vdn", reward_teams="all")


def test_a_mixer_moves_only_with_a_team_that_is_finite():
    old, new = ({"w": jnp.zeros(2)},), ({"w": jnp.ones(2)},)
    fine, broken = (jnp.array([True, True]),), (jnp.array([True, False]),)
    assert_identical(program._whole_or_old(fine, new, old), new)
    assert_identical(program._whole_or_old(broken, new, old), old)
    poisoned = ({"w": jnp.array([1.0, jnp.nan])},)
    assert_identical(program._whole_or_old(fine, poisoned, old), old)


def test_traces_of_a_team_must_be_one():
    with pytest.raises(UsageError, match="q_lambda differs among ann, big, cid"):
        mixed_team(ENV, pqn, "vdn", overrides={"ann": {"q_lambda": 0.1}})


def test_learners_without_values_may_stand_beside_a_mixed_team():
    team = mixed_team(ENV, dqn, "qmix", overrides={"solo": {"learner": ppo}})
    parts = mixing.mixed(team.spec, team.lifted.groups, on_replay=True)
    assert parts.teams == ((0, 1, 2),) and parts.indices == (0,)
    assert not mixing.mixed(team.spec, team.lifted.groups, on_replay=False).groups
