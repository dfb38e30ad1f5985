"""Persons in the membership: whose records are believed, who is put out, and how revocations reach all.

A revocation is told at once to a few members by each that hears of it for the first time, so that it reaches
all in a time like the logarithm of the crew (as SWIM's gossip does). In each period each member tells one
other a few of those that it knows, in turn, in case one was lost; and a newcomer is told the newest.

Whom a member puts out is its own decision, and nothing that it tells others. So a member whose clock is wrong
harms itself alone. A peer that is put out hears why from all that it still speaks to, with the revocation,
which it checks, too: no member can talk another one out of the crew. What nothing proves (that a pass has
ended, by another's clock) ends a peer only where it is alone, and two members or more have said so: of two
clocks that differ nobody knows which is wrong.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ragtag.protocols.membership.core import Core
from ragtag.protocols.membership.passes import (
    Bar,
    Passes,
    Revocation,
    Took,
    encoded,
    notice_answer,
    read_revocation,
    said_of,
)
from ragtag.protocols.membership.probe import Prober
from ragtag.protocols.membership.roster import decode_card
from ragtag.protocols.membership.row import Entry
from ragtag.protocols.membership.types import Address, Failed, Member, Status
from ragtag.protocols.membership.view import View
from ragtag.protocols.membership.wire import REVOCATIONS_EACH, Barred, Record, Revoked, record_of

_TOLD_TO_NEWCOMERS = 4
"""Datagrams of revocations for a newcomer. The others put out whom the rest names, and gossip brings it."""
_OUTVOTED = 2
"""So many members are right against one that is alone: the fewest that are a majority of all three. Nothing
that is measured could say whose clock is wrong."""


class Persons:
    """One peer's part. passes: what it knows of persons; ``None``: its crew takes none."""

    def __init__(self, core: Core, view: View, prober: Prober, passes: Passes | None) -> None:
        self._core, self._view, self._prober, self.passes = core, view, prober, passes
        self._turn = 0
        self._refused = False  # by a member, with no proof
        self._against: set[str] = set()  # members that have refused this peer since it is alone
        if passes is not None:
            view.may_be_in = self._may_be_in

    # -- Whose records are believed

    def why_not(self, record: Record) -> tuple[Bar, str] | None:
        """Why a living member may not be in, and which person it says it is; ``None``: it may."""
        card = decode_card(record.metadata)
        if self.passes is None:
            return (Bar.NO_PERSONS, card.person) if card is not None and card.proof else None
        if card is None:
            return Bar.NO_PASS, ""
        return self.passes.why_not(record.name, card.epoch, card.key, card.proof, self._core.unix_s)

    def _may_be_in(self, record: Record, known: Member | None) -> bool:
        found = self.why_not(record)
        if found is not None:
            self._core.remark("barred", record.name, said_of(*found))
        elif known is not None and not self._may_replace(record, known):
            self._core.remark("made up", record.name, "another person's, or not of the process that it names")
        else:
            return True
        return False

    def _may_replace(self, record: Record, known: Member) -> bool:
        """Whether a record whose proof is good may take the place of what is known of its name.

        Others can tell a process's card in a record that it has not made, and sign a card of their own for
        any name. So a name that lives is its person's, and a process has one epoch. What shows this
        process's own proof is no other process.
        """
        card, before = decode_card(record.metadata), decode_card(known.metadata)
        if card is None or before is None:
            return True
        if card.proof == before.proof:
            return record.epoch == known.epoch and record.name != self._view.mine.name
        return known.status >= Status.DEAD or card.person == before.person

    def barred(self, name: str, bar: Bar, person: str) -> Barred:
        """What to tell a process that may not be in."""
        void = None if self.passes is None or bar is not Bar.REVOKED else self.passes.voids(person)
        return Barred(name, bar, self._core.unix_s, b"" if void is None else encoded(void))

    def said(self, message: Barred) -> str:
        """What a member's refusal means for this peer."""
        bars = {bar.value: bar for bar in Bar}
        bar = bars.get(message.bar)
        mine = "" if self.passes is None else self.passes.mine.person
        text = (
            "it does not say why; install the same Ragtag everywhere"
            if bar is None
            else said_of(bar, mine, "of that member")
        )
        if bar in (Bar.EARLY, Bar.ENDED) and math.isfinite(message.unix_s):
            ahead_s = message.unix_s - self._core.unix_s
            if abs(ahead_s) > 1.0:
                text += (
                    f" (that member's clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'})"
                )
        return text

    def doubted(self, epoch: int, message: Barred) -> None:
        """The process ``epoch`` refuses this peer. It believes what is proven; the other may be wrong."""
        if message.revocation:
            self.take([message.revocation])
        if self.passes is None or not self.is_good():
            return
        if message.bar in (Bar.EARLY, Bar.ENDED) and self.outvoted(epoch):
            self._fail(self.said(message))
        elif not self._refused:
            self._refused = True
            self._core.remark("refused", message.name, self.said(message))

    def outvoted(self, epoch: int) -> bool:
        """The process ``epoch`` refuses this peer, and proves nothing: whether nobody else is left for this
        peer, and another member has refused it since.
        """
        if self._view.live:
            self._against.clear()
        elif len(self._against) < _OUTVOTED:
            self._against |= {e.member.name for e in self._view.entries.values() if e.member.epoch == epoch}
        return len(self._against) >= _OUTVOTED

    # -- Who is put out

    def look(self) -> None:
        """Once in a period: put out the members whose passes have ended, and tell one of revocations."""
        passes = self.passes
        if passes is None or not self.is_good():
            return
        if self._core.unix_s > passes.look_unix_s:
            self._look_at_all(passes)
        void = passes.void()
        if void and self._view.live:
            first = self._turn * REVOCATIONS_EACH % len(void)
            self._turn += 1
            self._tell(self._core.some(self._view.live, 1), [encoded(each) for each in void[first:]])

    def is_good(self) -> bool:
        """Whether this peer's own pass is good. If not it leaves, and ends."""
        bar = None if self.passes is None else self.passes.my_bar(self._core.unix_s)
        if self.passes is None or bar is None:
            return True
        if self._view.live:
            self._view.renew(status=Status.LEFT)
            self._prober.spread(self._few())
        self._fail(said_of(bar, self.passes.mine.person))
        return False

    def _fail(self, reason: str) -> None:
        self._core.effects.append(Failed(reason, barred=True))
        self._core.halt()

    def _look_at_all(self, passes: Passes) -> None:
        passes.look_unix_s = math.inf
        for entry in list(self._view.entries.values()):
            found = self.why_not(record_of(replace(entry.member, status=Status.ALIVE)))
            if found is not None:
                self._core.counts["put out"] += 1
                self._view.put_out(entry, said_of(*found))

    # -- Revocations

    def take(self, told: list[bytes]) -> None:
        """Revocations came. From the first one on that is not signed, the rest is not looked at."""
        passes, new = self.passes, []
        for data in told if passes is not None else ():
            assert passes is not None
            read = read_revocation(data)
            if read is None:
                break
            if passes.revoke(read, self._core.unix_s):
                new.append(data)
                continue
            void = passes.voids(read.person)
            if void is None or void.serial < read.serial:
                self._core.counts["unsigned"] += 1
                break
        if passes is None or not new:
            return
        self._tell(self._core.some(self._view.live, self._few()), new)
        if self.is_good():
            self._look_at_all(passes)

    def welcome(self, entry: Entry) -> None:
        """A newcomer was let in: tell it the newest revocations."""
        void = [] if self.passes is None else self.passes.void()[: _TOLD_TO_NEWCOMERS * REVOCATIONS_EACH]
        for at in range(0, len(void), REVOCATIONS_EACH):
            self._tell([entry.member.name], [encoded(each) for each in void[at:]])

    def noticed(self, source: Address, nonce: bytes, told: Revocation) -> None:
        """A notice came, perhaps from the holder of the crew's signing key: take it, and answer."""
        took = Took.NO_PERSONS
        if self.passes is not None:
            self.take([encoded(told)])
            void = self.passes.voids(told.person)
            took = Took.YES if void is not None and void.serial >= told.serial else Took.UNSIGNED
        self._core.send(source, notice_answer(self._core.me.key, nonce, took))

    def _few(self) -> int:
        return 2 + math.ceil(math.log2(len(self._view.live) + 1))

    def _tell(self, names: list[str], told: list[bytes]) -> None:
        message = Revoked(self._view.mine.name, told[:REVOCATIONS_EACH])
        for name in names:
            self._prober.tell(self._view.entries[name], message)
