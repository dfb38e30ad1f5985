"""Trains a net by each method: in one process with the joint batch, or in a crew in virtual time.

Each peer of a crew runs a user's training loop: ``CrewOptimizer`` over gradients, and K-FAC with the crew's
communicator, over ``simulation.transport``.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ragtag.core import seed as random
from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.optim.kfac.communicator import Needs
from ragtag.optim.kfac.preconditioner import KFAC
from ragtag.recipes.abreast import Keeps
from ragtag.recipes.tasks.images import load
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.kfac import CrewCommunicator, CrewSteps, Placement
from ragtag.training.optimizer.optimizer import CrewOptimizer

SGD_NAME, ADAMW_NAME, MUON_NAME, KFAC_NAME = "SGD", "AdamW", "Muon", "K-FAC"
SOAP_NAME, SHAMPOO_NAME = "SOAP", "Distributed Shampoo"
EXTRAS = (SOAP_NAME, SHAMPOO_NAME)
"""Methods of the package ``pytorch_optimizer`` (``ragtag[optimizers]``); without it they are left out."""
TARGET, LOOKS = 0.95, 5
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4
WARM_UP = 5
"""Steps in which the learning rate rises; over the rest it falls to 0 (cosine)."""
PEERS, BATCH = 8, 256
FACTOR_DECAY, FACTOR_EVERY, INVERSE_EVERY = 0.8, 5, 5
STEP_S, BEGINS_S = 0.5, 5.0
"""How long a step takes in virtual time, and when the first one begins: all channels are open by then."""
CALM, KILL_AND_FREEZE = "calm", "10 % lost, one killed, one frozen for 5 s"
MANY_CALM, MANY_CHURN = "64 peers, calm", "64 peers, 5 % lost, four killed, four frozen for 5 s"


@dataclass(frozen=True, slots=True)
class FaultyCrew:
    """A crew's size, and what goes wrong in it.

    calm: the name of the world of as many peers in which nothing does.
    """

    peers: int = PEERS
    calm: str = CALM
    faults: Mapping[str, Any] = field(default_factory=dict)


def _crash(peer: int, after: float) -> Crash:
    return Crash(peer, BEGINS_S + after * STEP_S)


def _freeze(peer: int, after: float) -> Freeze:
    return Freeze(peer, BEGINS_S + after * STEP_S, 5.0)


WORLDS: Mapping[str, FaultyCrew] = {
    CALM: FaultyCrew(),
    "5 % lost": FaultyCrew(faults={"loss": Loss(0.05)}),
    "10 % lost": FaultyCrew(faults={"loss": Loss(0.1)}),
    KILL_AND_FREEZE: FaultyCrew(
        faults={"loss": Loss(0.1), "crashes": (_crash(1, 15.3),), "freezes": (_freeze(2, 25.3),)}
    ),
    MANY_CALM: FaultyCrew(64, MANY_CALM),
    MANY_CHURN: FaultyCrew(
        64,
        MANY_CALM,
        {
            "loss": Loss(0.05),
            "crashes": tuple(_crash(8 * at + 1, 6.3 + 5 * at) for at in range(4)),
            "freezes": tuple(_freeze(8 * at + 2, 8.3 + 5 * at) for at in range(4)),
        },
    ),
}
"""Crews by name, calm ones before those that are compared with them."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A method and its settings.

    lr: of the method, or of the SGD behind K-FAC.
    rest_lr: of the AdamW that takes the steps of what is no matrix, beside Muon.
    damping, kl_clip: K-FAC's.
    """

    method: str
    lr: float
    rest_lr: float = 0.0
    damping: float = 0.0
    kl_clip: float = 0.0

    @property
    def text(self) -> str:
        """The settings in words."""
        parts = [f"lr {self.lr:g}"]
        parts += [f"{self.rest_lr:g} for what is no matrix"] if self.rest_lr else []
        parts += [f"damping {self.damping:g}, clip {self.kl_clip:g}"] if self.damping else []
        return ", ".join(parts)


def _grid(method: str, *tried: Mapping[str, float]) -> tuple[Settings, ...]:
    return tuple(Settings(method, **how) for how in tried)


GRIDS: Mapping[str, tuple[Settings, ...]] = {
    SGD_NAME: _grid(SGD_NAME, *({"lr": lr} for lr in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3))),
    ADAMW_NAME: _grid(ADAMW_NAME, *({"lr": lr} for lr in (0.003, 0.005, 0.01, 0.015, 0.02, 0.03))),
    MUON_NAME: _grid(
        MUON_NAME,
        *({"lr": lr, "rest_lr": rest} for rest in (0.01, 0.02) for lr in (0.03, 0.1, 0.3)),
    ),
    KFAC_NAME: _grid(
        KFAC_NAME,
        *({"lr": 0.1, "damping": d, "kl_clip": c} for d, c in ((0.03, 0.01), (0.1, 0.01), (0.1, 0.001))),
        *({"lr": 0.3, "damping": d, "kl_clip": c} for d, c in ((0.1, 0.01), (0.3, 0.01), (0.1, 0.001))),
    ),
    SOAP_NAME: _grid(SOAP_NAME, *({"lr": lr} for lr in (0.003, 0.005, 0.01, 0.015, 0.02, 0.03))),
    SHAMPOO_NAME: _grid(SHAMPOO_NAME, *({"lr": lr} for lr in (0.02, 0.04, 0.06, 0.08, 0.1, 0.15))),
}
"""As many settings for each method."""
IMAGE_GRIDS: Mapping[str, tuple[Settings, ...]] = {
    SGD_NAME: _grid(SGD_NAME, *({"lr": lr} for lr in (0.1, 0.2, 0.25, 0.3, 0.45, 0.65, 0.9))),
    KFAC_NAME: _grid(
        KFAC_NAME,
        *({"lr": lr, "damping": 0.03, "kl_clip": 0.003} for lr in (0.15, 0.3, 0.6)),
        *({"lr": 0.3, "damping": damping, "kl_clip": 0.003} for damping in (0.01, 0.1)),
        *({"lr": 0.3, "damping": 0.03, "kl_clip": clip} for clip in (0.001, 0.01)),
    ),
}
"""The same for whole images, of the two methods that the claim is about. K-FAC: one setting at a time."""


def methods() -> list[str]:
    """Those that can be run here: all, or all but ``EXTRAS``."""
    there = importlib.util.find_spec("pytorch_optimizer") is not None
    return [method for method in GRIDS if there or method not in EXTRAS]


@dataclass(slots=True)
class TrainedNet:
    """What a run came to.

    accuracy, loss: on samples held out, at the end.
    curve: accuracy after each tenth of the steps.
    reached: the step at which ``TARGET`` was the mean of the last five steps' accuracies (digits only; more
        than ``steps``: never).
    step_cpu_s: processor time of a step of one process, in the mean: only some decompose factors.
    step_s: a step of peer 0 in virtual time, in the mean.
    longest: steps of a peer in virtual time: the longest over the middle one.
    bytes_sent: by one peer of a crew, mean over those that live.
    oldest: of the bases that gradients were preconditioned with, how many averages of factors behind at most.
    values: of the model, where they are asked for.
    """

    settings: Settings
    seed: int
    steps: int
    accuracy: float = 0.0
    loss: float = 0.0
    curve: list[float] = field(default_factory=list)
    reached: int = 0
    step_cpu_s: float = 0.0
    step_s: float = 0.0
    longest: float = 0.0
    bytes_sent: float = 0.0
    oldest: int = 0
    values: list[float] = field(default_factory=list)


def first_at(target: float, looks: Sequence[float]) -> int:
    """The first step from which on five looks, one a step, have ``target`` as their mean; one more than there
    are: none.
    """
    for at in range(LOOKS, len(looks) + 1):
        if fmean(looks[at - LOOKS : at]) >= target:
            return at
    return len(looks) + 1


def small_net() -> nn.Sequential:
    """For 8 x 8 digits: a convolutional net of 9,802 values, with weights as torch draws them next."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


class _Block(nn.Module):
    """Two convolutions and a way around them (He et al., CVPR 2016), with group normalisation."""

    def __init__(self, into: int, width: int) -> None:
        super().__init__()
        stride = 1 if into == width else 2
        self.first = nn.Conv2d(into, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2))
        self.around = nn.Conv2d(into, width, 1, stride, bias=False) if into != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + self.around(x))


def deep_resnet(depth: int = 8, width: int = 16) -> nn.Sequential:
    """For 32 x 32 colour images: a ResNet of ``6 n + 2`` layers (He et al., CVPR 2016, section 4.2).

    Raises:
        ValueError: no whole n makes so many layers.
    """
    n, rest = divmod(depth - 2, 6)
    if n < 1 or rest:
        raise ValueError(f"a ResNet of {depth} layers: give 8, 14, 20 or another 6 n + 2")
    widths = (width, *(k * width for k in (1, 2, 4) for _ in range(n)))
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.GroupNorm(4, width),
        nn.ReLU(),
        *(_Block(into, out) for into, out in pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


class Images:
    """Images, a net for them, and joint batches."""

    def __init__(self, data: Path | None) -> None:
        task = load(data)
        self.digits = data is None
        x, self.y, test_x, self.test_y = task.train_x, task.train_y, task.test_x, task.test_y
        if self.digits:
            self.x, self.test_x = 2 * x - 1, 2 * test_x - 1
        else:
            self.x, self.test_x = x, test_x  # bytes: a batch at a time is made to floats

    def net(self, seed: int) -> nn.Sequential:
        """A net, its weights drawn from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(random.stream_key(seed, "kfac net") % (1 << 63))
            return small_net() if self.digits else deep_resnet()

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Joint batches for ever, each epoch in a new order."""
        rng = random.generator(seed, "kfac batches")
        while True:
            order = torch.from_numpy(rng.permutation(len(self.y)))
            for at in range(0, len(order) - BATCH + 1, BATCH):
                chosen = order[at : at + BATCH]
                yield _floats(self.x[chosen]), self.y[chosen]

    @torch.no_grad()
    def look(self, net: nn.Module) -> tuple[float, float]:
        """Accuracy and loss on what is held out."""
        right, loss = 0, 0.0
        for at in range(0, len(self.test_y), 1000):
            x, y = _floats(self.test_x[at : at + 1000]), self.test_y[at : at + 1000]
            scores = net(x)
            right += int((scores.argmax(1) == y).sum())
            loss += float(F.cross_entropy(scores, y, reduction="sum"))
        return right / len(self.test_y), loss / len(self.test_y)


def _floats(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else (x.float() - 122.0) / 63.0


def optimizers(settings: Settings, net: nn.Module) -> list[Optimizer]:
    """A method's, before a crew wraps them. Muon is for matrices; AdamW takes the rest beside it.

    SOAP (Vyas et al., 2024, arXiv 2409.11321) and Distributed Shampoo (Anil et al., 2020, arXiv 2002.09018)
    decompose as often as K-FAC.
    """
    if settings.method in EXTRAS:
        more = importlib.import_module("pytorch_optimizer")
        if settings.method == SOAP_NAME:
            how = {"weight_decay": 0.0, "precondition_frequency": INVERSE_EVERY}
            return [more.SOAP(net.parameters(), settings.lr, **how)]
        how = {"start_preconditioning_step": INVERSE_EVERY, "preconditioning_compute_steps": INVERSE_EVERY}
        return [more.ScalableShampoo(net.parameters(), settings.lr, use_svd=True, **how)]
    if settings.method == ADAMW_NAME:
        return [AdamW(net.parameters(), settings.lr)]
    if settings.method == MUON_NAME:
        matrices = [p for p in net.parameters() if p.ndim == 2]
        rest = [p for p in net.parameters() if p.ndim != 2]
        return [Muon(matrices, settings.lr, weight_decay=0.0), AdamW(rest, settings.rest_lr)]
    return [SGD(net.parameters(), settings.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)]


def paces(inner: list[Optimizer], steps: int) -> list[LambdaLR]:
    """Learning rates over a run."""

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))

    return [LambdaLR(one, rate) for one in inner]


def kfac_options(settings: Settings) -> dict[str, Any]:
    """What K-FAC is made with."""
    return {
        "damping": settings.damping,
        "kl_clip": settings.kl_clip,
        "factor_decay": FACTOR_DECAY,
        "factor_every": FACTOR_EVERY,
        "inverse_every": INVERSE_EVERY,
        "scaling": "fisher",
    }


def in_one_process(settings: Settings, seed: int, steps: int, data: Path | None = None) -> TrainedNet:
    """One process with the joint batch."""
    torch.set_num_threads(1)
    samples = Images(data)
    net, found, spent_s = samples.net(seed), TrainedNet(settings, seed, steps), []
    inner = optimizers(settings, net)
    rates = paces(inner, steps)
    kfac = KFAC(net, inner[0], **kfac_options(settings)) if settings.damping else None
    for step, (x, y) in zip(range(1, steps + 1), samples.batches(seed), strict=False):
        began_s = time.process_time()
        for one in inner:
            one.zero_grad()
        F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        if kfac is not None:
            kfac.step()
        for one in inner:
            one.step()
        for rate in rates:
            rate.step()
        spent_s.append(time.process_time() - began_s)
        if 10 * step // steps > 10 * (step - 1) // steps:
            found.curve.append(samples.look(net)[0])
    found.accuracy, found.loss = samples.look(net)
    found.step_cpu_s = sum(spent_s) / len(spent_s)
    return found


@torch.no_grad()
def change_last_bits(net: nn.Module, number: int) -> None:
    """Make a third of a model's values one bit larger in magnitude, and a third one smaller, by a number."""
    rng = random.generator(number, "kfac last bits")
    for value in net.parameters():
        by = torch.from_numpy(rng.integers(-1, 2, tuple(value.shape)))
        there = torch.where(by > 0, value * math.inf, torch.zeros_like(value))
        value.copy_(torch.where((by == 0) | (value == 0), value, torch.nextafter(value, there)))


def in_crew(
    settings: Settings,
    world: str,
    seed: int,
    steps: int,
    placement: Placement = "communication",
    nudge: int | None = None,
    data: Path | None = None,
) -> TrainedNet:
    """A crew in virtual time, in a world of ``WORLDS``; what peer 0 came to.

    nudge: keep the model's values, too; if not 0, the last bits of those at the beginning are changed, by
        this number.
    """
    torch.set_num_threads(1)
    samples, found, crew = Images(data), TrainedNet(settings, seed, steps), WORLDS[world]

    def train(peer: SimulatedTransport) -> tuple[list[float], int]:
        net = samples.net(seed)
        if nudge:
            change_last_bits(net, nudge)
        plain = optimizers(settings, net)
        how: dict[str, Any] = {"method": "rps+repair", "average": "gradients", "seed": seed}
        keeps = Keeps(peer, seed)
        inner = [
            CrewOptimizer(
                one,
                peer,
                name=f"model {at}",
                model=net if len(plain) == 1 else None,
                **how,
                **keeps.hooks,
            )
            for at, one in enumerate(plain)
        ]
        rates = paces(plain, steps)
        keeps.keeper.keep(**{f"rate {at}": rate for at, rate in enumerate(rates)})
        kfac = None
        if settings.damping:
            crews: list[CrewCommunicator] = []

            def joined(needs: Needs) -> CrewCommunicator:
                pace = CrewSteps([one._averaged for one in inner], plain[0], peer.heard_of)
                crews.append(
                    CrewCommunicator(peer, "kfac", needs, placement=placement, steps=pace, seed=seed)
                )
                return crews[0]

            kfac = KFAC(net, plain[0], communicator=joined, **kfac_options(settings))
            keeps.keeper.keep(kfac=kfac, tensors=crews[0].tensors)
        part = slice(peer.me * BATCH // crew.peers, (peer.me + 1) * BATCH // crew.peers)
        took_s, looks = list[float](), list[float]()
        oldest = 0
        peer.pause(BEGINS_S - peer.now_s())
        for _, (x, y) in zip(range(steps), samples.batches(seed), strict=False):
            began_s = peer.now_s()
            peer.compute()
            for one in inner:
                one.zero_grad()
            F.cross_entropy(net(x[part]), y[part]).backward()  # type: ignore[no-untyped-call]
            if kfac is not None:
                kfac.step()
                oldest = max(oldest, kfac.age or 0)
            for one in inner:
                one.step()
            outcome = inner[0].outcome
            for rate in rates:
                while outcome is not None and rate.last_epoch <= outcome.round:
                    rate.step()  # as many as the crew's steps, which were more where this peer was frozen
            took_s.append(peer.now_s() - began_s)
            if peer.me == 0 and samples.digits:
                looks.append(samples.look(net)[0])
        if peer.me == 0:
            found.accuracy, found.loss = samples.look(net)
            found.reached = first_at(TARGET, looks) if looks else 0
            found.step_s = fmean(took_s)
            if nudge is not None:
                found.values = nn.utils.parameters_to_vector(net.parameters()).tolist()
        return took_s, oldest

    lines = Faults(latency_s=0.001, rate_bytes_per_s=1e8, **crew.faults)
    simulated = SimulatedCrew(crew.peers, lines, seed, cost=ComputeCost(STEP_S))
    ended = {peer: told for peer, told in enumerate(simulated.run(train)) if told is not None}
    whole = [told for peer, told in ended.items() if all(f.peer != peer for f in lines.freezes)]
    found.longest = max(max(took_s) / median(took_s) for took_s, _ in whole)
    found.oldest = max(oldest for _, oldest in ended.values())
    sent = [simulated.world.traffic(peer).bytes_sent for peer in ended]
    found.bytes_sent = sum(sent) / len(sent)
    return found
