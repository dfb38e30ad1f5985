"""``ragtag report`` and ``ragtag watch``: what a run's trace says."""

from __future__ import annotations

import typer

from ragtag.app.cli import options
from ragtag.app.cli.common import plain_errors, print_json


@plain_errors
def report(
    run: options.Run,
    out: options.OutPage = None,
    open_: options.Open = False,
    as_json: options.Json = False,
) -> None:
    """Make one self-contained page of a run: accuracy, arrival, round times, faults, who was missed when."""
    from ragtag.app.report import build_report, report_json

    if as_json:
        print_json(report_json(run))
        return
    page = build_report(run, out)
    typer.echo(str(page))
    if open_:
        typer.launch(page.resolve().as_uri())


@plain_errors
def watch(run: options.Run) -> None:
    """Follow a run in the terminal until it is over; Ctrl-C leaves the run alone."""
    from ragtag.app.terminal.watch import watch as follow

    if follow(run).abandoned:
        raise typer.Exit(1)
