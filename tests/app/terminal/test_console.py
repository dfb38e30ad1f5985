"""A console that no run depends on."""

from __future__ import annotations

import io

from ragtag.app.terminal.console import SparedConsole


def test_a_character_that_a_terminal_does_not_have_ends_no_run() -> None:
    raw = io.BytesIO()
    console = SparedConsole(file=io.TextIOWrapper(raw, "latin-1", line_buffering=True))
    console.print("caf\ufffd and \u4f60")
    assert raw.getvalue() == b"caf? and ?\n"
