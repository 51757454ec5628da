"""Signals that ask a run to stop."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM set the event instead of ending the process; a second one ends it."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(signum: int, frame: Any) -> None:
        del frame
        if stop.is_set():
            signal.signal(signum, previous[signum])
            signal.raise_signal(signum)
        stop.set()
        print("stopping as soon as this is done; once more stops at once", file=sys.stderr)

    previous: dict[int, Any] = {
        number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
