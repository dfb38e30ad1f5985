"""The members of the crew as one peer believes: it merges what it hears, and says what to tell others.

Beliefs about one name are in one order (epoch, incarnation, status) and merging takes the greatest. So
members that exchange what they believe come to agree, in whatever order they hear it (SWIM, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from msgspec import Raw

from ragtag.core.address import family_of, unusable
from ragtag.core.wire import name_hash
from ragtag.protocols.membership.core import Core
from ragtag.protocols.membership.gossip import Rumours, page
from ragtag.protocols.membership.pace import Allowance, Health, ReplayWindow, RoundTrip
from ragtag.protocols.membership.row import Entry, fresh_entry, is_sound, member_of
from ragtag.protocols.membership.suspicion import Suspicion, confirmations_wanted, shortest_periods
from ragtag.protocols.membership.types import Address, Changed, Failed, Member, PutOut, Status
from ragtag.protocols.membership.wire import Challenge, Record, packed, record_of

LEAP_MAX = 1 << 32
"""No incarnation is believed that lies so far above the known one: a member raises its own once for each
refutation or news, so that takes more than a century. An accusation with a made-up incarnation thus leaves
numbers to refute it with. The last number there is (2**62 - 1) could not be refuted."""


class View:
    """The bounded table of members, and the rumours to be told.

    mine: this peer.
    entries: a row for each other member, by name.
    suspects, graves: the names of the suspected, and of the dead and gone, oldest first.
    may_be_in: whether a living member's record may be believed, as far as persons are concerned. Told with
        it is whom it would take the place of, if there is a row of the name.
    """

    def __init__(self, core: Core, health: Health) -> None:
        me = core.me
        self.core, self.health = core, health
        self._family = family_of(me.address[0])
        self.mine = Member(me.name, me.address, me.epoch, metadata=me.metadata)
        self._my_raw = packed(record_of(self.mine))
        self.entries: dict[str, Entry] = {}
        self.suspects: dict[str, None] = {}
        self.graves: dict[str, None] = {}
        self.live: list[str] = []
        """The names of other members that are alive or suspected, in order of arrival."""
        self._names: dict[str, None] = {me.name: None}
        self._rumours = Rumours(core, self._names, self._record)
        self._rumours.news(me.name)
        self._horizon = 0
        self._speak_up = False
        self._asking = Allowance(core.limits.datagrams_per_s_max)
        self.arrived: list[str] = []
        """Names that have become live since the reader last cleared this."""
        self.accused: list[str] = []
        """Names that have come under suspicion since the reader last cleared this."""
        self.me_hash = name_hash(me.name)
        self.may_be_in: Callable[[Record, Member | None], bool] = lambda record, known: True

    # -- Looking

    def find(self, name: str, epoch: int) -> Entry | None:
        """The row of one process; ``None``: it is unknown, or another process has the name."""
        entry = self.entries.get(name)
        return entry if entry is not None and entry.member.epoch == epoch else None

    def members(self) -> Iterator[Member]:
        """All other members that are known, the dead and gone among them, in order of arrival."""
        return (entry.member for entry in self.entries.values())

    # -- Hearing

    def hear(self, record: Record, teller: Entry | None = None) -> None:
        """Merge a belief. teller: the member that told it, whose newcomers are rationed; ``None``: not."""
        if record.name == self.mine.name:
            if self._believable(record, self.mine):
                self._about_me(record)
            return
        entry = self.entries.get(record.name)
        if not self._believable(record, None if entry is None else entry.member):
            return
        if entry is None:
            if record.status == Status.ALIVE:
                self._hear_of_stranger(record, teller)
            return
        member = entry.member
        if record.epoch != member.epoch:
            if record.epoch > member.epoch and record.status == Status.ALIVE:
                self._replace(entry, record)
            return
        heard = (record.incarnation, record.status)
        if heard <= (member.incarnation, member.status):
            if heard == (member.incarnation, Status.SUSPECT):
                self._confirm(entry, record)
            return
        if record.status == Status.ALIVE:
            self._alive(entry, record)
        elif record.status == Status.SUSPECT:
            self.suspect(entry, record.incarnation, record.accusers)
        elif record.status == Status.DEAD:
            self._hear_of_death(entry, record)
        else:
            self._become(entry, replace(member, incarnation=record.incarnation, status=Status.LEFT))

    def _believable(self, record: Record, known: Member | None) -> bool:
        """Whether a member's incarnation can be so high. That of a new process counts from 0."""
        same = known is not None and known.epoch == record.epoch
        if record.incarnation <= LEAP_MAX + (known.incarnation if known is not None and same else 0):
            return True
        self.core.counts["unbelievable"] += 1
        return False

    def admit(self, record: Record) -> Entry | None:
        """Take in a process that has introduced itself. Returns its row; ``None``: there is no room."""
        entry = self.entries.get(record.name)
        if entry is not None:
            self.hear(record)
        elif self._believable(record, None):
            self._add(record)
        return self.find(record.name, record.epoch)

    def _hear_of_stranger(self, record: Record, teller: Entry | None) -> None:
        """An unknown process that is older than a forgotten one may be that one: challenge it first."""
        if teller is not None and not teller.newcomers.take(self.core.now_s):
            self.core.remark("flooding", teller.member.name, "tells of too many new members")
        elif not self._sound(record):
            return
        elif record.epoch > self._horizon:
            self._add(record)
        elif self._asking.take(self.core.now_s):
            address = (record.host, record.port)
            cookie = self.core.seal.cookie(self.core.now_s, address)
            self.core.send(address, self.core.seal.seal(Challenge(cookie), record.epoch))

    def _sound(self, record: Record, known: Member | None = None) -> bool:
        """Whether a record of a living member is complete, and its address can be reached from here.

        known: the row of its name.
        """
        if not is_sound(record, self.core.limits.metadata_bytes):
            self.core.counts["unsound"] += 1
            return False
        why = unusable((record.host, record.port), self._family)
        if why:
            self.core.remark("bad address", record.name, f"listens where nothing can be sent: {why}")
        return not why and self.may_be_in(record, known)

    def _add(self, record: Record) -> None:
        core, limits = self.core, self.core.limits
        if not self._sound(record):
            return
        if len(self.live) >= limits.members_max:
            core.remark("crew full", record.name, f"{limits.members_max} members are the most")
            return
        entry = fresh_entry(record, limits, core.now_s)
        self.entries[record.name] = entry
        self._names[record.name] = None
        self._enter(entry.member, None)

    def _replace(self, entry: Entry, record: Record) -> None:
        """A later process has the name: the member was restarted."""
        if not self._sound(record, entry.member):
            return
        if not entry.updates.take(self.core.now_s):
            self.core.remark("flooding", record.name, "restarts too often")
            return
        entry.rtt, entry.window, entry.source = RoundTrip(), ReplayWindow(), None
        self._become(entry, member_of(record))

    def _alive(self, entry: Entry, record: Record) -> None:
        """A higher incarnation: the member refutes, or tells new metadata."""
        if not self._sound(record, entry.member):
            return
        member = entry.member
        if member.status is Status.ALIVE and not entry.updates.take(self.core.now_s):
            self.core.remark("flooding", record.name, "news about it comes too fast")
            return
        if member.status is Status.DEAD:
            gone_s = self.core.now_s - entry.since_s
            self.core.remark("healed", record.name, f"it was thought dead for {gone_s:.3g} s")
            self.tell_of_graves()
        self._become(entry, member_of(record))

    def _hear_of_death(self, entry: Entry, record: Record) -> None:
        """A death that others tell becomes a suspicion here, with the shortest time to refute.

        A member that is dead was suspected before, here too, so this costs almost no time. And where a
        partition heals, and each side takes the other's members for dead, none dies a second time.
        """
        member = entry.member
        if entry.suspicion is not None and member.incarnation == record.incarnation:
            entry.suspicion.certain = True
        elif member.status is Status.DEAD:
            entry.member = replace(member, incarnation=record.incarnation)
            self._publish(entry)
        else:
            self.suspect(entry, record.incarnation, (), certain=True)

    def _about_me(self, record: Record) -> None:
        mine = self.mine
        self._speak_up = record.epoch == mine.epoch and record.status != Status.ALIVE
        if record.status == Status.ALIVE:
            self.outlived(record.epoch, (record.host, record.port), record)
            mine_own = record.epoch == mine.epoch and mine.status is Status.ALIVE
            if mine_own and record.incarnation > mine.incarnation:
                self.renew(incarnation=record.incarnation + 1)  # this peer did not say that
        elif self._speak_up and mine.status is Status.ALIVE and record.incarnation >= mine.incarnation:
            self.health.worse()
            self.core.remark("refuted", mine.name, f"believed {Status(record.status).name.lower()}")
            self.renew(incarnation=record.incarnation + 1)

    def outlived(self, epoch: int, address: Address, record: Record | None = None) -> None:
        """Another process has this peer's name. If it started later, this peer is no member any more.

        record: the other's, if that is what says so. It must be believable.
        """
        later = (epoch, address) > (self.mine.epoch, self.mine.address)
        if later and (record is None or self.may_be_in(record, self.mine)):
            self.core.effects.append(
                Failed(
                    f"another peer is called {self.mine.name!r}, too, at {address[0]}:{address[1]}, and "
                    "started later; give each peer a name of its own"
                )
            )
            self.core.halt()

    def renew(
        self, *, incarnation: int | None = None, metadata: bytes | None = None, status: Status = Status.ALIVE
    ) -> None:
        """Tell this peer's record anew, in a higher incarnation."""
        self.mine = replace(
            self.mine,
            incarnation=self.mine.incarnation + 1 if incarnation is None else incarnation,
            metadata=self.mine.metadata if metadata is None else metadata,
            status=status,
        )
        self._my_raw = packed(record_of(self.mine))
        self._rumours.news(self.mine.name)

    # -- Suspecting

    def suspect(
        self, entry: Entry, incarnation: int, accusers: tuple[int, ...], certain: bool = False
    ) -> None:
        """A member (perhaps this peer) had no answer from ``entry`` in that incarnation."""
        n = 1 + len(self.live)
        entry.suspicion = Suspicion(
            self.core.now_s, dict.fromkeys(accusers), confirmations_wanted(n), shortest_periods(n), certain
        )
        self._become(entry, replace(entry.member, incarnation=incarnation, status=Status.SUSPECT))

    def accuse(self, entry: Entry) -> None:
        """This peer itself had no answer from ``entry``."""
        mine = record_of(replace(entry.member, status=Status.SUSPECT), (self.me_hash,))
        if entry.member.status is Status.ALIVE:
            self.suspect(entry, entry.member.incarnation, mine.accusers)
        elif entry.member.status is Status.SUSPECT:
            self._confirm(entry, mine)

    def _confirm(self, entry: Entry, record: Record) -> None:
        """Other members suspect it, too. Each of the first few is news (Lifeguard, section IV-B)."""
        if entry.suspicion is not None and entry.suspicion.add(record.accusers):
            self._publish(entry)

    def judge(self, period_s: float) -> None:
        """Declare dead the suspects that did not refute in time."""
        for name in list(self.suspects):
            entry = self.entries[name]
            if entry.suspicion is not None and self.core.now_s >= entry.suspicion.until_s(
                period_s, self.health.factor, entry.rtt.rto_s
            ):
                self.bury(entry)

    def bury(self, entry: Entry) -> None:
        """Declare a member dead."""
        self._become(entry, replace(entry.member, status=Status.DEAD))

    def put_out(self, entry: Entry, why: str) -> None:
        """A member may not be in any more. No other is told: each sees by itself whom it may believe."""
        member = replace(entry.member, status=Status.LEFT)
        was = entry.member.status
        if was < Status.DEAD:
            self.live.remove(member.name)
            self.core.effects.append(Changed(member, was))
        self.core.effects.append(PutOut(member, why))
        self.suspects.pop(member.name, None)
        self.graves.pop(member.name, None)
        self._forget(member.name)

    # -- Telling

    def gossip(self, to: str | None, about_me: bool = False) -> list[Raw]:
        """The records on a datagram to ``to``.

        First comes an accusation of ``to`` (Lifeguard's buddy system, section IV-C), or this peer's
        refutation of one that it has just read.

        about_me: this peer's own record comes first.
        """
        subject = self.entries.get(to) if to is not None else None
        first = to if subject is not None and subject.member.status is not Status.ALIVE else None
        if self._speak_up or about_me:
            first, self._speak_up = self.mine.name, False
        return self._rumours.gossip(first, 1 + len(self.live))

    def page(self, after: str) -> tuple[list[Raw], bool]:
        """The records of living members with names above ``after`` that fit, and whether there are more."""
        names = sorted(name for name in [self.mine.name, *self.live] if name > after)
        return page(names, self._paged)

    def _paged(self, name: str) -> Raw:
        """A record for a newcomer, which needs a suspect's address and hears of the suspicion soon."""
        if name == self.mine.name:
            return self._my_raw
        return packed(record_of(replace(self.entries[name].member, status=Status.ALIVE)))

    def _record(self, name: str) -> Raw:
        return self._my_raw if name == self.mine.name else self.entries[name].raw

    def tell_of_graves(self) -> None:
        """A member is back and may know that others live, too: tell which ones are taken for dead."""
        for name in self.graves:
            if self.entries[name].member.status is Status.DEAD:
                self._rumours.news(name)

    # -- Rows

    def _become(self, entry: Entry, member: Member) -> None:
        was = entry.member.status
        entry.member, entry.since_s = member, self.core.now_s
        if member.status is not Status.SUSPECT:
            entry.suspicion = None
            self.suspects.pop(member.name, None)
        self._publish(entry)
        if member.status is Status.SUSPECT:
            self.suspects[member.name] = None
            self.accused.append(member.name)
        if (was >= Status.DEAD) != (member.status >= Status.DEAD):
            if member.status >= Status.DEAD:
                self._exit(member, was)
            else:
                self._enter(member, was)
            return
        self.core.effects.append(Changed(member, was))

    def _enter(self, member: Member, was: Status | None) -> None:
        self.graves.pop(member.name, None)
        self.live.append(member.name)
        self.arrived.append(member.name)
        self._rumours.news(member.name)
        self.core.effects.append(Changed(member, was))

    def _exit(self, member: Member, was: Status) -> None:
        self.live.remove(member.name)
        self.graves[member.name] = None
        self.core.effects.append(Changed(member, was))
        while len(self.graves) > self.core.limits.graves_max:
            oldest = next(iter(self.graves))
            self._horizon = max(self._horizon, self.entries[oldest].member.epoch)
            del self.graves[oldest]
            self._forget(oldest)

    def _forget(self, name: str) -> None:
        """Have no row for a name any more."""
        del self.entries[name], self._names[name]
        self._rumours.forget(name)

    def _publish(self, entry: Entry) -> None:
        accusers = tuple(entry.suspicion.accusers) if entry.suspicion is not None else ()
        entry.raw = packed(record_of(entry.member, accusers))
        self._rumours.news(entry.member.name)
