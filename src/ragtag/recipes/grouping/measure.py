"""The measurements of the grouping recipe: the list of jobs, and their results by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ragtag.core.faults import Faults, Freeze, Slow, Window
from ragtag.recipes.grouping import compensation
from ragtag.recipes.grouping.central import Trained, Training, train_centrally
from ragtag.recipes.grouping.methods import Central, Cut, Gossip, Grouped, Paced
from ragtag.recipes.grouping.training import Crew, Method, Trial, Work
from ragtag.recipes.jobs import Job
from ragtag.recipes.tasks.digits import train_size
from ragtag.schedules.asynchronous import Asynchronous
from ragtag.schedules.backup import SYNCHRONOUS, BackupWorkers
from ragtag.schedules.bounded import BoundedStaleness, DynamicBound
from ragtag.schedules.grouping import ProgressiveGrouping, equal_groups
from ragtag.schedules.softsync import SoftSync

N = 16
BATCH = 8
EPOCHS = 30
LEARNING_RATE = 0.5
JITTER = 0.03
SLOW_PEER = 3
TABLE_N = 120
"""Peers of the table T(g)/T0: a number that 1, 2, 3, 4, 5 and 8 divide."""
TABLE_G = (1, 2, 3, 4, 5, 8)
TABLE = ((3.0, 1), (1.0, 1), (3.0, 2))
"""Delay and number of slow groups; the first is the published table's."""
LEARNERS = 30
SPLITS = (1, 2, 3, 5, 6, 10, 15, 30)
"""n of n-softsync, each of which divides the number of learners (else floor(lambda / n) is another n's)."""

LIVE_S = 20.0
LIVE_SLOWER = (1.0, 5.0, 21.0)
"""How many times 50 ms the steps of one of 4 peers take; 21: it sleeps 1 s more in each."""
LIVE_RATE = 0.02
"""At this rate ``LIVE_S`` are too short to learn all, so a method that moves the model less has less
accuracy."""

PROGRESSIVE = "progressive grouping"
SYNC = "synchronous"
METHODS: Mapping[str, Callable[[], Method]] = {
    SYNC: lambda: Central(SYNCHRONOUS),
    "backup workers, 1 spare": lambda: Central(BackupWorkers(1)),
    "DropCompute, 8 micro-batches": lambda: Cut(8),
    "SSP, bound 4": lambda: Paced(BoundedStaleness(4)),
    "DSSP, bound 2 to 8": lambda: Paced(DynamicBound(2, 8)),
    "n-softsync, n = 4": lambda: Central(SoftSync(4)),
    "asynchronous": lambda: Central(Asynchronous()),
    "Ringmaster, R = 32": lambda: Central(Asynchronous(32)),
    "AD-PSGD": Gossip,
    "4 fixed groups": lambda: Grouped(4),
    PROGRESSIVE: lambda: Grouped(ProgressiveGrouping()),
}


def delayed(delay: float) -> Faults:
    """One peer is (1 + delay) times slower."""
    return Faults(slow=(Slow(SLOW_PEER, 1.0 + delay),)) if delay else Faults()


CHANGING = Faults(slow=(Slow(SLOW_PEER, 4.0, Window(80.0, 200.0)),))
SCENES: Mapping[str, Faults] = {
    "one delayed 300 % from 80 to 200 s": CHANGING,
    "4 of 16 delayed 300 %, one in each of 4 groups": Faults(
        slow=tuple(Slow(peer, 4.0) for peer in range(0, N, 4))
    ),
    "one stands still from 60 to 100 s": Faults(freezes=(Freeze(SLOW_PEER, 60.0, 40.0),)),
}
"""Scenes beyond one constant straggler, for progressive, fixed and synchronous groups."""
SCENE_METHODS = (SYNC, "4 fixed groups", PROGRESSIVE)


def time_of_groups(g: int, delay: float, slow_groups: int, rounds: int) -> float:
    """T(g)/T0 of equal groups of ``TABLE_N`` peers without a model, one peer of each slow group delayed."""
    groups = equal_groups(range(TABLE_N), g)
    slow = tuple(Slow(group[0], 1.0 + delay) for group in groups[:slow_groups])

    def took_s(faults: Faults) -> float:
        work = Work(TABLE_N, 1, TABLE_N * rounds, 0.0, seed=0, net=None, faults=faults)
        return Crew(work).run(Grouped(g)).took_s

    return took_s(Faults(slow=slow)) / took_s(Faults())


def train(method: str, faults: Faults, seed: int, epochs: int) -> Trial:
    """Train digits on 16 peers."""
    work = Work(N, BATCH, epochs * train_size(), LEARNING_RATE, seed, jitter=JITTER, faults=faults)
    trial = Crew(work).run(METHODS[method]())
    trial.method = method
    return trial


def soften(n: int, corrected: bool, seed: int, epochs: int) -> Trial:
    """Train digits by n-softsync of 30 learners; n = 0: hard sync."""
    samples = epochs * train_size()
    work = Work(LEARNERS, BATCH // 2, samples, LEARNING_RATE, seed, jitter=0.1)
    trial = Crew(work).run(Central(SoftSync(n, corrected) if n else SYNCHRONOUS))
    trial.method = ("1/tau" if corrected else "fixed rate") if n else "hard sync"
    return trial


def live(slower: float, seed: int, until_s: float) -> Trained:
    """Train with four peers' live machines for a given time, one of them slower."""
    return train_centrally(
        Training("DNN 1", ProgressiveGrouping(), 4, LIVE_RATE, seed, until_s, slower=slower)
    )


def soft_times(n: int, steps: int) -> Trial:
    """The staleness of n-softsync with 30 learners that train nothing."""
    work = Work(LEARNERS, 1, LEARNERS * steps, 0.0, seed=0, net=None, jitter=0.1)
    return Crew(work).run(Central(SoftSync(n)))


@dataclass(slots=True)
class Results:
    """The measurements.

    table: by (delay, slow groups, g).
    trials: by (delay, method), over seeds.
    scenes: by (scene, method).
    soft: by (n, corrected); n = 0: hard sync.
    staleness: by n.
    live: by how many times slower one of four peers is.
    compensated: by ``compensation.Key``.
    """

    table: dict[tuple[float, int, int], float] = field(default_factory=dict)
    trials: dict[tuple[float, str], list[Trial]] = field(default_factory=lambda: defaultdict(list))
    scenes: dict[tuple[str, str], list[Trial]] = field(default_factory=lambda: defaultdict(list))
    soft: dict[tuple[int, bool], list[Trial]] = field(default_factory=lambda: defaultdict(list))
    staleness: dict[int, Trial] = field(default_factory=dict)
    live: dict[float, list[Trained]] = field(default_factory=lambda: defaultdict(list))
    compensated: dict[compensation.Key, list[Trial]] = field(default_factory=lambda: defaultdict(list))

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "table": [{"delay": d, "slow": k, "g": g, "ratio": r} for (d, k, g), r in self.table.items()],
            "trials": [{"delay": d, **asdict(t)} for (d, _), ts in self.trials.items() for t in ts],
            "scenes": [{"scene": s, **asdict(t)} for (s, _), ts in self.scenes.items() for t in ts],
            "softsync": [{"n": n, **asdict(t)} for (n, _), ts in self.soft.items() for t in ts],
            "staleness": {str(n): asdict(t) for n, t in self.staleness.items()},
            "live": [{"slower": s, **asdict(t)} for s, ts in self.live.items() for t in ts],
            "compensated": [
                {"model": m, "rate": r, "strength": s, **asdict(t)}
                for (m, r, s), ts in self.compensated.items()
                for t in ts
            ],
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs to make."""

    seeds: tuple[int, ...]
    delays: tuple[float, ...]
    epochs: int
    rounds: int
    splits: tuple[int, ...]
    softened: tuple[int, ...]
    soft_steps: int
    complete: bool
    live_s: float = LIVE_S
    compensation_epochs: int = compensation.EPOCHS

    @staticmethod
    def of(*, quick: bool, seeds: int) -> Plan:
        """All runs; quick: enough to see that the claims hold."""
        if quick:
            return Plan(
                seeds=tuple(range(min(2, seeds))),
                delays=(0.0, 1.0, 5.0),
                epochs=EPOCHS,
                rounds=200,
                splits=(1, 5, 15, 30),
                softened=(1, 15, 30),
                soft_steps=600,
                complete=False,
            )
        return Plan(
            seeds=tuple(range(seeds)),
            delays=(0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0),
            epochs=EPOCHS,
            rounds=400,
            splits=SPLITS,
            softened=(1, 2, 5, 15, 30),
            soft_steps=2000,
            complete=True,
        )

    def _table(self) -> list[tuple[float, int, int]]:
        return [(d, k, g) for d, k in TABLE for g in TABLE_G if g >= k]

    def _trials(self) -> list[tuple[float, str, int]]:
        return [(d, m, seed) for d in self.delays for m in METHODS for seed in self.seeds]

    def _scenes(self) -> list[tuple[str, str, int]]:
        return [(scene, m, seed) for scene in SCENES for m in SCENE_METHODS for seed in self.seeds]

    def _soft(self) -> list[tuple[int, bool, int]]:
        kinds = [(0, False), *((n, corrected) for n in self.softened for corrected in (True, False))]
        return [(n, corrected, seed) for n, corrected in kinds for seed in self.seeds]

    def _live(self) -> list[tuple[float, int]]:
        return [(slower, seed) for slower in LIVE_SLOWER for seed in self.seeds]

    def _compensated(self) -> list[tuple[compensation.Key, int]]:
        seeds = self.seeds if self.complete else self.seeds[:1]
        return [(key, seed) for key in compensation.measured() for seed in seeds]

    def jobs(self) -> list[Job]:
        """All measurements."""
        jobs = [Job(f"T({g})", time_of_groups, (g, d, k, self.rounds)) for d, k, g in self._table()]
        jobs += [Job(f"staleness, n = {n}", soft_times, (n, self.soft_steps)) for n in self.splits]
        jobs += [
            Job(f"{m}, delay {d:.0%}, seed {s}", train, (m, delayed(d), s, self.epochs))
            for d, m, s in self._trials()
        ]
        jobs += [
            Job(f"{m}, {scene}, seed {s}", train, (m, SCENES[scene], s, self.epochs))
            for scene, m, s in self._scenes()
        ]
        jobs += [
            Job(f"softsync, n = {n}, seed {s}", soften, (n, c, s, self.epochs)) for n, c, s in self._soft()
        ]
        jobs += [
            Job(f"live machines, one {x:g} times slower, seed {s}", live, (x, s, self.live_s))
            for x, s in self._live()
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
        found.staleness = {n: next(left) for n in self.splits}
        for d, m, _ in self._trials():
            found.trials[d, m].append(next(left))
        for scene, m, _ in self._scenes():
            found.scenes[scene, m].append(next(left))
        for n, c, _ in self._soft():
            found.soft[n, c].append(next(left))
        for slower, _ in self._live():
            found.live[slower].append(next(left))
        for key, _ in self._compensated():
            found.compensated[key].append(next(left))
        return found
