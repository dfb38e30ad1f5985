"""Invitations that end: how a newcomer with an invitation gets the crew's key from any member.

An invitation's key is computed from the crew's key, the invitation's number and its end. A token carries
number, end and that key, not the crew's. Every member can compute it again, so none keeps a list of
invitations. Another end gives another key, so a token whose end was changed is known to no member.

    newcomer                                        member
    asks: number, end, nonce, tag              ->   computes the invitation's key; looks at its clock
                                               <-   the crew's key, masked and under a tag
                                                    or: it has ended; or: it is not known here; or: it is a
                                                    person's, and revoked (``passes``)

Tags and masks are keyed BLAKE2b (RFC 7693) under the invitation's key. Only its holder can ask, and an answer
is worth nothing to others. A question is as long as its answer, so a forged sender is sent no more than was
spent on it, and a member keeps nothing of those that ask. A holder that has recorded an answer from before
the end can read the crew's key out of it: an end binds only those that come later.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from hmac import compare_digest

from ragtag.protocols.membership.types import KEY_BYTES

NUMBER_BYTES = NONCE_BYTES = 16
_MAGIC = 0x4952  # "RI"
_VERSION = 1
_TAG_BYTES = 16
_MASK = b"ragtag-mask"
_ASK = struct.Struct(f"<HBB{NUMBER_BYTES}sQ{NONCE_BYTES}s")
_ANSWER = struct.Struct(f"<HBB{NONCE_BYTES}s{KEY_BYTES}s")
ANSWER_BYTES = _ANSWER.size + _TAG_BYTES
_PADDING = bytes(ANSWER_BYTES - _ASK.size - _TAG_BYTES)


class Said(IntEnum):
    """What a datagram says: a newcomer's question, or one of a member's four answers."""

    ASK = 0
    WELCOME = 1
    ENDED = 2
    UNKNOWN = 3
    REVOKED = 4


def invitation_key(crew_key: bytes, number: bytes, ends_unix_s: int) -> bytes:
    """The key of an invitation. ends_unix_s: its end; 0: never."""
    what = number + ends_unix_s.to_bytes(8, "little")
    return keyed(crew_key, b"ragtag-invited", what, KEY_BYTES)


def ask(key: bytes, number: bytes, ends_unix_s: int, nonce: bytes) -> bytes:
    """A newcomer's question. key: the invitation's. nonce: random, for this question alone."""
    body = _ASK.pack(_MAGIC, _VERSION, Said.ASK, number, ends_unix_s, nonce)
    return body + _tag(key, body) + _PADDING


def is_ask(data: bytes) -> bool:
    """Whether a datagram may be a newcomer's question."""
    return len(data) == ANSWER_BYTES and data[:4] == struct.pack("<HBB", _MAGIC, _VERSION, Said.ASK)


@dataclass(frozen=True, slots=True)
class Question:
    """A newcomer's question, as a member reads it.

    key: that of an invitation of this number and end. vouched_for: whether the question was made with it.
    """

    number: bytes
    ends_unix_s: int
    nonce: bytes
    key: bytes = field(repr=False)
    vouched_for: bool


def question_of(crew_key: bytes, data: bytes) -> Question:
    """What a datagram asks for which ``is_ask`` holds."""
    body, tag = data[: _ASK.size], data[_ASK.size : _ASK.size + _TAG_BYTES]
    _, _, _, number, ends_unix_s, nonce = _ASK.unpack(body)
    key = invitation_key(crew_key, number, ends_unix_s)
    return Question(number, ends_unix_s, nonce, key, compare_digest(_tag(key, body), tag))


def answer(
    crew_key: bytes,
    question: Question,
    now_unix_s: float,
    is_void: Callable[[bytes], bool] = lambda number: False,
) -> bytes:
    """A member's answer to a question.

    is_void: whether the person's pass that goes with an invitation's number is revoked.
    """
    key, nonce = question.key, question.nonce
    if not question.vouched_for:
        return _answer(key, Said.UNKNOWN, nonce, bytes(KEY_BYTES))
    if question.ends_unix_s and now_unix_s > question.ends_unix_s:
        return _answer(key, Said.ENDED, nonce, bytes(KEY_BYTES))
    if is_void(question.number):
        return _answer(key, Said.REVOKED, nonce, bytes(KEY_BYTES))
    return _answer(key, Said.WELCOME, nonce, masked(key, _MASK, nonce, crew_key))


def read_answer(key: bytes, nonce: bytes, data: bytes) -> tuple[Said, bytes] | None:
    """What a member answered, and with ``WELCOME`` the crew's key; ``None``: it is no answer to this nonce.

    key: the invitation's. An ``UNKNOWN`` comes from a peer without that key, so nothing vouches for it.
    """
    if len(data) != ANSWER_BYTES:
        return None
    body, tag = data[: _ANSWER.size], data[_ANSWER.size :]
    magic, version, said, echo, hidden = _ANSWER.unpack(body)
    if (magic, version, echo) != (_MAGIC, _VERSION, nonce):
        return None
    if said == Said.UNKNOWN:
        return Said.UNKNOWN, b""
    if said not in (Said.WELCOME, Said.ENDED, Said.REVOKED) or not compare_digest(_tag(key, body), tag):
        return None
    return Said(said), masked(key, _MASK, nonce, hidden) if said == Said.WELCOME else b""


def _answer(key: bytes, said: Said, nonce: bytes, hidden: bytes) -> bytes:
    body = _ANSWER.pack(_MAGIC, _VERSION, said, nonce, hidden)
    return body + _tag(key, body)


def masked(key: bytes, person: bytes, nonce: bytes, text: bytes) -> bytes:
    """A text under a mask of its nonce and purpose; the same again takes it off."""
    mask = keyed(key, person, nonce, len(text))
    return bytes(a ^ b for a, b in zip(text, mask, strict=True))


def _tag(key: bytes, body: bytes) -> bytes:
    return keyed(key, b"ragtag-ask", body, _TAG_BYTES)


def keyed(key: bytes, person: bytes, what: bytes, size: int) -> bytes:
    """Keyed BLAKE2b (RFC 7693) of so many bytes. person: its purpose."""
    return hashlib.blake2b(what, key=key, digest_size=size, person=person).digest()
