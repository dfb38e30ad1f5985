"""A crew in one process that averages gradients while rounds are spoilt: how far its replicas are apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ragtag.core.channels import channel_of
from ragtag.core.faults import Faults, LossStream
from ragtag.core.types import Effect, Noted, Send
from ragtag.protocols.rounds.base import GATHER
from ragtag.training.align.plan import Aligned
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.training.fake_transport import FakeCrew, FakeTransport, run_peers

Make = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "groups": lambda m: torch.optim.AdamW(
        [{"params": list(m.parameters())[:2], "lr": 1e-3}, {"params": list(m.parameters())[2:], "lr": 1e-4}]
    ),
}


class Mortal(FakeCrew):
    """Peers may die within a round: of their averages every second one, by receiver, is sent.

    dies: in which round of the model's channel.
    tells: else it sends none of its averages.
    """

    def __init__(
        self, n: int, dies: dict[int, int], *, loss: float = 0.0, seed: int = 1, tells: bool = True
    ) -> None:
        super().__init__(n, loss=loss, seed=seed)
        self.dies, self._seed, self._tells = dies, seed, tells

    def heal(self) -> None:
        self._losses = LossStream(Faults(), self._seed)

    def _apply(self, peer: int, effects: list[Effect]) -> None:
        last = self.dies.get(peer)
        if last is not None:
            effects = [e for e in effects if not (isinstance(e, Send) and self._unsent(e, last))]
        super()._apply(peer, effects)

    def _unsent(self, effect: Send, last: int) -> bool:
        key = effect.run.key
        if key.channel != channel_of("model") or key.round < last:
            return False
        return key.round > last or (key.stage == GATHER and not (self._tells and effect.run.peer % 2))


@dataclass
class Training:
    """``n`` peers, ``rounds`` steps each; datagrams are lost in the first ``ill`` of them.

    astray: before which step a peer's parameters are changed, its alone; it gives no gradients. arrived:
    before which step a peer finds that it is not in step. vectors: by round, by peer: all parameters after
    it, in one line. A peer that is behind leaves out rounds, so its steps are not numbered as others' are.
    """

    n: int = 5
    rounds: int = 100
    loss: float = 0.0
    ill: int = 0
    dies: dict[int, int] = field(default_factory=dict)
    tells: bool = True
    make: Make = OPTIMIZERS["sgd"]
    options: dict[str, Any] = field(default_factory=dict)
    width: int = 120
    astray: dict[int, int] = field(default_factory=dict)
    arrived: dict[int, int] = field(default_factory=dict)
    vectors: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    aligned: dict[int, list[Aligned]] = field(default_factory=dict)
    notes: list[Noted] = field(default_factory=list)
    optimizers: dict[int, CrewOptimizer] = field(default_factory=dict)

    def run(self) -> Training:
        self.crew = Mortal(self.n, self.dies, loss=self.loss if self.ill else 0.0, tells=self.tells)
        torch.manual_seed(0)
        self.nets = [self._net() for _ in range(self.n)]
        for net in self.nets[1:]:
            net.load_state_dict(self.nets[0].state_dict())
        run_peers(self.crew, self._peer)
        return self

    def _net(self) -> nn.Module:
        k = self.width
        return nn.Sequential(nn.Linear(8, k), nn.Tanh(), nn.Linear(k, k), nn.Tanh(), nn.Linear(k, 4))

    def _peer(self, transport: FakeTransport) -> None:
        me, model = transport.me, self.nets[transport.me]
        optimizer = CrewOptimizer(
            self.make(model), transport, average="gradients", model=model,
            on_note=self.notes.append, weight=float(me not in self.astray), **self.options,
        )  # fmt: skip
        self.optimizers[me], self.aligned[me] = optimizer, []
        for round_ in range(self.rounds):
            if me == 0 and round_ == self.ill:
                self.crew.heal()
            if self.astray.get(me) == round_:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.1)
            if self.arrived.get(me) == round_ and optimizer._averaged.follower is not None:
                optimizer._averaged.follower.arrived(False)
            draw = torch.Generator().manual_seed(1000 * me + round_)
            inputs = torch.randn(6, 8, generator=draw)
            optimizer.zero_grad()
            F.mse_loss(model(inputs), inputs[:, :4].sin()).backward()
            optimizer.step()
            flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            if optimizer.outcome is not None:
                self.vectors.setdefault(optimizer.outcome.round, {})[me] = flat
            found = optimizer._averaged.aligned
            if found is not None and found not in self.aligned[me][-1:]:
                self.aligned[me].append(found)
            if self.dies.get(me) == round_:
                return

    def apart(self, round_: int) -> float:
        """The largest distance to the mean of those that live, over its norm."""
        vectors = torch.stack([v for peer, v in self.vectors[round_].items() if peer not in self.dies])
        mean = vectors.double().mean(0)
        return float((vectors.double() - mean).norm(dim=1).max() / mean.norm())

    def alike(self, round_: int) -> bool:
        """Whether all that live have the same, to the bit."""
        vectors = [v for peer, v in self.vectors[round_].items() if peer not in self.dies]
        return all(torch.equal(vectors[0], other) for other in vectors[1:])

    def sent(self, channel: int) -> int:
        """Bytes of all messages of a channel, lost ones and those asked for again too."""
        return sum(run.payload.nbytes for run in self.crew.sent if run.key.channel == channel)
