"""Passes: who may be in a crew that takes persons, proven by signatures (Ed25519, RFC 8032).

    signing key (the holder's)  --signs-->  Pass: person, serial, end, the person's public key
    person's key (in the token) --signs-->  binding: member's name, process, key of its sessions
    signing key (the holder's)  --signs-->  Revocation: person, the newest serial that is void

A member tells its pass and its binding on its card. So every member can check, without a server, that the
holder of the crew's signing key has let this person in, and that this process is that person's. As the key of
its sessions (``protocols.sealing``) is bound, no other member can speak for it. A person may have many
processes: each has a binding of its own.

A serial is the time at which its pass was issued, in microseconds. So no list of issued passes is kept, a
pass that comes from the future is known by its serial, and one rule is enough for revocations: of a person,
all passes up to a serial are void. Members keep the highest serial of each person, in whatever order they
hear of it. As no pass is valid for longer than a year, that table forgets what has ended by itself.

Clocks differ. Another's pass counts from ``SKEW_S`` before its issue to ``SKEW_S`` after its end. Machines
without time synchronisation are wrong by minutes, and passes last for days: 300 s is what Kerberos
allows by default, too (MIT krb5, ``clockskew``). A process goes by its own clock for its own pass, without
that: an honest one leaves before the others have to put it out.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections import OrderedDict
from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from msgspec import Meta

SEED_BYTES = PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64
PERSON_BYTES_MAX = 32
DAY_S = 86_400
PASS_DAYS_MAX = 366
SKEW_S = 300.0
REVOCATIONS_MAX = 1024
"""Persons of whom passes are void; beyond, those whose passes were issued first are forgotten."""
PROOF_BYTES_MAX = 240
REVOCATION_BYTES_MAX = 128
HOLDER = "holder"
"""The person that the holder of the signing key is. No token is issued to it."""
_HASH_BYTES = 8
_KNOWN_MAX = 8192  # proofs whose signatures were checked: a table of members holds fewer
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]*")
_PASS, _BINDING, _REVOCATION = "ragtag pass 1", "ragtag binding 1", "ragtag revocation 1"

_Person = Annotated[str, Meta(min_length=1, max_length=PERSON_BYTES_MAX)]
_Serial = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Public = Annotated[bytes, Meta(min_length=PUBLIC_BYTES, max_length=PUBLIC_BYTES)]
_Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class Pass(msgspec.Struct, array_like=True, frozen=True):
    """What the holder of a crew's signing key has signed of a person.

    serial: when it was issued, in microseconds of Unix time.
    ends_unix_s: its end.
    key: the person's public key.
    signature: by the crew's signing key, over all that stands before it.
    """

    person: _Person
    serial: _Serial
    ends_unix_s: Annotated[int, Meta(ge=0, lt=1 << 40)]
    key: _Public
    signature: _Signature


class Proof(msgspec.Struct, array_like=True, frozen=True):
    """What a member shows on its card. binding: the person's signature over this process."""

    shown: Pass
    binding: _Signature


class Revocation(msgspec.Struct, array_like=True, frozen=True):
    """Of a person, all passes up to a serial are void, says the holder of the crew's signing key."""

    person: _Person
    serial: _Serial
    signature: _Signature


class Bar(IntEnum):
    """Why a member lets a process not in, or puts it out."""

    NO_PASS = 1
    NO_PERSONS = 2
    UNSIGNED = 3
    UNBOUND = 4
    EARLY = 5
    ENDED = 6
    REVOKED = 7


_WHY = {
    Bar.NO_PASS: "this crew takes persons only, and the token names none: ask whoever holds the crew's token "
    "for one of your own (`ragtag invite --for NAME`)",
    Bar.NO_PERSONS: "this crew takes no persons: it was begun by a token that anybody may use. Join by that "
    "one, or begin another crew by `ragtag invite --persons`",
    Bar.UNSIGNED: "{person}'s token is not signed by this crew's signing key: it is of another crew, or was "
    "changed; ask whoever holds the crew's token for a new one",
    Bar.UNBOUND: "what this process shows of {person} was made for another process; start it again",
    Bar.EARLY: "{person}'s token is not valid yet: the clock {where} is behind that of the machine that "
    "issued it by more than {skew:.0f} minutes; set the one that is wrong",
    Bar.ENDED: "{person}'s token has ended; ask whoever holds the crew's token for a new one "
    "(`ragtag invite --for {person}`), or set the clock if it is wrong here",
    Bar.REVOKED: "{person}'s token was revoked by the holder of the crew's token; ask there for a new one",
}

T = TypeVar("T", Pass, Proof, Revocation)


def said_of(bar: Bar, person: str, where: str = "here") -> str:
    """What a bar means, and what to do. where: whose clock it goes by."""
    return _WHY[bar].format(person=person or "the person", skew=SKEW_S / 60, where=where)


def _decode(data: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def encoded(what: Proof | Revocation) -> bytes:
    """As it travels."""
    return msgspec.msgpack.encode(what)


def read_proof(data: bytes) -> Proof | None:
    """A proof, with no signature checked; ``None``: the bytes are none."""
    proof = _decode(data, Proof) if len(data) <= PROOF_BYTES_MAX else None
    return proof if proof is not None and is_name(proof.shown.person) else None


def read_revocation(data: bytes) -> Revocation | None:
    """A revocation, with no signature checked; ``None``: the bytes are none."""
    found = _decode(data, Revocation) if len(data) <= REVOCATION_BYTES_MAX else None
    return found if found is not None and is_name(found.person) else None


def is_name(person: str) -> bool:
    """Whether it can be a person's name. Of ASCII only: two names never look alike."""
    return len(person) <= PERSON_BYTES_MAX and _NAME.fullmatch(person) is not None


# -- Signing


def public_of(seed: bytes) -> bytes:
    """The public key of a private one; 32 bytes each."""
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def _sign(seed: bytes, *what: object) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).sign(msgspec.msgpack.encode(what))


def _signed(public: bytes, signature: bytes, *what: object) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, msgspec.msgpack.encode(what))
    except (InvalidSignature, ValueError):
        return False
    return True


def issued(signing: bytes, person: str, key: bytes, now_unix_s: float, ends_unix_s: int) -> Pass:
    """A pass for the holder of a key.

    signing: the crew's private signing key. key: the person's public key.

    Raises:
        ValueError: the name is none, or the end lies before now or more than a year ahead.
    """
    _require_name(person)
    if not now_unix_s < ends_unix_s <= now_unix_s + PASS_DAYS_MAX * DAY_S:
        raise ValueError(f"a person's token ends after it begins, and within {PASS_DAYS_MAX} days")
    serial = int(now_unix_s * 1e6)
    return Pass(person, serial, ends_unix_s, key, _sign(signing, _PASS, person, serial, ends_unix_s, key))


def revoked(signing: bytes, person: str, serial: int) -> Revocation:
    """The revocation of a person's passes up to a serial. Raises ValueError: the name is none."""
    _require_name(person)
    return Revocation(person, serial, _sign(signing, _REVOCATION, person, serial))


def number_of(person: str, serial: int) -> bytes:
    """The number of the invitation in a person's token (``invitation``), by which members know its pass."""
    return _hash_of(person) + serial.to_bytes(8, "little")


def _hash_of(person: str) -> bytes:
    return hashlib.blake2b(person.encode(), digest_size=_HASH_BYTES, person=b"ragtag-person").digest()


def _require_name(person: str) -> None:
    if not is_name(person):
        raise ValueError(
            f"{person[:40]!r} is no name for a person: 1 to {PERSON_BYTES_MAX} letters (a to z), digits and "
            ". _ + @ -, the first a letter or a digit"
        )


def proof_of(shown: Pass, seed: bytes, member: str, process: int, key: bytes) -> bytes:
    """What a process shows of its person.

    seed: the person's private key. member, process, key: as in ``Passes.why_not``.
    """
    return encoded(Proof(shown, _sign(seed, _BINDING, member, process, key)))


# -- Checking


class Passes:
    """What one peer of a crew that takes persons knows: the signing key, its own pass, and what is void.

    signer: the crew's public signing key.
    mine: this peer's own pass.
    look_unix_s: when a pass that was found good ends, the skew of clocks included; look at all again then.
    """

    def __init__(self, signer: bytes, mine: Pass) -> None:
        self.signer, self.mine = signer, mine
        self._void: dict[str, Revocation] = {}
        self._names: dict[bytes, str] = {}  # by a hash, as invitations tell it
        self._known: OrderedDict[bytes, Pass] = OrderedDict()
        self.look_unix_s = math.inf

    def why_not(
        self, member: str, process: int, key: bytes, proof: bytes, now_unix_s: float
    ) -> tuple[Bar, str] | None:
        """Why a member may not be in, and the person that it says it is; ``None``: it may.

        member: its name. process: its card's epoch. key: what its card tells of the key of its sessions.
        proof: what it shows.
        """
        shown = self._checked(member, process, key, proof)
        if not isinstance(shown, Pass):
            return shown
        bar = self._void_or_over(shown, now_unix_s, SKEW_S)
        if bar is not None:
            return bar, shown.person
        self.look_unix_s = min(self.look_unix_s, shown.ends_unix_s + SKEW_S)
        return None

    def _checked(self, member: str, process: int, key: bytes, proof: bytes) -> Pass | tuple[Bar, str]:
        """The pass of a proof whose signatures hold, which are checked once."""
        if not proof:
            return Bar.NO_PASS, ""
        what = msgspec.msgpack.encode((member, process, key, proof))
        digest = hashlib.blake2b(what, digest_size=16).digest()
        shown = self._known.get(digest)
        if shown is None:
            found = self._signed_by(member, process, key, proof)
            if not isinstance(found, Pass):
                return found
            shown = self._known[digest] = found
            while len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
        return shown

    def proven(self, member: str, process: int, key: bytes, proof: bytes, now_unix_s: float) -> bool:
        """Whether a proof is good, as ``why_not`` has it. Any thread may ask: nothing is kept of it."""
        shown = self._signed_by(member, process, key, proof)
        return isinstance(shown, Pass) and self._void_or_over(shown, now_unix_s, SKEW_S) is None

    def _signed_by(self, member: str, process: int, key: bytes, proof: bytes) -> Pass | tuple[Bar, str]:
        """The pass of a proof whose signatures hold; or why they do not."""
        read = read_proof(proof)
        if read is None:
            return Bar.UNSIGNED, ""
        shown = read.shown
        if not self._is_signed(shown):
            return Bar.UNSIGNED, ""  # nothing in it is believed, its person's name least of all
        if not key or not _signed(shown.key, read.binding, _BINDING, member, process, key):
            return Bar.UNBOUND, shown.person
        return shown

    def _void_or_over(self, shown: Pass, now_unix_s: float, skew_s: float) -> Bar | None:
        void = self._void.get(shown.person)
        if void is not None and shown.serial <= void.serial:
            return Bar.REVOKED
        if shown.serial / 1e6 > now_unix_s + SKEW_S:
            return Bar.EARLY
        return Bar.ENDED if now_unix_s > shown.ends_unix_s + skew_s else None

    def fits(self, secret: bytes) -> bool:
        """Whether this peer's own pass is signed by the signing key, and for the holder of a private key."""
        return public_of(secret) == self.mine.key and self._is_signed(self.mine)

    def _is_signed(self, shown: Pass) -> bool:
        fields = shown.person, shown.serial, shown.ends_unix_s, shown.key
        long = shown.ends_unix_s - shown.serial / 1e6 > PASS_DAYS_MAX * DAY_S
        return not long and _signed(self.signer, shown.signature, _PASS, *fields)

    def my_bar(self, now_unix_s: float) -> Bar | None:
        """Why this peer itself may not be in (any more), by its own clock; ``None``: it may."""
        return self._void_or_over(self.mine, now_unix_s, 0.0)

    def void(self) -> list[Revocation]:
        """What is revoked, the newest serials first."""
        return sorted(self._void.values(), key=lambda each: (-each.serial, each.person))

    def voids_number(self, number: bytes) -> bool:
        """Whether the pass of an invitation's number (``number_of``) is revoked."""
        void = self._void.get(self._names.get(number[:_HASH_BYTES], ""))
        return void is not None and int.from_bytes(number[_HASH_BYTES:], "little") <= void.serial

    def voids(self, person: str) -> Revocation | None:
        """What is revoked of a person."""
        return self._void.get(person)

    def revoke(self, told: Revocation, now_unix_s: float) -> bool:
        """Take a revocation; whether it says anything new. One that is not signed is not believed."""
        known = self._void.get(told.person)
        if self._past(told, now_unix_s) or (known is not None and told.serial <= known.serial):
            return False  # before the signature, as copies come often
        if not _signed(self.signer, told.signature, _REVOCATION, told.person, told.serial):
            return False
        self._void[told.person] = told
        self._names[_hash_of(told.person)] = told.person
        over = [each for each in self._void.values() if self._past(each, now_unix_s)]
        if len(self._void) - len(over) > REVOCATIONS_MAX:
            over.append(min(self._void.values(), key=lambda each: (each.serial, each.person)))
        for each in over:
            del self._void[each.person], self._names[_hash_of(each.person)]
        return told.person in self._void

    @staticmethod
    def _past(told: Revocation, now_unix_s: float) -> bool:
        """Whether all passes that it voids have ended long ago."""
        return told.serial / 1e6 + PASS_DAYS_MAX * DAY_S + 2 * SKEW_S < now_unix_s


# -- Telling a crew of a revocation from outside

_MAGIC, _VERSION = 0x5652, 1  # "RV"
_TELLS, _ANSWERS = 0, 1
_NOTICE = struct.Struct("<HBB16s")
NOTICE_BYTES = _NOTICE.size + 16 + REVOCATION_BYTES_MAX
"""A revocation as its issuer sends it to a member: magic, version, kind and a nonce, then encrypted under the
crew's key (AES-256-SIV, RFC 5297). The answer is as long, so a forged sender is sent no more than was spent
on it; and nobody outside the crew can have a member check a signature."""


class Took(IntEnum):
    """What a member says to a revocation."""

    YES = 0
    UNSIGNED = 1
    NO_PERSONS = 2


def notice(crew_key: bytes, told: Revocation, nonce: bytes) -> bytes:
    """A revocation for a member. nonce: 16 random bytes."""
    return _closed(crew_key, _TELLS, nonce, encoded(told))


def is_notice(data: bytes) -> bool:
    """Whether a datagram may be a notice."""
    return len(data) == NOTICE_BYTES and data[:4] == struct.pack("<HBB", _MAGIC, _VERSION, _TELLS)


def read_notice(crew_key: bytes, data: bytes) -> tuple[bytes, Revocation] | None:
    """Nonce and revocation of a datagram for which ``is_notice`` holds; ``None``: it is not the crew's."""
    plain = _opened(crew_key, data)
    told = None if plain is None else read_revocation(plain.rstrip(b"\0")[:-1])
    return None if told is None else (_NOTICE.unpack_from(data)[3], told)


def notice_answer(crew_key: bytes, nonce: bytes, took: Took) -> bytes:
    """A member's answer to a notice."""
    return _closed(crew_key, _ANSWERS, nonce, bytes([took]))


def read_notice_answer(crew_key: bytes, nonce: bytes, data: bytes) -> Took | None:
    """What a member has answered; ``None``: it is no answer to the notice of this nonce."""
    if len(data) != NOTICE_BYTES or data[: _NOTICE.size] != _NOTICE.pack(_MAGIC, _VERSION, _ANSWERS, nonce):
        return None
    plain = _opened(crew_key, data)
    return None if plain is None or plain[0] > max(Took) else Took(plain[0])


def _cipher(crew_key: bytes) -> AESSIV:
    return AESSIV(hashlib.blake2b(key=crew_key, digest_size=64, person=b"ragtag-notice").digest())


def _closed(crew_key: bytes, kind: int, nonce: bytes, text: bytes) -> bytes:
    head = _NOTICE.pack(_MAGIC, _VERSION, kind, nonce)
    return head + _cipher(crew_key).encrypt((text + b"\1").ljust(REVOCATION_BYTES_MAX, b"\0"), [head])


def _opened(crew_key: bytes, data: bytes) -> bytes | None:
    try:
        return _cipher(crew_key).decrypt(data[_NOTICE.size :], [data[: _NOTICE.size]])
    except InvalidTag:
        return None
