import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.deadline import Deadline
from ragtag.core.types import PEERS_MAX, Arm, MessageKey, Send, Timer
from ragtag.protocols.groups.host import (
    BATCHES_MAX,
    MET,
    ROSTER,
    WAIT,
    Announcement,
    Host,
    Roster,
    decode_announce,
    decode_roster,
    decode_wait,
    encode_announce,
    encode_roster,
    encode_wait,
    seats,
)
from ragtag.protocols.rounds.base import blob_message


def host() -> Host:
    host = Host(0, 0, Deadline(0.1))
    host.wait = Deadline(0.1)
    return host


@given(
    st.integers(0, (1 << 64) - 1),
    st.dictionaries(st.integers(0, (1 << 32) - 1), st.integers(0, 63), min_size=1, max_size=64),
)
def test_a_roster_survives_its_journey(key: int, wanted: dict[int, int]) -> None:
    members = seats(wanted, 64)
    roster = Roster(key, tuple(p for _, p in members), tuple(i for i, _ in members), 0.25)
    blob = encode_roster(roster)
    assert len(blob) <= 398 and decode_roster(blob) == roster
    assert decode_roster(blob[:-1]) is None
    assert sorted(roster.peers) == sorted(wanted) and len(set(roster.indices)) == len(wanted)
    kept = sum(wanted[p] == i for i, p in members)
    assert kept == len(set(wanted.values()))  # of those that want one index, one has it


@given(st.binary(max_size=500))
def test_nonsense_is_no_roster_nor_anything_else(blob: bytes) -> None:
    for decode in (decode_roster, decode_announce, decode_wait):
        decode(blob)  # whatever it is, it does not raise
    roster = decode_roster(blob)
    assert roster is None or len(set(roster.peers)) == len(roster.peers) == len(set(roster.indices))


def test_groups_with_other_members_have_other_tags() -> None:
    tags = {Roster(1, (0, peer), (0, 1)).tag for peer in range(1, 41)}
    assert len(tags) > 30


def test_an_answer_names_the_announcement_that_it_answers() -> None:
    """So a round trip is measured however late it is; what no announcement has just asked for names none."""
    h = host()

    def answers(peer: int, attempt: int, round_: int = 3, most: int = 2) -> dict[int, tuple[int, int]]:
        effects, _ = h.announce(0.01 * attempt, peer, round_, Announcement(9, peer, most, attempt=attempt))
        sends = [e.run for e in effects if isinstance(e, Send)]
        return {run.peer: (run.key.stage, run.key.block) for run in sends}

    assert answers(5, 1) == {5: (WAIT, 1)}
    assert answers(5, 2) == {5: (WAIT, 2)}  # its first answer was lost, or is late
    assert answers(6, 3) == {5: (ROSTER, 0), 6: (ROSTER, 3)}
    assert answers(5, 4) == {5: (ROSTER, 4)}
    assert answers(7, 1) == {7: (MET, 1)}


def test_a_host_that_closed_a_group_with_one_alone_waits_longer_for_the_next() -> None:
    h = host()
    effects, _ = h.announce(0.0, 5, 3, Announcement(9, 0, 3))
    (timer,) = [e.timer for e in effects if isinstance(e, Arm)]
    h.expire(0.25, timer)
    assert h.wait_s() == pytest.approx(0.25)
    h.announce(0.4, 6, 3, Announcement(9, 1, 3))
    assert h.wait_s() == pytest.approx(0.55)  # 0.4 s apart, and an answer's deadline


def test_the_last_one_of_those_that_each_came_alone_does_not_wait_for_nobody() -> None:
    """Else two peers, half a step apart, wait as long each, and stay half a step apart."""
    h = host()
    effects, _ = h.announce(0.0, 5, 3, Announcement(9, 0, 2))
    (timer,) = [e.timer for e in effects if isinstance(e, Arm)]
    h.expire(0.25, timer)
    effects, _ = h.announce(0.3, 6, 3, Announcement(9, 1, 3))  # a third one may come
    assert [e.run.key.stage for e in effects if isinstance(e, Send)] == [WAIT]
    effects, _ = h.announce(0.3, 7, 4, Announcement(9, 0, 2))
    (timer,) = [e.timer for e in effects if isinstance(e, Arm)]
    h.expire(9.0, timer)
    effects, _ = h.announce(9.1, 6, 4, Announcement(9, 1, 2))
    assert [e.run.key.stage for e in effects if isinstance(e, Send)] == [MET]


def test_a_full_group_is_closed_at_once() -> None:
    h = host()
    effects, roster = h.announce(0.0, 5, 3, Announcement(9, 1, 2))
    assert roster is None and any(isinstance(e, Arm) and e.at_s == pytest.approx(0.25) for e in effects)
    effects, roster = h.announce(0.01, 6, 3, Announcement(9, 0, 2))
    rosters = [decode_roster(e.run.payload[0].tobytes()) for e in effects if isinstance(e, Send)]
    assert roster is None and len(rosters) == 2  # the host itself is not in it
    assert rosters[0] == rosters[1] and rosters[0] is not None and rosters[0].peers == (6, 5)
    assert rosters[0].spread_s == pytest.approx(0.01, abs=1e-6)


def test_a_group_that_is_not_full_is_closed_at_the_hosts_deadline_with_the_host_in_it() -> None:
    h = host()
    effects, _ = h.announce(0.0, 0, 3, Announcement(9, 1, 4))
    timer = next(e.timer for e in effects if isinstance(e, Arm))
    h.announce(0.0, 6, 3, Announcement(9, 1, 4))
    effects, roster = h.expire(0.25, timer)
    assert roster is not None and sorted(roster.peers) == [0, 6]
    assert [e.run.peer for e in effects if isinstance(e, Send)] == [6]
    assert h.expire(0.3, timer) == ([], None)
    assert h.expire(0.3, Timer(0, 8, "host/9/1")) == ([], None)


def test_whoever_asks_again_hears_the_same_and_whoever_is_late_is_sent_on() -> None:
    h = host()
    h.announce(0.0, 5, 3, Announcement(9, 0, 2))
    h.announce(0.0, 6, 3, Announcement(9, 1, 2))
    again, _ = h.announce(0.1, 5, 3, Announcement(9, 0, 2))
    assert [e.run.key.stage for e in again if isinstance(e, Send)] == [ROSTER]
    late, roster = h.announce(0.1, 7, 3, Announcement(9, 0, 3))
    assert roster is None and [e.run.key.stage for e in late if isinstance(e, Send)] == [MET]


def test_a_host_whose_own_timer_is_late_says_that_it_closes_at_once() -> None:
    """A busy driver reads what came before it looks at its timers."""
    h = host()
    h.announce(0.0, 5, 3, Announcement(9, 0, 3))
    effects, _ = h.announce(60.0, 6, 3, Announcement(9, 1, 3))
    (sent,) = [e.run for e in effects if isinstance(e, Send)]
    assert decode_wait(sent.payload[0].tobytes()) == (9, pytest.approx(0.0, abs=2e-6))


def test_a_host_that_comes_too_late_itself_is_alone() -> None:
    h = host()
    h.announce(0.0, 5, 3, Announcement(9, 0, 2))
    h.announce(0.0, 6, 3, Announcement(9, 1, 2))
    assert h.announce(0.1, 0, 3, Announcement(9, 0, 3)) == ([], Roster(9, (0,), (0,)))


def test_a_host_whose_timer_is_overdue_answers_all_the_same() -> None:
    """A busy machine reads what has come before it looks at its timers."""
    late = host()
    effects, _ = late.announce(0.0, 1, 5, Announcement(7, 0, 4))
    timer = next(e for e in effects if isinstance(e, Arm))
    effects, roster = late.announce(timer.at_s + 3.0, 2, 5, Announcement(7, 1, 4))
    assert roster is None
    (send,) = effects
    assert isinstance(send, Send)
    assert decode_wait(send.run.payload[0].tobytes()) == (7, pytest.approx(1e-6))
    closed, _ = late.expire(timer.at_s + 3.0, timer.timer)
    assert {e.run.peer for e in closed if isinstance(e, Send)} == {1, 2}


def test_a_group_is_held_open_for_whoever_was_sent_on() -> None:
    h = host()
    effects, _ = h.announce(0.0, 6, 3, Announcement(9, 1, 4, 0.5))
    (arm,) = [e for e in effects if isinstance(e, Arm)]
    assert arm.at_s == pytest.approx(0.75)
    assert h.expire(0.25, arm.timer) == ([], None)
    effects, _ = h.announce(
        0.4, 5, 3, Announcement(9, 0, 4)
    )  # the others begin to come: as they always do, from now on
    assert [e.at_s for e in effects if isinstance(e, Arm)] == [pytest.approx(0.65)]
    effects, _ = h.announce(
        0.5, 7, 3, Announcement(9, 2, 4, 0.5)
    )  # and nobody that is there waits for longer
    assert not [e for e in effects if isinstance(e, Arm)]
    effects, _ = h.expire(0.65, arm.timer)
    assert len([e for e in effects if isinstance(e, Send)]) == 3


def test_a_second_member_is_waited_for_as_long_as_the_longest_and_others_as_is_usual() -> None:
    """Without a second both are alone. A third that comes by seldom may be late."""
    h = host()
    for apart_s in (*(19 * [0.1]), 0.9):
        h.wait.completed(apart_s)
    h.wait.completed(0.1)
    assert h.wait_s() == pytest.approx(0.25) and h.alone_s() == pytest.approx(1.05)

    def closes(at_s: float, peer: int, round_: int, seat: int) -> list[float]:
        effects, _ = h.announce(at_s, peer, round_, Announcement(9, seat, 4))
        return [e.at_s for e in effects if isinstance(e, Arm)]

    assert closes(0.0, 5, 3, 0) == [pytest.approx(1.05)]
    assert closes(0.1, 6, 3, 1) == [pytest.approx(0.25)]
    assert closes(0.2, 7, 3, 2) == []
    assert closes(2.0, 5, 4, 0) == [pytest.approx(3.05)]
    assert closes(2.9, 6, 4, 1) == [2.9]  # later than is usual: nobody waits for more
    effects, _ = h.expire(2.9, Timer(0, 4, "host/9/2"))
    assert [e.run.peer for e in effects if isinstance(e, Send)] == [5, 6]


def test_who_was_sent_on_is_early_and_says_nothing_about_how_far_apart_members_come() -> None:
    h = host()
    h.announce(0.0, 5, 3, Announcement(9, 0, 3, 0.5))
    effects, _ = h.announce(0.6, 6, 3, Announcement(9, 1, 3))  # the first that was in a group before
    assert [e.at_s for e in effects if isinstance(e, Arm)] == [pytest.approx(0.85)]
    effects, _ = h.announce(0.65, 7, 3, Announcement(9, 2, 3))
    rosters = [decode_roster(e.run.payload[0].tobytes()) for e in effects if isinstance(e, Send)]
    assert len(rosters) == 3 and rosters[0] is not None
    assert rosters[0].spread_s == pytest.approx(0.05, abs=1e-6)


def test_several_that_come_too_late_to_one_group_are_one_reason_to_wait_longer() -> None:
    h = host()
    for peer in (5, 6):
        h.announce(0.0, peer, 3, Announcement(9, 0, 2))
    h.announce(
        0.15, 7, 3, Announcement(9, 0, 2, 0.5)
    )  # sent on before: what it waited for was not this group
    assert h.wait.typical_s() == 0.1 and not h.wait._samples
    for peer in range(8, 14):
        h.announce(0.15, peer, 3, Announcement(9, 0, 2))
    assert list(h.wait._samples) == [pytest.approx(0.15)]


def test_what_a_host_remembers_is_bounded() -> None:
    h = host()
    for key in range(2 * BATCHES_MAX):
        h.announce(0.0, 5, 3, Announcement(key, 0, 4))
    assert len(h._batches) == BATCHES_MAX
    closed = host()
    for round_ in range(20):
        closed.announce(0.0, 5, round_, Announcement(1, 0, 1))
    assert len(closed._batches) <= 4


def test_a_peer_that_announces_itself_in_many_groups_pushes_out_its_own() -> None:
    h = host()
    for peer in range(6):
        h.announce(0.0, peer, 3, Announcement(peer // 2, peer % 2, 3))
    h.announce(0.0, 6, 3, Announcement(50, 0, 3))
    for key in range(100, 100 + 2 * BATCHES_MAX):
        h.announce(0.0, 9, 1000, Announcement(key, 0, 4))
    assert len(h._batches) == BATCHES_MAX
    assert {(3, 0), (3, 1), (3, 2), (3, 50)} < h._batches.keys()
    effects, _ = h.announce(0.1, 7, 3, Announcement(0, 2, 3))
    assert {e.run.peer for e in effects if isinstance(e, Send)} == {1, 7}, (
        "its group of the host and these is complete"
    )


def test_an_announcement_survives_its_journey() -> None:
    ask = Announcement(9, 3, 8, 0.5)
    assert decode_announce(encode_announce(ask)) == ask
    assert decode_announce(encode_announce(ask)[:-1]) is None
    for odd in (Announcement(9, 3, 0), Announcement(9, 3, PEERS_MAX + 1), Announcement(9, PEERS_MAX, 8)):
        assert decode_announce(encode_announce(odd)) is None


def test_a_told_message_carries_no_weight() -> None:
    run = blob_message(4, MessageKey(0, 1, WAIT, 0), encode_wait(7, 0.5))
    assert run.weight.sum() == 0 and run.heard.sum() == 0 and run.ended
    decoded = decode_wait(np.asarray(run.payload[0]).tobytes())
    assert decoded is not None and decoded[0] == 7 and decoded[1] == pytest.approx(0.5, abs=2e-6)
