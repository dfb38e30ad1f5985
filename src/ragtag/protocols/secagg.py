"""Secure aggregation: peers learn the sum of their vectors, and of no other peer's vector anything else.

Bell, Bonawitz, Gascón, Lepoint, Raykova, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead"
(CCS 2020, SecAgg+), on top of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning" (CCS 2017). Two neighbours i < j agree on a key, and expand it: i adds what comes of it to its
vector, j subtracts it, so in the sum it is gone. Each client adds a second mask, of a seed of its own.
Neighbours hold shares of both, Shamir's: for a client that is in the sum they give those of its seed, for
one that has dropped out those of its key. Nobody gives both, or the client's vector would lie open.

In the papers one server adds up. Here one peer, the *aggregator*, decides who is in the sum and collects
shares. Masked vectors go by blocks, each to a peer that *owns* it, as in a reduce-scatter.

| stage | client to aggregator | aggregator to client |
|---|---|---|
| KEYS | two public keys, a digest of its seed | its neighbours' |
| SHARES | for each neighbour, sealed: a share of seed and key | those for it, who is here, who owns what |
| MASKED | an owner: whose parts it has, and their masked sum | who is in the sum, or ``again`` |
| UNMASK | for each neighbour a share of its seed or of its key | all mask keys, or why there is no sum |
| BLOCKS | an owner, to all: its block of the sum | |

In MASKED each client gives its masked vector to owners, a block to each (``Part``). The aggregator keeps the
masked sum of each block. Until it has all of them over the same clients it asks ``again``, for the clients
that are left, and blocks of owners that are silent go to others, which fetch the parts. After UNMASK an owner
takes the masks off its block, and the aggregator those whose owner has dropped out meanwhile. So a client
that drops out costs time, and no block.

A client that does not answer a stage in time has dropped out, and is in no later one; it may take the sum.
``SecureSetting`` says how many may. Neighbours are those on a ring whose order a seed draws that all know, so
a peer's are a random set. ``ring_for`` says how many it takes, which grows with the logarithm of the number
of clients.

**What holds.** Members that do as they should, and compare what they have seen, learn the sum of at least
``survivors_min`` clients. The argument is by comparison with one server. It gets each client's whole masked
vector and all shares, and the papers show what it can learn together with ``colluders`` clients. All that
members see here they could compute from what that server sees: an owner has one block of each masked vector,
the aggregator has sums of such blocks, and the mask keys which all get are those that the server derives
from its shares. Words of a mask are used once, since the words of a block are those of its place in the
whole vector. There is one set of clients for all blocks: the aggregator names it, a client gives shares for
one set only, once, and whatever set an ``again`` names, its answer is a sum of masked parts.
A client gives one answer in a round, and a threshold is more than half of the neighbours; so nobody comes to
both secrets of one client, unless more of its neighbours collude than was planned for. **What does not.** The
aggregator must tell all the same of who is here and who is in the sum. Clients do not compare that (Bonawitz
et al.'s consistency check). An aggregator that tells them different things gets a client's seed of some, of
others the keys of those that it has masks with, and with these its vector, though each set that it names has
``survivors_min``. Keys are not signed: one that replaces the keys which a client gets by its own has all its
shares and masks, though all hear of one set. So comparing sets is of use only where keys are bound
to peers besides. Sums of two rounds with one client between them tell that client's vector. A
client may add what it likes, within 2^32, and an owner may do so with its block.

Values are clipped to ``clip`` and rounded to multiples of 1 / ``scale``, a power of two, in 32 bits without
overflow. So a sum is exact in quantised values, and differs from that of the clipped values by at most half
a step for each client. ``CHECKS`` zeros follow each block; a sum in which they are not 0 has masks left.
With ``deviation`` each client adds integer noise of its own before the masks (``ragtag.privacy.secagg``).

``SecureClient`` and ``SecureAggregator`` are machines: ``step(now_s, event) -> effects``. Their random bytes
come from the caller, and what comes from others is checked before it is used. The aggregator and owners wait
as long as such stages took before, with head-room (``SecureWaits``); longer where too few would be left.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import combinations, islice

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from ragtag.core.deadline import Deadline
from ragtag.core.errors import Error, NotFinite
from ragtag.core.seed import permutation, stream_key
from ragtag.core.types import Arm, Expired, Floats, Left, PeerId, Start, Timer
from ragtag.protocols.sealing.noise import KEY_BYTES, TAG_BYTES, HandshakeError, KeyPair

Words = NDArray[np.uint32]
Random = Callable[[int], bytes]
"""Random bytes, of so many."""
PRIME = (1 << 256) + 297
"""The field of the shares: the smallest prime above all keys of 32 bytes."""
SHARE_BYTES = 33
DIGEST_BYTES = 32
ADVERT_BYTES = 2 * KEY_BYTES + DIGEST_BYTES
SEALED_BYTES = 2 * SHARE_BYTES + TAG_BYTES
REVEALED_BYTES = 1 + SHARE_BYTES
OPENING_BYTES = KEY_BYTES + 1
"""A mask's key, and whether it is to be added."""
CHECKS = 4
"""Zeros behind each block: masks that are left make all of them 0 once in 2^128."""
NOISE_STEPS = 1 << 16
"""A client's noise has a standard deviation of so many steps at most: no finer steps are of use."""
_NOISE_STEPS_MIN = 16
_NOISE_ROOM = 40.0
"""Standard deviations of all noise together for which a sum has room."""
_BLOCK = 1 << 16
"""Mask words at a time: 256 KiB, which a core's cache holds."""
_ZEROS = bytes(4 * _BLOCK)
_TRIES_MAX = 1024
REASON_BYTES = 400
_NONE, _SEED, _KEY = range(3)
_CIPHER_WORDS = 4
"""Of AES: a block begins with one, so that its part of a stream can be made alone."""
_ASKED = struct.Struct("<H")
_SUMMED = struct.Struct("<HH")
_OWNER = struct.Struct("<H")
_LEAST_S = 1e-6
_FEW = 4
"""After fewer stages than these the head-room is larger: so many times after one."""


class SecureStage(IntEnum):
    """What a client sends next."""

    KEYS = 0
    SHARES = 1
    MASKED = 2
    UNMASK = 3
    BLOCKS = 4
    OVER = 5


class NoSecureSum(Error, RuntimeError):
    """A round of secure aggregation has ended without a sum; the caller may begin another, with new keys.

    stage: in which it ended.
    """

    def __init__(self, stage: SecureStage, why: str) -> None:
        super().__init__(f"secure aggregation, stage {stage.name}: {why}")
        self.stage = stage


# -- Shares


def shares_of(
    secret: int, threshold: int, count: int, draw: Callable[[int], int], prime: int = PRIME
) -> list[int]:
    """Shamir's shares (CACM 1979) at 1..count: any ``threshold`` give the secret, fewer say nothing of it.

    draw: a uniform number below its argument.
    Raises ValueError: the field is too small for them, or the threshold is not in 1..count.
    """
    if not 0 <= secret < prime or not 1 <= threshold <= count < prime:
        raise ValueError(f"{count} shares of which {threshold} suffice, in a field of {prime}")
    polynomial = [secret, *(draw(prime) for _ in range(threshold - 1))]
    return [_at(polynomial, x, prime) for x in range(1, count + 1)]


def secret_of(shares: Mapping[int, int], prime: int = PRIME, at: int = 0) -> int:
    """The value at ``at`` (0: the secret) of the polynomial of lowest degree through these shares.

    shares: by where each is the value, at least one.
    """
    above, below = 0, 1  # one fraction, since an inverse takes as long as many products
    for x, y in shares.items():
        own, under = y, 1
        for other in shares:
            if other != x:
                own, under = own * (at - other) % prime, under * (x - other) % prime
        above, below = (above * under + own * below) % prime, below * under % prime
    return above * pow(below, -1, prime) % prime


def genuine_secret(
    shares: Mapping[int, int], threshold: int, genuine: Callable[[int], bool]
) -> tuple[int, list[int]] | None:
    """The secret that ``genuine`` knows, and where shares are not its own; ``None``: none was found.

    Shares are tried in turn, ``_TRIES_MAX`` sets of them at most.
    """
    for some in islice(combinations(sorted(shares), threshold), _TRIES_MAX):
        subset = {x: shares[x] for x in some}
        secret = secret_of(subset)
        if genuine(secret):
            return secret, [x for x in shares if x not in subset and shares[x] != secret_of(subset, at=x)]
    return None


def _at(polynomial: Sequence[int], x: int, prime: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % prime
    return value


def _drawn(random: Random) -> Callable[[int], int]:
    """Uniform to 2^-256: twice as many bits as the field has."""
    return lambda prime: int.from_bytes(random(2 * SHARE_BYTES), "little") % prime


# -- Masks


def add_masks(total: Words, masks: Iterable[tuple[bytes, int]], first: int = 0) -> None:
    """Add masks to a vector, or to a part of it, modulo 2^32, in place.

    total: uint32 ``[m]``, the vector's words from ``first`` on, a multiple of 4.
    masks: AES-256 keys, each used for one mask only, with 1, or -1 to subtract.
    """
    begin = (first // _CIPHER_WORDS).to_bytes(16, "big")
    streams = [(Cipher(algorithms.AES(key), modes.CTR(begin)).encryptor(), sign) for key, sign in masks]
    buffer = bytearray(len(_ZEROS) + 15)
    words = np.frombuffer(buffer, np.uint32, _BLOCK)
    for at in range(0, len(total), _BLOCK):
        part = total[at : at + _BLOCK]
        size = len(part)
        zeros = memoryview(_ZEROS)[: 4 * size]
        for stream, sign in streams:
            stream.update_into(zeros, buffer)
            if sign > 0:
                part += words[:size]
            else:
                part -= words[:size]


def _derived(secret: bytes, *what: object) -> bytes:
    info = "/".join(map(str, what)).encode()
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


# -- Who is whose neighbour


def ring_for(
    n: int, dropouts: int, colluders: int = 1, *, fails: float = 2.0**-20, opens: float = 2.0**-40
) -> tuple[int, int]:
    """The fewest neighbours of each of ``n`` clients, and how many of them must give their shares.

    dropouts: clients that may drop out, at all stages together.
    colluders: members that tell the aggregator all they know, itself among them where it is a member.
    fails: the chance that so many dropouts, whichever, leave some client without enough shares, at most.
    opens: the chance that colluders come to both secrets of a client, or cut the ring in two, at most.

    Neighbours are a random set, so the tails are hypergeometric, summed over clients (CCS 2020, section 3.2).
    Raises ValueError: no ring does, since too many may drop out or collude.
    """
    if n < 3 or dropouts < 0 or colluders < 0:
        raise ValueError(f"{n} clients, {dropouts} dropouts, {colluders} colluders; it takes 3 clients")
    if dropouts + colluders >= n:
        raise ValueError(
            f"{n} clients cannot do with {dropouts} dropouts and {colluders} colluders: allow fewer"
        )
    for degree in [*range(2, n - 1, 2), n - 1]:
        if degree < n - 1 and _cut_chance(n, dropouts + colluders, degree) > opens:
            continue
        for threshold in range(degree // 2 + 1, degree + 1):
            lacking = n * _tail(n - 1, dropouts, degree, degree - threshold)
            both = n * _tail(n - 1, colluders, degree, 2 * threshold - degree - 1)
            if lacking <= fails and both <= opens:
                return degree, threshold
    raise ValueError(f"{n} clients cannot do with {dropouts} dropouts and {colluders} colluders: allow fewer")


def _tail(n: int, marked: int, drawn: int, most: int) -> float:
    """The chance that of ``drawn`` among ``n`` more than ``most`` are marked."""
    ways = sum(
        math.comb(marked, k) * math.comb(n - marked, drawn - k)
        for k in range(most + 1, min(marked, drawn) + 1)
    )
    return ways / math.comb(n, drawn)


def _cut_chance(n: int, missing: int, degree: int) -> float:
    """A bound of the chance that a ring falls apart: degree / 2 in a row miss, at two places."""
    row = degree // 2
    if missing < 2 * row:
        return 0.0
    return n * math.comb(n - row, missing - row) / math.comb(n, missing)


@dataclass(frozen=True)
class SecureSetting:
    """What all take part with, alike.

    n: clients, numbered from 0.
    length: values of a vector.
    clip: values beyond it count as it, or as -clip.
    degree, threshold: neighbours of each, and how many must give shares (``ring_for``).
    survivors_min: no client helps to unmask a sum of fewer, as far as it is told who is in it.
    seed, round: of the ring; keys of one round are no others'.
    blocks: into how many a vector is cut, at most one for each client.
    aggregator: the client that is it, too; it owns the first block.
    deviation: standard deviation of the noise that each client adds, in units of values; 0: none.

    Raises ValueError: what cannot be, or would open a vector.
    """

    n: int
    length: int
    clip: float
    degree: int
    threshold: int
    survivors_min: int
    seed: int = 0
    round: int = 0
    deviation: float = 0.0
    blocks: int = 1
    aggregator: PeerId = 0

    def __post_init__(self) -> None:
        if not 1 <= self.blocks <= self.n or not 0 <= self.aggregator < self.n:
            raise ValueError(f"{self.blocks} blocks and aggregator {self.aggregator} of {self.n} clients")
        if self.length < 1 or not 0 < self.clip < math.inf:
            raise ValueError(f"{self.length} values clipped to {self.clip}; both must be above 0")
        odd = self.degree % 2 == 1 and self.degree < self.n - 1
        if self.n < 3 or not 2 <= self.degree < self.n or odd:
            raise ValueError(f"{self.degree} neighbours of {self.n} clients; an even number below, or all")
        if not self.degree < 2 * self.threshold <= 2 * self.degree:
            raise ValueError(f"{self.threshold} of {self.degree} neighbours; it takes more than half")
        if not 2 <= self.survivors_min <= self.n:
            raise ValueError(f"a sum of {self.survivors_min} of {self.n} clients; it takes 2")
        if self.n >= 1 << 16 or not 2.0**-64 <= self.clip <= 2.0**64:
            raise ValueError(f"{self.n} clients, clip {self.clip}; below 2^16, and from 2^-64 to 2^64")
        if not 0 <= self.deviation <= 2.0**64 or 0 < self.deviation_steps < _NOISE_STEPS_MIN:
            raise ValueError(
                f"noise of deviation {self.deviation} beside values up to {self.clip}: too little to be "
                "counted in whole steps; a lower clip leaves it more"
            )

    @cached_property
    def scale(self) -> float:
        """Steps of a quantised value in 1: the largest power of two with which no sum overflows.

        With noise, no larger than makes the noise ``NOISE_STEPS``.
        """
        room = self.n * self.clip + _NOISE_ROOM * math.sqrt(self.n) * self.deviation
        largest = math.log2(((1 << 31) - 1) / room)
        if self.deviation:
            largest = min(largest, math.log2(NOISE_STEPS / self.deviation))
        return 2.0 ** math.floor(largest)

    @property
    def deviation_steps(self) -> int:
        """Of the noise that each client adds, in steps."""
        return math.ceil(self.deviation * self.scale)

    @property
    def error(self) -> float:
        """How far a sum is from that of the clipped values at most, for each value."""
        return self.n * 0.5 / self.scale

    @cached_property
    def _ring(self) -> tuple[int, ...]:
        return permutation(stream_key(self.seed, "secure aggregation, ring", self.round), self.n)

    @cached_property
    def _places(self) -> dict[PeerId, int]:
        return {peer: place for place, peer in enumerate(self._ring)}

    @cached_property
    def _near(self) -> dict[PeerId, list[PeerId]]:
        """Neighbours of those that were asked for."""
        return {}

    def neighbours(self, peer: PeerId) -> list[PeerId]:
        """Of a client, in the order of their numbers; its neighbours have it as one, too."""
        if peer not in self._near:
            at, reach = self._places[peer], self.degree // 2
            steps = [step for step in range(-reach, reach + 1) if step]
            around = {self._ring[(at + step) % self.n] for step in steps}
            every = self.degree == self.n - 1
            self._near[peer] = sorted(set(range(self.n)) - {peer} if every else around)
        return self._near[peer]

    def hangs_together(self, peers: Collection[PeerId]) -> bool:
        """Whether neighbours among ``peers`` lead from each to each: no part of them has a sum of its own."""
        left = set(peers)
        edge = [left.pop()] if left else []
        while edge:
            near = left.intersection(self.neighbours(edge.pop()))
            left -= near
            edge += near
        return not left

    @cached_property
    def _span(self) -> int:
        """Values of a block."""
        values = -(-self.length // self.blocks)
        return -(-values // _CIPHER_WORDS) * _CIPHER_WORDS

    @property
    def stride(self) -> int:
        """Words of a block, checks and padding included."""
        return self._span + CHECKS

    def owners_among(self, clients: Collection[PeerId], owners: Sequence[PeerId] = ()) -> list[PeerId]:
        """Who owns which block: new owners are among ``clients``, those with the fewest blocks first.

        owners: who stays the owner; -1: the block takes a new one.
        """
        order = sorted(clients, key=lambda peer: (peer - self.aggregator) % self.n)
        found = list(owners)
        if not found:
            first = [(self.aggregator + block) % self.n for block in range(self.blocks)]
            found = [owner if owner in clients else -1 for owner in first]
        load = {peer: found.count(peer) for peer in order}
        for block, owner in enumerate(found):
            if owner < 0:
                found[block] = min(order, key=lambda peer: load[peer])
                load[found[block]] += 1
        return found

    def blocked(self, steps: NDArray[np.int32]) -> Words:
        """Int32 ``[length]`` as uint32 ``[blocks * stride]``, zeros behind each block."""
        words = np.zeros((self.blocks, self.stride), np.uint32)
        whole = self.length // self._span
        words.view(np.int32)[:whole, : self._span] = steps[: whole * self._span].reshape(whole, self._span)
        rest = self.length - whole * self._span
        if rest:
            words.view(np.int32)[whole, :rest] = steps[whole * self._span :]
        return words.reshape(-1)

    def joined(self, words: Words) -> Words:
        """The values' words of uint32 ``[blocks * stride]``: uint32 ``[length]``."""
        values = words.reshape(self.blocks, self.stride)[:, : self._span]
        return values.reshape(-1)[: self.length]

    def masks_left(self, block: Words) -> bool:
        """Whether a block of a sum, uint32 ``[stride]``, is still masked."""
        return bool(block[self._span :].any())

    def quantised(self, values: Floats) -> tuple[Words, int]:
        """float32 ``[length]`` as uint32 ``[blocks * stride]``, and how many were beyond the clip.

        Exact but for the rounding: the scale is a power of two.
        Raises NotFinite, ValueError: another shape.
        """
        if values.shape != (self.length,) or values.dtype != np.float32:
            raise ValueError(f"{values.dtype} {list(values.shape)}; it takes float32 [{self.length}]")
        limit = np.float32(self.clip)
        low, high = values.min(), values.max()
        if not (np.isfinite(low) and np.isfinite(high)):
            raise NotFinite(f"value {int(np.argmin(np.isfinite(values)))} of a vector to be summed")
        beyond = 0
        if low < -limit or high > limit:
            beyond = int(np.count_nonzero(np.abs(values) > limit))
        steps = np.clip(values, -limit, limit)
        steps *= np.float32(self.scale)
        return self.blocked(np.rint(steps, out=steps)), beyond

    def values(self, total: Words) -> Floats:
        """A sum of quantised vectors, uint32 ``[length]``, as float32."""
        return np.asarray(total.view(np.int32) * (1.0 / self.scale), np.float32)

    @property
    def who_bytes(self) -> int:
        """Of a set of clients."""
        return -(-self.n // 8)

    @property
    def sum_bytes(self) -> int:
        """Of an owner's answer about one block."""
        return _SUMMED.size + self.who_bytes + 4 * self.stride

    @property
    def openings_max(self) -> int:
        """Mask keys that all get at most."""
        return self.n + (self.n - self.survivors_min) * self.degree

    def upload_bytes(self) -> int:
        """What all clients send in a round in which nobody drops out, by formula; to themselves, too."""
        shares = self.n * self.degree * (SEALED_BYTES + REVEALED_BYTES)
        parts = self.n * self.blocks * 4 * self.stride
        return self.n * ADVERT_BYTES + shares + parts + self.blocks * self.sum_bytes

    def download_bytes(self) -> int:
        """What all clients get in such a round, the sum with it, by formula; from themselves, too."""
        who = self.who_bytes
        owners = _OWNER.size * self.blocks
        shares = self.degree * (ADVERT_BYTES + SEALED_BYTES) + who + owners
        ends = _ASKED.size + who + owners + 1 + who + owners + self.n * OPENING_BYTES
        return self.n * (shares + ends + self.blocks * 4 * self.stride)

    def mask_key(self, own: KeyPair, public: bytes, a: PeerId, b: PeerId) -> bytes:
        """Of the mask between two clients, from the key pair of one and the public key of the other."""
        return _derived(own.shared(public), "secure aggregation, mask", self.round, min(a, b), max(a, b))

    def seed_key(self, seed: bytes) -> bytes:
        """Of a client's own mask."""
        return _derived(seed, "secure aggregation, own mask", self.round)

    def sealing_key(self, own: KeyPair, public: bytes, source: PeerId, to: PeerId) -> bytes:
        """Of the shares from one client to another: it seals one message."""
        return _derived(own.shared(public), "secure aggregation, shares", self.round, source, to)


# -- What goes between clients and aggregator


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    """From a client: an event of the aggregator, an effect of the client."""

    client: PeerId
    stage: SecureStage
    body: bytes | memoryview


@dataclass(frozen=True, slots=True, eq=False)
class Download:
    """To a client: the other way round.

    stage: that of the uploads which it answers.
    within_s: when the aggregator says something again, at the latest.
    """

    client: PeerId
    stage: SecureStage
    body: bytes | memoryview
    within_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A block of a client's masked vector: an effect of that client, an event of the block's owner."""

    client: PeerId
    block: int
    body: bytes | memoryview


@dataclass(frozen=True, slots=True, eq=False)
class Owns:
    """An owner takes the parts of a block from now on, also those that were sent before."""

    block: int


@dataclass(frozen=True, slots=True, eq=False)
class Unmasked:
    """A block of the sum: an effect of its owner or of the aggregator, an event of all.

    client: that sends it.
    """

    client: PeerId
    block: int
    body: bytes | memoryview


@dataclass(frozen=True, slots=True, eq=False)
class Summed:
    """The round's end: the sum, uint32 ``[length]``, and the clients that are in it."""

    total: Words
    clients: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Unsummed:
    """The round's end without a sum."""

    error: NoSecureSum


SecureEffect = Upload | Download | Part | Owns | Unmasked | Summed | Unsummed | Arm


def _bits(peers: Collection[PeerId], n: int) -> bytes:
    return sum(1 << peer for peer in peers).to_bytes(-(-n // 8), "little")


def _peers(bits: bytes, n: int) -> list[PeerId]:
    whole = int.from_bytes(bits, "little")
    if whole >> n:
        raise ValueError(f"peers beyond {n}")
    return [peer for peer in range(n) if whole >> peer & 1]


def _slots(body: bytes | memoryview, count: int, size: int) -> list[bytes]:
    """``count`` parts of ``size`` bytes. Raises ValueError: there are more bytes or fewer."""
    raw = bytes(body)
    if len(raw) != count * size:
        raise ValueError(f"{len(raw)} bytes for {count} times {size}")
    return [raw[at : at + size] for at in range(0, len(raw), size)]


def sum_block(body: bytes | memoryview) -> int:
    """The block that an owner's answer, of stage MASKED, is about."""
    return int(_SUMMED.unpack_from(body)[1])


def _digest(seed: bytes) -> bytes:
    return hashlib.sha256(b"secure aggregation, seed" + seed).digest()


def _who_owns(peers: Collection[PeerId], owners: Sequence[PeerId], n: int) -> bytes:
    return _bits(peers, n) + b"".join(map(_OWNER.pack, owners))


def _read_who_owns(raw: bytes, setting: SecureSetting) -> tuple[frozenset[PeerId], list[PeerId]]:
    """A set of peers and the owners of blocks. Raises ValueError: there are other bytes."""
    who = setting.who_bytes
    owners = [_OWNER.unpack(one)[0] for one in _slots(raw[who:], setting.blocks, _OWNER.size)]
    return frozenset(_peers(raw[:who], setting.n)), owners


class SecureWaits:
    """How long one peer waits in each stage: as long as such stages took before, with head-room.

    most_s: before there was such a stage (of the first, which lasts until all have called, before there were
        ``_FEW``), and where going on without those that lack would end the round.
    floor_s: of the clock by which messages are taken.
    """

    def __init__(self, most_s: float) -> None:
        self.most_s, self.floor_s = most_s, _LEAST_S
        self._deadlines: dict[str, Deadline] = {}
        self._seen: dict[str, int] = {}

    def budget_s(self, what: str) -> float:
        """At most ``most_s``."""
        seen = self._seen.get(what, 0)
        if seen < (_FEW if what == SecureStage.KEYS.name else 1):  # how far apart peers call, too
            return self.most_s
        deadline = self._deadlines[what]
        deadline.floor_s = self.floor_s
        return min(self.most_s, deadline.budget_s(max(1.0, _FEW / seen)))

    def whole(self, what: str, took_s: float) -> None:
        """All that was waited for came."""
        if what not in self._deadlines:
            self._deadlines[what] = Deadline(max(_LEAST_S, took_s), quantile=1.0, headroom=2.0)
        self._seen[what] = self._seen.get(what, 0) + 1
        self._deadlines[what].completed(took_s)

    def missed(self, what: str) -> None:
        """Something had not come."""
        if what in self._deadlines:
            self._deadlines[what].missed()

    def late(self, what: str, took_s: float) -> None:
        """Something came after its deadline."""
        if what in self._deadlines:
            self._deadlines[what].late(took_s)


class _Owned:
    """A block that a client owns: masked parts, and what was told of them.

    told: of which clients its newest answer has the sum.
    """

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self.parts: dict[PeerId, Words] = {}
        self.told: frozenset[PeerId] | None = None
        self._sum: tuple[frozenset[PeerId], Words] | None = None

    def take(self, part: Part) -> None:
        """The first of each client counts; another size counts as none."""
        if len(part.body) == 4 * self._stride:
            self.parts.setdefault(part.client, np.frombuffer(part.body, np.uint32))

    def sum(self, clients: frozenset[PeerId]) -> Words:
        """Of their parts, which are there; uint32 ``[stride]``, not to be changed."""
        if self._sum is None or self._sum[0] != clients:
            total = np.zeros(self._stride, np.uint32)
            for client in clients:
                total += self.parts[client]
            self._sum = clients, total
        return self._sum[1]


class _Blocks:
    """A sum as its blocks come."""

    def __init__(self, setting: SecureSetting) -> None:
        self._setting = setting
        self._words = np.zeros((setting.blocks, setting.stride), np.uint32)
        self.lacking = set(range(setting.blocks))

    def take(self, opened: Unmasked) -> bool:
        """Take the first of each. Returns False: masks are left."""
        if opened.block not in self.lacking or len(opened.body) != 4 * self._setting.stride:
            return True
        words = np.frombuffer(opened.body, np.uint32)
        self._words[opened.block] = words
        self.lacking.discard(opened.block)
        return not self._setting.masks_left(words)

    @property
    def total(self) -> Words:
        """uint32 ``[length]``."""
        return self._setting.joined(self._words.reshape(-1))


_UNCANCELLED = "masks do not cancel: a client has used other keys than it told"


class SecureClient:
    """One client's part in a round.

    values: float32 ``[length]``, copied.
    random: random bytes that nobody else can guess.
    waits: this peer's; for an answer it waits ``most_s`` beyond what the aggregator says, since it has no sum
        without one.
    noise: what is added to the quantised values, int64 ``[length]``, exactly where the setting has noise.

    clipped: how many values were beyond the clip.
    stage: of what it sends next.

    Raises NotFinite, ValueError: as ``SecureSetting.quantised``.
    """

    def __init__(
        self,
        setting: SecureSetting,
        me: PeerId,
        values: Floats,
        random: Random,
        waits: SecureWaits,
        noise: NDArray[np.int64] | None = None,
    ) -> None:
        self._setting, self.me, self._random, self._waits = setting, me, random, waits
        self._words, self.clipped = setting.quantised(values)
        if (noise is not None) != (setting.deviation > 0):
            raise ValueError(
                f"noise is {'not ' if noise is None else ''}there, and the setting says otherwise"
            )
        if noise is not None:
            self._words += setting.blocked(noise.astype(np.int32))  # modulo 2^32, as all sums are
        self._sealing, self._key = KeyPair(random(KEY_BYTES)), random(KEY_BYTES)
        self._masking, self._seed = KeyPair(self._key), random(KEY_BYTES)
        self._near = setting.neighbours(me)
        self._adverts: dict[PeerId, bytes] = {}
        self._held: dict[PeerId, bytes] = {}
        self.stage = SecureStage.KEYS
        self._started = False
        self._within_s = waits.most_s
        self._gone: set[PeerId] = set()
        self._expected: frozenset[PeerId] = frozenset()
        self._asked = 0
        self._owned: dict[int, _Owned] = {}
        self._early: list[Part] = []
        self._masked_s = self._owned_s = 0.0
        self._blocks = _Blocks(setting)
        self._opened: dict[tuple[int, PeerId], Unmasked] = {}
        self._openers: list[PeerId] = []
        self._clients: tuple[PeerId, ...] | None = None

    def step(
        self, now_s: float, event: Start | Download | Part | Unmasked | Left | Expired
    ) -> list[SecureEffect]:
        """The machine's step; what comes out of turn, or once more, has no effect.

        ``Left``: a client that will send nothing any more.
        """
        if self.stage == SecureStage.OVER:
            return []
        if isinstance(event, Start):
            if self._started:
                return []
            self._started = True
            publics = self._sealing.public + self._masking.public
            return self._send(now_s, publics + _digest(self._seed))
        if isinstance(event, Expired):
            if event.timer == self._parts_timer():
                return self._tell(now_s, late=True)
            if event.timer != self._timer():
                return []
            return self._fail("the aggregator has not answered in time")
        if isinstance(event, Left):
            self._gone.add(event.peer)
            return self._tell(now_s)
        if isinstance(event, Part):
            return self._keep(now_s, event)
        if isinstance(event, Unmasked):
            if self._clients is not None:
                return self._join([event])
            if event.block < self._setting.blocks:
                self._opened[event.block, event.client] = event
            return []
        ends = event.stage == SecureStage.UNMASK
        if event.client != self.me or not self._started or not (ends or event.stage == self.stage):
            return []
        self._within_s = event.within_s
        try:
            return self._answer(now_s, event)
        except (ValueError, InvalidTag) as error:
            return self._fail(f"the aggregator's answer makes no sense, or was forged ({error!r})")

    def _answer(self, now_s: float, event: Download) -> list[SecureEffect]:
        body = bytes(event.body)
        if event.stage == SecureStage.UNMASK:
            return self._open(now_s, body)
        if event.stage == SecureStage.SHARES:
            return self._mask(now_s, body)
        if event.stage == SecureStage.MASKED and any(body[: _ASKED.size]):
            return self._again(now_s, body)
        made = self._share(body) if event.stage == SecureStage.KEYS else self._reveal(body)
        if isinstance(made, str):
            return self._fail(made)
        self.stage = SecureStage(self.stage + 1)
        return self._send(now_s, made) if made else [self._arm(now_s)]

    def _send(self, now_s: float, body: bytes | memoryview) -> list[SecureEffect]:
        return [Upload(self.me, self.stage, body), self._arm(now_s)]

    def _arm(self, now_s: float) -> Arm:
        return Arm(self._timer(), now_s + self._within_s + self._waits.most_s)

    def _timer(self) -> Timer:
        return Timer(0, self._setting.round, f"client {self.stage.name} {self._asked}")

    def _parts_timer(self) -> Timer:
        return Timer(0, self._setting.round, f"parts {self._asked}")

    def _fail(self, why: str) -> list[SecureEffect]:
        error = NoSecureSum(self.stage, f"peer {self.me}: {why}")
        self._forget()
        return [Unsummed(error)]

    def _forget(self) -> None:
        """Keys and shares serve one round."""
        self.stage = SecureStage.OVER
        self._seed = self._key = b""
        self._held, self._adverts, self._words = {}, {}, np.zeros(0, np.uint32)
        self._owned, self._early, self._opened = {}, [], {}
        del self._sealing, self._masking

    def _share(self, body: bytes) -> bytes | str:
        setting, near = self._setting, self._near
        for peer, advert in zip(near, _slots(body, len(near), ADVERT_BYTES), strict=True):
            if any(advert):
                self._adverts[peer] = advert
        if len(self._adverts) < setting.threshold:
            return f"{len(self._adverts)} neighbours are here, {setting.threshold} are needed"
        draw, secrets = _drawn(self._random), (self._seed, self._key)
        seeds, keys = (
            shares_of(int.from_bytes(secret, "little"), setting.threshold, len(near), draw)
            for secret in secrets
        )
        out = []
        for peer, a, b in zip(near, seeds, keys, strict=True):
            if peer not in self._adverts:
                out.append(bytes(SEALED_BYTES))
                continue
            key = setting.sealing_key(self._sealing, self._adverts[peer][:KEY_BYTES], self.me, peer)
            plain = a.to_bytes(SHARE_BYTES, "little") + b.to_bytes(SHARE_BYTES, "little")
            out.append(AESGCM(key).encrypt(bytes(12), plain, None))
        return b"".join(out)

    def _mask(self, now_s: float, body: bytes) -> list[SecureEffect]:
        setting, near = self._setting, self._near
        sealed_bytes = len(near) * SEALED_BYTES
        here, owners = _read_who_owns(body[sealed_bytes:], setting)
        for peer, sealed in zip(near, _slots(body[:sealed_bytes], len(near), SEALED_BYTES), strict=True):
            if not any(sealed):
                continue
            if peer not in self._adverts:
                return self._fail(f"shares of peer {peer}, of which no keys came")
            key = setting.sealing_key(self._sealing, self._adverts[peer][:KEY_BYTES], peer, self.me)
            try:
                self._held[peer] = AESGCM(key).decrypt(bytes(12), sealed, None)
            except InvalidTag:
                return self._fail(f"peer {peer}'s shares were forged or damaged")
        if len(self._held) < setting.threshold:
            return self._fail(
                f"shares of {len(self._held)} neighbours are here, {setting.threshold} are needed"
            )
        masks = [(setting.seed_key(self._seed), 1)]
        for peer in self._held:
            public = self._adverts[peer][KEY_BYTES : 2 * KEY_BYTES]
            key = setting.mask_key(self._masking, public, self.me, peer)
            masks.append((key, 1 if self.me < peer else -1))
        add_masks(self._words, masks)
        self.stage, self._expected, self._masked_s = SecureStage.MASKED, here, now_s
        raw = self._words.data.cast("B")
        size = 4 * setting.stride
        parts: list[SecureEffect] = [
            Part(self.me, block, raw[block * size : (block + 1) * size]) for block in range(setting.blocks)
        ]
        return [*parts, self._arm(now_s), *self._own(now_s, owners)]

    # -- Blocks that it owns

    def _own(self, now_s: float, owners: Sequence[PeerId]) -> list[SecureEffect]:
        """Take the parts of the blocks that are its own from now on, and tell of those that are whole."""
        effects: list[SecureEffect] = []
        for block, owner in enumerate(owners):
            if owner != self.me:
                self._owned.pop(block, None)
            elif block not in self._owned:
                self._owned[block] = _Owned(self._setting.stride)
                effects.append(Owns(block))
        for part in self._early:
            if part.block in self._owned:
                self._owned[part.block].take(part)
        self._early, self._owned_s = [], now_s
        if self._owned:
            effects.append(Arm(self._parts_timer(), now_s + self._waits.budget_s("parts")))
        return effects + self._tell(now_s)

    def _keep(self, now_s: float, part: Part) -> list[SecureEffect]:
        if part.block in self._owned:
            self._owned[part.block].take(part)
            return self._tell(now_s)
        if self.stage <= SecureStage.MASKED and len(self._early) < self._setting.n * self._setting.blocks:
            self._early.append(part)
        return []

    def _again(self, now_s: float, body: bytes) -> list[SecureEffect]:
        """Answer for fewer clients, or own more blocks."""
        inside, owners = _read_who_owns(body[_ASKED.size :], self._setting)
        asked = int.from_bytes(body[: _ASKED.size], "little")
        if asked <= self._asked:
            return []
        self._asked, self._expected = asked, inside
        return [self._arm(now_s), *self._own(now_s, owners)]

    def _tell(self, now_s: float, late: bool = False) -> list[SecureEffect]:
        """The masked sums of blocks whose parts are there; ``late``: of those that are.

        With too few it goes on waiting, since there would be no sum.
        """
        if self.stage != SecureStage.MASKED:
            return []
        effects: list[SecureEffect] = []
        until_s = self._owned_s + self._waits.most_s
        for block, owned in self._owned.items():
            there = self._expected.intersection(owned.parts)
            whole = self._expected - self._gone <= there
            few = len(there) < self._setting.survivors_min and now_s < until_s
            enough = whole or (late and not few)
            if not enough:
                if late:
                    effects.append(Arm(self._parts_timer(), until_s))
                continue
            if owned.told == there:
                continue
            if owned.told is None and whole:
                self._waits.whole("parts", now_s - self._masked_s)
            elif not whole:
                self._waits.missed("parts")
            owned.told = there
            head = _SUMMED.pack(self._asked, block) + _bits(there, self._setting.n)
            effects.append(Upload(self.me, self.stage, head + owned.sum(there).tobytes()))
        return effects

    # -- Unmasking

    def _reveal(self, body: bytes) -> bytes | str:
        """A share of each neighbour's: of its seed if it is in the sum, else of its key, never of both.

        That it is never both in two answers follows from the stage, which only grows. A client that is not in
        the sum, since its parts came late, gives none (no bytes), and takes the sum.
        """
        setting = self._setting
        inside, _ = _read_who_owns(body[_ASKED.size :], setting)
        if self.me not in inside:
            self._held = {}
            return b""
        if len(inside) < setting.survivors_min:
            return f"{len(inside)} clients are left, a sum is of {setting.survivors_min} at least"
        if not setting.hangs_together(inside):
            return "the clients that are left fall into parts, each of which would have a sum of its own"
        near = [peer for peer in self._near if peer in inside]
        if len(near) < setting.threshold:
            return f"{len(near)} neighbours are left, {setting.threshold} are needed"
        if not self._held.keys() >= set(near):
            return "a client is in the sum, of which no shares came"
        out = []
        for peer in self._near:
            if peer not in self._held:
                out.append(bytes(REVEALED_BYTES))
            elif peer in inside:
                out.append(bytes([_SEED]) + self._held[peer][:SHARE_BYTES])
            else:
                out.append(bytes([_KEY]) + self._held[peer][SHARE_BYTES:])
        self._held = {}
        return b"".join(out)

    def _open(self, now_s: float, body: bytes) -> list[SecureEffect]:
        """The masks' keys: take them off the blocks that it owns."""
        setting = self._setting
        if not body or body[0]:
            return self._fail(body[1:REASON_BYTES].decode(errors="replace") or "no reason was given")
        if self._clients is not None:
            return []
        first = 1 + setting.who_bytes + _OWNER.size * setting.blocks
        clients, self._openers = _read_who_owns(body[1:first], setting)
        masks = [
            (key[:KEY_BYTES], 1 if key[KEY_BYTES] else -1)
            for key in _slots(body[first:], (len(body) - first) // OPENING_BYTES, OPENING_BYTES)
        ]
        self._clients, self.stage = tuple(sorted(clients)), SecureStage.BLOCKS
        effects: list[SecureEffect] = [self._arm(now_s)]
        for block, owned in self._owned.items():
            if clients <= owned.parts.keys():
                total = owned.sum(clients).copy()
                add_masks(total, masks, block * setting.stride)
                effects.append(Unmasked(self.me, block, total.data.cast("B")))
        self._owned = {}
        return effects + self._join(self._opened.values())

    def _join(self, opened: Iterable[Unmasked]) -> list[SecureEffect]:
        """Take blocks from those that may send them, and end once all are there."""
        assert self._clients is not None
        for one in opened:
            known = one.block < self._setting.blocks
            may = known and one.client in (self._openers[one.block], self._setting.aggregator)
            if may and not self._blocks.take(one):
                return self._fail(_UNCANCELLED)
        if self._blocks.lacking:
            return []
        self._forget()
        return [Summed(self._blocks.total, self._clients)]


class SecureAggregator:
    """The aggregator's part in a round.

    waits: of this peer. A stage that has not got all its uploads by then goes on without those that lack,
        unless those that are left would be too few for a sum.

    refused: uploads that came out of turn, twice, or in another form.
    forgers: clients that gave shares which are not their neighbours'.
    stage: of the uploads that it takes.
    """

    def __init__(self, setting: SecureSetting, waits: SecureWaits) -> None:
        self._setting, self._waits = setting, waits
        self.stage = SecureStage.KEYS
        self.refused = 0
        self.forgers: set[PeerId] = set()
        self._begun_s = 0.0
        self._begins: dict[SecureStage, float] = {}
        self._answered: set[tuple[SecureStage, PeerId]] = set()
        self._awaited = set(range(setting.n))
        self._gone: set[PeerId] = set()
        self._came: dict[PeerId, bytes] = {}
        self._adverts: dict[PeerId, bytes] = {}
        self._sharing: list[PeerId] = []
        self._asked = 0
        self._inside: frozenset[PeerId] = frozenset()
        self._owners: list[PeerId] = []
        self._sums: dict[int, tuple[frozenset[PeerId], Words]] = {}
        self._masks: list[tuple[bytes, int]] = []
        self._blocks = _Blocks(setting)

    def step(self, now_s: float, event: Start | Upload | Unmasked | Left | Expired) -> list[SecureEffect]:
        """The machine's step. ``Left``: a client will not answer any more."""
        if self.stage == SecureStage.OVER:
            return []
        if isinstance(event, Start):
            return [self._arm(now_s)]
        if isinstance(event, Expired):
            return self._late(now_s) if event.timer == self._timer() else []
        if isinstance(event, Left):
            self._gone.add(event.peer)
            self._awaited.discard(event.peer)
        elif isinstance(event, Unmasked):
            owned = self.stage == SecureStage.BLOCKS and event.block in self._blocks.lacking
            if not owned or self._owners[event.block] != event.client:
                return []
            if not self._blocks.take(event):
                return self._fail(_UNCANCELLED)
        elif not self._take(now_s, event):
            self.refused += 1
            return []
        return self._close(now_s) if not self._lacks() else []

    def _timer(self) -> Timer:
        return Timer(0, self._setting.round, f"aggregator {self.stage.name} {self._asked}")

    def _arm(self, now_s: float) -> Arm:
        self._begun_s = now_s
        self._begins.setdefault(self.stage, now_s)
        return Arm(self._timer(), now_s + self._budget_s())

    def _budget_s(self) -> float:
        """For owners of blocks as long again: they have waited for parts before they answer."""
        return self._twice() * self._waits.budget_s(self.stage.name)

    def _twice(self) -> int:
        return 2 if self.stage == SecureStage.MASKED else 1

    def _lacks(self) -> set[PeerId]:
        """Clients of which this stage has not got all that it waits for."""
        if self.stage == SecureStage.MASKED:
            return {owner for block, owner in enumerate(self._owners) if block not in self._sums} - self._gone
        if self.stage == SecureStage.BLOCKS:
            return {self._owners[block] for block in self._blocks.lacking} - self._gone
        return self._awaited - self._came.keys()

    def _late(self, now_s: float) -> list[SecureEffect]:
        """The stage's time is over: go on without those that lack, or wait for them where all would end."""
        lacks = self._lacks()
        left = len(self._inside - lacks) if self.stage == SecureStage.MASKED else len(self._came)
        ends = self.stage <= SecureStage.UNMASK and left < self._setting.survivors_min
        most_s = self._twice() * self._waits.most_s
        until_s = self._begun_s + most_s  # as the timer has it, to the last bit
        if ends and now_s < until_s:
            return [Arm(self._timer(), until_s)]
        self._waits.missed(self.stage.name)
        return self._close(now_s)

    def _take(self, now_s: float, upload: Upload) -> bool:
        setting, client = self._setting, upload.client
        if (upload.stage, client) not in self._answered:
            self._answered.add((upload.stage, client))
            if upload.stage < self.stage:
                self._waits.late(upload.stage.name, now_s - self._begins[upload.stage])
        if upload.stage != self.stage:
            return False
        if self.stage == SecureStage.MASKED:
            return self._take_sum(upload)
        sizes = {
            SecureStage.KEYS: ADVERT_BYTES,
            SecureStage.SHARES: setting.degree * SEALED_BYTES,
            SecureStage.UNMASK: setting.degree * REVEALED_BYTES,
        }
        if client not in self._awaited or client in self._came or len(upload.body) != sizes.get(self.stage):
            return False
        self._came[client] = bytes(upload.body)
        return True

    def _take_sum(self, upload: Upload) -> bool:
        """An owner's answer about a block; its newest counts."""
        setting, raw = self._setting, upload.body
        if len(raw) != setting.sum_bytes:
            return False
        asked, block = _SUMMED.unpack_from(raw)
        bits = bytes(raw[_SUMMED.size : _SUMMED.size + setting.who_bytes])
        if block >= setting.blocks or int.from_bytes(bits, "little") >> setting.n:
            return False
        clients = frozenset(_peers(bits, setting.n))
        if self._owners[block] != upload.client or asked != self._asked or not clients <= self._inside:
            return False
        if block in self._sums:
            return False
        self._sums[block] = clients, np.frombuffer(bytes(raw[-4 * setting.stride :]), np.uint32)
        return True

    def _close(self, now_s: float) -> list[SecureEffect]:
        """Go on to the next stage with those that have answered."""
        setting, came, stage = self._setting, self._came, self.stage
        if not self._lacks():
            self._waits.whole(stage.name, now_s - self._begun_s)
        if stage == SecureStage.MASKED:
            return self._settle(now_s)
        if stage == SecureStage.UNMASK:
            return self._unmask(now_s)
        if stage == SecureStage.BLOCKS:
            return self._open(self._blocks.lacking)
        here = sorted(came)
        if len(here) < setting.survivors_min:
            return self._too_few(here)
        self._awaited, self._came = set(here) - self._gone, {}
        self.stage = SecureStage(stage + 1)
        if stage == SecureStage.SHARES:
            self._sharing, self._inside = here, frozenset(here)
            self._owners = setting.owners_among(here)
        arm = self._arm(now_s)
        downloads: list[SecureEffect] = []
        if stage == SecureStage.KEYS:
            self._adverts = came
        for client in here:
            near = setting.neighbours(client)
            if stage == SecureStage.KEYS:
                body = b"".join(came.get(peer, bytes(ADVERT_BYTES)) for peer in near)
            else:
                body = b"".join(self._sealed(came, peer, client) for peer in near)
                body += _who_owns(here, self._owners, setting.n)
            downloads.append(Download(client, stage, body, self._budget_s()))
        return [*downloads, arm]

    def _too_few(self, here: Collection[PeerId]) -> list[SecureEffect]:
        why = f"{len(here)} of {self._setting.n} clients are left"
        return self._fail(f"{why}, a sum is of {self._setting.survivors_min} at least; nothing was revealed")

    def _sealed(self, came: Mapping[PeerId, bytes], source: PeerId, to: PeerId) -> bytes:
        if source not in came:
            return bytes(SEALED_BYTES)
        at = self._setting.neighbours(source).index(to) * SEALED_BYTES
        return came[source][at : at + SEALED_BYTES]

    def _settle(self, now_s: float) -> list[SecureEffect]:
        """Decide who is in the sum, once all blocks are there with the same clients; else ask again.

        A client is in it if owners have its parts. At first those of half of the blocks suffice: an owner
        that lacks it may have a bad line, and another one takes its block. After that all must have them.
        Owners that were asked and are silent are not in it. So each time that it asks there are fewer
        clients, or all is whole.
        """
        setting = self._setting
        silent = {owner for block, owner in enumerate(self._owners) if block not in self._sums}
        counts = {
            client: sum(client in clients for clients, _ in self._sums.values()) for client in self._inside
        }
        most = len(self._sums) if self._asked else (len(self._sums) + 1) // 2
        inside = frozenset(
            client
            for client, count in counts.items()
            if client not in silent and count >= (len(self._sums) if client in self._gone else most)
        )
        if len(inside) < setting.survivors_min:
            return self._too_few(inside)
        bad = {self._owners[block] for block, (clients, _) in self._sums.items() if not inside <= clients}
        self._sums = {block: found for block, found in self._sums.items() if found[0] == inside}
        able = inside - bad - self._gone
        stay = [
            owner if block in self._sums or owner in able else -1 for block, owner in enumerate(self._owners)
        ]
        self._inside, self._owners = inside, setting.owners_among(able or inside, stay)
        if len(self._sums) == setting.blocks:
            self.stage, self._awaited, self._came = SecureStage.UNMASK, set(inside) - self._gone, {}
        self._asked += 1
        arm = self._arm(now_s)
        again = self._asked if self.stage == SecureStage.MASKED else 0
        body = _ASKED.pack(again) + _who_owns(inside, self._owners, setting.n)
        within_s = self._budget_s()
        return [*(Download(client, SecureStage.MASKED, body, within_s) for client in sorted(inside)), arm]

    def _unmask(self, now_s: float) -> list[SecureEffect]:
        setting, inside = self._setting, self._inside
        masks: list[tuple[bytes, int]] = []
        for client in sorted(inside):
            seed = self._secret(client, _SEED)
            if isinstance(seed, str):
                return self._fail(seed)
            masks.append((setting.seed_key(seed), -1))
        for client in sorted(set(self._sharing) - inside):
            near = inside.intersection(setting.neighbours(client))
            secret = self._secret(client, _KEY) if near else b""
            if isinstance(secret, str):
                return self._fail(secret)
            for peer in sorted(near):
                public = self._adverts[peer][KEY_BYTES : 2 * KEY_BYTES]
                try:
                    key = setting.mask_key(KeyPair(secret), public, client, peer)
                except HandshakeError as error:
                    return self._fail(f"peer {peer} has {error}")
                masks.append((key, -1 if peer < client else 1))
        self._masks = masks
        self.stage = SecureStage.BLOCKS
        arm = self._arm(now_s)
        keys = b"".join(key + bytes([sign > 0]) for key, sign in masks)
        body = bytes(1) + _who_owns(inside, self._owners, setting.n) + keys
        within_s = self._budget_s()
        told: list[SecureEffect] = [
            Download(client, SecureStage.UNMASK, body, within_s) for client in range(setting.n)
        ]
        silent = {block for block, owner in enumerate(self._owners) if owner not in self._came}
        return [*told, arm, *self._open(silent)]

    def _open(self, blocks: Collection[int]) -> list[SecureEffect]:
        """Unmask these blocks itself, since their owners are silent, and end once all are there."""
        effects: list[SecureEffect] = []
        for block in sorted(blocks):
            total = self._sums[block][1].copy()
            add_masks(total, self._masks, block * self._setting.stride)
            opened = Unmasked(self._setting.aggregator, block, total.data.cast("B"))
            if not self._blocks.take(opened):
                return self._fail(_UNCANCELLED)
            effects.append(opened)
        if self._blocks.lacking:
            return effects
        self.stage = SecureStage.OVER
        return [*effects, Summed(self._blocks.total, tuple(sorted(self._inside)))]

    def _secret(self, owner: PeerId, kind: int) -> bytes | str:
        """What the neighbours' shares give, held to what the owner has told of it, or why it is not known."""
        setting, advert = self._setting, self._adverts[owner]
        near, shares = setting.neighbours(owner), dict[int, int]()
        for at, peer in enumerate(near):
            if peer not in self._came:
                continue
            place = setting.neighbours(peer).index(owner) * REVEALED_BYTES
            given = self._came[peer][place : place + REVEALED_BYTES]
            if given[0] == kind:
                shares[at + 1] = int.from_bytes(given[1:], "little")
            elif given[0] != _NONE:
                self.forgers.add(peer)
        what = "seed" if kind == _SEED else "key"
        if len(shares) < setting.threshold:
            given_of = f"{len(shares)} shares of peer {owner}'s {what} came"
            return f"{given_of}, {setting.threshold} are needed; the sum stays masked"

        def genuine(secret: int) -> bool:
            if secret >= 1 << 8 * KEY_BYTES:
                return False
            raw = secret.to_bytes(KEY_BYTES, "little")
            if kind == _SEED:
                return _digest(raw) == advert[2 * KEY_BYTES :]
            return KeyPair(raw).public == advert[KEY_BYTES : 2 * KEY_BYTES]

        found = genuine_secret(shares, setting.threshold, genuine)
        if found is None:
            return f"shares of peer {owner} do not give its {what}: forged, or dealt wrongly"
        self.forgers.update(near[x - 1] for x in found[1])
        return found[0].to_bytes(KEY_BYTES, "little")

    def _fail(self, why: str) -> list[SecureEffect]:
        error = NoSecureSum(self.stage, why)
        self.stage = SecureStage.OVER
        body = b"\1" + why.encode()[: REASON_BYTES - 1]
        told: list[SecureEffect] = [
            Download(client, SecureStage.UNMASK, body, self._waits.most_s)
            for client in range(self._setting.n)
        ]
        return [*told, Unsummed(error)]
