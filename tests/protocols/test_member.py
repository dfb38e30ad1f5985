"""What a crew of membership machines does, over lines that carry their bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.faults import Crash, Faults, Freeze, Loss, OneWay, Partition, Window
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.types import (
    Address,
    Describe,
    Entered,
    Failed,
    Identity,
    Join,
    Leave,
    Limits,
    Received,
    Status,
    Transmit,
    Wake,
    Woke,
)
from ragtag.protocols.membership.wire import Gossip, Ping, Record, Seal
from ragtag.simulation.worlds.members import (
    KEY,
    Jump,
    Life,
    MemberWorld,
    address_of,
    changes,
    name_of,
    remarks,
)

LINE = Faults(latency_s=0.01, jitter_s=0.002)


def crew(
    n: int, faults: Faults = LINE, seed: int = 1, settle_s: float = 20.0, **options: object
) -> MemberWorld:
    """``n`` peers that entered through the first."""
    world = MemberWorld(faults, seed, **options)  # type: ignore[arg-type]
    for peer in range(n):
        world.start(peer, () if peer == 0 else (0,))
    world.run(settle_s)
    return world


def deaths(world: MemberWorld, since_s: float = 0.0) -> set[str]:
    """Who was declared dead by anybody."""
    return {
        change.member.name
        for seen, change in changes(world)
        if seen.at_s >= since_s and change.member.status is Status.DEAD
    }


def member(world: MemberWorld, observer: int, peer: int) -> Status:
    return world.lives[observer].machine.members()[name_of(peer)].status


# -- Coming and going


def test_all_come_to_know_all() -> None:
    world = crew(12, settle_s=5.0)
    assert world.agreed() and len(world.lives[3].machine.live()) == 12
    assert all(life.entered_s is not None and life.entered_s < 0.2 for life in world.lives)
    assert not deaths(world) and not remarks(world, "refuted")


def test_any_live_member_is_an_entry_point() -> None:
    world = crew(4)
    world.crash(0)
    for peer, entry in ((4, 1), (5, 2), (6, 5)):
        world.start(peer, (entry,))
        world.run(world.now_s + 1.0)
    late = world.start(7, (0, 99, 3))  # a dead one and one that never was, before the one that lives
    world.run(world.now_s + 20.0)
    assert world.agreed() and late.machine.live() == tuple(name_of(p) for p in range(1, 8))


def test_peers_that_start_together_enter_through_each_other() -> None:
    world = MemberWorld(LINE, 1)
    for peer in range(5):
        world.start(peer, tuple(p for p in range(5) if p != peer))
    world.run(10.0)
    assert world.agreed()


def test_two_crews_that_never_met_become_one() -> None:
    world = crew(3)
    world.start(3, ())
    world.run(world.now_s + 2.0)
    world.start(4, (3, 0))
    world.run(world.now_s + 30.0)
    assert world.agreed() and len(world.lives[0].machine.live()) == 5


def test_leaving_is_announced_and_nobody_is_suspected_for_it() -> None:
    world = crew(6, replace(LINE, loss=Loss(0.2)))
    from_s = world.now_s
    world.leave(2)
    world.run(from_s + 1.0)
    assert world.lives[2].ended_s < from_s + 1.0
    world.run(from_s + 10.0)
    assert world.agreed()
    assert all(member(world, observer, 2) is Status.LEFT for observer in (0, 1, 3, 4, 5))
    assert not deaths(world, from_s)


def test_who_is_alone_leaves_at_once() -> None:
    world = MemberWorld(LINE, 1)
    life = world.start(0, ())
    world.run(1.0)
    world.leave(0)
    world.run(1.0)
    assert life.ended_s == 1.0 and life.machine.over and life.machine.step(2.0, Woke()) == []


def test_what_a_member_says_of_itself_reaches_a_small_crew_in_one_trip() -> None:
    world = crew(12)
    world.tell(world.lives[3], Describe(b"12 rounds"))
    world.run(world.now_s + 0.02)  # the line takes 10 ms, and some jitter; gossip alone takes periods
    assert all(life.machine.members()[name_of(3)].metadata == b"12 rounds" for life in world.lives)


def test_metadata_reaches_all() -> None:
    world = crew(5)
    machine = world.lives[3].machine
    machine.step(world.now_s, Describe(b"12 rounds"))
    world.run(world.now_s + 3.0)
    assert all(life.machine.members()[name_of(3)].metadata == b"12 rounds" for life in world.lives)
    with pytest.raises(ValueError, match="at most 256"):
        machine.step(world.now_s, Describe(bytes(257)))


# -- Dying, and seeming to


@pytest.mark.parametrize("n", [2, 3, 8, 24])
def test_a_death_is_seen_by_all_within_ten_periods(n: int) -> None:
    world = crew(n, replace(LINE, crashes=(Crash(n - 1, 20.0),)), settle_s=20.0)
    period_s = max(life.machine.period_s for life in world.lives)
    world.run(20.0 + 10 * period_s)
    assert world.agreed()
    assert all(member(world, observer, n - 1) is Status.DEAD for observer in range(n - 1))


def test_most_of_a_crew_may_die_at_once() -> None:
    world = crew(8)
    for peer in range(6):
        world.crash(peer)
    world.run(world.now_s + 40.0)
    assert world.agreed() and world.running()[0].machine.live() == ("peer-06", "peer-07")


def test_one_way_lines_kill_nobody() -> None:
    cut = tuple(OneWay(0, peer, Window(10.0, 35.0)) for peer in (1, 2))
    world = crew(6, replace(LINE, one_way=cut), settle_s=35.0)
    assert world.agreed() and not deaths(world)


def test_a_short_freeze_is_refuted_and_a_long_one_heals() -> None:
    freezes = (Freeze(2, 20.0, 0.6), Freeze(3, 40.0, 20.0))
    world = crew(6, replace(LINE, freezes=freezes), settle_s=59.0)
    assert deaths(world) == {name_of(3)}
    world.run(70.0)
    assert world.agreed() and deaths(world) == {name_of(3)}
    assert {seen.peer for seen, _ in remarks(world, "healed")} >= {0, 1, 2, 4, 5}


def test_who_slept_accuses_nobody() -> None:
    """All others' answers are late for it, not for them."""
    world = crew(6, replace(LINE, freezes=(Freeze(2, 20.0, 5.0),)), settle_s=40.0)
    assert not [
        change for seen, change in changes(world) if seen.peer == 2 and change.member.status is Status.DEAD
    ]
    assert world.lives[2].machine.counts["slept"] >= 1


def test_a_clock_that_jumps_accuses_nobody() -> None:
    world = crew(6, jumps=(Jump(2, 20.0, 3600.0), Jump(4, 21.0, 0.7)), settle_s=40.0)
    assert world.agreed() and not deaths(world)


def test_a_partition_heals_into_one_crew_and_says_so() -> None:
    part = Partition(frozenset({0, 1, 2}), Window(10.0, 30.0))
    world = crew(8, replace(LINE, partitions=(part,)), settle_s=29.0)
    assert world.lives[0].machine.live() == tuple(name_of(p) for p in (0, 1, 2))
    assert world.lives[5].machine.live() == tuple(name_of(p) for p in (3, 4, 5, 6, 7))
    world.run(42.0)
    assert world.agreed() and len(world.lives[0].machine.live()) == 8
    healed = {(seen.peer, remark.name) for seen, remark in remarks(world, "healed")}
    sides = {True: {0, 1, 2}, False: {3, 4, 5, 6, 7}}
    assert healed == {(a, name_of(b)) for a in range(8) for b in sides[a not in sides[True]]}
    assert "thought dead for" in remarks(world, "healed")[0][1].detail
    # and within its own side, healing cost nobody a death
    for seen, change in changes(world):
        if change.member.status is Status.DEAD:
            assert (seen.peer in part.side) != (int(change.member.name[-2:]) in part.side)


# -- Names


def test_a_second_peer_of_a_name_is_refused_by_name() -> None:
    world = crew(4)
    twin = world.start(4, (0,), name=name_of(2))
    world.run(world.now_s + 30.0)
    assert twin.failed is not None
    assert "two peers are called 'peer-02'" in twin.failed and "10.0.0.2:4002" in twin.failed
    assert world.agreed() and len(world.lives[0].machine.live()) == 4
    assert remarks(world, "refused") and not deaths(world)


def test_of_two_that_enter_at_once_by_different_doors_the_later_stays() -> None:
    part = Partition(frozenset({0, 1, 4}), Window(20.0, 21.0))
    world = crew(4, replace(LINE, partitions=(part,)))
    first = world.start(4, (0,), name="twin")
    world.run(world.now_s + 0.1)
    second = world.start(5, (2,), name="twin")
    world.run(world.now_s + 20.0)
    assert first.failed is not None and "another peer is called 'twin'" in first.failed
    assert second.failed is None and world.agreed()


def test_a_restarted_machine_takes_its_name_again_at_once() -> None:
    world = crew(4)
    world.crash(2)
    again = world.start(2, (0,))
    world.run(world.now_s + 3.0)
    assert again.entered_s is not None and world.agreed()
    assert world.lives[0].machine.members()[name_of(2)].epoch == again.machine.me.epoch


def test_the_name_of_the_dead_is_free_once_they_are_known_to_be() -> None:
    world = crew(4)
    world.crash(2)
    heir = world.start(4, (0,), name=name_of(2))
    world.run(world.now_s + 30.0)
    assert heir.failed is None and heir.entered_s is not None and world.agreed()
    assert remarks(world, "name taken")


# -- Not getting in


def failure(world: MemberWorld, life: Life) -> str:
    assert life.failed is not None, "it is still trying"
    return life.failed


def test_nobody_there_is_said_by_the_deadline() -> None:
    world = MemberWorld(LINE, 1)
    life = world.start(0, (7,), deadline_s=5.0)
    world.run(6.0)
    assert "no member answered at 10.0.0.7:4007" in failure(world, life) and life.ended_s <= 5.1


@pytest.mark.parametrize(("change", "says"), [("key", "another crew"), ("version", "another version")])
def test_another_crews_token_or_version_is_said(
    monkeypatch: pytest.MonkeyPatch, change: str, says: str
) -> None:
    world = crew(3)
    if change == "key":
        monkeypatch.setattr("ragtag.simulation.worlds.members.KEY", bytes(32))
        life = world.start(3, (0,), deadline_s=world.now_s + 5.0)
    else:
        life = world.start(3, (0,), deadline_s=world.now_s + 5.0)
        world.tamper = lambda sender, dest, data: [
            data[:2] + b"\x07" + data[3:] if sender.peer == 3 or dest == address_of(3) else data
        ]
    world.run(world.now_s + 6.0)
    assert says in failure(world, life)
    assert all(len(other.machine.live()) == 3 for other in world.lives[:3])


def test_who_enters_late_after_loss_still_enters() -> None:
    world = crew(6, replace(LINE, loss=Loss(0.5)), settle_s=30.0)
    assert all(life.entered_s is not None for life in world.lives)


def test_a_large_crew_is_known_to_a_newcomer_in_a_few_round_trips() -> None:
    world = crew(40, settle_s=5.0, metadata_bytes=64)
    life = world.start(40, (17,))
    world.run(world.now_s + 1.0)
    assert len(life.machine.live()) == 41


# -- Bad input


def outsider(world: MemberWorld, dest: int, data: bytes, source: Address = ("6.6.6.6", 666)) -> list[object]:
    """Put bytes before a member; what it does, and it must still think the same of everyone."""
    machine = world.lives[dest].machine
    before = machine.members()
    effects = machine.step(world.now_s, Received(source, data))
    assert machine.members() == before
    return [effect for effect in effects if not isinstance(effect, Wake)]


@given(st.binary(max_size=1300))
def test_noise_changes_nothing(data: bytes) -> None:
    assert outsider(CALM, 0, data) == []


@given(st.integers(0, 400), st.integers(0, 2000), st.integers(1, 255))
def test_forged_and_replayed_datagrams_change_nothing(which: int, at: int, change: int) -> None:
    peer, data = RECORDED[which % len(RECORDED)]
    damaged = bytearray(data)
    damaged[at % len(data)] ^= change
    source = address_of((peer + 1) % 3)
    answers = outsider(CALM, peer, bytes(damaged), source)
    answers += outsider(CALM, peer, data, source)
    for answer in answers:  # to a stranger's knock, a challenge; it keeps nothing of it
        assert isinstance(answer, Transmit) and len(answer.data) < 120


def _recorded() -> tuple[MemberWorld, list[tuple[int, bytes]]]:
    """A crew in which much happened, and all that was sent in it."""
    world, taken = MemberWorld(LINE, 1), list[tuple[int, bytes]]()

    def tap(life: Life, dest: Address, data: bytes) -> list[bytes]:
        taken.append((dest[1] - 4000, data))
        return [data]

    world.tamper = tap
    for peer in range(4):
        world.start(peer, () if peer == 0 else (0,))
    world.run(5.0)
    world.leave(3)
    world.run(10.0)
    return world, [(peer, data) for peer, data in taken if peer < 3]


CALM, RECORDED = _recorded()


def test_a_recorded_crew_s_datagrams_tell_no_names_and_no_addresses() -> None:
    text = b"".join(data for _, data in RECORDED)
    assert len(text) > 10_000
    for word in (name_of(0).split("-")[0], *(address_of(peer)[0] for peer in range(4))):
        assert word.encode() not in text


def test_a_recorded_crew_cannot_be_played_to_a_member_that_was_restarted() -> None:
    world, taken = _recorded()
    world.crash(1)
    world.run(10.1)
    again = world.start(1, ())
    world.run(10.2)
    before = again.machine.members()
    for peer, data in taken:
        if peer == 1:
            again.machine.step(world.now_s, Received(address_of(0), data))
    assert again.machine.members() == before
    assert again.machine.counts["misdirected"] > 20


@given(
    st.lists(
        st.builds(
            Record,
            st.sampled_from(["peer-00", "peer-01", "peer-02", "x", "é" * 64]),
            st.integers(0, (1 << 62) - 1),
            st.integers(0, (1 << 62) - 1),
            st.integers(0, 3),
            st.sampled_from(["", "h"]),
            st.integers(0, 65535),
            st.binary(max_size=300),
            st.lists(st.integers(0, 9), max_size=8).map(tuple),
        ),
        max_size=5,
    )
)
def test_no_record_of_a_member_raises(records: list[Record]) -> None:
    """Whoever has the key may lie; the machine still stands, within its limits."""
    world = crew(3, settle_s=1.0)
    liar, victim = world.lives[1].machine.me, world.lives[0].machine
    seal = Seal(KEY, liar.epoch)
    seal._number = 1 << 30
    for message in (Gossip(liar.name, records), Ping(liar.name, 1, records)):
        effects = victim.step(world.now_s, Received(liar.address, seal.seal(message, victim.me.epoch)))
        for effect in effects:
            assert not isinstance(effect, Transmit) or len(effect.data) <= 1152
    for i in range(40):
        victim.step(world.now_s + i, Woke())


def test_a_number_made_up_in_a_members_name_does_not_shut_it_out() -> None:
    """Whoever has the key can send one as any member. What that one sends itself has lower numbers then."""
    world, recorded = crew(4), list[tuple[int, bytes]]()

    def tap(life: Life, dest: Address, data: bytes) -> list[bytes]:
        recorded.append((dest[1] - 4000, data))
        return [data]

    world.tamper = tap
    shut_out, others, began_s = world.lives[1].machine.me, (0, 2, 3), world.now_s
    seal = Seal(KEY, shut_out.epoch)
    seal._number = 1 << 60

    def make_up() -> None:
        for peer in others:
            data = seal.seal(Gossip(shut_out.name, []), world.lives[peer].machine.me.epoch)
            world.lives[peer].machine.step(world.now_s, Received(shut_out.address, data))

    def counted(what: str) -> list[int]:
        return [world.lives[peer].machine.counts[what] for peer in others]

    make_up()
    world.run(began_s + 20.0)
    assert deaths(world, began_s) == set()
    refused = counted("replayed")
    world.run(began_s + 40.0)
    assert (counted("replayed"), counted("made up")) == (refused, [1, 1, 1])
    world.tamper = lambda life, dest, data: [data]
    world.run(began_s + 41.0)
    make_up()
    for peer, data in recorded[-500:]:
        assert outsider(world, peer, data, address_of((peer + 1) % 4)) == []
    assert counted("made up") == [1, 1, 1], "answers that were recorded are to questions that are closed"


def test_a_flooding_member_is_limited_and_named() -> None:
    world = crew(4)
    flooder, victim = world.lives[1].machine.me, world.lives[0].machine
    seal = Seal(KEY, flooder.epoch)
    seal._number = 1 << 30
    answered = 0
    for i in range(5000):
        news = [Record(f"ghost-{i}", 1 << 50, 0, 0, "10.9.9.9", 9)]
        data = seal.seal(Ping(flooder.name, i, news), victim.me.epoch)
        effects = victim.step(world.now_s, Received(flooder.address, data))
        answered += sum(isinstance(effect, Transmit) for effect in effects)
    assert answered <= 201 and len(victim.live()) <= 4 + 33
    assert victim.counts["flooding"] > 4000
    world.run(world.now_s + 60.0)  # ghosts die like others, and the crew goes on
    assert world.agreed()


def test_a_helper_serves_a_limited_number_of_others() -> None:
    from ragtag.protocols.membership.wire import Ask

    world = crew(4, limits=Limits(relays_max=10))
    asker, victim = world.lives[1].machine.me, world.lives[0].machine
    seal = Seal(KEY, asker.epoch)
    seal._number = 1 << 30
    pings = 0
    for i in range(100):
        data = seal.seal(Ask(asker.name, i, name_of(2)), victim.me.epoch)
        effects = victim.step(world.now_s, Received(asker.address, data))
        pings += sum(isinstance(effect, Transmit) for effect in effects)
    assert pings == 10 and victim.counts["relays refused"] == 90


# -- As a machine


def test_the_same_seed_gives_the_same_history() -> None:
    def history(seed: int) -> tuple[int, int, list[object]]:
        world = crew(5, replace(LINE, loss=Loss(0.3)), seed=seed, settle_s=6.0)
        return world.loop.events, world.bytes, list(world.seen)

    assert history(3) == history(3) != history(4)


def test_early_and_repeated_wakes_do_nothing() -> None:
    machine = Membership(Identity("a", ("h", 1), 1, KEY))
    first = machine.step(0.0, Join((), 10.0))
    assert Entered(0) in first
    (wake,) = [effect for effect in first if isinstance(effect, Wake)]
    assert machine.step(wake.at_s / 2, Woke()) == []
    assert [type(effect) for effect in machine.step(wake.at_s, Woke())] == [Wake]


def test_time_that_goes_back_stands_still() -> None:
    machine = Membership(Identity("a", ("h", 1), 1, KEY))
    machine.step(5.0, Join((), 10.0))
    for now_s in (4.0, 5.5, 1.0, 9.0):
        for effect in machine.step(now_s, Woke()):
            assert not isinstance(effect, Wake) or effect.at_s >= 5.0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Identity("", ("h", 1), 1, KEY), "1 to 64 bytes"),
        (lambda: Identity("é" * 33, ("h", 1), 1, KEY), "1 to 64 bytes"),
        (lambda: Identity("a", ("", 1), 1, KEY), "no address"),
        (lambda: Identity("a", ("h", 0), 1, KEY), "no address"),
        (lambda: Identity("a", ("h", 1), 0, KEY), "epoch"),
        (lambda: Identity("a", ("h", 1), 1, b"short"), "5 bytes"),
        (lambda: Membership(Identity("a", ("h", 1), 1, KEY, bytes(257))), "257 bytes of metadata"),
    ],
)
def test_an_identity_out_of_range_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_leaving_twice_is_leaving_once() -> None:
    world = crew(2)
    machine = world.lives[1].machine
    assert machine.step(world.now_s, Leave())
    assert not [e for e in machine.step(world.now_s, Leave()) if isinstance(e, Transmit | Failed)]
