"""Training without a common pace, in virtual time: each peer runs a user's training loop.

Peers compute as long as the cost model says, take samples from one pool, and step by
``training.optimizer.CrewOptimizer`` over ``simulation.transport``. Schedules, groups, barriers, deadlines and
the central state are the library's own. Nobody is told who is slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import fp32
from ragtag.core.faults import Faults
from ragtag.core.schema import ALIGN
from ragtag.core.types import Noted, Outcome, PeerId
from ragtag.recipes.tasks.digits import Indices, Net, Pool, train_size
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer

STEP_S = 1.0
"""How long a step of a whole batch takes on a peer that is not delayed."""
LATENCY_S = 1e-4
"""One-way delay of the lines: what is compared is waiting against staleness, not how long a message takes."""
SETTLED = 3
"""In a peer's first steps a central state has no other deadlines than a probe's, far shorter than a step."""


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
    faults: Faults = Faults(latency_s=LATENCY_S)  # noqa: RUF009
    looks: int = 24

    def __post_init__(self) -> None:
        if self.n < 1 or self.batch < 1 or self.samples < 1 or self.looks < 1:
            raise ValueError(
                f"work: {self.n} peers, batch {self.batch}, {self.samples} samples, {self.looks} looks; "
                f"all must be 1 or more"
            )


@dataclass(frozen=True, slots=True)
class Method:
    """How a crew trains.

    options: the arguments of ``crew.optimizer``, for this work.
    micro: micro-batches of a step; each is a local step of the optimizer.
    keeps: each peer has a model of its own, which keeps its update whatever an average comes to.
    """

    options: Callable[[Work], Mapping[str, Any]]
    micro: int = 1
    keeps: bool = False


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
    half_s: until half of them had.
    half_dropped: samples left out until then.
    used: samples that went into the model.
    dropped: samples whose gradients were computed and left out.
    alone: samples that went into a peer's own model only: it has been in no average with others since.
    busy: share of the peers' time spent computing.
    lead: by how many steps a peer was ahead of the slowest at most, in the second half.
    staleness: how many updates in the model were so many versions old, but for each peer's first ``SETTLED``.
    notes: what machines noted (kind and detail), with their times.
    """

    method: str
    seed: int
    took_s: float = 0.0
    half_s: float = 0.0
    half_dropped: int = 0
    used: int = 0
    dropped: int = 0
    alone: int = 0
    busy: float = 0.0
    lead: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)
    notes: list[tuple[float, str, str]] = field(default_factory=list)

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

    @property
    def settled_s(self) -> float:
        """The time of the second half, twice: speeds and deadlines are known by then."""
        return 2 * (self.took_s - self.half_s)

    @property
    def left_out(self) -> float:
        """The share of samples whose gradients were computed and left out, in the second half."""
        dropped = self.dropped - self.half_dropped
        return dropped / max(1, self.used / 2 + dropped)

    @property
    def kept_alone(self) -> float:
        """The share of used samples that are in a peer's own model only."""
        return self.alone / max(1, self.used)

    def beyond(self, limit: float) -> float:
        """The share of updates that were older than ``limit`` versions."""
        return sum(v for k, v in self.staleness.items() if k > limit) / max(1, sum(self.staleness.values()))

    def reached_s(self, accuracy: float) -> float:
        """When the model first was so accurate, and was so at the next evaluation, too; ``inf``: never."""
        for a, b in zip(self.looks, [*self.looks[1:], self.looks[-1]], strict=True):
            if min(a.accuracy, b.accuracy) >= accuracy:
                return a.at_s
        return float("inf")


def train(name: str, work: Work, method: Method) -> Trial:
    """Train until all samples are in the model.

    Raises simulation.transport.Stuck: all peers stand still before that.
    """
    torch.set_num_threads(1)
    return _Training(name, work, method).run()


class Values(nn.Module):
    """A model that is one vector. Its gradient is written out by the task, in numpy."""

    def __init__(self, first: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(first.clone())


def one_chunk(size: int) -> Codec:
    """Values as they are, in one chunk: a central state then has one block, as the papers' server has."""
    return fp32._replace(elements=-(-size // ALIGN) * ALIGN)


class _Training:
    """The training of all peers, with evaluations on the way."""

    def __init__(self, name: str, work: Work, method: Method) -> None:
        self._work, self._method = work, method
        self._trial = Trial(name, work.seed)
        self._first = work.net.initial(work.seed) if work.net else torch.zeros(ALIGN)
        self._pool = Pool(train_size() if work.net else work.samples, work.seed)
        self._steps = [0] * work.n
        self._busy_s = 0.0
        self._staleness: Counter[int] = Counter()
        self._alone: Counter[PeerId] = Counter()
        cost = ComputeCost(STEP_S / work.batch, sigma=work.jitter, seed=work.seed)
        self._crew = SimulatedCrew(work.n, work.faults, work.seed, cost=cost, on_note=self._noted)

    def run(self) -> Trial:
        trial = self._trial
        self._crew.run(lambda peer: _Trainee(self, peer).train())
        trial.staleness = dict(sorted(self._staleness.items()))
        trial.alone = self._alone.total()
        return trial

    # -- What one peer's loop asks and tells

    @property
    def work(self) -> Work:
        """The work of all peers."""
        return self._work

    @property
    def over(self) -> bool:
        """Whether all samples are in the model."""
        return self._trial.used >= self._work.samples

    def optimizer(self, model: Values, peer: SimulatedTransport, **told: Any) -> CrewOptimizer:
        """The optimizer that a script would ask its crew for."""
        with torch.no_grad():
            model.values.copy_(self._first)
        inner = torch.optim.SGD(model.parameters(), lr=self._work.learning_rate)
        asked = {"codec": one_chunk(len(self._first) + ALIGN), **self._method.options(self._work)}
        return CrewOptimizer(
            inner, peer, model=model, weight="samples", seed=self._work.seed, **told, **asked
        )

    def samples(self) -> Indices:
        """The samples of a peer's next local step."""
        return self._pool.take(self._work.batch // self._method.micro)

    def computed(self, peer: PeerId, for_s: float) -> None:
        """A peer has computed a local step."""
        self._steps[peer] += 1
        self._busy_s += for_s
        if self._trial.half_s and not self.over:
            self._trial.lead = max(self._trial.lead, self._steps[peer] - min(self._steps))

    def averaged(self, peer: PeerId, samples: int, model: Values, now_s: float, outcome: Outcome) -> None:
        """A peer's samples are in the model or not; what has come from the crew is in its own model."""
        trial, work = self._trial, self._work
        if self.over or not samples:
            return
        heard = int(outcome.heard[0])
        joins = bool(outcome.averaged.all()) and heard >> peer & 1 == 1
        if self._method.keeps:
            self._alone[peer] = 0 if joins and heard.bit_count() > 1 else self._alone[peer] + samples
        if self._method.keeps or joins:
            if self._steps[peer] > SETTLED:
                self._staleness.update(outcome.stale or ())
            every = work.samples / work.looks
            due = int((trial.used + samples) / every) > int(trial.used / every)
            trial.used += samples
            if due and work.net is not None:
                trial.looks.append(Look(now_s, trial.used, *work.net.look(model.values.detach())))
        else:
            trial.dropped += samples
        if not trial.half_s and 2 * trial.used >= work.samples:
            trial.half_s, trial.half_dropped = now_s, trial.dropped
        if self.over:
            trial.took_s, trial.busy = now_s, self._busy_s / (work.n * now_s)

    def _noted(self, peer: PeerId, now_s: float, note: Noted) -> None:
        if not self.over:
            self._trial.notes.append((now_s, note.what, note.detail))


class _Trainee:
    """One peer: its model, its optimizer, and the body of a user's training loop."""

    def __init__(self, training: _Training, peer: SimulatedTransport) -> None:
        self._training, self._peer = training, peer
        self._model = Values(torch.zeros(training.work.net.size if training.work.net else ALIGN))
        self._taken = self._pending = 0
        self._optimizer = training.optimizer(
            self._model, peer, samples=lambda: self._taken, on_outcome=self._averaged
        )

    def train(self) -> None:
        training, peer, values = self._training, self._peer, self._model.values
        net = training.work.net
        values.grad = torch.zeros_like(values)
        while not training.over:
            at = training.samples()
            if net is not None:
                even = np.full(len(at), 1 / len(at), np.float32)
                with np.errstate(over="ignore", invalid="ignore"):  # a run may diverge
                    values.grad.copy_(net.gradient(values.detach(), at, even))
            began_s = peer.now_s()
            peer.compute(len(at))
            training.computed(peer.me, peer.now_s() - began_s)
            self._taken += len(at)
            self._pending += len(at)
            self._optimizer.step()

    def _averaged(self, outcome: Outcome) -> None:
        samples, self._pending = self._pending, 0
        self._training.averaged(self._peer.me, samples, self._model, self._peer.now_s(), outcome)
