"""A central state in the simulator: bandwidth, loss, jitter, crashes and freezes; the same run every time."""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import bf16, fp32
from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.core.types import Average, Left, Noted, Outcome, PeerId
from ragtag.protocols.node import Channel, Node
from ragtag.schedules import Asynchronous, BackupWorkers, SoftSync
from ragtag.schedules.centre import Centre as Rule
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.worlds.rounds import World
from ragtag.training.exchange.central import Centre

N, CHUNKS, STEP_S, GOAL = 6, 40, 1.0, 3.0
FAULTS = Faults(
    loss=Loss(0.05), latency_s=0.01, jitter_s=0.005, rate_bytes_per_s=1e6, duplicate=0.05, reorder=0.1,
    reorder_s=0.02, crashes=(Crash(2, 12.5),), freezes=(Freeze(4, 15.0, 6.0),),
)  # fmt: skip


class Run:
    """Each peer goes a tenth of its way to ``GOAL`` in a step; peer 5 takes longer."""

    def __init__(self, rule: Rule, codec: Codec = fp32, seed: int = 3, until_s: float = 60.0) -> None:
        self.outcomes: dict[PeerId, list[Outcome]] = {peer: [] for peer in range(N)}
        self.notes: list[tuple[PeerId, Noted]] = []
        self.codec, self.until_s = codec, until_s
        nodes = [Node(peer, N, seed) for peer in range(N)]
        for node in nodes:
            node.configure(0, Channel(Centre(rule), codec, CHUNKS, probe_s=0.2, rtt_s=0.05))
        self.cost = ComputeCost(STEP_S, sigma=0.1, seed=seed)
        self.world = World(
            nodes,
            FAULTS,
            seed,
            on_done=self._done,
            on_note=lambda peer, _, note: self.notes.append((peer, note)),
        )
        for peer in range(N):
            values = np.zeros((CHUNKS, codec.elements), np.float32)
            self.world.at(0.0, peer, Average(0, values, 0.0))
            if peer != 2:
                self.world.at(13.0, peer, Left(2))
        self.world.run(until_s=2 * until_s)

    def _done(self, peer: PeerId, now_s: float, outcome: Outcome) -> None:
        self.outcomes[peer].append(outcome)
        ends_s = self.cost.ends_s(peer, len(self.outcomes[peer]), 4 if peer == 5 else 1, now_s, FAULTS)
        if ends_s < self.until_s:
            values = outcome.mean + np.float32(0.1) * (np.float32(GOAL) - outcome.mean)
            self.world.at(ends_s, peer, Average(0, values, 1.0))

    @property
    def last(self) -> list[Outcome]:
        return [self.outcomes[peer][-1] for peer in range(N) if peer != 2]


@pytest.mark.parametrize("rule", [Asynchronous(), BackupWorkers(1), SoftSync(2)], ids=str)
def test_it_gets_there_whatever_goes_wrong(rule: Rule) -> None:
    run = Run(rule)
    for outcome in run.last:
        assert outcome.averaged.all()
        np.testing.assert_allclose(outcome.mean, GOAL, atol=0.3)
    assert {peer for peer, note in run.notes if note.what == "central state rebuilt"} & {0, 1, 3, 4, 5}
    assert len(run.outcomes[5]) < 0.5 * len(run.outcomes[0])  # nobody waits for the slow one
    slow = [s for outcome in run.outcomes[5] for s in outcome.stale or ()]
    fast = [s for outcome in run.outcomes[0] for s in outcome.stale or ()]
    assert np.mean(slow) > np.mean(fast)
    if rule.barrier:  # blocks that were out of step after the faults are in step again: nobody waits twice
        assert max(outcome.total_s for outcome in run.outcomes[0][-15:]) < STEP_S


def test_a_run_of_one_seed_is_the_same_every_time() -> None:
    assert Run(SoftSync(2), until_s=20.0).world.digest() == Run(SoftSync(2), until_s=20.0).world.digest()


def test_values_may_travel_short() -> None:
    """What is rounded on its way is made up for: updates are measured from what was taken."""
    run = Run(Asynchronous(), bf16)
    for outcome in run.last:
        np.testing.assert_allclose(outcome.mean, GOAL, atol=0.3)
