"""A run in the terminal: a table of peers made of trace records (``watch`` follows its files)."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ragtag.app.terminal.peers import STATES, PeerTable, printable
from ragtag.app.tracefile import TraceFollower, trace_files
from ragtag.app.words import bytes_text, clock, counted, in_words, seconds
from ragtag.core import trace

WIDE = 112
"""From this many columns on, the view has its less important figures too."""
EVENTS_SHOWN = 3
_COLUMNS = (
    ("Peer", "Peer", "#", 2),
    ("State", "State", "State", 8),
    ("Step", "Step", "Step", 5),
    ("Loss", "Loss", "Loss", 6),
    ("Accuracy", "Accuracy", "Acc.", 6),
    ("Round", "Round", "Round", 5),
    ("Round time", "Median", "Time", 7),
    ("Last one", "Last", "Last", 7),
    ("Arrived", "Arrived", "Arr.", 6),
    ("Missed", "Missed", "Miss", 4),
    ("Sent", "Sent", "Sent", 7),
    ("Received", "Received", "Recv.", 7),
)
"""Each column's head in a wide terminal, in a narrower one and in a narrow one; its least width, so that
columns do not come and go with the length of a figure."""
_SPARED = ("Received", "Last one", "Sent", "Missed")
"""Columns that go first where not all fit."""
STYLES = {
    "waiting": "dim",
    "auxiliary": "cyan",
    "training": "",
    "elsewhere": "dim",
    "ended": "dim",
    "silent": "yellow",
    "frozen": "bold cyan",
    "gone": "bold red",
    "failed": "bold red",
    "done": "green",
}
LINE_EVERY_S = 5.0
"""Without a terminal: a line about this often, in the run's time."""
UNWRITTEN_LOOKS = 2
"""So many looks in a row must find that nobody writes: a writer opens its file a moment before it says so."""


class Dashboard:
    """A table of peers built from records; ``feed`` it, and ``render`` it when the screen is refreshed.

    n_peers: rows to begin with; peers that records name are added. Not thread-safe.
    """

    def __init__(self, n_peers: int, title: str = "") -> None:
        self.title = printable(title)
        self.crew = ""
        """Which of a run's crews this is, where it is not the first."""
        self.peers = PeerTable(n_peers)
        self.abandoned = False
        """Whether the run's processes have gone without a word."""

    def feed(self, record: trace.Record) -> None:
        """One more record; they may come a little out of time order."""
        self.peers.feed(record)
        if isinstance(record, trace.Run):
            self.title = self.title or printable(record.name)

    def begin_anew(self, crew: str) -> None:
        """The run's peers have left one crew for the next, of this name."""
        self.crew, self.peers = printable(crew), PeerTable(0)

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
        live = [row for row in self.peers.rows.values() if row.left or not row.gone]
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
        title = Text(
            ", ".join(filter(None, (self.title or "Ragtag", self.crew))),
            style="bold",
            no_wrap=True,
            overflow="ellipsis",
        )
        rows = len(self.peers.rows)
        facts = [counted(rows, "peer") if rows else "no peer yet", clock(round(self.peers.now_s, 1))]
        if self.peers.run is not None and self.peers.run.method:
            facts.insert(0, printable(self.peers.run.method))
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

    def _table(self, width: int, rows_most: int, console: Console, options: ConsoleOptions) -> RenderableType:
        """The table with the longest heads, and then with the most columns, that fit the width."""
        peers = sorted(self.peers.rows)
        if len(peers) > rows_most:  # peers in trouble come first, then the lowest numbers
            ranked = sorted(peers, key=lambda p: (STATES.index(self.peers.state(p)), p))
            peers = sorted(ranked[: rows_most - 1])
        rows = [self._cells(peer) for peer in peers]
        of = self.peers.rows.values()
        idle = {  # what no peer has anything of is not shown
            "Step": not any(row.steps_done for row in of),
            "Loss": not any(row.losses or row.loss_bad for row in of),
            "Accuracy": all(row.accuracy is None for row in of),
        }
        columns = [k for k, (name, *_) in enumerate(_COLUMNS) if not idle.get(name)]
        fewer = [[k for k in columns if _COLUMNS[k][0] not in _SPARED[:n]] for n in range(len(_SPARED) + 1)]
        tries = [(fewer[0], 0), (fewer[0], 1), (fewer[1], 1), *((few, 2) for few in fewer[1:])]
        table = Table()
        for some, heads in tries:
            table = self._filled(some, heads, rows)
            if Measurement.get(console, options.update(max_width=10 * width), table).maximum <= width:
                break
        table.expand = True
        if len(peers) < len(self.peers.rows):
            more = len(self.peers.rows) - len(peers)
            table.add_row("...", Text(f"{more} more", style="dim"))
        return table

    def _filled(self, columns: list[int], heads: int, rows: list[list[RenderableType]]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 0 if heads else 1), pad_edge=False)
        for k in columns:
            left = _COLUMNS[k][0] in ("Peer", "State")
            table.add_column(
                str(_COLUMNS[k][heads]),
                justify="left" if left else "right",
                no_wrap=True,
                min_width=int(_COLUMNS[k][3]),
            )
        for cells in rows:
            table.add_row(*(cells[k] for k in columns))
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
        dim = "dim" if state in ("gone", "waiting", "elsewhere") else ""
        return [cell if isinstance(cell, Text) else Text(str(cell), style=dim) for cell in cells]

    def _foot(self) -> RenderableType:
        shown = _news(self.peers.events)[-EVENTS_SHOWN:]
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
        yield self._of._table(width, max(4, console.height - 8 - EVENTS_SHOWN), console, options)
        yield self._of._foot()


def _news(events: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Events, without those that a later one says again: a peer that did not answer is back."""
    kept: list[tuple[float, str]] = []
    back: set[str] = set()
    for t, text in reversed(list(events)):
        who, silent, _ = text.partition(f" {in_words('silent')}")
        if silent and who in back:
            back.discard(who)
            continue
        who, was_silent, _ = text.partition(" did not answer for ")
        if was_silent:
            back.add(who)
        kept.append((t, text))
    return kept[::-1]


def _alike(apart: float) -> str:
    """How far replicas that are compared are alike."""
    return f"replicas {apart:.1%} apart" if apart else "replicas alike"


def _mean(values: deque[float], form: str) -> str:
    return form.format(statistics.fmean(values)) if values else "-"


# -- Following a run


def watch(
    folder: Path | str,
    until: Callable[[], bool] | None = None,
    *,
    console: Console | None = None,
    title: str = "",
    refresh_s: float = 0.25,
    wait: Callable[[float], object] | None = None,
    begun: bool = False,
) -> Dashboard:
    """Show a run as it goes, by following its trace files; returns the last state.

    until: asked after every look at the files; the view ends once it says True.
    begun: the run begins now, so it goes without saying that there is no trace yet.
    wait: for tests; sleeps ``refresh_s``.

    The view ends in any case once the run is over, or nobody writes its trace any more (its launcher was
    killed; ``Dashboard.abandoned``). What has been written by then is shown. Without a terminal, a line is
    printed every ``LINE_EVERY_S`` of the run's time, and one for every event. Of a run whose peers form
    several crews the newest is shown.

    Raises:
        FileNotFoundError: there is no such folder.
        OSError: the folder or a file in it cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no run to watch: {folder} is not a folder; give the folder that a run writes"
        )
    console = console or Console()
    follower, dashboard = TraceFollower(folder), Dashboard(0, title)
    if not begun and not trace_files(folder):
        console.print(Text(f"no trace in {folder} yet: waiting for a run to write one there", style="dim"))
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as screen:
            _follow(follower, dashboard, until, wait, refresh_s, _Screen(screen, dashboard))
    else:
        _follow(follower, dashboard, until, wait, refresh_s, plain := _PlainLines(console, dashboard))
        plain.end()
    if dashboard.abandoned:
        console.print(Text(_abandoned(folder, dashboard), style="bold red"), soft_wrap=True)
    return dashboard


def _follow(
    follower: TraceFollower,
    dashboard: Dashboard,
    until: Callable[[], bool] | None,
    wait: Callable[[float], object] | None,
    refresh_s: float,
    view: _Screen | _PlainLines,
) -> None:
    """Feed the dashboard from the files until there is a reason to end."""
    pause = wait or threading.Event().wait
    unwritten = 0
    while True:
        ending = until is not None and until()  # asked first: what was written before is still read
        written = follower.is_written()  # and so is this
        while records := follower.poll():
            for record in records:
                dashboard.feed(record)
            view.fed()
        if crew := follower.next_crew():
            view.crew_over()
            dashboard.begin_anew(crew)
            continue
        view.all_read()
        if ending or dashboard.peers.ended or (dashboard.over and not written):
            return
        unwritten = unwritten + 1 if written is False else 0
        if unwritten >= UNWRITTEN_LOOKS:
            dashboard.abandoned = True
            return
        pause(refresh_s)


def _abandoned(folder: Path, dashboard: Dashboard) -> str:
    rows = dashboard.peers.rows
    open_ = [peer for peer, row in rows.items() if not (row.left or row.gone or row.failed_t is not None)]
    who = f"peer {', '.join(map(str, open_))} had not ended" if open_ else "it does not say that it ended"
    return (
        f"the run has stopped: nothing writes to {folder} any more, and {who}; was it killed? "
        f"`ragtag report {folder}` shows how far it came"
    )


def _line_of(dashboard: Dashboard) -> str:
    """What a crew came to, before the next one is shown."""
    return f"{dashboard.crew or 'crew-1'}: {dashboard.line()}"


class _Screen:
    """The table, redrawn in place."""

    def __init__(self, screen: Live, dashboard: Dashboard) -> None:
        self._screen, self._dashboard = screen, dashboard

    def fed(self) -> None:
        pass  # more may be there: it is drawn once all is read

    def crew_over(self) -> None:
        self._screen.console.print(Text(_line_of(self._dashboard), style="dim"), soft_wrap=True)

    def all_read(self) -> None:
        self._screen.update(self._dashboard.render(), refresh=True)


class _PlainLines:
    """Occasional lines instead of a table."""

    def __init__(self, console: Console, dashboard: Dashboard) -> None:
        self._console, self._dashboard = console, dashboard
        self._line_at_s = 0.0
        self._last_line = ""
        self._last_event: tuple[float, str] | None = None

    def fed(self) -> None:
        self._show(last=False)

    def crew_over(self) -> None:
        self._show(last=True)

    def all_read(self) -> None:
        pass

    def end(self) -> None:
        self._show(last=True)

    def _show(self, last: bool) -> None:
        events = list(self._dashboard.peers.events)
        at = next((k for k in range(len(events) - 1, -1, -1) if events[k] is self._last_event), -1)
        for t, text in events[at + 1 :]:
            self._print(f"{clock(round(t, 1))}  {text}")
        if events:
            self._last_event = events[-1]
        line = self._dashboard.line()
        if (last and line != self._last_line) or self._dashboard.peers.now_s >= self._line_at_s:
            self._print(line)
            self._last_line = line
            self._line_at_s = self._dashboard.peers.now_s + LINE_EVERY_S

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
