"""The report's section on replicas: how often they were compared, what differed, what was made the same."""

from __future__ import annotations

from dataclasses import dataclass

from ragtag.app.report.axes import clock, percent
from ragtag.app.report.data import Summary
from ragtag.app.report.html import cell, table
from ragtag.core import trace

_NAMES = (
    *("peer", "compared", "not all alike", "own differed", "given", "taken"),
    *("largest distance", "last distance", "alike since"),
)
_HEADS = tuple((name, "num") for name in _NAMES)


@dataclass(slots=True)
class Looks:
    """What one peer saw when replicas were compared. alike_since: seconds; ``None``: they differ."""

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


def section(summary: Summary) -> str:
    """The section; nothing where no replicas were compared."""
    if not summary.replicas:
        return ""
    rows = [_row(peer, looks) for peer, looks in sorted(summary.replicas.items())]
    caption = (
        "Peers that average gradients compare their models now and then. Of all parts that were looked at, "
        "the share that not all had alike, and that this peer had not as most had; parts given to and taken "
        "from others; by how much a part's parameters changed when it was taken, relative to their norm."
    )
    return f'<section><h2>Replicas</h2><p class="cap">{caption}</p>{table(_HEADS, rows)}</section>'


def _row(peer: int, looks: Looks) -> str:
    alike = "they differ" if looks.alike_since is None else clock(looks.alike_since)
    cells = (
        peer, f"{looks.count:,}", percent(looks.apart / max(1, looks.units)),
        percent(looks.own / max(1, looks.units)), f"{looks.given:,}", f"{looks.taken:,}",
        _norm(looks.largest), _norm(looks.last), alike,
    )  # fmt: skip
    return "".join(cell(text, "num") for text in cells)


def _norm(distance: float) -> str:
    return f"{distance:.2g}" if distance else "0"
