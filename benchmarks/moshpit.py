"""How large a crew the simulated world carries: Moshpit rounds of 1,024 and of 10,000 peers.

    python benchmarks/moshpit.py              # both, one process each
    python benchmarks/moshpit.py --case 1024

- 1024: 5 rounds in groups of 32 on a grid of 32 x 32, a vector of one chunk per member; goal 30 s.
- 10000: 10 rounds in groups of 10 on a grid of 10^4, a vector of one chunk per member; goals 3 minutes, 4 GB.

All of a run is timed: making values and peers, matchmaking, averaging, and the variance after each round. A
run is one thread, so its CPU time is what it takes on a quiet machine: the goals are held against that.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragtag.recipes.moshpit.run import Case, run
from stored import how

RESULTS = Path(__file__).parent / "results" / "moshpit.json"
CASES = {
    "1024": Case("moshpit", 1024, (32, 32), chunks=32, rounds=5, until=0.0),
    "10000": Case("moshpit", 10_000, (10,) * 4, chunks=10, rounds=10, until=0.0),
}
GOALS_S = {"1024": 30.0, "10000": 180.0}
GOAL_BYTES = 4 << 30


def measure(name: str) -> dict[str, Any]:
    case = CASES[name]
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    found = run(case, seed=0)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    exact = len(case.sides)
    if not found.variance[exact] < 1e-12:
        raise RuntimeError(f"variance {found.variance[exact]} after {exact} rounds on a full grid: not exact")
    return {
        "case": asdict(case),
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "goal_s": GOALS_S[name],
        "events": found.events,
        "event_cpu_us": 1e6 * cpu_s / found.events,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "goal_bytes": GOAL_BYTES,
        "virtual_s": found.virtual_s,
        "variance": found.variance,
        "load_average_1min": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="only this one")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    made = how()
    results, met = {}, True
    for name in arguments.case or CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # for a peak of memory of its own
            result = results[name] = pool.apply(measure, (name,))
        met &= result["cpu_s"] <= result["goal_s"] and result["peak_bytes"] <= GOAL_BYTES
        print(
            f"{name} peers, {result['case']['rounds']} rounds: {result['wall_s']:.1f} s (CPU "
            f"{result['cpu_s']:.1f} s; goal {result['goal_s']:.0f} s), {result['peak_bytes'] / 1e9:.2f} GB, "
            f"{result['events']} events, {result['event_cpu_us']:.1f} us each"
        )
    record = {
        **made,
        "results": results,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.output}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
