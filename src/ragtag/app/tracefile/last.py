"""How the peers of a run ended, without reading its whole trace."""

from __future__ import annotations

import os
from pathlib import Path

from ragtag.app.tracefile.names import CREW_FILE, trace_files
from ragtag.core import trace

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
