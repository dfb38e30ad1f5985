"""Who came and went, as peers noted it; and whether the crew fell apart and became one again."""

from __future__ import annotations

from html import escape

from ragtag.app.report.axes import clock
from ragtag.app.report.data import MEMBERSHIP, Item, Summary
from ragtag.app.report.html import cell, table
from ragtag.app.terminal.words import in_words, these_peers

_BAD = frozenset({"declared dead", "lost its seat", "no member any more"})
_GOOD = frozenset({"back", "healed"})


def section(summary: Summary) -> str:
    """The section; empty where nobody came, went, or was taken for dead."""
    items = [item for item in summary.items if item.what in MEMBERSHIP and not item.error]
    back = {item.about for item in items if item.what == "back"}
    items = [item for item in items if item.what != "healed" or item.about not in back]  # the same twice
    if not items:
        return ""
    rows = [
        cell(clock(item.t), "n") + cell(_seat(item), "nw") + cell(in_words(item.what), f"nw {_style(item)}")
        + cell(item.detail) + cell(_seen(item))
        for item in items
    ]  # fmt: skip
    heads = [("Time", "n"), ("Peer", ""), ("What", ""), ("Its process", ""), ("Seen by", "")]
    return f"<section><h2>Coming and going</h2>{_healed(items)}{table(heads, rows, 'tight')}</section>"


def _healed(items: list[Item]) -> str:
    """In words, that peers that did not hear each other for a while are one crew again."""
    back = [item for item in items if item.what in _GOOD]
    if not back:
        return ""
    seats = sorted({item.about for item in back if item.about >= 0})
    who = these_peers(seats).capitalize() if seats else "Some peers"
    one = len(seats) == 1
    was, are = ("was", "is") if one else ("were", "are")
    text = f"{who} did not answer for a while, {was} taken for dead, and {are} back"
    return f"<p class='good'>{escape(text)} (last at {clock(max(item.t for item in back))}).</p>"


def _style(item: Item) -> str:
    return "bad" if item.what in _BAD else "good" if item.what in _GOOD else ""


def _seat(item: Item) -> str:
    return str(item.about) if item.about >= 0 else "none"


def _seen(item: Item) -> str:
    by = sorted(peer for peer in item.by if peer >= 0)
    return ", ".join(map(str, by[:12])) + (f" and {len(by) - 12} more" if len(by) > 12 else "")
