"""Who computes and who averages what: plans beside simpler rules, on the paper's mixes and on random ones.

    python benchmarks/roles.py

The paper is DeDLOC (Diskin et al., NeurIPS 2021). Mixes: ``unlike``: 16 workers, four of 200, eight of 100
and four of 50 Mbit/s, with four auxiliaries of 500; ``A``: 8 workers of 1 Gbit/s; ``B``: 16 of 200 Mbit/s;
``A + B``: both together. Rates are those of ``ragtag.optim.roles``: of steady streams, computed and not run,
since blocks of a crew are of one size as yet.

For each mix: averages of 100 MB per minute where all workers compute, by each rule, by the linear program,
and by the paper's own program, which is an upper bound; then steps per minute where computing a batch takes
all workers, alike in speed, as long as averaging takes by hivemind's rule, and the plan may leave some out.

Random mixes: of 3 to 12 peers with unlike rates, auxiliaries and clients: how much faster the plan is than
the best of the rules, and, of up to 8 peers, how close the search for who computes comes to all 2^n.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from ragtag.core.seed import generator
from ragtag.optim.roles import (
    Capacity,
    Mix,
    all_reduce,
    assign,
    best_shares,
    equal_shares,
    parameter_server,
    simple_rule,
    upper_bound,
)

RESULTS = Path(__file__).parent / "results" / "roles.json"
MBIT, VECTOR_BYTES = 1e6 / 8, 1e8
RULES = {
    "parameter server": parameter_server,
    "all-reduce": all_reduce,
    "equal shares": equal_shares,
    "simple rule": simple_rule,
}


def workers(mbit: float, many: int) -> tuple[Capacity, ...]:
    return (Capacity(mbit * MBIT, mbit * MBIT, 1.0),) * many


MIXES = {
    "unlike": (
        *workers(200, 4),
        *workers(100, 8),
        *workers(50, 4),
        *(Capacity(500 * MBIT, 500 * MBIT),) * 4,
    ),
    "A": workers(1000, 8),
    "B": workers(200, 16),
    "A + B": (*workers(1000, 8), *workers(200, 16)),
}


def of_the_paper(peers: tuple[Capacity, ...]) -> dict[str, Any]:
    """One mix: averages and steps per minute."""
    mix = Mix(peers, 1.0, VECTOR_BYTES)
    averages = {name: 60 * rule(mix).averaging_per_s for name, rule in RULES.items()}
    best = best_shares(mix, mix.able)
    averages["linear program"] = 60 * best.averaging_per_s
    free = Mix(peers, 1e-9, VECTOR_BYTES)  # computing never bounds it
    averages["the paper's program"] = 60 * upper_bound(free, free.able)
    batch = float(mix.samples.sum()) / simple_rule(mix).averaging_per_s
    balanced = Mix(peers, batch, VECTOR_BYTES)
    began_s = time.process_time()
    plan = assign(balanced)
    took_s = time.process_time() - began_s
    steps = {name: 60 * rule(balanced).steps_per_s for name, rule in RULES.items()}
    steps["plan"] = 60 * plan.steps_per_s
    return {
        "averages_per_minute": {name: round(rate, 3) for name, rate in averages.items()},
        "shares_of_linear_program": shares_of(peers, best.shares),
        "steps_per_minute": {name: round(rate, 3) for name, rate in steps.items()},
        "plan_computes": sum(plan.computes),
        "plan_cpu_s": round(took_s, 3),
    }


def shares_of(peers: tuple[Capacity, ...], shares: tuple[float, ...]) -> dict[str, float]:
    """The mean share of each kind of peer."""
    kinds: dict[str, list[float]] = {}
    for peer, share in zip(peers, shares, strict=True):
        what = "worker" if peer.samples_per_s else "auxiliary"
        kinds.setdefault(f"{what} of {peer.up_bytes_per_s / MBIT:.0f} Mbit/s", []).append(share)
    return {kind: round(statistics.fmean(of), 4) for kind, of in kinds.items()}


def random_mix(seed: int) -> Mix:
    draw = generator(seed, "roles benchmark")
    peers = []
    for _ in range(int(draw.integers(3, 13))):
        up = float(100 * MBIT * draw.lognormal(0, 1))
        samples = 0.0 if draw.random() < 0.2 else float(draw.lognormal(0, 1))
        peers.append(Capacity(up, up * float(draw.choice([1, 1, 5])), samples, bool(draw.random() < 0.2)))
    if all(peer.client for peer in peers):
        peers[0] = replace(peers[0], client=False)
    if not any(peer.samples_per_s for peer in peers):
        peers[-1] = replace(peers[-1], samples_per_s=1.0)
    mix = Mix(tuple(peers), 1.0, VECTOR_BYTES)
    batch = float(mix.samples.sum()) / simple_rule(mix).averaging_per_s * float(draw.lognormal(0, 0.5))
    return Mix(tuple(peers), batch, VECTOR_BYTES)


def at_random(many: int) -> dict[str, Any]:
    """How much faster plans are than the best rule, and how close to brute force."""
    gains, fewer, apart, slower = [], 0, [], 0
    for seed in range(many):
        mix = random_mix(seed)
        plan = assign(mix)
        best = max(rule(mix).steps_per_s for rule in RULES.values())
        gains.append(plan.steps_per_s / best)
        slower += plan.steps_per_s < best
        fewer += sum(plan.computes) < sum(mix.able)
        if mix.n <= 8:
            some = (c for c in product((False, True), repeat=mix.n) if any(c))
            fit = [c for c in some if all(able or not on for on, able in zip(c, mix.able, strict=True))]
            apart.append(plan.steps_per_s / max(best_shares(mix, c).steps_per_s for c in fit))
    return {
        "mixes": many,
        "slower_than_best_rule": slower,
        "times_best_rule": {
            "median": round(statistics.median(gains), 3),
            "tenth": round(float(np.quantile(gains, 0.1)), 3),
            "ninetieth": round(float(np.quantile(gains, 0.9)), 3),
            "most": round(max(gains), 3),
        },
        "plans_in_which_some_do_not_compute": fewer,
        "beside_brute_force": {
            "mixes": len(apart),
            "lowest": round(min(apart), 4),
            "below_0.95": sum(ratio < 0.95 for ratio in apart),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixes", type=int, default=200, help="random ones")
    parser.add_argument("--out", default=str(RESULTS))
    arguments = parser.parse_args()
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    found: dict[str, Any] = {
        "command": " ".join(["python benchmarks/roles.py", *sys.argv[1:]]),
        "commit": subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip(),
        "python": platform.python_version(),
        "scipy": scipy.__version__,
        "world": "computed rates of steady streams; no rounds are run by these shares",
        "vector_bytes": VECTOR_BYTES,
        "mixes": {name: of_the_paper(peers) for name, peers in MIXES.items()},
        "random": at_random(arguments.mixes),
    }
    for name, mix in found["mixes"].items():
        for what in ("averages_per_minute", "steps_per_minute"):
            print(f"{name:7} {what:20}", "  ".join(f"{rule} {rate:.2f}" for rule, rate in mix[what].items()))
        print(f"{name:7} shares {mix['shares_of_linear_program']}, plan computes {mix['plan_computes']}")
    print(json.dumps(found["random"]))
    path = Path(arguments.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
