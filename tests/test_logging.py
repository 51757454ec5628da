"""Progress on a terminal and elsewhere, and rows of metrics as strict JSON lines."""

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from marl import logging
from marl.logging import BarProgress, JsonLines, LineProgress, duration, make_progress, read_rows


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def console(terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, highlight=False)


def lines(progress):
    return progress._console.file.getvalue().splitlines()


def test_plain_lines_come_at_most_every_interval_and_at_the_end(clock):
    progress = LineProgress(console(), interval=10, clock=clock)
    progress.start(1000)
    for step in range(1, 31):
        clock.now += 1
        progress.update(step * 10, {"return/agent_0": float(step)})
    assert len(lines(progress)) == 3
    progress.close()
    assert len(lines(progress)) == 3, "the last line said it already"
    progress.start(1000, done=300)
    clock.now += 1
    progress.update(1000)
    progress.close()
    progress.close()
    assert len(lines(progress)) == 4
    assert lines(progress)[-1].startswith("1,000/1,000 steps  700 steps/s  took 1.0 s")


def test_a_plain_line_tells_steps_speed_time_left_and_returns(clock):
    progress = LineProgress(console(), interval=10, clock=clock)
    progress.start(30_000, done=10_000)
    clock.now += 10
    progress.update(20_000, {"return/agent_0": -12.345, "loss": 1.0})
    assert lines(progress) == [
        "20,000/30,000 steps  1,000 steps/s  10 s left  return agent_0 -12.35"
    ]


@pytest.mark.parametrize("kind", [LineProgress, BarProgress])
def test_compilation_is_announced_and_timed(clock, kind):
    progress = kind(console(), clock=clock)
    with progress.compiling("the training step"):
        assert kind is BarProgress or lines(progress) == ["compiling the training step ..."]
        clock.now += 12
    assert "12 s" in lines(progress)[-1]


def test_a_compilation_that_fails_is_not_called_done(clock):
    progress = LineProgress(console(), clock=clock)
    with pytest.raises(RuntimeError), progress.compiling("the training step"):
        raise RuntimeError
    assert lines(progress) == ["compiling the training step ..."]


def test_a_bar_shows_the_same_on_a_terminal(clock):
    progress = BarProgress(console(terminal=True), clock=clock)
    with progress.compiling("the training step"):
        clock.now += 3
    progress.start(1000)
    clock.now += 1
    progress.update(500, {"return/a": 2.0})
    progress.message("saved to [somewhere]")
    progress.update(1000)
    progress.close()
    progress.close()
    text = progress._console.file.getvalue()
    for expected in ("compiled the training step in 3.0 s", "100%", "1,000/1,000 steps"):
        assert expected in text
    assert "1,000 steps/s" in text and "return a 2.00" in text and "saved to [somewhere]" in text


def test_a_bar_stays_on_one_line(clock):
    progress = BarProgress(console(terminal=True), clock=clock)
    progress.start(1_000_000)
    clock.now += 1
    progress.update(10_000, {f"return/agent_{i}": -25.0 for i in range(10)})
    progress.close()
    drawn = progress._console.file.getvalue()
    assert drawn.count("\n") == 1, "it is redrawn in place"
    last = drawn.rsplit("\r", 1)[-1]
    for part in ("\u2501" * 20, "1%", "10,000 steps/s  1 min 39 s left", "return agent_0 -25.00"):
        assert part in last
    assert "agent_5" not in last


def test_the_kind_follows_the_output():
    assert isinstance(make_progress(True, console()), LineProgress)
    assert isinstance(make_progress(True, console(terminal=True)), BarProgress)


def test_no_progress_is_silent(capsys):
    progress = make_progress(show=False)
    progress.start(10)
    with progress.compiling("x"):
        progress.update(10, {"return/a": 1.0})
    progress.message("hello")
    progress.close()
    assert capsys.readouterr() == ("", "")


def test_progress_goes_to_stderr(capsys):
    progress = make_progress()
    progress.message("hello [bold]there[/bold]")
    assert capsys.readouterr() == ("", "hello [bold]there[/bold]\n")


def test_returns_are_those_of_teams_where_there_are_any():
    row = {"return/a": 1.0, "return/b": 2.0, "loss": 3.0}
    assert logging.returns_text(row) == "return a 1.00  b 2.00"
    assert logging.returns_text(row | {"team_return/red": 1.5}) == "return red 1.50"
    assert logging.returns_text({"loss": 3.0}) == ""


def test_returns_of_many_agents_fit_on_a_line():
    text = logging.returns_text({f"return/agent_{i}": 1.0 for i in range(30)})
    assert "and 24 more" in text and len(text) < 140


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (8.24, "8.2 s"),
        (12.3, "12 s"),
        (59.7, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_rows_are_strict_json_written_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = JsonLines(path)
    rows.write({"env_steps": 1, "loss": float("nan"), "up": jnp.inf, "x": {"y": np.float32(0.5)}})
    rows.write(
        {"env_steps": jnp.int32(2), "seeds": jnp.array([1.0, jnp.nan]), "ok": np.bool_(True)}
    )
    parsed = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert parsed == [
        {"env_steps": 1, "loss": None, "up": None, "x": {"y": 0.5}},
        {"env_steps": 2, "seeds": [1.0, None], "ok": True},
    ]


def test_rows_are_appended(tmp_path):
    assert JsonLines(tmp_path / "metrics.jsonl") and read_rows(tmp_path / "metrics.jsonl") == []
    for step in (1, 2):
        JsonLines(tmp_path / "metrics.jsonl").write({"env_steps": step})
    assert [row["env_steps"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_resuming_cuts_later_rows_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = JsonLines(path)
    for step in (10, 20, 30):
        rows.write({"env_steps": step})
    with open(path, "a") as file:
        file.write('{"env_steps": 4')
    assert [row["env_steps"] for row in read_rows(path)] == [10, 20, 30]
    JsonLines(path, resume_at=20).write({"env_steps": 30, "again": 1})
    assert read_rows(path) == [{"env_steps": 10}, {"env_steps": 20}, {"env_steps": 30, "again": 1}]
    assert list(tmp_path.iterdir()) == [path]


def test_resuming_without_a_file_begins_one(tmp_path):
    JsonLines(tmp_path / "metrics.jsonl", resume_at=20).write({"env_steps": 30})
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1
