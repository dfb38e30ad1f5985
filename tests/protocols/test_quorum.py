"""A quorum: what fewer gave is no average, and past it a peer is waited for only while that pays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ragtag
from ragtag.core.types import Outcome
from ragtag.protocols.channel.averager import Averager
from tests.protocols.harness import World, members, vectors

N, STEP_S, ROUNDS = 6, 1.0, 12


def crew(
    averager: Averager,
    after_s: Callable[[int, int], float | None],
    rounds: int = ROUNDS,
    overlap_s: float = 0.0,
) -> World:
    """Peers that average and compute for ``after_s(peer, round)``; ``None``: the peer comes no more.

    overlap_s: for how long their trainers go on before they ask for an average.
    """
    world, own = World(N, averager, 2 * N, floor_s=0.004, probe_s=0.3), vectors(N, 2 * N)

    def again(peer: int, outcome: Outcome) -> None:
        next_s = after_s(peer, outcome.round + 1)
        if outcome.round + 1 < rounds and next_s is not None:
            world.average(peer, own[peer], after_s=next_s, overlap_s=overlap_s)

    world.on_done = again
    for peer in range(N):
        world.average(peer, own[peer])
    return world


def of_round(world: World, number: int) -> dict[int, Outcome]:
    return {peer: o for peer, many in enumerate(world.outcomes) for o in many if o.round == number}


@pytest.mark.parametrize("repair", [False, True])
def test_what_fewer_than_a_quorum_gave_is_no_average(repair: bool) -> None:
    """Peers 0 to 3 go on without 4 and 5, and later without 3."""
    last = {4: 4, 5: 4, 3: 8}
    averager = ragtag.RPS(repair=repair, quorum=4)
    world = crew(averager, lambda peer, r: None if r > last.get(peer, ROUNDS) else STEP_S).run()
    for number in (5, 6, 7, 8):
        outcomes = of_round(world, number)
        assert set(outcomes) == {0, 1, 2, 3}
        for outcome in outcomes.values():
            heard = [members(bits) for bits in outcome.heard[outcome.averaged]]
            assert heard and all(who == [0, 1, 2, 3] for who in heard)
    for number in (9, 10, 11):
        outcomes = of_round(world, number)
        assert set(outcomes) == {0, 1, 2}
        assert not any(outcome.averaged.any() for outcome in outcomes.values())
        assert all((o.mean == vectors(N, 2 * N)[peer]).all() for peer, o in outcomes.items())
    without = crew(ragtag.RPS(repair=repair), lambda p, r: None if r > last.get(p, ROUNDS) else STEP_S).run()
    assert all(outcome.averaged.any() for outcome in of_round(without, 11).values())


def test_of_a_crew_in_two_parts_one_goes_on() -> None:
    """Peers 0 to 3 and peers 4 and 5 do not hear each other from round 4 on."""

    def parted(averager: Averager) -> list[bool]:
        world = crew(averager, lambda peer, r: STEP_S)
        world.carry = lambda source, run: (
            [] if run.key.round >= 4 and (source < 4) != (run.peer < 4) else [(0.0, run)]
        )
        world.run()
        return [bool(many[-1].averaged.any()) for many in world.outcomes]

    assert parted(ragtag.RPS(quorum=4)) == [True] * 4 + [False] * 2
    assert parted(ragtag.RPS()) == [True] * 6


def slow(peer: int, number: int) -> float:
    """Peer 5 takes half a step more in some rounds: enough for deadlines to have room for it."""
    return STEP_S + 0.5 * (peer == 5 and (number < 6 or number > 8))


def test_past_a_quorum_a_straggler_is_waited_for_while_that_pays() -> None:
    """Five peers are there, a step of 1 s has gone by: a sixth pays for .2 s of wait."""
    hurried, patient = (crew(averager, slow).run() for averager in (ragtag.RPS(quorum=4), ragtag.RPS()))
    waits = [max(o.scatter_s for p, o in of_round(w, 9).items() if p != 5) for w in (hurried, patient)]
    assert waits[1] > 0.49, "deadlines have learned to wait for it"
    assert 0.19 < waits[0] < 0.25


def test_until_an_average_is_due_a_wait_for_a_straggler_costs_nothing() -> None:
    """Peer 5 comes half a second late. Past a quorum there is no grace where the average is used later."""
    for overlap_s, waits_s, there in ((0.0, 0.2, 5), (0.8, 0.5, 6)):
        outcomes = of_round(crew(ragtag.RPS(quorum=4), slow, overlap_s=overlap_s).run(), 9)
        heard = outcomes[0].heard[outcomes[0].averaged]
        assert {len(members(bits)) for bits in heard} == {there}
        assert max(o.scatter_s for p, o in outcomes.items() if p != 5) == pytest.approx(waits_s, abs=0.01)


def test_of_what_is_due_nobody_waits_longer_for_a_quorum() -> None:
    """Peers 3 to 5 come no more; deadlines have learned of seconds. Then the next average is due."""
    apart = {3: 0.4, 4: 0.8, 5: 1.1}

    def after(peer: int, number: int) -> float | None:
        return None if peer > 2 and number > 20 else STEP_S + apart.get(peer, 0.0)

    waits_s = []
    for overlap_s in (0.0, 0.9):
        world = crew(ragtag.RPS(quorum=4), after, rounds=23, overlap_s=overlap_s).run()
        last = [*of_round(world, 21).values(), *of_round(world, 22).values()]
        waits_s.append(max(outcome.total_s for outcome in last))
    assert waits_s[0] > 4.0 and waits_s[1] <= 0.9, waits_s


@pytest.mark.parametrize("averager", [ragtag.RPS(), ragtag.AllReduce(), ragtag.RPS(quorum=4)], ids=repr)
def test_no_share_is_too_late_before_its_average_is_due(averager: Averager) -> None:
    """Deadlines are of milliseconds, and peer 5 comes half a second after the others."""

    def late(peer: int, number: int) -> float:
        return STEP_S + 0.5 * (peer == 5 and number == 9)

    for overlap_s, there in ((0.0, 5), (0.6, 6)):
        outcomes = of_round(crew(averager, late, overlap_s=overlap_s).run(), 9)
        heard = outcomes[0].heard[outcomes[0].averaged]
        assert {len(members(bits)) for bits in heard} == {there}
    hung = crew(averager, lambda p, r: None if p == 5 and r > 8 else STEP_S, overlap_s=0.6).run()
    assert max(outcome.total_s for outcome in of_round(hung, 9).values()) <= 0.6, "averages are back by then"


def test_a_peer_that_is_a_little_late_is_in() -> None:
    def late(peer: int, number: int) -> float:
        return STEP_S + 0.1 * (peer == 5)

    world = crew(ragtag.RPS(quorum=4), late).run()
    for number in range(4, ROUNDS):
        outcomes = of_round(world, number)
        assert len(outcomes) == N
        assert all(members(bits) == list(range(N)) for o in outcomes.values() for bits in o.heard)


def test_each_share_makes_the_grace_anew() -> None:
    """Peers 3 to 5 come one after the other, each in the grace after the one before, and not in the first."""
    apart = {3: 0.4, 4: 0.8, 5: 1.1}
    world = crew(ragtag.RPS(quorum=3), lambda peer, r: STEP_S + apart.get(peer, 0.0), rounds=24).run()
    outcomes = of_round(world, 23)
    assert outcomes[0].scatter_s > 1.0
    assert all(members(bits) == list(range(N)) for o in outcomes.values() for bits in o.heard)


def test_fewer_than_a_quorum_wait_once_more_at_the_deadline() -> None:
    """Two of six are late by more than the deadline: without a quorum the other four go on."""

    def late(peer: int, number: int) -> float:
        return STEP_S + 0.03 * (peer > 3 and number == 8)

    short, many = (
        of_round(crew(averager, late).run(), 8) for averager in (ragtag.RPS(quorum=5), ragtag.RPS())
    )
    assert {p for p, o in many.items() if o.missed} >= {0, 1, 2, 3}
    assert max(o.scatter_s for p, o in short.items() if p < 4) > max(
        o.scatter_s for p, o in many.items() if p < 4
    )


def test_a_peer_without_a_weight_is_none_of_a_quorum() -> None:
    """Peer 0 has none, and peer 5 is late by more than the deadline: four count, of the five that it takes.

    So the others wait once more, and peer 5 is in.
    """
    world, own = World(N, ragtag.RPS(quorum=5), 2 * N, floor_s=0.004, probe_s=0.3), vectors(N, 2 * N)

    def again(peer: int, outcome: Outcome) -> None:
        after_s = STEP_S + 0.03 * (peer == 5 and outcome.round == 7)
        if outcome.round < 8:
            world.average(peer, own[peer], float(peer > 0), after_s=after_s)

    world.on_done = again
    for peer in range(N):
        world.average(peer, own[peer], float(peer > 0))
    world.run()
    for outcome in of_round(world, 8).values():
        assert outcome.averaged.all()
        assert all(members(bits) == [1, 2, 3, 4, 5] for bits in outcome.heard)


@pytest.mark.parametrize("wrong", [1, -1, 65, 2.5, True])
def test_what_is_no_quorum_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="from 2 to 64, or 0"):
        ragtag.RPS(quorum=wrong)  # type: ignore[arg-type]


def test_peers_compare_their_quorums() -> None:
    assert ragtag.RPS(quorum=3) == ragtag.RPS(quorum=3)
    assert ragtag.RPS(quorum=3).name != ragtag.RPS(quorum=4).name
    assert repr(ragtag.RPS(repair=True, quorum=3)) == "RPS(repair=True, quorum=3)"
    assert ragtag.RPS(quorum=0) is ragtag.RPS()


def test_the_least_quorum_is_two() -> None:
    assert ragtag.RPS(quorum=2)
    with pytest.raises(ValueError, match="quorum"):
        ragtag.RPS(quorum=1)
