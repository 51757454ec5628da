"""What a run shows and writes while it goes: progress on stderr, rows of metrics in JSON lines."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    TaskProgressColumn,
)
from rich.progress import (
    Progress as Bar,
)
from rich.table import Column
from rich.text import Text

from marl.envs.errors import UsageError

RETURNS = ("team_return/", "return/")  # rows' keys that are shown, in this order
MAX_RETURNS = 6


class Progress(Protocol):
    """Shows how far a run is."""

    def message(self, text: str) -> None:
        """Something the user should read, such as where a checkpoint was written."""
        ...

    def compiling(self, what: str) -> Any:
        """A context in which `what` is compiled: announces it, then says how long it took."""
        ...

    def start(self, total_steps: int, done: int = 0) -> None:
        """Begin at `done` of `total_steps` environment steps."""
        ...

    def update(self, env_steps: int, row: Mapping[str, Any] | None = None) -> None:
        """`env_steps` are done in all; `row` holds the latest metrics."""
        ...

    def close(self) -> None:
        """Show the final state. Calling it again does nothing."""
        ...


def make_progress(show: bool = True, console: Console | None = None) -> Progress:
    """A bar on a terminal, plain lines elsewhere (a file, a notebook), or nothing."""
    if not show:
        return SilentProgress()
    console = console or Console(stderr=True, highlight=False)
    return BarProgress(console) if console.is_terminal else LineProgress(console)


class SilentProgress:
    """Shows nothing."""

    def message(self, text: str) -> None:
        pass

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        yield

    def start(self, total_steps: int, done: int = 0) -> None:
        pass

    def update(self, env_steps: int, row: Mapping[str, Any] | None = None) -> None:
        pass

    def close(self) -> None:
        pass


class LineProgress:
    """Plain lines: at most one every `interval` seconds, and one at the end."""

    def __init__(
        self,
        console: Console,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console = console
        self._interval = interval
        self._clock = clock
        self._pace: Pace | None = None
        self._returns = ""
        self._printed = (-math.inf, -1)  # when, and at which step

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        started = self._clock()
        self.message(f"compiling {what} ...")
        yield
        self.message(f"compiled in {duration(self._clock() - started)}")

    def start(self, total_steps: int, done: int = 0) -> None:
        self._pace = Pace(total_steps, done, self._clock)
        self._printed = (self._clock(), -1)

    def update(self, env_steps: int, row: Mapping[str, Any] | None = None) -> None:
        assert self._pace is not None, "start comes before update"
        self._pace.advance(env_steps)
        self._returns = returns_text(row) if row else self._returns
        if self._clock() - self._printed[0] >= self._interval:
            self._print()

    def close(self) -> None:
        if self._pace is not None and self._printed[1] != self._pace.done:
            self._print()
        self._pace = None

    def _print(self) -> None:
        assert self._pace is not None
        self.message("  ".join(filter(None, [self._pace.text(), self._returns])))
        self._printed = (self._clock(), self._pace.done)


class BarProgress:
    """A bar that is redrawn in place; messages stand above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console = console
        self._clock = clock
        self._bar: Bar | None = None
        self._pace: Pace | None = None

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        started = self._clock()
        if self._bar is None:
            with self._console.status(f"compiling {what} ..."):
                yield
        else:
            self.message(f"compiling {what} ...")
            yield
        self.message(f"compiled {what} in {duration(self._clock() - started)}")

    def start(self, total_steps: int, done: int = 0) -> None:
        self._pace = Pace(total_steps, done, self._clock)
        self._bar = Bar(
            BarColumn(bar_width=24, table_column=Column(no_wrap=True)),
            TaskProgressColumn(table_column=Column(no_wrap=True)),
            PaceColumn(self._pace),  # the only column that gives way
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=total_steps, completed=done, returns="")
        self._bar.start()

    def update(self, env_steps: int, row: Mapping[str, Any] | None = None) -> None:
        assert self._bar is not None and self._pace is not None, "start comes before update"
        self._pace.advance(env_steps)
        self._bar.update(self._task, completed=env_steps)
        if row:
            self._bar.update(self._task, returns=returns_text(row))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


class PaceColumn(ProgressColumn):
    """Steps, steps per second, the time left and the returns; cut where the line ends."""

    def __init__(self, pace: "Pace"):
        super().__init__(table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
        self._pace = pace

    def render(self, task: Any) -> Text:
        return Text.assemble((self._pace.text(), "cyan"), "  ", (task.fields["returns"], "green"))


class Pace:
    """How far and how fast; speed is the average from the start to the latest update."""

    def __init__(self, total: int, done: int, clock: Callable[[], float]):
        self.total, self.done = total, done
        self._first, self._clock = done, clock
        self._started = self._updated = clock()

    def advance(self, done: int) -> None:
        self.done, self._updated = done, self._clock()

    def text(self) -> str:
        elapsed = self._updated - self._started
        speed = (self.done - self._first) / elapsed if elapsed > 0 else 0.0
        words = [f"{self.done:,}/{self.total:,} steps"]
        if speed > 0:
            words.append(f"{speed:,.0f} steps/s")
            left = max(self.total - self.done, 0) / speed
            words.append(f"{duration(left)} left" if left else f"took {duration(elapsed)}")
        return "  ".join(words)


def duration(seconds: float) -> str:
    """`8.2 s`, `12 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def returns_text(row: Mapping[str, Any]) -> str:
    """The current returns of a row, of teams where there are any, else of agents."""
    for prefix in RETURNS:
        shown = {key.removeprefix(prefix): row[key] for key in row if key.startswith(prefix)}
        if shown:
            words = [f"{name} {np.mean(value):.2f}" for name, value in shown.items()]
            more = [f"and {len(words) - MAX_RETURNS} more"] if len(words) > MAX_RETURNS else []
            return "return " + "  ".join(words[:MAX_RETURNS] + more)
    return ""


class JsonLines:
    """Appends rows of metrics to a file, one strict JSON object a line.

    JSON has no NaN or infinity: they are written as null. The file is open only while a row is
    written, so that nothing is lost, or left open, however a run ends.

    Args:
      path: the file; made if missing.
      resume_at: environment steps a run goes on from. Rows after it, and a last line that a crash
        cut off, are removed, since the run writes them again.
    """

    def __init__(self, path: str | Path, resume_at: int | None = None):
        self.path = Path(path)
        self.path.touch()
        if resume_at is not None:
            self._cut(resume_at)

    def write(self, row: Mapping[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(strict(row), allow_nan=False) + "\n")

    def _cut(self, resume_at: int) -> None:
        kept = [row for row in read_rows(self.path) if row.get("env_steps", 0) <= resume_at]
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file that `JsonLines` wrote; a last line that was cut off is left out."""
    rows = []
    *whole, _ = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(whole, 1):
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:
            raise UsageError(f"{path}, line {number} is not JSON: {error}; mend it") from None
        if not isinstance(row, dict) or "env_steps" not in row:
            raise UsageError(f"{path}, line {number} is not a row of metrics; mend it")
        rows.append(row)
    return rows


def strict(value: Any) -> Any:
    """`value` in the types of JSON: arrays as lists, NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(key): strict(entry) for key, entry in value.items()}
    if hasattr(value, "tolist"):  # arrays and NumPy's numbers
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [strict(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
