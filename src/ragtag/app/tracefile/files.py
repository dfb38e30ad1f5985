"""Which files in a run's folder are its trace, and whether anyone still writes one.

A writer holds a shared lock on its file. The system gives the lock back however a process ends, SIGKILL
included, and no other process can be taken for the writer, as one could by its number. Both sides ask
without waiting.
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import re
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


def crews(folder: Path) -> list[Path]:
    """The folders of a run's crews, in order: its own, then ``crew-2`` and so on where its peers formed more.

    Raises:
        OSError: there is a folder, but it cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            found = [re.fullmatch(r"crew-([1-9]\d{0,8})", entry.name) for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return [folder]
    later = sorted((name for name in found if name), key=lambda name: int(name[1]))
    return [folder, *(path for name in later if trace_files(path := folder / name[0]))]


def hold(fd: int) -> bool:
    """Say that this file is written for as long as ``fd`` is open.

    False: a reader asks at this very moment; say it again with the next record. Where the file system has no
    locks, nobody can tell who writes, and it is as well.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def is_written(path: Path) -> bool | None:
    """Whether a process has this trace file open to write; ``None``: the file system cannot tell."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
