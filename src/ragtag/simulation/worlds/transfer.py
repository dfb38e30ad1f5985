"""One newcomer in virtual time, with donors that are slow, die, return, damage chunks, stall or are
silent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ragtag.protocols.transfer.machine import Transfer
from ragtag.protocols.transfer.types import (
    OUTSTANDING_MAX,
    Arm,
    Ask,
    Came,
    Connect,
    Drop,
    Expired,
    Fetch,
    Finished,
    GaveUp,
    Lost,
    Need,
    Offer,
    Offered,
    Refused,
    Start,
    Told,
    TransferEffect,
    TransferEvent,
)
from ragtag.simulation.check.rounds import InvariantBroken
from ragtag.simulation.loop import Loop


@dataclass(frozen=True, slots=True)
class SimulatedDonor:
    """How a donor behaves. Times are absolute, and infinite where the event never happens.

    round: the one that it is in at time 0.
    dies_s: its process ends.
    returns_s: another process takes its place.
    stalls_s: it sends nothing more, and keeps its connections.
    damages: so many chunks are intact before the first damaged one.
    silent: it takes connections and does not answer.
    """

    rate_bytes_per_s: float = 1e7
    rtt_s: float = 0.01
    round: int = 0
    round_s: float = 0.1
    dies_s: float = math.inf
    returns_s: float = math.inf
    stalls_s: float = math.inf
    damages: float = math.inf
    silent: bool = False
    schema: int = 1
    layout_hash: int = 1

    def alive(self, at_s: float) -> bool:
        """Whether the donor runs at that time."""
        return not self.dies_s <= at_s < self.returns_s


@dataclass(slots=True)
class _State:
    donor: SimulatedDonor
    connection: int = 0
    open: bool = False
    free_s: float = 0.0
    offer: Offer | None = None
    served: int = 0
    outstanding: set[int] = field(default_factory=set)


class TransferWorld:
    """Runs the machine until it ends.

    on_step: called at every step.
    seed, replay: how the donors were drawn, and how to see it again, for error messages.
    """

    def __init__(
        self,
        donors: Mapping[str, SimulatedDonor],
        *,
        total_bytes: int,
        chunk_bytes: int,
        need: Need | None = None,
        seed: int = 0,
        replay: str = "",
    ) -> None:
        self.seed, self.replay = seed, replay
        self.total_bytes, self.chunk_bytes = total_bytes, chunk_bytes
        self.machine = Transfer(list(donors), need if need is not None else Need(1))
        self._loop = Loop()
        self.ended: Finished | GaveUp | None = None
        self.intact: set[int] = set()
        self.on_step: Callable[[float, TransferEvent, list[TransferEffect]], None] = lambda *_: None
        self._states = {name: _State(donor) for name, donor in donors.items()}

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self._loop.now_s

    def run(self, deadline_s: float) -> Finished | GaveUp:
        """Fetch the state. The machine must end by ``deadline_s``.

        Raises:
            InvariantBroken: it did not, or it broke a rule.
        """
        self._push(0.0, Start(deadline_s), 0)
        while self.ended is None and self._loop.due_s <= deadline_s:
            self._loop.next()
        if self.ended is None:
            raise self._broken(f"the transfer had not ended by its deadline, {deadline_s} s")
        if isinstance(self.ended, Finished) and len(self.intact) != -(-self.total_bytes // self.chunk_bytes):
            raise self._broken("the transfer ended as complete, and chunks are missing")
        return self.ended

    def _broken(self, what: str) -> InvariantBroken:
        return InvariantBroken(what, self.seed, self.replay)

    def _push(self, at_s: float, event: TransferEvent, connection: int) -> None:
        self._loop.at(at_s, lambda: self._take(event, connection))

    def _take(self, event: TransferEvent, connection: int) -> None:
        if self._happens(event, connection):
            effects = self.machine.step(self.now_s, event)
            self.on_step(self.now_s, event, effects)
            for effect in effects:
                self._apply(effect)

    def _happens(self, event: TransferEvent, connection: int) -> bool:
        """Whether an event still comes: one of a closed connection does not."""
        if isinstance(event, Start | Expired):
            return True
        state = self._states[event.donor]
        if connection != state.connection or not state.open:
            return False
        if isinstance(event, Lost | Refused):
            self._close(state)
        elif isinstance(event, Came):
            state.outstanding.discard(event.index)
            if event.intact:
                self.intact.add(event.index)
        return True

    def _close(self, state: _State) -> None:
        state.open = False
        state.outstanding.clear()

    # -- Effects

    def _apply(self, effect: TransferEffect) -> None:
        if self.ended is not None:
            raise self._broken(f"{effect} came after the end")
        if isinstance(effect, Finished | GaveUp):
            self.ended = effect
        elif isinstance(effect, Arm):
            self._push(max(self.now_s, effect.at_s), Expired(), 0)
        elif isinstance(effect, Connect):
            self._connect(effect.donor)
        else:
            state = self._states[effect.donor]
            if not state.open:
                raise self._broken(f"{effect}, although there is no connection")
            if isinstance(effect, Drop):
                self._close(state)
            elif isinstance(effect, Ask):
                self._ask(state, effect)
            else:
                self._fetch(state, effect)

    def _connect(self, name: str) -> None:
        state, donor = self._states[name], self._states[name].donor
        if state.open:
            raise self._broken(f"connected to {name} twice")
        state.connection += 1
        state.open, state.free_s = True, 0.0
        if not donor.alive(self.now_s):
            self._push(self.now_s + donor.rtt_s, Refused(name, "nobody listens there"), state.connection)
        elif not donor.silent:
            there_s = self.now_s + 2.5 * donor.rtt_s
            told = Told(name, self._round(donor, there_s), donor.round_s)
            self._push(there_s + donor.rtt_s / 2, told, state.connection)
        if self.now_s < donor.dies_s < math.inf:
            lost = Lost(name, "the connection broke")
            self._push(donor.dies_s + donor.rtt_s / 2, lost, state.connection)

    def _round(self, donor: SimulatedDonor, at_s: float) -> int:
        """The last round that a donor has finished."""
        return donor.round - 1 + int(at_s / donor.round_s)

    def _ask(self, state: _State, ask: Ask) -> None:
        donor, there_s = state.donor, self.now_s + state.donor.rtt_s / 2
        if state.offer is None or state.offer.round < ask.round:
            round_ = max(ask.round, self._round(donor, there_s) + 1)
            there_s = max(there_s, (round_ - donor.round + 1) * donor.round_s)
            layout = donor.schema, donor.layout_hash
            state.offer = Offer(round_, 10 * round_, *layout, self.total_bytes, self.chunk_bytes)
        offered = Offered(ask.donor, state.offer)
        if there_s < donor.stalls_s and donor.alive(there_s):
            self._push(there_s + donor.rtt_s / 2, offered, state.connection)

    def _fetch(self, state: _State, fetch: Fetch) -> None:
        donor = state.donor
        state.outstanding.add(fetch.index)
        if len(state.outstanding) > OUTSTANDING_MAX:
            raise self._broken(f"{fetch.donor} is asked for more than {OUTSTANDING_MAX} chunks at a time")
        if state.offer is None:
            raise self._broken(f"{fetch}, and nothing was offered")
        first, until = state.offer.span(fetch.index)
        begins_s = max(state.free_s, self.now_s + donor.rtt_s / 2)
        state.free_s = begins_s + (until - first) / donor.rate_bytes_per_s
        if state.free_s < donor.stalls_s:
            came = Came(fetch.donor, fetch.index, until - first, state.served < donor.damages)
            self._push(state.free_s + donor.rtt_s / 2, came, state.connection)
            state.served += 1
