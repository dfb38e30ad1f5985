"""How many peers of a large crew find their group, in churn and in the calm after it, second by second.

    python benchmarks/matchmaking.py                          # 300 peers in random groups of 8
    python benchmarks/matchmaking.py -n 1000 --method moshpit --seconds 40

In virtual time, by the machines that run live. All average again and again, and compute 0.2 s (and up to a
fifth more or less, drawn anew each time) in between. From 5 to 15 s on a tenth of all die, which the others
are told 2 s later, and a twentieth freezes for 2 to 6 s; 1 % of datagrams are lost all the time. Printed for
each 5 seconds: what share of rounds peers spent alone, the mean size of groups, how long a round took and how
long hosts wait for their groups (medians).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np

from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.core.types import Average, Left, Outcome, PeerId
from ragtag.protocols.channel.averager import Averager, Channel, Opening
from ragtag.protocols.channel.presence import Crew as Membership
from ragtag.protocols.groups.channel import GroupNode, Moshpit, RandomGroups
from ragtag.simulation.worlds.rounds import World
from stored import how

LATENCY_S, CHUNKS = 0.01, 4
STEP_S, SPREAD = 0.2, 0.2
CHURN_S = (5.0, 15.0)
DEAD, FROZEN, LEARNED_S = 0.1, 0.05, 2.0
EVERY_S = 5.0


class Crew:
    """Peers that compute and average until they die."""

    def __init__(self, n: int, method: Averager, seed: int) -> None:
        draws = random.uniforms(random.stream_key(seed, "matchmaking"), 3 * n).tolist()
        order = sorted(range(n), key=draws.__getitem__)
        begins_s = [CHURN_S[0] + (CHURN_S[1] - CHURN_S[0]) * draw for draw in draws[n : 2 * n]]
        dead = order[: int(DEAD * n)]
        frozen = order[len(dead) : len(dead) + int(FROZEN * n)]
        crashes = tuple(Crash(peer, begins_s[peer]) for peer in dead)
        freezes = tuple(Freeze(peer, begins_s[peer], 2.0 + 4.0 * draws[2 * n + peer]) for peer in frozen)
        faults = Faults(latency_s=LATENCY_S, loss=Loss(0.01), crashes=crashes, freezes=freezes)
        channel = Channel(method, fp32, CHUNKS, probe_s=4 * LATENCY_S, rtt_s=2 * LATENCY_S)
        self.nodes = [method.open(Opening(0, channel, Membership(me, n, seed))) for me in range(n)]
        self.world = World(self.nodes, faults, seed, on_done=self._done)
        self.outcomes: list[Outcome] = []
        self._values = np.zeros((CHUNKS, fp32.elements), np.float32)
        self._seed, self._asked = seed, [0] * n
        for peer in range(n):
            self._ask(peer, 0.0)
        for crash in sorted(crashes, key=lambda crash: crash.at_s):
            for peer in range(n):
                self.world.at(crash.at_s + LEARNED_S, peer, Left(crash.peer))

    def _ask(self, peer: PeerId, now_s: float) -> None:
        self._asked[peer] += 1
        draw = random.uniform(random.stream_key(self._seed, "step", peer), self._asked[peer])
        at_s = now_s + STEP_S * (1.0 + SPREAD * (2.0 * draw - 1.0))
        self.world.at(at_s, peer, Average(0, self._values, 1.0))

    def _done(self, peer: PeerId, now_s: float, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._ask(peer, now_s)

    def row(self, until_s: float) -> dict[str, float]:
        """What happened until then, since the last row."""
        self.outcomes.clear()
        self.world.run(until_s=until_s)
        sizes = [len(outcome.members) for outcome in self.outcomes]
        nodes = [self.nodes[peer] for peer in self.world.live]
        return {
            "until_s": until_s,
            "rounds": len(sizes),
            "alone": sum(size < 2 for size in sizes) / len(sizes),
            "members": statistics.fmean(sizes),
            "round_s": statistics.median(outcome.total_s for outcome in self.outcomes),
            "wait_s": statistics.median(node.wait_s() for node in nodes if isinstance(node, GroupNode)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--peers", type=int, default=300)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--method", choices=("random", "moshpit"), default="random")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON results; those of other crews in it stay")
    parser.add_argument("--of", default="now", help="what the results are of, beside others")
    a = parser.parse_args()
    made = how()
    crew = Crew(a.peers, (RandomGroups if a.method == "random" else Moshpit)(a.group), a.seed)
    rows = []
    print(f"{a.peers} peers, {a.method} groups of {a.group}")
    while not rows or rows[-1]["until_s"] < a.seconds:
        rows.append(row := crew.row(EVERY_S * (len(rows) + 1)))
        print(
            f"{row['until_s']:4.0f} s: alone {row['alone']:6.1%}, members {row['members']:.2f}, "
            f"a round {row['round_s']:.3f} s, hosts wait {row['wait_s']:.3f} s",
            flush=True,
        )
    if a.out is not None:
        stored = json.loads(a.out.read_text()) if a.out.exists() else {}
        stored[f"{a.method}/{a.peers}/{a.of}"] = {**made, "world": "virtual time", "rows": rows}
        a.out.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
