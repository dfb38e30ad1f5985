"""What a launcher on Ray writes: the crew's trace, its invitation, and the peers' traces as they come."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from ragtag.app.disk import explain
from ragtag.app.invitation.token import Token, encode, keep_token
from ragtag.app.launch.setup import Setup
from ragtag.app.tracefile import CREW_FILE, TraceWriter
from ragtag.core import trace


class Book:
    """The run's folder, if it has one. What cannot be written is told, and stops no run."""

    def __init__(self, setup: Setup, say: Callable[[str], None], stack: ExitStack) -> None:
        self._folder, self._say = setup.run_folder, say
        self._started_s = time.monotonic()
        self._broken = False
        self._run = setup.run_record(None)
        self._trace: TraceWriter | None = None
        if self._folder is not None:
            self._trace = stack.enter_context(TraceWriter(self._folder / CREW_FILE, say))
            self._trace.write(self._run)

    def now_t(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started_s

    def write(self, record: trace.Known) -> None:
        """Write a record of the crew's."""
        if self._trace is not None:
            self._trace.write(record)

    def note(self, what: str, peer: int = trace.CREW, detail: str = "") -> None:
        """Write a note."""
        self.write(trace.Note(t=self.now_t(), peer=peer, what=what, detail=detail))

    def averaging(self, method: str) -> None:
        """What peers average by is known once the first one says so: the run's record comes again, whole."""
        if method and not self._run.method:
            self._run = msgspec.structs.replace(self._run, t=self.now_t(), method=method)
            self.write(self._run)

    def keep(self, token: Token) -> None:
        """Keep an invitation, for ``ragtag invite``."""
        if self._folder is None:
            return
        try:
            keep_token(self._folder, encode(token))
        except OSError as error:
            self._say(f"no invitation to this crew could be kept: {explain(error)}")

    def append(self, name: str, data: bytes) -> None:
        """Append a piece of a peer's trace."""
        if self._folder is None or self._broken:
            return
        try:
            with (self._folder / Path(name).name).open("ab") as file:
                file.write(data)
        except OSError as error:
            self._broken = True
            self._say(f"the peers' traces are not kept any more: {explain(error)}")
