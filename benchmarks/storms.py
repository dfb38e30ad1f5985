"""Averaging through storms of random faults: invariants, and progress after healing, seed by seed.

    python benchmarks/storms.py                               # all methods; a quarter of an hour on 2 cores
    python benchmarks/storms.py --seeds 100 --methods moshpit/3 rps
    python benchmarks/storms.py --rounds 12 --from-seed 5000

Each seed is a crew of three to eight peers and a storm: loss, delays, scarce bandwidth, partitions, one-way
links, crashes, freezes, slow peers, duplicates, reordering (``ragtag.simulation.trials.rounds``). No
invariant may break; after healing each peer must do its rounds, and the values of all must come to all:
directly, in one round, or through others where groups are smaller than the crew (``/3``). A seed that fails
is printed with the command that runs it again. All simulated, by the machines that run live.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ragtag.simulation.check.rounds import InvariantBroken
from ragtag.simulation.trials.rounds import METHODS, trial
from stored import how

RESULTS = Path(__file__).parent / "results" / "storms.json"
WITHOUT = ("ring",)
"""Stands still when a peer dies without a word, as a ring does."""


def storm(method: str, rounds: int, seed: int) -> tuple[int, str]:
    """One seed: rounds done in the storm by all peers, and what is wrong."""
    try:
        done = trial(seed, method, rounds)
    except InvariantBroken as error:
        return 0, str(error)
    return sum(done.rounds_done), ""


def of(method: str, args: argparse.Namespace, pool: ProcessPoolExecutor) -> dict[str, Any]:
    """All seeds of one method."""
    began_s = time.perf_counter()
    seeds = range(args.from_seed, args.from_seed + args.seeds)
    found = list(pool.map(partial(storm, method, args.rounds), seeds, chunksize=4))
    failed = [(seed, wrong) for seed, (_, wrong) in zip(seeds, found, strict=True) if wrong]
    for _, wrong in failed:
        print(wrong, flush=True)
    row = {
        "method": method,
        "seeds": args.seeds,
        "rounds": sum(rounds for rounds, _ in found),
        "failed": [seed for seed, _ in failed],
        "invariants_broken": sum("after healing" not in wrong for _, wrong in failed),
        "seconds": round(time.perf_counter() - began_s, 1),
    }
    print(
        f"{method:>16}: {args.seeds} storms, {row['rounds']:,} peers' rounds in them, {len(failed)} failed, "
        f"{row['invariants_broken']} of them by an invariant ({row['seconds']} s)",
        flush=True,
    )
    return row


def main() -> None:
    """Run the storms; with ``--out``, keep the rows."""
    names = [name for name in METHODS if name not in WITHOUT]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--from-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=6, help="that each peer is asked for in its storm")
    parser.add_argument("--methods", nargs="+", default=names, choices=list(METHODS))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help=f"a JSON file, such as {RESULTS}")
    args = parser.parse_args()
    made = how()
    with ProcessPoolExecutor(args.processes) as pool:
        rows = [of(method, args, pool) for method in args.methods]
    if args.out:
        kept = {**made, "world": "virtual time", "rows": rows}
        args.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
