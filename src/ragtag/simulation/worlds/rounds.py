"""A simulated world: virtual time on an event heap, machines for peers, faults from seeded streams.

Nothing here waits. The world pops the earliest event, gives it to its machine, and puts what the machine
answers back on the heap; so a round that takes a second of virtual time takes milliseconds, and a run of
one seed is the same run every time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from struct import Struct

import numpy as np

from ragtag.core.faults import Faults, Freeze
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
from ragtag.simulation.check.rounds import TOLERANCE, Checker, InvariantBroken
from ragtag.simulation.link import Link, Traffic

_WORLD = -1  # stands for a peer in entries of the heap that are calls
_RUN = Struct("<dHHIIBIIBH").pack
_EVENT = Struct("<dHB").pack
_DIGEST_BUFFER_BYTES = 1 << 16
_HASHED_WHOLE_BYTES = 1 << 14

OnDone = Callable[[PeerId, float, Outcome], None]
OnNote = Callable[[PeerId, float, Noted], None]
Call = Callable[[float], None]


class World:
    """Machines, one for each peer (``nodes[i]`` is peer ``i``), and the line between them.

    Payloads are neither copied nor changed on their way: what a machine sends must stay as it is until
    nothing is under way any more, so give every ``Average`` an array of its own.

    check: hold invariants while running (``ragtag.simulation.check.rounds``); costs several times as much.
    on_done, on_note: called as outcomes and notes come; they may call ``at`` and ``call``.
    record: keep what each machine was given in ``recordings`` (``ragtag.simulation.check.replay``).
    replay: the command or expression that runs this world again, for error messages.
    tolerance: relative, of means against the checker's own (wider for a codec that is not exact).
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
        tolerance: float = TOLERANCE,
        grouped: Iterable[int] = (),
    ) -> None:
        n = len(nodes)
        self.now_s, self.events = 0.0, 0
        self.nodes, self.seed = nodes, seed
        self.on_done, self.on_note = on_done, on_note
        self.recordings = [Recording() for _ in nodes] if record else []
        self._heap: list[tuple[float, int, PeerId, Event | Call]] = []
        self._order = 0
        self._ends_s = [math.inf] * n
        for crash in faults.crashes:
            self._known(crash.peer)
            self._ends_s[crash.peer] = min(crash.at_s, self._ends_s[crash.peer])
        self._replay = replay or f"World(nodes, faults={faults!r}, seed={seed}, check=True)"
        self._checker = Checker(n, seed, self._replay, tolerance, frozenset(grouped)) if check else None
        self._asked = [0] * n
        self._frozen: dict[PeerId, int] = {}
        self._held: dict[PeerId, list[tuple[int, Event | Call]]] = {}
        self._healed = False
        self._digest = hashlib.blake2b(digest_size=16)
        self._history = bytearray()
        self._faults = faults
        self._link = Link(faults, seed, self._ends_s, self._post)
        for freeze in faults.freezes:
            self._plan(freeze)
        for peer in range(n):
            self._post(0.0, peer, Start())

    @property
    def faults(self) -> Faults:
        """What goes wrong now."""
        return self._faults

    @property
    def live(self) -> frozenset[PeerId]:
        """The peers that have not crashed."""
        return frozenset(p for p, end_s in enumerate(self._ends_s) if end_s > self.now_s)

    @property
    def checker(self) -> Checker | None:
        """What holds the invariants, if anything does."""
        return self._checker

    def broken(self, what: str) -> InvariantBroken:
        """The error for a broken rule, with this world's seed and how to replay it."""
        return InvariantBroken(what, self.seed, self._replay)

    def busy(self, peer: PeerId) -> bool:
        """Whether a peer was asked for an average that it has not answered yet."""
        return self._asked[peer] > 0

    def traffic(self, peer: PeerId) -> Traffic:
        """What went over a peer's line so far."""
        return self._link.traffic[peer]

    def at(self, at_s: float, peer: PeerId, event: Event) -> None:
        """Deliver an event (``Average``, ``Offer``, ``Joined``, ``Left``) to a peer at a virtual time."""
        self._known(peer)
        if isinstance(event, Average | Offer):
            self._asked[peer] += 1
        self._later(at_s)
        self._post(at_s, peer, event)

    def call(self, at_s: float, function: Call, peer: PeerId = _WORLD) -> None:
        """Call ``function(now_s)`` at a virtual time. peer: it is done in this peer's process, so later where
        that is frozen then, and not at all once it has crashed.
        """
        self._later(at_s)
        self._order += 1
        heappush(self._heap, (at_s, self._order, peer, function))

    def give(self, peer: PeerId, event: Event) -> None:
        """Have a peer's machine take an event now, before anything else happens."""
        self._known(peer)
        self._order += 1
        self._deliver(self.now_s, self._order, peer, event)

    def leave(self, peer: PeerId) -> None:
        """A peer says that it goes: others hear it after what it has sent before. Its machine answers on."""
        at_s = self._link.through_s(self.now_s, peer)
        for other in range(len(self.nodes)):
            if other != peer:
                self._post(at_s, other, Left(peer))

    def next(self) -> bool:
        """Go on by one event; whether there was one."""
        if not self._heap:
            return False
        self._take()
        return True

    def run(self, until_s: float = math.inf, events_max: int = 100_000_000) -> None:
        """Go on until nothing is left to happen, or to ``until_s``.

        Raises:
            InvariantBroken: a machine broke a rule (only with ``check``).
            RuntimeError: more than ``events_max`` events.
        """
        heap, take = self._heap, self._take
        stop = self.events + events_max
        while heap and heap[0][0] <= until_s:
            if self.events >= stop:
                raise RuntimeError(
                    f"{events_max} events and not done at {heap[0][0]} s of virtual time (seed {self.seed}): "
                    f"machines that answer each other for ever, or raise events_max"
                )
            take()
        if self.now_s < until_s < math.inf:
            self.now_s = until_s

    def _take(self) -> None:
        """Take the earliest event."""
        at_s, order, peer, event = heappop(self._heap)
        if self._checker is not None:
            self._checker.time(self.now_s, at_s)
        self.now_s = at_s
        self.events += 1
        if peer == _WORLD:
            event(at_s)  # type: ignore[operator]
        elif at_s < self._ends_s[peer]:
            if peer in self._frozen:
                self._held[peer].append((order, event))
            else:
                self._deliver(at_s, order, peer, event)
        elif self._checker is not None and not callable(event):
            self._checker.drops(order)

    def heal(self) -> None:
        """From now on nothing goes wrong: all that is frozen thaws, nobody else crashes, nothing is lost."""
        self._healed = True
        self._faults = self._faults.healed()
        self._link.change(self._faults)
        for peer, end_s in enumerate(self._ends_s):
            if end_s > self.now_s:
                self._ends_s[peer] = math.inf
        for peer in list(self._frozen):
            self._thaw(peer)

    def digest(self) -> str:
        """A hash of everything that has happened: equal for two runs of one seed."""
        self._flush()
        return self._digest.hexdigest()

    # -- One event

    def _deliver(self, at_s: float, order: int, peer: PeerId, event: Event | Call) -> None:
        if type(event) is Arrived:
            run = event.runs[0]
            mask = run.mask
            self._history += _RUN(at_s, peer, run.peer, run.first, len(run.payload), run.ended, *run.key)
            if mask is not None:
                self._history += mask.tobytes()
        elif callable(event):
            event(at_s)
            return
        else:
            self._history += _EVENT(at_s, peer, len(type(event).__name__))
        if len(self._history) > _DIGEST_BUFFER_BYTES:
            self._flush()
        if self.recordings:
            self.recordings[peer].add(at_s, event)
        checker = self._checker
        if checker is not None:
            checker.delivers(at_s, order, peer, event)
        try:
            effects = self.nodes[peer].step(at_s, event)
        except Exception as error:
            error.add_note(f"peer {peer} at {at_s} s of virtual time, seed {self.seed}: {event!r:.200}")
            raise
        if checker is not None:
            checker.stepped(at_s, peer, event, effects)
        if effects:
            self._act(at_s, peer, effects)

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
                self._history += f"{effect.what}/{effect.peer}/{effect.detail}".encode()
                if self.on_note is not None:
                    self.on_note(peer, now_s, effect)

    def _post(self, at_s: float, peer: PeerId, event: Event) -> None:
        self._order += 1
        if self._checker is not None:
            self._checker.posts(self._order, event)
        heappush(self._heap, (at_s, self._order, peer, event))

    def _done(self, at_s: float, peer: PeerId, outcome: Outcome) -> None:
        self._asked[peer] -= 1
        self._history += outcome.heard.tobytes() + outcome.weight.tobytes() + outcome.averaged.tobytes()
        for part in () if outcome.gathered is None else _parts(outcome.gathered):
            self._history += part.rows.tobytes() + part.factor.tobytes()
        mean = outcome.mean
        if mean.nbytes <= _HASHED_WHOLE_BYTES:
            self._history += mean.tobytes()
        else:  # at memory speed: the sum of its words
            words = (
                np.ascontiguousarray(mean).reshape(-1).view(np.uint64 if mean.nbytes % 8 == 0 else np.uint32)
            )
            self._history += int(words.sum(dtype=np.uint64)).to_bytes(8, "little")
        if self.on_done is not None:
            self.on_done(peer, at_s, outcome)

    def _flush(self) -> None:
        self._digest.update(self._history)
        self._history.clear()

    # -- Peers that stand still

    def _plan(self, freeze: Freeze) -> None:
        self._known(freeze.peer)
        self.call(freeze.at_s, lambda _: self._freeze(freeze.peer))
        self.call(freeze.at_s + freeze.for_s, lambda _: self._unfreeze(freeze.peer))

    def _freeze(self, peer: PeerId) -> None:
        if not self._healed:
            self._frozen[peer] = self._frozen.get(peer, 0) + 1
            self._held.setdefault(peer, [])

    def _unfreeze(self, peer: PeerId) -> None:
        if peer in self._frozen:
            self._frozen[peer] -= 1
            if self._frozen[peer] == 0:
                self._thaw(peer)

    def _thaw(self, peer: PeerId) -> None:
        """Deliver what waited, in its order; timers last: a driver reads its socket first."""
        del self._frozen[peer]
        held = self._held.pop(peer)
        for order, event in sorted(held, key=lambda entry: isinstance(entry[1], Expired)):
            if self.now_s < self._ends_s[peer]:
                self._deliver(self.now_s, order, peer, event)

    def _known(self, peer: PeerId) -> None:
        if not 0 <= peer < len(self.nodes):
            raise ValueError(f"no peer {peer} in a world of {len(self.nodes)} (0 to {len(self.nodes) - 1})")

    def _later(self, at_s: float) -> None:
        if not at_s >= self.now_s:
            raise ValueError(f"it is {self.now_s} s already; nothing can be planned for {at_s} s")


def _parts(gathered: Gathered) -> list[Gathered]:
    return [gathered, *(part for _, part in gathered.late)]
