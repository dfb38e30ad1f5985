"""The demo, small: what it does in full takes a minute and a half, and is `make demo`."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ragtag.app.demo import DemoError, DemoPlan, run_demo
from ragtag.app.demo.processes import Processes
from ragtag.app.report import report_json
from ragtag.app.tracefile import read_run
from ragtag.core.faults import Faults

SMALL = DemoPlan(
    peers=3,
    rounds=20,
    every=4,
    frozen=1,
    frozen_at=0.1,
    frozen_for=0.1,
    killed=2,
    killed_at=0.3,
)


@pytest.mark.slow
@pytest.mark.timeout(600)  # eight processes import torch
def test_a_small_demo_trains_through_a_death_and_leaves_a_report(tmp_path: Path) -> None:
    out = io.StringIO()
    result = run_demo(plan=SMALL, folder=tmp_path / "demo", console=Console(file=out), live=False)
    assert result.report == tmp_path / "demo" / "crew" / "report.html"
    assert "<html" in result.report.read_text("utf-8")
    said = report_json(tmp_path / "demo" / "crew")
    assert (said["lost"], said["method"], said["errors"]) == ([2], "rps", 0)
    assert {fault["name"] for fault in said["faults"]} == {"loss", "freeze", "kill"}
    assert said["accuracy"]["mean_model"] == pytest.approx(result.survivors_mean)
    assert result.alone < result.all_data
    assert report_json(tmp_path / "demo" / "calm")["lost"] == []


def test_a_peer_that_leaves_nothing_is_named_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")  # no torch here
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    processes = Processes(replace(SMALL, seed=7), tmp_path / "demo", Console(file=io.StringIO()), live=False)
    with pytest.raises(DemoError, match=r"(?s)calm: peer 0, 1, 2 did not end as it should:.*\[0\].*torch"):
        processes.crew("calm", Faults(), "a story")
    run = read_run(tmp_path / "demo" / "calm").run
    assert run is not None and run.command == "ragtag demo --seed 7"
