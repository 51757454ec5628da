"""The learners that have a name."""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from marl.envs.errors import UsageError, defined_in, nearest

# name -> "module", or "module:attribute", of what has Config, Hparams and make
ALGORITHMS = {
    "ppo": "marl.agents.ppo",
    "a2c": "marl.agents.a2c",
    "dqn": "marl.agents.dqn",
    "pqn": "marl.agents.pqn",
    "sac": "marl.agents.sac",
    "td3": "marl.agents.td3",
    "ddpg": "marl.agents.ddpg",
    "random": "marl.agents.fixed:random",
    "noop": "marl.agents.fixed:noop",
}


def algorithm(name: str, known: Mapping[str, str] = ALGORITHMS) -> Any:
    """The algorithm of that name among those `known`, or the user's own.

    That is a module, `my_learner` or `my_package.my_learner`, or something in it,
    `my_package.my_learner:MyLearner`.
    """
    if name.startswith("object:"):
        raise UsageError(
            f"the run was trained with a learner object ({name.removeprefix('object:')}) that "
            "has no name; give the team again: marl.load(path, team=team)"
        )
    path = known.get(name, name)
    module, colon, attribute = path.partition(":")
    importable = all(word.isidentifier() for word in module.split("."))  # not "", nor a path
    if not importable or not (colon or "." in module or importlib.util.find_spec(module)):
        raise UsageError(f"learner {name!r} is not known; {nearest(name, known, 40)}")
    found = _module(module, name)
    return _attribute(found, attribute, name) if colon else found


def _module(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"learner {name!r}: no module {error.name!r}; is it installed, or in the folder this "
            "runs in?"
        ) from None


def _attribute(module: Any, attribute: str, name: str) -> Any:
    found = vars(module)
    if attribute not in found:
        raise UsageError(
            f"learner {name!r}: module {module.__name__!r} has no {attribute!r}; "
            f"{nearest(attribute, defined_in(module))}"
        )
    return found[attribute]
