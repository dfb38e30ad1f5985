"""Who may be in a crew of persons: passes, their ends, and revocations that reach all."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from ragtag.core.faults import Crash, Faults, Loss, Partition, Window
from ragtag.protocols.membership import passes as passes_module
from ragtag.protocols.membership.invitation import (
    ANSWER_BYTES,
    Said,
    ask,
    invitation_key,
    read_answer,
)
from ragtag.protocols.membership.passes import (
    SKEW_S,
    Bar,
    Pass,
    Passes,
    Revocation,
    Took,
    encoded,
    is_notice,
    notice,
    proof_of,
    public_of,
    read_notice_answer,
    revoked,
)
from ragtag.protocols.membership.roster import decode_card, encode_card
from ragtag.protocols.membership.types import Failed, Notice, Received, Remarked, Status, Transmit
from ragtag.protocols.membership.whereabouts import where_am_i
from ragtag.protocols.membership.wire import (
    CHALLENGE_BYTES,
    HEADER_BYTES,
    Barred,
    Gossip,
    Introduce,
    Message,
    Record,
    Refused,
    Revoked,
    Seal,
)
from ragtag.simulation.worlds.members import KEY, Life, address_of, changes, name_of, remarks
from tests.protocols.personal import DAY_S, SIGNING, UNIX_S, Persons, pass_for, seed

LINE = Faults(latency_s=0.01, jitter_s=0.002)
LOSSY = Faults(latency_s=0.01, jitter_s=0.002, loss=Loss(0.2))
NONCE = bytes(16)
OUTSIDE = ("10.9.9.9", 9)


def crew(n: int = 4, faults: Faults = LINE, settle_s: float = 5.0) -> Persons:
    world = Persons(faults)
    for peer in range(n):
        world.person(peer, () if peer == 0 else (0,))
    world.run(settle_s)
    assert world.agreed()
    return world


def told_revoked(world: Persons, peer: int, told: Revocation) -> Took | None:
    """What a member answers to the notice of a revocation."""
    answers: list[Took | None] = []
    before = world.tamper

    def look(life: Life, dest: tuple[str, int], data: bytes) -> list[bytes]:
        if dest == OUTSIDE:
            answers.append(read_notice_answer(KEY, NONCE, data))
            return []
        return before(life, dest, data)

    world.tamper = look
    data = notice(KEY, told, NONCE)
    assert is_notice(data)
    world.tell(world.lives[peer], Notice(OUTSIDE, data))
    world.run(world.now_s + 0.001)
    world.tamper = before
    assert len(answers) <= 1
    return answers[0] if answers else None


# -- Coming in


def test_persons_come_in_and_one_person_may_have_several_processes() -> None:
    world = crew(3)
    alice = pass_for("alice")
    world.person(3, (0,), "alice", shown=alice)
    world.person(4, (1,), "alice", shown=alice)
    world.run(world.now_s + 3.0)
    assert world.agreed() and world.live(2) == {0, 1, 2, 3, 4}
    assert not remarks(world, "barred")


def changed(shown: Pass, **of: object) -> Pass:
    return msgspec.structs.replace(shown, **of)


def other_process() -> bytes:
    """A proof that was copied from another member's card."""
    return proof_of(pass_for(), seed("alice"), name_of(0), 100, b"\1" + seed("session 0"))


BAD: dict[str, tuple[Callable[[], Pass], float, bytes | None, str]] = {
    "ended, by the members' clocks": (
        lambda: pass_for(at_s=UNIX_S - 2 * DAY_S, ends_s=UNIX_S - SKEW_S - 10), -DAY_S, None,
        "does not let this peer in: alice's token has ended; ask whoever holds the crew's token for a new",
    ),
    "ended, by its own clock": (
        lambda: pass_for(at_s=UNIX_S - 2 * DAY_S, ends_s=UNIX_S - 10), 0.0, None,
        "alice's token has ended; ask whoever",
    ),
    "not valid yet, by the members' clocks": (
        lambda: pass_for(at_s=UNIX_S + SKEW_S + 60), 3600.0, None, "alice's token is not valid yet: the",
    ),
    "not valid yet, by its own clock": (
        lambda: pass_for(at_s=UNIX_S + SKEW_S + 60), 0.0, None, "alice's token is not valid yet: the clock",
    ),
    "signed by another key": (
        lambda: pass_for(signing=seed("mallory")), 0.0, None, "is not signed by this crew's signing key",
    ),
    "for a longer time than it was issued for": (
        lambda: changed(pass_for(), ends_unix_s=int(UNIX_S) + 2 * DAY_S), 0.0, None,
        "is not signed by this crew's signing key",
    ),
    "under another name": (
        lambda: changed(pass_for(), person="holder"), 0.0, None, "is not signed by this crew's signing key",
    ),
    "with another's key": (
        lambda: changed(pass_for(), key=public_of(seed("mallory"))), 0.0, None, "is not signed by this",
    ),
    "of another process": (pass_for, 0.0, other_process(), "was made for another process; start it again"),
    "with noise for a proof": (pass_for, 0.0, b"\x95\0\0", "is not signed by this crew's signing key"),
    "without one": (pass_for, 0.0, b"", "this crew takes persons only, and the token names none: ask"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_a_pass_that_is_not_good_lets_nobody_in_and_says_what_to_do(bad: str) -> None:
    make, clock_s, proof, said = BAD[bad]
    world = crew(3)
    life = world.person(3, (0, 1), "alice", shown=make(), clock_s=clock_s, proof=proof)
    world.run(world.now_s + 10.0)
    assert life.failed is not None and said in life.failed, life.failed
    assert world.agreed() and world.live(0) == {0, 1, 2}
    assert all(change.member.name != name_of(3) for _, change in changes(world)), "nobody believed it"


def test_clocks_may_differ_by_five_minutes() -> None:
    world = crew(3)
    early = world.person(3, (0,), shown=pass_for("early", at_s=UNIX_S + 90))
    late = pass_for("late", at_s=UNIX_S - 2 * DAY_S, ends_s=UNIX_S - SKEW_S + 120)
    slow = world.person(4, (0,), shown=late, clock_s=-200.0)
    world.run(world.now_s + 5.0)
    assert early.failed is slow.failed is None
    assert world.agreed() and world.live(1) == {0, 1, 2, 3, 4}


def test_a_crew_that_takes_none_says_so_and_one_of_persons_lets_nobody_else_in() -> None:
    world = Persons(LINE)
    world.start(0, ())
    world.start(1, (0,))
    world.run(3.0)
    alice = world.person(2, (0,), "alice")
    world.run(world.now_s + 10.0)
    assert alice.failed is not None and "this crew takes no persons" in alice.failed
    assert world.agreed()

    world = crew(3)
    anybody = world.start(3, (0,))
    world.run(world.now_s + 10.0)
    assert anybody.failed is not None and "takes persons only" in anybody.failed
    assert world.agreed()


# -- Going out


@pytest.mark.parametrize("faults", [LINE, pytest.param(LOSSY, marks=pytest.mark.slow)], ids=["calm", "lossy"])
def test_one_whose_pass_is_revoked_is_put_out_and_the_crew_goes_on(faults: Faults) -> None:
    world = crew(8, faults, settle_s=10.0)
    alice = pass_for("alice")
    gone = [world.person(peer, (0,), "alice", shown=alice) for peer in (8, 9)]
    world.run(world.now_s + 5.0)
    assert world.live(3) == set(range(10))
    from_s = world.now_s
    assert told_revoked(world, 5, revoked(SIGNING, "alice", alice.serial)) is Took.YES
    world.run(from_s + 3.0)
    for life in gone:
        assert life.failed is not None and "alice's token was revoked by the holder" in life.failed
    assert world.agreed() and world.live(0) == set(range(8))
    late = world.person(10, (3,), "alice", shown=alice)
    again = world.person(11, (3,), "alice", shown=pass_for("alice", at_s=UNIX_S + 60))
    world.run(world.now_s + 10.0)
    assert late.failed is not None and "revoked" in late.failed
    assert again.failed is None and world.agreed() and world.live(7) == {*range(8), 11}, "a later one is good"
    dead = {c.member.name for seen, c in changes(world) if c.member.status is Status.DEAD}
    assert dead <= ({name_of(8), name_of(9)} if faults is LOSSY else set())


def test_one_that_never_heard_of_its_revocation_is_out_all_the_same() -> None:
    """A peer that ignores what it is told stays out, and nothing that it tells of others is believed."""
    world = crew(5)
    alice = world.person(5, (0,), "alice")
    world.run(world.now_s + 3.0)
    world.tamper = lambda life, dest, data: [] if dest == address_of(5) else [data]
    told_revoked(world, 0, revoked(SIGNING, "alice", int(1e6 * (UNIX_S + 60))))
    world.run(world.now_s + 20.0)
    assert alice.failed is None
    assert all(world.live(peer) == {0, 1, 2, 3, 4} for peer in range(5))
    world.tamper = lambda life, dest, data: [data]
    world.run(world.now_s + 20.0)
    assert alice.failed is not None and "revoked" in alice.failed, "whoever it speaks to says so"


def test_one_whose_pass_ends_leaves_by_itself() -> None:
    world = crew(5)
    alice = world.person(5, (0,), shown=pass_for("alice", ends_s=UNIX_S + 30))
    world.run(25.0)
    assert world.live(2) == set(range(6))
    world.run(33.0)
    assert alice.failed is not None and "has ended" in alice.failed
    assert world.agreed() and world.live(2) == set(range(5))
    assert Status.DEAD not in {change.member.status for _, change in changes(world)}


def test_one_whose_clock_is_late_is_put_out_by_the_others_clocks() -> None:
    world = crew(3)
    shown = pass_for("alice", at_s=UNIX_S - DAY_S, ends_s=UNIX_S + 20 - SKEW_S)
    alice = world.person(3, (0,), shown=shown, clock_s=-7200.0)
    world.run(18.0)
    assert world.live(2) == set(range(4))
    world.run(23.0)
    assert world.live(2) == set(range(3))
    world.run(45.0)
    assert alice.failed is not None and "has ended" in alice.failed, "once nobody else is left for it"
    assert "that member's clock is 7200 s ahead" in alice.failed
    assert world.agreed()


def test_a_newcomer_whose_clock_is_late_does_not_end_a_peer_that_is_alone() -> None:
    """It takes the founder's pass for one from the future. However often it comes, it is one against one."""
    world = Persons(LINE)
    first = world.person(0, (), shown=pass_for("holder", at_s=UNIX_S, ends_s=UNIX_S + 300 * DAY_S))
    for process in (1, 2):
        bob = world.person(1, (0,), "bob", clock_s=-2 * SKEW_S, deadline_s=60.0 * process, process=process)
        world.run(60.0 * process + 0.1)
        assert bob.failed is not None and "the clock of this machine is wrong" in bob.failed
        assert first.failed is None
    told = [seen.effect for seen in world.seen if seen.peer == 0 and isinstance(seen.effect, Remarked)]
    (said,) = [remark.detail for remark in told if remark.what == "refused" and remark.name == name_of(0)]
    assert "the clock of that member is behind" in said and "that member's clock is 600 s behind" in said
    late = world.person(2, (0,))
    world.run(world.now_s + 3.0)
    assert world.live(0) == {0, 2} and late.machine.live() == (name_of(0), name_of(2)), "others still come in"


@pytest.mark.parametrize("bar", [*Bar, 200])
def test_words_without_proof_end_nobody_that_is_alone(bar: int) -> None:
    world = Persons(LINE)
    world.person(0, ())
    world.run(1.0)
    for epoch in range(70, 80):  # a process that was put out has the crew's key
        word = Seal(KEY, epoch).seal(Barred(name_of(0), bar, UNIX_S), world.lives[0].machine.me.epoch)
        world.tell(world.lives[0], Received(OUTSIDE, word))
    world.run(world.now_s + 1.0)
    assert world.lives[0].failed is None


def test_a_member_with_a_wrong_clock_puts_out_nobody_but_in_its_own_view() -> None:
    world = crew(5)
    world.person(5, (0,), clock_s=400.0 * DAY_S)
    world.run(world.now_s + 30.0)
    assert all({0, 1, 2, 3, 4} <= world.live(peer) for peer in range(5))
    assert not [s for s in world.seen if isinstance(s.effect, Failed) and s.peer < 5]


def test_a_revocation_that_another_key_has_signed_changes_nothing() -> None:
    world = crew(4)
    forged = revoked(seed("mallory"), "holder", int(2e6 * UNIX_S))
    assert told_revoked(world, 0, forged) is Took.UNSIGNED
    inside = Seal(KEY, world.lives[1].machine.me.epoch)
    data = inside.seal(Revoked(name_of(1), [encoded(forged)] * 8), world.lives[0].machine.me.epoch)
    world.tell(world.lives[0], Received(address_of(1), data))
    world.run(world.now_s + 10.0)
    assert world.agreed() and world.live(0) == {0, 1, 2, 3}
    assert world.lives[0].machine.counts["unsigned"] >= 1


def test_a_newcomer_hears_what_was_revoked_before() -> None:
    """So the crew remembers, although all that were there when it was revoked have gone."""
    world = crew(3)
    told_revoked(world, 0, revoked(SIGNING, "alice", int(1e6 * (UNIX_S + 60))))
    world.run(world.now_s + 2.0)
    for peer in (3, 4):
        world.person(peer, (0,))
    world.run(world.now_s + 3.0)
    for peer in (0, 1, 2):
        world.leave(peer)
    world.run(world.now_s + 3.0)
    alice = world.person(5, (3, 4), "alice")
    world.run(world.now_s + 10.0)
    assert alice.failed is not None and "revoked" in alice.failed
    assert world.agreed()


def storm(number: int) -> None:
    """Faults, a restart and revocations drawn from a seed; healed, all agree, and none is wronged."""
    draw = random.Random(number)
    crashes = tuple(Crash(peer, draw.uniform(5, 15)) for peer in draw.sample(range(1, 10), 2))
    apart = Partition(frozenset(range(5)), Window(8.0, 8.0 + draw.uniform(0, 6)))
    loss = Loss(draw.choice([0.0, 0.1, 0.3]))
    faults = Faults(
        latency_s=0.01, jitter_s=0.005, loss=loss, duplicate=0.05, reorder=0.05, reorder_s=0.02,
        crashes=crashes, partitions=(apart,),
    )  # fmt: skip
    world, persons = Persons(faults, number), ("alice", "bob", "carol")
    whose = {peer: "holder" if peer < 4 else draw.choice(persons) for peer in range(12)}

    def come(peer: int) -> None:
        world.person(peer, () if peer == 0 else (0, 1), whose[peer])

    def tell(person: str) -> None:
        told = revoked(SIGNING, person, int(1e6 * UNIX_S))
        world.tell(world.lives[0], Notice(OUTSIDE, notice(KEY, told, NONCE)))

    for peer in range(12):
        world.at(0.2 * peer, partial(come, peer))
    void = {draw.choice(persons), draw.choice(persons)}
    for person in sorted(void):
        world.at(draw.uniform(6, 14), partial(tell, person))
    back = crashes[0].peer
    world.at(16.0, lambda: world.person(back, (0, 2, 3), whose[back], process=900))
    world.run(18.0)
    world.heal()
    world.run(50.0)
    assert world.agreed(), f"seed {number}"
    running = {life.peer for life in world.running()}
    assert {peer for peer in running if whose[peer] in void} == set(), f"seed {number}: {void}"
    assert running >= {p for p in range(12) if whose[p] not in void and p not in {c.peer for c in crashes}}
    for life in world.lives:
        assert life.failed is None or whose[life.peer] in void, f"seed {number}: {life.failed}"


def test_a_storm() -> None:
    storm(2)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_more_storms(number: int) -> None:
    storm(number)


def knows(world: Persons, peer: int) -> list[str]:
    passes = world.lives[peer].machine._persons.passes
    assert passes is not None
    return [void.person for void in passes.void()]


def test_a_revocation_reaches_all_in_some_hops_and_a_newcomer_as_it_is_let_in() -> None:
    """Long before the members' rounds of gossip, of which each takes a period, would bring it."""
    world = crew(24, settle_s=3.0)
    assert world.lives[0].machine.period_s > 0.1
    told_revoked(world, 0, revoked(SIGNING, "alice", int(1e6 * UNIX_S)))
    world.run(world.now_s + 0.08)
    assert [peer for peer in range(24) if knows(world, peer) != ["alice"]] == []
    late = world.person(24, (7,))
    give_up_s = world.now_s + 2.0
    while late.entered_s is None and world.now_s < give_up_s:
        world.run(world.now_s + 0.01)
    world.run(world.now_s + 0.02)
    assert knows(world, 24) == ["alice"]


# -- Names


def test_words_without_proof_about_a_name_end_nobody() -> None:
    """One that was put out has the crew's key, and can say what it likes, under any process's number."""
    world = crew(3)
    victim = world.lives[1].machine
    me = victim.me
    card = decode_card(me.metadata)
    assert card is not None
    mallory = pass_for("mallory", at_s=UNIX_S - 60)
    signed = proof_of(mallory, seed("mallory"), me.name, 66, card.key)
    of_mallory = encode_card(msgspec.structs.replace(card, epoch=66, proof=signed))
    later = 1 << 60
    records = [
        Record(me.name, epoch, 1 << 20, 0, "10.9.9.9", 9, metadata)
        for epoch, metadata in (
            (later, b""),
            (later, me.metadata),
            (later, of_mallory),
            (me.epoch, of_mallory),
        )
    ]
    for to, by in ((0, 2), (1, 0), (2, 0)):
        forged = Seal(KEY, world.lives[by].machine.me.epoch)
        forged._number = world.lives[by].machine._core.seal._number + 1000
        told: list[Message] = [Gossip(name_of(by), [record]) for record in records]
        for message in (Refused(me.name, later, *OUTSIDE, 0.0), *told):
            data = forged.seal(message, world.lives[to].machine.me.epoch)
            world.tell(world.lives[to], Received(OUTSIDE, data))
    world.run(world.now_s + 1.0)
    assert victim.me.epoch == me.epoch and world.lives[1].failed is None
    for observer in (0, 2):
        known = world.lives[observer].machine.members()[me.name]
        assert (known.epoch, known.metadata) == (me.epoch, me.metadata)
        assert world.lives[observer].machine.counts["made up"] > 0
    world.run(world.now_s + 10.0)
    assert world.agreed() and world.live(0) == {0, 1, 2}


def test_a_name_that_lives_is_its_persons_and_a_dead_ones_is_free() -> None:
    world = crew(4)
    world.person(4, (0,), "alice", name="otter")
    world.run(world.now_s + 2.0)
    thief = world.person(5, (1,), "bob", name="otter", deadline_s=world.now_s + 20.0)
    world.run(world.now_s + 21.0)
    assert thief.failed is not None and "two peers are called 'otter'" in thief.failed
    world.crash(4)
    world.person(4, (0,), "bob", name="otter", process=900)  # another person, at the same address
    world.person(4, (0,), "alice", name="otter", process=901)
    world.run(world.now_s + 2.0)
    assert world.lives[-1].entered_s is not None, "a restart is let in at once"
    world.crash(4)
    world.run(world.now_s + 20.0)
    heir = world.person(5, (1,), "bob", name="otter")
    world.run(world.now_s + 5.0)
    assert heir.entered_s is not None and heir.failed is None and world.agreed()


def test_of_two_processes_of_a_person_that_enter_at_once_by_different_doors_the_later_stays() -> None:
    part = Partition(frozenset({0, 1, 4}), Window(5.0, 6.0))
    world = crew(4, replace(LINE, partitions=(part,)))
    first = world.person(4, (0,), "alice", name="twin")
    world.run(world.now_s + 0.1)
    second = world.person(5, (2,), "alice", name="twin")
    world.run(world.now_s + 60.0)
    assert first.failed is not None and "another peer is called 'twin'" in first.failed
    assert second.failed is None and world.agreed()


# -- What it costs


def test_a_flood_of_what_is_not_signed_costs_one_signature_a_datagram(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = crew(3)
    checked = 0
    real = passes_module._signed

    def counted(*args: object) -> bool:
        nonlocal checked
        checked += 1
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(passes_module, "_signed", counted)
    inside = Seal(KEY, world.lives[1].machine.me.epoch)
    inside._number = 1 << 40
    forged = [encoded(revoked(seed("mallory"), f"person-{k}", int(1e6 * UNIX_S))) for k in range(8)]
    for _ in range(50):
        data = inside.seal(Revoked(name_of(1), forged), world.lives[0].machine.me.epoch)
        world.tell(world.lives[0], Received(address_of(1), data))
    stranger = Seal(bytes(32), 77)
    for k in range(200):
        data = stranger.seal(Revoked("x", forged), world.lives[0].machine.me.epoch)
        world.tell(world.lives[0], Received((f"10.1.0.{k}", 9), data))
        world.tell(
            world.lives[0], Notice((f"10.1.0.{k}", 9), notice(bytes(32), revoked(SIGNING, "a", 1), NONCE))
        )
    world.run(world.now_s + 0.01)
    assert 40 <= checked <= 50


def test_a_flood_without_any_key_keeps_nobody_out() -> None:
    """Not a newcomer, nor a revocation; and its answers are few, and no longer than what came."""
    world = crew(3)
    life = world.lives[0]
    machine = life.machine
    answers: list[bytes | None] = []
    world.on_step = lambda life, event, effects: answers.extend(
        e.data for e in effects if isinstance(e, Transmit) and e.dest == OUTSIDE
    )
    other = Seal(bytes(32), 77)
    elsewhere = other.seal(Introduce(Record("x", 77, 0, 0, "10.9.9.9", 9, bytes(64))), 0)
    for _ in range(400):
        answers.append(machine.invite(ask(bytes(32), NONCE, 0, NONCE), UNIX_S))
        assert machine.whereabouts(where_am_i(bytes(32), NONCE), OUTSIDE) is None
        world.tell(life, Notice(OUTSIDE, notice(bytes(32), revoked(SIGNING, "a", 1), NONCE)))
        world.tell(life, Received(OUTSIDE, elsewhere))
        world.tell(life, Received(OUTSIDE, elsewhere[: HEADER_BYTES + 1]))
    world.run(world.now_s + 1e-4)
    told = [data for data in answers if data is not None]
    assert 100 <= len(told) <= 201 and {len(data) for data in told} == {ANSWER_BYTES, CHALLENGE_BYTES}
    assert len(elsewhere) >= CHALLENGE_BYTES

    key = invitation_key(KEY, NONCE, 0)
    told_key = machine.invite(ask(key, NONCE, 0, NONCE), UNIX_S)
    assert told_key is not None and read_answer(key, NONCE, told_key) == (Said.WELCOME, KEY)
    assert machine.whereabouts(where_am_i(KEY, NONCE), OUTSIDE) is not None
    world.on_step = lambda life, event, effects: None
    assert told_revoked(world, 0, revoked(SIGNING, "alice", int(1e6 * UNIX_S))) is Took.YES
    late = world.person(3, (0,))
    world.run(world.now_s + 0.2)
    assert late.entered_s is not None


def test_an_answer_to_a_notice_is_as_long_as_it() -> None:
    world = crew(2)
    sent: list[bytes] = []
    world.on_step = lambda life, event, effects: sent.extend(
        e.data for e in effects if isinstance(e, Transmit) and e.dest == OUTSIDE
    )
    told_revoked(world, 0, revoked(SIGNING, "alice", int(1e6 * UNIX_S)))
    assert [len(data) for data in sent] == [passes_module.NOTICE_BYTES]


def test_the_signatures_of_a_member_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = crew(3)
    known: Passes | None = world.lives[0].machine._persons.passes
    assert known is not None and len(known._known) == 2
    monkeypatch.setattr(passes_module, "_signed", lambda *args: pytest.fail("it was known"))
    told = world.lives[1].machine.me
    assert world.lives[0].machine.members()[told.name].metadata == told.metadata
    world.run(world.now_s + 5.0)
    assert world.agreed()
