"""How much an update counts at the central state: measured by peers whose gradients are known.

``shares``: the loss of peer p falls along coordinate p alone, at a rate of 1. So what the state moves by
along p is what p's updates were counted for. ``growth``: all peers share one parabola, so the state's error
after each step of a stale group is known in closed form.

In both one peer has small batches and the others large ones, or one peer is slow. So groups form by measured
speed, and the updates of one are as many versions old as the other steps meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ragtag.core.faults import Faults, Slow
from ragtag.core.schema import ALIGN
from ragtag.core.types import Outcome
from ragtag.protocols.central.channel import centre
from ragtag.recipes.grouping.methods import FixedGroups
from ragtag.recipes.grouping.training import LATENCY_S, STEP_S, Values, one_chunk
from ragtag.schedules.grouping import ProgressiveGrouping
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.exchange.central import Centre
from ragtag.training.optimizer.optimizer import CrewOptimizer

SMALL, LARGE, LARGE_PEERS = 2, 32, 4
"""Batches: peer 0 has the small one. Its part of the crew's samples is a fifth, since all compute alike."""
RATIO = LARGE // SMALL
"""So many versions old are the updates of large batches."""
CREW, DELAY = 8, 3.0
"""The crew with a slow peer, and its delay."""
CURVATURE = 1.7
"""Times the learning rate. Synchronous training converges below 2. Updates that are ``RATIO`` versions old
and count for 4/5 of a step do so below 1.25 only."""
SETTLED_S = 25.0
"""By then all speeds are known, and updates are counted."""
UNTIL_S = 85.0
SKIPPED = 4
"""Steps of the stale group before its error is looked at: speeds are measured meanwhile."""
PERIODS = 10
"""Steps of the stale group in which the error is looked at: it falls by ten orders of magnitude."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What one update of a peer is counted for: mean movement of the state, in learning rates.

    stale: mean staleness of its updates.
    """

    movement: float
    stale: float


@dataclass(slots=True)
class _Seen:
    """One peer's updates since all speeds are known. first, last: the state along its coordinate."""

    updates: int = 0
    stale: list[int] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0


def shares(straggler: float = 0.0) -> list[Counted]:
    """What an update of each peer counts, under progressive grouping.

    straggler: one of ``CREW`` peers takes (1 + straggler) times as long as the others; 0: peers with small
        and large batches.
    """
    n = CREW if straggler else LARGE_PEERS + 1
    slow = (Slow(n - 1, 1.0 + straggler),) if straggler else ()
    batches = [LARGE] * n if straggler else [SMALL] + [LARGE] * LARGE_PEERS
    crew = SimulatedCrew(n, Faults(latency_s=LATENCY_S, slow=slow), cost=ComputeCost(STEP_S / LARGE))
    seen = [_Seen() for _ in range(n)]

    def train(peer: SimulatedTransport) -> None:
        me, mine = peer.me, seen[peer.me]
        model = Values(torch.zeros(n))

        def averaged(outcome: Outcome) -> None:
            if peer.now_s() < SETTLED_S:
                mine.first = float(model.values.detach()[me])
                return
            if peer.now_s() > UNTIL_S:  # others have left, so this peer is more of the crew
                return
            mine.updates += 1
            mine.stale += outcome.stale or ()
            mine.last = float(model.values.detach()[me])

        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            peer,
            schedule=ProgressiveGrouping(),
            model=model,
            codec=one_chunk(n),
            weight=float(batches[me]),
            on_outcome=averaged,
        )
        model.values.grad = torch.zeros(n)
        model.values.grad[me] = -1.0
        while peer.now_s() < UNTIL_S:
            peer.compute(batches[me])
            optimizer.step()

    crew.run(train)
    return [Counted((one.last - one.first) / one.updates, float(np.mean(one.stale))) for one in seen]


def growth(corrected: bool) -> float:
    """The state's error after a step of the stale group, over that before: geometric mean of magnitudes.

    corrected: as the library has it; else updates count by their samples only, however stale they are.
    """
    groups = FixedGroups(((0,), tuple(range(1, LARGE_PEERS + 1))), corrected=False)
    method = Centre(ProgressiveGrouping()) if corrected else centre("not corrected", groups, groups)
    crew = SimulatedCrew(LARGE_PEERS + 1, Faults(latency_s=LATENCY_S), cost=ComputeCost(STEP_S / LARGE))
    errors: list[float] = []

    def train(peer: SimulatedTransport) -> None:
        model = Values(torch.ones(ALIGN))
        batch = LARGE if peer.me else SMALL
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            peer,
            method=method,
            model=model,
            codec=one_chunk(ALIGN),
            weight=float(batch),
        )
        while len(errors) < PERIODS + SKIPPED + 1:
            # of a parabola, taken before the step is computed: it is as stale as the step is long
            model.values.grad = CURVATURE * model.values.detach()
            peer.compute(batch)
            optimizer.step()
            if peer.me == 1:
                errors.append(abs(float(model.values.detach()[0])))

    crew.run(train)
    return float((errors[SKIPPED + PERIODS] / errors[SKIPPED]) ** (1 / PERIODS))


def expected_growth(corrected: bool) -> float:
    """|(1 - s a)^tau - c a|: the fast group contracts tau times by its share s, the stale one adds c a."""
    fast, stale = 1 / (LARGE_PEERS + 1), LARGE_PEERS / (LARGE_PEERS + 1)
    counted = min(stale, 1 / RATIO) if corrected else stale
    return float(abs((1 - fast * CURVATURE) ** RATIO - counted * CURVATURE))
