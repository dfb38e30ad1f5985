"""The live view knows who is up."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragtag.app.experiment import ExperimentSetup, RoundFigures, simulate
from ragtag.app.terminal.peers import PeerTable
from ragtag.app.tracefile import TraceFollower
from ragtag.core import trace
from tests.app.synthetic import Story
from tests.app.terminal.watching import fed, in_time, states, step

STORY = Story(rounds=100, round_s=0.5)


def test_a_run_from_its_start_to_its_end() -> None:
    frozen, killed = STORY.at(STORY.freeze_at), STORY.at(STORY.kill_at)
    thaws = STORY.at(STORY.freeze_at + STORY.freeze_for)
    assert states(fed(STORY, 0.3).peers) == ["waiting"] * 6
    assert states(fed(STORY, frozen - 0.1).peers) == ["training"] * 6
    assert fed(STORY, frozen + 1).peers.state(2) == "frozen"
    assert states(fed(STORY, thaws + 2).peers) == ["training"] * 6
    assert fed(STORY, killed + 1).peers.state(4) == "gone"
    end = fed(STORY)
    assert states(end.peers) == ["done"] * 4 + ["gone", "done"]
    assert end.over and end.peers.progress == 1.0
    said = [text for _, text in end.peers.events]
    back = "peer 2 did not answer for 6 s, and is back"
    assert said[:4] == ["loss: 10% of datagrams", "peer 2 is frozen", back, "peer 4 is gone"]


def test_what_a_row_holds() -> None:
    end = fed(STORY).peers
    records = [r for r in in_time(STORY) if isinstance(r, trace.Round)]
    assert [end.rows[p].missed for p in range(6)] == [sum(p in r.missed for r in records) for p in range(6)]
    assert end.rows[0].step == STORY.rounds * STORY.steps_per_round
    assert end.rows[0].round == STORY.rounds - 1
    assert end.rows[0].sent == STORY.rounds * 650_000


def test_most_of_the_others_must_find_a_peer_silent() -> None:
    peers = PeerTable(5)
    for peer in range(5):
        peers.feed(trace.Join(t=0.0, peer=peer))
    peers.feed(trace.Note(t=1.0, peer=0, what="silent", other=3))
    assert peers.state(3) == "training"
    peers.feed(trace.Note(t=1.1, peer=1, what="silent", other=3))
    assert peers.state(3) == "silent"
    peers.feed(trace.Note(t=2.0, peer=0, what="heard again", other=3))
    assert peers.state(3) == "training"
    assert [text for _, text in peers.events] == [
        "peer 3 does not answer",
        "peer 3 did not answer for 1 s, and is back",
    ]


def test_a_freeze_without_an_end_ends_when_the_peer_is_heard() -> None:
    peers = PeerTable(2)
    peers.feed(trace.Join(t=0.0, peer=1))
    peers.feed(trace.Fault(t=1.0, peer=1, name="freeze"))
    peers.feed(step(50.0, 0))
    assert peers.state(1) == "frozen"
    peers.feed(trace.Note(t=51.0, peer=0, what="heard again", other=1))
    assert peers.state(1) == "training"


def test_a_peer_that_fails_is_told_once_and_ends() -> None:
    peers = PeerTable(2)
    peers.feed(step(1.0, 0))
    peers.feed(step(1.0, 1))
    peers.feed(trace.Error(t=2.0, peer=1, what="ValueError: no"))
    peers.feed(trace.Leave(t=2.1, peer=1))
    peers.feed(trace.Error(t=2.2, peer=1, what="ValueError: no", detail="Traceback"))
    assert peers.state(1) == "failed" and not peers.over
    assert [text for _, text in peers.events] == ["peer 1: ValueError: no"]
    peers.feed(trace.Leave(t=9.0, peer=0))
    assert peers.over


def test_a_peer_that_leaves_with_an_error_has_failed_and_the_error_is_told_when_it_comes() -> None:
    peers = PeerTable(2)
    peers.feed(step(1.0, 1))
    peers.feed(trace.Leave(t=2.0, peer=1, failed=True))
    peers.feed(trace.Note(t=2.0, peer=0, what="left", other=1))
    assert peers.state(1) == "failed"
    peers.feed(trace.Error(t=2.2, peer=1, what="ValueError: no"))
    assert [text for _, text in peers.events] == ["peer 1: ValueError: no"]
    peers.feed(trace.Leave(t=9.0, peer=0))
    assert peers.over


def test_a_peer_that_leaves_is_told_of_once() -> None:
    peers = PeerTable(3)
    for peer in range(3):
        peers.feed(step(1.0, peer))
    for told_by in (1, 2):
        peers.feed(trace.Note(t=2.0, peer=told_by, what="left", other=0))
    assert peers.state(0) == "gone"
    peers.feed(trace.Leave(t=2.1, peer=0))
    peers.feed(trace.Leave(t=2.2, peer=1))
    peers.feed(trace.Note(t=2.3, peer=2, what="left", other=1))
    assert (peers.state(0), peers.state(1)) == ("done", "done")
    assert [text for _, text in peers.events] == ["peer 0 has left", "peer 1 has left"]


def test_a_peer_that_goes_on_after_an_error_has_not_failed() -> None:
    peers = PeerTable(1)
    peers.feed(trace.Error(t=2.0, peer=0, what="a warning, as it turned out"))
    peers.feed(step(1.9, 0))  # from before, read later
    assert peers.state(0) == "failed"
    peers.feed(step(2.5, 0))
    assert peers.state(0) == "training"


def test_a_killed_peer_may_join_again() -> None:
    peers = PeerTable(1)
    peers.feed(step(0.0, 0))
    peers.feed(trace.Fault(t=1.0, peer=0, name="kill"))
    assert peers.state(0) == "gone" and peers.over
    peers.feed(trace.Join(t=2.0, peer=0))
    assert peers.state(0) == "training" and not peers.over


def test_a_simulated_run_goes_on_by_rounds(tmp_path: Path) -> None:
    shares: list[float | None] = []

    def look(figures: RoundFigures) -> None:
        peers = PeerTable(0)
        for record in TraceFollower(tmp_path).poll():
            peers.feed(record)
        shares.append(peers.progress)

    simulate(ExperimentSetup(peers=3, values=100, rounds=4, compute_sigma=0.0), tmp_path, on_round=look)
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_progress_by_steps_by_time_and_unknown() -> None:
    def run(**planned: float) -> PeerTable:
        peers = PeerTable(0)
        record = trace.Run(t=0.0, world="live", name="x", seed=0, peers=2, method="rps", **planned)  # type: ignore[arg-type]
        peers.feed(record)
        peers.feed(step(5.0, 0, 30))
        peers.feed(step(5.0, 1, 10))
        return peers

    assert run(steps_planned=100).progress == pytest.approx(0.2)
    assert run(planned_s=20.0).progress == pytest.approx(0.25)
    assert run().progress is None


def test_a_run_that_does_not_say_how_long_it_is_has_no_progress_though_all_have_left() -> None:
    """As one that was interrupted: it did not come to its end."""
    peers = PeerTable(1)
    peers.feed(trace.Run(t=0.0, world="live", name="x", seed=0, peers=1, method="rps"))
    peers.feed(trace.Leave(t=2.0, peer=0))
    assert peers.over and peers.progress is None


def joined(peers: int = 0) -> PeerTable:
    """The table of a launcher whose peer has joined a crew as its peer 2."""
    table = PeerTable(0)
    table.feed(trace.Run(t=0.0, world="live", name="x", seed=0, peers=peers, method="rps"))
    table.feed(trace.Join(t=1.0, peer=2))
    table.feed(
        trace.Round(
            t=2.0, peer=2, channel="model", round=9, scatter_s=0.1, gather_s=0.1, total_s=0.2, arrived=1.0,
            contributors=3.0, waited_for=[0, 1], missed=[], expired=False, bytes_sent=0, bytes_received=0,
        )
    )  # fmt: skip
    return table


def test_a_peer_that_was_started_elsewhere_trains_and_is_followed_no_more_at_the_end() -> None:
    peers = joined()
    peers.feed(note(3.0, "assists", 3, peer=2))
    assert {peer: peers.state(peer) for peer in peers.rows} == {
        2: "training", 0: "training", 1: "training", 3: "auxiliary"
    }  # fmt: skip
    peers.feed(note(4.0, "has left", 0, peer=2))
    peers.feed(trace.Leave(t=5.0, peer=2))
    peers.feed(trace.Leave(t=5.1))
    assert {peer: peers.state(peer) for peer in peers.rows} == {
        2: "done", 0: "gone", 1: "elsewhere", 3: "elsewhere"
    }  # fmt: skip


def test_a_peer_whose_end_nobody_told_has_ended_with_the_run() -> None:
    peers = crew_of(3)
    peers.feed(trace.Leave(t=5.0, peer=0))
    peers.feed(note(5.5, "back", 0, peer=1))
    peers.feed(trace.Leave(t=6.0))
    assert states(peers) == ["ended"] * 3
    peers.feed(trace.Leave(t=5.9, peer=1))  # of another file, read later
    assert states(peers) == ["ended", "done", "ended"]
    assert "ended" not in " ".join(text for _, text in peers.events)


def test_who_never_came_waits_to_the_end() -> None:
    peers = joined(peers=3)
    peers.feed(trace.Leave(t=5.0))
    assert states(peers) == ["waiting", "waiting", "ended"]


# -- Coming and going, as others note it


def note(t: float, what: str, other: int, peer: int = 0) -> trace.Note:
    return trace.Note(t=t, peer=peer, what=what, other=other, detail="hamster")


def test_a_newcomer_whose_trace_is_elsewhere_has_a_row_and_is_told_of_once() -> None:
    peers = PeerTable(3)
    for t, what in ((10.0, "comes"), (12.0, "takes part"), (30.0, "has left")):
        for by in range(3):
            peers.feed(note(t + 0.1 * by, what, 3, by))
        assert peers.state(3) == {"comes": "waiting", "takes part": "training", "has left": "gone"}[what]
    said = [text for _, text in peers.events if "peer 3" in text]
    assert said == ["peer 3 is on its way in", "peer 3 takes part", "peer 3 has left"]


def test_one_declared_dead_is_gone_until_it_is_back_or_its_seat_is_taken() -> None:
    peers = PeerTable(2)
    peers.feed(trace.Join(t=1.0, peer=1))
    for back in ("back", "takes part"):
        peers.feed(note(peers.now_s + 5.0, "declared dead", 1))
        assert peers.state(1) == "gone"
        peers.feed(note(peers.now_s - 1.0, "takes part", 1))  # read late
        assert peers.state(1) == "gone"
        peers.feed(note(peers.now_s + 5.0, back, 1))
        assert peers.state(1) == "training"


def crew_of(n: int) -> PeerTable:
    peers = PeerTable(n)
    for peer in range(n):
        peers.feed(trace.Join(t=0.0, peer=peer))
    return peers


def test_a_process_that_stands_still_is_told_of_in_words_and_for_how_long() -> None:
    """As a run's peers note it of one that was stopped for two seconds."""
    peers = crew_of(3)
    for t, by, what, other in (
        (8.0, 0, "silent", 1),
        (8.1, 2, "silent", 1),
        (9.0, 0, "declared dead", 1),
        (9.4, 2, "declared dead", 1),
        (10.1, 0, "refuted", 0),
        (10.2, 0, "healed", 1),
        (10.2, 0, "back", 1),
        (10.2, 0, "heard again", 1),
        (10.3, 2, "back", 1),
        (10.4, 2, "heard again", 1),
    ):
        peers.feed(trace.Note(t=t, peer=by, what=what, other=other, detail="peer-1 believed suspect"))
    assert [text for _, text in peers.events] == [
        "peer 1 does not answer",
        "peer 1 is taken for dead: nobody hears of it any more",
        "peer 1 did not answer for 2.2 s, and is back",
    ]
    assert peers.state(1) == "training"


def test_a_peer_whose_process_has_ended_is_lost_and_told_of_once() -> None:
    peers = crew_of(3)
    peers.feed(trace.Note(t=5.0, peer=1, what="lost", detail="ended by SIGKILL"))
    peers.feed(trace.Note(t=5.2, peer=0, what="silent", other=1))
    peers.feed(trace.Note(t=6.0, peer=0, what="declared dead", other=1, detail="peer-1"))
    assert peers.state(1) == "gone"
    assert [text for _, text in peers.events] == ["peer 1 is lost: ended by SIGKILL"]
    peers.feed(trace.Join(t=9.0, peer=1))
    assert peers.state(1) == "training"


def test_a_peer_that_a_fault_freezes_is_told_of_once_though_it_is_taken_for_dead() -> None:
    peers = crew_of(3)
    peers.feed(trace.Fault(t=5.0, peer=1, name="freeze", until_t=7.0))
    for by in (0, 2):
        peers.feed(trace.Note(t=5.2, peer=by, what="silent", other=1))
        peers.feed(trace.Note(t=6.0, peer=by, what="declared dead", other=1, detail="peer-1"))
        peers.feed(trace.Note(t=6.0, peer=by, what="left", other=1))  # so their averages go on without it
    assert peers.state(1) == "frozen"
    peers.feed(trace.Note(t=7.2, peer=0, what="back", other=1, detail="peer-1"))
    assert [text for _, text in peers.events] == [
        "peer 1 is frozen",
        "peer 1 did not answer for 2 s, and is back",
    ]


def test_what_has_no_words_of_its_own_stands_as_it_is() -> None:
    peers = crew_of(2)
    peers.feed(trace.Note(t=5.0, peer=1, what="skipped", other=1, detail="12 rounds, to 29"))
    peers.feed(trace.Note(t=5.0, peer=0, what="by-pass", other=0, detail="it is faster"))
    assert [text for _, text in peers.events] == [
        "peer 1 skipped 12 rounds, to 29",
        "peer 0 by-pass: it is faster",
    ]
