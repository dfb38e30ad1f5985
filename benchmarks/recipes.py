"""How long the quick forms of all recipes take, one after another, and what of each passes.

    python benchmarks/recipes.py            # all: a quarter of an hour or two
    python benchmarks/recipes.py --only rps moshpit
    python benchmarks/recipes.py --out FILE

Each is ``ragtag reproduce PAPER --quick --jobs 2`` as a user runs it, with a new folder: nothing is taken
from an earlier run.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ragtag.recipes import PAPERS
from stored import how

RESULTS = Path(__file__).parent / "results" / "recipes.json"
JOBS = 2


def quick(paper: str, folder: Path) -> dict[str, Any]:
    """Run a recipe's quick form in a folder.

    Raises:
        RuntimeError: it ended without a report.
    """
    before, begin_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    words = ["reproduce", paper, "--quick", "--jobs", str(JOBS), "--out", str(folder)]
    made = subprocess.run(
        [sys.executable, "-m", "ragtag.app.cli.main", *words], check=False, capture_output=True, text=True
    )
    took_s, after = time.monotonic() - begin_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    report = folder / "results.json"
    if not report.exists():
        raise RuntimeError(f"{paper}: no report, exit status {made.returncode}: {made.stderr[-1000:]}")
    rows = json.loads(report.read_text("utf-8"))["rows"]
    return {
        "paper": paper,
        "seconds": round(took_s, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "passed": sum(row["ok"] for row in rows),
        "failed": [f"{row['group']}: {row['quantity']}" for row in rows if not row["ok"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted(PAPERS), default=sorted(PAPERS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    record: dict[str, Any] = {**how(), "jobs": JOBS, "rows": []}
    for paper in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            row = quick(paper, Path(folder))
        record["rows"].append(row)
        print(
            f"{paper:10s} {row['seconds']:6.0f} s ({row['cpu_s']:.0f} s of processor time), "
            f"{row['passed']} of {row['passed'] + len(row['failed'])} pass",
            *row["failed"],
            sep="\n    ",
            flush=True,
        )
    record["seconds"] = round(sum(row["seconds"] for row in record["rows"]), 1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(f"all: {record['seconds'] / 60:.1f} minutes; written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
