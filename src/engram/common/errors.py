"""The errors that a user can fix, and where a trial diverged. Each message is one sentence, written for users."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class InputError(ValueError):
    """Something a user gave (an argument, a file, a tensor) cannot be used.

    Example:
        >>> try:
        ...     engram.preset("split-mnist", "dph+si")
        ... except engram.InputError as error:
        ...     print(str(error)[:54])
        there is no method 'dph+si' (did you mean dhp+si?), on
    """


class NotFiniteError(InputError):
    """A tensor holds NaN or infinity, which would corrupt what the network remembers.

    Example:
        >>> head = engram.DHPSoftmax(2, 3)
        >>> try:
        ...     head(torch.full((1, 2), torch.nan), torch.tensor([0]))
        ... except engram.NotFiniteError as error:
        ...     print(error)
        the features hold NaN or infinity, which would stay in the memory
    """


class SingularError(InputError):
    """A matrix that a memory is read by cannot be inverted.

    Example:
        >>> head = engram.heads.create("slda", 3, 2, shrinkage=0.0)
        >>> head.write(torch.eye(3), torch.tensor([0, 1, 1]))
        >>> try:
        ...     head.settle()
        ... except SingularError as error:
        ...     print(str(error)[:47])
        the second moment of the 3 features is singular
    """


@dataclass(frozen=True)
class Divergence:
    """Where a trial's loss became NaN or infinite, or where it failed for another reason, while the others go on.

    Args:
        trial: its number. This and the others are counted from 0.
        task: in which task.
        step: in which step of the task.
        why: a sentence about the other reason.

    Example:
        >>> print(Divergence(trial=0, task=1, step=99))
        trial 1 diverged in task 2, step 100: its loss became NaN or infinite
    """

    trial: int
    task: int
    step: int
    why: str | None = None

    def __str__(self) -> str:
        what = "diverged" if self.why is None else "failed"
        where = f"in task {self.task + 1}, step {self.step + 1}"
        return f"trial {self.trial + 1} {what} {where}: {self.why or 'its loss became NaN or infinite'}"

    @classmethod
    def of(cls, trial: Any, task: Any, step: Any, why: Any = None) -> Divergence:
        """What a file describes, if it can be that."""
        told = why is None or (isinstance(why, str) and why.isprintable() and len(why) <= MOST_WORDS)
        if not (told and type(trial) is type(task) is type(step) is int and min(task, step) >= 0):
            raise ValueError("it does not say in which task and step a trial diverged, or why")
        return cls(trial, task, step, why)

    def to_dict(self) -> dict[str, Any]:
        """What it was made with, as files hold it."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Stopped(Exception):
    """A user asked a run to stop; what it has learned so far is saved.

    Example:
        >>> try:
        ...     raise Stopped
        ... except Stopped:
        ...     print("resume it later")
        resume it later
    """


INTERRUPTED = 130  # the exit code of a command that was stopped by Ctrl-C, as in shells
MOST_WORDS = 1000  # characters of a sentence in a file
SHOWN = 80  # characters of a value that are shown in a message


def shortened(value: object) -> str:
    """A value for a message: on one line, at most `SHOWN` characters, and safe to print on a terminal."""
    try:
        text = repr(value[:SHOWN] if isinstance(value, str | bytes | list | tuple) else value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; a list that contains itself
        text = f"a {type(value).__name__} that cannot be printed"
    return printable(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")


def reason(error: BaseException) -> str:
    """The first sentence of an error's message. A KeyError's is only a name, and an OSError's repeats the path."""
    if isinstance(error, KeyError):
        return f"it has no {shortened(error.args[0]) if error.args else 'such name'}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    first = next(iter(str(error).splitlines()), "").split(". ")[0] or type(error).__name__
    return printable(first if len(first) <= 4 * SHOWN else first[: 4 * SHOWN] + "…")


def printable(text: str) -> str:
    """Text with unprintable characters escaped, so that no file can control the user's terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Raise an `InputError` that lists the choices if the value is not one of them.

    Args:
        what: what the value is, for the message.
        value: the value to check.
        choices: the allowed values.

    Example:
        >>> check_choice("method", "dph", ("finetune", "dhp"))
        Traceback (most recent call last):
        engram.common.errors.InputError: there is no method 'dph' (did you mean dhp?), only finetune, dhp
    """
    choices = tuple(choices)
    if value in choices:
        return
    raise InputError(f"there is no {what} {shortened(value)}{nearest(value, choices)}, only {', '.join(choices)}")


def nearest(value: object, choices: Iterable[str]) -> str:
    """A hint such as " (did you mean dhp?)" for a value that is almost one of the choices, and otherwise nothing."""
    near = difflib.get_close_matches(value[:SHOWN].lower(), choices, n=1) if isinstance(value, str) else []
    return f" (did you mean {near[0]}?)" if near else ""
