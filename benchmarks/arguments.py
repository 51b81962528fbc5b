"""Arguments of the command line that the scripts share."""

from __future__ import annotations

from argparse import ArgumentTypeError


def words(text: str) -> tuple[str, ...]:
    """`words("mlp, cnn")` is ("mlp", "cnn")."""
    return tuple(word.strip() for word in text.split(","))


def whole_number(text: str) -> int:
    """A whole number above 0."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"a whole number above 0 is needed, not '{text}'")
    return int(text)


def whole_numbers(text: str) -> tuple[int, ...]:
    """`whole_numbers("1,80")` is (1, 80)."""
    return tuple(whole_number(word) for word in text.split(","))


def networks(text: str) -> tuple[tuple[int, ...], ...]:
    """The layers of each network: `networks("100,400x400")` is ((100,), (400, 400))."""
    return tuple(whole_numbers(word.replace("x", ",")) for word in text.split(","))
