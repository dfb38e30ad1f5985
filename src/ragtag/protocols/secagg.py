"""Secure aggregation: an aggregator learns the sum of its clients' vectors, and of no client its own.

Bell, Bonawitz, Gascón, Lepoint, Raykova, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead"
(CCS 2020, SecAgg+), on top of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning" (CCS 2017). Two neighbours i < j agree on a key, and expand it: i adds what comes of it to its
vector, j subtracts it, so in the sum it is gone. Each client adds a second mask, of a seed of its own.
Neighbours hold shares of both, Shamir's: for a client that is in the sum they give those of its seed, for
one that has dropped out those of its key. Nobody gives both, or the client's vector would lie open.

| stage | client to aggregator | aggregator to client |
|---|---|---|
| KEYS | two public keys, a digest of its seed | its neighbours' |
| SHARES | for each neighbour, sealed: a share of seed and key | those that are for it |
| MASKED | its vector, masked | who is in the sum |
| UNMASK | for each neighbour a share of its seed or of its key | the sum, or why there is none |

A client that does not answer a stage in time has dropped out, and is in no later one; it may take the sum.
``SecureSetting`` says how many may. Neighbours are those on a ring whose order a seed draws that all know, so
a peer's are a random set. ``ring_for`` says how many it takes, which grows with the logarithm of the number
of clients.

**What holds.** An aggregator that does as it should, and members that compare what they have seen with it,
learn the sum of at least ``survivors_min`` clients. A client gives one answer in a round, and a threshold is
more than half of the neighbours; so an aggregator that tells clients different things does not come to both
secrets of one either, unless more of its neighbours collude than was planned for. **What does not.** Keys are
not signed: an aggregator that replaces keys by its own sees everything. Sums of two rounds with one client
between them tell that client's vector. A client may add what it likes, within 2^32.

Values are clipped to ``clip`` and rounded to multiples of 1 / ``scale``, a power of two, in 32 bits without
overflow. So a sum is exact in quantised values, and differs from that of the clipped values by at most half
a step for each client. ``CHECKS`` zeros follow each vector; a sum in which they are not 0 has masks left.
With ``deviation`` each client adds integer noise of its own before the masks (``ragtag.privacy.secagg``).

``SecureClient`` and ``SecureAggregator`` are machines: ``step(now_s, event) -> effects``. Their random bytes
come from the caller, and what comes from others is checked before it is used.
"""

from __future__ import annotations

import hashlib
import math
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
CHECKS = 4
"""Zeros behind each vector: masks that are left make all of them 0 once in 2^128."""
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


class SecureStage(IntEnum):
    """What a client sends next."""

    KEYS = 0
    SHARES = 1
    MASKED = 2
    UNMASK = 3
    OVER = 4


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


def add_masks(total: Words, masks: Iterable[tuple[bytes, int]]) -> None:
    """Add masks to a vector modulo 2^32, in place.

    total: uint32 ``[m]``. masks: AES-256 keys, each used for one mask only, with 1, or -1 to subtract.
    """
    streams = [(Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor(), sign) for key, sign in masks]
    buffer = bytearray(len(_ZEROS) + 15)
    words = np.frombuffer(buffer, np.uint32, _BLOCK)
    for first in range(0, len(total), _BLOCK):
        part = total[first : first + _BLOCK]
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
    survivors_min: no client helps to unmask a sum of fewer.
    seed, round: of the ring; keys of one round are no others'.
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

    def __post_init__(self) -> None:
        if self.length < 1 or not 0 < self.clip < math.inf:
            raise ValueError(f"{self.length} values clipped to {self.clip}; both must be above 0")
        odd = self.degree % 2 == 1 and self.degree < self.n - 1
        if self.n < 3 or not 2 <= self.degree < self.n or odd:
            raise ValueError(f"{self.degree} neighbours of {self.n} clients; an even number below, or all")
        if not self.degree < 2 * self.threshold <= 2 * self.degree:
            raise ValueError(f"{self.threshold} of {self.degree} neighbours; it takes more than half")
        if not 2 <= self.survivors_min <= self.n:
            raise ValueError(f"a sum of {self.survivors_min} of {self.n} clients; it takes 2")
        if self.n >= 1 << 24 or not 2.0**-64 <= self.clip <= 2.0**64:
            raise ValueError(f"{self.n} clients, clip {self.clip}; below 2^24, and from 2^-64 to 2^64")
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

    def quantised(self, values: Floats) -> tuple[Words, int]:
        """float32 ``[length]`` as uint32 ``[length + CHECKS]``, and how many were beyond the clip.

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
        words = np.zeros(self.length + CHECKS, np.uint32)
        words[: self.length].view(np.int32)[:] = np.rint(steps, out=steps)
        return words, beyond

    def values(self, total: Words) -> Floats:
        """A sum of quantised vectors, uint32 ``[length]``, as float32."""
        return np.asarray(total.view(np.int32) * (1.0 / self.scale), np.float32)

    def upload_bytes(self) -> int:
        """What a client sends that drops out nowhere, by formula."""
        return ADVERT_BYTES + self.degree * (SEALED_BYTES + REVEALED_BYTES) + 4 * (self.length + CHECKS)

    def download_bytes(self) -> int:
        """What such a client gets, the sum with it, by formula."""
        who = -(-self.n // 8)
        return self.degree * (ADVERT_BYTES + SEALED_BYTES) + who + (1 + who + 4 * self.length)

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
    """To a client: the other way round. stage: that of the uploads which it answers."""

    client: PeerId
    stage: SecureStage
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


SecureEffect = Upload | Download | Summed | Unsummed | Arm


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


def _digest(seed: bytes) -> bytes:
    return hashlib.sha256(b"secure aggregation, seed" + seed).digest()


class SecureClient:
    """One client's part in a round.

    values: float32 ``[length]``, copied.
    random: random bytes that nobody else can guess.
    noise: what is added to the quantised values, int64 ``[length]``, exactly where the setting has noise.
    deadline_s: the aggregator's, for a stage. This side waits twice as long: an answer has a way to go.

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
        deadline_s: float,
        noise: NDArray[np.int64] | None = None,
    ) -> None:
        self._setting, self.me, self._random, self._deadline_s = setting, me, random, deadline_s
        self._words, self.clipped = setting.quantised(values)
        if (noise is not None) != (setting.deviation > 0):
            raise ValueError(
                f"noise is {'not ' if noise is None else ''}there, and the setting says otherwise"
            )
        if noise is not None:
            self._words[: setting.length] += noise.astype(np.uint32)  # modulo 2^32, as all sums are
        self._sealing, self._key = KeyPair(random(KEY_BYTES)), random(KEY_BYTES)
        self._masking, self._seed = KeyPair(self._key), random(KEY_BYTES)
        self._near = setting.neighbours(me)
        self._adverts: dict[PeerId, bytes] = {}
        self._held: dict[PeerId, bytes] = {}
        self.stage = SecureStage.KEYS
        self._asked = False

    def step(self, now_s: float, event: Start | Download | Expired) -> list[SecureEffect]:
        """The machine's step; what comes out of turn, or once more, has no effect."""
        if self.stage == SecureStage.OVER:
            return []
        if isinstance(event, Start):
            if self._asked:
                return []
            publics = self._sealing.public + self._masking.public
            return self._send(now_s, publics + _digest(self._seed))
        if isinstance(event, Expired):
            if event.timer != self._timer():
                return []
            return self._fail("the aggregator has not answered in time")
        ends = event.stage == SecureStage.UNMASK
        if event.client != self.me or not self._asked or not (ends or event.stage == self.stage):
            return []
        try:
            return self._answer(now_s, event)
        except (ValueError, InvalidTag) as error:
            return self._fail(f"the aggregator's answer makes no sense, or was forged ({error!r})")

    def _answer(self, now_s: float, event: Download) -> list[SecureEffect]:
        if event.stage == SecureStage.UNMASK:
            return self._end(bytes(event.body))
        make = {
            SecureStage.KEYS: self._share,
            SecureStage.SHARES: self._mask,
            SecureStage.MASKED: self._reveal,
        }[self.stage]
        made = make(event.body)
        if isinstance(made, str):
            return self._fail(made)
        self.stage = SecureStage(self.stage + 1)
        return self._send(now_s, made)

    def _send(self, now_s: float, body: bytes | memoryview) -> list[SecureEffect]:
        self._asked = True
        return [Upload(self.me, self.stage, body), Arm(self._timer(), now_s + 2 * self._deadline_s)]

    def _timer(self) -> Timer:
        return Timer(0, self._setting.round, f"client {self.stage.name}")

    def _fail(self, why: str) -> list[SecureEffect]:
        error = NoSecureSum(self.stage, f"peer {self.me}: {why}")
        self._forget()
        return [Unsummed(error)]

    def _forget(self) -> None:
        """Keys and shares serve one round."""
        self.stage = SecureStage.OVER
        self._seed = self._key = b""
        self._held, self._adverts, self._words = {}, {}, np.zeros(0, np.uint32)
        del self._sealing, self._masking

    def _share(self, body: bytes | memoryview) -> bytes | str:
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

    def _mask(self, body: bytes | memoryview) -> memoryview | str:
        setting, near = self._setting, self._near
        for peer, sealed in zip(near, _slots(body, len(near), SEALED_BYTES), strict=True):
            if not any(sealed):
                continue
            if peer not in self._adverts:
                return f"shares of peer {peer}, of which no keys came"
            key = setting.sealing_key(self._sealing, self._adverts[peer][:KEY_BYTES], peer, self.me)
            try:
                self._held[peer] = AESGCM(key).decrypt(bytes(12), sealed, None)
            except InvalidTag:
                return f"peer {peer}'s shares were forged or damaged"
        if len(self._held) < setting.threshold:
            return f"shares of {len(self._held)} neighbours are here, {setting.threshold} are needed"
        masks = [(setting.seed_key(self._seed), 1)]
        for peer in self._held:
            public = self._adverts[peer][KEY_BYTES : 2 * KEY_BYTES]
            key = setting.mask_key(self._masking, public, self.me, peer)
            masks.append((key, 1 if self.me < peer else -1))
        add_masks(self._words, masks)
        return self._words.data.cast("B")

    def _reveal(self, body: bytes | memoryview) -> bytes | str:
        """A share of each neighbour's: of its seed if it is in the sum, else of its key, never of both.

        That it is never both in two answers follows from the stage, which only grows.
        """
        setting = self._setting
        inside = _peers(bytes(body), setting.n)
        if len(body) != -(-setting.n // 8) or self.me not in inside:
            return "it is not in the sum"
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

    def _end(self, body: bytes) -> list[SecureEffect]:
        setting = self._setting
        if not body or body[0]:
            return self._fail(body[1:REASON_BYTES].decode(errors="replace") or "no reason was given")
        who = -(-setting.n // 8)
        if len(body) != 1 + who + 4 * setting.length:
            return self._fail(f"a sum of {len(body)} bytes")
        clients = tuple(_peers(body[1 : 1 + who], setting.n))
        self._forget()
        return [Summed(np.frombuffer(body[1 + who :], np.uint32), clients)]


class SecureAggregator:
    """The aggregator's part in a round.

    deadline_s: a stage that has not got all its uploads by then goes on without those that lack.

    refused: uploads that came out of turn, twice, or in another form.
    forgers: clients that gave shares which are not their neighbours'.
    stage: of the uploads that it takes.
    """

    def __init__(self, setting: SecureSetting, deadline_s: float) -> None:
        self._setting, self._deadline_s = setting, deadline_s
        self.stage = SecureStage.KEYS
        self.refused = 0
        self.forgers: set[PeerId] = set()
        self._awaited = set(range(setting.n))
        self._came: dict[PeerId, bytes] = {}
        self._adverts: dict[PeerId, bytes] = {}
        self._sharing: list[PeerId] = []
        self._inside: list[PeerId] = []
        self._total = np.zeros(setting.length + CHECKS, np.uint32)

    def step(self, now_s: float, event: Start | Upload | Left | Expired) -> list[SecureEffect]:
        """The machine's step. ``Left``: a client will not answer any more."""
        if self.stage == SecureStage.OVER:
            return []
        if isinstance(event, Start):
            return [self._arm(now_s)]
        if isinstance(event, Expired):
            return self._close(now_s) if event.timer == self._timer() else []
        if isinstance(event, Left):
            self._awaited.discard(event.peer)
        elif not self._take(event):
            self.refused += 1
            return []
        return self._close(now_s) if self._awaited <= self._came.keys() else []

    def _timer(self) -> Timer:
        return Timer(0, self._setting.round, f"aggregator {self.stage.name}")

    def _arm(self, now_s: float) -> Arm:
        return Arm(self._timer(), now_s + self._deadline_s)

    def _take(self, upload: Upload) -> bool:
        setting, client = self._setting, upload.client
        sizes = {
            SecureStage.KEYS: ADVERT_BYTES,
            SecureStage.SHARES: setting.degree * SEALED_BYTES,
            SecureStage.MASKED: 4 * (setting.length + CHECKS),
            SecureStage.UNMASK: setting.degree * REVEALED_BYTES,
        }
        if upload.stage != self.stage or client not in self._awaited or client in self._came:
            return False
        if len(upload.body) != sizes[self.stage]:
            return False
        if self.stage == SecureStage.MASKED:
            self._total += np.frombuffer(upload.body, np.uint32)
            self._came[client] = b""
        else:
            self._came[client] = bytes(upload.body)
        return True

    def _close(self, now_s: float) -> list[SecureEffect]:
        setting, came, stage = self._setting, self._came, self.stage
        here = sorted(came)
        if stage != SecureStage.UNMASK and len(here) < setting.survivors_min:
            why = f"{len(here)} of {setting.n} clients are left, a sum is of {setting.survivors_min} at least"
            return self._fail(f"{why}; nothing was revealed")
        if stage == SecureStage.UNMASK:
            return self._unmask()
        downloads: list[SecureEffect] = []
        if stage == SecureStage.KEYS:
            self._adverts = came
            for client in here:
                near = setting.neighbours(client)
                body = b"".join(came.get(peer, bytes(ADVERT_BYTES)) for peer in near)
                downloads.append(Download(client, stage, body))
        elif stage == SecureStage.SHARES:
            self._sharing = here
            for client in here:
                body = b"".join(self._sealed(peer, client) for peer in setting.neighbours(client))
                downloads.append(Download(client, stage, body))
        else:
            self._inside = here
            downloads += [Download(client, stage, _bits(here, setting.n)) for client in here]
        self._awaited, self._came = set(here), {}
        self.stage = SecureStage(stage + 1)
        return [*downloads, self._arm(now_s)]

    def _sealed(self, source: PeerId, to: PeerId) -> bytes:
        if source not in self._came:
            return bytes(SEALED_BYTES)
        at = self._setting.neighbours(source).index(to) * SEALED_BYTES
        return self._came[source][at : at + SEALED_BYTES]

    def _unmask(self) -> list[SecureEffect]:
        setting, inside = self._setting, set(self._inside)
        masks: list[tuple[bytes, int]] = []
        for client in self._inside:
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
        add_masks(self._total, masks)
        if self._total[setting.length :].any():
            return self._fail("masks do not cancel: a client has used other keys than it told")
        total = self._total[: setting.length]
        body = bytes(1) + _bits(inside, setting.n) + total.tobytes()
        self.stage = SecureStage.OVER
        ends = [Download(client, SecureStage.UNMASK, body) for client in range(setting.n)]
        return [*ends, Summed(total, tuple(self._inside))]

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
            Download(client, SecureStage.UNMASK, body) for client in range(self._setting.n)
        ]
        return [*told, Unsummed(error)]
