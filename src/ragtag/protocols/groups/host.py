"""Matchmaking: peers with the same key find each other, without a master, by a deadline.

A key's *host* is a peer that every peer can compute (``keys.View.hosts``). A peer announces itself to the
host. The host answers at once by when it will close the group, and closes it when it is full or the wait is
over. A host that does not answer within a measured round trip is asked once more, then the next host is.

Each announcement of a round has a number (its key's block), which its answer carries. So round trips are
measured however late an answer is, and no answer passes for one to a later announcement (Karn and Partridge,
SIGCOMM 1987). Matchmaking takes at most ``HOSTS * TRIES`` deadlines of an answer, the host's wait, and one
deadline more.

Hosts learn how long to wait from how far apart announcements come, and rosters carry that to all members. For
a second member a host waits for the longest of the last, as without one there is no group and both would be
alone; then for their 90th percentile, counted from the first one on. One answer's deadline is added to it,
and no factor: a peer that waited for the dead in one group comes that much later to the next one, which waits
for all its members, and a factor would grow without bound.

A peer that comes when its group has met is sent on to the next round at once. There it asks the host to hold
the group open for as long as the others may still be busy. So a crew that has fallen apart in time comes
together again. A peer that was sent on is early, and teaches nothing about how long to wait: that is counted
from the first member that was in a group before, also where the group was closed with that one alone. A
member whose roster does not come asks its host, and waits on if the group is still open.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from ragtag.core.deadline import Deadline
from ragtag.core.seed import mix
from ragtag.core.types import PEERS_MAX, Arm, Effect, MessageKey, PeerId, Send, Timer
from ragtag.protocols.rounds.base import blob_message

ANNOUNCE, WAIT, ROSTER, BEHIND, MET = 2, 3, 4, 5, 6
"""Stages of a message key, beside those of averaging (``base``). BEHIND: the host is in this later round
already. MET: the group of this round has met."""
HOSTS, TRIES = 3, 2
"""How many hosts are asked, and how often each."""
BATCHES_MAX = 256
"""How many groups a host gathers at once, or remembers to answer again. Where there are more, it forgets one
in which the peer that is in most is alone: such groups may be made up."""

_ANNOUNCE = struct.Struct("<QHHI")  # key, index, most, microseconds to hold the group open
_WAIT = struct.Struct("<QI")  # key, microseconds until the group is closed
_ROSTER = struct.Struct("<QIH")  # key, spread of announcements in microseconds, members
_MEMBER = struct.Struct("<IH")  # peer, index
_US = 1e6
_US_MAX = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Roster:
    """A closed group: its members with their indices, in the order of the indices.

    spread_s: how far apart the first and the last member announced themselves.
    """

    key: int
    peers: tuple[PeerId, ...]
    indices: tuple[int, ...]
    spread_s: float = 0.0

    @property
    def tag(self) -> int:
        """10 bits that tell this group's messages from those of another with the same key and round."""
        value = self.key
        for peer, index in zip(self.peers, self.indices, strict=True):
            value = mix(value ^ (peer << 16 | index))
        return value & 0x3FF


class Announcement(NamedTuple):
    """What a peer tells a host.

    key: the group's.
    seat: the index that the peer wants in the group.
    most: how many members to expect.
    hold_s: how much longer to wait, as the peer was sent on from a round that others are still in.
    attempt: the announcement's number, which goes in its key; 0: no answer to it is timed.
    """

    key: int
    seat: int
    most: int
    hold_s: float = 0.0
    attempt: int = 0


def encode_announce(ask: Announcement) -> bytes:
    """An announcement's bytes."""
    return _ANNOUNCE.pack(ask.key, ask.seat, ask.most, min(_US_MAX, int(ask.hold_s * _US)))


def decode_announce(blob: bytes) -> Announcement | None:
    """An announcement; ``None``: it makes no sense."""
    if len(blob) < _ANNOUNCE.size:
        return None
    key, index, most, hold_us = _ANNOUNCE.unpack_from(blob)
    return (
        Announcement(key, index, most, hold_us / _US)
        if 1 <= most <= PEERS_MAX and index < PEERS_MAX
        else None
    )


def encode_wait(key: int, wait_s: float) -> bytes:
    """A host's answer. wait_s: below 0 where its own timer is overdue, as on a busy machine."""
    return _WAIT.pack(key, min(_US_MAX, max(0, int(wait_s * _US)) + 1))


def decode_wait(blob: bytes) -> tuple[int, float] | None:
    """The key, and in how many seconds the group is closed; ``None``: it makes no sense."""
    if len(blob) < _WAIT.size:
        return None
    key, wait_us = _WAIT.unpack_from(blob)
    return key, wait_us / _US


def encode_roster(roster: Roster) -> bytes:
    """A roster's bytes: at most 398, so it fits one datagram."""
    head = _ROSTER.pack(roster.key, min(_US_MAX, int(roster.spread_s * _US)), len(roster.peers))
    members = zip(roster.peers, roster.indices, strict=True)
    return head + b"".join(_MEMBER.pack(peer, index) for peer, index in members)


def decode_roster(blob: bytes) -> Roster | None:
    """A roster; ``None``: it makes no sense (peers or indices named twice, too many, cut short)."""
    if len(blob) < _ROSTER.size:
        return None
    key, spread_us, count = _ROSTER.unpack_from(blob)
    if not 1 <= count <= PEERS_MAX or len(blob) < _ROSTER.size + count * _MEMBER.size:
        return None
    members = [_MEMBER.unpack_from(blob, _ROSTER.size + i * _MEMBER.size) for i in range(count)]
    peers, indices = tuple(p for p, _ in members), tuple(i for _, i in members)
    if len(set(peers)) < count or len(set(indices)) < count:
        return None
    return Roster(key, peers, indices, spread_us / _US)


def seats(wanted: dict[PeerId, int], most: int) -> list[tuple[int, PeerId]]:
    """An index for each member: the one that it wants, or the lowest free one where two want the same."""
    taken: dict[int, PeerId] = {}
    homeless = [peer for peer in sorted(wanted) if taken.setdefault(wanted[peer], peer) != peer]
    free = iter([i for i in range(max(most, len(wanted))) if i not in taken])
    for peer in homeless:
        taken[next(free)] = peer
    return sorted(taken.items())


@dataclass(slots=True)
class _Batch:
    """A group that a host gathers.

    number: counts the host's groups.
    until_s: when it is closed.
    most: how many members to expect.
    wanted: the index that each member wants.
    first_s, last_s: when the first and the last member came; infinite: none has. Members that were sent on do
        not count: they are early, and do not tell how far apart members come.
    late: whether others have come since it met.
    roster: its members, once it is closed.
    """

    number: int
    key: int
    until_s: float
    most: int
    wanted: dict[PeerId, int] = field(default_factory=dict)
    first_s: float = math.inf
    last_s: float = -math.inf
    late: bool = False
    roster: Roster | None = None

    @property
    def spread_s(self) -> float:
        """How far apart its members came, as far as they count."""
        return max(0.0, self.last_s - self.first_s)


class Host:
    """One peer as a host: it gathers announcements and closes groups.

    wait: how far apart members come, which its peer learns, too.
    """

    wait: Deadline

    def __init__(self, me: PeerId, channel: int, answer: Deadline) -> None:
        self._me, self._channel, self._answers = me, channel, answer
        self._batches: dict[tuple[int, int], list[_Batch]] = {}
        self._count = 0

    def wait_s(self) -> float:
        """How long this peer, as a host, waits for a group to fill."""
        return self.wait.typical_s() + self._answers.budget_s()

    def alone_s(self) -> float:
        """How long it waits for a second member: without one there is no group, and both are alone."""
        return self.wait.longest_s() + self._answers.budget_s()

    def announce(
        self, now_s: float, peer: PeerId, round_: int, ask: Announcement
    ) -> tuple[list[Effect], Roster | None]:
        """A peer announces itself: what to do, and the roster if that closes this peer's own group."""
        key, index, most, hold_s, attempt = ask
        effects: list[Effect] = []
        batches = self._batches.setdefault((round_, key), [])
        for batch in batches:
            if peer in batch.wanted:  # its answer was lost
                return self._answer(now_s, peer, round_, batch, attempt), None
        over = [batch for batch in batches if batch.roster is not None]
        if over and not over[-1].late and hold_s == 0:
            over[-1].late = True  # several that come at once are one reason to wait longer, not several
            self._learn(now_s - over[-1].first_s)
        came = sum(len(batch.wanted) for batch in over) + 1
        if over and (came >= most or any(len(batch.wanted) > 1 for batch in over)):
            # too late, and no other is to come, or none that would wait: send it on to the next round
            if peer == self._me:
                return [], Roster(key, (peer,), (index,))
            run = blob_message(peer, MessageKey(self._channel, round_, MET, attempt), b"\0")
            return [Send(run, now_s + self.wait_s())], None
        if batches and batches[-1].roster is None:
            batch = batches[-1]
            until_s = batch.until_s
            if hold_s == 0 and batch.first_s == math.inf:
                until_s = now_s + self.wait_s()  # the members that the early one waits for begin to come
            elif len(batch.wanted) == 1:  # it is a group now
                until_s = min(until_s, max(now_s, batch.first_s + self.wait_s()))
            if until_s != batch.until_s:
                batch.until_s = until_s
                effects.append(Arm(self._timer(round_, key, batch.number), until_s))
        else:
            self._count += 1
            batch = _Batch(self._count, key, now_s + self.alone_s() + hold_s, most)
            batches.append(batch)
        batch.wanted[peer] = index
        batch.most = max(batch.most, most)  # the peer that knows of more is right, or waits a little
        if hold_s == 0:
            batch.first_s, batch.last_s = min(batch.first_s, now_s), now_s
        if len(batch.wanted) == 1:
            effects.append(Arm(self._timer(round_, key, batch.number), batch.until_s))
            self._forget(round_)
        if len(batch.wanted) >= min(batch.most, PEERS_MAX):
            closed, roster = self._close(now_s, round_, key, batch, {peer: attempt})
            return effects + closed, roster
        return effects + self._answer(now_s, peer, round_, batch, attempt), None

    def expire(self, now_s: float, timer: Timer) -> tuple[list[Effect], Roster | None]:
        """A host's wait is over: close the group as it is."""
        key, number = (int(part, 16) for part in timer.name.split("/")[1:])
        for batch in self._batches.get((timer.round, key), ()):
            if batch.number == number and batch.roster is None and now_s >= batch.until_s:
                return self._close(now_s, timer.round, key, batch, {})
        return [], None

    def _learn(self, apart_s: float) -> None:
        """A member came so long after the first. One teaches at most twice the wait of now."""
        if 0 < apart_s < math.inf:
            self.wait.completed(min(apart_s, 2 * self.wait_s()))

    def _timer(self, round_: int, key: int, number: int) -> Timer:
        return Timer(self._channel, round_, f"host/{key:x}/{number:x}")

    def _close(
        self, now_s: float, round_: int, key: int, batch: _Batch, answered: dict[PeerId, int]
    ) -> tuple[list[Effect], Roster | None]:
        members = seats(batch.wanted, batch.most)
        peers, indices = tuple(p for _, p in members), tuple(i for i, _ in members)
        batch.roster = Roster(key, peers, indices, batch.spread_s)
        blob = encode_roster(batch.roster)
        until_s = now_s + self.wait_s()
        effects: list[Effect] = []
        for p in peers:
            if p != self._me:
                wire = MessageKey(self._channel, round_, ROSTER, answered.get(p, 0))
                effects.append(Send(blob_message(p, wire, blob), until_s))
        return effects, batch.roster if self._me in batch.wanted else None

    def _answer(self, now_s: float, peer: PeerId, round_: int, batch: _Batch, attempt: int) -> list[Effect]:
        if peer == self._me:
            return []
        if batch.roster is not None:
            run = blob_message(
                peer, MessageKey(self._channel, round_, ROSTER, attempt), encode_roster(batch.roster)
            )
        else:
            blob = encode_wait(batch.key, batch.until_s - now_s)
            run = blob_message(peer, MessageKey(self._channel, round_, WAIT, attempt), blob)
        return [Send(run, now_s + self.wait_s())]

    def _forget(self, round_: int) -> None:
        """Bound the table: forget closed groups of rounds before the last, then others."""
        for entry in [entry for entry in self._batches if entry[0] < round_ - 1]:
            if all(batch.roster is not None for batch in self._batches[entry]):
                del self._batches[entry]
        while len(self._batches) > BATCHES_MAX:
            there = {at: {p for b in batches for p in b.wanted} for at, batches in self._batches.items()}
            times = Counter(peer for peers in there.values() for peer in peers)
            alone = {entry: times[min(peers)] for entry, peers in there.items() if len(peers) == 1}
            del self._batches[min(there, key=lambda entry: (-alone.get(entry, 0), entry[0]))]
