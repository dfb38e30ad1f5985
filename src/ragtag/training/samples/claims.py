"""What a peer posts about the blocks it draws: which it has claimed, and which it has used.

Blocks are numbered through all epochs: block ``b`` of epoch ``e`` is ``e * n_blocks + b``. A section is one
peer's part; a post has its sender's own, and then what it knows of peers that cannot speak for themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

Span = tuple[int, int]
"""Blocks ``[start, stop)``."""
BLOCK_MAX = 1 << 48
SPANS_MAX = 120
"""Spans in a section: about 600 bytes."""
_VARINT_MAX = 1 << 56


@dataclass(frozen=True, slots=True)
class Section:
    """One process of a peer.

    process: tells processes of a peer apart; a later one has a higher number.
    number: of the post that said this.
    entered: the epoch it began with.
    closed: epochs from there to below this have been reported.
    ready: of epochs below this it knows no block that anybody could still use.
    epoch: the one it is in.
    used: how many of the firm blocks, in their order, it has used.
    firm: what it uses without asking again.
    pending: what it claims, and will use unless somebody's claim is firm or has a lower number.
    pending_number: of the post that claimed this.
    """

    peer: int
    process: int
    number: int
    entered: int
    closed: int
    ready: int
    epoch: int
    used: int
    firm: tuple[Span, ...]
    pending: tuple[Span, ...]
    pending_number: int

    @property
    def reported(self) -> int:
        """Epochs below this are over for everybody: this process has reported them."""
        return self.closed if self.closed > self.entered else 0

    def used_spans(self) -> Iterator[Span]:
        """The first ``used`` blocks of ``firm``."""
        left = self.used
        for start, stop in self.firm:
            if left <= 0:
                return
            yield start, min(stop, start + left)
            left -= stop - start


def length(spans: Iterable[Span]) -> int:
    """How many blocks these are."""
    return sum(stop - start for start, stop in spans)


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same blocks in the same order, in as few spans as can be."""
    whole: list[Span] = []
    for start, stop in spans:
        if whole and whole[-1][1] == start:
            whole[-1] = (whole[-1][0], stop)
        elif stop > start:
            whole.append((start, stop))
    return whole


def without(spans: Iterable[Span], taken: Sequence[Span]) -> list[Span]:
    """What is left of ``spans``, in order, when ``taken`` is taken away."""
    left = list(spans)
    for a, b in taken:
        cut: list[Span] = []
        for start, stop in left:
            if b <= start or stop <= a:
                cut.append((start, stop))
            else:
                cut += [s for s in ((start, a), (b, stop)) if s[0] < s[1]]
        left = cut
    return left


def overlap(spans: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """The blocks that are in both."""
    others = list(other)
    return [(max(a, c), min(b, d)) for a, b in spans for c, d in others if max(a, c) < min(b, d)]


def encode(identity: int, sections: Sequence[Section], size_max: int) -> bytes:
    """The sections, the first one always, of the others as many as fit into ``size_max`` bytes.

    The first one's numbers may be 0, which stands for the number that its post will get.
    """
    out = bytearray(identity.to_bytes(4, "little"))
    for at, section in enumerate(sections):
        part = bytearray()
        for value in (
            section.peer,
            section.process,
            section.number,
            section.entered,
            section.closed,
            section.ready,
            section.epoch,
            section.used,
            section.pending_number,
            len(section.firm),
            len(section.pending),
        ):
            _put(part, value)
        last = 0
        for start, stop in (*section.firm, *section.pending):
            _put(part, (start - last) << 1 if start >= last else ((last - start) << 1) - 1)
            _put(part, stop - start)
            last = stop
        if at > 0 and len(out) + len(part) > size_max:
            continue
        out += part
    return bytes(out)


def decode(blob: bytes, identity: int, peer: int, number: int) -> list[Section] | None:
    """The sections in a post of ``peer`` with this ``number``; None: it is about other data, or damaged."""
    if blob[:4] != identity.to_bytes(4, "little"):
        return None
    values = _values(blob[4:])
    sections: list[Section] = []
    try:
        while (first := next(values, None)) is not None:
            sections.append(_section(first, values))
    except (StopIteration, ValueError):
        return None
    if not sections or sections[0].peer != peer:
        return None
    own = sections[0]
    pending = own.pending_number or number
    return [replace(own, number=number, pending_number=pending), *sections[1:]]


def _section(peer: int, values: Iterator[int]) -> Section:
    process, number, entered, closed, ready, epoch, used, pending_number, n_firm, n_pending = islice(
        values, 10
    )
    if max(n_firm, n_pending) > SPANS_MAX or peer >= 1 << 16:
        raise ValueError("more spans than a section has")
    spans: list[Span] = []
    last = 0
    for _ in range(n_firm + n_pending):
        step, blocks = next(values), next(values)
        start = last - (step + 1) // 2 if step & 1 else last + step // 2
        last = start + blocks
        if start < 0 or blocks < 1 or last > BLOCK_MAX:
            raise ValueError("a span of no blocks")
        spans.append((start, last))
    firm = tuple(spans[:n_firm])
    if used > length(firm) or max(entered, closed, ready, epoch) >= BLOCK_MAX:
        raise ValueError("more used than claimed")
    return Section(
        peer,
        process,
        number,
        entered,
        closed,
        ready,
        epoch,
        used,
        firm,
        tuple(spans[n_firm:]),
        pending_number,
    )


def _put(out: bytearray, value: int) -> None:
    """LEB128."""
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _values(data: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if value >= _VARINT_MAX or shift > 63:
            raise ValueError("too large a number")
        if not byte & 0x80:
            yield value
            value = shift = 0
    if shift:
        raise ValueError("cut short")
