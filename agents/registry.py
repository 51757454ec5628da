"""The learners that have a name."""

import importlib
from typing import Any

from marl.envs.errors import UsageError, nearest

ALGORITHMS = {"ppo": "marl.agents.ppo"}  # name -> module with Config, Hparams and make


def algorithm(name: str) -> Any:
    """The algorithm of that name, or the module `my_package.my_learner`; imported here."""
    if "." in name:
        return _module(name)
    if name not in ALGORITHMS:
        raise UsageError(f"learner {name!r} is not known; {nearest(name, ALGORITHMS)}")
    return importlib.import_module(ALGORITHMS[name])


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
