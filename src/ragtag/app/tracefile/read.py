"""Reading a trace: whole, or while it is written. What is there is taken: damaged lines, and a last line that
a crash has cut short, are counted and not fatal.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from ragtag.app.tracefile.files import CREW_FILE, crews, is_written, trace_files
from ragtag.core import trace

EXAMPLES_MAX = 20


@dataclass(slots=True)
class TraceDamage:
    """What could not be read, and what a newer version has added.

    lines: damaged lines by file name.
    examples: the first of them, with line numbers.
    torn: files whose last line is cut short.
    dropped: notes of writers that met a full disk.
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


BLOCK_BYTES = 1 << 18


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


REORDER = 64
"""Records of one file that may stand out of time order (several threads write to it)."""


@dataclass(slots=True)
class RunTrace:
    """The trace of one run; each call of ``records`` reads it again from the files.

    run: the run's record as it was last written, where there is one.
    damage: what the last full reading found.
    """

    folder: Path
    files: tuple[Path, ...]
    run: trace.Run | None = None
    damage: TraceDamage = field(default_factory=TraceDamage)

    def records(self) -> Iterator[trace.Record]:
        """All records in time order, in bounded memory: a block per file."""
        damage = TraceDamage()
        yield from heapq.merge(*(_in_order(_records(path, damage)) for path in self.files), key=time_of)
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
        first = islice(_records(path, TraceDamage()), REORDER)
        runs = [record for record in first if isinstance(record, trace.Run)]
        if runs:
            run.run = [record for record in runs if run_key(record) == run_key(runs[0])][-1]
            break
    if run.run is not None and run.run.version > trace.VERSION:
        raise ValueError(
            f"{folder}: a trace of version {run.run.version}, and this Ragtag reads versions up to"
            f" {trace.VERSION}; update Ragtag to read it"
        )
    return run


def run_key(run: trace.Run) -> tuple[object, ...]:
    """What tells runs apart: of two records with the same, the later one replaces the earlier one."""
    return run.started_unix_s, run.name, run.seed, run.peers


def time_of(record: trace.Record) -> float:
    """What records are put in order by."""
    return record.t


def _records(path: Path, damage: TraceDamage) -> Iterator[trace.Record]:
    reader, decoder = LineReader(path), trace.Decoder()
    while (lines := reader.read()) is not None:
        yield from decoded(lines, path.name, decoder, damage)
    if reader.rest:
        try:
            yield decoder.decode(reader.rest, reader.number + 1)
        except ValueError:
            damage.torn.append(path.name)
    damage.unknown_kinds += decoder.unknown_kinds
    damage.extra_fields += decoder.extra_fields


def decoded(
    lines: list[tuple[int, bytes | None]], name: str, decoder: trace.Decoder, damage: TraceDamage
) -> Iterator[trace.Record]:
    """The records of these lines of the file ``name``; what is none is counted as damage."""
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


class TraceFollower:
    """Follows a run's trace files as they grow; files that come later are found too.

    Where its peers form several crews, one after the other, it follows one of them, at first the first, and
    what the launcher writes.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._crew = self.folder
        self.damage = TraceDamage()
        self._readers: dict[Path, LineReader] = {}
        self._decoder = trace.Decoder()

    def next_crew(self) -> str | None:
        """Go on to the newest crew; its name, or ``None``: there is no newer one than is followed already."""
        newest = crews(self.folder)[-1]
        if newest == self._crew:
            return None
        self._crew = newest
        return newest.name

    def _files(self) -> list[Path]:
        files = trace_files(self._crew)
        launcher = self.folder / CREW_FILE
        return files if self._crew == self.folder or not launcher.exists() else [launcher, *files]

    def is_written(self) -> bool | None:
        """Whether any process writes the trace; ``None``: there is none, or the file system cannot tell."""
        found = [is_written(path) for path in self._files()]
        if any(found):
            return True
        return None if None in found or not found else False

    def poll(self, blocks_max: int = 4) -> list[trace.Record]:
        """The records that have come, in time order; at most ``blocks_max`` blocks of each file at a time.

        Call again at once while it returns anything: an empty list means that nothing more is there now.
        """
        records: list[trace.Record] = []
        for path in self._files():
            reader = self._readers.setdefault(path, LineReader(path))
            for _ in range(blocks_max):
                lines = reader.read()
                if lines is None:
                    break
                records += decoded(lines, path.name, self._decoder, self.damage)
        self.damage.unknown_kinds, self.damage.extra_fields = (
            self._decoder.unknown_kinds,
            self._decoder.extra_fields,
        )
        return sorted(records, key=time_of)


_TAIL_BYTES = 1 << 16


def last_leaves(folder: Path) -> dict[int, trace.Leave]:
    """The last record of each peer's file that ends with one of its end, by peer; what cannot be read is
    left out. A peer that was killed has none.
    """
    found: dict[int, trace.Leave] = {}
    for path in trace_files(folder):
        if path.name == CREW_FILE:
            continue
        try:
            record = trace.decode(_last_line(path))
        except (OSError, ValueError):  # torn, or gone: the report says what is wrong with a trace
            continue
        if isinstance(record, trace.Leave) and record.peer >= 0:
            found[record.peer] = record
    return found


def _last_line(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read().rstrip(b"\n").rpartition(b"\n")[2]
