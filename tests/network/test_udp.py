"""The socket: trains and single datagrams carry the same bytes; what is no datagram of ours is counted."""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from ragtag.core.address import Address
from ragtag.core.seed import generator
from ragtag.core.types import Bytes
from ragtag.core.wire import DATAGRAM_BYTES, HEADER_BYTES
from ragtag.network.link import udp
from ragtag.network.link.link import FAILING_MAX, SLAB_ROWS, TRAIN, Failures, Received, TooLarge
from ragtag.network.link.udp import MTU_DISCOVER, PMTUDISC_PROBE, UDP_SEGMENT, PortInUse, UdpLink, bound_at

LINUX = sys.platform == "linux"
linux = pytest.mark.skipif(not LINUX, reason="segmentation and coalescing are the Linux kernel's")


@pytest.fixture(params=["trains", "plain"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[UdpLink, UdpLink]]:
    plain = request.param == "plain"
    with closing(UdpLink(plain=plain)) as source, closing(UdpLink(plain=plain)) as dest:
        yield source, dest


def random_rows(k: int, index: int = 0) -> Bytes:
    return generator(3, "rows", index).integers(0, 256, (k, DATAGRAM_BYTES), dtype=np.uint8)


def wait_readable(endpoint: UdpLink) -> None:
    assert select.select([endpoint], [], [], 20.0)[0], "nothing came on loopback within 20 s"


def take(endpoint: UdpLink, rows: int, shorts: int = 0, malformed: int = 0) -> Received:
    """Receive until this much has come; the table is a copy."""
    tables, short, bad = [], list[bytes](), 0
    while sum(map(len, tables)) < rows or len(short) < shorts or bad < malformed:
        wait_readable(endpoint)
        got = endpoint.receive()
        tables.append(got.table.copy())
        short += got.short
        bad += got.malformed
    table = np.concatenate(tables) if tables else np.empty((0, DATAGRAM_BYTES), np.uint8)
    return Received(table, short, bad, drained=endpoint.receive().drained)


# -- Bytes


def test_both_ways_carry_the_same_bytes(pair: tuple[UdpLink, UdpLink]) -> None:
    source, dest = pair
    for k in (1, 2, TRAIN - 1, TRAIN, TRAIN + 1, 3 * TRAIN + 5):
        rows = random_rows(k, k)
        assert source.send(rows, dest.address) == k
        got = take(dest, k)
        assert np.array_equal(got.table, rows)
        assert (got.short, got.malformed, got.drained) == ([], 0, True)


@linux
def test_the_two_ways_understand_each_other() -> None:
    with closing(UdpLink()) as trains, closing(UdpLink(plain=True)) as plain:
        assert trains.segmentation
        assert trains.coalescing
        assert not plain.segmentation
        assert not plain.coalescing
        rows = random_rows(2 * TRAIN + 3)
        for source, dest in ((trains, plain), (plain, trains)):
            assert source.send(rows, dest.address) == len(rows)
            assert np.array_equal(take(dest, len(rows)).table, rows)


@linux
def test_one_system_call_takes_a_whole_train() -> None:
    """What segmentation and coalescing are for: 56 datagrams in one call, out and in."""
    with closing(UdpLink()) as source, closing(UdpLink()) as dest:
        source.sock = watched = Unwilling(source.sock, [])  # type: ignore[assignment]
        source.send(random_rows(2 * TRAIN), dest.address)
        assert watched.sizes == [TRAIN * DATAGRAM_BYTES] * 2
        wait_readable(dest)
        data, control, _, _ = dest.sock.recvmsg(65536, 32)
        assert len(data) > DATAGRAM_BYTES
        assert control


def test_short_and_full_datagrams_mix(pair: tuple[UdpLink, UdpLink]) -> None:
    source, dest = pair
    rows = random_rows(200)
    shorts = [bytes([i]) * HEADER_BYTES for i in range(40)]
    at = 0
    for i, short in enumerate(shorts):  # between trains of every length from 1 to 9
        k = i % 9 + 1
        source.send(rows[at : at + k], dest.address)
        source.send_short(short, dest.address)
        at += k
    got = take(dest, at, shorts=len(shorts))
    assert np.array_equal(got.table, rows[:at])
    assert got.short == shorts
    assert got.malformed == 0


@linux
def test_shorts_that_the_kernel_coalesced_come_apart() -> None:
    """The kernel may hand over equal short datagrams in one buffer, too, and a short after a train."""
    with closing(UdpLink()) as dest, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source:
        source.setsockopt(17, 103, HEADER_BYTES)  # UDP_SEGMENT
        shorts = [bytes([i]) * HEADER_BYTES for i in range(20)]
        source.sendto(b"".join(shorts), dest.address)
        assert take(dest, 0, shorts=20).short == shorts
        source.setsockopt(17, 103, DATAGRAM_BYTES)
        rows = random_rows(5)
        source.sendto(rows.tobytes() + shorts[7], dest.address)
        got = take(dest, 5, shorts=1)
        assert np.array_equal(got.table, rows)
        assert got.short == [shorts[7]]
        source.sendto(rows.tobytes() + b"odd", dest.address)
        got = take(dest, 5, malformed=1)
        assert np.array_equal(got.table, rows)
        source.setsockopt(17, 103, 100)
        source.sendto(bytes(1000), dest.address)
        assert take(dest, 0, malformed=10).malformed == 10


def test_a_host_that_is_unknown_is_named() -> None:
    with pytest.raises(OSError, match="'1:2:3' is no address and no known name"):
        bound_at("1:2:3")


def test_other_sizes_are_counted_and_left_out(pair: tuple[UdpLink, UdpLink]) -> None:
    _, dest = pair
    sizes = [0, 1, 63, 65, 1151, 1153, 2 * DATAGRAM_BYTES + HEADER_BYTES, 9000, 65507]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stray:
        for size in sizes:
            stray.sendto(bytes(size), dest.address)
        rows = random_rows(1)
        stray.sendto(rows.tobytes(), dest.address)
    got = take(dest, 1)
    assert got.malformed == len(sizes)
    assert got.short == []
    assert np.array_equal(got.table, rows)


def test_one_pass_takes_no_more_than_its_slab(pair: tuple[UdpLink, UdpLink]) -> None:
    source, dest = pair
    k = min(dest.capacity, 2 * SLAB_ROWS)
    rows = random_rows(k)
    assert source.send(rows, dest.address) == k
    wait_readable(dest)
    first = dest.receive()
    assert len(first.table) <= SLAB_ROWS + TRAIN
    assert not first.drained
    head = first.table.copy()
    rest = take(dest, k - len(head)).table
    assert np.array_equal(np.concatenate([head, rest]), rows)


def test_the_kernel_says_when_datagrams_came() -> None:
    with closing(UdpLink()) as one, closing(UdpLink()) as other:
        if not other.stamped:
            pytest.skip("no timestamps of received datagrams here")

        began_ns = time.time_ns()

        def before_it_was_read() -> bool:
            one.send(np.zeros((3, DATAGRAM_BYTES), np.uint8), other.address)
            one.send_short(bytes(HEADER_BYTES), other.address)
            assert select.select([other.fileno()], [], [], 5.0)[0]
            read_ns = time.time_ns()
            while time.time_ns() == read_ns:  # a clock may tick seldom
                pass
            got = other.receive()
            assert len(got.came_ns) == len(got.sources) and len(got.short_came_ns) == len(got.short)
            came_ns = (*got.came_ns, *got.short_came_ns)
            assert got.sources and min(came_ns) >= began_ns
            return len(got.short) == 1 and max(came_ns) <= read_ns

        # a kernel that has just been told to stamp does so a little later
        assert any(before_it_was_read() for _ in range(1000))


def test_nothing_there_is_nothing_received() -> None:
    with closing(UdpLink()) as endpoint:
        got = endpoint.receive()
        assert (len(got.table), got.short, got.malformed, got.drained) == (0, [], 0, True)


def test_the_receive_buffer_holds_what_capacity_says() -> None:
    """Windows are granted from it, so a crew that sends at once must not overflow it."""
    with closing(UdpLink(plain=True)) as dest, closing(UdpLink(plain=True)) as source:
        k = dest.capacity
        assert k >= 32
        assert source.send(random_rows(k), dest.address) == k
        assert len(take(dest, k).table) == k


def test_ipv6() -> None:
    try:
        dest = UdpLink(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    with closing(dest), closing(UdpLink(("::1", 0))) as source:
        rows = random_rows(3)
        source.send(rows, dest.address)
        assert np.array_equal(take(dest, 3).table, rows)


# -- Datagrams of several packets

PER = [2, 7, 24, 40, TRAIN]


@linux
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("plain", [False, True])
def test_a_datagram_holds_as_many_packets_as_asked_for(per: int, plain: bool) -> None:
    with closing(UdpLink(plain=plain)) as source, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as dest:
        dest.bind(("127.0.0.1", 0))
        dest.settimeout(20.0)
        for k in (1, per, per + 1, TRAIN + 1):
            rows = random_rows(k, k)
            assert source.send(rows, dest.getsockname(), per) == k
            came = []
            while sum(map(len, came)) < rows.size:
                came.append(dest.recv(65536))
            assert b"".join(came) == rows.tobytes()
            whole, train = per * DATAGRAM_BYTES, TRAIN - TRAIN % per
            for at, data in enumerate(came[:-1]):  # only a train's last one may be smaller
                assert len(data) == whole, (at, len(data), train)


@linux
def test_sizes_mix_and_each_train_says_what_came_together(pair: tuple[UdpLink, UdpLink]) -> None:
    source, dest = pair
    at, rows, shorts = 0, random_rows(2000), 0
    found: list[int] = []
    for k, per in ((5, 7), (56, 7), (7, 1), (30, 2), (112, TRAIN), (1, 7), (9, 1), (65, 24)):
        assert source.send(rows[at : at + k], dest.address, per) == k
        source.send_short(bytes(HEADER_BYTES), dest.address)
        wait_readable(dest)
        tables, came = [], 0
        while came < k or not shorts:
            got = dest.receive()
            shorts += len(got.short)
            assert got.malformed == 0 and len(got.per) == len(got.sources)
            edges = [0, *(end for end, _ in got.sources)]
            for a, b, each in zip(edges[:-1], edges[1:], got.per, strict=True):
                found.append(each)
                assert each <= max(per, 1) and b - a <= TRAIN
            tables.append(got.table.copy())
            came += len(got.table)
        assert np.array_equal(np.concatenate(tables), rows[at : at + k])
        at, shorts = at + k, 0
    assert {7, 1, 2, TRAIN, 24} <= set(found)


@linux
def test_what_the_kernel_has_joined_comes_apart_again() -> None:
    """Datagrams of one size, and a last one of another: of packets, a header, or rubbish."""
    with closing(UdpLink()) as dest, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source:
        source.setsockopt(socket.SOL_UDP, UDP_SEGMENT, 3 * DATAGRAM_BYTES)
        rows = random_rows(11)
        source.sendto(rows.tobytes(), dest.address)
        assert np.array_equal(take(dest, 11).table, rows)
        short = b"s" * HEADER_BYTES
        source.sendto(rows[:9].tobytes() + short, dest.address)
        got = take(dest, 9, shorts=1)
        assert np.array_equal(got.table, rows[:9]) and got.short == [short]
        source.sendto(rows[:10].tobytes() + short, dest.address)  # a datagram of 1,152 and 64 bytes
        got = take(dest, 9, malformed=1)
        assert np.array_equal(got.table, rows[:9]) and got.short == []
        source.sendto(rows[:6].tobytes() + b"odd", dest.address)
        assert np.array_equal(take(dest, 6, malformed=1).table, rows[:6])


@linux
def test_only_datagrams_of_several_packets_forbid_that_they_are_cut() -> None:
    with closing(UdpLink()) as source, closing(UdpLink()) as dest:
        option = MTU_DISCOVER[4]
        usual = source.sock.getsockopt(*option)
        assert usual != PMTUDISC_PROBE
        for per in (7, 1, TRAIN, 1):
            source.send(random_rows(60), dest.address, per)
            assert source.sock.getsockopt(*option) == (usual if per == 1 else PMTUDISC_PROBE)
        for size in (2 * DATAGRAM_BYTES, DATAGRAM_BYTES, 3 * DATAGRAM_BYTES):  # as a relay carries them
            source.carry(bytes(size), size, dest.address)
            assert source.sock.getsockopt(*option) == (usual if size == DATAGRAM_BYTES else PMTUDISC_PROBE)


@linux
def test_a_header_alone_leaves_whatever_was_sent_before(pair: tuple[UdpLink, UdpLink]) -> None:
    """The kernel refuses all from a socket whose segments a device does not take, however small it is."""
    source, dest = pair
    for per in PER:
        source.send(random_rows(60), dest.address, per)
        source.send_short(bytes(HEADER_BYTES), dest.address)
        assert source.sock.getsockopt(socket.SOL_UDP, UDP_SEGMENT) <= DATAGRAM_BYTES
        take(dest, 60, shorts=1)


def test_a_system_that_cannot_forbid_it_sends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a router would cut them, and a probe would say that the path takes them."""
    monkeypatch.setattr(sys, "platform", "freebsd14")
    with closing(UdpLink()) as source, closing(UdpLink()) as dest:
        with pytest.raises(TooLarge):
            source.send(random_rows(7), dest.address, 7)
        assert source.send(random_rows(7), dest.address) == 7
        take(dest, 7)


@linux
@pytest.mark.parametrize("error", [errno.EIO, errno.EINVAL, errno.EMSGSIZE])
def test_a_first_hop_that_does_not_take_them_is_told_and_is_no_failure(error: int) -> None:
    with closing(UdpLink()) as source, closing(UdpLink()) as dest:
        rows = random_rows(3 * TRAIN)
        source.sock = Unwilling(source.sock, [None, error])  # type: ignore[assignment]
        with pytest.raises(TooLarge) as refusal:
            source.send(rows, dest.address, 7)
        assert refusal.value.left == TRAIN
        assert source.segmentation and not source.failures.count and not source.failures.news
        assert np.array_equal(take(dest, TRAIN).table, rows[:TRAIN])
        assert source.send(rows[TRAIN:], dest.address) == 2 * TRAIN
        assert np.array_equal(take(dest, 2 * TRAIN).table, rows[TRAIN:])


# -- A send that does not go through


class Unwilling:
    """A socket whose sends, and reads, fail as told: by error number; None: it goes through."""

    def __init__(
        self, sock: socket.socket, errors: list[int | None], reads: list[int | None] | None = None
    ) -> None:
        self._sock, self.errors, self.sizes = sock, errors, list[int]()
        self.reads = reads or []

    def recvmsg_into(self, rooms: list[memoryview], control: int) -> object:
        error = self.reads.pop(0) if self.reads else None
        if error is not None:
            raise OSError(error, os.strerror(error))
        return self._sock.recvmsg_into(rooms, control)

    def sendto(self, data: memoryview, address: tuple[str, int]) -> int:
        self.sizes.append(len(data))
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise OSError(error, os.strerror(error))
        return self._sock.sendto(data, address)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


def test_a_full_send_buffer_says_how_much_has_left() -> None:
    with closing(UdpLink()) as source, closing(UdpLink()) as dest:
        source.sock = Unwilling(source.sock, [None, errno.EAGAIN])  # type: ignore[assignment]
        step = TRAIN if source.segmentation else 1
        rows = random_rows(3 * TRAIN)
        assert source.send(rows, dest.address) == step
        assert np.array_equal(take(dest, step).table, rows[:step])
        assert source.send(rows[step:], dest.address) == len(rows) - step  # and later the rest
        assert np.array_equal(take(dest, len(rows) - step).table, rows[step:])
        assert source.failures.count == 0


def test_a_send_buffer_that_is_really_full() -> None:
    """A stopped reader over a local socket pair: the sender gets the kernel's own EAGAIN."""
    with closing(UdpLink(plain=True)) as source:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with near, far:
            near.setblocking(False)

            class Piped(Unwilling):
                def sendto(self, data: memoryview, address: tuple[str, int]) -> int:
                    return near.send(data)

            udp = source.sock
            source.sock = Piped(udp, [])  # type: ignore[assignment]
            rows = random_rows(4096)
            left = source.send(rows, ("127.0.0.1", 9))
            source.sock = udp
            assert 0 < left < len(rows)
            for i in range(left):
                assert far.recv(2048) == rows[i].tobytes()


@linux
@pytest.mark.parametrize("error", [errno.EIO, errno.EINVAL, errno.EMSGSIZE])
def test_segmentation_is_given_up_where_the_route_refuses_it(error: int) -> None:
    with closing(UdpLink()) as source, closing(UdpLink()) as dest:
        rows = random_rows(TRAIN + 4)
        unwilling = source.sock = Unwilling(source.sock, [error])  # type: ignore[assignment]
        assert source.send(rows, dest.address) == len(rows)
        assert not source.segmentation
        assert np.array_equal(take(dest, len(rows)).table, rows)
        assert unwilling.sizes == [TRAIN * DATAGRAM_BYTES] + [DATAGRAM_BYTES] * len(rows)
        # the kernel must not cut any more either: a datagram of another size leaves in one piece
        source.sock.sendto(bytes(2 * DATAGRAM_BYTES + 1), dest.address)
        got = take(dest, 0, malformed=1)
        assert got.malformed == 1 and len(got.table) == 0


@linux
def test_a_route_that_refuses_what_may_be_segmented_gets_single_datagrams_too() -> None:
    """As where its MTU is below a datagram's size: also a datagram alone is refused, and a header."""

    class Small:
        """Refuses all sends while segmentation is on."""

        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def sendto(self, data: memoryview, address: tuple[str, int]) -> int:
            if self.sock.getsockopt(socket.SOL_UDP, UDP_SEGMENT):
                raise OSError(errno.EINVAL, "segments do not fit")
            return self.sock.sendto(data, address)

        def __getattr__(self, name: str) -> object:
            return getattr(self.sock, name)

    for rows in (random_rows(1), random_rows(TRAIN + 1)):
        with closing(UdpLink()) as source, closing(UdpLink()) as dest:
            source.sock = Small(source.sock)  # type: ignore[assignment]
            assert source.send(rows, dest.address) == len(rows)
            assert not source.segmentation and not source.failures.count
            assert np.array_equal(take(dest, len(rows)).table, rows)
    with closing(UdpLink()) as source, closing(UdpLink()) as dest:
        source.sock = Small(source.sock)  # type: ignore[assignment]
        source.send_short(bytes(HEADER_BYTES), dest.address)
        assert not source.segmentation and not source.failures.count


ERRORS = [
    errno.ECONNREFUSED, errno.ENOBUFS, errno.EPERM, errno.ENETUNREACH, errno.EACCES, errno.EINVAL,
    errno.EMSGSIZE, errno.EIO, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.ENOMEM, errno.EHOSTDOWN,
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_the_way_is_a_lost_datagram(error: int) -> None:
    with closing(UdpLink(plain=True)) as source, closing(UdpLink(plain=True)) as dest:
        source.sock = Unwilling(source.sock, [error])  # type: ignore[assignment]
        rows = random_rows(3)
        assert source.send(rows, dest.address) == 3
        assert source.failures.count == 1
        assert np.array_equal(take(dest, 2).table, rows[1:])


def test_a_socket_that_is_none_any_more_is_no_lost_datagram() -> None:
    with closing(UdpLink(plain=True)) as source:
        source.sock = Unwilling(source.sock, [errno.EBADF])  # type: ignore[assignment]
        with pytest.raises(OSError, match="Bad file descriptor"):
            source.send(random_rows(1), ("127.0.0.1", 9))


@linux
@pytest.mark.parametrize("error", [errno.EINVAL, errno.EMSGSIZE, errno.EACCES])
def test_a_way_that_refuses_trains_and_single_datagrams_leaves_segmentation_on(error: int) -> None:
    with closing(UdpLink()) as source, closing(UdpLink()) as dest:
        rows = random_rows(TRAIN)
        source.sock = Unwilling(source.sock, [error, error])  # type: ignore[assignment]
        if error == errno.EACCES:
            source.sock.errors.pop()  # nobody asks what a single datagram would meet
        assert source.send(rows, dest.address) == TRAIN
        assert source.segmentation
        assert source.send(rows, dest.address) == TRAIN
        assert np.array_equal(take(dest, TRAIN).table, rows)


def test_an_error_that_lasts_is_told_once_and_one_that_flaps_ever_more_rarely() -> None:
    here, there = ("10.0.0.1", 4000), ("10.0.0.2", 4000)
    failures = Failures()
    refused, full = OSError(errno.EACCES, "x"), OSError(errno.ENOBUFS, "x")
    for _ in range(1000):
        failures.failed(here, refused)
        failures.failed(there, refused)
    assert failures.count == 2000
    lost = "Permission denied: what is sent to 10.0.0.{}:4000 is lost"
    assert failures.news == [(here, lost.format(1)), (there, lost.format(2))]
    failures.failed(here, full)  # of another kind
    assert failures.news[2:] == [(here, "No buffer space available: what is sent to 10.0.0.1:4000 is lost")]
    for _ in range(1000):
        failures.went(there)
        failures.failed(there, refused)
    assert len(failures.news) == 3 + 9  # for the 2nd, 4th, ... and 512th time
    assert failures.news[-1][1].startswith("Permission denied, for the 512th time: ")
    failures.went(there)
    assert failures.lasting
    failures.went(here)
    assert not failures.lasting


def test_errors_of_more_addresses_than_a_bound_are_forgotten() -> None:
    failures = Failures()
    for i in range(2 * FAILING_MAX):
        failures.failed((f"10.0.{i >> 8}.{i & 255}", 4000), OSError(errno.EACCES, "x"))
        assert len(failures._times) <= FAILING_MAX
        assert len(failures._lasting) <= FAILING_MAX


@pytest.mark.parametrize("error", [errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EACCES])
def test_an_error_of_a_read_loses_nothing(error: int) -> None:
    with closing(UdpLink(plain=True)) as source, closing(UdpLink(plain=True)) as dest:
        rows = random_rows(2)
        source.send(rows, dest.address)
        wait_readable(dest)
        dest.sock = Unwilling(dest.sock, [], reads=[error, None, error])  # type: ignore[assignment]
        assert np.array_equal(take(dest, 2).table, rows)
        assert dest.receive_errors == 2


def test_nobody_listening_costs_nothing_but_the_datagram() -> None:
    """The kernel reports an ICMP error on a later call; neither side of the socket may stumble over it."""
    with closing(UdpLink()) as gone:
        nobody = gone.address
    with closing(UdpLink()) as source, closing(UdpLink()) as dest:
        for _ in range(5):
            source.send(random_rows(2), nobody)
            source.send_short(bytes(HEADER_BYTES), nobody)
            assert source.receive().malformed == 0
        rows = random_rows(1)
        source.send(rows, dest.address)
        assert np.array_equal(take(dest, 1).table, rows)


# -- Where to listen


def test_a_port_in_use() -> None:
    with closing(UdpLink()) as first:
        port = first.address[1]
        with pytest.raises(PortInUse, match=rf"UDP port {port} on 127\.0\.0\.1 is in use by another program"):
            UdpLink(("127.0.0.1", port))
        with pytest.raises(PortInUse, match="choose another port, or 0 for any free one"):
            UdpLink(("127.0.0.1", port))


def test_a_free_port_is_free_for_connections_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer takes both under one number: one whose TCP port another program has would be cut off."""
    free, taken = udp._free_over_tcp, list[socket.socket]()

    def taken_just_before(address: Address) -> bool:
        if len(taken) < 2:
            taken.append(socket.create_server(address))
        return free(address)

    monkeypatch.setattr(udp, "_free_over_tcp", taken_just_before)
    try:
        with closing(UdpLink()) as link, socket.create_server(link.address):
            assert len(taken) == 2
            assert link.address not in [sock.getsockname() for sock in taken]
    finally:
        for sock in taken:
            sock.close()


def test_an_address_of_another_machine() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1 is not an address of this machine"):  # RFC 5737
        UdpLink(("192.0.2.1", 0))


def test_an_inherited_socket() -> None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    address = sock.getsockname()
    with closing(UdpLink(fd=sock.detach())) as endpoint, closing(UdpLink()) as source:
        assert endpoint.address == address
        rows = random_rows(4)
        source.send(rows, endpoint.address)
        assert np.array_equal(take(endpoint, 4).table, rows)


def test_an_inherited_descriptor_that_is_no_udp_socket() -> None:
    read, write = os.pipe()
    try:
        with pytest.raises(OSError, match=f"file descriptor {read} handed over by the launcher is no socket"):
            UdpLink(fd=read)
        assert os.write(write, b"x") == 1, "the descriptor is not ours to close"
        assert os.read(read, 1) == b"x"
    finally:
        os.close(read)
        os.close(write)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp:
        with pytest.raises(OSError, match=f"file descriptor {tcp.fileno()} .* is no UDP socket"):
            UdpLink(fd=tcp.fileno())
        assert tcp.getsockname(), "the descriptor is not ours to close"
    with pytest.raises(OSError, match=r"file descriptor 987654 .* is no socket"):
        UdpLink(fd=987654)


def test_a_unix_socket_is_no_udp_socket() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with near, far, pytest.raises(OSError, match="is no UDP socket"):
        UdpLink(fd=near.fileno())
