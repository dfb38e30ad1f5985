"""Tracebacks of a script, with its author's own frames alone."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from ragtag.app.terminal.output import WHOLE, shortened
from ragtag.core.faultspec import parse_faults

SRC = Path(__file__).parents[3] / "src"
SCRIPT = """
import json
from ragtag.core.faultspec import parse_faults
def inner():
    try:
        parse_faults("no fault")
    except ValueError:
        json.loads("{")
inner()
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WHOLE, raising=False)


def raised(script: Path) -> str:
    script.write_text(SCRIPT)
    run = [sys.executable, str(script)]
    return subprocess.run(
        run, env={"PYTHONPATH": str(SRC)}, stderr=subprocess.PIPE, timeout=60, text=True
    ).stderr


def test_own_frames_and_what_was_raised_are_left(tmp_path: Path) -> None:
    text = raised(tmp_path / "script.py")
    lines = [line for line in shortened(text).splitlines() if "^" not in line]
    here = f'  File "{tmp_path}/script.py", line'
    first, second = text.count("ragtag/core"), text.count("json/")
    assert first and second
    assert lines == [
        "Traceback (most recent call last):",
        f"{here} 6, in inner",
        '    parse_faults("no fault")',
        next(line for line in text.splitlines() if "Error: " in line and line[0] != " "),
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        f"{here} 9, in <module>",
        "    inner()",
        f"{here} 8, in inner",
        '    json.loads("{")',
        next(line for line in text.splitlines() if line.startswith("json.decoder.JSONDecodeError: ")),
        f"({first + second} frames of Ragtag and other packages left out; RAGTAG_TRACEBACK=1 shows all)",
    ]


def test_asked_for_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = raised(tmp_path / "script.py")
    monkeypatch.setenv(WHOLE, "0")
    assert shortened(text) != text
    monkeypatch.setenv(WHOLE, "1")
    assert shortened(text) == text


def test_one_without_own_frames_stays_whole() -> None:
    try:
        parse_faults("no fault")
    except ValueError as error:
        frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[1:])
    text = "Traceback (most recent call last):\n" + "".join(frames) + "ValueError: no"
    assert len(frames) and shortened(text) == text
    assert shortened("just a line\n  indented") == "just a line\n  indented"


def test_a_message_of_several_lines_is_left(tmp_path: Path) -> None:
    text = (
        "Traceback (most recent call last):\n"
        f'  File "{tmp_path}/a.py", line 1, in <module>\n    f()\n'
        f'  File "{SRC}/ragtag/app/join.py", line 1, in f\n    g()\n  [Previous line repeated 7 more times]\n'
        "ValueError: one\n    two, indented\nthree"
    )
    assert shortened(text).splitlines()[3:6] == ["ValueError: one", "    two, indented", "three"]
    assert "repeated" not in shortened(text)
