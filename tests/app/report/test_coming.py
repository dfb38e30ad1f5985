"""Who came and went, in the report."""

from __future__ import annotations

from pathlib import Path

from ragtag.app.report import sections
from ragtag.app.report.figures import figures
from ragtag.app.report.summarise import summarise
from ragtag.app.tracefile import CREW_FILE, TraceWriter, peer_file, read_run
from ragtag.core import trace


def run(folder: Path, notes: list[tuple[float, str, int]], client: int = -1) -> Path:
    crew = TraceWriter(folder / CREW_FILE)
    crew.write(trace.Run(t=0.0, world="live", name="otters", seed=3, peers=2, method="allreduce"))
    for peer in (0, 1):
        writer = TraceWriter(folder / peer_file(peer))
        writer.write(trace.Join(t=1.0, peer=peer, client=peer == client))
        for t, what, other in notes:
            if other != peer:
                writer.write(trace.Note(t=t, peer=peer, what=what, other=other, detail=f"<b>name-{other}"))
        writer.write(trace.Leave(t=60.0, peer=peer))
        writer.close()
    crew.write(trace.Leave(t=61.0))
    crew.close()
    return folder


def test_newcomers_are_in_the_table_and_in_a_list_of_their_own(tmp_path: Path) -> None:
    summary = summarise(
        read_run(run(tmp_path, [(5.0, "comes", 2), (6.0, "takes part", 2), (20.0, "declared dead", 2)]))
    )
    assert summary.peers[2].state == "dead"
    html = sections.coming(summary)
    for said in ("is on its way in", "takes part", "is taken for dead", "0, 1", "&lt;b&gt;name-2"):
        assert said in html
    assert "partition" not in html and "<b>" not in html
    assert "declared dead" not in sections.events(summary)
    assert "joined from elsewhere" in sections.peers(summary)


def test_a_partition_that_healed_is_said_in_words(tmp_path: Path) -> None:
    notes = [(5.0, "declared dead", 1), (9.0, "healed", 1), (9.0, "back", 1)]
    html = sections.coming(summarise(read_run(run(tmp_path, notes))))
    assert "Peer 1 did not answer for a while, was taken for dead, and is back" in html
    assert html.count(">is back<") == 1  # which two notes say


def test_where_nobody_came_or_went_there_is_no_such_section(tmp_path: Path) -> None:
    assert sections.coming(summarise(read_run(run(tmp_path, [(5.0, "silent", 1)])))) == ""


def test_clients_are_named(tmp_path: Path) -> None:
    summary = summarise(read_run(run(tmp_path, [(5.0, "no owner", 1)], client=1)))
    assert [p.client for p in summary.peers.values()] == [False, True]
    assert "2 peers (peer 1 is a client)" in sections.header(summary)
    assert "ended (client)" in sections.peers(summary) and figures(summary)["clients"] == [1]
    assert "has nobody left to average for it but clients" in sections.events(summary)


def test_an_auxiliary_is_named_and_is_no_peer_that_trains(tmp_path: Path) -> None:
    for last, state in (
        ("", "auxiliary"),
        ("has left", "auxiliary, left"),
        ("declared dead", "auxiliary, dead"),
    ):
        notes = [(5.0, "comes", 2), (6.0, "assists", 2), *([(20.0, last, 2)] if last else [])]
        (folder := tmp_path / (last or "stays")).mkdir()
        summary = summarise(read_run(run(folder, notes)))
        assert summary.peers[2].state == state and summary.peers[2].auxiliary
        assert summary.charted == [0, 1] and summary.lost == []
        assert "2 peers and 1 auxiliary" in sections.header(summary)
        assert "joined from elsewhere" not in sections.peers(summary)
        assert "averages for the crew as an auxiliary, and trains nothing" in sections.coming(summary)
        told = figures(summary)
        assert (told["peers"], told["auxiliaries"]) == (2, 1)
    (folder := tmp_path / "seat").mkdir()
    notes = [(5.0, "assists", 2), (9.0, "has left", 2), (12.0, "takes part", 2)]
    later = summarise(read_run(run(folder, notes)))  # another process has its seat, and trains
    assert later.peers[2].state == "elsewhere" and not later.peers[2].auxiliary
