"""What leaves a peer, and what becomes of it where a channel is opened anew meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.core.address import Address
from ragtag.core.faults import Faults
from ragtag.core.types import Bytes, MessageKey, Outcome, Run, Send
from ragtag.core.wire import ANSWERS, CHUNK_BYTES, Identity, Kind, headers_of
from ragtag.network.control.controller import Delivery
from ragtag.network.link.flow import Flow, Hold
from ragtag.network.link.frame import Framer, Short
from ragtag.network.link.inbox import Inbox
from ragtag.network.link.inject import Injector
from ragtag.network.link.link import TRAIN, Received, TooLarge
from ragtag.network.link.outbox import KEEP_OPEN_S, Outbox
from ragtag.protocols.node import Node

OLD, NEW = 7, 8


OTHER: Address = ("127.0.0.1", 9)


class Wire:
    """An endpoint that keeps what is sent, and gives what it is told to."""

    capacity = 4096

    def __init__(self) -> None:
        self.keys, self.fits, self.full = True, 1 << 20, False
        self.rows: list[Bytes] = []
        self.shorts: list[bytes] = []
        self.next: list[Bytes] = []
        self.next_shorts: list[bytes] = []
        self.came_ns = 0

    def ready(self, address: Address) -> bool:
        return self.keys

    def room(self, address: Address) -> bool:
        return not self.full

    def send(self, rows: Bytes, address: Address, per: int = 1) -> int:
        rows = rows[: self.fits]
        self.rows.append(rows.copy())
        return len(rows)

    def send_short(self, datagram: bytes, address: Address) -> None:
        self.shorts.append(datagram)

    def receive(self) -> Received:
        rows, self.next = self.next, []
        shorts, self.next_shorts = self.next_shorts, []
        table = np.concatenate([np.zeros((0, 1152), np.uint8), *rows])
        sources = [(len(table), OTHER)] if rows else []
        came_ns, short_came_ns = [self.came_ns] * len(sources), [self.came_ns] * len(shorts)
        return Received(table, shorts, 0, True, sources, [OTHER] * len(shorts), came_ns, short_came_ns)


class Heard:
    """A controller that keeps what it is told."""

    window, rate, fair, bandwidth, busy, train_s = 64.0, np.inf, 0.0, 0.0, 1, 1e-3
    part, makeup_s = 1.0, np.inf

    def __init__(self, samples: list[Delivery]) -> None:
        self.samples = samples

    def sent(self, now_s: float, count: int, in_flight: int) -> None:
        pass

    def acknowledged(self, sample: Delivery) -> None:
        self.samples.append(sample)


class Peer:
    """Peer ``me`` of two, with channel 0 open."""

    def __init__(self, me: int) -> None:
        self.wire, self.framer = Wire(), Framer(Identity("otters", me), 5)
        self.framer.schemas[0] = OLD
        self.flow = Flow(1 - me, OTHER)
        flows = {1 - me: self.flow}
        self.outbox = Outbox(self.wire, self.framer, Injector(Faults(), 1, me), flows)  # type: ignore[arg-type]
        self.inbox = Inbox(self.wire, self.framer, flows, self.outbox, Node(me, 2, 1))  # type: ignore[arg-type]

    def give(self, k: int) -> None:
        """To the other one."""
        rows = np.zeros((k, CHUNK_BYTES), np.uint8)
        weight, heard = np.ones(k, np.float32), np.ones(k, np.uint64)
        run = Run(self.flow.peer, MessageKey(0, 0, 0, 0), 0, k, rows, weight, heard, None, True)
        self.outbox.enqueue(Send(run, 60.0))


def parsed(peer: Peer, shorts: list[bytes]) -> list[Short]:
    return [short for data in shorts if (short := peer.framer.parse_short(data)) is not None]


def test_what_was_begun_goes_on_as_it_was_when_its_channel_is_opened_anew() -> None:
    """Probes of several channels run on one: the first peer to be done opens it anew, and what it still owes
    the others, or its end, would be refused by them: they would wait for it until their deadline.
    """
    here, there = Peer(0), Peer(1)
    here.flow.path.control.window = 10
    here.give(25)
    here.outbox.flush(0.0)
    here.framer.schemas[0] = NEW
    for at in range(1, 4):
        sent = here.flow.path.sent
        here.flow.path.on_ack(0.1 * at, sent, sent, 1000)
        here.outbox.flush(0.1 * at)
    rows = np.concatenate(here.wire.rows)
    assert len(rows) == 25 and set(headers_of(rows)["schema"].tolist()) == {OLD}
    here.outbox.flush(9.0)
    ends = [short for short in parsed(there, here.wire.shorts) if short.kind == Kind.END]
    assert ends and {short.schema for short in ends} == {OLD}
    here.give(1)
    here.outbox.flush(9.1)
    assert headers_of(here.wire.rows[-1])["schema"].tolist() == [NEW], "what is begun now is of the new one"


def test_marks_that_are_sent_again_leave_the_next_message_little_to_say_of_the_path() -> None:
    """As more had come by then than the message had, the next one counted as all that the path may carry, and
    three such round trips ended its startup: at a few hundred datagrams a second.
    """
    here, samples = Peer(0), list[Delivery]()
    path = here.flow.path
    path.control = Heard(samples)  # type: ignore[assignment]
    here.give(10)
    here.outbox.flush(0.0)
    path.on_ack(0.02, 10, 4, 1000)  # six were overtaken: they come with the mark
    here.outbox.flush(1.0)
    assert path.sent > 10, "the mark was sent again"
    path.on_ack(1.02, path.sent, path.sent, 1000)
    here.flow.endings.clear()
    here.give(10)
    here.outbox.flush(2.0)
    path.on_ack(2.02, path.sent, path.sent, 1000)
    assert samples[-1].app_limited


def test_an_injected_delay_begins_when_something_is_sent() -> None:
    """A turn of a busy driver takes milliseconds, and what it sent at its end had as much less to go."""
    here = Peer(0)
    injector = Injector(Faults(latency_s=0.02), 1, 0)
    outbox = Outbox(here.wire, here.framer, injector, {1: here.flow})  # type: ignore[arg-type]
    outbox.clock_s = lambda: 5.007
    outbox.answer(5.0, here.flow, Kind.PING)
    assert injector.held.heap[0][0] == pytest.approx(5.027)


def test_what_is_repaired_of_a_round_that_is_done_is_as_it_was_asked_for() -> None:
    """Its values are the next rounds' memory from then on, and would leave with this round's weights."""
    here = Peer(0)
    rows, ones, bits = np.full((3, CHUNK_BYTES), 7, np.uint8), np.ones(3, np.float32), np.ones(3, np.uint64)
    run = Run(1, MessageKey(0, 4, 1, 0), 0, 3, rows, ones, bits, None, True)
    none = np.zeros(0, np.float32)
    done = Outcome(
        0, 4, none, none, none.astype(np.uint64), none.astype(np.bool_), (), (), 0.0, 0.0, 0.0, 0.0, False
    )
    here.outbox.finish(0.0, done)
    here.outbox.enqueue(Send(run, 60.0, True))
    rows[:] = 9
    here.outbox.flush(0.1)
    assert (here.wire.rows[0][:, 64:] == 7).all()


def test_a_channel_that_is_opened_anew_copies_nothing_of_its_first_rounds() -> None:
    here = Peer(0)
    none = np.zeros(0, np.float32)
    bits, bools = none.astype(np.uint64), none.astype(np.bool_)
    here.outbox.finish(0.0, Outcome(0, 9, none, none, bits, bools, (), (), 0.0, 0.0, 0.0, 0.0, False))
    rows, ones, own = np.zeros((3, CHUNK_BYTES), np.uint8), np.ones(3, np.float32), np.ones(3, np.uint64)
    sent = Send(Run(1, MessageKey(0, 0, 0, 1), 0, 3, rows, ones, own, None, True), 60.0)
    here.outbox.enqueue(sent)
    assert here.flow.queue[-1].run.payload is not rows, "of a round before one that is done"
    here.outbox.opened(0)
    here.outbox.enqueue(sent)
    assert here.flow.queue[-1].run.payload is rows


def test_what_is_too_large_for_the_first_hop_leaves_in_smaller_ones_at_once() -> None:
    """The link has room: nothing would wake a driver that took it for full."""
    here = Peer(0)
    here.flow.path.mtu.packets = 5
    send = here.wire.send

    def first_hop(rows: Bytes, address: Address, per: int = 1) -> int:
        if per > 1:
            raise TooLarge
        return send(rows, address, per)

    here.wire.send = first_hop  # type: ignore[method-assign]
    here.give(20)
    here.outbox.flush(0.0)
    assert not here.outbox.blocked and not here.flow.queue and sum(map(len, here.wire.rows)) == 20


def test_what_keeps_a_message_from_leaving_is_known_and_for_how_long() -> None:
    here = Peer(0)
    path, flow, outbox = here.flow.path, here.flow, here.outbox
    here.give(100)
    here.wire.keys = False
    outbox.flush(0.0)
    assert flow.held is Hold.KEYS and path.sent == 0, "what has no keys yet waits, and is not lost"
    outbox.flush(1.0)
    here.wire.keys, here.wire.fits = True, 0
    outbox.flush(3.0)
    assert flow.held is Hold.SOCKET
    here.wire.fits, path.control.window, path.granted, path._used = 1 << 20, 10, 1000, True
    outbox.flush(4.0)
    assert flow.held is Hold.WINDOW and path.sent == 10
    path.granted = 5
    outbox.flush(4.5)
    assert flow.held is Hold.RECEIVER
    path.granted, path.control.window, path.control.rate, path._next_s = 1000, 1000, 1.0, 90.0
    outbox.flush(5.0)
    assert flow.held is Hold.RATE
    path.control.rate, path._next_s = np.inf, 0.0
    outbox.flush(7.0)
    assert flow.held is None and not flow.queue
    outbox.flush(9.0)
    expected = {Hold.KEYS: 3.0, Hold.SOCKET: 1.0, Hold.WINDOW: 0.5, Hold.RECEIVER: 0.5, Hold.RATE: 2.0}
    assert flow.held_s == expected


def test_a_connection_that_is_full_holds_up_its_own_peer_and_its_messages_get_late() -> None:
    here = Peer(0)
    here.give(100)
    here.wire.full = True
    here.outbox.flush(0.0)
    assert here.flow.path.sent == 0 and here.flow.queue and not here.outbox.blocked
    assert here.flow.held is Hold.SOCKET
    assert 0.0 < here.outbox.due_s(0.0) < 1e6, "its descriptor wakes, or its deadline passes"
    here.wire.full = False
    here.outbox.flush(0.1)
    assert here.flow.path.sent > 0


def test_what_nobody_wants_any_more_has_come_all_the_same() -> None:
    """Else a path seems to lose what was only refused, and windows close."""
    here, there = Peer(0), Peer(1)
    here.give(12)
    here.outbox.flush(0.0)
    there.framer.schemas[0] = NEW
    there.wire.next = here.wire.rows
    taken = there.inbox.receive(0.1)
    assert taken.runs == [] and there.framer.refused.schema == 12
    inbound = there.flow.inbound
    assert (inbound.highest, inbound.received, inbound.whole) == (12, 12, True)
    acks = [short for short in parsed(here, there.wire.shorts) if short.kind == Kind.ACK]
    assert [ack.received for ack in acks] == [12]


def exchanged(here: Peer, there: Peer, sent_s: float, heard_s: float) -> None:
    """``here`` sends a datagram, which ``there`` reads at ``heard_s`` and answers at once."""
    here.give(1)
    here.outbox.flush(sent_s)
    there.wire.next, here.wire.rows = here.wire.rows, []
    there.inbox.receive(heard_s)
    here.wire.next_shorts, there.wire.shorts = there.wire.shorts, []
    here.inbox.receive(heard_s)


def test_what_waited_for_the_other_to_listen_is_no_round_trip_once_there_is_another() -> None:
    """Who takes a seat is told of before its driver runs: what reaches it meanwhile is answered much later.

    Newcomers took that for the way to the one that begins, and their first rounds for as long.
    """
    here, there = Peer(0), Peer(1)
    exchanged(here, there, 0.0, 2.0)
    path = here.flow.path
    assert (path.srtt_s, path.sure) == (2.0, False)
    exchanged(here, there, 2.1, 2.101)
    assert path.sure and path.srtt_s == pytest.approx(0.001, rel=0.01) and path.rto_s < 0.01
    assert here.flow.asks(1), "the first of a message"
    path.send(2.2, 1)
    assert not here.flow.asks(1), "it is known by now, and asked for more rarely"


@pytest.mark.parametrize("still_s", [0.0, 0.02])
def test_what_lay_at_the_two_ends_is_no_part_of_the_path(
    still_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 ms until a busy driver reads, 20 ms until the other reads its answer: 5 ms are the path's.

    still_s: for how long the thread stands still between its two clocks: the path is no shorter for that.
    """
    began_ns = 10**18
    clock_ns = [began_ns + 5_000_000]
    monkeypatch.setattr("time.time_ns", lambda: clock_ns[0])
    here, there = Peer(0), Peer(1)
    exchanged(here, there, 0.0, 0.005)  # each has heard the other
    here.give(1)
    here.outbox.flush(1.0)
    there.wire.next, here.wire.rows = here.wire.rows, []
    there.wire.came_ns, clock_ns[0] = began_ns + 1_002_500_000, began_ns + 1_032_500_000
    there.inbox.receive(1.0325)
    here.wire.next_shorts, there.wire.shorts = there.wire.shorts[-1:], []
    here.wire.came_ns, clock_ns[0] = began_ns + 1_035_000_000, began_ns + 1_055_000_000 + int(1e9 * still_s)
    seen: list[Delivery] = []
    here.flow.path.control = Heard(seen)
    here.inbox.receive(1.055)
    (sample,) = seen
    assert sample.rtt_s == pytest.approx(0.005, abs=1e-4) and sample.kept_s == pytest.approx(0.05, abs=1e-4)
    assert here.flow.path.srtt_s > 0.005, "when to ask again goes by all of it"


def test_a_clock_that_is_set_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_ns = [10**18]
    monkeypatch.setattr("time.time_ns", lambda: clock_ns[0])
    inbox = Peer(0).inbox
    assert inbox._clocks(0.0) == 10**18
    for now_s, ahead_ns in ((1.0, 3600 * 10**9), (2.0, -(10**9)), (3.0, 0)):
        clock_ns[0] = 10**18 + int(1e9 * now_s) + ahead_ns
        assert inbox._clocks(now_s) == 10**18 + ahead_ns


def test_datagrams_that_a_queue_has_mixed_come_as_one_run_of_each_sender() -> None:
    framers = [Framer(Identity("otters", sender), 5) for sender in (0, 1)]
    wire, reader = Wire(), Framer(Identity("otters", 2), 5)
    flows = {sender: Flow(sender, ("127.0.0.1", sender + 1)) for sender in (0, 1)}
    for framer in (*framers, reader):
        framer.schemas[0] = OLD
    outbox = Outbox(wire, reader, Injector(Faults(), 1, 2), flows)  # type: ignore[arg-type]
    inbox = Inbox(wire, reader, flows, outbox, Node(2, 3, 1))  # type: ignore[arg-type]
    tables = []
    for framer in framers:
        rows = np.zeros((10, CHUNK_BYTES), np.uint8)
        weight, heard = np.ones(10, np.float32), np.ones(10, np.uint64)
        run = Run(2, MessageKey(0, 0, 0, 0), 0, 10, rows, weight, heard, None, True)
        seqs = np.arange(1, 11, dtype=np.uint64)
        tables.append(framer.data(run, np.arange(10), seqs, True, True, OLD).copy())
    mixed = np.stack(tables, axis=1).reshape(20, -1)
    sources = [(row + 1, ("127.0.0.1", row % 2 + 1)) for row in range(20)]
    wire.receive = lambda: Received(mixed, [], 0, True, sources, [])  # type: ignore[method-assign]
    taken = inbox.receive(1.0)
    assert [(run.peer, run.first, len(run.payload), run.ended) for run in taken.runs] == [
        (0, 0, 10, True),
        (1, 0, 10, True),
    ]
    assert all(flow.inbound.whole and flow.inbound.reorder_s == 0.0 for flow in flows.values())


def test_no_number_is_used_twice_for_one_purpose() -> None:
    """Of (answer or not, number, epoch, sender, dest) a link that seals makes its nonce."""
    here, there = Peer(0), Peer(1)
    used = list[tuple[bool, int]]()
    for round_ in range(30):
        here.give(40)
        here.outbox.flush(0.1 * round_)
        here.outbox.flush(0.1 * round_ + 0.09)  # marks again, or questions
        there.wire.next, there.wire.next_shorts = here.wire.rows, here.wire.shorts
        for header in headers_of(np.concatenate(here.wire.rows)) if here.wire.rows else ():
            if header["kind"] != Kind.PROBE or header["chunk"] == 0:  # the packets of a probe have one number
                used.append((header["kind"] in ANSWERS, int(header["seq"])))
        used += [(short.kind in ANSWERS, short.seq) for short in parsed(there, here.wire.shorts)]
        here.wire.rows, here.wire.shorts = [], []
        there.inbox.receive(0.1 * round_ + 0.095)
        if round_ % 3:
            here.wire.next_shorts = there.wire.shorts
            here.inbox.receive(0.1 * round_ + 0.096)
        answers = parsed(here, there.wire.shorts)
        assert {short.kind for short in answers} <= set(ANSWERS)
        assert len({short.seq for short in answers}) == len(answers)
        there.wire.shorts = []
    here.outbox.bye(9.0, 3)
    used += [(short.kind in ANSWERS, short.seq) for short in parsed(there, here.wire.shorts)]
    assert len(used) > 500 and len(set(used)) == len(used)
    assert {answer for answer, _ in used} == {False, True}


def test_who_changed_seats_is_heard_under_its_new_number_only() -> None:
    """Its old seat stands empty, with its address: it must not be taken for that one's datagrams."""
    here, there = Peer(0), Peer(1)
    left = here.inbox._flows[2] = Flow(2, OTHER)
    left.mute = True
    here.inbox.reindex()
    there.give(1)
    there.outbox.flush(0.0)
    here.wire.next = there.wire.rows
    assert len(here.inbox.receive(0.1).runs) == 1 and here.framer.refused.elsewhere == 0


def test_knocks_keep_a_router_open_and_get_rarer() -> None:
    """Each new peer is knocked at with growing pauses, then every ``KEEP_OPEN_S``; one that is gone never."""
    wire, flows = Wire(), {1: Flow(1, OTHER), 2: Flow(2, ("127.0.0.1", 10))}
    flows[2].mute = True
    framer = Framer(Identity("otters", 0), NEW, False)
    outbox = Outbox(wire, framer, Injector(Faults(), 1, 0), flows)  # type: ignore[arg-type]
    at_s, now_s = list[float](), 0.0
    while now_s < 120.0:
        before = len(wire.shorts)
        due_s = outbox.knock(now_s)
        assert due_s > now_s
        at_s += [now_s] * (len(wire.shorts) - before)
        now_s = due_s
    apart = np.diff(at_s)
    assert at_s[0] == 0.0 and (np.diff(apart) >= 0).all() and apart[-1] == KEEP_OPEN_S
    assert apart[0] <= 1.0 and len(at_s) < 20
    flows[2].mute = False
    wire.keys = False  # asking for them is a knock
    before = len(wire.shorts)
    assert outbox.knock(now_s) > now_s and len(wire.shorts) == before


def test_amid_a_message_is_what_has_no_end_and_less_than_a_train() -> None:
    """A driver lets more gather then. The end of a message and a whole train are not waited with."""
    here, there = Peer(0), Peer(1)
    here.give(2 * TRAIN)
    path = here.flow.path
    path.control.window, path.granted, path._used = 2 * TRAIN, 2 * TRAIN, True
    here.outbox.flush(0.0)
    rows = np.concatenate(here.wire.rows)

    def amid(*parts: Bytes) -> bool:
        there.wire.next = list(parts)
        return there.inbox.receive(1.0).amid

    assert amid(rows[:1]) and amid(rows[1:8])
    assert not amid(rows[8 : 8 + TRAIN]), "the kernel puts trains together: a pass is worth its cost"
    assert not amid(), "nothing came: the sender stands still, and waiting gathers nothing"
    assert amid(rows[8 + TRAIN : -1])
    assert not amid(rows[-1:]), "the message is whole"
