"""Configurations: layers, shorthands, the order of overrides, and every kind of bad input."""

import textwrap

import numpy as np
import pytest

from marl import config, options
from marl.envs.errors import UsageError


@pytest.fixture
def write(tmp_path):
    """Writes a YAML file; returns its path."""

    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def load(*settings, source="ippo"):
    return config.load(source, settings)


def message(*settings, source="ippo"):
    with pytest.raises(UsageError) as error:
        config.load(source, settings)
    assert len(str(error.value)) < 1500, "a message fits on one screen"
    return str(error.value)


@pytest.mark.parametrize("name", sorted(config.presets()))
def test_presets_load_and_say_what_they_are(name):
    loaded = config.load(name)
    assert "/" in loaded.env.id
    assert len(config.presets()[name]) > 20
    update = loaded.training.num_envs * loaded.training.rollout_length
    assert loaded.training.total_steps % update == 0


@pytest.mark.parametrize("name", sorted(config.presets()))
def test_yaml_round_trips(name, write):
    loaded = config.load(name, ['team.overrides."agent_0,agent_1".gamma=0.9', "training.seed=3"])
    assert config.load(write(config.to_yaml(loaded))) == loaded
    assert config.from_dict(config.to_dict(loaded)) == loaded


def test_values_that_yaml_reads_otherwise_round_trip(write):
    kwargs = {
        "a": "off",
        "b": "1e6",
        "c": float("inf"),
        "d": "null",
        "e": [1e-20, True, None],
        "f": "",
    }
    loaded = config.from_dict({"env": {"id": "toy/x", "kwargs": kwargs}})
    assert config.load(write(config.to_yaml(loaded))).env.kwargs == kwargs


def test_numbers_of_other_libraries_are_written_as_plain_ones():
    values = {"team": {"learner": {"name": "ppo", "gamma": np.float64(0.5), "hidden_sizes": (8,)}}}
    assert "gamma: 0.5" in config.to_yaml(values) and "- 8" in config.to_yaml(values)
    with pytest.raises(UsageError, match="cannot be written as YAML"):
        config.to_yaml({"env": {"kwargs": {"f": print}}})


def test_a_learner_that_is_a_module_has_its_own_options(monkeypatch, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "learner.py").write_text("from marl.agents.ppo import Config, Hparams\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own" / "whole.py").write_text(
        "from marl.agents.ppo import Config, Hparams, make\n"
    )
    assert load("team.learner=own.whole", "team.learner.gamma=0").team.learner["gamma"] == 0
    assert "team.learner.gama" in message("team.learner=own.whole", "team.learner.gama=0")
    assert "a module without make" in message("team.learner=own.learner")
    assert "no module 'nowhere'" in message("team.learner=nowhere.learner")


def test_later_layers_win(write):
    path = write("preset: mappo\ntraining: {seed: 1, num_envs: 32}\n")
    loaded = load("training.seed=2", source=path)
    assert (loaded.team.critic, loaded.training.num_envs, loaded.training.seed) == ("all", 32, 2)


def test_a_base_is_found_beside_the_file_that_names_it(write, tmp_path):
    (tmp_path / "deeper").mkdir()
    write("preset: ippo\ntraining: {seed: 5}\n", "deeper/base.yaml")
    assert load(source=write("preset: deeper/base.yaml\n")).training.seed == 5


def test_settings_have_the_types_of_their_fields():
    loaded = load(
        "training.total_steps=2e6",
        "team.learner.num_minibatches=8.0",
        "team.learner.learning_rate=1",
        "team.learner.max_grad_norm=inf",
        "team.vectorise=false",
    )
    assert loaded.training.total_steps == 2_000_000
    assert isinstance(loaded.training.total_steps, int)
    learner = loaded.team.learner
    assert learner["num_minibatches"] == 8 and isinstance(learner["num_minibatches"], int)
    assert learner["max_grad_norm"] == float("inf")
    assert loaded.team.vectorise is False


def test_interpolations_are_resolved():
    loaded = load("training.seed=${training.num_envs}", "training.num_envs=8")
    assert loaded.training.seed == 8


def test_another_environment_starts_without_the_arguments_of_the_old_one(write):
    path = write("env: {id: toy/a, kwargs: {size: 3}}\n")
    assert load("env.kwargs.depth=1", source=path).env.kwargs == {"size": 3, "depth": 1}
    loaded = load("env=toy/b", "env.kwargs.depth=1", source=path)
    assert (loaded.env.id, loaded.env.kwargs) == ("toy/b", {"depth": 1})
    assert load("env=toy/a", source=path).env.kwargs == {"size": 3}


def test_another_learner_starts_from_its_own_defaults():
    base = {"team": {"learner": {"name": "ppo", "clip_epsilon": 0.1}}}
    merged = options.merge(base, {"team": {"learner": {"name": "other", "gamma": 0.9}}})
    assert merged["team"]["learner"] == {"name": "other", "gamma": 0.9}
    merged = options.merge(base, {"team": {"learner": {"name": "ppo", "gamma": 0.9}}})
    assert merged["team"]["learner"] == {"name": "ppo", "clip_epsilon": 0.1, "gamma": 0.9}


def test_sizes_of_a_replay_buffer_go_with_the_learner():
    sizes = load(source="iql").team.replay
    assert sizes["learning_starts"] == 2000
    assert load("team.learner=dqn", "team.replay.n_step=3", source="iql").team.replay == (
        sizes | {"n_step": 3}
    )
    assert load("team.learner=pqn", source="iql").team.replay == {}
    settings = ["team.learner=sac", "team.replay.n_step=3"]
    assert load(*settings, source="iql").team.replay == {"n_step": 3}
    assert load(source="matd3").team.replay == load(source="iddpg").team.replay


def test_a_partition_is_replaced_as_a_whole(write):
    path = write("preset: ippo\nteam: {sharing: {left: [agent_0], right: [agent_1]}}\n")
    assert load("team.sharing.all=[agent_*]", source=path).team.sharing == {"all": ["agent_*"]}
    assert load("team.sharing=group", source=path).team.sharing == "group"
    both = load("team.sharing.a=[agent_0]", "team.sharing.b=[agent_1]").team.sharing
    assert both == {"a": ["agent_0"], "b": ["agent_1"]}


def test_override_keys_take_globs_and_quoted_lists():
    loaded = load(
        "team.overrides.adversary_*.learning_rate=1e-4",
        'team.overrides."agent_0,agent_1".gamma=0.9',
        "team.overrides.agent_?.critic=[agent_*, self]",
    )
    assert list(loaded.team.overrides.items()) == [
        ("adversary_*", {"learning_rate": 1e-4}),
        ("agent_0,agent_1", {"gamma": 0.9}),
        ("agent_?", {"critic": ["agent_*", "self"]}),
    ]


def effective(overrides, agent):
    """What an agent ends up with, by the rule: every match in order, the later wins."""
    from marl.patterns import matching

    result = {}
    for glob, changes in overrides.items():
        if matching(glob, [agent]):
            result |= changes
    return result


def test_the_command_line_wins_over_later_globs_of_the_file(write):
    path = write(
        """
        preset: ippo
        team:
          overrides:
            "*": {learning_rate: 1e-3, gamma: 0.9}
            agent_0: {learning_rate: 2e-3, gamma: 0.8}
        """
    )
    loaded = load("team.overrides.*.learning_rate=3e-3", source=path)
    assert effective(loaded.team.overrides, "agent_0") == {"learning_rate": 3e-3, "gamma": 0.8}
    assert effective(loaded.team.overrides, "agent_1") == {"learning_rate": 3e-3, "gamma": 0.9}
    again = config.from_dict(config.to_dict(loaded))
    assert list(again.team.overrides) == list(loaded.team.overrides)


def test_the_last_setting_on_the_command_line_wins():
    settings = ["agent_0.gamma=0.1", "*.gamma=0.2", "agent_0.gamma=0.3", "*.gamma=0.4"]
    loaded = load(*(f"team.overrides.{setting}" for setting in settings))
    assert effective(loaded.team.overrides, "agent_0") == {"gamma": 0.4}
    loaded = load(*(f"team.overrides.{setting}" for setting in settings[:3]))
    assert effective(loaded.team.overrides, "agent_0") == {"gamma": 0.3}


UNKNOWN = [
    ("training.num_envz=3", "did you mean 'training.num_envs'"),
    ("trainig.num_envs=3", "did you mean 'training'"),
    ("total_steps=1e6", "did you mean 'training.total_steps'"),
    ("learning_rate=1e-3", "did you mean 'team.learner.learning_rate'"),
    ("team.learner.clip_epss=0.3", "did you mean 'team.learner.clip_epsilon'"),
    ("team.learner.buffer_size=100", "team.learner takes name, num_epochs"),
    ("team.overrides.agent_*.clip_epss=0.3", "'team.overrides.agent_*.clip_epsilon'"),
    ("team.overrides.agent_*.name=ppo", "unknown key 'team.overrides.agent_*.name'"),
    ("team.learner=pppo", "did you mean 'ppo'"),
    ("team.overrides.agent_*.learner=pppo", "did you mean 'ppo'"),
    ("on=1", "unknown key 'on'"),
]


@pytest.mark.parametrize(("setting", "expected"), UNKNOWN)
def test_unknown_names_are_refused_with_the_nearest(setting, expected):
    text = message(setting)
    assert expected in text


WRONG = [
    ("training.num_envs=2.5", "training.num_envs=2.5: expected a whole number"),
    ("training.num_envs=many", "training.num_envs=many: expected a whole number, got str"),
    ("training.num_envs=true", "training.num_envs=true: expected a whole number"),
    ("training.num_envs=null", "got nothing (null)"),
    ("training.num_envs=.inf", "num_envs=inf: expected a whole number, and inf is none"),
    ("training.total_steps=inf", "total_steps=inf: expected a whole number, and inf is none"),
    ("training.total_steps=NaN", "total_steps=nan: expected a whole number, and nan is none"),
    ("team.learner.learning_rate=nan", "rate=nan: expected a number, and nan is none"),
    ("team.learner.learning_rate=.nan", "rate=nan: expected a number, and nan is none"),
    ("team.learner.learning_rate=+-inf", "learning_rate=+-inf: expected a number, got str"),
    ("training.total_steps=--nan", "total_steps=--nan: expected a whole number, got str"),
    ("team.learner.learning_rate=-nan", "rate=nan: expected a number, and nan is none"),
    (f"training.total_steps=1{'0' * 400}", "total_steps has 401 digits: give a number up to 1e3"),
    (f"team.learner.learning_rate=-1{'0' * 400}", "learning_rate has 401 digits: give a number"),
    ("team.learner.gamma=high", "team.learner.gamma=high: expected a number"),
    ("team.learner.gamma=[1]", "expected a number, got list"),
    ("team.learner.hidden_sizes=64", "expected a list such as [64, 64]"),
    ("team.learner.normalize_observations=2", "expected true or false"),
    ("team.learner.torso=off", "quote it: 'off'"),
    ("team.reward_pooling=no", "quote it: 'off'"),
    ("team.sharing=yes", "quote it: 'on'"),
    ("team.critic=3", "expected a word or a list of agents"),
    ("team.sharing.a=3", "team.sharing.a=3: expected a word or a list of agents"),
    ("team.overrides.agent_0=3", "such as team.overrides.agent_0.learning_rate=1e-4"),
    ("team.overrides=3", "team.overrides=3: expected a mapping"),
    ("training=3", "'training' is a section"),
    ("training.seed.x=3", "training.seed={'x': 3}: expected a whole number"),
]


@pytest.mark.parametrize(("setting", "expected"), WRONG)
def test_values_of_the_wrong_type_are_refused(setting, expected):
    assert expected in message(setting)


RANGES = [
    ("training.num_envs=0", "training.num_envs=0: expected at least 1"),
    ("training.seed=-1", "training.seed=-1: expected at least 0"),
    ("training.seed=1e12", "expected at most"),
    ("evaluation.episodes=0", "evaluation.episodes=0: expected at least 1"),
    ("checkpoint.keep=0", "checkpoint.keep=0: expected at least 1"),
    ("training.log_interval=0", "expected at least 1"),
    ("training.total_steps=1999", "16 * 125 = 2000 steps; give more steps, or fewer"),
]


@pytest.mark.parametrize(("setting", "expected"), RANGES)
def test_values_out_of_range_are_refused(setting, expected):
    assert expected in message(setting)


def test_a_total_of_one_update_is_enough():
    assert load("training.total_steps=2000").training.total_steps == 2000


MALFORMED = [
    ("training.seed", "not of the form key=value"),
    ("=3", "not of the form key=value"),
    ("training..seed=3", "not of the form key=value"),
    ("training.seed=", "'training.seed' has no value"),
    ("team.critic=[self", "team.critic=[self: not valid YAML"),
    ("team.critic=*", "not valid YAML, or quote it"),
    ("training.seed=${nothing}", "cannot be resolved"),
    ("training.seed=!!python/object/apply:os.getpid []", "not valid YAML"),
]


@pytest.mark.parametrize(("setting", "expected"), MALFORMED)
def test_malformed_settings_are_refused(setting, expected):
    assert expected in message(setting)


def test_unknown_presets_are_refused_with_the_nearest(tmp_path):
    assert "unknown preset 'mapo'; did you mean 'mappo'" in message(source="mapo")
    assert "cannot read" in message(source=tmp_path / "missing.yaml")
    assert "is a folder" in message(source=tmp_path)


BAD_FILES = [
    ("training:\n  seed: 1\n num_envs: 2\n", "mine.yaml, line 3: not valid YAML"),
    ("training:\n  seed: 1\n  seed: 2\n", "mine.yaml, line 3: not valid YAML: found duplicate key"),
    ("- ippo\n", "expected keys and values"),
    ("preset: mapo\n", "unknown preset 'mapo'; did you mean 'mappo'"),
    ("preset: [ippo]\n", "'preset' names one preset"),
    ("preset: ippo\ntraining: {num_envz: 2}\n", "mine.yaml: unknown key 'training.num_envz'"),
    ("preset: ippo\nteam: {overrides: {agent_0: }}\n", "team.overrides.agent_0 needs options"),
    ("preset: ippo\nteam: {overrides: {on: {gamma: 1}}}\n", "quote this one"),
    ("training: {seed: 1}\n", "no environment is given"),
    ("", "no environment is given"),
]


@pytest.mark.parametrize(("text", "expected"), BAD_FILES)
def test_bad_files_are_refused(text, expected, write):
    assert expected in message(source=write(text))


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in message(source=path)


def test_presets_that_name_each_other_are_refused(write):
    write("preset: b.yaml\n", "a.yaml")
    path = write("preset: a.yaml\n", "b.yaml")
    assert "circle" in message(source=path)
    path = write("preset: c.yaml\n", "c.yaml")
    assert "circle" in message(source=path)


def test_loading_does_not_change_its_layers():
    base = {"team": {"overrides": {"a": {"gamma": 1.0}}, "sharing": {"x": ["a"]}}}
    options.merge(base, {"team": {"overrides": {"a": {"gamma": 0.5}}, "sharing": "none"}})
    assert base == {"team": {"overrides": {"a": {"gamma": 1.0}}, "sharing": {"x": ["a"]}}}
