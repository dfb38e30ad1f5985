"""Tracebacks of a script as its author reads them: the frames of their own code, and what was raised."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

WHOLE = "RAGTAG_TRACEBACK"
"""The environment variable that, where it is not empty or 0, has tracebacks shown whole."""
_FRAME = re.compile(r'  File "([^"]*)", line \d+')
_PACKAGE = Path(__file__).resolve().parents[1]
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
