"""Invitations: what a second machine needs to join a crew, as one line of text to copy.

    ragtag2-<base32 of: addresses, crew, key, end, number, kind; and 4 bytes by which a slip is noticed>

An invitation to a crew that exists has a number, an end, and a key of its own, for which members give the
crew's (``protocols.invitation``): with another end it is worth nothing. The token of a new crew holds the
crew's key, since there is no member yet to give it, and so has no end. Either lets its holder in, and a peer
that is in has the crew's key: a token is as secret as the crew should be.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ragtag.app.environment import format_address, parse_address
from ragtag.core.address import Address
from ragtag.core.errors import Error
from ragtag.protocols.membership.invitation import NUMBER_BYTES, invitation_key
from ragtag.training.state.atomic import write_whole

VERSION = 2
KEY_BYTES = 32
ADDRESSES_MAX = 8
CREW_BYTES_MAX = 64
TOKEN_FILE = "crew.token"
_PREFIX = "ragtag"
_CHECK_BYTES = 4
_TEXT_MAX = 8192


class TokenError(Error, ValueError):
    """A token that cannot be used; the message says why and what to do."""


class _Content(msgspec.Struct, array_like=True, frozen=True):
    """What is inside."""

    addresses: Annotated[
        list[Annotated[str, Meta(max_length=300)]], Meta(min_length=1, max_length=ADDRESSES_MAX)
    ]
    crew: Annotated[str, Meta(min_length=1, max_length=CREW_BYTES_MAX)]
    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    ends_unix_s: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0
    number: Annotated[bytes, Meta(max_length=NUMBER_BYTES)] = b""
    begins: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """What lets a peer into a crew.

    addresses: of members, any of which lets a newcomer in.
    number: of an invitation, 16 bytes; empty: ``key`` is the crew's own.
    ends_unix_s: when the invitation ends (0: with the crew).
    begins: a peer that finds nobody, and the address on its own machine, begins the crew.

    The key is not shown where a token is printed by mistake.
    """

    addresses: tuple[Address, ...]
    crew: str
    key: bytes
    ends_unix_s: int = 0
    number: bytes = b""
    begins: bool = False

    def __repr__(self) -> str:
        where = ", ".join(map(format_address, self.addresses))
        return f"Token(crew={self.crew!r}, addresses=[{where}], key=<secret>, ends_unix_s={self.ends_unix_s})"

    def invitation(self, ends_unix_s: int = 0) -> Token:
        """A new invitation to this crew, without its key.

        Raises:
            TokenError: this is an invitation itself: only members of the crew can make one.
        """
        if self.number:
            raise TokenError(
                "this token is an invitation, of which no other can be made; run `ragtag invite` with the "
                "folder of a run whose peers are in the crew"
            )
        number = secrets.token_bytes(NUMBER_BYTES)
        key = invitation_key(self.key, number, ends_unix_s)
        return Token(self.addresses, self.crew, key, ends_unix_s, number)

    def require_crew(self, crew: str, key: bytes | None = None) -> None:
        """Refuse an invitation to another crew than the one that is meant.

        Raises:
            TokenError: the name differs, or the name is the same and the key is not.
        """
        if self.crew != crew:
            raise TokenError(
                f"this token is for crew {self.crew!r}, not for {crew!r}; run `ragtag invite` on one of "
                "that crew's machines"
            )
        if key is not None and not secrets.compare_digest(self.key, key):
            raise TokenError(
                f"this token is for an earlier crew called {crew!r} (its key differs); run `ragtag invite` "
                "again"
            )


def new_key() -> bytes:
    """A key for a new crew, 32 random bytes."""
    return secrets.token_bytes(KEY_BYTES)


def encode(token: Token) -> str:
    """A token as one line of letters, digits and one hyphen.

    Raises:
        TokenError: a field is out of its range; nothing could read the token.
    """
    if not 1 <= len(token.addresses) <= ADDRESSES_MAX:
        raise TokenError(f"a token names 1 to {ADDRESSES_MAX} addresses, not {len(token.addresses)}")
    if len(token.key) != KEY_BYTES:
        raise TokenError(f"the crew's key has {len(token.key)} bytes; it must have {KEY_BYTES}")
    if not 1 <= len(token.crew.encode()) <= CREW_BYTES_MAX:
        raise TokenError(f"the crew's name {token.crew[:80]!r} must have 1 to {CREW_BYTES_MAX} bytes")
    if token.ends_unix_s < 0:
        raise TokenError(f"the token ends at {token.ends_unix_s}; that must be 0 or a time")
    if len(token.number) not in (0, NUMBER_BYTES) or (token.number and token.begins):
        raise TokenError(f"an invitation has a number of {NUMBER_BYTES} bytes, and begins no crew")
    if token.ends_unix_s and not token.number:
        raise TokenError("a token that holds the crew's key cannot end; only invitations can")
    texts = [format_address(address) for address in token.addresses]
    for text in texts:
        _address(text)
    content = _Content(texts, token.crew, token.key, token.ends_unix_s, token.number, token.begins)
    body = msgspec.msgpack.encode(content)
    letters = base64.b32encode(body + _check(VERSION, body)).decode("ascii").rstrip("=").lower()
    return f"{_PREFIX}{VERSION}-{letters}"


def decode(text: str, now_unix_s: float | None = None) -> Token:
    """Read a token; spaces and line breaks that came with copying, and capitals, do not matter.

    now_unix_s: today, to refuse an invitation that has ended (``None``: do not).

    Raises:
        TokenError: it is no token, was cut or mistyped, is of another version, or has ended.
    """
    if len(text) > _TEXT_MAX:
        raise TokenError(f"this is no token: {len(text)} characters are too many")
    letters = "".join(text.split()).lower()
    head, hyphen, rest = letters.partition("-")
    number = head.removeprefix(_PREFIX)
    if not hyphen or number == head or not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise TokenError(
            f"{text.strip()[:24]!r} is no token; a token begins with '{_PREFIX}{VERSION}-' and is printed by "
            "`ragtag invite`"
        )
    if int(number) != VERSION:
        older = "there" if int(number) < VERSION else "here"
        raise TokenError(
            f"this token has format {int(number)}, and this Ragtag reads format {VERSION}; install the same "
            f"version on both machines, then run `ragtag invite` again ({older} it is older)"
        )
    content = _content(_bytes(rest))
    if now_unix_s is not None and content.ends_unix_s and now_unix_s > content.ends_unix_s:
        minutes = (now_unix_s - content.ends_unix_s) / 60
        raise TokenError(
            f"this token for crew {content.crew!r} ended {minutes:.0f} minutes ago; run `ragtag invite` again"
        )
    addresses = tuple(_address(address) for address in content.addresses)
    return Token(addresses, content.crew, content.key, content.ends_unix_s, content.number, content.begins)


def keep_token(folder: Path, token: str | None) -> None:
    """Keep a crew's token in its run's folder, for this user's eyes only, in place of an older one.

    Raises:
        OSError: it cannot be written; the older one is as it was.
    """
    if token is None:
        return
    write_whole(folder / TOKEN_FILE, [token.encode() + b"\n"], mode=0o600, lasting=False)


def kept_token(folder: Path) -> str:
    """The invitation to a run's crew.

    Raises:
        TokenError: the folder has none.
    """
    try:
        return (folder / TOKEN_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise TokenError(
            f"{folder} holds no invitation; give the folder of a run of two peers or more, made by "
            "`ragtag run` or `ragtag join`"
        ) from None


def _bytes(letters: str) -> bytes:
    """The token's content; its check has held."""
    spoiled = TokenError(
        "this token is incomplete or mistyped; copy the whole line that `ragtag invite` printed"
    )
    try:
        raw = base64.b32decode(letters.upper() + "=" * (-len(letters) % 8))
    except (binascii.Error, ValueError):
        raise spoiled from None
    body, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if check != _check(VERSION, body):
        raise spoiled
    return body


def _content(body: bytes) -> _Content:
    try:
        content = msgspec.msgpack.decode(body, type=_Content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TokenError(f"this token was not made by `ragtag invite` ({error})") from None
    if len(content.crew.encode()) > CREW_BYTES_MAX:
        raise TokenError("this token was not made by `ragtag invite` (the crew's name is too long)")
    unsound = content.begins if content.number else content.ends_unix_s > 0
    if len(content.number) not in (0, NUMBER_BYTES) or unsound:
        raise TokenError("this token was not made by `ragtag invite` (it is of no kind)")
    return content


def _address(text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise TokenError(f"a token's address is wrong: {error}") from None


def _check(version: int, body: bytes) -> bytes:
    return hashlib.blake2b(bytes([version]) + body, digest_size=_CHECK_BYTES, person=b"ragtag-token").digest()
