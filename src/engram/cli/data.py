"""`engram data`: the commands that find, download and check the datasets."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from engram.common.errors import InputError
from engram.data import download, sources

data_app = typer.Typer(help="Find, download and check the datasets.", no_args_is_help=True)

DataFolder = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Folder of the datasets.",
        show_default="$ENGRAM_DATA, else the user's cache",
    ),
]


@data_app.command("list")
def list_data(data: DataFolder = None) -> None:
    """Name the datasets, and say which are there.

    Example: engram data list
    """
    print(f"in {sources.existing_folder(data)}")
    for name in sources.SOURCES:
        print(f"  {name:14} {'there' if sources.is_present(name, data) else 'missing'}")


@data_app.command("fetch")
def fetch_data(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Datasets, or 'all'.", show_default=False)],
    data: DataFolder = None,
) -> None:
    """Download datasets, verified, into the data folder.

    Example: engram data fetch mnist fashion-mnist
    """
    chosen = [n for n, s in sources.SOURCES.items() if not s.embedded] if names == ["all"] else names
    for name in chosen:
        sources.source_named(name)
    fetch_datasets(chosen, data, Console())


@data_app.command("check")
def check_data(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Datasets.", show_default="all")
    ] = None,
    data: DataFolder = None,
) -> None:
    """Verify every file: the published one, another of the right structure, missing, or damaged.

    Example: engram data check mnist
    """
    damaged = []
    for name in names or sources.SOURCES:
        for file in sources.check(name, data):
            words = {"structure": "usable, but not the published file"}.get(file.state, file.state)
            sound = file.state in ("published", "structure", "missing")
            print(f"{name:14} {file.bytes:>12,}  " + (f"{file.path}: {words}" if sound else words))
            if not sound or (names and file.state == "missing"):
                damaged.append(file.path)
    if damaged:
        raise InputError(f"{len(damaged)} file(s) cannot be used, the first of them {damaged[0]}")


def fetch_datasets(names: list[str], data: str | None, console: Console) -> None:
    with download.progress_bars(console) as bars:
        for name in names:
            paths = download.fetch(name, data, progress=bars)
            console.print(f"{name}: {len(paths)} files are ready in {paths[0].parent}", highlight=False, markup=False)
