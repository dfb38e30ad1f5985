"""What one peer has claimed: firm, to be looked at once more, and pending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ragtag.training.samples.claims import Span, joined, length, without
from ragtag.training.samples.ledger import Ledger, Process


@dataclass(slots=True)
class Lease:
    """Claims of the process ``who``, in the order of use.

    used: how many of the firm blocks are used.
    fresh: declared firm in the newest post, and to be held against what had come before that.
    fresh_number, number: of the posts that claimed ``fresh`` and ``pending``.
    """

    who: Process
    used: int = 0
    firm: list[Span] = field(default_factory=list)
    fresh: list[Span] = field(default_factory=list)
    fresh_number: int = 0
    pending: list[Span] = field(default_factory=list)
    number: int = 0

    def unused(self) -> list[Span]:
        """Firm blocks that are still to be used."""
        left, spans = self.used, []
        for start, stop in self.firm:
            skip = min(left, stop - start)
            left -= skip
            if start + skip < stop:
                spans.append((start + skip, stop))
        return spans

    def used_spans(self) -> list[Span]:
        """The first ``used`` blocks of ``firm``, as spans."""
        left, spans = self.used, []
        for start, stop in self.firm:
            if left <= 0:
                break
            spans.append((start, min(stop, start + left)))
            left -= stop - start
        return spans

    def use(self) -> int:
        """Use the next firm block: its number."""
        block = self.unused()[0][0]
        self.used += 1
        return block

    def declare(self) -> None:
        """What is pending becomes firm, but for one more look."""
        self.fresh, self.fresh_number = self.pending, self.number
        self.pending, self.number = [], 0

    def look_again(self, ledger: Ledger) -> None:
        """What was declared firm is, unless an older claim had come before that was said."""
        lost = ledger.lost(self.fresh, self.fresh_number, self.who)
        self.firm = joined([*self.firm, *without(self.fresh, lost)])
        self.fresh = []

    def drop_lost(self, ledger: Ledger) -> bool:
        """Give up what is pending here and another's by right; whether anything was."""
        lost = ledger.lost(self.pending, self.number, self.who)
        self.pending = without(self.pending, lost)
        if not self.pending:
            self.number = 0
        return bool(lost)

    def drop_below(self, block: int) -> None:
        """Give up what is not used of the blocks below this one."""
        below = [(0, block)]
        used = self.used_spans()
        self.firm = joined([*used, *without(self.unused(), below)])
        self.used = length(used)
        self.fresh = without(self.fresh, below)
        self.pending = without(self.pending, below)
        if not self.pending:
            self.number = 0

    def forget_below(self, block: int) -> None:
        """Say no more of what was used of the blocks below this one."""
        used = without(self.used_spans(), [(0, block)])
        self.firm = joined([*used, *self.unused()])
        self.used = length(used)

    def spans_with(self, more: Sequence[Span]) -> int:
        """How many spans it would take to say this and ``more``."""
        return len(joined([*self.firm, *self.fresh, *self.pending, *more]))
