"""What the peers of a central state say to each other: versions, keys, and small messages.

A *version* of a block is ``count << 6 | owner``. So two owners never make the same one, and the higher is the
newer (as Lamport's timestamps, CACM 1978). 0: none. It has 42 bits. In a key its low 32 take the round's
place, and the others stand above the block's number.

| stage | from, to | round | heard | weight |
|---|---|---|---|---|
| PUSH | peer, owner | the update's number | version that each chunk is to be added to; pace | the update's |
| PULL (with the version known) | peer, owner | number | - | - |
| STATE | owner, peer | version | whose updates are new in it | the number's low bits, clock, staleness |
| ASK, TELL | owner, all; back | number | - | - |
| FETCH, COPY | owner, holder; back | number | version of each chunk | - |
| HOLD | owner, peer | the update's number | - | - |

PUSH, STATE and COPY with ``NACK`` ask for chunks again (``rounds.repair``). HOLD: the answer takes a while (a
barrier), but the owner lives.

Where peers step in groups (``grouping``), an update says how long its peer's steps take (its *pace*), and the
group's *clock* as its peer knows it: 1 to 63, round and round, so that either of two is ahead; 0: none.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragtag.core.types import MessageKey, PeerId, Run
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.rounds.base import BLOCK_BITS, whole_message

PUSH, STATE, PULL, ASK, TELL, FETCH, COPY, HOLD = range(8)
BLOCKS_MAX = 32
"""The most blocks, however large the crew: enough to share among its peers, few enough to send."""
COUNT_MAX = (1 << 36) - 1
BELIEVED = COUNT_MAX >> 1
"""No block comes as far as this: a higher count is made up."""
LEAD_MAX = (1 << 16 - BLOCK_BITS) - 1
"""The largest lead that a PUSH can tell. It stands above the block's number."""
COPIES = 3
"""A small message has so many copies of its row, since losing it costs a deadline."""

_OWNER_BITS = 6
_U32 = 0xFFFFFFFF
_BLOCK = (1 << BLOCK_BITS) - 1
_STALE_MAX = 0x3FF
_CLOCK_BITS = 6
_CLOCKS = (1 << _CLOCK_BITS) - 1
_VERSION_BITS = 48
_VERSION_MASK = (1 << _VERSION_BITS) - 1
_PACES, _OCTAVE = 0xFFFF, 1024
_ASKED = struct.Struct("<Q")
_TOLD = struct.Struct(f"<QQ{BLOCKS_MAX}Q")


def version_of(count: int, owner: PeerId) -> int:
    """A version's number. Raises RuntimeError: there have been as many as can be numbered."""
    if count > COUNT_MAX:
        raise RuntimeError(f"a block of the central state has had {COUNT_MAX} versions, all that there are")
    return count << _OWNER_BITS | owner


def count_of(version: int) -> int:
    """How many versions of the block there were up to this one."""
    return version >> _OWNER_BITS


def state_key(channel: int, version: int, block: int) -> MessageKey:
    """The key of a block at a version."""
    return MessageKey(channel, version & _U32, STATE, version >> 32 << BLOCK_BITS | block)


def block_of(key: MessageKey) -> int:
    """The block that a key names."""
    return key.block & _BLOCK


def state_version(key: MessageKey) -> int:
    """The version that a key of ``state_key`` names."""
    return key.block >> BLOCK_BITS << 32 | key.round


def echo(number: int, stale: int, clock: int = 0) -> float:
    """The update's number, its staleness and the clock, in a float32 that holds them exactly."""
    return float(((number & 0xFF) << _CLOCK_BITS | clock) << 10 | min(stale, _STALE_MAX))


def echoed(weight: float) -> tuple[int, int, int]:
    """The low bits of the number, the staleness, the clock; (-1, 0, 0): it makes no sense."""
    if not 0 <= weight < 1 << 24 or weight != int(weight):
        return -1, 0, 0
    bits = int(weight)
    return bits >> 16, bits & _STALE_MAX, bits >> 10 & _CLOCKS


def ahead(clock: int, other: int) -> bool:
    """Whether a group's clock is ahead of the other. Never, where one of them is 0."""
    return bool(clock and other and 1 <= (clock - other) % _CLOCKS <= _CLOCKS // 2)


def later(clock: int, other: int) -> int:
    """The clock that is ahead."""
    return other if not clock or ahead(other, clock) else clock


def ticked(clock: int) -> int:
    """The clock after a step."""
    return clock % _CLOCKS + 1


def clock_in(lead: int) -> int:
    """The clock that an update's key carries above its block's number."""
    return min(lead, _CLOCKS)


def with_pace(versions: NDArray[np.uint64], step_s: float | None) -> NDArray[np.uint64]:
    """Versions, and above them how long a peer's steps take (to a 1,024th of an octave)."""
    if step_s is None or not 0 < step_s < math.inf:
        return versions
    code = min(_PACES, max(1, round((math.log2(step_s) + 32) * _OCTAVE)))
    return versions | np.uint64(code << _VERSION_BITS)


def without_pace(given: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], float | None]:
    """The versions, and how long the peer's steps take (``None``: it has not said)."""
    code = int(given[0] >> np.uint64(_VERSION_BITS)) if len(given) else 0
    step_s = 2.0 ** (code / _OCTAVE - 32) if code else None
    return given & np.uint64(_VERSION_MASK), step_s


def small(peer: PeerId, key: MessageKey, blob: bytes) -> Run:
    """A message without values, in ``COPIES`` rows."""
    row = np.frombuffer(blob.ljust(CHUNK_BYTES, b"\0"), np.uint8)[None, :]
    payload = np.repeat(row, COPIES, axis=0)
    return whole_message(peer, key, payload, np.zeros(COPIES, np.float32), np.zeros(COPIES, np.uint64))


def blob_of(run: Run) -> bytes | None:
    """What such a message says; ``None``: none of its rows came."""
    for i, row in enumerate(run.payload):
        if run.mask is None or run.mask[i]:
            return bytes(row.tobytes())
    return None


def encode_pull(version: int) -> bytes:
    """A request for a block, with the version that the asker has."""
    return _ASKED.pack(version)


def decode_pull(blob: bytes) -> int:
    """The version that an asker has; 0: none, or one that cannot be."""
    version = int(_ASKED.unpack_from(blob)[0]) if len(blob) >= _ASKED.size else 0
    return version if count_of(version) <= BELIEVED else 0


def encode_ask(blocks: list[int]) -> bytes:
    """A question to all: which versions they have of these blocks."""
    return _ASKED.pack(_bits(blocks))


def decode_ask(blob: bytes, n_blocks: int) -> list[int]:
    """The blocks that a question names."""
    if len(blob) < _ASKED.size:
        return []
    return _names(_ASKED.unpack_from(blob)[0], n_blocks)


class Holdings(NamedTuple):
    """What a peer has: the version of its copy of each block asked for, and the blocks that it owns."""

    versions: dict[int, int]
    mine: frozenset[int]


def encode_holdings(told: Holdings) -> bytes:
    """A peer's holdings as bytes."""
    versions = [told.versions.get(block, 0) for block in range(BLOCKS_MAX)]
    return _TOLD.pack(_bits(list(told.versions)), _bits(list(told.mine)), *versions)


def decode_holdings(blob: bytes, n_blocks: int) -> Holdings | None:
    """A peer's holdings from bytes; ``None``: they make no sense."""
    if len(blob) < _TOLD.size:
        return None
    blocks, mine, *versions = _TOLD.unpack_from(blob)
    known = _names(blocks, n_blocks)
    if any(count_of(versions[block]) > BELIEVED for block in known):
        return None
    return Holdings(
        {block: versions[block] for block in known}, frozenset(_names(mine, n_blocks)) & set(known)
    )


def _bits(blocks: list[int]) -> int:
    return sum(1 << block for block in set(blocks))


def _names(bits: int, n_blocks: int) -> list[int]:
    return [block for block in range(n_blocks) if bits >> block & 1]
