"""Shaped rewards: learned from with a weight that falls, and never reported as returns."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    SMALL,
    Spy,
    by_agent,
    compiled,
    quick_compilation,  # noqa: F401 (a fixture)
    small_team,
    trained,
)
from team_envs import SHIFT_ACTIVE, SHIFT_REWARD, Shift

import marl
from marl import config, rewards
from marl.envs.delegation import delegating
from marl.envs.errors import UsageError
from marl.envs.interface import AutoReset
from marl.envs.wrappers import EpisodeStatistics
from marl.rewards import RewardHparams

HINTS = {"ann": 0.5, "bob": 1.0, "cid": 2.0}  # paid in every step
NUM_ENVS, LENGTH = 2, 6  # an update is one episode of each environment


@delegating(stateful=False)
@dataclass(frozen=True)
class Hinted:
    """A `Shift` with shaped rewards; those of who is out are NaN."""

    env: Any = Shift(poison=True)

    def step(self, key, state, action):
        timestep, reached = self.env.step(key, state, action)
        shaped = {
            agent: jnp.where(jnp.asarray(SHIFT_ACTIVE[agent], bool)[state.step], hint, jnp.nan)
            for agent, hint in HINTS.items()
        }
        return timestep._replace(info={"shaped_reward": shaped}), reached


ENV = AutoReset(Hinted())
ACTIVE = np.asarray(list(SHIFT_ACTIVE.values()), bool)  # [A, T]
TRUE = np.asarray(list(SHIFT_REWARD.values()))
HINT = np.asarray(list(HINTS.values()))[:, None]


@pytest.mark.parametrize(
    ("env_steps", "weight"), [(0, 2.0), (25, 1.5), (50, 1.0), (100, 0.0), (1e9, 0.0)]
)
def test_the_weight_falls_linearly_to_zero(env_steps, weight):
    hparams = RewardHparams(jnp.float32(2), jnp.float32(100))
    found = rewards.with_shaped(jnp.ones(3), jnp.full(3, 10.0), hparams, jnp.float32(env_steps))
    np.testing.assert_allclose(found, 1 + weight * 10)


def test_the_weight_stays_without_an_end():
    hparams = RewardHparams(jnp.float32(2), jnp.float32(jnp.inf))
    found = rewards.with_shaped(jnp.ones(3), jnp.ones(3), hparams, jnp.float32(1e9))
    np.testing.assert_allclose(found, 3)


def learned_from(updates=3, **options):
    """What a team's learners get, [updates, T, B] by agent, and the metrics of its episodes."""

    def report(learner, state, experience, hparams):
        return {"reward": experience.reward}

    team = small_team(ENV, Spy(report, learns=False), **options)
    _, metrics = trained(team, compiled(team, NUM_ENVS, LENGTH), updates)
    return by_agent(team, metrics.learner, "reward"), metrics.episodes


@pytest.fixture(scope="module")
def alone():
    """Each agent its own reward; the weight is 3, 2, 1 in updates of 12 steps."""
    return learned_from(shaped_reward={"steps": 36, "weight": 3})


def test_learners_get_the_weighted_sum(alone):
    found = np.stack([alone[0][agent] for agent in HINTS])  # [A, updates, T, B]
    for update, weight in enumerate([3, 2, 1]):
        expected = np.where(ACTIVE, TRUE + weight * HINT, 0)
        np.testing.assert_allclose(
            found[:, update], np.broadcast_to(expected[..., None], (3, 6, 2))
        )


def test_returns_are_reported_without_it(alone):
    episodes = alone[1]
    np.testing.assert_allclose(episodes.finished, NUM_ENVS)
    own = np.where(ACTIVE, TRUE, 0).sum(1)
    hints = np.where(ACTIVE, HINT, 0).sum(1)
    for update in range(3):
        np.testing.assert_allclose(episodes.returns[update] / NUM_ENVS, own)
        np.testing.assert_allclose(episodes.shaped_returns[update] / NUM_ENVS, hints)


def test_it_is_added_before_rewards_are_pooled():
    found, episodes = learned_from(1, shaped_reward={"steps": 36}, reward_teams="all")
    total = np.where(ACTIVE, TRUE + HINT, 0).sum(0) / ACTIVE.sum(0)  # [T]
    for agent in HINTS:
        np.testing.assert_allclose(found[agent][0, :, 0], total, rtol=1e-6)
    pooled = (np.where(ACTIVE, TRUE, 0).sum(0) / ACTIVE.sum(0)).sum()
    np.testing.assert_allclose(episodes.team_returns[0] / NUM_ENVS, [pooled], rtol=1e-6)


def test_replay_holds_what_was_learned_from_when_it_was_collected():
    options = {"hidden_sizes": (4,), "shaped_reward": {"steps": 24}}
    sizes = {"capacity": 48, "batch_size": 4, "learning_starts": 1_000}
    team = marl.team(ENV, "dqn", replay=sizes, **options)
    state, _ = trained(team, compiled(team, NUM_ENVS, LENGTH), 2)
    held = np.asarray(state.replay.experience["reward"])[0]  # [rows, A]
    for update, weight in enumerate([1, 0.5]):
        expected = np.where(ACTIVE, TRUE + weight * HINT, np.nan).T
        np.testing.assert_allclose(held[update * LENGTH : (update + 1) * LENGTH], expected)


def test_a_run_reports_both_returns():
    team = marl.team(ENV, "ppo", shaped_reward={"steps": 24}, **SMALL)
    run = marl.train(
        ENV, team, 12, num_envs=2, rollout_length=6, log_interval=1, eval_episodes=2, progress=False
    )
    row = run.metrics[-1]
    assert row["return/cid"] == 1000 and row["shaped_return/cid"] == 8
    result = run.evaluations[-1]["greedy"]
    assert result["returns"]["bob"]["mean"] == 60 and result["shaped_returns"]["bob"]["mean"] == 3


def test_without_it_nothing_of_it_is_there():
    off, zero = (marl.team(ENV, "ppo", shaped_reward=x) for x in (None, {"steps": 0}))
    assert off.spec == zero.spec and off.spec.terms == rewards.Terms()
    assert len(off.group_hparams()) == len(off.lifted.groups)
    shapes = jax.eval_shape(
        compiled(off).init_function, jax.vmap(jax.random.key)(jnp.arange(1)), off.group_hparams()
    )
    assert shapes.carry.episode.shaped_returns == ()
    weights = [marl.team(ENV, "ppo", shaped_reward={"steps": x}) for x in (1e6, 2e6)]
    assert weights[0].spec == weights[1].spec, "floats compile nothing new"


def test_agents_in_a_list_and_statistics_keep_it():
    info = {"shaped_reward": jnp.asarray([1.0, 2.0, 3.0])}

    @dataclass(frozen=True)
    class Listed:
        agents = ("a", "b", "c")
        observation_spaces = tuple(Shift().observation_spaces.values())
        action_spaces = tuple(Shift().action_spaces.values())

        def reset(self, key):
            obs, state = Shift().reset(key)
            return tuple(obs.values()), state

        def step(self, key, state, action):
            own = dict(zip(Shift.agents, action, strict=True))
            timestep, state = Shift().step(key, state, own)
            fields = {
                name: tuple(value.values())
                for name, value in timestep._asdict().items()
                if isinstance(value, dict)
            }
            return timestep._replace(info=info, **fields), state

        def action_mask(self, state):
            return None

        def global_state(self, state):
            return None

    team = marl.team(AutoReset(Listed()), "ppo", shaped_reward={"steps": 1e6})
    _, state = team.env.reset(jax.random.key(0))
    action = dict.fromkeys(team.agents, jnp.int32(1))
    timestep, _ = team.env.step(jax.random.key(0), state, action)
    assert timestep.info["shaped_reward"] == {"a": 1.0, "b": 2.0, "c": 3.0}
    env = EpisodeStatistics(Hinted())
    timestep, _ = env.step(jax.random.key(0), env.reset(jax.random.key(0))[1], dict.fromkeys(HINTS))
    assert timestep.info["shaped_reward"]["cid"] == 2


BAD = {
    "an environment without it": (
        {"steps": 1e6},
        ["shaped_reward = {'steps': 1000000.0}", "has none", "jaxmarl/overcooked_v2", "steps = 0"],
    ),
    "no steps": ({"weight": 1.0}, ["no steps", "shaped_reward.steps = 1e6"]),
    "unknown": ({"step": 5}, ["no option 'step'", "did you mean 'steps'"]),
    "text": ({"steps": "long"}, ["shaped_reward.steps = 'long'", "give a number"]),
    "negative": ({"steps": 5, "weight": -1}, ["shaped_reward.weight = -1", "0 or more"]),
    "for ever heavier": ({"steps": 5, "weight": np.inf}, ["shaped_reward.weight = inf", "finite"]),
    "beyond 32 bits": ({"steps": 5, "weight": 1e39}, ["shaped_reward.weight = 1e+39", "32 bits"]),
    "not a mapping": (1e6, ["shaped_reward = 1000000.0 is a float", "{'steps': 1e6}"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_say_what_to_do(case):
    shaped, texts = BAD[case]
    with pytest.raises(UsageError) as error:
        marl.team(AutoReset(Shift()), "ppo", shaped_reward=shaped)
    for text in texts:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (jnp.zeros(3), "has it as float32[3]; jaxmarl"),
        ({"ann": jnp.zeros(2), "bob": jnp.int32(1)}, "has it as ann: float32[2], bob: int32[]; "),
        ([jnp.zeros((2, 3)), jnp.ones(1)], "has it as [float32[2, 3], float32[1]]; "),
        ({"ann": None, "bob": jnp.ones(1)}, "has it as ann: None, bob: float32[1]; "),
        ([None], "has it as [None]; "),
    ],
)
def test_what_an_environment_gives_instead_is_shown(given, shown):
    @delegating(stateful=False)
    @dataclass(frozen=True)
    class Otherwise:
        env: Any = Shift()

        def step(self, key, state, action):
            timestep, state = self.env.step(key, state, action)
            return timestep._replace(info={"shaped_reward": given}), state

    with pytest.raises(UsageError) as error:
        marl.team(AutoReset(Otherwise()), "ppo", shaped_reward={"steps": 1e6})
    assert shown in str(error.value)


def test_settings_on_the_command_line():
    loaded = config.load("ippo", ["team.shaped_reward.steps=2.5e6"])
    assert loaded.team.shaped_reward == {"steps": 2.5e6}
    assert config.load("ippo", ["team.shaped_reward.steps=inf"]).team.shaped_reward["steps"] > 1e99
    with pytest.raises(UsageError, match="team.shaped_reward.steps=soon: expected a number"):
        config.load("ippo", ["team.shaped_reward.steps=soon"])
