"""How long a newcomer takes from its first message to its first average, where a peer freezes meanwhile.

    python benchmarks/newcomer.py                 # 8 peers, 40 newcomers for each row
    python benchmarks/newcomer.py --runs 10 --out benchmarks/results/newcomer.json

In virtual time, by the machines that run live: membership, seats, meetings, the state's transfer, rounds.
Lines take 5 ms and another 10 on average, as answers do between processes on two busy cores. In each row a
peer, drawn anew, freezes for 2 to 6 s (or dies, or datagrams are lost) at a time drawn from one phase of the
newcomer's way in, as that runs undisturbed. First, for comparison, newcomers wait in meetings for all:
until the frozen one thaws or is declared dead, and without asking again for what was lost.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from ragtag.core import seed as random
from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.protocols.rounds.rps import rps
from ragtag.simulation.worlds.newcomer import DEADLINE_S, PHASES, NewcomerWorld
from stored import how

LATENCY_S, JITTER_S, STEP_S = 0.005, 0.01, 0.2
COMES_S, LIMIT_S = 6.0, 2 * DEADLINE_S
GOAL_S = 5.0


def newcomer(peers: int, seed: int, faults: Faults, late: bool) -> dict[str, float]:
    """What each phase took; a newcomer that is not in by then has taken ``LIMIT_S``."""
    crew = NewcomerWorld(peers, rps, faults, seed, step_s=STEP_S)
    crew.late = late
    crew.world.at(COMES_S, lambda: crew.come(peers, tuple(range(peers))))
    crew.run(COMES_S)
    while "average" not in crew.members[peers].phases and crew.now_s < COMES_S + LIMIT_S:
        crew.run(crew.now_s + 0.25)
    phases = crew.members[peers].phases
    phases.setdefault("average", COMES_S + LIMIT_S)
    took, before_s = {}, COMES_S
    for phase in PHASES:
        if phase in phases:
            took[phase], before_s = phases[phase] - before_s, phases[phase]
    return took


def faults_of(case: str, peers: int, seed: int, calm: dict[str, float]) -> Faults:
    """What goes wrong in a case: nothing, loss, or a peer that stops in a phase."""
    line: dict[str, Any] = {"latency_s": LATENCY_S, "jitter_s": JITTER_S}
    if case == "undisturbed":
        return Faults(**line)
    if case.endswith("% lost"):
        return Faults(**line, loss=Loss(float(case.split()[0]) / 100))
    what, _, phase = case.partition(": ")
    who, when, how_long = random.uniforms(random.stream_key(seed, f"newcomer/{case}"), 3)
    begins_s = COMES_S - 1.0
    if phase != "before":
        begins_s = COMES_S + sum(calm[name] for name in PHASES[: PHASES.index(phase)])
    at_s = begins_s + float(when) * calm.get(phase, 1.0)
    peer = int(peers * who)
    if what == "dies":
        return Faults(**line, crashes=(Crash(peer, at_s),))
    return Faults(**line, freezes=(Freeze(peer, at_s, 2.0 + 4.0 * float(how_long)),))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--peers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=40, help="newcomers for each row")
    parser.add_argument("--out", type=Path, help="JSON results")
    a = parser.parse_args()
    made = how()
    calm = [
        newcomer(a.peers, seed, Faults(latency_s=LATENCY_S, jitter_s=JITTER_S), True)
        for seed in range(a.runs)
    ]
    print("undisturbed: " + ", ".join(f"{p} {statistics.median(c[p] for c in calm):.2f}" for p in PHASES))
    cases = ["undisturbed", *(f"freezes: {phase}" for phase in ("before", *PHASES))]
    cases += [*(f"dies: {phase}" for phase in ("before", *PHASES)), "1 % lost", "5 % lost", "20 % lost"]
    print(f"{'':18}{'waits for all: median, 9 in 10, longest':>42}{'now':>28}")
    results: dict[str, dict[str, list[float]]] = {}
    for case in cases:
        results[case] = {}
        for late in (False, True):
            runs = [
                newcomer(a.peers, seed, faults_of(case, a.peers, seed, calm[seed]), late)
                for seed in range(a.runs)
            ]
            results[case]["now" if late else "waits for all"] = sorted(
                round(sum(phases.values()), 2) for phases in runs
            )
        before, now = results[case]["waits for all"], results[case]["now"]
        print(f"{case:18}{told(before):>42}{told(now):>28}", flush=True)
    late_s = [took for case in results.values() for took in case["now"] if took > GOAL_S]
    print(f"longer than {GOAL_S:g} s now: {len(late_s)} of {len(cases) * a.runs}")
    if a.out is not None:
        document = {
            **made,
            "world": f"virtual time; latency {LATENCY_S} s, jitter {JITTER_S} s, rounds {STEP_S} s apart",
            "median_phases_s": {p: round(statistics.median(c[p] for c in calm), 3) for p in PHASES},
            "results": results,
        }
        a.out.write_text(json.dumps(document, indent=1) + "\n")


def told(took: list[float]) -> str:
    return f"{took[len(took) // 2]:.2f}  {took[int(0.9 * len(took))]:.2f}  {took[-1]:.2f}"


if __name__ == "__main__":
    main()
