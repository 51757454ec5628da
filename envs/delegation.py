"""How a wrapper passes on what it does not change."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

Wrapper = TypeVar("Wrapper", bound=type)

PROPERTIES = ("agents", "observation_spaces", "action_spaces")
OF_STATE = ("action_mask", "global_state")


def delegating(stateful: bool) -> Callable[[Wrapper], Wrapper]:
    """Class decorator: members of the environment interface that the class lacks go to `self.env`.

    Args:
      stateful: the wrapper's state is a NamedTuple that holds the inner state as `env`; otherwise
        the wrapper has no state of its own and passes the inner one through.
    """

    def decorate(cls: Wrapper) -> Wrapper:
        for name in PROPERTIES:
            if name not in vars(cls):
                setattr(cls, name, property(attrgetter(f"env.{name}")))
        for name in OF_STATE:
            if name not in vars(cls):
                setattr(cls, name, _of_state(name, stateful))
        if "reset" not in vars(cls):
            cls.reset = _reset  # type: ignore[attr-defined]
        return cls

    return decorate


def _reset(self: Any, key: Any) -> Any:
    """The inner environment's first observations and state."""
    return self.env.reset(key)


def _of_state(name: str, stateful: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, state: Any) -> Any:
        return getattr(self.env, name)(state.env if stateful else state)

    method.__name__ = name
    method.__doc__ = f"The inner environment's `{name}`."
    return method
