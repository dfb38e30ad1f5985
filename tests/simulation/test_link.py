"""The line: each fault does what its name says, as often as it says."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ragtag.core.faults import BurstLoss, Faults, Loss, LossStream, OneWay, OwnLine, Partition, Window
from ragtag.core.types import Event, PeerId, Run, Send
from ragtag.simulation.link import OVERHEAD_BYTES, REPEATS_MAX, Link
from ragtag.simulation.loop import Port
from tests.simulation.scripted import message

WIRE_BYTES = 1088 + OVERHEAD_BYTES
SEED = 5


class Line:
    """A link whose arrivals are noted: ``came`` has (when, to whom, run)."""

    def __init__(self, faults: Faults, n: int = 2, ends_s: list[float] | None = None) -> None:
        self.came: list[tuple[float, PeerId, Run]] = []
        ports = [Port(lambda event: None, ends_s=end_s) for end_s in ends_s or [math.inf] * n]
        at = lambda at_s, call: call()  # noqa: E731  (in this line's tests times of arrival only grow)
        self.link = Link(faults, SEED, ports, self._post, at)

    def _post(self, at_s: float, dest: PeerId, event: Event) -> None:
        (run,) = event.runs  # type: ignore[union-attr]
        self.came.append((at_s, dest, run))

    def send(self, *runs: Run, now_s: float = 0.0, deadline_s: float = math.inf) -> None:
        self.link.send(now_s, 0, [Send(run, deadline_s) for run in runs])

    def send_each(self, runs: list[Run], deadline_s: float = math.inf) -> None:
        for run in runs:
            self.send(run, deadline_s=deadline_s)


def rows(run: Run) -> list[int]:
    """Which chunks of a message a run brings."""
    here = np.ones(len(run.payload), np.bool_) if run.mask is None else run.mask
    return [int(run.payload[i, 0]) for i in np.flatnonzero(here)]


def test_a_perfect_line_hands_over_the_senders_own_arrays_at_once() -> None:
    line, run = Line(Faults()), message(1, 5)
    line.send(run)
    ((at_s, dest, came),) = line.came
    assert (at_s, dest, came.peer, came.key, came.total, came.ended) == (0.0, 1, 0, run.key, 5, True)
    assert came.payload is run.payload and came.weight is run.weight and came.heard is run.heard
    assert came.mask is None


def test_latency_delays() -> None:
    line = Line(Faults(latency_s=0.25))
    line.send(message(1), now_s=1.0)
    assert line.came[0][0] == 1.25


def test_peers_may_have_lines_of_their_own() -> None:
    """Its own rate in place of the common one; its own delay beside the common one, whichever way."""
    own = (OwnLine(0, 4 * WIRE_BYTES, 0.25), OwnLine(2, 8 * WIRE_BYTES, 0.5))
    line = Line(Faults(latency_s=1.0, rate_bytes_per_s=2 * WIRE_BYTES, lines=own), n=4)

    def arrives_s(source: int, dest: int) -> float:
        line.came.clear()
        line.link.send(0.0, source, [Send(message(dest, 1), math.inf)])
        return line.came[-1][0]

    assert arrives_s(0, 1) == pytest.approx(0.25 + 1.25)
    assert arrives_s(1, 0) == pytest.approx(0.5 + 1.25)
    assert arrives_s(2, 0) == pytest.approx(0.125 + 1.75)
    assert arrives_s(3, 1) == pytest.approx(0.5 + 1.0)


@pytest.mark.parametrize("wrong", [(0.0, 0.0), (1.0, -1.0)])
def test_a_line_that_cannot_be_is_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="line of peer 3"):
        OwnLine(3, *wrong)


def test_jitter_is_exponential_with_its_mean() -> None:
    line = Line(Faults(latency_s=1.0, jitter_s=0.1))
    line.send_each([message(1, number=i) for i in range(4000)])
    late = np.array([at_s for at_s, _, _ in line.came]) - 1.0
    assert late.min() >= 0
    assert abs(late.mean() - 0.1) < 5 * 0.1 / math.sqrt(4000)
    assert abs((late > 0.1).mean() - math.exp(-1)) < 5 * 0.5 / math.sqrt(4000)
    assert abs((late > 0.3).mean() - math.exp(-3)) < 5 * 0.22 / math.sqrt(4000)


@pytest.mark.parametrize("loss", [Loss(0.1), Loss(0.6), BurstLoss(0.05, 0.2)])
def test_losses_are_those_of_the_loss_stream(loss: Loss | BurstLoss) -> None:
    """The injector of the real driver draws from the same stream, so both worlds lose the same chunks."""
    line, stream = Line(Faults(loss=loss)), LossStream(Faults(loss=loss), SEED)
    for number in range(200):
        run = message(1, 20, number)
        line.came.clear()
        line.send(run)
        through = stream.draw(0, 1, run.key, 20)
        assert through is not None
        assert [r for _, _, came in line.came for r in rows(came)] == np.flatnonzero(through).tolist()


@pytest.mark.parametrize("loss", [Loss(0.3), BurstLoss(0.1, 0.3)])
def test_many_small_messages_lose_as_one_by_one(loss: Loss | BurstLoss) -> None:
    faults = Faults(loss=loss)
    together, apart = Line(faults), Line(faults)
    for attempt in range(3):  # the later attempts draw anew
        runs = [message(1, number=number) for number in range(500)]
        together.send(*runs)
        apart.send_each(runs)
        assert [(t, d, rows(r), r.key, r.ended) for t, d, r in together.came] == [
            (t, d, rows(r), r.key, r.ended) for t, d, r in apart.came
        ]
        lost = together.link.traffic[0].datagrams_lost / (500 * (attempt + 1))
        assert abs(lost - loss.p) < 5 * math.sqrt(0.25 / 500)


def test_a_message_sent_twice_at_once_is_drawn_twice() -> None:
    runs = [message(1, number=number) for number in [*range(100), *range(100)]]
    together, apart = Line(Faults(loss=Loss(0.5))), Line(Faults(loss=Loss(0.5)))
    together.send(*runs)
    apart.send_each(runs)
    came = [bool(rows(run)) for _, _, run in together.came]
    assert came == [bool(rows(run)) for _, _, run in apart.came]
    assert came[:100] != came[100:]


def test_an_end_marker_is_repeated_a_round_trip_apart_until_one_gets_through() -> None:
    faults = Faults(loss=Loss(0.7), latency_s=0.01, jitter_s=0.0)
    line, stream = Line(faults), LossStream(faults, SEED)
    late = 0
    for number in range(300):
        run = message(1, 8, number)
        line.came.clear()
        line.send(run)
        if sum(len(rows(came)) for _, _, came in line.came) == 8:
            continue
        repeat = next(r for r in range(REPEATS_MAX) if not stream.marker_lost(0, 1, run.key, r))
        at_s, _, last = line.came[-1]
        assert last.ended and at_s == pytest.approx(0.01 + repeat * 0.02)
        assert all(not came.ended for _, _, came in line.came[:-1])
        if repeat:
            assert last.payload.shape == (0, 1088) and last.total == 8 and last.key == run.key
            late += len(line.came) == 2
    assert late > 50


def test_a_message_that_is_lost_as_a_whole_still_ends() -> None:
    line = Line(Faults(loss=Loss(0.5), latency_s=0.01))
    line.send_each([message(1, number=number) for number in range(2000)])
    assert len(line.came) == 2000 and all(run.ended for _, _, run in line.came)
    empty = sum(len(run.payload) == 0 for _, _, run in line.came)
    assert abs(empty / 2000 - 0.5) < 5 * 0.5 / math.sqrt(2000)


def test_no_marker_leaves_after_the_deadline() -> None:
    line = Line(Faults(loss=Loss(0.9), latency_s=0.01))
    line.send_each([message(1, number=number) for number in range(2000)], deadline_s=0.05)
    assert max(at_s for at_s, _, _ in line.came) <= 0.05 + 0.01
    ended = sum(run.ended for _, _, run in line.came) / 2000
    copies = 3  # at 0, 0.02 and 0.04
    expected = 0.1 + 0.9 * (1 - 0.9**copies)
    assert abs(ended - expected) < 5 * 0.5 / math.sqrt(2000)


@pytest.mark.parametrize("latency_s", [0.0, 0.01])
def test_where_everything_is_lost_nothing_comes_and_sending_ends(latency_s: float) -> None:
    line = Line(Faults(loss=Loss(1.0), latency_s=latency_s))
    line.send(message(1, 4), *(message(1, number=i) for i in range(20)))
    assert line.came == []


def test_a_repair_sends_only_what_was_asked_for() -> None:
    line = Line(Faults())
    asked = np.array([True, False, True, False, False])
    line.send(replace(message(1, 5), mask=asked))
    ((_, _, came),) = line.came
    assert rows(came) == [0, 2] and came.ended
    assert line.link.traffic[0].datagrams_sent == 2


def test_one_way_loss_is_one_way() -> None:
    line = Line(Faults(one_way=(OneWay(0, 1, Window(1.0, 2.0)),)))
    for now_s in (0.5, 1.0, 1.9, 2.0):
        line.send(message(1, 3, number=int(now_s * 10)), now_s=now_s, deadline_s=now_s)
    assert [run.key.round for _, _, run in line.came] == [5, 20]
    line.link.send(1.5, 1, [Send(message(0), 9.0)])
    assert line.came[-1][1] == 0


def test_a_partition_parts_its_sides_until_it_heals() -> None:
    line = Line(Faults(latency_s=0.1, partitions=(Partition(frozenset({0, 2}), Window(0.0, 1.0)),)), n=3)
    line.send(message(2), message(1), deadline_s=3.0)
    (first_s, to, _), (end_s, _, end) = line.came
    assert (to, first_s) == (2, 0.1)
    assert end.ended and len(end.payload) == 0 and end_s == pytest.approx(1.1)  # a repeat after the window


def test_bandwidth_queues_what_is_sent() -> None:
    line = Line(Faults(latency_s=0.5, rate_bytes_per_s=100 * WIRE_BYTES))
    line.send(message(1, 10), message(1, 20, number=1))
    line.send(message(1, 10, number=2), now_s=5.0)
    assert [at_s for at_s, _, _ in line.came] == pytest.approx([0.5 + 0.1, 0.5 + 0.3, 5.0 + 0.5 + 0.1])


def test_what_the_queue_cannot_hold_is_lost_from_the_tail() -> None:
    line = Line(Faults(latency_s=1.0, rate_bytes_per_s=10 * WIRE_BYTES, queue_bytes=7.5 * WIRE_BYTES))
    line.send(message(1, 5), message(1, 5, number=1), message(1, 5, number=2))
    came = {run.key.round: rows(run) for _, _, run in line.came if len(run.payload)}
    assert came == {0: [0, 1, 2, 3, 4], 1: [0, 1]}
    assert [run.key.round for _, _, run in line.came if run.ended] == [0, 1, 2]
    assert line.link.traffic[0].datagrams_lost == 8
    line.send(message(1, 5, number=3), now_s=0.33)  # by now 3.3 have left, so 3.8 fit
    assert rows(line.came[-1][2]) == [0, 1, 2]


def test_what_would_leave_after_the_deadline_is_not_sent() -> None:
    line = Line(Faults(latency_s=1.0, rate_bytes_per_s=10 * WIRE_BYTES))
    line.send(message(1, 10), deadline_s=0.45)
    (at_s, _, some), (end_s, _, end) = line.came
    assert rows(some) == [0, 1, 2, 3] and at_s == pytest.approx(1.4) and not some.ended
    assert end.ended and end_s == pytest.approx(1.45)  # given up at the deadline, and said so
    assert line.link.traffic[0].datagrams_sent == 4
    line.came.clear()
    line.send(message(1, 2), now_s=0.5)  # the uplink is free again
    assert line.came[0][0] == pytest.approx(1.7)
    line.send(message(1), now_s=1.0, deadline_s=0.9)
    assert len(line.came) == 1


def test_a_long_run_comes_in_pieces() -> None:
    line = Line(Faults(latency_s=0.05, rate_bytes_per_s=100 * WIRE_BYTES))
    line.send(message(1, 40))
    pieces = [(at_s, rows(run), run.ended) for at_s, _, run in line.came]
    assert len(pieces) == 4 and [p[2] for p in pieces] == [False, False, False, True]
    assert [row for _, part, _ in pieces for row in part] == list(range(40))
    assert [at_s for at_s, _, _ in pieces] == pytest.approx([0.15, 0.25, 0.35, 0.45])


def test_pieces_lose_and_are_asked_for_as_the_whole() -> None:
    faults = Faults(loss=Loss(0.4), latency_s=0.05, rate_bytes_per_s=100 * WIRE_BYTES)
    line, stream = Line(faults), LossStream(faults, SEED)
    asked = np.arange(40) % 3 > 0
    run = replace(message(1, 40), mask=asked)
    line.send(run)
    through = stream.draw(0, 1, run.key, 40)
    assert through is not None and len(line.came) > 2
    assert [r for _, _, came in line.came for r in rows(came)] == np.flatnonzero(asked & through).tolist()
    assert line.came[-1][2].ended
    assert line.link.traffic[0].datagrams_lost == int((asked & ~through).sum())


def test_duplicates_come_as_often_as_said() -> None:
    line = Line(Faults(latency_s=0.01, duplicate=0.2))
    line.send_each([message(1, 2, number) for number in range(3000)])
    twice = len(line.came) - 3000
    assert abs(twice / 3000 - 0.2) < 5 * math.sqrt(0.16 / 3000)
    copies = [run for at_s, _, run in line.came if at_s > 0.015]
    assert len(copies) == twice and all(rows(run) == [0, 1] for run in copies)


def test_reordering_delays_a_run_or_a_part_of_it_once_each() -> None:
    line = Line(Faults(latency_s=0.01, reorder=0.3, reorder_s=0.5))
    late = parts = 0
    for number in range(3000):
        line.came.clear()
        line.send(message(1, 4, number))
        came = [(at_s, row) for at_s, _, run in line.came for row in rows(run)]
        assert sorted(row for _, row in came) == [0, 1, 2, 3]
        assert {at_s for at_s, _ in came} <= {0.01, 0.51}
        assert sum(run.ended for _, _, run in line.came) == 1
        late += any(at_s == 0.51 for at_s, _ in came)
        parts += len(line.came) == 2
    assert abs(late / 3000 - 0.3) < 5 * math.sqrt(0.21 / 3000)
    assert abs(parts / late - 0.75) < 5 * math.sqrt(0.19 / late)  # of four cuts, one takes all


def test_nothing_leaves_a_crashed_peer() -> None:
    line = Line(Faults(rate_bytes_per_s=10 * WIRE_BYTES), ends_s=[0.35, math.inf])
    line.send(message(1, 10))
    assert [row for _, _, run in line.came for row in rows(run)] == [0, 1, 2]
    assert not any(run.ended for _, _, run in line.came)
    line.came.clear()
    line.send(message(1), now_s=0.35)
    assert line.came == []


@pytest.mark.parametrize("rate", [math.inf, 1e9])
def test_traffic_adds_up(rate: float) -> None:
    line = Line(Faults(loss=Loss(0.3), latency_s=0.01, rate_bytes_per_s=rate))
    line.send(*(message(1, 7, number) for number in range(100)))
    line.send(*(message(1, 1, number, stage=1) for number in range(100)))
    sent, received = line.link.traffic
    assert sent.datagrams_sent == 800 and sent.bytes_sent == 800 * WIRE_BYTES
    assert received.bytes_received == (800 - sent.datagrams_lost) * WIRE_BYTES
    assert 800 * 0.15 < sent.datagrams_lost < 800 * 0.45


def test_changed_faults_hold_from_then_on() -> None:
    line = Line(Faults(loss=Loss(1.0), latency_s=0.1))
    line.send(message(1))
    line.link.change(Faults(latency_s=0.1).healed())
    line.send(message(1, number=1))
    assert [run.key.round for _, _, run in line.came] == [1]


def test_a_downlink_takes_one_run_after_the_other() -> None:
    """Two chunks a second come in: four that come at once take two seconds, the next two wait."""
    lines = (OwnLine(1, 1.0, 0.0, 2 * WIRE_BYTES),)
    line = Line(Faults(latency_s=0.5, rate_bytes_per_s=1e30, lines=lines), 3)
    line.send(message(1, 4), now_s=0.0)
    line.send(message(2, 4), now_s=0.0)
    line.send(message(1, 2), now_s=1.0)
    assert [(round(at_s, 9), dest) for at_s, dest, _ in line.came] == [(2.5, 1), (0.5, 2), (3.5, 1)]
    with pytest.raises(ValueError, match="to receive"):
        OwnLine(1, 1.0, 0.0, 0.0)
