"""A crew in one process: real nodes in virtual time, one thread for each peer's training loop.

Virtual time goes on when all the peers that are present wait for a round: where all wait for one of the same
channel, at once until it is over for all; else until it is over for the first of them. So it does not depend
on which thread comes first.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from ragtag.codecs.base import Codec
from ragtag.core.faults import Faults, Loss, LossStream
from ragtag.core.schema import Schema, SchemaMismatch
from ragtag.core.types import (
    Arm,
    Arrived,
    Average,
    Bytes,
    Done,
    Effect,
    Event,
    Expired,
    Floats,
    Noted,
    Offer,
    OpenedTogether,
    Outcome,
    Post,
    Run,
    Send,
)
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.crew.board import Notices
from ragtag.protocols.node import Channel, Node

T = TypeVar("T")
PATIENCE_S = 30.0
LATENCY_S = 0.001


class FakeCrew:
    """``n`` nodes; ``present`` are the peers whose start a round waits for."""

    def __init__(self, n: int, *, loss: float = 0.0, seed: int = 1) -> None:
        self.n = n
        self.nodes = [Node(i, n, seed) for i in range(n)]
        self.present = set(range(n))
        self.sent: list[Run] = []
        self.notes: list[tuple[int, Noted]] = []
        self.asked: list[Average | Offer] = []
        self.schemas: dict[int, Schema] = {}
        self._losses = LossStream(Faults(loss=Loss(loss) if loss else None), seed)
        self._now_s, self._seq = 0.0, 0
        self._heap: list[tuple[float, int, int, Event]] = []
        self._asks: dict[tuple[int, int], Average | Offer] = {}  # by peer and channel
        self._waits: set[tuple[int, int]] = set()
        self._idle: dict[int, int] = {}  # those that wait for others to begin a round of this channel
        self._outcomes: dict[tuple[int, int], Outcome] = {}
        self._failed: BaseException | None = None
        self._changed = threading.Condition()

    def transport(self, peer: int) -> FakeTransport:
        return FakeTransport(self, peer)

    def configure(self, peer: int, channel: int, schema: Schema, method: Averager, codec: Codec) -> None:
        with self._changed:
            schema = Schema.decode(schema.encode())
            first = self.schemas.setdefault(channel, schema)
            difference = schema.difference(first)
            if difference is not None:
                raise SchemaMismatch(difference)
            chunks, parts = schema.n_chunks(codec.elements), schema.fragments
            shape = Channel(method, codec, chunks, 1.0, 2 * LATENCY_S, fragments=parts)
            self.nodes[peer].configure(channel, shape)

    def ask(self, peer: int, event: Average | Offer) -> None:
        with self._changed:
            self.asked.append(event)
            self._asks[peer, event.channel] = event

    def post(self, peer: int, topic: int, blob: bytes) -> int:
        """What is posted arrives as virtual time goes on: with the next round."""
        with self._changed:
            self._apply(peer, self.nodes[peer].step(self._now_s, Post(topic, blob)))
            return self.nodes[peer].board.notices(topic).posts[peer].number

    def wait(self, peer: int, channel: int) -> Outcome:
        with self._changed:
            self._waits.add((peer, channel))
            self._run_if_all_wait()
            if not self._changed.wait_for(
                lambda: (peer, channel) in self._outcomes or self._failed, PATIENCE_S
            ):
                raise TimeoutError(f"peer {peer} waits for {self.present - self._waiting()}")
            if self._failed is not None:
                raise RuntimeError("another peer failed") from self._failed
            self._waits.discard((peer, channel))
            return self._outcomes.pop((peer, channel))

    def await_newer(self, peer: int, channel: int) -> bool:
        """Wait until others have begun a round that this peer has not. Alone it would have them in no
        time, and what the others wait for would never come.
        """
        with self._changed:
            self._idle[peer] = channel
            self._run_if_all_wait()
            came = self._changed.wait_for(lambda: self._is_newer(peer) or self._failed, PATIENCE_S)
            del self._idle[peer]
            return bool(came)

    def _is_newer(self, peer: int) -> bool:
        return self.nodes[peer].newer(self._idle[peer])

    def leave(self, peer: int) -> None:
        """From now on nothing comes from this peer, and nobody's round waits for it to begin."""
        with self._changed:
            self.present.discard(peer)
            self._run_if_all_wait()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    def _waiting(self) -> set[int]:
        """The peers that wait for a round that is not over."""
        return {peer for peer, _ in self._waits - self._outcomes.keys()}

    def _run_if_all_wait(self) -> None:
        waiting = self._waiting()
        if (
            not waiting
            or not waiting | self._idle.keys() >= self.present
            or any(map(self._is_newer, self._idle))
        ):
            return
        asks, self._asks = self._asks, {}
        for (peer, _), event in sorted(asks.items(), key=lambda ask: ask[0]):  # not as threads came
            self._apply(peer, self.nodes[peer].step(self._now_s, event))
        waits = set(self._waits)
        together = len({channel for _, channel in waits}) == 1
        while waits - self._outcomes.keys() if together else waits.isdisjoint(self._outcomes):
            if any(map(self._is_newer, self._idle)):
                break
            self._now_s, _, peer, event = heapq.heappop(self._heap)
            if peer in self.present or peer in waiting:
                self._apply(peer, self.nodes[peer].step(self._now_s, event))
        self._changed.notify_all()

    def _apply(self, peer: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                run = effect.run
                mask = self._losses.draw(peer, run.peer, run.key, run.total)
                if mask is not None and run.mask is not None:
                    mask = mask & run.mask
                copy = replace(
                    run, peer=peer, payload=run.payload.copy(), mask=run.mask if mask is None else mask
                )
                self.sent.append(copy)
                self._push(self._now_s + LATENCY_S, run.peer, Arrived([copy]))
            elif isinstance(effect, Arm):
                self._push(effect.at_s, peer, Expired(effect.timer))
            elif isinstance(effect, Noted):
                self.notes.append((peer, effect))
            elif isinstance(effect, Done):
                self._outcomes[peer, effect.outcome.channel] = effect.outcome

    def _push(self, at_s: float, peer: int, event: Event) -> None:
        self._seq += 1
        heapq.heappush(self._heap, (at_s, self._seq, peer, event))


@dataclass
class FakeTransport:
    crew: FakeCrew
    me: int

    @property
    def n(self) -> int:
        return self.crew.n

    @property
    def live(self) -> frozenset[int]:
        return self.crew.nodes[self.me].live

    auxiliary: frozenset[int] = frozenset()
    clients: frozenset[int] = frozenset()

    def rates(self) -> dict[int, float]:
        return {}

    def post(self, topic: int, blob: bytes) -> int:
        return self.crew.post(self.me, topic, blob)

    def post_soon(self, topic: int, blob: bytes) -> None:
        self.post(topic, blob)

    def posts(self, topic: int) -> dict[int, bytes]:
        return {peer: posted.blob for peer, posted in self.notices(topic).posts.items()}

    may_grow = late = False

    def now_s(self) -> float:
        return time.monotonic()

    def pause(self, for_s: float) -> None:
        threading.Event().wait(for_s)

    def notices(self, topic: int) -> Notices:
        return self.crew.nodes[self.me].board.notices(topic)

    def configure(
        self,
        channel: int,
        schema: Schema,
        method: Averager,
        codec: Codec,
        *,
        together: OpenedTogether | None = None,
    ) -> None:
        self.crew.configure(self.me, channel, schema, method, codec)

    def heard_of(self, channel: int) -> int:
        return self.crew.nodes[self.me].heard_of(channel)

    def newer(self, channel: int) -> bool:
        return False

    def goes_on_after(self, channel: int, round_: int) -> None:
        raise AssertionError("all peers of this crew are in each round")

    def start(
        self,
        channel: int,
        values: Floats,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[int] = frozenset(),
        due: int = -1,
        number: int = -1,
    ) -> FakePending:
        self.crew.ask(self.me, Average(channel, values, weight, deadline_s, aside, due, number=number))
        return FakePending(self.crew, self.me, channel)

    def offer(
        self,
        channel: int,
        rows: Bytes,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[int] = frozenset(),
        number: int = -1,
    ) -> FakePending:
        self.crew.ask(self.me, Offer(channel, rows, weight, deadline_s, number=number))
        return FakePending(self.crew, self.me, channel)


@dataclass
class FakePending:
    crew: FakeCrew
    me: int
    channel: int

    def wait(self) -> Outcome:
        return self.crew.wait(self.me, self.channel)


def run_peers(crew: FakeCrew, train: Callable[[FakeTransport], T]) -> list[T]:
    """Run ``train`` for each peer, in a thread each; the first error ends all and is raised here."""

    def one(peer: int) -> T:
        try:
            result = train(crew.transport(peer))
        except BaseException as error:
            crew.fail(error)
            raise
        crew.leave(peer)
        return result

    with ThreadPoolExecutor(crew.n) as pool:
        futures = [pool.submit(one, peer) for peer in range(crew.n)]
        errors = [error for future in futures if (error := future.exception(PATIENCE_S)) is not None]
    if errors:
        raise next((e for e in errors if str(e) != "another peer failed"), errors[0])
    return [future.result() for future in futures]
