"""A watchdog: says so when a chunk of training takes far longer than those before it."""

import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LEAST_SECONDS = 60.0
TIMES_LONGER = 10.0


class Watchdog:
    """Watches the calls made inside `watching()`.

    Args:
      report: takes the message, once per call that is overdue.
      least_seconds: never report before.
      times_longer: report when a call takes so many times the median of those before it.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        least_seconds: float = LEAST_SECONDS,
        times_longer: float = TIMES_LONGER,
    ):
        self._report, self._least, self._times = report, least_seconds, times_longer
        self._durations: list[float] = []

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Time one call; the first ones only teach what is usual."""
        started = time.monotonic()
        timer = threading.Timer(self._patience(), self._bark, (what, threading.get_ident()))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        self._durations = [*self._durations[-99:], time.monotonic() - started]

    def _patience(self) -> float:
        usual = statistics.median(self._durations) if self._durations else 0.0
        return max(self._least, self._times * usual)

    def _bark(self, what: str, thread: int) -> None:
        usual = statistics.median(self._durations) if self._durations else None
        before = "" if usual is None else f"; those before took {usual:.1f} s"
        frame = sys._current_frames().get(thread)
        place = "".join(traceback.format_stack(frame, limit=3)) if frame is not None else ""
        self._report(
            f"{what} has been running for {self._patience():.0f} s{before}. It waits here:\n{place}"
            "If no core is busy, the process hangs: stop it, and go on with `marl train --resume`. "
            "On CPU, try XLA_FLAGS=--xla_cpu_enable_concurrency_optimized_scheduler=false, or one "
            "core (taskset -c 0)."
        )
