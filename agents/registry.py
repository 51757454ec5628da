"""The learners that have a name."""

import importlib
import importlib.util
from typing import Any

from marl.envs.errors import UsageError, nearest

ALGORITHMS = {"ppo": "marl.agents.ppo"}  # name -> module with Config, Hparams and make


def algorithm(name: str) -> Any:
    """The algorithm of that name, or the user's module `my_learner` or `my_package.my_learner`."""
    if name.startswith("object:"):
        raise UsageError(
            f"the run was trained with a learner object ({name.removeprefix('object:')}) that "
            "has no name; give the team again: marl.load(path, team=team)"
        )
    if name in ALGORITHMS:
        return importlib.import_module(ALGORITHMS[name])
    importable = all(word.isidentifier() for word in name.split("."))  # not "", nor a path
    if importable and ("." in name or importlib.util.find_spec(name) is not None):
        return _module(name)
    raise UsageError(f"learner {name!r} is not known; {nearest(name, ALGORITHMS)}")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"learner {name!r}: no module {error.name!r}; is it installed, or in the folder this "
            "runs in?"
        ) from None
