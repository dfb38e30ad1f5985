"""What a peer that is twenty times slower costs the others, in virtual time.

The figure of ``benchmarks/stragglers.py``, which is of real processes, without a machine's noise.
"""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.core.seed import generator
from ragtag.core.types import Average, Outcome
from ragtag.protocols.rounds.rps import rps
from tests.protocols.harness import World, vectors

N, STEP_S, SLEEP_S, LATENCY_S, UNTIL_S = 4, 0.05, 1.0, 0.0005, 30.0


def rounds(sleep_s: float, aside: bool, seed: int) -> tuple[float, int, int]:
    """Rounds a second of the three that do not sleep; how many of peer 0's the sleeper is in, and missed.

    Steps take 50 ms, give or take a tenth. The sleeper takes an average and offers to the next one, as
    ``CrewOptimizer`` has it.
    """
    world = World(N, rps, 16, seed=seed, latency_s=LATENCY_S, probe_s=4 * LATENCY_S, floor_s=2 * LATENCY_S)
    draw, values = generator(seed, "steps"), vectors(N, 16, "v", 0)
    slow = frozenset({N - 1}) if aside and sleep_s else frozenset[int]()
    giving = [True] * N

    def ask(peer: int, in_s: float) -> None:
        if world.now_s + in_s < UNTIL_S:
            world.push(world.now_s + in_s, peer, Average(0, values[peer], 1.0, None, slow))

    def step(peer: int) -> None:
        ask(peer, STEP_S * (1 + 0.1 * draw.standard_normal()) + (sleep_s if peer == N - 1 else 0.0))

    def done(peer: int, outcome: Outcome) -> None:
        giving[peer] = not giving[peer] or peer not in slow
        if giving[peer]:
            step(peer)
        else:
            ask(peer, 0.0)

    world.on_done = done
    for peer in range(N):
        step(peer)
    world.run()
    fast = [world.outcomes[peer] for peer in range(N - 1)]
    heard = sum(bool(np.any(o.heard & np.uint64(1 << (N - 1)))) for o in fast[0])
    return sum(map(len, fast)) / len(fast) / UNTIL_S, heard, sum(N - 1 in o.missed for o in fast[0])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_others_keep_at_least_95_percent_of_their_throughput(seed: int) -> None:
    calm, _, _ = rounds(0.0, aside=False, seed=seed)
    slowed, heard, missed = rounds(SLEEP_S, aside=True, seed=seed)
    steps = UNTIL_S / (SLEEP_S + STEP_S)
    assert slowed >= 0.95 * calm
    assert heard >= 0.8 * steps  # nearly all of what it computed counts
    assert missed == 0


def test_without_being_told_they_wait_for_it_again_and_again_and_lose_what_it_computed() -> None:
    _, heard, missed = rounds(SLEEP_S, aside=False, seed=0)
    steps = UNTIL_S / (SLEEP_S + STEP_S)
    assert missed >= 0.5 * steps
    assert heard <= 0.1 * steps
