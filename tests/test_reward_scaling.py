"""Reward scales and the running deviation of returns, against plain loops."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    SMALL,
    SMOOTH,
    Spy,
    assert_identical,
    by_agent,
    compiled,
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    small_team,
    trained,
)
from team_envs import SHIFT_ACTIVE, SHIFT_REWARD, Shift, shift

import marl
from marl import experience, reward_scaling
from marl.agents import dqn
from marl.agents.learner import Rollout
from marl.agents.statistics import RunningStatistics
from marl.envs.delegation import delegating
from marl.envs.errors import UsageError
from marl.envs.interface import AutoReset

NUM_ENVS, LENGTH, UPDATES, GAMMA = 2, 4, 3, 0.5  # episodes of 6 steps run on over rollouts
AGENTS = tuple(SHIFT_ACTIVE)
ACTIVE = np.asarray(list(SHIFT_ACTIVE.values()), bool)  # [A, 6]
TRUE = np.asarray(list(SHIFT_REWARD.values()))
STEPS = np.arange(UPDATES * LENGTH) % 6  # of the episode


def report(learner, state, experience, hparams):
    return {"reward": experience.reward}


def learned_from(**options):
    """[A, updates, T] that a team's learners get; its episodes and last state."""
    team = small_team(shift(poison=True), Spy(report, learns=False), gamma=GAMMA, **options)
    state, metrics = trained(team, compiled(team, NUM_ENVS, LENGTH), UPDATES)
    found = by_agent(team, metrics.learner, "reward")
    stacked = np.stack([found[agent] for agent in AGENTS])
    np.testing.assert_array_equal(stacked[..., 0], stacked[..., 1])  # two equal environments
    return stacked[..., 0], metrics.episodes, state


def deviations(reward, active, ends):
    """After each update, the deviation of the discounted returns of [steps] that were active."""
    running, seen, found = 0.0, [], []
    for step in range(UPDATES * LENGTH):
        running = GAMMA * running + reward[step]
        if active[step]:
            seen.append(running)
        if ends[step]:
            running = 0.0
        if step % LENGTH == LENGTH - 1:
            found.append(np.std(seen))
    return np.asarray(found)


def test_scales_differ_by_agent_and_returns_stay_true():
    found, episodes, _ = learned_from(
        reward_scale=2, overrides={"bob": {"reward_scale": 0.1}, "ann": {"gamma": 0.9}}
    )
    scale = np.asarray([2, 0.1, 2])[:, None]
    expected = np.where(ACTIVE, TRUE * scale, 0)[:, STEPS].reshape(3, UPDATES, LENGTH)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    returns = np.sum(episodes.returns, 0) / np.sum(episodes.finished)
    np.testing.assert_allclose(returns, np.where(ACTIVE, TRUE, 0).sum(1))


def test_agents_alone_are_divided_by_their_own_deviation():
    found, episodes, state = learned_from(normalize_rewards=True, reward_scale=3)
    last = {"ann": 5, "bob": 2, "cid": 5}  # step that ends the return
    for i, agent in enumerate(AGENTS):
        reward, active = np.where(ACTIVE[i], TRUE[i], 0)[STEPS], ACTIVE[i][STEPS]
        std = deviations(reward, active, (last[agent] == STEPS) | (STEPS == 5))
        expected = 3 * reward.reshape(UPDATES, LENGTH) / std[:, None]
        np.testing.assert_allclose(found[i], expected, rtol=1e-5)
        total = state.returns.statistics.total[i]
        assert total == NUM_ENVS * active.sum(), "steps in which it was out do not count"
    returns = np.sum(episodes.returns, 0) / np.sum(episodes.finished)
    np.testing.assert_allclose(returns, np.where(ACTIVE, TRUE, 0).sum(1))


def test_a_reward_team_has_one_deviation_of_what_it_pools():
    teams = {"pair": ["bob", "cid"]}
    found, _, state = learned_from(
        normalize_rewards=True,
        reward_teams=teams,
        reward_pooling="sum",
        overrides={"cid": {"reward_scale": 10}},
    )
    assert state.returns.running.shape == (2, NUM_ENVS)
    reward = np.where(ACTIVE, TRUE, 0)[1:].sum(0)[STEPS]
    std = deviations(reward, ACTIVE[1:].any(0)[STEPS], STEPS == 5)
    expected = reward.reshape(UPDATES, LENGTH) / std[:, None]
    np.testing.assert_allclose(found[1], expected, rtol=1e-5)
    np.testing.assert_allclose(found[2], 10 * expected, rtol=1e-5)


def test_returns_that_do_not_vary_are_not_divided():
    seen = RunningStatistics(
        total=jnp.ones(4) * 100,
        mean=jnp.asarray([0.0, 5.0, 0.0, 1e-4]),
        variance=jnp.asarray([0.0, 1e-7, 4.0, 1e-8]),
    )
    np.testing.assert_allclose(reward_scaling.deviation(seen), [1, 1, 2, 1e-4], rtol=1e-6)


@pytest.fixture(scope="module")
def played():
    """The first 5 of the 6 steps of an episode: ann acts in 10 of them, bob and cid in 6."""
    return play(small_team(shift()), NUM_ENVS, 5)[1]


def test_what_is_not_finite_never_enters(played):
    team = small_team(shift(), gamma=GAMMA, normalize_rewards=True)
    broken = played._replace(reward=played.reward.at[1, 0, 0].set(jnp.nan))
    spec, built = team.spec, team.lifted.groups
    before = reward_scaling.init(spec, NUM_ENVS)
    returns, factor = reward_scaling.after(spec, built, before, broken, team.group_hparams())
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((returns, factor)))
    np.testing.assert_array_equal(returns.statistics.total, [9, 6, 6])  # ann, bob, cid
    broken = broken._replace(reward=broken.reward.at[2, 0, 0].set(jnp.inf), reward_factor=factor)
    found = experience.outcome(spec.reward_teams, broken).reward
    np.testing.assert_array_equal(found[1:3, 0, 0], [jnp.nan, jnp.inf])  # nor is it cut to look so


def learned_after(played, reward, seen, **options):
    """[T, A, B] that is learned from `reward` after `seen` zeros, and the returns."""
    team = small_team(shift(), **({"gamma": GAMMA, "normalize_rewards": True} | options))
    rollout = played._replace(reward=jnp.asarray(reward, jnp.float32))
    spec, built = team.spec, team.lifted.groups
    before = reward_scaling.init(spec, NUM_ENVS)
    zeros = RunningStatistics(jnp.full(3, float(seen)), jnp.zeros(3), jnp.zeros(3))
    before = before._replace(statistics=zeros)
    returns, factor = reward_scaling.after(spec, built, before, rollout, team.group_hparams())
    rollout = rollout._replace(reward_factor=factor)
    return experience.outcome(spec.reward_teams, rollout).reward, returns


@pytest.mark.parametrize("sign", [1, -1])
def test_a_first_success_after_long_is_cut_at_ten_deviations(played, sign):
    reward = np.zeros((5, 3, NUM_ENVS))
    reward[4, 0, 0] = sign  # of ann
    # 1 of 10,000 returns is 1: mean 0.0001, deviation sqrt(0.0001 * 0.9999) = 0.0099995
    found, returns = learned_after(played, reward, 10_000 - 10, reward_scale=3)
    np.testing.assert_allclose(np.sqrt(returns.statistics.variance[0]), 0.0099995, rtol=1e-4)
    assert found[4, 0, 0] == sign * 10 * 3 and np.count_nonzero(found) == 1
    # 1 of 80: deviation sqrt(0.0125 * 0.9875) = 0.111102, within the limit
    found, _ = learned_after(played, reward, 80 - 10, reward_scale=3)
    np.testing.assert_allclose(found[4, 0, 0], sign * 3 / 0.111102, rtol=1e-4)


def test_rewards_stay_in_reward_teams_without_gamma(played):
    """And neither are they cut, however they vary; those of others are divided."""
    overrides = {"bob": {"learner": "random"}}
    reward = np.zeros((5, 3, NUM_ENVS))
    reward[2] = 50
    found, _ = learned_after(played, reward, 10_000, reward_scale=2, overrides=overrides)
    np.testing.assert_array_equal(found[2, 1], 2 * 50)
    np.testing.assert_array_equal(found[2, 0], 2 * 10)


def test_replay_samples_are_scaled_when_they_are_drawn():
    sizes = {"capacity": 100, "batch_size": 32, "learning_starts": 0}
    spy = Spy(report, learns=False, algorithm=dqn)
    options = {"replay": sizes, "hidden_sizes": (4,), "reward_scale": 0.001}
    team = marl.team(shift(), spy, **options)
    state, metrics = trained(team, compiled(team, NUM_ENVS, LENGTH), UPDATES)
    assert np.max(state.replay.experience["reward"]) == 400, "what is held is as it was paid"
    drawn = np.stack([*by_agent(team, metrics.learner, "reward").values()])[:, -1]
    for i, own in enumerate(drawn):
        paid = np.where(ACTIVE[i], TRUE[i], 0) / 1000
        assert np.all(np.abs(own[..., None] - paid).min(-1) < 1e-6)
        assert own.max() == pytest.approx(paid.max())


def test_statistics_are_kept_in_checkpoints(tmp_path):
    sizes = {"num_envs": 2, "rollout_length": 4, "log_interval": 1, "eval_episodes": 1}
    env = shift()
    team = marl.team(env, "ppo", normalize_rewards=True, **SMALL)
    whole = marl.train(env, team, 32, progress=False, **sizes)
    marl.train(env, team, 16, progress=False, out=tmp_path / "run", **sizes)
    resumed = marl.train(env, team, 32, progress=False, resume=tmp_path / "run", **sizes)
    assert np.all(np.asarray(whole.state.returns.statistics.total) > 0)
    assert_identical(whole.state.returns, resumed.state.returns)


def test_without_it_nothing_of_it_is_there():
    off, one = marl.team(shift(), "ppo"), marl.team(shift(), "ppo", reward_scale=1.0)
    assert off.spec == one.spec and not any(off.spec.terms)
    assert jax.eval_shape(lambda: first_state_of(off)).returns == ()
    scaled = [marl.team(shift(), "ppo", reward_scale=x) for x in (2.0, 3.0)]
    assert scaled[0].spec == scaled[1].spec, "floats compile nothing new"


def first_state_of(team):
    trainer = compiled(team)
    return trainer.init_function(jax.random.key(0)[None], team.group_hparams())


@pytest.mark.slow
def test_seeds_have_statistics_of_their_own():
    """Each of two seeds learns what it does alone, in an environment that pays by what it draws."""
    env = marl.make("toy/probe_both", num_agents=2)
    team = small_team(env, normalize_rewards=True, **SMOOTH)
    both, _ = trained(team, compiled(team, 3, 4, num_seeds=2), 2)
    assert both.returns.running.shape == (2, 2, 3)
    for seed in range(2):
        alone, _ = trained(team, compiled(team, 3, 4), 2, seed=seed)
        mine = jax.tree.map(lambda x, seed=seed: x[seed], (both.returns, both.team))
        assert relative_difference(mine, (alone.returns, alone.team)) <= 1e-4
    first, second = both.returns.statistics.mean
    assert np.all(np.abs(first - second) > 1e-2)


@delegating(stateful=False)
@dataclass(frozen=True)
class Paid:
    """A `Shift` whose rewards are multiplied, per agent, by hand."""

    factors: tuple[float, ...]
    env: Any = Shift()

    def step(self, key, state, action):
        timestep, state = self.env.step(key, state, action)
        pairs = zip(AGENTS, self.factors, strict=True)
        paid = {agent: factor * timestep.reward[agent] for agent, factor in pairs}
        return timestep._replace(reward=paid), state


def paid(*factors):
    return AutoReset(Paid(factors))


PAIR = {"pair": ["bob", "cid"]}


def mixed_after(env, learner, updates=UPDATES, scale=1.0, **options):
    """The last state of a team in which `scale` is that of two agents under VDN."""
    options |= {"reward_teams": PAIR, "mixer": "vdn", "hidden_sizes": (4,)} | SMOOTH
    options["overrides"] = dict.fromkeys(PAIR["pair"], {"reward_scale": scale})
    team = marl.team(env, learner, **options)
    return trained(team, compiled(team, NUM_ENVS, LENGTH), updates)[0]


@pytest.mark.parametrize("n_step", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mixers_on_replay_scale_as_an_environment_would(n_step):
    """In windows that are shorter than the list of agents."""
    sizes = {"capacity": 100, "batch_size": 8, "learning_starts": 0, "n_step": n_step}
    found, other = (mixed_after(shift(), "dqn", scale=x, replay=sizes) for x in (0.1, 0.2))
    expected = mixed_after(paid(1.0, 0.1, 0.1), "dqn", replay=sizes)
    assert relative_difference(found.team, expected.team) <= 1e-4
    assert relative_difference(other.team, expected.team) > 1e-2


def test_mixers_on_rollouts_scale_and_divide_as_an_environment_would():
    sizes = {"num_epochs": 1, "num_minibatches": 1}
    found, other = (
        mixed_after(shift(), "pqn", 1, scale=x, normalize_rewards=True, **sizes) for x in (0.1, 0.2)
    )
    pair, ann = 1 / np.sqrt(np.asarray(found.returns.statistics.variance, float))
    expected = mixed_after(paid(ann, 0.1 * pair, 0.1 * pair), "pqn", 1, **sizes)
    assert relative_difference(found.team, expected.team) <= 1e-4
    assert relative_difference(other.team, expected.team) > 1e-2


@pytest.mark.parametrize("kind", [experience.TeamRollout, Rollout])
def test_every_field_of_rollouts_leads_with_time_or_does_not(kind):
    named = experience.LED_BY_TIME[kind] + experience.TIMELESS[kind]
    assert sorted(named) == sorted(kind._fields)


def test_shortened_rollouts_keep_what_holds_for_all_steps(played):
    """Of 5 steps of 3 agents in 2 environments."""
    team = small_team(shift(), reward_scale=2.0)
    factor = reward_scaling.after(team.spec, (), (), played, team.group_hparams())[1]
    cut = experience.shortened(played._replace(reward_factor=factor), 1)
    for name in experience.LED_BY_TIME[experience.TeamRollout]:
        assert all(len(x) == 5 for x in jax.tree.leaves(getattr(played, name)))
        assert all(len(x) == 1 for x in jax.tree.leaves(getattr(cut, name)))
    assert_identical(cut.reward_factor, factor)


GAME = marl.make("toy/cooperative")  # row, column
BAD = {
    "zero": ({"reward_scale": 0}, ["reward_scale = 0 of row", "positive number"]),
    "text": ({"reward_scale": "big"}, ["reward_scale = 'big'", "positive number"]),
    "in a sharing set": (
        {"sharing": "group", "overrides": {"row": {"reward_scale": 2}}},
        ["row and column share parameters", "differ in reward_scale: 2 and 1.0"],
    ),
    "in a shared critic": (
        {
            "critic": "all",
            "reward_teams": "all",
            "sharing": {"critic": "reward_team"},
            "overrides": {"row": {"reward_scale": 2}},
        },
        ["row and column share a critic", "differ in reward_scale: 2 and 1.0"],
    ),
    "in a mixer": (
        {
            "learner": "dqn",
            "mixer": "vdn",
            "reward_teams": "all",
            "overrides": {"row": {"reward_scale": 2}},
        },
        ["reward_scale differs among row, column"],
    ),
    "normalising by two gammas": (
        {
            "normalize_rewards": True,
            "reward_teams": "all",
            "overrides": {"row": {"gamma": 0.5}},
        },
        ["one gamma in reward team all", "0.5, 0.99"],
    ),
    "normalising without gamma": (
        {"learner": "random", "normalize_rewards": True},
        ["no learner of this team has a gamma"],
    ),
    "not a bool": ({"normalize_rewards": "yes"}, ["normalize_rewards = 'yes'", "True or False"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_say_what_to_do(case):
    options, texts = BAD[case]
    with pytest.raises(UsageError) as error:
        marl.team(GAME, **options)
    for text in texts:
        assert text in str(error.value)
