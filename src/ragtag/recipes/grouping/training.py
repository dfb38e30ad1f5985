"""Training without a common pace, in virtual time: peers compute as long as the cost model says.

One process has a heap of ends of steps and timers. A *method* (``methods``) is told of each, and says which
peer begins what and which updates make the next model. It knows only speeds that it has measured. Exchanging
updates takes no time here, so that waiting is compared with staleness alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from ragtag.core.faults import Faults
from ragtag.recipes.tasks.digits import Indices, Net, Pool, train_size
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.loop import Loop

STEP_S = 1.0
"""How long a step of a whole batch takes on a peer that is not delayed."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a run, whatever the method.

    n: peers.
    batch: samples of a peer's step.
    samples: the run ends when so many samples of the shared pool have gone into the model.
    learning_rate: of a step by the mean over the whole crew.
    net: ``None``: no model, only time.
    jitter: sigma of the lognormal factor on each step's time.
    looks: evaluations, evenly over the samples.
    """

    n: int
    batch: int
    samples: int
    learning_rate: float
    seed: int
    net: Net | None = Net()  # noqa: RUF009
    jitter: float = 0.0
    faults: Faults = Faults()  # noqa: RUF009
    looks: int = 24

    def __post_init__(self) -> None:
        if self.n < 1 or self.batch < 1 or self.samples < 1 or self.looks < 1:
            raise ValueError(
                f"work: {self.n} peers, batch {self.batch}, {self.samples} samples, {self.looks} looks; "
                f"all must be 1 or more"
            )


@dataclass(frozen=True, slots=True)
class Update:
    """A peer's step: its samples, and the model (with its version) at which the gradient is taken."""

    peer: int
    samples: Indices
    model: Tensor | None
    version: int
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Look:
    """An evaluation of the model, after so many samples."""

    at_s: float
    samples: int
    loss: float
    accuracy: float


@dataclass(slots=True)
class Trial:
    """The results of a run.

    took_s: until all samples had gone into the model.
    used: samples that went into the model.
    dropped: samples whose gradients were computed and left out.
    busy: share of the peers' time spent computing.
    versions: of the model.
    staleness: how many updates were so many versions old.
    notes: the method's notes, with their times.
    """

    method: str
    seed: int
    took_s: float = 0.0
    used: int = 0
    dropped: int = 0
    busy: float = 0.0
    versions: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)
    notes: list[tuple[float, str]] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Accuracy at the end: the mean of the last fifth of evaluations, as one is a matter of luck."""
        late = self.looks[-max(1, len(self.looks) // 5) :]
        return float(np.mean([look.accuracy for look in late])) if late else float("nan")

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the updates that went into the model."""
        count = sum(self.staleness.values())
        return sum(k * v for k, v in self.staleness.items()) / count if count else 0.0

    def beyond(self, limit: float) -> float:
        """The share of updates that were older than ``limit`` versions."""
        return sum(v for k, v in self.staleness.items() if k > limit) / max(1, sum(self.staleness.values()))

    def reached_s(self, accuracy: float) -> float:
        """When the model first was so accurate, and was so at the next evaluation, too; ``inf``: never."""
        for a, b in zip(self.looks, [*self.looks[1:], self.looks[-1]], strict=True):
            if min(a.accuracy, b.accuracy) >= accuracy:
                return a.at_s
        return float("inf")


class Method(Protocol):
    """Decides which peer begins what, and what becomes of updates."""

    def start(self, crew: Crew) -> None:
        """Set the peers to work."""
        ...

    def computed(self, crew: Crew, update: Update) -> None:
        """A peer has ended a step."""
        ...


class Crew:
    """The peers, the model and the clock."""

    def __init__(self, work: Work) -> None:
        self.work, self.n, self.version = work, work.n, 0
        self.model: Tensor | None = work.net.initial(work.seed) if work.net else None
        self.used = self.dropped = 0
        self.staleness: Counter[int] = Counter()
        self.looks: list[Look] = []
        self.notes: list[tuple[float, str]] = []
        self.measured = Measured()
        self.mean_model: Callable[[], Tensor | None] = lambda: self.model
        self._cost = ComputeCost(STEP_S / work.batch, sigma=work.jitter, seed=work.seed)
        self._pool = Pool(train_size() if work.net else work.samples, work.seed)
        self._loop = Loop()
        self._steps = [0] * work.n
        self._busy_s = 0.0

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self._loop.now_s

    def run(self, method: Method) -> Trial:
        """Work until all samples are in the model. Raises RuntimeError: all peers stop before that."""
        method.start(self)
        self._method = method
        while self.used < self.work.samples:
            if not self._loop.next():
                raise RuntimeError(
                    f"{type(method).__name__}: all peers stand still after {self.used} of "
                    f"{self.work.samples} samples, at {self.now_s:g} s"
                )
        return Trial(
            method=type(method).__name__,
            seed=self.work.seed,
            took_s=self.now_s,
            used=self.used,
            dropped=self.dropped,
            busy=self._busy_s / (self.n * self.now_s),
            versions=self.version,
            staleness=dict(sorted(self.staleness.items())),
            looks=self.looks,
            notes=self.notes,
        )

    def at(self, at_s: float, then: Callable[[], None]) -> None:
        """Call ``then`` at ``at_s``. Of calls at one time the one that was asked for first comes first."""
        self._loop.at(at_s, then)

    def begin(self, peer: int, samples: int | None = None, model: Tensor | None = None) -> None:
        """A peer takes samples (a batch) from the pool, the newest model (or its own), and computes."""
        taken = self._pool.take(self.work.batch if samples is None else samples)
        step, began_s = self._steps[peer], self.now_s
        self._steps[peer] += 1
        ended_s = self._cost.ends_s(peer, step, len(taken), began_s, self.work.faults)
        if ended_s == float("inf"):
            return  # it crashes
        mine = self.model if model is None else model
        update = Update(peer, taken, mine, self.version, began_s, ended_s)

        def ended() -> None:
            self._busy_s += ended_s - began_s
            self._method.computed(self, update)

        self.at(ended_s, ended)

    def step(self, updates: Sequence[tuple[Update, float]]) -> None:
        """Make the next version: the model moves by the mean of updates, weighted by samples, each times its
        scale. Updates at one model are one gradient."""
        for update, _ in updates:
            self.staleness[self.version - update.version] += 1
        if self.work.net is not None:
            assert self.model is not None
            self.model = self.model - self.work.learning_rate * self.mean_gradient(updates)
        self.version += 1
        self.count(sum(len(update.samples) for update, _ in updates))

    def mean_gradient(self, updates: Sequence[tuple[Update, float]]) -> Tensor:
        """The updates' mean, weighted by samples, each times its scale."""
        assert self.work.net is not None
        total = sum(len(update.samples) for update, _ in updates)
        by_model: dict[int, list[tuple[Update, float]]] = defaultdict(list)
        for update, scale in updates:
            by_model[id(update.model)].append((update, scale / total))
        found: Tensor | None = None
        for same in by_model.values():
            indices = np.concatenate([update.samples for update, _ in same])
            weights = np.concatenate([np.full(len(u.samples), s, np.float32) for u, s in same])
            model = same[0][0].model
            assert model is not None
            part = self.work.net.gradient(model, indices, weights)
            found = part if found is None else found + part
        assert found is not None
        return found

    def count(self, samples: int) -> None:
        """So many samples have gone into the model: evaluate it where that is due."""
        every = self.work.samples / self.work.looks
        due = int((self.used + samples) / every) > int(self.used / every)
        self.used += samples
        model = self.mean_model()
        if due and self.work.net is not None and model is not None:
            self.looks.append(Look(self.now_s, self.used, *self.work.net.look(model)))

    def drop(self, update: Update) -> None:
        """Leave an update out."""
        self.dropped += len(update.samples)

    def note(self, what: str) -> None:
        """Note something for a reader of the results."""
        self.notes.append((self.now_s, what))


class Measured:
    """Measured step times: for each peer the median of the last few."""

    WINDOW = 5

    def __init__(self) -> None:
        self._last: dict[int, list[float]] = defaultdict(list)
        self._step_s: dict[int, float] = {}

    def add(self, update: Update) -> None:
        """A step has ended."""
        last = [*self._last[update.peer][1 - self.WINDOW :], update.ended_s - update.began_s]
        self._last[update.peer] = last
        self._step_s[update.peer] = sorted(last)[len(last) // 2]

    def step_s(self) -> dict[int, float]:
        """Seconds per step of each peer that has ended one."""
        return dict(self._step_s)
