"""What ``benchmarks/reproduce.py`` keeps of a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import reproduce
from ragtag.recipes.base import Report, Row, Table

PACE = {"load_average_1min", "million_additions_ms"}


def _written(folder: Path) -> Path:
    report = Report(name="rps", title="RPS", settings={"seeds": 2, "quick": True})
    report.rows = [
        Row("first", 1.0, 0.1, 1.05, "a paper", True, "=", None, "numbers"),
        Row("second", 1.0, 0.0, 2.0, "a paper", False, "<=", 0.5, "numbers"),
    ]
    report.tables = [Table("shown", ("a", "b"), [("1", "2")])]
    report.data = {"curves": [1.0, 2.0]}
    report.write(folder)
    return folder


def test_a_finished_report_is_stored_with_its_command(tmp_path: Path) -> None:
    folder, output = _written(tmp_path / "report"), tmp_path / "results" / "rps.json"
    given = ["rps", "--seeds", "2", "--quick", "--from", str(folder), "--commit", "1a2b3c4"]
    assert reproduce.main([*given, "--output", str(output)]) == 0
    found = json.loads(output.read_text("utf-8"))
    assert found["command"] == "ragtag reproduce rps --seeds 2 --quick"
    assert (found["commit"], found["passed"], found["failed"]) == ("1a2b3c4", 1, 1)
    assert found["settings"] == {"seeds": 2, "quick": True}
    assert found["rows"][1] == {
        "group": "numbers",
        "quantity": "second",
        "relation": "<=",
        "expected": 1.0,
        "tolerance": 0.0,
        "measured": 2.0,
        "error": 0.5,
        "ok": False,
    }
    assert found["tables"] == [{"title": "shown", "columns": ["a", "b"], "rows": [["1", "2"]]}]
    assert "data" not in found and "cpu_s" not in found
    assert "cores" in found["machine"] and not PACE & found["machine"].keys(), "that is of now"


def test_a_run_is_stored_with_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[list[str], Path]] = []

    def run(command: list[str], out: Path) -> float:
        ran.append((command, _written(out)))
        return 12.34

    monkeypatch.setattr(reproduce, "run", run)
    monkeypatch.setattr(reproduce, "commit", lambda: "5d6e7f8-dirty")
    output = tmp_path / "rps.json"
    assert reproduce.main(["rps", "--quick", "--out", str(tmp_path / "out"), "--output", str(output)]) == 0
    assert ran == [(["ragtag", "reproduce", "rps", "--quick"], tmp_path / "out")]
    found = json.loads(output.read_text("utf-8"))
    assert (found["commit"], found["cpu_s"]) == ("5d6e7f8-dirty", 12.3)
    assert found["machine"].keys() >= PACE


def test_another_papers_report_is_not_stored(tmp_path: Path) -> None:
    folder = _written(tmp_path)
    with pytest.raises(ValueError, match="the report is of rps, the command of topk"):
        reproduce.main(["topk", "--from", str(folder), "--commit", "1a2b3c4"])


def test_the_commit_of_a_finished_report_must_be_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        reproduce.main(["rps", "--from", str(tmp_path)])
