"""Live crews of more seats than average directly: they meet, average in groups, and let others in."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from ragtag.app.crew import membership
from ragtag.app.crew.crew import Crew
from ragtag.app.crew.join import join_as
from ragtag.app.crew.transport import DriverTransport
from ragtag.app.environment import Place
from ragtag.codecs.dense import fp32
from ragtag.core.channels import channel_of
from ragtag.core.schema import Schema, TensorSpec
from ragtag.core.types import PEERS_MAX, Outcome
from ragtag.network.link.udp import bound
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.groups.channel import Moshpit
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.types import Limits
from ragtag.protocols.rounds.rps import rps
from tests.app.drivers import transports
from tests.network.agents import KEY
from tests.network.crew import PATIENCE_S, until
from tests.network.crew import Crew as NetworkCrew

N = 70
PAUSE_S = 1.0
"""From round to round: all peers share one process, and a core or two."""
METHOD = Moshpit(8)
CHANNEL = channel_of("large")


@pytest.fixture(autouse=True)
def calm_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process has the probes of all its peers to answer: two a second of each are enough."""
    limits = Limits(probes_per_s_max=2.0)
    monkeypatch.setattr(membership, "Membership", lambda me: Membership(me, limits))


def schema(method: Averager = METHOD) -> Schema:
    return Schema((TensorSpec("weight", (100,), "float32"),), "fp32", method.name)


@contextmanager
def crew_of(n: int) -> Iterator[list[Crew]]:
    """Peers of one process that a launcher would have given their places, met."""
    with ExitStack() as stack:
        kinds = [[bound(socket.SOCK_DGRAM, ("127.0.0.1", 0)) for _ in range(n)] for _ in range(2)]
        peers, members = (tuple(sock.getsockname() for sock in kind) for kind in kinds)
        places = [
            Place(
                *(rank, n, "otters", 5, None, None, peers),
                socket_fd=data.detach(),
                key=KEY,
                members=members,
                member_fd=member.fileno(),
            )
            for rank, (data, member) in enumerate(zip(*kinds, strict=True))
        ]
        with ThreadPoolExecutor(n) as pool:
            futures = [pool.submit(join_as, place, PATIENCE_S) for place in places]
            crews = [future.result(2 * PATIENCE_S) for future in futures]
        for member in kinds[1]:
            member.close()
        for crew in crews:
            stack.callback(crew.leave, 1.0)
        yield crews


class Trainer:
    """A peer that averages until it is told to stop.

    values, outcome: of its last round; partners: all whose values were in an average of its.
    """

    def __init__(self, crew: Crew, begun: Callable[[], None] = lambda: None) -> None:
        self.crew, self.begun = crew, begun
        shape = (schema().n_chunks(fp32.elements), fp32.elements)
        self.values = np.full(shape, float(crew.rank), np.float32)
        self.outcome: Outcome | None = None
        self.failed: BaseException | None = None
        self.partners: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"trainer-{crew.rank}")
        self._thread.start()

    def _run(self) -> None:
        transport = self.crew._peer.transport
        assert isinstance(transport, DriverTransport)
        try:
            transport.configure(CHANNEL, schema(), METHOD, fp32)
            self.crew._peer.enter(CHANNEL)
            self.begun()
            while not self._stop.wait(PAUSE_S):
                self.outcome = transport.start(CHANNEL, self.values, 1.0).wait()
                self.values = self.outcome.mean.copy()
                if self.outcome.averaged.all():
                    self.partners |= set(self.outcome.members)
        except BaseException as error:
            self.failed = error
            raise

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"{self.crew.rank} goes on"
        assert self.failed is None


def all_well(trainers: list[Trainer], true: Callable[[], bool]) -> Callable[[], bool]:
    def look() -> bool:
        for trainer in trainers:
            assert trainer.failed is None, trainer.failed
        return true()

    return look


@pytest.mark.slow
def test_70_live_peers_average_in_groups_and_a_newcomer_gets_the_71st_seat() -> None:
    with crew_of(N) as crews:
        assert [crew.rank for crew in crews] == list(range(N))
        met = [crew._peer.transport for crew in crews]
        assert all(transport.n == N for transport in met)
        trainers = [Trainer(crew) for crew in crews]
        until(all_well(trainers, lambda: all(len(t.partners) > 1 for t in trainers)), "all in groups")
        assert 0 < np.std([trainer.values.mean() for trainer in trainers]) < 0.9 * np.std(range(N))
        late = join_as(Place(0, 1, "", token=crews[3].invitation(), name="late"), PATIENCE_S)
        try:
            assert late.rank == N
            newcomer = Trainer(late)
            everyone = [*trainers, newcomer]
            until(
                all_well(everyone, lambda: all(late.rank in trainer.crew.live for trainer in trainers)),
                "the newcomer known to all",
            )
            until(
                all_well(everyone, lambda: any(late.rank in t.partners for t in trainers)),
                "the newcomer in others' groups",
            )
            until(all_well(everyone, lambda: bool(newcomer.partners - {late.rank})), "others in its averages")
            trainers[9].stop()
            crews[9].leave()
            rest = [trainer for trainer in everyone if trainer is not trainers[9]]
            until(all_well(rest, lambda: all(9 not in t.crew.live for t in rest)), "peer 9 gone")
            for trainer in rest:
                trainer.stop()
            sizes = [len(trainer.outcome.members) for trainer in rest if trainer.outcome is not None]
            assert len(sizes) == N and max(sizes) <= 8
        finally:
            late.leave(1.0)


def test_a_member_that_comes_to_no_more_rounds_is_waited_for_as_long_as_was_measured() -> None:
    """In its crew's first rounds already: not for as long as joining may take."""
    with crew_of(4) as crews:

        def average(crew: Crew, rounds: int) -> list[Outcome]:
            transport = crew._peer.transport
            assert isinstance(transport, DriverTransport)
            transport.configure(CHANNEL, schema(), METHOD, fp32)
            values = np.zeros((schema().n_chunks(fp32.elements), fp32.elements), np.float32)
            return [transport.start(CHANNEL, values, 1.0).wait() for _ in range(rounds)]

        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(average, crew, 1 if crew.rank == 3 else 5) for crew in crews]
            until(lambda: all(each.done() for each in done), "all rounds done")
        outcomes = [outcome for each in done for outcome in each.result(PATIENCE_S)]
        assert max(outcome.total_s for outcome in outcomes) < PATIENCE_S / 10
        assert min(len(outcome.members) for outcome in outcomes) < 4, "a group met without it"


def test_what_averages_directly_is_refused_by_name_with_the_way_out() -> None:
    """Before anybody is met, so that one peer of the crew is enough."""
    with NetworkCrew(PEERS_MAX + 1, method=METHOD, absent=range(1, PEERS_MAX + 1)) as crew:
        transport = transports(crew)[0]
        with pytest.raises(ValueError, match=r"65 seats, and 'rps' averages 64 at most; .*ragtag\.Moshpit"):
            transport.configure(CHANNEL, schema(rps), rps, fp32)
