"""Drivers whose peers membership tells: a claim that nobody stands behind, and what datagrams may not say."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from ragtag.codecs.dense import fp32
from ragtag.core.types import Average, Floats, MessageKey, Outcome, Run
from ragtag.core.wire import CHUNK_BYTES, Identity, Kind
from ragtag.network.driver.driver import Driver
from ragtag.network.link.frame import Framer
from ragtag.network.link.udp import UdpLink
from ragtag.network.membership.admission import tell_revocation
from ragtag.protocols.membership.passes import Took, revoked
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.base import BLOCK_BITS
from ragtag.protocols.rounds.rps import rps
from tests.network.agents import KEY, Agents
from tests.network.crew import NAME, PATIENCE_S, mean_of, until, values_of

N, CHUNKS, GHOST = 3, 70, 63


class Crew(Agents):
    """``N`` drivers, each of which turns its agent; further agents the test turns."""

    def __init__(self, signing: bytes = b"") -> None:
        self.endpoints = [UdpLink() for _ in range(N)]
        self.drivers: dict[int, Driver] = {}
        super().__init__(0, signing=signing)
        self.founded, self.persons = N, {N - 1: "alice"}
        entries: list[tuple[str, int]] = []
        for peer, endpoint in enumerate(self.endpoints):
            self.start(peer, list(entries), peer, port=endpoint.address[1])
            entries.append(self.addresses[peer])
        where = {peer: endpoint.address for peer, endpoint in enumerate(self.endpoints)}
        for peer, endpoint in enumerate(self.endpoints):
            agent = self.agents.pop(peer)
            card = agent.roster.mine
            assert card is not None
            self.drivers[peer] = Driver(
                Node(peer, N, 1), endpoint, Identity(NAME, peer), where, agent=agent, epoch=card.epoch
            )
            self.drivers[peer].start()
            channel = Channel(rps, fp32, CHUNKS, probe_s=5.0, rtt_s=1e-3, floor_s=0.5)
            self.drivers[peer].configure(0, channel, 7).result(PATIENCE_S)
        until(lambda: all(len(driver.seats) == N - 1 for driver in self.drivers.values()), "all were found")
        self.round = 0

    def average(self) -> list[Outcome]:
        """One round of all."""
        own: list[Floats] = [values_of(peer, CHUNKS, self.round) for peer in range(N)]
        asked = [self.drivers[peer].average(Average(0, own[peer], 1.0)) for peer in range(N)]
        outcomes = [future.result(PATIENCE_S) for future in asked]
        self.expected = mean_of(CHUNKS, range(N), self.round)
        self.round += 1
        return outcomes

    def cuts(self) -> list[int]:
        """Into how many blocks each peer cuts a vector."""
        return [driver.node.cut for driver in self.drivers.values()]

    def check(self, outcomes: list[Outcome]) -> None:
        """All heard all, and have their mean."""
        for outcome in outcomes:
            assert (outcome.heard == 0b111).all()
            np.testing.assert_allclose(outcome.mean, self.expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew() as made:
        try:
            yield made
        finally:
            for driver in made.drivers.values():
                driver.close(0.0)


def test_nothing_is_taken_from_one_that_was_put_out_though_it_goes_on_sending() -> None:
    """It has an address and a number that all know, and in a crew that seals it has keys."""
    signing = bytes(range(32))
    with Crew(signing) as crew:
        try:
            crew.check(crew.average())
            told = revoked(signing, "alice", int(1e6 * time.time()))
            at = [crew.drivers[0].own_member_address]
            assert list(tell_revocation(at, KEY, told, PATIENCE_S).values()) == [Took.YES]
            until(lambda: all(crew.drivers[p].node.gone == {2} for p in (0, 1)), "all put it out")
            until(lambda: crew.drivers[2].lost_seat != "", "it was told")
            assert crew.drivers[2].barred and "alice's token was revoked" in crew.drivers[2].lost_seat
            assert not crew.drivers[0].barred
            sender = Framer(Identity(NAME, 2), crew.drivers[2].engine.framer.epoch)
            sender.schemas = {0: 7}
            run = Run(0, MessageKey(0, 1, 0, 0), 0, 1, np.zeros((1, CHUNK_BYTES), np.uint8),
                      np.ones(1, np.float32), np.zeros(1, np.uint64))  # fmt: skip
            flow = crew.drivers[0].engine.flows[2]
            assert flow.barred
            before, refused = flow.inbound.received, crew.drivers[0].engine.framer.refused
            malformed = refused.malformed
            for number in range(3):
                seq = np.array([crew.drivers[2].engine.flows[0].path.sent + number], np.uint64)
                row = sender.data(run, np.arange(1), seq)[0].tobytes()
                crew.endpoints[2].sock.sendto(row, crew.endpoints[0].address)
            crew.endpoints[2].sock.sendto(b"a mark", crew.endpoints[0].address)
            until(lambda: refused.malformed > malformed, "all was taken in")
            assert flow.inbound.received == before
            own = [values_of(peer, CHUNKS, 9) for peer in (0, 1)]
            asked = [crew.drivers[peer].average(Average(0, own[peer], 1.0)) for peer in (0, 1)]
            for future in asked:
                outcome = future.result(PATIENCE_S)
                assert (outcome.heard == 0b11).all() and not outcome.expired
        finally:
            for driver in crew.drivers.values():
                driver.close(0.0)


def test_blocks_that_a_ghost_claims_are_given_back_when_it_is_gone(crew: Crew) -> None:
    """It says that it averages in the last place, and sends nothing: while it lives 64 blocks are dealt."""
    crew.check(crew.average())
    crew.start(GHOST, list(crew.addresses.values()), GHOST, "ghost")
    crew.until(lambda: crew.cuts() == [GHOST + 1] * N, "all believed the ghost")
    crew.average()
    assert crew.drivers[0].node.channels[0].rounds[crew.round - 1].spec.growth == GHOST + 1 - N
    crew.kill(GHOST)
    until(lambda: crew.cuts() == [N] * N, "all cut vectors as before")
    crew.average()
    outcomes = crew.average()
    crew.check(outcomes)
    assert not any(outcome.expired for outcome in outcomes)
    machine = crew.drivers[0].node.channels[0].rounds[outcomes[0].round]
    assert machine.spec.growth == 0 and len(machine.spec.owners) == N


def test_datagrams_from_a_peers_own_address_end_nobody_and_make_no_places(crew: Crew) -> None:
    """Who comes and goes is membership's to tell: a good-bye, or a larger cut, is anybody's who forges."""
    crew.check(crew.average())
    for dest in range(N):
        sender = (dest + 1) % N
        forger = Framer(Identity(NAME, sender), crew.drivers[sender].engine.framer.epoch)
        forger.schemas = {0: 7}
        driver, flow = crew.drivers[dest], crew.drivers[sender].engine.flows[dest]
        ones, none = np.ones(1, np.float32), np.zeros(1, np.uint64)
        key = MessageKey(0, 1, 0, 60 << BLOCK_BITS)
        run = Run(dest, key, 0, 1, np.zeros((1, CHUNK_BYTES), np.uint8), ones, none)
        seq = np.array([flow.path.sent], np.uint64)
        shots = [forger.short(Kind.BYE, dest)] * 3 + [forger.data(run, np.arange(1), seq)[0].tobytes()]
        before = driver.engine.framer.refused.malformed
        for shot in (*shots, b"a mark"):  # malformed: when it is counted, all has come
            crew.endpoints[sender].sock.sendto(shot, crew.endpoints[dest].address)
        until(lambda: driver.engine.framer.refused.malformed > before, "all was taken in")  # noqa: B023
        assert driver.node.gone == frozenset() and driver.node.n == driver.node.cut == N
    crew.check(crew.average())
