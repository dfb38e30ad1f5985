"""The datagram: offsets as documented, every changed bit found, strays refused."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core import seed, wire
from ragtag.core.types import Bytes

ME = wire.Identity("crew", 3, 0xABCD)


def datagrams(k: int, identity: wire.Identity = ME, **fields: object) -> Bytes:
    """``k`` datagrams of random chunks to ``identity``, tagged."""
    rows = seed.generator(0, "datagrams", k).integers(0, 256, (k, wire.DATAGRAM_BYTES), dtype=np.uint8)
    headers = wire.headers_of(rows)
    headers["version"] = wire.VERSION
    headers["crew"], headers["dest"], headers["kind"] = identity.crew_id, identity.peer, wire.Kind.DATA
    for name, value in fields.items():
        headers[name] = value
    headers["tag"] = wire.tags(rows, identity.key)
    return rows


def test_sizes() -> None:
    assert wire.HEADER_BYTES == wire.HEADER.itemsize == 64
    assert wire.DATAGRAM_BYTES == 1152
    assert wire.DATAGRAM_BYTES + 40 + 8 == 1200  # IPv6 header, UDP header


def documented_fields() -> list[tuple[int, str, str]]:
    """(offset, type, field) as the table in the module's docstring says."""
    assert wire.__doc__ is not None
    fields = []
    for offsets, kind, names in re.findall(r"^\| ([\d, ]+) \| (\w+) \| ([\w, ]+) \|", wire.__doc__, re.M):
        for offset, name in zip(offsets.split(","), names.split(","), strict=True):
            fields.append((int(offset), kind, name.strip()))
    return fields


def test_the_header_is_as_documented() -> None:
    types = {"u8": "u1", "u16": "<u2", "u32": "<u4", "u64": "<u8", "f32": "<f4"}
    fields = documented_fields()
    assert [name for _, _, name in fields] == list(wire.HEADER.names or ())
    for offset, kind, name in fields:
        dtype, at = wire.HEADER.fields[name][:2]  # type: ignore[index]
        assert (at, dtype) == (offset, np.dtype(types[kind])), name


def test_a_header_byte_by_byte() -> None:
    """Fixed by struct, apart from numpy: another implementation must write the same 64 bytes."""
    row = np.zeros((1, wire.DATAGRAM_BYTES), np.uint8)
    header = wire.headers_of(row)
    values = (
        1,
        2,
        0x0304,
        5,
        6,
        7,
        8,
        0x1122334455667788,
        0x99AABBCCDDEEFF00,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
        1.5,
        16,
    )
    header[0] = values
    assert row[0, :64].tobytes() == struct.pack("<BBHHHIIQQIIBBHIIfQ", *values)


def flipped(row: Bytes) -> Bytes:
    """Every copy of ``row`` with one bit changed."""
    bits = np.unpackbits(row)
    return np.packbits(bits[None, :] ^ np.eye(len(bits), dtype=np.uint8), axis=1)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_tag_finds_every_changed_bit(n: int) -> None:
    row = datagrams(n)[-1]
    assert wire.tags(row[None], ME.key) == wire.headers_of(row[None])["tag"]
    changed = flipped(row)
    assert len(changed) == wire.DATAGRAM_BYTES * 8
    assert (wire.tags(changed, ME.key) != wire.headers_of(changed)["tag"]).all()


@given(st.data())
def test_the_tag_finds_any_changed_word(data: st.DataObject) -> None:
    row = datagrams(1)[0].copy()
    word = data.draw(st.integers(0, wire.DATAGRAM_BYTES // 8 - 1))
    new = data.draw(st.integers(0, 2**64 - 1))
    words = row.view("<u8")
    same = int(words[word]) == new
    words[word] = new
    assert bool(wire.tags(row[None], ME.key)[0] == wire.headers_of(row[None])["tag"][0]) == same


def test_the_tag_is_keyed_by_the_crews_name() -> None:
    rows = datagrams(64)
    other = wire.Identity("other crew", ME.peer, ME.schema)
    assert (wire.tags(rows, other.key) != wire.headers_of(rows)["tag"]).all()


def test_tags_of_a_table_are_tags_of_its_rows() -> None:
    rows = datagrams(9)
    assert np.array_equal(wire.tags(rows, 1), [wire.tags(row[None], 1)[0] for row in rows])


def test_tags_scatter() -> None:
    """Datagrams that differ in one counter have tags that differ in about half of their bits."""
    rows = np.repeat(datagrams(1), 256, axis=0)
    wire.headers_of(rows)["seq"] = np.arange(256)
    tags = wire.tags(rows, ME.key)
    assert len(np.unique(tags)) == 256
    changed = np.bitwise_count(tags[1:] ^ tags[:-1])
    assert 24 < changed.mean() < 40


def test_tags_read_a_received_train_in_place() -> None:
    """Rows of a larger socket buffer, as the kernel's coalescing leaves them, are read without a copy."""
    buffer = np.zeros(5 * wire.DATAGRAM_BYTES, np.uint8)
    table = buffer.reshape(5, -1)
    table[:] = datagrams(5)
    assert np.shares_memory(wire.headers_of(table), buffer)
    assert np.array_equal(wire.tags(table, ME.key), wire.headers_of(table)["tag"])


def test_wellformed_takes_what_is_meant_for_this_peer() -> None:
    for kind in wire.Kind:
        assert wire.wellformed(wire.headers_of(datagrams(4, kind=kind)), ME).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 0),
        ("version", 1),
        ("crew", 1),
        ("dest", 2),
        ("kind", max(wire.Kind) + 1),
        ("kind", 255),
    ],
)
def test_wellformed_refuses_strays_row_by_row(field: str, value: int) -> None:
    headers = wire.headers_of(datagrams(3))
    headers[field][1] = value
    assert wire.wellformed(headers, ME).tolist() == [True, False, True]


@given(st.binary(min_size=wire.HEADER_BYTES, max_size=wire.HEADER_BYTES))
def test_random_headers_are_judged_field_by_field(noise: bytes) -> None:
    header = np.frombuffer(noise, wire.HEADER)
    version, kind, crew = struct.unpack_from("<BBH", noise)
    (dest,) = struct.unpack_from("<H", noise, 6)
    fits = (version, crew, dest) == (wire.VERSION, ME.crew_id, ME.peer)
    assert wire.wellformed(header, ME).tolist() == [fits and kind <= max(wire.Kind)]


def test_crews_differ_by_name() -> None:
    assert wire.name_hash("a") != wire.name_hash("b")
    assert wire.Identity("a", 0).key != wire.Identity("b", 0).key
    assert wire.Identity("a", 0).key == wire.Identity("a", 1, 7).key


@given(st.integers(1, 10**7), st.integers(1, 4096))
def test_n_chunks_is_just_enough(n_values: int, elements: int) -> None:
    n = wire.n_chunks(n_values, elements)
    assert (n - 1) * elements < n_values <= n * elements
