"""Values of named tensors on their way from the peer that computed them to all others.

| stage | from, to | round | block | what |
|---|---|---|---|---|
| TELL | peer, all | revision | page | the versions that a peer has, and its run's base |
| TOLD | back | revision | page | the same of the other: an answer, which says as much |
| ASK | peer, holder | the question's number | - | up to ``WINDOW`` rows that the peer lacks |
| ROWS | back | the question's number | the tensor | those rows; version in ``heard``, age (s) in ``weight`` |
| GONE | back | the question's number | page | as TOLD: a version that was asked for is not held any more |
| PUSH | maker, peer | revision | the tensor | all rows, as ROWS, to a peer that said it takes them so |

A receiver asks; no peer sends values that nobody asked for. So loss, duplication and reordering need no
rule: rows that do not come are asked for again, of the same peer or of another that has them, and a row that
comes twice is taken once. At most one window is on its way between two peers, so other messages between them
wait for ``WINDOW`` rows at most. A newcomer tells that it has nothing, hears what there is, and asks for it.

Rows of one version are collected apart. Once all are there, and their digest is the version's, they replace
the old value. So no peer ever has a mixture of two versions, and a peer that lacks the newest goes on with
its last.

Versions are in one order on all peers (``core.types.Version``); a newer one wins. Their clock is Lamport's
(CACM 1978): above that of each version known to its maker, and not below the trainer's, which counts rounds.
The difference between the trainer's clock and a version's is the value's age in rounds. A training's rounds
go on where an earlier run of it ended. Peers tell each other with which clock the run began, its *base*; the
highest holds.

**Pushed** channels are for values that a peer stands still for. What it takes it marks in what it tells,
which is a question once for all: a maker sends rows of a new version at once, and tells of it behind them,
which saves two latencies. Of what is lost the receiver knows then, and asks. Nobody else is asked for rows
that their maker is about to send: not before it has told, or was silent for as long as an answer may take.

A holder keeps the version before the newest as long as it is asked for. So a receiver that is slower than the
publisher still gets one version whole.

Bytes, where nothing is lost: a peer that publishes sends and gets one TELL and one TOLD per other peer and
page (``PAGE`` tensors) on which anything is new. A peer sends ``ceil(r / WINDOW)`` ASKs for the r rows that
it takes from another at once (more where they belong to over ``ASKS_MAX`` tensors), and each row travels
once. A pushed value saves its ASKs.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ragtag.core.deadline import Deadline
from ragtag.core.types import (
    PEERS_MAX,
    Arm,
    Arrived,
    Bools,
    Bytes,
    Effect,
    Event,
    Expired,
    Joined,
    Left,
    MessageKey,
    Noted,
    PeerId,
    Publish,
    Run,
    Send,
    Timer,
    Version,
    Visits,
)
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.channel.averager import Averager, Opening
from ragtag.protocols.node import Node
from ragtag.protocols.rounds.base import blob_message

TELL, TOLD, ASK, ROWS, GONE, PUSH = range(6)
WINDOW = 64
"""Rows on their way between two peers at once: 68 KiB, which a line of 100 Mbit/s carries in 6 ms."""
TENSORS_MAX = 1024
AHEAD_MAX = 1 << 24
"""A clock further ahead of all known ones is not believed: it would use up the numbers."""
ELSEWHERE = 2
"""After so many unanswered questions in a row to one holder, the others are asked what they have."""
_NUMBER_MAX = (1 << 32) - 1
_GRANULARITY_S = 1e-3
_DOUBLINGS_MAX = 10
_PAGE = struct.Struct("<IH2x")
_VERSION = struct.Struct("<IH?xI")
_ASKED = struct.Struct("<fH2x")
_ROWS = struct.Struct("<HxxIIIQ")
PAGE = (CHUNK_BYTES - _PAGE.size) // _VERSION.size
"""How many tensors' versions one datagram tells."""
ASKS_MAX = (CHUNK_BYTES - _ASKED.size) // _ROWS.size
"""How many tensors one question can be about."""
NONE = Version(0, 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A whole value.

    rows: uint8 ``[k, CHUNK_BYTES]``, never changed.
    made_s: when it was published, on this peer's clock. Time on the way is not counted.
    """

    version: Version
    rows: Bytes
    made_s: float


@dataclass(slots=True, eq=False)
class _Coming:
    """A version of which some rows have come. got: bool ``[k]``."""

    version: Version
    rows: Bytes
    got: Bools
    left: int


@dataclass(slots=True)
class _Question:
    """What a peer was asked for and has not sent yet.

    open: of each tensor, the version and which of its rows, bool ``[k]``.
    came: whether anything of the answer has come.
    """

    number: int
    sent_s: float
    due_s: float
    open: dict[int, tuple[Version, Bools]]
    came: bool = False


@dataclass(slots=True)
class _Remote:
    """What is known of one other peer.

    holds: the versions that it says it has.
    takes: tensors of which it wants new versions at once, unasked.
    behind: pages of which it has not acknowledged the newest revision.
    tries: how often it was told of them.
    tell_s: when it is told of them again.
    question: what it is asked for now.
    fails: questions in a row that it has left unanswered.
    rests_until_s: it is asked nothing before.
    asked: the number of the newest question to it.
    served: the number of the last question of its own that was answered.
    armed_s: when a timer looks after its question.
    given_up: the last question that it did not answer in time.
    """

    answers: Deadline
    holds: dict[int, Version] = field(default_factory=dict)
    takes: set[int] = field(default_factory=set)
    behind: set[int] = field(default_factory=set)
    tries: int = 0
    tell_s: float = math.inf
    question: _Question | None = None
    fails: int = 0
    rests_until_s: float = -math.inf
    asked: int = 0
    served: int = -1
    armed_s: float = math.inf
    given_up: _Question | None = None


def digest_of(clock: int, maker: PeerId, rows: Bytes) -> int:
    """32 bits of a value, of the peer that published it and of the version's clock."""
    return zlib.crc32(np.ascontiguousarray(rows).data, zlib.crc32(struct.pack("<IH", clock, maker)))


class Publisher:
    """One peer's part in a channel of named tensors.

    sizes: how many rows each tensor has.
    held: the newest whole value of each tensor; ``None``: there was none. Any thread may read it.
    latest: the highest clock of any version that was heard of.
    base: the clock with which the run began.
    heard: whether others have told of values.
    """

    done = highest = -1
    active = None

    def __init__(self, opening: Opening, sizes: tuple[int, ...], pushed: bool = False) -> None:
        self._pushed = pushed
        self._number, self._crew, self._sizes = opening.number, opening.crew, sizes
        self._rtt_s, self._probe_s = opening.channel.rtt_s, opening.channel.probe_s
        self.held: list[Held | None] = [None] * len(sizes)
        self.latest = self.base = 0
        self.heard = False
        self._older: dict[int, Held] = {}
        self._older_asked: set[int] = set()
        self._coming: dict[int, _Coming] = {}
        self._lacking: dict[int, Version] = {}
        self._wanted = frozenset(range(len(sizes)))
        self._due: dict[int, float] = {}  # until when rows are to come that their maker pushes
        self._revision = 0
        others = opening.crew.presence.others - opening.crew.gone
        self._remotes = {peer: self._new_remote() for peer in sorted(others)}

    def _new_remote(self) -> _Remote:
        window = self._probe_s * min(1.0, WINDOW / sum(self._sizes))
        return _Remote(Deadline(max(_GRANULARITY_S, self._rtt_s + window), headroom=2.0, backoff_max=64.0))

    # -- What a node asks of it

    def probed(self, probe_s: float, now_s: float) -> None:
        """One exchange of all values takes this long: how long a first question waits follows from it."""
        self._probe_s = probe_s
        for remote in self._remotes.values():
            remote.answers = self._new_remote().answers

    def resume(self, round_: int) -> None:
        """Nothing: there are no rounds."""

    def newer(self) -> bool:
        """Yes: nothing is waited for."""
        return True

    def shows(self, now_s: float, peer: PeerId, number: int) -> bool:
        """No: a peer's driver answers here though its trainer may hang."""
        return False

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event and say what to do."""
        if isinstance(event, Arrived):
            return [effect for run in event.runs for effect in self._take(now_s, run)]
        if isinstance(event, Publish):
            return self._publish(now_s, event)
        if isinstance(event, Expired):
            return self._expired(now_s, event.timer)
        if isinstance(event, Joined | Visits):  # an auxiliary has no use for tensors
            return self._joined(now_s, event.peer) if event.role.gives else []
        if isinstance(event, Left):
            return self._left(now_s, event.peer)
        raise ValueError(f"channel {self._number} publishes named tensors; nothing is averaged on it")

    @property
    def _pages(self) -> range:
        return range(-(-len(self._sizes) // PAGE))

    def version(self, tensor: int) -> Version:
        """The version of a tensor's newest whole value."""
        held = self.held[tensor]
        return NONE if held is None else held.version

    # -- Publishing

    def _publish(self, now_s: float, ask: Publish) -> list[Effect]:
        for tensor, rows in ask.rows.items():
            self._require(tensor, rows)
        self.base = max(self.base, ask.base)
        if ask.wanted is not None:
            self._want(ask.wanted)
        for tensor, rows in sorted(ask.rows.items()):
            version = ask.versions.get(tensor) or self._next(tensor, rows, ask.clock)
            if version > self.version(tensor):
                self._replace(tensor, Held(version, rows, now_s))
        pages = {tensor // PAGE for tensor in ask.rows}
        if not pages or ask.wanted is not None:
            pages = set(self._pages)
        self._revision = (self._revision + 1) & _NUMBER_MAX
        pushes = self._push_all(now_s, ask.rows)  # before it tells of them
        return pushes + self._announce(now_s, pages, self._remotes) + self._ask_all(now_s)

    def _push_all(self, now_s: float, tensors: Iterable[int]) -> list[Effect]:
        me = self._crew.me
        made = [tensor for tensor in tensors if self.version(tensor).maker == me]
        takers = [peer for peer, remote in self._remotes.items() if remote.takes.intersection(made)]
        effects: list[Effect] = []
        for peer in sorted(takers, key=lambda peer: (peer - me) % PEERS_MAX):  # no two begin with one
            effects += self._push(now_s, peer, sorted(self._remotes[peer].takes.intersection(made)))
        return effects

    def _push(self, now_s: float, peer: PeerId, tensors: list[int]) -> list[Effect]:
        """Send whole values; what has not left in the time of as many answers is to be asked for."""
        windows = len(self._remotes) * -(-sum(self._sizes[tensor] for tensor in tensors) // WINDOW)
        until_s = now_s + self._pause_s(peer, self._remotes[peer]) * windows
        effects: list[Effect] = []
        for tensor in tensors:
            held = self.held[tensor]
            assert held is not None
            key = MessageKey(self._number, self._revision, PUSH, tensor)
            effects.append(Send(_rows_of(peer, key, held, None, now_s), until_s))
        return effects

    def _require(self, tensor: int, rows: Bytes) -> None:
        if not 0 <= tensor < len(self._sizes):
            raise ValueError(f"tensor {tensor} of {len(self._sizes)}")
        want = (self._sizes[tensor], CHUNK_BYTES)
        if rows.shape != want or rows.dtype != np.uint8:
            raise ValueError(f"rows of {rows.dtype} {rows.shape} for tensor {tensor}; give uint8 {want}")

    def _next(self, tensor: int, rows: Bytes, clock: int) -> Version:
        known = max(self.version(tensor), self._lacking.get(tensor, NONE)).clock
        clock = max(clock, known + 1)
        if clock > _NUMBER_MAX:
            raise RuntimeError(f"channel {self._number} has had {clock} versions, as many as can be numbered")
        return Version(clock, self._crew.me, digest_of(clock, self._crew.me, rows))

    def _replace(self, tensor: int, new: Held) -> None:
        """Take a newer value. The one before is kept, unless a still older one is being asked for."""
        before = self.held[tensor]
        self._due.pop(tensor, None)
        if tensor in self._older_asked:
            self._older_asked.discard(tensor)
        elif before is not None:
            self._older[tensor] = before
        self.held[tensor] = new
        self.latest = max(self.latest, new.version.clock)
        if self._lacking.get(tensor, NONE) <= new.version:
            self._lacking.pop(tensor, None)
        coming = self._coming.get(tensor)
        if coming is not None and coming.version <= new.version:
            del self._coming[tensor]

    def _want(self, wanted: frozenset[int]) -> None:
        self._wanted = wanted
        for tensor in range(len(self._sizes)):
            if tensor not in wanted:
                self._lacking.pop(tensor, None)
                self._coming.pop(tensor, None)
        for remote in self._remotes.values():
            for tensor, version in remote.holds.items():
                self._hear_of(tensor, version)

    # -- Telling which versions there are

    def _announce(self, now_s: float, pages: Iterable[int], peers: Iterable[PeerId]) -> list[Effect]:
        """Tell these peers what this one has on these pages, until they answer."""
        effects: list[Effect] = []
        for peer in peers:
            remote = self._remotes[peer]
            remote.behind |= set(pages)
            remote.tries = 0
            effects += self._tell(now_s, peer, remote)
        return effects

    def _tell(self, now_s: float, peer: PeerId, remote: _Remote) -> list[Effect]:
        pause_s = self._pause_s(peer, remote) * 2 ** min(remote.tries, _DOUBLINGS_MAX)
        remote.tries += 1
        remote.tell_s = now_s + pause_s
        sends: list[Effect] = [
            Send(self._page(peer, TELL, self._revision, page), remote.tell_s)
            for page in sorted(remote.behind)
        ]
        return [*sends, Arm(Timer(self._number, peer, "tell"), remote.tell_s)]

    def _pause_s(self, peer: PeerId, remote: _Remote) -> float:
        """How long an answer may take."""
        rtt_s = self._crew.rtt_s.get(peer, self._rtt_s)
        return max(_GRANULARITY_S, rtt_s, remote.answers.budget_s())

    def _page(self, peer: PeerId, stage: int, number: int, page: int) -> Run:
        tensors = range(page * PAGE, min((page + 1) * PAGE, len(self._sizes)))
        blob = _PAGE.pack(self.base, page)
        for tensor in tensors:
            clock, maker, digest = self.version(tensor)
            blob += _VERSION.pack(clock, maker, self._pushed and tensor in self._wanted, digest)
        return _small(peer, MessageKey(self._number, number, stage, page), blob)

    def _learn(self, now_s: float, peer: PeerId, remote: _Remote, blob: bytes) -> int | None:
        """Take what a peer says it has. Returns the page; ``None``: the message makes no sense."""
        base, page = _PAGE.unpack_from(blob)
        if page not in self._pages or base > self._clock_most:
            return None
        most = self._clock_most
        self.base = max(self.base, base)
        first = page * PAGE
        for tensor in range(first, min(first + PAGE, len(self._sizes))):
            at = _PAGE.size + (tensor - first) * _VERSION.size
            clock, maker, takes, digest = _VERSION.unpack_from(blob, at)
            (remote.takes.add if takes else remote.takes.discard)(tensor)
            version = Version(clock, maker, digest)
            if version.clock > most or version.maker >= PEERS_MAX:
                continue
            self.latest, self.heard = max(self.latest, version.clock), self.heard or version > NONE
            remote.holds[tensor] = version
            if self._hear_of(tensor, version) and self._pushed:
                self._expect(now_s, tensor, version)
            if version.maker == peer:
                self._due.pop(tensor, None)  # it tells behind the rows
        return int(page)

    @property
    def _clock_most(self) -> int:
        return max(self.latest, self.base) + AHEAD_MAX

    def _expect(self, now_s: float, tensor: int, version: Version) -> None:
        """Its maker is about to send the rows of a new version, or is sending them."""
        remote = self._remotes.get(version.maker)
        if remote is not None:
            self._due[tensor] = now_s + self._pause_s(version.maker, remote)

    def _hear_of(self, tensor: int, version: Version) -> bool:
        """Whether it is one that this peer wants and lacks, and had not heard of."""
        known = max(self.version(tensor), self._lacking.get(tensor, NONE))
        if tensor not in self._wanted or version <= known:
            return False
        self._lacking[tensor] = version
        return True

    def _gone(self, remote: _Remote, number: int, page: int) -> None:
        """A holder no longer has the versions that it was asked for: forget the rows of those."""
        question = remote.question
        if question is None or question.number != number:
            return
        for tensor, (version, _) in list(question.open.items()):
            if tensor // PAGE == page and remote.holds.get(tensor, NONE) != version:
                del question.open[tensor]
                self._coming.pop(tensor, None)

    # -- Asking for what this peer lacks

    def _ask_all(self, now_s: float) -> list[Effect]:
        """Ask each holder that has no question open, for a window at most."""
        asks: dict[PeerId, list[int]] = {}
        nowhere: set[int] = set()
        effects: list[Effect] = []
        for tensor in sorted(self._lacking):
            due_s, maker = self._due.get(tensor, now_s), self._lacking[tensor].maker
            if due_s > now_s and maker in self._remotes:
                effects += self._wake(maker, self._remotes[maker], due_s)
                continue
            source = self._source(now_s, tensor)
            if source is None:
                nowhere |= {tensor} if not self._holders(tensor) else set()
            elif self._remotes[source].question is None:
                asks.setdefault(source, []).append(tensor)
        effects += self._look_around(now_s, nowhere) if nowhere else []
        for source, tensors in asks.items():
            effects += self._ask(now_s, source, tensors)
        return effects

    def _holders(self, tensor: int) -> list[PeerId]:
        coming = self._coming.get(tensor)
        version = self._lacking[tensor] if coming is None else coming.version
        return [peer for peer, remote in self._remotes.items() if remote.holds.get(tensor, NONE) >= version]

    def _source(self, now_s: float, tensor: int) -> PeerId | None:
        """The peer to ask for a tensor: the one that failed least, of equals the one that computed it, and a
        client, whose line has better to do, only where nobody else has it.
        """
        maker, clients = self._lacking[tensor].maker, self._crew.clients
        able = [peer for peer in self._holders(tensor) if self._remotes[peer].rests_until_s <= now_s]
        return min(
            able,
            key=lambda peer: (
                self._remotes[peer].fails,
                peer != maker,
                peer in clients,
                (peer - self._crew.me) % PEERS_MAX,
            ),
            default=None,
        )

    def _look_around(self, now_s: float, tensors: Iterable[int]) -> list[Effect]:
        """No peer has these versions any more: forget them, and ask all what they have."""
        pages = set()
        for tensor in tensors:
            self._lacking.pop(tensor, None)
            self._coming.pop(tensor, None)
            pages.add(tensor // PAGE)
            for remote in self._remotes.values():
                self._hear_of(tensor, remote.holds.get(tensor, NONE))
        return self._announce(now_s, pages, self._remotes)

    def _ask(self, now_s: float, peer: PeerId, tensors: list[int]) -> list[Effect]:
        remote = self._remotes[peer]
        remote.asked = (remote.asked + 1) & _NUMBER_MAX
        budget_s = self._pause_s(peer, remote)
        question = remote.question = _Question(remote.asked, now_s, now_s + budget_s, {})
        room, parts = WINDOW, []
        for tensor in tensors[:ASKS_MAX]:
            coming = self._coming.get(tensor)
            if coming is None:
                coming = self._coming[tensor] = self._collect(tensor, self._lacking[tensor])
            first = int(np.argmin(coming.got))
            wants = ~coming.got[first : first + WINDOW]
            wants &= np.cumsum(wants) <= room
            room -= int(np.count_nonzero(wants))
            asked = np.zeros(len(coming.got), np.bool_)
            asked[first : first + WINDOW] = wants
            question.open[tensor] = coming.version, asked
            bits = int.from_bytes(np.packbits(wants, bitorder="little").tobytes(), "little")
            parts.append(_ROWS.pack(tensor, first, coming.version.clock, coming.version.digest, bits))
            if room == 0:
                break
        blob = _ASKED.pack(budget_s, len(parts)) + b"".join(parts)
        run = _small(peer, MessageKey(self._number, remote.asked, ASK, 0), blob)
        return [Send(run, question.due_s), *self._wake(peer, remote, question.due_s)]

    def _wake(self, peer: PeerId, remote: _Remote, at_s: float) -> list[Effect]:
        """Look after a question at ``at_s``, by one timer at a time."""
        if at_s >= remote.armed_s:
            return []
        remote.armed_s = at_s
        return [Arm(Timer(self._number, peer, "ask"), at_s)]

    def _collect(self, tensor: int, version: Version) -> _Coming:
        size = self._sizes[tensor]
        return _Coming(version, np.empty((size, CHUNK_BYTES), np.uint8), np.zeros(size, np.bool_), size)

    def _expired(self, now_s: float, timer: Timer) -> list[Effect]:
        remote = self._remotes.get(timer.round)
        if remote is None:
            return []
        if timer.name == "tell":
            due = remote.behind and now_s >= remote.tell_s
            return self._tell(now_s, timer.round, remote) if due else []
        if now_s < remote.armed_s:
            return []
        remote.armed_s = math.inf
        due_s = remote.rests_until_s if remote.question is None else remote.question.due_s
        if now_s < due_s:
            return self._wake(timer.round, remote, due_s)
        if remote.question is None:
            return self._ask_all(now_s)  # it has rested
        return self._unanswered(now_s, timer.round, remote)

    def _unanswered(self, now_s: float, peer: PeerId, remote: _Remote) -> list[Effect]:
        """A question brought nothing: it or the answer was lost, or the peer is frozen, dead or cut off."""
        remote.given_up, remote.question = remote.question, None
        remote.answers.missed()
        remote.fails += 1
        pause_s = self._pause_s(peer, remote) * 2 ** min(remote.fails - 1, _DOUBLINGS_MAX)
        remote.rests_until_s = now_s + pause_s
        effects = self._wake(peer, remote, remote.rests_until_s)
        if remote.fails == ELSEWHERE and self._lacking:
            pages = {tensor // PAGE for tensor in self._lacking}
            effects += self._announce(now_s, pages, [other for other in self._remotes if other != peer])
        return effects + self._ask_all(now_s)

    # -- What comes

    def _take(self, now_s: float, run: Run) -> list[Effect]:
        remote, stage = self._remotes.get(run.peer), run.key.stage
        if remote is None:
            return []
        if stage in (ROWS, PUSH):
            return self._rows(now_s, run, remote)
        blob = _read(run)
        if blob is None:
            return []
        if stage == ASK:
            return self._answer(now_s, run, remote, blob)
        if stage not in (TELL, TOLD, GONE):
            return []
        page = self._learn(now_s, run.peer, remote, blob)
        if page is None:
            return []
        effects: list[Effect] = []
        if stage == TELL:
            answer = self._page(run.peer, TOLD, run.key.round, page)
            effects.append(Send(answer, now_s + self._pause_s(run.peer, remote)))
        elif stage == GONE:
            self._gone(remote, run.key.round, page)
        elif run.key.round == self._revision:
            remote.behind.discard(page)
        self._close_if_over(now_s, run.peer, remote)
        return effects + self._ask_all(now_s)

    def _rows(self, now_s: float, run: Run, remote: _Remote) -> list[Effect]:
        tensor, k = run.key.block, len(run.payload)
        if tensor >= len(self._sizes) or run.total != self._sizes[tensor] or run.first + k > run.total:
            return []
        if k and run.payload.shape[1] != CHUNK_BYTES:
            return []
        if run.key.stage == PUSH:
            return self._take_pushed(now_s, run, tensor)
        question, coming = remote.question, self._coming.get(tensor)
        if remote.given_up is not None and run.key.round == remote.given_up.number:
            remote.answers.late(now_s - remote.given_up.sent_s)
            remote.given_up, remote.fails, remote.rests_until_s = None, 0, now_s
        fresh = coming is not None and k > 0 and self._store(run, coming)
        if question is None or run.key.round != question.number or tensor not in question.open:
            return self._complete(now_s, run, tensor, coming) if fresh else []
        effects: list[Effect] = []
        if fresh:
            question.came, question.due_s = True, now_s + self._pause_s(run.peer, remote)
            effects = self._complete(now_s, run, tensor, coming)
        version, asked = question.open[tensor]
        coming = self._coming.get(tensor)
        if run.ended or coming is None or coming.version != version or coming.got[asked].all():
            del question.open[tensor]
        if not question.open and not question.came:
            return effects + self._unanswered(now_s, run.peer, remote)
        return effects + (self._ask_all(now_s) if self._close_if_over(now_s, run.peer, remote) else [])

    def _take_pushed(self, now_s: float, run: Run, tensor: int) -> list[Effect]:
        """Rows that their maker sends unasked. A version that is being asked for comes to its end first."""
        there = run.heard if run.mask is None else run.heard[run.mask]
        if not self._pushed or tensor not in self._wanted or not len(there):
            return []
        mark = int(there[0])
        version = Version(mark >> 32, run.peer, mark & 0xFFFFFFFF)
        if version <= self.version(tensor) or version.clock > self._clock_most:
            return []
        coming = self._coming.get(tensor)
        if coming is None or (coming.version < version and tensor not in self._lacking):
            coming = self._coming[tensor] = self._collect(tensor, version)
        if coming.version != version or not self._store(run, coming):
            return []
        self._expect(now_s, tensor, version)
        return self._complete(now_s, run, tensor, coming)

    def _store(self, run: Run, coming: _Coming) -> bool:
        """Take the rows of the version that is collected; whether any was new."""
        span = slice(run.first, run.first + len(run.payload))
        new = ~coming.got[span]
        new &= run.heard == np.uint64(coming.version.clock << 32 | coming.version.digest)
        if run.mask is not None:
            new &= run.mask
        k = int(np.count_nonzero(new))
        if k == len(new):
            coming.rows[span] = run.payload
        elif k:
            coming.rows[span][new] = run.payload[new]
        coming.got[span] |= new
        coming.left -= k
        return k > 0

    def _complete(self, now_s: float, run: Run, tensor: int, coming: _Coming | None) -> list[Effect]:
        """Where all rows are there, the value replaces the old one, unless it is damaged."""
        if coming is None or coming.left:
            return []
        del self._coming[tensor]
        version = coming.version
        if digest_of(version.clock, version.maker, coming.rows) != version.digest:
            self._remotes[run.peer].holds.pop(tensor, None)
            self._lacking.pop(tensor, None)
            for remote in self._remotes.values():
                self._hear_of(tensor, remote.holds.get(tensor, NONE))
            return [Noted("damaged value", run.peer, f"tensor {tensor}, version {version.clock}")]
        age_s = float(run.weight[0])
        made_s = now_s - (age_s if 0 <= age_s < math.inf else 0.0)
        if version > self.version(tensor):
            self.heard = True
            coming.rows.flags.writeable = False
            self._replace(tensor, Held(version, coming.rows, made_s))
        return []

    def _close_if_over(self, now_s: float, peer: PeerId, remote: _Remote) -> bool:
        question = remote.question
        if question is None or question.open:
            return False
        remote.question, remote.fails = None, 0
        remote.answers.completed(now_s - question.sent_s)
        return True

    # -- Answering

    def _answer(self, now_s: float, run: Run, remote: _Remote, blob: bytes) -> list[Effect]:
        """Send the rows that a peer asks for, a window at most."""
        patience_s, parts = _ASKED.unpack_from(blob)
        if run.key.round == remote.served or not 0 < patience_s < math.inf:
            return []  # a copy of a question that was answered before
        remote.served, room = run.key.round, WINDOW
        until_s = now_s + patience_s
        effects: list[Effect] = []
        pages: set[int] = set()
        for i in range(min(parts, ASKS_MAX)):
            tensor, first, count, digest, bits = _ROWS.unpack_from(blob, _ASKED.size + i * _ROWS.size)
            if tensor >= len(self._sizes) or first >= self._sizes[tensor]:
                continue
            held = self._of_version(tensor, count, digest)
            if held is None:
                pages.add(tensor // PAGE)
                continue
            wants = np.unpackbits(np.frombuffer(bits.to_bytes(8, "little"), np.uint8), bitorder="little")
            asked = np.zeros(len(held.rows), np.bool_)
            span = asked[first : first + WINDOW]
            span[:] = wants[: len(span)]
            span &= np.cumsum(span) <= room
            room -= int(np.count_nonzero(span))
            if span.any():
                key = MessageKey(self._number, run.key.round, ROWS, tensor)
                effects.append(Send(_rows_of(run.peer, key, held, asked, now_s), until_s))
        effects += [Send(self._page(run.peer, GONE, run.key.round, page), until_s) for page in sorted(pages)]
        return effects

    def _of_version(self, tensor: int, count: int, digest: int) -> Held | None:
        held, older = self.held[tensor], self._older.get(tensor)
        if held is not None and (held.version.clock, held.version.digest) == (count, digest):
            return held
        if older is not None and (older.version.clock, older.version.digest) == (count, digest):
            self._older_asked.add(tensor)
            return older
        return None

    # -- Who is there

    def _joined(self, now_s: float, peer: PeerId) -> list[Effect]:
        """A peer is there, as a new process: it has nothing, and its numbers start anew."""
        if peer == self._crew.me:
            return []
        self._remotes[peer] = self._new_remote()
        return self._announce(now_s, self._pages, [peer]) + self._ask_all(now_s)

    def _left(self, now_s: float, peer: PeerId) -> list[Effect]:
        self._remotes.pop(peer, None)
        return self._ask_all(now_s)


def _rows_of(peer: PeerId, key: MessageKey, held: Held, asked: Bools | None, now_s: float) -> Run:
    size, mark = len(held.rows), held.version.clock << 32 | held.version.digest
    weight = np.full(size, max(0.0, now_s - held.made_s), np.float32)
    heard = np.full(size, mark, np.uint64)
    return Run(peer, key, 0, size, held.rows, weight, heard, mask=asked, ended=True)


def _small(peer: PeerId, key: MessageKey, blob: bytes) -> Run:
    """A message of one chunk without an end mark: the answer says that it came."""
    run = blob_message(peer, key, blob)
    run.ended = False
    return run


def _read(run: Run) -> bytes | None:
    """What such a message says; ``None``: it makes no sense."""
    if run.total != 1 or run.first != 0 or run.payload.shape != (1, CHUNK_BYTES):
        return None
    if run.mask is not None and not run.mask.all():
        return None
    return bytes(run.payload.tobytes())


def publisher_of(node: Node, channel: int) -> Publisher:
    """A node's part in a channel of named tensors. Raises KeyError: it has no such channel open."""
    machine = node.channels[channel]
    if not isinstance(machine, Publisher):
        raise KeyError(f"channel {channel} is averaged on; nothing is published there")
    return machine


def published(sizes: Iterable[int], *, pushed: bool = False) -> Averager:
    """An averager that opens a channel of named tensors.

    sizes: how many rows each has, at least 1.
    pushed: what this peer wants its makers are to send at once, before it asks.

    Raises:
        ValueError: there are no tensors, too many, or one has no rows.
    """
    rows = tuple(sizes)
    if not 1 <= len(rows) <= TENSORS_MAX or min(rows) < 1:
        raise ValueError(f"{len(rows)} named tensors; 1 to {TENSORS_MAX} with values can be published")
    return Averager("published", lambda opening: Publisher(opening, rows, pushed), "published")
