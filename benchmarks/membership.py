"""How true and how fast membership is: false deaths under loss, real deaths, and storms of faults.

    python benchmarks/membership.py                # all figures; half an hour on one quiet core
    python benchmarks/membership.py --minutes 300 --deaths 60 --storms 50
    python benchmarks/membership.py --only storms --storms 1000 --from-seed 0

- quiet: crews of live peers at 20 % loss; a false death is one live member declared dead by one other.
  Goal: at most 1 in 1,000 peer-minutes.
- deaths: one peer of a crew dies, at 0 and at 20 % loss. In protocol periods (of the crew's slowest member):
  until somebody suspects it, until somebody declares it dead, and until the last member does.
  Goals at the 99th percentile: suspected within 3, declared within 10.
- storms: `ragtag.simulation.trials.membership`: invariants, and agreement after healing, seed by seed.

All simulated. Round trips of 40 to 60 ms; the protocol period follows from them, and is given beside.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # tests import this file, too

from ragtag.core.faults import Faults, Loss
from ragtag.protocols.membership.types import Status
from ragtag.simulation.check.rounds import InvariantBroken
from ragtag.simulation.trials.membership import MemberTrial, member_trial
from ragtag.simulation.worlds.members import MemberWorld, changes, name_of
from stored import how

Each = Callable[[Callable[..., Any], Iterable[Any]], Iterable[Any]]
RESULTS = Path(__file__).parent / "results" / "membership.json"
SIZES = (2, 4, 8, 16, 64)
SETTLE_S = 15.0
FALSE_DEATHS_GOAL = 1.0
"""In 1,000 peer-minutes."""
SUSPECTED_GOAL, DECLARED_GOAL = 3.0, 10.0
"""Protocol periods, at the 99th percentile."""


def crew(n: int, loss: float, seed: int) -> MemberWorld:
    """A crew that has come to know itself."""
    line = Faults(loss=Loss(loss) if loss else None, latency_s=0.02, jitter_s=0.005)
    world = MemberWorld(line, seed)
    for peer in range(n):
        world.start(peer, () if peer == 0 else (0,))
    world.run(SETTLE_S)
    while not world.agreed():
        world.run(world.now_s + 1.0)
    return world


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that a share ``q`` of them does not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -int(-q * len(ranked) // 1) - 1))]


def quiet(
    n: int, minutes: float, seed: int, until_unix_s: float = math.inf, loss: float = 0.2
) -> dict[str, Any]:
    """A crew in which nobody dies, for ``minutes`` peer-minutes, or as many as there is time for."""
    world = crew(n, loss, seed)
    from_s, sent, size = world.now_s, world.datagrams, world.bytes
    span_s = 60.0 * minutes / n
    false_deaths = suspicions = 0
    while world.now_s < from_s + span_s and time.time() < until_unix_s:
        world.seen.clear()
        world.run(min(world.now_s + 30.0, from_s + span_s))
        for _, change in changes(world):
            false_deaths += change.member.status is Status.DEAD
            suspicions += change.member.status is Status.SUSPECT
    peer_s = (world.now_s - from_s) * n
    return {
        "peers": n,
        "loss": loss,
        "seed": seed,
        "peer_minutes": peer_s / 60,
        "false_deaths": false_deaths,
        "suspicions_per_peer_minute": suspicions / (peer_s / 60),
        "period_s": statistics.median(life.machine.period_s for life in world.lives),
        "datagrams_per_s": (world.datagrams - sent) / peer_s,
        "bytes_per_s": (world.bytes - size) / peer_s,
    }


def deaths(
    n: int, loss: float, count: int, first_seed: int, until_unix_s: float = math.inf
) -> dict[str, Any]:
    """``count`` deaths (or as many as there is time for), each in a crew of its own and at its own time."""
    suspected, declared, by_all, periods = [], [], [], []
    for seed in range(first_seed, first_seed + count):
        if periods and time.time() > until_unix_s:
            break
        world = crew(n, loss, seed)
        period_s = max(life.machine.period_s for life in world.lives)
        world.run(world.now_s + period_s * (seed % 17) / 17)
        world.seen.clear()
        died_s, name = world.now_s, name_of(n - 1)
        world.crash(n - 1)
        views = [life.machine.members() for life in world.lives[: n - 1]]
        # one that some suspected for lost datagrams when it died has no news of that to bring any more
        already = any(view[name].status is Status.SUSPECT for view in views if name in view)
        first: dict[Status, list[float]] = {Status.SUSPECT: [], Status.DEAD: []}
        while len(first[Status.DEAD]) < n - 1 and world.now_s < died_s + 60 * period_s:
            world.run(world.now_s + period_s)
            first = {
                status: [
                    (seen.at_s - died_s) / period_s
                    for seen, change in changes(world)
                    if change.member.name == name and change.member.status is status
                ]
                for status in first
            }
        missing = [float("inf")] * (n - 1 - len(first[Status.DEAD]))
        suspected.append(0.0 if already else min(first[Status.SUSPECT], default=float("inf")))
        declared.append(min(first[Status.DEAD], default=float("inf")))
        by_all.append(max([*first[Status.DEAD], *missing]))
        periods.append(period_s)
    record: dict[str, Any] = {"peers": n, "loss": loss, "deaths": len(periods), "first_seed": first_seed}
    record["period_s"] = statistics.median(periods)
    for what, values in (("suspected", suspected), ("declared", declared), ("declared_by_all", by_all)):
        record[f"{what}_periods"] = {
            "median": statistics.median(values),
            "p99": quantile(values, 0.99),
            "max": max(values),
        }
    return record


def storm(seed: int, until_unix_s: float = math.inf) -> MemberTrial | dict[str, Any] | None:
    """One seed's trial; where it fails, what broke, with the command that shows it again."""
    if time.time() > until_unix_s:
        return None
    try:
        return member_trial(seed)
    except InvariantBroken as error:
        print(f"storms: {error}", flush=True)
        return {"seed": seed, "what": error.what, "replay": error.replay}


def storms(count: int, first_seed: int, each: Each = map) -> dict[str, Any]:
    """Trials of as many seeds, and those that fail."""
    failed, after_s, lives = [], [], 0
    for trial in each(storm, range(first_seed, first_seed + count)):
        if isinstance(trial, dict):
            failed.append(trial)
        elif trial is not None:
            after_s.append(trial.agreed_after_s)
            lives += trial.lives
    return {
        "seeds": len(after_s) + len(failed),
        "first_seed": first_seed,
        "processes": lives,
        "failed": failed,
        "agreed_after_s": {
            "median": statistics.median(after_s),
            "p99": quantile(after_s, 0.99),
            "max": max(after_s),
        },
    }


def report(results: dict[str, Any]) -> None:
    """What came out, beside the goals."""
    if "quiet" in results:
        minutes = sum(r["peer_minutes"] for r in results["quiet"])
        false_deaths = sum(r["false_deaths"] for r in results["quiet"])
        print(
            f"quiet: {false_deaths} false deaths in {minutes:.0f} peer-minutes at 20 % loss: "
            f"{1000 * false_deaths / minutes:.2f} in 1,000 (goal {FALSE_DEATHS_GOAL:g})"
        )
    for r in results.get("deaths", ()):
        p99 = {key: r[f"{key}_periods"]["p99"] for key in ("suspected", "declared", "declared_by_all")}
        print(
            f"deaths: {r['peers']} peers, {r['loss']:.0%} loss, {r['deaths']} deaths, period "
            f"{r['period_s']:.2f} s; 99th percentile: suspected after {p99['suspected']:.2f} periods (goal "
            f"{SUSPECTED_GOAL:g}), declared after {p99['declared']:.2f} (goal {DECLARED_GOAL:g}), by all "
            f"after {p99['declared_by_all']:.2f}"
        )
    if "storms" in results:
        r = results["storms"]
        print(
            f"storms: {r['seeds'] - len(r['failed'])} of {r['seeds']} seeds hold; all agree "
            f"{r['agreed_after_s']['median']:.1f} s after healing (median; at most "
            f"{r['agreed_after_s']['max']:.1f} s)"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=600.0, help="peer-minutes for each size of crew")
    parser.add_argument(
        "--deaths", type=int, default=200, help="for each size and loss (over 16 peers: a quarter)"
    )
    parser.add_argument("--storms", type=int, default=1000, help="seeds")
    parser.add_argument("--from-seed", type=int, default=0)
    parser.add_argument(
        "--limit-s", type=float, default=math.inf, help="stop each part after so many seconds"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", choices=["quiet", "deaths", "storms"], action="append")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    parts = arguments.only or ["quiet", "deaths", "storms"]
    results: dict[str, Any] = {}
    commands: dict[str, str] = {}
    made = how()
    seed = arguments.from_seed
    for part in parts:
        started_s = time.perf_counter()
        until_s = time.time() + arguments.limit_s
        with ProcessPoolExecutor(arguments.jobs) as pool:
            sizes = sorted(arguments.sizes, reverse=True)  # the long ones first
            if part == "quiet":
                n = len(sizes)
                results[part] = list(
                    pool.map(quiet, sizes, [arguments.minutes] * n, [seed] * n, [until_s] * n)
                )
            elif part == "deaths":
                cases = [(n, loss) for n in sizes for loss in (0.0, 0.2)]
                counts = [arguments.deaths // (4 if n > 16 else 1) for n, _ in cases]
                ns, losses = zip(*cases, strict=True)
                results[part] = list(
                    pool.map(deaths, ns, losses, counts, [seed] * len(cases), [until_s] * len(cases))
                )
            else:
                results[part] = storms(
                    arguments.storms,
                    seed,
                    lambda call, seeds, pool=pool, until_s=until_s: pool.map(
                        partial(call, until_unix_s=until_s), seeds, chunksize=5
                    ),
                )
        commands[part] = made["command"]
        for found in results[part] if isinstance(results[part], list) else [results[part]]:
            found["commit"] = made["commit"]  # in each, since parts may be measured one by one
        print(f"{part}: {time.perf_counter() - started_s:.0f} s", flush=True)
    report(results)
    if arguments.only and arguments.output.exists():  # the other figures stay as they were
        old = json.loads(arguments.output.read_text(encoding="utf-8"))
        commands, results = {**old["commands"], **commands}, {**old["results"], **results}
    record = {
        "commands": commands,
        "machine": made["machine"],
        "goals": {
            "false_deaths_per_1000_peer_minutes": FALSE_DEATHS_GOAL,
            "suspected_p99_periods": SUSPECTED_GOAL,
            "declared_p99_periods": DECLARED_GOAL,
        },
        "results": results,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.output}")
    return 1 if results.get("storms", {}).get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
