"""Sums of short vectors under homomorphic encryption: the peer that adds up has no key to read them.

CKKS (Cheon, Kim, Kim, Song, "Homomorphic Encryption for Arithmetic of Approximate Numbers", ASIACRYPT 2017)
by TenSEAL (``pip install ragtag[encrypted]``), at 128 bits of security. Peers share one secret key, which
the peer that adds up must not have, and each encrypts its vector; any peer decrypts the sum:

    mine = EncryptedSum(1000, peers=16, key=key)        # on all peers; the first makes the key: key=None
    part = mine.encrypt(vector)                         # bytes for the one that adds up
    total = add_encrypted(public, parts)                # there, with mine.public alone
    mean = mine.decrypt(total) / len(parts)

It takes one message each way, where secure averages (``privacy.secagg``) take four stages; no peer has to
come back when others drop out. It costs 30 bytes for a value each way, and as much for one value as for
2,048, so it is for short vectors, and longer ones are refused. How keys and messages travel is the caller's.

**What it does not protect from.** The peer that adds up and any one peer with the key together read all:
secure averages hold against as many as they are told of. A peer with the key that sees another's message
reads it. Ciphertexts are not authenticated: the peer that adds up may leave some out, add others or change
them. Sums are approximate, and their low bits tell of the key: show decrypted sums only to those that have
the key (Li, Micciancio, "On the Security of Homomorphic Encryption on Approximate Numbers", EUROCRYPT 2021).
Messages are parsed by native code.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ragtag.core.errors import Error, NotFinite

LENGTH_MAX = 1 << 16
DEGREE = 4096
"""Of polynomials; a ciphertext has half as many values."""
MODULI_BITS = (54, 54)
"""With ``DEGREE`` at most 109 bits in all are 128 bits of security (homomorphicencryption.org, 2018)."""
SCALE_BITS = 40
_SLOTS = DEGREE // 2
_SPARE_BITS = 2
_PREFIX = struct.Struct("<I")


class NoTenSEAL(Error, ImportError):
    """TenSEAL is not installed; the message says how to get it."""


class EncryptedSum:
    """One peer's end of sums under encryption.

    length: values of a vector.
    peers: vectors in a sum, at most.
    key: ``key`` of the peer that made it; ``None``: a new one.

    Raises:
        NoTenSEAL: it is not installed.
        ValueError: the vector is too long or has no values, no peers, or ``key`` is no such key.
    """

    def __init__(self, length: int, *, peers: int, key: bytes | None = None) -> None:
        if not 1 <= length <= LENGTH_MAX:
            raise ValueError(
                f"encrypted sums: {length:,} values; from 1 to {LENGTH_MAX:,} are encrypted, for more use "
                "crew.secure_average, which sends 4 bytes a value"
            )
        if peers < 1:
            raise ValueError(f"encrypted sums: {peers} peers; it takes one at least")
        self.length, self.peers = length, peers
        self.limit = 2.0 ** (MODULI_BITS[0] - SCALE_BITS - _SPARE_BITS) / peers
        """Values within -limit and limit are taken: beyond it sums would wrap around."""
        tenseal = _tenseal()
        if key is None:
            self._context = tenseal.context(
                tenseal.SCHEME_TYPE.CKKS, DEGREE, coeff_mod_bit_sizes=list(MODULI_BITS)
            )
            self._context.global_scale = 2.0**SCALE_BITS
        else:
            self._context = _read(tenseal.context_from, key, "key")
        if not self._context.has_secret_key():
            raise ValueError("encrypted sums: this is the public part of a key, which cannot decrypt")

    @property
    def key(self) -> bytes:
        """For the other peers, over sealed lines; never for the one that adds up."""
        return self._saved(secret=True)

    @property
    def public(self) -> bytes:
        """For the peer that adds up."""
        return self._saved(secret=False)

    def encrypt(self, vector: Tensor) -> bytes:
        """A vector ``[length]`` as a message.

        Raises ValueError: it has another shape, or values beyond ``limit``. NotFinite: it is.
        """
        values = vector.detach().to("cpu", torch.float64)
        if values.shape != (self.length,):
            raise ValueError(f"encrypted sums: a vector {list(vector.shape)}; it must be [{self.length}]")
        if not bool(values.isfinite().all()):
            raise NotFinite("the vector to encrypt")
        if float(values.abs().max()) > self.limit:
            raise ValueError(
                f"encrypted sums: a value of {float(values.abs().max()):g}; with {self.peers} peers all must "
                f"be within {self.limit:g}, so clip or scale them"
            )
        make = _tenseal().ckks_vector
        return _joined(
            [make(self._context, part.tolist()).serialize() for part in torch.split(values, _SLOTS)]
        )

    def decrypt(self, total: bytes) -> Tensor:
        """The values ``[length]`` of a message, float64, off by some 1e-8 for each vector in it.

        Raises ValueError: it is no message under this key's settings.
        """
        read = _tenseal().ckks_vector_from
        values: list[float] = []
        for part in _parts(total, self.length):
            values += _read(read, self._context, part, "message").decrypt()
        if len(values) != self.length:
            raise ValueError(f"encrypted sums: a message of {len(values):,} values; {self.length:,} are due")
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    def _saved(self, *, secret: bool) -> bytes:
        saved: bytes = self._context.serialize(
            save_public_key=True, save_secret_key=secret, save_galois_keys=False, save_relin_keys=False
        )
        return saved


def add_encrypted(public: bytes, messages: Sequence[bytes]) -> bytes:
    """The sum of messages, as a message; this takes no secret.

    public: ``EncryptedSum.public`` of those that encrypted.

    Raises ValueError: there are no messages, or one is malformed or of another length. NoTenSEAL.
    """
    if not messages:
        raise ValueError("encrypted sums: no messages to add up")
    tenseal = _tenseal()
    context = _read(tenseal.context_from, public, "public key")
    total: list[Any] = []
    for message in messages:
        vectors = [
            _read(tenseal.ckks_vector_from, context, part, "message") for part in _parts(message, LENGTH_MAX)
        ]
        sizes = [vector.size() for vector in vectors]
        if total and sizes != [vector.size() for vector in total]:
            raise ValueError(
                f"encrypted sums: a message of {sum(sizes):,} values among others of another size"
            )
        total = [mine + other for mine, other in zip(total, vectors, strict=True)] if total else vectors
    return _joined([vector.serialize() for vector in total])


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(_PREFIX.pack(len(part)) + part for part in parts)


def _parts(message: bytes, length: int) -> list[bytes]:
    """The ciphertexts of a message: each has its length before it."""
    found: list[bytes] = []
    at = 0
    while at < len(message):
        if len(message) - at < _PREFIX.size:
            raise ValueError("encrypted sums: a message was cut off")
        (size,) = _PREFIX.unpack_from(message, at)
        at += _PREFIX.size
        if size > len(message) - at:
            raise ValueError("encrypted sums: a message was cut off")
        found.append(message[at : at + size])
        at += size
    if not 1 <= len(found) <= math.ceil(length / _SLOTS):
        raise ValueError(f"encrypted sums: a message of {len(found)} ciphertexts for {length:,} values")
    return found


def _read(read: Callable[..., Any], *given: Any) -> Any:
    """What TenSEAL makes of bytes; the last of ``given`` says in an error what they were to be."""
    *given_, what = given
    try:
        return read(*given_)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ValueError(f"encrypted sums: this is no {what} ({error})") from error


def _tenseal() -> Any:
    try:
        import tenseal
    except ImportError as error:
        raise NoTenSEAL(f"encrypted sums need TenSEAL: pip install 'ragtag[encrypted]' ({error})") from error
    return tenseal
