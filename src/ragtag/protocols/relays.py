"""Ways between peers of which some cannot reach each other: over UDP, over TCP, or through one member that
both reach.

A machine without I/O, of one process. It says where a datagram for a peer leaves, and which datagrams of
others are passed on. It is asked below what seals (``network.link.relayed``), so a member that passes
datagrams on sees no more of them than any router does.

**Addresses.** A peer's card tells one address. A router in front of the peer may give it another one for each
destination (RFC 4787, section 4.1: address and port-dependent mapping). So a member also takes the address
from which the peer's own hello came, once the peer has shown that it receives there.

    one peer                                other peer
    HELLO: count                      ->    looks where it came from
                                      <-    HERE: count; a ticket for that address; whether it is known
    HELLO: count, ticket              ->    from now on that is where the peer is
                                      <-    HERE

Both are 64 bytes, so nobody is made to send more than was sent to it. Their tags are keyed BLAKE2b (RFC
7693). The key follows from both ends' key pairs (X25519) and the crew's key: no other member can speak for
either. The answer depends on nothing that is kept. A hello that was recorded earns an answer, and moves
nothing, as its count is old.

**When a way is doubted.** Something has left for ``LOOK_S``, and nothing authentic came. The other end's way
may be broken as well as this one's, so hellos say that nothing is heard, and the other end doubts its own.
An end that doubts says hello on its present way and directly, in growing pauses, and from the
``OTHERS_FROM``-th time on over TCP, too, and through others: one, then two, four, eight. The first way that
is answered is taken, and later a better one that is: UDP to the peer itself is best, TCP to it is better than
through another member, whose line would carry all twice. Better ways are tried every ``AGAIN_S``.

**Over TCP** a peer listens at the address of its card, port for port. Whoever can reach the other connects,
and hellos over the connection show the other end where the answer goes. So a peer that only gets out, and
only by TCP, is reached by all that it reaches, and members that have TCP ways to two such peers relay between
them.

**Through whom.** Of the members to which this peer has a direct way, sorted by seat, it begins with number
a + b (the two seats), modulo how many there are; the end with the higher seat begins with the next one. So
pairs, and both directions of a pair, spread over all of them. Each end chooses for what it sends. What goes
through a member that is dead, or has no direct way itself any more, is led through another one.

**What is passed on.** Only what came from the very address for which its sender holds a ticket, for a member
to which this peer has a direct way: each datagram takes one hop at most, and none goes round. It leaves as
long as it came, at most ``FORWARDED_PACKETS_PER_S`` from each member. A peer that relays keeps nothing but
what it knows of members anyway.

    0  u8  FORWARD           4  u16  receiver's seat
    1  u8  0                 6  u16  0
    2  u16 sender's seat     8  u64  the sender's ticket at the relay; then the datagram
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import NamedTuple, Protocol

from ragtag.core.address import Address, by_stream, dials, is_stream, without_stream
from ragtag.core.types import PeerId
from ragtag.core.wire import DATAGRAM_BYTES, HEADER_BYTES
from ragtag.protocols.membership.pace import INITIAL_RTO_S, Allowance
from ragtag.protocols.sealing.noise import HandshakeError, KeyPair

HELLO, HERE, FORWARD = 0x46, 0x47, 0x48
"""First bytes, which no other datagram has."""
FORWARD_BYTES = 16
"""By so much a datagram that is passed on is longer. Of one packet it stays below RFC 8899's 1,200 bytes and
IPv4's headers, and below IPv6's least MTU."""
DIRECT, STREAM = -1, -2
"""In place of the seat of a member that relays: over UDP to the peer itself, or over TCP to it."""
LOOK_S = INITIAL_RTO_S
"""After so long without anything from a peer to which something was sent its way is doubted."""
AGAIN_S = 15.0
"""Between two attempts at a better way than that in use; as often routers are kept from forgetting
(RFC 8445, section 11)."""
OTHERS_FROM = 3
"""The attempt from which on TCP is tried, and others are asked to relay: two hellos may be lost by chance."""
FORWARDED_PACKETS_PER_S = 100_000.0
"""Packets of 1,152 bytes that one member may have passed on by this peer: about a gigabit per second."""
_PAUSE_S, _PAUSE_MAX_S = INITIAL_RTO_S / 8, 2 * INITIAL_RTO_S
_RELAYS_MAX = 8
_ASKED_MAX = 64
_TOLD_AT = 8
"""The attempt at which it is said that a peer is out of reach: some seconds without any answer."""
_TROUBLED, _KNOWN = 1, 1
_HEAD = struct.Struct("<BBHHHQQ24x")
_FORWARD = struct.Struct("<BBHHHQ")
_TAG_BYTES = HEADER_BYTES - _HEAD.size


class Mates(Protocol):
    """The members that live, as membership tells."""

    def at(self, address: Address) -> tuple[PeerId, bytes] | None:
        """The seat and card's key of the member that tells an address."""

    def there(self, peer: PeerId) -> tuple[Address, bytes] | None:
        """The address and card's key of the member that has a seat."""

    def living(self) -> Iterable[PeerId]:
        """Their seats."""


class Out(NamedTuple):
    """A datagram to send to an address."""

    data: bytes
    address: Address


class Turned(NamedTuple):
    """The way to a peer has changed, or is to be told of. address: as its card has it."""

    peer: PeerId
    address: Address
    what: str
    detail: str


@dataclass(slots=True, eq=False)
class _Door:
    """Where a peer itself is reached, over UDP or over TCP.

    usual: where its card says.
    learned: where its own hello came from, and came to be proven; ``None``: where its card says.
    count: the highest of its hellos that showed where it is.
    ticket: by which it passes on what this peer sends there; 0: none.
    """

    usual: Address
    learned: Address | None = None
    count: int = 0
    ticket: int = 0

    @property
    def at(self) -> Address:
        """Where what is sent there goes."""
        return self.learned or self.usual


@dataclass(slots=True, eq=False)
class _Way:
    """The way to the process at an address.

    secret: for tags.
    doors: where it is reached itself: ``DIRECT`` and ``STREAM``.
    trouble: the highest of its hellos that said it hears nothing.
    via: the member that relays what is sent to it, or ``DIRECT``, or ``STREAM``.
    sure: whether this way was ever answered.
    doubted: whether the other end says that it hears nothing.
    silent: whether nothing has come although something left.
    wanted: whether anything has left since something came.
    heard: how much had come when that was looked at last.
    attempt: hellos without an answer; 0: the way is not doubted.
    again_s: when to look again, or to say hello.
    better_s: when to try better ways again.
    asked: hellos that are not answered, by count: on which way, and with which ticket.
    told: whether it was said that it is out of reach.
    passed: what is still passed on of what it sends.
    """

    peer: PeerId
    address: Address
    public: bytes
    secret: bytes
    doors: dict[PeerId, _Door]
    trouble: int = 0
    via: PeerId = DIRECT
    sure: bool = False
    doubted: bool = False
    silent: bool = False
    wanted: bool = False
    heard: int = 0
    attempt: int = 0
    again_s: float = math.inf
    better_s: float = math.inf
    asked: OrderedDict[int, tuple[PeerId, int]] = field(default_factory=OrderedDict)
    told: bool = False
    passed: Allowance = field(default_factory=lambda: Allowance(FORWARDED_PACKETS_PER_S))

    @property
    def door(self) -> _Door:
        """Where it is sent to, if nobody relays."""
        return self.doors[min(self.via, DIRECT)]


class Routes:
    """One process's ways to all others.

    me: its seat.
    crew_key: 32 bytes.
    key: this process's own key pair.
    mates: who is where.
    heard: of an address as a card has it, how much authentic has come from there; it only has to change.
    random: random bytes, of so many.
    streams: whether the link below has addresses over TCP.
    forwarded: packets that were passed on for others.
    refused: why datagrams were not taken, or not passed on, and how many.
    news: what is to be told; the caller clears it.
    """

    def __init__(
        self,
        me: PeerId,
        crew_key: bytes,
        key: KeyPair,
        mates: Mates,
        heard: Callable[[Address], int],
        random: Callable[[int], bytes],
        streams: bool = False,
    ) -> None:
        self._me, self._crew_key, self._key, self._mates, self._heard = me, crew_key, key, mates, heard
        self._secret, self._streams = random(32), streams
        self._ways: dict[PeerId, _Way] = {}
        self._by_address: dict[Address, _Way] = {}
        self._learned: dict[Address, _Way] = {}
        self._count = 0
        self._due_s = math.inf
        self.forwarded = 0
        self.refused: Counter[str] = Counter()
        self.news: list[Turned] = []

    # -- Where a datagram leaves

    def to(self, now_s: float, address: Address) -> tuple[Address, bytes]:
        """Where a datagram for an address leaves, and what stands before it; nothing: it goes directly."""
        way = self._by_address.get(address) or self._look(address)
        if way is None:
            return address, b""
        if not way.wanted:
            way.wanted = True
            if not way.attempt:
                self._at(way, min(way.again_s, now_s + LOOK_S if way.sure else now_s))
        relay = self._ways.get(way.via)
        return (way.door.at, b"") if relay is None else (relay.door.at, self._head(relay, way.peer))

    def via(self, peer: PeerId) -> PeerId:
        """The member that relays what is sent to a peer, or ``DIRECT``, or ``STREAM``."""
        way = self._ways.get(peer)
        return DIRECT if way is None else way.via

    def streamed(self, peer: PeerId) -> bool:
        """Whether what is sent to a peer leaves over TCP, to it or to the member that relays."""
        via = self.via(peer)
        return STREAM in (via, self.via(via))

    def _head(self, relay: _Way, to: PeerId) -> bytes:
        return _FORWARD.pack(FORWARD, 0, self._me, to, 0, relay.door.ticket)

    def _look(self, address: Address) -> _Way | None:
        found = self._mates.at(address)
        return None if found is None else self._way(found[0])

    def _way(self, peer: PeerId) -> _Way | None:
        """The way to the process that has a seat now; ``None``: there is none, or it has no key."""
        found, way = self._mates.there(peer), self._ways.get(peer)
        if found is None or peer == self._me or len(found[1]) < 33:
            return None
        address, public = found[0], found[1][1:]
        if way is not None and (way.address, way.public) == (address, public):
            return way
        try:
            shared = self._key.shared(public)
        except HandshakeError:
            return None
        if way is not None:
            self._forget(way)
        secret = hashlib.blake2b(shared, key=self._crew_key, person=b"ragtag-relays").digest()
        doors = {DIRECT: _Door(address), STREAM: _Door(by_stream(address))}
        way = self._ways[peer] = self._by_address[address] = _Way(peer, address, public, secret, doors)
        return way

    def _forget(self, way: _Way) -> None:
        """Another process has its seat, or it tells another address."""
        del self._ways[way.peer]
        if self._by_address.get(way.address) is way:
            del self._by_address[way.address]
        for door in way.doors.values():
            self._learn(way, door, None)

    def _learn(self, way: _Way, door: _Door, source: Address | None) -> None:
        """A peer is at another address than before; ``None``: where its card says."""
        if door.learned is not None and self._learned.get(door.learned) is way:
            del self._learned[door.learned]
        door.learned = source
        if source is not None:
            before = self._learned.get(source)
            for other in () if before is None else before.doors.values():
                if other.learned == source and other is not door:
                    other.learned = None
            self._learned[source] = way

    def closed(self, now_s: float, address: Address) -> None:
        """A connection has ended: what goes over it needs another one, or another way."""
        way = self._learned.get(address) or self._by_address.get(without_stream(address))
        if way is None:
            return
        door = way.doors[STREAM]
        if way.via == STREAM and door.at == address:
            way.doubted = True
            self._at(way, now_s)
        if door.learned == address:
            self._learn(way, door, None)

    def _at(self, way: _Way, at_s: float) -> None:
        way.again_s = at_s
        self._due_s = min(self._due_s, at_s)

    # -- What is said, and when

    @property
    def due_s(self) -> float:
        """When ``turn`` has something to do."""
        return self._due_s

    def turn(self, now_s: float) -> list[Out]:
        """Hellos to send now. It may be called at any time, and should be when membership has news."""
        out: list[Out] = []
        for way in list(self._ways.values()):
            if way.via >= 0 and not self._relays(way.via):
                self._turn_to(way, DIRECT)
                way.sure, way.attempt = False, max(way.attempt, OTHERS_FROM - 1)
                self._at(way, now_s)
        if now_s < self._due_s:
            return out
        self._due_s = math.inf
        for way in list(self._ways.values()):
            if way.again_s <= now_s:
                self._look_at(now_s, way, out)
        self._due_s = min((way.again_s for way in self._ways.values()), default=math.inf)
        return out

    def _look_at(self, now_s: float, way: _Way, out: list[Out]) -> None:
        if self._way(way.peer) is not way:  # it is gone, for now or for ever
            way.attempt, way.wanted, way.again_s = 0, False, math.inf
            return
        if way.attempt == 0 and way.sure and not way.doubted:
            heard = self._heard(way.address)
            if heard != way.heard or not way.wanted:
                way.heard, way.wanted = heard, False
                if way.via != DIRECT and way.better_s <= now_s:
                    way.better_s = now_s + AGAIN_S
                    out += [self._hello(way, via, False) for via in self._itself()]
                way.again_s = way.better_s if way.via != DIRECT else math.inf
                return
            way.silent = True
        if way.attempt > _TOLD_AT and not way.wanted:  # nobody asks for it any more
            way.attempt, way.again_s = 0, math.inf
            return
        self._ask(now_s, way, out)

    def _ask(self, now_s: float, way: _Way, out: list[Out]) -> None:
        """Say hello on all ways that are worth it by now."""
        way.attempt += 1
        way.wanted = False
        ways = [DIRECT] if way.via == DIRECT else [way.via, DIRECT]
        if way.attempt >= OTHERS_FROM:
            ways += [via for via in self._itself() if via not in ways]
            most = min(_RELAYS_MAX, 2 ** (way.attempt - OTHERS_FROM))
            ways += [peer for peer in self._candidates(now_s, way)[:most] if peer not in ways]
        troubled = way.silent or way.attempt >= OTHERS_FROM
        out += [self._hello(way, via, troubled) for via in ways]
        if way.attempt == _TOLD_AT and not way.told:
            way.told = True
            others, at = len(self._candidates(now_s, way)), way.doors[DIRECT].at
            nor, what = (", nor over TCP", "UDP or TCP") if self._streams else ("", "UDP")
            why = f"{others} members were asked to relay" if others else "no other member can relay"
            detail = (
                f"it does not answer at {at[0]}:{at[1]}{nor}, and {why}: have the router or firewall in "
                f"front of one of the two let {what} in"
            )
            self.news.append(Turned(way.peer, way.address, "out of reach", detail))
        pause_s = min(_PAUSE_MAX_S, _PAUSE_S * 2 ** (way.attempt - 1))
        way.again_s = now_s + (pause_s if way.attempt <= 2 * _TOLD_AT else AGAIN_S)

    def _itself(self) -> tuple[PeerId, ...]:
        """Ways to a peer itself, the best first."""
        return (DIRECT, STREAM) if self._streams else (DIRECT,)

    def _candidates(self, now_s: float, way: _Way) -> list[PeerId]:
        """The members that may relay to a peer, the first choice first."""
        found = []
        for peer in self._mates.living():
            if peer in (self._me, way.peer):
                continue
            if self._relays(peer):
                found.append(peer)
            else:
                self._greet(now_s, peer)
        found.sort()
        first = (self._me + way.peer + (self._me > way.peer)) % len(found) if found else 0
        return found[first:] + found[:first]

    def _greet(self, now_s: float, peer: PeerId) -> None:
        """Ask a member for a ticket: it gives none unasked."""
        way = self._way(peer)
        if way is not None and way.attempt == 0 and not way.sure:
            self._at(way, now_s)

    def _relays(self, peer: PeerId) -> bool:
        """Whether a member could pass something on, as far as is known here."""
        way = self._ways.get(peer)
        if way is None or not way.door.ticket or way.via >= 0 or not way.sure:
            return False
        return self._way(peer) is way

    def _hello(self, way: _Way, via: PeerId, troubled: bool) -> Out:
        self._count += 1
        ticket = way.doors[via].ticket if via < 0 else 0
        way.asked[self._count] = via, ticket
        while len(way.asked) > _ASKED_MAX:
            way.asked.popitem(last=False)
        return self._out(way, via, self._message(way, HELLO, _TROUBLED * troubled, self._count, ticket))

    def _out(self, way: _Way, via: PeerId, message: bytes) -> Out:
        if via < 0:
            return Out(message, way.doors[via].at)
        relay = self._ways[via]
        return Out(self._head(relay, way.peer) + message, relay.door.at)

    def _message(self, way: _Way, kind: int, flags: int, count: int, ticket: int) -> bytes:
        body = _HEAD.pack(kind, flags, self._me, way.peer, 0, count, ticket)
        return body + self._tag(way, body)

    @staticmethod
    def _tag(way: _Way, body: bytes) -> bytes:
        return hashlib.blake2b(body, key=way.secret, digest_size=_TAG_BYTES).digest()

    def _ticket(self, way: _Way, source: Address) -> int:
        """What only a process that receives at ``source`` learns, and that only this process can make."""
        what = way.public + f"{source[0]} {source[1]}".encode()
        return 1 | int.from_bytes(hashlib.blake2b(what, key=self._secret, digest_size=8).digest(), "little")

    # -- What comes

    def source(self, address: Address) -> Address:
        """The address on the card of the peer that sends from an address."""
        way = self._learned.get(address)
        if way is not None:
            return way.address
        there = without_stream(address) if dials(address) else address
        return there if there in self._by_address else address

    def knows(self, address: Address) -> bool:
        """Whether a peer's own hello has shown that it is at an address."""
        return address in self._learned

    def hear(self, now_s: float, data: bytes, source: Address, via: PeerId = DIRECT) -> list[Out]:
        """Take a hello, or the answer to one, of 64 bytes; what to send for it.

        via: the member that has passed it on.
        """
        kind, flags, sender, receiver, _, count, ticket = _HEAD.unpack_from(data)
        way = self._way(sender)
        if way is None or receiver != self._me:
            self.refused["stranger"] += 1
            return []
        if not compare_digest(self._tag(way, data[: _HEAD.size]), data[_HEAD.size :]):
            self.refused["forged"] += 1
            return []
        if kind == HERE:
            return self._answered(now_s, way, count, ticket, flags & _KNOWN != 0)
        if via >= 0 and not self._relays(via):
            self._greet(now_s, via)  # the answer can go through it alone
            return []
        door, given = None, 0
        if via == DIRECT:
            via = STREAM if is_stream(source) else DIRECT
            door, given = way.doors[via], self._ticket(way, source)
            if ticket == given and count > door.count:
                door.count = count
                if source != door.at:
                    self._learn(way, door, None if source == door.usual else source)
                    self.news.append(Turned(way.peer, way.address, "", ""))
                    way.better_s = now_s
                    self._at(way, now_s)
        if flags & _TROUBLED and count > way.trouble:
            way.trouble = count
            if way.attempt == 0:
                way.doubted = True
                self._at(way, now_s)
        known = door is None or source == door.at
        return [self._out_to(way, via, source, self._message(way, HERE, _KNOWN * known, count, given))]

    def _out_to(self, way: _Way, via: PeerId, source: Address, message: bytes) -> Out:
        """An answer, to where its question came from."""
        return Out(message, source) if via < 0 else self._out(way, via, message)

    def _answered(self, now_s: float, way: _Way, count: int, ticket: int, known: bool) -> list[Out]:
        asked = way.asked.pop(count, None)
        if asked is None:
            self.refused["replayed"] += 1
            return []
        via, shown = asked
        if via < 0:
            way.doors[via].ticket = ticket
            if not known:  # it cannot answer but to a hello: the ticket shows it where this end is
                return [self._hello(way, via, False)] if shown != ticket else []
        if way.attempt or not way.sure or via == DIRECT or (via == STREAM and way.via >= 0):
            if via != way.via:
                self._turn_to(way, via)
            way.attempt, way.sure = 0, True
            way.doubted = way.silent = way.told = False
            way.heard, way.wanted = self._heard(way.address), False
            way.better_s = now_s + AGAIN_S
            self._at(way, now_s + LOOK_S)
        return []

    def _turn_to(self, way: _Way, via: PeerId) -> None:
        way.via = via
        if via == DIRECT:
            told = "reached", "what is sent to it goes there directly again, over UDP"
        elif via == STREAM:
            told = "by TCP", "it did not answer over UDP: what is sent to it goes over a TCP connection"
        else:
            told = "relayed", f"what is sent to it goes through peer {via}"
        self.news.append(Turned(way.peer, way.address, *told))
        for other in self._ways.values():
            if other.via == way.peer:
                self.news.append(Turned(other.peer, other.address, "", ""))

    # -- What is passed on

    def for_me(self, head: bytes) -> bool:
        """Whether what came with ``head`` (``FORWARD_BYTES``) before it was passed on to this peer."""
        return bool(_FORWARD.unpack(head)[3] == self._me)

    def delivered(self, head: bytes, source: Address) -> tuple[Address, PeerId] | None:
        """Whose datagram was passed on to this peer, by the address on its card, and by which member.

        ``None``: it comes from no member, or is in the name of none.
        """
        way = self._way(_FORWARD.unpack(head)[2])
        relay = self._by_address.get(self.source(source)) or self._look(source)
        if way is None or relay is None:
            self.refused["stranger"] += 1
            return None
        return way.address, relay.peer

    def forward(self, now_s: float, head: bytes, source: Address, size: int) -> Address | None:
        """The address to which a datagram is passed on, with its head; ``None``: it is not.

        size: of the datagram, or of all of a train with one head, in bytes.
        """
        _, _, sender, receiver, _, ticket = _FORWARD.unpack(head)
        way, to = self._way(sender), self._way(receiver)
        if way is None or ticket != self._ticket(way, source):
            self.refused["stranger"] += 1
        elif to is None or to is way or to.via >= 0:
            self.refused["no way on"] += 1
        else:
            packets = max(1, size // DATAGRAM_BYTES)
            if way.passed.take(now_s, packets):
                self.forwarded += packets
                return to.door.at
            self.refused["too much to relay"] += packets
        return None
