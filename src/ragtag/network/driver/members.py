"""From membership to averaging: who is reached where, and what the node is told of it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from ragtag.core.types import Joined, Left, Noted, PeerId, Visits
from ragtag.network.link.flow import Flow
from ragtag.network.link.inject import Injector
from ragtag.network.membership.agent import Agent, Told
from ragtag.protocols.membership.roster import NO_SEAT, Reach, RosterEffect, Unseated
from ragtag.protocols.membership.types import Address, Changed, Failed

APART_MAX = 256
"""Processes without a seat, of which it is kept what was sent to them and what came."""

News = Joined | Left | Visits | Noted


class People:
    """Applies what an agent tells to a driver's flows.

    inside: whom the node takes for peers that average, from the beginning: not those on their way in.
    expected_until_s: by when they are members at the latest; who is not by then is left out until it comes.
    lost_seat: why this peer may average no more (empty: it may). moved: whether anybody is reached elsewhere
    than before, or is not there any more; whoever goes by addresses resets it.
    """

    def __init__(
        self,
        me: PeerId,
        agent: Agent,
        flows: dict[PeerId, Flow],
        injector: Injector,
        inside: Iterable[PeerId],
        expected_until_s: float = math.inf,
    ) -> None:
        self.agent, self._flows, self._me = agent, flows, me
        self._injector = injector
        self._inside, self._expected_until_s = set(inside), expected_until_s
        self._known: set[PeerId] = set()
        self._apart: OrderedDict[tuple[PeerId, int], Flow] = OrderedDict()
        self.lost_seat, self.moved = "", False
        agent.lost = self._lost

    @property
    def due_s(self) -> float:
        """When it wants to be turned, though nothing has come."""
        return min(self.agent.due_s, self._expected_until_s)

    def turn(self, now_s: float) -> Iterator[News]:
        """What the node and the trace are to be told now."""
        for told in self.agent.turn(now_s):
            yield from self.take(now_s, told)
        if now_s >= self._expected_until_s:
            self._expected_until_s = math.inf
            for peer in sorted(self._inside - self.agent.roster.seats.keys()):
                yield Noted("never came", peer, "its launcher named it, and it has not become a member")
                yield from self._place(Left(peer))

    def take(self, now_s: float, told: Told) -> Iterator[News]:
        """One thing that membership tells."""
        roster = self.agent.roster
        if isinstance(told, Changed):
            for effect in roster.changed(told.member, told.was):
                if self._is_no_news(effect):
                    continue
                if isinstance(effect, Reach):
                    self._reach(effect)
                elif isinstance(effect, Unseated):
                    self.lost_seat = (
                        f"{effect.reason}: it was out of reach for so long that it was declared dead, or two "
                        "newcomers took one seat; start it again to join anew"
                    )
                    self._give_up(now_s)
                    yield Noted("lost its seat", self._me, effect.reason)
                elif isinstance(effect, Noted):
                    yield effect
                else:
                    yield from self._place(effect)
        elif isinstance(told, Failed):
            self.lost_seat = told.reason
            yield Noted("no member any more", self._me, told.reason)
        else:
            yield Noted(told.what, roster.seat_of(told.name), f"{told.name} {told.detail}".strip())

    def _is_no_news(self, effect: RosterEffect) -> bool:
        """Whether it says only that one is there whom the node counts on from the beginning."""
        if not isinstance(effect, Noted) or effect.what != "takes part":
            return False
        return effect.peer in self._inside and effect.peer not in self._known

    def _give_up(self, now_s: float) -> None:
        """Tell the crew that this peer claims no seat, so that it gets none back when that one is free."""
        card = self.agent.roster.mine
        if card is not None:
            self.agent.describe(now_s, replace(card, seat=NO_SEAT, averaging=False))

    def _place(self, effect: Joined | Left | Visits) -> Iterator[News]:
        """Where a peer stands now. One that the node counts on already is not told of as if it were new."""
        peer = effect.peer
        self._known.add(peer)
        self._mute(peer, isinstance(effect, Left))
        known = peer in self._inside
        if isinstance(effect, Joined):
            self._inside.add(peer)
        else:
            self._inside.discard(peer)
        if not (known and isinstance(effect, Joined)):
            yield effect

    def _reach(self, reach: Reach) -> None:
        """A process takes data at an address. Another one than before begins anew, unless it was here once.

        Of one that comes back (it was thought dead, and a newcomer had claimed its seat) the counts must go
        on: it takes datagrams with numbers that it has seen for old ones, and answers nothing sensible.
        """
        flow = self._flows.get(reach.peer)
        known = flow is None or (
            flow.process in (None, reach.epoch) and flow.inbound.epoch in (-1, reach.epoch)
        )
        if flow is None or not known:
            if flow is not None:
                self._set_apart(flow)
            self._inside.discard(reach.peer)
            flow = self._apart.pop((reach.peer, reach.epoch), None) or Flow(reach.peer, reach.address)
            self._flows[reach.peer] = flow
        flow.process, flow.address, flow.doubted = reach.epoch, reach.address, False
        self.moved = True

    def _set_apart(self, flow: Flow) -> None:
        """Keep what was counted of a process whose seat is another's now."""
        process = flow.process if flow.process is not None else flow.inbound.epoch
        flow.retire()
        self._apart[flow.peer, process] = flow
        while len(self._apart) > APART_MAX:
            self._apart.popitem(last=False)

    def _mute(self, peer: PeerId, mute: bool) -> None:
        flow = self._flows.get(peer)
        if flow is not None:
            self.moved |= flow.mute != mute
            flow.mute = mute
            if mute:
                flow.clear()

    def _lost(self, address: Address, now_s: float) -> bool:
        """Faults that are injected between two peers hold for their membership's datagrams, too."""
        faults = self._injector.faults
        if faults.loss is None and not faults.one_way and not faults.partitions:
            return False
        peer = self._peer_at(address)
        if peer < 0:
            return False
        return self._injector.answer_lost(peer) or self._injector.cut(peer, now_s)

    def _peer_at(self, address: Address) -> PeerId:
        for member in self.agent.machine.members().values():
            if member.address == address:
                return self.agent.roster.seat_of(member.name)
        return -1
