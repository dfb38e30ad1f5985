"""Averages with repair in virtual time: whole drivers over lines with a rate, a short queue and loss.

    python benchmarks/repair.py --out benchmarks/results/repair.json

For each line and loss 4 peers average by RPS as it is, by RPS with repair to all and to 99.9 % of each
message, and by all-reduce. Nodes, queues, pacing and datagrams are the product's (benchmarks/lab/drivers.py).
`time` is the median round over what an uplink needs to send all of it once, without loss, and the longest;
`averaged` the share of chunks that came as averages, `heard` that of all peers' chunks in them, `sent` the
packets that left over chunks needed. The first rounds do not count. The goal is a time of 1.3 with repair and
for all-reduce.

On the line of 50 ms a message has 919 chunks: 99.9 % of it are all but none.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from lab.drivers import Drivers
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.protocols.rounds.rps import RPS
from stored import how

GOAL = 1.3
LINES: dict[str, dict[str, float]] = {
    "16 MB, 500 Mbit/s": {},
    "4 MB, 100 Mbit/s, 50 ms": {"mbit": 100.0, "mb": 4.0, "rtt_s": 0.05},
}
LOSSES = 0.0, 0.001, 0.01, 0.05, 0.1
WAYS: tuple[Averager, ...] = RPS(), RPS(repair=True), RPS(repair=0.999), AllReduce()


def measure(line: str, loss: float, averager: Averager, asked: argparse.Namespace) -> dict[str, Any]:
    """One averager on one line."""
    drivers = Drivers(averager, loss=loss, **LINES[line])
    rounds = [drivers.average() for _ in range(asked.warm + asked.rounds)][asked.warm :]
    drivers.close()
    took = [one.s / one.limit_s for one in rounds]
    means = {
        key: statistics.fmean(getattr(one, key) for one in rounds) for key in ("averaged", "heard", "sent")
    }
    row = {
        "line": line, "loss": loss, "way": repr(averager), "median": round(statistics.median(took), 3),
        "longest": round(max(took), 3), **{key: round(mean, 5) for key, mean in means.items()},
    }  # fmt: skip
    print(f"{line:<26}{loss:>6.1%}  {row['way']:<18}{row['median']:>7.2f}{row['longest']:>9.2f}"
          f"{row['averaged']:>10.2%}{row['heard']:>9.2%}{row['sent']:>7.2f}", flush=True)  # fmt: skip
    return row


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--losses", type=float, nargs="+", default=LOSSES)
    parser.add_argument("--lines", nargs="+", default=list(LINES), choices=list(LINES))
    parser.add_argument("--out", type=Path, help="a JSON file, such as benchmarks/results/repair.json")
    asked = parser.parse_args()
    made = how()
    print(f"{'line':<26}{'loss':>6}  {'way':<18}{'time':>7}{'longest':>9}{'averaged':>10}{'heard':>9}"
          f"{'sent':>7}")  # fmt: skip
    rows = [
        measure(line, loss, averager, asked)
        for line in asked.lines
        for loss in asked.losses
        for averager in WAYS
    ]
    if asked.out:
        found = {**made, "world": "virtual time", "goal": GOAL, "rows": rows}
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
