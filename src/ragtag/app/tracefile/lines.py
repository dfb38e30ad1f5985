"""The lines of a trace file, as far as it has grown."""

from __future__ import annotations

import os
from pathlib import Path

from ragtag.core import trace

BLOCK_BYTES = 1 << 18


class LineReader:
    """Whole lines of a growing file, a block at a time; the file is open only while a block is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self._offset = 0
        self._part = b""
        self._skipping = False

    def read(self) -> list[tuple[int, bytes | None]] | None:
        """The next block's lines with their numbers; ``None`` at the end of what is there now.

        A line longer than ``trace.LINE_BYTES_MAX`` comes as ``None``. A file that has become shorter was
        begun anew, and is read from its start.
        """
        with self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                self.number, self._offset, self._part, self._skipping = 0, 0, b"", False
            file.seek(self._offset)
            block = file.read(BLOCK_BYTES)
        if not block:
            return None
        self._offset += len(block)
        *whole, self._part = (self._part + block).split(b"\n")
        lines: list[tuple[int, bytes | None]] = []
        for line in whole:
            self.number += 1
            lines.append((self.number, None if self._skipping or len(line) > trace.LINE_BYTES_MAX else line))
            self._skipping = False
        if len(self._part) > trace.LINE_BYTES_MAX:
            self._skipping, self._part = True, b""
        return lines

    @property
    def rest(self) -> bytes:
        """What stands after the last line feed: a line cut short, or one being written."""
        return self._part
