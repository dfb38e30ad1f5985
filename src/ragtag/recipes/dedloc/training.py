"""Trains a crew that gathers towards a target batch, one in lockstep, and one process with the large batch.

Each peer of a crew runs a user's training loop, ``CrewOptimizer`` over gradients, in virtual time. Its
samples are drawn for it alone, and each is used once. What a step of the crew made of the model is seen at
peer 0, which neither dies nor freezes.

A crew in lockstep is one without a target: each peer computes the same part of the large batch, in as many
small batches as a peer with a target would need for it, and all average.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.core.types import PEERS_MAX, Outcome, PeerId
from ragtag.recipes.abreast import Keeps
from ragtag.recipes.base import worst
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.account import Account
from ragtag.training.optimizer.optimizer import CrewOptimizer

GATHERS, LOCKSTEP = "target batch", "lockstep"
CALM, FAULTY = "calm", "peers die and freeze, 2 % lost"
CHANGING = "members change every 10 steps, 2 % lost"
CHANGE = 10
"""After so many steps some members die, and as many others come."""
INPUTS, CLASSES = 16, 4
RATE, MOMENTUM = 2.0, 0.9
"""RATE: over the hidden units, as with the same rate a wider network's outputs move farther."""
SAMPLE_S = 0.02
"""What a sample takes on a peer of speed 1; the fastest peer has speed 4."""
JITTER = 0.2
LOST = 0.02
FROZEN_STEPS = 3.0
"""How long a peer is frozen, in steps of the calm crew."""
HELD_OUT = 4096


@dataclass(frozen=True, slots=True)
class CrewSetup:
    """A crew and its work.

    target: samples of a step.
    batch: samples of a peer's batch.
    steps: of the crew.
    change: in a faulty world a peer dies each time that a calm crew takes so many steps, and one freezes each
        time that it takes twice as many.
    """

    peers: int
    target: int
    batch: int
    steps: int
    change: int

    @property
    def hidden(self) -> int:
        """Hidden units of the model: so many that it has a chunk for each peer to own, and no more."""
        return (self.peers * fp32.elements - CLASSES) // (INPUTS + 1 + CLASSES)

    def changes(self, world: str) -> list[int]:
        """Before which steps a member dies and another comes: where members change, one of sixteen each time.
        All together have no more than ``PEERS_MAX`` seats.
        """
        if world != CHANGING:
            return []
        return [at for at in range(CHANGE, self.steps, CHANGE) for _ in range(max(1, self.peers // 16))]

    def founders(self, world: str) -> int:
        """So many peers are there from the beginning, and while members change."""
        return min(self.peers, PEERS_MAX - len(self.changes(world)))

    def comes(self, world: str) -> dict[PeerId, float]:
        """When the other peers come, by peer."""
        first, step_s = self.founders(world), self.step_s(world)
        return {first + n: at * step_s for n, at in enumerate(self.changes(world))}

    def speeds(self, world: str) -> list[float]:
        """Of all peers: 1 to 4, evenly, in an order without a pattern. One that comes is as fast as the one
        that dies then.
        """
        n = self.founders(world)
        own = [1.0 + 3.0 * (7 * peer % n) / max(1, n - 1) for peer in range(n)]
        return own + own[1 : 1 + len(self.changes(world))]

    def samples_per_s(self, world: str) -> float:
        """What all peers compute together, while none is dead or frozen."""
        return sum(self.speeds(world)[: self.founders(world)]) / SAMPLE_S

    def step_s(self, world: str) -> float:
        """How long a step takes them, if they do nothing else."""
        return self.target / self.samples_per_s(world)

    def faults(self, world: str) -> Faults:
        """Those of a world. Raises ValueError: there is no such world."""
        lines: dict[str, Any] = {"latency_s": 0.02, "rate_bytes_per_s": 1e8}
        if world == CALM:
            return Faults(**lines)
        lines["loss"] = Loss(LOST)
        if world == CHANGING:
            times_s = self.comes(world).values()
            return Faults(**lines, crashes=tuple(Crash(1 + n, at_s) for n, at_s in enumerate(times_s)))
        if world != FAULTY:
            raise ValueError(f"world {world!r}; there are {CALM!r}, {FAULTY!r} and {CHANGING!r}")
        step_s = self.step_s(world)
        deaths = min(self.peers // 2, (self.steps - 1) // self.change)
        dies = (Crash(1 + at, (1 + at) * self.change * step_s) for at in range(deaths))
        freezes = (
            Freeze(self.peers - 1 - at, (2 * at + 0.5) * self.change * step_s, FROZEN_STEPS * step_s)
            for at in range((1 + deaths) // 2)
        )
        return Faults(**lines, crashes=tuple(dies), freezes=tuple(freezes))

    def computable(self, world: str, until_s: float) -> float:
        """Samples that peers of a world compute while they live and run, if they do nothing else."""
        faults, comes, found = self.faults(world), self.comes(world), 0.0
        for peer, speed in enumerate(self.speeds(world)):
            ends_s = min([until_s, *(crash.at_s for crash in faults.crashes if crash.peer == peer)])
            ends_s -= min(ends_s, comes.get(peer, 0.0))
            for freeze in faults.freezes:
                if freeze.peer == peer:
                    ends_s -= max(0.0, min(freeze.for_s, until_s - freeze.at_s))
            found += speed / SAMPLE_S * ends_s
        return found


@dataclass(slots=True)
class CrewRun:
    """What a crew came to. Lists have an entry for each of its steps.

    rule: ``GATHERS`` or ``LOCKSTEP``.
    losses: on samples held out.
    ended_s: in virtual time.
    samples: in the mean; of a mean of which parts did not come, what came of them.
    useful: samples in means: with a target by the accounts of all peers, dead ones' at their last mean.
    survivors: peers that finished.
    computed, counted, pending, dropped: by the accounts of the survivors, with a target (else nothing).
    unaccounted: the largest difference in one peer's account between computed and what became of it.
    overshoot: of peer 0's account.
    replayed: losses of one process that takes each step on the very samples that peers counted in it: of a
        calm crew with a target (else nothing).
    """

    setup: CrewSetup
    rule: str
    world: str
    seed: int
    losses: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    useful: float = 0.0
    survivors: int = 0
    computed: float = 0.0
    counted: float = 0.0
    pending: float = 0.0
    dropped: dict[str, float] = field(default_factory=dict)
    unaccounted: float = 0.0
    overshoot: float = 0.0
    replayed: list[float] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Samples in means over what all peers, none dead or frozen, would have computed in the time."""
        return self.useful / (self.setup.samples_per_s(self.world) * self.ended_s[-1])

    @property
    def used(self) -> float:
        """Samples in means over what peers would have computed in the time while they lived and ran."""
        return self.useful / self.setup.computable(self.world, self.ended_s[-1])

    def reached_s(self, loss: float) -> float:
        """When the loss was first so low; infinite: never."""
        ends = zip(self.ended_s, self.losses, strict=True)
        return next((at_s for at_s, now in ends if now <= loss), math.inf)

    @property
    def replay_apart(self) -> float:
        """The largest difference of a step's loss from that of one process on the same samples; NaN, which no
        row passes: there is none for each step.
        """
        if len(self.losses) != len(self.replayed):
            return math.nan
        return worst(abs(a - b) for a, b in zip(self.losses, self.replayed, strict=True))

    def account(self, accounts: list[Account]) -> None:
        """Take down what became of the survivors' samples."""
        for of in accounts:
            self.computed += of.computed
            self.counted += of.counted
            self.pending += of.pending
            for why, n in of.dropped.items():
                self.dropped[why] = self.dropped.get(why, 0.0) + n
            known = of.counted + of.pending + sum(of.dropped.values())
            self.unaccounted = worst((self.unaccounted, abs(of.computed - known)))


def drawn_samples(seed: int, whose: int, at: int, n: int) -> tuple[Tensor, Tensor]:
    """Inputs ``[n, INPUTS]`` and labels ``[n]`` of a problem that a small network solves in part.

    whose: -1: held out; -2: of the one process; else a peer's. at: the number of the batch.
    """
    meant = random.generator(0, "dedloc classes").standard_normal((INPUTS, CLASSES))
    rng = random.generator(seed, "dedloc samples", 2 + whose, at)
    x = rng.standard_normal((n, INPUTS))
    y = (x @ meant + rng.standard_normal((n, CLASSES))).argmax(1)
    return torch.from_numpy(x).float(), torch.from_numpy(y)


def first_model(hidden: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model that all begin with, with so many hidden units, and its optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.stream_key(0, "dedloc model") % (1 << 63))
        model = nn.Sequential(nn.Linear(INPUTS, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))
    return model, torch.optim.SGD(model.parameters(), lr=RATE / hidden, momentum=MOMENTUM)


def large_batch(setup: CrewSetup, seed: int) -> list[float]:
    """The loss on samples held out after each step of one process with the large batch."""
    batches = (drawn_samples(seed, -2, step, setup.target) for step in range(setup.steps))
    return _alone(batches, setup.hidden)


def _alone(batches: Iterable[tuple[Tensor, Tensor]], hidden: int) -> list[float]:
    """The loss on samples held out after each step of one process."""
    torch.set_num_threads(1)
    model, sgd = first_model(hidden)
    judges = drawn_samples(0, -1, 0, HELD_OUT)
    losses = []
    for x, y in batches:
        sgd.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        sgd.step()
        losses.append(_loss(model, judges))
    return losses


class CountedBatches:
    """Which batches are in which step of a crew, by what its peers' accounts say of them.

    batches: of each step: the peer and the number of its batch.
    """

    def __init__(self, setup: CrewSetup, seed: int) -> None:
        self._setup, self._seed = setup, seed
        self._gathered: dict[PeerId, list[int]] = {}
        self._before: dict[PeerId, float] = {}
        self.batches: dict[int, list[tuple[PeerId, int]]] = {}

    def computed(self, peer: PeerId, at: int) -> None:
        """A peer has computed a batch."""
        self._gathered.setdefault(peer, []).append(at)

    def averaged(self, peer: PeerId, step: int, counted: float) -> None:
        """A step is over at a peer, which has counted so many samples since it began."""
        gathered, before = self._gathered.pop(peer, []), self._before.get(peer, 0.0)
        self._before[peer] = counted
        if counted - before == len(gathered) * self._setup.batch:
            self.batches.setdefault(step, []).extend((peer, at) for at in gathered)

    def replay(self) -> list[float]:
        """The loss after each step of one process that takes these samples."""
        return _alone((self._samples(step) for step in range(self._setup.steps)), self._setup.hidden)

    def _samples(self, step: int) -> tuple[Tensor, Tensor]:
        drawn = [
            drawn_samples(self._seed, peer, at, self._setup.batch) for peer, at in self.batches.get(step, [])
        ]
        x, y = zip(*drawn, strict=True) if drawn else ([torch.zeros(0, INPUTS)], [torch.zeros(0).long()])
        return torch.cat(x), torch.cat(y)


def crew_run(setup: CrewSetup, rule: str, world: str, seed: int) -> CrewRun:
    """Train a crew in a world by a rule. Raises ValueError: there is no such world or rule."""
    if rule not in (GATHERS, LOCKSTEP):
        raise ValueError(f"rule {rule!r}; there are {GATHERS!r} and {LOCKSTEP!r}")
    torch.set_num_threads(1)
    found, judges = CrewRun(setup, rule, world, seed), drawn_samples(0, -1, 0, HELD_OUT)
    cost = ComputeCost(SAMPLE_S, setup.speeds(world), JITTER, seed)
    useful: dict[PeerId, float] = {}
    shared = CountedBatches(setup, seed)

    def train(peer: SimulatedTransport) -> Account | None:
        model, sgd = first_model(setup.hidden)
        how: dict[str, Any] = {"method": "allreduce", "average": "gradients", "seed": seed}
        batches = 1
        if rule == GATHERS:
            how |= {"target_batch": setup.target, "weight": setup.batch}
        else:
            batches = setup.target // (setup.peers * setup.batch)
            how |= {"weight": batches * setup.batch}

        def over(outcome: Outcome) -> None:
            if peer.me == 0:
                found.losses.append(_loss(model, judges))
                found.ended_s.append(peer.now_s())
                found.samples.append(samples_of(outcome))
            if optimizer.samples is not None:
                useful[peer.me] = optimizer.samples.counted
                shared.averaged(peer.me, outcome.round, optimizer.samples.counted)

        keeps = Keeps(peer, seed, over)
        optimizer = CrewOptimizer(sgd, peer, model=model, **how, **keeps.hooks)
        at = 0
        while optimizer.outcome is None or optimizer.outcome.round + 1 < setup.steps:
            for _ in range(batches):
                peer.compute(setup.batch)
                x, y = drawn_samples(seed, peer.me, at, setup.batch)
                loss = F.cross_entropy(model(x), y) / batches
                loss.backward()  # type: ignore[no-untyped-call]
                shared.computed(peer.me, at)
                at += 1
            optimizer.step()
            optimizer.zero_grad()
        optimizer._averaged.settle()
        if peer.me == 0 and optimizer.samples is not None:
            found.overshoot = optimizer.samples.overshoot
        return optimizer.samples or Account(setup.target)

    comes = setup.comes(world)
    n = setup.founders(world) + len(comes)
    accounts = SimulatedCrew(n, setup.faults(world), seed, cost=cost, comes=comes).run(train)
    living = [account for account in accounts if account is not None]
    found.survivors = len(living)
    found.useful = sum(useful.values()) if rule == GATHERS else sum(found.samples)
    found.account(living)
    if rule == GATHERS and world == CALM:
        found.replayed = shared.replay()
    return found


def samples_of(outcome: Outcome) -> float:
    """Samples in a round's mean, on the average of its chunks; a chunk that did not come has none."""
    return float((outcome.weight * outcome.averaged).mean())


def window_means(losses: list[float], size: int) -> list[float]:
    """Means over windows of so many steps."""
    return [fmean(losses[at : at + size]) for at in range(0, len(losses) - size + 1, size)]


@torch.no_grad()
def _loss(model: nn.Module, judges: tuple[Tensor, Tensor]) -> float:
    return float(F.cross_entropy(model(judges[0]), judges[1]))
