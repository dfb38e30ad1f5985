"""Loops over tables of datagrams that numba compiles; ``Framer.compile`` imports them.

Each loop reads a row once, while it is in the cache. It writes the same bytes as ``ragtag.core.wire`` and
``ragtag.network.link.frame`` do without it, and accepts the same rows.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragtag.core.compiled import compile_
from ragtag.core.types import WEIGHT_MAX, Bools, Floats
from ragtag.core.wire import CHUNK_BYTES, DATAGRAM_BYTES, FINAL, HEADER_BYTES, ODD_INTS, TAG_WORD, Kind, Words

_HEADER, _CHUNK = HEADER_BYTES // 8, CHUNK_BYTES // 8  # in words; a loop of constant length vectorises
_TAG = TAG_WORD
_O0, _O1, _SUM, _O3, _O4, _O5, _O6, _O7 = (np.uint64(odd) for odd in ODD_INTS)
_FINAL, _HALF = np.uint64(FINAL), np.uint64(32)
_FIRST, _BYTE = np.uint64(0xFFFF0000FFFF00FF), np.uint64(0xFF)  # all but the kind and the sender
_KIND, _WEIGHT = np.uint64(8), np.uint64(32)
_DATA, _LAST, _ASK = np.uint64(Kind.DATA), np.uint64(Kind.LAST), np.uint64(Kind.ASK)
_WHO, _NEXT, _U32 = ~np.uint64(0xFF00), np.uint64(1 << 32), np.uint64(0xFFFFFFFF)
_U16 = np.uint64(0xFFFF)
_WEIGHT_MOST = np.uint64(np.float32(WEIGHT_MAX).view(np.uint32))
"""The most that a weight may be, as bits: of two floats from 0 on the larger one has the larger bits."""
_warming = Lock()


@compile_
def _tag(header: Words, total: np.uint64, key: np.uint64) -> np.uint64:
    total = total * _SUM + header[0] * _O0 + header[1] * _O1 + header[3] * _O3 + header[4] * _O4
    total += header[5] * _O5 + header[6] * _O6 + header[7] * _O7 + key
    total ^= total >> _HALF
    total *= _FINAL
    total ^= total >> _HALF
    return total


@compile_
def check(table: Words, headers: Words, first: np.uint64, key: np.uint64) -> bool:
    """Copy the headers of ``table``, uint64 ``[k, 144]``, to ``headers``, ``[k, 8]``, and check them.

    Returns whether all rows are data, begin with ``first`` (but for kind and sender), have the right tag, and
    a weight from 0 to ``WEIGHT_MAX``. If not, the caller finds out which row and why.
    """
    fine = True
    for i in range(table.shape[0]):
        total = np.uint64(0)
        for j in range(_CHUNK):
            total += table[i, _HEADER + j]
        header = headers[i]
        for j in range(_HEADER):
            header[j] = table[i, j]
        kind = header[0] >> _KIND & _BYTE
        fine &= header[_TAG] == _tag(header, total, key)
        fine &= header[0] & _FIRST == first
        fine &= (kind == _DATA) | (kind == _LAST) | (kind == _ASK)
        fine &= header[6] >> _WEIGHT <= _WEIGHT_MOST
    return fine


@compile_
def of_their_trains(headers: Words, ends: NDArray[np.int64], senders: NDArray[np.int64]) -> bool:
    """Whether each of ``headers``, uint64 ``[k, 8]``, is in the name of its train's sender.

    ends, senders: of each train the row after its last one, and who sends from where it came.
    """
    fine, row = True, 0
    for train in range(len(ends)):
        sender = np.uint64(senders[train])
        for i in range(row, ends[train]):
            fine &= headers[i, 0] >> _HALF & _U16 == sender
        row = ends[train]
    return fine


@compile_
def head(
    headers: Words,
    seqs: Words,
    chunks: NDArray[np.int64],
    weight: Floats,
    heard: Words,
    first: np.uint64,
    epoch: np.uint64,
    what: np.uint64,
    which: np.uint64,
    total: np.uint64,
) -> None:
    """Write headers of consecutive datagrams, uint64 ``[k, 8]``, without their tags.

    seqs, chunks, weight, heard: ``[k]``. first, epoch, what, which, total: what the first, second, fifth,
    sixth and seventh word of all have in common.
    """
    bits = weight.view(np.uint32)
    for i in range(headers.shape[0]):
        headers[i, 0], headers[i, 1] = first, epoch | seqs[i] & _U32
        headers[i, 2] = headers[i, 3] = 0
        headers[i, 4], headers[i, 5] = what, np.uint64(chunks[i]) << _HALF | which
        headers[i, 6], headers[i, 7] = np.uint64(bits[i]) << _HALF | total, heard[i]


@compile_
def fill(table: Words, headers: Words, chunks: Words, sums: Words, key: np.uint64) -> None:
    """Write whole datagrams to ``table``, uint64 ``[k, 144]``: headers ``[k, 8]`` and chunks ``[k, 136]``.

    The headers get their tags in ``table``. The sums of the chunks' words go to ``sums``, ``[k]``.
    """
    for i in range(table.shape[0]):
        total = np.uint64(0)
        for j in range(_CHUNK):
            word = chunks[i, j]
            total += word
            table[i, _HEADER + j] = word
        sums[i] = total
        for j in range(_HEADER):
            table[i, j] = headers[i, j]
        table[i, _TAG] = _tag(headers[i], total, key)


@compile_
def stamp(table: Words, headers: Words, sums: Words, key: np.uint64) -> None:
    """Write headers, uint64 ``[k, 8]``, with their tags before chunks that are in ``table`` already.

    sums: what ``fill`` found for these chunks, ``[k]``.
    """
    for i in range(table.shape[0]):
        for j in range(_HEADER):
            table[i, j] = headers[i, j]
        table[i, _TAG] = _tag(headers[i], sums[i], key)


@compile_
def cut(headers: Words, edges: NDArray[np.int64], asks: Bools) -> int:
    """Where runs of consecutive chunks begin in ``headers``, uint64 ``[k, 8]``; returns how many there are.

    edges, asks: ``[k]``; of each run, the first row, and whether any of its rows asks for an answer.
    """
    runs = 0
    for i in range(headers.shape[0]):
        row, kind = headers[i], headers[i, 0] >> _KIND & _BYTE
        begins = True
        if i > 0:
            before = headers[i - 1]
            begins = before[0] >> _KIND & _BYTE == _LAST
            begins |= row[0] & _WHO != before[0] & _WHO
            begins |= row[1] >> _HALF != before[1] >> _HALF
            begins |= row[4] != before[4]
            begins |= row[5] - before[5] != _NEXT
            begins |= row[6] & _U32 != before[6] & _U32
        if begins:
            edges[runs], asks[runs] = i, False
            runs += 1
        asks[runs - 1] |= kind >= _LAST
    return runs


def warm() -> None:
    """Compile the loops, or load what was compiled before. After that no call compiles anything."""
    kernels: tuple[Any, ...] = (fill, check, stamp, head, of_their_trains, cut)
    with _warming:
        if kernels[-1].signatures:
            return
        rows, key = np.zeros((1, DATAGRAM_BYTES // 8), "<u8"), np.uint64(0)
        headers = np.zeros((1, _HEADER), "<u8")
        fill(rows, headers, np.zeros((1, _CHUNK), "<u8"), np.zeros(1, "<u8"), key)
        check(rows, headers, np.uint64(0), key)
        stamp(rows, headers, np.zeros(1, "<u8"), key)
        one, number = np.zeros(1, "<u8"), np.zeros(1, np.int64)
        head(headers, one, number, np.zeros(1, np.float32), one, key, key, key, key, key)
        of_their_trains(headers, number, number)
        cut(headers, np.zeros(1, np.int64), np.zeros(1, np.bool_))
        for kernel in kernels:
            kernel.disable_compile()
