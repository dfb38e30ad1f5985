"""Which files in a run's folder are its trace."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path

CREW_FILE = "crew.jsonl"


def peer_file(peer: int) -> str:
    """The name of a peer's trace file in the run's folder; a peer below 0 is the crew."""
    return CREW_FILE if peer < 0 else f"peer-{peer:02d}.jsonl"


def trace_files(folder: Path) -> list[Path]:
    """The trace files that are in ``folder`` now, the crew's first, then the peers' by number.

    Raises:
        OSError: there is a folder, but it cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            names = {entry.name for entry in entries if entry.is_file()}
    except (FileNotFoundError, NotADirectoryError):
        return []
    peers = sorted(fnmatch.filter(names, "peer-*.jsonl"), key=lambda name: (len(name), name))
    return [folder / name for name in ([CREW_FILE] if CREW_FILE in names else []) + peers]
