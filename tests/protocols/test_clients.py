"""Clients, piece by piece: who owns what they would, and what others take of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragtag
from ragtag.codecs.dense import fp32
from ragtag.core.types import Arm, Arrived, Average, Joined, Left, Noted, Offer, Post, Role, Send, Visits
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.central.owners import Owners
from ragtag.protocols.channel.averager import Averager, Channel
from ragtag.protocols.channel.presence import Crew
from ragtag.protocols.channel.shares import Plan, write_plans
from ragtag.protocols.node import Node
from ragtag.protocols.rounds.base import BLOCK_BITS, BY_SHARES, SCATTER
from ragtag.protocols.rounds.gather import gather
from ragtag.protocols.rounds.rps import rps
from ragtag.protocols.rounds.stages import Stages
from tests.protocols.harness import TINY, World, vectors

ALLREDUCE = ragtag.AllReduce()


def crew_of(n: int, clients: tuple[int, ...], me: int = 0) -> Crew:
    crew = Crew(me, n, 7, role=Role.CLIENT if me in clients else Role.TRAINER)
    for peer in clients:
        if peer != me:
            crew.presence.joined(peer, Role.CLIENT)
    return crew


def blocks(node: Node, round_: int = 0) -> dict[int, int]:
    """How many chunks each peer owns in a round that has begun."""
    machine = node.channels[0].rounds[round_]  # type: ignore[attr-defined]
    assert isinstance(machine, Stages)
    spec, owned = machine.spec, dict.fromkeys(range(node.n), 0)
    for block, owner in enumerate(spec.owners):
        owned[owner] += spec.layout.sizes[block] if machine.spec.shares else 1
    return owned


# -- Who owns


@given(st.integers(2, 12), st.data())
def test_all_that_see_the_same_clients_cut_alike_and_clients_own_nothing(n: int, data: st.DataObject) -> None:
    """Each peer, trainer or client, goes by the same shares; and nobody's silence changes them."""
    clients = tuple(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n - 1))))
    views = [crew_of(n, clients, me) for me in range(n)]
    for crew in views:
        others = sorted(set(range(n)) - {crew.me})
        for peer in data.draw(st.sets(st.sampled_from(others))):
            for _ in range(3):
                crew.presence.count_silence({peer: False})
    found = {crew.shares(0, 5, False, False) for crew in views}
    assert len(found) == 1
    (shares,) = found
    own = [peer for peer, share in enumerate(shares) if share]
    assert own == [peer for peer in range(n) if peer not in clients] and set(shares) <= {0, 1}
    assert all(crew.clients == set(clients) for crew in views)


def test_what_was_planned_for_a_client_is_shared_by_the_others() -> None:
    crew = crew_of(4, (3,))
    for teller in (0, 1):
        crew.plans.take(teller, write_plans([Plan(0, 2, (5, 3, 0, 9))]))
    assert crew.shares(0, 1, True, False) == (1, 1, 1)
    assert crew.shares(0, 2, True, False) == (5, 3, 0, 0)
    assert crew.shares(0, 2, False, False) == (1, 1, 1)
    for teller in (0, 1):
        crew.plans.take(teller, write_plans([Plan(0, 3, (0, 0, 0, 9))]))
    assert crew.shares(0, 3, True, False) == (1, 1, 1)


def test_clients_own_alike_only_once_all_others_have_left_and_a_death_changes_no_cut() -> None:
    crew = crew_of(4, (2, 3), me=2)
    before = crew.shares(0, 0, False, False)
    crew.presence.leave(0)
    assert crew.shares(0, 0, False, False) == before == (1, 1) and crew.owners == {1}
    crew.presence.leave(1)
    assert crew.shares(0, 0, False, False) == () and crew.owners == {2, 3}
    crew.presence.joined(1)
    assert crew.shares(0, 0, False, False) == before and crew.owners == {1}


def test_another_process_in_a_clients_seat_owns_again() -> None:
    node = Node(0, 3, 1)
    node.step(0.0, Joined(2, Role.CLIENT))
    assert node.clients == {2} and node.live == {0, 1, 2} and node.crew.owners == {0, 1}
    node.step(0.0, Left(2))
    assert not node.clients
    node.step(0.0, Visits(2, Role.CLIENT))
    assert not node.clients and node.crew.owners == {0, 1}
    node.step(0.0, Joined(2))
    assert not node.clients and node.crew.owners == {0, 1, 2}


def test_that_a_peer_which_takes_part_is_a_client_is_no_word_of_a_new_process() -> None:
    """What it had posted is kept: it would not post that again."""
    nodes = [Node(peer, 2, 1) for peer in range(2)]
    posts = [effect.run for effect in nodes[1].step(0.0, Post(5, b"told")) if isinstance(effect, Send)]
    nodes[0].step(0.1, Arrived([replace(run, peer=1) for run in posts]))
    nodes[0].step(0.2, Joined(1, Role.CLIENT))
    assert nodes[0].clients == {1} and nodes[0].board.notices(5).blobs() == {1: b"told"}
    nodes[0].step(0.3, Left(1))
    nodes[0].step(0.4, Joined(1, Role.CLIENT))
    assert nodes[0].clients == {1} and nodes[0].board.notices(5).blobs() == {}


@pytest.mark.parametrize("method", [rps, ALLREDUCE], ids=lambda method: method.name)
def test_the_vector_is_cut_evenly_among_the_others(method: Averager) -> None:
    for me in (0, 4):
        node = Node(me, 5, 1, role=Role.CLIENT if me == 4 else Role.TRAINER)
        for peer in {3, 4} - {me}:
            node.step(0.0, Joined(peer, Role.CLIENT))
        node.configure(0, Channel(method, fp32, 24, 0.1, 0.01))
        values = np.zeros((24, fp32.elements), np.float32)
        node.step(0.0, Average(0, values, 1.0))
        assert blocks(node) == {0: 8, 1: 8, 2: 8, 3: 0, 4: 0}


def test_rows_of_clients_go_through_the_others() -> None:
    world = World(4, gather, 8, clients=(2, 3))
    draws = [np.random.default_rng(peer).integers(0, 255, (5, CHUNK_BYTES)) for peer in range(4)]
    for peer in range(4):
        world.push(0.0, peer, Offer(0, draws[peer].astype(np.uint8), 1.0))
    world.run()
    for peer in range(4):
        (outcome,) = world.outcomes[peer]
        came = outcome.gathered
        assert came is not None and came.whole.all() and len(came.rows) == 20
        assert outcome.heard.tolist() == [0b1111] * 4 and not outcome.missed
    assert set(blocks(world.nodes[0])) == {0, 1, 2, 3} and blocks(world.nodes[0])[2] == 0


def test_blocks_of_a_central_state_are_a_clients_only_where_nobody_else_is() -> None:
    owners = Owners(2, 1, 16, range(4), frozenset({2, 3}))
    assert {owners[block] for block in range(16)} == {0, 1}
    assert owners.outranks(0, 3, 5) and not owners.outranks(3, 0, 5)
    owners.left(0)
    assert {owners[block] for block in range(16)} == {1}
    owners.left(1)
    assert {owners[block] for block in range(16)} == {2, 3}
    owners.joined(1)
    assert {owners[block] for block in range(16)} == {1}
    owners.joined(1, owns=False)
    assert {owners[block] for block in range(16)} == {1, 2, 3}


# -- Rounds


def test_a_peer_that_has_not_heard_of_a_client_is_missed_at_once_and_mixes_nothing() -> None:
    world = World(4, rps, 12, clients=(3,))
    world.nodes[0] = node = Node(0, 4, 1)
    node.configure(0, Channel(rps, TINY, 12, 0.05, 0.005, 0.02))
    inputs = vectors(4, 12)
    for peer in range(4):
        world.average(peer, inputs[peer])
    world.run()
    for peer in range(4):
        (outcome,) = world.outcomes[peer]
        for chunk in range(12):
            heard = [p for p in range(4) if int(outcome.heard[chunk]) >> p & 1]
            mean = np.mean([inputs[p][chunk] for p in heard], axis=0)
            np.testing.assert_allclose(outcome.mean[chunk], mean, rtol=1e-5)
        assert outcome.total_s < 0.05  # nobody waits until a deadline
    assert {note.what for _, note in world.notes} == {"apart"}


def test_a_made_up_cut_is_told_from_a_true_one_by_its_name_alone() -> None:
    node = Node(0, 3, 1)
    node.configure(0, Channel(rps, TINY, 6, 0.1, 0.01))
    node.step(0.0, Average(0, vectors(3, 6)[0], 1.0))
    machine = node.channels[0].rounds[0]  # type: ignore[attr-defined]
    spec = machine.spec
    key = spec.key(SCATTER, 1)
    assert not spec.cut_apart(key, spec.layout.sizes[1])
    assert not spec.cut_apart(key._replace(block=1 << BLOCK_BITS | 1))  # a crew that has grown
    assert spec.cut_apart(key._replace(block=BY_SHARES << BLOCK_BITS))


def test_who_owns_nothing_waits_once_more_where_most_averages_are_missing_and_no_longer_than_that() -> None:
    """Its first deadline comes in the second stage: early or late, it cannot tell before."""
    world = World(3, rps, 6, clients=(1, 2))
    world.rounds(12, lambda peer, round_: vectors(3, 6, "calm", round_)[peer])
    before = max(outcome.total_s for outcome in world.outcomes[1][4:])
    now_s = world.now_s + 1.0
    owner, effects = (world.nodes[peer].step(now_s, Average(0, vectors(3, 6)[peer], 1.0)) for peer in (0, 1))
    until = [max(effect.at_s for effect in found if isinstance(effect, Arm)) for found in (owner, effects)]
    assert now_s + before < until[1] <= until[0] < now_s + 1.0, "as long as an owner for copies, at most"
    sends = [effect for effect in effects if hasattr(effect, "run")]
    assert {effect.run.peer for effect in sends} == {0}
    assert all(effect.deadline_s > now_s + before for effect in sends)


@pytest.mark.parametrize("averager", [ragtag.Moshpit(), ragtag.AllReduce(ring=True)], ids=repr)
def test_a_client_opens_no_channel_without_owners(averager: Averager) -> None:
    channel = Channel(averager, fp32, 4, 0.1, 0.01)
    Node(0, 3, 1).configure(0, channel)
    with pytest.raises(ValueError, match="this peer is a client"):
        Node(0, 3, 1, role=Role.CLIENT).configure(0, channel)


def test_where_only_clients_are_left_it_is_said_once() -> None:
    node = Node(1, 3, 1, role=Role.CLIENT)
    node.step(0.0, Joined(2, Role.CLIENT))
    node.configure(0, Channel(rps, TINY, 6, 0.01, 0.001))
    notes: list[Noted] = []
    node.step(0.0, Left(0))
    node.step(0.0, Left(2))
    for at_s in range(3):
        effects = node.step(float(at_s), Average(0, vectors(3, 6)[1], 1.0))
        notes += [effect for effect in effects if isinstance(effect, Noted)]
    assert [note.what for note in notes] == ["no owner"] and "start a peer that is none" in notes[0].detail
