"""Handshakes of the Noise protocol framework (revision 34), without I/O.

Two patterns of it are in use: ``IKpsk2`` between peers that know each other's public keys, and ``NNpsk0``
between two that share nothing but a key. Both end with one cipher for each direction, whose keys nobody can
compute later from what went over the line and what either end keeps (forward secrecy). Official vectors are
in ``tests/protocols/sealing``.

    prologue, shared by both ends
        |
        v
    Handshake.write(payload) -> bytes -> Handshake.read(bytes) -> payload      (by turns, two messages)
        |
        v
    Handshake.split() -> the initiator's cipher, the responder's
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

Buffer = Any
"""Bytes, a bytearray or a memoryview (collections.abc.Buffer, from Python 3.12 on)."""
KEY_BYTES = 32
TAG_BYTES = 16
_NONCE_MAX = (1 << 64) - 1
HASHES = ("SHA256", "SHA512", "BLAKE2s", "BLAKE2b")
_PATTERNS: dict[str, tuple[bool, tuple[tuple[str, ...], ...]]] = {
    "IKpsk2": (True, (("e", "es", "s", "ss"), ("e", "ee", "se", "psk"))),
    "NNpsk0": (False, (("psk", "e"), ("e", "ee"))),
}
"""By name: whether the initiator knows the responder's public key, and each message's tokens (section 7)."""


class Cipher(Protocol):
    """An authenticated cipher under one key, as ``cryptography`` has them."""

    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes:
        """``data`` encrypted, and its tag."""

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes:
        """What was encrypted. Raises InvalidTag: it was not, with this key, nonce and associated data."""

    def encrypt_into(self, nonce: bytes, data: Buffer, associated_data: Buffer | None, buf: Buffer) -> int:
        """As ``encrypt``, into ``buf``, which is 16 bytes longer than ``data``."""

    def decrypt_into(self, nonce: bytes, data: Buffer, associated_data: Buffer | None, buf: Buffer) -> int:
        """As ``decrypt``, into ``buf``, which is 16 bytes shorter than ``data``."""


_CIPHERS: dict[str, tuple[Callable[[bytes], Cipher], Callable[[int], bytes]]] = {
    "AESGCM": (AESGCM, lambda n: bytes(4) + n.to_bytes(8, "big")),
    "ChaChaPoly": (ChaCha20Poly1305, lambda n: bytes(4) + n.to_bytes(8, "little")),
}
"""By name: the cipher of a key, and the nonce of a number (sections 12.3 and 12.4)."""


class HandshakeError(ValueError):
    """The other end's message was not made with the keys that this end expects, or was damaged."""


class KeyPair:
    """An X25519 key pair (RFC 7748). private: 32 random bytes, which nobody else learns."""

    def __init__(self, private: bytes) -> None:
        self._private = X25519PrivateKey.from_private_bytes(private)
        self.public = self._private.public_key().public_bytes_raw()
        """32 bytes, for everybody."""

    def shared(self, public: bytes) -> bytes:
        """The secret that this pair and the holder of a public key have in common.

        Raises HandshakeError: ``public`` is a point with which all have the same secret.
        """
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise HandshakeError("a public key of small order") from None


class _Symmetric:
    """The state that both ends mix all keys and all messages into (SymmetricState, section 5.2)."""

    def __init__(self, name: str, cipher: str, hash_name: str) -> None:
        if hash_name not in HASHES:
            raise ValueError(f"a handshake's hash is one of {', '.join(HASHES)}, not {hash_name!r}")
        self._hash_name = hash_name.lower()
        self._cipher, self._nonce = _CIPHERS[cipher]
        size, raw = hashlib.new(self._hash_name).digest_size, name.encode()
        self.hash = raw.ljust(size, b"\0") if len(raw) <= size else self._digest(raw)
        self._chain = self.hash
        self._key: Cipher | None = None
        self._number = 0

    def _digest(self, data: bytes) -> bytes:
        return hashlib.new(self._hash_name, data).digest()

    def _derive(self, material: bytes, count: int) -> list[bytes]:
        """HKDF (RFC 5869) as Noise uses it (section 4.3)."""
        secret, out, last = hmac.digest(self._chain, material, self._hash_name), list[bytes](), b""
        for index in range(1, count + 1):
            last = hmac.digest(secret, last + bytes([index]), self._hash_name)
            out.append(last)
        return out

    def mix_hash(self, data: bytes) -> None:
        self.hash = self._digest(self.hash + data)

    def mix_key(self, material: bytes) -> None:
        self._chain, key = self._derive(material, 2)
        self._key, self._number = self._cipher(key[:KEY_BYTES]), 0

    def mix_key_and_hash(self, material: bytes) -> None:
        self._chain, mixed, key = self._derive(material, 3)
        self.mix_hash(mixed)
        self._key, self._number = self._cipher(key[:KEY_BYTES]), 0

    def encrypt(self, plain: bytes) -> bytes:
        data = plain if self._key is None else self._key.encrypt(self._next(), plain, self.hash)
        self.mix_hash(data)
        return data

    def decrypt(self, data: bytes) -> bytes:
        try:
            plain = data if self._key is None else self._key.decrypt(self._next(), data, self.hash)
        except InvalidTag:
            raise HandshakeError("made with other keys, or damaged") from None
        self.mix_hash(data)
        return plain

    @property
    def keyed(self) -> bool:
        """Whether what is encrypted now has a tag."""
        return self._key is not None

    def split(self) -> tuple[bytes, bytes]:
        """The initiator's key and the responder's."""
        first, second = self._derive(b"", 2)
        return first[:KEY_BYTES], second[:KEY_BYTES]

    def _next(self) -> bytes:
        self._number += 1
        return self._nonce(self._number - 1)


class Handshake:
    """One end of a handshake (HandshakeState, section 5.3).

    pattern: "IKpsk2" or "NNpsk0".
    cipher: "AESGCM" or "ChaChaPoly".
    initiator: whether this end writes the first message.
    psk: 32 bytes that both ends share.
    prologue: what both ends have to agree on besides.
    ephemeral: a key pair for this handshake alone.
    static: this end's own key pair (IKpsk2).
    remote: the other end's public key; the responder learns it from the first message.

    Raises ValueError: a key is missing, or ``psk`` has another size.
    """

    def __init__(
        self,
        pattern: str,
        cipher: str,
        *,
        initiator: bool,
        psk: bytes,
        prologue: bytes,
        ephemeral: KeyPair,
        static: KeyPair | None = None,
        remote: bytes | None = None,
        hash_name: str = "BLAKE2s",
    ) -> None:
        known, self._messages = _PATTERNS[pattern]
        if len(psk) != KEY_BYTES:
            raise ValueError(f"a handshake's shared key has {len(psk)} bytes; it must have {KEY_BYTES}")
        if known and (static is None or (initiator and remote is None)):
            raise ValueError(f"{pattern} needs this end's key pair, and the initiator the other's public key")
        self._state = _Symmetric(f"Noise_{pattern}_25519_{cipher}_{hash_name}", cipher, hash_name)
        self._initiator, self._psk = initiator, psk
        self._ephemeral, self._static = ephemeral, static
        self._remote_ephemeral = b""
        self._remote_static = remote or b""
        self._turn = 0
        self._state.mix_hash(prologue)
        if known:
            assert static is not None
            self._state.mix_hash(self._remote_static if initiator else static.public)

    @property
    def remote(self) -> bytes:
        """The other end's public key; empty: it is not known yet, or the pattern has none."""
        return self._remote_static

    @property
    def hash(self) -> bytes:
        """A hash of the whole handshake, the same at both ends."""
        return self._state.hash

    def write(self, payload: bytes = b"") -> bytes:
        """This end's next message."""
        out = bytearray()
        for token in self._messages[self._turn]:
            if token == "e":
                out += self._ephemeral.public
                self._state.mix_hash(self._ephemeral.public)
                self._state.mix_key(self._ephemeral.public)  # as every pattern with a psk does (section 9.2)
            elif token == "s":
                assert self._static is not None
                out += self._state.encrypt(self._static.public)
            else:
                self._mix(token)
        self._turn += 1
        return bytes(out + self._state.encrypt(payload))

    def read(self, message: bytes) -> bytes:
        """The payload of the other end's next message.

        Raises HandshakeError: it was made with other keys than expected, or damaged.
        """
        at = 0
        for token in self._messages[self._turn]:
            size = KEY_BYTES + (TAG_BYTES if token == "s" and self._state.keyed else 0)
            if token in "es" and len(message) < at + size:
                raise HandshakeError("too short")
            if token == "e":
                self._remote_ephemeral = message[at : at + size]
                self._state.mix_hash(self._remote_ephemeral)
                self._state.mix_key(self._remote_ephemeral)
                at += size
            elif token == "s":
                self._remote_static = self._state.decrypt(message[at : at + size])
                at += size
            else:
                self._mix(token)
        if len(message) < at + (TAG_BYTES if self._state.keyed else 0):
            raise HandshakeError("too short")
        self._turn += 1
        return self._state.decrypt(message[at:])

    def split(self) -> tuple[bytes, bytes]:
        """The keys of 32 bytes for what follows: the one that the initiator sends with, and the responder's.

        Raises RuntimeError: messages are missing.
        """
        if self._turn < len(self._messages):
            raise RuntimeError("a handshake has no keys before its last message")
        return self._state.split()

    def _mix(self, token: str) -> None:
        if token == "psk":
            self._state.mix_key_and_hash(self._psk)
            return
        mine, theirs = (token[0], token[1]) if self._initiator else (token[1], token[0])
        pair = self._ephemeral if mine == "e" else self._static
        assert pair is not None
        self._state.mix_key(pair.shared(self._remote_ephemeral if theirs == "e" else self._remote_static))


def cipher_of(name: str, key: bytes) -> Cipher:
    """The cipher of a name ("AESGCM", "ChaChaPoly") under a key of 32 bytes."""
    return _CIPHERS[name][0](key)


def nonce_of(name: str, number: int) -> bytes:
    """The 12 bytes of nonce that a cipher takes for a number.

    Raises ValueError: the number is no nonce (section 5.1).
    """
    if not 0 <= number < _NONCE_MAX:
        raise ValueError(f"{number} is no number of a nonce")
    return _CIPHERS[name][1](number)
