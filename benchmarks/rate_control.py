"""Rate control in virtual time: a crew's averages over lines of a rate, for each controller.

    python benchmarks/rate_control.py --out benchmarks/results/rate_control.json

For each line (rate, round trip, queue, loss) 4, 8 or 16 peers average 18 times, as they would live: the
paths and controllers are the product's (benchmarks/lab/line.py). `time` is the median round over what an
uplink needs to send all of it, and the longest; `dropped` the share of datagrams that found no room in a
queue, in all rounds and in the first. The first three do not count for the time. Then, the share of a line of
50 Mbit/s that one path has beside one TCP flow (CUBIC); the goal is a third to two thirds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.line import Crew, share_beside_tcp
from ragtag.network.control.controller import Controller
from ragtag.network.control.path import CONTROLLERS
from stored import how

WARM, ROUNDS = 3, 18
LINES: tuple[dict[str, Any], ...] = (
    {},
    {"loss": 0.01},
    {"loss": 0.05},
    {"loss": 0.1},
    {"queue_ms": 5.0},
    {"queue_ms": 2.0},
    {"mbit": 100.0, "mb": 4.0},
    {"mbit": 100.0, "mb": 4.0, "rtt_s": 0.05},
    {"mbit": 100.0, "mb": 4.0, "rtt_s": 0.05, "loss": 0.01},
    {"mbit": 100.0, "mb": 4.0, "rtt_s": 0.05, "loss": 0.1},
    {"loss": 0.06, "bursts": 3.3},
    {"rtt_s": 0.002, "jitter_s": 0.001},
    {"mbit": 100.0, "mb": 4.0, "rtt_s": 0.04, "jitter_s": 0.01},
    {"mbit": 100.0, "mb": 0.16, "rtt_s": 0.04, "loss": 0.06, "bursts": 3.3},
    {"n": 8},
    {"n": 16, "queue_ms": 2.0},
)


BESIDE: tuple[dict[str, Any], ...] = (
    {},
    {"queue_ms": 5.0},
    {"queue_ms": 50.0},
    {"rtt_s": 0.01},
    {"rtt_s": 0.05, "queue_ms": 50.0},
    {"message": 2000.0},
    {"message": 6000.0},
)


def beside(name: str, make: Callable[[], Controller], line: dict[str, Any]) -> dict[str, Any]:
    """One controller beside TCP."""
    share = round(share_beside_tcp(make(), **line), 3)
    said = ", ".join(f"{key} {value:g}" for key, value in line.items()) or "20 ms of queue, .2 ms, endless"
    print(f"{said:<44}{name:<8}{share:>7.2f}", flush=True)
    return {"control": name, "line": line, "share_beside_cubic": share}


def measure(name: str, make: Callable[[], Controller], line: dict[str, Any]) -> dict[str, Any]:
    """One controller on one line."""
    crew = Crew(make, **line)
    rounds = [crew.average() for _ in range(ROUNDS)]
    took = [one.s / one.limit_s for one in rounds[WARM:]]
    row = {
        "control": name, "line": line, "median": round(statistics.median(took), 3),
        "longest": round(max(took), 3),
        "dropped": round(sum(one.dropped for one in rounds) / sum(one.sent for one in rounds), 5),
        "dropped_first": round(rounds[0].dropped / rounds[0].sent, 5),
    }  # fmt: skip
    said = ", ".join(f"{key} {value:g}" for key, value in line.items()) or "500 Mbit/s, 20 ms, .2 ms, 16 MB"
    print(f"{said:<44}{name:<8}{row['median']:>7.2f}{row['longest']:>8.2f}{row['dropped']:>9.2%}", flush=True)
    return row


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--controls", nargs="+", default=list(CONTROLLERS), choices=list(CONTROLLERS))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    made = how()
    print(f"{'line':<44}{'control':<8}{'time':>7}{'longest':>8}{'dropped':>9}")
    rows = [measure(name, CONTROLLERS[name], line) for line in LINES for name in asked.controls]
    print("the share beside one TCP flow (goal: .33 to .67)")
    rows += [beside(name, CONTROLLERS[name], line) for line in BESIDE for name in asked.controls]
    if asked.out:
        kept = {**made, "world": "virtual time", "rows": rows}
        asked.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
