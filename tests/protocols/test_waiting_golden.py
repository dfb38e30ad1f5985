"""Transcripts of peers that wait for others: who is asked, who is waited for, and who no more.

Kept in tests/golden/waiting/ and read by people (see ``test_golden``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from ragtag.core.types import Left, Offer, Outcome, Run
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.groups.channel import Moshpit
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.rounds.base import GATHER
from ragtag.protocols.rounds.gather import gather
from ragtag.protocols.rounds.rps import rps
from tests.protocols.harness import World, vectors
from tests.protocols.transcript import transcript

Golden = Callable[[str, str], None]
STEP_S, CALM = 0.1, 8
"""A step, and rounds from which deadlines are learned before anything happens."""


def steady(
    n: int,
    method: Averager,
    rounds: int,
    n_chunks: int = 8,
    step_s: Callable[[int], float] = lambda peer: STEP_S,
) -> World:
    """A crew whose peers average, and compute for ``step_s(peer)`` before they do so again."""
    world = World(n, method, n_chunks, floor_s=0.004, probe_s=0.3)
    own = vectors(n, n_chunks)

    def again(peer: int, outcome: Outcome) -> None:
        if outcome.round + 1 < rounds:
            world.average(peer, own[peer], after_s=step_s(peer))

    world.on_done = again
    for peer in range(n):
        world.average(peer, own[peer])
    return world


def uneven(peer: int) -> float:
    """Peer 1 computes half as long again: so deadlines have room for it."""
    return STEP_S + 0.05 * (peer == 1)


def begun_s(world: World, peer: int, number: int) -> float:
    """When a peer began a round."""
    return next(outcome.started_s for outcome in world.outcomes[peer] if outcome.round == number)


def tell(golden: Golden, name: str, world: World, me: int, title: str, note: str, number: int) -> None:
    """From the beginning of a round on."""
    from_s = begun_s(world, me, number)
    golden(
        f"waiting/{name}",
        transcript(world, me, f"{title} Peer {me} tells, from round {number} on.", note, from_s, True),
    )


@pytest.mark.parametrize("method", [rps, direct], ids=lambda m: m.name)
def test_a_peer_freezes(golden: Golden, method: Averager) -> None:
    """It gave its copies, and freezes before it tells its average; it thaws two rounds later."""
    world = steady(4, method, CALM + 5, step_s=uneven)
    calm = steady(4, method, CALM + 5, step_s=uneven).run()
    at_s = begun_s(calm, 3, CALM) + 0.0015
    world.frozen[3] = (at_s, at_s + 0.35)
    world.run()
    note = (
        "Peer 3 freezes after it has sent its copies, for 350 ms. Only its average is missing: it is asked\n"
        "for, and waited for no longer when no answer comes; from the next round on it\n"
        "is not waited for, until it is heard."
    )
    tell(
        golden,
        f"a_peer_freezes_{method.name}",
        world,
        0,
        f"{method.name}: 4 peers in steps of 100 ms.",
        note,
        CALM,
    )


def test_a_peer_computes_longer(golden: Golden) -> None:
    """Its node answers, though its trainer computes: it gets its whole deadline."""
    world = steady(4, direct, CALM + 2)
    own = vectors(4, 8)

    def again(peer: int, outcome: Outcome) -> None:
        if outcome.round + 1 < CALM + 2:
            odd = peer == 3 and outcome.round == CALM - 1
            world.average(peer, own[peer], after_s=uneven(peer) + 0.12 * odd)

    world.on_done = again
    world.run()
    note = (
        "Peer 3 computes 120 ms longer in this round, 70 ms longer than the slowest. It answers that it is\n"
        "there, and is waited for."
    )
    tell(golden, "a_peer_computes_longer", world, 0, "allreduce: 4 peers, one 50 ms slower.", note, CALM)


def test_a_message_is_gone_for_good(golden: Golden) -> None:
    """What a peer has sent and nobody got comes no more: its sender says so."""
    world = steady(4, rps, CALM + 2, step_s=lambda peer: STEP_S + 0.05 * (peer == 3))

    def carry(source: int, run: Run) -> Iterable[tuple[float, Run]]:
        gone = run.key.round == CALM and run.key.stage == GATHER and (source, run.peer) == (3, 0)
        return [] if gone else [(0.0, run)]

    world.carry = carry
    world.run()
    note = (
        "What peer 3 made of its block is lost on its way to peer 0, with every mark. Peer 3 answers that\n"
        "nothing of it comes any more; unless it does in the time for an answer, it is waited for no longer."
    )
    tell(golden, "gone_for_good", world, 0, "rps: 4 peers, one 50 ms slower.", note, CALM)


def test_most_are_late(golden: Golden) -> None:
    """A peer that is early waits once more, rather than going on alone."""
    world = steady(4, rps, CALM + 2)
    own = vectors(4, 8)

    def again(peer: int, outcome: Outcome) -> None:
        if outcome.round + 1 < CALM + 2:
            late = peer != 0 and outcome.round == CALM - 1
            world.average(peer, own[peer], after_s=STEP_S + 0.012 * late)

    world.on_done = again
    world.run()
    note = "All others begin 12 ms late, which is more than peer 0's deadline: it waits once more as long."
    tell(golden, "most_are_late", world, 0, "rps: 4 peers in steps of 100 ms.", note, CALM)


def test_a_line_is_cut_one_way(golden: Golden) -> None:
    """Peer 1 does not hear peer 0, and deals 0's block to others."""
    world = steady(4, rps, CALM + 4)
    world.carry = lambda source, run: (
        [] if run.key.round >= CALM and (source, run.peer) == (0, 1) else [(0.0, run)]
    )
    world.run()
    note = "From now on nothing of peer 0 comes to peer 1, which takes another for the owner of 0's block."
    tell(golden, "cut_one_way", world, 0, "rps: 4 peers in steps of 100 ms.", note, CALM)


def test_a_peer_falls_behind(golden: Golden) -> None:
    """It was frozen for some rounds, and comes back into the newest."""
    world = steady(4, direct, CALM + 8)
    calm = steady(4, direct, CALM + 8).run()
    at_s = begun_s(calm, 3, CALM) + 0.0505
    world.frozen[3] = (at_s, at_s + 0.5)
    world.run()
    note = "Peer 3 freezes while it computes, for 500 ms, and then finds what the others sent meanwhile."
    tell(golden, "a_peer_falls_behind", world, 3, "allreduce: 4 peers in steps of 100 ms.", note, CALM)


def test_rows_are_lost(golden: Golden) -> None:
    """Rows through owners, repaired; what is lacking at the deadline comes late."""
    world = World(3, gather, 4, loss=0.0, floor_s=0.004, probe_s=0.05)
    rows = np.zeros((2, CHUNK_BYTES), np.uint8)

    def again(peer: int, outcome: Outcome) -> None:
        if outcome.round < 2:
            world.push(world.now_s + STEP_S, peer, Offer(0, rows + 16 * outcome.round + peer, 1.0))

    def carry(source: int, run: Run) -> Iterable[tuple[float, Run]]:
        odd = run.key.round == 1 and run.key.stage == GATHER and (source, run.peer) == (2, 0)
        return [(0.3 if odd else 0.0, run)]

    world.on_done, world.carry = again, carry
    for peer in range(3):
        world.push(0.0, peer, Offer(0, rows + peer, 1.0))
    world.run()
    note = (
        "Each peer offers two rows; every owner tells all what it has. In round 1 what peer 2 tells peer 0\n"
        "takes 300 ms longer than a round: its rows are part of the next outcome, as those of round 1."
    )
    golden(
        "waiting/rows", transcript(world, 0, "gather: 3 peers, 2 rows each. Peer 0 tells.", note, 0.0, True)
    )


def test_a_group_meets_and_a_member_dies(golden: Golden) -> None:
    """Matchmaking, a round inside the group, a death."""
    world = World(3, Moshpit(3), 6, floor_s=0.004, probe_s=0.05)
    own = vectors(3, 6)

    def again(peer: int, outcome: Outcome) -> None:
        if outcome.round < 4:
            world.average(peer, own[peer], after_s=STEP_S)

    world.on_done = again
    world.dead[2] = 0.26
    for peer in range(2):
        world.push(0.5, peer, Left(2))
    for peer in range(3):
        world.average(peer, own[peer])
    world.run()
    note = (
        "A group of three finds itself through a host, and averages among its members. Peer 2 dies\n"
        "at 260 ms, while it computes; at 500 ms membership tells."
    )
    golden(
        "waiting/a_group",
        transcript(world, 0, "moshpit/3: 3 peers in steps of 100 ms. Peer 0 tells.", note, 0.0, True),
    )
