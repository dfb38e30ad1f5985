"""Writing and reading a run's trace files: ``peer-NN.jsonl`` for each peer and ``crew.jsonl``.

Tracing never stops training: a disk that is full, or any other error of the file system, is reported once,
records are dropped and counted, and writing goes on when there is space again. Reading takes what is
there: damaged lines and a last line cut short by a crash are counted, not fatal.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType

from ragtag.core import trace

CREW_FILE = "crew.jsonl"
BLOCK_BYTES = 1 << 18
REORDER = 64
"""Records of one file that may stand out of time order (several threads write to it)."""
EXAMPLES_MAX = 20

_ADVICE = {
    errno.ENOSPC: "the disk is full: make room, or put the run's folder on another disk",
    errno.EDQUOT: "the disk quota is used up: make room, or put the run's folder on another disk",
    errno.EIO: "the disk reports an error: check it, or put the run's folder on another disk",
    errno.EFBIG: "the file may not grow further: raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "the file system is read-only: put the run's folder on another disk",
}

_log = logging.getLogger("ragtag.trace")


def peer_file(peer: int) -> str:
    """The name of a peer's trace file in the run's folder; a peer below 0 is the crew."""
    return CREW_FILE if peer < 0 else f"peer-{peer:02d}.jsonl"


class TraceWriter:
    """Appends records to one trace file; any number of threads may write.

    Each record is one ``write`` of one whole line, so a process that is killed leaves a whole trace, and
    nothing is held in memory. A line that the disk takes only in part is taken back, or ended so that only
    it is damaged. While the disk is full, records are dropped and counted in ``dropped``, and the
    disk is tried again every ``retry_s``; what was dropped is then noted in the trace.

    on_trouble is called once each time that tracing stops, with a message that says what to do; by
    default it is logged as a warning. ``clock`` is for tests.

    Raises:
        OSError: the file cannot be opened for another reason than a full disk (a wrong path, no permission).
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
        self._torn = False
        self._gap = 0
        self._fd = -1
        self._closed = False
        self._lock = threading.Lock()
        trouble = ""
        try:
            self._open()
        except OSError as reason:
            if reason.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
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
            self._closed = True
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def _append(self, line: bytes) -> None:
        """Write a whole line or, as far as the file shows, nothing."""
        data = b"\n" + line if self._torn else line
        wrote = 0
        try:
            while wrote < len(data):
                wrote += os.write(self._fd, data[wrote:])
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
        advice = _ADVICE.get(reason.errno or 0, f"{reason.strerror or reason}")
        return f"tracing to {self.path} has stopped: {advice}. Training goes on; what is missed is counted."

    def _drop(self) -> None:
        self.dropped += 1
        self._gap += 1

    def _gap_note(self, record: trace.Record) -> trace.Note:
        return trace.Note(
            t=record.t, peer=record.peer, what="trace resumed", detail=f"{self._gap} records were dropped"
        )


class LineReader:
    """Whole lines of a growing file, a block at a time; the file is open only while a block is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self._offset = 0
        self._part = b""
        self._skipping = False

    def read(self) -> list[tuple[int, bytes | None]] | None:
        """The next block's lines with their numbers; ``None`` at the end of what is there now.

        A line longer than ``trace.LINE_BYTES_MAX`` comes as ``None``. A file that has become shorter was
        begun anew, and is read from its start.
        """
        with self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                self.number, self._offset, self._part, self._skipping = 0, 0, b"", False
            file.seek(self._offset)
            block = file.read(BLOCK_BYTES)
        if not block:
            return None
        self._offset += len(block)
        *whole, self._part = (self._part + block).split(b"\n")
        lines: list[tuple[int, bytes | None]] = []
        for line in whole:
            self.number += 1
            lines.append((self.number, None if self._skipping or len(line) > trace.LINE_BYTES_MAX else line))
            self._skipping = False
        if len(self._part) > trace.LINE_BYTES_MAX:
            self._skipping, self._part = True, b""
        return lines

    @property
    def rest(self) -> bytes:
        """What stands after the last line feed: a line cut short, or one being written."""
        return self._part


@dataclass(slots=True)
class Damage:
    """What could not be read, and what a newer version has added.

    lines: damaged lines by file name; examples: the first of them, with line numbers; torn: files whose
    last line is cut short; dropped: notes of writers that met a full disk.
    """

    lines: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    unknown_kinds: Counter[str] = field(default_factory=Counter)
    extra_fields: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, reason: str) -> None:
        """One more damaged line in the file ``name``."""
        self.lines[name] += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(f"{name}: {reason}"[:300])

    def messages(self) -> list[str]:
        """One sentence for each thing that was wrong; empty where the trace is whole."""
        said = [f"{name}: {n} damaged line(s) left out" for name, n in sorted(self.lines.items())]
        said += self.examples
        said += [f"{name}: the last line is cut short (the writer was ended)" for name in self.torn]
        newer = "written by a newer version of Ragtag"
        said += [f"{n} record(s) of unknown kind {kind!r}, {newer}" for kind, n in self.unknown_kinds.items()]
        said += [
            f"{n} record(s) with the unknown field {name}, {newer}" for name, n in self.extra_fields.items()
        ]
        return said


@dataclass(slots=True)
class RunTrace:
    """The trace of one run; each call of ``records`` reads it again from the files.

    run: the first ``run`` record, where there is one. damage: what the last full reading found.
    """

    folder: Path
    files: tuple[Path, ...]
    run: trace.Run | None = None
    damage: Damage = field(default_factory=Damage)

    def records(self) -> Iterator[trace.Record]:
        """All records in time order, in bounded memory: a block per file."""
        damage = Damage()
        yield from heapq.merge(*(_in_order(_records(path, damage)) for path in self.files), key=_time)
        self.damage = damage


def read_run(folder: Path | str) -> RunTrace:
    """The trace in a run's folder.

    Raises:
        FileNotFoundError: there is no trace; the message says what was looked for.
    """
    folder = Path(folder)
    files = tuple(trace_files(folder))
    if not files:
        what = "is not a folder" if not folder.is_dir() else f"has neither {CREW_FILE} nor peer-*.jsonl"
        raise FileNotFoundError(f"no trace to read: {folder} {what}; give the folder that a run has written")
    run = RunTrace(folder, files)
    for path in files:  # the crew's file comes first, and its first record should be the run's
        first = islice(_records(path, Damage()), REORDER)
        run.run = next((record for record in first if isinstance(record, trace.Run)), None)
        if run.run is not None:
            break
    if run.run is not None and run.run.version > trace.VERSION:
        raise ValueError(
            f"{folder}: a trace of version {run.run.version}, and this Ragtag reads versions up to"
            f" {trace.VERSION}; update Ragtag to read it"
        )
    return run


def trace_files(folder: Path) -> list[Path]:
    """The trace files that are in ``folder`` now, the crew's first, then the peers' by number."""
    crew = folder / CREW_FILE
    peers = sorted(folder.glob("peer-*.jsonl"), key=lambda path: (len(path.name), path.name))
    return ([crew] if crew.is_file() else []) + [path for path in peers if path.is_file()]


def _time(record: trace.Record) -> float:
    return record.t


def _records(path: Path, damage: Damage) -> Iterator[trace.Record]:
    reader, decoder = LineReader(path), trace.Decoder()
    while (lines := reader.read()) is not None:
        yield from _decoded(lines, path.name, decoder, damage)
    if reader.rest:
        try:
            yield decoder.decode(reader.rest, reader.number + 1)
        except ValueError:
            damage.torn.append(path.name)
    damage.unknown_kinds += decoder.unknown_kinds
    damage.extra_fields += decoder.extra_fields


def _decoded(
    lines: list[tuple[int, bytes | None]], name: str, decoder: trace.Decoder, damage: Damage
) -> Iterator[trace.Record]:
    for number, line in lines:
        try:
            if line is None:
                raise ValueError(f"trace line {number}: longer than {trace.LINE_BYTES_MAX} bytes")
            if line:
                yield decoder.decode(line, number)
        except ValueError as reason:
            damage.count(name, str(reason))


def _in_order(records: Iterator[trace.Record]) -> Iterator[trace.Record]:
    """Sort records that are at most ``REORDER`` places out of order."""
    heap: list[tuple[float, int, trace.Record]] = []
    for at, record in enumerate(records):
        heapq.heappush(heap, (record.t, at, record))
        if len(heap) > REORDER:
            yield heapq.heappop(heap)[2]
    while heap:
        yield heapq.heappop(heap)[2]


class Follower:
    """Follows a run's trace files as they grow; files that come later are found too."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.damage = Damage()
        self._readers: dict[Path, LineReader] = {}
        self._decoder = trace.Decoder()

    def poll(self, blocks_max: int = 4) -> list[trace.Record]:
        """The records that have come, in time order; at most ``blocks_max`` blocks of each file at a time.

        Call again at once while it returns anything: an empty list means that nothing more is there now.
        """
        records: list[trace.Record] = []
        for path in trace_files(self.folder):
            reader = self._readers.setdefault(path, LineReader(path))
            for _ in range(blocks_max):
                lines = reader.read()
                if lines is None:
                    break
                records += _decoded(lines, path.name, self._decoder, self.damage)
        self.damage.unknown_kinds, self.damage.extra_fields = (
            self._decoder.unknown_kinds,
            self._decoder.extra_fields,
        )
        return sorted(records, key=_time)
