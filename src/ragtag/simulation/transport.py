"""A crew in virtual time under training code as users write it: ``train(transport)`` for each peer.

Each peer's training function runs in a thread of its own, but only one of them at a time, and only while
virtual time stands still. A function that waits (for a round, a pause, its own computing) hands over to the
next. Where all wait, the world goes on to its next event. So the seed alone decides a run, on any machine,
and a second of virtual time takes as long as its events do.

``SimulatedTransport`` gives ``ragtag.training`` what the live transport does
(``training.transport.Transport``). A ``CrewOptimizer`` does not know which of the two it has. It also brings
peers that were away, or come late, the state of others (``training.state.abreast``).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType
from typing import Generic, NoReturn, TypeVar

import numpy as np

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DENSE, fp32, known_name
from ragtag.core.errors import Error
from ragtag.core.faults import Faults, Partition, Window
from ragtag.core.schema import Schema, SchemaMismatch
from ragtag.core.types import (
    PEERS_MAX,
    RATE_MAX,
    Arm,
    Assisted,
    Average,
    Bytes,
    Effect,
    Event,
    Expired,
    Floats,
    Joined,
    Left,
    Measured,
    Met,
    Noted,
    Offer,
    OpenedTogether,
    Outcome,
    PeerId,
    Post,
    Posted,
    Publish,
    Role,
    Start,
    Tell,
    Visits,
)
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.channel.overlap import Overlap
from ragtag.protocols.channel.shares import Line, write_line
from ragtag.protocols.crew.board import PAGES, RATES
from ragtag.protocols.crew.joining import (
    ChannelEvent,
    ChannelWay,
    Differs,
    Heard,
    IsOpen,
    Newer,
    Nobody,
    ProbeRound,
    StateHere,
    TakesPart,
    Timed,
)
from ragtag.protocols.crew.posting import Posting
from ragtag.protocols.crew.serving import Forms, Serving, form_of
from ragtag.protocols.crew.standing import Standing
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.publish.channel import Publisher, publisher_of
from ragtag.protocols.rounds.allreduce import ring
from ragtag.protocols.rounds.rps import rps_repair
from ragtag.protocols.transfer.snapshots import Shelf
from ragtag.protocols.transfer.types import Fetched, Finished, GaveUp, Need, TransferError
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.link import shortest_s, timeout_s
from ragtag.simulation.worlds.rounds import World
from ragtag.simulation.worlds.transfer import Giving, StateFetch

T = TypeVar("T")
_SWITCH_S = 60.0
"""A training function that runs for longer than this between two waits counts as hung."""


DEADLINE_S = 1.0
"""How long peers wait for each other to open a channel, unless told otherwise, and how long a probe may
take."""
STATE_DEADLINE_S = 60.0
"""How long a peer that was away, or comes late, takes to get into step at most, unless told otherwise."""
_AHEAD_LOOK_S = 0.05  # how often one that waits for others' rounds looks whether anybody is to begin one
_ALL_BEGIN: Mapping[PeerId, float] = MappingProxyType({})
_Note = Callable[[str, str, str], None]


class Crashed(BaseException):
    """This peer's process has crashed, by its world's faults: its training function must not go on."""


class Stuck(Error, RuntimeError):
    """A training function waits for an event that never comes, or does not return."""


class _MeetingNode:
    """A node in a world, which carries rounds.

    told: called at the end of each of its meetings. stepped: called after each step.
    """

    def __init__(
        self, node: Node, told: Callable[[PeerId, Met], None], stepped: Callable[[PeerId], None]
    ) -> None:
        self._node, self._told, self._stepped = node, told, stepped

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """The node's step."""
        effects = self._node.step(now_s, event)
        for effect in effects:
            if isinstance(effect, Met):
                self._told(self._node.me, effect)
        self._stepped(self._node.me)
        return effects


class _ServingNode:
    """An auxiliary's node, which opens the channels that it hears of.

    done: told of each round. rates: what a peer has measured of its ways to others.
    """

    def __init__(
        self,
        node: Node,
        rtt_s: float,
        done: Callable[[Outcome], None],
        rates: Callable[[PeerId], dict[PeerId, float]],
    ) -> None:
        self._node, self._rtt_s, self._done, self._rates = node, rtt_s, done, rates
        self._serving = Serving()
        self._told: Line | None = None

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """The node's step."""
        effects = self._node.step(now_s, event)
        for effect in list(effects):
            if isinstance(effect, Assisted):
                self._done(effect.outcome)
                planned = any(form.planned for form in self._serving.known.values())
                line = Line(self._rates(self._node.me), auxiliary=True)
                if planned and line.differs(self._told):
                    self._told = line
                    effects = effects + self._node.step(now_s, Post(RATES, write_line(line)))
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

    The last ``clients`` of the ``n`` own nothing of what is averaged.

    Without ``run``, ``transport`` serves a caller in its own thread: while the caller waits, the world goes
    on.

    faults: of lines and peers. A crash ends the peer's training function, a freeze halts it.
    comes: when peers come that were not there when the crew began, by peer: those with the highest numbers,
        in their order.
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
        comes: Mapping[PeerId, float] = _ALL_BEGIN,
        auxiliaries: int = 0,
        clients: int = 0,
    ) -> None:
        founded = n - len(comes)
        if not 0 <= clients < n + (auxiliaries > 0):
            raise ValueError(
                f"{clients} clients of {n} peers: one at least must own what is averaged, or an auxiliary"
            )
        if list(comes) != list(range(founded, n)) or list(comes.values()) != sorted(comes.values()):
            raise ValueError(f"peers that come later have the last numbers of {n}, in their order: {comes}")
        if comes and auxiliaries:
            raise ValueError("a simulated crew has peers that come later or auxiliaries, not both")
        self.trainers, self.n = n, n + auxiliaries
        self.roles = [Role.CLIENT if n - clients <= peer < n else Role.TRAINER for peer in range(n)]
        self.roles += [Role.AUXILIARY] * auxiliaries
        self.seed, self.cost, self.comes = seed, cost or ComputeCost(0.0), dict(comes)
        helpers = range(n, self.n)
        roles = self.roles
        trainers = [Node(peer, max(founded, peer + 1), seed, founded, roles[peer]) for peer in range(n)]
        others = [Node(peer, self.n, seed, n, Role.AUXILIARY) for peer in helpers]
        self.nodes = nodes = trainers + others
        there = [peer for peer, role in enumerate(roles) if role is not Role.TRAINER and peer not in comes]
        for node in nodes:
            for peer in there:
                if peer != node.me:
                    node.step(0.0, Joined(peer, roles[peer]))
        self.assisted: dict[PeerId, list[Outcome]] = {peer: [] for peer in helpers}
        rtt_s = max(1e-4, timeout_s(faults))
        meeting = [_MeetingNode(node, self._over, self._look) for node in trainers]
        serving = [_ServingNode(node, rtt_s, self.assisted[node.me].append, self.rates) for node in others]
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
        self._means: dict[tuple[PeerId, int], deque[Floats]] = {}
        self._awaited: dict[PeerId, int] = {}
        self._until: dict[PeerId, Callable[[], bool]] = {}
        """What trainers wait for to be so."""
        self.giving = [Giving(self.world, peer) for peer in range(n)]

    def rates(self, peer: PeerId) -> dict[PeerId, float]:
        """Bytes a second to each other peer that the lines of both allow; empty: no limit."""
        lines = {line.peer: line for line in self.world.faults.lines}
        up = lines[peer].rate_bytes_per_s if peer in lines else self.world.faults.rate_bytes_per_s
        rates = {
            other: min(up, lines[other].down_bytes_per_s if other in lines else math.inf)
            for other in range(self.n)
            if other != peer
        }
        return {other: rate for other, rate in rates.items() if rate <= RATE_MAX}

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
        self._ready.extend(trainer for trainer in self._trainers if trainer.peer not in self.comes)
        for peer, at_s in self.comes.items():
            self.world.call(at_s, self._arrives(peer), peer=peer)
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

    def _arrives(self, peer: PeerId) -> Callable[[float], None]:
        """A peer comes: all that are there hear of it, as membership would tell them."""

        def arrive(now_s: float) -> None:
            there = set(range(self.n)) - {peer} - self._later(now_s)
            for other in sorted(there):
                if other in self.world.live:
                    visits = Visits(peer, self.roles[peer])
                    self.world.at(now_s + self.world.faults.latency_s, other, visits)
                else:
                    self.world.give(peer, Left(other))
            self._ready.append(self._trainers[peer])

        return arrive

    def _later(self, now_s: float) -> set[PeerId]:
        return {peer for peer, at_s in self.comes.items() if at_s > now_s}

    def takes_part(self, peer: PeerId) -> None:
        """A peer that came late averages from now on; the others hear of it."""
        now_s = self.world.now_s
        for other in sorted(self.world.live - {peer} - self._later(now_s)):
            self.world.at(now_s + self.world.faults.latency_s, other, Joined(peer, self.roles[peer]))

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

    def until(self, peer: PeerId, what: str, so: Callable[[], bool], at_s: float = math.inf) -> bool:
        """Wait until something is so, or to ``at_s``; whether it is. In the trainer's thread.

        so: looked at after each event of this peer's node, and by ``_look``. what: for errors.
        """
        if so():
            return True
        over = False

        def ends(_: float) -> None:
            nonlocal over
            if not over:
                over = True
                self._look(peer, over=True)

        if at_s < math.inf:
            self.world.call(at_s, ends, peer=peer)
        if self._trainers:
            self._until[peer] = so
            self._trainers[peer].wait(what)
        else:
            while not so() and not over:
                if not self.world.next():
                    raise Stuck(f"nothing is left to happen, and peer {peer} waits {what}")
        over = True
        return so()

    def _look(self, peer: PeerId, over: bool = False) -> None:
        """Something has happened in a peer's process; over: it waits no longer."""
        so = self._until.get(peer)
        if so is not None and (over or so()):
            del self._until[peer]
            self._ready.append(self._trainers[peer])

    def fetch(
        self, peer: PeerId, donors: Sequence[PeerId], need: Need, for_s: float, noted: _Note
    ) -> Future[Fetched | None]:
        """Fetch a state from donors over the lines, while the peer goes on; ``None``: there are no donors."""
        future: Future[Fetched | None] = Future()

        def over(ended: Finished | GaveUp, blob: bytearray) -> None:
            if isinstance(ended, GaveUp):
                future.set_exception(TransferError(ended.reason, ended.outcome))
            else:
                future.set_result(Fetched.of(ended.outcome, blob))
            self._look(peer)

        if donors:
            giving = {f"peer-{donor}": self.giving[donor] for donor in donors}
            StateFetch(self.world, peer, giving, need, self.world.now_s + for_s, over, noted)
        else:
            future.set_result(None)
        return future

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
        return self._lent(peer, came.popleft())

    def _lent(self, peer: PeerId, outcome: Outcome) -> Outcome:
        """An outcome whose mean is there until the next but one, as of live peers (``Channel.reuse``).

        Machines here do not use it again themselves: what they have sent is on its way in the same memory.
        """
        tables = self._means.setdefault((peer, outcome.channel), deque(maxlen=2))
        again = len(tables) == 2 and tables[0].shape == outcome.mean.shape
        table = tables.popleft() if again else np.empty_like(outcome.mean)
        np.copyto(table, outcome.mean)
        tables.append(table)
        return replace(outcome, mean=table)

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
        if not codec.exact:
            checker.rounds(channel, codec, passed_on=method.name == ring.name)
        if method.kind in ("central", "published") or schema.fragments > 1 or method.hadamard:
            checker.leave_out(channel)
        elif method.kind == "in groups":
            checker.averages_in_groups(channel)
        elif method.guard is not None:
            checker.guards(channel)
        if method.quorum:
            checker.demands(channel, method.quorum)

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
    """One peer's transport in a simulated crew, and its clock.

    deadline_s: how long it takes to get into step with the others at most.
    standing: which peers are behind.
    """

    def __init__(self, crew: SimulatedCrew, me: PeerId, deadline_s: float = STATE_DEADLINE_S) -> None:
        super().__init__(me, crew.nodes[me].board, lambda post: crew.world.give(me, post))
        self.crew, self.deadline_s = crew, deadline_s
        self._forms = Forms()
        self._node = crew.nodes[me]
        self._step = 0
        self._openings: dict[int, ChannelWay] = {}
        self._after: dict[int, int] = {}
        self._overlaps: dict[int, Overlap] = {}
        self._cut: Partition | None = None
        self._told = False
        self.standing = Standing(self, lambda: self._node.live - {me})

    @property
    def n(self) -> int:
        """How many places the crew has, taken or not; it may grow."""
        return self._node.n

    @property
    def may_grow(self) -> bool:
        """Whether peers may come."""
        return bool(self.crew.comes)

    @property
    def late(self) -> bool:
        """Whether the crew averaged before this peer came: it has to ``take_part`` on each channel, once."""
        return self.me in self.crew.comes

    @property
    def live(self) -> frozenset[PeerId]:
        """The peers that are believed to take part now."""
        return self._node.live

    @property
    def auxiliary(self) -> frozenset[PeerId]:
        """The peers that average and compute nothing."""
        return self._node.auxiliary

    @property
    def clients(self) -> frozenset[PeerId]:
        """The peers that compute and own nothing of what is averaged."""
        return self._node.clients

    def rates(self) -> dict[PeerId, float]:
        """Bytes a second to each peer, as rate control would find them: no slower than either end's line."""
        return self.crew.rates(self.me)

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

    def cut_off(self, for_s: float) -> Window:
        """From now on this peer's line fails for so long: it hears nobody, and nobody hears it. Its script
        goes on. When that is, in virtual time.
        """
        world, now_s = self.crew.world, self.now_s()
        window = Window(now_s, now_s + for_s)
        others = tuple(cut for cut in world.faults.partitions if cut is not self._cut)
        self._cut = Partition(frozenset({self.me}), window)
        world.change_lines(replace(world.faults, partitions=(*others, self._cut)))
        return window

    # -- Averages

    def configure(
        self,
        channel: int,
        schema: Schema,
        method: Averager,
        codec: Codec,
        *,
        together: OpenedTogether | None = None,
    ) -> None:
        """Open a channel as live peers do: compare schemas, then average zeros to measure how long it takes.

        Raises:
            SchemaMismatch: a larger or equal side has another schema. It names the first tensor that differs.
        """
        crew, node = self.crew, self._node
        chunks = schema.n_chunks(codec.elements)
        faults = crew.world.faults
        rtt_s = max(1e-4, timeout_s(faults))
        deadline_s = DEADLINE_S if together is None else together.deadline_s
        late, there = self.late and together is None, None if together is None else together.peers
        way_s = self.deadline_s if late else deadline_s
        opening = ChannelWay(self.me, channel, schema, chunks, way_s, late, there)
        self._openings[channel] = opening
        parts = schema.fragments
        form = form_of(channel, 0, method, known_name(codec), chunks, parts)
        assisted = form.assisted and crew.n > crew.trainers
        edges = schema.edges(codec.elements)
        shape = Channel(
            method, codec, chunks, deadline_s, rtt_s,
            fragments=parts, edges=edges, assisted=assisted, among=there,
        )  # fmt: skip
        node.configure(channel, shape)
        if crew.n > crew.trainers:
            _, topic, told = self._forms.add(form)
            self.post_soon(topic, told)
        crew.opens(channel, method, codec, schema)
        by = rps_repair if self.n <= PEERS_MAX else method
        probes = Channel(by, fp32, opening.probe_chunks, deadline_s, rtt_s, passing=True, among=there)
        node.configure(opening.probes, probes)
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
                    node.probed(opening.probes, effect.for_s, self.now_s())  # the one before bounds none
                    outcome = self.start(opening.probes, zeros, 1.0, effect.for_s).wait()
                    event = Timed.of(outcome, rtt_s)
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
        number: int = -1,
    ) -> SimulatedPending:
        """Begin the channel's next round."""
        # lines carry no copies, and a trainer may change its values once its own round is over
        due = max(due, self._after.get(channel, -1) + 1)
        return self._begin(Average(channel, values.copy(), weight, deadline_s, aside, due, number=number))

    def offer(
        self,
        channel: int,
        rows: Bytes,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[PeerId] = frozenset(),
        number: int = -1,
    ) -> SimulatedPending:
        """Begin the next round of a channel whose averager gathers rows."""
        due = self._after.get(channel, -1) + 1
        return self._begin(Offer(channel, rows, weight, deadline_s, aside, due, number=number))

    def _begin(self, ask: Average | Offer) -> SimulatedPending:
        now_s, world = self.now_s(), self.crew.world
        others, rates = sorted(self._node.live - {self.me}), self.rates()
        # where no line has a delay of its own the channel's ``rtt_s`` is everybody's
        apart = any(line.latency_s for line in world.faults.lines)
        for peer in others if rates or apart else ():  # as live drivers do before each round
            far = (world.faults, self.me, peer)
            rtt_s, rate = timeout_s(*far) if apart else 0.0, rates.get(peer, 0.0) / len(others)
            world.at(now_s, self.me, Measured(peer, rtt_s, shortest_s(*far), rate))
        overlap = self._overlaps.setdefault(ask.channel, Overlap())
        world.at(now_s, self.me, replace(ask, overlap_s=overlap.begins(now_s)))
        return SimulatedPending(self.crew, self.me, ask.channel, overlap)

    # -- Others' state

    @property
    def shelf(self) -> Shelf:
        """Where this peer leaves its state for those that ask."""
        return self.crew.giving[self.me].shelf

    def ask(
        self,
        need: Need,
        deadline_s: float,
        *,
        behind: Collection[PeerId],
        draw: Callable[[Sequence[PeerId]], list[PeerId]],
        noted: Callable[[str, str, str], None],
    ) -> Future[Fetched | None]:
        """Fetch the state of peers that take part (``training.state.keeper.Donors``)."""
        living = sorted(self._node.live - {self.me} - self._node.clients)
        answering = [peer for peer in living if self._node.heard_lately(peer)] or living
        donors = draw([peer for peer in answering if peer not in behind])
        return self.crew.fetch(self.me, donors, need, deadline_s, noted)

    def await_future(self, future: Future[T]) -> T:
        """What a future comes to, or its error."""
        self.crew.until(self.me, "for the state of others", future.done)
        return future.result()

    def await_newer(self, channel: int, at_most_s: float) -> bool:
        """Wait until others have begun a round of a channel that this peer has not. ``False``: nothing was
        heard of one in time, or nobody is to begin one (``standing.more``).
        """
        until_s = self.now_s() + at_most_s
        while self.now_s() < until_s and self.standing.more(channel):
            look_s = min(until_s, self.now_s() + _AHEAD_LOOK_S)
            what = f"for a newer round of channel {channel}"
            if self.crew.until(self.me, what, lambda: self._node.newer(channel), look_s):
                return True
        return self._node.newer(channel)

    def heard_of(self, channel: int) -> int:
        """The newest round of a channel that anything has come of; -1: none."""
        return self._node.heard_of(channel) if channel in self._openings else -1

    def newer(self, channel: int) -> bool:
        """Whether others are known to have begun a round of a channel that this peer has not."""
        return channel in self._openings and self._node.newer(channel)

    def goes_on_after(self, channel: int, round_: int) -> None:
        """From now on this peer begins later rounds of a channel only."""
        self._after[channel] = round_

    def take_part(self, channel: int, round_: int) -> None:
        """Tell the crew that this peer averages from now on; go on once something newer is heard of it, or
        nobody is to begin anything newer. round_: the last one whose result it has (-1: none).
        """
        opening = self._openings[channel]
        event: ChannelEvent | None = StateHere(round_)
        while event is not None:
            effects, event = opening.step(self.now_s(), event), None
            for effect in effects:
                if isinstance(effect, TakesPart):
                    self._node.resume(channel, effect.round)
                    if not self._told:
                        self._told = True
                        self.crew.takes_part(self.me)
                elif isinstance(effect, Arm):
                    newer = self.await_newer(channel, effect.at_s - self.now_s())
                    more = self.standing.more(channel)
                    event = Newer() if newer else Expired(effect.timer) if more else Nobody()

    # -- Named tensors

    def publish(self, ask: Publish) -> None:
        """Publish named tensors now."""
        self.crew.world.give(self.me, ask)

    def published(self, channel: int) -> tuple[Publisher, float]:
        """A channel's named tensors, and virtual time."""
        return publisher_of(self._node, channel), self.now_s()


class SimulatedPending:
    """A round under way."""

    def __init__(self, crew: SimulatedCrew, me: PeerId, channel: int, overlap: Overlap) -> None:
        self._crew, self._me, self._channel, self._overlap = crew, me, channel, overlap

    @property
    def over(self) -> bool:
        """Whether the round is done."""
        self._overlap.asked(self._crew.world.now_s)
        return self._crew.is_over(self._me, self._channel)

    def wait(self) -> Outcome:
        """Wait until the round is done. Its machine's deadlines bound it."""
        self._overlap.asked(self._crew.world.now_s)
        return self._crew.outcome(self._me, self._channel)
