"""Which round numbers are believed, though one member may tell any."""

from __future__ import annotations

from ragtag.core.types import Arrived, Left, MessageKey
from ragtag.protocols.channel.far_rounds import CATCH_UP, FarRounds
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.rounds.asking import question
from ragtag.protocols.rounds.base import SCATTER, blob_message
from tests.protocols.harness import TINY


def one_of_three() -> Node:
    """Peer 0, in no round yet."""
    node = Node(0, 3, 1)
    node.configure(0, Channel(direct, TINY, 6, probe_s=100.0, rtt_s=0.01))
    return node


def tells(node: Node, peer: int, number: int) -> None:
    node.step(1.0, Arrived([blob_message(peer, MessageKey(0, number, SCATTER, 0), b"")]))


def asks(node: Node, peer: int, number: int) -> None:
    node.step(1.0, Arrived([question(peer, MessageKey(0, number, SCATTER, 1))]))


def test_one_that_tells_far_rounds_time_and_again_has_nobody_skip_to_each() -> None:
    """Neither by questions nor by values; what two tell, or the only other one, is believed."""
    node = one_of_three()
    node.resume(0, 0)
    tells(node, 1, 1000)
    for number in (1 << 20, 1 << 21, 1000 + 2 * CATCH_UP):
        asks(node, 1, number)
        tells(node, 1, number)
    assert node.heard_of(0) == 1000, "it may have been alone, but not again and again"
    tells(node, 1, 1000 + CATCH_UP)
    assert node.heard_of(0) == 1000 + CATCH_UP
    tells(node, 2, 5000)
    assert node.heard_of(0) == 5000, "an honest one and that"
    alone = one_of_three()
    alone.resume(0, 0)
    alone.step(0.0, Left(2))
    for number in (1000, 1 << 20):
        tells(alone, 1, number)
        assert alone.heard_of(0) == number


def test_what_one_alone_has_others_skip_grows_with_the_logarithm_of_the_rounds() -> None:
    far, leaps, done = FarRounds(), [], 0
    for turn in range(1, 200):
        believed = {far.believes(done, done + 1000, (1,), lambda: (1, 2)) for _ in range(5)}
        assert len(believed) == 1, "how often it tells that in a round is nothing to it"
        if believed == {True}:
            leaps.append(turn)
        done += 1000 if believed == {True} else 1
    assert leaps == [1, 3, 7, 15, 31, 63, 127]
    patient = FarRounds()
    assert patient.believes(0, 1000, (1,), lambda: (1, 2))
    for number in range(1000, 1100):
        assert not patient.believes(number, number + 1000, (1,), lambda: (1, 2))
        assert patient.believes(number, number + 1, (1,), lambda: (1, 2)), "it is near again"
