"""Seats: cards, claims, and whole crews that agree on who averages under which number."""

from __future__ import annotations

import itertools
from dataclasses import replace as changed_to
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ragtag.core.faults import Faults, Loss, Partition, Window
from ragtag.core.types import PEERS_MAX, SEATS_MAX, Joined, Left, Noted, Role, Visits
from ragtag.core.wire import VERSION
from ragtag.protocols.membership.probe import ANNOUNCED_MAX
from ragtag.protocols.membership.roster import (
    CARD_BYTES_MAX,
    NO_SEAT,
    Card,
    Reach,
    Roster,
    Seating,
    Unseated,
    decode_card,
    encode_card,
)
from ragtag.protocols.membership.types import Limits, Member, Status
from ragtag.simulation.worlds.members import name_of
from tests.protocols.rostered import SeatedWorld, card_of

LINE = Faults(latency_s=0.005, jitter_s=0.001)
CARDS = st.builds(
    Card,
    wire=st.integers(0, 255),
    seat=st.integers(NO_SEAT, SEATS_MAX - 1),
    term=st.integers(0, (1 << 31) - 1),
    epoch=st.integers(0, (1 << 32) - 1),
    averaging=st.booleans(),
    host=st.text(st.characters(codec="utf-8"), min_size=1, max_size=40),
    port=st.integers(1, 65535),
    state_port=st.integers(0, 65535),
    founded=st.integers(1, SEATS_MAX),
    seed=st.integers(0, (1 << 62) - 1),
    seats=st.integers(1, SEATS_MAX),
)


def member(name: str, card: Card, epoch: int = 100, status: Status = Status.ALIVE) -> Member:
    return Member(name, ("10.0.0.1", 4000), epoch, 0, status, encode_card(card))


def seated(seat: int, *, averaging: bool = True, term: int = 0, founded: int = 3, **of: object) -> Card:
    return card_of(seat, founded, seat=seat, averaging=averaging, term=term, **of)


def roster(name: str = "me", epoch: int = 50) -> Roster:
    return Roster(name, epoch)


def kinds(effects: list[object]) -> list[object]:
    return [(e.what, e.peer) if isinstance(e, Noted) else type(e) for e in effects]


# -- Cards


@given(CARDS)
def test_a_card_comes_out_as_it_went_in(card: Card) -> None:
    data = encode_card(card)
    assert len(data) <= CARD_BYTES_MAX == Limits().metadata_bytes
    assert decode_card(data) == card


def test_a_host_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the host 'aaa.* is too long to be told; give its address"):
        encode_card(card_of(0, 1, host="a" * 255))


@given(st.binary(max_size=300))
@example(b"")
@example(b"\x99" * 9)
@example(b"\x91" * 5000)
def test_what_is_no_card_is_none(data: bytes) -> None:
    card = decode_card(data)
    assert card is None or decode_card(encode_card(card)) == card


@given(CARDS, st.data())
def test_a_card_that_was_changed_is_none_or_in_range(card: Card, data: st.DataObject) -> None:
    raw = bytearray(encode_card(card))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    read = decode_card(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    if read is not None:
        assert NO_SEAT <= read.seat < SEATS_MAX and 1 <= read.port <= 65535 and read.term >= 0
        assert 1 <= read.founded <= SEATS_MAX and 1 <= read.seats <= SEATS_MAX


@pytest.mark.parametrize(
    "wrong",
    [
        {"seat": SEATS_MAX}, {"seat": -2}, {"term": -1}, {"term": 1 << 31}, {"port": 0}, {"port": 65536},
        {"founded": 0}, {"founded": SEATS_MAX + 1}, {"seed": -1}, {"seed": 1 << 62}, {"host": ""},
        {"seats": 0}, {"seats": SEATS_MAX + 1}, {"wire": 256}, {"averaging": 1}, {"epoch": -1},
        {"epoch": 1 << 32},
    ],
)  # fmt: skip
def test_a_field_out_of_its_range_makes_no_card(wrong: dict[str, object]) -> None:
    assert decode_card(msgspec.msgpack.encode(replace(seated(1), **wrong))) is None


def test_a_card_that_says_nothing_of_seats_is_of_a_crew_of_64_at_most() -> None:
    fields = msgspec.msgpack.decode(encode_card(seated(1, seats=SEATS_MAX)))
    assert fields[10:] == [SEATS_MAX, b"", "", 0, b"", Role.TRAINER]
    read = decode_card(msgspec.msgpack.encode(fields[:10]))
    assert read is not None and read == seated(1) and read.seats == PEERS_MAX


class CardBefore(msgspec.Struct, array_like=True, frozen=True):
    """As it was when a crew had 64 seats at most."""

    wire: int
    seat: Annotated[int, msgspec.Meta(ge=NO_SEAT, lt=PEERS_MAX)]
    term: int
    epoch: int
    averaging: bool
    host: str
    port: int
    state_port: int
    founded: int
    seed: int


def test_who_knows_of_64_seats_only_reads_newer_cards_and_takes_none_of_a_larger_crew() -> None:
    decode = msgspec.msgpack.Decoder(CardBefore).decode
    mine = seated(63, seats=SEATS_MAX)
    read = decode(encode_card(mine))
    assert [getattr(read, name) for name in read.__struct_fields__] == [
        getattr(mine, name) for name in read.__struct_fields__
    ]
    with pytest.raises(msgspec.ValidationError):
        decode(encode_card(seated(64)))


# -- One roster


def test_who_comes_is_reached_visits_and_joins() -> None:
    mine = roster()
    came = mine.changed(member("a", seated(1, averaging=False)), None)
    assert kinds(came) == [Reach, ("comes", 1), Visits]
    assert came[0] == Reach(1, ("10.0.0.1", 5001), 201)
    assert kinds(mine.changed(member("a", seated(1)), Status.ALIVE)) == [("takes part", 1), Joined]
    assert mine.changed(member("a", seated(1)), Status.ALIVE) == []  # it refuted something
    assert mine.seat_of("a") == 1 and mine.seat_of("b") == NO_SEAT
    moved = mine.changed(member("a", seated(1, host="10.9.9.9")), Status.ALIVE)
    assert moved == [Reach(1, ("10.9.9.9", 5001), 201)]


def test_who_goes_is_said_to_have_left_or_declared_dead_once() -> None:
    for status, what in ((Status.LEFT, "has left"), (Status.DEAD, "declared dead")):
        mine = roster()
        mine.changed(member("a", seated(1)), None)
        assert mine.changed(member("a", seated(1), status=Status.SUSPECT), Status.ALIVE) == []
        gone = member("a", seated(1), status=status)
        assert kinds(mine.changed(gone, Status.SUSPECT)) == [(what, 1), Left]
        assert mine.changed(gone, status) == []
        assert not mine.seats[1].live and mine.seat_of("a") == 1


def test_who_was_declared_dead_and_is_not_is_back_at_the_same_address() -> None:
    for was in (Status.DEAD, Status.SUSPECT):  # suspected again before it could refute
        mine = roster()
        mine.changed(member("a", seated(1)), None)
        mine.changed(member("a", seated(1), status=Status.DEAD), Status.ALIVE)
        back = mine.changed(member("a", seated(1)), was)
        assert kinds(back) == [("back", 1), Joined]
        assert back[-1] == Joined(1, same=True)
        (joined,) = (
            e for e in mine.changed(member("a", seated(1), 101), Status.ALIVE) if isinstance(e, Joined)
        )
        assert not joined.same  # the next process of that name


def test_the_death_of_an_earlier_process_of_a_name_changes_nothing() -> None:
    mine = roster()
    mine.changed(member("a", seated(1), epoch=200), None)
    assert mine.changed(member("a", seated(1), epoch=100, status=Status.DEAD), Status.ALIVE) == []
    assert mine.seats[1].live


def test_a_restarted_process_leaves_its_seat_and_takes_one_in_a_higher_term() -> None:
    mine = roster()
    mine.changed(member("a", seated(1, term=4)), None)
    assert kinds(mine.changed(member("a", card_of(1, 1), epoch=200), Status.ALIVE)) == [Left]
    assert not mine.seats[1].live
    mine.changed(member("b", seated(0)), None)
    assert mine.free() == (1, 5)
    again = mine.changed(member("a", seated(1, averaging=False, term=5), epoch=200), Status.ALIVE)
    assert kinds(again) == [Reach, ("comes", 1), Visits]


def test_a_member_without_a_card_or_of_another_wire_format_is_refused_by_name() -> None:
    mine = roster()
    other = mine.changed(member("a", seated(1, wire=VERSION + 1)), None)
    assert other == [
        Noted(
            "refused",
            -1,
            f"a has wire format {VERSION + 1}, {VERSION} here; install the same Ragtag everywhere",
        )
    ]
    bare = mine.changed(changed_to(member("b", seated(1)), metadata=b"otter"), None)
    assert bare == [Noted("refused", -1, "b has no card; install the same Ragtag everywhere")]
    assert (
        mine.unfit == f"a has wire format {VERSION + 1}, {VERSION} here; install the same Ragtag everywhere"
    )
    mine.changed(member("c", seated(2)), None)
    assert mine.unfit == "", "there is one to average with"
    turned = mine.changed(changed_to(member("c", seated(2)), metadata=b""), Status.ALIVE)
    assert kinds(turned) == [("refused", 2), Left]


KEY = b"\1" + bytes(32)


@pytest.mark.parametrize("seals", [False, True])
def test_a_peer_that_seals_and_one_that_does_not_have_nothing_to_do_with_each_other(seals: bool) -> None:
    mine = Roster("me", 1, seals)
    (noted,) = mine.changed(member("a", seated(1, key=b"" if seals else KEY)), None)
    assert isinstance(noted, Noted) and (noted.what, noted.peer) == ("refused", -1)
    assert "RAGTAG_SEAL" in noted.detail and mine.unfit == noted.detail and not mine.seats
    assert kinds(mine.changed(member("b", seated(2, key=KEY if seals else b"")), None))[-1] is Joined
    assert mine.unfit == ""


def test_a_key_is_found_by_the_address_where_its_peer_takes_data() -> None:
    mine = Roster("me", 1, seals=True)
    card = seated(1, key=KEY)
    mine.changed(member("a", card), None)
    assert mine.at((card.host, card.port)) == (1, KEY)
    assert mine.at((card.host, card.port + 1)) is None
    mine.changed(changed_to(member("a", card), status=Status.DEAD), Status.ALIVE)
    assert mine.at((card.host, card.port)) is None


BAD_HOSTS = ["127.0.0.1%x", "255.255.255.255", "otters.example", "::1", "224.0.0.9", "0.0.0.0"]


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_a_member_that_takes_data_where_nothing_can_be_sent_is_refused_by_name(host: str) -> None:
    mine = roster()
    mine.claim(seated(0))
    refused = mine.changed(member("a", seated(1, host=host)), None)
    assert kinds(refused) == [("refused", -1)] and not mine.seats
    assert refused[0].detail.startswith(f"a takes data where nothing can be sent: '{host}', port ")
    mine.changed(member("b", seated(2)), None)
    turned = mine.changed(member("b", seated(2, host=host)), Status.ALIVE)
    assert kinds(turned) == [("refused", 2), Left]


def test_peers_behind_one_router_reach_each_other_within_their_network() -> None:
    """And all others where the router shows them: few routers send back what came from inside."""
    home = {"host": "203.0.113.9", "inner_host": "192.168.1.7", "inner_port": 5000}
    mate = replace(seated(1), port=6001, **home)
    other = replace(seated(2), host="198.51.100.1", port=6002, inner_host="192.168.1.8", inner_port=5001)
    mine = replace(seated(0), port=6000, **{**home, "inner_host": "192.168.1.6"})
    for claimed, way in ((mine, ("192.168.1.7", 5000)), (seated(0), ("203.0.113.9", 6001))):
        one = roster()
        one.claim(claimed)
        assert Reach(1, way, mate.epoch) in one.changed(member("mate", mate), None)
        assert Reach(2, ("198.51.100.1", 6002), other.epoch) in one.changed(member("other", other), None)
        assert one.at(way) == (1, mate.key) and one.at(("198.51.100.1", 6002)) == (2, other.key)
        assert one.at(("192.168.1.8", 5001)) is None  # an address in another network


def test_seats_of_the_dead_are_taken_first_then_new_ones_until_there_are_none() -> None:
    mine = roster()
    for seat in range(3):
        mine.changed(member(f"p{seat}", seated(seat)), None)
    assert mine.free() == (3, 1)
    mine.changed(member("p1", seated(1), status=Status.DEAD), Status.SUSPECT)
    assert mine.free() == (1, 1)
    for seat in range(PEERS_MAX):
        mine.changed(member(f"q{seat}", seated(seat, term=1)), None)
    with pytest.raises(RuntimeError, match="all 64 seats of the crew are taken; larger crews average in gr"):
        mine.free()


def test_more_seats_than_64_are_free_only_where_all_that_average_say_so() -> None:
    mine = roster()
    for seat in range(PEERS_MAX):
        mine.changed(member(f"p{seat}", seated(seat, seats=SEATS_MAX)), None)
    assert (mine.room, mine.free()) == (SEATS_MAX, (PEERS_MAX, 1))
    assert mine.free(after=3) == (PEERS_MAX + 3, 1)
    mine.changed(member("comer", seated(PEERS_MAX - 1, averaging=False)), None)
    assert mine.room == SEATS_MAX  # who only comes decides nothing
    mine.changed(member("p3", seated(3, seats=PEERS_MAX), epoch=101), Status.ALIVE)
    assert mine.room == PEERS_MAX
    with pytest.raises(RuntimeError, match=r"all 64 seats .* give averager=ragtag.Moshpit\(group=8\)"):
        mine.free()
    mine.changed(member("far", seated(70)), None)  # there is one already, whatever they say
    assert mine.room == SEATS_MAX


def test_a_crew_that_was_founded_large_has_seats_up_to_the_most_there_can_be() -> None:
    mine = roster()
    for seat in range(SEATS_MAX):
        assert mine.room == (SEATS_MAX if seat else PEERS_MAX)
        mine.changed(member(f"p{seat}", seated(seat, founded=100)), None)
    with pytest.raises(RuntimeError, match="all 1024 seats of the crew are taken; a crew has no more"):
        mine.free()
    mine.changed(member("p700", seated(700, founded=100), status=Status.DEAD), Status.SUSPECT)
    assert mine.free(after=5) == (700, 1)


def test_in_a_small_crew_nobody_leaves_free_seats_to_others() -> None:
    mine = roster()
    for seat in range(3):
        mine.changed(member(f"p{seat}", seated(seat)), None)
    assert mine.free(after=4) == (3, 1)


@given(st.integers(2, 12), st.randoms(use_true_random=False))
def test_those_that_lost_one_seat_claim_different_ones_next(n: int, random: Any) -> None:
    claims = [(f"c{i}", 10 + i, seated(100, averaging=False, founded=100)) for i in range(n)]
    places = []
    for name, epoch, card in claims:
        mine = Roster(name, epoch)
        others = [(other, *rest) for other, *rest in claims if other != name]
        random.shuffle(others)
        mine.changed(member("holder", seated(1, founded=100)), None)
        for other, started, told in others:
            mine.changed(member(other, told, started), None)
        mine.claim(card)
        if mine.contested():
            places.append(mine.free(max(0, mine.rivals(card) - 1))[0])
    assert len(places) == n - 1 == len(set(places))


# -- Conflicts

CLAIMS = [
    ("old", 10, seated(1)),
    ("later", 20, seated(1)),
    ("next term", 5, seated(1, term=1)),
    ("older comer", 30, seated(1, averaging=False, term=1)),
    ("comer", 40, seated(1, averaging=False, term=1)),
    ("comer in a later term", 60, seated(1, averaging=False, term=2)),
]
RANKED = ["next term", "later", "old", "comer in a later term", "older comer", "comer"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(6), 6))[::7])
def test_of_claims_to_one_seat_all_decide_alike_in_whatever_order_they_hear(order: tuple[int, ...]) -> None:
    mine = roster()
    for i in order:
        name, epoch, card = CLAIMS[i]
        mine.changed(member(name, card, epoch), None)
    for holder in RANKED:
        assert mine.seats[1].name == holder and mine.seats[1].live
        name, epoch, card = next(claim for claim in CLAIMS if claim[0] == holder)
        mine.changed(member(name, card, epoch, Status.LEFT), Status.ALIVE)
    assert not mine.seats[1].live


def test_a_seat_that_is_claimed_by_another_is_noted_and_its_holder_stays() -> None:
    mine = roster()
    mine.changed(member("a", seated(1)), None)
    comer = member("b", seated(1, averaging=False, term=1))
    assert mine.changed(comer, None) == [Noted("seat taken", 1, "b claims the seat of a")]
    assert mine.changed(comer, Status.ALIVE) == []  # once
    # the other's death was heard of elsewhere first: the newcomer is there already
    died = mine.changed(member("a", seated(1), status=Status.DEAD), Status.SUSPECT)
    assert kinds(died) == [("declared dead", 1), Left, Reach, ("comes", 1), Visits]


def test_whose_seat_was_given_away_is_told_once_and_whose_was_not_is_left_alone() -> None:
    mine = roster("me", 50)
    mine.claim(seated(1))
    assert mine.changed(member("weak", seated(1, averaging=False, term=9)), None) == []
    assert mine.changed(member("older", seated(1), 20), None) == [] and mine.contested() == ""
    assert mine.changed(member("heir", seated(1, term=1)), None) == [Unseated("seat 1 is heir's")]
    assert mine.contested() == "seat 1 is heir's"
    assert mine.changed(member("heir", seated(1, term=1)), Status.ALIVE) == []
    mine.claim(replace(seated(1), seat=NO_SEAT, averaging=False))
    assert mine.contested() == "" and mine.seats[1].name == "heir"


def test_a_newcomer_that_has_settled_is_told_when_its_seat_is_anothers_after_all() -> None:
    mine = roster("me", 50)
    mine.claim(seated(1, averaging=False, term=1))
    assert mine.changed(member("back", seated(1), 20), None) == [Unseated("seat 1 is back's")]


# -- A newcomer's way


def test_a_newcomer_waits_for_the_list_claims_and_settles_when_nobody_objects() -> None:
    mine = roster()
    seating = Seating(mine, card_of(9, 1), 10.0, 0.5)
    mine.changed(member("a", seated(0, seed=77)), None)
    assert seating.look(10.9, 0.5, 2) is None and not seating.claimed
    mine.changed(member("b", seated(1)), None)
    claim = seating.look(11.0, 0.5, 3)
    assert claim is not None
    assert (claim.seat, claim.term, claim.averaging, claim.founded, claim.seed) == (2, 1, False, 3, 77)
    mine.claim(claim)
    assert seating.look(11.9, 0.5, 3) is None and not seating.settled
    assert seating.until_s == 11.0 + 2 * 0.5
    assert seating.look(12.0, 0.5, 3) is None and seating.settled


def test_a_claim_waits_by_the_period_as_it_is_known_when_it_is_looked_at() -> None:
    """A newcomer that was let in before it could measure a round trip claimed by a guess: it sat for 10 s."""
    mine = roster()
    mine.changed(member("a", seated(0)), None)
    seating = Seating(mine, card_of(9, 1), 10.0, 5.0)
    claim = seating.look(10.0, 5.0, 2, whole=True)
    assert claim is not None and seating.until_s == 20.0
    mine.claim(claim)
    assert seating.look(10.1, 0.15, 2) is None and not seating.settled
    assert seating.until_s == pytest.approx(10.3)
    assert seating.look(10.3, 0.15, 2) is None and seating.settled


def test_a_newcomer_that_has_the_whole_list_claims_at_once() -> None:
    mine = roster()
    mine.changed(member("a", seated(0)), None)
    seating = Seating(mine, card_of(9, 1), 10.0, 0.5)
    claim = seating.look(10.0, 0.5, 2, whole=True)
    assert claim is not None and claim.seat == 1


def test_in_a_crew_that_cannot_be_told_at_once_a_claim_waits_for_gossip() -> None:
    mine = roster()
    mine.changed(member("a", seated(0)), None)
    seating = Seating(mine, card_of(9, 1), 10.0, 0.5)
    assert seating.look(10.0, 0.5, 4 * ANNOUNCED_MAX, whole=True) is not None
    assert seating.until_s == 10.0 + (2 + 2) * 0.5


def test_a_newcomer_whose_claim_is_contested_claims_another_seat_at_once() -> None:
    mine = roster()
    mine.changed(member("a", seated(0)), None)
    seating = Seating(mine, card_of(9, 1), 0.0, 0.1)
    claim = seating.look(0.2, 0.1, 2)
    assert claim is not None and claim.seat == 1
    mine.claim(claim)
    mine.changed(member("b", seated(1, averaging=False, term=1), 10), None)
    again = seating.look(0.25, 0.1, 3)
    assert again is not None and again.seat == 2 and seating.until_s == pytest.approx(0.45)


def test_where_nobody_has_a_seat_the_first_one_begins_the_crew() -> None:
    seating = Seating(roster(), card_of(9, 1), 0.0, 0.1)
    claim = seating.look(0.2, 0.1, 2)
    assert claim is not None and (claim.seat, claim.averaging, claim.founded) == (0, True, 1)


# -- Crews in virtual time


def quiet(crew: SeatedWorld, by_s: float) -> None:
    """Run until all agree, by ``by_s`` at the latest; and a while longer, for it must last."""
    while crew.world.now_s < by_s and not crew.is_quiet():
        crew.run(crew.world.now_s + 1.0)
    crew.run(crew.world.now_s + 3.0)
    crew.check_quiet()


def test_founders_agree_and_newcomers_take_new_seats_one_by_one() -> None:
    crew = SeatedWorld(3, LINE, 1)
    crew.run(5.0)
    crew.check_quiet()
    for peer in (3, 4):
        crew.come(peer, (peer % 3,))
        crew.run(crew.world.now_s + 10.0)
        crew.check_quiet()
        assert crew.members[peer].mine.seat == peer
    assert {m.mine.founded for m in crew.running()} == {3} and {m.mine.seed for m in crew.running()} == {7}


@pytest.mark.parametrize("seed", range(8))
def test_newcomers_that_claim_one_seat_at_once_end_with_different_seats(seed: int) -> None:
    crew = SeatedWorld(3, LINE, seed)
    crew.run(5.0)
    for peer in (5, 4, 3):  # the same instant
        crew.come(peer, (peer - 3,))
    crew.run(30.0)
    crew.check_quiet()
    assert sorted(m.mine.seat for m in crew.running()) == [0, 1, 2, 3, 4, 5]
    claims = [crew.members[peer].seating for peer in (3, 4, 5)]
    assert all(seating is not None and seating.settled for seating in claims)
    assert any(m.notes("seat taken") for m in crew.running())  # they did claim the same one


def test_the_seat_of_a_dead_one_goes_to_the_next_newcomer_and_of_one_that_left() -> None:
    crew = SeatedWorld(3, LINE, 2)
    crew.run(5.0)
    crew.world.crash(1)
    crew.world.leave(2)
    crew.run(30.0)
    assert crew.members[0].notes("declared dead") == [Noted("declared dead", 1, name_of(1))]
    assert crew.members[0].notes("has left") == [Noted("has left", 2, name_of(2))]
    crew.come(7, (0,))
    crew.come(8, (0,))
    crew.run(60.0)
    crew.check_quiet()
    assert sorted(m.mine.seat for m in crew.running()) == [0, 1, 2]
    assert all(m.mine.term == 1 for m in crew.running() if m.life.peer > 2)


def test_a_peer_that_is_cut_off_and_healed_keeps_its_seat_where_nobody_took_it() -> None:
    crew = SeatedWorld(4, Faults(latency_s=0.005, partitions=(Partition((3,), Window(10.0, 40.0)),)), 3)
    crew.run(40.0)
    assert all(len(crew.members[peer].notes("declared dead")) == 1 for peer in (0, 1, 2))
    quiet(crew, 120.0)
    for peer in (0, 1, 2):
        (back,) = crew.members[peer].notes("back")
        assert back == Noted("back", 3, f"{name_of(3)} was out of reach, and had been declared dead")
    assert not crew.members[3].unseated


@pytest.mark.parametrize("seed", range(4))
def test_a_seat_that_was_given_away_in_a_partition_is_its_new_holders_and_the_other_is_told(
    seed: int,
) -> None:
    crew = SeatedWorld(4, Faults(latency_s=0.005, partitions=(Partition((3,), Window(10.0, 60.0)),)), seed)
    crew.run(35.0)
    heir = crew.come(6, (0,))
    crew.run(60.0)
    assert heir.mine.seat == 3 and heir.mine.averaging and crew.members[3].settled  # two, on two sides
    quiet(crew, 150.0)
    assert crew.members[3].unseated == f"seat 3 is {name_of(6)}'s" and not heir.unseated
    crew.check_quiet()
    assert [type(t) for _, t in crew.members[3].told].count(Unseated) == 1
    crew.world.crash(6)  # the seat is free, and does not fall back to who gave it up
    crew.run(crew.world.now_s + 10.0)
    crew.check_quiet()
    assert 3 not in crew.members[0].view()


def test_a_holder_that_is_back_before_its_heir_takes_part_keeps_the_seat() -> None:
    crew = SeatedWorld(4, Faults(latency_s=0.005, partitions=(Partition((3,), Window(10.0, 60.0)),)), 5)
    crew._average = lambda member: None  # type: ignore[method-assign]  # it is still on its way
    crew.run(35.0)
    heir = crew.come(6, (0,))
    crew.run(60.0)
    assert heir.mine.seat == 3 and not heir.mine.averaging
    quiet(crew, 150.0)
    assert heir.unseated == f"seat 3 is {name_of(3)}'s" and not crew.members[3].unseated


HAPPENINGS = st.lists(
    st.tuples(
        st.floats(2.0, 20.0), st.sampled_from(["come", "crash", "leave", "restart"]), st.integers(1, 7)
    ),
    max_size=8,
)
CUTS = st.lists(
    st.tuples(
        st.frozensets(st.integers(0, 7), min_size=1, max_size=4), st.floats(2.0, 15.0), st.floats(1.0, 9.0)
    ),
    max_size=2,
)
Happening = tuple[float, str, int]
Cut = tuple[frozenset[int], float, float]


def storm(founders: int, loss: float, happen: list[Happening], cuts: list[Cut], seed: int) -> None:
    """A crew under random joins, crashes, restarts, leaves, loss and partitions: at last all agree."""
    partitions = tuple(Partition(side, Window(at_s, at_s + for_s)) for side, at_s, for_s in cuts)
    lossy = Loss(loss) if loss else None
    faults = Faults(latency_s=0.005, jitter_s=0.002, loss=lossy, partitions=partitions)
    crew = SeatedWorld(founders, faults, seed)
    entries = tuple(range(founders))

    def do(what: str, peer: int) -> None:
        running = crew.world.is_running(peer)
        if what == "come" and not running:
            crew.come(peer, entries)
        elif what == "restart":
            crew.world.crash(peer)
            crew.come(peer, tuple(other for other in entries if other != peer))
        elif running:
            (crew.world.crash if what == "crash" else crew.world.leave)(peer)

    for at_s, what, peer in happen:
        crew.world.at(at_s, lambda what=what, peer=peer: do(what, peer))  # type: ignore[misc]
    crew.run(25.0)
    quiet(crew, 150.0)
    told = [m for m in crew.all if m.unseated]
    assert all(m.mine.seat == NO_SEAT and not m.mine.averaging for m in told)
    if not cuts and not lossy:  # nobody was out of reach: no living member's seat went to another
        assert not told
        assert not [m for m in crew.all if m.notes("back")]


STORMS = st.tuples(
    st.integers(2, 4), st.sampled_from([0.0, 0.05, 0.2]), HAPPENINGS, CUTS, st.integers(0, 1000)
)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(STORMS)
def test_after_a_storm_all_agree_on_who_holds_which_seat(of: Any) -> None:
    storm(*of)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STORMS)
def test_after_many_storms_all_agree_on_who_holds_which_seat(of: Any) -> None:
    storm(*of)
