"""Of peers that are behind those with the newest state go on, once nobody that lives is ahead of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragtag.core.types import Post
from ragtag.protocols.crew.board import Notices
from ragtag.protocols.crew.standing import END, NO_STATE, Standing, decode, encode
from tests.protocols.hall import Hall

CHANNEL = 5


@dataclass
class Place:
    """One peer's place on the boards of a hall."""

    hall: Hall
    me: int

    def post_soon(self, topic: int, blob: bytes) -> None:
        self.hall.step(self.me, Post(topic, blob))

    def notices(self, topic: int) -> Notices:
        return self.hall.boards[self.me].notices(topic)


def standings(hall: Hall) -> list[Standing]:
    def living(me: int) -> set[int]:
        return set(range(hall.n)) - hall.dead - {me}

    return [Standing(Place(hall, me), lambda me=me: living(me)) for me in range(hall.n)]


@given(
    st.lists(st.one_of(st.none(), st.integers(NO_STATE, 3)), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 1000),
)
@example([2, 3, 2, None], {3}, 0.0, 0)
@example([NO_STATE, NO_STATE], set(), 0.0, 0)
def test_those_with_the_newest_state_go_on(
    rounds: list[int | None], dead: set[int], loss: float, seed: int
) -> None:
    """rounds: of each peer's state; ``None``: it is in step, and says nothing."""
    hall = Hall(len(rounds), seed=seed, loss=loss)
    peers = standings(hall)
    for peer, round_ in enumerate(rounds):
        if round_ is not None:
            peers[peer].behind(CHANNEL, round_)
    for peer in dead & set(range(len(rounds))):
        hall.leave(peer)
    hall.run(60.0)
    living = {peer: round_ for peer, round_ in enumerate(rounds) if peer not in dead}
    behind = {peer: round_ for peer, round_ in living.items() if round_ is not None}
    newest = max(behind.values(), default=None)
    go_on = {peer for peer in behind if not peers[peer].ahead(CHANNEL)}
    if None in living.values():
        assert not go_on, "one is in step: there is somebody to catch up with"
    elif newest == NO_STATE:
        assert go_on == {min(behind)}, "of those without any state one begins"
    else:
        assert go_on == {peer for peer, round_ in behind.items() if round_ == newest}
    for peer in living:
        known = peers[peer].known_behind(CHANNEL)
        assert {other: known[other] for other in known if other in living} == behind
        assert peers[peer].known_behind(CHANNEL + 1) == {}


def test_before_the_others_know_nobody_goes_on() -> None:
    """Each would go on by itself else, and be ahead of the others."""
    hall = Hall(2)
    peers = standings(hall)
    assert peers[0].ahead(CHANNEL), "it is not behind, and has not said so"
    hall.cut = lambda source, dest: True
    peers[0].behind(CHANNEL, 7)
    peers[1].behind(CHANNEL, 6)
    hall.run(100.0)
    assert peers[0].ahead(CHANNEL) and peers[1].ahead(CHANNEL)
    hall.cut = lambda source, dest: False
    hall.run(200.0)
    assert not peers[0].ahead(CHANNEL) and peers[1].ahead(CHANNEL)


def test_a_peer_that_has_gone_on_is_ahead_of_the_others() -> None:
    hall = Hall(3)
    peers = standings(hall)
    for peer, round_ in enumerate((4, 9, 4)):
        peers[peer].behind(CHANNEL, round_)
    hall.run()
    peers[1].abreast(CHANNEL)
    hall.run()
    assert peers[0].ahead(CHANNEL) and peers[2].ahead(CHANNEL)
    assert peers[0].known_behind(CHANNEL) == {0: 4, 2: 4}
    peers[2].behind(CHANNEL, 12)  # the state has come
    hall.leave(1)
    hall.run()
    assert peers[0].ahead(CHANNEL) and not peers[2].ahead(CHANNEL)


def test_channels_stand_apart() -> None:
    hall = Hall(2)
    peers = standings(hall)
    peers[0].behind(1, 10)
    peers[0].behind(2, 20)
    peers[1].behind(1, 5)
    hall.run()
    assert not peers[0].ahead(1) and peers[0].ahead(2), "peer 1 is in step on channel 2"
    peers[0].abreast(1)
    hall.run()
    assert peers[1].ahead(1) and peers[1].known_behind(2) == {0: 20}


@given(st.dictionaries(st.integers(0, (1 << 32) - 1), st.integers(NO_STATE, 1 << 62), max_size=64))
def test_what_is_posted_is_read_again(behind: dict[int, int]) -> None:
    assert decode(encode(behind)) == behind


@given(st.binary(max_size=100))
def test_of_what_cannot_be_read_nothing_is_believed(blob: bytes) -> None:
    assert isinstance(decode(blob), dict)
    assert len(decode(blob)) <= len(blob)


def test_there_is_room_for_so_many_channels_in_a_post() -> None:
    hall = Hall(1)
    (peer,) = standings(hall)
    for channel in range(64):
        peer.behind(channel, 1 << 40)
    assert not peer.ahead(63)
    with pytest.raises(ValueError, match="at most 64"):
        peer.behind(64, 0)


def test_no_round_is_to_come_once_all_that_are_not_behind_are_at_their_end() -> None:
    hall = Hall(4)
    peers = standings(hall)
    for late in (2, 3):
        peers[late].behind(CHANNEL, NO_STATE)
    for peer in (0, 1):
        assert peers[2].more(CHANNEL) and not peers[2].over(CHANNEL)
        Place(hall, peer).post_soon(END, b"")
        hall.run(10.0 * (1 + peer))
    assert peers[2].over(CHANNEL) and not peers[2].more(CHANNEL) and peers[2].ahead(CHANNEL)


def test_nobody_is_ahead_of_one_that_is_left_alone_whatever_has_been_told() -> None:
    hall = Hall(2)
    peers = standings(hall)
    assert peers[0].ahead(CHANNEL)
    hall.leave(1)
    assert not peers[0].ahead(CHANNEL) and not peers[0].over(CHANNEL)
