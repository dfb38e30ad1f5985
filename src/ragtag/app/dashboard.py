"""A run in the terminal: a table of peers, made of trace records as they come."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ragtag.app.peers import STATES, Peers, plain
from ragtag.app.report.axes import clock, seconds
from ragtag.app.report.html import bytes_text
from ragtag.app.words import counted
from ragtag.core import trace

WIDE = 112
"""From this many columns on, the table has its less important columns too."""
EVENTS_SHOWN = 3
_COLUMNS = (
    ("Peer", "#"),
    ("State", "State"),
    ("Step", "Step"),
    ("Loss", "Loss"),
    ("Accuracy", "Acc."),
    ("Round", "Round"),
    ("Round time", "Time"),
    ("last", "last"),
    ("Arrived", "Arr."),
    ("Missed", "Miss"),
    ("Sent", "Sent"),
    ("Received", "Recv."),
)
"""Each column's head, in a wide terminal and in a narrow one."""
STYLES = {
    "waiting": "dim",
    "training": "",
    "silent": "yellow",
    "frozen": "bold cyan",
    "gone": "bold red",
    "failed": "bold red",
    "done": "green",
}


class Dashboard:
    """A table of peers built from records; ``feed`` it, and ``render`` it when the screen is refreshed.

    n_peers: rows to begin with; peers that records name are added. Not thread-safe.
    """

    def __init__(self, n_peers: int, title: str = "") -> None:
        self.title = plain(title)
        self.peers = Peers(n_peers)
        self.abandoned = False
        """Whether the run's processes have gone without a word."""

    def feed(self, record: trace.Record) -> None:
        """One more record; they may come a little out of time order."""
        self.peers.feed(record)
        if isinstance(record, trace.Run):
            self.title = self.title or plain(record.name)

    @property
    def over(self) -> bool:
        """Whether every peer is done, gone or has failed."""
        return self.peers.over

    def render(self) -> RenderableType:
        """The whole view; it fits itself to the width and height it is printed in."""
        return _View(self)

    def line(self) -> str:
        """The view in one line, for where there is no terminal."""
        states: dict[str, int] = {}
        for peer in self.peers.rows:
            states[self.peers.state(peer)] = states.get(self.peers.state(peer), 0) + 1
        said = ", ".join(f"{states[name]} {name}" for name in reversed(STATES) if name in states)
        live = [row for row in self.peers.rows.values() if not row.gone]
        losses = [value for row in live for value in row.losses]
        parts = [clock(round(self.peers.now_s, 1)), said]
        if self.peers.progress is not None:
            parts.insert(1, f"{self.peers.progress:.0%}")
        if losses:
            parts.append(f"loss {statistics.fmean(losses):.3g}")
        if (accuracy := self.peers.accuracy) is not None:
            parts.append(f"accuracy {accuracy:.1%}")
        times = [value for row in live for value in row.round_s]
        if times:
            parts.append(f"round {seconds(statistics.median(times))}")
        arrived = [value for row in live for value in row.arrived]
        if arrived:
            parts.append(f"arrived {statistics.fmean(arrived):.1%}")
        if self.peers.apart is not None:
            parts.append(_alike(self.peers.apart))
        return "  ".join(parts)

    # -- Drawing

    def _head(self, width: int) -> RenderableType:
        title = Text(self.title or "Ragtag", style="bold", no_wrap=True, overflow="ellipsis")
        facts = [counted(len(self.peers.rows), "peer"), clock(round(self.peers.now_s, 1))]
        if self.peers.run is not None and self.peers.run.method:
            facts.insert(0, plain(self.peers.run.method))
        if (accuracy := self.peers.accuracy) is not None:
            facts.append(f"accuracy {accuracy:.1%}")
        if self.peers.apart is not None:
            facts.append(_alike(self.peers.apart))
        if self.peers.mean_accuracy is not None and width >= WIDE:
            facts.append(f"mean model {self.peers.mean_accuracy:.1%}")
        lines: list[RenderableType] = [title]
        about = Text("  ".join(facts), style="dim", no_wrap=True, overflow="ellipsis")
        share = self.peers.progress
        if share is not None:
            bar = ProgressBar(1.0, share, complete_style="cyan", finished_style="green")
            row = Table.grid(padding=(0, 1), expand=True)
            row.add_column(ratio=1)
            row.add_column(justify="right", no_wrap=True)
            row.add_column(no_wrap=True)
            row.add_row(bar, f"{share:4.0%}", about)
            lines.append(row)
        else:
            lines.append(about)
        return Group(*lines)

    def _table(self, width: int, rows_most: int) -> RenderableType:
        wide = width >= WIDE
        table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1) if wide else (0, 0), pad_edge=False)
        of = self.peers.rows.values()
        idle = {  # what no peer has anything of is not shown
            "Step": not any(row.steps_done for row in of),
            "Loss": not any(row.losses or row.loss_bad for row in of),
            "Accuracy": all(row.accuracy is None for row in of),
        }
        columns = [
            k for k, (name, _) in enumerate(_COLUMNS) if not idle.get(name) and (wide or name != "Received")
        ]
        heads = [_COLUMNS[k][0 if wide else 1] for k in columns]
        for head in heads:
            left = head in ("Peer", "#", "State")
            table.add_column(head, justify="left" if left else "right", no_wrap=True)
        peers = list(self.peers.rows)
        if len(peers) > rows_most:  # who is in trouble comes first, then the lowest numbers
            ranked = sorted(peers, key=lambda p: (STATES.index(self.peers.state(p)), p))
            peers = sorted(ranked[: rows_most - 1])
        for peer in peers:
            cells = self._cells(peer)
            table.add_row(*(cells[k] for k in columns))
        if len(peers) < len(self.peers.rows):
            table.add_row("...", Text(f"{len(self.peers.rows) - len(peers)} more", style="dim"))
        return table

    def _cells(self, peer: int) -> list[RenderableType]:
        row, state = self.peers.rows[peer], self.peers.state(peer)
        loss = Text("nan", style="bold red") if row.loss_bad else Text(_mean(row.losses, "{:.3f}"))
        median = statistics.median(row.round_s) if row.round_s else None
        cells: list[RenderableType] = [
            str(peer),
            Text(state, style=STYLES[state]),
            f"{row.steps_done:,}",
            loss,
            "-" if row.accuracy is None else f"{row.accuracy:.1%}",
            "-" if row.round is None else f"{row.round:,}",
            "-" if median is None else seconds(median),
            seconds(row.round_s[-1]) if row.round_s else "-",
            _mean(row.arrived, "{:.1%}"),
            f"{row.missed:,}",
            bytes_text(row.sent),
            bytes_text(row.received),
        ]
        dim = "dim" if state in ("gone", "waiting") else ""
        return [cell if isinstance(cell, Text) else Text(str(cell), style=dim) for cell in cells]

    def _foot(self) -> RenderableType:
        shown = list(self.peers.events)[-EVENTS_SHOWN:]
        lines = [
            Text(f"{clock(round(t, 1)):>8}  {text}", no_wrap=True, overflow="ellipsis") for t, text in shown
        ]
        return Group(*lines) if lines else Text("no events so far", style="dim")


class _View:
    """Draws a dashboard for the width and height at hand."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._of = dashboard

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = options.max_width
        yield self._of._head(width)
        yield self._of._table(width, max(4, console.height - 8 - EVENTS_SHOWN))
        yield self._of._foot()


def _alike(apart: float) -> str:
    """How far replicas that are compared are alike."""
    return f"replicas {apart:.1%} apart" if apart else "replicas alike"


def _mean(values: deque[float], form: str) -> str:
    return form.format(statistics.fmean(values)) if values else "-"
