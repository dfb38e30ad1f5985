"""Whether anyone still writes a trace file: its writers hold a shared lock on it.

The system gives the lock back however a process ends, SIGKILL included, and no other process can be taken
for the writer, as one could by its number. Both sides ask without waiting.
"""

from __future__ import annotations

import fcntl
from pathlib import Path


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
