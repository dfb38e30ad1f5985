"""What the person who typed ``ragtag run`` sees: peers' lines with their numbers, errors once, the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from ragtag.app.launch_events import Ended, Event, Injected, LaunchResult, Line, Ready, Said
from ragtag.core.types import PeerId

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
_JOIN_S = 10.0


class RunView:
    """Prints a launcher's events as they come. watched: a live table shows joins and faults already."""

    def __init__(self, out: Console, err: Console, watched: bool, on_error: str) -> None:
        self._out, self._err, self._watched, self._on_error = out, err, watched, on_error

    def show(self, event: Event) -> None:
        """Print one event."""
        if isinstance(event, Line):
            self._print(self._err if event.error else self._out, event.peer, _plain(event.text))
        elif isinstance(event, Ended):
            self._ended(event)
        elif isinstance(event, Said):
            self._err.print(Text(f"ragtag: {event.text}", style="dim"), soft_wrap=True)
        elif self._watched:
            return
        elif isinstance(event, Ready):
            self._err.print(Text(f"ragtag: {len(event.peers)} peers have joined", style="dim"))
        elif isinstance(event, Injected):
            self._err.print(Text(f"ragtag: fault {event.record.detail}", style="yellow"))

    def _ended(self, end: Ended) -> None:
        if not end.failed:
            if end.by == "fault" and not self._watched:
                self._print(self._err, end.peer, Text("killed, as the faults say", style="yellow"))
            return
        if end.same_as is not None:
            said = f"failed with the same error as peer {end.same_as}"
        elif end.shown:
            said = f"failed ({end.how}); its error is above"
        else:
            said = f"failed ({end.how})"
        self._print(self._err, end.peer, Text(said, style="bold red"))
        if end.error and end.same_as is None and not end.shown:
            title = f"peer {end.peer}"
            self._err.print(Panel(_plain(end.error), title=title, title_align="left", border_style="red"))
            if self._on_error == "continue":
                self._err.print(Text("ragtag: the others go on; --on-error stop ends them", style="dim"))

    def _print(self, console: Console, peer: PeerId, text: Text) -> None:
        prefix = Text(f"[{peer}] ", style=COLOURS[peer % len(COLOURS)])
        console.print(prefix + text, soft_wrap=True)


def summary(result: LaunchResult) -> str:
    """How a run ended, in one line of markup."""
    ends = result.ends
    counts = {
        "done": sum(end.status == 0 for end in ends),
        "killed by a fault": sum(end.by == "fault" for end in ends),
        "ended early": sum(end.by == "launcher" for end in ends),
        "[bold red]failed[/bold red]": len(result.failed),
    }
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{len(ends)} peers, {result.wall_s:.1f} s: {said}"


def result_json(result: LaunchResult) -> dict[str, Any]:
    """How a run ended, as plain values."""
    return {
        "exit_code": result.exit_code,
        "run_folder": None if result.run_folder is None else str(result.run_folder),
        "wall_s": result.wall_s,
        "signal": result.signal or None,
        "peers": [
            {
                "peer": end.peer,
                "status": end.status,
                "ended_by": end.by,
                "failed": end.failed,
                "error": end.error or None,
            }
            for end in result.ends
        ],
    }


@contextmanager
def watching(folder: Path, console: Console, title: str) -> Iterator[None]:
    """Show the live table of a run in a thread of its own; what goes wrong with it does not stop the run."""
    from ragtag.app.watch import watch

    over = threading.Event()

    def show() -> None:
        try:
            watch(folder, over.is_set, console=console, title=title, wait=over.wait)
        except Exception as error:
            console.print(f"[yellow]the live table has ended: {escape(str(error))}[/yellow]")

    thread = threading.Thread(target=show, name="ragtag-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_JOIN_S)


def _plain(line: str) -> Text:
    """A peer's own colours are kept; other control sequences would spoil the table."""
    text = Text.from_ansi(line) if "\x1b" in line else Text(line)
    text.plain = "".join(c if c.isprintable() or c in "\n\t" else " " for c in text.plain)
    return text
