"""`marl.team`: options resolved agent by agent, and errors that say what to do."""

from types import SimpleNamespace

import jax
import pytest
from team_cases import SMALL, Spy, assert_identical, bound, small_team
from team_envs import shift

import marl
from marl.agents import ppo
from marl.agents.learner import CriticSpace
from marl.envs.errors import UsageError
from marl.envs.spaces import Box, Discrete

GAME = marl.make("toy/cooperative")  # row, column
MIXED = marl.make("toy/heterogeneous")  # scout_0, scout_1, pilot, crew


class Criticless:
    """PPO that says it has no critic."""

    Config, Hparams = ppo.Config, ppo.Hparams

    @staticmethod
    def make(*spaces):
        return ppo.make(*spaces)._replace(value=None)


# Each: environment, arguments of marl.team, and what the message says: what was given, what was
# expected, what to do.
BAD = {
    "unknown learner": (GAME, {"learner": "ppoo"}, ["'ppoo'", "did you mean 'ppo'"]),
    "no such module": (GAME, {"learner": "my.learner"}, ["'my.learner'", "no module 'my'"]),
    "not a learner": (GAME, {"learner": 3}, ["learner 3", "Config, Hparams, make", "give a name"]),
    "unknown option": (
        GAME,
        {"learning_rat": 1e-3},
        ["'ppo'", "'learning_rat'", "did you mean 'learning_rate'"],
    ),
    "unknown option of an override": (
        GAME,
        {"overrides": {"row": {"gama": 0.9}}},
        ["'gama'", "'gamma'"],
    ),
    "pattern matches nothing": (
        GAME,
        {"overrides": {"predator_*": {"gamma": 0.9}}},
        ["agents 'predator_*' match nothing", "row, column"],
    ),
    "override is no mapping": (
        GAME,
        {"overrides": {"row": 3}},
        ["overrides.row = 3", "{option: value}"],
    ),
    "above its range": (GAME, {"gamma": 1.5}, ["gamma = 1.5", "out of range", "[0.0, 1.0]"]),
    "below its range": (GAME, {"learning_rate": -1}, ["learning_rate = -1", "[0.0, inf)"]),
    "not a number": (GAME, {"gamma": float("nan")}, ["gamma = nan", "[0.0, 1.0]"]),
    "out of range in an override": (
        GAME,
        {"overrides": {"*": {"initial_std": 0.0}}},
        ["initial_std = 0.0", "1e-06"],
    ),
    "text for a float": (GAME, {"gamma": "high"}, ["gamma = 'high' is a str", "give a number"]),
    "a bool for a float": (GAME, {"gamma": True}, ["gamma = True is a bool", "give a number"]),
    "part of an epoch": (GAME, {"num_epochs": 2.5}, ["num_epochs = 2.5 is a float", "give a int"]),
    "a bool for an integer": (GAME, {"num_epochs": True}, ["num_epochs = True is a bool"]),
    "infinite in 32 bits": (GAME, {"learning_rate": 1e39}, ["learning_rate = 1e+39 is inf in the"]),
    "nothing in 32 bits": (GAME, {"reward_scale": 1e-46}, ["reward_scale of", "= 1e-46 is 0.0 in"]),
    "no epochs": (GAME, {"num_epochs": 0}, ["num_epochs = 0 is out of range", "1 or more"]),
    "a number for a list": (GAME, {"hidden_sizes": 64}, ["hidden_sizes = 64 is a int", "(64, 64)"]),
    "text for a bool": (
        GAME,
        {"normalize_observations": "yes"},
        ["normalize_observations = 'yes' is a str", "give a bool"],
    ),
    "a bool for a choice": (
        GAME,
        {"value_normalization": True},
        ["value_normalization = True is a bool", "give a str", "'none'"],
    ),
    "unknown choice": (GAME, {"activation": "tan"}, ["activation = 'tan'", "did you mean 'tanh'"]),
    "options that need another": (
        GAME,
        {"clip_values": True},
        ["clip_values", "value_normalization = 'running' or 'popart'"],
    ),
    "unknown critic scope": (GAME, {"critic": "al"}, ["'al'", "did you mean 'all'", "row, column"]),
    "unknown critic scope of an agent": (
        GAME,
        {"overrides": {"row": {"critic": ["self", "colum"]}}},
        ["'colum'", "did you mean 'column'"],
    ),
    "empty critic scope": (GAME, {"critic": []}, ["critic is empty", "self, all, state"]),
    "no global state": (
        GAME,
        {"critic": "state"},
        ["critic = 'state'", "has none", "use critic = 'all'"],
    ),
    "no critic": (
        GAME,
        {"learner": Criticless, "critic": "all"},
        ["has no critic", "critic = all does not apply", "ppo"],
    ),
    "unknown sharing": (GAME, {"sharing": "groups"}, ["sharing = 'groups'", "'group'"]),
    "sharing sets overlap": (
        MIXED,
        {"sharing": {"a": ["scout_*"], "b": ["*_0"]}},
        ["scout_0 is in 'a' and in 'b'", "one set at most"],
    ),
    "sharing set of nobody": (
        MIXED,
        {"sharing": {"a": ["spy_*"]}},
        ["sharing.a: agents 'spy_*' match nothing"],
    ),
    "sharing across observations": (
        MIXED,
        {"sharing": {"a": ["scout_0", "crew"]}},
        ["scout_0 and crew", "differ in observation space", "{crew: {sharing: none}}"],
    ),
    "sharing across actions": (
        marl.make("toy/matrix", rows=[[1, 2]], columns=[[1, 2]]),
        {"sharing": {"a": ["*"]}},
        ["row and column", "action space", "Discrete(n=1", "Discrete(n=2"],
    ),
    "sharing across learning rates": (
        GAME,
        {"sharing": {"a": ["*"]}, "overrides": {"row": {"learning_rate": 1e-3}}},
        ["row and column", "learning_rate", "0.001 and 0.00025", "make them equal"],
    ),
    "sharing a group across learning rates": (
        GAME,
        {"sharing": "group", "overrides": {"row": {"gamma": 0.5}}},
        ["row and column", "sharing = group", "gamma", "0.5 and 0.99"],
    ),
    "sharing across configs": (
        GAME,
        {"sharing": {"a": ["*"]}, "overrides": {"row": {"num_epochs": 7}}},
        ["row and column", "differ in num_epochs", "7 and 4"],
    ),
    "sharing across critic scopes": (
        GAME,
        {"sharing": {"a": ["*"]}, "overrides": {"row": {"critic": "all"}}},
        ["row and column", "differ in critic"],
    ),
    "unknown reward teams": (GAME, {"reward_teams": "al"}, ["reward_teams = 'al'", "'all'"]),
    "reward teams overlap": (
        GAME,
        {"reward_teams": {"x": ["*"], "y": ["row"]}},
        ["reward_teams: row is in 'x' and in 'y'"],
    ),
    "reward team of an agent's name": (
        GAME,
        {"reward_teams": {"row": ["*"]}},
        ["reward_teams.row", "name of an agent"],
    ),
    "unknown pooling": (GAME, {"reward_pooling": "max"}, ["reward_pooling = 'max'", "mean, sum"]),
    "unknown death": (GAME, {"death": "end"}, ["death = 'end'", "continue, terminal"]),
    "no environment": (3, {}, ["the environment int lacks reset, step"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    env, arguments, words = BAD[name]
    with pytest.raises(UsageError) as error:
        marl.team(env, **arguments)
    message = str(error.value)
    for word in words:
        assert word in message
    assert len(message) < 700  # a screen


def test_later_overrides_win_option_by_option():
    team = small_team(
        MIXED,
        gamma=0.5,
        overrides={
            "scout_*": {"gamma": 0.6, "learning_rate": 1e-3},
            "scout_1, crew": {"gamma": 0.7},
            "*": {"entropy_coef": 0.0},
        },
    )
    found = dict(zip(team.agents, team.hparams, strict=True))
    assert [found[agent].gamma for agent in team.agents] == [0.6, 0.7, 0.5, 0.7]
    rates = [found[agent].learning_rate for agent in team.agents]
    assert rates == [1e-3, 1e-3, 2.5e-4, 2.5e-4]
    assert all(hparams.entropy_coef == 0 for hparams in team.hparams)


def test_hparams_become_float32_arrays_per_group():
    team = small_team(MIXED, overrides={"scout_1": {"gamma": 1}})
    scouts = team.group_hparams()[0]
    assert scouts.gamma.dtype == "float32" and scouts.gamma.shape == (2,)
    assert not any(x.weak_type for x in jax.tree.leaves(team.group_hparams()))
    assert scouts.gamma.tolist() == pytest.approx([0.99, 1.0])


def test_hparams_do_not_separate_agents_and_config_does():
    assert len(small_team(GAME, overrides={"row": {"gamma": 0.5}}).lifted.groups) == 1
    assert len(small_team(GAME, overrides={"row": {"num_epochs": 3}}).lifted.groups) == 2
    assert len(small_team(GAME, overrides={"row": {"critic": "all"}}).lifted.groups) == 2
    assert len(small_team(GAME, vectorise=False).lifted.groups) == 2


def test_groups_are_agents_of_one_structure():
    team = small_team(MIXED)
    assert [group.sets for group in team.lifted.groups] == [((0,), (1,)), ((2,),), ((3,),)]
    assert team.lifted.reasons[0] == ""
    assert "observation" in team.lifted.reasons[1] and "action" in team.lifted.reasons[1]


def test_sharing_sets():
    assert small_team(MIXED, sharing="group").spec.sharing_sets == ((0, 1), (2,), (3,))
    assert small_team(MIXED, sharing={"x": ["scout_*"]}).spec.sharing_sets == ((0, 1), (2,), (3,))
    assert small_team(MIXED).spec.sharing_sets == ((0,), (1,), (2,), (3,))
    apart = small_team(MIXED, sharing="group", overrides={"scout_1": {"sharing": "none"}})
    assert apart.spec.sharing_sets == ((0,), (1,), (2,), (3,))
    pairs = small_team(
        marl.make("toy/roster", names=["a", "b", "c", "d"]), sharing={"x": ["d", "a"], "y": "b, c"}
    )
    assert pairs.spec.sharing_sets == ((0, 3), (1, 2))
    assert [group.shape for group in pairs.lifted.groups] == [(2, 2)]


def test_agent_ids_are_added_where_parameters_are_shared():
    shapes = {}
    for name, options in {
        "shared": {"sharing": "group"},
        "plain": {"sharing": "group", "agent_ids": False},
        "own": {},
    }.items():
        team = small_team(GAME, **options)
        state = jax.eval_shape(team.learner.init, jax.random.key(0), team.group_hparams())
        shapes[name] = state[0].actor.params["network"]["linear"]["w"].shape
    assert shapes == {"shared": (1, 8, 1 + 2), "plain": (1, 8, 1), "own": (2, 8, 1)}


def test_whole_floats_and_lists_are_accepted():
    team = small_team(GAME, num_epochs=3.0, hidden_sizes=[16, 8.0])
    assert team.spec.agents[0].config == ppo.Config(
        **SMALL | {"num_epochs": 3, "hidden_sizes": (16, 8)}
    )
    assert isinstance(team.spec.agents[0].config.num_epochs, int)


def test_another_learner_starts_from_its_own_defaults():
    """Options of the team's learner are not handed to another that an override names."""
    other = Spy()
    team = small_team(GAME, gamma=0.5, overrides={"row": {"learner": other, "gae_lambda": 0.3}})
    row, column = team.hparams
    assert (row.gamma, row.gae_lambda, column.gamma) == (0.99, 0.3, 0.5)
    assert team.spec.agents[0].config == ppo.Config()
    assert len(team.lifted.groups) == 2


def test_a_ready_learner_is_taken_as_it_is():
    space = Box((1,), 0, 1)
    made = ppo.make(ppo.Config(**SMALL), space, Discrete(2), CriticSpace((space,)))
    learner = bound(made, ppo.Hparams())
    team = marl.team(GAME, learner)
    assert len(team.lifted.groups) == 1
    assert team.lifted.groups[0].learner is learner
    with pytest.raises(UsageError, match="no option 'gamma'"):
        marl.team(GAME, learner, gamma=0.5)


def test_equal_requests_make_equal_specs():
    """Compiled programs are memoised on the spec; hparams are no part of it."""
    one = small_team(GAME, gamma=0.5, critic="all")
    other = small_team(marl.make("toy/cooperative"), gamma=0.9, critic="all")
    assert one.spec == other.spec and hash(one.spec) == hash(other.spec)
    assert one.env == other.env and one != other
    assert one.lifted is other.lifted
    assert small_team(GAME).spec != one.spec


def test_state_of_an_agent():
    team = small_team(MIXED, sharing={"x": ["scout_*"]})
    state = jax.jit(team.learner.init)(jax.random.key(0), team.group_hparams())
    scout, twin = (team.agent_state(state, agent) for agent in ("scout_0", "scout_1"))
    assert scout.actor.params["log_std"].shape == (0,)
    assert_identical(scout, twin)
    assert team.agent_state(state, "pilot").actor.params["log_std"].shape == (2,)


def test_state_of_an_unknown_agent():
    team = small_team(GAME)
    state = jax.eval_shape(team.learner.init, jax.random.key(0), team.group_hparams())
    with pytest.raises(KeyError, match="nobody"):
        team.agent_state(state, "nobody")


def test_a_ready_learner_that_wants_hparams():
    """What `ppo.make` gives takes its hparams from whoever calls it, and here nobody has any."""
    space = Box((1,), 0, 1)
    learner = ppo.make(ppo.Config(**SMALL), space, Discrete(2), CriticSpace((space,)))
    with pytest.raises(UsageError, match="hparams"):
        marl.team(GAME, learner)


def test_an_algorithm_that_does_not_hash():
    algorithm = SimpleNamespace(Config=ppo.Config, Hparams=ppo.Hparams, make=ppo.make)
    with pytest.raises(UsageError, match="hash"):
        marl.team(GAME, algorithm)


def test_describe_says_who_is_together_and_why():
    text = small_team(
        MIXED,
        critic="all",
        sharing={"x": ["scout_*"]},
        reward_teams={"eyes": ["scout_*"]},
        overrides={"pilot": {"learning_rate": 1e-3}},
    ).describe()
    for words in (
        "4 agents in 3 groups",
        "group 0: scout_0, scout_1",
        "shared by 2 agents",
        "not vmapped",
        "differs in observation, action",
        "eyes pools (mean) scout_0, scout_1",
        "learning_rate: scout_0 0.00025, scout_1 0.00025, pilot 0.001, crew 0.00025",
        "MultiDiscrete(3, 2)",
    ):
        assert words in text


def test_describe_compiles_nothing():
    spy = Spy()
    small_team(shift(), spy, critic="all").describe()
    assert spy.calls == {"make": 1}
