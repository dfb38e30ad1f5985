"""What a report shows: the figures of a run, and of each peer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ragtag.app.report.series import Bins, Dots, Sample
from ragtag.app.report.spent import Timeline
from ragtag.core import trace

if TYPE_CHECKING:
    from ragtag.app.report.replicas import Looks
    from ragtag.app.report.sparse import Sums

ALL = -2
"""The row of all peers together in a table of bins."""
KILLS = frozenset({"kill", "crash"})
FREEZES = frozenset({"freeze", "stall"})
LOST = frozenset({"killed", "failed", "lost", "dead", "no trace"})
MEMBERSHIP = frozenset(
    {
        "comes", "takes part", "has left", "declared dead", "back", "healed", "lost its seat", "seat taken",
        "no member any more",
    }
)  # fmt: skip
"""What peers note of each other's coming and going."""


@dataclass(slots=True)
class Peer:
    """A peer's figures; ``missed``: how often others waited for it in vain; ``misses``: its own waits.

    told: what others noted last of its membership; all that is known of one whose trace is elsewhere.
    digest, last_round: of the model that it ended with, and the last round that it averaged, as it left.
    """

    number: int
    state: str = "no trace"
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
    round_s: Sample = field(default_factory=lambda: Sample(values_max=1 << 14))


@dataclass(slots=True)
class Item:
    """A line of the list of notes and errors; ``by``: the peers that said the same at about that time."""

    t: float
    what: str
    about: int
    detail: str
    error: bool
    by: set[int]


@dataclass(slots=True)
class Extent:
    """The first pass: how long the run was, from when (``t0``) to when (``t1``) it is drawn, who is in it."""

    lasted_s: float = 0.0
    t0: float = 0.0
    t1: float = 0.0
    peers: list[int] = field(default_factory=list)
    steps_most: int = 0
    rounds_most: int = 0
    runs: int = 0
    killed_t: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Summary:
    """The second pass: all that the page and the headline figures are made of."""

    run: trace.Run | None
    extent: Extent
    peers: dict[int, Peer]
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
    sparse: dict[int, Sums] = field(default_factory=dict)
    replicas: dict[int, Looks] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    thinned: int = 0
    thinned_rounds: int = 0

    @property
    def survivors(self) -> list[Peer]:
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
