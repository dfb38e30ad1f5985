"""A crew cut into single peers says so, in the log and in the trace, and counts nothing as arrived."""

from __future__ import annotations

import pytest

from ragtag.app.tracefile import read_run
from ragtag.core import trace
from tests.app.processes import Command, Place, notes, until

CUT = """
        text = f"partition={crew.rank}" if os.path.exists("cut") else ""
        crew._peer.driver.engine.injector.faults = parse_faults(text)
        time.sleep(0.02)
"""
"""What the script does in each turn of its loop: its lines are cut as long as there is a file."""


def times(place: Place, what: str, peer: int) -> int:
    return len(notes(place.run, what, peer))


def heard(crew: Command, peer: int) -> list[str]:
    """What it said of whom it heard, each time that this changed."""
    return [line for line in crew.lines(peer) if line.startswith("heard")] or [""]


@pytest.mark.slow
def test_all_lines_are_cut_for_a_while_and_for_good(place: Place) -> None:
    script = place.folder / "train.py"
    begin = "from ragtag.core.faultspec import parse_faults\n"
    script.write_text(begin + script.read_text().replace("        time.sleep(0.02)\n", CUT[1:]))
    crew, cut = place.crew(3), place.folder / "cut"
    for healed in (True, False):
        for peer in range(3):
            until(lambda peer=peer: "heard 0b111" in heard(crew, peer)[-1], f"peer {peer} hears all")
        before = [times(place, "alone", peer) for peer in range(3)]
        cut.touch()
        for peer in range(3):
            until(
                lambda peer=peer, before=before: (
                    times(place, "alone", peer) > max(before[peer], times(place, "no longer alone", peer))
                ),
                f"peer {peer} is alone",
            )
        if healed:
            cut.unlink()
    place.end()
    assert crew.code() == 0, crew.text
    records = list(read_run(place.run).records())
    for peer in range(3):
        began, over = notes(place.run, "alone", peer), notes(place.run, "no longer alone", peer)
        assert all("not heard" in note.detail for note in began)
        assert all(note.detail.endswith("heard") for note in over)
        ends = [*(note.t for note in over), float("inf")]
        assert len(began) == len(ends)  # it ends alone
        own = [record for record in records if isinstance(record, trace.Round) and record.peer == peer]
        spans = [(note.t, end) for note, end in zip(began, ends, strict=True)]
        apart = [r.arrived for r in own if any(since < r.t < until for since, until in spans)]
        assert apart and max(apart) == 0.0
        together = [r.arrived for r in own if r.t < began[0].t]
        assert together and max(together) == 1.0
        (leave,) = [r for r in records if isinstance(r, trace.Leave) and r.peer == peer]
        assert len(apart) <= leave.rounds_alone <= len(own)
        assert any(f"spent {leave.rounds_alone} of its {len(own)} rounds alone, and ends" in line
                   for line in crew.lines(peer)), crew.lines(peer)  # fmt: skip
