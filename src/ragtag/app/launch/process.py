"""One peer's process: started in a session of its own, read without blocking, ended with all its children."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ragtag.app.launch.relay import Relay
from ragtag.app.terminal.output import Lines, SeenErrors, Tracebacks, shortened
from ragtag.core.types import PeerId

KILL_S = 10.0
"""How long a process may take to end after SIGKILL."""
READ_BYTES = 65_536
_DRAIN_READS_MAX = 64

Show = Callable[[str, bool], None]
"""Told of each line, and whether it is of standard error."""


@dataclass(slots=True)
class Stream:
    """One of a peer's two output pipes."""

    peer: PeerProcess
    fd: int
    error: bool
    lines: Lines = field(default_factory=Lines)


class PeerProcess:
    """A Python process with these arguments and environment.

    fds: are handed down to it.
    relay: reads its output; without one this process does, by the selector.
    streams: what the relay's numbers mean; those of this peer are added.
    """

    def __init__(
        self,
        number: PeerId,
        argv: Sequence[str],
        env: dict[str, str],
        fds: tuple[int, ...],
        selector: selectors.BaseSelector,
        show: Show,
        relay: Relay | None = None,
        streams: dict[int, Stream] | None = None,
    ) -> None:
        self.number, self.killed = number, False
        self._relay, self._relayed = relay, [2 * number, 2 * number + 1]
        self.tracebacks = Tracebacks()
        self._selector, self._show = selector, show
        self._reaped = False
        self._streams: list[Stream] = []
        self._process = subprocess.Popen(
            [sys.executable, *argv],
            env=env,
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.pid = self._process.pid
        for pipe, error in ((self._process.stdout, False), (self._process.stderr, True)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            stream = Stream(self, pipe.fileno(), error)
            if relay is not None and streams is not None and relay.alive:
                streams[self._relayed[error]] = stream
                self._streams.append(stream)
                relay.watch(self._relayed[error], stream.fd)
            else:
                selector.register(stream.fd, selectors.EVENT_READ, stream)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it has started."""
        if self._reaped:
            return  # the number may be another's by now
        with suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies permits nothing
            os.killpg(self.pid, number)

    def has_ended(self) -> bool:
        """Whether the process has ended; it is not reaped where the system can tell without."""
        if hasattr(os, "waitid"):  # macOS: from Python 3.13 on
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return self._process.poll() is not None

    def reap(self) -> int:
        """The status of a process that has ended or is about to: its exit status, or minus a signal.

        Raises:
            subprocess.TimeoutExpired: it goes on for ``KILL_S`` more.
        """
        status = self._process.wait(KILL_S)
        self._reaped = True
        return status

    # -- Output

    def read(self, stream: Stream) -> bool:
        """Show what is there now; False: nothing is, or nothing will be."""
        try:
            data = os.read(stream.fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(stream.fd)
        self.take(stream, data)
        return bool(data)

    def take(self, stream: Stream, data: bytes) -> None:
        """Show what a stream has brought; where that is nothing it has ended."""
        self._lines(stream, stream.lines.feed(data) if data else stream.lines.close())

    def skip(self, stream: Stream, n_bytes: int, n_lines: int) -> None:
        """Show that something of a stream is missing here."""
        for text in self.tracebacks.release():
            self._show(text, True)
        told = f"[{n_lines:,} lines ({n_bytes:,} bytes) are missing here: nothing took what was printed]"
        for text in [*stream.lines.close(), told]:
            self._show(text, stream.error)

    def release(self, now_s: float, seen: SeenErrors) -> None:
        """Show the traceback that has been held back long enough; of one that another peer had, whose it is.

        A process that dies of it may take longer to end, also where its peers die of the same.
        """
        if held := "\n".join(self.tracebacks.due(now_s)):
            first = seen.same_as(self.number, held)
            told = shortened(held) if first is None else f"the same traceback as peer {first}'s"
            for text in told.splitlines():
                self._show(text, True)

    def drain(self) -> None:
        """Read what an ended process has left in its pipes; a daemon of its own may hold them open."""
        if self._relay is not None:
            self._relay.finish(self._relayed, KILL_S)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            key = self._selector.get_map().get(pipe.fileno())
            if key is not None:
                for _ in range(_DRAIN_READS_MAX):
                    if not self.read(key.data):
                        break
                if pipe.fileno() in self._selector.get_map():
                    self._selector.unregister(pipe)
                    self._lines(key.data, key.data.lines.close())
            pipe.close()
        for stream in self._streams:  # the last line, where no line feed has ended it
            self.take(stream, b"")

    def _lines(self, stream: Stream, lines: list[str]) -> None:
        if stream.error:
            lines = self.tracebacks.feed(lines, time.monotonic())
        for text in lines:
            self._show(text, stream.error)
