"""A donor: one background thread that gives newcomers the training state over TCP.

The thread uses no more of a core than its budget, for newcomers and strangers together. While the budget is
overdrawn the thread does nothing at all. It does one thing at a time (a read, a piece of a chunk), so the
budget is never overdrawn by more than one. Strangers can hold a few connections for a few seconds, and
nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import math
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from ipaddress import IPv6Address

from ragtag.core.address import Address
from ragtag.network.link.udp import bound
from ragtag.network.transfer.budget import CpuBudget, LinkBudget
from ragtag.network.transfer.session import Closed, DonorLimits, DonorSession
from ragtag.protocols.transfer.snapshots import Shelf
from ragtag.protocols.transfer.wire import KEY_BYTES, Prover

_LOOK_S = 1.0  # how often to look at the trainer's progress, and how rarely to note strangers
_NAP_S = 0.1  # the longest pause in one go, as closing waits for its end
_LOOK = 0  # in place of a selector's mask: a snapshot may have come


class DonorServer:
    """Gives the snapshots on a shelf to newcomers that show the crew's key.

        server = DonorServer(key, shelf, (host, 0))
        server.start()
        ...                         # the trainer: shelf.wanted, shelf.put
        server.close()

    on_note: called by the donor's thread with (what, address, detail). what: ``newcomer`` (it was served; the
        detail has the bytes), ``refused``, or ``failed`` (an error has ended the thread).
    persons: in a crew that takes persons, whom the state is given to.
    failure: the error that has ended the thread; ``None``: none has.

    Raises:
        ValueError: the key has not 32 bytes, or a share is out of its range.
        OSError: the address cannot be bound; the message says what to do.
    """

    def __init__(
        self,
        key: bytes,
        shelf: Shelf,
        address: Address = ("127.0.0.1", 0),
        *,
        limits: DonorLimits | None = None,
        on_note: Callable[[str, str, str], None] | None = None,
        persons: Prover | None = None,
    ) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"donor: the crew's key has {len(key)} bytes; it must have {KEY_BYTES}")
        self.limits = limits if limits is not None else DonorLimits()
        self._budget = CpuBudget(self.limits.cpu_share, self.limits.cpu_burst_s)
        self._link = LinkBudget(self.limits.link_share)
        self._key, self._shelf, self._persons = key, shelf, persons
        self._note = on_note if on_note is not None else lambda what, address, detail: None
        self._listener = _listen(address)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._sessions: dict[socket.socket, DonorSession] = {}
        self._ready: deque[tuple[object, int]] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ragtag-donor", daemon=True)
        self._accept_s = self._sweep_s = self._counted_s = 0.0
        self._looked_s, self._looked_round, self._round_s = -math.inf, -1, 0.0
        self._refused, self._refused_s = 0, -math.inf
        self._barred = False  # the system lets no connection be accepted, and that was noted
        self.failure: BaseException | None = None
        self.given_bytes = 0
        """Bytes given to newcomers whose connection has ended."""
        self.used_s = 0.0
        """Seconds of a core that the thread has used."""
        self.ended: Counter[str] = Counter()
        """How many connections have ended, by reason (beyond 256 reasons: ``other``)."""

    @property
    def address(self) -> Address:
        """Where newcomers connect."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def n_connections(self) -> int:
        """How many connections are open."""
        return len(self._sessions)

    def start(self) -> None:
        """Start the thread, and have the shelf wake it after each put."""
        self._shelf.serve(self._wake, time.monotonic, self.limits.chunk_s)
        self._thread.start()

    def close(self, deadline_s: float = 5.0) -> None:
        """Stop serving at once. Newcomers that are being served go on with other donors.

        Raises:
            TimeoutError: the thread did not end within ``deadline_s`` seconds.
        """
        self._stop.set()
        self._wake()
        if self._thread.ident is None:
            self._end()
            return
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the donor's thread did not end within {deadline_s} s")

    # -- The thread

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread wakes anyway; closed: it has ended
            self._wake_out.send(b"x")

    def _run(self) -> None:
        self._counted_s = time.thread_time()
        try:
            while not self._stop.is_set():
                self._turn()
                self._pay()
        except BaseException as error:
            self.failure = error
            self._note("failed", "", repr(error))
            raise
        finally:
            self._end()

    def _turn(self) -> None:
        now_s = time.monotonic()
        pause_s = self._budget.pause_s(now_s)
        if pause_s > 0:
            time.sleep(min(pause_s, _NAP_S))
        elif self._ready:
            self._handle(*self._ready.popleft())
        else:
            self._clock(now_s)
            selected = self._selector.select(self._watch(now_s))
            self._ready.extend((key.fileobj, mask) for key, mask in selected)

    def _pay(self) -> None:
        """Charge the budget with all that the thread has used since the last charge, pauses included."""
        counted_s = time.thread_time()
        used_s = counted_s - self._counted_s
        self._counted_s = counted_s
        self.used_s += used_s
        self._budget.spend(time.monotonic(), used_s)

    def _watch(self, now_s: float) -> float:
        """Tell the selector what each connection can go on with; returns the longest wait, in seconds."""
        wakes_s = now_s + _LOOK_S
        for sock, session in self._sessions.items():
            wakes_s = min(wakes_s, session.wakes_s())
            wanted = session.interest(now_s)
            if wanted == session.watched:
                continue
            if not session.watched:
                self._selector.register(sock, wanted)
            elif wanted:
                self._selector.modify(sock, wanted)
            else:
                self._selector.unregister(sock)
            session.watched = wanted
        return max(0.0, wakes_s - now_s)

    def _handle(self, source: object, mask: int) -> None:
        if source is self._listener:
            self._accept()
        elif source is self._wake_in:
            self._wake_in.recv(4096)
            self._ready.extend((sock, _LOOK) for sock in self._sessions)
        elif isinstance(source, socket.socket) and source in self._sessions:
            session = self._sessions[source]
            if mask == _LOOK:
                self._do(session, session.look)
            if mask & selectors.EVENT_READ:
                full = sum(s.member for s in self._sessions.values()) >= self.limits.members_max
                gives_way = self._too_many(session) if full and not session.member else None
                room = not full or gives_way is not None
                self._do(session, lambda now_s: session.read(now_s, self._round_s, room=room))
                if gives_way is not None and session.member and source in self._sessions:
                    self._drop(gives_way, "gave way to a newcomer from another host")
            if mask & selectors.EVENT_WRITE and source in self._sessions:
                self._do(session, session.write)

    def _too_many(self, newcomer: DonorSession) -> DonorSession | None:
        """A newcomer of the host that has the most places, where that is two more than the newcomer's has."""
        members = [session for session in self._sessions.values() if session.member]
        hosts = Counter(session.host for session in members)
        host, most = hosts.most_common(1)[0]
        if most < hosts[newcomer.host] + 2:
            return None
        theirs = [session for session in members if session.host == host]
        return min(theirs, key=lambda session: session.given_bytes)

    def _do(self, session: DonorSession, what: Callable[[float], None]) -> None:
        try:
            what(time.monotonic())
        except Closed as closed:
            self._drop(session, str(closed))

    def _clock(self, now_s: float) -> None:
        """Do what is due: drop connections that took too long, sweep the shelf, time the trainer's rounds."""
        for session in [s for s in self._sessions.values() if now_s >= s.ends_s()]:
            self._drop(session, "took too long" if session.member else "did not show the crew's key in time")
        if now_s >= self._accept_s > 0:
            self._accept_s = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        if now_s >= self._sweep_s:
            self._sweep_s = now_s + _LOOK_S
            self._shelf.sweep(self.limits.keep_s)
        new = self._shelf.round
        if new < self._looked_round:  # rounds are counted anew
            self._looked_s, self._looked_round, self._round_s = now_s, new, 0.0
        elif new > self._looked_round and now_s - self._looked_s >= _LOOK_S:
            if self._looked_round >= 0:
                self._round_s = (now_s - self._looked_s) / (new - self._looked_round)
            self._looked_s, self._looked_round = now_s, new

    def _accept(self) -> None:
        try:
            sock, where = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._selector.unregister(self._listener)  # it would be readable all the time
                self._accept_s = time.monotonic() + _LOOK_S
                if not self._barred:
                    self._note("refused", "", f"no connection can be accepted now ({error.strerror})")
                self._barred = True
            return
        self._barred = False
        strangers = [session for session in self._sessions.values() if not session.member]
        if len(strangers) >= self.limits.strangers_max:
            self._drop(min(strangers, key=lambda s: s.began_s), "gave way to another stranger")
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # macOS: it was reset already, and reading it says so
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        session = self._sessions[sock] = self._session(sock)
        session.host = _host_of(where[0])

    def _session(self, sock: socket.socket) -> DonorSession:
        return DonorSession(
            sock, self._key, self._shelf, self.limits, self._link, time.monotonic(), self._persons
        )

    def _drop(self, session: DonorSession, why: str) -> None:
        if session.watched:
            self._selector.unregister(session.sock)
        del self._sessions[session.sock]
        where = _peer_of(session.sock)
        session.close()
        self.given_bytes += session.given_bytes
        self.ended[why if why in self.ended or len(self.ended) < 256 else "other"] += 1
        if session.member:
            self._note("newcomer", where, f"{why}; {session.given_bytes} bytes given")
        else:
            self._refuse(where, why)

    def _refuse(self, where: str, why: str) -> None:
        """Note refusals once a second at most: strangers must not decide how much is written."""
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._refused_s >= _LOOK_S:
            more = f" ({self._refused - 1} others since the last note)" if self._refused > 1 else ""
            self._note("refused", where, why + more)
            self._refused, self._refused_s = 0, now_s

    def _end(self) -> None:
        for session in list(self._sessions.values()):
            self._drop(session, "the donor ends")
        self._shelf.end()
        self._selector.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()


def _host_of(host: str) -> str:
    """What tells hosts apart: an address, of IPv6 its first half, as one host has many with that."""
    plain = IPv6Address(host.partition("%")[0]) if ":" in host else None
    if plain is None or plain.ipv4_mapped:
        return host
    return plain.exploded[:19]


def _peer_of(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "gone"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(address: Address) -> socket.socket:
    sock = bound(socket.SOCK_STREAM, address, again=True)
    sock.listen(64)
    sock.setblocking(False)
    return sock
