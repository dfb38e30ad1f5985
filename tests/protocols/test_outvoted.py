"""How many owners must have gone on without a peer before nobody waits for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ragtag.core.types import Begin, Outcome, Run
from ragtag.protocols.rounds.base import SCATTER, Spec
from ragtag.protocols.rounds.layout import layout_of
from ragtag.protocols.rounds.progress import Waiting
from ragtag.protocols.rounds.rps import rps
from tests.protocols.harness import TINY, World, members, vectors

LAST, ODD, LATE_S = 12, 10, 0.02
"""The last peer begins 200 ms after the others, so their deadlines are 300 ms and more."""


def one_odd_round(n: int) -> list[Outcome]:
    """Round ``ODD`` of each peer: the last peer's copies come late to peer 0, and not to the others."""
    world, own, last = World(n, rps, 2 * n, floor_s=0.004, probe_s=0.3), vectors(n, 2 * n), n - 1

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        if (source, run.key.round, run.key.stage) != (last, ODD, SCATTER):
            return [(0.0, run)]
        if run.peer == 0:
            return [(LATE_S, run)]
        return [(0.0, replace(run, mask=np.zeros(len(run.payload), np.bool_)))]

    def again(peer: int, outcome: Outcome) -> None:
        if len(world.outcomes[peer]) <= LAST:
            world.average(peer, own[peer], after_s=0.1 + 0.2 * (peer == last))

    world.carry, world.on_done = carry, again
    for peer in range(n):
        world.average(peer, own[peer], after_s=0.2 * (peer == last))
    world.run()
    return [outcomes[ODD] for outcomes in world.outcomes]


def test_in_a_crew_of_three_the_loss_on_one_line_does_not_end_the_wait_for_what_is_on_its_way() -> None:
    """Peer 1 lost peer 2's copy and tells an average without it. Its copy for peer 0 comes 20 ms later."""
    outcomes = one_odd_round(3)
    assert all(outcome.missed == () for outcome in outcomes)
    own_block = [members(heard) for heard in outcomes[0].heard]
    assert own_block.count([0, 1]) == 2  # two chunks of six: peer 1's block alone is without peer 2
    assert outcomes[0].scatter_s > 0.2 + LATE_S  # it waited for the copy


def test_in_a_crew_of_four_two_owners_without_a_peer_end_the_wait_for_it() -> None:
    outcomes = one_odd_round(4)
    assert outcomes[0].missed == (3,)
    assert 0.2 < outcomes[0].scatter_s < 0.2 + LATE_S  # not until its copy, nor until the deadline


def test_clients_which_own_nothing_are_no_owners_that_have_not_gone_on_yet() -> None:
    """Of three owners two others went on without peer 3: they are most, however many clients there are."""
    spec = Spec(
        0, 0, 0, layout_of(6, 3), (0, 1, 2), frozenset(range(9)), TINY, patience=None
    )  # fmt: skip
    waiting = Waiting(spec, frozenset({0, 1, 2}))
    waiting.begin(0.0, Begin(np.zeros((6, TINY.elements), np.float32), 1.0, frozenset(range(1, 9)), 1.0, 1.0))
    waiting.owe((3, SCATTER, 0))
    heard = np.array([0b111110111], np.uint64)
    waiting.outvoted(1, heard)
    assert waiting.owed
    waiting.outvoted(2, heard)
    assert not waiting.owed and waiting.missed() == (3,)
