"""Loss against steps with a target batch: a crew that peers leave, beside one process with the large batch.

Peers of speeds 1 to 4 gather towards a target in virtual time. About every ``--change`` steps of the crew one
dies without a word. One process takes the same number of steps with batches of the target, over several
seeds. The crew is within the band where its loss, a mean over ten steps, is no further out than the lowest
and the highest of the seeds and their standard deviation.

    python benchmarks/target_batch.py                    # 8 peers
    python benchmarks/target_batch.py --peers 64 --target 4096 --steps 40
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

from ragtag.core.faults import Crash, Faults
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.gathering import Account
from ragtag.training.optimizer.optimizer import CrewOptimizer

DIM, CLASSES = 16, 4
SAMPLE_S = 0.02
"""What a sample takes on a peer of speed 1."""


def task(seed: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``n`` samples of a problem that a small network solves in part."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, DIM, generator=draw)
    meant = torch.randn(DIM, CLASSES, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(n, CLASSES, generator=draw)
    return x, (x @ meant + noise).argmax(1)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model that all begin with, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


JUDGES = task(10**6, 4096)


def judged(model: nn.Module) -> float:
    """The loss on samples that nobody trains on."""
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(JUDGES[0]), JUDGES[1]))


def alone(seed: int, steps: int, target: int) -> list[float]:
    """The loss after each step of one process with the large batch."""
    model, sgd = made()
    x, y = task(seed, steps * target)
    losses = []
    for at in range(0, steps * target, target):
        sgd.zero_grad()
        nn.functional.cross_entropy(model(x[at : at + target]), y[at : at + target]).backward()
        sgd.step()
        losses.append(judged(model))
    return losses


class Crew:
    """A crew that peers leave. losses: of peer 0, after each step. counts: of all that stay."""

    def __init__(self, peers: int, steps: int, target: int, batch: int, change: int, seed: int) -> None:
        self.steps, self.target, self.batch, self.seed = steps, target, batch, seed
        speeds = [1.0 + 3.0 * (7 * peer % peers) / max(1, peers - 1) for peer in range(peers)]
        step_s = target * SAMPLE_S / sum(speeds)
        leave = range(1, min(peers // 2, steps // change) + 1)
        crashes = tuple(Crash(peer, 1.0 + change * peer * step_s) for peer in leave)
        faults = Faults(latency_s=0.02, rate_bytes_per_s=1e8, crashes=crashes)
        cost = ComputeCost(SAMPLE_S, speeds, 0.2, seed=seed)
        self.crew = SimulatedCrew(peers, faults, seed=seed, cost=cost)
        self.losses: list[float] = []
        self.counts: list[Account] = []

    def run(self) -> None:
        """Train to the end."""
        self.counts = [of for of in self.crew.run(self._train) if of is not None]

    def _train(self, peer: SimulatedTransport) -> Account | None:
        batch, seen = self.batch, 0
        model, sgd = made()
        x, y = task(1000 * self.seed + peer.me + 1, 20_000)
        options: dict[str, Any] = {"method": "allreduce", "weight": batch, "average": "gradients"}
        optimizer = CrewOptimizer(sgd, peer, model=model, target_batch=self.target, **options)
        at = 0
        while optimizer.outcome is None or optimizer.outcome.round + 1 < self.steps:
            peer.compute(batch)
            rows = torch.arange(at, at + batch) % len(x)
            at += batch
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if peer.me == 0 and optimizer.samples is not None and optimizer.samples.steps > seen:
                seen = optimizer.samples.steps
                self.losses.append(judged(model))
        optimizer._averaged.settle()
        return optimizer.samples


def windows(losses: list[float], size: int) -> list[float]:
    """Means over windows of steps."""
    return [statistics.mean(losses[at : at + size]) for at in range(0, len(losses) - size + 1, size)]


def main() -> None:
    """Print the crew's losses beside one process's, and the account."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, value in (("peers", 8), ("target", 1024), ("steps", 60), ("batch", 16), ("change", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    began_s = time.process_time()
    crew = Crew(asked.peers, asked.steps, asked.target, asked.batch, asked.change, seed=1)
    crew.run()
    took_s = time.process_time() - began_s
    own = windows(crew.losses, 10)
    others = [windows(alone(100 + seed, len(crew.losses), asked.target), 10) for seed in range(asked.seeds)]
    outside = 0
    print(f"steps      crew    one process, {asked.seeds} seeds: lowest, highest, standard deviation")
    for at, (mine, theirs) in enumerate(zip(own, zip(*others, strict=True), strict=True)):
        spread = statistics.stdev(theirs)
        fits = min(theirs) - spread <= mine <= max(theirs) + spread
        outside += not fits
        print(
            f"{10 * at + 1:3} to {10 * at + 10:3}  {mine:.4f}  {min(theirs):.4f}  {max(theirs):.4f}  "
            f"{spread:.4f}{'' if fits else '  outside'}"
        )
    counts = crew.counts
    computed, counted = (sum(getattr(of, name) for of in counts) for name in ("computed", "counted"))
    dropped: dict[str, float] = {}
    for of in counts:
        for why, n in of.dropped.items():
            dropped[why] = dropped.get(why, 0.0) + n
    print(f"{computed:.0f} samples computed, {counted:.0f} counted; dropped: {dropped}")
    print(
        f"steps had {counts[0].overshoot:+.1%} beyond the target; goodput of peer 0 {counts[0].goodput:.1%}"
    )
    print(f"{outside} of {len(own)} windows outside the band; {took_s:.0f} s of one core")


if __name__ == "__main__":
    main()
