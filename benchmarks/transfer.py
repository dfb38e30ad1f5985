"""What a newcomer's fetch of the state costs a donor that trains, and how long it takes: 3 donors, loopback.

    python benchmarks/transfer.py                                # 4 and 12 MB (1M values; with Adam): 3 min
    python benchmarks/transfer.py --sizes 4e8 --fetches 3 --keep # 400 MB, beside what was measured before

The first donor trains (a torch loop on one core, its donor thread on the same one); the other two, which
only finish the same rounds, and the newcomer run on the other cores. Its steps while a newcomer takes the
state from all three are compared, in the same run, with those while one takes it from the other two (cores
share memory, caches and often more, so that any work beside it slows a trainer), and with those while
nothing goes on: without taking the snapshot (once per newcomer, the trainer's own work) and with it. Pairs
are a fetch and the next one, of the other two: machines drift, and pairs do not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ragtag.network.transfer.donor import DonorServer
from ragtag.network.transfer.fetch import Donor, fetch_state
from ragtag.network.transfer.session import DonorLimits
from ragtag.protocols.transfer.snapshots import Shelf
from stored import how

SCHEMA, LAYOUT = 1, 1
DEADLINE_S = 600.0
LOOK_S = 0.002  # how often those that do not train look how far the one that does is
WINDOW_S = 0.25  # over which the largest share of a core is looked for


class Step(NamedTuple):
    """One step of the training loop: when it began (monotonic, of all processes), how long, if it put.

    used_s: by the donor's thread until then.
    """

    began_s: float
    took_s: float
    put: bool
    used_s: float


Span = tuple[float, float]


def donor(key: bytes, size: int, trains: bool, cores: list[int], pipe: Connection, rounds: Any) -> None:
    """One process: a trainer, and a donor thread beside it. rounds: finished, shared by all donors."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shelf = Shelf(threading.Lock())
    server = DonorServer(key, shelf)
    server.start()
    pipe.send(server.address)
    state = bytes(size)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(256, 256)
    steps: list[Step] = []
    number = 0
    while not pipe.poll():
        began_s = time.monotonic()
        if trains:
            for _ in range(4):
                optimizer.zero_grad()
                (model(inputs) - inputs).square().mean().backward()
                optimizer.step()
            rounds.value = number
        elif rounds.value < number:
            time.sleep(LOOK_S)
            continue
        wanted = shelf.wanted(number)
        if wanted:
            shelf.put(number, number, SCHEMA, LAYOUT, bytes(bytearray(state)))  # copies, as a trainer must
        steps.append(Step(began_s, time.monotonic() - began_s, wanted, server.used_s))
        number += 1
    pipe.recv()
    pipe.send((steps if trains else [], server.used_s, server.given_bytes))
    server.close()


def measure(size: int, fetches: int, pause_s: float) -> dict[str, Any]:
    """One run: ``fetches`` fetches of all three, as many of the other two, and pauses in between."""
    key = secrets.token_bytes(32)
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    processes, pipes, rounds = [], [], context.Value("q", -1, lock=False)
    for i in range(3):
        ours, theirs = context.Pipe()
        mine = cores[:1] if i == 0 else cores[1:] or cores
        processes.append(context.Process(target=donor, args=(key, size, i == 0, mine, theirs, rounds)))
        pipes.append(ours)
        processes[-1].start()
    os.sched_setaffinity(0, cores[1:] or cores)
    donors = [Donor(f"donor-{i}", pipe.recv()) for i, pipe in enumerate(pipes)]
    time.sleep(2 * pause_s)
    spans: list[Span] = []
    beside: list[Span] = []
    given, of_rounds = [], []
    for i in range(2 * fetches):
        began_s = time.monotonic()
        some = donors[i % 2 :]
        fetched = fetch_state(key, some, schema=SCHEMA, deadline_s=DEADLINE_S)
        span = began_s, time.monotonic()
        (beside if i % 2 else spans).append(span)
        if len(some) == len(donors):
            given.append(fetched.given.get("donor-0", 0))
            of_rounds.append(len(fetched.rounds))
        time.sleep(max(pause_s, (span[1] - began_s) / 4))
    for pipe in pipes:
        pipe.send("stop")
    told = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(30)
    os.sched_setaffinity(0, cores)
    steps: list[Step] = told[0][0][10:]
    return {
        "bytes": size,
        "fetch_s": {"median": statistics.median(b - a for a, b in spans), "all": [b - a for a, b in spans]},
        "snapshots_of_one_round": sum(n == 1 for n in of_rounds),
        "trainer_gave_bytes": statistics.mean(given),
        "donor_cpu_share": told[0][1] / sum(b - a for a, b in spans),
        "donor_cpu_share_largest": largest_share(steps),
        **ratios(steps, spans, beside),
    }


def ratios(steps: list[Step], spans: list[Span], beside: list[Span]) -> dict[str, Any]:
    """Steps while all three give, against those while the other two do, and those while nobody does."""
    during, control = ([s for span in some for s in within(steps, span)] for some in (spans, beside))
    calm = [s for s in steps if all(s.began_s + s.took_s < a or s.began_s > b for a, b in spans + beside)]
    free = [s.took_s for s in during if not s.put]
    other, rest = [s.took_s for s in control], [s.took_s for s in calm]
    pairs = []
    for span, next_span in zip(spans, beside, strict=True):
        pair = [[s.took_s for s in within(steps, one) if not s.put] for one in (span, next_span)]
        if all(pair):
            pairs.append(statistics.mean(pair[0]) / statistics.mean(pair[1]))
    return {
        "steps_calm": len(calm),
        "steps_during": len(during),
        "step_s_calm": statistics.mean(rest),
        "step_s_beside_others": statistics.mean(other),
        "ratio_to_others": statistics.mean(free) / statistics.mean(other),
        "ratio_median_to_others": statistics.median(free) / statistics.median(other),
        "ratio_pairs": {"median": statistics.median(pairs), "all": pairs},
        "ratio_mean": statistics.mean(free) / statistics.mean(rest),
        "ratio_mean_with_snapshots": statistics.mean(s.took_s for s in during) / statistics.mean(rest),
        "ratio_median": statistics.median(free) / statistics.median(rest),
    }


def within(steps: list[Step], span: Span) -> list[Step]:
    """Steps that began and ended in it."""
    return [s for s in steps if span[0] <= s.began_s and s.began_s + s.took_s <= span[1]]


def largest_share(steps: list[Step]) -> float:
    """Of a core, that the donor's thread used in any ``WINDOW_S`` or a step more."""
    largest, first = 0.0, 0
    for s in steps:
        while s.began_s - steps[first + 1].began_s >= WINDOW_S:
            first += 1
        took_s = s.began_s - steps[first].began_s
        if took_s >= WINDOW_S:
            largest = max(largest, (s.used_s - steps[first].used_s) / took_s)
    return largest


def show(r: dict[str, Any], allowed: float) -> None:
    """One size as text."""
    print(f"{r['bytes'] / 1e6:g} MB from 3 donors: {r['fetch_s']['median']:.3f} s (median)")
    print(
        f"  the donor that trains: {r['steps_during']} steps meanwhile took {r['ratio_to_others']:.3f} x one "
        f"while others give (median {r['ratio_median_to_others']:.3f} x, of pairs "
        f"{r['ratio_pairs']['median']:.3f} x), {r['ratio_mean']:.3f} x a calm one "
        f"({r['step_s_calm'] * 1e3:.1f} ms); with its snapshots {r['ratio_mean_with_snapshots']:.3f} x"
    )
    print(
        f"  its donor thread used {r['donor_cpu_share']:.2%} of a core (allowed {allowed:.0%}, at most "
        f"{r['donor_cpu_share_largest']:.2%} in {WINDOW_S} s), and gave "
        f"{r['trainer_gave_bytes'] / r['bytes']:.0%} of the state"
    )


def main() -> None:
    """Run all sizes and print ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=lambda text: int(float(text)), nargs="+", default=[4_000_000, 12_000_000]
    )
    parser.add_argument("--fetches", type=int, default=0, help="per size (0: 40; 13 of 12 MB, 5 of 400 MB)")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between fetches, at least")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "transfer.json")
    parser.add_argument("--keep", action="store_true", help="the file's results of other sizes")
    arguments = parser.parse_args()
    made = how()
    limits = DonorLimits()
    results = []
    if arguments.keep:
        before = json.loads(arguments.out.read_text("utf-8"))["results"]
        results = [r for r in before if r["bytes"] not in arguments.sizes]
    for size in arguments.sizes:
        r = measure(size, arguments.fetches or max(5, min(40, 160_000_000 // size)), arguments.pause)
        results.append({**made, **r})
        show(r, limits.cpu_share)
    figures = {
        "limits": {
            "cpu_share": limits.cpu_share,
            "cpu_burst_s": limits.cpu_burst_s,
            "link_share": limits.link_share,
        },
        "results": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
