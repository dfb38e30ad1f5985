"""A crew in virtual time under training code as users write it: ``train(transport)`` for each peer.

Each peer's training function runs in a thread of its own, but only one of them at a time, and only while
virtual time stands still. A function that waits (for a round, a pause, its own computing) hands over to the
next. Where all wait, the world goes on to its next event. So the seed alone decides a run, on any machine,
and a second of virtual time takes as long as its events do.

``SimulatedTransport`` gives ``ragtag.training`` what the live transport does
(``training.transport.Transport``). A ``CrewOptimizer`` does not know which of the two it has.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

import numpy as np

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DENSE, fp32
from ragtag.core.channels import channel_of
from ragtag.core.errors import Error
from ragtag.core.faults import Faults
from ragtag.core.schema import Schema, SchemaMismatch
from ragtag.core.types import (
    PEERS_MAX,
    Assisted,
    Average,
    Bytes,
    Effect,
    Event,
    Floats,
    Joined,
    Left,
    Met,
    Noted,
    Offer,
    Outcome,
    PeerId,
    Posted,
    Publish,
    Role,
    Start,
    Tell,
)
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.crew.board import PAGES
from ragtag.protocols.crew.joining import ChannelEvent, ChannelWay, Differs, Heard, IsOpen, ProbeRound, Timed
from ragtag.protocols.crew.posting import Posting
from ragtag.protocols.crew.serving import Forms, Serving, form_of
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.publish.channel import Publisher, publisher_of
from ragtag.protocols.rounds.rps import rps
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.link import timeout_s
from ragtag.simulation.worlds.rounds import World

T = TypeVar("T")
_SWITCH_S = 60.0
"""A training function that runs for longer than this between two waits counts as hung."""


DEADLINE_S = 1.0
"""How long peers wait for each other to open a channel, unless told otherwise, and how long a probe may
take."""


class Crashed(BaseException):
    """This peer's process has crashed, by its world's faults: its training function must not go on."""


class Stuck(Error, RuntimeError):
    """A training function waits for an event that never comes, or does not return."""


class _MeetingNode:
    """A node in a world, which carries rounds. told: called at the end of each of its meetings."""

    def __init__(self, node: Node, told: Callable[[PeerId, Met], None]) -> None:
        self._node, self._told = node, told

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """The node's step."""
        effects = self._node.step(now_s, event)
        for effect in effects:
            if isinstance(effect, Met):
                self._told(self._node.me, effect)
        return effects


class _ServingNode:
    """An auxiliary's node, which opens the channels that it hears of. done: told of each round."""

    def __init__(self, node: Node, rtt_s: float, done: Callable[[Outcome], None]) -> None:
        self._node, self._rtt_s, self._done = node, rtt_s, done
        self._serving = Serving()

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """The node's step."""
        effects = self._node.step(now_s, event)
        for effect in effects:
            if isinstance(effect, Assisted):
                self._done(effect.outcome)
            elif isinstance(effect, Posted) and effect.topic in PAGES:
                for form in self._serving.look(self._node):
                    if form.assisted:
                        opened = form.opened(DENSE.get(form.codec, fp32), self._rtt_s)
                        self._node.configure(form.channel, opened, now_s)
        return effects


class _Trainer(Generic[T]):
    """One peer's training function, in a thread that runs only between ``resume`` and its next ``wait``."""

    def __init__(self, peer: PeerId, body: Callable[[], T]) -> None:
        self.peer = peer
        self.done = self.crashed = self._ended = False
        self.error: BaseException | None = None
        self.result: T | None = None
        self.waits_for = ""
        self._body = body
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=f"trainer {peer}", daemon=True)

    def resume(self) -> None:
        """Let it run until it waits or ends. Raises Stuck: it does neither."""
        if not self._thread.is_alive() and not self.done:
            self._thread.start()
        self._go.release()
        if not self._back.acquire(timeout=_SWITCH_S):
            raise Stuck(f"the training function of peer {self.peer} has not come back for {_SWITCH_S:g} s")

    def wait(self, what: str) -> None:
        """In the thread: stand still until ``resume``. what: for errors. Raises Crashed: the peer crashed."""
        self.waits_for = what
        self._back.release()
        self._go.acquire()
        if self.crashed:
            raise Crashed

    def crash(self) -> None:
        """End the process where it stands."""
        if not self.done:
            self.crashed = True
            self.resume()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.crashed:
                self.result = self._body()
        except Crashed:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._back.release()


class SimulatedCrew:
    """``n`` peers that train over simulated lines, and after them ``auxiliaries`` that only average.

    Without ``run``, ``transport`` serves a caller in its own thread: while the caller waits, the world goes
    on.

    faults: of lines and peers. A crash ends the peer's training function, a freeze halts it.
    cost: how long ``SimulatedTransport.compute`` takes; by default no time.
    check: hold the invariants of ``simulation.check``.
    on_note: told what machines note: peer, virtual time, note.
    schemas: of the channels that were opened.
    assisted: the rounds of which each auxiliary has averaged its blocks.
    """

    def __init__(
        self,
        n: int,
        faults: Faults = Faults(),  # noqa: B008  (frozen)
        seed: int = 0,
        *,
        cost: ComputeCost | None = None,
        check: bool = False,
        on_note: Callable[[PeerId, float, Noted], None] | None = None,
        auxiliaries: int = 0,
    ) -> None:
        self.trainers, self.n = n, n + auxiliaries
        self.seed, self.cost = seed, cost or ComputeCost(0.0)
        helpers = range(n, self.n)
        trainers = [Node(peer, n, seed) for peer in range(n)]
        others = [Node(peer, self.n, seed, n, Role.AUXILIARY) for peer in helpers]
        self.nodes = nodes = trainers + others
        for node in nodes:
            for peer in helpers:
                if peer != node.me:
                    node.step(0.0, Joined(peer, Role.AUXILIARY))
        self.assisted: dict[PeerId, list[Outcome]] = {peer: [] for peer in helpers}
        rtt_s = max(1e-4, timeout_s(faults))
        meeting = [_MeetingNode(node, self._over) for node in trainers]
        serving = [_ServingNode(node, rtt_s, self.assisted[node.me].append) for node in others]
        machines: list[_MeetingNode | _ServingNode] = [*meeting, *serving]
        self.world = World(machines, faults, seed, check=check, on_done=self._done, on_note=on_note)
        if self.world.checker is not None:
            self.world.checker.only_own(frozenset(helpers))
        self._faults = faults
        self.schemas: dict[int, Schema] = {}
        self._meetings: dict[tuple[PeerId, int], Met | None] = {}  # under way, or just over
        self._trainers: list[_Trainer[object]] = []
        self._ready: deque[_Trainer[object]] = deque()
        self._outcomes: dict[tuple[PeerId, int], deque[Outcome]] = {}
        self._awaited: dict[PeerId, int] = {}

    def transport(self, peer: PeerId) -> SimulatedTransport:
        """One peer's transport."""
        return SimulatedTransport(self, peer)

    def run(self, train: Callable[[SimulatedTransport], T]) -> list[T | None]:
        """Run ``train`` for each peer to its end. Returns what each returned; ``None``: it crashed.

        Raises:
            Stuck: a training function waits for an event that never comes.
            Exception: the first error of a training function.
        """
        if self._trainers:
            raise RuntimeError("a simulated crew runs once; make another")
        trainers = [self._made(peer, train) for peer in range(self.trainers)]
        self._trainers = list(trainers)  # type: ignore[arg-type]
        self._ready.extend(self._trainers)
        for crash in (crash for crash in self._faults.crashes if crash.peer < self.trainers):
            self.world.call(crash.at_s, self._crashes(crash.peer))
        try:
            while True:
                while self._ready:
                    self._resume(self._ready.popleft())
                if all(trainer.done for trainer in self._trainers):
                    return [trainer.result for trainer in trainers]
                if not self.world.next():
                    self._stuck()
        finally:
            for trainer in self._trainers:
                trainer.crash()

    def _made(self, peer: PeerId, train: Callable[[SimulatedTransport], T]) -> _Trainer[T]:
        return _Trainer(peer, lambda: train(self.transport(peer)))

    def _crashes(self, peer: PeerId) -> Callable[[float], None]:
        return lambda _: self._trainers[peer].crash()

    def _resume(self, trainer: _Trainer[object]) -> None:
        if trainer.done:
            return
        trainer.resume()
        if trainer.error is not None:
            trainer.error.add_note(
                f"peer {trainer.peer} at {self.world.now_s:g} s of virtual time, seed {self.seed}"
            )
            raise trainer.error
        if trainer.done and not trainer.crashed:
            self.world.leave(trainer.peer)

    def _stuck(self) -> NoReturn:
        waiting = {t.peer: t.waits_for for t in self._trainers if not t.done}
        raise Stuck(f"nothing is left to happen at {self.world.now_s:g} s, and peers wait: {waiting}")

    # -- What a peer's transport asks

    def wake(self, peer: PeerId, at_s: float) -> None:
        """Sleep until a virtual time, or longer where the peer is frozen then. In the trainer's thread."""
        if not self._trainers:
            self.world.run(at_s)
            return
        trainer = self._trainers[peer]
        if at_s < math.inf:  # else the peer crashes first
            self.world.call(at_s, lambda _: self._ready.append(trainer), peer=peer)
        trainer.wait(f"for {at_s:g} s of virtual time")

    def outcome(self, peer: PeerId, channel: int) -> Outcome:
        """Wait for the end of a round. In the trainer's thread."""
        came = self._outcomes.setdefault((peer, channel), deque())
        while not came:
            if not self._trainers:
                if not self.world.next():
                    raise Stuck(f"nothing is left to happen, and peer {peer} waits for channel {channel}")
                continue
            self._awaited[peer] = channel
            self._trainers[peer].wait(f"for a round of channel {channel}")
        return came.popleft()

    def is_over(self, peer: PeerId, channel: int) -> bool:
        """Whether ``outcome`` would return at once."""
        return bool(self._outcomes.get((peer, channel)))

    def _done(self, peer: PeerId, now_s: float, outcome: Outcome) -> None:
        self._outcomes.setdefault((peer, outcome.channel), deque()).append(outcome)
        if self._awaited.get(peer) == outcome.channel:
            del self._awaited[peer]
            self._ready.append(self._trainers[peer])

    def opens(self, channel: int, method: Averager, codec: Codec, schema: Schema) -> None:
        """A channel is opened: tell the checker, if there is one, by which rules it is averaged."""
        self.schemas[channel] = schema
        checker = self.world.checker
        if checker is None:
            return
        if method.kind in ("central", "published") or schema.fragments > 1 or not codec.exact:
            checker.leave_out(channel)
        elif method.kind == "in groups":
            checker.averages_in_groups(channel)
        elif method.guard is not None:
            checker.guards(channel)

    def meet(self, peer: PeerId, tell: Tell) -> Met:
        """Hold a meeting, bounded by its node's deadline. In the trainer's thread."""
        at = (peer, tell.number)
        self._meetings[at] = None
        self.world.give(peer, tell)
        while True:
            met = self._meetings[at]
            if met is not None:
                del self._meetings[at]
                return met
            if self._trainers:
                self._trainers[peer].wait(f"for meeting {tell.number}")
            elif not self.world.next():
                raise Stuck(f"nothing is left to happen, and peer {peer} waits for meeting {tell.number}")

    def _over(self, peer: PeerId, met: Met) -> None:
        if (peer, met.number) in self._meetings:
            self._meetings[peer, met.number] = met
            if self._trainers and self._trainers[peer].waits_for == f"for meeting {met.number}":
                self._ready.append(self._trainers[peer])


class SimulatedTransport(Posting):
    """One peer's transport in a simulated crew, and its clock."""

    may_grow = False

    def __init__(self, crew: SimulatedCrew, me: PeerId) -> None:
        super().__init__(me, crew.nodes[me].board, lambda post: crew.world.give(me, post))
        self.crew = crew
        self._forms = Forms()
        self._node = crew.nodes[me]
        self._step = 0

    @property
    def n(self) -> int:
        """How many peers the crew has, dead or alive."""
        return self.crew.n

    @property
    def live(self) -> frozenset[PeerId]:
        """The peers that are believed to take part now."""
        return self._node.live

    # -- Time

    def now_s(self) -> float:
        """Virtual time."""
        return self.crew.world.now_s

    def pause(self, for_s: float) -> None:
        """Sleep for so long."""
        self.crew.wake(self.me, self.now_s() + for_s)

    def compute(self, samples: int = 1) -> None:
        """Compute a local step of so many samples, for as long as the crew's cost says."""
        crew, step = self.crew, self._step
        self._step += 1
        crew.wake(self.me, crew.cost.ends_s(self.me, step, samples, self.now_s(), crew.world.faults))

    # -- Averages

    def configure(
        self, channel: int, schema: Schema, method: Averager, codec: Codec, *, together_s: float | None = None
    ) -> None:
        """Open a channel as live peers do: compare schemas, then average zeros to measure how long it takes.

        Raises:
            SchemaMismatch: a larger or equal side has another schema. It names the first tensor that differs.
        """
        crew, node = self.crew, self._node
        chunks = schema.n_chunks(codec.elements)
        faults = crew.world.faults
        rtt_s = max(1e-4, timeout_s(faults))
        deadline_s = DEADLINE_S if together_s is None else together_s
        opening = ChannelWay(
            self.me, channel, schema, chunks, deadline_s, wait_for_silent=together_s is not None
        )
        dense, parts = codec.name if DENSE.get(codec.name) is codec else "", schema.fragments
        form = form_of(channel, 0, method, dense, chunks, parts)
        assisted = form.assisted and crew.n > crew.trainers
        shape = Channel(method, codec, chunks, deadline_s, rtt_s, fragments=parts, assisted=assisted)
        node.configure(channel, shape)
        if crew.n > crew.trainers:
            _, topic, told = self._forms.add(form)
            self.post_soon(topic, told)
        crew.opens(channel, method, codec, schema)
        by = rps if self.n <= PEERS_MAX else method
        probes = Channel(by, fp32, opening.probe_chunks, deadline_s, rtt_s, passing=True)
        probe = channel_of(f"{channel}/probe")
        node.configure(probe, probes)
        event: ChannelEvent | None = Start()
        while event is not None:
            effects, event = opening.step(self.now_s(), event), None
            for effect in effects:  # ``Arm`` is left out: in virtual time a meeting ends by its own deadline
                if isinstance(effect, Tell):
                    met = crew.meet(self.me, effect)
                    event = Heard(met, node.n, node.gone, rtt_s, node.heard_of(channel))
                elif isinstance(effect, Left):
                    crew.world.give(self.me, effect)
                elif isinstance(effect, ProbeRound):
                    zeros = np.zeros((effect.chunks, fp32.elements), np.float32)
                    outcome = self.start(probe, zeros, 1.0, effect.for_s).wait()
                    longer_s = max(outcome.scatter_s, outcome.gather_s)
                    event = Timed(None if outcome.expired else longer_s, rtt_s)
                elif isinstance(effect, IsOpen):
                    node.probed(channel, effect.probe_s, self.now_s())
                elif isinstance(effect, Differs):
                    raise SchemaMismatch(effect.why)

    def start(
        self,
        channel: int,
        values: Floats,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[PeerId] = frozenset(),
        due: int = -1,
    ) -> SimulatedPending:
        """Begin the channel's next round."""
        # lines carry no copies, and a trainer may change its values once its own round is over
        return self._begin(Average(channel, values.copy(), weight, deadline_s, aside, due))

    def offer(
        self,
        channel: int,
        rows: Bytes,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[PeerId] = frozenset(),
    ) -> SimulatedPending:
        """Begin the next round of a channel whose averager gathers rows."""
        return self._begin(Offer(channel, rows, weight, deadline_s, aside))

    def _begin(self, ask: Average | Offer) -> SimulatedPending:
        self.crew.world.at(self.now_s(), self.me, ask)
        return SimulatedPending(self.crew, self.me, ask.channel)

    # -- Named tensors

    def publish(self, ask: Publish) -> None:
        """Publish named tensors now."""
        self.crew.world.give(self.me, ask)

    def published(self, channel: int) -> tuple[Publisher, float]:
        """A channel's named tensors, and virtual time."""
        return publisher_of(self._node, channel), self.now_s()


class SimulatedPending:
    """A round under way."""

    def __init__(self, crew: SimulatedCrew, me: PeerId, channel: int) -> None:
        self._crew, self._me, self._channel = crew, me, channel

    @property
    def over(self) -> bool:
        """Whether the round is done."""
        return self._crew.is_over(self._me, self._channel)

    def wait(self) -> Outcome:
        """Wait until the round is done. Its machine's deadlines bound it."""
        return self._crew.outcome(self._me, self._channel)
