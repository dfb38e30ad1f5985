"""Builds a run's report from its trace."""

from __future__ import annotations

import re
from contextlib import suppress
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

from ragtag.app.report import charts, sections
from ragtag.app.report.data import Summary
from ragtag.app.report.drawing import marks_of
from ragtag.app.report.figures import figures
from ragtag.app.report.summarise import summarise
from ragtag.app.tracefile import read_run

_HERE = Path(__file__).parent


def build_report(run_folder: Path | str, out: Path | str | None = None) -> Path:
    """Write one self-contained HTML page about a run; returns its path.

    out: where to; by default ``report.html`` in the run's folder. The page makes no requests, works offline,
    and follows the reader's light or dark scheme. A run that goes on still is reported as far as it has come.

    Raises:
        FileNotFoundError: there is no trace in the folder.
        ValueError: the trace is of a newer version, or holds no record.
        OSError: the trace cannot be read, or the page cannot be written; a page of before stays as it is.
    """
    folder = Path(run_folder)
    path = folder / "report.html" if out is None else Path(out)
    page = render(summarise(read_run(folder)), folder.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(path, page)
    return path


def report_json(run_folder: Path | str) -> dict[str, Any]:
    """The report's headline figures as plain JSON values; see ``figures`` for the keys.

    Raises:
        FileNotFoundError: there is no trace in the folder.
        ValueError: the trace is of a newer version, or holds no record.
        OSError: the trace cannot be read.
    """
    return figures(summarise(read_run(run_folder)))


def _write_whole(path: Path, page: str) -> None:
    """Write the page or nothing: a reader of an old one never gets half of a new one."""
    partial = path.with_name(path.name + ".part")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # what could not be written can perhaps not be removed either
            partial.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def render(summary: Summary, folder: str) -> str:
    """The whole page as text."""
    marks = marks_of(summary.faults, summary.extent.t1)
    body = [
        sections.header(summary),
        sections.damage(summary),
        sections.results(summary),
        charts.all_charts(summary, marks),
        sections.faults(summary, marks),
        sections.peers(summary),
        sections.leaderboard(summary),
        sections.epochs(summary),
        sections.links(summary),
        sections.selections(summary),
        sections.replicas(summary),
        sections.gathered(summary),
        sections.private(summary),
        sections.guards(summary),
        sections.coming(summary),
        sections.events(summary),
        sections.configuration(summary, folder),
    ]
    title = summary.run.name if summary.run is not None else folder
    fill = {
        "title": escape(f"{title}: Ragtag report"),
        "version": escape(_version()),
        "css": _text("page.css"),
        "js": _text("page.js"),
        "body": "\n".join(part for part in body if part),
    }
    # One pass, so that braces in a trace's text are never filled in.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], _text("page.html"))


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _version() -> str:
    try:
        return metadata.version("ragtag")
    except metadata.PackageNotFoundError:
        return "(not installed)"
