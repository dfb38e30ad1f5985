"""What the SWIM and Lifeguard papers say, held against the machine in simulated crews.

"SWIM: Scalable Weakly-consistent Infection-style Process Group Membership Protocol", Das, Gupta, Motivala,
DSN 2002. "Lifeguard: Local Health Awareness for More Accurate Failure Detection", Dadgar, Phillips, Currey,
DSN-W 2018.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest

from ragtag.core.faults import Crash, Faults, Freeze, Loss, OneWay, Window
from ragtag.protocols.membership.types import Address, Status
from ragtag.protocols.membership.wire import Ask, Ping, Seal
from ragtag.simulation.worlds.members import KEY, Life, MemberWorld, changes, name_of, remarks


def crew(n: int, faults: Faults, settle_s: float = 15.0, seed: int = 1) -> MemberWorld:
    world = MemberWorld(faults, seed)
    for peer in range(n):
        world.start(peer, () if peer == 0 else (0,))
    world.run(settle_s)
    return world


def tapped(world: MemberWorld) -> list[tuple[float, int, int, object]]:
    """From now on: all that is sent, as (time, from, to, message)."""
    sent: list[tuple[float, int, int, object]] = []

    def tap(life: Life, dest: Address, data: bytes) -> list[bytes]:
        opened = Seal(KEY, int.from_bytes(data[16:24], "little")).open(data)
        assert opened is not None
        sent.append((world.now_s, life.peer, dest[1] - 4000, opened.message))
        return [data]

    world.tamper = tap
    return sent


LINE = Faults(latency_s=0.02, jitter_s=0.002)


def test_load_per_member_does_not_grow_with_the_crew() -> None:
    """Abstract: "expected message load per group member" is constant in the group's size."""
    load = {}
    for n in (8, 24):
        world = crew(n, LINE, settle_s=20.0)
        before, period_s = world.datagrams, world.lives[0].machine.period_s
        world.run(world.now_s + 20 * period_s)
        load[n] = (world.datagrams - before) / n / 20
    assert load[8] == pytest.approx(6, rel=0.35)  # three probes in a period, a ping and an answer each
    assert load[24] == pytest.approx(load[8], rel=0.35)


def test_members_are_probed_in_rounds() -> None:
    """Section 4.3: round robin in random order bounds the time between two probes of one member by 2n - 1."""
    n = 7
    world = crew(n, LINE)
    sent = tapped(world)
    world.run(world.now_s + 30.0)
    pings = [dest for _, source, dest, message in sent if source == 2 and isinstance(message, Ping)]
    assert len(pings) > 50
    for other in set(range(n)) - {2}:
        turns = [i for i, dest in enumerate(pings) if dest == other]
        assert max(b - a for a, b in pairwise(turns)) <= 2 * n - 1
    assert len({tuple(pings[i : i + n - 1]) for i in range(0, 36, n - 1)}) > 3  # a new order each time


def test_the_indirect_path_is_taken_only_after_the_direct_one() -> None:
    """Section 3.1: k members are asked when the answer to a ping has not come in time, and not before."""
    cut = (OneWay(0, 1, Window(15.0)),)
    world = crew(6, Faults(latency_s=0.02, one_way=cut))
    sent = tapped(world)
    world.run(world.now_s + 5.0)
    asked = [
        (at_s, dest, message.subject)
        for at_s, source, dest, message in sent
        if source == 0 and isinstance(message, Ask)
    ]
    assert asked and {subject for _, _, subject in asked} == {name_of(1)}
    asks = [(at_s, dest) for at_s, dest, _ in asked]
    first_s = min(at_s for at_s, _ in asks)
    pinged_s = max(
        at_s
        for at_s, source, dest, message in sent
        if (source, dest) == (0, 1) and isinstance(message, Ping) and at_s < first_s
    )
    assert first_s - pinged_s >= 2 * 0.02
    assert len({dest for at_s, dest in asks if at_s == first_s}) == 3
    assert not [c for _, c in changes(world) if c.member.status is Status.DEAD]


def test_rumours_reach_all_in_a_time_like_the_logarithm_of_the_crew() -> None:
    """Section 4.1: infection-style dissemination; latency grows with log n."""
    took = {}
    for n in (8, 64):
        world = crew(n, LINE, settle_s=8.0)
        world.leave(3)
        from_s, period_s = world.now_s, world.lives[0].machine.period_s
        world.run(from_s + 10 * period_s)
        heard = [s.at_s for s, c in changes(world) if c.member.status is Status.LEFT]
        assert len(heard) == n - 1
        took[n] = (max(heard) - from_s) / period_s
    assert took[64] <= took[8] + 2 * math.log2(64 / 8) and took[64] < 5


def test_suspicion_keeps_slow_members_in() -> None:
    """Section 4.2: a suspected member that speaks up within the timeout is not declared failed."""
    freezes = tuple(Freeze(peer, 15.0 + 2 * peer, 0.6) for peer in range(1, 5))
    world = crew(8, Faults(latency_s=0.02, freezes=freezes), settle_s=30.0)
    suspected = {c.member.name for _, c in changes(world) if c.member.status is Status.SUSPECT}
    assert suspected and not [c for _, c in changes(world) if c.member.status is Status.DEAD]
    assert {r.name for _, r in remarks(world, "refuted")} == suspected
    assert world.agreed()


def test_incarnations_are_raised_by_their_own_member_only() -> None:
    """Section 4.2: "Incarnation numbers ... can be incremented only by the member itself"."""
    world = crew(6, Faults(latency_s=0.02, loss=Loss(0.4)), settle_s=40.0)
    own = {life.machine.me.name: life.machine.me.incarnation for life in world.lives}
    assert max(own.values()) > 0
    refuted = Counter(seen.peer for seen, _ in remarks(world, "refuted"))
    assert own == {name_of(peer): refuted[peer] for peer in range(6)}


def test_a_death_is_shorter_to_declare_when_many_see_it() -> None:
    """Lifeguard, section IV-B: the suspicion timeout falls from max to min with independent suspicions."""

    def lasted(witnesses: int) -> float:
        """In a crew of 8, only this many others lose sight of peer 7."""
        ways = tuple(OneWay(a, b, Window(15.0)) for p in range(witnesses) for a, b in ((p, 7), (7, p)))
        crash = (Crash(7, 15.0),) if witnesses == 7 else ()
        world = crew(8, Faults(latency_s=0.02, one_way=ways, crashes=crash), settle_s=60.0)
        period_s = world.lives[0].machine.period_s
        begun = [s.at_s for s, c in changes(world) if c.member.status is Status.SUSPECT]
        ended = [s.at_s for s, c in changes(world) if c.member.status is Status.DEAD]
        return (min(ended) - min(begun)) / period_s if ended else math.inf

    assert lasted(7) < 6
    assert lasted(2) == math.inf  # the others' answers vouch for it


def test_who_hears_nobody_doubts_itself() -> None:
    """Lifeguard, section IV-A: a member that gets no answers at all slows down before it accuses."""
    deaf = tuple(OneWay(peer, 0, Window(15.0)) for peer in range(1, 6))
    world = crew(6, Faults(latency_s=0.02, one_way=deaf), settle_s=15.0)
    period_s = world.lives[0].machine.period_s
    world.run(15.0 + 6 * period_s)
    assert world.lives[0].machine._health.score >= 2
    falsely = [c for s, c in changes(world) if s.peer == 0 and c.member.status is Status.DEAD]
    assert not falsely  # by now it would have declared a silent member dead, if it trusted itself
