"""A notice board: each peer's latest small value per topic reaches all live peers.

A post goes to all peers at once. It goes again to a peer that has not acknowledged it, after the measured
timeout (RFC 6298, sections 2 and 3): a few times at that pace and in two copies, since a post is one datagram
and a peer may be waiting for it, then after pauses that back off (section 5.5).

There is one slot per topic and peer. A newer post takes an older one's place, acknowledged or not, and goes
out at most once in a round trip. So what is on its way is bounded, however often a peer posts.

An acknowledgement carries its sender's newest post on the topic (a datagram has one size, full or not). So a
peer whose post was acknowledged knows all that the other had posted by then, and later posts of the other
have higher numbers (Lamport, "Time, clocks, and the ordering of events in a distributed system", CACM 1978).
A peer that lies may number its posts as it likes. They are taken all the same: a peer that it alone has told
a high number is heard by the others, whose numbers are lower. But no post moves a clock by more than
``_STEP_MAX``, and numbers have 56 bits, so nobody uses them up for the others.

In a crew of more than 64 seats each district (``district``) has a board of its own.

Auxiliaries listen, on topics that are for them alone (``PAGES``) and on ``SHARES``. They post on ``RATES``
alone.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ragtag.core.channels import topic_of
from ragtag.core.types import (
    Arm,
    Arrived,
    Bytes,
    Effect,
    Event,
    Expired,
    Joined,
    Left,
    Measured,
    MessageKey,
    PeerId,
    Post,
    Posted,
    Run,
    Send,
    Timer,
    Visits,
)
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.crew.district import district_of

BOARD = 253
"""The channel of posts."""
PAGES = tuple(topic_of(f"channels/{page}") for page in range(8))
"""The topics for auxiliaries alone: which channels there are (``serving``)."""
SHARES, RATES = topic_of("shares"), topic_of("rates")
"""Who owns which share (``channel.shares``), which is told to auxiliaries, too; and the rates that each peer
has measured of its own line, which they tell, too."""
TOPICS_MAX = 128
"""On so many topics a board keeps posts of one peer. Its posts on further ones are not taken."""
_TOPICS = 1 << 32
_HEAD = struct.Struct("<HHQIQ")
BLOB_MAX = CHUNK_BYTES - _HEAD.size
POST, TAKEN = 0, 1
EVEN = 4
"""So many sends go at the pace of the timeout, before pauses back off. Repeated ones go in two copies."""
SILENT_AFTER, SILENT_AFTER_MAX = 11, 23
"""After so many unanswered sends, the later ones eight timeouts apart, a peer counts as silent."""
_SILENT_BY_CHANCE = 1e-4
"""On a path that loses much the number is such that chance alone loses them all no more often than this."""
_PAUSE_FIRST_S, _PAUSE_MAX_S = 0.1, 8.0
_GRANULARITY_S = 1e-3
_NUMBER_MAX = (1 << 56) - 1
_STEP_MAX = 1 << 20
"""A post moves the clock so far at most. A peer that missed more posts is in time again some posts later."""


@dataclass(frozen=True, slots=True)
class Notices:
    """What one peer's board knows of a topic at one moment.

    peers: all that ever had a place, except this peer.
    posts: every peer's newest post, this peer's included.
    reached: the number of this peer's newest post that each peer has acknowledged.
    silent: peers that have left, or leave post after post unanswered.
    rto_s: how long an answer may take (RFC 6298), at the middle one of the peers that are not silent.
    """

    peers: frozenset[PeerId]
    posts: Mapping[PeerId, Posted]
    reached: Mapping[PeerId, int]
    silent: frozenset[PeerId]
    rto_s: float = _PAUSE_FIRST_S

    def blobs(self) -> dict[PeerId, bytes]:
        """Every peer's newest value, this peer's included."""
        return {peer: posted.blob for peer, posted in self.posts.items()}


@dataclass(slots=True)
class _Slot:
    """One topic on its way to one peer.

    sent: the number of the newest post sent; 0: none.
    sent_s: when it was sent last.
    copies: how often it was sent.
    tries: sends since anything was heard from the peer.
    acked: the number of the newest post that the peer has acknowledged.
    """

    sent: int = 0
    sent_s: float = 0.0
    copies: int = 0
    tries: int = 0
    acked: int = 0


@dataclass(slots=True)
class _Path:
    """The path to one peer.

    gone: the peer has left.
    listens: it is an auxiliary. It alone is told ``PAGES``; of the rest it is told ``SHARES``, and posts
        ``RATES``.
    srtt_s, var_s: the smoothed round trip and its variation; 0: not measured.
    told_s: a timeout that the driver has measured.
    lost: the share of sends without an answer, smoothed.
    armed_s: when the timer is due.
    """

    gone: bool = False
    listens: bool = False
    srtt_s: float = 0.0
    var_s: float = 0.0
    told_s: float = 0.0
    lost: float = 0.1
    armed_s: float = float("inf")
    slots: dict[int, _Slot] = field(default_factory=dict)

    def is_told(self, topic: int) -> bool:
        """Whether posts on a topic go to the peer."""
        return topic in PAGES or topic == SHARES if self.listens else topic not in PAGES

    @property
    def silent(self) -> bool:
        """Whether the peer has left, or leaves post after post unanswered. Any thread may ask."""
        return self.gone or any(slot.tries > self.tries_max for slot in list(self.slots.values()))

    @property
    def tries_max(self) -> int:
        """After how many unanswered sends the peer counts as silent: more on a path that loses more."""
        tries = math.ceil(math.log(_SILENT_BY_CHANCE) / math.log(min(self.lost, 0.9)))
        return min(SILENT_AFTER_MAX, max(SILENT_AFTER, tries))

    def heard(self) -> None:
        """Something came from the peer: what it left unanswered was lost on one of the two ways."""
        for slot in self.slots.values():
            for unanswered in [1.0] * (slot.tries - 1) + [0.0] * (slot.tries > 0):
                self.lost += (unanswered - self.lost) / 32
            slot.tries = 0

    def measure(self, took_s: float) -> None:
        """Take a round trip (RFC 6298, 2.2, 2.3). One teaches at most twice the timeout: a peer may sleep."""
        took_s = min(took_s, 2.0 * self.rto_s) if self.rto_s else took_s
        if self.srtt_s == 0.0:
            self.srtt_s, self.var_s = took_s, took_s / 2
        else:
            self.var_s += (abs(self.srtt_s - took_s) - self.var_s) / 4
            self.srtt_s += (took_s - self.srtt_s) / 8

    @property
    def rto_s(self) -> float:
        """The retransmission timeout; 0: not measured."""
        return self.srtt_s + max(_GRANULARITY_S, 4 * self.var_s) if self.srtt_s else self.told_s


class Board:
    """The machine of peer ``me`` of ``n``. ``Posted`` comes once for each post that is new to it.

    Peers of other districts have no place on it.
    """

    def __init__(self, me: PeerId, n: int) -> None:
        self._me = me
        self._district = district_of(me)
        self._paths = {p: _Path() for p in range(n) if p != me and district_of(p) == self._district}
        self._posts: dict[int, dict[PeerId, Posted]] = {}
        self._clock: dict[int, int] = {}

    def notices(self, topic: int) -> Notices:
        """What is known of a topic now. Any thread may ask."""
        paths = {p: path for p, path in dict(self._paths).items() if not path.listens}
        reached = {p: slot.acked for p, path in paths.items() if (slot := path.slots.get(topic)) is not None}
        silent = frozenset(p for p, path in paths.items() if path.silent)
        rtos_s = sorted(path.rto_s for p, path in paths.items() if path.rto_s > 0 and p not in silent)
        rto_s = rtos_s[len(rtos_s) // 2] if rtos_s else _PAUSE_FIRST_S
        # posts last: an acknowledgement's post is stored before the acknowledgement is counted
        return Notices(frozenset(paths), self.told(topic), reached, silent, rto_s)

    def told(self, topic: int) -> dict[PeerId, Posted]:
        """The newest post of each peer on a topic. Any thread may ask."""
        return dict(self._posts.get(topic, {}))

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event and say what to do."""
        if isinstance(event, Post):
            return self._post(now_s, event)
        if isinstance(event, Arrived):
            return [effect for run in event.runs for effect in self._take(now_s, run)]
        if isinstance(event, Expired):
            path = self._paths.get(event.timer.round)
            if path is None or now_s < path.armed_s:
                return []
            path.armed_s = float("inf")
            return self._flush(now_s, event.timer.round)
        if isinstance(event, Measured):
            if event.peer in self._paths:
                self._paths[event.peer].told_s = event.rtt_s
        elif isinstance(event, Left):
            if event.peer in self._paths:
                self._paths[event.peer].gone = True
        elif isinstance(event, Visits) and not event.role.gives:
            return self._listened_to(now_s, event.peer)
        elif (
            isinstance(event, Joined) and event.peer != self._me and district_of(event.peer) == self._district
        ):
            self._paths.setdefault(event.peer, _Path())  # the crew may have grown
            return self._joined(now_s, event.peer, event.same)
        return []

    def _listened_to(self, now_s: float, peer: PeerId) -> list[Effect]:
        """An auxiliary is there, or on its way in."""
        path = self._paths.get(peer)
        if path is None or path.gone or not path.listens:
            self._paths[peer] = _Path(listens=True)
            for posts in list(self._posts.values()):
                posts.pop(peer, None)
        return self._flush(now_s, peer)

    def _post(self, now_s: float, post: Post) -> list[Effect]:
        if not 0 <= post.topic < _TOPICS:
            raise ValueError(f"topic {post.topic}: topics are numbered from 0 to {_TOPICS - 1}")
        if not self._room(self._me, post.topic):
            raise ValueError(f"topic {post.topic}: this peer posts on {TOPICS_MAX} topics already, the most")
        if len(post.blob) > BLOB_MAX:
            raise ValueError(f"{len(post.blob)} bytes to post; at most {BLOB_MAX} can be")
        number = self._clock.get(post.topic, 0) + 1
        if number > _NUMBER_MAX:
            raise RuntimeError(f"topic {post.topic} has had {number} posts, as many as can be numbered")
        posted = Posted(self._me, post.topic, number, bytes(post.blob))
        effects = self._keep(posted)
        for peer in self._paths:
            effects += self._flush(now_s, peer)
        return effects

    def _room(self, peer: PeerId, topic: int) -> bool:
        """Whether there is room for a peer's post on a topic. Each has its own: none can use up another's."""
        there = sum(peer in posts for posts in self._posts.values())
        return there < TOPICS_MAX or peer in self._posts.get(topic, {})

    def _keep(self, posted: Posted) -> list[Effect]:
        """Store a post if it is its peer's newest."""
        posts = self._posts.setdefault(posted.topic, {})
        clock = self._clock.get(posted.topic, 0)
        self._clock[posted.topic] = max(clock, min(posted.number, clock + _STEP_MAX))
        known = posts.get(posted.peer)
        if known is not None and known.number >= posted.number:
            return []
        posts[posted.peer] = posted
        return [posted]

    def _joined(self, now_s: float, peer: PeerId, same: bool) -> list[Effect]:
        """A peer is there. As a new process it has heard nothing, and its numbers start anew."""
        path = self._paths[peer]
        path.gone, path.listens, path.slots = False, False, {}
        if not same:
            for posts in list(self._posts.values()):
                posts.pop(peer, None)
        return self._flush(now_s, peer)

    # -- Out

    def _flush(self, now_s: float, peer: PeerId) -> list[Effect]:
        """Send a peer what is due, and set a timer for what will be."""
        path = self._paths[peer]
        if path.gone:
            return []
        effects: list[Effect] = []
        due_s = float("inf")
        for topic, posts in self._posts.items():
            newest = posts.get(self._me)
            if newest is None or not path.is_told(topic):
                continue
            slot = path.slots.setdefault(topic, _Slot())
            if slot.acked >= newest.number:
                continue
            if self._due_s(path, slot, newest.number) <= now_s:
                again = slot.sent == newest.number
                slot.copies = slot.copies + 1 if again else 1
                slot.sent, slot.sent_s, slot.tries = newest.number, now_s, slot.tries + 1
                pause_s = self._due_s(path, slot, newest.number) - now_s
                send = Send(_run(peer, POST, newest, newest.number, 0), now_s + pause_s)
                effects += [send, send] if again and slot.tries <= EVEN else [send]
            due_s = min(due_s, self._due_s(path, slot, newest.number))
        if due_s < path.armed_s:
            path.armed_s = due_s
            effects.append(Arm(Timer(BOARD, peer, "again"), due_s))
        return effects

    def _due_s(self, path: _Path, slot: _Slot, number: int) -> float:
        """When a slot may be sent again: a newer post after a round trip, the same one after a timeout."""
        if slot.acked >= slot.sent:
            return slot.sent_s  # nothing is on its way
        rto_s = path.rto_s or max((other.rto_s for other in self._paths.values()), default=0.0)
        rto_s = rto_s or _PAUSE_FIRST_S
        if number > slot.sent and slot.tries < 2:
            return slot.sent_s + (path.srtt_s or rto_s)
        times = min(1 << max(0, slot.tries - EVEN), 8) if slot.tries <= path.tries_max else 64
        return slot.sent_s + min(_PAUSE_MAX_S, times * rto_s)

    # -- In

    def _take(self, now_s: float, run: Run) -> list[Effect]:
        path, read = self._paths.get(run.peer), _read(run)
        if path is None or path.gone or read is None:
            return []
        check, other, topic, number, told = read
        if not 1 <= number <= _NUMBER_MAX or other > _NUMBER_MAX:
            return []
        if path.listens and topic != RATES and (run.key.stage != TAKEN or other):
            return []
        tells = number if run.key.stage == POST else other
        if tells and not self._room(run.peer, topic):
            return []
        path.heard()
        if run.key.stage == POST and check == _check(told):
            effects = self._keep(Posted(run.peer, topic, number, told))
            newest = self._posts[topic].get(self._me) or Posted(self._me, topic, 0, b"")
            answer = _run(run.peer, TAKEN, newest, number, check)
            return [
                *effects,
                Send(answer, now_s + (path.rto_s or _PAUSE_FIRST_S)),
                *self._flush(now_s, run.peer),
            ]
        if run.key.stage != TAKEN:
            return []
        effects = self._keep(Posted(run.peer, topic, other, told)) if other else []
        self._acknowledge(now_s, path, topic, number, check)
        return effects + self._flush(now_s, run.peer)

    def _acknowledge(self, now_s: float, path: _Path, topic: int, number: int, check: int) -> None:
        newest = self._posts.get(topic, {}).get(self._me)
        slot = path.slots.get(topic)
        if slot is None or newest is None or not slot.acked < number <= slot.sent:
            return  # it answers an earlier process of this peer, or is known
        if number == newest.number and check != _check(newest.blob):
            return
        if number == slot.sent and slot.copies == 1:  # Karn's rule: RFC 6298, section 3
            path.measure(max(1e-6, now_s - slot.sent_s))
        slot.acked = number


def _check(blob: bytes) -> int:
    """16 bits of a post, which its acknowledgement repeats: an earlier process posted something else."""
    return int.from_bytes(hashlib.blake2b(blob, digest_size=2).digest(), "little")


def _run(peer: PeerId, stage: int, post: Posted, number: int, check: int) -> Run:
    """A message of one chunk. An acknowledgement has the number of the post it answers, and a post."""
    check, other = (_check(post.blob), 0) if stage == POST else (check, post.number)
    data = _HEAD.pack(len(post.blob), check, other, post.topic, number) + post.blob
    row: Bytes = np.frombuffer(data + bytes(CHUNK_BYTES - len(data)), np.uint8).reshape(1, CHUNK_BYTES)
    key = MessageKey(BOARD, number & 0xFFFFFFFF, stage, post.topic & 0xFFFF)
    return Run(peer, key, 0, 1, row, np.zeros(1, np.float32), np.zeros(1, np.uint64))


def _read(run: Run) -> tuple[int, int, int, int, bytes] | None:
    """A message's check, the number of the post it carries with an acknowledgement, topic, number and post;
    ``None``: it cannot be read.
    """
    if run.total != 1 or run.first != 0 or run.payload.shape != (1, CHUNK_BYTES):
        return None
    if run.mask is not None and not run.mask.all():
        return None
    data = run.payload.tobytes()
    size, check, other, topic, number = _HEAD.unpack_from(data)
    return (check, other, topic, number, data[_HEAD.size : _HEAD.size + size]) if size <= BLOB_MAX else None
