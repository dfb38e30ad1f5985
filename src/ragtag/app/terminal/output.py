"""What peers print: lines of bounded length, and tracebacks, once, as their author reads them."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ragtag.core.types import PeerId

LINE_BYTES_MAX = 16_384
"""A longer line is cut into lines of this length."""
HOLD_S = 2.0
"""How long a traceback is held back to see whether its peer dies of it."""
HELD_LINES_MAX = 1_000

_TRACEBACK = re.compile(
    r'\s*(\+ Exception Group )?Traceback \(most recent call last\):|  File "[^"]*", line \d+$'
    r"|Exception ignored (in|on|while)[: ]"
)
"""How one begins; of a script that is no Python, with the place of the error; of what Python could not raise
(an interrupt amid its own end, a `__del__`), with where that was.
"""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class Lines:
    """Bytes of a pipe to lines of text; of a line that overwrites itself (``\\r``) the last state stays."""

    def __init__(self, bytes_max: int = LINE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._part = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes."""
        *whole, part = (self._part + data).split(b"\n")
        lines = [text for line in whole for text in self._cut(line.rstrip(b"\r"))]
        part = part[part.rfind(b"\r", 0, -1) + 1 :]  # a final \r may be half of \r\n
        if len(part) > self._bytes_max:
            *full, rest = self._pieces(part)
            lines += map(self._text, full)
            part = rest
        self._part = part
        return lines

    def close(self) -> list[str]:
        """The last line, where no line feed ended it."""
        part, self._part = self._part.rstrip(b"\r"), b""
        return self._cut(part) if part else []

    def _cut(self, line: bytes) -> list[str]:
        return [self._text(piece) for piece in self._pieces(line[line.rfind(b"\r") + 1 :])]

    def _pieces(self, line: bytes) -> list[bytes]:
        return [line[at : at + self._bytes_max] for at in range(0, len(line) or 1, self._bytes_max)]

    def _text(self, piece: bytes) -> str:
        return piece.decode("utf-8", "replace")


@dataclass(slots=True)
class Tracebacks:
    """Holds a traceback in a peer's standard error back until it is known whether the peer dies of it.

    One that it survives is passed on after ``HOLD_S``; so is a longer one than ``HELD_LINES_MAX`` lines.
    """

    held: list[str] = field(default_factory=list)
    until_s: float | None = None
    passed_on: str = ""

    def feed(self, lines: Iterable[str], now_s: float) -> list[str]:
        """The lines that are to be shown now."""
        shown: list[str] = []
        for line in lines:
            if self.until_s is None and _TRACEBACK.match(line):
                self.until_s = now_s + HOLD_S
            if self.until_s is None:
                shown.append(line)
            else:
                self.held.append(line)
                if len(self.held) >= HELD_LINES_MAX:
                    shown += self.release()
        return shown

    def due(self, now_s: float) -> list[str]:
        """What has been held back long enough."""
        return self.release() if self.until_s is not None and now_s >= self.until_s else []

    def release(self) -> list[str]:
        """Pass on what is held."""
        lines, self.held, self.until_s = self.held, [], None
        if lines:
            self.passed_on = "\n".join(lines)
        return lines

    def take(self) -> str:
        """What is held, not to be passed on: the peer's last words."""
        text, self.held, self.until_s = "\n".join(self.held), [], None
        return text


@dataclass(slots=True)
class SeenErrors:
    """Which peer failed first with which error; object addresses do not make an error another one."""

    _first: dict[str, PeerId] = field(default_factory=dict)

    def same_as(self, peer: PeerId, text: str) -> PeerId | None:
        """The peer that failed with this error before, or ``None``: it is new."""
        if not text:
            return None
        first = self._first.setdefault(_ADDRESS.sub("0x", text), peer)
        return None if first == peer else first


def last_line(text: str) -> str:
    """The line of a traceback that says what was raised (the last that is not indented)."""
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if not line[0].isspace()), lines[-1] if lines else "")


def interrupted(text: str) -> bool:
    """Whether a traceback is that of a peer that was asked to stop."""
    return any(line.startswith("KeyboardInterrupt") for line in text.splitlines()[-3:])


WHOLE = "RAGTAG_TRACEBACK"
"""The environment variable that, where it is not empty or 0, has tracebacks shown whole."""
_FRAME = re.compile(r'  File "([^"]*)", line \d+')
_PACKAGE = Path(__file__).resolve().parents[2]
_LIBRARY = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) + os.sep for name in ("stdlib", "purelib", "platlib")}
)


def shortened(text: str) -> str:
    """A traceback without the frames of Ragtag, of installed packages and of Python itself.

    One without a frame of anybody else's stays whole, and so does every one where ``WHOLE`` is set. How many
    frames are left out is said.
    """
    if os.environ.get(WHOLE, "0") not in ("", "0"):
        return text
    kept: list[str] = []
    mine, left_out, own = True, 0, 0
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            mine = not _of_a_library(frame[1])
            own, left_out = own + mine, left_out + (not mine)
        elif not line.startswith("    ") and not line.startswith("  [Previous line repeated"):
            mine = True  # what was raised, or the head of the next one
        if mine:
            kept.append(line)
    if not own or not left_out:
        return text
    frames = "1 frame" if left_out == 1 else f"{left_out} frames"
    return "\n".join([*kept, f"({frames} of Ragtag and other packages left out; {WHOLE}=1 shows all)"])


def _of_a_library(path: str) -> bool:
    if path.startswith("<frozen "):
        return True
    if path.startswith("<"):
        return False  # "<string>", "<stdin>": the author's
    resolved = Path(path).resolve()
    packages = {"site-packages", "dist-packages"} & set(resolved.parts)
    return bool(packages) or _PACKAGE in resolved.parents or str(resolved).startswith(_LIBRARY)
