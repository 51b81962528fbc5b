"""What can go wrong in a way that a person can mend: each error's message is one sentence for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something a person gave (an argument, a file, a tensor) cannot be used."""


class NotFiniteError(InputError):
    """A tensor holds NaN or infinity where that would poison what the network remembers."""


class DivergedError(RuntimeError):
    """The training loss stopped being a number."""

    def __init__(self, task: int, step: int):
        super().__init__(f"the loss became NaN or infinite in task {task + 1}, step {step + 1}")
        self.task = task
        self.step = step

    def __reduce__(self) -> tuple[type[DivergedError], tuple[int, int]]:
        return DivergedError, (self.task, self.step)  # from one process to another


class Stopped(Exception):
    """A person asked a run to stop, and what it had learned is kept."""


INTERRUPTED = 130  # the exit code of a command that a person stopped, as shells number it
SHOWN = 80  # characters of a value in a sentence


def in_brief(value: object) -> str:
    """A value as a sentence can hold it: on one line, shortened, without anything that a terminal would obey."""
    try:
        text = repr(value[:SHOWN] if isinstance(value, str | bytes | list | tuple) else value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits; lists within lists
        text = f"a {type(value).__name__} beyond writing down"
    return plain(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")


def said(reason: BaseException) -> str:
    """The first sentence of what went wrong; a KeyError alone would be a mere name, and an OSError has the path too."""
    if isinstance(reason, KeyError):
        return f"it has no {in_brief(reason.args[0]) if reason.args else 'such name'}"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    first = next(iter(str(reason).splitlines()), "").split(". ")[0] or type(reason).__name__
    return plain(first if len(first) <= 4 * SHOWN else first[: 4 * SHOWN] + "…")


def plain(text: str) -> str:
    """Text with what cannot be printed written as an escape, so that no file can move a terminal's cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a value that is not among the choices, and name them."""
    choices = tuple(choices)
    if value in choices:
        return
    near = difflib.get_close_matches(value[:SHOWN].lower(), choices, n=1) if isinstance(value, str) else []
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise InputError(f"there is no {what} {in_brief(value)}{hint}, only {', '.join(choices)}")
