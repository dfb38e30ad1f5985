"""All-reduce of any number of peers, all or nothing: the caller restarts it when it failed.

A binary tree reduces to its root and broadcasts from there: 2 (n - 1) messages ("Optimization of collective
communication operations in MPICH", Thakur, Rabenseifner, Gropp, IJHPCA 19 (1), 2005, section 4). Unlike a
ring or ``rounds.reduce`` it scales to thousands of peers in one step; like every plain all-reduce it needs
all of them. The root sends the mean only where all peers' values are in it, else it tells that the round
failed. The tree turns each round, so that other peers hold the places that matter most.
"""

from __future__ import annotations

import numpy as np

from ragtag.core.deadline import Deadline
from ragtag.core.types import Average, Effect, Floats, PeerId, Run, Send, Timer
from ragtag.protocols.groups.keys import View
from ragtag.protocols.groups.machine import GroupChannel, PartialMachine
from ragtag.protocols.rounds.base import Incoming, whole_message

_UP, _DOWN = 0, 1


class TreeAllReduce(PartialMachine):
    """One peer of the tree. ``Outcome.heard`` names it and its neighbours; ``weight`` is all peers'."""

    def __init__(self, me: PeerId, view: View, seed: int, channel: GroupChannel) -> None:
        super().__init__(me, view, seed, channel)
        self._restart()
        self._parent: PeerId | None = None
        self._children: tuple[PeerId, ...] = ()
        self._levels = 0
        self._came: dict[tuple[PeerId, int], Incoming] = {}
        self._sum: Floats = np.empty((0, 0), np.float32)
        self._weight: Floats = np.empty(0, np.float32)
        self._count = 0
        self._sent_up = False

    def _stand(self, round_: int) -> int:
        """Find this peer's neighbours in the tree. Returns how many levels are below it."""
        peers, n = self.view.peers, len(self.view)
        at = (self.view.rank(self.me) + round_) % n
        standing = [2 * at + 1, 2 * at + 2]
        self._parent = peers[((at - 1) // 2 - round_) % n] if at else None
        self._children = tuple(peers[(child - round_) % n] for child in standing if child < n)
        self._levels = n.bit_length() - 1  # edges from the root to the deepest peer
        return self._levels - ((at + 1).bit_length() - 1)

    def _restart(self) -> None:
        self._hop = Deadline(self.channel.probe_s, floor_s=self.channel.rtt_s)

    def _begin(self, now_s: float, ask: Average) -> list[Effect]:
        assert self.active is not None
        below = self._stand(self.active)
        channel, hop_s = self.channel, self._hop.budget_s()
        self._came = {(peer, _UP): Incoming(channel.n_chunks) for peer in self._children}
        if self._parent is not None:
            self._came[self._parent, _DOWN] = Incoming(channel.n_chunks)
        self._sum = ask.values * np.float32(ask.weight)
        self._weight = np.full(channel.n_chunks, ask.weight, np.float32)
        self._count, self._sent_up = 1, False
        effects: list[Effect] = [
            self._arm("up", now_s + hop_s * (below + 1)),
            self._arm("down", now_s + hop_s * (2 * self._levels + 2)),
        ]
        return effects + self._up_if_whole(now_s)

    def _take(self, now_s: float, run: Run) -> list[Effect]:
        key = run.key
        if self.active is None or key.round > self.active:
            if key.round > self.done:
                self._keep(run)
            return []
        incoming = self._came.get((run.peer, key.stage))
        if key.round != self.active or incoming is None or (key.stage == _UP and self._sent_up):
            return []
        if run.total != self.channel.n_chunks or run.first + len(run.payload) > run.total:
            return []
        if key.stage == _DOWN and not self._sent_up:
            return []  # this peer's part is missing: the round failed further up, or the message is made up
        for a, b in incoming.fresh(run):
            rows = slice(run.first + a, run.first + b)
            if key.stage == _UP:
                with np.errstate(over="ignore", invalid="ignore"):
                    self.channel.codec.accumulate(
                        run.payload[a:b], np.ones(b - a, np.float32), self._sum[rows]
                    )
            else:
                self.channel.codec.decode(run.payload[a:b], self._sum[rows])
                self._weight[rows] = 0
            self._weight[rows] += run.weight[a:b]
        if incoming.left == 0 and key.stage == _UP:
            self._count += int(run.heard[0])
        if not incoming.closed:
            return []
        if key.stage == _UP:
            return self._up_if_whole(now_s)
        return self._down(now_s, incoming.left == 0 and int(run.heard[0]) == len(self.view))

    def _up_if_whole(self, now_s: float) -> list[Effect]:
        return self._up(now_s) if all(self._came[c, _UP].closed for c in self._children) else []

    def _up(self, now_s: float) -> list[Effect]:
        self._sent_up = True
        if self._parent is None:
            self._sum /= self._weight[:, None]
            return self._down(now_s, self._count == len(self.view))
        until_s = now_s + self._hop.budget_s()
        send = self._whole(self._parent, _UP, self._count, until_s)
        self._sum, self._weight = np.empty_like(self._sum), np.empty_like(self._weight)  # what was sent stays
        return [send]

    def _whole(self, peer: PeerId, stage: int, count: int, until_s: float) -> Send:
        """A sum or mean. Its ``heard`` counts the peers in it, which may be more than it has bits."""
        assert self.active is not None
        payload = self.channel.codec.encode(self._sum)
        heard = np.full(self.channel.n_chunks, count, np.uint64)
        return Send(
            whole_message(peer, self.channel.key(self.active, stage), payload, self._weight, heard), until_s
        )

    def _down(self, now_s: float, good: bool) -> list[Effect]:
        """Pass on the mean, or that there is none."""
        until_s = now_s + self._hop.budget_s()
        count = len(self.view) if good else 0
        effects: list[Effect] = [self._whole(child, _DOWN, count, until_s) for child in self._children]
        if not good:
            return effects + self.alone(now_s)
        if self._levels:
            self._hop.completed((now_s - self.started_s) / (2 * self._levels))
        others = self._children if self._parent is None else (self._parent, *self._children)
        members = (self.me, *others)
        heard = [(1 << len(members)) - 1] * self.channel.n_chunks
        return effects + self._finish(now_s, self.outcome(now_s, self._sum, self._weight, heard, members))

    def _expired(self, now_s: float, timer: Timer) -> list[Effect]:
        if timer.round != self.active:
            return []
        if timer.name == "up":
            return [] if self._sent_up else self._up(now_s)
        return self.alone(now_s)
