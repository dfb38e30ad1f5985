"""What peers behind routers that translate addresses cost the others: rounds with and without such routers.

    python -m benchmarks.behind_nat                       # as root, on Linux; six peers, four minutes

Six peers join by a token and average 66 KB in steps of 50 ms over links of 10 Mbit/s, in the lab. Four are
in public. Two are in public, too; or behind a router each that keeps their ports, so that they reach each
other by hole punching; or behind a router each that draws a port for each destination and lets nothing in
unasked, so that what they send each other goes through one of the four; or not there. Runs of the four kinds
are interleaved. Of the four the median and the longest round are compared, and how many peers' values each
round's average has.

Goal: the others' rounds are at most 1.2 times as long, whatever the routers do.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab
from benchmarks.stored import how

N, ALONE, BEHIND = 6, 4, ((4,), (5,))
KINDS = {
    "public": "all in public",
    "cone": "2 behind cone routers",
    "symmetric": "2 behind symmetric routers",
    "without": "4, and nobody else",
}
ROUNDS, WARM = 120, 20
STEP_S, RATE_MBIT, QUEUE_MS = 0.05, 10.0, 100.0
PATIENCE_S = 480.0
"""For one run: a machine that does other work takes a minute to import torch six times."""
GOAL = 1.2
ROOT = Path(__file__).parents[1]

PEER = """
import json, os, time
import torch
import ragtag
from benchmarks.behind_nat import PATIENCE_S, ROUNDS, STEP_S, WARM

N = int(os.environ["PEERS"])
rounds = []
def told(outcome):
    heard = sum(bool((outcome.heard >> peer & 1).any()) for peer in range(N))
    rounds.append((outcome.total_s, heard, float(outcome.averaged.mean())))

with ragtag.join(deadline_s=PATIENCE_S / 4) as crew:
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
    driver = crew._peer.driver
    through = {way.peer: way.through for way in driver.directions() if way.through >= 0}
    found = {"seat": crew.rank, "rounds": rounds[-ROUNDS:-1][WARM:]}
    print(json.dumps({**found, "through": through, "relayed": driver.relayed()}))
"""


def run(kind: str) -> dict[str, Any]:
    """One crew; what the public peers saw, and who relayed how many packets."""
    n = ALONE if kind == "without" else N
    behind = BEHIND if kind in ("cone", "symmetric") else ()
    symmetric = kind == "symmetric"
    with Lab(n, behind=behind, symmetric=symmetric, rate_mbit=RATE_MBIT, queue_ms=QUEUE_MS) as lab:
        peers = lab.joined(f"import os\nos.environ['PEERS'] = '{n}'\n{PEER}")
        said = [json.loads(peer.communicate(timeout=PATIENCE_S)[0]) for peer in peers]
    seen = [one for peer in said[:ALONE] for one in peer["rounds"]]
    return {
        "median_ms": 1e3 * statistics.median(one[0] for one in seen),
        "longest_ms": 1e3 * max(one[0] for one in seen),
        "heard_mean": statistics.mean(one[1] for one in seen),
        "averaged": statistics.mean(one[2] for one in seen),
        "rounds": len(seen),
        "rounds_of_all": [len(peer["rounds"]) for peer in said],
        "heard_by_all": [statistics.mean(one[1] for one in peer["rounds"]) for peer in said],
        "relayed": {peer["seat"]: peer["relayed"] for peer in said if peer["relayed"]},
        "ways_relayed": sum(len(peer["through"]) for peer in said),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3, help="runs of each kind, interleaved")
    parser.add_argument("--out", type=Path, help="a JSON file, such as benchmarks/results/behind_nat.json")
    asked = parser.parse_args()
    made = how()
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for at in range(asked.pairs):
        for kind, name in KINDS.items():
            one = run(kind)
            found[kind].append(one)
            times = f"median {one['median_ms']:.1f} ms, longest {one['longest_ms']:.0f} ms"
            came = f"{one['heard_mean']:.2f} heard, {one['averaged']:.1%} averaged"
            print(f"{at + 1}. {name:>26}: {times}, {came}, relayed {one['relayed'] or 'nothing'}", flush=True)
    medians = {kind: statistics.median(one["median_ms"] for one in runs) for kind, runs in found.items()}
    ratios = {
        "ratio": medians["cone"] / medians["public"],
        "symmetric_ratio": medians["symmetric"] / medians["public"],
        "without_ratio": medians["symmetric"] / medians["without"],
    }
    for name, ratio in ratios.items():
        verdict = "met" if ratio <= GOAL else "MISSED"
        print(f"median rounds, {name}: {ratio:.2f} times as long (goal {GOAL}): {verdict}")
    if asked.out:
        kinds = {"public": "public", "cone": "behind", "symmetric": "symmetric", "without": "without"}
        result = {**made, "goal": GOAL, **ratios, **{kinds[kind]: runs for kind, runs in found.items()}}
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
