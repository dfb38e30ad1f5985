"""Who meets when a crew begins on Ray, and through whom those enter that come later."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.app.environment import place_from_environment
from ragtag.app.invitation.token import ADDRESSES_MAX, Token, decode
from ragtag.app.on_ray.register import PeerAddresses, Register


def arrival(port: int) -> PeerAddresses:
    return PeerAddresses(("192.0.2.1", port), ("192.0.2.1", port + 1))


def invitation(register: Register, number: int) -> Token:
    place = register.place(number)
    assert place.token is not None
    return decode(place.token)


def begun(n: int, came: int) -> Register:
    register = Register(n, "brave-otter", seed=7)
    for number in range(came):
        register.come(number, arrival(1000 * number + 1000))
    register.begin()
    return register


def test_those_that_have_come_know_each_other() -> None:
    register = begun(3, 3)
    assert register.complete
    for number in range(3):
        place = register.place(number)
        assert (place.rank, place.size, place.seed, place.token) == (number, 3, 7, None)
        assert place.peers == tuple(arrival(1000 * i + 1000).data for i in range(3))
        assert place.members == tuple(arrival(1000 * i + 1000).member for i in range(3))
        assert place_from_environment(place.variables()) is not None
    assert len({register.place(number).key for number in range(3)}) == 1


def test_numbers_that_are_missing_at_the_beginning_leave_no_gap() -> None:
    register = Register(4, "c")
    for number in (0, 2, 3):
        register.come(number, arrival(1000 * number + 1000))
    assert not register.complete
    register.begin()
    assert [register.place(number).rank for number in (0, 2, 3)] == [0, 1, 2]
    register.come(1, arrival(9000))
    assert register.place(1).token is not None


def test_a_peer_that_is_started_again_enters_through_those_that_live() -> None:
    register = begun(3, 3)
    register.gone(1)
    register.gone(2)
    register.come(1, arrival(9000))
    assert invitation(register, 1).addresses == (arrival(1000).member,)
    assert invitation(register, 1).key == register.place(0).key
    assert register.place(1).name == "peer-1-2"  # no other process has had this name
    assert register.place(0).token is None


def test_who_was_heard_last_is_asked_first() -> None:
    register = begun(12, 12)
    register.heard(4)
    register.heard(99)  # long gone
    register.come(12, arrival(20_000))
    addresses = invitation(register, 12).addresses
    assert len(addresses) == ADDRESSES_MAX
    assert addresses[0] == arrival(5000).member


def test_one_that_is_left_alone_begins_anew_by_its_own_invitation() -> None:
    register = begun(2, 2)
    register.gone(0)
    register.gone(1)
    register.come(1, arrival(9000))
    assert invitation(register, 1).addresses == (arrival(9000).member,)


def test_a_crew_of_one_begins_by_its_own_invitation_so_that_others_can_join() -> None:
    register = begun(3, 1)
    assert invitation(register, 0).addresses == (arrival(1000).member,)


@pytest.mark.parametrize("n", [0, -1, 1025])
def test_a_number_of_peers_out_of_range(n: int) -> None:
    with pytest.raises(ValueError, match="a crew has 1 to 1024"):
        Register(n, "c")


@given(st.lists(st.tuples(st.sampled_from(["come", "gone", "heard"]), st.integers(0, 5)), max_size=40))
def test_whoever_has_come_has_a_place_and_no_invitation_names_the_gone(events: list[tuple[str, int]]) -> None:
    register = begun(3, 2)
    last = {number: arrival(1000 * number + 1000) for number in range(2)}
    port = 10_000
    for what, number in events:
        if what == "come":
            port += 10
            last[number] = arrival(port)
            register.come(number, last[number])
        else:
            last = {n: a for n, a in last.items() if what == "heard" or n != number}
            (register.gone if what == "gone" else register.heard)(number)
        assert register.living == last.keys()
        for living in last:
            place = register.place(living)
            if place.token is None:
                assert place.peers is not None
                assert place.peers[place.rank] == last[living].data
            else:
                others = {a.member for n, a in last.items() if n != living} or {last[living].member}
                assert set(decode(place.token).addresses) <= others
