"""Notice boards in virtual time, over a line that loses, doubles and reorders."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace

from ragtag.core import seed as random
from ragtag.core.types import Arm, Arrived, Effect, Event, Expired, Joined, Left, Post, Posted, Send
from ragtag.protocols.crew.board import Board

EVENTS_MAX = 2_000_000


class Hall:
    """``n`` boards. loss: share of messages that are lost; jitter_s: how much later some come than others.

    dead: peers of whom nothing comes any more; frozen: until when a peer stands still; cut: whether what
    goes from one peer to another now is lost.
    """

    def __init__(
        self, n: int, *, seed: int = 0, loss: float = 0.0, jitter_s: float = 0.0, latency_s: float = 0.01
    ) -> None:
        self.n, self.loss, self.jitter_s, self.latency_s = n, loss, jitter_s, latency_s
        self.boards = [Board(peer, n) for peer in range(n)]
        self.dead: set[int] = set()
        self.frozen: dict[int, float] = {}
        self.cut: Callable[[int, int], bool] = lambda source, dest: False
        self.log: list[tuple[float, int, Event | None, list[Effect]]] = []
        self.sent = 0
        self.now_s = 0.0
        self._lives = [0] * n
        self._key, self._draws = random.stream_key(seed, "hall"), 0
        self._heap: list[tuple[float, int, int, int, Event | Callable[[], None]]] = []
        self._order = 0

    def uniform(self) -> float:
        self._draws += 1
        return random.uniform(self._key, self._draws)

    def push(self, at_s: float, peer: int, event: Event | Callable[[], None]) -> None:
        self._order += 1
        life = self._lives[peer] if peer >= 0 else 0
        heapq.heappush(self._heap, (at_s, self._order, peer, life, event))

    def call(self, at_s: float, function: Callable[[], None]) -> None:
        self.push(at_s, -1, function)

    def post(self, peer: int, topic: int, blob: bytes) -> int:
        """At once, as a driver's thread does for one that waits for the number."""
        effects = self.step(peer, Post(topic, blob))
        return next(e.number for e in effects if isinstance(e, Posted) and e.peer == peer)

    def restart(self, peer: int) -> None:
        """The peer is another process from now on, and everybody knows."""
        self.dead.discard(peer)
        self._lives[peer] += 1
        self.boards[peer] = Board(peer, self.n)
        for other in range(self.n):
            if other != peer and other not in self.dead:
                self.step(other, Joined(peer))

    def leave(self, peer: int) -> None:
        self.dead.add(peer)
        for other in range(self.n):
            if other not in self.dead:
                self.step(other, Left(peer))

    def run(self, until_s: float = float("inf")) -> None:
        for _ in range(EVENTS_MAX):
            if not self._heap or self._heap[0][0] > until_s:
                self.now_s = max(self.now_s, until_s) if until_s < float("inf") else self.now_s
                return
            at_s, _, peer, life, event = heapq.heappop(self._heap)
            thaw_s = self.frozen.get(peer, 0.0)
            if thaw_s > at_s:
                self.push(thaw_s, peer, event)
                continue
            self.now_s = at_s
            if callable(event):
                event()
            elif peer not in self.dead and life == self._lives[peer]:
                self.step(peer, event)
        raise AssertionError(f"still going after {EVENTS_MAX} events, at {self.now_s} s")

    def step(self, peer: int, event: Event) -> list[Effect]:
        effects = self.boards[peer].step(self.now_s, event)
        self.log.append((self.now_s, peer, event, effects))
        for effect in effects:
            if isinstance(effect, Send):
                assert effect.deadline_s >= self.now_s
                self._send(peer, effect)
            elif isinstance(effect, Arm):
                assert effect.at_s >= self.now_s
                self.push(effect.at_s, peer, Expired(effect.timer))
        return effects

    def _send(self, peer: int, send: Send) -> None:
        self.sent += 1
        copies = 2 if self.loss and self.uniform() < 0.05 else 1
        for _ in range(copies):
            if (self.loss and self.uniform() < self.loss) or self.cut(peer, send.run.peer):
                continue
            late_s = self.jitter_s * self.uniform() if self.jitter_s else 0.0
            came = replace(send.run, peer=peer)
            self.push(self.now_s + self.latency_s + late_s, send.run.peer, Arrived((came,)))
