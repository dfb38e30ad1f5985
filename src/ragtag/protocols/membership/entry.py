"""Admission: any living member is an entry point, and a stranger is believed only after a round trip.

    newcomer                         member
    Introduce(record)          ->
                               <-    Challenge(cookie)      nothing is kept of a stranger
    Introduce(record, cookie)  ->    admitted; Refused: the name is taken; or Barred: by its person's pass
                               <-    Page(view, more)
    Pull(after)                ->    until there is no more

The same happens wherever a peer hears another that it does not know: it challenges, and the other introduces
itself. Every peer is first a crew of one, so peers that start together may enter through each other.
"""

from __future__ import annotations

import math

from ragtag.core.address import without_stream
from ragtag.protocols.membership.core import Core
from ragtag.protocols.membership.pace import INITIAL_RTO_S, Allowance
from ragtag.protocols.membership.passes import said_of
from ragtag.protocols.membership.persons import Persons
from ragtag.protocols.membership.probe import Prober
from ragtag.protocols.membership.row import Entry
from ragtag.protocols.membership.types import Address, Entered, Failed, Join, Status
from ragtag.protocols.membership.view import View
from ragtag.protocols.membership.wire import (
    CHALLENGE_BYTES,
    Barred,
    Challenge,
    Introduce,
    Message,
    Opened,
    Page,
    Pull,
    Refused,
    Revoked,
    gossip_of,
    record_of,
)

_COOKIE_USES = 3
_OTHERS_S = 3 * INITIAL_RTO_S
"""For so long a newcomer that one member does not let in waits for another one that does."""


class Admission:
    """Brings this peer into the crew, and lets others in."""

    def __init__(self, core: Core, view: View, prober: Prober, persons: Persons) -> None:
        self.core, self.view, self.prober, self.persons = core, view, prober, persons
        self.entered = False
        self._entries: tuple[Address, ...] = ()
        self._deadline_s = math.inf
        self._attempt = 0
        self._heard = False
        self._tried_s: dict[Address, float] = {}
        self._cookies: dict[Address, tuple[int, bytes, int]] = {}
        self._refused: Refused | None = None
        self._refused_until_s = math.inf
        self._refused_for_s = 0.0
        self._refusals: set[tuple[int, int]] = set()  # no more than this peer asked for
        self._barred: dict[Address, str] = {}  # by entry, what its member said
        self._pulling = ""
        self._pulled_from = ""
        self._pulls = 0
        self._strangers = Allowance(core.limits.datagrams_per_s_max)
        self._anybody = Allowance(core.limits.datagrams_per_s_max)

    # -- As a newcomer

    def join(self, event: Join) -> None:
        """Ask the entries in turn to be let in. Without entries the crew begins here."""
        self._entries = tuple(a for a in event.entries if a != self.core.me.address)
        self._deadline_s = event.deadline_s - self.core.slept_s
        if not self._entries:
            self._enter()
        else:
            self.retry()

    def retry(self) -> None:
        """No member has let this peer in yet: ask the next entry.

        The pause grows until a member was heard, since no round trip is known before. Then it is measured.
        """
        if self.entered:
            return
        if self.core.now_s >= self._deadline_s:
            if self.view.live:
                self._enter()  # no entry answered, but others came in here
            else:
                self._fail(self._why())
            return
        self.ask_next()
        if self._refused is not None:
            pause_s = max(self.prober.default_rto_s, self._refused_for_s / 10)
        elif self._heard:
            pause_s = self.prober.default_rto_s
        else:
            rounds = self._attempt // len(self._entries)
            pause_s = INITIAL_RTO_S / 8 * 2.0 ** min(rounds, 4)
        pause_s /= len(self._entries)  # other entries may be quicker than the one just asked
        self.core.after(min(pause_s, max(0.0, self._deadline_s - self.core.now_s)), "join")

    def ask_next(self) -> None:
        """Introduce this peer to the next of its entries."""
        address = self._entries[self._attempt % len(self._entries)]
        self._attempt += 1
        self._tried_s[address] = self.core.now_s
        epoch, cookie, uses = self._cookies.pop(address, (0, b"", 0))
        if uses:  # it was challenged here, and then something was lost
            self._cookies[address] = (epoch, cookie, uses - 1)
        self._introduce(address, epoch, cookie)

    def ask_missing(self) -> None:
        """Rarely ask at an entry where no member is known, so that two crews that never met become one."""
        if not self._entries or not self.entered or self.core.uniform() * (1 + len(self.view.live)) >= 4:
            return
        known = {self.view.entries[name].member.address for name in self.view.live}
        if self._entries[self._attempt % len(self._entries)] in known:
            self._attempt += 1
        else:
            self.ask_next()

    def challenged(self, source: Address, epoch: int, message: Challenge) -> None:
        """A member does not know this peer yet: introduce it."""
        tried_s = self._tried_s.pop(source, None)
        if tried_s is not None and not self.entered:
            self._heard = True
            self.prober.learn_first(self.core.now_s - tried_s)
            self._cookies[source] = (epoch, message.cookie, _COOKIE_USES)
        self._introduce(source, epoch, message.cookie)

    def refused(self, opened: Opened, message: Refused) -> None:
        """Another member has the name. If it is dead, waiting helps; if not, nothing does."""
        said = (opened.source_epoch, opened.number)
        if message.name != self.core.me.name or said in self._refusals:
            return
        if self.entered:
            if self.persons.passes is None or self.persons.outvoted(opened.source_epoch):
                self.view.outlived(message.epoch, (message.host, message.port))
            return
        self._refusals.add(said)
        if self._refused is None:
            self._refused = message
            self._refused_for_s = max(0.0, min(message.within_s, 3600.0))
            self._refused_until_s = self.core.now_s + self._refused_for_s
            self.core.remark(
                "name taken", message.name, f"by {message.host}:{message.port}; waiting in case it is dead"
            )
        elif self.core.now_s > self._refused_until_s:
            self._fail(self._why())
        else:  # a member that has just begun knows no round trip, and asks for too long a wait at first
            self._refused_for_s = max(0.0, min(message.within_s, self._refused_for_s))
            self._refused_until_s = min(self._refused_until_s, self.core.now_s + self._refused_for_s)

    def barred(self, source: Address, epoch: int, message: Barred) -> None:
        """A member says that this peer may not be in. Another one's clock may be right."""
        if message.name != self.core.me.name:
            return
        if self.entered or message.revocation:
            self.persons.doubted(epoch, message)
        elif (at := without_stream(source)) in self._entries:
            self._barred[at] = self.persons.said(message)
            self._deadline_s = min(self._deadline_s, self.core.now_s + _OTHERS_S)
            if len(self._barred) == len(set(self._entries)):
                self._fail(self._why())

    def paged(self, source: str, message: Page) -> None:
        """A page of a member's view came. Its records are merged already."""
        if not self.entered:
            self._enter()
        if message.more and message.gossip:
            entry = self.view.entries.get(source)
            last = max(record.name for record in message.gossip)
            if entry is not None and last > self._pulling:
                self._pulling = last
                self._pull(entry)
        elif not message.more and source == self._pulled_from:
            self._pulling = self._pulled_from = ""

    @property
    def pulling(self) -> bool:
        """Whether more of a member's view is to come."""
        return bool(self._pulled_from)

    def asked(self, entry: Entry) -> bool:
        """Whether this peer waits for that member's view."""
        return not self.entered or entry.member.name == self._pulled_from

    def pull(self, entry: Entry) -> None:
        """Ask a member for its whole view."""
        self._pulling = ""
        self._pull(entry)

    def pull_expired(self, number: int) -> None:
        """No page came: go on from another member. Without that, gossip would tell the rest later."""
        if number == self._pulls and self._pulled_from and self.view.live:
            self._pull(self.view.entries[self.core.some(self.view.live, 1)[0]])

    def _pull(self, entry: Entry) -> None:
        self._pulled_from = entry.member.name
        self._pulls += 1
        self.core.after(2 * self.prober.rto_s(entry), "pull", self._pulls)
        news = gossip_of(self.view.gossip(entry.member.name))
        self.prober.tell(entry, Pull(self.view.mine.name, self._pulling, news))

    def _introduce(self, address: Address, epoch: int, cookie: bytes) -> None:
        self._to(address, epoch, Introduce(record_of(self.view.mine), cookie))

    def _enter(self) -> None:
        self.entered = True
        self._tried_s.clear()
        self._cookies.clear()
        self.core.effects.append(Entered(len(self.view.live)))

    def _fail(self, reason: str) -> None:
        self.core.effects.append(Failed(reason, barred=bool(self._barred)))
        self.core.halt()

    def _why(self) -> str:
        if self._refused is not None:
            r = self._refused
            return (
                f"two peers are called {r.name!r}: the other one, at {r.host}:{r.port}, is alive; give this "
                "peer another name"
            )
        if self._barred:
            (host, port), said = next(iter(self._barred.items()))
            return f"{host}:{port} does not let this peer in: {said}"
        asked = ", ".join(f"{host}:{port}" for host, port in self._entries[:4])
        if self.core.counts["barred"]:
            return (
                f"the members at {asked} show no passes that are good here: this crew takes no persons, or "
                "the clock of this machine is wrong"
            )
        versions = self.core.seal.refused["version"]
        if versions:
            return f"{asked} speaks another version of membership; install the same Ragtag on every peer"
        if self.core.seal.refused["foreign"]:
            return f"{asked} belongs to another crew (its key differs); was the token made by this crew?"
        return f"no member answered at {asked}; is one running there, and does the firewall let UDP through?"

    # -- As a member

    def hears_strangers(self) -> bool:
        """Whether one more datagram of a stranger may be taken now, which has proved to be the crew's."""
        return self._strangers.take(self.core.now_s)

    def answers_anybody(self) -> bool:
        """Whether one more datagram that nothing vouches for may be answered now.

        Those have an allowance of their own: who has no key at all keeps nobody out that has one.
        """
        return self._anybody.take(self.core.now_s)

    def stranger(self, source: Address, opened: Opened) -> None:
        """A datagram of an unknown process: take only messages that make it known."""
        epoch, message = opened.source_epoch, opened.message
        if not self._strangers.take(self.core.now_s):
            self.core.remark("flooding", "", "too many strangers; some are not answered")
        elif isinstance(message, Challenge):
            self.challenged(source, epoch, message)
        elif isinstance(message, Refused):
            self.refused(opened, message)
        elif isinstance(message, Barred):
            self.barred(source, epoch, message)
        elif isinstance(message, Revoked):  # it may overtake the page by which its sender gets known
            self.persons.take(message.told)
        elif isinstance(message, Introduce) and self.core.seal.knows_cookie(
            message.cookie, self.core.now_s, source
        ):
            self._admit(source, epoch, message)
        else:
            self._to(source, epoch, Challenge(self.core.seal.cookie(self.core.now_s, source)))

    def lost(self, source: Address, data: bytes) -> None:
        """Answer a peer with another crew's token: it cannot read the answer, but sees which crew's it is.

        The answer is no longer than what came, as the address may be forged. Introductions are longer.
        """
        epoch = self.core.seal.stray(data)
        if epoch is not None and len(data) >= CHALLENGE_BYTES and self.answers_anybody():
            self._to(source, epoch, Challenge(self.core.seal.cookie(self.core.now_s, source)))

    def _admit(self, source: Address, epoch: int, message: Introduce) -> None:
        record = message.record
        if record.epoch != epoch or record.status not in (Status.ALIVE, Status.LEFT):
            self.core.counts["unsound"] += 1
            return
        bar = self.persons.why_not(record) if record.status == Status.ALIVE else None
        if bar is not None:
            self.core.remark("barred", record.name, said_of(*bar))
            self._to(source, epoch, self.persons.barred(record.name, *bar))
            return
        mine = self.view.mine
        holder = mine if record.name == mine.name else None
        entry = self.view.entries.get(record.name)
        if entry is not None and entry.member.status < Status.DEAD and entry.member.epoch != epoch:
            moved = entry.member.address != (record.host, record.port)
            heir = epoch > entry.member.epoch and self.view.may_be_in(record, entry.member)
            holder = entry.member if moved or not heir else None
        if holder is not None:
            self.core.remark("refused", record.name, f"the name is taken by {holder.address[0]}")
            within_s = 10 * self.prober.period_s + 4 * self.prober.default_rto_s
            self._to(source, epoch, Refused(record.name, holder.epoch, *holder.address, within_s))
            return
        admitted = self.view.admit(record)
        if admitted is not None and record.status == Status.ALIVE:
            self.page_to(admitted, "")
            self.persons.welcome(admitted)

    def page_to(self, entry: Entry, after: str) -> None:
        """Send a member a page of this peer's view, from the first name above ``after``."""
        records, more = self.view.page(after)
        self.prober.tell(entry, Page(self.view.mine.name, more, gossip_of(records)))

    def _to(self, address: Address, epoch: int, message: Message) -> None:
        self.core.send(address, self.core.seal.seal(message, epoch))
