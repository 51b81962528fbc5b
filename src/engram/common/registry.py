"""The heads, penalties, rehearsals and benchmarks that a method or a run can name. A new one is one file.

A file of a room registers what it defines, at its top level:

    @PENALTIES.register("si", settings="xi")
    class SI(Penalty): ...

Another package registers through an entry point, which names the module that holds such a registration:

    [project.entry-points."engram.penalties"]
    mine = "mypackage.mypenalty"

Names and facts of the package's own files are read from their text, so listing them imports neither those files nor
PyTorch. A file is imported when its registration is first used.
"""

from __future__ import annotations

import ast
import functools
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata, resources
from typing import Any, TypeVar

from engram.common.errors import InputError, check_choice, printable, reason, shortened

Made = TypeVar("Made", bound=Callable[..., Any])
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*(\+\+)?")  # "++" only at the end, as in "der++"


@dataclass(frozen=True)
class Registration:
    """A registered class or function, and the facts given with it."""

    name: str
    make: Callable[..., Any]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class _Source:
    """The module of a registration that may not be imported yet; an entry point's facts are unknown until it is."""

    module: str
    facts: Mapping[str, Any] | None


class Registry:
    """The registrations of one kind.

    Args:
        kind: what is registered, for messages: "penalty".
        room: the package whose files are searched: "engram.penalties".
        group: the group of entry points of other packages: "engram.penalties". Its last word, in capitals, is the
            name that this registry has in files: `@PENALTIES.register("si")`.
    """

    def __init__(self, kind: str, room: str, group: str):
        self.kind = kind
        self.room = room
        self.group = group
        self._registered: dict[str, Registration] = {}

    def register(self, name: str, **facts: Any) -> Callable[[Made], Made]:
        """A decorator that registers a class or function under a name.

        Args:
            name: lower-case letters and digits, with dashes between words; it may end in "++".
            facts: what can be asked about it by `facts`. In the package's own files each is a literal. `settings`, by
                name of the argument that gets it, may be words with spaces between them where the names are the same.
                `words` is a clause that says what it is or does, for reports.

        Example:
            >>> tools = Registry("tool", "engram.common", "engram.tools")
            >>> @tools.register("hammer", weight=2)
            ... class Hammer: ...
            >>> tools.names(), tools.facts("hammer")
            (('hammer',), {'weight': 2})
        """
        if not NAME.fullmatch(name):
            raise InputError(f"a {self.kind} is named by lower-case letters, digits and dashes, not {name!r}")

        def add(make: Made) -> Made:
            there = self._registered.get(name)
            if there is not None and _path(there.make) != _path(make):
                both = f"{_path(there.make)} and {_path(make)}"
                raise InputError(f"the {self.kind} {name} is registered twice, by {both}")
            self._registered[name] = Registration(name, make, _named(facts))
            return make

        return add

    def names(self) -> tuple[str, ...]:
        """All names: those of the package, then of other packages, then those registered by the program that runs."""
        return tuple(dict.fromkeys([*self._sources, *self._registered]))

    def facts(self, name: str) -> Mapping[str, Any]:
        """The facts given with a registration. Those of the package's own files are read without importing them."""
        source = self._sources.get(name)
        known = name in self._registered or (source is not None and source.facts is not None)
        return self.known_facts(name) if known else self[name].facts

    def known_facts(self, name: str) -> Mapping[str, Any]:
        """The facts that are known without importing anything; none for an entry point that has not been used."""
        source = self._sources.get(name)
        there = self._registered.get(name)
        return there.facts if there is not None else (source and source.facts) or {}

    def __contains__(self, name: object) -> bool:
        return name in self._registered or name in self._sources

    def __getitem__(self, name: str) -> Registration:
        """The registration of that name; the file that holds it is imported if it has not been yet."""
        if name not in self._registered:
            check_choice(self.kind, name, self.names())
            module = self._sources[name].module
            try:
                import_module(module)
            except Exception as error:  # another package can raise anything
                raise InputError(f"the {self.kind} {name} cannot be imported from {module}: {reason(error)}") from error
            if name not in self._registered:
                raise InputError(f"the module {module} does not register the {self.kind} {name}")
        return self._registered[name]

    @functools.cached_property
    def _sources(self) -> dict[str, _Source]:
        own = self._read_room()
        found = dict(own)
        for point in metadata.entry_points(group=self.group):
            if not NAME.fullmatch(point.name):
                why = "a name has lower-case letters, digits and dashes"
            elif point.name in found and found[point.name].module != point.module:
                why = f"{found[point.name].module} has that name already"
            else:
                found.setdefault(point.name, _Source(point.module, None))
                continue
            named = f"{self.kind} {shortened(point.name)} of {printable(point.module)}"
            logging.getLogger("engram").warning("the %s is ignored: %s", named, why)  # on stderr, unless configured
        return found

    def _read_room(self) -> dict[str, _Source]:
        """The registrations in the text of the room's files."""
        package, _, folder = self.room.partition(".")
        variable = self.group.rpartition(".")[2].upper()
        decorator = re.compile(rf"^@{variable}\.register\((.*?)\)\n(?=@|class |def )", re.MULTILINE | re.DOTALL)
        found: dict[str, _Source] = {}
        for file in sorted((resources.files(package) / folder).iterdir(), key=lambda file: file.name):
            if not file.name.endswith(".py"):
                continue
            for arguments in decorator.findall(file.read_text(encoding="utf-8")):
                name, facts = _literals(arguments)
                found[name] = _Source(f"{self.room}.{file.name.removesuffix('.py')}", facts)
        return found


def _literals(arguments: str) -> tuple[str, dict[str, Any]]:
    call = ast.parse(f"register({arguments})", mode="eval").body
    assert isinstance(call, ast.Call)
    facts = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return ast.literal_eval(call.args[0]), _named(facts)


def _named(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts with a dict of settings, where they were given as words."""
    settings = facts.get("settings")
    return {**facts, "settings": {name: name for name in settings.split()}} if isinstance(settings, str) else facts


def _path(make: Callable[..., Any]) -> str:
    return f"{make.__module__}.{make.__qualname__}"


HEADS = Registry("head", "engram.nn", "engram.heads")
PENALTIES = Registry("penalty", "engram.penalties", "engram.penalties")
REHEARSALS = Registry("rehearsal", "engram.rehearsal", "engram.rehearsals")
BENCHMARKS = Registry("benchmark", "engram.data", "engram.benchmarks")
