"""Gradient coherence is drawn where peers measured it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragtag.app.report import build_report, report_json
from ragtag.app.tracefile import CREW_FILE, TraceWriter, peer_file
from ragtag.core import trace
from tests.app.report.test_timeline import pace


def write(folder: Path, *coherence: list[float]) -> None:
    with TraceWriter(folder / CREW_FILE) as writer:
        writer.write(trace.Run(t=0.0, world="live", name="two", seed=1, peers=2, method="rps"))
    for peer, values in enumerate(coherence):
        with TraceWriter(folder / peer_file(peer)) as writer:
            for second in range(1, 9):
                writer.write(trace.Step(t=second, peer=peer, step=second, samples=second, loss=1.0))
                steps = [second * 10 + at for at in range(len(values))]
                more = {"coherence": values, "coherence_steps": steps}
                writer.write(pace(second, peer, 0.9, 0.1, **more))
            writer.write(trace.Leave(t=9.0, peer=peer, steps=8))


def test_it_is_drawn_and_its_middle_is_told(tmp_path: Path) -> None:
    write(tmp_path, [0.5, 0.25], [-0.75])
    page = build_report(tmp_path).read_text(encoding="utf-8")
    assert "Gradient coherence" in page
    figures = report_json(tmp_path)["coherence"]
    assert figures == {"count": 24, "median": pytest.approx(0.25), "lowest": -0.75}


def test_without_it_there_is_no_chart(tmp_path: Path) -> None:
    write(tmp_path, [], [])
    assert "Gradient coherence" not in build_report(tmp_path).read_text(encoding="utf-8")
    assert report_json(tmp_path)["coherence"]["count"] == 0
