"""`make("suite/name")`: environments by id.

A suite is a module with `make(name, **kwargs)`, which returns an episodic environment, and
`listing()`; it is imported when it is asked for. Anybody's environment goes by the id
"my_package.my_module:make_env".
"""

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from marl.envs.errors import UsageError, defined_in, nearest
from marl.envs.interface import AutoReset
from marl.envs.naming import by_name
from marl.envs.validation import check_hash, missing_members, validate

__all__ = [
    "SUITES",
    "Entry",
    "by_name",
    "check_hash",
    "listing",
    "make",
    "missing_members",
    "validate",
]

SUITES = {
    "jaxmarl": "marl.envs.suites.jaxmarl",
    "toy": "marl.envs.toy",
}


_origins: dict[Any, tuple[str, dict[str, Any]]] = {}


class Entry(NamedTuple):
    """One line of a suite's listing."""

    id: str  # what `make` takes
    note: str  # agents, and what is special
    unavailable: str  # why it cannot be built here; "" if it can


def make(id: str, **kwargs: Any) -> Any:
    """An environment that resets itself, with dicts by agent id.

    Args:
      id: "suite/name", or "module:function" for anybody's. What such a function returns must
        reset itself: wrap an episodic environment in `AutoReset`.
      **kwargs: the environment's own arguments.

    Raises:
      UsageError: there is no such environment, or it cannot be built with these arguments.
    """
    if id.startswith("object:"):
        raise UsageError(
            f"the run was trained on an environment object ({id.removeprefix('object:')}) that "
            "has no id; give it again: marl.load(path, env=env)"
        )
    env = _make_from_factory(id, kwargs) if ":" in id else _make_from_suite(id, kwargs)
    _origins[env] = (id, kwargs)
    return env


def origin(env: Any) -> tuple[str, dict[str, Any]] | None:
    """What `make` was called with for an environment equal to `env`, or None."""
    return _origins.get(env)


def _make_from_suite(id: str, kwargs: dict[str, Any]) -> Any:
    suite, _, name = id.partition("/")
    if not name:
        raise UsageError(
            f"environment {id!r} names no suite; write <suite>/<name> with a suite of "
            f"{', '.join(SUITES)}, or my_package.my_module:make_env"
        )
    return AutoReset(_suite(suite).make(name, **kwargs))


def listing(suite: str) -> list[Entry]:
    """What `make` knows of a suite; builds nothing."""
    return [Entry(f"{suite}/{name}", *rest) for name, *rest in _suite(suite).listing()]


def _suite(name: str) -> ModuleType:
    if name not in SUITES:
        raise UsageError(
            f"no suite {name!r} of environments: {nearest(name, SUITES)}; one of your own is in no "
            "suite, and goes by my_package.my_module:make_env"
        )
    return importlib.import_module(SUITES[name])


def _make_from_factory(id: str, kwargs: dict[str, Any]) -> Any:
    factory = _factory(id)
    try:
        inspect.signature(factory).bind(**kwargs)
    except TypeError as error:
        raise UsageError(
            f"{id} was given {', '.join(kwargs) or 'no arguments'}: {error}; "
            f"it takes {inspect.signature(factory)}"
        ) from None
    env = factory(**kwargs)
    if missing := missing_members(env):
        raise UsageError(
            f"{id} returned a {type(env).__name__} without {', '.join(missing)}; an environment "
            "has the members of marl.envs.interface.Environment"
        )
    check_hash(env)
    return by_name(env)


def _factory(id: str) -> Callable[..., Any]:
    module_name, _, attribute = id.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"environment {id!r}: write my_package.my_module:make_env")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"environment {id!r}: no module {error.name!r}; is it installed, or in the folder this "
            "runs in?"
        ) from None
    if not hasattr(module, attribute):
        own = [name for name in defined_in(module) if callable(getattr(module, name, None))]
        raise UsageError(
            f"environment {id!r}: module {module_name!r} has no {attribute!r}: "
            f"{nearest(attribute, own)}"
        )
    factory = getattr(module, attribute)
    if not callable(factory):
        raise UsageError(
            f"environment {id!r}: {attribute!r} is a {type(factory).__name__}; expected a function "
            "or class that returns an environment"
        )
    return factory
