"""Training with its averages hidden behind it: step times with and without overlap, over a slow line.

    python benchmarks/overlap.py                 # 2 peers, 4 MB, 100 Mbit/s, 1 % loss; root, Linux

Peers are network namespaces (benchmarks/lab). A step computes for half, once and twice as long as an average
takes over this line; the processor is free meanwhile (it sleeps, as one that waits for a GPU does) or is not.
Each row is one crew whose steps are timed by its peers' own clocks, from the start of one to the start of the
next: the median over all peers. `hidden` is the step with overlap over the longer of the two, compute and
average: 1 where nothing of the shorter one is seen.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lab import Lab, why_not
from stored import how

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "overlap.json"
WARM = 5
"""Steps that do not count: deadlines and rates are learned."""
GOAL = 1.1


def peer(asked: argparse.Namespace) -> None:
    """Train in a namespace; prints the step times and what came of the averages."""
    import ragtag

    torch.set_num_threads(1)
    kind, overlap, compute_s = asked.peer[0], asked.peer[1] == "overlap", float(asked.peer[2])
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, asked.parameters // 1000, bias=False)
    model.weight.grad = torch.zeros_like(model.weight)
    averaged: list[float] = []
    block = torch.ones(64, 64)

    def compute() -> None:
        if kind == "free":
            time.sleep(compute_s)
            return
        until_s = time.thread_time() + compute_s
        while time.thread_time() < until_s:
            torch.mm(block, block)

    with ragtag.join() as here:
        optimizer = here.optimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model=model,
            overlap=overlap,
            on_outcome=lambda outcome: averaged.append(float(outcome.averaged.mean())),
        )
        starts = []
        for _ in range(asked.steps + WARM + 1):
            starts.append(time.perf_counter())
            compute()
            optimizer.step()
        here.leave(finish=False)
    took = [after - before for before, after in pairwise(starts)]
    print(json.dumps({"took": took[WARM:], "averaged": statistics.fmean(averaged[WARM:])}), flush=True)


def crew(
    lab: Lab, number: int, kind: str, overlap: bool, compute_s: float, asked: argparse.Namespace
) -> dict[str, Any]:
    """One crew's median step, in seconds. number: no other crew's in this lab."""
    given = ["--peer", kind, "overlap" if overlap else "plain", repr(compute_s)]
    argv = [sys.executable, *sys.argv, *given]
    with ExitStack() as undo:
        processes = []
        for me in range(asked.n):
            env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
            env |= lab.environment(me, crew=f"overlap-{number}", port=4800 + number)
            process = lab.start(me, argv, env=env, stdout=subprocess.PIPE, text=True)
            undo.callback(process.wait)
            undo.callback(process.kill)
            processes.append(process)
        said = [json.loads(one.communicate(timeout=600.0)[0].splitlines()[-1]) for one in processes]
    return {
        "kind": kind,
        "overlap": overlap,
        "compute_s": compute_s,
        "step_s": statistics.median(took for one in said for took in one["took"]),
        "averaged": min(one["averaged"] for one in said),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--kinds", nargs="+", choices=("free", "busy"), default=["free", "busy"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--peer", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peer:
        return peer(asked)
    if reason := why_not():
        sys.exit(reason)
    document = how() | {"goal": GOAL, "setting": {"n": asked.n, "mbit": asked.mbit, "loss": asked.loss}}
    rows: list[dict[str, Any]] = []
    with Lab(asked.n, rate_mbit=asked.mbit, queue_ms=20.0, loss=asked.loss) as lab:
        alone = crew(lab, 0, "free", False, 0.0, asked)
        print(f"an average alone: {alone['step_s']:.3f} s, {alone['averaged']:.1%} averaged", flush=True)
        for kind in asked.kinds:
            for share in (0.5, 1.0, 2.0):
                compute_s = share * alone["step_s"]
                pair = [
                    crew(lab, 2 * len(rows) + 1 + overlap, kind, overlap, compute_s, asked)
                    for overlap in (False, True)
                ]
                longer_s = max(compute_s, alone["step_s"])
                row = {
                    "kind": kind,
                    "compute_over_average": share,
                    "compute_s": compute_s,
                    "plain_s": pair[0]["step_s"],
                    "overlap_s": pair[1]["step_s"],
                    "hidden": pair[1]["step_s"] / longer_s,
                    "averaged": pair[1]["averaged"],
                }
                rows.append(row)
                print(
                    f"processor {kind}, computing {compute_s:.3f} s: {row['plain_s']:.3f} s a step, "
                    f"with overlap {row['overlap_s']:.3f}, {row['hidden']:.2f} times the longer of the two; "
                    f"{row['averaged']:.1%} averaged",
                    flush=True,
                )
    asked.out.write_text(json.dumps(document | {"alone": alone, "rows": rows}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
