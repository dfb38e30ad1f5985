"""Calls the command as a person would, and reads what it printed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from typer.testing import CliRunner

from ragtag.app.cli.main import app

runner = CliRunner()
AVERAGES = """
import os, sys
for told in ("joined 0", "ready", "averaged"):
    os.write(int(os.environ["RAGTAG_READY_FD"]), f"{os.environ['RAGTAG_RANK']} {told}\\n".encode())
"""
"""What a peer tells its launcher that joins and averages."""


def invoke(*args: str | Path, width: int = 110) -> SimpleNamespace:
    env = {"COLUMNS": str(width)}
    result = runner.invoke(app, [str(arg) for arg in args], prog_name="ragtag", env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


def error_of(result: SimpleNamespace) -> str:
    """The one line that an error is; nothing else was printed."""
    assert result.out == ""
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: ")
    return str(lines[0])
