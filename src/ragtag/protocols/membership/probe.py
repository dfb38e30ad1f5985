"""Failure detection: ping, ping through others, and only then accuse.

SWIM, sections 3.1 and 4.3. One probe of a member whose answers take at most ``r`` (as measured):

    0     ping
    r     ping again, and ask three others to ping it
    2r    ping again, and ask three more
    4r    no answer came to anyone: accuse it

So lost datagrams alone rarely accuse a member, and the verdict on a dead one is as fast as an answer through
others can be.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ragtag.protocols.membership.core import Core
from ragtag.protocols.membership.pace import INITIAL_RTO_S, Health
from ragtag.protocols.membership.row import Entry
from ragtag.protocols.membership.types import Status
from ragtag.protocols.membership.view import View
from ragtag.protocols.membership.wire import Ack, Ask, Gossip, Message, Ping, Record, gossip_of

VERDICT_RTOS = 4.0
PERIOD_RTOS = 5.0
"""A protocol period holds a whole probe and some more time (SWIM asks for at least three round trips)."""
ANNOUNCED_MAX = 64
"""How many members a peer tells at once what is new of itself. The others hear it from them."""
NONCES_MAX = 4096


@dataclass(slots=True)
class Probe:
    """A probe of one member.

    epoch, incarnation: of the member when the probe began.
    rto_s: how long an answer may take.
    slept_s: how long this peer had slept by then.
    step: pings so far.
    asked: members that were asked to ping it.
    helpers: how many of these were heard.
    """

    subject: str
    epoch: int
    incarnation: int
    rto_s: float
    slept_s: float
    step: int = 0
    over: bool = False
    asked: dict[str, None] = field(default_factory=dict)
    helpers: int = 0


@dataclass(slots=True)
class Relay:
    """A ping in another member's place. nonce: the number in that member's question."""

    subject: str
    epoch: int
    requester: str
    nonce: int
    step: int = 0
    over: bool = False


@dataclass(slots=True)
class Sent:
    """What a number that may come back in an answer stands for.

    probe: what the ping was for; ``None``: to tell news, or to see whether a dead member lives.
    direct: the ping went to the subject itself.
    """

    probe: Probe | Relay | None
    at_s: float
    slept_s: float
    direct: bool


class Prober:
    """Probes members in turn, a few in each protocol period, and answers for others."""

    def __init__(self, core: Core, view: View, health: Health) -> None:
        self.core, self.view, self.health = core, view, health
        self.default_rto_s = INITIAL_RTO_S
        self._sent: dict[int, Sent] = {}
        self._nonce = 0
        self._ring: list[str] = []
        self._first: deque[str] = deque()
        self._probes: dict[str, Probe] = {}
        self._relays = 0

    # -- Time, as measured

    def rto_s(self, entry: Entry) -> float:
        """How long an answer from this member may take."""
        return entry.rtt.rto_s if entry.rtt.measured else self.default_rto_s

    def measure(self) -> None:
        """Once in a period: take the members' middle timeout for members that were not measured yet."""
        names = self.core.some(self.view.live, 64)
        known = sorted(e.rtt.rto_s for e in map(self.view.entries.__getitem__, names) if e.rtt.measured)
        if known:
            self.default_rto_s = known[len(known) // 2]  # a few that are far away have their own, longer

    def learn_first(self, took_s: float) -> None:
        """Take the first round trip of all, of being let in: RFC 6298's timeout after one sample."""
        self.default_rto_s = min(self.default_rto_s, 3 * max(took_s, 1e-4))

    @property
    def period_s(self) -> float:
        """The protocol period: from measured round trips, and no shorter than the load allows."""
        limits = self.core.limits
        return max(limits.fanout / limits.probes_per_s_max, PERIOD_RTOS * self.default_rto_s)

    # -- Probing

    def turn(self) -> None:
        """Probe the next member: first suspects that others accuse, then all in turn, in random order."""
        self._newcomers()
        for _ in range(2 * len(self.view.live) + 1):
            name = self._next()
            if name is None:
                return
            entry = self.view.entries.get(name)
            if entry is not None and entry.member.status < Status.DEAD and name not in self._probes:
                self._begin(entry)
                return

    def _newcomers(self) -> None:
        """Put newcomers at random places of the ring (SWIM, section 4.3), and some suspects first."""
        for name in self.view.arrived:
            self._ring.insert(int(self.core.uniform() * (len(self._ring) + 1)), name)
        self.view.arrived.clear()
        # about six of the members that hear of a suspicion probe the suspect at once: to agree, or to let it
        # refute
        for name in self.view.accused:
            if self.core.uniform() * len(self.view.live) < 6 and len(self._first) < 64:
                self._first.append(name)
        self.view.accused.clear()

    def _next(self) -> str | None:
        if self._first:
            return self._first.popleft()
        if not self._ring:
            self._ring = self.core.shuffled(self.view.live)
        return self._ring.pop() if self._ring else None

    def _begin(self, entry: Entry) -> None:
        if len(self._probes) >= self.core.limits.probes_max:
            return
        member = entry.member
        rto_s = self.rto_s(entry) * self.health.factor
        probe = Probe(member.name, member.epoch, member.incarnation, rto_s, self.core.slept_s)
        self._probes[member.name] = probe
        self._ping(entry, probe)

    def _ping(self, entry: Entry, probe: Probe) -> None:
        self.tell(entry, Ping(self.view.mine.name, self._number(probe, True), self._news(entry)))
        probe.step += 1
        last = probe.step == 3
        self.core.after((VERDICT_RTOS - 2 if last else 1) * probe.rto_s, "probe", self._nonce)

    def expired(self, nonce: int) -> None:
        """The time for an answer to one ping of a probe is over."""
        sent = self._sent.get(nonce)
        if sent is None or not isinstance(sent.probe, Probe) or sent.probe.over:
            return
        probe = sent.probe
        entry = self.view.find(probe.subject, probe.epoch)
        if entry is None or entry.member.status >= Status.DEAD:
            self._end(probe)
        elif probe.step < 3:
            self._ask(probe)
            self._ping(entry, probe)
        else:
            self._end(probe)
            self._accuse(entry, probe)

    def _ask(self, probe: Probe) -> None:
        others = [name for name in self.view.live if name != probe.subject and name not in probe.asked]
        for name in self.core.some(others, self.core.limits.asks):
            probe.asked[name] = None
            helper = self.view.entries[name]
            nonce = self._number(probe, False)
            self.tell(helper, Ask(self.view.mine.name, nonce, probe.subject, self._news(helper)))

    def _accuse(self, entry: Entry, probe: Probe) -> None:
        spoke = entry.member.incarnation > probe.incarnation  # news of it came through others
        if spoke or probe.slept_s != self.core.slept_s:  # a peer that slept meanwhile is no witness
            self._begin(entry)
            return
        if probe.asked and not probe.helpers:
            self.health.worse()  # not even a helper was heard: the trouble may be here
        self.view.accuse(entry)
        self._again(entry)

    def _again(self, entry: Entry) -> None:
        """Go on probing a member that this peer accuses: only its answers may have been lost."""
        if len(self._first) < 64:
            self._first.append(entry.member.name)

    def _end(self, probe: Probe) -> None:
        probe.over = True
        if self._probes.get(probe.subject) is probe:
            del self._probes[probe.subject]

    def knock(self) -> None:
        """Ping one of the dead: after a partition it answers, and refutes its death (with the gossip)."""
        dead = [n for n in self.view.graves if self.view.entries[n].member.status is Status.DEAD]
        if dead and self.core.uniform() * (1 + len(self.view.live)) < 4:
            entry = self.view.entries[dead[int(self.core.uniform() * len(dead))]]
            nonce = self._number(None, True)
            self.tell(entry, Ping(self.view.mine.name, nonce, self._news(entry)))

    # -- Answers

    def acked(self, source: str, ack: Ack) -> None:
        """An answer came, from the subject itself or from a helper."""
        sent = self._sent.get(ack.nonce)
        if sent is None:
            return
        probe = sent.probe
        entry = self.view.entries[source]
        if probe is None or (sent.direct and source == probe.subject):
            if sent.slept_s == self.core.slept_s:
                self._sample(entry, sent)
            del self._sent[ack.nonce]
        elif sent.direct or not isinstance(probe, Probe) or source not in probe.asked:
            return
        if isinstance(probe, Probe):
            probe.helpers += not sent.direct
            if ack.there and not probe.over:
                self._end(probe)
                self.health.better()
        elif isinstance(probe, Relay) and not probe.over:
            probe.over = True
            self._relays -= 1
            self._report(probe, there=True)

    def awaits(self, source: str, nonce: int) -> bool:
        """Whether a member's own answer to this question is still waited for: there was none before."""
        sent = self._sent.get(nonce)
        if sent is None or not sent.direct or not isinstance(sent.probe, Probe):
            return False
        return sent.probe.subject == source and not sent.probe.over

    def _sample(self, entry: Entry, sent: Sent) -> None:
        took_s = self.core.now_s - sent.at_s
        if sent.probe is None or sent.probe.over:  # one late answer teaches a little
            took_s = min(took_s, 2 * self.rto_s(entry))
        first = not entry.rtt.measured
        entry.rtt.sample(took_s)
        if first:
            self.measure()

    # -- For other members

    def asked(self, requester: str, ask: Ask) -> None:
        """Another member had no answer from ``ask.subject``: ping it in that member's place."""
        subject = self.view.entries.get(ask.subject)
        if subject is None or self._relays >= self.core.limits.relays_max:
            self.core.counts["relays refused"] += 1
            return
        self._relays += 1
        self._relay(subject, Relay(ask.subject, subject.member.epoch, requester, ask.nonce))

    def _relay(self, subject: Entry, relay: Relay) -> None:
        self.tell(subject, Ping(self.view.mine.name, self._number(relay, True), self._news(subject)))
        relay.step += 1
        self.core.after(self.rto_s(subject), "relay", self._nonce)

    def relay_expired(self, nonce: int) -> None:
        """A ping for another member was not answered in time: say so, and try once more."""
        sent = self._sent.get(nonce)
        if sent is None or not isinstance(sent.probe, Relay) or sent.probe.over:
            return
        relay = sent.probe
        subject = self.view.find(relay.subject, relay.epoch)
        if relay.step == 1 and subject is not None:
            self._report(relay, there=False)
            self._relay(subject, relay)
        else:
            relay.over = True
            self._relays -= 1

    def _report(self, relay: Relay, there: bool) -> None:
        requester = self.view.entries.get(relay.requester)
        if requester is not None:
            self.tell(requester, Ack(self.view.mine.name, relay.nonce, there, self._news(requester)))

    # -- Out

    def tell(self, entry: Entry, message: Message) -> None:
        """Send a message to a member: to where it was heard last, or where it says that it is."""
        self.core.send(entry.source or entry.member.address, self.core.seal.seal(message, entry.member.epoch))

    def spread(self, k: int) -> None:
        """Tell the news to ``k`` members now."""
        for name in self.core.some(self.view.live, k):
            entry = self.view.entries[name]
            self.tell(entry, Gossip(self.view.mine.name, self._news(entry)))

    def announce(self) -> None:
        """Tell what is new of this peer now. The answers tell what others know of it."""
        for name in self.core.some(self.view.live, ANNOUNCED_MAX):
            entry = self.view.entries[name]
            news = gossip_of(self.view.gossip(name, about_me=True))
            self.tell(entry, Ping(self.view.mine.name, self._number(None, True), news))

    def _news(self, entry: Entry) -> list[Record]:
        return gossip_of(self.view.gossip(entry.member.name))

    def _number(self, probe: Probe | Relay | None, direct: bool) -> int:
        self._nonce += 1
        self._sent[self._nonce] = Sent(probe, self.core.now_s, self.core.slept_s, direct)
        if len(self._sent) > NONCES_MAX:
            self._forget()
        return self._nonce

    def _forget(self) -> None:
        for nonce in list(self._sent)[: NONCES_MAX // 2]:
            probe = self._sent.pop(nonce).probe
            if isinstance(probe, Relay) and not probe.over:
                probe.over = True
                self._relays -= 1
            elif isinstance(probe, Probe):
                self._end(probe)
