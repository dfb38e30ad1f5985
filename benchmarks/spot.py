"""How much of what spot machines compute ends in the crew's model: 1,000 of them, in virtual time.

    python benchmarks/spot.py                        # 1,000 machines for 20 minutes
    python benchmarks/spot.py --peers 100 --out /tmp/spot.json

Each machine lives for 20 minutes on average and is followed by another, on lines of 20 to 1,000 Mbit/s with
round trips of 20 to 200 ms. They average in groups that are drawn anew, and none of them is special
(``ragtag.recipes.internet.spot``; the full ``ragtag reproduce internet`` runs the same beside its training).
Nothing is trained: the averagers' own machines run, on short vectors over lines that are slow in proportion.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from ragtag.recipes.internet.spot import SpotSetup, spot
from stored import how

RESULTS = Path(__file__).parent / "results" / "spot.json"
GOAL = 0.88
"""Decoupled DiLoCo's (Douillard et al., arXiv 2604.21428)."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"a JSON file, such as {RESULTS}")
    args = parser.parse_args()
    began_s = time.process_time()
    run = spot(SpotSetup(args.peers, seed=args.seed))
    parts = {name: getattr(run, name) / run.all for name in ("useful", "died", "joined", "waited")}
    found = {
        "settings": asdict(run.setup),
        "goodput": run.goodput,
        "goal": GOAL,
        "shares": parts,
        "deaths": run.deaths,
        "averages": run.rounds,
        "alone": run.alone / max(1, run.rounds),
        "processor_s": round(time.process_time() - began_s, 1),
    }
    args.out.write_text(json.dumps({**how(__file__), **found}, indent=1) + "\n", "utf-8")
    print(f"goodput {run.goodput:.1%} (goal {GOAL:.0%}), {run.deaths:,} deaths; written to {args.out}")


if __name__ == "__main__":
    main()
