"""Errors that a user can mend: what was given, what was expected, what to do."""

import difflib
import inspect
import sys
from collections.abc import Iterable
from types import ModuleType


class UsageError(ValueError):
    """Something the user asked for cannot be done; the message says why and what to do instead.

    Raised while an experiment is built, never from inside a trace. The command line prints the
    message alone and exits with code 2.
    """


class NotFinite(RuntimeError):  # noqa: N818  (the name that users read)
    """Training met a NaN or an infinity and stopped; the message says whose, what and when."""


def nearest(name: str, choices: Iterable[str], limit: int = 8) -> str:
    """A clause that names the closest valid choices: `did you mean 'ippo'? choose from ...`."""
    known = [str(choice) for choice in choices]
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.6) or [
        other for other in known if _one_letter_apart(str(name), other)
    ]
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    shown = ", ".join(known[:limit]) + (", ..." if len(known) > limit else "")
    return f"{hint}choose from {shown}" if known else "there is nothing to choose from"


def _one_letter_apart(one: str, other: str) -> bool:
    """Whether names of one length differ in one letter: of two, that is only half alike."""
    differ = sum(a != b for a, b in zip(one, other, strict=False))
    return len(one) == len(other) > 1 and differ == 1


def defined_in(module: ModuleType) -> list[str]:
    """Public names that are a module's own: its `__all__`, or what it does not import."""
    if hasattr(module, "__all__"):
        return list(module.__all__)

    def imported(name: str, value: object) -> bool:
        home = sys.modules.get(getattr(value, "__module__", None) or "")
        if home is None or home is module:
            return inspect.ismodule(value)
        return getattr(home, getattr(value, "__name__", name), None) is value

    names = vars(module).items()
    return [name for name, x in names if not name.startswith("_") and not imported(name, x)]
