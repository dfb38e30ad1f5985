"""A live view of a run, by following its trace files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ragtag.app.report.axes import clock
from ragtag.app.terminal.dashboard import Dashboard
from ragtag.app.tracefile import TraceFollower, trace_files

LINE_EVERY_S = 5.0
"""Without a terminal: a line about this often, in the run's time."""
UNWRITTEN_LOOKS = 2
"""So many looks in a row must find that nobody writes: a writer opens its file a moment before it says so."""


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

    until: asked after every look at the files; the view ends once it says True, and in any case once the run
    is over, or nobody writes its trace any more (its launcher was killed; ``Dashboard.abandoned``). What has
    been written by then is shown. Without a terminal, a line is printed every ``LINE_EVERY_S`` of the run's
    time, and one for every event. Of a run whose peers form several crews the newest is shown. begun: the
    run begins now, so it goes without saying that there is no trace yet. wait: for tests; sleeps
    ``refresh_s``.

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
