"""Whether by-passing a selection chooses right on real links: time per round, forced either way and chosen.

Four peers as network namespaces (see ``sparse_namespaces``) at several rates. In turn, in the same
processes: all sent (RPS with repair), and for each ratio a selection, and ``TopK(bypass="auto")``. Gradients
are heavy-tailed vectors that cost nothing to compute, so a step is a round. Rounds of the choosing one count
from the third choice on (each holds for 16 rounds), those in which the link is measured, too.

    python benchmarks/sparse_bypass.py --json benchmarks/results/sparse_bypass.json     # root, Linux
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from lab import host_of, why_not
from sparse_namespaces import PORT, ROOT, lab_of
from stored import how

N, ROUNDS, CHOOSING, SETTLED, SLOW = 4, 24, 96, 48, 8
"""Peers; rounds of those that are forced, and that choose; the first that counts of these; rounds of those
that send all where that takes seconds."""


def ways_of(ratios: list[float]) -> list[tuple[str, float, bool]]:
    """Name, ratio (0: all is sent), whether it chooses."""
    both = [(ratio, choose) for ratio in ratios for choose in (False, True)]
    return [("dense", 0.0, False), *((f"{'auto' if c else 'sparse'} {r:g}", r, c) for r, c in both)]


def rounds_of(mbit: float, ratio: float, chooses: bool) -> int:
    """How many rounds a way takes."""
    return CHOOSING if chooses else SLOW if not ratio and mbit < 50 else ROUNDS


def peer(me: int, asked: argparse.Namespace) -> None:
    """One peer: all ways; prints the seconds of each one's rounds."""
    import ragtag

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(me)
    gradients = [torch.randn(asked.values, generator=draw) ** 3 for _ in range(4)]
    for at, (name, ratio, chooses) in enumerate(ways_of(asked.ratios)):
        os.environ |= {
            "RAGTAG_RANK": str(me), "RAGTAG_SIZE": str(N), "RAGTAG_CREW": f"by-pass {name}",
            "RAGTAG_PEERS": ",".join(f"{host_of(other)}:{PORT + at}" for other in range(N)),
        }  # fmt: skip
        weight = torch.nn.Parameter(torch.zeros(asked.values))
        model = torch.nn.Module()
        model.weight = weight
        compress = ragtag.TopK(ratio, resync=0, bypass="auto" if chooses else False) if ratio else None
        took_s, whole = [], []
        with ragtag.join() as crew:
            optimizer = crew.optimizer(
                torch.optim.SGD([weight], lr=1e-3), average="gradients", align=False, model=model,
                compress=compress, averager=ragtag.RPS(repair=True),
            )  # fmt: skip
            for round_ in range(rounds_of(asked.mbit, ratio, chooses)):
                weight.grad = gradients[round_ % 4].clone()
                began_s = time.perf_counter()
                optimizer.step()
                took_s.append(time.perf_counter() - began_s)
                whole.append(bool(optimizer._averaged.compression and optimizer._averaged.compression.dense))
            estimate = None
            if (
                chooses
                and optimizer._averaged.sparse is not None
                and optimizer._averaged.sparse._bypass is not None
            ):
                found = optimizer._averaged.sparse._bypass.estimate()
                estimate = found and {"dense_s": found.dense_s, "sparse_s": found.sparse_s}
        print(json.dumps({"way": name, "s": took_s, "whole": whole, "estimate": estimate}), flush=True)


def measure(mbit: float, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """All ways at one rate."""
    asked.mbit = mbit
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with lab_of(N, asked) as lab:
        peers = []
        for me in range(N):
            command = [sys.executable, *sys.argv, "--peer", str(me), str(mbit)]
            peers.append(lab.start(me, command, env=env, stdout=subprocess.PIPE, text=True))
        said = [[json.loads(line) for line in one.communicate(timeout=600)[0].splitlines()] for one in peers]
    rows: list[dict[str, Any]] = []
    for (name, ratio, chooses), *of in zip(ways_of(asked.ratios), *said, strict=True):
        first = SETTLED if chooses else min(8, len(of[0]["s"]) // 2)
        middle = [median(one["s"][first:]) for one in of]
        rows.append(
            {
                "mbit": mbit, "way": name, "ratio": ratio, "rounds": len(of[0]["s"]) - first,
                "round_s": max(middle), "mean_s": max(fmean(one["s"][first:]) for one in of),
                "whole": fmean(fmean(one["whole"][first:]) for one in of), "estimate": of[0]["estimate"],
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By rate and ratio: the choosing one's time over the better one's."""
    found = []
    for row in rows:
        if not row["way"].startswith("auto"):
            continue
        here = {other["way"]: other["round_s"] for other in rows if other["mbit"] == row["mbit"]}
        dense_s, sparse_s = here["dense"], here[f"sparse {row['ratio']:g}"]
        better_s = min(dense_s, sparse_s)
        found.append(
            {
                "mbit": row["mbit"], "ratio": row["ratio"], "dense_s": dense_s, "sparse_s": sparse_s,
                "chosen_s": row["round_s"], "whole": row["whole"],
                "over_the_better": row["round_s"] / better_s,
            }
        )  # fmt: skip
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[20, 100, 500, 2000], help="Mbit/s")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.001, 0.25])
    parser.add_argument("--values", type=int, default=1_000_000)
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--json", type=Path, help="a file, written after each rate")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peer:
        asked.mbit = float(asked.peer[1])
        return peer(int(asked.peer[0]), asked)
    reason = why_not()
    if reason:
        sys.exit(reason)
    made, rows = how(), []
    for mbit in asked.rates:
        measured = measure(mbit, asked)
        for verdict in verdicts(measured):
            print(json.dumps(verdict), flush=True)
        rows += measured
        if asked.json:
            setting = {"values": asked.values, "loss": asked.loss}
            found = {**made, **setting, "verdicts": verdicts(rows), "rows": rows}
            asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
