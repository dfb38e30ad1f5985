"""What a report shows: the figures of a run, and of each peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragtag.app.report.series import Bins, Dots, Sample
from ragtag.core import trace

COMPUTE, AVERAGE, WAIT = range(3)
ALL = -2
"""The row of all peers together in a table of bins."""
KILLS = frozenset({"kill", "crash"})
FREEZES = frozenset({"freeze", "stall"})
LOST = frozenset({"killed", "failed", "lost", "dead", "no trace"})
MEMBERSHIP = frozenset(
    {
        "comes", "takes part", "assists", "has left", "declared dead", "back", "healed", "lost its seat",
        "seat taken", "no member any more", "put out",
    }
)  # fmt: skip
"""What peers note of each other's coming and going."""


@dataclass(slots=True)
class PeerFigures:
    """A peer's figures.

    missed: how often others waited for it in vain.
    misses: how often it waited in vain.
    sealed: whether what it sent was encrypted (``None``: it has not said so).
    refused: datagrams that it did not accept, by reason.
    relayed: packets of others that it passed on.
    told: what others noted last of its membership; all that is known of one whose trace is elsewhere.
    auxiliary: whether it averages for the crew, and trains nothing.
    client: whether it trains, and averages nothing for others.
    digest: of the model that it ended with.
    last_round: the newest one up to which it has kept up with the others.
    """

    number: int
    state: str = "no trace"
    auxiliary: bool = False
    client: bool = False
    rounds: int = 0
    missed: int = 0
    misses: int = 0
    expired: int = 0
    arrived: float = 0.0
    steps: int = 0
    samples: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    datagrams_lost: int | None = None
    accuracy: float | None = None
    loss: float | None = None
    batch_losses_bad: int = 0
    bad_since_t: float | None = None
    error_t: float | None = None
    joined_t: float | None = None
    last_t: float | None = None
    left: bool = False
    told: str = ""
    digest: str = ""
    last_round: int = -1
    sealed: bool | None = None
    refused: dict[str, int] = field(default_factory=dict)
    relayed: int = 0
    round_s: Sample = field(default_factory=lambda: Sample(values_max=1 << 14))


@dataclass(slots=True)
class Item:
    """A line of the list of notes and errors.

    by: the peers that said the same at about that time.
    """

    t: float
    what: str
    about: int
    detail: str
    error: bool
    by: set[int]


@dataclass(slots=True)
class Extent:
    """The first pass: how long the run was, which peers it had, and what is drawn of it: ``t0`` to ``t1``."""

    lasted_s: float = 0.0
    t0: float = 0.0
    t1: float = 0.0
    peers: list[int] = field(default_factory=list)
    auxiliary: set[int] = field(default_factory=set)
    steps_most: int = 0
    rounds_most: int = 0
    runs: int = 0
    killed_t: dict[int, float] = field(default_factory=dict)


class Timeline:
    """Seconds of each kind by peer and column of time; what a peer waited for; how stale it was.

    seconds: float64 ``[peers, kinds, columns]``. The others have an entry for each of ``peers``.
    """

    def __init__(self, peers: Sequence[int], columns: int, t0: float, t1: float) -> None:
        self.peers = list(peers)
        self._row = {peer: at for at, peer in enumerate(self.peers)}
        self._t0, self._column_s = t0, max(t1 - t0, 1e-6) / columns
        self.seconds: NDArray[np.float64] = np.zeros((len(self.peers), 3, columns))
        self.total_s: NDArray[np.float64] = np.zeros((len(self.peers), 3))
        self.lost_s = [0.0] * len(self.peers)
        self.waited_s: list[Counter[int]] = [Counter() for _ in self.peers]
        self.stale: list[Counter[int]] = [Counter() for _ in self.peers]

    @property
    def any(self) -> bool:
        """Whether any peer told where its time went."""
        return bool(self.total_s.any())

    def add(self, record: trace.Pace) -> None:
        """One record; its time is spread over the columns that it lies in."""
        row = self._row.get(record.peer)
        if row is None:
            return
        kinds = np.array([record.compute_s, record.average_s, record.wait_s])
        self.total_s[row] += kinds
        self.lost_s[row] += record.lost_s
        for other, s in zip(record.waited_for, record.waited_s, strict=False):
            if other in self._row:
                self.waited_s[row][other] += s  # type: ignore[assignment]  # a Counter adds floats as well
        for at, count in enumerate(record.stale):
            self.stale[row][at] += count
        self._spread(row, record.t - float(kinds.sum()), record.t, kinds)

    def _spread(self, row: int, begin: float, end: float, kinds: NDArray[np.float64]) -> None:
        if not end > begin:
            return
        columns = self.seconds.shape[2]
        a, b = ((t - self._t0) / self._column_s for t in (begin, end))
        edges = np.arange(columns + 1)
        covered = np.clip(np.minimum(edges[1:], b) - np.maximum(edges[:-1], a), 0.0, None)
        self.seconds[row] += kinds[:, None] * (covered / (b - a))


@dataclass(slots=True)
class Comparisons:
    """What one peer saw when replicas were compared.

    alike_since: seconds (``None``: they differ).
    """

    count: int = 0
    units: int = 0
    apart: int = 0
    own: int = 0
    given: int = 0
    taken: int = 0
    largest: float = 0.0
    last: float = 0.0
    alike_since: float | None = None

    def add(self, record: trace.Align) -> None:
        """One comparison more."""
        self.count += 1
        self.units += record.units
        self.apart += record.apart
        self.own += record.own
        self.given += record.given
        self.taken += record.taken
        self.largest = max(self.largest, record.distance)
        self.last = record.distance if record.taken else self.last
        if record.apart:
            self.alike_since = None
        elif self.alike_since is None:
            self.alike_since = record.t


@dataclass(slots=True)
class Selections:
    """One peer's rounds with selections."""

    rounds: int = 0
    whole: int = 0
    saved_bytes: int = 0
    captured: float = 0.0
    committed: int = 0
    restored: int = 0
    late: int = 0
    given_up: int = 0
    last: trace.Sparse | None = None

    def add(self, record: trace.Sparse) -> None:
        """One round more."""
        self.rounds += record.of
        self.whole += record.how_often_dense
        self.saved_bytes += max(0, record.dense_bytes - record.bytes)
        self.captured += record.of * record.captured
        self.committed += record.committed
        self.restored += record.restored
        self.late += record.late
        self.given_up += record.given_up
        self.last = record


@dataclass(slots=True)
class Used:
    """What peers tell of an epoch of a split: the least and the most. A peer that left early knows less.

    missed: samples that nobody is known to have used; twice: that several peers used.
    """

    missed: tuple[int, int]
    twice: tuple[int, int]

    def add(self, record: trace.Epoch) -> None:
        """What one peer more tells."""
        self.missed = min(self.missed[0], record.missed), max(self.missed[1], record.missed)
        self.twice = min(self.twice[0], record.twice), max(self.twice[1], record.twice)


@dataclass(slots=True)
class Verdicts:
    """What owners made of one peer's shares, by their guards. Floats, since traces may say anything.

    values: judged; cut, far: sums of parts and distances times values; capped: chunks.
    owners: that judged any.
    """

    values: float = 0.0
    cut: float = 0.0
    far: float = 0.0
    capped: int = 0
    owners: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Summary:
    """The second pass: all that the page and the headline figures are made of.

    epochs: by number and samples, by which splits are told apart.
    """

    run: trace.Run | None
    extent: Extent
    peers: dict[int, PeerFigures]
    charted: list[int]
    loss: Bins
    accuracy: Bins
    mean_accuracy: Bins
    own_mean: Bins
    arrived: Bins
    scatter: Bins
    gather: Bins
    round_number: Bins
    missed: NDArray[np.int64]
    waited: NDArray[np.int64]
    rounds: NDArray[np.int64]
    dots: Dots
    late_dots: Dots
    timeline: Timeline
    coherence: Bins
    mu: Sample = field(default_factory=Sample)
    round_s: Sample = field(default_factory=Sample)
    arrival: Sample = field(default_factory=Sample)
    faults: list[trace.Fault] = field(default_factory=list)
    faults_left_out: int = 0
    results: list[trace.Result] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    items_left_out: int = 0
    errors: int = 0
    mean_eval: trace.Eval | None = None
    sparse: dict[int, Selections] = field(default_factory=dict)
    replicas: dict[int, Comparisons] = field(default_factory=dict)
    verdicts: dict[int, Verdicts] = field(default_factory=dict)
    unjudged: int = 0
    leaderboard: trace.Leaderboard | None = None
    gathered: dict[tuple[int, int | str], trace.Target] = field(default_factory=dict)
    spent: dict[int, trace.Privacy] = field(default_factory=dict)
    epochs: dict[tuple[int, int], Used] = field(default_factory=dict)
    epochs_left_out: int = 0
    links: list[trace.Link] = field(default_factory=list)
    links_left_out: int = 0
    damage: list[str] = field(default_factory=list)
    thinned: int = 0
    thinned_rounds: int = 0

    @property
    def survivors(self) -> list[PeerFigures]:
        """The peers that were not lost."""
        return [p for p in self.peers.values() if p.state not in LOST]

    @property
    def lost(self) -> list[int]:
        """The peers that were killed, failed, or ended without a word while others went on."""
        return [p.number for p in self.peers.values() if p.state in LOST - {"no trace"}]

    @property
    def finished(self) -> bool:
        """Whether anyone has left as planned."""
        return any(p.left for p in self.peers.values())
