"""Peers that begin a round long before the others, in small crews."""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.core.types import Outcome, Run
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import HEADROOM
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.rounds.asking import ANSWER
from ragtag.protocols.rounds.rps import rps_repair
from tests.protocols.harness import World, vectors

STEP_S, LATENCY_S = 0.01, 0.0005
FLOOR_S = 2 * LATENCY_S


def everyone(n: int, outcome: Outcome) -> bool:
    """Whether all chunks have the values of all peers."""
    return bool((outcome.heard == np.uint64((1 << n) - 1)).all())


def crew(n: int) -> World:
    return World(n, rps_repair, 8, latency_s=LATENCY_S, probe_s=STEP_S, floor_s=FLOOR_S)


# -- One round of calm ones

LAST, ODD = 30, 20
BEFORE_S = 0.004
"""So much earlier than the others peer 0 begins each round."""
DEADLINE_S = HEADROOM * (BEFORE_S + LATENCY_S)


def odd_one(n: int, late_s: float = 0.0, dead: bool = False, hung: bool = False) -> World:
    """One round for which others than peer 0 come late, or not at all."""
    world, own = crew(n), vectors(n, 8)

    def ask(peer: int, number: int) -> None:
        odd = number == ODD and peer > 0
        if odd and dead:
            world.dead[peer] = world.now_s + 1e-6
        if number < LAST and not (odd and hung):
            world.average(peer, own[peer], after_s=BEFORE_S * (peer > 0) + late_s * odd)

    world.on_done = lambda peer, outcome: ask(peer, outcome.round + 1)
    for peer in range(n):
        ask(peer, 0)
    return world.run()


def rounds_of(world: World, peer: int) -> dict[int, Outcome]:
    return {outcome.round: outcome for outcome in world.outcomes[peer]}


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_where_most_are_late_a_peer_is_early_and_is_not_split_from_them(n: int) -> None:
    world = odd_one(n, late_s=0.75 * DEADLINE_S)
    assert rounds_of(world, 0)[ODD].scatter_s > DEADLINE_S
    for peer in range(n):
        assert sorted(rounds_of(world, peer)) == list(range(LAST))
        assert all(everyone(n, outcome) for outcome in world.outcomes[peer])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_who_is_far_too_early_is_with_the_others_again_in_the_next_round(n: int) -> None:
    """They said that they are there: what it went on from is spoilt, and nothing else."""
    world = odd_one(n, late_s=1.5 * DEADLINE_S)
    assert rounds_of(world, 0)[ODD].missed == tuple(range(1, n))
    for peer in range(n):
        assert set(rounds_of(world, peer)) | {ODD} == set(range(LAST))
        assert all(everyone(n, outcome) for outcome in world.outcomes[peer] if outcome.round != ODD)


@pytest.mark.parametrize("n", [3, 4, 6])
def test_the_last_one_waits_for_answers_and_then_no_more(n: int) -> None:
    world = odd_one(n, dead=True)
    lost = rounds_of(world, 0)[ODD]
    answer_s = ANSWER * 2.5 * LATENCY_S  # round trips, as the channel has it
    assert lost.missed == tuple(range(1, n))
    assert lost.scatter_s == pytest.approx(FLOOR_S + answer_s)  # it computes nothing, so asks at once
    assert not any(outcome.expired for outcome in world.outcomes[0] if outcome.round > ODD)
    assert len(world.outcomes[0]) == LAST


def test_two_that_hang_while_their_nodes_answer_cost_three_rounds() -> None:
    world = odd_one(3, hung=True)
    waited = [outcome.round for outcome in world.outcomes[0] if outcome.expired]
    assert waited == [ODD, ODD + 1, ODD + 2]
    assert len(world.outcomes[0]) == LAST


@pytest.mark.parametrize("method", [rps_repair, direct], ids=["rps", "all-reduce"])
@pytest.mark.parametrize("parted", [{0, 1, 2}, {0, 1}], ids=["halves", "two of six"])
def test_peers_that_a_line_parts_find_out_after_one_deadline(method: Averager, parted: set[int]) -> None:
    """Whichever side they are on. Fewer than half of the others are there: one alone would be early."""
    world = World(6, method, 12, latency_s=LATENCY_S, probe_s=STEP_S, floor_s=FLOOR_S)
    own, cut_s = vectors(6, 12), 30 * STEP_S

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        return [] if world.now_s > cut_s and (source in parted) != (run.peer in parted) else [(0.0, run)]

    def again(peer: int, outcome: Outcome) -> None:
        if world.now_s < 3 * cut_s:
            world.average(peer, own[peer], after_s=STEP_S)

    world.carry, world.on_done = carry, again
    for peer in range(6):
        world.average(peer, own[peer])
    world.run()
    for peer, outcomes in enumerate(world.outcomes):
        later = [outcome for outcome in outcomes if outcome.started_s + outcome.total_s > cut_s]
        side = parted if peer in parted else set(range(6)) - parted
        assert set(later[-1].waited_for) == side - {peer}
        assert sum(outcome.expired for outcome in later) == 1
