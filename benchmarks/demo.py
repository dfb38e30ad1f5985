"""What `ragtag demo` comes to, several times over: the main job, and what it promises.

    python benchmarks/demo.py --runs 3 --out benchmarks/results/demo.json

Each run is a whole demo: six peers that lose a tenth of their datagrams, of which one is frozen and one is
killed; the same without faults; one peer alone on its shard; and one process on all the data. About a minute
each. It exits with 1 where a run broke a promise; what it found is stored all the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.append(str(Path(__file__).parent))

from ragtag.app.demo import DemoPlan, DemoResult, run_demo
from stored import how

RESULTS = "benchmarks/results/demo.json"


def row(result: DemoResult) -> dict[str, Any]:
    """The figures of a run, without where its files lie, and with names that a page's formula can hold."""
    kept = {key: value for key, value in result.to_json().items() if key not in ("report", "folder")}
    kept["samples"]["everything"] = kept["samples"].pop("all-data")
    return kept


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--out", type=Path, help=f"a JSON file, such as {RESULTS}")
    asked = parser.parse_args()
    made, plan, rows = how(), DemoPlan(), []
    for at in range(asked.runs):
        print(f"\nrun {at + 1} of {asked.runs}")
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(run_demo(plan=plan, folder=Path(folder) / "demo", console=Console(), live=False)))
    if asked.out:
        kept = {**made, "plan": asdict(plan), "rows": rows}
        asked.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0 if all(found["ok"] for found in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
