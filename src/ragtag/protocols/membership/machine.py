"""Membership without a master: which peers are in the crew, as a machine.

SWIM (Das, Gupta, Motivala, "SWIM: Scalable Weakly-consistent Infection-style Process Group Membership
Protocol", DSN 2002) with suspicion and incarnation numbers, and from Lifeguard (Dadgar, Phillips, Currey,
"Lifeguard: Local Health Awareness for More Accurate Failure Detection", DSN-W 2018) a suspicion that shortens
as others agree, an accusation that is told to the accused first, and doubt in oneself. Beyond both: a
partition heals (the dead are pinged, rarely), all times follow from measured round trips, and every datagram
is encrypted, bound to two processes, and taken once.

    types       events and effects                  view       what this peer believes of members
    wire        datagrams                           probe      failure detection
    pace        round trips, allowances, health     entry      admission
    core        time, timers, chance                suspicion  how long a suspect has
    gossip      which news go on a datagram         row        the table's rows
    invitation  the way to the crew's key
    whereabouts a peer's address as others see it
    passes      persons: passes, revocations, and their signatures
    persons     whose records are believed, and who is put out
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ragtag.protocols.membership.core import Core, Due
from ragtag.protocols.membership.entry import Admission
from ragtag.protocols.membership.invitation import answer, question_of
from ragtag.protocols.membership.pace import Health, ReplayWindow
from ragtag.protocols.membership.passes import Passes, read_notice
from ragtag.protocols.membership.persons import Persons
from ragtag.protocols.membership.probe import Prober
from ragtag.protocols.membership.roster import PROVEN_CARD_BYTES_MAX
from ragtag.protocols.membership.row import Entry
from ragtag.protocols.membership.types import (
    Address,
    Clock,
    Describe,
    Failed,
    Identity,
    Join,
    Leave,
    Limits,
    Member,
    MemberEffect,
    MemberEvent,
    Notice,
    Received,
    Status,
    Stopped,
)
from ragtag.protocols.membership.view import View
from ragtag.protocols.membership.whereabouts import you_are_at
from ragtag.protocols.membership.wire import (
    Ack,
    Ask,
    Barred,
    Challenge,
    Introduce,
    Message,
    Opened,
    Page,
    Ping,
    Pull,
    Refused,
    Revoked,
    gossip_of,
)

_FAREWELLS = 3
PERSONS_LIMITS = Limits(metadata_bytes=PROVEN_CARD_BYTES_MAX, gossip_bytes=960)
"""Of a crew that takes persons: cards prove them, and a datagram of gossip has room for the longest."""


class Membership:
    """One peer's part: it takes events and says what to do. No datagram makes it raise.

    passes: what it knows of persons, in a crew that takes persons only. ``Clock`` comes first then.
    """

    def __init__(self, me: Identity, limits: Limits | None = None, passes: Passes | None = None) -> None:
        self._core = Core(me, limits or (Limits() if passes is None else PERSONS_LIMITS))
        self._health = Health()
        self._view = View(self._core, self._health)
        self._prober = Prober(self._core, self._view, self._health)
        self._persons = Persons(self._core, self._view, self._prober, passes)
        self._admission = Admission(self._core, self._view, self._prober, self._persons)
        self._slot = 0
        self._farewells = 0
        self.over = False
        if len(me.metadata) > self._core.limits.metadata_bytes:
            raise ValueError(
                f"member: {len(me.metadata)} bytes of metadata; at most {self._core.limits.metadata_bytes}"
            )

    # -- Looking

    @property
    def me(self) -> Member:
        """This peer, as it tells others of itself."""
        return self._view.mine

    def members(self) -> dict[str, Member]:
        """All known members by name: the living (this peer, too), the suspected, the dead and the gone."""
        others = {member.name: member for member in self._view.members()}
        return {self.me.name: self.me, **others}

    def live(self) -> tuple[str, ...]:
        """The sorted names of all members that are alive or only suspected, this peer among them."""
        return tuple(sorted([self.me.name, *self._view.live]))

    @property
    def entered(self) -> bool:
        """Whether a member has let this peer in, or it has begun a crew."""
        return self._admission.entered

    @property
    def whole(self) -> bool:
        """Whether this peer is in, and has the whole view of the member that let it in."""
        return self._admission.entered and not self._admission.pulling

    @property
    def period_s(self) -> float:
        """The protocol period now. A few members are probed in each."""
        return self._prober.period_s

    def ours(self, data: bytes) -> bool:
        """Whether a datagram was made with the crew's key."""
        return self._core.seal.ours(data)

    def invite(self, data: bytes, now_unix_s: float) -> bytes | None:
        """The answer to a newcomer's question for the crew's key (``invitation.is_ask``).

        ``None``: this peer is in no crew, or too many ask.
        """
        if not self._admission.entered or self.over:
            return None
        question, hears = question_of(self._core.me.key, data), self._admission
        if not (hears.hears_strangers() if question.vouched_for else hears.answers_anybody()):
            return None
        passes = self._persons.passes
        if passes is None:
            return answer(self._core.me.key, question, now_unix_s)
        return answer(self._core.me.key, question, now_unix_s, passes.voids_number)

    def whereabouts(self, data: bytes, source: Address) -> bytes | None:
        """The answer to a peer that asks where it is (``whereabouts.asks_where``); ``None``: none is due."""
        told = None if self.over else you_are_at(self._core.me.key, data, source)
        return told if told is not None and self._admission.hears_strangers() else None

    def rtt_s(self, name: str) -> float | None:
        """The smoothed round trip to a member; ``None``: it was not measured."""
        entry = self._view.entries.get(name)
        return entry.rtt.srtt_s if entry is not None and entry.rtt.measured else None

    @property
    def counts(self) -> Mapping[str, int]:
        """What was refused or limited, and how often (see ``Seal.refused`` and ``Remarked``)."""
        return {**self._core.counts, **self._core.seal.refused}

    # -- Stepping

    def step(self, now_s: float, event: MemberEvent) -> list[MemberEffect]:
        """Take one event at time ``now_s`` (a time before the last one counts as the last)."""
        if self.over:
            return []
        core = self._core
        core.advance(now_s, slack_s=self.period_s / core.limits.fanout)
        if isinstance(event, Received):
            self._received(event)
        elif isinstance(event, Clock):
            core.unix_ahead_s = event.unix_s - now_s
        elif isinstance(event, Notice):
            notice = read_notice(core.me.key, event.data) if self._admission.entered else None
            if notice is not None and self._admission.hears_strangers():
                self._persons.noticed(event.source, *notice)
        elif isinstance(event, Join) and self._persons.is_good():
            self._admission.join(event)
            core.after(core.uniform() * self.period_s / core.limits.fanout, "slot")
        elif isinstance(event, Leave):
            self._leave()
        elif isinstance(event, Describe):
            self._describe(event.metadata)
        for _ in range(1024):
            due = core.due()
            if due is None:
                break
            self._expired(due)
        effects = core.finish()
        for i, effect in enumerate(effects):
            if isinstance(effect, Failed | Stopped):
                self.over = True
                return effects[: i + 1]
        return effects

    def _expired(self, due: Due) -> None:
        if due.what == "slot":
            self._turn()
        elif due.what == "probe":
            self._prober.expired(due.nonce)
        elif due.what == "relay":
            self._prober.relay_expired(due.nonce)
        elif due.what == "join":
            self._admission.retry()
        elif due.what == "pull":
            self._admission.pull_expired(due.nonce)
        elif due.what == "farewell":
            self._farewell()

    def _turn(self) -> None:
        """A few times in each period: declare dead suspects whose time is over, and probe the next member."""
        period_s = self.period_s
        self._view.judge(period_s)
        self._prober.turn()
        self._slot += 1
        if self._slot % self._core.limits.fanout == 0:
            self._prober.measure()
            self._prober.knock()
            self._admission.ask_missing()
            self._persons.look()
        self._core.after(period_s * self._health.factor / self._core.limits.fanout, "slot")

    def _leave(self) -> None:
        if self.me.status is not Status.LEFT:
            self._view.renew(status=Status.LEFT)
            self._farewell()

    def _farewell(self) -> None:
        """Tell some members that this peer goes, three times, a round trip apart. They tell the others."""
        if self._farewells == _FAREWELLS or not self._view.live:
            self._core.effects.append(Stopped())
            self._core.halt()
            return
        self._farewells += 1
        self._prober.spread(2 + math.ceil(math.log2(len(self._view.live) + 1)))
        self._core.after(self._prober.default_rto_s, "farewell")

    def _describe(self, metadata: bytes) -> None:
        """Tell new metadata. Raises ValueError: they are too long."""
        if len(metadata) > self._core.limits.metadata_bytes:
            raise ValueError(
                f"member: {len(metadata)} bytes of metadata; at most {self._core.limits.metadata_bytes}"
            )
        self._view.renew(metadata=metadata)
        self._prober.announce()

    # -- Hearing

    def _received(self, event: Received) -> None:
        opened = self._core.seal.open(event.data)
        if opened is None:
            self._admission.lost(event.source, event.data)
            return
        entry = self._known(event, opened)
        if entry is None:
            return
        if not entry.allowance.take(self._core.now_s):
            self._core.remark("flooding", entry.member.name, "too many datagrams; some are not taken")
        elif not entry.window.fresh(opened.number) and not self._made_up(entry, opened):
            self._core.counts["replayed"] += 1
        else:
            entry.source = event.source
            self._take(event, entry, opened)

    def _made_up(self, entry: Entry, opened: Opened) -> bool:
        """Whether a member's highest number is not its own, since it answers an open question by an old one.

        Numbers begin anew with this one. Whoever has the crew's key can send a high number in any member's
        name, and would shut that one out for good.
        """
        name, message = entry.member.name, opened.message
        if not isinstance(message, Ack) or not self._prober.awaits(name, message.nonce):
            return False
        self._core.remark("made up", name, "a datagram in its name, with a number far above its own")
        entry.window = ReplayWindow(opened.number, 1)
        return True

    def _known(self, event: Received, opened: Opened) -> Entry | None:
        """The sender's row; ``None``: it is a stranger, and its datagram has been dealt with."""
        message = opened.message
        name = message.record.name if isinstance(message, Introduce) else getattr(message, "source", None)
        if isinstance(message, Page) and not self._admission.entered:
            for record in message.gossip:
                if record.name == message.source and record.epoch == opened.source_epoch:
                    self._view.admit(record)
        entry = self._view.find(name, opened.source_epoch) if name is not None else None
        if entry is None:
            self._admission.stranger(event.source, opened)
        return entry

    def _take(self, event: Received, entry: Entry, opened: Opened) -> None:
        """A message of a member. Its news come first, as the answer is to tell what follows from them."""
        message, name = opened.message, entry.member.name
        was = entry.member.status
        self._news(entry, message)
        if self._view.find(name, opened.source_epoch) is None:
            return
        if isinstance(message, Ping):
            ack = Ack(self.me.name, message.nonce, True, gossip_of(self._view.gossip(name)))
            self._prober.tell(entry, ack)
        elif isinstance(message, Ack):
            self._prober.acked(name, message)
        elif isinstance(message, Ask):
            self._prober.asked(name, message)
        elif isinstance(message, Page):
            self._admission.paged(name, message)
        elif isinstance(message, Pull):
            self._admission.page_to(entry, message.after)
        elif isinstance(message, Introduce):
            if self._core.seal.knows_cookie(message.cookie, self._core.now_s, event.source):
                self._admission.page_to(entry, "")
            else:
                self._admission.stranger(event.source, opened)
        elif isinstance(message, Revoked):
            self._persons.take(message.told)
        elif isinstance(message, Challenge | Refused | Barred):
            self._admission.stranger(event.source, opened)
        if was is Status.DEAD and entry.member.status is Status.ALIVE:
            self._admission.pull(entry)

    def _news(self, entry: Entry, message: Message) -> None:
        if isinstance(message, Introduce):
            self._view.hear(message.record)
        elif not isinstance(message, Challenge | Refused | Barred | Revoked):
            asked_for = isinstance(message, Page) and self._admission.asked(entry)
            for record in message.gossip:
                self._view.hear(record, None if asked_for else entry)
