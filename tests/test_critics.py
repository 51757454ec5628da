"""Critic scopes: which sources a critic reads, in which order, and that it reads nothing else."""

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from team_cases import (
    Spy,
    play,
    quick_compilation,  # noqa: F401 (a fixture)
    relative_difference,
    report_experience,
    small_team,
    updater,
)
from team_envs import shift

import marl
from marl import critics, experience, groups, rewards
from marl.envs import spaces
from marl.envs.errors import UsageError
from marl.envs.games import Roster
from marl.envs.interface import AutoReset
from marl.envs.probes import Count, together
from marl.envs.spaces import Box, Discrete

AGENTS = ("red_0", "blue", "red_1")
KINDS = ("P", "Q", "P")


@pytest.mark.parametrize(
    ("critic", "expected"),
    [
        ("self", ("self",)),
        ("all", ("all",)),
        (["self", "state", "self"], ("self", "state")),
        ("red_*", ("red_0", "red_1")),
        (["state", "red_?", "blue"], ("state", "red_0", "red_1", "blue")),
    ],
)
def test_parse(critic, expected):
    assert critics.parse(critic, "critic", AGENTS) == expected


@pytest.mark.parametrize("critic", ["al", "green_*", ["self", "bleu"], []])
def test_parse_names_the_choices(critic):
    with pytest.raises(UsageError) as error:
        critics.parse(critic, "critic", AGENTS)
    for choice in ("self", "all", "state", *AGENTS):
        assert choice in str(error.value)


@pytest.mark.parametrize(
    ("tokens", "own_first", "scopes"),
    [
        (("self",), False, [("self",)] * 3),
        (("self",), True, [("self",)] * 3),
        (("all",), False, [(0, 1, 2)] * 3),
        # own first, then by kind (as first met in declared order), then by position
        (("all",), True, [("self", 2, 1), ("self", 0, 2), ("self", 0, 1)]),
        (("self", "all"), False, [("self", 2, 1), ("self", 0, 2), ("self", 0, 1)]),
        (("blue",), False, [(1,)] * 3),
        (("self", "blue"), False, [("self", 1), ("self",), ("self", 1)]),
        (("red_1", "red_0"), False, [(0, 2)] * 3),  # declared order, not the user's
        (("red_0", "red_1"), True, [("self", 2), ("self", 0, 2), ("self", 0)]),
        (("state",), False, [("state",)] * 3),
        (("state",), True, [("self", "state")] * 3),
        (("state", "all"), False, [(0, 1, 2, "state")] * 3),
        (("self", "state"), False, [("self", "state")] * 3),
    ],
)
def test_resolve(tokens, own_first, scopes):
    found = [critics.resolve(tokens, p, own_first, AGENTS, KINDS) for p in range(3)]
    assert found == scopes


@pytest.mark.parametrize("named", AGENTS)
def test_members_of_one_set_see_scopes_of_one_structure(named):
    """Some of a set are named, others are not: "self" then stands beside the named ones."""
    members = (0, 2)
    kinds = [KINDS[0]] * 3
    found = [critics.resolve(("self", named), p, False, AGENTS, kinds, members) for p in members]
    assert found[0] == found[1] == ("self", AGENTS.index(named))


@dataclass(frozen=True)
class Kinds:
    """Agents P, Q, P see 2, 3 and 2 numbers; every step is an episode."""

    agents = AGENTS

    @property
    def observation_spaces(self):
        return {"red_0": Box((2,)), "blue": Box((3,)), "red_1": Box((2,))}

    @property
    def action_spaces(self):
        return dict.fromkeys(self.agents, Discrete(2))

    def reset(self, key):
        return self._observe(), Count.zero()

    def step(self, key, state, action):
        reward = dict.fromkeys(self.agents, jnp.float32(1))
        return together(self._observe(), reward, True), Count(state.step + 1)

    def action_mask(self, state):
        return None

    def global_state(self, state):
        return jnp.ones((4,))

    def _observe(self):
        return {agent: jnp.ones(space.shape) for agent, space in self.observation_spaces.items()}


KINDS_ENV = AutoReset(Kinds())


def build(group, observations, state):
    """`critics.build` from observations by position, [T, B, ...]."""
    stacked = groups.stack(group, observations)  # [S, N, T, B, ...]
    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), stacked)
    own = critics.identify_folded(group, groups.fold(group, by_time))
    return critics.build(group, own, observations, state)


def test_agents_of_one_kind_see_scopes_of_one_structure():
    """P, Q, P: own first, and the other P before the Q, so that the two P are one group."""
    team = small_team(KINDS_ENV, critic=["self", "all"])
    assert [group.sets for group in team.lifted.groups] == [((0,), (2,)), ((1,),)]
    positions = [jnp.full((2, 1, space.size), p) for p, space in enumerate(_observation_spaces())]
    built = [build(group, positions, ()) for group in team.lifted.groups]
    who = [[np.asarray(x)[0, :, 0, 0].tolist() for x in sources] for sources in built]
    assert who == [[[0, 2], [2, 0], [1, 1]], [[1], [0], [2]]]


@pytest.mark.parametrize("critic", ["all", "blue", "state", ["red_*", "state"]])
def test_what_all_agents_read_has_no_agent_axis(critic):
    """Passed once for all sets of the group, never tiled."""
    team = small_team(KINDS_ENV, critic=critic)
    reds, blue = team.lifted.groups
    assert reds.joint and blue.joint and len(reds.sets) == 2
    T, B = 3, 2
    observations = [jnp.ones((T, B, *space.shape)) for space in _observation_spaces()]
    built = build(reds, observations, jnp.ones((T, B, 4)))
    assert all(x.shape[:2] == (T, B) and x.ndim == 3 for x in built)
    if critic == "all":
        assert [x.shape[2] for x in built] == [2, 3, 2]


def test_the_state_is_passed_to_the_whole_group_once():
    """In the traced update no array carries the joint input once per agent or set."""
    team = small_team(KINDS_ENV, Spy(report_experience), critic="all")
    states, rollout = jax.eval_shape(lambda: play(team, num_envs=5, length=8))
    update = updater(team)
    text = str(jax.make_jaxpr(update)(states, rollout, team.group_hparams()))
    assert "f32[8,5,7]" in text  # [T, B, 2 + 3 + 2]
    assert "f32[2,8,5,7]" in text.replace(" ", "")  # its values, before and after each step
    for tiled in ("f32[8,2,5,7]", "f32[2,2,8,5,7]", "f32[8,10,7]"):
        assert tiled not in text.replace(" ", "")


def _observation_spaces():
    return [KINDS_ENV.observation_spaces[agent] for agent in AGENTS]


def valuer(team):
    """`values(observations, global_state) -> [A, T, B]`, of fresh critics; compiled."""

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def values(observations, global_state):
        state = team.learner.init(jax.random.key(0), team.group_hparams())
        found = {}
        for group, group_state in zip(team.lifted.groups, state, strict=True):
            critic_obs = build(group, observations, global_state)
            axes = (0, None if group.joint else 1)
            value = groups.over_sets(group, group.learner.value, axes, group_state, critic_obs)
            for index, members in enumerate(group.sets):
                for place, position in enumerate(members):
                    own = value[index] if group.joint else value[index][:, place :: len(members)]
                    found[position] = own
        return jnp.stack([found[position] for position in sorted(found)])

    return values


ALL, OWN = np.ones((3, 3), bool), np.eye(3, dtype=bool)


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({"critic": "self"}, OWN),
        ({"critic": "all"}, ALL),
        ({"critic": ["self", "all"]}, ALL),
        ({"critic": "state"}, np.zeros((3, 3), bool)),
        ({"critic": "blue"}, [[0, 1, 0]] * 3),
        (
            {"critic": "self", "overrides": {"red_1": {"critic": ["self", "blue"]}}},
            [[1, 0, 0], [0, 1, 0], [0, 1, 1]],
        ),
        (
            {"critic": "self", "overrides": {"red_1": {"critic": ["red_0"]}}},
            [[1, 0, 0], [0, 1, 0], [1, 0, 0]],
        ),
        (
            {"critic": ["red_1"], "overrides": {"red_1": {"critic": "self"}}},
            [[0, 0, 1], [0, 0, 1], [0, 0, 1]],
        ),
        ({"critic": "self", "sharing": {"reds": ["red_*"]}}, OWN),
        ({"critic": "all", "sharing": {"reds": ["red_*"]}}, ALL),
        ({"critic": "all", "sharing": "group", "reward_teams": "all"}, ALL),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_a_critic_reads_its_scope_and_nothing_else(options, reads):
    """Entry [i, j]: whether the value of agent i changes with the observation of agent j."""
    team = small_team(KINDS_ENV, **options)
    values = valuer(team)
    keys = jax.random.split(jax.random.key(1), 3)
    shape = (2, 3)
    observations = [
        jax.random.normal(key, (*shape, space.size))
        for key, space in zip(keys, _observation_spaces(), strict=True)
    ]
    global_state = jnp.ones((*shape, 4))
    before = values(observations, global_state)
    for j in range(3):
        changed = [x + 1.0 if p == j else x for p, x in enumerate(observations)]
        after = values(changed, global_state)
        moved = np.any(np.asarray(before != after), axis=(1, 2))
        np.testing.assert_array_equal(moved, np.asarray(reads, bool)[:, j])
    reads_state = "state" in str(options["critic"])
    assert bool(np.any(values(observations, global_state + 1) != before)) == reads_state


def test_a_shared_critic_tells_agents_apart_that_are_paid_apart():
    """Own observation and id come first then, so that two agents of a set get two values."""
    apart = small_team(KINDS_ENV, critic="all", sharing="group")
    assert apart.spec.agents[0].scope == ("self", 2, 1)
    together = small_team(KINDS_ENV, critic="all", sharing="group", reward_teams="all")
    assert together.spec.agents[0].scope == (0, 1, 2)
    terminal = small_team(
        KINDS_ENV, critic="all", sharing="group", reward_teams="all", death="terminal"
    )
    assert terminal.spec.agents[0].scope == ("self", 2, 1)  # their returns end apart
    observations = [jnp.ones((1, 1, space.size)) for space in _observation_spaces()]
    value = valuer(apart)(observations, ())
    assert value[0] != value[2]  # the same observations, another id


def test_the_final_state_is_the_one_before_the_reset():
    """The shift's state counts steps, so the state a step led to is always one more."""
    team = small_team(shift(), Spy(report_experience, learns=False), critic="state")
    states, rollout = play(team, num_envs=2, length=8)
    np.testing.assert_array_equal(rollout.global_state[:, 0, 0], [0, 1, 2, 3, 4, 5, 0, 1])
    np.testing.assert_array_equal(rollout.final_global_state, rollout.global_state + 1)
    _, metrics = updater(team)(states, rollout, team.group_hparams())
    given = metrics[0]["experience"]
    np.testing.assert_array_equal(given.critic_obs[0][0], rollout.global_state)
    np.testing.assert_array_equal(given.final_critic_obs[0][0], rollout.final_global_state)


def test_a_critic_of_a_pooled_set_runs_once_and_learns_as_if_tiled():
    team = small_team(
        AutoReset(Roster(("a", "b", "c"), by_action=True)),
        Spy(report_experience),
        critic="all",
        sharing="group",
        reward_teams="all",
        value_normalization="running",
        normalize_observations=True,
        num_epochs=1,
        num_minibatches=1,
    )
    states, rollout = play(team, num_envs=4, length=6)
    update = updater(team)
    hparams = team.group_hparams()
    states, metrics = update(states, rollout, hparams)  # the statistics have moved
    _, metrics = update(states, rollout, hparams)
    (group,) = team.lifted.groups
    state, own, given = (
        jax.tree.map(lambda x: x[0], tree)
        for tree in (states[0], hparams[0], metrics[0]["experience"])
    )
    assert given.reward.shape == (6, 12)
    assert all(x.shape[:2] == (6, 4) for x in given.critic_obs)
    tiled = given._replace(
        critic_obs=jax.tree.map(lambda x: jnp.repeat(x, 3, axis=1), given.critic_obs),
        final_critic_obs=jax.tree.map(lambda x: jnp.repeat(x, 3, axis=1), given.final_critic_obs),
    )
    learn = jax.jit(group.learner.update)
    once, tiled_result = (learn(jax.random.key(0), state, x, own)[0] for x in (given, tiled))
    assert relative_difference(once.actor, tiled_result.actor) <= 1e-5
    assert relative_difference(once.critic, tiled_result.critic) <= 1e-5
    assert relative_difference(once.critic.params, state.critic.params) > 1e-4
    mean, tiled_mean = once.value_statistics.mean, tiled_result.value_statistics.mean
    assert relative_difference(mean, tiled_mean) <= 1e-5


def test_state_space_is_that_of_the_environment():
    assert critics.state_space(KINDS_ENV) == Box((4,))
    assert critics.state_space(marl.make("toy/cooperative")) is None
    team = small_team(KINDS_ENV, critic="state")
    assert team.env.final_extras == ("global_state",)
    asked = dataclasses.replace(KINDS_ENV, final_extras=("action_mask",))
    assert small_team(asked, critic="state").env.final_extras == ("action_mask", "global_state")
    assert spaces.from_signature(team.spec.state) == Box((4,))
    assert small_team(KINDS_ENV, critic="all").env.final_extras == ()


def test_experience_axes_of_joint_scopes_are_none():
    """What `vmap` is told: the critic's input is common, the agents' own data is not."""
    team = small_team(KINDS_ENV, critic="all")
    reds = team.lifted.groups[0]
    assert reds.joint
    _, rollout = jax.eval_shape(lambda: play(team, num_envs=2, length=2))
    rollout = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rollout)
    result = rewards.Outcome(rollout.reward, rollout.terminated, rollout.truncated)
    observations = [jnp.zeros((2, 2, space.size)) for space in _observation_spaces()]
    seen = experience.Seen(observations, observations, (), ())
    _, axes = experience.of_group(reds, rollout, 0, result, seen, jax.random.key(0), {})
    assert axes.critic_obs is None and axes.final_critic_obs is None
    assert axes.obs == axes.reward == axes.weight == 1
