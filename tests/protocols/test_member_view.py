"""Merging beliefs: in any order the same comes of them, and tables stay within their limits."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.protocols.membership.core import Core
from ragtag.protocols.membership.entry import Admission
from ragtag.protocols.membership.pace import Health
from ragtag.protocols.membership.persons import Persons
from ragtag.protocols.membership.probe import Prober
from ragtag.protocols.membership.suspicion import Suspicion, confirmations_wanted, shortest_periods
from ragtag.protocols.membership.types import Changed, Failed, Identity, Limits, Remarked, Status, Transmit
from ragtag.protocols.membership.view import LEAP_MAX, View
from ragtag.protocols.membership.wire import Pull, Record, Seal

ME = Identity("me", ("10.0.0.9", 4000), 100, bytes(32))
ALIVE, SUSPECT, DEAD, LEFT = Status


def view(limits: Limits | None = None) -> View:
    return View(Core(ME, limits or Limits()), Health())


def record(name: str, epoch: int = 1, incarnation: int = 0, status: Status = ALIVE) -> Record:
    if status is ALIVE:
        return Record(name, epoch, incarnation, status, f"10.0.1.{epoch}", 4000, bytes([incarnation]))
    return Record(name, epoch, incarnation, status, accusers=(7,) if status is SUSPECT else ())


RECORDS = st.lists(
    st.builds(
        record, st.sampled_from("ab"), st.integers(1, 2), st.integers(0, 3), st.sampled_from(list(Status))
    ),
    max_size=24,
)
ENOUGH = Limits(updates_per_s_max=100.0, newcomers_per_s_max=100.0)


def settled(records: list[Record]) -> dict[str, object]:
    """What is believed after all of them, all addresses being known, and after the time to refute."""
    v = view(ENOUGH)
    for first in (record("a"), record("b"), *records, *records):
        v.hear(first)
    v.core.now_s += 1e6
    v.judge(1.0)
    return {m.name: (m.epoch, m.incarnation, min(m.status, DEAD)) for m in v.members()}


@given(RECORDS, st.randoms(use_true_random=False))
def test_the_order_of_hearing_does_not_matter(records: list[Record], random: object) -> None:
    shuffled = list(records)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert settled(records) == settled(shuffled)


@given(RECORDS)
def test_beliefs_only_grow(records: list[Record]) -> None:
    v, last = view(ENOUGH), {}
    for r in records:
        v.hear(r)
        for member in v.members():
            assert member.version >= last.get(member.name, member.version)
            last[member.name] = member.version
        live = {m.name for m in v.members() if m.status < DEAD}
        assert set(v.live) == live and len(v.live) == len(live)
        assert set(v.graves) == {m.name for m in v.members()} - live
        assert set(v.suspects) == {m.name for m in v.members() if m.status is SUSPECT}


@pytest.mark.parametrize(
    ("first", "then", "becomes"),
    [  # SWIM, section 4.2: the order of overriding
        ((0, ALIVE), (0, ALIVE), (0, ALIVE)),
        ((0, ALIVE), (1, ALIVE), (1, ALIVE)),
        ((1, ALIVE), (0, SUSPECT), (1, ALIVE)),
        ((1, ALIVE), (1, SUSPECT), (1, SUSPECT)),
        ((1, SUSPECT), (1, ALIVE), (1, SUSPECT)),
        ((1, SUSPECT), (2, ALIVE), (2, ALIVE)),
        ((1, SUSPECT), (0, DEAD), (1, SUSPECT)),
        ((1, ALIVE), (1, LEFT), (1, LEFT)),
        ((1, LEFT), (1, DEAD), (1, LEFT)),
        ((1, ALIVE), (1, DEAD), (1, SUSPECT)),  # here: there is always time to refute
        ((1, SUSPECT), (1, DEAD), (1, SUSPECT)),
    ],
)
def test_what_overrides_what(
    first: tuple[int, Status], then: tuple[int, Status], becomes: tuple[int, Status]
) -> None:
    v = view(ENOUGH)
    v.hear(record("a"))
    v.hear(record("a", 1, *first))
    v.hear(record("a", 1, *then))
    (member,) = v.members()
    assert (member.incarnation, member.status) == becomes


def test_hearsay_of_a_death_kills_no_one_however_often_it_is_heard() -> None:
    v = view()
    v.hear(record("a"))
    for _ in range(3):
        v.hear(record("a", 1, 0, DEAD))
    assert next(v.members()).status is SUSPECT
    v.hear(record("a", 1, 1))
    assert next(v.members()).status is ALIVE


def test_the_dead_of_whom_nothing_is_known_are_ignored() -> None:
    v = view()
    for status in (SUSPECT, DEAD, LEFT):
        v.hear(record("x", status=status))
    assert not list(v.members())


def test_tables_have_limits_and_forgotten_ones_must_show_themselves() -> None:
    v = view(Limits(members_max=4, graves_max=3, newcomers_per_s_max=100.0))
    for i in range(6):
        v.hear(record(f"n{i}", epoch=10 + i))
    assert len(v.live) == 4
    assert any(isinstance(e, Remarked) and e.what == "crew full" for e in v.core.effects)
    for i in range(4):
        v.hear(record(f"n{i}", 10 + i, 1, LEFT))
    assert len(v.graves) == 3 and len(list(v.members())) == 3
    v.core.effects.clear()
    v.hear(record("n0", epoch=10))  # a rumour, perhaps a very old one
    assert "n0" not in v.entries
    (challenge,) = v.core.effects
    assert isinstance(challenge, Transmit) and challenge.dest == ("10.0.1.10", 4000)
    v.hear(record("later", epoch=99))
    assert "later" in v.entries


def test_one_teller_brings_no_flood_of_names() -> None:
    v = view(Limits(newcomers_per_s_max=8.0))
    v.hear(record("teller"))
    teller = v.entries["teller"]
    for i in range(50):
        v.hear(record(f"n{i:02d}"), teller)
    assert len(v.live) == 9
    assert any(isinstance(e, Remarked) and e.what == "flooding" for e in v.core.effects)
    v.core.now_s += 1.0
    v.hear(record("n40"), teller)
    assert len(v.live) == 10


def test_one_member_brings_no_flood_of_news_about_itself_but_may_always_refute() -> None:
    v = view()
    v.hear(record("a"))
    for i in range(1, 60):
        v.hear(record("a", 1, i))
    assert next(v.members()).incarnation == 8
    assert sum(isinstance(e, Changed) for e in v.core.effects) == 9
    v.hear(record("a", 1, 60, SUSPECT))
    v.hear(record("a", 1, 61))
    assert next(v.members()).incarnation == 61


def test_unsound_records_are_not_taken() -> None:
    v = view(Limits(metadata_bytes=4))
    good = record("a")
    for bad in (
        msgspec.structs.replace(good, host=""),
        msgspec.structs.replace(good, port=0),
        msgspec.structs.replace(good, epoch=0),
        msgspec.structs.replace(good, metadata=bytes(5)),
        msgspec.structs.replace(good, name="é" * 33),
    ):
        v.hear(bad)
    assert not v.live and v.core.counts["unsound"] == 5


def test_an_accusation_of_oneself_is_refuted_and_doubted() -> None:
    v = view()
    v.hear(record("me", 100, 0, SUSPECT))
    assert (v.mine.incarnation, v.mine.status, v.health.score) == (1, ALIVE, 1)
    v.hear(record("me", 100, 0, DEAD))  # old: it is refuted already
    assert v.mine.incarnation == 1
    v.hear(record("me", 100, 7, DEAD))
    assert v.mine.incarnation == 8
    v.hear(record("me", 99, 50, DEAD))  # of the process that had the name before
    assert v.mine.incarnation == 8


def test_a_later_process_of_ones_own_name_ends_this_one() -> None:
    v = view()
    v.hear(record("me", 101))
    (failed,) = [e for e in v.core.effects if isinstance(e, Failed)]
    assert "another peer is called 'me'" in failed.reason and "10.0.1.101:4000" in failed.reason


def test_gossip_fits_and_tells_first_what_was_told_least() -> None:
    v = view(Limits(newcomers_per_s_max=1000.0))
    for i in range(100):
        v.hear(record(f"n{i:03d}"))
    seen: dict[bytes, int] = {}
    for _ in range(40):
        gossip = v.gossip("n000")
        assert sum(map(len, map(bytes, gossip))) <= Limits().gossip_bytes
        for raw in gossip:
            seen[bytes(raw)] = seen.get(bytes(raw), 0) + 1
    assert len(seen) == 101 and max(seen.values()) - min(seen.values()) <= 4


def test_the_accused_hears_of_it_first() -> None:
    v = view()
    for name in ("a", "b"):
        v.hear(record(name))
    for _ in range(60):
        v.gossip(None)
    v.accuse(v.entries["a"])
    for _ in range(60):
        v.gossip(None)
    assert v.gossip("a")[0] == v.entries["a"].raw


def test_the_accused_hears_of_it_first_with_a_request_for_all_it_knows() -> None:
    """Its answer refutes the accusation before this peer has believed it."""
    core, health = Core(ME, Limits()), Health()
    v = View(core, health)
    prober = Prober(core, v, health)
    for name in ("a", "b"):
        v.hear(record(name))
    v.accuse(v.entries["a"])
    for _ in range(60):
        v.gossip(None)
    core.effects.clear()
    Admission(core, v, prober, Persons(core, v, prober, None)).pull(v.entries["a"])
    (sent,) = [effect for effect in core.effects if isinstance(effect, Transmit)]
    opened = Seal(ME.key, v.entries["a"].member.epoch).open(sent.data)
    assert opened is not None and isinstance(opened.message, Pull)
    first = opened.message.gossip[0]
    assert (first.name, first.status) == ("a", SUSPECT)


def test_pages_hold_all_the_living_once() -> None:
    v = view(Limits(newcomers_per_s_max=1000.0))
    for i in range(70):
        v.hear(record(f"n{i:02d}"))
    v.hear(record("n03", 1, 0, SUSPECT))
    v.hear(record("n04", 1, 1, LEFT))
    names, after, more = [], "", True
    while more:
        raws, more = v.page(after)
        page = [msgspec.msgpack.decode(raw, type=Record) for raw in raws]
        assert all(r.status == ALIVE and r.port for r in page)
        names += [r.name for r in page]
        after = names[-1]
    assert names == sorted(["me", *v.live])


# -- How long a suspect has


def test_a_suspicion_that_others_share_is_shorter() -> None:
    suspicion = Suspicion(10.0, {1: None}, wanted=3, periods=4.0)
    spans = [suspicion.until_s(1.0, 1.0, 0.0) - 10.0]
    for accuser in (2, 2, 3, 4, 5):
        suspicion.add((accuser,))
        spans.append(suspicion.until_s(1.0, 1.0, 0.0) - 10.0)
    assert spans[0] == 10.0 and spans[1] == spans[2] and spans[4] == spans[5] == 4.0
    assert spans == sorted(spans, reverse=True)
    # Lifeguard, section IV-B: max - (max - min) log(C + 1) / log(K + 1), with C = 1 of K = 3
    assert spans[1] == pytest.approx(10.0 - 6.0 * 0.5)


def test_hearsay_of_a_death_needs_no_further_accusers() -> None:
    certain = Suspicion(0.0, {}, wanted=3, periods=4.0, certain=True)
    assert certain.until_s(1.0, 1.0, 0.5) == 5.0
    assert replace(certain, certain=False).until_s(1.0, 1.0, 0.5) == 11.0


def test_a_peer_in_trouble_waits_longer_before_it_accuses_and_believes_others_as_soon() -> None:
    """In groups of a few peers one that takes a dead peer for alive for longer meets nobody meanwhile."""
    v = view(ENOUGH)
    for name in "abc":
        v.hear(record(name))
    for _ in range(4):
        v.health.worse()
    v.accuse(v.entries["a"])  # its own accusation
    v.hear(record("b", status=DEAD))  # what another has declared
    v.core.now_s += 1.01 * shortest_periods(4)
    v.judge(1.0)
    assert [v.entries[name].member.status for name in "abc"] == [SUSPECT, DEAD, ALIVE]
    v.core.now_s = 2.4 * 5.0 * shortest_periods(4)  # nobody shares it: two and a half times as long
    v.judge(1.0)
    assert v.entries["a"].member.status is SUSPECT
    v.core.now_s = 2.6 * 5.0 * shortest_periods(4)
    v.judge(1.0)
    assert v.entries["a"].member.status is DEAD


def test_how_many_and_how_long_follow_the_crews_size() -> None:
    assert [confirmations_wanted(n) for n in (1, 2, 3, 4, 5, 6, 100)] == [0, 0, 0, 1, 2, 3, 3]
    assert [shortest_periods(n) for n in (1, 2, 4, 64, 1024)] == [2.5, 2.5, 3.0, 5.0, 7.0]


@pytest.mark.parametrize("host", ["127.0.0.1%x", "255.255.255.255", "otters.example", "::1", "224.0.0.9"])
def test_a_member_that_listens_where_nothing_can_be_sent_is_not_taken_and_named(host: str) -> None:
    mine = view()
    mine.admit(msgspec.structs.replace(record("p1"), host=host))
    mine.hear(record("p2"))
    mine.hear(msgspec.structs.replace(record("p2", incarnation=3), host=host))
    mine.hear(msgspec.structs.replace(record("p2", epoch=2), host=host))
    assert {m.name: (m.epoch, m.incarnation) for m in mine.members()} == {"p2": (1, 0)}
    told = [effect for effect in mine.core.finish() if isinstance(effect, Remarked)]
    assert [(told.what, told.name) for told in told] == [
        ("bad address", "p1"), ("bad address", "p2"), ("bad address", "p2"),
    ]  # fmt: skip
    assert told[0].detail.startswith(f"listens where nothing can be sent: '{host}', port ")


LAST = (1 << 62) - 1
"""The highest incarnation that travels."""


def of(name: str, incarnation: int, status: Status, epoch: int = 1) -> Record:
    if status is ALIVE:
        return Record(name, epoch, incarnation, status, "10.0.0.1", 4000, b"")
    return Record(name, epoch, incarnation, status, accusers=(7,) if status is SUSPECT else ())


@pytest.mark.parametrize("status", list(Status))
def test_an_incarnation_that_nobody_can_refute_is_not_believed(status: Status) -> None:
    v = view(ENOUGH)
    v.hear(of("a", 3, ALIVE))
    v.hear(of("a", LAST, status))
    assert [(m.incarnation, m.status) for m in v.members()] == [(3, ALIVE)]
    v.hear(of("stranger", LAST, status))
    assert v.admit(of("another", LAST, ALIVE)) is None
    v.hear(of("a", LAST, status, epoch=2))  # another process of the name
    assert [(m.name, m.epoch) for m in v.members()] == [("a", 1)]
    assert v.core.counts["unbelievable"] >= 2
    v.hear(of("a", 4, ALIVE))
    assert [m.incarnation for m in v.members()] == [4]


@pytest.mark.parametrize("status", [ALIVE, SUSPECT, DEAD, LEFT])
def test_what_is_said_of_this_peer_it_can_always_refute(status: Status) -> None:
    """Whatever others believe of it they take its word against it: both go by one rule."""
    v, other = view(ENOUGH), view(ENOUGH)
    other.mine = replace(other.mine, name="other")
    other.hear(of("me", 0, ALIVE, ME.epoch))
    v.hear(of("me", LAST, status, ME.epoch))
    assert v.mine.incarnation == 0
    for incarnation in (5, LEAP_MAX, 2 * LEAP_MAX):
        lie = of("me", incarnation, status, ME.epoch)
        v.hear(lie)
        other.hear(lie)
        assert v.mine.incarnation == incarnation + 1 and v.mine.status is ALIVE
        other.hear(replace_record(v))
        if status is not LEFT:
            assert [(m.incarnation, m.status) for m in other.members()] == [(incarnation + 1, ALIVE)]


def replace_record(v: View) -> Record:
    """What a peer says of itself."""
    return Record(v.mine.name, v.mine.epoch, v.mine.incarnation, v.mine.status, "10.0.0.1", 4000, b"")
