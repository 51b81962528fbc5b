"""`engram runs`: list, show, compare and export the runs of a folder."""

from __future__ import annotations

import typer

from engram.cli.late import late

runs_app = typer.Typer(
    cls=late(
        {
            "list": "runs_list.list_runs",
            "show": "runs_show.show_run",
            "compare": "runs_show.compare_runs",
            "export": "runs_export.export_runs",
        }
    ),
    help="List, show, compare and export the runs of a folder.",
    no_args_is_help=True,
)
