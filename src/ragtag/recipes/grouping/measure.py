"""The measurements of the grouping recipe: the list of jobs, and their results by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ragtag.core.faults import Faults, Freeze, Slow, Window
from ragtag.recipes.grouping import compensation, counts, gossip
from ragtag.recipes.grouping.methods import FIXED, METHODS, PROGRESSIVE, SYNC, grouped, scheduled
from ragtag.recipes.grouping.training import LATENCY_S, Trial, Work
from ragtag.recipes.grouping.training import train as train_work
from ragtag.recipes.jobs import Job
from ragtag.recipes.tasks.digits import train_size
from ragtag.schedules.grouping import equal_groups
from ragtag.schedules.softsync import SoftSync

N = 16
BATCH = 8
LEARNING_RATE = 0.5
JITTER = 0.03
SLOW_PEER = 3
GROUP = 3
"""Peers of each group of the table T(g)/T0."""
TABLE_G = (1, 2, 3, 4, 5, 8)
TABLE = ((3.0, 1), (1.0, 1), (3.0, 2))
"""Delay and number of slow groups; the first is the published table's."""
TIMED_DELAY, TIMED_JITTER = 3.0, 0.005
"""Of runs without a model, for time alone: so little jitter that waiting for the last of 16 takes 1 %."""
LEARNERS = 30
SPLITS = (1, 2, 3, 5, 6, 10, 15, 30)
"""n of n-softsync, each of which divides the number of learners (else floor(lambda / n) is another n's)."""

NAMES = (*METHODS, gossip.NAME)
"""All methods that train."""


def lines(*slow: Slow, freezes: tuple[Freeze, ...] = ()) -> Faults:
    """Lines that lose nothing, and slow peers."""
    return Faults(latency_s=LATENCY_S, slow=slow, freezes=freezes)


def delayed(delay: float) -> Faults:
    """One peer is (1 + delay) times slower."""
    return lines(Slow(SLOW_PEER, 1.0 + delay)) if delay else lines()


SCENES: Mapping[str, Faults] = {
    "one delayed 300 % from 80 to 200 s": lines(Slow(SLOW_PEER, 4.0, Window(80.0, 200.0))),
    "4 of 16 delayed 300 %, one in each of 4 groups": lines(*(Slow(peer, 4.0) for peer in range(0, N, 4))),
    "one stands still from 60 to 100 s": lines(freezes=(Freeze(SLOW_PEER, 60.0, 40.0),)),
}
"""Scenes beyond one constant straggler."""
CHANGING, EVERYWHERE, STILL = SCENES
SCENE_STEPS = {CHANGING: 330, EVERYWHERE: 160, STILL: 160}
"""The work of a scene: so many seconds, if none waits and none is delayed."""
SCENE_METHODS = (
    (CHANGING, PROGRESSIVE),
    (EVERYWHERE, PROGRESSIVE),
    (EVERYWHERE, FIXED),
    (STILL, PROGRESSIVE),
)


def _run(name: str, work: Work) -> Trial:
    if name == gossip.NAME:
        return gossip.Gossip(work).run()
    return train_work(name, work, METHODS[name]())


def time_of_groups(g: int, delay: float, slow_groups: int, rounds: int) -> float:
    """T(g)/T0 of equal groups of ``GROUP`` peers without a model, one peer of each slow group delayed."""
    n = GROUP * g
    groups = equal_groups(range(n), g)
    slow = (Slow(group[0], 1.0 + delay) for group in groups[:slow_groups])
    work = Work(n, 1, n * rounds, 0.0, seed=0, net=None, faults=lines())
    calm = train_work("no delay", work, grouped(g))
    late = train_work("delay", replace(work, faults=lines(*slow)), grouped(g))
    return late.took_s / calm.took_s


def time_of(name: str, rounds: int) -> Trial:
    """A method on 16 peers without a model, one delayed: its time, in steps of a crew without delay."""
    samples = N * BATCH * rounds
    return _run(name, Work(N, BATCH, samples, 0.0, 0, None, TIMED_JITTER, delayed(TIMED_DELAY)))


def train(name: str, delay: float, seed: int, epochs: int) -> Trial:
    """Train digits on 16 peers, one delayed."""
    samples = epochs * train_size()
    return _run(name, Work(N, BATCH, samples, LEARNING_RATE, seed, jitter=JITTER, faults=delayed(delay)))


def play(scene: str, name: str, seed: int) -> Trial:
    """A scene without a model: time and groups."""
    return _run(
        name, Work(N, BATCH, SCENE_STEPS[scene] * N * BATCH, 0.0, seed, None, TIMED_JITTER, SCENES[scene])
    )


def soften(n: int, corrected: bool, seed: int, epochs: int) -> Trial:
    """Train digits by n-softsync of 30 learners; n = 0: hard sync."""
    work = Work(LEARNERS, BATCH // 2, epochs * train_size(), LEARNING_RATE, seed, jitter=0.1)
    name = ("1/tau" if corrected else "fixed rate") if n else "hard sync"
    return train_work(name, work, scheduled(SoftSync(n, corrected)) if n else grouped(1))


def soft_times(n: int, steps: int) -> Trial:
    """The staleness of n-softsync with 30 learners that train nothing."""
    work = Work(LEARNERS, 1, LEARNERS * steps, 0.0, seed=0, net=None, jitter=0.1)
    return train_work(f"n = {n}", work, scheduled(SoftSync(n)))


@dataclass(slots=True)
class Results:
    """The measurements.

    table: by (delay, slow groups, g).
    times: by method.
    trials: by (delay, method), over seeds.
    scenes: by (scene, method), over seeds.
    soft: by (n, corrected), over seeds; n = 0: hard sync.
    staleness: by n.
    slow_share, stale_share: what an update of each peer counts, of a slow peer's crew and of stale groups.
    growth: of the error at a stale group's steps, by whether they are corrected.
    compensated: by ``compensation.Key``, over seeds.
    """

    table: dict[tuple[float, int, int], float] = field(default_factory=dict)
    times: dict[str, Trial] = field(default_factory=dict)
    trials: dict[tuple[float, str], list[Trial]] = field(default_factory=lambda: defaultdict(list))
    scenes: dict[tuple[str, str], list[Trial]] = field(default_factory=lambda: defaultdict(list))
    soft: dict[tuple[int, bool], list[Trial]] = field(default_factory=lambda: defaultdict(list))
    staleness: dict[int, Trial] = field(default_factory=dict)
    slow_share: list[counts.Counted] = field(default_factory=list)
    stale_share: list[counts.Counted] = field(default_factory=list)
    growth: dict[bool, float] = field(default_factory=dict)
    compensated: dict[compensation.Key, list[Trial]] = field(default_factory=lambda: defaultdict(list))

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "table": [{"delay": d, "slow": k, "g": g, "ratio": r} for (d, k, g), r in self.table.items()],
            "times": [asdict(t) for t in self.times.values()],
            "trials": [{"delay": d, **asdict(t)} for (d, _), ts in self.trials.items() for t in ts],
            "scenes": [{"scene": s, **asdict(t)} for (s, _), ts in self.scenes.items() for t in ts],
            "softsync": [{"n": n, **asdict(t)} for (n, _), ts in self.soft.items() for t in ts],
            "staleness": {str(n): asdict(t) for n, t in self.staleness.items()},
            "slow_share": [asdict(c) for c in self.slow_share],
            "stale_share": [asdict(c) for c in self.stale_share],
            "growth": {"corrected" if c else "not corrected": g for c, g in self.growth.items()},
            "compensated": [
                {"model": m, "rate": r, "strength": s, **asdict(t)}
                for (m, r, s), ts in self.compensated.items()
                for t in ts
            ],
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs to make.

    delays: of progressive grouping.
    trained: methods that train, too, with the longest delay and the first seed.
    table: delays and numbers of slow groups of T(g)/T0.
    rounds, timed: steps of each peer in runs without a model, of T(g)/T0 and of methods.
    softened: n of n-softsync that trains.
    """

    seeds: tuple[int, ...]
    delays: tuple[float, ...]
    trained: tuple[str, ...]
    table: tuple[tuple[float, int], ...]
    epochs: int
    rounds: int
    timed: int
    splits: tuple[int, ...]
    softened: tuple[int, ...]
    soft_epochs: int
    soft_steps: int
    compensated: tuple[compensation.Key, ...]
    compensation_epochs: int = compensation.EPOCHS

    @staticmethod
    def of(*, quick: bool, seeds: int) -> Plan:
        """All runs; quick: enough to see that the claims hold."""
        if quick:
            return Plan(
                seeds=tuple(range(min(2, seeds))),
                delays=(0.0, 5.0),
                trained=(),
                table=TABLE[:1],
                epochs=15,
                rounds=60,
                timed=100,
                splits=(1, 30),
                softened=(15,),
                soft_epochs=12,
                soft_steps=100,
                compensated=tuple(key for key in compensation.measured() if compensation.mends(key)),
            )
        return Plan(
            seeds=tuple(range(seeds)),
            delays=(0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0),
            trained=tuple(name for name in NAMES if name not in (SYNC, PROGRESSIVE)),
            table=TABLE,
            epochs=30,
            rounds=200,
            timed=200,
            splits=SPLITS,
            softened=(1, 2, 5, 15, 30),
            soft_epochs=30,
            soft_steps=700,
            compensated=tuple(compensation.measured()),
        )

    @property
    def worst(self) -> float:
        """The longest delay."""
        return max(self.delays)

    def _table(self) -> list[tuple[float, int, int]]:
        return [(d, k, g) for d, k in self.table for g in TABLE_G if g >= k]

    def _trials(self) -> list[tuple[float, str, int]]:
        asked = [(0.0, SYNC), *((d, PROGRESSIVE) for d in self.delays)]
        more = [(self.worst, name, self.seeds[0]) for name in self.trained]
        return [(d, m, seed) for d, m in asked for seed in self.seeds] + more

    def _scenes(self) -> list[tuple[str, str, int]]:
        return [(scene, m, seed) for scene, m in SCENE_METHODS for seed in self.seeds[:1]]

    def _soft(self) -> list[tuple[int, bool, int]]:
        kinds = [(0, False), *((n, corrected) for n in self.softened for corrected in (True, False))]
        few = self.seeds if self.trained else self.seeds[:1]
        return [(n, c, seed) for n, c in kinds for seed in (self.seeds if c or not n else few)]

    def _compensated(self) -> list[tuple[compensation.Key, int]]:
        seeds = self.seeds if self.trained else self.seeds[:1]
        return [(key, seed) for key in self.compensated for seed in seeds]

    def jobs(self) -> list[Job]:
        """All measurements."""
        jobs = [Job(f"T({g})", time_of_groups, (g, d, k, self.rounds)) for d, k, g in self._table()]
        jobs += [Job(f"time of {name}", time_of, (name, self.timed)) for name in NAMES]
        jobs += [Job(f"staleness, n = {n}", soft_times, (n, self.soft_steps)) for n in self.splits]
        jobs += [
            Job(f"{m}, delay {d:.0%}, seed {s}", train, (m, d, s, self.epochs)) for d, m, s in self._trials()
        ]
        jobs += [Job(f"{m}, {scene}, seed {s}", play, (scene, m, s)) for scene, m, s in self._scenes()]
        jobs += [
            Job(f"softsync, n = {n}, seed {s}", soften, (n, c, s, self.soft_epochs))
            for n, c, s in self._soft()
        ]
        jobs += [
            Job("what a slow peer's update counts", counts.shares, (counts.DELAY,)),
            Job("what a stale update counts", counts.shares, ()),
            *(Job(f"growth, corrected: {c}", counts.growth, (c,)) for c in (True, False)),
        ]
        jobs += [
            Job(
                f"lambda {key[2]:g}, rate {key[1]:g}, {key[0]}, seed {s}",
                compensation.train_compensated,
                (key, s, self.compensation_epochs),
            )
            for key, s in self._compensated()
        ]
        return jobs

    def sort(self, results: Sequence[Any]) -> Results:
        """The results of ``jobs``, in their order, by name."""
        found, left = Results(), iter(results)
        found.table = {key: next(left) for key in self._table()}
        found.times = {name: next(left) for name in NAMES}
        found.staleness = {n: next(left) for n in self.splits}
        for d, m, _ in self._trials():
            found.trials[d, m].append(next(left))
        for scene, m, _ in self._scenes():
            found.scenes[scene, m].append(next(left))
        for n, c, _ in self._soft():
            found.soft[n, c].append(next(left))
        found.slow_share, found.stale_share = next(left), next(left)
        found.growth = {c: next(left) for c in (True, False)}
        for key, _ in self._compensated():
            found.compensated[key].append(next(left))
        return found
