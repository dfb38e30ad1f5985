"""A newcomer takes part within seconds, whoever freezes while it comes, and whatever gets lost."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ragtag.core import seed as random
from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.protocols.rounds.rps import rps
from ragtag.simulation.worlds.newcomer import PHASES, NewcomerWorld

PEERS, COMES_S, LIMIT_S = 8, 4.0, 60.0
BUSY = Faults(latency_s=0.005, jitter_s=0.01)
WITHIN_S = 3.5
"""Undisturbed a newcomer takes 1.9 to 2.2 s, of which half is for a state of a round to come."""


def phases_of(seed: int, faults: Faults) -> dict[str, float]:
    """When a newcomer of a crew of eight is done with what, from its first message on."""
    crew = NewcomerWorld(PEERS, rps, faults, seed, step_s=0.2)
    crew.world.at(COMES_S, lambda: crew.come(PEERS, tuple(range(PEERS))))
    while crew.now_s < LIMIT_S and "average" not in (
        crew.members[PEERS].phases if PEERS in crew.members else ()
    ):
        crew.run(crew.now_s + 0.25)
    return {phase: at_s - COMES_S for phase, at_s in crew.members[PEERS].phases.items()}


@pytest.mark.parametrize("phase", ["before", *PHASES])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_peer_that_freezes_or_dies_while_a_newcomer_comes_does_not_keep_it(phase: str, seed: int) -> None:
    calm = phases_of(seed, BUSY)
    assert tuple(calm) == PHASES and calm["average"] < 2.6
    begins_s = {"before": -0.5} | {after: calm[name] for name, after in pairwise(PHASES)}
    at_s = COMES_S + begins_s.get(phase, 0.0) + 0.01
    who = int(PEERS * random.uniform(random.stream_key(seed, f"who/{phase}"), 0))
    for faults in (
        Faults(latency_s=0.005, jitter_s=0.01, freezes=(Freeze(who, at_s, 6.0),)),
        Faults(latency_s=0.005, jitter_s=0.01, crashes=(Crash(who, at_s),)),
    ):
        assert phases_of(seed, faults)["average"] < WITHIN_S


@pytest.mark.parametrize("loss", [0.05, 0.2])
def test_loss_does_not_keep_a_newcomer(loss: float) -> None:
    """Of what the others tell only when they are asked, something is lost for most newcomers."""
    for seed in range(4):
        faults = Faults(latency_s=0.005, jitter_s=0.01, loss=Loss(loss))
        assert phases_of(seed, faults)["average"] < (4.0 if loss < 0.1 else 6.0)
