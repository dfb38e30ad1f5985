"""A peer whose line fails: it soon finds out that it is the one that is cut off, and goes on with its steps.

Where it waited for most of a step it would be late for the next round by as much, and all others with it
(``benchmarks/outages.py`` has what that costs).
"""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.core.seed import generator
from ragtag.core.types import Arrived, Outcome, Run
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.rounds.asking import QUESTIONS
from ragtag.protocols.rounds.rps import rps_repair
from tests.protocols.harness import World, vectors

N, STEP_S, LATENCY_S, JITTER = 8, 0.2, 0.001, 0.05
ROUNDS, ODD = 40, 25
BOTH = pytest.mark.parametrize("method", [rps_repair, direct], ids=["rps", "all-reduce"])


class Crew:
    """Peers that compute for a step, a twentieth more or less, and average. Lines fail for a step each.

    cuts: the peers whose lines fail, by round. after_s: how long after such a peer has begun that round.
    pace: how many times as long as usual a peer computes, by peer and round.
    dead: peers that die before they begin round ``ODD``.
    """

    def __init__(
        self,
        method: Averager,
        cuts: dict[int, list[int]],
        after_s: float = -1e-6,
        pace: dict[tuple[int, int], float] | None = None,
        dead: tuple[int, ...] = (),
    ) -> None:
        self._cuts, self._after_s, self._pace, self._dead = cuts, after_s, pace or {}, dead
        self._fails_s = [(0.0, 0.0)] * N
        self._own, self._draws = vectors(N, N), [generator(1, "cut off", peer) for peer in range(N)]
        self.world = world = World(
            N, method, N, latency_s=LATENCY_S, probe_s=4 * LATENCY_S, floor_s=4 * LATENCY_S
        )
        world.carry, world.on_done = self._carry, self._done
        for peer in range(N):
            self._begins(peer, 0)
        world.run()

    def _begins(self, peer: int, number: int) -> None:
        if number == ROUNDS:
            return
        if number == ODD and peer in self._dead:
            self.world.dead[peer] = self.world.now_s
            return
        pace = self._pace.get((peer, number), 1.0)
        computes_s = pace * STEP_S * (1 + JITTER * (2 * self._draws[peer].random() - 1))
        self.world.average(peer, self._own[peer], after_s=computes_s)
        if peer in self._cuts.get(number, ()):
            from_s = self.world.now_s + computes_s + self._after_s
            self._fails_s[peer] = from_s, from_s + STEP_S

    def _done(self, peer: int, outcome: Outcome) -> None:
        self._begins(peer, outcome.round + 1)

    def _carry(self, source: int, run: Run) -> list[tuple[float, Run]]:
        """What is sent meanwhile is repeated until its deadline: it may come once the line works again."""
        now_s, both = self.world.now_s, (self._fails_s[source], self._fails_s[run.peer])
        works_s = max(until_s if from_s <= now_s < until_s else now_s for from_s, until_s in both)
        return [(works_s - now_s, run)] if works_s <= self.world.deadline_s else []

    def of(self, number: int) -> list[Outcome]:
        return [next(o for o in outcomes if o.round == number) for outcomes in self.world.outcomes]


@BOTH
@pytest.mark.parametrize("after_s", [-1e-6, 0.5 * JITTER * STEP_S], ids=["before all", "amid"])
def test_who_is_cut_off_finds_out_in_a_part_of_a_step_and_is_in_the_next_round(
    method: Averager, after_s: float
) -> None:
    """With the first of the others, and with all copies out. Rounds take up to 20 ms: peers begin them so far
    apart. Peer 3 asks after that, as does whoever lacks it alone, and an answer takes 5 ms.
    """
    crew = Crew(method, {ODD: [3]}, after_s)
    cut = crew.of(ODD)[3]
    assert set(cut.missed) == set(range(N)) - {3} and cut.total_s < 0.3 * STEP_S
    for number in (ODD, ODD + 1):
        assert max(outcome.total_s for outcome in crew.of(number)) < 0.35 * STEP_S
    for outcome in crew.of(ODD + 1):  # in peer 3's own block one may lack that it has not heard by then
        assert outcome.missed == () and sum(outcome.heard == (1 << N) - 1) >= N - 1


@BOTH
def test_however_often_lines_fail_nobody_waits_for_most_of_a_step(method: Averager) -> None:
    """In each round those of two peers do. By the middle one of the last first stages alone each such peer
    would be later than the one before, as they teach each other how long it takes to find out.
    """
    cuts = {number: [number % N, (3 * number + 1) % N] for number in range(5, ROUNDS)}
    world = Crew(method, cuts).world
    took_s = [outcome.total_s for outcomes in world.outcomes for outcome in outcomes if outcome.round >= 20]
    assert np.mean(took_s) < 0.3 * STEP_S and max(took_s) < 0.8 * STEP_S


def test_a_fast_peer_asks_slow_ones_seldom_whether_they_are_there() -> None:
    """It waits for two thirds of a step in each round: it asks after a part of its own, and then after twice
    as long each time.
    """
    world = Crew(rps_repair, {}, pace={(0, number): 0.3 for number in range(ROUNDS)}).world
    rounds = [outcome.round for outcome in world.outcomes[0] if outcome.scatter_s > 0.6 * STEP_S]
    assert len(rounds) > ROUNDS / 2
    asked = [
        run.key.round
        for _, peer, event, _ in world.log
        if peer == 1 and isinstance(event, Arrived)
        for run in event.runs
        if run.peer == 0 and run.key.stage in QUESTIONS
    ]
    assert 1 <= np.mean([asked.count(number) for number in rounds]) < 5


def test_who_is_usually_early_and_begins_last_for_once_asks_at_once_the_two_that_it_lacks() -> None:
    """What has come shows that it is not early. A quarter of its own step later it would ask all the same."""
    usual = {(0, number): 0.8 for number in range(ROUNDS)}
    crew = Crew(rps_repair, {}, pace=usual | {(0, ODD): 1.2}, dead=(5, 6))
    (last,) = (outcome for outcome in crew.world.outcomes[0] if outcome.round == ODD)
    assert last.missed == (5, 6)
    assert last.scatter_s < 0.1 * STEP_S
