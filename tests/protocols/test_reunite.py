"""Lines that were cut for a while and carry again: peers that saw each other differently meet in one round.

Small models are the hard case: a peer that owns the only block sends nothing before its round is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from ragtag.core.seed import generator
from ragtag.core.types import Measured, Outcome, Run
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.rounds.rps import rps, rps_repair
from tests.protocols.harness import World, vectors

PAUSE_S = 0.027
CUT_S, HEAL_S, END_S = 0.6, 1.0, 3.0
"""Half of all lines, drawn for each direction, carry nothing between the first two."""


def healed(
    n: int, n_chunks: int, method: Averager, seed: int, jitter: float, busy_s: float = 0.0
) -> list[bool]:
    """Whether each average of the last second had everybody's values in every chunk.

    jitter: how far computing strays from ``PAUSE_S``, as a share. busy_s: mean of an exponential delay of
    each message and each step, as on a machine with other work.
    """
    draw = generator(seed, "reunite", n)
    world = World(n, method, n_chunks, seed=seed, latency_s=0.0004, probe_s=0.01, floor_s=0.002)
    lines = [(a, b) for a in range(n) for b in range(n) if a != b]
    cut = {line for line in lines if draw.random() < 0.5}
    values, last = vectors(n, n_chunks), []

    def delay_s() -> float:
        return float(draw.exponential(busy_s)) if busy_s else 0.0

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        away = CUT_S <= world.now_s < HEAL_S and (source, run.peer) in cut
        return [] if away else [(delay_s(), run)]

    def again(peer: int, outcome: Outcome) -> None:
        if world.now_s >= END_S - 1:
            last.append(bool((outcome.heard == (1 << n) - 1).all()))
        if world.now_s < END_S:
            pause_s = PAUSE_S * (1 + jitter * (2 * draw.random() - 1)) + delay_s()
            world.average(peer, values[peer], after_s=pause_s)

    world.carry, world.on_done = carry, again
    for peer in range(n):
        world.average(peer, values[peer], after_s=0.005 * draw.random())
    world.run()
    for node in world.nodes:  # a non-owner hears owners only, and from them of the others
        assert node.live == frozenset(range(n)), (seed, node.me)
    return last


@pytest.mark.parametrize("method", [direct, rps_repair], ids=lambda m: m.name)
@pytest.mark.parametrize(("n", "n_chunks"), [(2, 1), (3, 1), (3, 2)])
def test_peers_that_were_cut_off_are_all_in_all_rounds_again(method: Averager, n: int, n_chunks: int) -> None:
    whole = []
    for seed, jitter in itertools.product(range(6), (0.0, 0.1)):
        last = healed(n, n_chunks, method, seed, jitter)
        assert len(last) > n * 20
        assert np.mean(last) > 0.9, (seed, jitter)  # 2 of 108 averages in a row may miss one by a deadline
        whole.append(np.mean(last))
    assert np.mean(whole) > 0.99


@pytest.mark.parametrize("n", [2, 3, 4])
def test_so_they_are_on_a_busy_machine(n: int) -> None:
    whole = [np.mean(healed(n, 1, direct, seed, 0.02, busy_s=0.002)) for seed in range(10)]
    assert min(whole) > 0.5  # none is cut off for good
    assert np.median(whole) > 0.95


@pytest.mark.parametrize("lag_s", [0.0299, 0.0301, 0.0303])
@pytest.mark.parametrize("n_chunks", [1, 2])
@pytest.mark.parametrize("method", [direct, rps, rps_repair], ids=lambda m: m.name)
def test_who_always_begins_a_round_as_it_is_over_for_the_other_gets_ahead_in_the_end(
    method: Averager, n_chunks: int, lag_s: float
) -> None:
    """Equal steps of 30 ms: one peer is on its own, and the other a hair more than a step behind it."""
    world = World(2, method, n_chunks, latency_s=0.0004, probe_s=0.01, floor_s=0.002)
    values = vectors(2, n_chunks)
    world.carry = lambda source, run: [] if world.now_s < 0.5 else [(0.0, run)]

    def again(peer: int, outcome: Outcome) -> None:
        if world.now_s < 1.5:
            world.average(peer, values[peer], after_s=0.03)

    world.on_done = again
    for peer in range(2):
        world.average(peer, values[peer], after_s=lag_s * peer)
    world.run()
    for outcomes in world.outcomes:
        assert np.mean([(outcome.heard == 0b11).all() for outcome in outcomes[-20:]]) == 1


@pytest.mark.parametrize("n", [4, 6])
def test_who_came_apart_by_parts_of_a_long_step_are_in_one_round_again_at_once(n: int) -> None:
    """Steps of half a second on lines of milliseconds: deadlines have learned nothing of tenths of a second.

    Each peer is late once, by another part of a step. Most of the others are then missing at the first
    deadline of a peer that comes first, and it waits for as long as they may compute. It went on alone, was
    alone again in the next rounds, and it took them up to ten rounds to meet.
    """
    whole = []
    for seed in range(4):
        draw = generator(seed, "apart", n)
        world = World(n, rps_repair, 4 * n, seed=seed, latency_s=0.0004, probe_s=0.002, floor_s=0.002)
        values, late, heard = vectors(n, 4 * n), draw.permutation(n), [list[bool]() for _ in range(n)]

        def again(peer: int, outcome: Outcome, world: World = world, heard: list[list[bool]] = heard) -> None:
            heard[peer].append(bool((outcome.heard == (1 << n) - 1).all()))
            once_s = 0.5 * late[peer] / n if len(heard[peer]) == 10 else 0.0  # noqa: B023
            if len(heard[peer]) < 20:
                world.average(peer, values[peer], after_s=once_s + 0.5 + 0.002 * draw.random())  # noqa: B023

        world.on_done = again
        for peer in range(n):
            world.average(peer, values[peer])
        world.run()
        whole.append(np.mean([rounds[10:] for rounds in heard]))
    assert np.mean(whole) > 0.85, whole


def cut_and_healed(world: World, cut: Callable[[int, int], bool], far: Callable[[int, int], float]) -> float:
    """The share of averages with everybody's values, 2 s after lines between some peers carry again.

    They carry nothing for a second. Steps take 10 ms. far: the delay of a line, beyond that of all of them.
    """
    values, last = vectors(world.n, world.n_chunks), list[bool]()

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        away = 0.5 <= world.now_s < 1.5 and cut(source, run.peer)
        return [] if away else [(far(source, run.peer), run)]

    def again(peer: int, outcome: Outcome) -> None:
        if 3.5 <= world.now_s < 4.0:
            last.append(bool((outcome.heard == (1 << world.n) - 1).all()))
        if world.now_s < 4.1:
            world.average(peer, values[peer], after_s=0.01)

    world.carry, world.on_done = carry, again
    for peer in range(world.n):
        world.average(peer, values[peer])
    world.run()
    return float(np.mean(last))


@pytest.mark.parametrize("method", [direct, rps, rps_repair], ids=lambda m: m.name)
def test_who_was_alone_waits_for_those_that_come_after_it_in_vain(method: Averager) -> None:
    """A peer that is alone has a round in each short step: what others send is of rounds long done to it.

    They begin the newest round that they hear of, and are never in time. It went on alone for half a minute.
    """
    world = World(3, method, 3, latency_s=0.015, probe_s=0.01, floor_s=0.002)
    assert cut_and_healed(world, lambda a, b: 0 in (a, b), lambda a, b: 0.0) > 0.95


@pytest.mark.parametrize("method", [direct, rps], ids=lambda m: m.name)
@pytest.mark.parametrize("sites", [(0, 0, 1, 1), (0, 0, 0, 1)])
def test_sites_meet_again_though_each_is_faster_than_the_line_between_them(
    method: Averager, sites: tuple[int, ...]
) -> None:
    """Local networks 40 ms apart: alone, each has several rounds in the time of a message to the other.

    Their deadlines have learned nothing of that line. Drivers have: nothing comes sooner than a round trip.
    """
    n, near_s, far_s = len(sites), 0.0004, 0.04
    world = World(n, method, n, latency_s=near_s, probe_s=0.1, floor_s=0.002)
    for a, b in itertools.permutations(range(n), 2):
        trip_s = 2 * (near_s + far_s * (sites[a] != sites[b]))
        world.nodes[a].step(0.0, Measured(b, 1.1 * trip_s, trip_s))
    apart = lambda a, b: sites[a] != sites[b]  # noqa: E731
    assert cut_and_healed(world, apart, lambda a, b: far_s * apart(a, b)) > 0.95


@pytest.mark.parametrize("method", [direct, rps], ids=lambda m: m.name)
def test_who_is_later_than_its_line_is_long_owns_nothing_and_holds_nobody_up(method: Averager) -> None:
    """All that peer 3 sends from second 1 on lies in its queue for .3 s, steps take .05 s."""
    n, values = 4, vectors(4, 4)
    world = World(n, method, n, probe_s=0.05, floor_s=0.002)
    for a, b in itertools.permutations(range(n), 2):
        world.nodes[a].step(0.0, Measured(b, 0.01, 0.004))
    outcomes = list[Outcome]()

    def again(peer: int, outcome: Outcome) -> None:
        if peer == 0 and world.now_s > 2:
            outcomes.append(outcome)
        if world.now_s < 5:
            world.average(peer, values[peer], after_s=0.05)

    world.carry = lambda source, run: [(0.3 * (source == 3 and world.now_s > 1), run)]
    world.on_done = again
    for peer in range(n):
        world.average(peer, values[peer])
    world.run()
    assert len(outcomes) > 50
    assert all(outcome.averaged.all() for outcome in outcomes)
    assert max(outcome.scatter_s + outcome.gather_s for outcome in outcomes) < 0.006  # as without it
