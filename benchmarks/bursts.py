"""What a burst of loss does to an average, with and without a randomised Hadamard transform.

    python benchmarks/bursts.py                      # everything
    python benchmarks/bursts.py --only cost          # the processor time alone

Eight peers average by RPS through the real machines, in virtual time, over lines that lose a twentieth of all
datagrams: each by itself, or in bursts (Gilbert-Elliott) of 5 or 40 in the middle. What they average has
layers of 8 to 128 chunks whose spread between peers differs by lognormal factors. A peer's error is the
squared distance of what it comes to from the mean of all, over the squared distance of its own values from
it: 1 where all is lost.

error: over all values. worst layer: the largest of any layer, by peer and round. rounds: the standard
deviation of the error from peer to peer and round to round, over its mean. Cost is processor time, in turns
with rounds that mix nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent))  # tests import this file, too

from ragtag.codecs.dense import fp32
from ragtag.core.faults import BurstLoss, Faults, Loss
from ragtag.core.seed import generator
from ragtag.core.types import Average, Floats, Outcome
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.hadamard import Hadamard
from ragtag.protocols.rounds.rps import RPS
from ragtag.simulation.worlds.rounds import World
from stored import how

RESULTS = Path(__file__).parent / "results" / "bursts.json"
PEERS, CHUNKS, ROUNDS = 8, 1280, 20
LAYER_MIN, LAYER_MAX = 8, 128
LATENCY_S, ROUND_S = 0.002, 1.0
SIZES = (0, 8, 64)
"""Chunks that are mixed; 0: none."""
P = 0.05
LINES: dict[str, Loss | BurstLoss] = {
    "each by itself": Loss(P),
    "bursts of 5": BurstLoss(enter=P / (1 - P) / 5, leave=1 / 5),
    "bursts of 40": BurstLoss(enter=P / (1 - P) / 40, leave=1 / 40),
}


def layers_of(seed: int, chunks: int = CHUNKS) -> list[int]:
    """Where layers begin, and where the last one ends: their lengths are drawn log-uniformly."""
    drawn = np.exp2(generator(seed, "layers").uniform(np.log2(LAYER_MIN), np.log2(LAYER_MAX), chunks))
    ends = np.cumsum(drawn.astype(int)).tolist()
    return [0, *(end for end in ends if end <= chunks - LAYER_MIN), chunks]


def vectors(seed: int, number: int, chunks: int = CHUNKS) -> list[Floats]:
    """What the peers have in a round, float32 ``[chunks, elements]`` each."""
    draw, edges = generator(seed, "bursts", number), layers_of(seed, chunks)
    scale = np.repeat(np.exp(draw.standard_normal(len(edges) - 1)), np.diff(edges))[:, None]
    shape = (chunks, fp32.elements)
    return [(scale * draw.standard_normal(shape)).astype(np.float32) for _ in range(PEERS)]


def planned(
    averager: Averager, loss: Loss | BurstLoss | None, rounds: int, seed: int, chunks: int = CHUNKS
) -> tuple[World, list[dict[int, Outcome]]]:
    """A world that will average, and where each round's outcomes will be, by peer."""
    nodes = [Node(peer, PEERS, seed) for peer in range(PEERS)]
    found: list[dict[int, Outcome]] = [{} for _ in range(rounds)]

    def done(peer: int, now_s: float, outcome: Outcome) -> None:
        found[outcome.round][peer] = outcome

    world = World(nodes, Faults(latency_s=LATENCY_S, loss=loss), seed, on_done=done)
    edges = tuple(layers_of(seed, chunks))
    for node in nodes:
        node.configure(0, Channel(averager, fp32, chunks, 4 * LATENCY_S, 2 * LATENCY_S, edges=edges))
    for number in range(rounds):
        for peer, values in enumerate(vectors(seed, number, chunks)):
            world.at(number * ROUND_S, peer, Average(0, values, 1.0))
    return world, found


def averages(
    averager: Averager, loss: Loss | BurstLoss | None, rounds: int, seed: int
) -> list[list[Outcome]]:
    """Each round's outcomes, by peer."""
    world, found = planned(averager, loss, rounds, seed)
    world.run()
    return [[of[peer] for peer in range(PEERS)] for of in found]


def errors(seed: int, rounds: list[list[Outcome]]) -> Floats:
    """The squared error of each layer over what keeping own values would be, ``[rounds, peers, layers + 1]``;
    the last one is of all values.
    """
    edges = layers_of(seed)
    table = np.empty((len(rounds), PEERS, len(edges)), np.float32)
    for number, outcomes in enumerate(rounds):
        values = vectors(seed, number)
        mean = np.mean(values, axis=0, dtype=np.float64)
        for peer, outcome in enumerate(outcomes):
            came, own = (
                np.add.reduceat(np.square(x - mean).sum(axis=1), edges[:-1])
                for x in (outcome.mean, values[peer])
            )
            table[number, peer] = np.append(came / own, came.sum() / own.sum())
    return table


def shown(line: str, size: int, rounds: int, seed: int) -> dict[str, Any]:
    """One row: an error of 1 is that of own values kept."""
    table = errors(seed, averages(RPS(hadamard=size), LINES[line], rounds, seed))
    worst, whole = table[:, :, :-1].max(axis=2).ravel(), table[:, :, -1].ravel()
    return {
        "line": line,
        "size": size,
        "error_percent": round(100 * float(whole.mean()), 3),
        "worst_layer_percent_median": round(100 * float(np.median(worst)), 2),
        "worst_layer_percent_most": round(100 * float(worst.max()), 2),
        "rounds_relative": round(float(whole.std() / whole.mean()), 3),
    }


def costs(values: int, repeats: int) -> list[dict[str, Any]]:
    """Processor time of the transform of so many values, and of a round in virtual time, per peer."""
    chunks = values // fp32.elements
    table = generator(1, "bursts cost").standard_normal((chunks, fp32.elements), np.float32)
    rounds = 3
    alone: dict[int, list[float]] = {size: [] for size in SIZES if size}
    whole: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(repeats):
        for size in SIZES:
            if size:
                transform = Hadamard(1, chunks, fp32.elements, size)
                began_s = time.process_time()
                transform.inverse(transform.forward(table))
                alone[size].append(time.process_time() - began_s)
            world, _ = planned(RPS(hadamard=size), None, rounds, 1, chunks)
            began_s = time.process_time()
            world.run()
            whole[size].append((time.process_time() - began_s) / rounds / PEERS)
    plain_s = statistics.median(whole[0])
    return [
        {
            "size": size,
            "values": values,
            "both_ways_ns_per_value": round(1e9 * statistics.median(alone[size]) / table.size, 2),
            "round_cpu_ms_per_peer": round(1e3 * statistics.median(whole[size]), 2),
            "round_times_plain": round(statistics.median(whole[size]) / plain_s, 2),
        }
        for size in alone
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--values", type=int, default=1_000_000, help="of the vector that is timed")
    parser.add_argument("--repeats", type=int, default=5, help="turns of timing")
    parser.add_argument(
        "--only", choices=("loss", "cost"), help="measure this; what is stored of the other stays"
    )
    parser.add_argument("--out", default=str(RESULTS))
    asked = parser.parse_args()
    path = Path(asked.out)
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    made = how()
    if asked.only != "cost":
        rows = []
        for line in LINES:
            for size in SIZES:
                rows.append(shown(line, size, asked.rounds, asked.seed))
                print(rows[-1], flush=True)
        kept["loss"] = made | {"peers": PEERS, "rounds": asked.rounds, "lost": P, "rows": rows}
    if asked.only != "loss":
        kept["cost"] = made | {"rows": costs(asked.values, asked.repeats)}
        print(*kept["cost"]["rows"], sep="\n", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
