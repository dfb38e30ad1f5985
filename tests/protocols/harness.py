"""A crew of nodes in virtual time, on one heap: enough of a world to test machines, and no more.

It also holds machines to what ``core.types`` says of payloads: what was sent must not change until it is
delivered, and what was delivered is overwritten as soon as ``step`` returns.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Faults, Loss, LossStream
from ragtag.core.seed import generator
from ragtag.core.types import (
    Arm,
    Arrived,
    Assisted,
    Average,
    Done,
    Effect,
    Event,
    Expired,
    Floats,
    Joined,
    Noted,
    Outcome,
    Role,
    Run,
    Send,
)
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import Channel, Node

TINY = fp32._replace(name="tiny", elements=4)
"""fp32 in chunks of four values: small vectors have many chunks, and tests are fast."""

EVENTS_MAX = 400_000


class World:
    """``n`` nodes with one channel each way; ``log`` has every event with its effects."""

    def __init__(
        self,
        n: int,
        method: Averager,
        n_chunks: int,
        *,
        seed: int = 1,
        loss: float = 0.0,
        latency_s: float = 0.002,
        probe_s: float = 0.05,
        floor_s: float = 0.02,
        auxiliary: tuple[int, ...] = (),
        clients: tuple[int, ...] = (),
    ) -> None:
        self.n, self.n_chunks, self.latency_s = n, n_chunks, latency_s
        self.now_s = 0.0
        others = dict.fromkeys(auxiliary, Role.AUXILIARY) | dict.fromkeys(clients, Role.CLIENT)
        self.nodes = [Node(i, n, seed, role=others.get(i, Role.TRAINER)) for i in range(n)]
        rtt_s, assisted = 2.5 * latency_s, bool(auxiliary)
        for node in self.nodes:
            for peer, role in others.items():
                if peer != node.me:
                    node.step(0.0, Joined(peer, role))
            node.configure(0, Channel(method, TINY, n_chunks, probe_s, rtt_s, floor_s, assisted=assisted))
        self.loss = LossStream(Faults(loss=Loss(loss) if loss else None), seed)
        self.dead: dict[int, float] = {}
        self.frozen: dict[int, tuple[float, float]] = {}
        self.carry: Callable[[int, Run], Iterable[tuple[float, Run]]] = lambda source, run: [(0.0, run)]
        """(sender, run as sent) to the (extra delay, run) that are delivered; a test may tamper here."""
        self.deadline_s = 0.0
        """Until when that which is carried now may be sent."""
        self.on_done: Callable[[int, Outcome], None] = lambda peer, outcome: None
        self.outcomes: list[list[Outcome]] = [[] for _ in range(n)]
        """Of an auxiliary: of the rounds that it has served."""
        self.notes: list[tuple[int, Noted]] = []
        self.log: list[tuple[float, int, Event, list[Effect]]] = []
        self._heap: list[tuple[float, int, int, Event, bytes]] = []
        self._seq = 0

    def push(self, at_s: float, peer: int, event: Event, sent: bytes = b"") -> None:
        heapq.heappush(self._heap, (at_s, self._seq, peer, event, sent))
        self._seq += 1

    def average(
        self,
        peer: int,
        values: Floats,
        weight: float = 1.0,
        *,
        after_s: float = 0.0,
        deadline_s: float | None = None,
        overlap_s: float = 0.0,
    ) -> None:
        ask = Average(0, values, weight, deadline_s, overlap_s=overlap_s)
        self.push(self.now_s + after_s, peer, ask)

    def run(self) -> World:
        """Until nothing is left to happen."""
        for _ in range(EVENTS_MAX):
            if not self._heap:
                return self
            now_s, _, peer, event, sent = heapq.heappop(self._heap)
            thaw_s = self._thaw_s(peer, now_s)
            if thaw_s > now_s:
                self.push(thaw_s, peer, event, sent)
            elif now_s < self.dead.get(peer, np.inf):
                self.now_s = now_s
                self._step(peer, event, sent)
        raise AssertionError(f"still going after {EVENTS_MAX} events, at {self.now_s} s")

    def _thaw_s(self, peer: int, now_s: float) -> float:
        from_s, until_s = self.frozen.get(peer, (0.0, 0.0))
        return until_s if from_s <= now_s < until_s else now_s

    def _step(self, peer: int, event: Event, sent: bytes) -> None:
        if isinstance(event, Arrived):
            (run,) = event.runs
            assert _content(run) == sent, f"{run.key} changed after it was sent"
            payload = run.payload.copy()
            effects = self.nodes[peer].step(self.now_s, Arrived((replace(run, payload=payload),)))
            payload.fill(0xFF)
        else:
            effects = self.nodes[peer].step(self.now_s, event)
        self.log.append((self.now_s, peer, event, effects))
        for effect in effects:
            self._do(peer, effect)

    def _do(self, peer: int, effect: Effect) -> None:
        if isinstance(effect, Send):
            assert effect.deadline_s >= self.now_s
            self.deadline_s = effect.deadline_s
            for delay_s, run in self.carry(peer, effect.run):
                for later_s, arrived in self.through(peer, run, effect.deadline_s - self.now_s):
                    at_s = self.now_s + self.latency_s + delay_s + later_s
                    self.push(at_s, run.peer, Arrived((arrived,)), _content(arrived))
        elif isinstance(effect, Arm):
            assert effect.at_s >= self.now_s
            self.push(effect.at_s, peer, Expired(effect.timer))
        elif isinstance(effect, Done):
            self.outcomes[peer].append(effect.outcome)
            self.on_done(peer, effect.outcome)
        elif isinstance(effect, Assisted):
            self.outcomes[peer].append(effect.outcome)
        elif isinstance(effect, Noted):
            self.notes.append((peer, effect))

    def through(self, source: int, run: Run, within_s: float) -> list[tuple[float, Run]]:
        """What gets through a lossy line, and how much later: chunks, and an end marker that is repeated."""
        mask = self.loss.draw(source, run.peer, run.key, run.total)
        if mask is not None:
            mask = mask[run.first : run.first + len(run.payload)]
        if run.mask is not None:
            mask = run.mask if mask is None else mask & run.mask
        dest, run = run.peer, replace(run, peer=source, mask=mask)
        if not run.ended or mask is None or mask.all():
            return [(0.0, run)]
        copies = int(within_s / (2 * self.latency_s)) + 1
        through = (not self.loss.marker_lost(source, dest, run.key, i) for i in range(copies))
        repeat = next((i for i, there in enumerate(through) if there), None)
        if repeat == 0:
            return [(0.0, run)]
        parts = [(0.0, replace(run, ended=False))] if mask.any() else []
        if repeat is None:
            return parts
        none = slice(0, 0)
        marker = replace(
            run, payload=run.payload[none], weight=run.weight[none], heard=run.heard[none], mask=None
        )
        return [*parts, (repeat * 2 * self.latency_s, marker)]

    # -- What most tests do

    def rounds(
        self, n_rounds: int, values: Callable[[int, int], Floats], pause_s: float = 0.001, skew_s: float = 0.0
    ) -> World:
        """Every peer averages ``values(peer, round)`` again and again, as soon as it has its last outcome."""

        def again(peer: int, outcome: Outcome) -> None:
            at = len(self.outcomes[peer])
            if at < n_rounds:
                self.average(peer, values(peer, at), after_s=pause_s)

        self.on_done = again
        for peer in range(self.n):
            self.average(peer, values(peer, 0), after_s=peer * skew_s)
        return self.run()

    def once(self, inputs: list[Floats], weights: list[float] | None = None, **options: Any) -> list[Outcome]:
        """One round of all peers that live, begun together."""
        for peer, values in enumerate(inputs):
            if peer not in self.dead:
                self.average(peer, values, weights[peer] if weights else 1.0, **options)
        had = [len(outcomes) for outcomes in self.outcomes]
        self.run()
        return [outcomes[at] for outcomes, at in zip(self.outcomes, had, strict=True) if len(outcomes) > at]


def _content(run: Run) -> bytes:
    return run.payload.tobytes() + run.weight.tobytes() + run.heard.tobytes()


def vectors(n: int, n_chunks: int, name: str = "vectors", *indices: int) -> list[Floats]:
    """A random vector for each of ``n`` peers, float32 ``[n_chunks, 4]``."""
    return [
        generator(1, name, *indices, i).standard_normal((n_chunks, TINY.elements)).astype(np.float32)
        for i in range(n)
    ]


def members(heard: Any) -> list[int]:
    """The peers in a set of contributors."""
    return [i for i in range(64) if int(heard) >> i & 1]


def mean_of_heard(outcome: Outcome, inputs: list[Floats], weights: list[float] | None = None) -> Floats:
    """What the outcome must be, recomputed in float64 from who it says was heard in each chunk."""
    weights = weights or [1.0] * len(inputs)
    mean = np.zeros(outcome.mean.shape, np.float64)
    for chunk, heard in enumerate(outcome.heard):
        who = members(heard)
        total = sum(weights[i] for i in who)
        mean[chunk] = sum(weights[i] * inputs[i][chunk].astype(np.float64) for i in who) / total
    return mean  # type: ignore[return-value]
