"""RPS where loss is not independent: a user's exchange in virtual time, while a peer or a line fails.

Each peer's ``CrewOptimizer`` averages a model that is its own unit vector in every chunk. So what it holds
after a round says with which weight each peer is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Crash, Faults, OneWay, Partition, Window
from ragtag.core.types import Floats, PeerId
from ragtag.protocols.rounds.rps import rps
from ragtag.recipes.base import worst
from ragtag.recipes.lockstep import LATENCY_S
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer

N = 16
STEP_S = 0.05
ROUNDS = 36
FROM_S, UNTIL_S = 0.5, 1.2
"""The fault's window. A round takes about ``STEP_S``."""
SETTLED_S = 0.9
"""By then the crew knows of the fault."""
HEALED_S = 1.4
LOST = 0
"""The peer that is not heard any more."""
SIDE = frozenset(range(N // 2))

ONE_WAY = "nothing that one peer sends arrives"
SILENT = "one peer dies in mid-round"
PARTED = "two halves do not hear each other"
_MID_ROUND_S = 0.471
_WINDOW = Window(FROM_S, UNTIL_S)
FAULTS: Mapping[str, Faults] = {
    ONE_WAY: Faults(
        latency_s=LATENCY_S, one_way=tuple(OneWay(LOST, k, _WINDOW) for k in range(N) if k != LOST)
    ),
    SILENT: Faults(latency_s=LATENCY_S, crashes=(Crash(LOST, _MID_ROUND_S),)),
    PARTED: Faults(latency_s=LATENCY_S, partitions=(Partition(SIDE, _WINDOW),)),
}


@dataclass(frozen=True, slots=True)
class Weights:
    """What the peers' averages were made of. Errors are the largest over peers, chunks and weights.

    during: how far they lie from the mean of the peers that can be heard, once the crew knows of the fault.
    after: from the mean of all, once it is over; of the living, where it does not end.
    broken: rounds in which a chunk of a peer that is heard had no average.
    """

    during: float
    after: float
    broken: int


@dataclass(slots=True)
class _Row:
    """A peer's average: when it ended, its weights ``[n_chunks, N]``, and whether all chunks have one."""

    at_s: float
    weights: Floats
    whole: bool


class _Unit(nn.Module):
    def __init__(self, peer: PeerId) -> None:
        super().__init__()
        unit = torch.zeros(N, N)
        unit[:, peer] = 1.0
        self.unit = unit.flatten()
        self.values = nn.Parameter(self.unit.clone())


def weights(scenario: str) -> Weights:
    """Average for ``ROUNDS`` rounds under a scenario of ``FAULTS``."""
    crew = SimulatedCrew(N, FAULTS[scenario], seed=1, cost=ComputeCost(STEP_S))
    seen: dict[PeerId, list[_Row]] = {peer: [] for peer in range(N)}

    def train(peer: SimulatedTransport) -> None:
        model = _Unit(peer.me)
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            peer,
            method=rps,
            model=model,
            codec=fp32._replace(elements=N),
        )
        for _ in range(ROUNDS):
            peer.compute()
            with torch.no_grad():
                model.values.copy_(model.unit)
            outcome = optimizer.average()
            found = model.values.detach().numpy().reshape(N, N).copy()
            seen[peer.me].append(_Row(peer.now_s(), found, bool(outcome.averaged.all())))

    crew.run(train)
    heard = [peer for peer in range(N) if scenario == PARTED or peer != LOST]
    last_s = min(seen[peer][-1].at_s for peer in heard)
    during, after, broken = list[float](), list[float](), 0
    for peer in heard:
        lasts = _expected(scenario, peer)
        heals = lasts if scenario == SILENT else np.full(N, 1 / N)
        rows = seen[peer]
        during.append(worst(_off(row, lasts) for row in rows if SETTLED_S <= row.at_s < UNTIL_S - STEP_S))
        after.append(worst(_off(row, heals) for row in rows if HEALED_S <= row.at_s < last_s - STEP_S))
        broken = max(broken, sum(not row.whole for row in rows))
    return Weights(worst(during), worst(after), broken)


def _expected(scenario: str, peer: PeerId) -> NDArray[np.float64]:
    """The weights in a peer's average while the fault lasts."""
    if scenario == PARTED:
        inside = np.array([(k in SIDE) == (peer in SIDE) for k in range(N)])
    else:
        inside = np.arange(N) != LOST
    found: NDArray[np.float64] = inside / inside.sum()
    return found


def _off(row: _Row, expected: NDArray[np.float64]) -> float:
    return float(np.abs(row.weights - expected).max())
