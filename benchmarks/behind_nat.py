"""What peers behind routers that translate addresses cost the others: rounds with and without such routers.

    python -m benchmarks.behind_nat                      # as root, on Linux; six peers, two minutes

Six peers join by a token and average 66 KB in steps of 50 ms over links of 10 Mbit/s, in the lab. Runs with
all in public and runs with two behind a router each are interleaved. Of the four that are public in both, the
median and the longest round are compared, and how many peers' values each round's average has.

Goal: the others' rounds are at most 1.2 times as long.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab
from benchmarks.stored import how

N, BEHIND = 6, ((4,), (5,))
ROUNDS, WARM = 120, 20
STEP_S, RATE_MBIT, QUEUE_MS = 0.05, 10.0, 100.0
GOAL = 1.2
ROOT = Path(__file__).parents[1]

PEER = """
import json, sys, time
import torch
import ragtag
from benchmarks.behind_nat import N, ROUNDS, STEP_S, WARM

rounds = []
def told(outcome):
    heard = sum(bool((outcome.heard >> peer & 1).any()) for peer in range(N))
    rounds.append((outcome.total_s, heard, float(outcome.averaged.mean())))

with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 128)
    optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model, on_outcome=told)
    values = torch.randn(4, 128)
    whole = 0
    while whole < ROUNDS and len(rounds) < 10 * ROUNDS:
        model(values).sum().backward()
        time.sleep(STEP_S)
        optimizer.step()
        whole += bool(whole or rounds and rounds[-1][1] == N)
    print(json.dumps({"seat": crew.rank, "rounds": rounds[-ROUNDS:-1][WARM:]}))
"""


def run(behind: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """One crew; what the public peers saw."""
    with Lab(N, behind=behind, rate_mbit=RATE_MBIT, queue_ms=QUEUE_MS) as lab:
        peers = lab.joined(PEER)
        found = [json.loads(peer.communicate(timeout=180)[0])["rounds"] for peer in peers]
    seen = [one for peer in found[:4] for one in peer]
    return {
        "median_ms": 1e3 * statistics.median(one[0] for one in seen),
        "longest_ms": 1e3 * max(one[0] for one in seen),
        "heard_mean": statistics.mean(one[1] for one in seen),
        "averaged": statistics.mean(one[2] for one in seen),
        "rounds": len(seen),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3, help="runs of each kind, interleaved")
    parser.add_argument("--out", type=Path, help="a JSON file, such as benchmarks/results/behind_nat.json")
    asked = parser.parse_args()
    made = how()
    public, behind = [], []
    for at in range(asked.pairs):
        public.append(run(()))
        behind.append(run(BEHIND))
        for kind, one in (("public", public[-1]), ("2 behind routers", behind[-1])):
            times = f"median {one['median_ms']:.1f} ms, longest {one['longest_ms']:.0f} ms"
            came = f"{one['heard_mean']:.2f} of {N} heard, {one['averaged']:.1%} averaged"
            print(f"{at + 1}. {kind:>16}: {times}, {came}", flush=True)
    medians = [statistics.median(one["median_ms"] for one in kind) for kind in (public, behind)]
    ratio = medians[1] / medians[0]
    print(f"median rounds: {ratio:.2f} times as long (goal {GOAL}): {'met' if ratio <= GOAL else 'MISSED'}")
    if asked.out:
        result = {**made, "goal": GOAL, "ratio": ratio, "public": public, "behind": behind}
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
