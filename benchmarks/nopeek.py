"""Distance correlation as a loss: how near it is to dcor's, and what it costs beside matrix products.

    OMP_NUM_THREADS=1 python benchmarks/nopeek.py

X of 512 x 3,072 (CIFAR-10's images) and Z of 512 x 4,096, float32. Forward and backward (the gradient by Z)
are held against two matrix products of the same shapes: X^T Z, and the pair X X^T, Z Z^T, which no way to the
distances does without. Times are processor time, the best of some turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcor
import torch
from torch import Tensor

from ragtag.core.seed import generator
from ragtag.privacy import distance_correlation
from stored import how

RESULTS = Path(__file__).parent / "results" / "nopeek.json"
N, INPUTS, CODES = 512, 3072, 4096
WITHIN, TIMES = 1e-6, 3.0


def cases() -> dict[str, tuple[Tensor, Tensor]]:
    """X and Z, independent, dependent, and far from the origin."""

    def drawn(name: str, *shape: int) -> Tensor:
        return torch.from_numpy(generator(0, name).standard_normal(shape)).float()

    x, noise = drawn("x", N, INPUTS), drawn("noise", N, CODES)
    code = (x @ drawn("map", INPUTS, CODES) / 50).relu()
    return {"independent": (x, noise), "a layer's": (x, code), "far off": (x + 30.0, code + 30.0)}


def cpu_s(calls: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """The least processor time of each; they take turns, after one that warms up."""
    for call in calls.values():
        call()
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(turns):
        for name, call in calls.items():
            begin_s = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - begin_s)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9, help="runs of each; the best counts")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    made = how()
    off: dict[str, dict[str, float]] = {}
    for name, (x, z) in cases().items():
        wanted = float(dcor.distance_correlation(x.double().numpy(), z.double().numpy()))
        off[name] = {
            "dcor": wanted,
            "float32": abs(float(distance_correlation(x, z)) / wanted - 1),
            "float32, blocks of 100 rows": abs(float(distance_correlation(x, z, rows=100)) / wanted - 1),
            "float64": abs(float(distance_correlation(x.double(), z)) / wanted - 1),
        }
    x, z = cases()["a layer's"]
    learned = z.clone().requires_grad_()
    times = cpu_s(
        {
            "forward": lambda: distance_correlation(x, z),
            "forward and backward": lambda: distance_correlation(x, learned).backward(),
            "forward and backward, blocks of 100 rows": lambda: distance_correlation(
                x, learned, rows=100
            ).backward(),
            "X X^T and Z Z^T": lambda: (x @ x.T, z @ z.T),
            "X^T Z": lambda: x.T @ z,
        },
        arguments.turns,
    )
    worst = max(value for found in off.values() for how, value in found.items() if how != "dcor")
    both = times["forward and backward"]
    goals: list[tuple[str, float, str, float]] = [
        ("relative distance to dcor, the worst", worst, "<=", WITHIN),
        ("forward and backward / (X X^T and Z Z^T)", both / times["X X^T and Z Z^T"], "<=", TIMES),
        ("forward and backward / X^T Z", both / times["X^T Z"], "<=", TIMES),
    ]
    record = {
        **made,
        "dcor": dcor.__version__,
        "torch_threads": torch.get_num_threads(),
        "shapes": [[N, INPUTS], [N, CODES]],
        "relative_distance": off,
        "cpu_s": times,
        "goals": goals,
    }
    for name, value in times.items():
        print(f"  {name:45s}{1e3 * value:9.1f} ms")
    for name, value, relation, goal in goals:
        print(f"  {name:45s}{value:9.3g}   goal {relation} {goal:g}{'' if value <= goal else ', missed'}")
    arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
