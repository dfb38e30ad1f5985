"""How ``ragtag join`` is told its token: what other users of the machine can read is no place for it."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

VARIABLE = "RAGTAG_TOKEN"
_TOKEN = re.compile(r"\s*ragtag\d+-", re.IGNORECASE)
_TEXT_MAX = 8192


class JoinCommand(TyperCommand):
    """Takes options between TOKEN and SCRIPT, too, and no TOKEN where the environment has it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Bring the arguments into the order that the parser knows: options, TOKEN, SCRIPT, its arguments."""
        options, rest = self._parted(ctx, args)
        if "--" not in options:
            if os.environ.get(VARIABLE):
                if rest and (rest[0] == "-" or _TOKEN.match(rest[0])):
                    ctx.fail(f"the token is in {VARIABLE} already; give it once")
                token = [VARIABLE]
            else:
                token, rest = rest[:1], rest[1:]
            more, rest = self._parted(ctx, rest)
            args = [*options, *more, *token, *rest]
        return super().parse_args(ctx, args)

    def _parted(self, ctx: Any, args: list[str]) -> tuple[list[str], list[str]]:
        """Options that stand first, and what begins with the first argument that is none."""
        found, left, _ = self.make_parser(ctx).parse_args(args=list(args))
        named = [found[name] for name in ("token", "script") if isinstance(found.get(name), str)]
        at = len(args) - len(named) - len(found.get("args") or ()) - len(left)
        return args[:at], args[at:]


def is_folder(given: str) -> bool:
    """Whether a TOKEN is a run's folder."""
    return _is(given, Path.is_dir)


def _is(given: str, what: Callable[[Path], bool]) -> bool:
    """Whether a file is that; a token, or what was to be one, may be too long for a file's name."""
    try:
        return _TOKEN.match(given) is None and what(Path(given))
    except OSError:
        return False


def token_text(given: str) -> str:
    """The token that is meant: a file's content, standard input's (``-``), the environment's, or itself.

    One that stands in the command line is made unreadable there, where the system lets a process do that.

    Raises:
        ValueError: there is none.
        OSError: the file cannot be read.
    """
    if given == VARIABLE:
        text = os.environ.get(VARIABLE, "")
        if not text:
            raise ValueError(
                f"{VARIABLE} is not set; put the token there, in a file, or on standard input (-)"
            )
        return text
    if given == "-":
        return _of_input()
    if _is(given, Path.exists):
        with Path(given).open(encoding="utf-8", errors="replace") as file:
            return file.read(_TEXT_MAX + 1)
    hide(given)
    return given


def _of_input() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.read(_TEXT_MAX + 1)
    print("token: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline(_TEXT_MAX + 1)


def hide(text: str) -> bool:
    """Overwrite ``text`` in this process's command line, as ``ps`` shows it to every user; whether it was.

    Linux alone tells where that is (proc(5): arg_start and arg_end, fields 48 and 49 of /proc/PID/stat).
    """
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, IndexError, ValueError):
        return False
    secret = os.fsencode(text)
    at = ctypes.string_at(start, end - start).find(secret) if 0 < start < end and secret else -1
    if at < 0:
        return False
    ctypes.memset(start + at, ord("x"), len(secret))
    return True
