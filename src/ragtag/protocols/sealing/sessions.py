"""Sessions: the keys under which two processes send each other datagrams, and how they come to them.

A machine without I/O. Each process has a key pair of its own, and tells its public key on its membership
card. Two of them make a session by a handshake of two datagrams (Noise IKpsk2; the shared key is the crew's).
So both ends prove that they are in the crew and which process they are: no member can speak for another. The
rules are WireGuard's (Donenfeld, NDSS 2017, sections 5 and 6). Either end may begin. The one that was asked
sends under the new keys only once something has come under them. A session is replaced after some time or
traffic.

    0  type u8    INIT or REPLY             8   count u64   of INITs of this key pair; grows
    1  suite u8   which cipher              16  mac[16]     keyed BLAKE2b (RFC 7693), crew's key
    2  sender's index u16                   32  Noise message, then zeros up to 1,152 bytes
    4  receiver's index u16 (REPLY)

What is sent under a session bears the index that its receiver has chosen, and a number that is never used
twice: it is the cipher's nonce, so 32 bits of it travel (RFC 9000, section 17.1), and a window of the newest
numbers refuses what is replayed (RFC 4303, section 3.4.3). A stranger cannot make a mac, and an INIT that was
recorded has an old count; both are refused before any public-key operation. An answer is as long as its
question, so nobody can be made to send more than was sent to it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hmac import compare_digest

import numpy as np
from numpy.typing import NDArray

from ragtag.core.address import Address
from ragtag.core.types import Bools, PeerId
from ragtag.core.wire import DATAGRAM_BYTES
from ragtag.protocols.membership.pace import INITIAL_RTO_S
from ragtag.protocols.sealing.noise import TAG_BYTES, Cipher, Handshake, HandshakeError, KeyPair, cipher_of

INIT, REPLY = 0x44, 0x45
"""First bytes of handshakes, which no other datagram has."""
AES, CHACHA = 1, 2
SUITES = {AES: "AESGCM", CHACHA: "ChaChaPoly"}
CARD_BYTES = 33
"""What a card tells of a process's key: the suite that it prefers, and the public key."""
REKEY_AFTER = 1 << 22
"""Datagrams of both directions after which a session is replaced: half of RFC 9001's limit for AES-GCM
(section 6.6)."""
REKEY_AFTER_S = 120.0
"""Seconds after which a session in use is replaced (WireGuard, section 6.1)."""
NUMBERS_MAX = 1 << 40
"""A session that no new one replaces is not used beyond this."""
WINDOW = 1 << 14
"""Numbers of which it is known whether they came: 19 MB of datagrams."""
_HEAD = struct.Struct("<BBHHHQ")
_MAC = slice(_HEAD.size, _HEAD.size + 16)
_NOISE = _MAC.stop
_INIT_BYTES = 32 + (32 + TAG_BYTES) + TAG_BYTES
_REPLY_BYTES = 32 + _HEAD.size + TAG_BYTES
_PROLOGUE = b"ragtag sessions 1"
_PAUSE_S, _PAUSE_MAX_S = INITIAL_RTO_S / 8, 2 * INITIAL_RTO_S
Numbers = NDArray[np.int64]


class SeenNumbers:
    """Which numbers have come: all above ``highest`` have not, and all too far below it count as come."""

    def __init__(self) -> None:
        self.highest = 0
        self._seen = np.zeros(WINDOW, np.bool_)
        self._seen[0] = True  # numbers begin at 1

    def whole(self, low: NDArray[np.uint32]) -> Numbers:
        """The full numbers of which these are the low 32 bits: the nearest to the next one."""
        least = self.highest + 1 - (1 << 31)
        numbers: Numbers = (low.astype(np.int64) - least & 0xFFFFFFFF) + least
        return numbers

    def fresh(self, numbers: Numbers) -> Bools:
        """Which of these have not come. It says nothing of one that stands here twice: see ``take``."""
        fresh = (numbers > self.highest - WINDOW) & (numbers > 0)
        known = fresh & (numbers <= self.highest)
        fresh[known] = ~self._seen[numbers[known] % WINDOW]
        return np.asarray(fresh, np.bool_)

    def take(self, numbers: Numbers) -> Bools:
        """These are fresh, and have come in authentic datagrams. Which are to be taken: each the first time.

        Only what is authentic may take a number. Else a forged datagram would keep a true one out.
        """
        first = np.ones(len(numbers), np.bool_)
        if len(numbers) == 0:
            return first
        if (numbers[1:] <= numbers[:-1]).any():
            first[:] = False
            first[np.unique(numbers, return_index=True)[1]] = True
        top = int(numbers.max())
        if top - self.highest >= WINDOW:
            self._seen[:] = False
        elif top > self.highest:
            self._seen[np.arange(self.highest + 1, top + 1) % WINDOW] = False
        self.highest = max(self.highest, top)
        self._seen[numbers[numbers > self.highest - WINDOW] % WINDOW] = True
        return first

    def fresh_one(self, low: int) -> int:
        """The full number of a datagram, if it has not come; 0: it has. As ``whole`` and ``fresh``."""
        least = self.highest + 1 - (1 << 31)
        number = (low - least & 0xFFFFFFFF) + least
        known = number <= self.highest and (number <= self.highest - WINDOW or self._seen[number % WINDOW])
        return 0 if known or number <= 0 else number

    def take_one(self, number: int) -> None:
        """As ``take``, of one number."""
        if number == self.highest + 1:  # almost always
            self.highest, self._seen[number % WINDOW] = number, True
        else:
            self.take(np.array([number]))


@dataclass(slots=True, eq=False)
class Session:
    """Keys for both directions between two processes.

    peer: the other's number.
    ours, theirs: the index under which datagrams come, and leave.
    sealing, opening: the ciphers of what leaves, and of what comes.
    initiated: whether this end has begun it.
    began_s: when it was made.
    sent: the number that was used last.
    """

    peer: PeerId
    suite: int
    ours: int
    theirs: int
    sealing: Cipher
    opening: Cipher
    initiated: bool
    began_s: float
    sent: int = 0
    came: SeenNumbers = field(default_factory=SeenNumbers)

    def ages(self, now_s: float) -> bool:
        """Whether this end is to replace it. The other end does half a period later, if this one does not."""
        late = 1.0 if self.initiated else 1.5
        used = self.sent + self.came.highest
        return used >= late * REKEY_AFTER or now_s - self.began_s >= late * REKEY_AFTER_S


@dataclass(slots=True)
class _Asked:
    """A handshake that this end has begun, and that is not answered yet. Its row is sent until it is."""

    handshake: Handshake
    index: int
    suite: int
    row: bytes


@dataclass(slots=True)
class _Other:
    """Another process, at an address.

    prefers: the suite that is fast there.
    public: its public key.
    count: the highest count of its INITs.
    answer: to the one of that count.
    current: the session to send under; ``before``: the one before it, under which datagrams may still come;
        ``coming``: one that the other end has begun, and under which nothing has come yet.
    asked: a handshake that waits for its answer, until ``again_s``; the wait after that one is ``pause_s``.
    wanted: whether anything was to be sent since the last attempt.
    heard: how often something authentic has come from it.
    keyless: whether there can be no session with it: its public key is a point with which all have the same
        secret. Another key makes it another process.
    """

    peer: PeerId
    prefers: int
    public: bytes
    count: int = 0
    current: Session | None = None
    before: Session | None = None
    coming: Session | None = None
    asked: _Asked | None = None
    again_s: float = math.inf
    pause_s: float = _PAUSE_S
    wanted: bool = False
    heard: int = 0
    answer: bytes = b""
    keyless: bool = False


Known = Callable[[Address], tuple[PeerId, bytes] | None]
"""By address, the peer that is there and its card's key (``card_of``); ``None``: not known (yet)."""


class Sessions:
    """One process's sessions with all others.

    crew_key: 32 bytes.
    key: this process's own key pair.
    known: who is where.
    random: random bytes, of so many.
    prefers: the suite that is fast here. A pair uses AES-GCM where both prefer it.
    refused: how many datagrams were refused, by reason: stranger (of no session or nobody known), forged,
        replayed, clear (not sealed).
    """

    def __init__(
        self,
        crew_key: bytes,
        key: KeyPair,
        known: Known,
        random: Callable[[int], bytes],
        prefers: int = AES,
    ) -> None:
        self._crew_key, self._key, self._known, self._random = crew_key, key, known, random
        self._prefers = prefers
        self._others: dict[Address, _Other] = {}
        self._where: dict[PeerId, Address] = {}  # one address for a seat, so that no table outgrows the seats
        self._by_index: dict[int, tuple[Session | None, _Other]] = {}  # None: its handshake is under way
        self._count = 0
        self.refused: Counter[str] = Counter()
        self._due_s = math.inf

    # -- To send

    def to(self, now_s: float, address: Address) -> Session | None:
        """The session for what is to be sent to an address.

        ``None``: there is none yet. A handshake is begun, if it is known who is there.
        """
        other = self._others.get(address)
        session = None if other is None else other.current
        if session is not None and session.sent < NUMBERS_MAX:
            assert other is not None
            if session.ages(now_s):
                self._want(now_s, other)
            return session
        other = self._look(address)
        if other is not None:
            self._want(now_s, other)
        return None

    def _look(self, address: Address) -> _Other | None:
        """Who is at an address now. Sessions with a process that was there before, or had its seat, end."""
        found = self._known(address)
        other = self._others.get(address)
        if found is None or len(found[1]) != CARD_BYTES:
            return other
        peer, prefers, public = found[0], found[1][0], found[1][1:]
        if other is None or (other.peer, other.public) != (peer, public):
            before = self._where.get(peer, address)
            was = self._others.get(before)
            count = was.count if was is not None and was.public == public else 0
            self._end(before)
            self._end(address)
            other = self._others[address] = _Other(peer, prefers, public, count)
            self._where[peer] = address
        return other

    def _end(self, address: Address) -> None:
        """Forget who was at an address."""
        other = self._others.pop(address, None)
        if other is None:
            return
        self._where.pop(other.peer, None)
        for index in [index for index, (_, whose) in self._by_index.items() if whose is other]:
            del self._by_index[index]

    def _want(self, now_s: float, other: _Other) -> None:
        """A session is wanted: the next turn begins a handshake, unless one is under way."""
        if other.keyless:
            return
        other.wanted = True
        if other.asked is None:
            other.again_s = min(other.again_s, now_s)
        self._due_s = min(self._due_s, other.again_s)

    @property
    def due_s(self) -> float:
        """When ``turn`` has something to do."""
        return self._due_s

    def turn(self, now_s: float) -> list[tuple[Address, bytes]]:
        """Handshakes to send now, and where."""
        if now_s < self._due_s:
            return []
        out = []
        self._due_s = math.inf
        for address, other in self._others.items():
            if other.again_s <= now_s and other.wanted:
                try:
                    out.append((address, self._ask(now_s, other)))
                except HandshakeError:  # a member may tell any 32 bytes as its key
                    other.keyless, other.again_s = True, math.inf
                    self.refused["forged"] += 1
            elif other.again_s <= now_s:  # nobody waits for it any more
                self._drop(other)
                other.again_s, other.pause_s = math.inf, _PAUSE_S
            self._due_s = min(self._due_s, other.again_s)
        return out

    def _ask(self, now_s: float, other: _Other) -> bytes:
        """The handshake's first datagram, the same again until it is answered: no end makes keys for that."""
        if other.asked is None:
            suite = AES if self._prefers == other.prefers == AES else CHACHA
            self._count += 1
            index = self._free_index()
            head = _HEAD.pack(INIT, suite, index, 0, 0, self._count)
            handshake = self._handshake(suite, head, other.public)
            row = self._row(head, handshake.write(), other.public)
            other.asked = _Asked(handshake, index, suite, row)
            self._by_index[index] = None, other
        other.wanted = False
        other.again_s = now_s + other.pause_s
        other.pause_s = min(_PAUSE_MAX_S, 2 * other.pause_s)
        return other.asked.row

    def _drop(self, other: _Other) -> None:
        """Give a handshake up."""
        if other.asked is not None:
            del self._by_index[other.asked.index]
            other.asked = None

    def _handshake(self, suite: int, head: bytes, remote: bytes | None) -> Handshake:
        """A handshake; the initiator's where ``remote`` is given."""
        ephemeral = KeyPair(self._random(32))
        return Handshake(
            "IKpsk2", SUITES[suite], initiator=remote is not None, psk=self._crew_key,
            prologue=_PROLOGUE + head, ephemeral=ephemeral, static=self._key, remote=remote,
        )  # fmt: skip

    def _row(self, head: bytes, message: bytes, to: bytes) -> bytes:
        rest = message.ljust(DATAGRAM_BYTES - _NOISE, b"\0")
        return head + self._mac(head, rest, to) + rest

    def _mac(self, head: bytes, rest: bytes, to: bytes) -> bytes:
        """Nobody outside the crew can make it, nor send it on to another member."""
        return hashlib.blake2b(
            head + rest + to, key=self._crew_key, digest_size=16, person=b"ragtag-session"
        ).digest()

    def _free_index(self) -> int:
        """An index that is not in use."""
        while True:
            index = int.from_bytes(self._random(2), "little")
            if index not in self._by_index:
                return index

    # -- What comes

    def under(self, index: int) -> Session | None:
        """The session whose datagrams bear an index; ``None``: there is none."""
        found = self._by_index.get(index)
        return None if found is None else found[0]

    def opened(self, session: Session) -> None:
        """Something authentic has come under a session: its other end has the keys, too."""
        found = self._by_index.get(session.ours)
        if found is not None:
            found[1].heard += 1
        if found is not None and found[1].coming is session:
            found[1].coming = None
            self._begin(found[1], session)

    def heard(self, address: Address) -> int:
        """How often something authentic has come from the process at an address, under any session."""
        other = self._others.get(address)
        return 0 if other is None else other.heard

    def unknown(self, now_s: float, address: Address, count: int = 1) -> None:
        """Datagrams of no session came from an address: their sender has one that this end has lost."""
        self.refused["stranger"] += count
        other = self._look(address)
        if other is not None and other.current is None:
            self._want(now_s, other)

    def take(self, now_s: float, row: bytes, source: Address) -> bytes | None:
        """Take a handshake's datagram, of 1,152 bytes; an answer to send back, if there is one."""
        kind, suite, sender, receiver, _, count = _HEAD.unpack_from(row)
        if suite not in SUITES or not compare_digest(
            self._mac(row[: _HEAD.size], row[_NOISE:], self._key.public), row[_MAC]
        ):
            self.refused["forged"] += 1
            return None
        other = self._look(source)
        if other is None:
            self.refused["stranger"] += 1
            return None
        if kind == INIT:
            return self._answer(now_s, other, row, suite, sender, count)
        self._finish(now_s, other, row, sender, receiver)
        return None

    def _answer(
        self, now_s: float, other: _Other, row: bytes, suite: int, sender: int, count: int
    ) -> bytes | None:
        if count == other.count and other.answer:
            return other.answer  # it was sent again, as the answer was lost
        if count <= other.count:
            self.refused["replayed"] += 1
            return None
        handshake = self._handshake(suite, row[: _HEAD.size], None)
        try:
            handshake.read(row[_NOISE : _NOISE + _INIT_BYTES])
        except HandshakeError:
            self.refused["forged"] += 1
            return None
        if handshake.remote != other.public:  # a member, but not the one that is at this address
            self.refused["forged"] += 1
            return None
        other.count = count
        if other.coming is not None:
            self._by_index.pop(other.coming.ours, None)
        index = self._free_index()
        head = _HEAD.pack(REPLY, suite, index, sender, 0, 0)
        other.answer = self._row(head, handshake.write(head), other.public)
        other.coming = self._session(now_s, other, suite, index, sender, handshake, initiated=False)
        return other.answer

    def _finish(self, now_s: float, other: _Other, row: bytes, sender: int, receiver: int) -> None:
        asked = other.asked
        if asked is None or asked.index != receiver:  # an answer to an earlier attempt
            self.refused["replayed"] += 1
            return
        try:
            said = asked.handshake.read(row[_NOISE : _NOISE + _REPLY_BYTES])
        except HandshakeError:
            said = b""
        if said != row[: _HEAD.size]:  # some other member's: this handshake cannot go on, but a new one can
            self._drop(other)
            self.refused["forged"] += 1
            return
        other.asked, other.again_s, other.pause_s = None, math.inf, _PAUSE_S
        self._begin(
            other,
            self._session(now_s, other, asked.suite, asked.index, sender, asked.handshake, initiated=True),
        )

    def _session(
        self,
        now_s: float,
        other: _Other,
        suite: int,
        ours: int,
        theirs: int,
        handshake: Handshake,
        *,
        initiated: bool,
    ) -> Session:
        first, second = handshake.split()
        out, back = (first, second) if initiated else (second, first)
        name = SUITES[suite]
        session = Session(
            other.peer, suite, ours, theirs, cipher_of(name, out), cipher_of(name, back), initiated, now_s
        )
        self._by_index[ours] = session, other
        return session

    def _begin(self, other: _Other, session: Session) -> None:
        """From now on send under a session. Under the one before it datagrams may still come."""
        if other.before is not None:
            self._by_index.pop(other.before.ours, None)
        other.before, other.current = other.current, session


def card_of(prefers: int, key: KeyPair) -> bytes:
    """What a process tells of its key on its card: the suite that it prefers, and its public key."""
    return bytes([prefers]) + key.public
