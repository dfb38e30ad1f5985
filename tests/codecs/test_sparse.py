"""The sparse wire format: round trips, sizes, the same bytes on both paths, and what forgers send."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.codecs.sparse.indices import COUNT_MAX, rice
from ragtag.codecs.sparse.selection import NONE, Selection
from ragtag.codecs.sparse.topk import top_k
from ragtag.codecs.sparse.wire import Format, decode, encode
from ragtag.codecs.values import from_2bit, from_bf16, from_int8, to_2bit, to_bf16, to_int8
from ragtag.core import fast
from ragtag.core.seed import generator
from ragtag.core.wire import CHUNK_BYTES
from tests.codecs.vectors import heavy

PATHS = ["plain", pytest.param("compiled", marks=pytest.mark.skipif(not fast.available(), reason="no numba"))]
VALUES = ["fp32", "bf16", "int8", "2bit"]
INDICES = ["rice", "blocks"]
SIZES = st.sampled_from([1, 2, 65_535, 65_537, 1 << 20, (1 << 32) - 1])

codings = pytest.mark.parametrize(
    ("values", "indices"), [(v, i) for v in VALUES for i in INDICES], ids=lambda x: x
)
paths = pytest.mark.parametrize("path", PATHS)


class on:
    """One of the two paths."""

    def __init__(self, path: str) -> None:
        self._context = fast.plain() if path == "plain" else None

    def __enter__(self) -> None:
        if self._context:
            self._context.__enter__()

    def __exit__(self, *error) -> None:
        if self._context:
            self._context.__exit__(*error)


@st.composite
def selections(draw) -> tuple[Selection, int]:
    """Entries spread evenly, in clusters with wide gaps, or densely."""
    d = draw(SIZES)
    n = draw(st.integers(1, min(d, 3000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.sampled_from(["even", "clusters", "dense"]))
    if shape == "even":
        at = np.unique(rng.integers(0, d, n))
    elif shape == "clusters":
        at = np.unique(np.minimum(rng.integers(0, d, 4).repeat(n) + rng.integers(0, 3 * n, 4 * n), d - 1))
    else:
        first = rng.integers(0, d - n + 1)
        at = np.arange(first, first + n)
    values = (rng.standard_normal(len(at)) * 10.0 ** rng.integers(-30, 30)).astype(np.float32)
    return Selection(at.astype(np.int64), values), d


def expected(chosen: Selection, starts, values: str) -> np.ndarray:
    """What a receiver makes of the values, from the values' own module."""
    if values == "fp32":
        return chosen.values
    if values == "bf16":
        return from_bf16(to_bf16(chosen.values))
    spans = pairwise(starts)
    if values == "2bit":
        return np.concatenate([from_2bit(*to_2bit(chosen.values[a:b]), b - a) for a, b in spans])
    return np.concatenate([from_int8(*to_int8(chosen.values[a:b])) for a, b in spans])


@paths
@codings
@settings(max_examples=40, deadline=None)
@given(made=selections())
def test_what_is_sent_arrives(path, values, indices, made) -> None:
    chosen, d = made
    form = Format(d, len(chosen.indices), values, indices)
    with on(path):
        sent = encode(chosen, form, 7, 3)
        got = decode(sent.chunks, form, round_=7, sender=3)
    assert not got.refused
    assert np.array_equal(got.indices, chosen.indices) and np.array_equal(got.starts, sent.starts)
    assert np.array_equal(got.values, expected(chosen, sent.starts, values))
    assert sent.chunks.shape == (len(sent.starts) - 1, CHUNK_BYTES)


@paths
@codings
def test_every_fragment_decodes_alone_and_in_any_order(path, values, indices) -> None:
    u = heavy(1 << 20)
    chosen, form = top_k(u, 5000), Format(1 << 20, 5000, values, indices)
    with on(path):
        sent = encode(chosen, form, 1, 2)
        assert len(sent.chunks) > 5
        whole = np.zeros(form.d, np.float32)
        for row in generator(1, "order").permutation(len(sent.chunks)):
            buffer = np.full((1, CHUNK_BYTES + 64), 0xEE, np.uint8)
            buffer[:, 64:] = sent.chunks[row]
            got = decode(buffer[:, 64:], form, round_=1, sender=2)
            assert np.array_equal(got.indices, chosen.indices[sent.starts[row] : sent.starts[row + 1]])
            whole[got.indices] = got.values
    assert np.array_equal(np.flatnonzero(whole), chosen.indices)


@pytest.mark.skipif(not fast.available(), reason="numba is not installed (ragtag[fast])")
@pytest.mark.parametrize("values", VALUES)
@settings(max_examples=40, deadline=None)
@given(made=selections())
def test_both_paths_write_the_same_bytes(values, made) -> None:
    chosen, d = made
    form = Format(d, len(chosen.indices), values, "rice")
    quick = encode(chosen, form, 7, 3)
    with fast.plain():
        slow = encode(chosen, form, 7, 3)
    assert quick.chunks.tobytes() == slow.chunks.tobytes()


@paths
@pytest.mark.parametrize(
    ("values", "ratio", "bits"),
    [("int8", 0.001, 20.0), ("int8", 0.01, 16.6), ("2bit", 0.001, 14.1), ("2bit", 0.01, 10.6)],
)
def test_bits_per_entry(path, values, ratio, bits) -> None:
    d = 4_000_000
    k = int(ratio * d)
    form = Format(d, k, values, "rice")
    with on(path):
        sent = encode(top_k(heavy(d), k), form, 0, 0)
    full = sent.starts[-2]  # the last one is filled up with zeros
    assert (len(sent.chunks) - 1) * CHUNK_BYTES * 8 / full <= bits


@paths
def test_numba_or_not_each_reads_what_the_other_writes(path) -> None:
    chosen, form = top_k(heavy(100_000), 300), Format(100_000, 300)
    with fast.plain():
        by_blocks = encode(chosen, form, 0, 0).chunks
    by_rice = encode(chosen, Format(100_000, 300, indices="rice"), 0, 0).chunks
    assert (by_blocks[:, 0] >> 2 & 1).all() and not (by_rice[:, 0] >> 2 & 1).any()
    with on(path):
        got = decode(np.concatenate([by_rice, by_blocks]), form)
    assert np.array_equal(got.indices, np.tile(chosen.indices, 2)) and not got.refused


def test_nothing_has_no_fragments() -> None:
    form = Format(0, 1)
    sent = encode(NONE, form, 0, 0)
    assert sent.chunks.shape == (0, CHUNK_BYTES)
    assert decode(sent.chunks, form)[3] == ()


def test_peers_that_differ_are_told_what_in() -> None:
    chosen = top_k(heavy(10_000), 100)
    chunks = encode(chosen, Format(10_000, 100), 5, 2).chunks

    def why(form: Format, **of: int) -> str:
        got = decode(chunks, form, **of)
        assert not len(got.indices) and len(got.refused) == len(chunks)
        return got.refused[0][1]

    assert "values as int8, here they are bf16" in why(Format(10_000, 100, "bf16"))
    assert "about 1 in 99 values, here it is 1 in 1024" in why(Format(10_000, 10))
    assert "of round 5" in why(Format(10_000, 100), round_=6)
    assert "from peer 2" in why(Format(10_000, 100), sender=1)
    chunks[:, 4:8] = 255
    assert "it begins at 4294967295 in a vector of 10000" in why(Format(10_000, 100))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"d": 10, "k": 0}, "k is 0"),
        ({"d": 10, "k": 11}, "k is 11"),
        ({"d": 1 << 32, "k": 1}, "32 bits"),
        ({"d": 10, "k": 1, "values": "fp8"}, "fp8"),
        ({"d": 10, "k": 1, "indices": "gaps"}, "gaps"),
    ],
)
def test_formats_that_cannot_be(wrong, match) -> None:
    with pytest.raises(ValueError, match=match):
        Format(**wrong)


@pytest.mark.parametrize("at", [[3, 2], [1, 1], [-1, 2], [2, 10]])
def test_selections_that_cannot_be_sent(at) -> None:
    with pytest.raises(ValueError, match="ascend"):
        encode(Selection(np.array(at), np.ones(2, np.float32)), Format(10, 2), 0, 0)
    bad = Selection(np.array([1, 2]), np.array([1, np.nan], np.float32))
    with pytest.raises(ValueError, match="not finite"):
        encode(bad, Format(10, 2), 0, 0)


@cache
def good(form: Format) -> np.ndarray:
    return encode(top_k(heavy(form.d), form.k), form, 0, 0).chunks


def held(chunks: np.ndarray, form: Format) -> None:
    """Whatever the bytes: entries within the vector, ascending in each fragment, finite; or a reason."""
    got = decode(chunks, form)
    assert len(got.indices) == len(got.values) == got.starts[-1] <= COUNT_MAX * len(chunks)
    assert np.isfinite(got.values).all()
    refused = {row for row, reason in got.refused if reason}
    for row, (a, b) in enumerate(pairwise(got.starts)):
        assert (a == b) == (row in refused)
        part = got.indices[a:b]
        assert (np.diff(part) > 0).all()
        assert ((part >= 0) & (part < form.d)).all()


def both_agree(chunks: np.ndarray, form: Format) -> None:
    held(chunks, form)
    quick = decode(chunks, form)
    with fast.plain():
        held(chunks, form)
        slow = decode(chunks, form)
    assert [row for row, _ in quick.refused] == [row for row, _ in slow.refused]
    assert np.array_equal(quick.indices, slow.indices) and np.array_equal(quick.values, slow.values)


@codings
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_forged_fragments(values, indices, data) -> None:
    """Bytes of a good fragment changed, the header's too."""
    d = data.draw(st.sampled_from([3000, 1 << 20]))
    k = min(d, data.draw(st.sampled_from([1, 100, 2000])))
    form = Format(d, k, values, indices)
    chunks = good(form).copy()
    for _ in range(data.draw(st.integers(1, 8))):
        row, at = data.draw(st.integers(0, len(chunks) - 1)), data.draw(st.integers(1, CHUNK_BYTES - 1))
        chunks[row, data.draw(st.sampled_from([at, at % 16 or 1, at % 40 or 1]))] = data.draw(
            st.integers(0, 255)
        )
    both_agree(chunks, form)


@codings
@settings(max_examples=40, deadline=None)
@given(noise=st.binary(min_size=CHUNK_BYTES - 2, max_size=CHUNK_BYTES - 2), d=SIZES)
def test_noise_behind_a_good_beginning(values, indices, noise, d) -> None:
    form = Format(d, max(1, d // 100), values, indices)
    kind = 0xA0 | INDICES.index(indices) << 2 | VALUES.index(values)
    both_agree(np.frombuffer(bytes([kind, form.density]) + noise, np.uint8)[None], form)


@paths
@codings
def test_an_index_just_beyond_the_vector(path, values, indices) -> None:
    chosen = Selection(np.array([3, 70, 999]), np.ones(3, np.float32))
    chunks = encode(chosen, Format(1000, 10, values, indices), 0, 0).chunks
    with on(path):
        assert not decode(chunks, Format(1000, 10, values)).refused
        ((_, reason),) = decode(chunks, Format(999, 10, values)).refused
    assert "beyond the vector" in reason or "reach 999 in a vector of 999" in reason


@codings
def test_fragments_cut_short_at_any_length(values, indices) -> None:
    form = Format(100_000, 1000, values, indices)
    chunks = encode(top_k(heavy(100_000), 1000), form, 0, 0).chunks[:1]
    whole = decode(chunks, form)
    cut = CHUNK_BYTES - 24
    assert decode(chunks[:, :cut], form).refused, "what was filled to the brim cannot be cut by 24 bytes"
    for width in range(0, CHUNK_BYTES, 7):
        both_agree(chunks[:, :width], form)
    assert len(whole.indices)


@settings(max_examples=40, deadline=None)
@given(noise=st.binary(min_size=0, max_size=3 * CHUNK_BYTES))
def test_pure_noise(noise) -> None:
    width = max(1, len(noise) // 3)
    rows = len(noise) // width if noise else 0
    both_agree(np.frombuffer(noise[: rows * width], np.uint8).reshape(rows, width), Format(1000, 10))


def test_a_piece_of_one_entry_has_no_gaps() -> None:
    assert len(rice(np.array([70_000]), 5)) == 0
