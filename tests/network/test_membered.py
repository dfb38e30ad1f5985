"""Drivers whose peers membership tells: a claim that nobody stands behind, and what datagrams may not say."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ragtag.codecs.dense import fp32
from ragtag.core.types import Average, Floats, MessageKey, Outcome, Run
from ragtag.core.wire import CHUNK_BYTES, Identity, Kind
from ragtag.network.driver.driver import Driver
from ragtag.network.link.frame import Framer
from ragtag.network.link.udp import UdpLink
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.base import BLOCK_BITS
from ragtag.protocols.rounds.rps import rps
from tests.network.agents import Agents
from tests.network.crew import NAME, PATIENCE_S, mean_of, until, values_of

N, CHUNKS, GHOST = 3, 70, 63


class Crew(Agents):
    """``N`` drivers, each of which turns its agent; further agents the test turns."""

    def __init__(self) -> None:
        self.endpoints = [UdpLink() for _ in range(N)]
        self.drivers: dict[int, Driver] = {}
        super().__init__(0)
        self.founded = N
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
