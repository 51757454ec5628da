"""Learners on replay in teams: Q-critics' contexts, next actions, mixed teams, and equal results.

What "equal" means is what `test_dispatch` says of learners on rollouts.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    SMOOTH,
    Spy,
    agent_states,
    all_finite,
    assert_identical,
    compiled,
    first_state,
    identical,
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    trained,
)

import marl
from marl import groups, learning, replay
from marl import update as updating
from marl.agents import ddpg, dqn, ppo, sac, td3
from marl.agents.learner import ActInput
from marl.envs.delegation import delegating
from marl.envs.errors import NotFinite, UsageError
from marl.envs.features import Continuing
from marl.envs.interface import AutoReset
from marl.envs.probes import Drawn, together
from marl.envs.spaces import Box, Discrete

TOLERANCE = 1e-5
ONE_STEP = {"learning_starts": 0, "batch_size": 8, "capacity": 200}


class Watched(Spy):
    """An algorithm that learns from replay, watched by a `Spy`."""

    def __init__(self, report=None, learns=True, algorithm=sac):
        super().__init__(report, learns, algorithm)
        self.CRITIC = algorithm.CRITIC


def small(env, learner, **options):
    return marl.team(env, learner, **{"hidden_sizes": (8,), "replay": ONE_STEP} | options)


# A team of two kinds: reds P and a blue Q, whose actions differ too


@dataclass(frozen=True)
class Kinds:
    """Agents P, Q, P see 2, 3 and 2 draws; P act with one number, Q with two; two-step episodes."""

    discrete: bool = False  # Q chooses one of three instead
    agents = ("red_0", "blue", "red_1")

    @property
    def observation_spaces(self):
        return {"red_0": Box((2,)), "blue": Box((3,)), "red_1": Box((2,))}

    @property
    def action_spaces(self):
        red, blue = Box((1,), -1, 1), Discrete(3) if self.discrete else Box((2,), 0, 4)
        return {"red_0": red, "blue": blue, "red_1": red}

    def reset(self, key):
        state = Drawn(jnp.int32(0), jax.random.normal(key, (7,)))
        return self._observe(state), state

    def step(self, key, state, action):
        reached = Drawn(state.step + 1, jax.random.normal(key, (7,)))
        reward = {agent: jnp.mean(action[agent]) - state.draw[0] for agent in self.agents}
        return together(self._observe(reached), reward, reached.step >= 2, cut=True), reached

    def action_mask(self, state):
        return None

    def global_state(self, state):
        return None

    def _observe(self, state):
        red_0, blue, red_1 = jnp.split(state.draw, (2, 5))
        return {"red_0": red_0, "blue": blue, "red_1": red_1}


KINDS = AutoReset(Kinds())
REDS_SHARE = {"sharing": {"reds": ["red_*"]}}


def some(team, num_envs=2, length=3):
    """States and a rollout of random numbers: there is nothing to compile."""
    init = jax.eval_shape(team.learner.init, jax.random.key(0), team.group_hparams())
    _, rollout = jax.eval_shape(lambda: play(team, num_envs, length))
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(draw.uniform(0, 1, x.shape), x.dtype), (init, rollout)
    )


def learned(team, states, rollout):
    """What `replay_step` reports per group, with a rollout for samples."""
    key, hparams = jax.random.key(0), team.group_hparams()
    return learning.replay_step(team.spec, team.lifted.groups, key, states, rollout, hparams)[1]


def report_samples(learner, state, experience, hparams):
    return {"experience": experience._replace(shuffle_key=())}


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


# Vmapped groups, and the same as a loop


def outcome(team, num_envs, length):
    """By agent: initial states, actions of the first rollout, states after 1 and 5 updates."""
    trainer = compiled(team, num_envs, length)
    start = first_state(team, trainer)
    found = {"initial": agent_states(team, jax.tree.map(jnp.copy, start.team))}
    state, _ = trainer.chunk(start, 1)
    rows = state.replay.experience["steps"]
    found["actions"] = {
        agent: groups.unstack(group, jnp.moveaxis(steps.action, (2, 3), (0, 1)))[position]
        for group, steps in zip(team.lifted.groups, rows, strict=True)
        for position, agent in enumerate(team.agents)
        if position in group.positions
    }
    found["after 1"] = agent_states(team, jax.tree.map(jnp.copy, state.team))
    state, metrics = trainer.chunk(state, 4)
    found["after 5"] = agent_states(team, jax.tree.map(jnp.copy, state.team))
    assert all_finite(jax.tree.map(lambda x: x[:4], metrics.learner))
    return found


def assert_equal(one, other, agents=None):
    """As the design defines it."""
    for agent in one["initial"] if agents is None else agents:
        assert_identical(one["initial"][agent], other["initial"][agent])
        assert_identical(one["actions"][agent], other["actions"][agent])
        assert len(np.unique(one["actions"][agent])) > 1
        for when in ("after 1", "after 5"):
            assert relative_difference(one[when][agent], other[when][agent]) <= TOLERANCE, when
            assert not identical(one[when][agent], one["initial"][agent])


@pytest.mark.slow
def test_vmapped_centralised_critics_equal_the_same_team_as_a_loop():
    """MASAC of three alike agents: contexts of vmapped agents have an axis of agents."""
    env = marl.make("toy/probe_continuous", num_agents=3)
    sizes = ONE_STEP | {"updates_per_rollout": 2, "batch_size": 32}
    vmapped, looped = (
        small(env, sac, critic="all", vectorise=vectorise, replay=sizes, **SMOOTH)
        for vectorise in (True, False)
    )
    assert [len(team.lifted.groups) for team in (vmapped, looped)] == [1, 3]
    assert_equal(outcome(vmapped, 4, 8), outcome(looped, 4, 8))


@pytest.mark.slow
def test_vmapped_dqn_equals_the_same_team_as_a_loop():
    """DQN as it comes, but for Adam's epsilon."""
    tag = marl.make("jaxmarl/MPE_simple_tag_v3")
    sizes = {"learning_starts": 0, "batch_size": 64, "capacity": 1000}
    vmapped, looped = (
        marl.team(tag, dqn, vectorise=vectorise, replay=sizes, **SMOOTH)
        for vectorise in (True, False)
    )
    assert [len(team.lifted.groups) for team in (vmapped, looped)] == [2, 4]
    assert_equal(outcome(vmapped, 4, 32), outcome(looped, 4, 32))


# Mixed teams

PAIR = marl.make("toy/probe_both", num_agents=2)  # the agents do not interact
PPO = {"learner": ppo, "hidden_sizes": (8,), "num_epochs": 2, "num_minibatches": 2} | SMOOTH
DQN = {"learner": dqn, "hidden_sizes": (8,)} | SMOOTH


@pytest.fixture(scope="module")
def pairs():
    """What became of PPO and DQN side by side, and of each with its like."""

    def of(*options):
        overrides = dict(zip(PAIR.agents, options, strict=True))
        sizes = ONE_STEP | {"updates_per_rollout": 2}
        team = marl.team(PAIR, ppo, overrides=overrides, replay=sizes, vectorise=False)
        return outcome_of_pair(team)

    return of(PPO, DQN), of(PPO, PPO), of(DQN, DQN)


def outcome_of_pair(team):
    trainer = compiled(team, 4, 4)
    state, _ = trainer.chunk(first_state(team, trainer), 1)
    one = agent_states(team, jax.tree.map(jnp.copy, state.team))
    state, _ = trainer.chunk(state, 4)
    return one, agent_states(team, jax.tree.map(jnp.copy, state.team))


def test_agents_learn_beside_others_as_they_do_among_their_like(pairs):
    """Every learner takes its slice of one rollout, or of one sample, whoever else is there."""
    mixed, of_ppo, of_dqn = pairs
    for when in range(2):  # after 1 and after 5 updates
        for agent, alike in zip(PAIR.agents, (of_ppo, of_dqn), strict=True):
            assert relative_difference(mixed[when][agent], alike[when][agent]) <= TOLERANCE
    assert not identical(mixed[0]["agent_0"], mixed[1]["agent_0"])
    assert mixed[0]["agent_1"].steps == 2 and mixed[1]["agent_1"].steps == 10


@pytest.mark.slow
def test_learners_of_every_kind_learn_in_one_environment():
    """DQN on bytes, PPO on a dict of actions, SAC on integers with a critic that reads them all."""
    env = marl.make("toy/heterogeneous")
    tiny = {"hidden_sizes": (4,)}
    overrides = {
        "scout_*": {"learner": dqn, "image_encoder": "flatten"} | tiny,
        "pilot": {"learner": ppo, "num_minibatches": 1, "num_epochs": 1} | tiny,
        "crew": {"learner": sac, "critic": ["self", "scout_*", "pilot"]} | tiny,
    }
    overrides["crew"]["image_encoder"] = "flatten"
    team = marl.team(env, ppo, overrides=overrides, replay=ONE_STEP | {"learning_starts": 24})
    crew = team.lifted.groups[-1]
    assert crew.contexts == ((0, 1, 2),)
    trainer = compiled(team, 4, 4)
    start = first_state(team, trainer)
    before = agent_states(team, jax.tree.map(jnp.copy, start.team))
    state, metrics = trainer.chunk(start, 1)
    after = agent_states(team, jax.tree.map(jnp.copy, state.team))
    # PPO does not wait for the others
    moved = {agent: not identical(before[agent], after[agent]) for agent in team.agents}
    assert moved == {"scout_0": False, "scout_1": False, "pilot": True, "crew": False}
    state, metrics = trainer.chunk(state, 3)
    metrics = jax.tree.map(lambda x: x[:3], metrics)
    for agent, own in agent_states(team, state.team).items():
        assert not identical(own, before[agent])
    assert all_finite((state.team, metrics.learner)) and all(map(np.all, metrics.finite))


# What is not finite


@delegating(stateful=False)
@dataclass(frozen=True)
class Poisoned:
    """`agent_1` sees a NaN at step `at` of each environment; the state counts all steps."""

    at: int
    env: Any = Continuing(limit=1000)

    def reset(self, key):
        obs, state = self.env.reset(key)
        return self._poison(obs, state), state

    def step(self, key, state, action):
        timestep, state = self.env.step(key, state, action)
        obs = self._poison(timestep.obs, state)
        return timestep._replace(obs=obs, final_obs=obs), state

    def _poison(self, obs, state):
        bad = jnp.where(state.step == self.at, jnp.nan, obs["agent_1"])
        return {**obs, "agent_1": bad}


@pytest.mark.parametrize(
    ("learner", "critic", "learning_starts"),
    [
        (dqn, "self", 0),
        (sac, "all", 10**6),  # it is not read yet
        pytest.param(sac, "all", 0, marks=pytest.mark.slow),
    ],
)
def test_stop_names_agent_quantity_and_step(learner, critic, learning_starts, tmp_path):
    env = AutoReset(Poisoned(at=37))
    sizes = ONE_STEP | {"learning_starts": learning_starts}
    team = small(env, learner, critic=critic, replay=sizes)
    numbers = dict(num_envs=2, rollout_length=8, log_interval=2, eval_episodes=2, progress=False)
    out = tmp_path / "run"
    with pytest.raises(NotFinite, match="observation of agent_1 is not finite at step 37 "):
        marl.train(env, team, 2 * 8 * 8, out=out, checkpoint_interval=1, **numbers)
    failure = json.loads((out / "failure.json").read_text())
    assert failure["agents"] == ["agent_1"] and failure["step"] == 37
    restored = marl.load(out, env=env, team=team)
    assert restored.env_steps == 2 * 8 * 4 and all_finite(restored.weights().team)


# Refusals


@pytest.mark.parametrize(
    ("env", "learner", "options", "words"),
    [
        (PAIR, dqn, {"critic": "all"}, ("'dqn'", "agent_0", "no critic", "critic = all", "sac")),
        (PAIR, dqn, {"critic": "state"}, ("critic = 'state'", "global state")),
        (KINDS, dqn, {}, ("'dqn'", "Discrete", "sac")),
        (PAIR, td3, {}, ("td3", "Box", "Discrete", "sac")),
        (PAIR, ddpg, {}, ("ddpg", "Box", "Discrete", "sac")),
        (KINDS, sac, {"critic": "green"}, ("critic = 'green'", "red_0", "blue")),
    ],
)
def test_what_does_not_fit_a_learner_is_refused_at_build_time(env, learner, options, words):
    with pytest.raises(UsageError) as error:
        marl.team(env, learner, **options)
    for word in words:
        assert word in str(error.value)
