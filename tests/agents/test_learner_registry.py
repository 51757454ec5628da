"""Learners by name: short, dotted, mistyped."""

import sys

import pytest

from marl.agents import fixed, ppo, registry
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


def test_the_names_are_these():
    known = {"ppo", "a2c", "dqn", "pqn", "sac", "td3", "ddpg", "random", "noop"}
    assert set(registry.ALGORITHMS) == known


def test_a_dotted_name_is_a_module():
    assert registry.algorithm("marl.agents.ppo") is ppo is registry.algorithm("ppo")


def test_a_colon_stands_before_what_is_in_a_module():
    assert registry.algorithm("random") is fixed.random
    assert registry.algorithm("marl.agents.fixed:noop") is fixed.noop is registry.algorithm("noop")


@pytest.mark.parametrize(
    "name, message",
    [
        ("pppo", "learner 'pppo' is not known; did you mean 'ppo'? choose from ppo, a2c, dqn"),
        ("td33", "learner 'td33' is not known; did you mean 'td3'?"),
        ("", "learner '' is not known; choose from ppo, a2c, dqn, pqn, sac, td3, ddpg, random"),
        ("no_such_package.learner", "no module 'no_such_package'"),
        ("marl.agents.no_such", "no module 'marl.agents.no_such'"),
        ("marl.agents.ppo.deeper", "no module 'marl.agents.ppo.deeper'"),
        ("my/learner.py", "learner 'my/learner.py' is not known"),
        ("./learner.py", "learner './learner.py' is not known"),
        ("learner.py:mine", "learner 'learner.py:mine': no module 'learner'"),
        ("no_such_module:mine", "learner 'no_such_module:mine': no module 'no_such_module'"),
        (":noop", "learner ':noop' is not known; did you mean 'noop'?"),
        (
            "marl.agents.fixed:nop",
            "module 'marl.agents.fixed' has no 'nop'; did you mean 'noop'",
        ),
        ("marl.agents.fixed:", "module 'marl.agents.fixed' has no ''; choose from"),
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
    (package / "good.py").write_text("VALUE = 3\nmine = object()\n")
    (tmp_path / "learner_of_a_user.py").write_text("VALUE = 4\n")
    (package / "bad.py").write_text("import no_such_dependency\n")
    imports = "import jax\nfrom marl.agents.fixed import noop, scripted as made\n"
    (package / "own.py").write_text(f"{imports}still = made(lambda key, obs, mask: 0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.algorithm("package_of_a_user.good").VALUE == 3
    assert registry.algorithm("learner_of_a_user").VALUE == 4
    good = registry.algorithm("package_of_a_user.good")
    assert registry.algorithm("package_of_a_user.good:mine") is good.mine
    assert registry.algorithm("learner_of_a_user:VALUE") == 4
    with pytest.raises(UsageError, match="has no 'xyz'; choose from still$"):
        registry.algorithm("package_of_a_user.own:xyz")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        registry.algorithm("package_of_a_user.bad")
    for name in [name for name in sys.modules if "_of_a_user" in name]:
        monkeypatch.delitem(sys.modules, name)
