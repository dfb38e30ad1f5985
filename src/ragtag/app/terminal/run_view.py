"""What ``ragtag run`` prints: peers' lines with their numbers, errors once, the end."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from ragtag.app.environment import Reached
from ragtag.app.launch.events import Ended, Event, Injected, LaunchResult, Printed, Ready, Remark, Seated
from ragtag.app.terminal.output import shortened
from ragtag.app.tracefile import crews, last_leaves
from ragtag.app.words import Final, counted, models_in_words, these_peers
from ragtag.core.types import PeerId

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
MIN_WIDTH = 20
"""Lines are not broken for less room than this."""
_JOIN_S = 10.0


class RunView:
    """Prints a launcher's events as they come.

    watched: a live table shows joins and faults already.
    """

    def __init__(self, out: Console, err: Console, watched: bool, on_error: str) -> None:
        self._out, self._err, self._watched, self._on_error = out, err, watched, on_error

    def show(self, event: Event) -> None:
        """Print one event."""
        if isinstance(event, Printed):
            self._print(self._err if event.error else self._out, event.peer, _plain(event.text))
        elif isinstance(event, Ended):
            self._ended(event)
        elif isinstance(event, Remark):
            self._say(event.text)
        elif isinstance(event, Seated):
            if event.seat != event.peer:  # what the crew says of it names it so
                self._say(f"peer {event.peer} of this launcher is peer {event.seat} of its crew")
        elif self._watched:
            return
        elif isinstance(event, Ready):
            self._say(_have_joined(event.peers))
        elif isinstance(event, Injected):
            self._say(f"fault {event.record.detail}", "yellow")

    def _ended(self, end: Ended) -> None:
        if end.lost:
            if not self._watched:  # else the table tells, and the end says why
                self._print(self._err, end.peer, Text(f"lost: {_why_lost(end)}", style="yellow"))
            return
        if not end.failed:
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
            self._err.print(
                Panel(_plain(shortened(end.error)), title=title, title_align="left", border_style="red")
            )
            if self._on_error == "continue":
                self._say("the others go on; --on-error stop ends them")

    def _print(self, console: Console, peer: PeerId, text: Text) -> None:
        prefix = Text(f"[{peer}] ", style=COLOURS[peer % len(COLOURS)])
        print_wrapped(console, text, prefix)

    def _say(self, text: str, style: str = "dim") -> None:
        print_wrapped(self._err, Text(f"ragtag: {text}", style=style))


def print_wrapped(console: Console, text: Text, prefix: Text | None = None) -> None:
    """Print a line: in a terminal broken between words where it is too long, with room below ``prefix``.

    A word that is too long for a line by itself, such as a path, is left whole to the terminal.
    """
    prefix = prefix or Text()
    width = console.width - prefix.cell_len
    breaks = _breaks(text.plain, width) if console.is_terminal and width >= MIN_WIDTH else []
    for line in text.divide(breaks):
        line.rstrip()
        console.print(prefix + line, soft_wrap=True)
        prefix = Text(" " * prefix.cell_len)


def _breaks(text: str, width: int) -> list[int]:
    """Where lines begin, after the first: at words that end beyond so many columns."""
    breaks: list[int] = []
    begins = column = 0
    for word in re.finditer(r"\s*\S+", text):
        indent = len(word[0]) - len(word[0].lstrip())
        if column and column + cell_len(word[0]) > width:
            begins = word.start() + indent
            breaks.append(begins)
        column = cell_len(text[begins : word.end()])
    return breaks


def summary(result: LaunchResult) -> list[str]:
    """How a run ended, in lines of markup: how many finished, then who did not and why, as far as it is
    the run's business and not the script's own error, which has been shown.
    """
    ends = result.ends
    idle = [end for end in ends if end.status == 0 and not end.finished]
    counts = {
        "finished": len(result.finished),
        "averaged nothing": len(idle),
        "lost": sum(end.lost for end in ends),
        "ended early": sum(end.by == "launcher" and end.status != 0 for end in ends),
        "[bold red]failed[/bold red]": len(result.failed),
    }
    said = [f"{count} {what}" for what, count in counts.items() if count]
    said += [f"{counted(result.restarts, 'restart')}"] if result.restarts else []
    lines = [f"{counted(len(ends), 'peer')}, {result.wall_s:.1f} s: {', '.join(said)}"]
    lines += [f"[yellow]peer {end.peer} was lost: {_why_lost(end)}[/yellow]" for end in ends if end.lost]
    for reached, what in _IDLE.items():
        who = [end.peer for end in idle if end.reached is reached]
        lines += [f"[yellow]{these_peers(who)} {what}[/yellow]"] if who else []
    few = len(result.finished) < result.min_peers
    if few and not (result.signal or result.stopped or result.failed):
        enough = "one must" if result.min_peers == 1 else f"{result.min_peers} must (--min-peers)"
        came = counted(len(result.finished), "peer") if result.finished else "no peer"
        lines.append(f"[bold red]{came} finished, and {enough}[/bold red]")
    return lines


_NEVER = "joined and never averaged a round: call optimizer.step() of crew.optimizer(...)"
_IDLE = {
    Reached.STARTED: "never called ragtag.join()",
    Reached.JOINED: _NEVER,
    Reached.READY: _NEVER,
}
"""What a peer did that came to its end without averaging, by how far it came."""


def _why_lost(end: Ended) -> str:
    """What has ended a peer other than its script, or its launcher."""
    if end.by == "fault":
        return "killed, as --faults says"
    hint = (
        "; what sent it is not known: is the machine out of memory?" if end.status == -signal.SIGKILL else ""
    )
    return end.how + hint


def models(folder: Path) -> str:
    """Whether the peers that ended well hold the same model, as their traces say; "": they do not say.

    Of a script that joined several crews, one after the other: its last crew's.
    """
    leaves = last_leaves(crews(folder)[-1])
    ended = {peer: leave for peer, leave in leaves.items() if not leave.failed}
    return models_in_words({peer: Final(leave.digest, leave.round) for peer, leave in ended.items()})


def _have_joined(peers: Sequence[PeerId]) -> str:
    return f"{counted(len(peers), 'peer')} {'has' if len(peers) == 1 else 'have'} joined"


def result_json(result: LaunchResult) -> dict[str, Any]:
    """How a run ended, as plain values."""
    return {
        "exit_code": result.exit_code,
        "run_folder": None if result.run_folder is None else str(result.run_folder),
        "wall_s": result.wall_s,
        "signal": result.signal or None,
        "restarts": result.restarts,
        "peers": [
            {
                "peer": end.peer,
                "status": end.status,
                "ended_by": end.by,
                "finished": end.finished,
                "lost": end.lost,
                "failed": end.failed,
                "error": end.error or None,
            }
            for end in result.ends
        ],
    }


@contextmanager
def watching(folder: Path, console: Console, title: str) -> Iterator[None]:
    """Show the live table of a run in a thread of its own; what goes wrong with it does not stop the run."""
    from ragtag.app.terminal.dashboard import watch

    over = threading.Event()

    def show() -> None:
        try:
            watch(folder, over.is_set, console=console, title=title, wait=over.wait, begun=True)
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
