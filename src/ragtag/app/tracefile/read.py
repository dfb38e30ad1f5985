"""Reading a whole trace. What is there is taken: damaged lines, and a last line that a crash has cut short,
are counted and not fatal.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from ragtag.app.tracefile.damage import Damage
from ragtag.app.tracefile.lines import LineReader
from ragtag.app.tracefile.names import CREW_FILE, trace_files
from ragtag.core import trace

REORDER = 64
"""Records of one file that may stand out of time order (several threads write to it)."""


@dataclass(slots=True)
class RunTrace:
    """The trace of one run; each call of ``records`` reads it again from the files.

    run: the run's record as it was last written, where there is one. damage: what the last full reading
    found.
    """

    folder: Path
    files: tuple[Path, ...]
    run: trace.Run | None = None
    damage: Damage = field(default_factory=Damage)

    def records(self) -> Iterator[trace.Record]:
        """All records in time order, in bounded memory: a block per file."""
        damage = Damage()
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
        first = islice(_records(path, Damage()), REORDER)
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


def _records(path: Path, damage: Damage) -> Iterator[trace.Record]:
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
    lines: list[tuple[int, bytes | None]], name: str, decoder: trace.Decoder, damage: Damage
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
