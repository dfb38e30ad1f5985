"""What to do about errors of the file system: in words, and where nothing depends on the file."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

_ADVICE = {
    errno.ENOSPC: "the disk is full: make room, or put {what} on another disk",
    errno.EDQUOT: "the disk quota is used up: make room, or put {what} on another disk",
    errno.EIO: "the disk reports an error: check it, or put {what} on another disk",
    errno.EFBIG: "the file may not grow further: raise the limit on file sizes (ulimit -f)",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has too many files open: close some",
    errno.EROFS: "the file system is read-only: put {what} on another disk",
    errno.EACCES: "no permission: ask its owner, or choose another folder",
    errno.EPERM: "no permission: ask its owner, or choose another folder",
}


def advice(error: OSError, what: str) -> str:
    """What is wrong and what to do about it.

    what: what was to be written, as "the run's folder".
    """
    known = _ADVICE.get(error.errno or 0)
    return (error.strerror or str(error)) if known is None else known.format(what=what)


def explain(error: OSError) -> str:
    """One line on an error that ends a command: which file, what is wrong, what to do."""
    if error.strerror is None:
        return str(error)
    where = f"{error.filename}: " if error.filename is not None else ""
    return where + advice(error, "it")


class Spare:
    """Writes that training does not depend on: one that fails costs a warning, and is tried again later.

    what: is written, as "the invitation to this crew".
    tell: is given one line when writing begins to fail, and one when it works again.
    retry_s: between two attempts while it fails.
    clock: for tests.
    """

    def __init__(
        self,
        what: str,
        tell: Callable[[str], None],
        retry_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._tell = what, tell
        self._retry_s, self._clock = retry_s, clock
        self._again_s: float | None = None

    def write(self, write: Callable[[], None]) -> bool:
        """Call ``write`` unless it has just failed; whether it was called and did not raise OSError."""
        now_s, failing = self._clock(), self._again_s is not None
        if self._again_s is not None and now_s < self._again_s:
            return False
        try:
            write()
        except OSError as error:
            self._again_s = now_s + self._retry_s
            if not failing:
                self._tell(f"{self._what} cannot be written: {advice(error, 'it')}. The run goes on.")
            return False
        self._again_s = None
        if failing:
            self._tell(f"{self._what} is written again")
        return True
