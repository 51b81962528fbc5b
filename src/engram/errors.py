"""What can go wrong in a way that a person can mend: each error's message is one sentence for them."""

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


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a value that is not among the choices, and name them."""
    choices = tuple(choices)
    if value in choices:
        return
    near = difflib.get_close_matches(str(value).lower(), choices, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise InputError(f"there is no {what} {value!r}{hint}, only {', '.join(choices)}")
