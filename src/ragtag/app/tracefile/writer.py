"""Writing one trace file.

Tracing never stops training: a disk that is full, or any other error of the file system, is reported once,
records are dropped and counted, and writing goes on when there is space again.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ragtag.app.disk import advice
from ragtag.app.tracefile.files import hold
from ragtag.app.tracefile.thin import Thinner
from ragtag.core import trace

_log = logging.getLogger("ragtag.trace")
_WRONG_PATH = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EEXIST,
}


class TraceWriter:
    """Appends records to one trace file; any number of threads may write.

    Each record is one ``write`` of one whole line, so a process that is killed leaves a whole trace, and
    nothing is held in memory. A line that the disk takes only in part is taken back, or ended so that only
    it is damaged. While the disk is full, records are dropped and counted in ``dropped``, and the
    disk is tried again every ``retry_s``; what was dropped is then noted in the trace. As long as a writer is
    open, readers can tell that the file is written (``files``). A file does not grow without end (``thin``).

    on_trouble: called once each time that tracing stops, with a message that says what to do; by default it
        is logged as a warning.
    clock: for tests.

    Raises:
        OSError: the path is wrong, or may not be written. What may pass (a full disk, too many open files)
            is only told, and tried again.
    """

    def __init__(
        self,
        path: Path | str,
        on_trouble: Callable[[str], None] | None = None,
        retry_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self.dropped = 0
        self._on_trouble = on_trouble or _log.warning
        self._retry_s, self._clock = retry_s, clock
        self._retry_at_s: float | None = None
        self._torn = self._held = False
        self._gap = 0
        self._thinner, self._size = Thinner(), 0
        self._fd = -1
        self._closed = False
        self._lock = threading.Lock()
        trouble = ""
        try:
            self._open()
        except OSError as reason:
            if reason.errno in _WRONG_PATH:
                raise
            trouble = self._stop(reason)
        if trouble:
            self._on_trouble(trouble)

    def write(self, record: trace.Record) -> None:
        """Append one record; on a file system's error it is dropped and counted.

        Raises:
            ValueError: the record cannot be encoded (see ``trace.encode``).
        """
        line = trace.encode(record)
        trouble = ""
        with self._lock:
            lines = self._lines(record, line)
            if not lines:
                return
            waiting = self._retry_at_s is not None and self._clock() < self._retry_at_s
            if waiting or self._closed:
                self._drop()
                return
            try:
                if self._fd < 0:
                    self._open()
                if self._gap:
                    self._append(trace.encode(self._gap_note(record)))
                    self._gap = 0
                for line in lines:
                    self._append(line)
                self._retry_at_s = None
            except OSError as reason:
                again = self._retry_at_s is not None
                message = self._stop(reason)
                trouble = "" if again else message
                self._drop()
        if trouble:
            self._on_trouble(trouble)

    def close(self) -> None:
        """Close the file; what is written from then on is dropped and counted."""
        with self._lock:
            if not self._closed and self._fd >= 0:
                with suppress(OSError):
                    for rest in self._thinner.rest():
                        self._append(trace.encode(rest))
            self._closed = True
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                with suppress(OSError):  # some file systems say only now that the disk is full
                    os.close(fd)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def _lines(self, record: trace.Record, line: bytes) -> list[bytes]:
        """What is to be written for a record, which is this line."""
        if isinstance(record, trace.Unknown):
            return [line]
        taken = self._thinner.take(record, self._size)
        lines = [line if one is record else trace.encode(one) for one in taken]
        if isinstance(record, trace.Leave) and self._thinner.left_out:
            detail = f"{self._thinner.left_out} records were left out: the file is full"
            lines.insert(
                0, trace.encode(trace.Note(t=record.t, peer=record.peer, what="trace full", detail=detail))
            )
            self._thinner.left_out = 0
        return lines

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._held = hold(self._fd)

    def _append(self, line: bytes) -> None:
        """Write a whole line or, as far as the file shows, nothing."""
        self._held = self._held or hold(self._fd)
        data = b"\n" + line if self._torn else line
        wrote = 0
        try:
            while wrote < len(data):
                wrote += os.write(self._fd, data[wrote:])
            self._size += wrote
        except OSError:
            if wrote:
                self._take_back(wrote)
            raise
        self._torn = False

    def _take_back(self, wrote: int) -> None:
        try:
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - wrote)
        except OSError:
            self._torn = True  # the next line begins with a line feed

    def _stop(self, reason: OSError) -> str:
        self._retry_at_s = self._clock() + self._retry_s
        why = advice(reason, "the run's folder")
        return f"tracing to {self.path} has stopped: {why}. The run goes on; what is missed is counted."

    def _drop(self) -> None:
        self.dropped += 1
        self._gap += 1

    def _gap_note(self, record: trace.Record) -> trace.Note:
        return trace.Note(
            t=record.t,
            peer=record.peer,
            what="trace resumed",
            detail=f"{self._gap} record{'s were' if self._gap > 1 else ' was'} dropped",
        )
