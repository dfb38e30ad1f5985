"""Machines that do as they are told, and small crews of real nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Faults
from ragtag.core.seed import generator
from ragtag.core.types import Average, Effect, Event, Floats, MessageKey, Outcome, PeerId, Run
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import Channel, Node
from ragtag.simulation.worlds.rounds import World


class Scripted:
    """Notes what it is given, and answers what its script says."""

    def __init__(self, script: Callable[[float, Event], list[Effect]] = lambda now_s, event: []) -> None:
        self.script = script
        self.given: list[tuple[float, Event]] = []

    def step(self, now_s: float, event: Event) -> list[Effect]:
        self.given.append((now_s, event))
        return self.script(now_s, event)


def message(
    dest: PeerId, k: int = 1, number: int = 0, *, stage: int = 0, block: int = 0, heard: int = 1
) -> Run:
    """A whole message of ``k`` chunks; row ``i`` is full of ``i``."""
    payload = np.repeat(np.arange(k, dtype=np.uint8)[:, None], 1088, axis=1)
    key = MessageKey(0, number, stage, block)
    weight, bits = np.ones(k, np.float32), np.full(k, heard, np.uint64)
    return Run(dest, key, 0, k, payload, weight, bits, ended=True)


def values(seed: int, peer: PeerId, step: int, n_chunks: int) -> Floats:
    drawn = generator(seed, "values", peer, step).standard_normal((n_chunks, fp32.elements))
    return drawn.astype(np.float32)


def nodes(n: int, method: Averager, n_chunks: int, seed: int) -> list[Node]:
    crew = [Node(peer, n, seed) for peer in range(n)]
    for node in crew:
        node.configure(0, Channel(method, fp32, n_chunks, probe_s=0.1, rtt_s=0.01))
    return crew


class Crew:
    """A world in which every peer does ``rounds`` rounds, ``pause_s`` apart; ``outcomes`` by peer."""

    def __init__(
        self,
        n: int,
        method: Averager,
        faults: Faults = Faults(),  # noqa: B008
        *,
        n_chunks: int = 13,
        rounds: int = 4,
        seed: int = 1,
        pause_s: float = 0.5,
        check: bool = True,
        record: bool = False,
        machines: list[Node] | None = None,
    ) -> None:
        self.n_chunks, self.rounds, self.seed, self.pause_s = n_chunks, rounds, seed, pause_s
        self.outcomes: list[list[Outcome]] = [[] for _ in range(n)]
        self._asked = [0] * n
        crew = machines or nodes(n, method, n_chunks, seed)
        self.world = World(crew, faults, seed, check=check, on_done=self._done, record=record)
        for peer in range(n):
            self.world.at(0.0, peer, self.ask(peer, 0.0))

    def ask(self, peer: PeerId, _: float) -> Average:
        self._asked[peer] += 1
        return Average(0, values(self.seed, peer, self._asked[peer] - 1, self.n_chunks), 1.0)

    def run(self, until_s: float = 1000.0) -> World:
        self.world.run(until_s)
        return self.world

    def _done(self, peer: PeerId, now_s: float, outcome: Outcome) -> None:
        self.outcomes[peer].append(outcome)
        if self._asked[peer] < self.rounds:
            self.world.at(now_s + self.pause_s, peer, self.ask(peer, now_s))
