"""Options that would do nothing are refused; what comes with its switch, even off, is not."""

import dataclasses

import pytest
from frozen_cases import source
from team_cases import assert_identical

import marl
from marl import binding, config, experiment, unused
from marl.agents import registry
from marl.binding import resolve_algorithm
from marl.envs.errors import UsageError

GAME_ID = "toy/cooperative"
GAME = marl.make(GAME_ID)  # row, column
MIXED = marl.make("toy/heterogeneous")
ALONE = marl.make("toy/probe_memory")


def refused(env=GAME, learner="ppo", **options):
    with pytest.raises(UsageError) as error:
        marl.team(env, learner, **options)
    return str(error.value)


@pytest.mark.parametrize("option", unused.NEEDED)
def test_what_an_option_needs_is_off_by_default_in_every_learner(option):
    needed, _ = unused.NEEDED[option]
    found = []
    for name in registry.ALGORITHMS:
        algorithm = resolve_algorithm(name)
        defaults = {field.name: field.default for field in dataclasses.fields(algorithm.Config)}
        if option in {*algorithm.Hparams._fields, *defaults}:
            found.append(defaults[needed])
    assert found and set(found) <= {"none", "squared", False, "constant"}


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("core_size", 32, "core_size = 32 does nothing without core; give core = 'gru' or 'lstm'"),
        ("sequence_length", 4, "sequence_length = 4 does nothing without core"),
        ("burn_in", 0, "burn_in = 0 does nothing without core"),
        ("huber_delta", 2.0, "without value_loss; give value_loss = 'huber' too, or leave huber_"),
        ("value_clip_epsilon", 0.1, "without clip_values; give clip_values = True too, or leave"),
        ("learning_rate_end", 0.0, "give learning_rate_schedule = 'linear' too"),
        ("entropy_coef_end", 0.0, "give entropy_schedule = 'linear' too"),
    ],
)
def test_an_option_without_its_switch_is_refused(option, value, words):
    assert words in refused(**{option: value})
    message = refused(overrides={"row": {option: value}})
    assert (
        message.startswith(f"overrides.row: {option} = {value} does nothing") and words in message
    )


def test_an_option_with_its_switch_is_not_refused_where_one_agent_uses_it():
    marl.team(GAME, "ppo", core_size=8, overrides={"row": {"core": "gru"}})
    marl.team(GAME, "ppo", core="gru", overrides={"row": {"core_size": 8}})
    sizes = {"core_size": 8, "sequence_length": 4}
    marl.team(GAME, "ppo", core="gru", **sizes, overrides={"row": {"core": "none"}})
    message = refused(overrides={"row": {"core": "gru"}, "column": {"core_size": 8}})
    assert message.startswith("overrides.column: core_size = 8")
    message = refused(core="gru", overrides={"row": {"learner": "dqn", "core_size": 8}})
    assert message.startswith("overrides.row: core_size = 8"), "another learner, another core"
    # nor where whoever had it got another learner
    marl.team(GAME, "ppo", core="gru", core_size=8, overrides={"*": {"learner": "dqn"}})


def test_a_size_that_a_preset_gives_may_be_switched_off():
    changed = config.load("mappo_switch_riddle", ["team.learner.core=none"])
    assert changed.team.learner["core_size"] == 32
    experiment.build(changed)


class Own:
    """A learner of somebody's own, in which a core's size means something else."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        core_size: int = 3

    Hparams = resolve_algorithm("random").Hparams
    CRITIC = None

    def make(config, observation_space, action_space, critic_space):  # noqa: N805
        return resolve_algorithm("random").make(None, observation_space, action_space, None)


def test_learners_of_ones_own_are_left_alone():
    marl.team(GAME, Own, core_size=4)


def test_the_reward_of_who_does_not_learn_is_not_scaled():
    message = refused(learner="random", reward_scale=2.0)
    assert message.startswith("reward_scale = 2 is of what an agent learns from, and row, column")
    overrides = {"row": {"learner": "noop", "reward_scale": 0.5}}
    assert refused(overrides=overrides).startswith("overrides.row: reward_scale = 0.5")
    marl.team(GAME, "ppo", reward_scale=2.0, overrides={"row": {"learner": "random"}})
    marl.team(GAME, "random", reward_scale=1.0)
    learning = {name for name in binding.ALGORITHMS if unused._learns(resolve_algorithm(name))}
    assert set(binding.ALGORITHMS) - learning == {"random", "noop", "frozen"}


def test_pooling_needs_reward_teams():
    for teams in ("none", {"us": ["row"]}):
        message = refused(reward_pooling="sum", reward_teams=teams)
        assert "reward_pooling = 'sum'" in message and "leave reward_pooling at 'mean'" in message
    marl.team(GAME, "ppo", reward_pooling="sum", reward_teams="all")
    marl.team(ALONE, "ppo", reward_pooling="sum", reward_teams="all")


def test_agent_ids_need_somebody_who_shares():
    assert "agent_ids = False leaves out the one-hot" in refused(agent_ids=False)
    marl.team(GAME, "ppo", agent_ids=False, sharing="group")
    for sharing in ("group", {"us": ["agent_*"]}):  # what the environment has to share
        marl.team(ALONE, "ppo", agent_ids=False, sharing=sharing)
    for critics in ("reward_team", {"ours": ["row", "column"]}):
        sharing = {"actor": "none", "critic": critics}
        marl.team(GAME, "ppo", agent_ids=False, sharing=sharing, reward_teams="all", critic="all")


RECORDED = {
    "hidden_sizes": (4,),
    "core_size": 8,
    "reward_pooling": "sum",
    "agent_ids": False,
    "replay": {"capacity": 64},
    "overrides": {"column": {"learner": "random", "reward_scale": 2.0}},
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run from before such options were refused. Tests only read it."""
    with pytest.MonkeyPatch.context() as before:
        before.setattr(unused, "check", lambda *arguments: None)
        return source(tmp_path_factory.mktemp("runs") / "run", marl.team(GAME, "ppo", **RECORDED))


def test_a_new_run_of_what_was_recorded_is_refused(recorded):
    for left_away in ({}, {"replay": None}, {"replay": None, "core_size": 64, "core": "none"}):
        refused(**(RECORDED | left_away))
    with pytest.raises(UsageError, match="sizes of a replay buffer"):
        experiment.describe(config.load(recorded.path / "config.yaml"))


def test_a_run_that_was_recorded_is_loaded_and_goes_on(recorded, monkeypatch):
    for loaded in (marl.load(recorded.path), experiment.load(recorded.path, [f"env={GAME_ID}"])):
        assert loaded.team == recorded.team
        assert_identical(loaded.state.team, recorded.state.team)
    monkeypatch.setattr(marl, "train", lambda env, team, **options: team)
    assert experiment.resume(recorded.path, ["training.total_steps=1e4"]) == recorded.team


def test_a_policy_of_a_run_that_was_recorded_can_be_frozen(recorded):
    marl.team(GAME, "ppo", overrides={"row": {"learner": "frozen", "run": str(recorded.path)}})


@pytest.mark.parametrize("partition", ["reward_teams", "sharing"])
def test_a_set_of_nobody_is_refused(partition):
    message = refused(MIXED, **{partition: {"nobody": []}})
    assert message.startswith(f"{partition}.nobody = [] names no agents; give some of scout_0")
