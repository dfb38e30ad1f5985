"""Which files in a run's folder are its trace."""

from __future__ import annotations

from pathlib import Path

CREW_FILE = "crew.jsonl"


def peer_file(peer: int) -> str:
    """The name of a peer's trace file in the run's folder; a peer below 0 is the crew."""
    return CREW_FILE if peer < 0 else f"peer-{peer:02d}.jsonl"


def trace_files(folder: Path) -> list[Path]:
    """The trace files that are in ``folder`` now, the crew's first, then the peers' by number."""
    crew = folder / CREW_FILE
    peers = sorted(folder.glob("peer-*.jsonl"), key=lambda path: (len(path.name), path.name))
    return ([crew] if crew.is_file() else []) + [path for path in peers if path.is_file()]
