"""A guard outlives its launcher by a moment: should the launcher be killed, it kills the peers.

Why not PR_SET_PDEATHSIG: it is Linux only, needs code between fork and exec, and forgets the peers' own
children. Why not a pipe that each peer watches: a stopped peer watches nothing, and would stay for ever.
A process of its own that reads a pipe from the launcher sees its end however the launcher ends, and SIGKILL
to a process group ends stopped processes and grandchildren too, on Linux as on macOS.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import suppress

_SCRIPT = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin.buffer:
    (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
"""
_log = logging.getLogger("ragtag.launch")


class Guard:
    """Kills the process groups that it watches if this process ends without releasing them."""

    def __init__(self) -> None:
        read, self._write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SCRIPT],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._write)
            raise
        finally:
            os.close(read)

    @property
    def pid(self) -> int:
        """The guard's process."""
        return self._process.pid

    def watch(self, group: int) -> None:
        """From now on, kill this process group should this process end."""
        self._tell(b"+%d\n" % group)

    def release(self, group: int) -> None:
        """The group has ended. Release it before its leader is reaped: its number may then be used again."""
        self._tell(b"-%d\n" % group)

    def close(self, deadline_s: float = 5.0) -> None:
        """End the guard; it kills what has not been released."""
        if self._write < 0:
            return
        os.close(self._write)
        self._write = -1
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(deadline_s)

    def _tell(self, line: bytes) -> None:
        if self._write < 0:
            return
        try:
            os.write(self._write, line)
        except BrokenPipeError:
            _log.warning("the guard has been ended: should this process be killed too, its peers live on")
            with suppress(OSError):
                os.close(self._write)
            self._write = -1
            self._process.wait(5.0)
