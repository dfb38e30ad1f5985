"""The crew as one peer sees it: which peers were heard, have fallen silent or have left, and how many places
there are.

A round does not wait for a peer that was not heard in the round before. After ``GONE_AFTER`` silent rounds
its blocks go to other owners. Anything heard from it brings it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ragtag.core.types import Effect, Noted, PeerId, Role
from ragtag.protocols.channel.shares import Plans

GONE_AFTER = 2
"""After so many silent rounds a peer owns no blocks."""
ALONE_MAX = 2
"""For so many rounds in a row a peer that hears less than half of the others takes itself for early."""


class Presence:
    """What peer ``me`` of ``n`` knows of the others: how many rounds each was silent, and which have left."""

    def __init__(self, me: PeerId, n: int) -> None:
        self._me = me
        self._silent = dict.fromkeys((p for p in range(n) if p != me), 0)
        self._left: set[PeerId] = set()
        self._auxiliary: set[PeerId] = set()
        """Peers that only own blocks. To all but rounds they are visitors, so they are among ``_left``."""
        self._clients: set[PeerId] = set()
        self.heard: set[PeerId] = set()
        """Peers from which something came since the last round ended."""
        self._alone = 0
        self._changes = 0  # counts changes of the silent and the left, after each
        self._live: tuple[int, frozenset[PeerId]] = (-1, frozenset())

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._silent

    @property
    def live(self) -> frozenset[PeerId]:
        """The peers that average now: this one, and those not silent for long."""
        counted, live = self._live  # asked for at every sample that a trainer draws, from another thread
        if counted != self._changes:
            counted = self._changes
            there = {p for p, rounds in self._silent.items() if rounds < GONE_AFTER}
            live = frozenset({self._me} | there - self._left)
            self._live = counted, live
        return live

    @property
    def auxiliary(self) -> frozenset[PeerId]:
        """The peers that only own blocks."""
        return frozenset(self._auxiliary)

    @property
    def clients(self) -> frozenset[PeerId]:
        """The peers that average, and own nothing."""
        return frozenset(self._clients)

    @property
    def assisting(self) -> frozenset[PeerId]:
        """The auxiliaries that own blocks now: those not silent for long."""
        return frozenset(p for p in self._auxiliary if self._silent[p] < GONE_AFTER)

    @property
    def waiting(self) -> frozenset[PeerId]:
        """The peers that a round waits for."""
        return frozenset(p for p, rounds in self._silent.items() if rounds == 0) - self._away

    @property
    def _away(self) -> set[PeerId]:
        """The peers from which no round has anything to expect."""
        return self._left - self._auxiliary

    @property
    def gone(self) -> frozenset[PeerId]:
        """The peers that have left."""
        return frozenset(self._left)

    @property
    def absent(self) -> frozenset[PeerId]:
        """The peers that have left or are silent: a meeting does not wait for them."""
        return frozenset(p for p, rounds in self._silent.items() if rounds > 0) | self._left

    @property
    def others(self) -> frozenset[PeerId]:
        """All peers that may be heard, wherever they stand."""
        return frozenset(self._silent)

    def grow(self, n: int) -> None:
        """The crew has ``n`` places. A peer in a new one is not waited for before it is heard."""
        for peer in range(n):
            if peer != self._me:
                self._silent.setdefault(peer, GONE_AFTER)

    def visit(self, peer: PeerId) -> None:
        """A peer is on its way in: it is answered, and takes no part in rounds."""
        self._silent.setdefault(peer, GONE_AFTER)
        self.leave(peer)

    def assist(self, peer: PeerId) -> list[Effect]:
        """A peer owns blocks from now on, and does nothing else."""
        self.visit(peer)
        self._auxiliary.add(peer)
        return self.hear(peer)

    def silent_rounds(self, peer: PeerId) -> int:
        """How many rounds in a row nothing has come from a peer."""
        return self._silent[peer]

    def heard_lately(self, peer: PeerId) -> bool:
        """Whether a peer is here, and was not silent when it last owed a message (any thread may ask)."""
        return self._silent.get(peer) == 0 and peer not in self._left

    def joined(self, peer: PeerId, role: Role = Role.TRAINER) -> list[Effect]:
        """A peer that gives is there (again)."""
        self._left.discard(peer)
        self._auxiliary.discard(peer)
        (self._clients.discard if role.owns else self._clients.add)(peer)
        self._changes += 1
        return self.hear(peer)

    def leave(self, peer: PeerId) -> None:
        """A peer has left for good."""
        self._left.add(peer)
        self._auxiliary.discard(peer)
        self._clients.discard(peer)
        self._changes += 1

    def hear(self, peer: PeerId) -> list[Effect]:
        """Something came from a peer."""
        if peer not in self._silent:
            return []
        self.heard.add(peer)
        was, self._silent[peer] = self._silent[peer], 0
        if not was:
            return []
        self._changes += 1
        return [Noted("heard again", peer, f"after {was} silent round{'s' * (was > 1)}")]

    def vouched(self, peers: Iterable[PeerId]) -> list[Effect]:
        """Owners have heard these peers. This peer owns nothing, so no message of theirs would come to it."""
        effects: list[Effect] = []
        for peer in peers:
            was = self._silent.get(peer, 0)
            if was and peer not in self._left:
                self._silent[peer] = 0
                self._changes += 1
                effects.append(
                    Noted("heard again", peer, f"by others, after {was} silent round{'s' * (was > 1)}")
                )
        return effects

    def miss(self, peers: Iterable[PeerId]) -> list[Effect]:
        """These peers told nothing at a meeting: rounds do not wait for them until they are heard."""
        effects: list[Effect] = []
        for peer in peers:
            if peer in self._left:
                continue
            if self._silent[peer] == 0:
                effects.append(Noted("silent", peer, "told nothing when peers met"))
            # it keeps its blocks for now: peers that met sooner have begun, with it as their owner
            self._silent[peer] = max(self._silent[peer], 1)
            self.heard.discard(peer)  # that was before it fell silent
            self._changes += 1
        return effects

    def count_silence(
        self,
        owed: dict[PeerId, bool],
        answered: frozenset[PeerId] = frozenset(),
        unanswered: frozenset[PeerId] = frozenset(),
    ) -> list[Effect]:
        """After a round: count the peers that owed a message and were not heard, in this round or another.

        owed: peers that owed one, and whether anything of it came.
        answered: peers that said that they are there. That counts where there are at most two others.
        unanswered: peers that were asked whether they are there, and said nothing: it is not early for these.
        """
        effects: list[Effect] = []
        silent = [peer for peer, came in owed.items() if not came and peer not in self.heard | self._away]
        waited = [peer for peer in owed if self._silent[peer] == 0]
        alone = 2 * sum(self._silent[peer] == 0 for peer in silent) > len(waited)
        self._alone = self._alone + 1 if alone else 0
        if 0 < self._alone <= ALONE_MAX:
            # this peer is more likely early than most others silent at once
            early_for = set(waited) - unanswered if len(waited) > 2 else answered.intersection(waited)
            owed = {peer: came or peer in early_for for peer, came in owed.items()}
        for peer, came in owed.items():
            if came or peer in self.heard:
                self._silent[peer] = 0
            elif peer not in self._away:
                self._silent[peer] += 1
                if self._silent[peer] == 1:
                    effects.append(Noted("silent", peer))
        self.heard.clear()
        self._changes += 1
        return effects


class StepOrder:
    """Numbers the rounds of the channels that this peer averages in within one step of its training alike.

    Where a step has several channels (two optimizers; K-FAC's factors, gradients and rows), all peers have as
    many rounds of each. A peer that was away, or is a round behind, leaves some out. Were these more in one
    channel than in another, it would wait in the next round of that channel for others, which wait for it in
    the present round of the other: each up to its deadline, in each step from then on. So a step has the
    number of its rounds: where one of them is a later one, those that follow are, too.

    A channel is of the steps while each of them has a round of it that has the step's number. Others, such as
    one that is averaged at every tenth step, are numbered by themselves.

    One that follows rounds of a channel, until it has the crew's state, takes no steps by them: all of these
    are in one step of its script. So where a peer gives nothing to some rounds of a channel one after the
    other, each tells the step's number alone. It begins no step, and the channels of this step stay known.
    """

    def __init__(self) -> None:
        self._step = -1
        self._now: set[int] = set()  # the channels that this step had,
        self._before: set[int] = set()  # and those of the step before it
        self._last = -1  # the channel that began a round last

    def number(self, channel: int, number: int) -> int:
        """The round of a channel that begins next. number: that which would, for all the channel knows."""
        if channel in self._now:
            return max(number, self._step + 1)
        return max(number, self._step) if channel in self._before else number

    def begins(self, channel: int, number: int, gives: bool = True) -> None:
        """A round of a channel begins. A step is over when one of its channels begins anew.

        gives: whether this peer adds anything to the round.
        """
        again, self._last = channel == self._last, channel
        if channel in self._now:
            if gives or not again:
                # the step in which a peer finds that it was away may lack its last channels
                rest = set() if gives and number == self._step + 1 else self._before
                self._before, self._now = self._now | rest, set()
        elif channel not in self._before and self._now and number != self._step:
            return
        self._step = number
        self._now.add(channel)

    def has(self, channel: int) -> bool:
        """Whether each step has a round of this channel, as far as is known."""
        return channel in self._now or channel in self._before

    def opened(self, channel: int) -> None:
        """A channel is opened, perhaps anew: its rounds are counted from the first."""
        self._now.discard(channel)
        self._before.discard(channel)


class Crew:
    """The crew as one peer sees it: its places, which are taken, and how far away the peers are.

    All channels of a node share it.

    n: how many places the crew has, taken or not.
    founded: how many it had when it began, the same on all peers.
    role: this peer's own.
    rtt_s, shortest_s: measured round trips, by peer: usual ones with a margin, and the shortest.
    rate_bytes_per_s: what the ways there deliver, of those where that was measured.
    computed_s: how long this peer usually computes between two rounds, by the number of their channel.
    met_s: when a round with others ended here last, in any channel: they have computed since then.
    plans: who owns which share of a channel, where that was planned.
    steps: how the rounds of this peer's steps are numbered.
    """

    def __init__(
        self, me: PeerId, n: int, seed: int, founded: int | None = None, role: Role = Role.TRAINER
    ) -> None:
        self.role = role
        self.me, self.n, self.seed, self.founded = me, n, seed, n if founded is None else founded
        self.cut = n
        """A vector is cut into so many blocks: one for each place up to the highest that a living peer
        has."""
        self.presence = Presence(me, n)
        self.rtt_s: dict[PeerId, float] = {}
        self.shortest_s: dict[PeerId, float] = {}
        self.rate_bytes_per_s: dict[PeerId, float] = {}
        self.computed_s: dict[int, float] = {}
        self.met_s = -math.inf
        self.plans = Plans()
        self.steps = StepOrder()
        self.elsewhere: Callable[[int], frozenset[PeerId]] = lambda channel: frozenset()
        """The peers that take no part on a channel, as they say, before they have the crew's state."""
        self._newer_places = set(range(self.founded, n))  # taken places beyond the founders'
        self._departed: set[PeerId] = set()  # such places whose peer is gone

    @property
    def live(self) -> frozenset[PeerId]:
        """The peers that average now: this one, and those not silent for long."""
        return self.presence.live

    @property
    def owners(self) -> frozenset[PeerId]:
        """The peers that own blocks now: clients only where nobody else is left."""
        return self.owning(True)

    def owning(self, assisted: bool) -> frozenset[PeerId]:
        """The same, of a channel of which auxiliaries own blocks, or do not."""
        assisting = self.presence.assisting if assisted else frozenset()
        return (self.live - self.clients) | assisting or self.live

    @property
    def clients(self) -> frozenset[PeerId]:
        """The peers that average and own nothing, this one among them where that is its role."""
        others = self.presence.clients
        return others if self.role.owns else others | {self.me}

    @property
    def auxiliary(self) -> frozenset[PeerId]:
        """The peers that only own blocks, this one among them where that is its role."""
        others = self.presence.auxiliary
        return others if self.role.gives else others | {self.me}

    @property
    def gone(self) -> frozenset[PeerId]:
        """The peers that have left."""
        return self.presence.gone

    @property
    def step_s(self) -> float:
        """How long this peer usually computes before the others hear of it again, in any channel: those that
        average at each tenth step have rounds ten steps apart. 0: not known.
        """
        return min(self.computed_s.values(), default=0.0)

    @property
    def trip_s(self) -> float:
        """The shortest round trip to the farthest of the peers that a round waits for; 0: none is known."""
        return max((self.shortest_s.get(peer, 0.0) for peer in self.presence.waiting), default=0.0)

    def line_s(self, n_bytes: float) -> float:
        """How long it takes to send ``n_bytes`` to each peer that a round waits for, by what the ways there
        deliver; 0: it is known of none.

        One peer's ways mostly share its uplink, so what they deliver is added up. Where each was measured
        alone that is too much, and the time too short.
        """
        rates = [rate for peer, rate in self.rate_bytes_per_s.items() if peer in self.presence.waiting]
        return n_bytes * len(rates) / sum(rates) if rates else 0.0

    def shares(self, channel: int, round_: int, planned: bool, assisted: bool) -> tuple[int, ...]:
        """The shares of a round, by peer; empty: all own as much.

        A client's is 0, whatever was planned, unless all others have left. The place of a peer that has left
        counts as before, so that a death changes no cut.

        planned: whether the channel goes by plans.
        assisted: whether auxiliaries own blocks of it.
        """
        trainers, clients = len(self.live - self.auxiliary), self.clients
        plan = self.plans.shares(channel, round_, trainers) if planned else ()
        places = set(range(self.cut)) - clients
        if not clients or places <= self.gone - (self.auxiliary if assisted else frozenset()):
            return plan
        others = tuple(0 if peer in clients else share for peer, share in enumerate(plan))
        if any(others):
            return others
        # clients in the last places change nothing by coming and going
        return tuple(int(peer in places) for peer in range(max(places) + 1))

    @property
    def growth(self) -> int:
        """How many more blocks a vector is cut into than when the crew was founded."""
        return self.cut - self.founded

    def comes_or_is(self, peer: PeerId) -> bool:
        """Whether a peer is known to have this place, or to be on its way to it."""
        return peer not in self._departed and (peer in self.presence or peer < self.n)

    def grow(self, n: int) -> None:
        """The crew has ``n`` places at least, and cuts vectors into as many blocks."""
        self.cut = max(self.cut, n)
        if n > self.n:
            self.n = n
            self.presence.grow(n)

    def came(self, peer: PeerId) -> None:
        """A peer takes part, perhaps in a place beyond the founders'."""
        self._departed.discard(peer)
        if peer >= self.founded:
            self._newer_places.add(peer)
        self.grow(peer + 1)

    def comes(self, peer: PeerId) -> None:
        """A peer is on its way in, and has no blocks until it takes part."""
        self.went(peer)
        self._departed.discard(peer)

    def went(self, peer: PeerId) -> None:
        """A peer is gone. The last places get no blocks while they are empty."""
        self._newer_places.discard(peer)
        if peer >= self.founded:
            self._departed.add(peer)
        self.cut = min(self.cut, max({self.founded, self.me + 1, *(p + 1 for p in self._newer_places)}))
