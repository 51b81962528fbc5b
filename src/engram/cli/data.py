"""`engram data`: list, download and check the datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from engram.common.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from engram.config.settings import Config
    from engram.data.samples import Dataset

data_app = typer.Typer(help="List, download and check the datasets.", no_args_is_help=True)

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
    """List the datasets and say which are present.

    Example: engram data list
    """
    from engram.data import sources

    print(f"in {sources.existing_folder(data)}")
    for name in sources.SOURCES:
        print(f"  {name:14} {'present' if sources.is_present(name, data) else 'missing'}")


@data_app.command("fetch")
def fetch_data(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Datasets, or 'all'.", show_default=False)],
    data: DataFolder = None,
) -> None:
    """Download datasets into the data folder and verify their checksums.

    Example: engram data fetch mnist fashion-mnist
    """
    from rich.console import Console

    from engram.data import sources

    chosen = [n for n, s in sources.SOURCES.items() if not s.embedded] if names == ["all"] else names
    for name in chosen:
        sources.source_named(name)  # refuse unknown names before anything is downloaded
    fetch_datasets(chosen, data, Console())


@data_app.command("check")
def check_data(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Datasets.", show_default="all")] = None,
    data: DataFolder = None,
) -> None:
    """Check every file: the published one, another one of the right structure, missing, or damaged.

    Example: engram data check mnist
    """
    from engram.data import sources

    unusable = []
    for name in names or sources.SOURCES:
        for file in sources.check(name, data):
            state = {"structure": "usable, but not the published file"}.get(file.state, file.state)
            sound = file.state in ("published", "structure", "missing")
            print(f"{name:14} {file.bytes:>12,}  " + (f"{file.path}: {state}" if sound else state))
            if not sound or (names and file.state == "missing"):
                unusable.append(file.path)
    if unusable:
        raise InputError(f"{len(unusable)} file(s) cannot be used, the first of them {unusable[0]}")


def fetch_datasets(names: list[str], data: str | None, console: Console) -> None:
    """Download datasets with progress bars, and print where they are."""
    from engram.data import download

    with download.progress_bars(console) as bars:
        for name in names:
            paths = download.fetch(name, data, progress=bars)
            console.print(f"{name}: {len(paths)} files are ready in {paths[0].parent}", highlight=False, markup=False)


def load_or_fetch(config: Config, data: str | None, console: Console) -> list[Dataset]:
    """Load the datasets of a config.

    Missing ones are downloaded into Engram's own cache folder, never into a folder that a person named.
    """
    from engram.data.sources import is_present, named_folder
    from engram.engine.build import dataset_names, load_datasets

    missing = [name for name in dataset_names(config) if not is_present(name)] if named_folder(data) is None else []
    if missing:
        try:
            fetch_datasets(missing, None, console)
        except InputError as reason:
            hint = "" if config.dataset == "five-datasets" else "; `--dataset mnist-small` needs no download"
            raise InputError(f"{reason}{hint}") from reason
    return load_datasets(config, data)
