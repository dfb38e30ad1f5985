"""One rank's message for one bucket: a head, and fragments (``ragtag.codecs.sparse.wire``), in a fixed room.

All ranks give an all-gather the same number of bytes. How many that are follows from what all ranks wanted
to send last time, which each head says; fragments that do not fit go back into the residual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ragtag.core.types import Bytes
from ragtag.core.wire import CHUNK_BYTES
from ragtag.hooks.backward import Names

HEAD_BYTES = 64
FINE, GRADIENT, SUM = 0, 1, 2
_GRAIN = 64
_VALUE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "2bit": 0.25}


class Head(NamedTuple):
    """What stands in front of a rank's message.

    step: of this rank.
    wanted, sent: bytes of fragments there are, and in the message.
    fault: FINE, GRADIENT (a gradient is not finite) or SUM (gradient plus residual is not).
    number: of the first such parameter (-1: unknown).
    nans, infinite, values: how many of that parameter's.
    """

    step: int
    wanted: int = 0
    sent: int = 0
    fault: int = FINE
    number: int = -1
    nans: int = 0
    infinite: int = 0
    values: int = 0


class Fitted(NamedTuple):
    """The fragments that fit into a message.

    wanted: bytes of all fragments.
    payload: those that fit.
    fragments: how many these are.
    """

    wanted: int
    payload: Bytes
    fragments: int


def first_room(k: int, d: int, values: str) -> int:
    """Bytes that k of d entries take at most, or nearly so: nothing is known yet.

    Rice-coded gaps need about log2(d/k) + 2 bits, indices in blocks 16 and a header for each 64K.
    """
    per_entry = _VALUE_BYTES[values] + max(16.0, math.log2(max(1.0, d / k)) + 4) / 8
    needed = k * per_entry + 8 * math.ceil(d / 65536) + k / 32
    return round_up(needed * CHUNK_BYTES / (CHUNK_BYTES - 64) + 64)


def round_up(n_bytes: float) -> int:
    """To a whole number of grains."""
    return math.ceil(n_bytes / _GRAIN) * _GRAIN


def fit(chunks: Bytes, room: int) -> Fitted:
    """Fragments (uint8 ``[n, 1088]``) as bytes, less the last one's zeros, as many as fit into ``room``."""
    flat = chunks.reshape(-1)
    if not len(flat):
        return Fitted(0, flat, 0)
    wanted = (len(chunks) - 1) * CHUNK_BYTES + int(np.flatnonzero(chunks[-1])[-1]) + 1
    if wanted <= room:
        return Fitted(wanted, flat[:wanted], len(chunks))
    fragments = room // CHUNK_BYTES
    return Fitted(wanted, flat[: fragments * CHUNK_BYTES], fragments)


def pack(head: Head, payload: Bytes, room: int) -> Bytes:
    """A message, uint8 ``[64 + room]``: the head, the fragments, zeros."""
    message = np.zeros(HEAD_BYTES + room, np.uint8)
    message[:HEAD_BYTES].view(np.int64)[: len(head)] = head
    message[HEAD_BYTES : HEAD_BYTES + len(payload)] = payload
    return message


def unpack(message: Bytes) -> tuple[Head, Bytes]:
    """The head and the fragments. Raises ValueError where they cannot be."""
    head = Head(*message[:HEAD_BYTES].view(np.int64).tolist())
    if not 0 <= head.sent <= len(message) - HEAD_BYTES:
        raise ValueError(f"a message says it has {head.sent} bytes in a room of {len(message) - HEAD_BYTES}")
    chunks = np.zeros((math.ceil(head.sent / CHUNK_BYTES), CHUNK_BYTES), np.uint8)
    chunks.reshape(-1)[: head.sent] = message[HEAD_BYTES : HEAD_BYTES + head.sent]
    return head, chunks


def complaint(faults: Sequence[tuple[int, Head]], names: Names) -> str:
    """What ranks reported of one step, in words: the same on every rank."""
    rank, head = min(faults)  # callbacks run in any order
    others = len({number for number, _ in faults} - {rank})
    where = names.described(head.number)
    also = f" (and {others} more ranks have such values)" if others else ""
    if head.fault == GRADIENT:
        counts = f"{head.nans} NaN and {head.infinite} infinite of {head.values} values"
        what = f"the gradient of {where} has {counts}"
    else:
        what = f"gradient plus residual overflow in the bucket of {where}"
    return (
        f"rank {rank}: {what}{also}. Nothing of that bucket was sent, residuals are finite; this step must "
        "not be taken on any rank (all raise this). Lower the learning rate or clip gradients; with "
        'GradScaler, give not_finite="skip"'
    )
