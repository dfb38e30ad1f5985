"""The report's section on selections: what was sent of how much, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from ragtag.app.report.axes import percent
from ragtag.app.report.data import Summary
from ragtag.app.report.html import bytes_text, cell, table
from ragtag.core import trace

_NAMES = (
    *("peer", "rounds", "sent whole", "density", "bytes saved", "energy captured", "residual"),
    *("delivered", "given back", "came late", "never came"),
)
_HEADS = tuple((name, "num") for name in _NAMES)


@dataclass(slots=True)
class Sums:
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


def section(summary: Summary) -> str:
    """The section; nothing where everything was sent."""
    if not summary.sparse:
        return ""
    rows = [_row(peer, sums) for peer, sums in sorted(summary.sparse.items())]
    caption = (
        "Rounds in which all was sent, since a selection would have taken longer. Of a message in a round, "
        "dense against sent; fragments delivered into the round's sum, given back to be sent again, "
        "rows that came a round late, blocks of which some never came."
    )
    return f'<section><h2>Selections</h2><p class="cap">{caption}</p>{table(_HEADS, rows)}</section>'


def _row(peer: int, sums: Sums) -> str:
    last = sums.last
    cells = (
        peer, f"{sums.rounds:,}", f"{sums.whole:,}", None if last is None else f"{last.density:.3%}",
        bytes_text(sums.saved_bytes), percent(sums.captured / max(1, sums.rounds)),
        None if last is None else f"{last.residual_norm:.3g}", f"{sums.committed:,}", f"{sums.restored:,}",
        f"{sums.late:,}", f"{sums.given_up:,}",
    )  # fmt: skip
    return "".join(cell(text, "num") for text in cells)
