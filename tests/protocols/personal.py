"""A simulated crew that takes persons: membership machines whose cards prove whose they are."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from ragtag.core.faults import Faults
from ragtag.core.wire import VERSION
from ragtag.protocols.membership.passes import HOLDER, Pass, Passes, issued, proof_of, public_of
from ragtag.protocols.membership.roster import NO_SEAT, Card, encode_card
from ragtag.simulation.worlds.members import Life, MemberWorld, address_of, name_of

UNIX_S = 1_800_000_000.0
DAY_S = 86_400


def seed(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=32).digest()


SIGNING = seed("the crew's signing key")


def pass_for(
    person: str = "alice", *, at_s: float = UNIX_S, ends_s: float = UNIX_S + DAY_S, signing: bytes = SIGNING
) -> Pass:
    return issued(signing, person, public_of(seed(person)), at_s, int(ends_s))


class Persons(MemberWorld):
    """Members by person; the wall clock is right on all of them, unless ``start`` says otherwise."""

    def __init__(self, faults: Faults, number: int = 1) -> None:
        super().__init__(faults, number)

    def person(
        self,
        peer: int,
        entries: tuple[int, ...],
        person: str = HOLDER,
        *,
        shown: Pass | None = None,
        clock_s: float = 0.0,
        proof: bytes | None = None,
        process: int | None = None,
        name: str | None = None,
        deadline_s: float = 1e9,
    ) -> Life:
        """Start a process of a person. clock_s: by so much its clock is ahead. proof: in place of its own."""
        shown = shown or pass_for(person, at_s=UNIX_S - DAY_S, ends_s=UNIX_S + 300 * DAY_S)
        host, port = address_of(peer)
        epoch = 100 + peer if process is None else process
        key = b"\1" + seed(f"session {peer}")
        card = Card(VERSION, NO_SEAT, 0, epoch, False, host, port + 1000, 0, 1, 5, key=key)
        if proof is None:
            proof = proof_of(shown, seed(shown.person), name or name_of(peer), epoch, key)
        return self.start(
            peer,
            entries,
            name=name,
            deadline_s=deadline_s,
            metadata=encode_card(msgspec.structs.replace(card, proof=proof)),
            passes=Passes(public_of(SIGNING), shown),
            unix_s=UNIX_S + self.now_s + clock_s,
        )

    def live(self, observer: int) -> set[int]:
        """Whom a member takes for living, itself included."""
        return {int(name.removeprefix("peer-")) for name in self.lives[observer].machine.live()}
