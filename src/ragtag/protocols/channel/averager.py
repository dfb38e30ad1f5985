"""What an averager is: a value that says how the peers of a crew come to a mean on a channel.

A new averager is a file with a machine, and a line in ``averagers``. The machine takes a peer's values and
gives an outcome for each round; it decides itself how peers meet. Most averagers let all peers average at
once, through owners of blocks. These bring the machine of one round only, and share the rest (``at_once``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from ragtag.codecs.base import Codec
from ragtag.core.types import PEERS_MAX, Effect, Event, Floats, PeerId
from ragtag.protocols.channel.presence import Crew
from ragtag.protocols.rounds.base import BY_SHARES, Patience, Reordering, Round, Spec
from ragtag.protocols.rounds.layout import layout_of, shared_owners
from ragtag.protocols.rounds.robust import RobustMean

Kind = Literal["at once", "in groups", "central", "published"]
"""How peers meet: all in each round, in groups that change, at a state that they share, or not at all, where
each publishes values of its own."""


class Machine(Protocol):
    """One peer's part in all rounds of a channel, with matchmaking and deadlines of its own.

    done: the last round that is over; -1: none.
    highest: the newest round that was heard of.
    active: the round under way.
    """

    @property
    def done(self) -> int: ...  # noqa: D102
    @property
    def highest(self) -> int: ...  # noqa: D102
    @property
    def active(self) -> int | None: ...  # noqa: D102

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event: ``Average`` or ``Offer`` begins this peer's next round, which ``Done`` ends.

        Runs that arrive together belong to one round. ``Joined``, ``Visits`` and ``Left`` tell of peers.
        """
        ...

    def probed(self, probe_s: float, now_s: float) -> None:
        """One exchange of the whole vector takes this long."""
        ...

    def resume(self, round_: int) -> None:
        """This peer came late: its next round comes after ``round_``, and in it (for each fragment) the peer
        takes, and gives nothing.
        """
        ...

    def newer(self) -> bool:
        """Whether others are known to be past this peer's last round, so that it can follow.

        A peer that averages in groups finds out when it looks for one.
        """
        ...

    def shows(self, now_s: float, peer: PeerId, number: int) -> bool:
        """Whether a message of round ``number`` shows that its sender takes part now."""
        ...


@dataclass(frozen=True, slots=True)
class Channel:
    """What is averaged on a channel, and how.

    n_chunks: chunks that a round averages.
    probe_s: how long the first round may take, as measured by a probe.
    rtt_s: a measured round trip, with its margin.
    floor_s: no stage's deadline is shorter. Nor is it shorter than the round trip to the middle peer.
    reuse: the memory of an outcome's mean is used again once the round after the next begins.
    fragments: values come as a table of so many parts of ``n_chunks`` each, and a round averages one.
    edges: chunks at which tensors begin (``Schema.edges``), the same on all peers.
    passing: the channel is not used for long (a probe), and does not decide how far the crew may grow.
    assisted: auxiliaries own blocks of it, as all peers tell them of it (``protocols.crew.serving``).
    among: the peers that take part (``None``: all). Others that live own nothing, and nobody waits for them.
    """

    averager: Averager
    codec: Codec
    n_chunks: int
    probe_s: float
    rtt_s: float
    floor_s: float = 0.0
    reuse: bool = False
    fragments: int = 1
    edges: tuple[int, ...] = ()
    passing: bool = False
    assisted: bool = False
    among: frozenset[PeerId] | None = None

    def part(self, round_: int) -> slice:
        """The rows of the table that a round averages: they follow from its number, so all peers agree."""
        start = round_ % self.fragments * self.n_chunks
        return slice(start, start + self.n_chunks)


@dataclass(frozen=True, slots=True)
class Opening:
    """What an averager needs to open a channel on one peer.

    number: the channel's.
    crew: the peers as this one sees them, shared by all its channels.
    now_s: when it is opened.
    """

    number: int
    channel: Channel
    crew: Crew
    now_s: float = 0.0

    @property
    def me(self) -> PeerId:
        """This peer."""
        return self.crew.me

    @property
    def peers(self) -> frozenset[PeerId]:
        """The peers that have not left, this one among them."""
        return frozenset(range(self.crew.n)) - self.crew.gone


@dataclass(frozen=True, slots=True)
class Setting:
    """What an averager needs to make the machine of one round.

    n: blocks that the vector is cut into.
    live: the peers that take part, as far as this one knows.
    present: the peers that have not left for good.
    auxiliary: those of them that only own blocks (``base.Spec``).
    clients: those that own none while another lives.
    repair_s: how long to wait before lost chunks are asked for again.
    growth: how many of the ``n`` blocks came since the crew was founded (``base.Spec``).
    scratch: float32 ``[n_chunks, elements]``, memory of an old round that this one may use for its mean.
    earlier: the machines of earlier rounds that still answer.
    patience, reordering, guard, quorum, enough: see ``base.Spec``.
    hadamard: how many chunks are mixed (``rounds.hadamard``); 0: none.
    edges: chunks at which tensors begin.
    shares: by peer, in whole numbers; empty: all own as much (``channel.shares``).
    """

    me: PeerId
    n: int
    seed: int
    channel: int
    round: int
    live: frozenset[PeerId]
    present: frozenset[PeerId]
    n_chunks: int
    codec: Codec
    repair_s: float
    growth: int = 0
    scratch: Floats | None = None
    earlier: tuple[Round, ...] = ()
    patience: Patience | None = None
    reordering: Reordering = field(default_factory=Reordering)
    guard: RobustMean | None = None
    quorum: int = 0
    enough: float = 1.0
    hadamard: int = 0
    edges: tuple[int, ...] = ()
    auxiliary: frozenset[PeerId] = frozenset()
    clients: frozenset[PeerId] = frozenset()
    shares: tuple[int, ...] = ()

    @property
    def owning(self) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
        """The peers that may own blocks, of those that live, and of those that have not left."""
        return self.live - self.clients or self.live, self.present - self.clients or self.present

    @property
    def n_giving(self) -> int:
        """How many living peers give to the round, as far as this one knows."""
        return len(self.live - self.auxiliary)

    def shared(self, spec: Spec, order: tuple[PeerId, ...]) -> Spec:
        """A round whose blocks are as large as their owners' shares. order: the peers, as blocks follow."""
        sizes = tuple(self.shares[peer] for peer in order)
        owners = shared_owners(order, self.shares, *self.owning, self.auxiliary)
        layout = layout_of(self.n_chunks, len(order), sizes)
        return replace(spec, layout=layout, owners=owners, growth=BY_SHARES, shares=self.shares)


@dataclass(frozen=True, slots=True)
class Averager:
    """How a channel is averaged.

    name: what peers compare when they meet.
    open: makes one peer's part in all rounds of a channel.
    kind: how peers meet.
    patience: how many times the measured budget a round may take. Lossy averagers take 1; one that repairs
        what is lost stands by longer, as its name promises.
    gathers: it takes ``Offer`` in place of ``Average``, and ``n_chunks`` is how many rows a peer may offer.
    seats_max: how many seats the crew may have.
    written: how a script asks for it, which is also its ``repr``.
    guards: its owners see each peer's share apart, so that a guard can judge it.
    guard: how they reduce these; ``None``: by their weighted mean.
    quorum: how many peers' values make an average, at least; 0: any.
    enough: where it repairs, the share of each message to which it does (``base.Spec``).
    hadamard: how many chunks are mixed before they are sent (``rounds.hadamard``); 0: none.
    owned: blocks have owners, so that a peer may own none of them.
    planned: peers own blocks by the shares that the crew has agreed on (``channel.shares``), where it has.
    """

    name: str
    open: Callable[[Opening], Machine]
    kind: Kind
    patience: float = 1.0
    gathers: bool = False
    seats_max: int = PEERS_MAX
    written: str = ""
    guards: bool = False
    guard: RobustMean | None = None
    quorum: int = 0
    enough: float = 1.0
    hadamard: int = 0
    owned: bool = False
    planned: bool = False

    @property
    def cuts(self) -> bool:
        """Whether blocks are cut as unlike as shares are; rows have no places that could be cut."""
        return self.owned and not self.gathers

    def __repr__(self) -> str:
        return self.written or f"Averager({self.name!r})"


def is_planned(shares: str) -> bool:
    """Whether shares are measured, and not equal. Raises ValueError: they are neither."""
    if shares not in ("equal", "measured"):
        raise ValueError(
            f'shares={shares!r}: "equal", or "measured": each peer owns as much as its line is good for'
        )
    return shares == "measured"


def guarded(averager: Averager, guard: RobustMean) -> Averager:
    """The same averager, its owners' shares guarded. Raises ValueError: its owners do not see them apart."""
    if not averager.guards:
        raise ValueError(f"{averager!r} adds shares up on their way, and cannot be guarded; use RPS()")
    return replace(averager, guard=guard)
