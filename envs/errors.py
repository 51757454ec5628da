"""Errors that a user can mend: what was given, what was expected, what to do."""

import difflib
from collections.abc import Iterable


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
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    shown = ", ".join(known[:limit]) + (", ..." if len(known) > limit else "")
    return f"{hint}choose from {shown}" if known else "there is nothing to choose from"
