"""How long an average takes by planned shares, by hivemind's rule and by equal ones, and what is predicted.

    python benchmarks/shares.py                  # everything; it stores the result
    python benchmarks/shares.py --quick          # smaller vectors, nothing stored

Crews with lines as DeDLOC's (Diskin et al., NeurIPS 2021: ``ragtag.recipes.dedloc.mixes``), and one of homes,
which receive ten times as fast as they send. All machines of the peers run, in virtual time: AllReduce, on
lines that send, and receive, no faster than the mix says, 5 ms one way; also with 1 % of datagrams lost. Each
average begins half a second after the last peer has the one before. A time is from there to the last peer's
end, the median of ``ROUNDS`` that follow ``WARM`` others. Beside it stands what ``ragtag.optim.roles.assess``
predicts, for steady streams.

up only: the same where lines limit what is sent alone.

planned: a user's training loop with ``AllReduce(shares="measured")``. Peers begin with equal shares, tell
their rates and plan: the round from which the plan holds, how long rounds took before and after, and how many
peers' values were missing from any of them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parent))  # tests import this file, too

from ragtag.codecs.dense import fp32
from ragtag.core.channels import channel_of
from ragtag.core.faults import Faults, Loss, OwnLine
from ragtag.core.schema import Schema, TensorSpec
from ragtag.core.types import Noted, Outcome
from ragtag.core.wire import CHUNK_BYTES
from ragtag.optim.roles import Capacity, Mix, assess, equal_shares, even_shares, simple_rule
from ragtag.protocols.channel.shares import Plan, whole_shares, write_plans
from ragtag.protocols.crew.board import SHARES
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.recipes.dedloc.mixes import MBIT, MIXES
from ragtag.simulation.link import OVERHEAD_BYTES
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer
from stored import how

RESULTS = Path(__file__).parent / "results" / "shares.json"
LATENCY_S, APART_S = 0.005, 0.5
WARM, ROUNDS, STEPS = 2, 5, 40
HOMES = tuple(
    Capacity(up * MBIT, 10 * up * MBIT, 1.0) for up, many in ((100, 4), (50, 4), (20, 4)) for _ in range(many)
)
CREWS = {**MIXES, "12 homes, 10 times as fast down": HOMES}
RULES = {
    "equal": equal_shares,
    "rule": simple_rule,
    "plan": lambda mix: even_shares(mix, mix.able),
}
CHANNEL = channel_of("shares")


def crew_of(
    peers: Sequence[Capacity], loss: float, down: bool = True, **options: Any
) -> tuple[SimulatedCrew, int]:
    """A crew on a mix's lines, and how many of it train. Clients are the last of those that do."""
    lines = tuple(
        OwnLine(peer, line.up_bytes_per_s, 0.0, line.down_bytes_per_s if down else math.inf)
        for peer, line in enumerate(peers)
    )
    faults = Faults(latency_s=LATENCY_S, lines=lines, loss=Loss(loss) if loss else None)
    trainers, clients = (
        sum(found) for found in ([p.samples_per_s > 0 for p in peers], [p.client for p in peers])
    )
    helpers = len(peers) - trainers
    return SimulatedCrew(trainers, faults, 1, auxiliaries=helpers, clients=clients, **options), trainers


def averages(
    peers: Sequence[Capacity], shares: Sequence[float], values: int, loss: float = 0.0, down: bool = True
) -> tuple[float, float]:
    """An average's time in seconds by given shares, and the part of all values that was averaged of all.

    shares: none: all own as much, but clients.
    """
    crew, trainers = crew_of(peers, loss, down)
    averager = AllReduce(shares="measured")
    schema = Schema((TensorSpec("w", (values,), "float32"),), fp32.name, averager.name)
    ended = np.zeros((WARM + ROUNDS, trainers))
    begun = np.full(WARM + ROUNDS, np.inf)
    whole = np.zeros((WARM + ROUNDS, trainers))

    def train(transport: SimulatedTransport) -> None:
        transport.configure(CHANNEL, schema, averager, fp32)
        if shares:
            transport.post(SHARES, write_plans([Plan(CHANNEL, 0, whole_shares(shares))]))
        own = np.full((schema.n_chunks(fp32.elements), fp32.elements), float(transport.me), np.float32)
        for number in range(WARM + ROUNDS):
            transport.pause(max(0.0, 10.0 * (number + 1) - transport.now_s()))
            begun[number] = min(begun[number], transport.now_s())
            outcome = transport.start(CHANNEL, own, 1.0).wait()
            ended[number, transport.me] = transport.now_s()
            whole[number, transport.me] = (outcome.heard == (1 << trainers) - 1).mean()
        transport.pause(APART_S)

    crew.run(train)
    times = (ended.max(1) - begun)[WARM:]
    return float(statistics.median(times.tolist())), float(whole[WARM:].mean())


def row(name: str, peers: tuple[Capacity, ...], values: int) -> dict[str, Any]:
    """One crew: times by rule, and what is predicted of them."""
    on_wire = (values * 4) * (CHUNK_BYTES + OVERHEAD_BYTES) / CHUNK_BYTES
    mix = Mix(peers, 1.0, on_wire)
    found: dict[str, Any] = {"crew": name, "peers": len(peers)}
    for rule, of in RULES.items():
        shares = of(mix).shares
        predicted_s = 1 / assess(mix, mix.able, shares).averaging_per_s
        took_s, whole = averages(peers, shares, values)
        up_s, _ = averages(peers, shares, values, down=False)
        lossy_s, lossy_whole = averages(peers, shares, values, loss=0.01)
        found[rule] = {
            "predicted_s": round(predicted_s, 4),
            "took_s": round(took_s, 4),
            "up_only_s": round(up_s, 4),
            "lossy_s": round(lossy_s, 4),
            "whole_percent": round(100 * whole, 3),
            "lossy_whole_percent": round(100 * lossy_whole, 3),
        }
    for what in ("predicted_s", "took_s", "up_only_s", "lossy_s"):
        found[f"{what[:-2]}_equal_over_plan"] = round(found["equal"][what] / found["plan"][what], 3)
    return found


def trained(name: str, peers: tuple[Capacity, ...], values: int, loss: float) -> dict[str, Any]:
    """A training loop whose crew plans by itself."""

    notes: list[Noted] = []
    crew, trainers = crew_of(peers, loss, on_note=lambda peer, now_s, note: notes.append(note))
    outcomes: list[list[Outcome]] = [[] for _ in range(trainers)]

    def train(transport: SimulatedTransport) -> None:
        weight = torch.nn.Parameter(torch.full((values,), float(transport.me)))
        optimizer = CrewOptimizer(
            torch.optim.SGD([weight], lr=0.0),
            transport,
            method=AllReduce(shares="measured"),
            every=1,
            on_outcome=outcomes[transport.me].append,
            on_note=notes.append,
        )
        for _ in range(STEPS):
            transport.pause(APART_S)
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        transport.pause(APART_S)

    crew.run(train)
    plans = [note.detail for note in notes if note.what == "shares"]
    first = int(plans[0].split()[2]) if plans else STEPS
    longest = [max(of[number].total_s for of in outcomes) for number in range(STEPS)]
    missed = sum(len(outcome.missed) for of in outcomes for outcome in of)
    return {
        "crew": name,
        "lost_percent": 100 * loss,
        "plans": plans,
        "from_round": first,
        "before_s": round(statistics.median(longest[1:first]), 4),
        "after_s": round(statistics.median(longest[first:]), 4) if plans else None,
        "apart": sum(note.what == "apart" for note in notes),
        "missed": missed,
    }


def main() -> None:
    """Measure, print and store."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="smaller vectors, nothing stored")
    quick = arguments.parse_args().quick
    stamp, values = how(), 100_000 if quick else 200_000
    rows = []
    for name, peers in CREWS.items():
        rows.append(row(name, peers, values))
        print(json.dumps(rows[-1]), flush=True)
    loops = []
    for name in ("16 unlike, 4 auxiliaries", "12 homes, 10 times as fast down"):
        slower = tuple(
            replace(p, up_bytes_per_s=p.up_bytes_per_s / 5, down_bytes_per_s=p.down_bytes_per_s / 5)
            for p in CREWS[name]
        )
        for loss in (0.0, 0.01):
            loops.append(trained(name, slower, 50_000, loss))
            print(json.dumps(loops[-1]), flush=True)
    if not quick:
        found = {**stamp, "values": values, "rounds": ROUNDS, "rows": rows, "planned": loops}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
