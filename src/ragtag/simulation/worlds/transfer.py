"""A state on its way in virtual time.

``TransferWorld`` has one newcomer, and donors that are slow, die, return, damage chunks, stall or are silent.
``StateFetch`` is one peer of a ``World`` of rounds that fetches what others' trainers have left on their
shelves: real snapshots, over connections that wait while a process is frozen or a line is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

from ragtag.core.faults import Faults
from ragtag.core.types import PeerId
from ragtag.protocols.transfer.machine import Transfer
from ragtag.protocols.transfer.snapshots import Shelf, Snapshot
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
from ragtag.simulation.worlds.rounds import World

LINK_SHARE = 0.1
"""Of a donor's line, for all that fetch its state: as live (``network.transfer.session``)."""
CUT_RETRY_S = 0.2
"""A connection over a line that is cut tries again so often (the least timeout of Linux's TCP)."""


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
    replica: int = 0

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
            sizes = self.total_bytes, self.chunk_bytes
            state.offer = Offer(round_, 10 * round_, *layout, *sizes, donor.replica)
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


class TimedShelf(Shelf):
    """A shelf that knows how long its trainer's rounds take."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        super().__init__(nullcontext())
        self.round_s = self._ended_s = 0.0
        self._clock = now_s

    def wanted(self, round_: int) -> bool:
        """A round is over; whether a snapshot of it is wanted."""
        now_s = self._clock()
        if 0 <= self.round < round_:
            self.round_s = (now_s - self._ended_s) / (round_ - self.round)
        self._ended_s = now_s
        return super().wanted(round_)


class Giving:
    """A peer of a world that gives its state: what a donor's thread does live.

    shelf: where its trainer leaves snapshots.
    readers: called when there may be something new on it.
    free_s: when its line has sent all that it was asked for.
    """

    def __init__(self, world: World, peer: PeerId) -> None:
        self.world, self.peer = world, peer
        self.shelf = TimedShelf(lambda: world.now_s)
        self.shelf.serve(self._look, lambda: world.now_s)
        self.readers: dict[StateFetch, Callable[[], None]] = {}
        self.free_s = 0.0

    def _look(self) -> None:
        for look in list(self.readers.values()):
            look()

    def sent_s(self, n_bytes: int) -> float:
        """When so many bytes more will have left."""
        rate = LINK_SHARE * _line(self.world.faults, self.peer)[0]
        self.free_s = max(self.free_s, self.world.now_s) + n_bytes / rate
        return self.free_s


class StateFetch:
    """One peer's fetch. It begins at once, in the peer's own process.

    me: the peer.
    donors: whom it asks.
    deadline_s: absolute.
    over: told once what it came to, with the state's bytes.
    noted: told which donors were lost or dropped, and why.
    """

    def __init__(
        self,
        world: World,
        me: PeerId,
        donors: Mapping[str, Giving],
        need: Need,
        deadline_s: float,
        over: Callable[[Finished | GaveUp, bytearray], None],
        noted: Callable[[str, str, str], None],
    ) -> None:
        self._world, self._me, self._donors = world, me, donors
        self._over, self._noted = over, noted
        self._machine = Transfer(list(donors), need)
        self._ended = False
        self._blob = bytearray()
        self._connections = dict.fromkeys(donors, 0)
        self._open: set[str] = set()
        self._read: dict[str, Snapshot] = {}
        self._step(Start(deadline_s))

    def _step(self, event: TransferEvent) -> None:
        if not self._ended:
            for effect in self._machine.step(self._world.now_s, event):
                self._apply(effect)

    def _apply(self, effect: TransferEffect) -> None:
        if isinstance(effect, Finished | GaveUp):
            self._ended = True
            for name in list(self._open):
                self._close(name)
            self._over(effect, self._blob)
        elif isinstance(effect, Arm):
            at_s = max(self._world.now_s, effect.at_s)
            self._world.call(at_s, lambda _: self._step(Expired()), peer=self._me)
        elif isinstance(effect, Connect):
            self._connect(effect.donor)
        elif isinstance(effect, Drop):
            self._noted("dropped", effect.donor, effect.why)
            self._close(effect.donor)
        else:
            self._to_donor(effect.donor, lambda: self._serve(effect))

    # -- Connections

    def _rtt_s(self, name: str) -> float:
        faults = self._world.faults
        own_s = _line(faults, self._me)[1] + _line(faults, self._donors[name].peer)[1]
        return 2 * (faults.latency_s + faults.jitter_s + own_s)

    def _connect(self, name: str) -> None:
        donor, rtt_s, now_s = self._donors[name].peer, self._rtt_s(name), self._world.now_s
        self._connections[name] += 1
        self._open.add(name)
        if donor not in self._world.live:
            self._to_me(name, Refused(name, "nobody listens there"), rtt_s)
            return
        self._to_donor(name, lambda: self._greet(name), 2.5 * rtt_s)  # connected, and shown the crew's key
        for crash in self._world.faults.crashes:
            if crash.peer == donor and crash.at_s > now_s:
                self._to_me(name, Lost(name, "the connection broke"), crash.at_s - now_s + rtt_s / 2)

    def _close(self, name: str) -> None:
        self._open.discard(name)
        self._read.pop(name, None)
        giving = self._donors[name]
        giving.readers.pop(self, None)
        giving.shelf.leave(self)

    def _across(self, name: str, after_s: float, to: PeerId, call: Callable[[], object]) -> None:
        """Make a call in a process once what it stands for is through, on the connection that there is."""
        connection, donor = self._connections[name], self._donors[name].peer
        source = self._me if to == donor else donor

        def send(now_s: float) -> None:
            if self._ended or name not in self._open or connection != self._connections[name]:
                return
            if self._world.faults.cut(source, to, now_s):
                self._world.call(now_s + CUT_RETRY_S, send)
            else:
                self._world.call(now_s, lambda _: self._happens(name, connection, call), peer=to)

        self._world.call(self._world.now_s + after_s, send)

    def _happens(self, name: str, connection: int, call: Callable[[], object]) -> None:
        if not self._ended and name in self._open and connection == self._connections[name]:
            call()

    def _to_donor(self, name: str, call: Callable[[], object], after_s: float | None = None) -> None:
        after_s = self._rtt_s(name) / 2 if after_s is None else after_s
        self._across(name, after_s, self._donors[name].peer, call)

    def _to_me(
        self, name: str, event: Told | Offered | Came | Lost | Refused, after_s: float | None = None
    ) -> None:
        def take() -> None:
            if isinstance(event, Lost | Refused):
                self._noted("lost" if isinstance(event, Lost) else "dropped", name, event.why)
                self._close(name)
            elif isinstance(event, Came):
                self._store(name, event.index)
            self._step(event)

        self._across(name, self._rtt_s(name) / 2 if after_s is None else after_s, self._me, take)

    # -- The donor's side, in its process

    def _greet(self, name: str) -> None:
        shelf = self._donors[name].shelf
        if shelf.closed:
            self._to_me(name, Refused(name, "catches up with the crew itself"))
        else:
            self._to_me(name, Told(name, shelf.round, shelf.round_s))

    def _serve(self, asked: Ask | Fetch) -> None:
        name, giving = asked.donor, self._donors[asked.donor]
        if isinstance(asked, Ask):
            giving.readers[self] = lambda: self._offer(name)
            giving.shelf.ask(self, asked.round)
            self._offer(name)
            return
        snapshot = self._read[name]
        n_bytes = len(snapshot.chunk(asked.index))
        after_s = giving.sent_s(n_bytes) - self._world.now_s + self._rtt_s(name) / 2
        self._to_me(name, Came(name, asked.index, n_bytes), after_s)

    def _offer(self, name: str) -> None:
        """There may be a snapshot now."""
        giving = self._donors[name]
        snapshot = giving.shelf.given(self)
        if snapshot is None and not giving.shelf.closed:
            return
        giving.readers.pop(self, None)
        if snapshot is None:
            self._to_me(name, Refused(name, "catches up with the crew itself"))
        else:
            self._read[name] = snapshot
            self._to_me(name, Offered(name, snapshot.offer))

    # -- Back at the peer's

    def _store(self, name: str, index: int) -> None:
        snapshot = self._read[name]
        if len(self._blob) != snapshot.offer.total_bytes:
            self._blob = bytearray(snapshot.offer.total_bytes)
        first, until = snapshot.offer.span(index)
        self._blob[first:until] = snapshot.chunk(index)


def _line(faults: Faults, peer: PeerId) -> tuple[float, float]:
    """A peer's rate, and what its own line adds to the latency."""
    for line in faults.lines:
        if line.peer == peer:
            return line.rate_bytes_per_s, line.latency_s
    return faults.rate_bytes_per_s, 0.0
