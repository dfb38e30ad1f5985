"""A peer as a Ray actor: it runs the script in a process of its own, and tells what comes of it.

The script has a process to itself (its main thread, its signals, its environment, its output) and shares the
actor's fate: a guard kills it when the actor dies, however that happens. A thread follows it: what it
prints, its trace, its end.
"""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ragtag.app.environment import VARIABLES, Announcement, Place, read_announcements
from ragtag.app.launch.guard import Guard
from ragtag.app.launch.process import READ_BYTES, PeerProcess, Stream
from ragtag.app.on_ray.library import own_host
from ragtag.app.on_ray.register import PeerAddresses
from ragtag.app.terminal.output import SeenErrors
from ragtag.app.tracefile import crews, trace_files
from ragtag.core.trace import LINE_BYTES_MAX
from ragtag.network.link.udp import bound_at

_OF_OTHERS = {*VARIABLES, "RAGTAG_RAY"}
LOOK_S = 0.2
"""How often a script's end and its trace are looked for, if it prints nothing meanwhile."""
LINES_MAX = 4096
"""Lines that wait to be fetched; older ones are dropped, and counted."""
TOLD_MAX = 64
"""Announcements of its peer that wait likewise."""
TRACE_BYTES_MAX = LINE_BYTES_MAX
"""How much of a trace file is passed on at a time: a line at least."""


@dataclass(frozen=True, slots=True)
class End:
    """How a script ended.

    status: its exit status, or minus the number of a signal.
    held: the traceback that it left.
    passed_on: the last one that came as lines already.
    """

    status: int
    held: str
    passed_on: str


@dataclass(slots=True)
class News:
    """What has come of a script since the last look.

    lines: text, and whether of standard error.
    dropped: lines that nobody fetched in time.
    told: how far the peer has come.
    trace: whole lines to append to the file of this path in the run's folder.
    end: the last news.
    """

    lines: list[tuple[str, bool]] = field(default_factory=list)
    dropped: int = 0
    told: list[Announcement] = field(default_factory=list)
    trace: list[tuple[str, bytes]] = field(default_factory=list)
    end: End | None = None


class Script:
    """A Python process of these arguments.

    fds: are handed down to it.
    traced: whether it writes a trace.

    Its environment is this process's, and its place in the crew.
    """

    def __init__(self, argv: Sequence[str], place: dict[str, str], fds: Sequence[int], traced: bool) -> None:
        base = {name: value for name, value in os.environ.items() if name not in _OF_OTHERS}
        base.setdefault("PYTHONUNBUFFERED", "1")
        self._folder = Path(tempfile.mkdtemp(prefix="ragtag-peer-")) if traced else None
        if self._folder is not None:
            base["RAGTAG_RUN"] = str(self._folder)
        self._sent: dict[Path, int] = {}
        self._lines: deque[tuple[str, bool]] = deque(maxlen=LINES_MAX)
        self._dropped = 0
        self._told: list[Announcement] = []
        self._end: End | None = None
        self._trouble: BaseException | None = None
        self._something = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._ready, ready = os.pipe()
        os.set_blocking(self._ready, False)
        self._selector.register(self._ready, selectors.EVENT_READ, None)
        try:
            env = base | place | {"RAGTAG_READY_FD": str(ready)}
            self._guard = Guard()
            self._process = PeerProcess(0, argv, env, (*fds, ready), self._selector, self._show)
        finally:
            os.close(ready)
        self._guard.watch(self._process.pid)
        threading.Thread(target=self._follow, name="ragtag-script", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        self._process.signal(signal.Signals(number))

    def take(self, wait_s: float) -> News:
        """What is new; waits up to ``wait_s`` for something to be. Raises what has ended the thread."""
        with self._something:
            self._something.wait_for(self._any, wait_s)
            news = News(list(self._lines), self._dropped, self._told)
            self._lines.clear()
            self._dropped, self._told = 0, []
            end = self._end
            if self._trouble is not None:
                raise self._trouble
        news.trace = self._new_trace()
        if not news.trace:  # all that it wrote has been passed on
            news.end = end
            if end is not None and self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
        return news

    def _any(self) -> bool:
        return bool(self._lines or self._told) or bool(self._end or self._trouble)

    # -- The thread

    def _follow(self) -> None:
        try:
            self._see_to_its_end()
        except BaseException as error:
            self._process.signal(signal.SIGKILL)
            with self._something:
                self._trouble = error
                self._something.notify_all()

    def _see_to_its_end(self) -> None:
        seen = SeenErrors()  # of this peer: nobody here knows those of others
        while not self._process.has_ended():
            for key, _ in self._selector.select(LOOK_S):
                if isinstance(key.data, Stream):
                    self._process.read(key.data)
                elif not self._read_ready():
                    self._selector.unregister(self._ready)
            self._process.release(time.monotonic(), seen)
        self._process.signal(signal.SIGKILL)  # what it left behind
        self._guard.release(self._process.pid)
        status = self._process.reap()
        self._process.drain()
        self._read_ready()  # what it told last
        self._guard.close()
        self._selector.close()
        os.close(self._ready)
        tracebacks = self._process.tracebacks
        with self._something:
            self._end = End(status, tracebacks.take(), tracebacks.passed_on)
            self._something.notify_all()

    def _read_ready(self) -> bool:
        """Take what it has told; whether more may come."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self._ready, READ_BYTES)
        with self._something:
            self._told = (self._told + read_announcements(data))[-TOLD_MAX:]
            self._something.notify_all()
        return bool(data)

    def _show(self, text: str, error: bool) -> None:
        with self._something:
            self._dropped += len(self._lines) == LINES_MAX
            self._lines.append((text, error))
            self._something.notify_all()

    # -- The trace

    def _new_trace(self) -> list[tuple[str, bytes]]:
        """Whole lines of each file, of all crews, that have not been passed on yet."""
        found: list[tuple[str, bytes]] = []
        if self._folder is None:
            return found
        for path in (path for crew in crews(self._folder) for path in trace_files(crew)):
            with path.open("rb") as file:
                file.seek(self._sent.get(path, 0))
                data = file.read(TRACE_BYTES_MAX)
            data = data[: data.rfind(b"\n") + 1]
            if data:
                self._sent[path] = self._sent.get(path, 0) + len(data)
                found.append((str(path.relative_to(self._folder)), data))
        return found


def variables(place: Place) -> dict[str, str]:
    """A place as text, for another process; the run's folder is that of the machine where it runs."""
    return {name: value for name, value in place.variables().items() if name != "RAGTAG_RUN"}


@dataclass(frozen=True, slots=True)
class ActorCame:
    """An actor is there.

    life: names this process of it; a restarted actor has another. runs: whether the script was started."""

    life: str
    host: str
    arrival: PeerAddresses
    runs: bool


class PeerActor:
    """One peer. Its sockets are bound before the script starts: datagrams that come early wait in them."""

    def __init__(self) -> None:
        self._life = secrets.token_hex(8)
        self._host = own_host()
        self._data, self._member = bound_at(self._host), bound_at(self._host)
        self._script: Script | None = None

    def come(self) -> ActorCame:
        """Where this peer is."""
        arrival = PeerAddresses(self._data.getsockname()[:2], self._member.getsockname()[:2])
        return ActorCame(self._life, self._host, arrival, self._script is not None)

    def start(
        self, life: str, argv: Sequence[str], place: dict[str, str], cwd: str | None, traced: bool
    ) -> int | None:
        """Start the script; its process. ``None``: the actor has been restarted since ``life``.

        Raises:
            FileNotFoundError: the script is not on this node.
        """
        if life != self._life or self._script is not None:
            return None
        if cwd is not None and Path(cwd).is_dir():
            os.chdir(cwd)
        if argv[0] != "-m" and not Path(argv[0]).exists():
            raise FileNotFoundError(
                f"there is no script {argv[0]} on the node {self._host}; give --working-dir, whose files Ray "
                "brings to every node, or have the script under the same path on each"
            )
        fds = self._data.fileno(), self._member.fileno()
        place = place | {"RAGTAG_FD": str(fds[0]), "RAGTAG_MEMBER_FD": str(fds[1])}
        self._script = Script(argv, place, fds, traced)
        return self._script.pid

    def follow(self, life: str, wait_s: float) -> News | None:
        """What is new of the script. ``None``: the actor has been restarted since ``life``."""
        if life != self._life or self._script is None:
            return None
        return self._script.take(wait_s)

    def signal(self, life: str, number: int) -> None:
        """Send the script a signal."""
        if life == self._life and self._script is not None:
            self._script.signal(number)
