"""A UDP socket that moves trains of datagrams.

On Linux the kernel cuts one 64 KB buffer into datagrams on the way out (UDP_SEGMENT, since 4.18), and hands
arriving datagrams over in one buffer (UDP_GRO, since 5.0). Elsewhere, or where a device refuses, each
datagram takes its own system call. Both ways carry the same bytes.

Datagrams of several packets leave as they are or not at all (RFC 8899, section 3): the kernel neither cuts
them nor has routers do so, and goes by its device's MTU alone (IP_PMTUDISC_PROBE). Those of one packet it may
cut, as an MTU of 576 needs.
"""

from __future__ import annotations

import errno
import math
import socket
import struct
import sys
import time

import numpy as np

from ragtag.core.address import Address, family_of, unusable
from ragtag.core.errors import Error
from ragtag.core.types import Bytes
from ragtag.core.wire import DATAGRAM_BYTES, HEADER_BYTES
from ragtag.network.link.link import (
    BROKEN,
    CARRIED_BYTES_MAX,
    SLAB_ROWS,
    TRAIN,
    Failures,
    Received,
    TooLarge,
    Wrapped,
    is_wrapped,
)

SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104  # linux/udp.h; not all in Python's socket module
SO_TIMESTAMPNS = 35  # asm-generic/socket.h
MTU_DISCOVER = {4: (socket.IPPROTO_IP, 10), 6: (socket.IPPROTO_IPV6, 23)}  # linux/in.h, linux/in6.h
PMTUDISC_PROBE = 3
_UNFIT = (errno.EIO, errno.EINVAL, errno.EMSGSIZE)
"""Errors of a train that is to be cut into datagrams that do not fit, or by a device that does not cut."""
_TIMESPEC = struct.Struct("@qq")
_CONTROL_BYTES = 64
"""Room for the size of coalesced datagrams, and for the time when they came."""
_PORTS_TRIED = 16
_RECV_BYTES = 65_536
_RCVBUF_WANTED = 8 << 20
_TRUESIZE = 2304
"""Bytes that one datagram of ours takes of a receive buffer at worst: 2,048 of data, and an sk_buff."""


class PortInUse(Error, OSError):
    """The address to listen on is taken."""


class UdpLink:
    """One bound UDP socket, non-blocking; on loopback, if no address is given.

    fd: a bound UDP socket to use, which a launcher hands over.
    plain: whether to do without segmentation, coalescing and the kernel's time stamps.
    receive_errors: reads that failed for an earlier send.

    Raises OSError: as ``bound`` does, or where ``fd`` is no UDP socket.
    """

    sealed = False
    routes = None
    due_s = math.inf

    def __init__(self, address: Address | None = None, *, fd: int | None = None, plain: bool = False) -> None:
        self.sock = (
            _inherited(fd) if fd is not None else bound(socket.SOCK_DGRAM, address or ("127.0.0.1", 0))
        )
        self.family = family_of_socket(self.sock)
        self.sock.setblocking(False)
        self._grow_buffers()
        self.segmentation = not plain and _option(self.sock, UDP_SEGMENT, DATAGRAM_BYTES)
        self._cut_bytes = DATAGRAM_BYTES if self.segmentation else 0
        self._discover = self._usual = self._path_mtu()
        self.coalescing = not plain and _option(self.sock, UDP_GRO, 1)
        self.stamped = not plain and _option(self.sock, SO_TIMESTAMPNS, 1, socket.SOL_SOCKET)
        self._slab = np.empty(SLAB_ROWS * DATAGRAM_BYTES + _RECV_BYTES, np.uint8)
        self._view = self._slab.data
        self.failures = Failures()
        self.receive_errors = 0

    @property
    def address(self) -> Address:
        """The address on which this socket listens."""
        host, port = self.sock.getsockname()[:2]
        return str(host), int(port)

    @property
    def capacity(self) -> int:
        """How many datagrams the receive buffer surely holds."""
        size = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        return max(2, int(0.8 * size) // _TRUESIZE)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def unusable(self, address: Address) -> str:
        """Why nothing can be sent from this socket to an address; empty: it can."""
        return unusable(address, self.family)

    def fileno(self) -> int:
        """The socket's file descriptor, for a poll."""
        return self.sock.fileno()

    # -- Out

    def turn(self, now_s: float) -> None:
        """A socket has nothing to send of itself."""

    def ready(self, address: Address) -> bool:
        """Always: all that is sent is in clear."""
        return True

    def room(self, address: Address) -> bool:
        """Always: no datagram waits for another one."""
        return True

    def send(self, rows: Bytes, address: Address, per: int = 1) -> int:
        """Send uint8 ``[k, 1152]``, C-contiguous; returns how many rows left (fewer: the buffer is full).

        per: rows in a datagram. Raises TooLarge: the first hop takes no such datagrams.
        """
        view = rows.reshape(-1).data
        self._whole(per > 1)
        sent = 0
        while sent < len(rows):
            train = TRAIN - TRAIN % per if self.segmentation else per  # a send may find out that none is cut
            self._cut(per * DATAGRAM_BYTES if train > per else 0)
            until = min(sent + train, len(rows))
            if not self._send(view[sent * DATAGRAM_BYTES : until * DATAGRAM_BYTES], address, per, sent):
                break
            sent = until
        return sent

    def send_short(self, datagram: bytes, address: Address) -> None:
        """Send one header-only datagram. A full buffer loses it, as a full queue on the way would."""
        if self._cut_bytes > DATAGRAM_BYTES:  # the kernel sends nothing where its segments would not fit
            self._cut(DATAGRAM_BYTES)
        self._send(memoryview(datagram), address)

    def carry(self, data: memoryview | bytes, size: int, address: Address) -> int:
        """Send datagrams of ``size`` bytes each; how many bytes left. As ``Carrier``."""
        view, sent = memoryview(data), 0
        per = 1 if size <= CARRIED_BYTES_MAX else 2  # or more
        self._whole(per > 1)
        while sent < len(view):
            train = size * max(1, min(TRAIN, _RECV_BYTES // size)) if self.segmentation else size
            part = view[sent : sent + train]
            self._cut(size if len(part) > size else 0)
            if not self._send(part, address, per, sent, size):
                break
            sent += len(part)
        return sent

    def _send(
        self, data: memoryview, address: Address, per: int = 1, left: int = 0, size: int = DATAGRAM_BYTES
    ) -> bool:
        """Send one train. ``False``: the socket has no room. What has no route is lost, but counts sent.

        left: how many rows have left before, for TooLarge. size: of each datagram.
        """
        try:
            self.sock.sendto(data, address)
        except BlockingIOError:
            return False
        except OSError as error:
            if per > 1 and error.errno in _UNFIT:
                raise TooLarge(left) from None
            if self.segmentation and error.errno in _UNFIT:
                return self._one_by_one(data, address, size)
            self.failures.failed(address, error)
        else:
            if self.failures.lasting:
                self.failures.went(address)
        return True

    def _one_by_one(self, data: memoryview, address: Address, size: int) -> bool:
        """A train was refused: try its datagrams one by one, to find out whether segmentation was why.

        If the first goes through, it was. The device behind this route has no checksum offload, or takes only
        datagrams smaller than ours; the kernel would cut these, but sends none from a socket that segments.
        Then datagrams leave one by one from now on. If the first is refused as well, the route is why.
        """
        self._segment(False)
        before = self.failures.count
        if not self._send(data[:size], address):
            self._segment(True)  # the buffer is full: nothing is known yet
            return False
        if self.failures.count > before:  # the others would be refused as well
            self.failures.count += (len(data) - 1) // size
            self._segment(True)
            return True
        for at in range(size, len(data), size):
            self._send(data[at : at + size], address)
        return True

    def _segment(self, on: bool) -> None:
        """Say whether the kernel is to cut what is sent into datagrams."""
        self.segmentation = on
        self._cut(DATAGRAM_BYTES if on else 0)

    def _cut(self, size: int) -> None:
        """Have the kernel cut what is sent into datagrams of this size; 0: have it send it as it is."""
        if size != self._cut_bytes:
            _option(self.sock, UDP_SEGMENT, size)
            self._cut_bytes = size

    def _path_mtu(self) -> int:
        """What the kernel does with datagrams that a path does not take; -1: it cannot be told."""
        try:
            return self.sock.getsockopt(*MTU_DISCOVER[self.family]) if sys.platform == "linux" else -1
        except OSError:
            return -1

    def _whole(self, whole: bool) -> None:
        """Have datagrams leave in one piece, whatever is known of the path; or as usual.

        Raises TooLarge: this system cannot.
        """
        wanted = PMTUDISC_PROBE if whole else self._usual
        if wanted == self._discover:
            return
        level, option = MTU_DISCOVER[self.family]
        if self._usual < 0 or not _option(self.sock, option, wanted, level):
            raise TooLarge
        self._discover = wanted

    # -- In

    def receive(self) -> Received:
        """Take what has come, about ``SLAB_ROWS`` packets at most, without waiting."""
        rows, malformed, short = 0, 0, list[bytes]()
        sources, short_sources = list[tuple[int, Address]](), list[Address]()
        stamps, short_stamps, per = list[bytes](), list[bytes](), list[int]()
        wrapped = list[Wrapped]()
        drained = False
        calls = aside = 0
        while rows + aside < SLAB_ROWS and calls < 512:
            calls += 1
            at = rows * DATAGRAM_BYTES
            room = self._view[at : at + _RECV_BYTES]
            try:
                n, control, _, source = self.sock.recvmsg_into([room], _CONTROL_BYTES)
            except BlockingIOError:
                drained = True
                break
            except OSError as error:  # an ICMP message has answered an earlier send: it is reported here
                if error.errno in BROKEN:
                    raise
                self.receive_errors += 1
                continue
            size, stamp = n, b""
            for level, kind, data in control:
                if kind == UDP_GRO and level == SOL_UDP:
                    size = int.from_bytes(data[:4], sys.byteorder)
                elif kind == SO_TIMESTAMPNS and level == socket.SOL_SOCKET:
                    stamp = data
            whole = n if size and n % DATAGRAM_BYTES == 0 == size % DATAGRAM_BYTES else 0  # as nearly always
            if not whole:
                if is_wrapped(size) or (size and is_wrapped(n % size)):
                    aside += n // DATAGRAM_BYTES
                    n = _set_aside(room, n, size, source[:2], _times_ns([stamp])[0], wrapped)
                    size = min(size, n)
                    if n == 0:
                        continue
                if size and size % DATAGRAM_BYTES == 0:
                    last = n % size  # all are of one size but the last one
                    if last == HEADER_BYTES:
                        short.append(bytes(room[n - last : n]))
                    elif last % DATAGRAM_BYTES:
                        malformed += 1
                    else:
                        last = 0
                    whole = n - last
                elif size == HEADER_BYTES:
                    short += [bytes(room[i : i + size]) for i in range(0, n - size + 1, size)]
                    malformed += n % size != 0
                else:
                    malformed += max(1, -(-n // size)) if size else 1
                more = len(short) - len(short_sources)
                short_sources += [source[:2]] * more
                short_stamps += [stamp] * more
            if whole:
                rows += whole // DATAGRAM_BYTES
                sources.append((rows, source[:2]))  # the kernel coalesces datagrams of one sender only
                stamps.append(stamp)
                per.append(size // DATAGRAM_BYTES)
        table = self._slab[: rows * DATAGRAM_BYTES].reshape(rows, DATAGRAM_BYTES)
        came_ns, short_came_ns = _times_ns(stamps), _times_ns(short_stamps)
        return Received(
            table, short, malformed, drained, sources, short_sources, came_ns, short_came_ns, per, wrapped
        )

    def _grow_buffers(self) -> None:
        """Ask for large buffers. The kernel's limit (net.core.rmem_max) decides, but root may pass it."""
        for force, plain in (
            (33, socket.SO_RCVBUF),
            (32, socket.SO_SNDBUF),
        ):  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
            if sys.platform == "linux":
                try:
                    self.sock.setsockopt(socket.SOL_SOCKET, force, _RCVBUF_WANTED)
                    continue
                except PermissionError:
                    pass
            for wanted in (_RCVBUF_WANTED, _RCVBUF_WANTED // 4, _RCVBUF_WANTED // 16):
                try:  # Linux clips silently; BSD refuses what is above its limit
                    self.sock.setsockopt(socket.SOL_SOCKET, plain, wanted)
                    break
                except OSError:
                    continue


def _set_aside(
    room: memoryview, n: int, size: int, source: Address, came_ns: int, wrapped: list[Wrapped]
) -> int:
    """Put relayed datagrams of a train of ``n`` bytes aside; how many bytes of others are left in front."""
    last = n % size
    if not is_wrapped(size):  # only the last one is
        wrapped.append(Wrapped(bytes(room[n - last : n]), last, source, came_ns))
        return n - last
    if last and not is_wrapped(last):
        wrapped.append(Wrapped(bytes(room[: n - last]), size, source, came_ns))
        room[:last] = bytes(room[n - last : n])
        return last
    wrapped.append(Wrapped(bytes(room[:n]), size, source, came_ns))
    return 0


def _times_ns(stamps: list[bytes]) -> list[int]:
    """The kernel's stamps (struct timespec) as nanoseconds; one that is missing is now."""
    if not all(stamps):
        now = time.time_ns()
        stamps = [stamp or _TIMESPEC.pack(*divmod(now, 1_000_000_000)) for stamp in stamps]
    return [1_000_000_000 * seconds + rest_ns for seconds, rest_ns in _TIMESPEC.iter_unpack(b"".join(stamps))]


def bound(kind: socket.SocketKind, address: Address, *, again: bool = False) -> socket.socket:
    """A socket of a kind, bound to an address.

    Port 0 is any free one; for UDP one that is free for TCP, too, as connections are taken beside it under
    the same number (``streams``).

    again: whether connections of an earlier socket at that address may linger.

    Raises:
        PortInUse: another program has the port.
        OSError: the address is none of this machine's.
    """
    sock = _bound_once(kind, address, again)
    for _ in range(_PORTS_TRIED if kind == socket.SOCK_DGRAM and address[1] == 0 else 0):
        if _free_over_tcp(sock.getsockname()[:2]):
            break
        taken, sock = sock, _bound_once(kind, address, again)  # while the last one is held: another number
        taken.close()
    return sock


def _free_over_tcp(address: Address) -> bool:
    """Whether connections can be taken at an address."""
    try:
        _bound_once(socket.SOCK_STREAM, address, again=True).close()
    except PortInUse:
        return False
    return True


def _bound_once(kind: socket.SocketKind, address: Address, again: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, kind)
    try:
        if again:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            protocol = "UDP" if kind == socket.SOCK_DGRAM else "TCP"
            raise PortInUse(
                error.errno,
                f"{protocol} port {address[1]} on {address[0]} is in use by another program; "
                "choose another port, or 0 for any free one",
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(error.errno, f"{address[0]} is not an address of this machine") from None
        if isinstance(error, socket.gaierror):
            raise OSError(error.errno, f"{address[0]!r} is no address and no known name") from None
        raise
    return sock


def family_of_socket(sock: socket.socket) -> int:
    """The version of a socket's internet protocol: 4 or 6."""
    return 6 if sock.family == socket.AF_INET6 else 4


def bound_at(host: str) -> socket.socket:
    """A UDP socket on a free port of ``host``, the address of this machine that others are told.

    Raises OSError: as ``bound`` does, or where others could not send to that address.
    """
    if family_of(host) and (why := unusable((host, 1))):
        raise OSError(errno.EADDRNOTAVAIL, f"{why}: give the address at which others reach this machine")
    return bound(socket.SOCK_DGRAM, (host, 0))


def _inherited(fd: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise OSError(error.errno, f"file descriptor {fd} handed over by the launcher is no socket") from None
    if sock.type & 0xF != socket.SOCK_DGRAM or sock.family not in (socket.AF_INET, socket.AF_INET6):
        sock.detach()
        raise OSError(errno.ENOTSOCK, f"file descriptor {fd} handed over by the launcher is no UDP socket")
    return sock


def _option(sock: socket.socket, option: int, value: int, level: int = SOL_UDP) -> bool:
    if sys.platform != "linux":
        return False
    try:
        sock.setsockopt(level, option, value)
    except OSError:
        return False
    return True
