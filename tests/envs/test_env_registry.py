"""Environments by id, and what is said when there is none."""

import subprocess
import sys

import pytest

from marl.envs import registry
from marl.envs.errors import UsageError
from marl.envs.interface import AutoReset, Environment
from marl.envs.naming import SingleAgent
from marl.envs.probes import Probe
from marl.envs.suites.jaxmarl_table import TABLE, UNAVAILABLE


@pytest.mark.parametrize(
    "id, kwargs, message",
    [
        ("climbing", {}, "names no suite.*jaxmarl, toy"),
        ("toys/climbing", {}, "no suite 'toys'.*did you mean 'toy'"),
        ("toy/climb", {}, "no environment toy/climb: did you mean 'climbing'"),
        ("toy/penalty", {"kk": 1}, "toy/penalty has no argument 'kk': .*choose from k"),
        ("toy/matrix", {}, "its arguments are rows, columns"),
        ("toy/death", {"death": 9}, "death = 9, length = 5"),
        ("jaxmarl/MPE_simple", {}, "did you mean 'MPE_simple_v3'"),
        ("jaxmarl/LearnedPolicyEnemySMAX", {}, "needs a trained enemy policy"),
        ("jaxmarl/JaxRobotarium_rware", {}, "not on PyPI"),
        ("jaxmarl/MPE_simple_v3", {"time_limit": "cut"}, "truncate, terminate"),
    ],
)
def test_mistakes_are_named(id, kwargs, message):
    with pytest.raises(UsageError, match=message):
        registry.make(id, **kwargs)


def test_equal_arguments_make_equal_environments():
    one, other = (registry.make("toy/penalty", k=-30) for _ in range(2))
    assert one == other and hash(one) == hash(other) and one != registry.make("toy/penalty")
    assert isinstance(one, AutoReset) and isinstance(one, Environment)


def test_listings_name_everything_and_build_nothing():
    entries = {entry.id: entry for entry in registry.listing("jaxmarl")}
    assert len(entries) == len(TABLE) + len(UNAVAILABLE) == 38
    assert entries["jaxmarl/MPE_simple_tag_v3"].note == "3 adversaries, 1 agent"
    assert "not on PyPI" in entries["jaxmarl/JaxRobotarium_rware"].unavailable
    assert all(entry.note or entry.unavailable for entry in entries.values())
    toys = registry.listing("toy")
    assert all(entry.note and not entry.unavailable for entry in toys)


FACTORIES = """
import marl.envs.probes
from marl.envs.interface import AutoReset

not_callable = 3

def make_env(num_agents=1):
    return AutoReset(marl.envs.probes.Probe("action", num_agents=num_agents))

def make_single():
    class Single:
        observation_space = action_space = None
        reset = step = staticmethod(lambda *args: None)
    return Single()

def make_unhashable():
    env = make_single()
    type(env).__hash__ = None
    return env

def make_half():
    class Half:
        agents = ("a",)
        reset = staticmethod(lambda key: None)
    return Half()
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "factories_under_test.py").write_text(FACTORIES)
    (tmp_path / "broken_under_test.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    yield "factories_under_test"
    sys.modules.pop("factories_under_test", None)


def test_anybodys_factory_is_called(factories):
    env = registry.make(f"{factories}:make_env", num_agents=3)
    assert env == AutoReset(Probe("action", num_agents=3))
    assert isinstance(registry.make(f"{factories}:make_single"), SingleAgent)


@pytest.mark.parametrize(
    "id, kwargs, message",
    [
        ("no_such_module:make_env", {}, "no module 'no_such_module'"),
        ("factories_under_test:make_envs", {}, "no 'make_envs': did you mean 'make_env'"),
        ("factories_under_test:not_callable", {}, "is a int; expected a function"),
        ("factories_under_test:make_unhashable", {}, "does not hash.*frozen=True"),
        ("factories_under_test:make_env", {"agents": 2}, r"takes \(num_agents=1\)"),
        (
            "factories_under_test:make_half",
            {},
            "a Half without observation_spaces, action_spaces, step, action_mask, global_state",
        ),
    ],
)
def test_factories_that_fail_are_named(factories, id, kwargs, message):
    with pytest.raises(UsageError, match=message):
        registry.make(id, **kwargs)


def test_only_what_the_module_defines_is_proposed(factories):
    own = "make_env, make_single, make_unhashable, make_half"
    with pytest.raises(UsageError, match=f": choose from {own}$"):
        registry.make(f"{factories}:xyz")
    sys.modules[factories].__all__ = ["make_single", "AutoReset"]
    with pytest.raises(UsageError, match=": choose from make_single, AutoReset$"):
        registry.make(f"{factories}:xyz")


def test_a_missing_dependency_of_the_module_is_not_blamed_on_the_id(factories):
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        registry.make("broken_under_test:make_env")


QUIET = """
import sys
streams = sys.stdout, sys.stderr
from marl.envs import registry
registry.listing("jaxmarl")
assert "jaxmarl" not in sys.modules
registry.make("jaxmarl/MPE_simple_v3")
assert "jaxmarl" in sys.modules
assert (sys.stdout, sys.stderr) == streams
"""


def test_importing_jaxmarl_prints_nothing_and_leaves_the_streams():
    done = subprocess.run(
        [sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
