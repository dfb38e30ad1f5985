"""Rounds of averaging that all peers of a simulated world begin at once.

Every average that a recipe reports comes from ``ragtag.protocols`` machines that exchange runs over
``ragtag.simulation`` links. Nothing here computes a mean.
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
"""The shortest measured deadline, unless asked for otherwise: messages that come at once teach no wait."""
STEP_S = 0.01
"""Virtual time from the end of a round to the beginning of the next: a local step."""

Next = Callable[[int, list[Outcome]], Sequence[Floats] | None]
"""Called with a round's number and all peers' outcomes. Returns their next values; ``None``: stop."""


def run_rounds(
    first: Sequence[Floats],
    then: Next,
    *,
    method: Averager,
    faults: Faults,
    seed: int,
    codec: Codec = fp32,
    deadline_s_min: float = DEADLINE_S_MIN,
    number: int = 0,
) -> list[Traffic]:
    """Average ``first`` (one ``[n_chunks, elements]`` per peer), then what ``then`` returns, until it stops.

    Returns the traffic on each peer's line.

    deadline_s_min: a stage's measured deadline is no shorter; 0: as short as measurement says.
    number: of the channel, which names the draws of what is lost.

    Raises:
        RuntimeError: the world comes to rest before ``then`` stops.
    """
    n, n_chunks = len(first), len(first[0])
    nodes = [Node(peer, n, seed) for peer in range(n)]
    channel = Channel(
        method, codec, n_chunks, probe_s=4 * LATENCY_S, rtt_s=2 * LATENCY_S, floor_s=deadline_s_min
    )
    for node in nodes:
        node.configure(number, channel)
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
            world.at(now_s + STEP_S, p, Average(number, mine, 1.0))

    world = World(nodes, faults, seed, on_done=on_done)
    for peer, values in enumerate(first):
        world.at(0.0, peer, Average(number, values, 1.0))
    world.run()
    if not stopped:
        raise RuntimeError(f"the world came to rest in round {done} with {len(outcomes)} of {n} peers done")
    return [world.traffic(peer) for peer in range(n)]
