"""Rounds of averaging among real nodes in a simulated world, begun together: what recipes measure.

Every average a recipe reports comes out of ``ragtag.protocols`` machines that exchange runs over
``ragtag.simulation`` links; nothing here computes a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import fp32
from ragtag.core.faults import Faults
from ragtag.core.types import Average, Floats, Outcome, PeerId
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import Channel, Node
from ragtag.simulation.link import Traffic
from ragtag.simulation.worlds.rounds import World

LATENCY_S = 0.001
"""One-way delay of the simulated line."""
DEADLINE_S_MIN = 4 * LATENCY_S
"""A measured deadline is no shorter, unless asked for: messages that come at once teach a wait of nothing."""
STEP_S = 0.01
"""Virtual time between the end of a round and the begin of the next: a local step."""

Next = Callable[[int, list[Outcome]], Sequence[Floats] | None]
"""Called with a round's number and all peers' outcomes; answers with their next values, or ``None``: stop."""


def run_rounds(
    first: Sequence[Floats],
    then: Next,
    *,
    method: Averager,
    faults: Faults,
    seed: int,
    codec: Codec = fp32,
    deadline_s_min: float = DEADLINE_S_MIN,
) -> list[Traffic]:
    """Average ``first`` (one ``[n_chunks, elements]`` per peer), then what ``then`` answers, until it stops.

    deadline_s_min: a stage's measured deadline is no shorter (0: as short as measurement says).

    Returns what went over each peer's line.
    Raises RuntimeError when the world comes to rest before ``then`` said stop.
    """
    n, n_chunks = len(first), len(first[0])
    nodes = [Node(peer, n, seed) for peer in range(n)]
    channel = Channel(
        method, codec, n_chunks, probe_s=4 * LATENCY_S, rtt_s=2 * LATENCY_S, floor_s=deadline_s_min
    )
    for node in nodes:
        node.configure(0, channel)
    outcomes: dict[PeerId, Outcome] = {}
    done, stopped = 0, False

    def on_done(peer: PeerId, now_s: float, outcome: Outcome) -> None:
        nonlocal done, stopped
        outcomes[peer] = outcome
        if len(outcomes) < n:
            return
        values = then(done, [outcomes[p] for p in range(n)])
        outcomes.clear()
        done, stopped = done + 1, values is None
        for p, mine in enumerate(values or ()):
            world.at(now_s + STEP_S, p, Average(0, mine, 1.0))

    world = World(nodes, faults, seed, on_done=on_done)
    for peer, values in enumerate(first):
        world.at(0.0, peer, Average(0, values, 1.0))
    world.run()
    if not stopped:
        raise RuntimeError(f"the world came to rest in round {done} with {len(outcomes)} of {n} peers done")
    return [world.traffic(peer) for peer in range(n)]
