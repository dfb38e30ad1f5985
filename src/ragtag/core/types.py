"""What moves between machines, drivers and worlds: runs, events and effects.

A protocol is a machine without I/O: it is told what happened and when, and answers with what to do.
The same machine is driven over real datagrams (``ragtag.network``) and in virtual time
(``ragtag.simulation``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
PeerSet = NDArray[np.uint64]
"""One bit for each peer: bit ``i`` is set when peer ``i`` contributed."""

PeerId = int
WEIGHT_MAX = 2.0**46
"""What a chunk may weigh at most: more is not believed. 2^40 of each of 64 peers."""
RATE_MIN, RATE_MAX = 1.0, 1e15
"""Bytes a second that a line may have: what lies outside was not measured, or in another unit."""
PEERS_MAX = 64
"""A chunk names its contributors in 64 bits; larger crews average in groups."""
SEATS_MAX = 1024
"""Peers of a crew that averages in groups: each keeps a row for each of the others."""
LARGER_CREWS = "larger crews average in groups: give averager=ragtag.Moshpit(group=8) on every peer"
"""The way out, where more than ``PEERS_MAX`` are to average directly."""


class MessageKey(NamedTuple):
    """Which message a chunk belongs to; with the sender's id it is unique within a crew."""

    channel: int
    round: int
    stage: int
    block: int


class Timer(NamedTuple):
    """A timer's name; the channel and round route it to the machine that armed it."""

    channel: int
    round: int
    name: str


@dataclass(
    slots=True, eq=False
)  # not frozen: made twice per message, and a frozen one costs five times as much
class Run:
    """Consecutive chunks of one message, to or from one peer.

    peer: the other end (destination in a ``Send``, source in an ``Arrived``).
    first: index of the first chunk.
    total: chunks in the whole message.
    payload: uint8 ``[k, chunk_bytes]``; rows may be strided (a receiver hands over its socket buffer, so an
        *arrived* payload is valid only while ``step`` runs; a *sent* one is immutable from then on).
    weight: float32 ``[k]``, the weight that each chunk's values carry in a mean.
    heard: uint64 ``[k]``, the contributors of each chunk.
    mask: bool ``[k]``, the chunks that are there; ``None``: all.
    ended: nothing more of this message will come (its marked last datagram has been seen).
    """

    peer: PeerId
    key: MessageKey
    first: int
    total: int
    payload: Bytes
    weight: Floats
    heard: PeerSet
    mask: Bools | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """The driver has started the machine."""


@dataclass(slots=True)
class Arrived:
    """Runs came from the network, in this order."""

    runs: Sequence[Run]


@dataclass(frozen=True, slots=True)
class Expired:
    """A timer that the machine armed has run out."""

    timer: Timer


class Role(IntEnum):
    """What a peer does in its crew.

    TRAINER: it computes, contributes to averages, and owns its share of the blocks.
    AUXILIARY: it owns its share of the blocks, and does nothing else: it contributes to no average.
    CLIENT: it computes and contributes, and owns nothing: others average what it sends.
    """

    TRAINER = 0
    AUXILIARY = 1
    CLIENT = 2

    @property
    def gives(self) -> bool:
        """Whether it has values of its own, which averages are made of and which take them."""
        return self is not Role.AUXILIARY

    @property
    def owns(self) -> bool:
        """Whether it owns a share of what is averaged."""
        return self is not Role.CLIENT


@dataclass(frozen=True, slots=True)
class Joined:
    """A peer is there (again), and does what its role says.

    same: it is the process that joined before, and was thought dead. It remembers what it was told and what
        was acknowledged to it, and does not repeat that.
    """

    peer: PeerId
    role: Role = Role.TRAINER
    same: bool = False


@dataclass(frozen=True, slots=True)
class Visits:
    """A peer may be talked with when peers meet, but does not average (yet): it is on its way in."""

    peer: PeerId
    role: Role = Role.TRAINER


@dataclass(frozen=True, slots=True)
class Left:
    """A peer is gone for good."""

    peer: PeerId


@dataclass(frozen=True, slots=True, eq=False)
class Average:
    """Ask a node to average ``values`` (float32 ``[n_chunks, elements]``) with the crew.

    Where the channel averages fragments in turn, ``values`` are all of them, the outcome is of the round's.
    ``values`` must not change until the round is done. ``deadline_s`` bounds the whole round; ``None`` leaves
    it to measurement. aside: peers (this one may be among them) that are known to come to few rounds: this
    one does not wait for them and they own no blocks; what they send in time counts.

    due: the round that is due, where its own peer can tell (of a channel whose rounds follow from another's,
    or where its state is the crew's after an earlier one); -1: it cannot. An earlier one, which a peer that
    was away would begin with, is over for the others.

    overlap_s: for how long this peer's trainer goes on before it asks for the outcome, as far as is known (0:
    it asks at once). Until then it costs nothing to wait.

    number: which round it is, where the trainer numbers all rounds of the channel; -1: the channel does. What
    the trainer leaves out between two numbers is nothing that this peer has to catch up with.
    """

    channel: int
    values: Floats
    weight: float
    deadline_s: float | None = None
    aside: frozenset[PeerId] = frozenset()
    due: int = -1
    overlap_s: float = 0.0
    number: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Ask a node to gather what all peers offer: ``rows``, uint8 ``[k, chunk_bytes]``, each decoding alone.

    k is 0 to the channel's ``n_chunks``. The outcome has rows in place of a mean (``Outcome.gathered``).

    ``rows`` must not change any more. The rest is as in ``Average``.
    """

    channel: int
    rows: Bytes
    weight: float
    deadline_s: float | None = None
    aside: frozenset[PeerId] = frozenset()
    due: int = -1
    overlap_s: float = 0.0
    number: int = -1


class Version(NamedTuple):
    """Which of a named tensor's values: the greater, the newer, on all peers alike.

    clock: its maker's when it was published, above that of any version which the maker knew of (0: none).
    maker: the peer that published it.
    digest: 32 bits of its rows, so no two values have one version.
    """

    clock: int
    maker: PeerId
    digest: int


@dataclass(frozen=True, slots=True, eq=False)
class Publish:
    """Ask a node to tell all peers the newest values of some of a channel's named tensors.

    rows: of each, by its number, uint8 ``[k, chunk_bytes]``, not changed any more; without any the peer only
        says that it is there, and hears what others have.
    versions: of values that were published before (from a checkpoint); the others are new.
    clock: the trainer's; no new version has a lower one.
    base: its clock when the run began, of which all peers take the highest.
    wanted: which tensors this peer takes (``None``: as before; at first all).
    """

    channel: int
    rows: Mapping[int, Bytes]
    clock: int = 0
    base: int = 0
    versions: Mapping[int, Version] = field(default_factory=dict)
    wanted: frozenset[int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Begin:
    """Begin one round: what a node tells the round's machine when its own peer asks for an average.

    waiting: the peers whose messages the round waits for.
    scatter_s, gather_s: for how long at most.
    withheld: those of them whose copies it does not wait for (see ``rounds.base.Lesson``).
    rows: what is offered, in place of values, where rows are gathered.
    grace_s: how much longer it may scatter where most have not come.
    usual_scatter_s, usual_gather_s: how long the stages take usually. After the second one's time, or
        ``gather_s`` where it is shorter, peers that are missing are asked whether they are there; after the
        first one's where most are missing in SCATTER.
    answer_s: how long a missing peer may take to say so, at least (see ``rounds.asking``).
    cycle_s: what a wait past a quorum is weighed against: how long ago this peer began the round before.
        Infinite: no wait until the deadline costs anything.
    met: whether all peers have come here from a meeting. Then all take the same peer for a block's owner, and
        one whose share comes no more is past the round.
    """

    values: Floats
    weight: float
    waiting: frozenset[PeerId]
    scatter_s: float
    gather_s: float
    withheld: frozenset[PeerId] = frozenset()
    rows: Bytes | None = None
    grace_s: float = 0.0
    usual_scatter_s: float = math.inf
    usual_gather_s: float = math.inf
    answer_s: float = 0.0
    cycle_s: float = math.inf
    met: bool = False


@dataclass(frozen=True, slots=True)
class OpenedTogether:
    """How peers open a channel that all of them open now.

    deadline_s: how long they wait for each other.
    peers: which they are. Others, as those that still train when these end, are not waited for (``None``:
        all that live).
    """

    deadline_s: float
    peers: frozenset[PeerId] | None = None


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell ``blob`` to every peer and hear theirs: exchange ``number``, until ``deadline_s`` (absolute).

    late: the others have met before, and average: they answer at once, so one that does not is waited for
        only as long as most answers took, several times over.
    there: the peers that are waited for, silent in rounds or not, unless they have left. ``None``: all that
        are not silent.
    """

    number: int
    blob: bytes
    deadline_s: float
    late: bool = False
    there: frozenset[PeerId] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of the way to a peer.

    rtt_s: the round-trip time, with its margin (RFC 6298's retransmission timeout). 0: not known.
    shortest_s: the shortest one that was seen: no answer comes sooner. 0: not known.
    rate_bytes_per_s: what the way there delivers, beside what this peer sends to others; 0: not known.
    """

    peer: PeerId
    rtt_s: float
    shortest_s: float = 0.0
    rate_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Post:
    """Put ``blob`` (at most 1,064 bytes) on the notice board: this peer's newest value on a topic."""

    topic: int
    blob: bytes


Event = (
    Post
    | Tell
    | Publish
    | Measured
    | Start
    | Arrived
    | Expired
    | Joined
    | Visits
    | Left
    | Average
    | Offer
    | Begin
)


@dataclass(slots=True, eq=False)
class Send:
    """Send a run; what has not left by ``deadline_s`` (absolute) is dropped.

    first: it leaves before what waits for the same peer, but for what came first before it.
    """

    run: Run
    deadline_s: float
    first: bool = False


@dataclass(frozen=True, slots=True)
class Arm:
    """Deliver ``Expired(timer)`` at ``at_s`` (absolute). Timers are never disarmed, only ignored."""

    timer: Timer
    at_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """The rows that blocks' owners have taken into a round, as far as they came here.

    rows: uint8 ``[m, chunk_bytes]``.
    factor: float32 ``[m]``, by how much each counts in the mean: its sender's weight over that of all that
        take part.
    block: int64 ``[m]``, the block that each was in.
    whole: bool ``[n_blocks]``, of which blocks all rows are here.
    none: of which ones nothing has come.
    late: earlier rounds of which something was lacking, and what has come of them since (perhaps nothing).
    given_up: (round, block) of earlier rounds whose lacking rows will not come any more.
    """

    rows: Bytes
    factor: Floats
    block: NDArray[np.int64]
    whole: Bools
    none: Bools
    late: tuple[tuple[int, Gathered], ...] = ()
    given_up: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Audited:
    """What a guard made of the shares that came to one owner in a round (``protocols.rounds.robust``).

    All tuples but ``short`` are by peer, in the order of ``peers``.

    peers: those of which a share was judged.
    values: how many values of each were judged.
    cut: the part of these that was left out, or clipped away, 0 to 1.
    far: the root mean square distance of its values from the result, over the middle peer's.
    capped: in how many chunks its weight was more than is believed.
    short: how many chunks have no average, since too few shares of them came.
    """

    peers: tuple[PeerId, ...]
    values: tuple[int, ...]
    cut: tuple[float, ...]
    far: tuple[float, ...]
    capped: tuple[int, ...]
    short: int


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a round came to, and what it is made of.

    mean: float32 ``[n_chunks, elements]``: the average where one came, the peer's own values elsewhere.
    weight: float32 ``[n_chunks]``, the total weight behind each chunk.
    heard: uint64 ``[n_chunks]``, the peers whose values are in each chunk (own bit only: nothing came).
    averaged: bool ``[n_chunks]``, whether an average came (False: own values were kept).
    missed: peers that were waited for and did not deliver all their messages in time.
    scatter_s, gather_s: how long each stage took.
    total_s: the whole round.
    expired: whether a deadline ended the round (rather than arrivals).
    members: in a group, bit ``i`` of ``heard`` stands for peer ``members[i]`` (empty: for peer ``i``).
    last: the peer whose copies ended the wait for them, or one that had not sent all of them when it ended
        (-1: there was nobody to wait for, or the method does not tell).
    gathered: where rows were gathered. Then ``mean`` is empty, and there is an entry per block: ``heard``,
        the peers that its owner heard in time; ``weight``, how many these are; ``averaged``, whether all its
        rows came.
    stale: where updates go to a central state: how many versions old this peer's was, for each block of it.
    groups: where peers step in groups there: which peers go together, the fastest first, as far as this peer
        has seen as an owner of blocks (empty: it owns none, or nothing is known of speeds yet).
    judged: where shares are guarded: what became of those that came to this peer as an owner of blocks.
    told: bool ``[n_chunks]``, whether anything of what the chunk's owner tells has come: else it may be that
        nobody has an average of it (``None``: the method does not tell).
    """

    channel: int
    round: int
    mean: Floats
    weight: Floats
    heard: PeerSet
    averaged: Bools
    missed: tuple[PeerId, ...]
    waited_for: tuple[PeerId, ...]
    started_s: float
    scatter_s: float
    gather_s: float
    total_s: float
    expired: bool
    members: tuple[PeerId, ...] = ()
    last: PeerId = -1
    gathered: Gathered | None = None
    stale: tuple[int, ...] | None = None
    groups: tuple[tuple[PeerId, ...], ...] = ()
    judged: Audited | None = None
    told: Bools | None = None

    def __str__(self) -> str:
        """In a line: how much was averaged, of how many peers, who was missed, and how long it took."""
        count = max(1, len(self.heard))
        contributors = int(np.unpackbits(self.heard.view(np.uint8)).sum()) / count
        missed = ", ".join(str(peer) for peer in self.missed) or "nobody"
        return (
            f"round {self.round}: {int(self.averaged.sum()) / count:.1%} averaged, of {contributors:.3g} "
            f"peers on average; missed: {missed}; {1e3 * self.total_s:.1f} ms"
        )


def nobodys(channel: int, mean: Floats, weight: Floats, heard: PeerSet, gathered: Gathered | None) -> Outcome:
    """The outcome of a round that nobody else took part in: nothing came, nobody was waited for."""
    return Outcome(
        channel=channel,
        round=0,
        mean=mean,
        weight=weight,
        heard=heard,
        averaged=np.zeros(len(heard), np.bool_),
        missed=(),
        waited_for=(),
        started_s=0.0,
        scatter_s=0.0,
        gather_s=0.0,
        total_s=0.0,
        expired=False,
        gathered=gathered,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """A round is over: the end of what ``Average`` or ``Offer`` began."""

    outcome: Outcome


@dataclass(frozen=True, slots=True, eq=False)
class Assisted:
    """An auxiliary has averaged its blocks of a round, as its crew asked and not its own process.

    outcome: of its own blocks; all other chunks of ``mean`` are undefined, and not ``averaged``.
    """

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Noted:
    """Something worth a line in the trace (a peer suspected, a message refused)."""

    what: str
    peer: PeerId
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Met:
    """An exchange is over: what each peer told, and which told nothing in time."""

    number: int
    blobs: dict[PeerId, bytes]
    missing: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Posted:
    """A peer's newest value on a topic of the notice board (one's own, too, once it has its number).

    number: grows with each post of a topic, and is higher than that of any post which its peer had taken
    before (Lamport's clock, CACM 1978): of two posts, the one with the lower number did not know the other.
    """

    peer: PeerId
    topic: int
    number: int
    blob: bytes


Effect = Send | Arm | Done | Assisted | Noted | Met | Posted


class Machine(Protocol):
    """A protocol without I/O."""

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event at time ``now_s`` (never decreasing) and say what to do."""
        ...
