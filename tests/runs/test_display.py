"""The bar of `engram.run`: shown where somebody watches, and only there; with two times that cannot be confused."""

from __future__ import annotations

import io
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

import engram
from builders import assert_numbers_equal, custom_stream
from engram import Progress, Result, preset
from engram.common.errors import Divergence
from engram.engine.learner import Outcome
from engram.runs.display import STEPS, NotebookDisplay, clock, columns, in_notebook, times

CONFIG = preset("custom", "dhp", epochs=1, trials=2, hidden=[4])
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def train(**options: Any) -> Result:
    return engram.run(CONFIG, stream=custom_stream(), device="cpu", **options)


@contextmanager
def terminal() -> Iterator[Terminal]:
    """A terminal as stderr; stdout goes to a file, as pytest has it."""
    with redirect_stderr(Terminal()) as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        yield made


# --- where it is shown


def test_nothing_is_shown_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_bar_that_disappears() -> None:
    with terminal() as screen:
        train()
    text = screen.getvalue()
    assert "task 2/2" in text
    assert re.search(r"\d:\d\d elapsed", text)
    assert text.endswith("\x1b[2K"), "the last line of the bar is erased"


def test_false_shows_nothing_on_a_terminal() -> None:
    with terminal() as screen:
        train(progress=False)
    assert screen.getvalue() == ""


def test_true_prints_a_line_for_each_task_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    train(progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(":")[0] for line in err.splitlines()] == ["dhp, task 1/2", "dhp, task 2/2"]


def test_what_a_program_prints_meanwhile_goes_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    """It would be lost to a file or a pipe if the bar took it."""
    with terminal() as screen:
        train(report=lambda progress: print("mine"))
    assert "mine" in capsys.readouterr().out
    assert "elapsed" in screen.getvalue()
    assert "mine" not in screen.getvalue()


def test_the_bar_changes_no_number_and_the_callers_report_is_called() -> None:
    seen: list[float] = []
    with terminal():
        with_bar = train(report=lambda progress: seen.append(progress.done))
    assert_numbers_equal(with_bar, train(progress=False))
    assert seen[-1] == 1.0


def test_several_configs_have_one_bar() -> None:
    with terminal() as screen:
        engram.run_many([CONFIG, CONFIG.replace(method="finetune")], stream=custom_stream(), device="cpu")
    text = CODES.sub("", screen.getvalue())
    assert "dhp" in text
    assert "finetune" in text


def test_the_bar_is_gone_when_training_fails() -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with terminal() as screen, pytest.raises(KeyboardInterrupt):
        train(report=stop)
    assert "\x1b[?25h" in screen.getvalue(), "the cursor is shown again"


def test_without_stderr_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    assert train().trials == (0, 1)


# --- the two times


def test_both_times_have_their_word() -> None:
    assert times(12, 100) == "0:12 elapsed, 1:40 left"
    assert times(12, None) == "0:12 elapsed"
    assert (clock(59.9), clock(60), clock(3599), clock(3675)) == ("0:59", "1:00", "59:59", "1:01:15")


def test_a_bar_says_how_long_it_has_taken_and_how_long_it_will() -> None:
    now = 0.0
    text = io.StringIO()
    bars = Bars(*columns("training"), console=Console(file=text, width=100), get_time=lambda: now)
    task = bars.add_task("", total=STEPS)
    for now in range(13):
        bars.update(task, completed=now * 100)
    rendered = _text(bars)
    assert "0:12 elapsed, 1:28 left" in rendered, rendered
    now = 20
    bars.update(task, completed=STEPS)
    assert _text(bars).rstrip().endswith("100% 0:20 elapsed")


def _text(bars: Bars) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(bars.get_renderable())
    return console.file.getvalue()  # type: ignore[attr-defined]


# --- a notebook


class Cell:
    """IPython as the kernel of a notebook: it keeps what is displayed in each output of a cell."""

    def __init__(self, kernel: object = True):
        self.kernel = kernel
        self.shown: list[dict[str, str]] = []

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Cell:
        assert raw
        assert display_id
        self.shown.append(content)
        return self

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        self.shown.append(content)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    made = Cell()
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython = lambda: made  # type: ignore[attr-defined]
    display.display = made.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("engram.runs.display.SECONDS_BETWEEN_UPDATES", 0.0)
    return made


def test_a_notebook_has_a_bar_that_disappears(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_notebook()
    train()
    assert '<progress value="0.0000" max="1">' in cell.shown[0]["text/html"]
    last = cell.shown[-2]
    assert last["text/plain"].startswith("task 2/2, 100%, ")
    assert "dhp  " in last["text/html"]
    assert cell.shown[-1] == {"text/plain": ""}
    assert capsys.readouterr() == ("", "")


def test_a_notebook_shows_nothing_if_told_so(cell: Cell) -> None:
    train(progress=False)
    assert cell.shown == []


def test_ipython_in_a_terminal_is_no_notebook(cell: Cell) -> None:
    cell.kernel = None
    assert not in_notebook()


def test_a_notebook_is_not_sent_a_message_for_every_event(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.runs.display.SECONDS_BETWEEN_UPDATES", 3600.0)
    train()
    assert len(cell.shown) == 2, "the first, and the one that clears it"


def test_a_notebook_keeps_warnings_and_escapes_labels(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {("<b>", 0): Outcome(rows=[[0.9, 0.5]], diverged=Divergence(0, 1, 7))}
    with NotebookDisplay({"<b>": CONFIG}) as display:
        for _ in range(2):
            display.show(Progress(0.5, 0, {"<b>": CONFIG}, outcomes, task_ended=True, note="a note"))
    assert "&lt;b&gt;  90.0" in cell.shown[-2]["text/html"]
    err = capsys.readouterr().err
    assert err.splitlines() == ["a note", "<b>, trial 1 diverged in task 2, step 8: its loss became NaN or infinite"]
