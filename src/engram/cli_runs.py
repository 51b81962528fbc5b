"""`engram runs`: list, show, compare and export the runs of a folder."""

from __future__ import annotations

import typer

from engram.cli_late import late

runs_app = typer.Typer(
    cls=late(
        {
            "list": "cli_runs_list.list_runs",
            "show": "cli_runs_show.show_run",
            "compare": "cli_runs_show.compare_runs",
            "export": "cli_runs_export.export_runs",
        }
    ),
    help="List, show, compare and export the runs of a folder.",
    no_args_is_help=True,
)
