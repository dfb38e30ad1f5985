"""fp32: bit for bit, from strided socket buffers, with a weight for each chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ragtag.codecs.dense import fp32
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
