"""A crew cut into single peers says so, in the log and in the trace, and counts nothing as arrived."""

from __future__ import annotations

import pytest

from ragtag.app.tracefile import read_run
from ragtag.core import trace
from tests.app.processes import Place, notes, until


@pytest.mark.slow
def test_all_lines_are_cut_for_a_while_and_for_good(place: Place) -> None:
    cut = "partition=0@4+5,partition=1@4+5,partition=0@16,partition=1@16"
    crew = place.command("crew", "run", "-n", "3", "-o", str(place.run), "--faults", cut, "train.py")
    crew.says("heard 0b111")
    for peer in range(3):
        until(lambda peer=peer: len(notes(place.run, "alone", peer)) == 2, f"peer {peer} is alone again")
    place.end()
    assert crew.code() == 0, crew.text
    records = list(read_run(place.run).records())
    for peer in range(3):
        (first, second), (over, *_) = (
            notes(place.run, "alone", peer),
            notes(place.run, "no longer alone", peer),
        )
        assert first.t < over.t < second.t
        assert "not heard" in first.detail and over.detail.endswith("heard")
        own = [record for record in records if isinstance(record, trace.Round) and record.peer == peer]
        apart = [r.arrived for r in own if first.t < r.t < over.t or r.t > second.t]
        assert apart and max(apart) == 0.0
        together = [r.arrived for r in own if r.t < first.t - 2.0]
        assert together and max(together) == 1.0
        (leave,) = [r for r in records if isinstance(r, trace.Leave) and r.peer == peer]
        assert len(apart) <= leave.rounds_alone <= len(own)
        assert any(f"spent {leave.rounds_alone} of its {len(own)} rounds alone, and ends" in line
                   for line in crew.lines(peer)), crew.lines(peer)  # fmt: skip
