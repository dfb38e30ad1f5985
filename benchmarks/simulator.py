"""How fast the simulated world is: one round over a large vector, and many small events.

    python benchmarks/simulator.py                 # both figures, medians of 5 runs each
    python benchmarks/simulator.py --runs 9 --loss 0

- large: 16 peers average 1M float32 by one round of RPS at 10 % loss; goal 0.3 s.
- small: 64 peers, a vector of 64 chunks (one per block), 10 rounds of RPS; goals 15 us per event and 3 s.

Only ``World.run`` is timed: nodes and values are made before. CPU time stands beside wall time, as it is
what a busy machine does not distort.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Faults, Loss
from ragtag.core.seed import generator
from ragtag.core.types import Average, Outcome, PeerId
from ragtag.core.wire import n_chunks
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.rps import rps
from ragtag.simulation.worlds.rounds import World
from stored import how

RESULTS = Path(__file__).parent / "results" / "simulator.json"


@dataclass(frozen=True)
class Case:
    """One thing to time. Goals are for the median of the wall time."""

    name: str
    peers: int
    chunks: int
    rounds: int
    goal_s: float
    goal_event_us: float | None = None


CASES = (
    Case("large", peers=16, chunks=n_chunks(1_000_000, fp32.elements), rounds=1, goal_s=0.3),
    Case("small", peers=64, chunks=64, rounds=10, goal_s=3.0, goal_event_us=15.0),
)


def simulate(case: Case, loss: float, seed: int) -> tuple[float, float, int, float]:
    """Wall seconds, CPU seconds, events, and the share of chunks that were averaged."""
    nodes = [Node(peer, case.peers, seed) for peer in range(case.peers)]
    for node in nodes:
        node.configure(0, Channel(rps, fp32, case.chunks, probe_s=0.05, rtt_s=0.002))
    shape = (case.chunks, fp32.elements)
    values = [
        generator(seed, "values", peer).standard_normal(shape, np.float32) for peer in range(case.peers)
    ]
    left = [case.rounds] * case.peers
    averaged: list[float] = []

    def ask(peer: PeerId, now_s: float) -> None:
        left[peer] -= 1
        world.at(now_s, peer, Average(0, values[peer], 1.0))

    def done(peer: PeerId, now_s: float, outcome: Outcome) -> None:
        averaged.append(float(outcome.averaged.mean()))
        if left[peer]:
            ask(peer, now_s)

    faults = Faults(loss=Loss(loss) if loss else None, latency_s=0.001)
    world = World(nodes, faults, seed, on_done=done)
    for peer in range(case.peers):
        ask(peer, 0.0)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    world.run()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    if len(averaged) != case.peers * case.rounds:
        raise RuntimeError(f"{len(averaged)} outcomes of {case.peers * case.rounds}: the case did not finish")
    return wall_s, cpu_s, world.events, statistics.fmean(averaged)


def measure(case: Case, loss: float, runs: int) -> dict[str, Any]:
    """Medians over ``runs`` runs, after one that warms up."""
    simulate(case, loss, seed=0)
    walls, cpus, events, shares = zip(*(simulate(case, loss, seed) for seed in range(runs)), strict=True)
    wall_s, cpu_s = statistics.median(walls), statistics.median(cpus)
    event_us = [1e6 * time_s / count for time_s, count in zip(walls, events, strict=True)]
    cpu_us = [1e6 * time_s / count for time_s, count in zip(cpus, events, strict=True)]
    return {
        "case": asdict(case),
        "loss": loss,
        "runs": runs,
        "wall_s": {"median": wall_s, "min": min(walls), "max": max(walls)},
        "cpu_s": {"median": cpu_s, "min": min(cpus), "max": max(cpus)},
        "events": int(statistics.median(events)),
        "event_us": statistics.median(event_us),
        "event_cpu_us": statistics.median(cpu_us),
        "averaged": statistics.fmean(shares),
        "load_average_1min": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each case (median is reported)")
    parser.add_argument("--loss", type=float, default=0.1, help="loss of each datagram")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    made = how()
    results = []
    for case in CASES:
        result = measure(case, arguments.loss, arguments.runs)
        results.append(result)
        print(
            f"{case.name}: {case.peers} peers, {case.chunks} chunks, {case.rounds} rounds at "
            f"{arguments.loss:.0%} loss: {result['wall_s']['median']:.3f} s (goal {case.goal_s} s; CPU "
            f"{result['cpu_s']['median']:.3f} s), {result['events']} events, "
            f"{result['event_us']:.1f} us each (CPU {result['event_cpu_us']:.1f}"
            + (f"; goal {case.goal_event_us:g})" if case.goal_event_us else ")")
        )
    record = {
        **made,
        "results": results,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
