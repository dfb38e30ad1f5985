"""How long all recipes of papers take together: ``ragtag reproduce``, one after the other.

    python benchmarks/recipes.py                        # the quick forms; a quarter of an hour on 2 cores
    python benchmarks/recipes.py --full --out FILE      # the full ones; hours

Wall clock and processor time of each, and how many of its numbers are within their tolerance. Reports go to a
folder that is deleted; ``benchmarks/reproduce.py`` stores what a recipe found.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from ragtag.recipes import RECIPES
from reproduce import run
from stored import how

RESULTS = Path(__file__).parent / "results" / "recipes.json"
GOAL_MIN = {"quick": 15, "full": 180}


def ran(paper: str, form: str, jobs: int) -> dict[str, Any]:
    """One recipe."""
    with tempfile.TemporaryDirectory() as folder:
        quick = ["--quick"] if form == "quick" else []
        began_s = time.monotonic()
        cpu_s = run(["ragtag", "reproduce", paper, "--jobs", str(jobs), *quick], Path(folder))
        wall_s = time.monotonic() - began_s
        report = json.loads((Path(folder) / "results.json").read_text("utf-8"))
    passed = sum(row["ok"] for row in report["rows"])
    return {"paper": paper, "wall_s": wall_s, "cpu_s": cpu_s, "passed": passed, "of": len(report["rows"])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="not the quick forms")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"a JSON file, such as {RESULTS.name}")
    args = parser.parse_args()
    form = "full" if args.full else "quick"
    made, rows = how(), []
    for paper in sorted(RECIPES):
        rows.append(row := ran(paper, form, args.jobs))
        print(
            f"{paper:<10} {row['wall_s'] / 60:5.1f} min, {row['cpu_s'] / 60:5.1f} min of processors; "
            f"{row['passed']} of {row['of']} numbers pass",
            flush=True,
        )
    minutes, goal = sum(row["wall_s"] for row in rows) / 60, GOAL_MIN[form]
    found = {"form": form, "jobs": args.jobs, "minutes": minutes, "goal_min": goal, "rows": rows}
    args.out.write_text(json.dumps({**made, **found}, indent=1) + "\n", "utf-8")
    print(f"all {form} forms: {minutes:.1f} min (goal {goal}); written to {args.out}")


if __name__ == "__main__":
    main()
