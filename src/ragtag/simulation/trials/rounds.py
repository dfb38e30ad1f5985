"""Trials of averaging: a small crew under faults drawn from a seed, checked throughout, then healed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core.faults import BurstLoss, Crash, Faults, Freeze, Loss, OneWay, Partition, Slow, Window
from ragtag.core.types import Average, Left, Outcome, PeerId
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.channel.averager import Averager, Channel
from ragtag.protocols.channel.averagers import AVERAGERS
from ragtag.protocols.node import Node
from ragtag.protocols.rounds.rps import RPS
from ragtag.simulation.check.progress import demand_progress
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.link import OVERHEAD_BYTES
from ragtag.simulation.worlds.rounds import World

GROUPS = {8: False, 3: True}
"""Sizes of groups, and whether a crew of up to 8 peers may need several."""
QUORUM = RPS(quorum=2)
"""At least two peers of a trial live, so that they can go on."""
METHODS: dict[str, Averager] = {
    averager.name: averager
    for entry in AVERAGERS.values()
    for averager in ([entry.make(group) for group in GROUPS] if entry.number == "group" else [entry.make()])
} | {QUORUM.name: QUORUM}
"""All averagers by name; those in groups in each size; and one with a quorum."""
DECLARED = 3
"""After so many steps members know of a death, for averagers that go by membership."""
_CHANNEL = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """The figures of a trial.

    n: peers.
    live: peers that did not crash.
    rounds_done: in the storm, by peer.
    averaged: the share of chunks that were averaged in the storm.
    round_s: how long a peer's round took in the storm, on average.
    healed_round: the round after healing in which all heard all.
    events: in virtual time.
    digest: a hash of all that happened.
    """

    n: int
    faults: Faults
    live: frozenset[PeerId]
    rounds_done: tuple[int, ...]
    averaged: float
    round_s: float
    healed_round: int
    events: int
    digest: str


def storm(seed: int, n: int, until_s: float, round_bytes: float, scarce: bool = True) -> Faults:
    """Faults for a crew of ``n`` until ``until_s``. The seed decides which kinds there are, and how hard.

    At least two peers live. Round trips stay below a hundredth of ``until_s``.

    round_bytes: what a peer sends in a round.
    scarce: bandwidth may be so low that ``round_bytes`` take up to a twelfth of ``until_s``.
    """
    draw = random.generator(seed, "storm")

    def maybe(p: float) -> bool:
        return bool(draw.random() < p)

    def window() -> Window:
        from_s = float(draw.uniform(0, until_s))
        return Window(from_s, from_s + float(draw.exponential(until_s / 4)))

    loss = None
    if maybe(0.8):
        p = float(draw.choice([0.01, 0.1, 0.3, 0.6]))
        loss = BurstLoss(p * 0.2 / (1 - p), 0.2, good=0.01) if maybe(0.4) else Loss(p)
    peers = [int(peer) for peer in draw.permutation(n)]
    doomed = peers[: int(draw.integers(0, n - 1))] if maybe(0.4) else []
    side = frozenset(peers[: int(draw.integers(1, n))])
    latency_s = until_s * 1e-3 * float(draw.random())
    rate = round_bytes / (until_s / 12 * float(draw.uniform(0.01, 1)))
    return Faults(
        loss=loss,
        latency_s=latency_s,
        jitter_s=until_s * 1e-3 * float(draw.random()) if maybe(0.6) else 0.0,
        rate_bytes_per_s=rate if maybe(0.4) and scarce else float("inf"),
        queue_bytes=round_bytes * float(draw.uniform(0.1, 1)) if maybe(0.3) else float("inf"),
        duplicate=0.2 if maybe(0.4) else 0.0,
        reorder=0.2 if maybe(0.4) else 0.0,
        reorder_s=until_s * 1e-2 * float(draw.random()),
        one_way=(OneWay(peers[0], peers[-1], window()),) if maybe(0.3) else (),
        partitions=(Partition(side, window()),) if maybe(0.4) else (),
        crashes=tuple(Crash(peer, float(draw.uniform(0, until_s))) for peer in doomed),
        freezes=(Freeze(peers[-1], float(draw.uniform(0, until_s)), until_s / 8),) if maybe(0.5) else (),
        slow=(Slow(peers[0], 5.0, window()),) if maybe(0.3) else (),
    )


def trial(seed: int, method: str = "rps", rounds: int = 12) -> Trial:
    """Run one seed's storm over a crew of 3 to 8, checked; heal it, and demand progress.

    method: the averager's name in ``METHODS``.

    Raises:
        InvariantBroken: it has the command that runs the trial again.
    """
    draw = random.generator(seed, "trial")
    n, n_chunks = int(draw.integers(3, 9)), int(draw.integers(1, 40))
    step_s = 1.0
    round_bytes = 2 * n_chunks * (CHUNK_BYTES + OVERHEAD_BYTES)
    # a machine that repairs leaves pacing to its driver, and there is none here
    faults = storm(seed, n, rounds * step_s, round_bytes, scarce=method in ("rps", QUORUM.name))
    nodes = crew(
        n, n_chunks, METHODS[method], seed, probe_s=0.1 * step_s, rtt_s=max(2 * faults.latency_s, 1e-4)
    )
    cost = ComputeCost(step_s, sigma=0.2, seed=seed)
    weights = draw.choice([0.5, 1.0, 3.0], size=n) if draw.random() < 0.5 else np.ones(n)
    rounds_done, shares, rounds_s = [0] * n, 0.0, 0.0

    def ask(peer: PeerId, step: int) -> Average:
        values = random.generator(seed, "values", peer, step).standard_normal((n_chunks, fp32.elements))
        return Average(_CHANNEL, values.astype(np.float32), float(weights[peer]))

    def go(peer: PeerId, now_s: float) -> None:
        at_s = cost.ends_s(peer, rounds_done[peer], 1, now_s, faults)
        if rounds_done[peer] < rounds and at_s < float("inf"):
            world.at(at_s, peer, ask(peer, rounds_done[peer]))

    def done(peer: PeerId, now_s: float, outcome: Outcome) -> None:
        nonlocal shares, rounds_s
        rounds_done[peer] += 1
        shares += float(outcome.averaged.mean())
        rounds_s += outcome.total_s
        go(peer, now_s)

    command = (
        f'python -c "from ragtag.simulation.trials.rounds import trial; trial({seed}, {method!r}, {rounds})"'
    )
    in_groups = METHODS[method].kind == "in groups"
    several = in_groups and GROUPS[int(method.rpartition("/")[2])]
    grouped = (_CHANNEL,) if in_groups else ()
    world = World(nodes, faults, seed, check=True, on_done=done, replay=command, grouped=grouped)
    if world.checker is not None and METHODS[method].quorum:
        world.checker.demands(_CHANNEL, METHODS[method].quorum)
    for peer in range(n):
        go(peer, 0.0)
        for crash in faults.crashes if in_groups else ():
            if crash.peer != peer:
                world.at(crash.at_s + DECLARED * step_s, peer, Left(crash.peer))
    world.run(until_s=100 * rounds * step_s)
    steps = iter(range(rounds, 1 << 62))
    healed = demand_progress(world, lambda peer, _: ask(peer, next(steps)), pause_s=step_s, in_groups=several)
    done_by_all = max(1, sum(rounds_done))
    return Trial(
        n,
        faults,
        world.live,
        tuple(rounds_done),
        shares / done_by_all,
        rounds_s / done_by_all,
        healed,
        world.events,
        world.digest(),
    )


def crew(n: int, n_chunks: int, method: Averager, seed: int, probe_s: float, rtt_s: float) -> list[Node]:
    """Nodes of ``n`` peers with one channel of ``n_chunks`` float32 chunks."""
    nodes = [Node(peer, n, seed) for peer in range(n)]
    for node in nodes:
        node.configure(_CHANNEL, Channel(method, fp32, n_chunks, probe_s, rtt_s))
    return nodes
