"""The names a config can have: methods, made of a head and a penalty or a rehearsal, benchmarks and datasets."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engram.common.errors import InputError, nearest, shortened
from engram.common.registry import BENCHMARKS, HEADS, PENALTIES, REHEARSALS, Registry
from engram.config.paper import PAPER_METHODS

CUSTOM = "custom"  # the benchmark, dataset or network of a user's own stream and features


class Parts(NamedTuple):
    """What a method is made of. "finetune" has none of them, and no method has both a penalty and a rehearsal."""

    head: str | None
    penalty: str | None
    rehearsal: str | None = None


def parts_of(method: str) -> Parts:
    """The head, and the penalty or the rehearsal, that a method names.

    Example:
        >>> parts_of("dhp+si")
        Parts(head='dhp', penalty='si', rehearsal=None)
        >>> parts_of("matched+der++")
        Parts(head='matched', penalty=None, rehearsal='der++')
    """
    if method in HEADS:
        return Parts(method, None)
    if method in PENALTIES or method in REHEARSALS:
        head, second = None, method
    else:
        head, _, second = method.partition("+")
        if not second:
            return Parts(None, None)
    return Parts(head, None, second) if second in REHEARSALS else Parts(head, second)


def all_methods() -> tuple[str, ...]:
    """What `--methods all` runs: the paper's in its order, then every other combination of a head and a penalty.

    Heads that are baselines, or registered with `listed=False`, take no part; a method can name them all the same.
    Nor do rehearsals, the reference methods: `--methods reference` runs those.
    """
    facts = {name: HEADS.known_facts(name) for name in HEADS.names()}
    heads = [name for name, known in facts.items() if not known.get("baseline") and known.get("listed", True)]
    penalties = [first + name for name in PENALTIES.names() for first in ("", *(f"{head}+" for head in heads))]
    return tuple(dict.fromkeys((*PAPER_METHODS, *heads, *penalties)))


def known_methods() -> tuple[str, ...]:
    """Every method: `all_methods()`, the rehearsals, then every other head, alone and with a penalty or a rehearsal."""
    heads = HEADS.names()
    both = (f"{head}+{other}" for head in heads for other in (*PENALTIES.names(), *REHEARSALS.names()))
    return tuple(dict.fromkeys((*all_methods(), *REHEARSALS.names(), *heads, *both)))


def usable_methods(on_problem: Callable[[str], None]) -> list[str]:
    """All methods except those of other packages that cannot be imported; `on_problem` gets a sentence about each."""
    broken = set()
    for registry in (HEADS, PENALTIES, REHEARSALS):
        for name in registry.names():
            try:
                registry.facts(name)  # imports what is of another package
            except InputError as error:
                broken.add(name)
                on_problem(f"{error}; its methods are left out")
    return [method for method in all_methods() if broken.isdisjoint(parts_of(method))]


def check_method(method: str) -> None:
    """Refuse a method that does not exist."""
    if method in PAPER_METHODS:  # as nearly all are: there is no need to list the others
        return
    known = known_methods()
    if method not in known:
        more = f"or HEAD+METHOD with a head of {', '.join(HEADS.names())}"
        only = f"only {', '.join((*all_methods(), *REHEARSALS.names()))}, {more}"
        raise InputError(f"there is no method {shortened(method)}{nearest(method, known)}, {only}")


def baseline_heads() -> list[str]:
    """The heads that a method without a head can have, as far as they are imported."""
    return [name for name in HEADS.names() if HEADS.known_facts(name).get("baseline")]


def datasets_of(benchmark: str) -> tuple[str, ...]:
    """The datasets that a benchmark's tasks can be made from."""
    return (CUSTOM,) if benchmark == CUSTOM else tuple(BENCHMARKS.facts(benchmark)["datasets"])


def all_datasets() -> tuple[str, ...]:
    """The datasets of all benchmarks."""
    return tuple(dict.fromkeys(name for b in (*BENCHMARKS.names(), CUSTOM) for name in datasets_of(b)))


def in_words(method: str) -> str:
    """What a method is, in a sentence: its head, and its penalty or its rehearsal, by the `words` they registered with.

    Example:
        >>> in_words("si")
        'A penalty that holds each weight by how much it lowered the loss.'
    """
    head, penalty, rehearsal = parts_of(method)
    parts = [_words(HEADS, head, "{}")] if head else []
    parts += [_words(PENALTIES, penalty, "a penalty that {}")] if penalty else []
    parts += [_words(REHEARSALS, rehearsal, "a rehearsal that {}")] if rehearsal else []
    text = "; and ".join(parts) or "one task after the other, with nothing that holds what was learned"
    return f"{text[0].upper()}{text[1:]}."


def _words(registry: Registry, name: str, sentence: str) -> str:
    words = registry.known_facts(name).get("words")
    return sentence.format(words) if words else f"the {registry.kind} {name}, of another package"
