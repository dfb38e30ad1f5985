"""Snapshots on their way from a trainer to the newcomers that its peer gives them to: at most two, and only
wanted ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from ragtag.core.deadline import Deadline
from ragtag.protocols.transfer.donor import PATIENCE
from ragtag.protocols.transfer.types import BLOB_BYTES_MAX, Offer, chunk_bytes_for
from ragtag.protocols.transfer.wire import chunk_hasher

SNAPSHOTS_MAX = 2


@dataclass(slots=True, eq=False)
class Snapshot:
    """A training state of one round, as bytes.

    number: newcomers ask for its chunks by it.
    offer: what a newcomer is told of it.
    blob: the bytes.
    put_s: when it came.
    left_s: when its last reader left; before the first one, when it came.
    hashes: by index, those of the chunks that were read so far.
    hashing: those that are computed now, and from how many bytes so far.
    """

    number: int
    offer: Offer
    blob: memoryview
    put_s: float
    left_s: float
    hashes: dict[int, bytes] = field(default_factory=dict)
    hashing: dict[int, tuple[hashlib.blake2b, int]] = field(default_factory=dict)

    def chunk(self, index: int) -> memoryview:
        """The bytes of one chunk."""
        first, until = self.offer.span(index)
        return self.blob[first:until]

    def hash(self, index: int, n_bytes: int) -> bytes | None:
        """The hash of one chunk, computed from ``n_bytes`` more of it; ``None``: that was not all of it.

        It is computed once, however many newcomers read the chunk, and when it is first read.
        """
        if index in self.hashes:
            return self.hashes[index]
        data = self.chunk(index)
        hasher, upto = self.hashing.pop(index) if index in self.hashing else (chunk_hasher(), 0)
        hasher.update(data[upto : upto + n_bytes])
        if upto + n_bytes < len(data):
            self.hashing[index] = hasher, upto + n_bytes
            return None
        self.hashes[index] = hasher.digest()
        return self.hashes[index]


class Shelf:
    """A store of at most two snapshots that the trainer's thread and the donor's share.

    The donor's thread says which newcomers (``reader``) want a snapshot, and from which round on. The
    trainer's thread makes one only where one is wanted. After every round it calls:

        if shelf.wanted(round):
            shelf.put(round, step, schema, layout_hash, blob, replica)

    A snapshot that is being read is not replaced. While both are, newcomers that come read the newest. But
    once one has been there for ``PATIENCE`` times as long as reading it takes, by the middle one of the times
    that chunks took lately, it gives way to one that is wanted: else two newcomers that read on without end
    would have all others get a state that grows older and older.

    lock: keeps these two threads apart.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self.round = -1
        """The newest round that the trainer has finished; -1: none."""
        self.closed = False
        """Whether nothing is given, as this peer is behind its crew itself."""
        self.ended = False
        """Whether ``round`` was the last one: it is given to those that wait for a later one, too."""
        self._wanted: float = math.inf  # lowest round; the trainer reads it without the lock
        self._lock = lock
        self._snapshots: list[Snapshot] = []
        self._wants: dict[object, int] = {}
        self._given: dict[object, Snapshot] = {}
        self._count = 0
        self._on_put: Callable[[], None] = lambda: None
        self._now_s: Callable[[], float] = lambda: 0.0
        self._least_s = 0.0
        self._pace: Deadline | None = None

    # -- The trainer's thread

    def wanted(self, round_: int) -> bool:
        """Whether a snapshot of the round just finished is wanted. It takes no lock."""
        self.round = round_
        return self._wanted < math.inf and self._enough(round_, self._wanted)

    def put(
        self, round_: int, step: int, schema: int, layout_hash: int, blob: bytes, replica: int = 0
    ) -> bool:
        """Leave a snapshot, whose blob is not copied.

        It is not kept (``False``) where nobody wants it any more, or where all places are being read.

        schema, layout_hash: 64 bits each.
        replica: see ``Offer``; 32 bits.

        Raises:
            ValueError: a number is out of its range, or the blob is empty or too large.
        """
        for name, value, bits in (("round", round_, 62), ("step", step, 62)):
            if not 0 <= value < 1 << bits:
                raise ValueError(f"snapshot: {name} is {value}; it must lie between 0 and 2**{bits} - 1")
        for name, value, bits in (
            ("schema", schema, 64),
            ("layout_hash", layout_hash, 64),
            ("replica", replica, 32),
        ):
            if not 0 <= value < 1 << bits:
                raise ValueError(f"snapshot: {name} is {value}; it must have at most {bits} bits")
        if not 1 <= len(blob) <= BLOB_BYTES_MAX:
            raise ValueError(f"snapshot: the blob has {len(blob)} bytes; it must have 1 to {BLOB_BYTES_MAX}")
        offer = Offer(round_, step, schema, layout_hash, len(blob), chunk_bytes_for(len(blob)), replica)
        with self._lock:
            readers = [reader for reader, wanted in self._wants.items() if self._enough(round_, wanted)]
            if not readers or not self._make_room():
                return False
            self._count += 1
            snapshot = Snapshot(self._count, offer, memoryview(blob), self._now_s(), self._now_s())
            self._snapshots.append(snapshot)
            for reader in readers:
                del self._wants[reader]
                self._given[reader] = snapshot
            self._review()
        self._on_put()
        return True

    def _enough(self, round_: int, asked: float) -> bool:
        """Whether a snapshot of a round does for one that asked for this round, or the first after it."""
        return round_ >= (min(asked, self.round) if self.ended else asked)

    def restart(self) -> None:
        """No round is finished, whatever was said before. Those that wait for a snapshot get the next one;
        one that is being read is read to its end, and given to nobody else.
        """
        with self._lock:
            self.round = -1
            self._snapshots.clear()
            self._wants = dict.fromkeys(self._wants, 0)
            self._review()

    def gives(self, gives: bool) -> None:
        """Say whether there is anything to give from now on.

        If not, newcomers that wait for a snapshot are told so. Those that read one read it to its end.
        """
        with self._lock:
            self.closed = not gives
            if self.closed:
                self._wants.clear()
            self._review()
        self._on_put()

    # -- The donor's thread

    def serve(self, on_put: Callable[[], None], now_s: Callable[[], float], least_s: float = 0.0) -> None:
        """Serve this shelf from now on: the trainer's thread calls ``on_put`` after each put.

        least_s: how long each snapshot may be read in any case.
        """
        self._on_put, self._now_s, self._least_s = on_put, now_s, least_s

    def took(self, chunk_s: float) -> None:
        """A chunk has left, so long after it was the next one that its reader waited for."""
        if self._pace is None:
            self._pace = Deadline(max(chunk_s, 1e-9), quantile=0.5)
        self._pace.completed(chunk_s)

    def ask(self, reader: object, round_: int) -> Snapshot | None:
        """The snapshot that ``reader`` is to read: of ``round_``, or the first after it.

        ``None``: there is none yet; ``given`` has it after a put. Where all places are being read and none
        holds one that is new enough, it is the newest.
        """
        with self._lock:
            self._leave(reader)
            if self.closed:
                self._review()
                return None
            fit = [snapshot for snapshot in self._snapshots if self._enough(snapshot.offer.round, round_)]
            if fit:
                self._given[reader] = min(fit, key=lambda snapshot: snapshot.offer.round)
            elif not self._free():
                self._given[reader] = max(self._snapshots, key=lambda snapshot: snapshot.offer.round)
            else:
                self._wants[reader] = round_
            self._review()
            return self._given.get(reader)

    def given(self, reader: object) -> Snapshot | None:
        """The snapshot that ``reader`` reads; ``None``: none."""
        return self._given.get(reader)

    def leave(self, reader: object) -> None:
        """``reader`` wants nothing any more."""
        with self._lock:
            self._leave(reader)
            self._review()

    def sweep(self, keep_s: float) -> None:
        """Forget snapshots that nobody has read for ``keep_s`` seconds."""
        with self._lock:
            now_s, busy = self._now_s(), set(map(id, self._given.values()))
            self._snapshots = [s for s in self._snapshots if id(s) in busy or now_s - s.left_s < keep_s]
            self._review()

    def end(self) -> None:
        """Nobody serves this shelf any more: nothing is wanted or kept."""
        with self._lock:
            self._wants.clear()
            self._given.clear()
            self._snapshots.clear()
            self._review()

    @property
    def n_snapshots(self) -> int:
        """How many blobs are kept now."""
        return len(self._snapshots)

    # -- With the lock held

    def _leave(self, reader: object) -> None:
        self._wants.pop(reader, None)
        snapshot = self._given.pop(reader, None)
        if snapshot is not None:
            snapshot.left_s = self._now_s()

    def _idle(self) -> list[Snapshot]:
        """The snapshots that may give way: nobody reads them, or has had time enough to."""
        read, now_s = set(map(id, self._given.values())), self._now_s()
        return [s for s in self._snapshots if id(s) not in read or now_s - s.put_s >= self._enough_s(s)]

    def _enough_s(self, snapshot: Snapshot) -> float:
        """How long a snapshot is there at least while it is read."""
        if self._pace is None:
            return math.inf
        return max(self._least_s, PATIENCE * snapshot.offer.n_chunks * self._pace.typical_s())

    def _free(self) -> bool:
        """Whether there is a place for one more: an empty one, or one that may give way."""
        return len(self._snapshots) < SNAPSHOTS_MAX or bool(self._idle())

    def _make_room(self) -> bool:
        if len(self._snapshots) < SNAPSHOTS_MAX:
            return True
        if not (idle := self._idle()):
            return False
        oldest = min(idle, key=lambda snapshot: snapshot.offer.round)
        self._snapshots.remove(oldest)
        self._given = {reader: s for reader, s in self._given.items() if s is not oldest}
        return True

    def _review(self) -> None:
        """Find the lowest wanted round. Readers that wait while all places are taken get the newest."""
        if self._wants and not self._free():
            newest = max(self._snapshots, key=lambda snapshot: snapshot.offer.round)
            self._given |= dict.fromkeys(self._wants, newest)
            self._wants.clear()
        self._wanted = min(self._wants.values(), default=math.inf)
