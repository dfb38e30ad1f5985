"""A simulated world: peers' machines on one loop, with faults from seeded streams.

An event goes to its machine, and the machine's effects go back onto the loop. Nothing sleeps, so a round of a
second of virtual time takes milliseconds, and a run of one seed is always the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from struct import Struct

import numpy as np

from ragtag.core.faults import Faults
from ragtag.core.recording import Recording
from ragtag.core.types import (
    Arm,
    Arrived,
    Average,
    Done,
    Effect,
    Event,
    Expired,
    Gathered,
    Left,
    Machine,
    Noted,
    Offer,
    Outcome,
    PeerId,
    Send,
    Start,
)
from ragtag.simulation.check.rounds import Checker, InvariantBroken
from ragtag.simulation.link import Link, Traffic
from ragtag.simulation.loop import Loop, Port

_RUN = Struct("<dHHIIBIIBH").pack
_EVENT = Struct("<dHB").pack
_HASHED_WHOLE_BYTES = 1 << 14

OnDone = Callable[[PeerId, float, Outcome], None]
OnNote = Callable[[PeerId, float, Noted], None]
Call = Callable[[float], object]


class World:
    """Machines, one for each peer (``nodes[i]`` is peer ``i``), and the line between them.

    Payloads are neither copied nor changed on their way. What a machine sends must stay as it is while
    any run is on its way, so give every ``Average`` an array of its own.

    check: hold invariants while running (``ragtag.simulation.check.rounds``), at several times the cost.
    on_done, on_note: called with each outcome and note. They may call ``at`` and ``call``.
    record: keep each machine's events in ``recordings`` (``ragtag.simulation.check.replay``).
    replay: the command or expression that runs this world again, for error messages.
    grouped: the channels that are averaged in groups.

    Raises:
        InvariantBroken: by ``run`` and ``heal``, with the seed and how to replay it.
    """

    def __init__(
        self,
        nodes: Sequence[Machine],
        faults: Faults = Faults(),  # noqa: B008  (frozen)
        seed: int = 0,
        *,
        check: bool = False,
        on_done: OnDone | None = None,
        on_note: OnNote | None = None,
        record: bool = False,
        replay: str = "",
        grouped: Iterable[int] = (),
    ) -> None:
        self.nodes, self.seed = nodes, seed
        self.on_done, self.on_note = on_done, on_note
        self.recordings = [Recording() for _ in nodes] if record else []
        self._loop = Loop()
        self._replay = replay or f"World(nodes, faults={faults!r}, seed={seed}, check=True)"
        checker = Checker(len(nodes), seed, self._replay, frozenset(grouped)) if check else None
        self._checker, self._watched = checker, check or record
        drop = None if checker is None else checker.drops
        self._ports = [Port(partial(self._take, peer), last=Expired, drop=drop) for peer in range(len(nodes))]
        for crash in faults.crashes:
            self._known(crash.peer)
            port = self._ports[crash.peer]
            port.ends_s = min(crash.at_s, port.ends_s)
        self._asked = [0] * len(nodes)
        self._faults = faults
        self._link = Link(faults, seed, self._ports, self._post, self._loop.at)
        for freeze in faults.freezes:
            self._known(freeze.peer)
            self._loop.freeze(self._ports[freeze.peer], freeze.at_s, freeze.for_s)
        for peer in range(len(nodes)):
            self._post(0.0, peer, Start())

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self._loop.now_s

    @property
    def events(self) -> int:
        """How many events have happened."""
        return self._loop.events

    @property
    def faults(self) -> Faults:
        """The faults that hold now."""
        return self._faults

    @property
    def live(self) -> frozenset[PeerId]:
        """The peers that have not crashed."""
        return frozenset(peer for peer, port in enumerate(self._ports) if port.ends_s > self.now_s)

    @property
    def checker(self) -> Checker | None:
        """The checker of invariants; ``None``: there is none."""
        return self._checker

    def broken(self, what: str) -> InvariantBroken:
        """The error for a broken rule, with this world's seed and how to replay it."""
        return InvariantBroken(what, self.seed, self._replay)

    def busy(self, peer: PeerId) -> bool:
        """Whether a peer was asked for an average that is not done."""
        return self._asked[peer] > 0

    def traffic(self, peer: PeerId) -> Traffic:
        """The traffic on a peer's line so far."""
        return self._link.traffic[peer]

    def at(self, at_s: float, peer: PeerId, event: Event) -> None:
        """Deliver an event (``Average``, ``Offer``, ``Joined``, ``Left``) to a peer at a virtual time."""
        self._known(peer)
        self._post(at_s, peer, event)
        if isinstance(event, Average | Offer):
            self._asked[peer] += 1

    def call(self, at_s: float, function: Call, peer: PeerId | None = None) -> None:
        """Call ``function(now_s)`` at a virtual time.

        peer: call it in this peer's process, so later where that is frozen, and not at all once it has
            crashed.
        """
        port = None if peer is None else self._ports[peer]
        self._loop.post(at_s, port, lambda: function(self._loop.now_s))

    def give(self, peer: PeerId, event: Event) -> None:
        """Give a peer's machine an event now, before all others."""
        self._known(peer)
        self._loop.give(self._ports[peer], event)

    def leave(self, peer: PeerId) -> None:
        """A peer tells that it goes, after all that it sent before. Its machine goes on answering."""
        at_s = self._link.through_s(self.now_s, peer)
        for other in range(len(self.nodes)):
            if other != peer:
                self._post(at_s, other, Left(peer))

    def next(self) -> bool:
        """Go on by one event. Returns whether there was one."""
        return self._loop.next()

    def run(self, until_s: float = math.inf, events_max: int = 100_000_000) -> None:
        """Go on until no event is left, or to ``until_s``.

        Raises:
            InvariantBroken: a machine broke a rule (only with ``check``).
            RuntimeError: more than ``events_max`` events have happened.
        """
        try:
            self._loop.run(until_s, events_max)
        except RuntimeError as error:
            error.add_note(f"seed {self.seed}")
            raise

    def change_lines(self, faults: Faults) -> None:
        """What these faults say of lines holds from now on; crashes and freezes stay as they were."""
        self._faults = faults
        self._link.change(faults)

    def heal(self) -> None:
        """End all faults: frozen peers thaw, no other peer crashes, nothing is lost."""
        self.change_lines(self._faults.healed())
        for port in self._ports:
            if port.ends_s > self.now_s:
                port.ends_s = math.inf
        self._loop.heal()

    def digest(self) -> str:
        """A hash of all that has happened, equal for two runs of one seed."""
        return self._loop.digest()

    # -- One event

    def _take(self, peer: PeerId, event: Event) -> None:
        """Give a peer's machine an event, or make a call in its process."""
        loop = self._loop
        at_s = loop.now_s
        if type(event) is Arrived:
            run = event.runs[0]
            loop.log(_RUN(at_s, peer, run.peer, run.first, len(run.payload), run.ended, *run.key))
            if run.mask is not None:
                loop.log(run.mask.tobytes())
        elif callable(event):
            event()
            return
        else:
            loop.log(_EVENT(at_s, peer, len(type(event).__name__)))
        if self._watched:
            self._watch(peer, event)
        try:
            effects = self.nodes[peer].step(at_s, event)
        except Exception as error:
            error.add_note(f"peer {peer} at {at_s} s of virtual time, seed {self.seed}: {event!r:.200}")
            raise
        if self._checker is not None:
            self._checker.stepped(at_s, peer, event, effects)
        if effects:
            self._act(at_s, peer, effects)

    def _watch(self, peer: PeerId, event: Event) -> None:
        if self.recordings:
            self.recordings[peer].add(self.now_s, event)
        if self._checker is not None:
            self._checker.delivers(self.now_s, self._loop.order, peer, event)

    def _act(self, now_s: float, peer: PeerId, effects: list[Effect]) -> None:
        sends = [effect for effect in effects if type(effect) is Send]
        if sends:
            self._link.send(now_s, peer, sends)
            if len(sends) == len(effects):
                return
        for effect in effects:
            if isinstance(effect, Arm):
                self._post(max(effect.at_s, now_s), peer, Expired(effect.timer))
            elif isinstance(effect, Done):
                self._done(now_s, peer, effect.outcome)
            elif isinstance(effect, Noted):
                self._loop.log(f"{effect.what}/{effect.peer}/{effect.detail}".encode())
                if self.on_note is not None:
                    self.on_note(peer, now_s, effect)

    def _post(self, at_s: float, peer: PeerId, event: Event) -> None:
        order = self._loop.post(at_s, self._ports[peer], event)
        if self._checker is not None:
            self._checker.posts(order, event)

    def _done(self, at_s: float, peer: PeerId, outcome: Outcome) -> None:
        self._asked[peer] -= 1
        log = self._loop.log
        log(outcome.heard.tobytes() + outcome.weight.tobytes() + outcome.averaged.tobytes())
        for part in () if outcome.gathered is None else _parts(outcome.gathered):
            log(part.rows.tobytes() + part.factor.tobytes())
        mean = outcome.mean
        if mean.nbytes <= _HASHED_WHOLE_BYTES:
            log(mean.tobytes())
        else:  # at memory speed: the sum of its words
            words = (
                np.ascontiguousarray(mean).reshape(-1).view(np.uint64 if mean.nbytes % 8 == 0 else np.uint32)
            )
            log(int(words.sum(dtype=np.uint64)).to_bytes(8, "little"))
        if self.on_done is not None:
            self.on_done(peer, at_s, outcome)

    def _known(self, peer: PeerId) -> None:
        if not 0 <= peer < len(self.nodes):
            raise ValueError(f"no peer {peer} in a world of {len(self.nodes)} (0 to {len(self.nodes) - 1})")


def _parts(gathered: Gathered) -> list[Gathered]:
    return [gathered, *(part for _, part in gathered.late)]
