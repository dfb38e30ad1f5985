"""Invitations: what a second machine needs to join a crew, as one line of text to copy.

    ragtag2-<base32 of: addresses, crew, key, end, number, kind; and 4 bytes by which a slip is noticed>

An invitation to a crew that exists has a number, an end, and a key of its own, for which members give the
crew's (``protocols.invitation``): with another end it is worth nothing. The token of a new crew holds the
crew's key, since there is no member yet to give it, and so has no end. Either lets its holder in, and a peer
that is in has the crew's key: a token is as secret as the crew should be.

A crew that takes persons only has a signing key besides (``protocols.membership.passes``), and three tokens:

    the holder's   the crew's key and the signing key: whoever has it begins the crew, lets persons in and
                   puts them out
    a person's     an invitation, with a pass that the signing key has signed, and the person's own key
    a process's    what the holder's own peers get of the holder's: the crew's key, and a pass for "holder"
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ragtag.app.environment import format_address, parse_address
from ragtag.app.tracefile import crews
from ragtag.core.address import Address
from ragtag.core.errors import Error
from ragtag.protocols.membership.invitation import NUMBER_BYTES, invitation_key
from ragtag.protocols.membership.passes import (
    DAY_S,
    HOLDER,
    PASS_DAYS_MAX,
    SEED_BYTES,
    Bar,
    Pass,
    Passes,
    Revocation,
    issued,
    number_of,
    public_of,
    revoked,
    said_of,
)
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


class _Person(msgspec.Struct, array_like=True, frozen=True):
    """What only a person's token has: see ``Credential``."""

    shown: Pass
    signer: Annotated[bytes, Meta(min_length=SEED_BYTES, max_length=SEED_BYTES)]
    secret: Annotated[bytes, Meta(min_length=SEED_BYTES, max_length=SEED_BYTES)]


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
    signing: Annotated[bytes, Meta(max_length=SEED_BYTES)] = b""
    person: _Person | None = None


@dataclass(frozen=True, slots=True)
class Credential:
    """By what a person's processes prove whose they are.

    shown: the person's pass. signer: the crew's public signing key. secret: the person's private key.
    """

    shown: Pass
    signer: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Credential(person={self.shown.person!r}, secret=<secret>)"


@dataclass(frozen=True, slots=True)
class Token:
    """What lets a peer into a crew.

    addresses: of members, any of which lets a newcomer in.
    number: of an invitation, 16 bytes; empty: ``key`` is the crew's own.
    ends_unix_s: when the invitation ends (0: with the crew).
    begins: a peer that finds nobody, and the address on its own machine, begins the crew.
    signing: the crew's private signing key, in the holder's token.
    credential: a person's.

    The key is not shown where a token is printed by mistake.
    """

    addresses: tuple[Address, ...]
    crew: str
    key: bytes
    ends_unix_s: int = 0
    number: bytes = b""
    begins: bool = False
    signing: bytes = b""
    credential: Credential | None = None

    def __repr__(self) -> str:
        where = ", ".join(map(format_address, self.addresses))
        more = "" if self.credential is None else f", person={self.credential.shown.person!r}"
        ends = f"ends_unix_s={self.ends_unix_s}"
        return f"Token(crew={self.crew!r}, addresses=[{where}], key=<secret>, {ends}{more})"

    def invitation(self, ends_unix_s: int = 0) -> Token:
        """A new invitation to this crew, without its key.

        Raises:
            TokenError: this is an invitation itself: only members of the crew can make one.
        """
        if self.signing or self.credential is not None:
            raise TokenError(
                f"crew {self.crew!r} takes persons only: whoever has its holder's token, of `ragtag invite "
                "--persons`, makes one for each by `ragtag invite --for NAME HOLDER`"
            )
        if self.number:
            raise TokenError(
                "this token is an invitation, of which no other can be made; run `ragtag invite` with the "
                "folder of a run whose peers are in the crew"
            )
        number = secrets.token_bytes(NUMBER_BYTES)
        key = invitation_key(self.key, number, ends_unix_s)
        return Token(self.addresses, self.crew, key, ends_unix_s, number)

    def for_person(self, person: str, ends_unix_s: int, now_unix_s: float) -> Token:
        """A new token for a person, made of the holder's.

        Raises:
            TokenError: this is not the holder's token.
            ValueError: the person's name is none or the holder's, or the end is not within a year.
        """
        self._require_signing("let persons in")
        if person == HOLDER:
            raise ValueError(f"{HOLDER!r} is what the holder's own peers are called; give the person a name")
        secret = secrets.token_bytes(SEED_BYTES)
        shown = issued(self.signing, person, public_of(secret), now_unix_s, ends_unix_s)
        credential = Credential(shown, public_of(self.signing), secret)
        number = number_of(shown.person, shown.serial)
        key = invitation_key(self.key, number, ends_unix_s)
        return Token(self.addresses, self.crew, key, ends_unix_s, number, credential=credential)

    def for_processes(self, now_unix_s: float) -> Token:
        """What a launcher gives its peers in place of the holder's token; another token is as it is."""
        if not self.signing:
            return self
        secret = secrets.token_bytes(SEED_BYTES)
        ends_unix_s = int(now_unix_s) + PASS_DAYS_MAX * DAY_S
        shown = issued(self.signing, HOLDER, public_of(secret), now_unix_s, ends_unix_s)
        credential = Credential(shown, public_of(self.signing), secret)
        return replace(self, signing=b"", credential=credential)

    def revocation(self, person: str, serial: int) -> Revocation:
        """That a person's tokens up to a serial are void, signed.

        Raises:
            TokenError: this is not the holder's token.
            ValueError: the person's name is none, or the holder's.
        """
        self._require_signing("put persons out")
        if person == HOLDER:
            raise ValueError("the holder of the crew's token cannot be put out; begin another crew instead")
        return revoked(self.signing, person, serial)

    def _require_signing(self, what: str) -> None:
        if not self.signing:
            raise TokenError(
                f"this token cannot {what}: only the one that `ragtag invite --persons` printed for crew "
                f"{self.crew!r}, when it was new, holds its signing key"
            )

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
    if len(token.signing) not in (0, SEED_BYTES) or (token.signing and (token.number or token.credential)):
        raise TokenError(f"a signing key has {SEED_BYTES} bytes, and is no person's")
    texts = [format_address(address) for address in token.addresses]
    for text in texts:
        _address(text)
    of = token.credential
    person = None if of is None else _Person(of.shown, of.signer, of.secret)
    content = _Content(
        texts, token.crew, token.key, token.ends_unix_s, token.number, token.begins, token.signing, person
    )
    body = msgspec.msgpack.encode(content)
    letters = base64.b32encode(body + _check(VERSION, body)).decode("ascii").rstrip("=").lower()
    return f"{_PREFIX}{VERSION}-{letters}"


def no_token(what: str) -> TokenError:
    """What was given for a token is none."""
    begins = f"a token begins with '{_PREFIX}{VERSION}-' and is printed by `ragtag invite`"
    return TokenError(f"{what} is no token; {begins}")


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
        raise no_token(repr(text.strip()[:24]))
    if int(number) != VERSION:
        older = "there" if int(number) < VERSION else "here"
        raise TokenError(
            f"this token has format {int(number)}, and this Ragtag reads format {VERSION}; install the same "
            f"version on both machines, then run `ragtag invite` again ({older} it is older)"
        )
    content = _content(_bytes(rest))
    if now_unix_s is not None and content.ends_unix_s and now_unix_s > content.ends_unix_s:
        minutes = (now_unix_s - content.ends_unix_s) / 60
        again = "run `ragtag invite` again"
        if content.person is not None:
            again = said_of(Bar.ENDED, content.person.shown.person)
        raise TokenError(f"this token for crew {content.crew!r} ended {minutes:.0f} minutes ago; {again}")
    addresses = tuple(_address(address) for address in content.addresses)
    of = content.person
    return Token(
        addresses,
        content.crew,
        content.key,
        content.ends_unix_s,
        content.number,
        content.begins,
        content.signing,
        None if of is None else _credential(of),
    )


def keep_token(folder: Path, token: str | None) -> None:
    """Keep a crew's token in its run's folder, for this user's eyes only, in place of an older one.

    Raises:
        OSError: it cannot be written; the older one is as it was.
    """
    if token is None:
        return
    write_whole(folder / TOKEN_FILE, [token.encode() + b"\n"], mode=0o600, lasting=False)


def kept_token(folder: Path) -> str:
    """The invitation to the crew whose folder this is.

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


def newest_token(run_folder: Path) -> str:
    """The invitation to the newest crew of a run that has one: its peers may form several, one after another.

    Raises:
        TokenError: none has.
        OSError: the folder cannot be read.
    """
    kept = [folder for folder in crews(run_folder) if (folder / TOKEN_FILE).exists()]
    return kept_token(kept[-1] if kept else run_folder)


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
    unsound |= len(content.signing) not in (0, SEED_BYTES)
    unsound |= bool(content.signing) and (content.person is not None or bool(content.number))
    if content.person is not None and content.number:
        shown = content.person.shown
        told = number_of(shown.person, shown.serial), shown.ends_unix_s
        unsound |= (content.number, content.ends_unix_s) != told
    if len(content.number) not in (0, NUMBER_BYTES) or unsound:
        raise TokenError("this token was not made by `ragtag invite` (it is of no kind)")
    return content


def _credential(of: _Person) -> Credential:
    """A person's credential, whose parts fit together. Raises TokenError: they do not."""
    mine = Passes(of.signer, of.shown)
    if not mine.fits(of.secret):
        raise TokenError(
            "this token is not signed by the key of its crew, or is not its person's: it was changed; "
            "ask whoever holds the crew's token for a new one"
        )
    return Credential(of.shown, of.signer, of.secret)


def _address(text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise TokenError(f"a token's address is wrong: {error}") from None


def _check(version: int, body: bytes) -> bytes:
    return hashlib.blake2b(bytes([version]) + body, digest_size=_CHECK_BYTES, person=b"ragtag-token").digest()
