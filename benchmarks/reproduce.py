"""Stores what ``ragtag reproduce`` found beside the other results, with the command that made it.

    python benchmarks/reproduce.py diloco --seeds 3 --jobs 2            # runs the recipe, hours perhaps
    python benchmarks/reproduce.py diloco --seeds 3 --jobs 2 --from FOLDER --commit 1a2b3c4

Options that are not named below are ``ragtag reproduce``'s own. The report goes to --out, where a run that
was cut goes on when it is started again. --from takes a report that the command has left in FOLDER at that
commit, and runs nothing. Kept are all rows, tables and notes; the curves behind them stay in the report.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # tests import this file, too

from ragtag.recipes.base import FORMAT
from stored import commit, machine, pace

RESULTS = Path(__file__).parent / "results"
ROW = ("group", "quantity", "relation", "expected", "tolerance", "measured", "error", "ok")


def stored(
    report: dict[str, Any], command: Sequence[str], made: dict[str, Any], cpu_s: float | None
) -> dict[str, Any]:
    """What is kept of a report. made: its machine and commit. cpu_s: of all its processes, if that is known.

    Raises:
        ValueError: it is of another format, or of another paper than the command's.
    """
    if report.get("format") != FORMAT:
        raise ValueError(f"the report has format {report.get('format')!r}; known is {FORMAT}")
    if report["recipe"] != command[2]:
        raise ValueError(f"the report is of {report['recipe']}, the command of {command[2]}")
    rows = [{name: row[name] for name in ROW} for row in report["rows"]]
    passed = sum(row["ok"] for row in rows)
    return {
        "command": " ".join(command),
        **made,
        **({} if cpu_s is None else {"cpu_s": round(cpu_s, 1)}),
        "settings": report["settings"],
        "passed": passed,
        "failed": len(rows) - passed,
        "rows": rows,
        "tables": report["tables"],
        "notes": report["notes"],
    }


def run(command: Sequence[str], out: Path) -> float:
    """Run it, and say how much processor time it took. What fails to be reproduced is no error of the run."""
    (out / "results.json").unlink(missing_ok=True)  # what is read in the end is this run's
    cli = [sys.executable, "-m", "ragtag.app.cli.main", *command[1:], "--out", str(out)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(cli, check=False)  # ends with 1 where a number fails: the report says so
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paper", help="which recipe")
    parser.add_argument("--out", type=Path, help="the report's folder (default: runs/stored-PAPER)")
    parser.add_argument("--from", dest="made", type=Path, metavar="FOLDER", help="of a finished report")
    parser.add_argument("--commit", help="with --from: at which it was made")
    parser.add_argument("--output", type=Path, help="where to write (default: results/reproduce_PAPER.json)")
    arguments, options = parser.parse_known_args(given)
    if (arguments.made is None) != (arguments.commit is None):
        parser.error("--from and --commit go together: a report does not say at which commit it was made")
    command = ["ragtag", "reproduce", arguments.paper, *options]
    if arguments.made is None:
        folder = arguments.out or Path("runs") / f"stored-{arguments.paper}"
        made = {"machine": machine() | pace(), "commit": commit()}
        cpu_s: float | None = run(command, folder)
    else:
        folder, cpu_s = arguments.made, None
        made = {"machine": machine(), "commit": arguments.commit}  # its pace then is not known
    report = json.loads((folder / "results.json").read_text("utf-8"))
    output = arguments.output or RESULTS / f"reproduce_{arguments.paper}.json"
    figures = stored(report, command, made, cpu_s)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    print(f"{figures['passed']} of {len(figures['rows'])} numbers pass; written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
