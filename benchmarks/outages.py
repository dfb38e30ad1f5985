"""What it costs a crew that a line now and then fails for about as long as a step takes.

    python benchmarks/outages.py                 # everything; it stores the result
    python benchmarks/outages.py --quick         # one seed, fewer rounds, nothing stored

Each peer runs a user's training loop in virtual time: a step of a second (a twentieth more or less), then an
average, over lines with a round trip of 20 ms. Before an average its line fails with the probability given,
for as long as a step takes: it hears nobody, nobody hears it, and its script goes on. A crew in which nothing
fails stands beside it.

*time*: of the run, over that of the crew in which nothing fails. *round*: how long an average takes a peer
whose line works. *alone*: the share of the rounds of such peers in which they averaged with nobody.
*cut_shared*: the part of the values that a peer averaged with others though its line had failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parent))

from ragtag.core import seed as random
from ragtag.core.faults import Faults, Window
from ragtag.core.types import Outcome
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.groups.channel import Moshpit, RandomGroups
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.protocols.rounds.rps import RPS
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer
from stored import how

RESULTS = Path(__file__).parent / "results" / "outages.json"
STEP_S, SPREAD, LATENCY_S = 1.0, 0.05, 0.01
FAILING = (0.0, 0.01, 0.1)
"""The share of averages before which a peer's line fails."""
CREWS: dict[str, tuple[int, Averager]] = {
    "RPS, 4": (4, RPS()),
    "RPS, 16": (16, RPS()),
    "all-reduce, 16": (16, AllReduce()),
    "Moshpit in fours, 16": (16, Moshpit(group=4)),
    "pairs, 16": (16, RandomGroups(group=2)),
}


@dataclass(frozen=True, slots=True)
class Taken:
    """One round of one peer. cut: its line failed meanwhile. shared: the part of the values that it averaged
    with others.
    """

    took_s: float
    cut: bool
    shared: float


class Crew:
    """Peers that train, and whose lines fail."""

    def __init__(self, n: int, averager: Averager, failing: float, rounds: int, seed: int) -> None:
        self._averager, self._failing, self._rounds, self._seed = averager, failing, rounds, seed
        self._cuts: dict[int, Window] = {}
        lines = Faults(latency_s=LATENCY_S)
        self._crew = SimulatedCrew(n, lines, seed, cost=ComputeCost(STEP_S, sigma=SPREAD, seed=seed))
        self.taken: list[Taken] = []

    def run(self) -> float:
        """Train to the end; how long it took, mean over the peers."""
        return float(np.mean([end for end in self._crew.run(self._train) if end is not None]))

    def _train(self, peer: SimulatedTransport) -> float:
        model = torch.nn.Linear(128, 128)

        def told(outcome: Outcome) -> None:
            until_s = outcome.started_s + outcome.total_s
            cut = self._cuts.get(peer.me)
            was_cut = cut is not None and cut.until_s > outcome.started_s
            shared = float((outcome.heard & (outcome.heard - 1)).astype(bool).mean())
            self.taken.append(Taken(until_s - outcome.started_s, was_cut, shared))

        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            peer,
            model=model,
            method=self._averager,
            on_outcome=told,
            seed=self._seed,
        )
        began_s, draws = peer.now_s(), random.stream_key(self._seed, "outages", peer.me)
        for step in range(self._rounds):
            peer.compute()
            if random.uniform(draws, step) < self._failing:
                self._cuts[peer.me] = peer.cut_off(STEP_S)
            optimizer.step()
        return peer.now_s() - began_s


def rows_of(name: str, rounds: int, seeds: int) -> list[dict[str, Any]]:
    """One kind of crew, with lines that fail more and more often."""
    n, averager = CREWS[name]
    rows: list[dict[str, Any]] = []
    for failing in FAILING:
        crews = [Crew(n, averager, failing, rounds, seed) for seed in range(seeds)]
        took_s = float(np.mean([crew.run() for crew in crews]))
        there = [taken for crew in crews for taken in crew.taken if not taken.cut]
        cut = [taken for crew in crews for taken in crew.taken if taken.cut]
        times_s = [taken.took_s for taken in there]
        rows.append(
            {
                "crew": name,
                "failing": failing,
                "time": took_s / (rows[0]["took_s"] if rows else took_s),
                "took_s": took_s,
                "round_median_s": float(np.median(times_s)),
                "round_mean_s": float(np.mean(times_s)),
                "round_longest_s": max(times_s),
                "alone": float(np.mean([taken.shared == 0 for taken in there])),
                "rounds": len(there),
                "cut": len(cut),
                "cut_shared": float(np.mean([taken.shared for taken in cut])) if cut else None,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure, print and store."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="one seed, fewer rounds, nothing stored")
    quick = arguments.parse_args().quick
    torch.set_num_threads(1)
    stamp, rounds, seeds = how(), 20 if quick else 100, 1 if quick else 3
    rows = [row for name in CREWS for row in rows_of(name, rounds, seeds)]
    if not quick:
        found = {**stamp, "step_s": STEP_S, "rounds": rounds, "seeds": seeds, "rows": rows}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
