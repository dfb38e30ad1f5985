"""What lost messages do to sparse training, through the real machines in virtual time.

Four or more peers train a small network with ``average="gradients"`` and a share of the entries; the
simulated line loses 0, 10 and 30 % of all datagrams. By default rounds end before anything that was lost
can come again, so that error feedback has all the work: what an owner did not get is rolled back
(``tickets``), or cleared as if it had been sent (``as if sent``). Then the same with the deadlines that
peers learn, which leave time for repair.

    python benchmarks/sparse_loss.py [--steps 400] [--seeds 3] [--json benchmarks/results/sparse_loss.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parent))  # tests import this file, too

from ragtag.codecs.base import Codec
from ragtag.core.faults import Faults, Loss
from ragtag.core.schema import Schema
from ragtag.core.types import Bools, Bytes, Floats, Offer, Outcome
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import Channel, Node
from ragtag.simulation.worlds.rounds import World
from ragtag.training.exchange.compress import TopK
from ragtag.training.exchange.sent import Undecided
from ragtag.training.exchange.sparse import SparseReplica
from ragtag.training.optimizer.optimizer import CrewOptimizer
from stored import how

LATENCY_S, COMPUTE_S = 0.002, 0.01
TIGHT_S = 4.4 * LATENCY_S
"""A stage has time for a message, not for a request and its answer."""
EXAMPLES, WIDE, CLASSES, BATCH = 2048, 32, 10, 32


class SimulatedCrew:
    """Nodes in a world; a round is over when all peers have their outcomes."""

    def __init__(self, n: int, loss: float, seed: int) -> None:
        self.n = n
        self.nodes = [Node(peer, n, seed) for peer in range(n)]
        faults = Faults(latency_s=LATENCY_S, loss=Loss(loss) if loss else None)
        self.world = World(self.nodes, faults, seed, check=True, on_done=self._done)
        self.outcomes: dict[int, Outcome] = {}

    def _done(self, peer: int, now_s: float, outcome: Outcome) -> None:
        self.outcomes[peer] = outcome

    def run(self) -> None:
        """Go on until all that were asked have answered."""
        while len(self.outcomes) < self.n:
            self.world.run(self.world.now_s + LATENCY_S)
        self.world.run(self.world.now_s + COMPUTE_S)


@dataclass
class SimulatedTransport:
    """A peer's way to its crew."""

    crew: SimulatedCrew
    me: int

    @property
    def n(self) -> int:
        return self.crew.n

    @property
    def live(self) -> frozenset[int]:
        return self.crew.nodes[self.me].live

    def now_s(self) -> float:
        return self.crew.world.now_s

    def configure(
        self, channel: int, schema: Schema, method: Averager, codec: Codec, *, together_s: float | None = None
    ) -> None:
        shape = Channel(method, codec, schema.n_chunks(codec.elements), 4 * LATENCY_S, 2 * LATENCY_S)
        self.crew.nodes[self.me].configure(channel, shape)

    def offer(
        self,
        channel: int,
        rows: Bytes,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[int] = frozenset(),
    ) -> SimulatedPending:
        self.crew.world.at(self.crew.world.now_s, self.me, Offer(channel, rows, weight, deadline_s))
        return SimulatedPending(self)

    def start(self, channel: int, values: Floats, weight: float, deadline_s: float | None = None) -> Any:
        raise RuntimeError("nothing is averaged densely here")

    def post(self, topic: int, blob: bytes) -> int:
        raise RuntimeError("nothing is posted here")

    posts = notices = post  # type: ignore[assignment]


@dataclass
class SimulatedPending:
    transport: SimulatedTransport

    def wait(self) -> Outcome:
        return self.transport.crew.outcomes.pop(self.transport.me)


class AsIfSent(Undecided):
    """Clears what was sent, whatever became of it."""

    def _settle(self, round_: int, sent: Any, there: Bools, not_there: Bools) -> tuple[int, int]:
        return super()._settle(round_, sent, there | not_there, np.zeros_like(there))


def task(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A teacher's labels, one in ten of them wrong: the loss has a floor that is not 0."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EXAMPLES, WIDE, generator=draw)
    hidden = torch.tanh(inputs @ torch.randn(WIDE, 24, generator=draw))
    labels = (hidden @ torch.randn(24, CLASSES, generator=draw)).argmax(1)
    wrong = torch.rand(EXAMPLES, generator=draw) < 0.1
    labels[wrong] = torch.randint(0, CLASSES, (int(wrong.sum()),), generator=draw)
    return inputs, labels


def trained(
    peers: int, loss: float, steps: int, seed: int, compress: TopK, tickets: bool, deadline_s: float | None
) -> dict[str, float]:
    """The mean loss of all replicas at the end, on all examples, and what became of fragments."""
    inputs, labels = task(seed)
    crew = SimulatedCrew(peers, loss, seed)
    replicas, gradients, models = [], [], []
    for peer in range(peers):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(WIDE, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, CLASSES)
        )
        inner = torch.optim.SGD(model.parameters(), lr=0.2)
        transport = SimulatedTransport(crew, peer)
        optimizer = CrewOptimizer(inner, transport, average="gradients", compress=compress, model=model)
        replica = optimizer._averaged.sparse
        assert isinstance(replica, SparseReplica)
        if not tickets:
            replica._sent.__class__ = AsIfSent
        models.append(model)
        gradients.append(optimizer._averaged._mode)
        replicas.append(replica)
    counts = dict.fromkeys(("committed", "restored", "late", "given_up"), 0)
    draws = [torch.Generator().manual_seed(1000 * seed + peer) for peer in range(peers)]
    for _ in range(steps):
        begun = []
        for model, mode, replica, draw in zip(models, gradients, replicas, draws, strict=True):
            batch = torch.randint(0, EXAMPLES, (BATCH,), generator=draw)
            model.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            mode.local(None, False)
            begun.append(replica.begin(mode.offer(1.0), deadline_s))
        crew.run()
        for mode, replica, one in zip(gradients, replicas, begun, strict=True):
            mode.take(replica.end(one))
            found = replica.compression
            assert found is not None
            for name in counts:
                counts[name] += getattr(found, name)
    with torch.no_grad():
        losses = [float(F.cross_entropy(model(inputs), labels)) for model in models]
    spread = max(losses) - min(losses)
    return {"loss": statistics.fmean(losses), "spread": spread, **counts}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ratio", type=float, default=0.02)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    made = how()
    compress = TopK(ratio=asked.ratio, values="int8", resync=0, bypass=False)
    cells = [
        ("loss-free", 0.0, True, TIGHT_S),
        *((f"{name}, {loss:.0%} lost", loss, name == "tickets", TIGHT_S)
          for loss in (0.1, 0.3) for name in ("tickets", "as if sent")),
        *((f"tickets and repair, {loss:.0%} lost", loss, True, None) for loss in (0.1, 0.3)),
    ]  # fmt: skip
    rows = []
    began_s = time.perf_counter()
    for name, loss, tickets, deadline_s in cells:
        runs = [
            trained(asked.peers, loss, asked.steps, seed, compress, tickets, deadline_s)
            for seed in range(asked.seeds)
        ]
        mean = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        base = rows[0]["loss"] if rows else mean["loss"]
        rows.append({"name": name, **mean, "over_loss_free": mean["loss"] / base})
        print(
            f"{name:32s} loss {mean['loss']:.4f} ({mean['loss'] / base:6.3f} of loss-free; replicas within "
            f"{mean['spread']:.1e})  restored {mean['restored']:.0f} late {mean['late']:.0f} "
            f"given up {mean['given_up']:.0f} of {mean['committed'] + mean['restored']:.0f}",
            flush=True,
        )
    if asked.json:
        report = {
            **made, "peers": asked.peers, "steps": asked.steps,
            "seeds": asked.seeds, "ratio": asked.ratio, "wall_s": time.perf_counter() - began_s, "rows": rows,
        }  # fmt: skip
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
