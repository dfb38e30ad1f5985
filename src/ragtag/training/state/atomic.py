"""Files that are there whole or not at all, whichever process dies when."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

_PIECE_BYTES = 8 << 20
_NAMES_MAX = 1_000
_HIDDEN = re.compile(r"\..+\.\d+-\d+\.tmp")

_log = logging.getLogger("ragtag.checkpoint")


def write_whole(path: Path, parts: Iterable[bytes], mode: int = 0o666, lasting: bool = True) -> None:
    """Write a file so that at every moment ``path`` is what it was, or is complete and on the disk.

    The parts go to a hidden file beside it, locked while its process lives; then fsync, rename, and fsync of
    the folder.
    mode: its permissions, less the umask.
    lasting: whether it is to outlive a loss of power; without, nothing waits for the disk.
    Raises OSError; the hidden file is then gone.
    """
    hidden, file = _create(path, mode)
    try:
        try:
            for part in parts:
                _write(file, part)
            if lasting:
                os.fsync(file)
            hidden.replace(path)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise
    finally:
        os.close(file)  # and with it the lock
    if lasting:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make what was renamed in a folder, or removed from it, last through a loss of power."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove_dead(folder: Path, name: re.Pattern[str]) -> None:
    """Remove hidden files that writers of files called ``name`` have left when they died.

    Those of living writers are locked. What cannot be locked or removed stays, and a line in the log says so.
    """
    with os.scandir(folder) as entries:
        found = [entry.name for entry in entries if _HIDDEN.fullmatch(entry.name)]
    for hidden in found:
        if name.fullmatch(hidden[1:].rsplit(".", 2)[0]):
            try:
                _remove_if_dead(folder / hidden)
            except FileNotFoundError:
                continue  # its writer has finished meanwhile, or another one has removed it
            except OSError as error:
                _log.warning("%s is left over and cannot be removed: %s", folder / hidden, error)


def _remove_if_dead(hidden: Path) -> None:
    file = os.open(hidden, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if _lock(file) and _is_at(file, hidden):
            hidden.unlink()
    finally:
        os.close(file)


def _create(path: Path, mode: int) -> tuple[Path, int]:
    """A hidden file of this process alone, locked where the file system has locks."""
    for number in range(_NAMES_MAX):
        hidden = path.with_name(f".{path.name}.{os.getpid()}-{number}.tmp")
        with contextlib.suppress(FileExistsError):  # another thread's, or left by a process of this number
            file = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            try:
                if _lock_own(file) and _is_at(file, hidden):
                    return hidden, file
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # someone has removed it before it was locked
    raise FileExistsError(f"{path.parent} is full of hidden files .{path.name}.*.tmp; remove them")


def _lock(file: int) -> bool:
    """Take a file's lock unless somebody has it. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_own(file: int) -> bool:
    try:
        return _lock(file)
    except OSError as error:  # no locks here: then nobody can lock it to remove it either
        _log.debug("no locks on this file system: %s", error)
        return True


def _is_at(file: int, path: Path) -> bool:
    """Whether ``path`` still is this open file."""
    try:
        return os.path.samestat(os.fstat(file), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left[:_PIECE_BYTES]) :]
