"""Drivers over loopback: averages, losses, silence, freezes, deaths, misuse, and what an idle one costs."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing

import numpy as np
import pytest

from ragtag.codecs.dense import fp32
from ragtag.core import fast
from ragtag.core.faults import BurstLoss, Faults, Freeze, Loss, OneWay
from ragtag.core.types import PEERS_MAX, Arrived, Average, Bytes, Event, MessageKey, Outcome, Run
from ragtag.core.wire import CHUNK_BYTES, Identity, Kind
from ragtag.network.control.controller import QUANTUM_S
from ragtag.network.control.path import Path
from ragtag.network.control.window import LossWindow
from ragtag.network.driver.driver import Driver, DriverFailed
from ragtag.network.link import open_link
from ragtag.network.link.flow import Flow
from ragtag.network.link.frame import Framer
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.crew.district import partners
from ragtag.protocols.groups.channel import Moshpit
from ragtag.protocols.node import GONE_AFTER, HEADROOM, Channel, Node
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.layout import layout_of, rotating_owners
from ragtag.protocols.rounds.rps import rps, rps_repair
from tests.network import crew as crews
from tests.network.crew import PATIENCE_S, Crew, mean_of, until, values_of

ALL = (rps, rps_repair, direct, ring)
sockets = pytest.mark.parametrize("over", ["udp"], indirect=True)


@pytest.fixture(autouse=True, params=["udp", "sealed"])
def over(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The link that crews stand on; whatever does not ask for a socket holds over any."""
    monkeypatch.setattr(crews, "LINK", request.param)
    return str(request.param)


def everyone(n: int) -> int:
    return (1 << n) - 1


def assert_complete(outcome: Outcome, n: int, n_chunks: int, round_: int = 0) -> None:
    """Everybody's values are in every chunk, and no deadline was needed."""
    assert outcome.averaged.all()
    assert (outcome.heard == everyone(n)).all()
    assert (outcome.weight == n).all()
    assert not outcome.expired
    assert outcome.missed == ()
    np.testing.assert_allclose(outcome.mean, mean_of(n_chunks, range(n), round_), rtol=1e-5, atol=1e-6)


# -- A line that loses nothing


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("method", ALL, ids=lambda method: method.name)
def test_the_mean_of_all(method: Averager, n: int) -> None:
    with Crew(n, 41, method=method) as crew:
        met = crew.meet(blob=b"hello")
        for peer, what in met.items():
            assert what.blobs == {other: b"hello" for other in range(n) if other != peer}
            assert what.missing == ()
        for round_ in range(3):
            outcomes = crew.average(round_=round_)
            assert {o.round for o in outcomes.values()} == {round_}
            for outcome in outcomes.values():
                assert_complete(outcome, n, 41, round_)
            means = {outcome.mean.tobytes() for outcome in outcomes.values()}
            assert len(means) == 1, "every peer holds the same bits"


@sockets
@pytest.mark.parametrize("loss", [0.0, pytest.param(0.05, marks=pytest.mark.slow)])
def test_more_peers_than_average_directly_average_in_groups(loss: float) -> None:
    n, faults = PEERS_MAX + 2, Faults(loss=Loss(loss) if loss else None)
    with Crew(n, 5, method=Moshpit(8), faults=faults, probe_s=0.3) as crew:
        met = crew.meet(blob=b"hello")
        for peer, what in met.items():
            assert what.blobs.keys() == partners(peer, set(range(n)) - {peer}) and what.missing == ()
        own = {peer: values_of(peer, 5) for peer in range(n)}
        first = variance = np.stack([own[peer] for peer in range(n)]).var(axis=0).mean()
        for _ in range(20):  # three suffice where nobody is late, which in one process most are
            before, own = own, {}
            for peer, outcome in crew.average(before).items():
                assert peer in outcome.members and len(outcome.members) <= 8
                whole = (outcome.heard == (1 << len(outcome.members)) - 1) & outcome.averaged
                mean = np.mean([before[other] for other in outcome.members], axis=0)
                np.testing.assert_allclose(outcome.mean[whole], mean[whole], rtol=1e-4, atol=1e-5)
                own[peer] = outcome.mean.copy()
            variance = np.stack([own[peer] for peer in range(n)]).var(axis=0).mean()
            if variance < 0.01 * first:
                break
        assert variance < 0.01 * first
        # nothing is looked at for ever of flows that have nothing to send
        until(lambda: not any(driver.engine.outbox._busy for driver in crew.drivers.values()), "idle")


@sockets
def test_the_mean_of_all_datagram_by_datagram() -> None:
    with Crew(3, 300, plain=True) as crew:
        crew.meet()
        assert not any(endpoint.segmentation or endpoint.coalescing for endpoint in crew.endpoints)
        for outcome in crew.average().values():
            assert_complete(outcome, 3, 300)


def test_more_than_the_first_window() -> None:
    """Ten times what may leave before the first answer."""
    with Crew(2, 1300) as crew:
        crew.meet()
        for outcome in crew.average().values():
            assert_complete(outcome, 2, 1300)
        for driver in crew.drivers.values():
            traffic = driver.traffic()
            assert traffic.datagrams_lost == 0
            assert traffic.bytes_sent > 2 * 650 * 1152
            assert set(driver.rtt_s()) == {1 - driver.node.me}


def test_weights() -> None:
    with Crew(3, 30) as crew:
        crew.meet()
        outcomes = crew.average(weights={0: 1.0, 1: 3.0, 2: 0.0})
        expected = (values_of(0, 30) + 3 * values_of(1, 30)) / 4
        for outcome in outcomes.values():
            np.testing.assert_allclose(outcome.mean, expected, rtol=1e-5, atol=1e-6)
            assert (outcome.heard == 0b011).all()
            assert (outcome.weight == 4.0).all()


def test_two_channels_at_a_time() -> None:
    with Crew(2, 30) as crew:
        lane = Channel(direct, fp32, 50, 10.0, 1e-3)
        for future in [d.configure(9, lane, 8) for d in crew.drivers.values()]:
            future.result(PATIENCE_S)
        crew.meet()
        asked = [
            crew.ask(peer, values_of(peer, k), channel=c) for c, k in ((0, 30), (9, 50)) for peer in (0, 1)
        ]
        outcomes = [future.result(PATIENCE_S) for future in asked]
        for outcome in outcomes[:2]:
            assert_complete(outcome, 2, 30)
        for outcome in outcomes[2:]:
            assert_complete(outcome, 2, 50)


def test_a_late_starter_finds_what_came_before() -> None:
    """Who asks first sends at once; the other takes it in although it has not begun."""
    with Crew(2, 60) as crew:
        crew.meet()
        first = crew.ask(0, values_of(0, 60))
        until(lambda: crew.drivers[1].traffic().datagrams_received >= 30, "the first peer's data there")
        second = crew.ask(1, values_of(1, 60))
        for future in (first, second):
            assert_complete(future.result(PATIENCE_S), 2, 60)


# -- Losses


@pytest.mark.parametrize("loss", [Loss(0.1), BurstLoss(0.02, 0.18)], ids=["independent", "bursts"])
def test_nine_in_ten_arrive_and_no_deadline_is_needed(loss: Loss | BurstLoss) -> None:
    """End markers say what will not come: a round lasts as long as the line needs."""
    n, n_chunks, rounds = 3, 300, 4
    gathered, scattered = [], []
    with Crew(n, n_chunks, faults=Faults(loss=loss)) as crew:
        crew.meet()
        for round_ in range(rounds):
            for peer, outcome in crew.average(round_=round_).items():
                assert not outcome.expired
                assert outcome.missed == ()
                expected = expected_of(outcome, n_chunks, n, round_)
                np.testing.assert_allclose(outcome.mean, expected, rtol=1e-5, atol=1e-6)
                assert ((outcome.heard[~outcome.averaged]) == 1 << peer).all()
                gathered.append(outcome.averaged.mean())
                scattered.append(np.mean([int(h).bit_count() for h in outcome.heard[outcome.averaged]]))
        ways = {(peer, way.peer): way for peer, driver in crew.drivers.items() for way in driver.directions()}
        assert set(ways) == {(a, b) for a in range(n) for b in range(n) if a != b}
        lost = sum(way.lost for way in ways.values()) / sum(way.sent for way in ways.values())
        assert lost == pytest.approx(0.1, abs=0.05)
        assert all(0 < way.min_rtt_s <= way.rtt_s < PATIENCE_S for way in ways.values())
        assert all(way.rate_bytes_per_s >= 0 and way.late == 0 for way in ways.values())
    # one in three chunks is one's own and cannot get lost; of bursts there are fewer than of datagrams
    tolerance = 0.02 if isinstance(loss, Loss) else 0.06
    assert np.mean(gathered) == pytest.approx(1 / 3 + 2 / 3 * 0.9, abs=tolerance)
    assert np.mean(scattered) == pytest.approx(1 + 2 * 0.9, abs=3 * tolerance)


def expected_of(outcome: Outcome, n_chunks: int, n: int, round_: int) -> np.ndarray:
    """The mean of those that the outcome says were heard, chunk by chunk."""
    heard = np.array([[int(h) >> peer & 1 for peer in range(n)] for h in outcome.heard], np.float64)
    every = np.stack([values_of(peer, n_chunks, round_) for peer in range(n)]).astype(np.float64)
    return np.einsum("cp,pce->ce", heard, every) / heard.sum(axis=1)[:, None]


@pytest.mark.parametrize("method", [rps_repair, direct, ring], ids=lambda method: method.name)
def test_repair_makes_a_lossy_line_whole(method: Averager) -> None:
    with Crew(3, 120, method=method, faults=Faults(loss=Loss(0.1))) as crew:
        crew.meet()
        for round_ in range(3):
            outcomes = crew.average(round_=round_)
            for outcome in outcomes.values():
                assert_complete(outcome, 3, 120, round_)
            assert len({outcome.mean.tobytes() for outcome in outcomes.values()}) == 1


LINES = {
    "duplicates": Faults(duplicate=0.4),
    "jitter": Faults(latency_s=0.01, jitter_s=0.01),
    "reordering": Faults(reorder=0.2, reorder_s=0.01),
    "a slow line": Faults(rate_bytes_per_s=2e6),
    "all of them": Faults(duplicate=0.3, latency_s=0.005, jitter_s=0.005, reorder=0.2, reorder_s=0.01),
}


@pytest.mark.parametrize("line", ["duplicates", "a slow line"])
def test_a_bad_line_in_order_changes_nothing(line: str) -> None:
    with Crew(3, 150, faults=LINES[line]) as crew:
        crew.meet()
        for round_ in range(4):
            for outcome in crew.average(round_=round_).values():
                assert_complete(outcome, 3, 150, round_)
        for driver in crew.drivers.values():
            assert driver.traffic().datagrams_lost == 0


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("method", [rps_repair, direct, ring], ids=lambda method: method.name)
def test_repair_finds_what_was_overtaken(method: Averager, line: str) -> None:
    with Crew(3, 150, method=method, faults=LINES[line]) as crew:
        crew.meet()
        for round_ in range(2):
            for outcome in crew.average(round_=round_).values():
                assert_complete(outcome, 3, 150, round_)


def test_a_channel_opened_anew_knows_nothing_of_the_rounds_before() -> None:
    """An end marker that waits, as others overtake it, was one of round 1 to the new channel: peers began
    rounds apart, and waited until their deadlines."""
    with Crew(3, 60, method=rps_repair, faults=LINES["jitter"]) as crew:
        crew.meet()
        for schema in range(1, 7):
            for future in [d.configure(0, crew.channel, schema) for d in crew.drivers.values()]:
                future.result(PATIENCE_S)
            crew.meet(schema)
            for round_ in range(2):
                for outcome in crew.average(round_=round_).values():
                    assert_complete(outcome, 3, 60, round_)
                    assert outcome.round == round_


def test_an_injected_delay_begins_late_in_a_long_turn() -> None:
    latency_s = 0.02
    with Crew(2, 8, faults=Faults(latency_s=latency_s)) as crew:
        engine, asked = crew.drivers[0].engine, Future[float]()

        def takes_long(now_s: float) -> None:
            while (late_s := engine.now_s()) < now_s + 0.005:
                pass
            before = {entry[:2] for entry in engine.injector.held.heap}
            engine.outbox.answer(now_s, engine.flows[1], Kind.PING)
            (new,) = {entry[:2] for entry in engine.injector.held.heap} - before
            asked.set_result(new[0] - late_s)

        crew.drivers[0].call(takes_long)
        assert asked.result(PATIENCE_S) >= latency_s


def test_a_meeting_knows_how_long_answers_take() -> None:
    """Before the first average, too: it says after which time a peer is told again."""
    with Crew(3) as crew:
        crew.meet()
        crew.meet(1)
        for peer, driver in crew.drivers.items():
            assert driver.node.crew.rtt_s.keys() == set(range(3)) - {peer}


@pytest.mark.parametrize("line", LINES)
def test_without_repair_little_is_taken_for_lost(line: str) -> None:
    """A mark that overtakes its message ends it too early, until the line has shown that it reorders."""
    arrived = []
    with Crew(3, 150, faults=LINES[line]) as crew:
        crew.meet()
        for round_ in range(4):
            for outcome in crew.average(round_=round_).values():
                assert not outcome.expired
                expected = expected_of(outcome, 150, 3, round_)
                np.testing.assert_allclose(outcome.mean, expected, rtol=1e-5, atol=1e-6)
                arrived.append(outcome.averaged.mean())
    assert np.mean(arrived) > 0.8


def test_losses_do_not_add_up_on_a_line_that_duplicates() -> None:
    with Crew(2, 200, faults=Faults(loss=Loss(0.1), duplicate=0.5)) as crew:
        crew.meet()
        for round_ in range(4):
            for outcome in crew.average(round_=round_).values():
                assert not outcome.expired
                assert outcome.averaged.mean() > 0.8


def test_one_way_loss() -> None:
    """Peer 1 hears peer 0, and not the other way round: the mean is of what each hears.

    Only peer 0 needs a deadline, and half of it is for what it sends to be encrypted and to leave. What peer
    1 waits for comes.
    """
    with Crew(2, 40, faults=Faults(one_way=(OneWay(1, 0),))) as crew:
        asked = {
            1: crew.ask(1, values_of(1, 40), deadline_s=PATIENCE_S),
            0: crew.ask(0, values_of(0, 40), deadline_s=3.0),
        }
        outcomes = {peer: future.result(PATIENCE_S) for peer, future in asked.items()}
        assert outcomes[0].expired and (outcomes[0].heard == 0b01).all()
        own = outcomes[1].heard.tolist()
        assert not outcomes[1].expired
        assert own.count(0b11) == 20, "the block that peer 1 owns has peer 0's values"


# -- Who does not answer


def test_a_peer_that_never_answers_costs_one_deadline() -> None:
    probe_s = 1.0  # the others have so long for a handshake, too
    with Crew(3, 60, probe_s=probe_s, absent=[2]) as crew:
        for peer, outcome in crew.average().items():
            assert outcome.expired
            assert 2 in outcome.waited_for
            assert outcome.missed == (2,)
            assert outcome.total_s >= HEADROOM * probe_s
            assert crew.noted(peer, "silent", 2)
            assert (outcome.heard & np.uint64(0b100) == 0).all()
        for round_ in range(1, 1 + GONE_AFTER):
            for outcome in crew.average(round_=round_).values():
                assert 2 not in outcome.waited_for
                assert not outcome.expired
        later = crew.average(round_=9)
        for outcome in later.values():
            assert outcome.averaged.all(), "its blocks are others' now"
            np.testing.assert_allclose(outcome.mean, mean_of(60, [0, 1], 9), rtol=1e-5, atol=1e-6)


def test_a_peer_that_missed_the_meeting_is_not_waited_for() -> None:
    with Crew(3, 60, absent=[2]) as crew:
        met = crew.meet(deadline_s=0.2)
        assert {peer: what.missing for peer, what in met.items()} == {0: (2,), 1: (2,)}
        for outcome in crew.average().values():
            assert 2 not in outcome.waited_for
            assert not outcome.expired


def test_a_frozen_peer_is_left_out_and_comes_back() -> None:
    """Frozen by the injector, as a stopped process would be: it hears nothing, says nothing, and thaws."""
    with Crew(3, 60, probe_s=0.2) as crew:
        crew.meet()
        for round_ in range(2):
            for outcome in crew.average(round_=round_).values():
                assert_complete(outcome, 3, 60, round_)
        frozen, for_s = crew.drivers[2], 1.5
        frozen.engine.injector.faults = Faults(freezes=(Freeze(2, frozen.now_s(), for_s),))
        frozen.configure(9, crew.channel, 7).result(PATIENCE_S)  # wakes it, so that it falls asleep
        begun_s = time.monotonic()
        outcomes = crew.average({peer: values_of(peer, 60, 2) for peer in (0, 1)}, round_=2)
        assert time.monotonic() - begun_s < for_s, "nobody waits until it thaws"
        for peer, outcome in outcomes.items():
            assert outcome.missed == (2,)
            assert crew.noted(peer, "silent", 2)
        crew.ask(2, values_of(2, 60, 2)).result(PATIENCE_S)
        crew.meet(1)
        assert all(crew.noted(peer, "heard again", 2) for peer in (0, 1))
        for round_ in range(3, 6):
            outcomes = crew.average(round_=round_)
        for outcome in outcomes.values():
            assert_complete(outcome, 3, 60, 5)


def test_a_peer_that_says_good_bye_is_not_waited_for() -> None:
    with Crew(3, 60, probe_s=PATIENCE_S) as crew:
        crew.meet()
        crew.average()
        crew.drivers.pop(2).close(PATIENCE_S)
        assert all(crew.noted(peer, "left", 2) for peer in (0, 1))
        for outcome in crew.average(round_=1).values():
            assert outcome.waited_for in ((0,), (1,))
            assert not outcome.expired
            np.testing.assert_allclose(
                outcome.mean[outcome.averaged], mean_of(60, [0, 1], 1)[outcome.averaged], rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("method", [rps, direct, ring], ids=lambda method: method.name)
def test_a_good_bye_in_the_middle_of_a_round_ends_the_wait(method: Averager) -> None:
    with Crew(3, 60, method=method, probe_s=PATIENCE_S) as crew:
        crew.meet()
        asked = [crew.ask(peer, values_of(peer, 60)) for peer in (0, 1)]
        for peer in (0, 1):
            channel = crew.drivers[peer].node.channels[0]
            until(lambda channel=channel: channel.active is not None, "its round has begun")  # type: ignore[misc]
        crew.drivers.pop(2).close(1.0)
        for peer, future in enumerate(asked):
            outcome = future.result(PATIENCE_S / 2)
            assert 2 in outcome.waited_for
            assert outcome.heard.any()
            assert (outcome.heard & np.uint64(1 << peer) > 0).all() or outcome.averaged.any()


def test_what_is_still_under_way_does_not_bring_back_who_has_left() -> None:
    with Crew(2, 30) as crew:
        crew.meet()
        driver = crew.drivers[0]
        driver.leave(1)
        assert crew.noted(0, "left", 1)
        before = driver.traffic().datagrams_received
        crew.drivers[1].meet(1, b"I am still here", PATIENCE_S)
        until(lambda: driver.traffic().datagrams_received > before, "it heard the other again")
        assert crew.average({0: values_of(0, 30)})[0].waited_for == ()
        assert driver.node.gone == {1}


def test_a_peer_that_comes_late_meets_those_that_have_met_without_it() -> None:
    with Crew(3, 30, absent=[2], probe_s=1.0) as crew:
        for peer, met in crew.meet(deadline_s=0.3).items():
            assert met.missing == (2,)
            assert met.blobs == {1 - peer: b"hello"}
        late = crew.start(2, crew.endpoints[2])
        late.configure(0, crew.channel, 7).result(PATIENCE_S)
        met = late.meet(0, b"late", PATIENCE_S).result(PATIENCE_S)
        assert met.blobs == {0: b"hello", 1: b"hello"}
        for outcome in crew.average().values():
            assert_complete(outcome, 3, 30)


@pytest.mark.parametrize("faults", [Faults(), Faults(latency_s=0.05), Faults(loss=Loss(0.1))])
def test_close_sends_what_is_queued_and_says_good_bye(faults: Faults) -> None:
    """Peer 0 asks, and closes at once, before anything of it can have left: the other still gets it all."""
    n_chunks = 600
    with Crew(2, n_chunks, faults=faults, probe_s=PATIENCE_S) as crew:
        crew.meet()
        crew.ask(0, values_of(0, n_chunks))
        crew.drivers.pop(0).close(PATIENCE_S)
        assert crew.noted(1, "left", 0)
        outcome = crew.ask(1, values_of(1, n_chunks)).result(PATIENCE_S)
        own = outcome.heard.tolist()
        assert own.count(0b11) >= (0.8 if faults.loss else 1.0) * n_chunks / 2


def test_close_does_not_wait_for_the_dead() -> None:
    with Crew(2, 600, absent=[1], probe_s=PATIENCE_S) as crew:
        future = crew.ask(0, values_of(0, 600))
        begun_s = time.monotonic()
        crew.drivers[0].close(0.3)
        assert time.monotonic() - begun_s < 5.0
        until(
            lambda: not crew.drivers[0].alive, "ended"
        )  # close may return before a thread without a core has
        with pytest.raises(DriverFailed, match="has ended: it was closed"):
            future.result(PATIENCE_S)
        crew.drivers[0].close(0.3)  # twice does no harm


def test_a_peer_that_starts_again_is_heard_and_its_former_self_is_not() -> None:
    with Crew(2, 60, probe_s=1.0) as crew:
        crew.meet()
        for outcome in crew.average().values():
            assert_complete(outcome, 2, 60)
        address = crew.endpoints[1].address
        crew.drivers.pop(1).close(PATIENCE_S)
        assert crew.noted(0, "left", 1)
        assert 1 in crew.drivers[0].node.gone
        until(
            lambda: int(time.time() * 10) & 0xFFFFFFFF > crew_epoch(crew.drivers[0], 1),
            "a new tenth of a second",
        )
        crew.start(1, crew.link(address))
        crew.drivers[1].configure(0, crew.channel, 7).result(PATIENCE_S)
        crew.meet(1)
        assert 1 not in crew.drivers[0].node.gone
        assert 1 in crew.drivers[0].node.live
        assert crew.average({0: values_of(0, 60, 1)}, round_=1)[0].round == 1
        newcomer = crew.average({1: values_of(1, 60, 1)}, round_=1)[1]
        assert newcomer.round == 1, "it has heard which round it is"
        outcomes = crew.average(round_=2)
        assert outcomes[0].round == outcomes[1].round == 2
        for outcome in outcomes.values():
            assert_complete(outcome, 2, 60, 2)


def crew_epoch(driver: Driver, peer: int) -> int:
    return driver.engine.flows[peer].inbound.epoch


# -- Values belong to the trainer again once the outcome is there


def test_values_may_change_as_soon_as_the_outcome_is_there() -> None:
    """Peer 1 gives up on peer 0 and sends its average, which ends peer 0's round before its values left."""
    n_chunks = 400
    with Crew(2, n_chunks, record=True) as crew:
        crew.meet()
        # nothing leaves peer 0 but requests for an answer
        path = crew.drivers[0].engine.flows[1].path
        control = path.control = LossWindow(window=0.0)
        path._used = True  # no more its first window
        values = values_of(0, n_chunks)
        mine = crew.ask(0, values)
        crew.drivers[1].average(Average(0, values_of(1, n_chunks), 1.0, deadline_s=0.2)).result(PATIENCE_S)
        outcome = mine.result(PATIENCE_S)
        assert not outcome.expired
        kept = values.copy()
        values[:] = 1e9
        assert arrived(crew, 1, round_=0) == {}
        control.window = 1000.0
        crew.meet(1)
        owner = rotating_owners(crew.seed, 0, 2, frozenset((0, 1)))
        layout = layout_of(n_chunks, 2)
        came = arrived(crew, 1, round_=0)
        assert came.keys() == {(0, owner.index(1)), (1, owner.index(0))}, "its scatter, and its average"
        assert came[0, owner.index(1)] == kept[layout.spans[owner.index(1)]].tobytes()
        assert came[1, owner.index(0)] == outcome.mean[layout.spans[owner.index(0)]].tobytes()


def arrived(crew: Crew, peer: int, round_: int) -> dict[tuple[int, int], bytes]:
    """What a peer was sent in a round of channel 0, by stage and block."""
    recording = crew.recordings[peer]
    assert recording is not None
    came: dict[tuple[int, int], bytes] = {}
    for _, event in list(recording):
        for run in event.runs if isinstance(event, Arrived) else ():
            if run.key[:2] == (0, round_) and len(run.payload):
                came[run.key[2:]] = came.get(run.key[2:], b"") + run.payload.tobytes()
    return came


# -- Misuse, and the end of the thread


def test_a_peer_may_come_while_its_traffic_is_added_up() -> None:
    with Crew(2) as crew:
        crew.meet()
        driver = crew.drivers[0]
        driver.close(PATIENCE_S)  # its thread adds flows; here one that is looked at does, at the worst time
        flows = driver.engine.flows
        before, known = driver.traffic(), flows[1]

        class Brings:
            inbound = known.inbound

            @property
            def path(self) -> Path:
                flows.setdefault(2 + len(flows), Flow(2, known.address))
                return known.path

        flows[1] = Brings()  # type: ignore[assignment]
        assert driver.traffic() == before
        assert len(flows) > 1


def test_misuse_fails_the_call_and_not_the_driver() -> None:
    with Crew(2, 30) as crew:
        crew.meet()
        driver = crew.drivers[0]
        values = values_of(0, 30)
        with pytest.raises(ValueError, match=r"values of shape \(29, 272\) on a channel of \(30, 272\)"):
            driver.average(Average(0, values[:29], 1.0)).result(PATIENCE_S)
        with pytest.raises(ValueError, match="values of float64"):
            driver.average(Average(0, values.astype(np.float64), 1.0)).result(PATIENCE_S)  # type: ignore[arg-type]
        with pytest.raises(KeyError, match=r"channel 3 is not configured; call configure\(\) first"):
            driver.average(Average(3, values, 1.0)).result(PATIENCE_S)
        with pytest.raises(ValueError, match="a channel of no values"):
            driver.configure(4, Channel(rps, fp32, 0, 1.0, 1e-3), 0).result(PATIENCE_S)
        with pytest.raises(ValueError, match=r"2000000 bytes to tell; at most 1048576"):
            driver.meet(5, bytes(2_000_000), 1.0).result(PATIENCE_S)
        with pytest.raises(RuntimeError, match="meeting 0"):
            driver.meet(0, b"again", 1.0).result(PATIENCE_S)
        first = driver.average(Average(0, values, 1.0))
        with pytest.raises(RuntimeError, match="a round of channel 0 is not done yet"):
            driver.average(Average(0, values, 1.0)).result(PATIENCE_S)
        other = crew.ask(1, values_of(1, 30))
        for future in (first, other):
            assert_complete(future.result(PATIENCE_S), 2, 30)
        assert driver.alive
        for outcome in crew.average(round_=1).values():
            assert_complete(outcome, 2, 30, 1)


def test_a_driver_that_dies_fails_what_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    with Crew(2, 30) as crew:
        crew.meet()
        driver = crew.drivers[0]
        waiting: list[Future[Outcome]] = [crew.ask(0, values_of(0, 30))]
        true_step = driver.node.step

        def step(now_s: float, event: Event) -> object:
            if isinstance(event, Arrived) and any(run.key.channel == 0 for run in event.runs):
                raise ZeroDivisionError("by zero")
            return true_step(now_s, event)

        monkeypatch.setattr(driver.node, "step", step)
        meeting = driver.meet(7, b"", PATIENCE_S)
        crew.ask(1, values_of(1, 30))
        for future in (waiting[0], meeting):
            with pytest.raises(DriverFailed, match="the driver of peer 0 has ended: by zero"):
                future.result(PATIENCE_S)
        until(lambda: not driver.alive, "the thread ended")
        assert [args.exc_type for args in died] == [ZeroDivisionError], "the cause is shown once"
        for future in (driver.average(Average(0, values_of(0, 30), 1.0)), driver.meet(8, b"", 1.0)):
            with pytest.raises(DriverFailed, match="the driver has ended: by zero"):
                future.result(PATIENCE_S)
        with pytest.raises(DriverFailed, match="by zero"):
            driver.leave(1)
        driver.close(1.0)
        assert driver.link.fileno() == -1, "its socket is closed"


@sockets
def test_a_driver_that_never_started_fails_calls_and_closes(over: str) -> None:
    endpoint = open_link(name=over)
    driver = Driver(Node(0, 2, 1), endpoint, Identity("otters", 0), {1: endpoint.address})
    with pytest.raises(DriverFailed):
        driver.average(Average(0, values_of(0, 3), 1.0)).result(1.0)
    driver.close(1.0)
    assert endpoint.fileno() == -1


def test_whatever_is_asked_while_a_driver_ends_is_answered() -> None:
    """Calls race with the end of the thread: each future must come to something."""
    for _ in range(20):
        with Crew(2, 3) as crew:
            driver = crew.drivers[0]
            futures: list[Future[None]] = []
            go = threading.Barrier(2)

            def ask(
                driver: Driver = driver,
                futures: list[Future[None]] = futures,
                go: threading.Barrier = go,
                crew: Crew = crew,
            ) -> None:
                go.wait(PATIENCE_S)
                futures.extend(driver.configure(1, crew.channel, 0) for _ in range(50))

            thread = threading.Thread(target=ask)
            thread.start()
            go.wait(PATIENCE_S)
            driver.close(0.0)
            thread.join(PATIENCE_S)
            assert len(futures) == 50
            for future in futures:
                error = future.exception(PATIENCE_S)
                assert error is None or isinstance(error, DriverFailed)


# -- What it costs


def test_an_idle_driver_takes_no_processor_time() -> None:
    with Crew(3, 30) as crew:
        crew.meet()
        crew.average()
        busy = time.thread_time  # of this thread, which sleeps meanwhile
        before, mine = resource.getrusage(resource.RUSAGE_SELF), busy()
        threading.Event().wait(1.0)
        after = resource.getrusage(resource.RUSAGE_SELF)
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime - (busy() - mine)
        assert used_s < 0.03, f"three idle drivers used {used_s:.3f} s in a second"


def test_a_driver_waiting_for_a_silent_peer_takes_little_processor_time() -> None:
    """Endings and requests are repeated, at growing pauses, until the deadline."""
    with Crew(2, 300, absent=[1]) as crew:
        crew.ask(0, values_of(0, 300))
        before = resource.getrusage(resource.RUSAGE_SELF)
        threading.Event().wait(1.0)
        after = resource.getrusage(resource.RUSAGE_SELF)
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert used_s < 0.3, f"a driver that waits used {used_s:.3f} s in a second"


@pytest.mark.skipif(not fast.available(), reason="numba is not installed (ragtag[fast])")
def test_large_channels_have_their_loops_compiled_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragtag.network.driver.driver.LARGE_CHUNKS", 41)
    with Crew(2, 40) as small:
        assert all(driver._compiling is None for driver in small.drivers.values())
    with Crew(3, 41) as crew:
        for round_ in range(2):
            for outcome in crew.average(round_=round_).values():
                assert_complete(outcome, 3, 41, round_)
            for driver in crew.drivers.values():
                assert driver._compiling is not None
                driver._compiling.join(PATIENCE_S)
                assert driver.engine.framer._kernels is not None


@sockets
@pytest.mark.parametrize("host", ["127.0.0.1%x", "255.255.255.255", "localhost", "::1"])
def test_an_address_that_nothing_can_be_sent_to_is_refused_before_anything_is_started(host: str) -> None:
    with closing(open_link()) as endpoint:
        peers = {0: endpoint.address, 1: (host, 4000)}
        with pytest.raises(ValueError, match=r"^peer 1's address '.*', port 4000, is "):
            Driver(Node(0, 2, 1), endpoint, Identity("otters", 0), peers)


@sockets
def test_a_peer_that_nothing_can_be_sent_to_for_a_while_is_noted_once_for_each_reason() -> None:
    """What is sent to peer 2 fails at peer 0, each round for another reason; then it goes through again."""
    errors = errno.EACCES, errno.EINVAL, errno.EPERM, errno.ENETDOWN
    with Crew(3, 60, probe_s=0.3) as crew:
        crew.meet()
        crew.average()
        sock = crew.endpoints[0].sock
        round_ = 0

        class Forbidden:
            def sendto(self, data: memoryview, address: tuple[str, int]) -> int:
                if address == crew.addresses[2]:
                    error = errors[round_ - 1]
                    raise OSError(error, os.strerror(error))
                return sock.sendto(data, address)

            def __getattr__(self, name: str) -> object:
                return getattr(sock, name)

        crew.endpoints[0].sock = Forbidden()  # type: ignore[assignment]
        for round_ in range(1, 1 + len(errors)):
            outcomes = crew.average(round_=round_)
            assert (outcomes[1].heard == 0b111).any()
        crew.endpoints[0].sock = sock
        assert crew.endpoints[0].failures.count > len(errors)
        assert crew.drivers[0].alive
        round_ += 1
        while not all((outcome.heard == 0b111).all() for outcome in crew.average(round_=round_).values()):
            round_ += 1
            assert round_ < 40
        noted = [note for _, note in crew.notes[0] if note.what == "not sent"]
        assert [(note.peer, note.detail.partition(":")[0]) for note in noted] == [
            (2, os.strerror(error)) for error in errors
        ]
        assert not [note for peer in (1, 2) for _, note in crew.notes[peer] if note.what == "not sent"]


@pytest.mark.parametrize("method", ALL, ids=lambda method: method.name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_what_is_not_finite_or_overflows_counts_for_nothing(method: Averager, value: float) -> None:
    """One peer's NaN, or the sum of everybody's 3e38: no average that nobody could go on with."""
    with Crew(3, 30, method=method) as crew:
        crew.meet()
        values = {peer: values_of(peer, 30) for peer in range(3)}
        for peer, own in values.items():
            if peer == 2 or value == 3e38:
                own[4, 7] = value
        outcomes = crew.average(values)
        for peer, outcome in outcomes.items():
            kept = ~outcome.averaged
            assert set(np.flatnonzero(kept)) <= {4}
            assert np.array_equal(outcome.mean[kept], values[peer][kept], equal_nan=True)
            assert np.isfinite(outcome.mean).all() or (peer == 2 and kept[4])
            for chunk in np.flatnonzero(outcome.averaged):
                who = [other for other in range(3) if int(outcome.heard[chunk]) >> other & 1]
                expected = np.mean([values[other][chunk].astype(np.float64) for other in who], axis=0)
                np.testing.assert_allclose(outcome.mean[chunk], expected, rtol=1e-5, atol=1e-6)
        assert [note for notes in crew.notes for _, note in notes if note.what == "not finite"]


# -- What a turn is worth


def test_datagrams_that_come_one_by_one_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the driver for each would cost more than all that is done with them: 4 peers of 100 Mbit/s
    each kept two cores busy. Amid a message what comes wakes nobody for a millisecond, and a call does.
    """
    with closing(open_link()) as link, closing(open_link()) as other:
        driver = Driver(Node(0, 2, seed=0), link, Identity("otters", 0), {1: other.address})
        driver.open(0.0, 0, Channel(rps, fp32, 40, probe_s=1.0, rtt_s=0.01), 7)
        engine = driver.engine
        waits: list[tuple[set[int], float]] = []

        def ready(reads: Sequence[int], writes: Sequence[int], within_s: float) -> set[int]:
            waits.append((set(reads), within_s))
            return set()

        monkeypatch.setattr("ragtag.network.driver.engine.ready", ready)
        run = Run(0, MessageKey(0, 0, 0, 1), 0, 40, np.zeros((40, CHUNK_BYTES), np.uint8),
                  np.ones(40, np.float32), np.full(40, 2, np.uint64), None, True)  # fmt: skip
        framer = Framer(Identity("otters", 1), 5)
        rows = framer.data(run, np.arange(40), np.arange(1, 41, dtype=np.uint64), True, False, 7)

        def turn(part: Bytes) -> None:
            other.send(part, link.address)
            engine._turn()

        mailbox, both = {engine.mailbox.fileno()}, {engine.mailbox.fileno(), link.fileno()}
        turn(rows[:3])
        assert waits[-1][0] == both
        turn(rows[3:6])
        assert waits[-1][0] == mailbox, "what comes next wakes nobody"
        assert waits[-1][1] <= QUANTUM_S
        turn(rows[6:])
        engine._turn()
        assert waits[-1][0] == both, "the end of a message is heard of at once"
        assert waits[-1][1] > QUANTUM_S
