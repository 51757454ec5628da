"""`on_nan="skip"` with replay: what is not finite stays in the buffer, and has no weight."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixing_cases import CREW, ENV
from off_policy_cases import KINDS, some
from team_cases import (
    all_finite,
    assert_identical,
    compiled,
    identical,
    quick_compilation,  # noqa: F401 (a fixture)
    trained,
)
from team_envs import Poisoned

import marl
from marl import decomposition, learning, mixing, nonfinite
from marl.agents import dqn, sac
from marl.envs.features import Continuing
from marl.envs.interface import AutoReset
from marl.envs.spaces import Box

# Who goes without a window: five windows of three steps, in one of which something is NaN

WINDOW = 2
ALL, MEMBERS = ("ann", "big", "cid", "solo"), ("ann", "big", "cid")
READS_BIG = {"overrides": {"ann": {"critic": ["self", "big"]}}}


def poisoned(team, rollout, what, agent, value=jnp.nan, step=1):
    """`rollout` with a `value` in what `agent` saw, did, got or was led to, or in the state."""
    if what.endswith("global_state"):
        bad = getattr(rollout, what).at[step, WINDOW, 0].set(value)
        return rollout._replace(**{what: bad})
    position = team.agents.index(agent)
    if what == "reward":
        return rollout._replace(reward=rollout.reward.at[step, position, WINDOW].set(value))
    (index,) = (i for i, group in enumerate(team.lifted.groups) if position in group.positions)
    place = np.unravel_index(
        team.lifted.groups[index].positions.index(position), team.lifted.groups[index].shape
    )
    at = (step, *place, WINDOW)
    if what == "final_obs":
        trees = list(rollout.final_obs)
        trees[index] = trees[index].at[at].set(value)
        return rollout._replace(final_obs=tuple(trees))
    steps = list(rollout.steps)
    changed = getattr(steps[index], what).at[at].set(value)
    steps[index] = steps[index]._replace(**{what: changed})
    return rollout._replace(steps=tuple(steps))


def small(env, learner, **options):
    return marl.team(env, learner, **{"hidden_sizes": (4,)} | options)


@pytest.mark.parametrize(
    ("env", "learner", "options", "what", "agent", "without"),
    [
        (ENV, dqn, {}, "obs", "big", ("big",)),
        (ENV, dqn, {}, "final_obs", "cid", ("cid",)),
        (ENV, dqn, {}, "reward", "solo", ("solo",)),
        (ENV, dqn, dict(sharing="group"), "obs", "cid", ("cid",)),
        (ENV, dqn, dict(reward_teams=CREW), "obs", "big", ("big",)),
        (ENV, dqn, dict(reward_teams=CREW), "reward", "big", MEMBERS),
        (ENV, dqn, dict(reward_teams=CREW, mixer="vdn"), "obs", "big", MEMBERS),
        (ENV, dqn, dict(reward_teams=CREW, mixer="vdn"), "final_obs", "solo", ("solo",)),
        (ENV, dqn, dict(reward_teams=CREW, mixer="qmix"), "global_state", None, MEMBERS),
        (ENV, sac, READS_BIG, "obs", "big", ("ann", "big")),
        (ENV, sac, READS_BIG, "obs", "ann", ("ann",)),
        (ENV, sac, dict(critic="all", sharing="group"), "final_obs", "cid", ALL),
        (ENV, sac, dict(critic=["self", "state"]), "final_global_state", None, ALL),
        (KINDS, sac, {}, "action", "blue", ("blue",)),
        (KINDS, sac, dict(critic="all"), "action", "red_1", ("red_0", "blue", "red_1")),
    ],
)
def test_agents_that_would_read_it_go_without_the_window(
    env, learner, options, what, agent, without
):
    team = small(env, learner, **options)
    _, rollout = some(team, num_envs=5)
    for value in (jnp.nan, -jnp.inf):
        bad = poisoned(team, rollout, what, agent, value)
        found = nonfinite.left_out(team.spec, team.lifted.groups, bad)
        expected = np.ones((3, len(team.agents), 5), bool)
        expected[:, [team.agents.index(name) for name in without], WINDOW] = False
        np.testing.assert_array_equal(found.usable, expected)
        zero = poisoned(team, rollout, what, agent, 0.0)
        assert_identical(found._replace(usable=None), zero)  # and nothing else is touched
    clean = nonfinite.left_out(team.spec, team.lifted.groups, rollout)
    assert np.all(clean.usable)
    assert_identical(clean._replace(usable=None), rollout)


def test_what_an_agent_that_was_out_got_matters_to_nobody():
    team = small(ENV, dqn, reward_teams=CREW)
    _, rollout = some(team, num_envs=5)
    out = rollout._replace(active=rollout.active.at[1, 1, WINDOW].set(False))
    found = nonfinite.left_out(team.spec, team.lifted.groups, poisoned(team, out, "reward", "big"))
    assert np.all(found.usable) and np.all(np.isfinite(found.reward))


@pytest.mark.parametrize(
    ("env", "learner", "options", "what", "step"),
    [
        (ENV, dqn, dict(reward_teams=CREW), "reward", 1),
        (ENV, dqn, dict(reward_teams=CREW, mixer="qmix"), "obs", 0),
        (KINDS, sac, dict(critic="all"), "final_obs", 2),
    ],
    ids=["dqn", "qmix", "masac"],
)
def test_a_gradient_step_is_as_if_the_window_had_no_weight(env, learner, options, what, step):
    """Whatever stands in it; and without the window it is another step."""
    team = small(env, learner, **options)
    spec, built, hparams = team.spec, team.lifted.groups, team.group_hparams()
    key = jax.random.key(0)
    states, rollout = some(team, num_envs=5)
    ends = dict.fromkeys(("terminated", "truncated"), jnp.zeros_like(rollout.terminated))
    rollout = rollout._replace(**ends, episode_over=jnp.zeros_like(rollout.episode_over))
    mixers = mixing.init(spec, built, key, hparams) if spec.mixer != "none" else ()

    @jax.jit
    def learn(samples):
        found = learning.replay_step(spec, built, key, states, samples, hparams)
        if spec.mixer != "none":
            return decomposition.replay_step(spec, built, found[0], mixers, samples, hparams)
        return found

    agent = team.agents[1]
    samples = poisoned(team, rollout, what, agent, step=step)
    bad = learn(nonfinite.left_out(spec, built, samples))
    usable = jnp.ones_like(rollout.active).at[:, :3, WINDOW].set(False)
    assert all_finite(bad)
    assert_identical(bad, learn(rollout._replace(usable=usable)))
    assert not identical(bad, learn(rollout._replace(usable=jnp.ones_like(usable))))
    assert not all_finite(learn(samples)), "a learner reads what is not finite"


# Training goes on

UPDATES, NUM_ENVS, LENGTH = 60, 2, 8
BUFFER = {"capacity": 2000, "batch_size": 32, "updates_per_rollout": 4, "learning_starts": 0}


@dataclass(frozen=True)
class Reach(Continuing):
    """Pays 1 less the square of how far the action is from 1/2; only truncated, after `limit`."""

    @property
    def action_spaces(self):
        return dict.fromkeys(self.agents, Box((1,), -1, 1))

    def step(self, key, state, action):
        timestep, state = super().step(key, state, action)
        reward = {agent: 1.0 - (action[agent][0] - 0.5) ** 2 for agent in self.agents}
        return timestep._replace(reward=reward), state


def after_a_nan(learner, inner, **options):
    """What became of a run in whose first rollout `agent_1` saw a NaN, and of one without it."""
    outcomes = []
    for at in (5, 10**6):
        env = AutoReset(Poisoned(at, inner))
        team = marl.team(env, learner, hidden_sizes=(16,), **options)
        trainer = compiled(team, NUM_ENVS, LENGTH, max_updates=UPDATES, skip_nan=True)
        outcomes.append((team, *trained(team, trainer, UPDATES)))
    (team, state, metrics), (_, clean, of_clean) = outcomes
    rows = state.replay.experience
    assert np.isnan(rows["steps"][0].obs).sum() == np.isnan(rows["final_obs"][0]).sum() == NUM_ENVS
    assert metrics.faults.observation[0].tolist() == [LENGTH, 5]
    assert np.all(metrics.finite[0]), "nothing was undone"
    left_out = metrics.learner[0]["left_out"]
    assert np.all(left_out[:, 0] == 0) and np.all(of_clean.learner[0]["left_out"] == 0)
    # the step before led to it: of the windows of n steps n + 1 hold one of the two
    steps, n = np.arange(1, UPDATES + 1) * LENGTH, team.spec.replay.n_step
    expected = np.mean((n + 1) / (steps - n + 1))
    assert np.mean(left_out[:, 1]) == pytest.approx(expected, rel=0.15)
    assert all_finite((state.team, metrics.learner))
    assert_identical(
        team.agent_state(state.team, "agent_0"), team.agent_state(clean.team, "agent_0")
    )
    assert not identical(state.team, clean.team)
    return team, state, metrics


def test_dqn_learns_on_beside_a_nan_in_the_buffer():
    """Rewards of 1 at a discount of 1/2 are worth 2; windows have three steps."""
    options = {"gamma": 0.5, "learning_rate": 1e-2, "tau": 0.1, "replay": BUFFER | {"n_step": 3}}
    _, state, metrics = after_a_nan(dqn, Continuing(limit=1000), **options)
    assert state.team[0].steps.tolist() == [4 * UPDATES] * 2
    np.testing.assert_allclose(metrics.learner[0]["q_mean"][-1], 2.0, atol=0.05)


def test_sac_learns_on_beside_a_nan_in_the_buffer():
    """The action that a NaN led to is one too, and what it was paid."""
    options = {"gamma": 0.0, "learning_rate": 1e-2, "learn_temperature": False}
    options |= {"initial_temperature": 0.01, "replay": BUFFER | {"updates_per_rollout": 8}}
    team, state, _ = after_a_nan(sac, Reach(limit=1000), **options)
    rows = state.replay.experience
    assert np.isnan(rows["steps"][0].action).sum() == np.isnan(rows["reward"]).sum() == NUM_ENVS
    policy = marl.policy.Policy(team.env, team.spec, state.team, state.hparams, "greedy")
    obs = dict.fromkeys(team.agents, jnp.ones(1))
    action, _ = policy(jax.random.key(0), obs, policy.initial_memory())
    for agent in team.agents:
        assert float(action[agent][0]) == pytest.approx(0.5, abs=0.15)


def test_a_run_says_that_samples_are_left_out(capsys):
    env = AutoReset(Poisoned(at=5))
    team = small(env, dqn, replay=BUFFER | {"updates_per_rollout": 1})
    sizes = {"num_envs": NUM_ENVS, "rollout_length": LENGTH, "log_interval": 4, "eval_episodes": 2}
    marl.train(env, team, 4 * NUM_ENVS * LENGTH, on_nan="skip", **sizes)
    assert (
        "observation of agent_1 is not finite at step 5 (seed 0); 0 updates of agents were undone "
        "in this chunk; what replay holds of it has no weight"
    ) in capsys.readouterr().err
