"""From which address a peer's datagrams come, as other members see them.

A peer behind a router that translates addresses (NAT) knows its own address only within its network. It
asks a member for the one that stood on its question, as a STUN client does (RFC 8489), and tells the crew
that one.

    newcomer                                   member
    asks: nonce, tag                      ->   looks where it came from
                                          <-   nonce, host and port, masked, and a tag

Tags and masks are keyed BLAKE2b (RFC 7693) under the crew's key. So only members ask and answer, and no
router on the way finds an address to rewrite. A question is as long as its answer: a forged sender is sent no
more than was spent on it, and a member keeps nothing of those that ask.
"""

from __future__ import annotations

import struct
from hmac import compare_digest
from ipaddress import ip_address

from ragtag.core.address import Address, unusable
from ragtag.protocols.membership.invitation import NONCE_BYTES, keyed, masked

_MAGIC, _VERSION = 0x5752, 1  # "RW"
_ASKS, _TELLS = 0, 1
_HEAD = struct.Struct(f"<HBB{NONCE_BYTES}s")
_PLACE = struct.Struct("<16sBH")
_TAG_BYTES = 16
_PLACED = b"ragtag-place"
WHERE_BYTES = _HEAD.size + _PLACE.size + _TAG_BYTES


def where_am_i(crew_key: bytes, nonce: bytes) -> bytes:
    """A peer's question. nonce: 16 random bytes, for this question alone."""
    body = _HEAD.pack(_MAGIC, _VERSION, _ASKS, nonce) + bytes(_PLACE.size)
    return body + keyed(crew_key, b"ragtag-where", body, _TAG_BYTES)


def asks_where(data: bytes) -> bool:
    """Whether a datagram may be such a question."""
    return len(data) == WHERE_BYTES and data[:4] == struct.pack("<HBB", _MAGIC, _VERSION, _ASKS)


def you_are_at(crew_key: bytes, data: bytes, source: Address) -> bytes | None:
    """A member's answer to a datagram for which ``asks_where`` holds; ``None``: no member has asked.

    source: where it came from, with a numeric host.
    """
    body, tag = data[:-_TAG_BYTES], data[-_TAG_BYTES:]
    if not compare_digest(keyed(crew_key, b"ragtag-where", body, _TAG_BYTES), tag):
        return None
    nonce = body[_HEAD.size - NONCE_BYTES : _HEAD.size]
    host = ip_address(source[0]).packed
    place = _PLACE.pack(host.ljust(16, b"\0"), len(host), source[1])
    told = _HEAD.pack(_MAGIC, _VERSION, _TELLS, nonce) + masked(crew_key, _PLACED, nonce, place)
    return told + keyed(crew_key, b"ragtag-where", told, _TAG_BYTES)


def where_i_am(crew_key: bytes, nonce: bytes, data: bytes) -> Address | None:
    """The address that a member has seen; ``None``: it is no member's answer to the question of ``nonce``."""
    body, tag = data[:-_TAG_BYTES], data[-_TAG_BYTES:]
    if len(data) != WHERE_BYTES or body[: _HEAD.size] != _HEAD.pack(_MAGIC, _VERSION, _TELLS, nonce):
        return None
    if not compare_digest(keyed(crew_key, b"ragtag-where", body, _TAG_BYTES), tag):
        return None
    host, size, port = _PLACE.unpack(masked(crew_key, _PLACED, nonce, body[_HEAD.size :]))
    if size not in (4, 16):
        return None
    address = str(ip_address(host[:size])), port
    return None if unusable(address) else address
