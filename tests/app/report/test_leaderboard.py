"""Persons' samples: the report tells who has added them up, and how old they are."""

from __future__ import annotations

from pathlib import Path

from ragtag.app.report import build_report
from ragtag.app.tracefile import TraceWriter, peer_file
from ragtag.core import trace


def test_samples_of_persons_come_with_the_time_at_which_they_were_last_told(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / peer_file(1)) as writer:
        for t, samples in ((10.0, [64, 32]), (20.5, [640, 32])):
            writer.write(
                trace.Leaderboard(t=t, peer=1, persons=["alice", "bob"], samples=samples, processes=[2, 1])
            )
        writer.write(trace.Leave(t=25.0, peer=1))
    page = build_report(tmp_path).read_text(encoding="utf-8")
    section = page[page.index("<h2>Persons</h2>") :]
    assert "peer 1 has heard it and added it up, last at 20.5 s" in section
    assert "those since are left out where it ended without a word, or was put out" in section
    assert section.index("<td>alice</td>") < section.index(">640</td>") < section.index("<td>bob</td>")
