import threading
import time

import pytest

from marl.background import Background
from marl.watchdog import Watchdog


def test_an_overdue_call_is_reported_with_its_place():
    reports: list[str] = []
    barked = threading.Event()

    def report(text: str) -> None:
        reports.append(text)
        barked.set()

    dog = Watchdog(report, least_seconds=0.05, times_longer=2)
    with dog.watching("a chunk"):
        assert barked.wait(5)
    assert "a chunk has been running" in reports[0]
    assert "barked.wait" in reports[0], "the line it waits at"
    assert "xla_cpu_enable_concurrency_optimized_scheduler" in reports[0]


def test_usual_calls_are_not_reported():
    reports: list[str] = []
    dog = Watchdog(reports.append, least_seconds=0.2, times_longer=2)
    for _ in range(3):
        with dog.watching("a chunk"):
            time.sleep(0.01)
    time.sleep(0.3)
    assert not reports


def test_background_work_raises_its_error_at_the_next_call():
    background = Background()

    def fail() -> None:
        raise OSError("disk full")

    background.submit(fail)
    with pytest.raises(OSError, match="disk full"):
        background.submit(print)
    done: list[int] = []
    background.submit(done.append, 1)
    background.close()
    assert done == [1]
