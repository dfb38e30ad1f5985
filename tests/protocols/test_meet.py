"""Peers meet: everyone hears everyone, who is absent is waited for once, who comes late is told."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.seed import generator
from ragtag.core.types import (
    SEATS_MAX,
    Arm,
    Arrived,
    Expired,
    Joined,
    Left,
    Measured,
    MessageKey,
    Met,
    Run,
    Send,
    Tell,
    Timer,
    Visits,
)
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.crew.district import partners
from ragtag.protocols.crew.meet import (
    BLOB_MAX,
    HELD_MAX,
    MEET,
    MEETINGS_MAX,
    PATIENCE,
    TELL,
    TOLD,
    Meeting,
    Meetings,
    from_rows,
    to_rows,
)
from ragtag.protocols.node import Node

LATENCY_S = 0.01


class Lobby:
    """Nodes that only meet, in virtual time; ``absent`` ones neither hear nor speak until they start.

    thaws_s: what comes to these waits until then. lost: whether a run from one to another is lost.
    """

    def __init__(self, n: int, absent: set[int] | None = None, latency_s: float = LATENCY_S) -> None:
        self.latency_s = latency_s
        self.thaws_s: dict[int, float] = {}
        self.lost: Callable[[int, Run], bool] = lambda peer, run: False
        self.nodes = [Node(peer, n, 0) for peer in range(n)]
        self.absent = absent or set()
        self.met: dict[int, list[tuple[float, Met]]] = {peer: [] for peer in range(n)}
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, object]] = []
        self._order = 0

    def push(self, at_s: float, peer: int, event: object) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at_s, self._order, peer, event))

    def tell(self, peer: int, number: int, deadline_s: float, late: bool = False) -> None:
        self.push(self.now_s, peer, Tell(number, b"peer %d" % peer, self.now_s + deadline_s, late))

    def run(self, until_s: float = 100.0) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, peer, event = heapq.heappop(self._heap)
            if peer in self.absent:
                continue
            if self.now_s < self.thaws_s.get(peer, 0.0):
                self.push(self.thaws_s[peer], peer, event)
                continue
            for effect in self.nodes[peer].step(self.now_s, event):  # type: ignore[arg-type]
                if isinstance(effect, Send):
                    run = effect.run
                    if self.lost(peer, run):
                        continue
                    came = Run(
                        peer,
                        run.key,
                        run.first,
                        run.total,
                        run.payload,
                        run.weight,
                        run.heard,
                        None,
                        run.ended,
                    )
                    self.push(self.now_s + self.latency_s, run.peer, Arrived((came,)))
                elif isinstance(effect, Arm):
                    self.push(effect.at_s, peer, Expired(effect.timer))
                elif isinstance(effect, Met):
                    self.met[peer].append((self.now_s, effect))


def test_what_is_lost_is_told_again_after_the_time_that_an_answer_takes() -> None:
    """The pauses grew to a second whether anything came or not: at 30 % of loss a meeting took 4.5 s."""
    lobby, lost = Lobby(2), [0, 0]

    def loses(peer: int, run: Run) -> bool:
        lost[peer] += run.key.stage == TOLD
        return run.key.stage == TOLD and lost[peer] <= 5

    lobby.lost = loses
    for peer in range(2):
        lobby.push(0.0, peer, Measured(1 - peer, 0.02, 0.02, 0.0))
        lobby.tell(peer, 0, 5.0)
    lobby.run()
    for ((at_s, met),) in lobby.met.values():
        assert met.missing == () and at_s < 0.2


def test_a_new_process_is_told_again_whatever_its_former_self_said_last() -> None:
    """What could not be taken put off the timer for telling, and no timer was left."""
    meeting, rows = Meeting(frozenset({1}), 0), np.zeros((2, CHUNK_BYTES), np.uint8)
    none, nobody = np.zeros(1, np.float32), np.zeros(1, np.uint64)

    def came(stage: int, total: int) -> Arrived:
        key = MessageKey(MEET, 0, stage, 0)
        return Arrived((Run(1, key, 0, total, rows[:1], none, nobody, None, False),))

    meeting.step(0.0, Tell(0, b"hello", 9.0))
    meeting.step(0.05, came(TOLD, 1))
    meeting.step(0.1, Expired(Timer(MEET, 0, "again")))
    meeting.step(0.2, came(TELL, 3))
    meeting.step(0.2, came(TELL, 2))
    effects, told, due_s = meeting.step(0.25, Joined(1)), 0, {0.26}  # the timer of its next question is late
    while due_s and told < 3:
        told += sum(isinstance(effect, Send) and effect.run.key.stage == TELL for effect in effects)
        now_s = min(due_s)
        due_s.discard(now_s)
        effects = meeting.step(now_s, Expired(Timer(MEET, 0, "again")))
        due_s |= {effect.at_s for effect in effects if isinstance(effect, Arm)}
    assert told == 3


@pytest.mark.parametrize("seed", range(20))
def test_who_is_taken_for_dead_amid_a_meeting_and_comes_back_holds_nobody_up(seed: int) -> None:
    """It has told others, who forget that as of a former process, and tells it nobody again that has had it.

    What they were to tell it was dropped, and they took it for told. All waited until the deadline, 60 s.
    """
    lobby, draws = Lobby(4), generator(seed, "back")
    lobby.lost = lambda peer, run: bool(draws.random() < 0.3)
    for peer in range(4):
        lobby.push(draws.uniform(0.0, 1.0), peer, Tell(0, b"peer %d" % peer, 60.0))
    for peer, other in ((0, 1), (2, 1), (3, 0)):
        gone_s = draws.uniform(0.0, 1.0)
        lobby.push(gone_s, peer, Left(other))
        lobby.push(gone_s + draws.uniform(0.0, 0.5), peer, Joined(other))
    lobby.run()
    assert all(at_s < 10.0 for ((at_s, _),) in lobby.met.values()), lobby.met


def test_one_that_does_not_come_is_told_ever_more_rarely() -> None:
    lobby, told = Lobby(3, {2}), []
    lobby.lost = lambda peer, run: run.peer == 2 and bool(told.append(lobby.now_s))  # type: ignore[func-returns-value]
    for peer in range(2):
        lobby.push(0.0, peer, Measured(2, 0.002, 0.002, 0.0))
        lobby.tell(peer, 0, 20.0)
    lobby.run()
    assert {peer: at_s for peer, ((at_s, _),) in list(lobby.met.items())[:2]} == {0: 20.0, 1: 20.0}
    assert 2 * 20 <= len(told) <= 2 * 30


def test_in_a_large_crew_each_meets_a_few_others_and_news_are_near_to_all() -> None:
    n = 200
    lobby = Lobby(n)
    for peer in range(n):
        lobby.tell(peer, 0, 5.0)
    lobby.run()
    few = {peer: set(met.blobs) for peer in range(n) for _, met in lobby.met[peer]}
    assert len(few) == n
    for peer, others in few.items():
        assert len(others) <= 2 * math.log2(n) + 2
        assert all(peer in few[other] for other in others)
        ((at_s, met),) = lobby.met[peer]
        assert at_s <= 3 * LATENCY_S and met.missing == ()
    reached = {0}
    for _ in range(math.ceil(math.log2(n))):
        reached |= {other for peer in reached for other in few[peer]}
    assert reached == set(range(n))


def test_in_a_large_crew_who_is_absent_is_missed_by_those_who_meet_it() -> None:
    n, absent = 100, {7, 30}
    lobby = Lobby(n, absent)
    for peer in range(n):
        lobby.tell(peer, 0, 5.0)
    lobby.run()
    for peer in set(range(n)) - absent:
        ((at_s, met),) = lobby.met[peer]
        mine = partners(peer, set(range(n)) - {peer})
        assert set(met.missing) == mine & absent
        assert (at_s >= 5.0) == bool(mine & absent)
    lobby.absent.clear()  # who comes late is told by those whom it asks
    for peer in absent:
        lobby.tell(peer, 0, 5.0)
    lobby.run()
    for peer in absent:
        assert set(lobby.met[peer][0][1].blobs) == partners(peer, set(range(n)) - {peer})


@given(st.sets(st.integers(0, SEATS_MAX - 1), min_size=1, max_size=300))
def test_partners_are_each_others_and_few(seats: set[int]) -> None:
    found = {peer: partners(peer, seats - {peer}) for peer in seats}
    for peer, others in found.items():
        assert peer not in others and others <= seats
        assert len(others) <= 2 * math.ceil(math.log2(max(2, len(seats))))
        assert all(peer in found[other] for other in others)


def test_everyone_hears_everyone_within_a_round_trip_of_the_last() -> None:
    lobby = Lobby(3)
    for peer in range(3):
        lobby.tell(peer, 0, 5.0)
    lobby.run()
    for peer in range(3):
        ((at_s, met),) = lobby.met[peer]
        assert at_s <= 2 * LATENCY_S + 1e-9
        assert met.blobs == {p: b"peer %d" % p for p in range(3) if p != peer}
        assert met.missing == ()


def test_who_is_absent_is_waited_for_once_and_not_at_the_next_meeting() -> None:
    lobby = Lobby(4, absent={3})
    for peer in range(3):
        lobby.tell(peer, 0, 5.0)
    lobby.run()
    assert [met.missing for peer in range(3) for _, met in lobby.met[peer]] == [(3,)] * 3
    assert all(lobby.met[peer][0][0] == pytest.approx(5.0) for peer in range(3))
    for peer in range(3):
        lobby.tell(peer, 1, 5.0)
    began_s = lobby.now_s
    lobby.run()
    for peer in range(3):
        at_s, met = lobby.met[peer][1]
        assert at_s - began_s <= 2 * LATENCY_S + 1e-9
        assert met.missing == (3,)


def test_it_is_not_waited_for_though_a_faster_peer_has_begun_the_next_meeting() -> None:
    lobby = Lobby(3, absent={2})
    lobby.tell(0, 0, 4.0)
    lobby.tell(1, 0, 5.0)
    lobby.push(4.5, 0, Tell(1, b"early", 9.5))  # reaches peer 1 before its own first meeting is over
    lobby.push(6.0, 1, Tell(1, b"later", 11.0))
    lobby.run()
    assert lobby.met[1][1][0] == pytest.approx(6.0, abs=3 * LATENCY_S)


def test_who_comes_late_hears_all_who_have_met() -> None:
    lobby = Lobby(3, absent={2})
    for number in (0, 1):
        for peer in (0, 1):
            lobby.tell(peer, number, 2.0)
        lobby.run()
    lobby.absent.clear()
    for number in (0, 1):
        lobby.tell(2, number, 50.0)
        began_s = lobby.now_s
        lobby.run()
        at_s, met = lobby.met[2][number]
        assert met.blobs == {0: b"peer 0", 1: b"peer 1"}
        assert at_s - began_s <= 2 * LATENCY_S + 1e-9


def test_one_that_comes_in_the_middle_of_a_meeting_it_is_not_expected_at_is_heard() -> None:
    lobby = Lobby(4, absent={2, 3})
    for peer in (0, 1):
        lobby.tell(peer, 0, 2.0)
    lobby.run()
    lobby.absent.discard(2)
    lobby.tell(0, 1, 5.0)  # waits for peer 1, which takes its time
    lobby.tell(2, 1, 5.0)
    lobby.push(lobby.now_s + 1.0, 1, Tell(1, b"slow", lobby.now_s + 6.0))
    lobby.run()
    assert set(lobby.met[0][1][1].blobs) == {1, 2}
    assert set(lobby.met[2][0][1].blobs) == {0, 1}


def test_who_has_left_is_not_waited_for() -> None:
    lobby = Lobby(3, absent={2})
    for peer in (0, 1):
        lobby.tell(peer, 0, 5.0)
        lobby.push(0.5, peer, Left(2))
    lobby.run()
    assert all(lobby.met[peer][0][0] == pytest.approx(0.5) for peer in (0, 1))


def lobby_that_has_met(n: int, latency_s: float = LATENCY_S) -> Lobby:
    """All but the last have met long ago."""
    lobby = Lobby(n, absent={n - 1}, latency_s=latency_s)
    for peer in range(n - 1):
        lobby.tell(peer, 0, 5.0)
        lobby.push(0.5, peer, Left(n - 1))
    lobby.run()
    lobby.absent.clear()
    for peer in range(n - 1):
        lobby.push(lobby.now_s, peer, Visits(n - 1))
    return lobby


@pytest.mark.parametrize("latency_s", [0.0001, 0.01, 0.3])
@pytest.mark.parametrize("frozen", [{2}, {0, 1, 3}])
def test_a_late_peer_goes_on_without_the_frozen_when_half_have_answered(
    latency_s: float, frozen: set[int]
) -> None:
    lobby = lobby_that_has_met(7, latency_s)
    began_s = lobby.now_s
    lobby.thaws_s = dict.fromkeys(frozen, began_s + 30.0)
    lobby.tell(6, 0, 60.0, late=True)
    lobby.run(began_s + 20.0)
    assert {peer for peer in range(6) if not lobby.nodes[6].heard_lately(peer)} == frozen
    lobby.run()
    at_s, met = lobby.met[6][0]
    assert set(met.missing) == frozen and set(met.blobs) == set(range(6)) - frozen
    assert at_s - began_s <= PATIENCE * max(0.1, 2 * latency_s) + 1e-9
    assert lobby.nodes[6].live == set(range(7))  # silent, not gone: what it says when it thaws brings it back
    assert all(lobby.nodes[6].silent_rounds(peer) == 0 for peer in frozen)


def test_it_waits_for_all_while_most_are_frozen() -> None:
    lobby = lobby_that_has_met(7)
    began_s = lobby.now_s
    lobby.thaws_s = dict.fromkeys((0, 1, 2, 3), began_s + 3.0)
    lobby.tell(6, 0, 60.0, late=True)
    lobby.run()
    at_s, met = lobby.met[6][0]
    assert met.missing == () and at_s - began_s == pytest.approx(3.0, abs=3 * LATENCY_S)


def test_it_waits_for_who_answers_and_has_not_told_yet() -> None:
    lobby = lobby_that_has_met(4)
    began_s = lobby.now_s
    for peer in (0, 1):
        lobby.tell(peer, 1, 60.0)
    lobby.tell(3, 1, 60.0, late=True)
    lobby.push(began_s + 5.0, 2, Tell(1, b"its model was large", began_s + 60.0))
    lobby.run()
    at_s, met = lobby.met[3][0]
    assert met.blobs[2] == b"its model was large"
    assert at_s - began_s <= 6.0 + 2 * LATENCY_S  # it asks once a second


def test_what_others_told_and_was_lost_is_asked_for_again() -> None:
    lobby = lobby_that_has_met(4)
    began_s, losses = lobby.now_s, [2]
    lobby.tell(3, 0, 60.0, late=True)

    def lost(peer: int, run: Run) -> bool:  # what peer 1 tells the newcomer, twice
        if peer != 1 or run.peer != 3 or run.key.stage != TELL or not losses[0]:
            return False
        losses[0] -= 1
        return True

    lobby.lost = lost
    lobby.run()
    at_s, met = lobby.met[3][0]
    assert met.missing == () and at_s - began_s < 0.5


def test_peers_that_start_together_wait_for_a_slow_one() -> None:
    lobby = Lobby(6)
    for peer in range(5):
        lobby.tell(peer, 0, 60.0)
    lobby.push(20.0, 5, Tell(0, b"at last", 80.0))
    lobby.absent.add(5)
    lobby.run(19.95)
    lobby.absent.clear()
    lobby.run()
    assert all(lobby.met[peer][0][1].missing == () for peer in range(6))


@pytest.mark.parametrize("size", [0, 1, 1083, 1084, 1085, 5000])
def test_a_blob_of_any_size_comes_back(size: int) -> None:
    blob = bytes(i % 251 for i in range(size))
    assert from_rows(to_rows(blob)) == blob


def test_more_than_can_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {BLOB_MAX}"):
        to_rows(bytes(BLOB_MAX + 1))


def test_a_meeting_that_was_held_outlives_any_number_that_others_make_up() -> None:
    """A newcomer is answered in it, however many meetings a forger has told of since."""
    meetings = Meetings()
    held = meetings.of(0, lambda: Meeting(frozenset({1, 2}), 0))
    held.step(0.0, Tell(0, b"mine", 9.0))
    held.step(9.0, Expired(Timer(MEET, 0, "deadline")))
    assert held.over
    for number in range(1, 4 * MEETINGS_MAX):
        meetings.of(number, lambda number=number: Meeting(frozenset({1, 2}), number))  # type: ignore[misc]
        assert len(meetings._meetings) <= MEETINGS_MAX + 1
    assert meetings.of(0, lambda: Meeting(frozenset({1, 2}), 0)) is held


def test_meetings_of_many_models_are_all_kept() -> None:
    """One that a peer has ended was forgotten while another still asked for its answer, which waited long."""
    meetings = Meetings()
    kept = []
    for number in range(20 * MEETINGS_MAX):
        kept.append(meetings.of(number, lambda number=number: Meeting(frozenset({1}), number)))  # type: ignore[misc]
        kept[-1].step(0.0, Tell(number, b"mine", 9.0))
        kept[-1].step(9.0, Expired(Timer(MEET, number, "deadline")))
    assert all(
        meetings.of(number, lambda: Meeting(frozenset(), -1)) is one for number, one in enumerate(kept)
    )
    for number in range(len(kept), 2 * HELD_MAX):
        meeting = meetings.of(number, lambda number=number: Meeting(frozenset({1}), number))  # type: ignore[misc]
        meeting.step(0.0, Tell(number, b"", 9.0))
    assert len(meetings._meetings) <= MEETINGS_MAX + HELD_MAX
