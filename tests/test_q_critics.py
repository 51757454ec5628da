"""Q-critics in teams: the actions they read, recorded and asked for."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from off_policy_cases import (
    KINDS,
    ONE_STEP,
    REDS_SHARE,
    Kinds,
    Watched,
    learned,
    report_samples,
    small,
    some,
)
from team_cases import (
    assert_identical,
    compiled,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    trained,
)

import marl
from marl import groups, learning, replay
from marl import update as updating
from marl.agents import ddpg, ppo, sac, td3
from marl.agents.learner import ActInput
from marl.envs.interface import AutoReset


def test_a_context_is_everybody_elses_actions_in_declared_order():
    """Of the same samples for all agents; the critics' observations are everybody's."""
    team = small(KINDS, Watched(report_samples, learns=False), critic="all")
    assert [group.positions for group in team.lifted.groups] == [(0,), (1,), (2,)]
    trainer = compiled(team, 4, 4)
    _, metrics = trained(team, trainer, 2)
    given = [jax.tree.map(lambda x: x[-1], found["experience"]) for found in metrics.learner]
    for position, own in enumerate(given):
        others = [given[p] for p in range(3) if p != position]
        assert len(own.context) == len(own.next_context) == 2
        for context, following, other in zip(own.context, own.next_context, others, strict=True):
            np.testing.assert_array_equal(context, other.action)
            assert following.shape == context.shape and not np.array_equal(following, context)
        for place, observation in enumerate(own.critic_obs):
            np.testing.assert_array_equal(observation[0], given[place].obs[0])
        for place, observation in enumerate(own.final_critic_obs):
            np.testing.assert_array_equal(observation[0], given[place].final_obs[0])


def test_where_parameters_are_shared_the_own_observation_and_id_come_first():
    """Then the other agents of the own kind, and only then those of another.

    Also where all are paid alike: what the others do beside oneself differs all the same.
    """
    team = small(
        KINDS, Watched(report_samples, learns=False), critic="all", reward_teams="all", **REDS_SHARE
    )
    reds, blue = team.lifted.groups
    assert reds.scopes == (("self", 2, 1), ("self", 0, 1)) and reds.contexts == ((2, 1), (0, 1))
    assert blue.scopes == ((0, 1, 2),) and blue.contexts == ((0, 2),)
    red, other = jax.jit(lambda *given: [x["experience"] for x in learned(team, *given)])(
        *some(team, num_envs=8)
    )
    mine, fellow, enemy = red.critic_obs
    assert set(mine) == {"agent_id", "obs"}
    np.testing.assert_array_equal(mine["obs"], red.obs["obs"])
    for n in range(2):  # B * N: members stand last
        np.testing.assert_array_equal(
            mine["agent_id"][0, :, n::2], np.tile(np.eye(2)[n], (3, 8, 1))
        )
        np.testing.assert_array_equal(fellow[0, :, n::2], red.obs["obs"][0, :, 1 - n :: 2])
        np.testing.assert_array_equal(enemy[0, :, n::2], other.obs[0])
        np.testing.assert_array_equal(red.context[0][0, :, n::2], red.action[0, :, 1 - n :: 2])
        np.testing.assert_array_equal(red.context[1][0, :, n::2], other.action[0])
        # of blue, the reds' actions in declared order
        np.testing.assert_array_equal(other.context[n][0], red.action[0, :, n::2])


@pytest.mark.parametrize("algorithm", [sac, td3, ddpg])
def test_a_critic_of_its_own_agent_has_no_context(algorithm):
    team = small(KINDS, algorithm)
    for group in team.lifted.groups:
        assert set(group.contexts) == {()} and group.scopes[0] == ("self",)


def test_a_named_agent_is_read_with_its_action():
    team = small(KINDS, sac, critic=["self", "blue"])
    contexts = {
        position: context
        for group in team.lifted.groups
        for position, context in zip(group.positions, group.contexts, strict=True)
    }
    assert contexts == {0: (1,), 1: (), 2: (1,)}


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({"critic": "all"}, np.ones((3, 3))),
        ({"critic": "self"}, np.eye(3)),
        ({"critic": "all"} | REDS_SHARE, np.ones((3, 3))),
        ({"critic": "all", "env": AutoReset(Kinds(discrete=True))}, np.ones((3, 3))),
    ],
    ids=["all", "self", "all, shared", "all, discrete"],
)
def test_a_critic_values_the_actions_it_reads_and_no_others(options, reads):
    """Entry [i, j]: whether agent i's critic gives another value where agent j acts otherwise."""
    env = options.get("env", KINDS)

    def report(learner, state, experience, hparams):
        (parts,) = learner.update.args  # what `make` captured
        view = experience.critic_obs, experience.action, experience.context
        return {"value": sac.q_value(parts, state, *view)}

    chosen = {name: value for name, value in options.items() if name != "env"}
    team = small(env, Watched(report, learns=False), **chosen)
    states, rollout = some(team)

    @jax.jit
    def values(actions):
        """By position, [critics, T, B], where agents took the actions [T, B, ...]."""
        steps = []
        for group, group_steps in zip(team.lifted.groups, rollout.steps, strict=True):
            stacked = groups.stack(group, actions)  # [S, N, T, B, ...]
            steps.append(group_steps._replace(action=jnp.moveaxis(stacked, 2, 0)))
        found = learned(team, states, rollout._replace(steps=tuple(steps)))
        by_position = {}
        for group, metrics in zip(team.lifted.groups, found, strict=True):
            for s, members in enumerate(group.sets):
                for n, position in enumerate(members):
                    by_position[position] = metrics["value"][s][..., n :: len(members)]
        return [by_position[position] for position in range(3)]

    actions = [jnp.zeros((3, 2, *space.shape), space.dtype) for space in env.action_spaces.values()]
    before = values(actions)
    for j in range(3):
        changed = [action + (p == j) for p, action in enumerate(actions)]
        moved = [bool(jnp.any(a != b)) for a, b in zip(values(changed), before, strict=True)]
        assert moved == np.asarray(reads, bool)[:, j].tolist()


# Next actions, and keys


@dataclass
class Log:
    """What learners were called with: tracers, where what called them is compiled."""

    asked: list[Any] = field(default_factory=list)
    learned: list[Any] = field(default_factory=list)


class Logged:
    """An algorithm whose calls are logged; agents are told apart by what they see."""

    def __init__(self, algorithm, log):
        self.Config, self.Hparams, self.CRITIC = (
            algorithm.Config,
            algorithm.Hparams,
            getattr(algorithm, "CRITIC", "value"),
        )
        self._algorithm, self._log = algorithm, log

    def make(self, *given):
        learner, log = self._algorithm.make(*given), self._log
        asked = "act" if learner.next_action is None else "next_action"

        def ask(key, state, inputs, hparams):
            out = getattr(learner, asked)(key, state, inputs, hparams)
            log.asked.append((key, state, inputs, out.action))
            return out

        def update(key, state, experience, hparams):
            log.learned.append((state, experience))
            keys = {"update": key, "shuffle": experience.shuffle_key}
            return state, jax.tree.map(jax.random.key_data, keys)

        return learner._replace(update=update, **{asked: ask})


def logged_team(algorithms, log):
    """Each agent of `KINDS` with its own algorithm, in a Python loop; Q-critics read everybody."""
    overrides = {
        name: {
            "learner": Logged(algorithm, log),
            "hidden_sizes": (8,),
            "critic": "all" if algorithm in (sac, td3) else "self",
        }
        | ({"target_noise": 0.0} if algorithm is td3 else {})
        for name, algorithm in zip(KINDS.agents, algorithms, strict=True)
    }
    return marl.team(KINDS, sac, overrides=overrides, vectorise=False, replay=ONE_STEP)


def moved_apart(state):
    """A state whose target policy is not the current one."""
    if not hasattr(state, "target_actor"):
        return state
    return state._replace(target_actor=jax.tree.map(lambda x: 0.5 - x, state.target_actor))


@pytest.fixture(scope="module")
def one_step():
    """A replay step of SAC, TD3 and PPO, in Python: what went in, how they were called, metrics."""
    log = Log()
    team = logged_team((sac, td3, ppo), log)
    states, rollout = some(team, num_envs=3, length=2)
    states = tuple(moved_apart(state) for state in states)
    log.asked.clear()  # PPO is asked to act in rollouts too
    metrics = learned(team, states, rollout)
    return team, states, rollout, Log(list(log.asked), list(log.learned)), metrics


def test_next_actions_are_those_of_the_current_or_of_the_target_policy(one_step):
    """SAC's and PPO's of the current policy, TD3's of the target's, where each step led to."""
    team, states, rollout, log, _ = one_step
    assert len(log.asked) == 3 and len(log.learned) == 2  # PPO does not learn from replay
    given = [experience for _, experience in log.learned]
    read = [given[1].next_context[0], given[0].next_context[0], given[0].next_context[1]]
    np.testing.assert_array_equal(given[1].next_context[1], read[2])
    for position, algorithm in enumerate((sac, td3, ppo)):
        state = jax.tree.map(lambda x: x[0], states[position])
        group = team.lifted.groups[position]
        obs = rollout.final_obs[position][:, 0, 0].reshape(6, -1)
        inputs = ActInput(obs, None, (), jnp.zeros(6, bool), rollout.env_steps)
        hparams = jax.tree.map(lambda x: x[0], team.group_hparams()[position])
        learner, key = group.learner, log.asked[position][0]
        if algorithm is td3:
            current = learner.act_greedy(key, state, inputs, hparams).action
            state = state._replace(actor=state.actor._replace(params=state.target_actor))
            expected = learner.act_greedy(key, state, inputs, hparams).action
            assert relative_difference(current, expected) > 0.1
        else:
            expected = learner.act(key, state, inputs, hparams).action
        np.testing.assert_allclose(read[position].reshape(expected.shape), expected, rtol=1e-5)
        assert len(np.unique(np.asarray(expected), axis=0)) > 1


def test_everybody_is_asked_before_anybody_learns(one_step):
    """With the states at the start of the step."""
    _, states, _, log, _ = one_step
    for (_, state, _, _), stacked in zip(log.asked, states, strict=True):
        assert_identical(state, jax.tree.map(lambda x: x[0], stacked))
    for (state, _), stacked in zip(log.learned, states[:2], strict=True):
        assert_identical(state, jax.tree.map(lambda x: x[0], stacked))


def as_set(keys):
    """Of [..., 2] key data."""
    return {tuple(key) for key in np.asarray(keys).reshape(-1, 2).tolist()}


def test_what_an_agent_would_do_is_drawn_with_another_key_than_its_update(one_step):
    """`split` gives the keys that folding in 0, 1, ... does, so they are easily used twice."""
    *_, log, metrics = one_step
    asked = as_set([jax.random.key_data(key) for key, *_ in log.asked])
    updates = as_set([found[name] for found in metrics[:2] for name in ("update", "shuffle")])
    assert len(asked) == 3 and len(updates) == 2 + 1  # the order of samples is everybody's
    assert not asked & updates


def test_replay_draws_with_other_keys_than_rollouts(monkeypatch):
    """Nor with what those are split into."""
    team = logged_team((ppo, ppo, sac), Log())
    states, rollout = some(team, num_envs=3, length=2)
    shifts = np.uint32([0, 8, 16, 24])

    def replay_step(spec, built, key, states, samples, hparams):
        """The key by bytes, as metrics are averaged."""
        found = jax.random.key_data(key)[:, None] >> shifts & jnp.uint32(255)
        return states, ({}, {}, {"bytes": found.astype(jnp.float32)})

    monkeypatch.setattr(learning, "replay_step", replay_step)

    @jax.jit
    def keys(states, rollout, hparams):
        rows = replay.rows_of(rollout)
        buffer = replay.make_buffer(team.spec.replay, 3)
        empty = buffer.init(jax.tree.map(lambda x: x[0, 0], rows))
        state = updating.TeamState(states, (), empty)
        return updating.update(team.spec, 3, jax.random.key(5), state, rollout, hparams).metrics

    first, second, of_replay = keys(states, rollout, team.group_hparams())
    used = [first["update"], second["update"], first["shuffle"]]
    level = [jax.random.wrap_key_data(jnp.asarray(x).reshape(2)) for x in used]
    rollouts = as_set(used)
    for _ in range(2):  # into at most three
        level = [key for parent in level for key in jax.random.split(parent, 3)]
        rollouts |= as_set([jax.random.key_data(key) for key in level])
    assert len(rollouts) == 3 + 9 + 27
    drawn = np.asarray(of_replay["bytes"], np.uint32) << shifts
    assert not as_set(drawn.sum(-1, dtype=np.uint32)) & rollouts
