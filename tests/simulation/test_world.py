"""The world: one seed, one history; peers that crash, freeze and thaw; healing."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import pytest

from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core.faults import BurstLoss, Crash, Faults, Freeze, Loss, OneWay, OwnLine, Partition, Window
from ragtag.core.types import (
    Arm,
    Arrived,
    Average,
    Effect,
    Event,
    Expired,
    Joined,
    Left,
    Noted,
    Outcome,
    PeerId,
    Send,
    Start,
    Timer,
)
from ragtag.protocols.channel.at_once import Rounds
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.rounds.rps import rps
from ragtag.simulation.worlds.rounds import World
from tests.simulation.scripted import Crew, Scripted, message, nodes, values

ROUGH = Faults(
    loss=BurstLoss(0.05, 0.3),
    latency_s=0.003,
    jitter_s=0.002,
    rate_bytes_per_s=2e6,
    queue_bytes=2e5,
    duplicate=0.1,
    reorder=0.1,
    reorder_s=0.01,
    one_way=(OneWay(0, 2, Window(0.2, 0.9)),),
    partitions=(Partition(frozenset({0, 1}), Window(1.0, 1.5)),),
    crashes=(Crash(4, 2.0),),
    freezes=(Freeze(3, 0.6, 0.8),),
)


def history(seed: int, faults: Faults = ROUGH, n_chunks: int = 13) -> tuple[str, int, list[bytes]]:
    crew = Crew(5, rps, faults, seed=seed, n_chunks=n_chunks, rounds=6)
    world = crew.run()
    bits = [o.mean.tobytes() + o.heard.tobytes() for outcomes in crew.outcomes for o in outcomes]
    return world.digest(), world.events, bits


def test_one_seed_is_one_history() -> None:
    assert history(7) == history(7)


def test_another_seed_is_another_history() -> None:
    digests = {history(seed)[0] for seed in range(5)}
    assert len(digests) == 5


def test_the_digest_sees_what_is_averaged_not_only_when() -> None:
    def digest(first: float, n_chunks: int) -> str:
        world = World(nodes(2, rps, n_chunks, seed=1))
        for peer in range(2):
            array = values(1, peer, 0, n_chunks)
            array[0, 0] = first
            world.at(0.0, peer, Average(0, array, 1.0))
        world.run()
        return world.digest()

    for n_chunks in (3, 200):  # small means are hashed, large ones are summed
        assert digest(1.0, n_chunks) == digest(1.0, n_chunks)
        assert digest(1.0, n_chunks) != digest(2.0, n_chunks)


def test_the_digest_sees_a_lost_chunk() -> None:
    same = Faults(latency_s=0.01)
    assert history(1, same)[0] != history(1, Faults(loss=Loss(0.01), latency_s=0.01))[0]


@pytest.mark.parametrize("method", [rps, direct])
def test_without_faults_all_get_the_same_mean(method: object) -> None:
    crew = Crew(4, method, Faults(latency_s=0.01), rounds=2)  # type: ignore[arg-type]
    crew.run()
    mean = np.mean([values(1, peer, 0, 13) for peer in range(4)], axis=0)
    for outcomes in crew.outcomes:
        assert len(outcomes) == 2 and outcomes[0].averaged.all()
        np.testing.assert_allclose(outcomes[0].mean, mean, rtol=1e-5, atol=1e-6)
        assert outcomes[0].mean.tobytes() == crew.outcomes[0][0].mean.tobytes()


def test_payloads_are_not_copied() -> None:
    run = message(1)
    sender = Scripted(lambda now_s, event: [Send(run, 9.0)] if isinstance(event, Joined) else [])
    receiver = Scripted()
    world = World([sender, receiver], Faults(latency_s=0.1))
    world.at(0.0, 0, Joined(1))
    world.run()
    (came,) = [event.runs[0] for _, event in receiver.given if isinstance(event, Arrived)]
    assert came.payload is run.payload


def test_events_come_in_the_order_of_their_times_and_of_their_making() -> None:
    timer = Timer(0, 0, "t")
    node = Scripted(
        lambda now_s, event: [Arm(timer, now_s + 0.5), Arm(timer, now_s)] if isinstance(event, Joined) else []
    )
    world, called = World([node]), []
    world.at(1.0, 0, Joined(5))
    world.at(1.0, 0, Left(5))
    world.call(1.25, called.append)
    world.run()
    assert node.given == [
        (0.0, Start()),
        (1.0, Joined(5)),
        (1.0, Left(5)),
        (1.0, Expired(timer)),
        (1.5, Expired(timer)),
    ]
    assert called == [1.25] and world.now_s == 1.5 and world.events == 6


def test_it_runs_until_a_time_and_goes_on_from_there() -> None:
    node = Scripted()
    world = World([node])
    world.at(1.0, 0, Joined(1))
    world.at(2.0, 0, Joined(2))
    world.run(until_s=1.5)
    assert world.now_s == 1.5 and node.given[-1] == (1.0, Joined(1))
    with pytest.raises(ValueError, match=r"1\.5 s already"):
        world.at(1.0, 0, Joined(1))
    world.run()
    assert world.now_s == 2.0 and node.given[-1] == (2.0, Joined(2))


def test_a_crashed_peer_hears_and_says_nothing() -> None:
    crew = Crew(4, rps, Faults(latency_s=0.01, crashes=(Crash(2, 0.75),)), rounds=8)
    world = crew.run()
    assert len(crew.outcomes[2]) == 2 and [len(o) for o in crew.outcomes] == [8, 8, 2, 8]
    assert world.live == {0, 1, 3}
    assert not any(int(o.heard.max()) & 0b100 for o in crew.outcomes[0][2:])


def test_a_frozen_peer_gets_what_came_when_it_thaws_in_order() -> None:
    node = Scripted()
    world = World([node], Faults(freezes=(Freeze(0, 1.0, 2.0), Freeze(0, 2.5, 1.0))))
    for at_s in (0.5, 1.0, 1.7, 1.2, 3.0, 3.5, 4.0):
        world.at(at_s, 0, Joined(int(at_s * 10)))
    world.run()
    times = [(at_s, event.peer) for at_s, event in node.given if isinstance(event, Joined)]
    assert times == [(0.5, 5), *((3.5, peer) for peer in (10, 12, 17, 30, 35)), (4.0, 40)]


def test_a_frozen_peer_that_dies_gets_nothing() -> None:
    node = Scripted()
    world = World([node], Faults(freezes=(Freeze(0, 1.0, 2.0),), crashes=(Crash(0, 2.0),)))
    world.at(1.5, 0, Joined(1))
    world.run()
    assert [event for _, event in node.given] == [Start()]


def test_a_frozen_peer_is_missed_and_comes_back() -> None:
    crew = Crew(4, rps, Faults(latency_s=0.01, freezes=(Freeze(1, 0.75, 3.0),)), rounds=12)
    crew.run()
    heard = [int(np.bitwise_or.reduce(o.heard)) & 0b10 for o in crew.outcomes[0]]
    assert heard[0] and heard[-1] and 0 in heard


def test_a_frozen_peers_downlink_goes_on_receiving() -> None:
    """It had raised, as what comes to a line waited for the process behind it to thaw."""
    lines = (OwnLine(1, 1e6, 0.0, 1e6),)
    faults = Faults(latency_s=0.01, rate_bytes_per_s=1e6, freezes=(Freeze(1, 0.75, 3.0),), lines=lines)
    crew = Crew(4, rps, faults, rounds=12)
    crew.run()
    heard = [int(np.bitwise_or.reduce(o.heard)) & 0b10 for o in crew.outcomes[0]]
    assert heard[0] and heard[-1] and 0 in heard
    assert len(crew.outcomes[1]) == 12


def test_healing_ends_everything_but_death() -> None:
    faults = Faults(
        loss=Loss(1.0),
        latency_s=0.01,
        partitions=(Partition(frozenset({0}), Window()),),
        freezes=(Freeze(1, 0.0, 100.0), Freeze(0, 2.0, 100.0)),
        crashes=(Crash(2, 0.5), Crash(3, 5.0)),
    )
    crew = Crew(4, rps, faults, rounds=1)
    world = crew.run(until_s=1.0)
    assert crew.outcomes[1] == [] and world.busy(1)
    world.heal()
    assert world.live == {0, 1, 3} and world.faults.loss is None
    crew.rounds = 8
    for peer in (0, 3):
        world.at(1.0, peer, crew.ask(peer, 1.0))
    world.run(until_s=50.0)
    assert [len(outcomes) for outcomes in crew.outcomes] == [8, 8, 1, 8]
    heard = [int(np.bitwise_and.reduce(outcome.heard)) for outcome in crew.outcomes[0]]
    assert heard[0] == 0b0001 and 0b1011 in heard


def test_notes_are_passed_on() -> None:
    noted: list[tuple[PeerId, float, Noted]] = []
    node = Scripted(lambda now_s, event: [Noted("odd", 3)] if isinstance(event, Joined) else [])
    world = World([Scripted(), node], on_note=lambda *note: noted.append(note))
    world.at(2.0, 1, Joined(0))
    world.run()
    assert noted == [(1, 2.0, Noted("odd", 3))]


def test_machines_that_answer_each_other_for_ever_are_stopped() -> None:
    def echo(peer: PeerId) -> Scripted:
        answers = lambda now_s, event: [] if isinstance(event, Start) else [Send(message(1 - peer), math.inf)]  # noqa: E731
        return Scripted(answers)

    world = World([echo(0), echo(1)])
    world.at(0.0, 0, Joined(1))
    with pytest.raises(RuntimeError, match="500 events and not done"):
        world.run(events_max=500)


def test_an_error_in_a_machine_says_where_and_in_which_world() -> None:
    def fail(now_s: float, event: Event) -> list[Effect]:
        if isinstance(event, Joined):
            raise ZeroDivisionError("in a machine")
        return []

    world = World([Scripted(), Scripted(fail)], seed=77)
    world.at(3.0, 1, Joined(0))
    with pytest.raises(ZeroDivisionError) as caught:
        world.run()
    assert "peer 1 at 3.0 s" in caught.value.__notes__[0] and "seed 77" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "faults", [Faults(crashes=(Crash(2, 1.0),)), Faults(freezes=(Freeze(-1, 1.0, 1.0),))]
)
def test_faults_of_strangers_are_refused(faults: Faults) -> None:
    with pytest.raises(ValueError, match="in a world of 2"):
        World([Scripted(), Scripted()], faults)


def test_events_for_strangers_and_for_the_past_are_refused() -> None:
    world = World([Scripted()])
    with pytest.raises(ValueError, match="no peer 1 in a world of 1"):
        world.at(0.0, 1, Joined(0))
    with pytest.raises(ValueError, match="nothing can be planned for -1"):
        world.call(-1.0, lambda now_s: None)
    with pytest.raises(ValueError, match="nothing can be planned for nan"):
        world.call(math.nan, lambda now_s: None)


def test_callbacks_may_go_on_asking() -> None:
    crew = Crew(3, rps, Faults(latency_s=0.001), rounds=5, pause_s=0.0)
    crew.run()
    assert [[type(o.round) for o in outs] for outs in crew.outcomes] == [[int] * 5] * 3
    assert [[o.round for o in outs] for outs in crew.outcomes] == [[0, 1, 2, 3, 4]] * 3


def test_a_crew_of_one_is_done_at_once() -> None:
    crew = Crew(1, rps, rounds=3)
    crew.run()
    assert [(o.total_s, o.heard.tolist()) for o in crew.outcomes[0]] == [(0.0, [1] * 13)] * 3


@pytest.mark.parametrize(
    ("cuts", "most_s", "median_s"), [(2, 1.5, 0.06), (4, 0.8, 0.06)], ids=["two lines", "a ring"]
)
def test_deadlines_do_not_grow_by_peers_that_wait_for_each_other(
    cuts: int, most_s: float, median_s: float
) -> None:
    """Lines of four peers are cut one way, so that end marks never come there. What a peer waits for in vain
    is no measure of how long shares take: learned as one, deadlines came to 4 s in 150 rounds and to 11 s in
    200, where a round trip takes 2 ms and peers compute for 50 to 75 ms. Nor is the time in which a peer
    shows that it is not there learned from rounds that such peers held up: else all wait for ever longer.
    """
    n, rounds = 4, 150
    crew = [Node(peer, n, 1) for peer in range(n)]
    for node in crew:
        node.configure(0, Channel(rps, fp32, 8, 0.02, 0.002))
    table = np.ones((8, fp32.elements), np.float32)
    longest_s = 0.0
    took_s: list[float] = []

    def machine(peer: int) -> Rounds:
        found = crew[peer].channels[0]
        assert isinstance(found, Rounds)
        return found

    def done(peer: int, now_s: float, outcome: Outcome) -> None:
        nonlocal longest_s
        took_s.append(outcome.total_s)
        longest_s = max(longest_s, sum(machine(peer).budgets_s()))
        if outcome.round < rounds:
            pause_s = 0.05 * (1 + 0.5 * random.uniform(random.stream_key(1, "pause", peer), outcome.round))
            world.at(now_s + pause_s, peer, Average(0, table.copy(), 1.0))

    lines = Faults(latency_s=0.001, one_way=tuple(OneWay(peer, (peer + 1) % n) for peer in range(cuts)))
    world = World(crew, lines, 1, on_done=done)
    for peer in range(n):
        world.at(0.0, peer, Average(0, table.copy(), 1.0))
    world.run(until_s=1000.0)
    assert all(machine(peer).done >= rounds for peer in range(n))
    assert longest_s < most_s
    assert median(took_s) < median_s
