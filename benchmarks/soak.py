"""Whether memory stays flat through an hour of averaging under faults, in virtual time.

    python benchmarks/soak.py                      # every averager; some minutes each
    python benchmarks/soak.py --methods rps --minutes 10

Six peers average once a second. Each minute the lines change: loss, bursts, delay, copies, reordering, one-
way cuts and partitions, as storms draw them; a peer freezes for some seconds every two minutes. The second
half has the faults of the first one again. What Python holds (tracemalloc, after a collection) is read each
minute. Printed and stored: the most of the second quarter, in which tables and buffers have found their
sizes, and the most of the last one, which has the same faults. Live processes:
``churn.py --minutes 10`` reads what their processes hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core.faults import Faults, Freeze, Window
from ragtag.core.types import Average, Outcome, PeerId
from ragtag.core.wire import CHUNK_BYTES
from ragtag.simulation.link import OVERHEAD_BYTES
from ragtag.simulation.trials.rounds import METHODS, crew, storm
from ragtag.simulation.worlds.rounds import World
from stored import how

RESULTS = Path(__file__).parent / "results" / "soak.json"
PEERS, CHUNKS, CHANNEL, STEP_S, MINUTE_S = 6, 24, 0, 1.0, 60.0
REMEMBERED = 2_000
"""Messages whose losses the simulated line remembers, for repairs: its own 65,536 are not full in an hour."""
GOAL = 1.05
"""Of the last quarter's most over the second one's."""


def later(window: Window, by_s: float) -> Window:
    """A span of time that begins so much later, and ends with the minute."""
    return Window(window.from_s + by_s, min(window.until_s, MINUTE_S) + by_s)


def soak(method: str, minutes: int, seed: int) -> dict[str, Any]:
    """One averager's hour."""
    round_bytes = 2 * CHUNKS * (CHUNK_BYTES + OVERHEAD_BYTES)
    draw, half = random.generator(seed, "soak"), minutes // 2

    def weather(minute: int) -> Faults:
        """The lines' faults in a minute: as storms draw them, but nobody ends."""
        drawn = storm(seed + minute % half, PEERS, MINUTE_S, round_bytes, scarce=False)
        from_s = minute * MINUTE_S
        return replace(
            drawn,
            one_way=tuple(replace(cut, window=later(cut.window, from_s)) for cut in drawn.one_way),
            partitions=tuple(replace(cut, window=later(cut.window, from_s)) for cut in drawn.partitions),
            slow=(),
            crashes=(),
            freezes=(),
        )

    frozen = [(int(draw.integers(PEERS)), minute + float(draw.random())) for minute in range(0, half, 2)]
    freezes = tuple(
        Freeze(peer, MINUTE_S * (minute + again), 5.0) for again in (0, half) for peer, minute in frozen
    )
    nodes = crew(PEERS, CHUNKS, METHODS[method], seed, probe_s=0.1 * STEP_S, rtt_s=0.1)
    rounds, held = [0] * PEERS, []

    def ask(peer: PeerId) -> Average:
        values = random.generator(seed, "values", peer, rounds[peer]).standard_normal((CHUNKS, fp32.elements))
        return Average(CHANNEL, values.astype(np.float32), 1.0)

    def done(peer: PeerId, now_s: float, outcome: Outcome) -> None:
        rounds[peer] += 1
        world.at(now_s + STEP_S, peer, ask(peer))

    def look(now_s: float) -> None:
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
        if len(held) < minutes:
            world.change_lines(weather(len(held)))
            world.call(now_s + MINUTE_S, look)

    tracemalloc.start()
    world = World(nodes, replace(weather(0), freezes=freezes), seed, on_done=done)
    world._link._losses.attempts_max = REMEMBERED
    for peer in range(PEERS):
        world.at(0.0, peer, ask(peer))
    world.call(MINUTE_S, look)
    world.run(until_s=minutes * MINUTE_S)
    tracemalloc.stop()
    quarter = len(held) // 4
    early, late = max(held[quarter : 2 * quarter]), max(held[-quarter:])
    return {
        "method": method,
        "rounds": sum(rounds),
        "events": world.events,
        "minutes": minutes,
        "second_quarter_kb": early / 1024,
        "last_quarter_kb": late / 1024,
        "growth": late / early,
    }


def main() -> int:
    """The command; returns 1 where memory has grown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--minutes", type=int, default=60, help="of virtual time (default: %(default)d)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.minutes < 8:
        parser.error("--minutes is 8 or more: quarters of less tell nothing")
    document = how() | {"goal": GOAL, "rows": []}
    for method in asked.methods:
        row = soak(method, asked.minutes, asked.seed)
        document["rows"].append(row)
        print(
            f"{method}: {row['rounds']} rounds; at most {row['second_quarter_kb']:.0f} KB in the second "
            f"quarter, {row['last_quarter_kb']:.0f} in the last: {row['growth']:.2f} times",
            flush=True,
        )
    asked.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(row["growth"] > GOAL for row in document["rows"]))


if __name__ == "__main__":
    sys.exit(main())
