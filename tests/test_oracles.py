"""Oracles that catch most of what goes wrong in this field, through whole teams.

Ratio = 1, rename (in test_dispatch.py), isolation, brute force, trace counter, poison.
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    Spy,
    agent_states,
    all_finite,
    assert_identical,
    compiled,
    first_state,
    identical,
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    report_experience,
    small_team,
    trained,
    updater,
)
from team_envs import SHIFT_ACTIVE, Shift, shift

import marl
from marl.agents import ppo
from marl.agents.learner import CriticSpace

AGENTS = Shift.agents
NORMALISED = {"normalize_observations": True, "value_normalization": "popart", "clip_values": True}
POOLED = {"critic": ["all", "state"], "sharing": "group", "reward_teams": "all"}


# Ratio = 1


def report_ratio(learner, state, experience, hparams):
    """How far PPO's ratio is from 1 before the first gradient step of an update."""
    log_ratio = learner.log_prob(state, experience) - experience.extras["log_prob"]
    error = jnp.where(experience.weight > 0, jnp.abs(jnp.expm1(log_ratio)), 0.0)
    return {"ratio_error": jnp.max(error), "live": jnp.mean(experience.weight)}


RATIO = Spy(report_ratio)


def test_ratio_is_1_before_the_first_gradient_step_of_every_update():
    """With masks, agents that are dead or away, shared parameters and statistics that move.

    In one epoch of one minibatch PPO's own estimate of the divergence is that of this ratio.
    """
    start, _ = trained(*one_step_team(), 0)
    state, metrics = trained(*one_step_team(), 4)
    (group,) = metrics.learner
    assert np.max(group["ratio_error"]) <= 1e-5
    assert np.max(group["approx_kl"]) <= 1e-9 and np.all(group["clip_fraction"] == 0)
    shares = [np.mean(rows + rows[:2]) for rows in SHIFT_ACTIVE.values()]
    assert group["live"][0] == pytest.approx(np.mean(shares))
    before, after = start.team[0], state.team[0]
    assert not np.allclose(before.obs_statistics.mean, after.obs_statistics.mean, atol=0.1)
    assert not identical(before.actor.params, after.actor.params)


def one_step_team():
    """A team that takes one gradient step per update, and its program."""
    options = {"num_epochs": 1, "num_minibatches": 1, "learning_rate": 0.02}
    team = small_team(shift(poison=True), RATIO, **options, **NORMALISED, **POOLED)
    return team, compiled(team)


def test_ratio_is_1_for_composite_and_squashed_actions():
    """Statistics and parameters far from fresh ones; the policies leave the middle of the box."""
    env = marl.make("toy/heterogeneous")
    spy = Spy(report_ratio, learns=False)
    team = small_team(env, spy, image_encoder="flatten", normalize_observations=True)
    trainer = compiled(team)
    state = first_state(team, trainer)

    def moved(group):
        statistics = group.obs_statistics
        statistics = statistics._replace(
            total=statistics.total + 50,
            mean=statistics.mean + 0.3,
            variance=statistics.variance * 2,
        )
        params = jax.tree.map(lambda x: x * 10, group.actor.params)
        return group._replace(actor=group.actor._replace(params=params), obs_statistics=statistics)

    state = state._replace(team=tuple(moved(group) for group in state.team))
    _, metrics = trainer.chunk(state, 2)
    for group in metrics.learner:
        assert np.max(group["ratio_error"]) <= 1e-5 and np.all(group["live"][:2] == 1)


# Isolation


@pytest.fixture(scope="module", params=["none", "pair"])
def isolated(request):
    """A team, and what it becomes in one update of a fixed rollout with damaged rewards.

    Critics see everybody; rewards are apart, or those of ann and bob are pooled.
    """
    teams = "none" if request.param == "none" else {"pair": ["ann", "bob"]}
    team = small_team(shift(), critic="all", reward_teams=teams, value_normalization="running")
    states, rollout = play(team)
    update, hparams = updater(team), team.group_hparams()

    def after(damage):
        result, _ = update(states, rollout._replace(reward=damage(rollout.reward)), hparams)
        return agent_states(team, result)

    mates = {agent: {agent} for agent in AGENTS}
    if request.param == "pair":
        mates["ann"] = mates["bob"] = {"ann", "bob"}
    return after, mates


@pytest.mark.parametrize("damage", [lambda x: x * 1e6, lambda x: x * jnp.nan], ids=["1e6", "nan"])
@pytest.mark.parametrize("victim", AGENTS)
def test_a_reward_reaches_its_team_and_nobody_else(isolated, victim, damage):
    after, mates = isolated
    position = AGENTS.index(victim)
    healthy = after(lambda reward: reward)
    damaged = after(lambda reward: reward.at[:, position].set(damage(reward[:, position])))
    for agent in AGENTS:
        if agent in mates[victim]:
            assert not identical(damaged[agent].actor, healthy[agent].actor)
        else:
            assert_identical(damaged[agent], healthy[agent])


# Poison


@pytest.mark.parametrize(
    "options", [{"critic": ["self", "all"]}, POOLED], ids=["independent", "pooled"]
)
def test_what_must_not_be_read_changes_nothing(options):
    """NaN in observations, rewards and masks of who is out, and where nothing follows."""
    teams = [small_team(shift(poison), **NORMALISED, **options) for poison in (False, True)]
    assert teams[0].spec == teams[1].spec
    (healthy, steps), (poisoned, poisoned_steps) = (play(team) for team in teams)
    assert_identical(healthy, poisoned)
    assert not all_finite(poisoned_steps.reward)  # those that nobody may read
    update, hparams = updater(teams[0]), teams[0].group_hparams()
    for _ in range(2):
        healthy, metrics = update(healthy, steps, hparams)
        poisoned, poisoned_metrics = update(poisoned, poisoned_steps, hparams)
        assert all_finite(poisoned) and all_finite(poisoned_metrics)
        assert_identical(poisoned, healthy)
        assert_identical(poisoned_metrics, metrics)


def test_a_poisoned_team_trains():
    """Through the train step, whose returns are those worked out by hand."""
    state, metrics = trained(*one_step_team(), 3)
    assert all_finite(state.team) and all_finite(metrics)
    returns = metrics.episodes.returns.sum(0) / metrics.episodes.finished.sum()
    np.testing.assert_allclose(returns, [21.0, 60.0, 1000.0])


def test_poison_in_the_logit_of_an_illegal_action_stays_there():
    """Action 0 is never legal: the bias of its logit may be NaN, and nothing else becomes it."""
    team = small_team(shift())
    states, rollout = play(team)
    (state,) = states
    network = state.actor.params["network"]
    head = sorted(network)[-1]
    bias = network[head]["b"]
    assert bias.shape == (3, 3)  # [sets, actions]
    network = network | {head: network[head] | {"b": bias.at[:, 0].set(jnp.nan)}}
    actor = state.actor._replace(params=state.actor.params | {"network": network})
    (after,), metrics = updater(team)((state._replace(actor=actor),), rollout, team.group_hparams())
    learned = after.actor.params["network"][head]
    assert np.all(np.isnan(learned["b"][:, 0]))
    network = after.actor.params["network"] | {head: {"w": learned["w"], "b": learned["b"][:, 1:]}}
    assert all_finite([network, after.actor.optimizer, after.critic, metrics])


# Brute force

# Eight steps of the shift: an episode of six, and two steps of the next. By hand, per step:
ANN = [1, 2, 3, 4, 5, 6, 1, 2]
BOB = [10, 20, 30, 0, 0, 0, 10, 20]  # out from step 3 to the episode's end
CID = [100, 200, 0, 0, 300, 400, 100, 200]  # out in steps 2 and 3
NEVER, LAST, DEATH = [0] * 8, [0, 0, 0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]
EXPECTED = {
    # agent: (reward, terminated, truncated)
    "alone": (
        {},
        {
            "ann": (ANN, NEVER, LAST),
            "bob": (BOB, [0, 0, 1, 0, 0, 1, 0, 0], NEVER),  # dies, and is cut off from the next
            "cid": (CID, LAST, NEVER),
        },
    ),
    "mean": (
        {"reward_teams": "all"},
        dict.fromkeys(AGENTS, ([37, 74, 16.5, 4, 152.5, 203, 37, 74], NEVER, LAST)),
    ),
    "sum": (
        {"reward_teams": "all", "reward_pooling": "sum"},
        dict.fromkeys(AGENTS, ([111, 222, 33, 4, 305, 406, 111, 222], NEVER, LAST)),
    ),
    "terminal": (
        {"reward_teams": "all", "death": "terminal"},
        {
            "ann": ([37, 74, 16.5, 4, 152.5, 203, 37, 74], NEVER, LAST),
            "bob": ([37, 74, 16.5, 4, 152.5, 203, 37, 74], [0, 0, 1, 0, 0, 1, 0, 0], NEVER),
            "cid": ([37, 74, 16.5, 4, 152.5, 203, 37, 74], LAST, NEVER),
        },
    ),
    "pair": (  # without ann nobody is truncated, so the pair's end is a termination
        {"reward_teams": {"pair": ["bob", "cid"]}},
        {
            "ann": (ANN, NEVER, LAST),
            "bob": ([55, 110, 30, 0, 300, 400, 55, 110], LAST, NEVER),
            "cid": ([55, 110, 30, 0, 300, 400, 55, 110], LAST, NEVER),
        },
    ),
    "continue": (
        {"death": "continue"},
        {
            "ann": (ANN, NEVER, LAST),
            "bob": (BOB, LAST, NEVER),
            "cid": (CID, LAST, NEVER),
        },
    ),
}


@pytest.fixture(scope="module")
def shift_rollouts():
    """States and a rollout, for agents with parameters of their own and with common ones."""
    env = shift(poison=True)
    return {sharing: play(small_team(env, sharing=sharing)) for sharing in ("none", "group")}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("sharing", ["none", "group"])
def test_rewards_and_ends_are_those_worked_out_by_hand(shift_rollouts, name, sharing):
    options, expected = EXPECTED[name]
    spy = Spy(report_experience, learns=False)
    team = small_team(shift(poison=True), spy, sharing=sharing, **options)
    states, rollout = shift_rollouts[sharing]
    _, metrics = updater(team)(states, rollout, team.group_hparams())
    (group,) = metrics
    given = group["experience"]
    num_members = team.lifted.groups[0].shape[1]
    for position, agent in enumerate(AGENTS):
        index, place = (position, 0) if sharing == "none" else (0, position)
        reward, terminated, truncated = expected[agent]
        active = SHIFT_ACTIVE[agent] + SHIFT_ACTIVE[agent][:2]
        for values, by_hand in (
            (given.reward, reward),
            (given.terminated, terminated),
            (given.truncated, truncated),
            (given.weight, active),
        ):
            for column in range(4):
                own = np.asarray(values)[index, :, place + column * num_members]
                np.testing.assert_allclose(own, by_hand)


def test_targets_equal_a_plain_loop_over_every_agents_steps():
    """Values, deaths, a truncation, a termination and the rollout's end, different per agent.

    PPO in one minibatch reports half the mean squared distance of its values from their targets.
    """
    gammas = {"ann": 0.9, "bob": 0.8, "cid": 0.5}
    team = small_team(
        shift(poison=True),
        num_epochs=1,
        num_minibatches=1,
        gae_lambda=0.7,
        reward_teams={"pair": ["ann", "cid"]},
        overrides={agent: {"gamma": gamma} for agent, gamma in gammas.items()},
    )
    states, rollout = play(team, length=8)
    _, metrics = updater(team)(states, rollout, team.group_hparams())
    space = team.env.observation_spaces["ann"]
    action_space = team.env.action_spaces["ann"]
    learner = ppo.make(ppo.Config(hidden_sizes=(8,)), space, action_space, CriticSpace((space,)))
    obs, final_obs = rollout.steps[0].obs[:, :, 0], rollout.final_obs[0][:, :, 0]  # [T, A, B, 2]
    pooled = [50.5, 101, 3, 4, 152.5, 203, 50.5, 101]
    alone = dict(
        zip(("reward", "terminated", "truncated"), EXPECTED["alone"][1]["bob"], strict=True)
    )
    for position, agent in enumerate(AGENTS):
        state = team.agent_state(states, agent)
        value = np.asarray(learner.value(state, (obs[:, position],)))[:, 0]
        following = np.asarray(learner.value(state, (final_obs[:, position],)))[:, 0]
        reward = alone["reward"] if agent == "bob" else pooled
        terminated = alone["terminated"] if agent == "bob" else NEVER
        truncated = NEVER if agent == "bob" else LAST
        active = SHIFT_ACTIVE[agent] + SHIFT_ACTIVE[agent][:2]
        gamma, advantage, squared = gammas[agent], 0.0, []
        for t in reversed(range(8)):
            bootstrap = 0.0 if terminated[t] else gamma * following[t]
            delta = reward[t] + bootstrap - value[t]
            carried = 0.0 if terminated[t] or truncated[t] else gamma * 0.7 * advantage
            advantage = delta + carried
            squared.append(0.5 * advantage**2 * active[t])
        loss = sum(squared) / sum(active)  # the four environments are alike
        assert metrics[0]["value_loss"][position] == pytest.approx(loss, rel=1e-5)


# Trace counter


def test_nothing_is_traced_or_compiled_twice(caplog):
    """Other hparams, other seeds, a longer run, or the same team built again: one program."""
    spy = Spy()
    env = marl.make("toy/cooperative")

    def run(env, seed, total_steps, **options):
        team = small_team(env, spy, **options)
        marl.train(
            env,
            team,
            total_steps,
            seed=seed,
            num_seeds=2,
            num_envs=2,
            rollout_length=4,
            log_interval=1,
            eval_episodes=2,
            progress=False,
        )

    run(env, 0, 24)
    traced = dict(spy.calls)
    assert traced["make"] == 1 and traced["update"] > 0  # two players, which are one group
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        run(env, 0, 24)
        run(env, 5, 24, learning_rate=1e-3, gamma=0.5, entropy_coef=0, max_grad_norm=float("inf"))
        run(env, 1, 40, overrides={"row": {"learning_rate": 1e-2, "clip_epsilon": 0.1}})
        run(marl.make("toy/cooperative"), 0, 24, overrides={"*": {"gamma": 1}})
    assert dict(spy.calls) == traced
    compiled_again = [r.message for r in caplog.records if r.message.startswith("Compiling")]
    assert not compiled_again
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        jax.jit(lambda x: x + 1)(jnp.ones(7))
    assert [r.message for r in caplog.records if r.message.startswith("Compiling")]
