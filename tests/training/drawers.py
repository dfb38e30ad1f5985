"""A crew that only draws samples, in virtual time: real pools over real notice boards on a lossy line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from ragtag.training.samples.ledger import EpochReport
from ragtag.training.samples.pool import Deck, Over, Pool, Tell, Use, Wait
from tests.protocols.hall import Hall

LOOK_S = 0.002
PATIENCE_S = 5.0


def deck_of(n: int, blocks: int, size: int = 2) -> Deck:
    edges = [blocks * i // n for i in range(n + 1)]
    return Deck((size,) * blocks, tuple(pairwise(edges)), False, 77)


def shards_of(lengths: Sequence[int], size: int = 2) -> Deck:
    edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return Deck((size,) * edges[-1], tuple(pairwise(edges)), True, 77)


class Drawers:
    """``n`` peers that draw ``epochs`` epochs; a block takes peer ``p`` ``pace_s[p]``.

    drawn[epoch][block]: who drew it, when. reports[peer][epoch]. A death is known ``known_s`` later.
    waits[peer]: each time that a draw had to wait: since when, and how long. rto_max_s: the longest timeout
    of any board while somebody waited.
    """

    def __init__(
        self,
        deck: Deck,
        pace_s: Sequence[float],
        *,
        epochs: int = 2,
        seed: int = 0,
        loss: float = 0.0,
        known_s: float = 0.3,
        lease_s: float = 1.0,
        jitter_s: float = 0.0,
    ) -> None:
        self.deck, self.pace_s, self.epochs, self.known_s = deck, pace_s, epochs, known_s
        self.n, self.lease_s = len(pace_s), lease_s
        self.hall = Hall(self.n, seed=seed, loss=loss, jitter_s=jitter_s, latency_s=0.005)
        self.pools = [Pool(peer, deck, 1, lease_s) for peer in range(self.n)]
        self.live = [set(range(self.n)) for _ in range(self.n)]
        self.drawn: list[dict[int, list[tuple[int, float]]]] = [{} for _ in range(epochs)]
        self.reports: list[dict[int, EpochReport]] = [{} for _ in range(self.n)]
        self.ended: list[dict[int, float]] = [{} for _ in range(self.n)]
        self.waited_s = [0.0] * self.n
        self.waits: list[list[tuple[float, float]]] = [[] for _ in range(self.n)]
        self.rto_max_s = 0.0
        self._asked_s: list[float | None] = [None] * self.n
        self.finished: set[int] = set()
        self.lives = [0] * self.n
        self.last_s = 0.0

    def start(self, peer: int, at_s: float = 0.0) -> None:
        life = self.lives[peer]
        self.hall.call(at_s, lambda: self.begin(peer, life, 0))

    def begin(self, peer: int, life: int, epoch: int) -> None:
        if life != self.lives[peer]:
            return
        self.pools[peer].begin(epoch)
        self.draw(peer, life)

    def later(self, peer: int, life: int, after_s: float, function: Callable[[int, int], None]) -> None:
        """Call it when the peer has had that long, and is there."""

        def run() -> None:
            thaw_s = self.hall.frozen.get(peer, 0.0)
            if life != self.lives[peer] or peer in self.hall.dead:
                return
            if thaw_s > self.hall.now_s:
                self.hall.call(thaw_s, run)
            else:
                function(peer, life)

        self.hall.call(self.hall.now_s + after_s, run)

    def draw(self, peer: int, life: int) -> None:
        pool, hall = self.pools[peer], self.hall
        while True:
            action = pool.next(hall.now_s, hall.boards[peer].notices(0), self.live[peer])
            self.take_reports(peer)
            if isinstance(action, Tell):
                pool.posted(hall.now_s, hall.post(peer, 0, action.blob))
                continue
            if isinstance(action, Wait):
                self.waited_s[peer] += LOOK_S
                if pool.entered:  # before, nothing may be measured yet
                    self.rto_max_s = max(self.rto_max_s, hall.boards[peer].notices(0).rto_s)
                if self._asked_s[peer] is None:
                    self._asked_s[peer] = hall.now_s
                self.later(peer, life, LOOK_S, self.draw)
            elif isinstance(action, Use):
                self.note_wait(peer)
                if action.epoch < self.epochs:
                    who = self.drawn[action.epoch].setdefault(action.block, [])
                    who.append((peer, hall.now_s))
                self.later(peer, life, self.pace_s[peer], self.draw)
            else:
                assert isinstance(action, Over)
                self.note_wait(peer)
                self.ended[peer][pool.epoch] = self.last_s = hall.now_s
                if pool.epoch + 1 < self.epochs:
                    self.later(peer, life, 0.0, lambda p, li: self.begin(p, li, pool.epoch + 1))
                else:
                    self.finished.add(peer)
                    self.later(peer, life, 0.0, self.settle)
            return

    def note_wait(self, peer: int) -> None:
        since_s, self._asked_s[peer] = self._asked_s[peer], None
        if since_s is not None:
            self.waits[peer].append((since_s, self.hall.now_s - since_s))

    def settle(self, peer: int, life: int) -> None:
        pool, hall = self.pools[peer], self.hall
        force = len(self.finished | hall.dead) == self.n and hall.now_s > self.last_s + PATIENCE_S
        while isinstance(
            action := pool.settle(hall.now_s, hall.boards[peer].notices(0), self.live[peer], force), Tell
        ):
            pool.posted(hall.now_s, hall.post(peer, 0, action.blob))
        self.take_reports(peer)
        if isinstance(action, Wait):
            self.later(peer, life, 0.05, self.settle)

    def take_reports(self, peer: int) -> None:
        reports = self.pools[peer].reports
        for report in reports:
            assert report.epoch not in self.reports[peer]
            self.reports[peer][report.epoch] = report
        reports.clear()

    def kill(self, peer: int, at_s: float) -> None:
        def die() -> None:
            self.hall.dead.add(peer)
            self.lives[peer] += 1
            self.hall.call(at_s + self.known_s, lambda: self.know(peer, self.lives[peer]))

        self.hall.call(at_s, die)

    def know(self, peer: int, life: int) -> None:
        if peer in self.hall.dead and life == self.lives[peer]:
            for other in range(self.n):
                if other != peer:
                    self.live[other].discard(peer)

    def restart(self, peer: int, at_s: float) -> None:
        def come() -> None:
            self.lives[peer] += 1
            self._asked_s[peer] = None
            self.hall.restart(peer)
            self.pools[peer] = Pool(peer, self.deck, self.lives[peer] + 1, self.lease_s)
            known = [self.live[p] for p in range(self.n) if p != peer and p not in self.hall.dead]
            self.live[peer] = set.intersection(*known) | {peer} if known else {peer}
            for other in range(self.n):
                self.live[other].add(peer)
            self.reports[peer].clear()
            self.begin(peer, self.lives[peer], 0)

        self.hall.call(at_s, come)

    def freeze(self, peer: int, at_s: float, for_s: float) -> None:
        def stop() -> None:
            self.hall.frozen[peer] = at_s + for_s
            if for_s > self.known_s:
                self.hall.call(at_s + self.known_s, lambda: self.suspect(peer, at_s + for_s))

        self.hall.call(at_s, stop)

    def suspect(self, peer: int, until_s: float) -> None:
        for other in range(self.n):
            if other != peer:
                self.live[other].discard(peer)
        self.hall.call(until_s + 0.02, lambda: [live.add(peer) for live in self.live])  # type: ignore[func-returns-value]

    def run(self, until_s: float = 600.0) -> Drawers:
        while self.hall._heap and self.hall.now_s < until_s:
            alive = set(range(self.n)) - self.hall.dead
            if alive <= self.finished and all(len(self.reports[p]) for p in alive) and self.settled(alive):
                break
            self.hall.run(min(until_s, self.hall.now_s + 0.5))
        return self

    def settled(self, alive: set[int]) -> bool:
        return all(self.epochs - 1 in self.reports[p] for p in alive)

    def counts(self, epoch: int) -> Counter[int]:
        return Counter({block: len(who) for block, who in self.drawn[epoch].items()})

    def missing(self, epoch: int) -> set[int]:
        return set(range(len(self.deck.sizes))) - set(self.drawn[epoch])
