"""The dense codecs: from strided socket buffers, with a weight for each chunk; fp32 bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DENSE, bf16, fp32, int8
from ragtag.core.seed import generator
from ragtag.core.types import Bytes, Floats
from ragtag.core.wire import CHUNK_BYTES, DATAGRAM_BYTES, HEADER_BYTES

TABLES = st.integers(0, 4).flatmap(
    lambda k: hnp.arrays(
        np.float32, (k, fp32.elements), elements=st.floats(width=32), fill=st.floats(width=32)
    )
)


def values(k: int, name: str = "values") -> Floats:
    return generator(1, name, k).standard_normal((k, fp32.elements)).astype(np.float32)


def received(chunks: Bytes) -> Bytes:
    """The chunks as rows of a socket buffer, headers between them."""
    buffer = np.full((len(chunks), DATAGRAM_BYTES), 0xEE, np.uint8)
    buffer[:, HEADER_BYTES:] = chunks
    return buffer[:, HEADER_BYTES:]


def test_a_chunk_fills_a_datagram() -> None:
    assert fp32.elements * 4 == CHUNK_BYTES
    assert fp32.encode(values(3)).shape == (3, CHUNK_BYTES)


@given(TABLES)
def test_every_bit_comes_back(table: Floats) -> None:
    """NaNs, infinities, negative zeros and denormals too: the codec claims to be exact."""
    assert fp32.exact
    out = np.empty_like(table)
    fp32.decode(received(fp32.encode(table)), out)
    assert out.tobytes() == table.tobytes()


def test_encoding_does_not_copy() -> None:
    table = values(4)
    assert np.shares_memory(fp32.encode(table), table)


def test_chunks_are_little_endian_floats() -> None:
    assert fp32.encode(np.full((1, fp32.elements), 1.0, np.float32))[0, :4].tobytes() == b"\x00\x00\x80\x3f"


def test_every_chunk_decodes_alone() -> None:
    table = values(5)
    chunks = received(fp32.encode(table))
    for i in range(5):
        out = np.empty((1, fp32.elements), np.float32)
        fp32.decode(chunks[i : i + 1], out)
        assert np.array_equal(out[0], table[i])


@pytest.mark.parametrize(
    "weights", [[1.0], [2.5], [1.0, 1.0, 1.0], [0.5, 0.5], [1.0, 2.0, 0.0, 3.5], [0.0, 0.0]]
)
def test_accumulate_adds_each_chunk_with_its_weight(weights: list[float]) -> None:
    weight = np.array(weights, np.float32)
    table, total = values(len(weights)), values(len(weights), "total")
    expected = total + table * weight[:, None]
    fp32.accumulate(received(fp32.encode(table)), weight, total)
    assert np.array_equal(total, expected)


def test_accumulate_into_rows_of_a_larger_table() -> None:
    table, total = values(2), np.zeros((6, fp32.elements), np.float32)
    fp32.accumulate(fp32.encode(table), np.ones(2, np.float32), total[3:5])
    assert np.array_equal(total[3:5], table)
    assert not total[[0, 1, 2, 5]].any()


def test_what_was_received_is_not_changed() -> None:
    chunks = received(fp32.encode(values(3)))
    before = chunks.copy()
    fp32.accumulate(chunks, np.full(3, 2.0, np.float32), values(3, "total"))
    fp32.decode(chunks, np.empty((3, fp32.elements), np.float32))
    assert np.array_equal(chunks, before)


each = pytest.mark.parametrize("codec", DENSE.values(), ids=DENSE)
short = pytest.mark.parametrize("codec", [bf16, int8], ids=lambda c: c.name)


def table_of(codec: Codec, k: int, name: str = "values") -> Floats:
    draw = generator(1, name, k)
    return (draw.standard_normal((k, codec.elements)) * 10.0 ** draw.integers(-6, 6, (k, 1))).astype(
        np.float32
    )


def decoded(codec: Codec, table: Floats) -> Floats:
    out = np.empty_like(table)
    codec.decode(received(codec.encode(table)), out)
    return out


@each
def test_chunks_are_full_and_decode_alone(codec) -> None:
    table = table_of(codec, 5)
    chunks = codec.encode(table)
    assert chunks.shape == (5, CHUNK_BYTES) and chunks.dtype == np.uint8
    whole = decoded(codec, table)
    for i in range(5):
        assert np.array_equal(decoded(codec, table[i : i + 1])[0], whole[i])
    assert codec.encode(table[:0]).shape == (0, CHUNK_BYTES)


def test_how_far_off_the_short_ones_are() -> None:
    table = table_of(bf16, 20)
    assert (np.abs(decoded(bf16, table) - table) <= np.abs(table) * 2.0**-8).all()
    table = table_of(int8, 20)
    padded = np.zeros((20, 5 * 256), np.float32)
    padded[:, : int8.elements] = np.abs(table)
    top = padded.reshape(20, 5, 256).max(axis=2).repeat(256, axis=1)[:, : int8.elements]
    assert (np.abs(decoded(int8, table) - table) <= top / 127 * 0.501).all()


@short
@given(hnp.arrays(np.float32, (2, 300), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_what_was_decoded_encodes_to_the_same(codec, table) -> None:
    """Around a ring an average is decoded and encoded at each hop; and finite values stay finite."""
    narrow = codec._replace(elements=300)
    once = np.empty_like(table)
    narrow.decode(narrow.encode(table), once)
    twice = np.empty_like(table)
    narrow.decode(narrow.encode(once), twice)
    assert np.isfinite(once).all() and np.array_equal(once, twice)


@short
def test_what_was_decoded_encodes_to_the_same_bytes(codec) -> None:
    """Of ordinary values, whose scales use all their bits."""
    table = table_of(codec, 200)
    chunks = codec.encode(table)
    assert codec.encode(decoded(codec, table)).tobytes() == chunks.tobytes()


@each
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(codec, value) -> None:
    table = table_of(codec, 2)
    table[1, 700 % codec.elements] = value
    out = decoded(codec, table)
    assert np.isfinite(out[0]).all() and not np.isfinite(out[1, 700 % codec.elements])


@short
@pytest.mark.parametrize("weights", [[1.0], [2.5], [0.5, 0.5], [1.0, 2.0, 0.0, 3.5]])
def test_the_short_ones_accumulate_with_weights(codec, weights) -> None:
    weight = np.array(weights, np.float32)
    table, total = table_of(codec, len(weights)), table_of(codec, len(weights), "total")
    expected = total + decoded(codec, table) * weight[:, None]
    chunks = received(codec.encode(table))
    before = chunks.copy()
    codec.accumulate(chunks, weight, total)
    assert np.array_equal(total, expected) and np.array_equal(chunks, before)


@each
@given(noise=st.binary(min_size=CHUNK_BYTES, max_size=CHUNK_BYTES))
def test_any_bytes_decode(codec, noise) -> None:
    out = np.zeros((1, codec.elements), np.float32)
    codec.decode(np.frombuffer(noise, np.uint8)[None], out)
