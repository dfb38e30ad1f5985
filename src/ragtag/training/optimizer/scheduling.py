"""When an optimizer averages: its schedule, told what is measured, and which peers are waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_low

from ragtag.core.types import Noted, Outcome, PeerId
from ragtag.schedules.base import Average, Compute, Progress, Schedule, Skip
from ragtag.schedules.bounded import lead
from ragtag.schedules.partial import set_aside
from ragtag.training.exchange.slow import unheard
from ragtag.training.optimizer.gathering import Gathering
from ragtag.training.optimizer.speeds import Pacer, Paces
from ragtag.training.transport import Peers

COHERENCE_MAX = 256
"""Measurements that are kept until somebody asks."""
CYCLES = 8
"""So many of the last rounds tell how long the crew takes from one to the next."""
SURE = 0.8
"""A round counts as gone by once so much of its time has. A peer that is early waits itself; one that begins
a round ahead of the others has all of them wait."""
STALE_MAX = 32
"""The last class of staleness: 2^31 rounds and more."""


@dataclass(slots=True)
class Spent:
    """Where the time has gone since it was last asked for.

    compute_s: between steps, and the local step itself.
    average_s: in averages.
    wait_s: put off by the schedule.
    for_peer_s: of the last two, how much went by waiting for each peer.
    lost_s: of computing, by the share of this peer's values that averages overwrote without having them.
    averages, steps: how many.
    stale: of the averages, to how many this peer came after 0, 1, 2 to 3, 4 to 7, ... rounds without it (how
        stale it was); at a central state, of its updates of blocks, how many were so many versions old.
    coherence: the newest measurements, where they are asked for: (step, mu).
    """

    compute_s: float = 0.0
    average_s: float = 0.0
    wait_s: float = 0.0
    lost_s: float = 0.0
    averages: int = 0
    steps: int = 0
    for_peer_s: dict[PeerId, float] = field(default_factory=dict)
    stale: list[int] = field(default_factory=list)
    coherence: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=COHERENCE_MAX))

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.average_s + self.wait_s

    def cohered(self, step: int, mu: float | None) -> None:
        """What was measured at a step, if anything was."""
        if mu is not None:
            self.coherence.append((step, mu))

    def count_stale(self, rounds: int) -> None:
        """``rounds`` went by without this peer before the one that it has just taken part in."""
        at = min(rounds.bit_length(), STALE_MAX)
        self.stale += [0] * (at + 1 - len(self.stale))
        self.stale[at] += 1


class Scheduling:
    """One optimizer's schedule at work.

    A schedule with ``paced`` (it asks for others' speeds or clocks) or ``partial`` (it does not wait for all
    in a round, to which peers come after ``every`` steps, else after each) has this peer post its pace; for
    the others nothing is posted. One with ``follows`` asks whether others have begun to average.

    began: whether they have.
    gathering: what is gathered towards a target batch, where the schedule has one.
    """

    def __init__(
        self,
        schedule: Schedule,
        peers: Peers,
        name: str,
        note: Callable[[Noted], None] | None = None,
        gathering: Gathering | None = None,
        began: Callable[[], bool] = lambda: False,
    ) -> None:
        self._schedule, self._peers, self._gathering = schedule, peers, gathering
        self.partial = bool(getattr(schedule, "partial", False))
        self._every = int(getattr(schedule, "every", 1))
        self._began = began if getattr(schedule, "follows", False) else None
        paced = self.partial or bool(getattr(schedule, "paced", False))
        self._pacer = Pacer(peers, name, note) if paced else None
        self._paces: Paces | None = None
        self._aside: frozenset[PeerId] = frozenset()
        self._computed_s = 0.0
        self._offered_s: float | None = None
        """How long was computed for the average that is under way; ``None``: there is none."""
        self._round_s: float | None = None
        self._round = -1
        self._ended_s: float | None = None
        self._began_s = self._peers.now_s()
        self.spent = Spent()
        self._passed = 0
        self._cycles_s: deque[float] = deque(maxlen=CYCLES)
        self._averaged_s: float | None = None
        self.busy_s = 0.0
        """How long was computed since the start."""

    @property
    def aside(self) -> frozenset[PeerId]:
        """The peers that the next average does not wait for; this one may be among them."""
        return self._aside

    def worked(self, steps: int) -> None:
        """A local step has just been taken; ``steps``: so many in all."""
        took_s = self.pauses()
        now_s = self._peers.now_s()
        self.spent.steps += 1
        if self._pacer is not None:  # a first step is taken to have begun with all else: better than nothing
            self._pacer.stepped(steps, now_s - self._began_s if took_s is None else took_s)
            self._paces = None
        self._ended_s = now_s

    def pauses(self) -> float | None:
        """This peer computes no longer, as another of its optimizers is to average; for how long it did."""
        now_s = self._peers.now_s()
        took_s = None if self._ended_s is None else now_s - self._ended_s
        self._computed_s += took_s or 0.0
        self.busy_s += took_s or 0.0
        self.spent.compute_s += took_s or 0.0
        if took_s is not None:
            self._ended_s = now_s
        return took_s

    def resumes(self) -> None:
        """It computes again."""
        now_s = self._peers.now_s()
        if self._ended_s is not None:
            self.spent.wait_s += now_s - self._ended_s
            self._ended_s = now_s

    def due(self, step: int, since: int) -> bool:
        """Whether to average now.

        It stands by for a peer no longer than the schedule says, counted from that peer's last step.
        """
        now_s = began_s = idle_from_s = self._peers.now_s()
        seen = -1
        while True:  # by the clock: a pause lasts longer than was asked for, and to look takes time, too
            progress = self._progress(step, since, now_s - began_s)
            decision = self._schedule.decide(progress)
            if isinstance(decision, Compute | Skip | Average):
                break
            slowest, _ = lead(progress)
            clock = progress.clocks.get(slowest, -1)
            idle_from_s, seen = (idle_from_s if clock == seen else now_s), clock
            ends_s = idle_from_s + decision.at_most_s
            if now_s >= ends_s:
                if self._pacer is not None:
                    self._pacer.overdue(slowest)
                break
            if self._pacer is not None:
                self._pacer.post()
            if self._gathering is not None:
                self._gathering.stands_by()
            self._peers.pause(min(decision.for_s, ends_s - now_s))
            before_s, now_s = now_s, self._peers.now_s()
            if slowest != self._peers.me:
                self._charge(slowest, now_s - before_s)
        self.spent.wait_s += now_s - began_s
        self._ended_s = self._peers.now_s()
        if self._gathering is not None:
            self._gathering.decided()
        self._passed += isinstance(decision, Skip)
        if isinstance(decision, Compute | Skip):
            return False
        if self._pacer is not None:
            self._pacer.post()  # others may wait for this very step, and a post is little beside an average
        return True

    @property
    def went_by(self) -> int:
        """The last round that went by without this peer, as its schedule says; -1: none did.

        The others wait for those that are away, so their rounds may take longer than this peer's steps: no
        more went by than there was time for.
        """
        gone = self._passed
        if gone and self._averaged_s is not None and self._cycles_s:
            away_s = (self._peers.now_s() - self._averaged_s) * gone / (gone + 1)  # less the last steps
            gone = min(gone, int(away_s / median_low(self._cycles_s) + 1.0 - SURE))
        return self._round + gone if self._passed else -1

    def begin(self) -> frozenset[PeerId]:
        """An average begins: what is computed from now on is for the next. Returns the peers that it does
        not wait for.
        """
        self._offered_s, self._computed_s = self._computed_s, 0.0
        if self.partial:
            paces = self._read()
            between_s = {peer: self._every * s for peer, s in paces.step_s.items()}
            self._aside = set_aside(between_s, self._aside & paces.live, paces.exchange_s)
        return self._aside

    def averaged(self, outcome: Outcome, kept: bool = False) -> None:
        """An average is over; ``kept``: what it came without is offered again."""
        now_s = self._peers.now_s()
        spent = self.spent
        waited_s = outcome.total_s if self._ended_s is None else now_s - self._ended_s
        spent.average_s += waited_s
        spent.averages += 1
        for versions in outcome.stale or ():
            spent.count_stale(versions)
        if outcome.stale is None and 0 <= self._round < outcome.round:
            spent.count_stale(outcome.round - self._round - 1)
        if self._averaged_s is not None and self._round < outcome.round:
            self._cycles_s.append((now_s - self._averaged_s) / (outcome.round - self._round))
        self._averaged_s = now_s
        self._round, self._passed = outcome.round, 0
        if self._offered_s is None:  # it was not begun: this peer took over what others have
            self._offered_s, self._computed_s = self._computed_s, 0.0
        spent.lost_s += 0.0 if kept else self._offered_s * float(unheard(outcome, self._peers.me).mean())
        for peer in outcome.missed or (() if outcome.last < 0 else (outcome.last,)):
            self._charge(peer, min(outcome.scatter_s, waited_s))  # local steps may have gone on meanwhile
        self._ended_s, self._offered_s, self._round_s = now_s, None, outcome.total_s
        if self._pacer is not None:
            self._pacer.averaged(outcome.gather_s)

    def take_spent(self) -> Spent:
        """Where the time has gone since the last call."""
        spent, self.spent = self.spent, Spent()
        return spent

    def _charge(self, peer: PeerId, waited_s: float) -> None:
        self.spent.for_peer_s[peer] = self.spent.for_peer_s.get(peer, 0.0) + waited_s

    def _read(self) -> Paces:
        assert self._pacer is not None
        if self._paces is None:
            self._paces = self._pacer.read()
        return self._paces

    def _progress(self, step: int, since: int, waited_s: float) -> Progress:
        peers = self._peers
        if self._pacer is None:
            return Progress(
                step=step,
                since_average=since,
                n=peers.n,
                live=peers.live,
                round_s=self._round_s,
                waited_s=waited_s,
                me=peers.me,
                computed_s=self._computed_s,
                tallies={} if self._gathering is None else self._gathering.read(),
                others_began=self._began is not None and self._began(),
            )
        self._paces = None
        paces = self._read()
        return Progress(
            step=step,
            since_average=since,
            n=peers.n,
            live=paces.live,
            round_s=self._round_s,
            waited_s=waited_s,
            me=peers.me,
            computed_s=self._computed_s,
            clocks=paces.steps,
            step_s=paces.step_s,
            since_s=paces.since_s,
        )
