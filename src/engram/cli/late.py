"""Commands that are imported when they are asked for: PyTorch alone takes longer to import than many of them take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup


class Commands(Mapping[str, Any]):
    """Commands by their names, as Typer has them; each is made when it is looked up."""

    def __init__(self, places: Mapping[str, str]):
        self.places = places

    def __getitem__(self, name: str) -> Any:
        module, _, what = self.places[name].partition(".")
        found = getattr(import_module(f"engram.cli.{module}"), what)
        group = typer.Typer()
        if isinstance(found, typer.Typer):
            group.add_typer(found, name=name)
        else:
            group.command(name)(found)
        return typer.main.get_group(group).commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def late(places: Mapping[str, str]) -> type[TyperGroup]:
    """The class of a group: its commands by their names, each with the module of Engram and the name it has there.

    What is there is the function of a command, or the `typer.Typer` of a group of them.
    """

    class LateGroup(TyperGroup):
        def __init__(self, **settings: Any):
            super().__init__(**{**settings, "commands": Commands(places)})

    return LateGroup
