"""Learners by name: short, dotted, mistyped."""

import sys

import pytest

from marl.agents import ppo, registry
from marl.agents.validation import hparams_in_range
from marl.envs.errors import UsageError


@pytest.mark.parametrize("name", registry.ALGORITHMS)
def test_named_algorithms_have_what_a_team_takes(name):
    algorithm = registry.algorithm(name)
    config, hparams = algorithm.Config(), algorithm.Hparams()
    assert hash(config) == hash(algorithm.Config())
    assert all(isinstance(value, float) for value in hparams)
    hparams_in_range(hparams, getattr(algorithm, "BOUNDS", {}))
    assert callable(algorithm.make)


def test_a_dotted_name_is_a_module():
    assert registry.algorithm("marl.agents.ppo") is ppo is registry.algorithm("ppo")


@pytest.mark.parametrize(
    "name, message",
    [
        ("pppo", "learner 'pppo' is not known; did you mean 'ppo'? choose from ppo"),
        ("", "learner '' is not known; choose from ppo"),
        ("no_such_package.learner", "no module 'no_such_package'"),
        ("marl.agents.no_such", "no module 'marl.agents.no_such'"),
        ("marl.agents.ppo.deeper", "no module 'marl.agents.ppo.deeper'"),
        ("my/learner.py", "learner 'my/learner.py' is not known"),
        ("./learner.py", "learner './learner.py' is not known"),
    ],
)
def test_an_unknown_name_is_refused(name, message):
    with pytest.raises(UsageError) as caught:
        registry.algorithm(name)
    assert message in str(caught.value)


def test_ones_own_module_is_found_and_its_own_mistakes_stay_visible(tmp_path, monkeypatch):
    package = tmp_path / "package_of_a_user"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "good.py").write_text("VALUE = 3\n")
    (tmp_path / "learner_of_a_user.py").write_text("VALUE = 4\n")
    (package / "bad.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.algorithm("package_of_a_user.good").VALUE == 3
    assert registry.algorithm("learner_of_a_user").VALUE == 4
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        registry.algorithm("package_of_a_user.bad")
    for name in [name for name in sys.modules if "_of_a_user" in name]:
        monkeypatch.delitem(sys.modules, name)
