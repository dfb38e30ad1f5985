"""A crew of spot machines in virtual time: how much of what they compute ends in the crew's model.

Machines live for a drawn time and are followed at once by others, which first fetch the state. Lines differ
by a factor of fifty. All average in groups drawn anew each time, while they compute on. No mathematics is
trained: the averagers' own machines run, on short vectors over lines that are slower in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core.faults import Faults, OwnLine
from ragtag.core.types import Average, Effect, Event, Left, Outcome, PeerId
from ragtag.protocols.channel.averager import Channel, Opening
from ragtag.protocols.channel.presence import Crew
from ragtag.protocols.groups.channel import GroupNode, RandomGroups
from ragtag.protocols.groups.keys import View
from ragtag.simulation.link import OVERHEAD_BYTES
from ragtag.simulation.worlds.rounds import World

LIFE_S = 1200.0
"""How long a machine lives, on average."""
RATES_BYTES_PER_S = 20e6 / 8, 1000e6 / 8
"""The slowest and the fastest line; in between all orders of magnitude are as frequent."""
RTTS_S = 0.02, 0.2
LEARNED_S = 2.0
"""After so long the others know that a peer is gone, or there."""
CODEC, CHUNKS = fp32._replace(name="small chunks", elements=16), 2048
"""Chunks of 64 bytes in place of 1,088, and few: messages that find groups are small beside the vector."""
UNEVEN = 0.05
"""How far apart peers come to an average: of the period, to either side."""


@dataclass(frozen=True, slots=True)
class SpotSetup:
    """A crew of spot machines.

    sent_bytes: of the vector that is averaged, as it is sent: 25 million values as int8.
    state_bytes: what a newcomer fetches: their model, anchor and momentum as fp32.
    period_s: computing from one average to the next.
    until_s: virtual time.
    """

    peers: int
    seed: int = 0
    group: int = 8
    sent_bytes: float = 25e6
    state_bytes: float = 300e6
    period_s: float = 30.0
    until_s: float = 1200.0


@dataclass(slots=True)
class SpotRun:
    """What became of the time of all machines, in seconds of one of them.

    useful: computed, and in an average with others, or with a machine that still lives at the end.
    died: computed, and in no average when its machine died.
    joined: before a machine had the state and had taken part in its first average.
    waited: an average was not over when the next was due.
    deaths: so many.
    rounds, alone: averages, and those in which a peer met no other.
    """

    setup: SpotSetup
    useful: float = 0.0
    died: float = 0.0
    joined: float = 0.0
    waited: float = 0.0
    deaths: int = 0
    rounds: int = 0
    alone: int = 0

    @property
    def all(self) -> float:
        """What all machines would have computed without faults and waiting."""
        return self.setup.peers * self.setup.until_s

    @property
    def goodput(self) -> float:
        """The useful share of that."""
        return self.useful / self.all


@dataclass(slots=True)
class _Machine:
    """The machine in a place.

    born: counts machines of this place; what was planned for an earlier one does not happen.
    since_s: since when it computes what is not in ``pending`` (``None``: it does not).
    pending: computed, and in no average yet. offered: the part of it that is in the round under way.
    fresh: it has not taken part in an average.
    idle_s: since when it waits for the round under way, as the next is due (``None``: it does not).
    turn: the number of the period in which it averages next.
    """

    born: int = 0
    since_s: float | None = None
    pending: float = 0.0
    offered: float = 0.0
    fresh: bool = True
    idle_s: float | None = None
    turn: int = 0


class _Nobody:
    """A place whose machine has died."""

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Nothing."""
        return []


def spot(setup: SpotSetup) -> SpotRun:
    """Run a crew of spot machines to its end."""
    return _Spot(setup).run()


class _Spot:
    def __init__(self, setup: SpotSetup) -> None:
        n = setup.peers
        self._setup, self._found = setup, SpotRun(setup)
        draws = random.uniforms(random.stream_key(setup.seed, "spot lines"), 2 * n).reshape(2, n)
        low, high = RATES_BYTES_PER_S
        self._rates: list[float] = (low * (high / low) ** draws[0]).tolist()
        on_wire = CHUNKS * (4 * CODEC.elements + OVERHEAD_BYTES) / setup.sent_bytes
        delays_s = (RTTS_S[0] + (RTTS_S[1] - RTTS_S[0]) * draws[1]) / 4  # at either end, there and back
        lines = [
            OwnLine(peer, rate * on_wire, delay_s)
            for peer, (rate, delay_s) in enumerate(zip(self._rates, delays_s.tolist(), strict=True))
        ]
        method, probe_s = RandomGroups(setup.group), setup.sent_bytes / low
        self._channel = Channel(method, CODEC, CHUNKS, probe_s=probe_s, rtt_s=RTTS_S[1])
        self._nodes: list[GroupNode | _Nobody] = []
        self._machines = [_Machine(fresh=False) for _ in range(n)]
        self._known = set(range(n))
        view = View(self._known)
        for peer in range(n):
            self._nodes.append(self._node(peer, view))
        self._world = World(self._nodes, Faults(lines=tuple(lines)), setup.seed, on_done=self._done)
        self._values = np.zeros((CHUNKS, CODEC.elements), np.float32)
        for peer in range(n):
            self._starts(peer, 0.0)

    def run(self) -> SpotRun:
        """To the end: what living machines have computed by then is in the model when the crew ends."""
        found, until_s = self._found, self._setup.until_s
        self._world.run(until_s)
        for peer, machine in enumerate(self._machines):
            self._stops(peer, until_s)
            if machine.fresh:
                found.joined += machine.pending
            else:
                found.useful += machine.pending
        return found

    def _node(self, peer: PeerId, view: View) -> GroupNode:
        crew = Crew(peer, self._setup.peers, self._setup.seed)
        node = self._channel.averager.open(Opening(0, self._channel, crew))
        assert isinstance(node, GroupNode)
        node.view = view
        return node

    # -- A machine's work

    def _starts(self, peer: PeerId, now_s: float) -> None:
        """A machine has the state, and computes."""
        machine = self._machines[peer]
        machine.since_s, machine.turn = now_s, int(now_s / self._setup.period_s)
        life_s = -LIFE_S * math.log1p(-self._draw("lives", peer, machine.born))
        self._plan(peer, now_s + life_s, self._dies)
        self._plan_turn(peer, now_s)

    def _plan_turn(self, peer: PeerId, now_s: float) -> None:
        machine, period_s = self._machines[peer], self._setup.period_s
        machine.turn = max(machine.turn + 1, int(now_s / period_s))
        apart = UNEVEN * (2.0 * self._draw("turns", peer, machine.turn) - 1.0)
        self._plan(peer, max(now_s, (machine.turn + apart) * period_s), self._turn)

    def _turn(self, peer: PeerId, now_s: float) -> None:
        """An average is due."""
        node, machine = self._nodes[peer], self._machines[peer]
        self._computed(machine, now_s)
        if isinstance(node, GroupNode) and node.active is None:
            self._begins(peer, now_s)
        else:
            machine.since_s, machine.idle_s = None, now_s

    def _begins(self, peer: PeerId, now_s: float) -> None:
        machine = self._machines[peer]
        machine.offered = machine.pending
        self._world.at(now_s, peer, Average(0, self._values, 1.0))
        self._plan_turn(peer, now_s)

    def _done(self, peer: PeerId, now_s: float, outcome: Outcome) -> None:
        found, machine = self._found, self._machines[peer]
        met = len(outcome.members) > 1
        found.rounds += 1
        found.alone += not met
        came = machine.offered * float(outcome.averaged.mean()) if met else 0.0
        if machine.fresh:  # it took, and gave nothing
            found.joined += came
            machine.fresh = not met
        else:
            found.useful += came
        machine.pending -= came
        machine.offered = 0.0
        if machine.idle_s is not None:
            found.waited += now_s - machine.idle_s
            machine.since_s, machine.idle_s = now_s, None
            self._begins(peer, now_s)

    def _computed(self, machine: _Machine, now_s: float) -> None:
        if machine.since_s is not None:
            machine.pending += now_s - machine.since_s
            machine.since_s = now_s

    # -- Machines come and go

    def _stops(self, peer: PeerId, now_s: float) -> None:
        machine = self._machines[peer]
        self._computed(machine, now_s)
        if machine.idle_s is not None:
            self._found.waited += now_s - machine.idle_s
            machine.idle_s = None

    def _dies(self, peer: PeerId, now_s: float) -> None:
        found, machine = self._found, self._machines[peer]
        self._stops(peer, now_s)
        found.died += machine.pending
        found.deaths += 1
        self._nodes[peer] = _Nobody()
        self._machines[peer] = _Machine(machine.born + 1)
        comes_s = now_s + LEARNED_S + self._setup.state_bytes / self._rates[peer]
        found.joined += min(comes_s, self._setup.until_s) - now_s
        self._world.call(now_s + LEARNED_S, lambda at_s: self._gone(peer, at_s))
        self._plan(peer, comes_s, self._comes)

    def _gone(self, peer: PeerId, now_s: float) -> None:
        self._known.discard(peer)
        for other in self._agree():
            self._world.at(now_s, other, Left(peer))

    def _comes(self, peer: PeerId, now_s: float) -> None:
        """Another machine is in this place, and has the state of one that is ahead."""
        node = self._node(peer, View(self._known | {peer}))
        node.resume(max(other.done for other in self._nodes if isinstance(other, GroupNode)))
        self._nodes[peer] = node
        self._starts(peer, now_s)
        self._world.call(now_s + LEARNED_S, lambda _: self._here(peer))

    def _here(self, peer: PeerId) -> None:
        if isinstance(self._nodes[peer], GroupNode):
            self._known.add(peer)
            self._agree()

    def _agree(self) -> list[PeerId]:
        """All living machines see the crew alike: by one view, as views are dear. Which these are."""
        view, living = View(self._known), []
        for peer, node in enumerate(self._nodes):
            if isinstance(node, GroupNode):
                node.view = view if peer in self._known else View(self._known | {peer})
                living.append(peer)
        return living

    def _plan(self, peer: PeerId, at_s: float, what: Callable[[PeerId, float], None]) -> None:
        """Call this at a time, unless the machine has died by then."""
        born = self._machines[peer].born

        def call(now_s: float) -> None:
            if self._machines[peer].born == born:
                what(peer, now_s)

        self._world.call(at_s, call)

    def _draw(self, what: str, peer: PeerId, at: int) -> float:
        return random.uniform(random.stream_key(self._setup.seed, f"spot {what}", peer), at)
