"""A link that seals: it stands on another one, and encrypts what goes over that.

A datagram keeps its size. Its first 32 bytes hold what the other end knows already (version, crew, both
peers), a check that is not needed any more, and 8 bytes for a link to use. So there is room for a tag of 16
bytes, and for 8 bytes in clear:

| offset | type | field | meaning |
|---|---|---|---|
| 0 | u8 | SEALED | no other datagram begins so |
| 1 | u8 | kind | as in ``core.wire`` |
| 2 | u16 | index | the receiver's, of a session |
| 4 | u32 | number | low 32 bits of the datagram's number in its session |
| 8 | | | encrypted: packet's number, epoch, and the header from its schema on; the chunk; the tag |

What is in clear is authenticated, too. A number belongs to the session and not to the packet: a packet that
finds no room is built anew, and its number would be used twice.

A datagram of several packets is encrypted at once, under one number. Its first packet stands as above; the
others follow whole, and then the tag. So each chunk keeps its place.
"""

from __future__ import annotations

import math
import struct
import time
from collections import Counter, deque
from functools import cache

import numpy as np
from cryptography.exceptions import InvalidTag

from ragtag.core.address import Address
from ragtag.core.types import Bools, Bytes
from ragtag.core.wire import DATAGRAM_BYTES, VERSION, Identity
from ragtag.network.link.link import SLAB_ROWS, TRAIN, Failures, Link, Received, TooLarge
from ragtag.protocols.relays import Routes
from ragtag.protocols.sealing.noise import KEY_BYTES, Cipher, cipher_of
from ragtag.protocols.sealing.sessions import (
    AES,
    CHACHA,
    INIT,
    REPLY,
    SUITES,
    Numbers,
    Session,
    Sessions,
)

SEALED = 0x43
_TRIALS = 20
_CLEAR = 8
_FIRST = 24  # where in a header stands what is encrypted: the packet's number is copied here from offset 8
_NONCES = {AES: struct.Struct(">4xQ").pack, CHACHA: struct.Struct("<4xQ").pack}
"""By suite, the nonce of a number (as ``noise.nonce_of``)."""
_SHORT = struct.Struct("<BBHI")
_U16, _U8, _KIND = np.uint64(0xFFFF), np.uint64(0xFF), np.uint64(0xFF00)
_BY_16, _BY_32 = np.uint64(16), np.uint64(32)


@cache
def fast_suite() -> int:
    """The suite that is faster on this machine: AES-GCM wherever the processor has instructions for it."""
    plain, nonce = bytes(DATAGRAM_BYTES), bytes(12)

    def fastest_s(cipher: Cipher) -> float:
        best_s = math.inf
        for _ in range(_TRIALS):
            began_s = time.perf_counter()
            cipher.encrypt(nonce, plain, None)
            best_s = min(best_s, time.perf_counter() - began_s)
        return best_s

    return min((AES, CHACHA), key=lambda suite: fastest_s(cipher_of(SUITES[suite], bytes(KEY_BYTES))))


class _Slices:
    """Slices of each row of a table, kept for as long as tables come in the same memory.

    A link and a framer each use one buffer again and again. Slicing it anew costs a third of encrypting it.
    """

    def __init__(self, *bounds: tuple[int, int]) -> None:
        self._bounds, self._at, self._rows = bounds, 0, 0
        self._slices: list[list[memoryview]] = []

    def of(self, table: Bytes) -> list[list[memoryview]]:
        """For each of the bounds a slice of each row; ``table`` uint8 ``[k, 1152]``, C-contiguous."""
        at = int(table.ctypes.data)
        if at != self._at or len(table) > self._rows:
            data, starts = table.reshape(-1).data, range(0, table.size, DATAGRAM_BYTES)
            self._slices = [[data[row + a : row + b] for row in starts] for a, b in self._bounds]
            self._at, self._rows = at, len(table)  # the slices keep that memory: no other table is there
        return self._slices


def _spans(got: Received) -> list[tuple[int, int]] | None:
    """Of each datagram its first row, and the row after its last; ``None``: each has one."""
    if not got.per or max(got.per) == 1:
        return None
    spans, begin = [], 0
    for (until, _), per in zip(got.sources, got.per, strict=True):
        spans += [(row, min(row + per, until)) for row in range(begin, until, per)]
        begin = until
    return spans


def _parts(data: memoryview, first: int, until: int, per: int, at: int) -> list[memoryview]:
    """Each datagram of rows ``first`` to ``until``, ``per`` in each, without its first ``at`` bytes."""
    size = DATAGRAM_BYTES
    return [data[row * size + at : min(row + per, until) * size] for row in range(first, until, per)]


def _decrypt(
    session: Session, which: list[int], numbers: Numbers, parts: tuple[list[memoryview], ...]
) -> Bools:
    """Open some of a pass's datagrams into their places; which of them were authentic.

    parts: of each datagram of the pass what is in clear, what is encrypted, and its place.
    """
    true = np.ones(len(which), np.bool_)
    clear, rest, plain = parts
    opening = map(
        session.opening.decrypt_into,
        map(_NONCES[session.suite], numbers.tolist()),
        map(rest.__getitem__, which),
        map(clear.__getitem__, which),
        map(plain.__getitem__, which),
    )
    at = 0
    while at < len(which):
        try:
            for _ in opening:
                at += 1
        except InvalidTag:
            true[at] = False
            at += 1
    return true


class SealedLink:
    """What is sent over ``link`` is encrypted for its receiver alone; what comes is theirs, or is refused.

    identity: whose datagrams these are; peers' numbers follow from their sessions.
    sessions: the keys.
    """

    sealed = True

    def __init__(self, link: Link, identity: Identity, sessions: Sessions) -> None:
        self._link, self.sessions = link, sessions
        self._now_s = 0.0
        self._out = np.zeros((TRAIN, DATAGRAM_BYTES), np.uint8)
        rows = SLAB_ROWS + 64  # a link may bring some more than it was asked for, and then this grows
        self._in = np.zeros((rows, DATAGRAM_BYTES), np.uint8)
        sealed, plain = ((0, _CLEAR), (_CLEAR, DATAGRAM_BYTES)), ((_FIRST, DATAGRAM_BYTES),)
        self._heads, self._data = self._out.view("<u8")[:, 0], self._out.reshape(-1).data
        self._clear, self._rest = _Slices(*sealed).of(self._out)
        self._plain_out = _Slices(*plain)
        self._sealed_in, self._plain_in = _Slices(*sealed), _Slices(*plain)
        self._word = VERSION | identity.crew_id << 16 | identity.peer << 48

    @property
    def routes(self) -> Routes | None:
        """Who relays what is sent to whom."""
        return self._link.routes

    @property
    def failures(self) -> Failures:
        """What could not be sent."""
        return self._link.failures

    @property
    def due_s(self) -> float:
        """When a handshake is to be sent, or something below."""
        return min(self.sessions.due_s, self._link.due_s)

    @property
    def address(self) -> Address:
        """The address at which others reach this link."""
        return self._link.address

    @property
    def capacity(self) -> int:
        """How many datagrams the link surely keeps until they are read."""
        return self._link.capacity

    def unusable(self, address: Address) -> str:
        """Why nothing can be sent from here to an address; empty: it can."""
        return self._link.unusable(address)

    def fileno(self) -> int:
        """A file descriptor to poll."""
        return self._link.fileno()

    def close(self) -> None:
        """End the link."""
        self._link.close()

    # -- Handshakes

    def turn(self, now_s: float) -> None:
        """Send handshakes that are due."""
        self._now_s = now_s
        self._link.turn(now_s)
        for address, row in self.sessions.turn(now_s):
            self._link.send(np.frombuffer(row, np.uint8).reshape(1, -1), address)

    def ready(self, address: Address) -> bool:
        """Whether there are keys for an address. If not, the next turn asks for some."""
        return self.sessions.to(self._now_s, address) is not None

    def room(self, address: Address) -> bool:
        """Whether the link below takes more for an address now."""
        return self._link.room(address)

    # -- Out

    def send(self, rows: Bytes, address: Address, per: int = 1) -> int:
        """Send uint8 ``[k, 1152]``, C-contiguous, encrypted; returns how many rows left.

        Where there are no keys yet the rows are lost: a caller looks first (``ready``).

        per: rows in a datagram. Raises TooLarge: the first hop takes no such datagrams.
        """
        session = self.sessions.to(self._now_s, address)
        if session is None:
            return len(rows)
        words = rows.view("<u8")
        words[::per, 3] = words[::per, 1]
        heads, data = words[::per, 0] & _KIND, rows.reshape(-1).data
        heads |= np.uint64(SEALED | session.theirs << 16)
        heads |= np.arange(session.sent + 1, session.sent + 1 + len(heads), dtype=np.uint64) << _BY_32
        pack, encrypt = _NONCES[session.suite], session.sealing.encrypt_into
        clear, rest = self._clear, self._rest
        plain = self._plain_out.of(rows)[0] if per == 1 else []
        train = TRAIN - TRAIN % per
        for at in range(0, len(rows), train):
            until = min(at + train, len(rows))
            k, first = until - at, at // per
            self._heads[:k:per] = heads[first : first - (-k // per)]
            numbers = range(session.sent + 1, session.sent + 1 - (-k // per))
            session.sent += len(numbers)
            if per == 1:
                deque(map(encrypt, map(pack, numbers), plain[at:until], clear, rest), maxlen=0)
            else:
                parts = _parts(data, at, until, per, _FIRST), _parts(self._data, 0, k, per, _CLEAR)
                deque(map(encrypt, map(pack, numbers), parts[0], clear[:k:per], parts[1]), maxlen=0)
            try:
                left = self._link.send(self._out[:k], address, per)
            except TooLarge as error:
                raise TooLarge(at + error.left) from None
            if left < k:
                return at + left
        return len(rows)

    def send_short(self, datagram: bytes, address: Address) -> None:
        """Send one header-only datagram, encrypted. Without keys it is lost."""
        session = self.sessions.to(self._now_s, address)
        if session is None:
            return
        session.sent += 1
        number = session.sent
        clear = _SHORT.pack(SEALED, datagram[1], session.theirs, number & 0xFFFFFFFF)
        plain = datagram[8:16] + datagram[_FIRST + 8 :]
        nonce = _NONCES[session.suite](number)
        self._link.send_short(clear + session.sealing.encrypt(nonce, plain, clear), address)

    # -- In

    def receive(self) -> Received:
        """Take what has come: what is sealed and fresh, opened. Handshakes are answered."""
        got = self._link.receive()
        k = len(got.table)
        if k:
            self._open(got)
        if got.short:
            self._open_short(got)
        return got

    def _open(self, got: Received) -> None:
        """Put the opened rows in place of those that came."""
        table, k = got.table, len(got.table)
        if k > len(self._in):
            self._in = np.zeros((k, DATAGRAM_BYTES), np.uint8)
        spans = _spans(got)
        starts = np.arange(k) if spans is None else np.array([a for a, _ in spans])
        counts = None if spans is None else np.array([b - a for a, b in spans])
        words, first = self._in[:k].view("<u8"), table.view("<u8")[starts, 0]
        ok = first & _U8 == SEALED
        if not ok.all():
            self._others(got, starts[~ok].tolist())
        index = first >> _BY_16 & _U16
        low = (first >> _BY_32).astype(np.uint32)
        mine = np.zeros(len(starts), np.uint64)
        came = table if table.flags.c_contiguous else np.ascontiguousarray(table)
        parts = self._parts_in(came, spans)
        mixed = bool((index[1:] != index[:-1]).any()) or not ok.all()
        for one in np.unique(index[ok]).tolist() if mixed else [int(index[0])]:
            which = np.flatnonzero(ok & (index == one)) if mixed else np.arange(len(starts))
            session = self.sessions.under(one)
            if session is None:
                ok[which] = False
                self._unknown(got, starts[which].tolist())
                continue
            numbers = session.came.whole(low[which])
            fresh = session.came.fresh(numbers)
            which, numbers = self._keep(ok, which, numbers, fresh, "replayed")
            true = _decrypt(session, which.tolist(), numbers, parts)
            which, numbers = self._keep(ok, which, numbers, true, "forged")
            which, _ = self._keep(ok, which, numbers, session.came.take(numbers), "replayed")
            if len(which):
                self.sessions.opened(session)
                mine[which] = self._word | session.peer << 32
        if counts is not None:  # no packet speaks for another peer, wherever in a datagram it stands
            words[:, 0] &= _KIND
            words[:, 0] |= np.repeat(mine, counts)
        words[starts, 0] = first & _KIND | mine
        words[starts, 1] = words[starts, 3]
        got.table = self._in[:k]
        if not ok.all():
            good = ok if counts is None else np.repeat(ok, counts)
            got.table = got.table[good]
            upto = np.concatenate(([0], np.cumsum(good)))
            got.sources = [(int(upto[end]), address) for end, address in got.sources]

    def _parts_in(
        self, came: Bytes, spans: list[tuple[int, int]] | None
    ) -> tuple[list[memoryview], list[memoryview], list[memoryview]]:
        """Of each datagram that came what is in clear, what is encrypted, and where it goes in this table."""
        clear, rest = self._sealed_in.of(came)
        (plain,) = self._plain_in.of(self._in)
        if spans is None:
            return clear, rest, plain
        size, data, opened = DATAGRAM_BYTES, came.reshape(-1).data, self._in.reshape(-1).data
        return (
            [clear[a] for a, _ in spans],
            [data[a * size + _CLEAR : b * size] for a, b in spans],
            [opened[a * size + _FIRST : b * size] for a, b in spans],
        )

    def _keep(
        self, ok: Bools, which: Numbers, numbers: Numbers, good: Bools, why: str
    ) -> tuple[Numbers, Numbers]:
        """The good ones of some datagrams, and of their numbers. Others are counted, and are not ``ok``."""
        if good.all():
            return which, numbers
        self.sessions.refused[why] += int((~good).sum())
        ok[which[~good]] = False
        return which[good], numbers[good]

    def _others(self, got: Received, rows: list[int]) -> None:
        """Handshakes among the datagrams that came are answered; what was not sealed is refused.

        rows: the first one of each.
        """
        for row in rows:
            if got.table[row, 0] not in (INIT, REPLY):
                self.sessions.refused["clear"] += 1
                continue
            source = self._source(got, row)
            answer = self.sessions.take(self._now_s, got.table[row].tobytes(), source)
            if answer is not None:
                self._link.send(np.frombuffer(answer, np.uint8).reshape(1, -1), source)

    def _unknown(self, got: Received, rows: list[int]) -> None:
        for source, count in Counter(self._source(got, row) for row in rows).items():
            self.sessions.unknown(self._now_s, source, count)

    @staticmethod
    def _source(got: Received, row: int) -> Address:
        return next(address for end, address in got.sources if row < end)

    def _open_short(self, got: Received) -> None:
        """Put the opened header-only datagrams in place of those that came."""
        stamps = got.short_came_ns or [0] * len(got.short)
        opened: list[tuple[bytes, Address, int]] = []
        for data, source, came_ns in zip(got.short, got.short_sources, stamps, strict=True):
            plain = self._opened_short(data, source)
            if plain is not None:
                opened.append((plain, source, came_ns))
        got.short = [plain for plain, _, _ in opened]
        got.short_sources = [source for _, source, _ in opened]
        got.short_came_ns = [came_ns for _, _, came_ns in opened]

    def _opened_short(self, data: bytes, source: Address) -> bytes | None:
        form, kind, index, low = _SHORT.unpack_from(data)
        if form != SEALED:
            self.sessions.refused["clear"] += 1
            return None
        session = self.sessions.under(index)
        if session is None:
            self.sessions.unknown(self._now_s, source)
            return None
        number = session.came.fresh_one(low)
        if not number:
            self.sessions.refused["replayed"] += 1
            return None
        nonce = _NONCES[session.suite](number)
        try:
            plain: bytes = session.opening.decrypt(nonce, data[_CLEAR:], data[:_CLEAR])
        except InvalidTag:
            self.sessions.refused["forged"] += 1
            return None
        session.came.take_one(number)
        self.sessions.opened(session)
        word: int = self._word | kind << 8 | session.peer << 32
        return word.to_bytes(8, "little") + plain[:8] + bytes(16) + plain[8:]
