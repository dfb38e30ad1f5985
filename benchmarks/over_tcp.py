"""What it costs a crew that one peer is reached over TCP only: rounds with and without its UDP.

    python -m benchmarks.over_tcp                         # as root, on Linux; four peers, some minutes

Four peers join by a token and average 1 MB over links of 20 Mbit/s, in the lab. All go by UDP; or nftables
drops all UDP at one of them, so that three of six pairs go over TCP, as they find out themselves. Runs of the
two kinds are interleaved. The median and the longest round are compared, and what of the values is averaged.

Goal: rounds are at most 1.2 times as long, and all are whole.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.lab import Lab

N, PAIRS, ROUNDS, WARM = 4, 2, 30, 10
RATE_MBIT, QUEUE_MS, SIDE = 20.0, 100.0, 500
KINDS = {"udp": "all by UDP", "tcp": "one by TCP"}
PATIENCE_S = 240.0
GOAL = 1.2
NO_UDP = """
table inet shut {
  chain out { type filter hook output priority 0; meta l4proto udp drop; }
  chain in { type filter hook input priority 0; meta l4proto udp drop; }
}
"""

PEER = """
import json, time
import torch
import ragtag
from benchmarks.over_tcp import N, PATIENCE_S, ROUNDS, SIDE

rounds = []
def told(outcome):
    heard = sum(bool((outcome.heard >> peer & 1).any()) for peer in range(N))
    rounds.append((outcome.total_s, heard, float(outcome.averaged.mean())))

began_s = time.monotonic()
with ragtag.join(deadline_s=PATIENCE_S / 2) as crew:
    model = torch.nn.Linear(SIDE, SIDE)
    optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model, on_outcome=told)
    values, whole = torch.randn(4, SIDE), 0
    while whole < ROUNDS and time.monotonic() < began_s + PATIENCE_S:
        model(values).sum().backward()
        optimizer.step()
        whole += bool(whole or rounds and rounds[-1][1] == N)
    streamed = sum(way.streamed for way in crew._peer.driver.directions())
    print(json.dumps({"rounds": rounds[-ROUNDS:-1], "streamed": streamed}))
"""


def run(kind: str) -> dict[str, Any]:
    """One crew: how long its rounds took, and over how many of its twelve ways it sent by TCP."""
    with Lab(N, rate_mbit=RATE_MBIT, queue_ms=QUEUE_MS) as lab:
        if kind == "tcp":
            lab.run(N - 1, "nft", "-f", "-", stdin=NO_UDP)
        said = [json.loads(peer.communicate(timeout=2 * PATIENCE_S)[0]) for peer in lab.joined(PEER)]
    seen = [one for peer in said for one in peer["rounds"][WARM:]]
    return {
        "median_s": statistics.median(one[0] for one in seen),
        "longest_s": max(one[0] for one in seen),
        "heard_mean": statistics.mean(one[1] for one in seen),
        "averaged": statistics.mean(one[2] for one in seen),
        "rounds": len(seen),
        "ways_over_tcp": sum(peer["streamed"] for peer in said),
    }


def main() -> None:
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(PAIRS):
        for kind, name in KINDS.items():
            one = run(kind)
            medians[kind].append(one["median_s"])
            figures = ", ".join(f"{what} {figure:.4g}" for what, figure in one.items())
            print(f"{name}: {figures}", flush=True)
    ratio = statistics.median(medians["tcp"]) / statistics.median(medians["udp"])
    print(f"median rounds: {ratio:.2f} times as long (goal {GOAL}): {'met' if ratio <= GOAL else 'MISSED'}")


if __name__ == "__main__":
    main()
