"""What a driver keeps for a peer: numbers that wrap, epochs, end marks that count once, bounded queues."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.types import MessageKey, Run
from ragtag.network.control.path import PINGS
from ragtag.network.link.flow import ENDINGS_MAX, LEAP_MAX, QUEUE_MAX, Ending, Flow, Inbound, Outgoing

U32 = (1 << 32) - 1


def a_flow() -> Flow:
    return Flow(1, ("127.0.0.1", 9))


def outgoing(deadline_s: float, k: int = 6, first: int = 0) -> Outgoing:
    payload = np.arange(k * 4, dtype=np.uint8).reshape(k, 4)
    run = Run(
        1, MessageKey(0, 0, 0, 0), first, first + k, payload, np.arange(k, dtype=np.float32),
        np.arange(k, dtype=np.uint64), None, True,
    )  # fmt: skip
    return Outgoing(run, np.arange(first, first + k), None, deadline_s)


# -- Epochs


def test_a_newer_process_begins_anew_and_an_older_one_is_not_heard() -> None:
    inbound = Inbound()
    assert inbound.enter(100)
    inbound.count(1.0, 1, 50, 50)
    assert inbound.new_ending(MessageKey(0, 0, 0, 0), 1)
    assert inbound.enter(100)
    assert (inbound.highest, inbound.received) == (50, 50)
    assert not inbound.enter(99)
    assert (inbound.epoch, inbound.highest) == (100, 50)
    assert inbound.enter(101)
    assert (inbound.highest, inbound.received, inbound.unanswered) == (0, 0, 0)
    assert inbound.new_ending(MessageKey(0, 0, 0, 0), 1), "the new process numbers its messages anew"
    assert not inbound.enter(100)


# -- Silence


def test_one_that_was_silent_for_long_is_asked_as_soon_as_it_is_heard() -> None:
    """Else a peer that slept would stay cut off after it wakes, for as long as it was last waited for."""
    flow = a_flow()
    flow.pings, flow.ping_s = PINGS + 5, 99.0
    flow.hear(10.0)
    assert (flow.pings, flow.ping_s) == (0, 10.0)


def test_hearing_a_peer_does_not_hasten_what_is_asked_at_the_measured_pace() -> None:
    flow = a_flow()
    flow.pings, flow.ping_s = PINGS, 99.0
    flow.hear(10.0)
    assert (flow.pings, flow.ping_s) == (PINGS, 99.0)


# -- Numbers


def test_what_came_is_counted_and_waits_for_an_answer() -> None:
    inbound = Inbound()
    inbound.count(1.0, 1, 40, 40)
    inbound.count(2.0, 51, 60, 10)
    assert (inbound.highest, inbound.received, inbound.unanswered) == (60, 50, 50)
    assert inbound.reorder_s == 0.0


@pytest.mark.parametrize("first", [1, LEAP_MAX + 2, (1 << 31) + 5, U32])
def test_the_first_datagram_may_have_any_number_and_no_later_one(first: int) -> None:
    """To a peer that was restarted the others go on counting; their first numbers are as far as they are."""
    inbound = Inbound()
    assert inbound.enter(100)
    assert not inbound.leaps(first)
    inbound.count(1.0, first, first, 1)
    assert inbound.highest == first
    assert not inbound.unordered
    assert inbound.whole == (first == 1), "what was sent before may have been lost"
    assert not inbound.leaps(first + LEAP_MAX & U32)
    assert inbound.leaps(first + LEAP_MAX + 1 & U32)


def test_a_copy_does_not_make_up_for_what_was_lost() -> None:
    """Else the sender would take the mark that was lost for answered, and repeat it no more."""
    inbound = Inbound()
    inbound.count(1.0, 1, 10, 10)
    assert inbound.whole
    inbound.count(1.1, 10, 10, 1)  # again
    inbound.count(1.2, 12, 12, 1)  # 11 was lost
    assert inbound.received == inbound.highest == 12
    assert not inbound.whole


def test_an_overtaken_datagram_shows_how_late_it_is() -> None:
    inbound = Inbound()
    inbound.count(1.0, 1, 10, 10)
    inbound.count(1.5, 20, 30, 11)
    inbound.count(1.6, 11, 19, 9)
    assert inbound.highest == 30
    assert inbound.received == 30
    assert inbound.reorder_s == pytest.approx(0.1)


def test_one_late_copy_is_forgotten_and_a_line_that_reorders_is_not() -> None:
    """A datagram repeated by the network (or by somebody) ten seconds later is no sign of reordering."""
    inbound = Inbound()
    inbound.count(1.0, 1, 10, 10)
    inbound.count(11.0, 5, 5, 1)
    assert inbound.reorder_s == pytest.approx(10.0)
    for seq in range(11, 700):
        inbound.count(11.0 + 0.001 * seq, seq, seq, 1)
    assert inbound.reorder_s == 0.0
    now_s, seq = 20.0, 1000
    for _ in range(50):  # one in five is 10 ms late
        for ahead in (1, 2, 3, 5):
            now_s += 0.002
            inbound.count(now_s, seq + ahead, seq + ahead, 1)
        inbound.count(now_s + 0.01, seq + 4, seq + 4, 1)
        assert 0.008 < inbound.reorder_s < 0.011
        seq += 5


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(0, 1 << 34))
def test_numbers_wrap_at_32_bits(steps: list[int], start: int) -> None:
    """Both ends keep whole numbers; 32 bits of them travel."""
    inbound, flow = Inbound(highest=start, received=start), a_flow()
    sent = start
    for k in steps:
        first, sent = sent + 1, sent + k
        inbound.count(1.0, first & U32, sent & U32, k)
    assert inbound.highest == sent
    assert inbound.received == sent
    flow.path.sent = sent + 500  # what was sent meanwhile
    assert flow.unwrap(inbound.highest & U32) == sent


# -- End marks


def test_an_end_mark_counts_once() -> None:
    inbound = Inbound()
    key = MessageKey(0, 1, 0, 2)
    assert [inbound.new_ending(key, 5) for _ in range(3)] == [True, False, False]
    assert inbound.new_ending(key, 6), "the same message, sent again"
    assert inbound.new_ending(key._replace(block=3), 5)


def test_end_marks_that_are_remembered_are_bounded() -> None:
    inbound = Inbound()
    key = MessageKey(0, 1, 0, 2)
    for number in range(ENDINGS_MAX + 100):
        assert inbound.new_ending(key, number)
    assert len(inbound.endings) == ENDINGS_MAX
    assert not inbound.new_ending(key, ENDINGS_MAX + 99)
    assert inbound.new_ending(key, 0), "the oldest were forgotten first"


# -- The queue


def test_what_can_no_longer_come_in_time_is_dropped() -> None:
    flow = a_flow()
    for deadline_s in (1.0, 2.0, 3.0):
        flow.push(outgoing(deadline_s))
        number = int(deadline_s)
        flow.endings[number] = Ending(MessageKey(0, 0, 0, 0), 6, number, deadline_s, 0.0)
    flow.expire(2.0)
    assert [item.deadline_s for item in flow.queue] == [3.0]
    assert list(flow.endings) == [3]
    assert flow.dropped_late == 2


def test_the_queue_is_bounded_and_drops_the_oldest() -> None:
    flow = a_flow()
    for i in range(QUEUE_MAX + 5):
        flow.push(outgoing(float(i)))
    assert len(flow.queue) == QUEUE_MAX
    assert flow.queue[0].deadline_s == 5.0
    assert flow.dropped_late == 5


@pytest.mark.parametrize("first", [0, 10])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_what_is_detached_does_not_follow_its_values(first: int, at: int) -> None:
    item = outgoing(1.0, 6, first)
    item.at = at
    payload, weight, heard = item.run.payload, item.run.weight, item.run.heard
    item.detach()
    run, low = item.run, first + at
    payload[:], weight[:], heard[:] = 255, -1.0, 99
    assert (run.first, run.total, run.ended, run.peer) == (low, first + 6, True, 1)
    assert np.array_equal(run.payload, np.arange(at * 4, 24, dtype=np.uint8).reshape(-1, 4))
    assert run.weight.tolist() == list(range(at, 6))
    assert run.heard.tolist() == list(range(at, 6))
    assert item.chunks[item.at] == low


def test_detaching_what_was_asked_for_again_keeps_its_holes() -> None:
    """A repair sends some chunks only; their places in the copy are those in the message."""
    item = outgoing(1.0, 6)
    item.chunks = np.array([1, 3, 5])
    item.at = 1
    item.detach()
    assert item.run.first == 3
    assert [item.run.payload[c - item.run.first, 0] for c in item.chunks[item.at :]] == [12, 20]


def test_what_is_to_leave_first_leaves_before_what_waits_and_in_its_order() -> None:
    flow = a_flow()
    waits = [outgoing(1.0), outgoing(2.0)]
    first = [replace(outgoing(3.0), first=True) for _ in range(3)]
    for one in (waits[0], first[0], first[1], waits[1], first[2]):
        flow.push(one)
    assert [id(one) for one in flow.queue] == [id(one) for one in (*first, *waits)]
