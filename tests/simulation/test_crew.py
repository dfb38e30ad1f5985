"""Whole crews in virtual time, of more peers than average directly: seats, groups, deaths, newcomers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from ragtag.core.faults import Faults, Freeze, Loss
from ragtag.core.types import PEERS_MAX
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.groups.channel import Moshpit, RandomGroups
from ragtag.protocols.rounds.rps import rps
from ragtag.simulation.worlds.crew import CrewWorld

LINE = Faults(latency_s=0.005, jitter_s=0.001)
LOSSY = Faults(latency_s=0.005, jitter_s=0.001, loss=Loss(0.01))


def until(crew: CrewWorld, true: Callable[[], bool], limit_s: float) -> float:
    """Let time pass until something is true, for at most so long; how long it took."""
    began_s = crew.now_s
    while not true():
        assert crew.now_s < began_s + limit_s, f"not within {limit_s} s of virtual time"
        crew.run(crew.now_s + 0.25)
    return crew.now_s - began_s


@pytest.mark.parametrize(
    "method", [Moshpit(8), pytest.param(RandomGroups(8), marks=pytest.mark.slow)], ids=lambda m: m.name
)
def test_peers_of_a_large_crew_come_to_one_mean_while_some_die_and_others_come(method: Averager) -> None:
    crew = CrewWorld(68, method, LOSSY, seed=3, step_s=0.2)
    mean = np.mean([member.values for member in crew.running()], axis=0)
    until(crew, lambda: crew.spread() < 1e-6, 6.0)
    kept = np.mean([member.values for member in crew.running()], axis=0)
    assert np.abs(kept - mean).max() < 0.2 * np.abs(mean).max()  # as far as losses leave it
    for index in (5, 66):
        crew.crash(index)
    crew.leave(11)
    for index in range(68, 72):
        crew.come(index, (0, 7))
    until(crew, lambda: len(crew.running()) == 69 and crew.agreed(), 20.0)
    assert any(member.seat >= PEERS_MAX for member in crew.running() if member.index >= 68)
    until(crew, lambda: crew.spread() < 1e-5, 10.0)
    newest = [member.outcomes[-1][1] for member in crew.running()]
    assert max(len(outcome.members) for outcome in newest) <= 16  # random groups are of 8 to 15
    seats = {member.seat for member in crew.running()}
    assert all(set(outcome.members) <= seats for outcome in newest)


@pytest.mark.slow
def test_a_crew_in_groups_grows_beyond_64_seats_one_at_a_time() -> None:
    crew = CrewWorld(63, Moshpit(8), LINE, seed=1, step_s=0.25)
    until(crew, crew.agreed, 10.0)  # else a newcomer may take a seat whose holder it has not heard of
    for index in range(63, 66):
        crew.come(index, (3,))
        until(crew, lambda index=index: len(crew.running()) == index + 1 and crew.agreed(), 15.0)  # type: ignore[misc]
    assert sorted(member.seat for member in crew.running()) == list(range(66))


def test_a_crew_that_averages_directly_says_why_it_has_no_65th_seat() -> None:
    crew = CrewWorld(63, rps, LINE, seed=1, step_s=2.0)
    crew.run(0.5)
    for index in (63, 64):
        crew.come(index, (3,))
    until(crew, lambda: any(member.failed for member in crew.members.values()), 30.0)
    (failed,) = [member for member in crew.members.values() if member.failed]
    assert failed.failed == (
        "all 64 seats of the crew are taken; larger crews average in groups: give "
        "averager=ragtag.Moshpit(group=8) on every peer"
    )


def test_a_run_of_one_seed_is_the_same_run_each_time() -> None:
    def run() -> list[bytes]:
        crew = CrewWorld(66, Moshpit(8), LOSSY, seed=9, step_s=0.2)
        crew.world.at(0.2, lambda: crew.crash(2))
        crew.world.at(0.3, lambda: crew.come(66, (0,)))
        crew.run(1.0)
        return [member.values.tobytes() for member in crew.members.values()]

    assert run() == run()


def test_what_a_member_sends_does_not_grow_with_the_crew() -> None:
    """Membership's datagrams in a quiet second, and the runs of a round, for each peer."""
    told: dict[int, float] = {}
    rounds: dict[int, float] = {}
    for n in (16, 66):
        crew = CrewWorld(n, Moshpit(8), LINE, seed=2, step_s=0.25)
        until(crew, lambda crew=crew: crew.agreed(), 10.0)  # type: ignore[misc]
        before, begun = crew.world.datagrams, sum(t.datagrams_sent for t in crew.link.traffic)
        done = sum(len(member.outcomes) for member in crew.running())
        crew.run(crew.now_s + 1.0)
        told[n] = (crew.world.datagrams - before) / n
        sent = sum(t.datagrams_sent for t in crew.link.traffic) - begun
        rounds[n] = sent / (sum(len(member.outcomes) for member in crew.running()) - done)
    assert told[66] < 1.25 * told[16]
    assert rounds[66] < 1.5 * rounds[16]  # groups are of up to 8 in both; those of the smaller are less even


@pytest.mark.slow
def test_a_storm_over_128_peers() -> None:
    """Deaths, leaves, freezes and 40 newcomers at once, with loss: all that run are one crew after it."""
    freezes = tuple(Freeze(peer, 4.0 + 0.3 * peer, 1.5) for peer in (1, 13, 70))
    faults = Faults(latency_s=0.005, jitter_s=0.002, loss=Loss(0.02), freezes=freezes)
    crew = CrewWorld(128, Moshpit(8), faults, seed=5, step_s=0.2)
    for i, index in enumerate((4, 8, 15, 16, 23, 42, 99, 127)):
        crew.world.at(4.0 + 0.2 * i, lambda index=index: crew.crash(index))  # type: ignore[misc]
    for index in (50, 60):
        crew.world.at(5.0, lambda index=index: crew.leave(index))  # type: ignore[misc]
    for index in range(128, 168):
        crew.world.at(4.5, lambda index=index: crew.come(index, (0, 2, 5, 100)))  # type: ignore[misc]
    crew.run(8.0)
    until(crew, lambda: len(crew.running()) == 158 and crew.agreed(), 30.0)
    until(crew, lambda: crew.spread() < 1e-4, 20.0)
    sizes = Counter(len(member.outcomes[-1][1].members) for member in crew.running())
    assert sizes[1] < 0.3 * sum(sizes.values())
    assert not any(member.failed for member in crew.members.values())


@pytest.mark.slow
def test_256_members_know_of_a_death_and_of_newcomers_within_seconds() -> None:
    crew = CrewWorld(256, Moshpit(16), LINE, seed=4, step_s=1.0)
    until(crew, crew.agreed, 30.0)
    crew.crash(77)
    gone = {member.index: member for member in crew.running()}
    assert until(crew, lambda: all(77 not in m.node.live for m in gone.values() if m.node), 10.0) <= 6.0
    until(crew, crew.agreed, 30.0)
    for index in range(256, 264):
        crew.come(index, (0, 200))
    until(crew, lambda: len(crew.running()) == 263 and crew.agreed(), 40.0)
    assert (
        max(member.seat for member in crew.running()) <= 270
    )  # the dead's first, and few places are left free


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("latency_s", [0.0001, 0.02])
def test_newcomers_of_one_instant_that_want_one_seat_are_all_heard_by_all(
    seed: int, latency_s: float
) -> None:
    """Who gave way to another one in a seat was told of it then, and reaches it there."""
    crew = CrewWorld(1, rps, Faults(latency_s=latency_s, jitter_s=latency_s / 10), seed, step_s=0.1)
    crew.run(1.0)
    for index in (1, 2, 3):
        crew.come(index, (0,))
    until(crew, lambda: len(crew.running()) == 4 and crew.agreed(), 20.0)
    crew.run(crew.now_s + 3.0)
    assert crew.agreed()
    assert all((member.outcomes[-1][1].heard == 0b1111).all() for member in crew.running())
    until(crew, lambda: crew.spread() < 1e-6, 3.0)


@pytest.mark.parametrize("seed", range(4))
def test_a_restarted_peer_and_a_newcomer_that_meet_first_do_not_begin_the_crew_anew(seed: int) -> None:
    """Their token names the restarted one. So they let each other in, some milliseconds before the crew asks
    there again.
    """
    line = Faults(latency_s=0.005, jitter_s=0.005)
    crew = CrewWorld(3, rps, line, seed, step_s=0.2, asks=frozenset({3}))
    crew.run(4.0 + 0.01 * seed)
    crew.come(3, (4,))  # it has overheard the newcomer
    crew.come(4, (3,))
    until(crew, lambda: len(crew.running()) == 5 and crew.agreed(), 10.0)
    assert {member.card.founded for member in crew.running()} == {3}
    assert sorted(crew.members) == list(range(5)), "nobody lost its seat"
