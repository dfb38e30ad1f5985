"""What to do about errors of the file system, in words."""

from __future__ import annotations

import errno

_ADVICE = {
    errno.ENOSPC: "the disk is full: make room, or put {what} on another disk",
    errno.EDQUOT: "the disk quota is used up: make room, or put {what} on another disk",
    errno.EIO: "the disk reports an error: check it, or put {what} on another disk",
    errno.EFBIG: "the file may not grow further: raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "the file system is read-only: put {what} on another disk",
    errno.EACCES: "no permission: ask its owner, or choose another folder",
    errno.EPERM: "no permission: ask its owner, or choose another folder",
}


def advice(error: OSError, what: str) -> str:
    """What is wrong and what to do about it. what: what was to be written, as "the run's folder"."""
    known = _ADVICE.get(error.errno or 0)
    return (error.strerror or str(error)) if known is None else known.format(what=what)


def explain(error: OSError) -> str:
    """One line on an error that ends a command: which file, what is wrong, what to do."""
    if error.errno not in _ADVICE:
        return str(error)
    where = f"{error.filename}: " if error.filename is not None else ""
    return where + advice(error, "it")
