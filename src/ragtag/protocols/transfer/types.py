"""Events and effects of the machine that fetches a state, what an offer is, and what came of it.

A donor is a name here; connections, keys and bytes are the driver's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ragtag.core.errors import Error

OUTSTANDING_MAX = 4
"""A donor is asked for at most so many chunks at a time."""
CHUNKS_MAX = 1 << 14
CHUNK_BYTES_MIN, CHUNK_BYTES_USUAL, CHUNK_BYTES_MAX = 1 << 17, 1 << 20, 1 << 24
BLOB_BYTES_MAX = CHUNKS_MAX * CHUNK_BYTES_MAX


def chunk_bytes_for(total_bytes: int) -> int:
    """The size of a blob's chunks, a power of two. All donors cut blobs of one size alike.

    At least 256 chunks, so that a slow donor holds little back, as long as a chunk has 128 KB to 1 MB: a
    smaller one costs a donor more for what comes with it than for its bytes. Chunks are larger only where
    there would be more than 16,384.
    """
    wanted = min(CHUNK_BYTES_USUAL, max(CHUNK_BYTES_MIN, -(-total_bytes // 256)))
    return min(CHUNK_BYTES_MAX, _power(max(wanted, -(-total_bytes // CHUNKS_MAX))))


def _power(least: int) -> int:
    """The first power of two that is not below ``least`` (1 or more)."""
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Offer:
    """One donor's snapshot.

    round, step: after which it was taken.
    schema: the model's (``core.schema``).
    layout_hash: of the blob's structure. Chunks of several donors with one layout make one blob.
    replica: digest of what is to be the same at all donors after a round, 32 bits (0: it is not compared).
    """

    round: int
    step: int
    schema: int
    layout_hash: int
    total_bytes: int
    chunk_bytes: int
    replica: int = 0

    @property
    def n_chunks(self) -> int:
        """How many chunks the blob has; all but the last have ``chunk_bytes``."""
        return -(-self.total_bytes // self.chunk_bytes)

    @property
    def layout(self) -> tuple[int, int, int]:
        """What must be equal in offers whose chunks make one blob."""
        return self.layout_hash, self.total_bytes, self.chunk_bytes

    @property
    def version(self) -> tuple[int, int]:
        """What is equal in offers that are of one state: the round, and the replica."""
        return self.round, self.replica

    def span(self, index: int) -> tuple[int, int]:
        """Where chunk ``index`` begins and ends in the blob."""
        first = index * self.chunk_bytes
        return first, min(first + self.chunk_bytes, self.total_bytes)


# -- Events


@dataclass(frozen=True, slots=True)
class Start:
    """Begin, and be done or give up by ``deadline_s`` (absolute)."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class Told:
    """A donor has finished ``round``, and takes ``round_s`` for one (0: not known yet)."""

    donor: str
    round: int
    round_s: float


@dataclass(frozen=True, slots=True)
class Offered:
    """A donor has a snapshot."""

    donor: str
    offer: Offer


@dataclass(frozen=True, slots=True)
class Came:
    """A chunk came. intact: its bytes have the hash that its donor gave."""

    donor: str
    index: int
    n_bytes: int
    intact: bool = True


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to a donor broke, or it is busy: it may be tried again."""

    donor: str
    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A donor cannot help: nothing listens there, it has another key, or it breaks the protocol."""

    donor: str
    why: str


@dataclass(frozen=True, slots=True)
class Expired:
    """The time of an ``Arm`` has come."""


TransferEvent = Start | Told | Offered | Came | Lost | Refused | Expired


# -- Effects


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to a donor and ask it how far it is."""

    donor: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a donor for its snapshot of ``round``, or of the first after it."""

    donor: str
    round: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask a donor for a chunk of what it has offered."""

    donor: str
    index: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the connection to a donor."""

    donor: str
    why: str


@dataclass(frozen=True, slots=True)
class Arm:
    """Deliver ``Expired`` at ``at_s`` (absolute). A timer is never taken back; a needless one is ignored."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a transfer.

    offer: the agreed snapshot; ``None``: there was none.
    given: bytes that were used, by donor.
    dropped: donors that were given up, and why.
    rounds: chunks by the round of their snapshot. More than one round where donors of the agreed one were too
        few.
    mixed: whether chunks are of other rounds or replicas than the agreed snapshot.
    came: chunks that are there.
    wasted_bytes: bytes that came twice or damaged.
    """

    offer: Offer | None
    given: Mapping[str, int]
    dropped: Mapping[str, str]
    rounds: Mapping[int, int]
    mixed: bool
    came: int
    wasted_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """All chunks are there. Nothing follows."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class GaveUp:
    """There is no state. The reason says why, and what to do. Nothing follows."""

    reason: str
    outcome: Outcome


TransferEffect = Connect | Ask | Fetch | Drop | Arm | Finished | GaveUp


@dataclass(frozen=True, slots=True)
class Need:
    """What a newcomer needs.

    schema: of this peer's model.
    agreed_min: where fewer donors of the agreed round are left, donors of other rounds are used.
    blob_bytes_max: no larger state is taken.
    """

    schema: int
    agreed_min: int = 1
    blob_bytes_max: int = field(default=BLOB_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A state that was fetched, and what it is made of.

    blob: the state's bytes.
    round, step: of the snapshot on which donors agreed.
    rounds: chunks by round; more than one round where donors of the agreed one were too few.
    mixed: whether chunks are of other rounds or replicas than that snapshot.
    given: bytes by donor.
    dropped: by donor that was given up, why.
    wasted_bytes: bytes that came twice or damaged.
    took_s: seconds that it took.
    """

    blob: bytearray
    round: int
    step: int
    rounds: Mapping[int, int]
    mixed: bool
    given: Mapping[str, int]
    dropped: Mapping[str, str]
    wasted_bytes: int
    took_s: float

    @classmethod
    def of(cls, outcome: Outcome, blob: bytearray) -> Fetched:
        """What a transfer that has finished came to. Raises TransferError: nothing was offered."""
        if outcome.offer is None:
            raise TransferError("no offer", outcome)
        return cls(
            blob=blob,
            round=outcome.offer.round,
            step=outcome.offer.step,
            rounds=outcome.rounds,
            mixed=outcome.mixed,
            given=outcome.given,
            dropped=outcome.dropped,
            wasted_bytes=outcome.wasted_bytes,
            took_s=outcome.took_s,
        )


class TransferError(Error, RuntimeError):
    """No donor could give the state; the message says why, donor by donor.

    outcome: how far the transfer came; ``None``: it ended before the machine did.
    """

    def __init__(self, message: str, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
