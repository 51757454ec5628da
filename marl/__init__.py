"""Multi-agent reinforcement learning in JAX. Names load lazily: importing this costs nothing."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from marl.envs.registry import make as make
    from marl.run import Run as Run
    from marl.run import load as load
    from marl.specs import Team as Team
    from marl.specs import team as team
    from marl.training import train as train

_HOMES = {
    "make": "marl.envs.registry",
    "Team": "marl.specs",
    "Run": "marl.run",
    "load": "marl.run",
}
_FUNCTIONS = {"team": "marl.specs", "train": "marl.training"}

__all__ = [*_HOMES, *_FUNCTIONS]


def __getattr__(name: str) -> Any:
    home = {**_HOMES, **_FUNCTIONS}.get(name)
    if home is None:
        raise AttributeError(
            f"module 'marl' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    from marl import xla

    xla.prepare()  # before anything computes; imports alone have no effects
    return getattr(importlib.import_module(home), name)
