"""How large datagrams may be on a path: the search, and what becomes of data where a path's MTU changes.

Virtual time: two peers' own flows, framers, inboxes and outboxes, over lines whose MTU is set by the test.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from ragtag.core.address import Address
from ragtag.core.faults import Faults
from ragtag.core.seed import generator
from ragtag.core.types import Bytes, MessageKey, Run, Send
from ragtag.core.wire import CHUNK_BYTES, DATAGRAM_BYTES, Identity, Kind
from ragtag.network.control.controller import Delivery
from ragtag.network.control.mtu import PACKETS_MAX, PROBES_MAX, RAISE_S, Search
from ragtag.network.control.path import Path
from ragtag.network.link.flow import Flow
from ragtag.network.link.frame import Framer
from ragtag.network.link.inbox import Inbox
from ragtag.network.link.inject import Injector
from ragtag.network.link.link import Received, TooLarge
from ragtag.network.link.outbox import Outbox
from ragtag.protocols.node import Node

STEP_S = 1e-3
DELAY_S = 2e-3
PROBE_BYTE = bytes([Kind.PROBE])

# -- The search


def searched(first_hop: int, path: int, search: Search, now_s: float = 0.0) -> tuple[int, float]:
    """Probe until nothing is left to find out: how many probes left, and when it was over."""
    left, number = 0, itertools.count(1)
    while True:
        size = search.next(now_s, 1.0, PROBES_MAX, PACKETS_MAX)
        if not size:
            return left, now_s
        at = next(number)
        search.sent(at)
        if size > first_hop:
            search.refused()
        else:
            left += 1
            if size <= path:
                search.acknowledged(at)
            else:
                now_s += 1.0


@pytest.mark.parametrize("first_hop", [1, 2, 7, 13, 55, PACKETS_MAX])
def test_the_search_finds_what_the_path_takes(first_hop: int) -> None:
    for path in range(1, first_hop + 1):
        search = Search()
        left, now_s = searched(first_hop, path, search)
        assert search.packets == path
        assert left <= PROBES_MAX * 6 + 1
        assert search.next(now_s + 0.9 * RAISE_S, 1.0, 3, PACKETS_MAX) == 0
        searched(PACKETS_MAX, PACKETS_MAX, search, now_s + RAISE_S)
        assert search.packets == PACKETS_MAX, "a path that takes more is found out after a while"


def test_a_first_hop_of_ethernet_costs_no_probe() -> None:
    assert searched(1, 1, Search()) == (0, 0.0)


def test_a_path_that_takes_what_its_first_hop_takes_costs_few() -> None:
    assert searched(PACKETS_MAX, PACKETS_MAX, Search()) == (1, 0.0)
    assert searched(7, 7, Search()) == (1, 0.0)


def test_one_probe_is_under_way_at_a_time_and_some_may_be_lost() -> None:
    search = Search()
    assert search.next(0.0, 1.0, 3, 8) == 8
    search.sent(4)
    assert search.next(0.9, 1.0, 3, 8) == 0
    assert search.next(1.0, 1.0, 3, 8) == search.next(2.0, 1.0, 3, 8) == 8
    search.sent(9)
    search.acknowledged(3)
    search.acknowledged(10)
    assert search.packets == 1, "no probe of ours"
    search.acknowledged(4)
    assert search.packets == 8, "the answer to the first one may come late"
    search = Search()
    for at, tries in ((0.0, 8), (1.0, 8), (2.0, 8), (3.0, 4)):
        assert search.next(at, 1.0, 3, 8) == tries, "after three a smaller one"


def test_nothing_is_tried_that_the_receiver_s_window_does_not_hold() -> None:
    search = Search()
    assert search.next(0.0, 1.0, 3, 1) == search.next(1.0, 1.0, 3, 0) == 0
    search = Search()
    assert search.next(0.0, 1.0, 3, 9) == 9
    search.sent(1)
    assert 1 < search.next(1.0, 1.0, 3, 4) <= 4, "the window has become smaller"


# -- Two peers


class Line:
    """An endpoint, and its way to the other one.

    first_hop, mtu: packets that a datagram may hold there, and further on, where others are lost.
    loss: the share of datagrams that is lost.
    deaf: whether probes find an end that does not know them.
    sizes: how many datagrams of each size left; lost: packets of data that were.
    """

    capacity = 1024

    def __init__(self, seed: int) -> None:
        self.first_hop = self.mtu = 7
        self.loss, self.up, self.deaf = 0.0, True, False
        self.sizes: Counter[int] = Counter()
        self.probes = self.lost = 0
        self.now_s, self.other = 0.0, self
        self._came: list[tuple[float, int, Bytes | bytes]] = []
        self._draws, self._count = generator(seed, "mtu"), itertools.count()

    def ready(self, address: Address) -> bool:
        return True

    def room(self, address: Address) -> bool:
        return True

    def send(self, rows: Bytes, address: Address, per: int = 1) -> int:
        if per > self.first_hop:
            raise TooLarge
        for at in range(0, len(rows), per):
            one = rows[at : at + per].copy()
            probe = one[0, 1] == Kind.PROBE
            self.probes += probe
            if not probe:
                self.sizes[len(one)] += 1
            if len(one) > self.mtu or self._loses() or (probe and self.deaf):
                self.lost += 0 if probe else len(one)
            else:
                self._put(one)
        return len(rows)

    def send_short(self, datagram: bytes, address: Address) -> None:
        if not self._loses():
            self._put(datagram)

    def _loses(self) -> bool:
        return not self.up or (self.loss > 0 and self._draws.random() < self.loss)

    def _put(self, data: Bytes | bytes) -> None:
        heapq.heappush(self.other._came, (self.now_s + DELAY_S, next(self._count), data))

    def receive(self) -> Received:
        tables, shorts, sources, per = (
            [np.zeros((0, DATAGRAM_BYTES), np.uint8)],
            list[bytes](),
            [],
            list[int](),
        )
        rows = 0
        while self._came and self._came[0][0] <= self.now_s:
            data = heapq.heappop(self._came)[2]
            if isinstance(data, bytes):
                shorts.append(data)
            else:
                tables.append(data)
                rows += len(data)
                sources.append((rows, AT))
                per.append(len(data))
        return Received(
            np.concatenate(tables), shorts, 0, True, sources, [AT] * len(shorts), [0] * len(sources), [], per
        )


AT: Address = ("127.0.0.1", 9)


class End:
    """One of two peers; what it takes is counted by message and chunk."""

    def __init__(self, me: int, line: Line, faults: Faults | None = None) -> None:
        self.line, self.framer = line, Framer(Identity("otters", me), 5)
        self.framer.open(0, 7)
        self.flow = Flow(1 - me, AT)
        flows = {1 - me: self.flow}
        self.outbox = Outbox(line, self.framer, Injector(faults or Faults(), 1, me), flows)  # type: ignore[arg-type]
        self.inbox = Inbox(line, self.framer, flows, self.outbox, Node(me, 2, 1))  # type: ignore[arg-type]
        self.came: Counter[tuple[int, int]] = Counter()
        self.messages = 0

    def give(self, k: int) -> None:
        run = Run(
            self.flow.peer, MessageKey(0, self.messages, 0, 0), 0, k, np.zeros((k, CHUNK_BYTES), np.uint8),
            np.ones(k, np.float32), np.ones(k, np.uint64), None, True,
        )  # fmt: skip
        self.messages += 1
        self.outbox.enqueue(Send(run, 1e9))

    def turn(self, now_s: float) -> None:
        self.line.now_s = now_s
        for run in self.inbox.receive(now_s).runs:
            self.came.update((run.key.round, run.first + i) for i in range(len(run.payload)))
        self.outbox.flush(now_s)

    @property
    def packets(self) -> int:
        return self.flow.path.mtu.packets


class Two:
    """A sender, a receiver, and the time."""

    def __init__(self, faults: Faults | None = None) -> None:
        lines = Line(1), Line(2)
        lines[0].other, lines[1].other = lines[1], lines[0]
        self.line, self.now_s = lines[0], 0.0
        self.ends = [End(0, lines[0], faults), End(1, lines[1])]
        self.source, self.dest = self.ends

    def until(self, there: Callable[[], bool], for_s: float = 60.0) -> float:
        """Go on until it is so; how long that took."""
        began_s = self.now_s
        while not there():
            assert self.now_s < began_s + for_s, (self.source.packets, self.line.sizes, self.source.flow.path)
            self.now_s += STEP_S
            for end in self.ends:
                end.turn(self.now_s)
        return self.now_s - began_s

    def send(self, k: int, messages: int = 1, for_s: float = 60.0) -> float:
        """Messages of ``k`` chunks, one after the other has left and is known to have come or been lost."""
        took_s = 0.0
        for _ in range(messages):
            self.source.give(k)
            took_s += self.until(lambda: self.source.outbox.idle, for_s)
        return took_s


@pytest.mark.parametrize("mtu", [1, 2, 5, 7])
def test_data_finds_the_paths_mtu_and_none_of_it_is_lost(mtu: int) -> None:
    two = Two()
    two.line.mtu = mtu
    two.send(100, 30)
    assert two.source.packets == mtu
    assert two.line.lost == 0 and set(two.dest.came.values()) == {1} and len(two.dest.came) == 3000
    assert two.source.flow.path.received == two.source.flow.path.acked, "a probe that is lost is no loss"
    assert two.line.probes <= 1 + 3 * PROBES_MAX
    before = two.line.sizes.copy()
    two.send(700)
    after = two.line.sizes - before
    assert max(after) == mtu and sum(after.values()) <= 700 / mtu + 60


def test_an_end_that_does_not_know_probes_gets_one_packet_in_a_datagram() -> None:
    two = Two()
    two.line.deaf = True
    two.send(100, 30)
    assert two.source.packets == 1 and set(two.line.sizes) == {1} and len(two.dest.came) == 3000


def test_little_is_sent_without_a_probe() -> None:
    two = Two()
    two.send(1, 20)
    assert two.line.probes == 0


def test_what_is_held_back_by_an_injected_delay_goes_one_by_one() -> None:
    two = Two(Faults(latency_s=2e-3))
    two.send(100, 10)
    assert two.line.probes == 0 and set(two.line.sizes) == {1} and len(two.dest.came) == 1000


@pytest.mark.parametrize("smaller", [1, 3])
def test_a_path_that_takes_less_than_before_costs_a_window_and_no_more(smaller: int) -> None:
    two = Two()
    two.send(100, 20)
    assert two.source.packets == 7
    two.line.mtu, path = smaller, two.source.flow.path
    window, timeout_s = path.limit, path.rto_s
    two.source.give(20_000)
    two.until(lambda: two.source.packets < 7)
    assert two.line.lost <= window + 7
    took_s = two.until(lambda: two.source.outbox.idle)
    assert two.source.packets == smaller and two.line.lost <= window + 7
    assert len([1 for message, _ in two.dest.came if message == 20]) == 20_000 - two.line.lost
    assert took_s < 60.0 and timeout_s < 0.5
    lost = two.line.lost
    two.send(100, 10)
    assert two.line.lost == lost, "it stays with what the path takes"
    two.line.mtu = 7
    two.now_s += RAISE_S
    two.send(100, 10)
    assert two.source.packets == 7 and two.line.lost == lost


def test_a_black_hole_is_not_taken_for_a_full_queue_nor_for_the_paths_own_losses() -> None:
    two = Two()
    two.send(100, 20)
    two.line.mtu, control = 1, two.source.flow.path.control
    two.send(100)
    assert two.line.lost > 0
    assert control.ambient.share < 0.01  # type: ignore[attr-defined]


def test_a_first_hop_that_takes_less_than_before_costs_nothing() -> None:
    two = Two()
    two.send(100, 20)
    two.source.give(2000)
    two.until(lambda: two.source.flow.path.in_flight > 0)
    two.line.first_hop = two.line.mtu = 2
    two.until(lambda: two.source.outbox.idle)
    assert two.source.packets == 2 and two.line.lost == 0 and len(two.dest.came) == 4000


def test_after_an_outage_datagrams_are_as_large_as_before() -> None:
    two = Two()
    two.send(100, 20)
    two.line.up = False
    two.source.give(500)
    for _ in range(2000):
        two.now_s += STEP_S
        for end in two.ends:
            end.turn(two.now_s)
    two.line.up = True
    two.until(lambda: two.source.outbox.idle)
    two.send(100, 5)
    assert two.source.packets == 7


@pytest.mark.parametrize("loss", [0.02, 0.1, 0.3])
def test_a_path_that_loses_datagrams_by_chance_keeps_their_size(loss: float) -> None:
    two = Two()
    two.line.loss = two.line.other.loss = loss
    two.send(500, 40, 600.0)
    sizes = two.line.sizes
    large = sum(size * count for size, count in sizes.items() if size == 7)
    assert large > 0.8 * sum(size * count for size, count in sizes.items())
    assert abs(two.line.lost / sum(size * count for size, count in sizes.items()) - loss) < 0.1 * loss + 0.01


def test_another_process_or_another_address_is_searched_anew() -> None:
    two = Two()
    two.send(100, 20)
    path = two.source.flow.path
    assert path.mtu.packets == 7
    path.restart()
    assert path.mtu.packets == 1
    two.send(100, 20)
    assert path.mtu.packets == 7
    path.moved()
    assert path.mtu.packets == 1


# -- What one path makes of answers


class Told:
    """A controller that keeps what it is told."""

    window, rate, fair, bandwidth, busy, train_s = 1000.0, np.inf, 0.0, 0.0, 1, 1e-3
    part, makeup_s = 1.0, np.inf

    def __init__(self) -> None:
        self.samples: list[Delivery] = []

    def sent(self, now_s: float, count: int, in_flight: int) -> None:
        pass

    def acknowledged(self, sample: Delivery) -> None:
        self.samples.append(sample)


def seven_to_a_datagram() -> tuple[Path, Told]:
    told = Told()
    path = Path(told)
    path.send(0.0, 1)
    path.on_ack(0.1, 1, 1, 1000)
    assert path.mtu.next(0.1, 1.0, 3, 7) == 7
    path.mtu.sent(1)
    path.mtu.acknowledged(1)
    assert path.mtu.packets == 7
    return path, told


def test_what_falls_into_a_black_hole_is_no_loss_to_rate_control_and_found_once() -> None:
    path, told = seven_to_a_datagram()
    path.send(0.2, 70, 70)
    path.send(0.2, 1)
    path.send(0.2, 35, 35)
    path.send(0.2, 1)
    path.on_ack(0.3, 1 + 70 + 1, 2, 1000)
    assert path.mtu.packets == 1 and (told.samples[-1].passed, told.samples[-1].delivered) == (1, 1)
    assert path.mtu.next(0.3, 1.0, 3, 56) == 7, "first the size that was"
    path.on_ack(0.4, path.sent, 3, 1000)  # the rest had left before that was known
    assert (told.samples[-1].passed, told.samples[-1].delivered) == (1, 1)
    assert path.mtu.next(1.3, 1.0, 3, 56) == 7


def test_a_large_datagram_that_comes_while_small_ones_are_lost_shows_that_there_is_no_hole() -> None:
    path, _ = seven_to_a_datagram()
    received = 1
    for at in range(1, 20):
        path.send(at, 40)
        path.send(at, 7, 7)
        received += 7
        path.on_ack(at + 0.1, path.sent, received, 1000)
    assert path.mtu.packets == 7


def test_one_large_datagram_or_two_are_lost_by_chance() -> None:
    path, told = seven_to_a_datagram()
    received = 1
    for at in range(1, 20):
        path.send(at, 14, 14)
        path.send(at, 1)
        received += 1
        path.on_ack(at + 0.1, path.sent, received, 1000)
        assert path.mtu.packets == 7 and told.samples[-1].passed == 15
        path.send(at + 0.2, 7, 7)
        received += 7
        path.on_ack(at + 0.3, path.sent, received, 1000)


# -- Packets of probes


def test_a_probe_is_answered_once_and_only_to_its_sender() -> None:
    two = Two()
    two.source.give(1)
    two.until(lambda: two.source.outbox.idle)
    rows = two.source.framer.probe(1, 77, 5)
    assert rows.shape == (5, DATAGRAM_BYTES) and not rows[:, 64:].any()
    kept, headers = two.dest.framer.parse(rows)
    assert len(kept) == len(headers) == 0 and two.dest.framer.refused.total == 0
    assert [(probe.sender, probe.number) for probe in two.dest.framer.probes] == [(0, 77)]
    two.dest.framer.probes.clear()
    two.dest.framer.parse(rows[:4])
    assert two.dest.framer.probes == [], "its end is missing"
    rows[4, 70] ^= 1
    two.dest.framer.parse(rows)
    assert two.dest.framer.probes == [] and two.dest.framer.refused.corrupt == 1
    stranger = Framer(Identity("badgers", 0), 5).probe(1, 78, 3)
    two.dest.framer.parse(stranger)
    assert two.dest.framer.probes == [] and two.dest.framer.refused.foreign == 3
    before = two.dest.flow.answers
    two.line._put(two.source.framer.probe(1, 78, 2))
    two.until(lambda: two.dest.flow.answers > before)
    for _ in range(20):
        two.dest.turn(two.now_s)
    assert two.dest.flow.answers == before + 1
    two.dest.inbox._peer_at = {}
    two.line._put(two.source.framer.probe(1, 79, 2))
    two.until(lambda: two.dest.framer.refused.elsewhere > 0)
    assert two.dest.framer.probes == []
