"""What is said of claims comes back as it was, and nothing that is damaged is believed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ragtag.training.samples.claims import (
    SPANS_MAX,
    Section,
    Span,
    decode,
    encode,
    joined,
    length,
    overlap,
    without,
)

spans = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 30)).map(lambda s: (s[0], s[0] + s[1])), max_size=9
)


def blocks(of: list[Span] | tuple[Span, ...]) -> list[int]:
    return [block for start, stop in of for block in range(start, stop)]


@st.composite
def sections(draw: st.DrawFn) -> Section:
    firm = tuple(draw(spans))
    counts = [draw(st.integers(0, 1 << 40)) for _ in range(6)]
    used = draw(st.integers(0, length(firm)))
    return Section(
        draw(st.integers(0, 63)), *counts, used, firm, tuple(draw(spans)), draw(st.integers(1, 1 << 32))
    )


@given(st.lists(sections(), min_size=1, max_size=4), st.integers(0, (1 << 32) - 1), st.integers(1, 1 << 32))
def test_sections_come_back(said: list[Section], identity: int, number: int) -> None:
    blob = encode(identity, [replace(said[0], number=0, pending_number=0), *said[1:]], 1 << 20)
    heard = decode(blob, identity, said[0].peer, number)
    assert heard == [replace(said[0], number=number, pending_number=number), *said[1:]]
    assert decode(blob, identity ^ 1, said[0].peer, number) is None
    assert decode(blob, identity, said[0].peer + 1, number) is None
    assert decode(blob[:-1], identity, said[0].peer, number) is None


@given(sections(), st.lists(sections(), max_size=30))
def test_others_are_said_as_far_as_there_is_room(own: Section, others: list[Section]) -> None:
    blob = encode(5, [own, *others], 1080)
    assert len(blob) <= 1080
    assert decode(blob, 5, own.peer, 9) is not None


def test_the_largest_section_fits() -> None:
    firm = tuple((i * 1000, i * 1000 + 500) for i in reversed(range(SPANS_MAX)))
    own = Section(63, 1 << 35, 0, 9, 9, 9, 9, 500 * SPANS_MAX, firm, (), 1 << 32)
    assert len(encode(1, [own], 0)) <= 1080


@given(st.binary(max_size=200), st.booleans())
def test_no_blob_harms(data: bytes, ours: bool) -> None:
    heard = decode((b"\x05\0\0\0" if ours else b"") + data, 5, data[0] if data else 0, 1)
    for section in heard or ():
        assert 0 <= section.used <= length(section.firm)
        assert all(0 <= start < stop for start, stop in (*section.firm, *section.pending))


@given(spans, spans)
def test_sets_of_blocks(these: list[Span], those: list[Span]) -> None:
    there = set(blocks(those))
    assert blocks(joined(these)) == blocks(these)
    assert blocks(without(these, those)) == [block for block in blocks(these) if block not in there]
    assert set(blocks(overlap(these, those))) == set(blocks(these)) & there
