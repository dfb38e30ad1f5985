"""The methods that are compared: the schedules of ``ragtag.schedules``, applied to a ``training.Crew``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ragtag.core import seed as random
from ragtag.recipes.grouping.training import Crew, Update
from ragtag.schedules.base import Average, Progress, Schedule, Wait
from ragtag.schedules.centre import Arrival, Centre, Drop
from ragtag.schedules.dropcompute import DropCompute, best_threshold_s
from ragtag.schedules.grouping import (
    Groups,
    ProgressiveGrouping,
    barrier_s,
    equal_groups,
    plausible,
    scale,
    share,
)


class Central:
    """A centre that holds the model: synchronous, backup workers, n-softsync, asynchronous, Ringmaster."""

    def __init__(self, centre: Centre) -> None:
        self._centre = centre
        self._held: list[tuple[Update, float]] = []
        self._ready: list[int] = []

    def start(self, crew: Crew) -> None:
        """All peers begin."""
        for peer in range(crew.n):
            crew.begin(peer)

    def computed(self, crew: Crew, update: Update) -> None:
        """The centre judges the update. With a barrier, the peer waits for the next step."""
        arrival = Arrival(update.peer, crew.version - update.version, len(self._held) + 1, crew.n)
        verdict = self._centre.judge(arrival)
        if isinstance(verdict, Drop):
            crew.drop(update)
            crew.begin(update.peer)
            return
        self._held.append((update, verdict.scale))
        self._ready.append(update.peer)
        if verdict.close:
            crew.step(self._held)
            self._held = []
        if verdict.close or not self._centre.barrier:
            for peer in self._ready:
                crew.begin(peer)
            self._ready = []


class Paced:
    """Bounded staleness, fixed or moving: every update is an n-th of a step, and a peer shares it (and goes
    on) only when its schedule says so."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._clocks: dict[int, int] = {}
        self._last_s: dict[int, float] = {}
        self._waiting: dict[int, tuple[Update, float]] = {}
        self._timers: set[int] = set()
        self._live: frozenset[int] = frozenset()

    def start(self, crew: Crew) -> None:
        """All peers begin."""
        self._clocks = dict.fromkeys(range(crew.n), 0)
        self._live = frozenset(self._clocks)
        self._last_s = dict.fromkeys(range(crew.n), 0.0)
        for peer in range(crew.n):
            crew.begin(peer)

    def computed(self, crew: Crew, update: Update) -> None:
        """A peer has taken a step and decides. Peers that wait decide again when the slowest has moved."""
        crew.measured.add(update)
        slowest = min(self._clocks.values())
        self._clocks[update.peer] += 1
        self._last_s[update.peer] = crew.now_s
        self._waiting[update.peer] = (update, crew.now_s)
        moved = min(self._clocks.values()) > slowest
        for peer in sorted(self._waiting, key=lambda p: (self._waiting[p][1], p)) if moved else [update.peer]:
            self._decide(crew, peer)

    def _decide(self, crew: Crew, peer: int) -> None:
        update, since_s = self._waiting[peer]
        waited_s = crew.now_s - since_s
        decision = self._schedule.decide(
            Progress(
                step=self._clocks[peer],
                since_average=1,
                n=crew.n,
                live=self._live,
                waited_s=waited_s,
                me=peer,
                clocks=self._clocks,
                step_s=crew.measured.step_s(),
                since_s={p: crew.now_s - at_s for p, at_s in self._last_s.items()},
            )
        )
        if isinstance(decision, Wait) and waited_s < decision.at_most_s * (1 - 1e-9):
            if peer not in self._timers:
                self._timers.add(peer)
                left_s = decision.at_most_s - waited_s
                crew.at(crew.now_s + min(decision.for_s, left_s), lambda: self._again(crew, peer))
            return
        if isinstance(decision, Wait):
            crew.note(f"peer {peer} waited {waited_s:.3g} s and went on beyond its bound")
        del self._waiting[peer]
        crew.step([(update, 1.0 / crew.n)])
        crew.begin(peer)

    def _again(self, crew: Crew, peer: int) -> None:
        self._timers.discard(peer)
        if peer in self._waiting:
            self._decide(crew, peer)


class Cut:
    """DropCompute: synchronous, in micro-batches, cut at a threshold measured in the first rounds."""

    def __init__(self, micro: int, warm_up: int = 4) -> None:
        self._rule = DropCompute(micro)
        self._warm_up = warm_up
        self._done: dict[int, list[Update]] = {}
        self._ready: list[int] = []
        self._micro_s: list[list[list[float]]] = []

    def start(self, crew: Crew) -> None:
        """All peers begin their first micro-batch."""
        if crew.work.batch % self._rule.micro:
            raise ValueError(
                f"batches of {crew.work.batch} do not part into {self._rule.micro} micro-batches"
            )
        for peer in range(crew.n):
            self._begin(crew, peer)

    def _begin(self, crew: Crew, peer: int) -> None:
        self._done[peer] = []
        crew.begin(peer, crew.work.batch // self._rule.micro)

    def computed(self, crew: Crew, update: Update) -> None:
        """Begin the next micro-batch, or wait at the barrier. When all are there, take a step."""
        mine = self._done[update.peer]
        mine.append(update)
        spent_s = update.ended_s - mine[0].began_s
        progress = Progress(
            step=len(mine),
            since_average=len(mine),
            n=crew.n,
            live=frozenset(range(crew.n)),
            me=update.peer,
            computed_s=spent_s,
        )
        if not isinstance(self._rule.decide(progress), Average):
            crew.begin(update.peer, crew.work.batch // self._rule.micro)
            return
        self._ready.append(update.peer)
        if len(self._ready) < crew.n:
            return
        self._learn(crew)
        crew.step([(part, 1.0) for parts in self._done.values() for part in parts])
        ready, self._ready = self._ready, []
        for peer in ready:
            self._begin(crew, peer)

    def _learn(self, crew: Crew) -> None:
        if len(self._micro_s) >= self._warm_up:
            return
        self._micro_s.append([[u.ended_s - u.began_s for u in self._done[p]] for p in range(crew.n)])
        if len(self._micro_s) == self._warm_up:
            threshold_s = best_threshold_s(np.array(self._micro_s))
            self._rule = DropCompute(self._rule.micro, threshold_s)
            crew.note(f"threshold {threshold_s:.3g} s")


class Gossip:
    """AD-PSGD: each peer has its own model, and averages it with a random other's after each step.

    "Asynchronous Decentralized Parallel Stochastic Gradient Descent", Lian, Zhang, Zhang, Liu, ICML 2018
    (arXiv 1710.06952), algorithm 1. The mean of all models is evaluated.
    """

    def __init__(self) -> None:
        self._models: list[Tensor] = []
        self._exchanges = 0

    def start(self, crew: Crew) -> None:
        """All peers begin with the same model."""
        if crew.model is not None:
            self._models = [crew.model] * crew.n
            crew.mean_model = self._mean
        for peer in range(crew.n):
            crew.begin(peer)

    def _mean(self) -> Tensor:
        total = self._models[0].clone()
        for model in self._models[1:]:
            total += model
        return total / len(self._models)

    def computed(self, crew: Crew, update: Update) -> None:
        """Average with another peer, then step by the gradient at the model before."""
        me = update.peer
        draw = random.uniform(random.stream_key(crew.work.seed, "neighbour", self._exchanges))
        other = (me + 1 + int(draw * (crew.n - 1))) % crew.n if crew.n > 1 else me
        self._exchanges += 1
        crew.staleness[crew.version - update.version] += 1
        crew.version += 1
        if self._models:
            both = (self._models[me] + self._models[other]) / 2
            self._models[other] = both
            self._models[me] = both - crew.work.learning_rate * crew.mean_gradient([(update, 1.0)])
        crew.count(len(update.samples))
        crew.begin(me, model=self._models[me] if self._models else None)


@dataclass(slots=True, eq=False)
class _Round:
    """A group's round. waiting: members that it waits for. arrived: their updates."""

    version: int
    began_s: float
    members: frozenset[int]
    waiting: set[int]
    arrived: list[Update] = field(default_factory=list)
    armed: bool = False
    closed: bool = False


class Grouped:
    """Synchronous inside a group, asynchronous between groups. Groups are fixed or follow measured speeds.

    groups: a number of equal, fixed groups that wait for all their members; or the rule that forms them. Then
        rounds have deadlines, and a late update counts by itself.
    """

    def __init__(self, groups: int | ProgressiveGrouping) -> None:
        self._rule = groups if isinstance(groups, ProgressiveGrouping) else None
        self._count = groups if isinstance(groups, int) else 1
        self._groups: Groups = ()
        self._rounds: dict[int, _Round] = {}
        self._ready: set[int] = set()
        self._silent: set[int] = set()

    def start(self, crew: Crew) -> None:
        """Nothing is measured yet: begin with one group, or the fixed ones."""
        self._groups = equal_groups(range(crew.n), self._count)
        self._ready = set(range(crew.n))
        self._begin(crew)

    def computed(self, crew: Crew, update: Update) -> None:
        """Close the round if it is complete. A late update counts by itself."""
        crew.measured.add(update)
        round_ = self._rounds[update.peer]
        if round_.closed:
            del self._rounds[update.peer]
            self._ready.add(update.peer)
            crew.step([(update, self._scale(crew, [update]))])
            self._regroup(crew)
        else:
            round_.arrived.append(update)
            round_.waiting.discard(update.peer)
            if round_.waiting:
                self._arm(crew, round_)
            else:
                self._close(crew, round_)

    def _close(self, crew: Crew, round_: _Round) -> None:
        if round_.closed:
            return
        round_.closed = True
        for update in round_.arrived:
            del self._rounds[update.peer]
            self._ready.add(update.peer)
        if round_.arrived:
            part = self._scale(crew, round_.arrived)
            crew.step([(update, part) for update in round_.arrived])
        self._regroup(crew)

    def _scale(self, crew: Crew, updates: Sequence[Update]) -> float:
        """The scale of updates at one model: their part of the samples per second, never above 1/tau."""
        rate = {peer: 1.0 / s if s > 0 else 0.0 for peer, s in self._step_s(crew).items()}
        part = share([update.peer for update in updates], rate)
        return scale(min(1.0, part), crew.version - updates[0].version)

    def _regroup(self, crew: Crew) -> None:
        if self._rule is not None:
            known, doubted = plausible(self._step_s(crew))
            for peer in sorted(doubted.keys() - self._silent):
                crew.note(f"peer {peer} is left out: nothing of it for {doubted[peer]:.3g} s")
            self._silent = set(doubted)
            before, self._groups = self._groups, self._rule.groups(known, self._groups)
            if len(before) != len(self._groups):
                sizes = " + ".join(str(len(group)) for group in self._groups)
                crew.note(f"{len(self._groups)} groups: {sizes}" if len(self._groups) > 1 else "1 group")
        self._begin(crew)

    def _step_s(self, crew: Crew) -> dict[int, float]:
        """Measured step times. A step under way takes at least as long as it has taken by now."""
        known = crew.measured.step_s()
        middle = sorted(known.values())[len(known) // 2] if known else math.nan
        found = {}
        for peer in range(crew.n):
            round_ = self._rounds.get(peer)
            so_far_s = crew.now_s - round_.began_s if round_ is not None else 0.0
            found[peer] = max(known.get(peer, middle), so_far_s)
        return found

    def _begin(self, crew: Crew) -> None:
        for group in self._groups:
            mates = [self._rounds[peer] for peer in group if peer in self._rounds]
            ready = [peer for peer in group if peer in self._ready]
            if not ready or any(not round_.closed for round_ in mates):
                continue
            round_ = _Round(crew.version, crew.now_s, frozenset(ready), set(ready))
            for peer in ready:
                self._ready.discard(peer)
                self._rounds[peer] = round_
                crew.begin(peer)
            self._arm(crew, round_)

    def _arm(self, crew: Crew, round_: _Round) -> None:
        """Set the deadline once the steps of half the members have been measured."""
        if self._rule is None or round_.armed:
            return
        step_s = crew.measured.step_s()
        known = [step_s[peer] for peer in round_.members if peer in step_s]
        if 2 * len(known) >= len(round_.members):
            round_.armed = True
            at_s = max(crew.now_s, round_.began_s + barrier_s(known))
            crew.at(at_s, lambda: self._close(crew, round_))
