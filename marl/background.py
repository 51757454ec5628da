"""Work beside training: one job at a time, whose error comes out at the next one."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Background:
    """Runs one job at a time in a thread, so that training does not wait for the disk."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._job: Future[Any] | None = None

    def submit(self, job: Callable[..., Any], *args: Any) -> None:
        """Start a job once the one before it is done; raises that one's error."""
        self.wait()
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="marl-writer")
        self._job = self._pool.submit(job, *args)

    def wait(self) -> None:
        """Wait for the running job, if there is one; raises its error."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
