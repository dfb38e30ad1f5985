"""Sessions: two processes come to keys in virtual time, over a line that loses, repeats and forges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ragtag.core.address import Address
from ragtag.core.seed import generator
from ragtag.core.wire import DATAGRAM_BYTES
from ragtag.protocols.sealing.noise import KeyPair
from ragtag.protocols.sealing.sessions import (
    _HEAD,
    CHACHA,
    INIT,
    REKEY_AFTER,
    REKEY_AFTER_S,
    REPLY,
    WINDOW,
    SeenNumbers,
    Session,
    Sessions,
    card_of,
)

CREW = b"c" * 32


class World:
    """Processes at addresses 1, 2, ...; what they hand over arrives ``rtt_s / 2`` later."""

    def __init__(self, n: int = 2, rtt_s: float = 0.01, keys: dict[int, bytes] | None = None) -> None:
        self.now_s, self.rtt_s = 0.0, rtt_s
        self.cards: dict[Address, tuple[int, bytes]] = {}
        self.ends: dict[Address, Sessions] = {}
        self.wire: list[tuple[float, Address, Address, bytes]] = []
        self.lost: Callable[[bytes], bool] = lambda row: False
        self.log: list[tuple[Address, Address, bytes]] = []
        for peer in range(1, n + 1):
            self.start(peer, (keys or {}).get(peer, CREW))

    def start(self, peer: int, crew: bytes = CREW, seed: int = 0, prefers: int = 1) -> Sessions:
        draws = generator(seed, "test sessions", peer)
        address = at(peer)
        keys = KeyPair(draws.bytes(32))
        end = Sessions(crew, keys, self.cards.get, draws.bytes, prefers)
        self.ends[address], self.cards[address] = end, (peer, card_of(prefers, keys))
        return end

    def send(self, rows: list[tuple[Address, bytes]], source: Address) -> None:
        for to, row in rows:
            self.log.append((source, to, row))
            if not self.lost(row):
                self.wire.append((self.now_s + self.rtt_s / 2, source, to, row))

    def run(self, until_s: float) -> None:
        while True:
            due = [entry[0] for entry in self.wire] + [end.due_s for end in self.ends.values()]
            if min(due) > until_s:
                break
            self.now_s = max(self.now_s, min(due))
            for source, end in self.ends.items():
                self.send(end.turn(self.now_s), source)
            arrived = [entry for entry in self.wire if entry[0] <= self.now_s]
            self.wire = [entry for entry in self.wire if entry[0] > self.now_s]
            for _, source, to, row in arrived:
                answer = self.ends[to].take(self.now_s, row, source)
                if answer is not None:
                    self.send([(source, answer)], to)
        self.now_s = until_s

    def session(self, source: int, to: int) -> Session | None:
        return self.ends[at(source)].to(self.now_s, at(to))

    def meet(self, source: int = 1, to: int = 2, within_s: float = 1.0) -> tuple[Session, Session]:
        """A session of both; the second end has heard the first one under it."""
        until_s = self.now_s + within_s
        while (mine := self.session(source, to)) is None:
            assert self.now_s < until_s, "no session came about"
            self.run(min(until_s, self.now_s + 0.01))
        theirs = self.ends[at(to)].under(mine.theirs)
        assert theirs is not None
        self.ends[at(to)].opened(theirs)
        return mine, theirs

    def meet_anew(self) -> None:
        """The first end asks for new keys."""
        mine = self.session(1, 2)
        assert mine is not None
        mine.sent = REKEY_AFTER
        self.session(1, 2)
        self.run(self.now_s + 1.0)
        assert self.session(1, 2) is not mine


def at(peer: int) -> Address:
    return f"10.0.0.{peer}", 7000


def speak(mine: Session, theirs: Session, text: bytes = b"fish") -> bytes:
    nonce = bytes(12)
    return theirs.opening.decrypt(nonce, mine.sealing.encrypt(nonce, text, None), None)


def test_two_datagrams_make_keys_for_both_directions() -> None:
    world = World()
    mine, theirs = world.meet(within_s=0.02)
    assert speak(mine, theirs) == b"fish" == speak(theirs, mine)
    assert [row[0] for _, _, row in world.log] == [INIT, REPLY]
    assert {len(row) for _, _, row in world.log} == {DATAGRAM_BYTES}  # no answer is longer than its question
    assert world.session(2, 1) is theirs
    assert (mine.peer, theirs.peer) == (2, 1)


def test_the_end_that_was_asked_sends_nothing_under_keys_that_nobody_has_used() -> None:
    world = World()
    world.session(1, 2)
    world.run(0.02)
    assert world.ends[at(2)].to(world.now_s, at(1)) is None  # else a replayed INIT would change its keys


def test_a_handshake_is_sent_again_as_it_was_until_it_is_answered() -> None:
    world = World(rtt_s=1.0)  # longer than the first waits
    mine, theirs = world.meet(within_s=3.0)
    assert speak(mine, theirs) == b"fish"
    inits = [row for _, _, row in world.log if row[0] == INIT]
    replies = [row for _, _, row in world.log if row[0] == REPLY]
    assert len(inits) > 2 and len(set(inits)) == len(set(replies)) == 1


@pytest.mark.parametrize("seed", range(8))
def test_half_of_all_handshakes_lost_only_delays_them(seed: int) -> None:
    world, draws = World(), generator(seed, "test lost handshakes")
    world.lost = lambda row: bool(draws.random() < 0.5)
    for _ in range(400):
        if world.session(1, 2) is not None:
            break
        world.run(world.now_s + 0.1)
    mine, theirs = world.meet()
    assert speak(mine, theirs) == b"fish"


def test_both_may_begin_at_once() -> None:
    world = World()
    world.session(1, 2), world.session(2, 1)
    world.run(0.1)
    one, two = world.session(1, 2), world.session(2, 1)
    assert one is not None and two is not None
    for mine, to in ((one, 2), (two, 1)):
        theirs = world.ends[at(to)].under(mine.theirs)
        assert theirs is not None and speak(mine, theirs) == b"fish"
        world.ends[at(to)].opened(theirs)


def test_a_stranger_without_the_crew_s_key_is_not_answered() -> None:
    world = World(keys={2: b"x" * 32})
    world.session(2, 1)
    world.run(1.0)
    assert all(row[0] == INIT for _, _, row in world.log)
    assert world.ends[at(1)].refused["forged"] == len(world.log) > 0


def test_a_member_cannot_speak_from_another_s_address() -> None:
    world = World(3)
    world.session(3, 1)
    row = world.ends[at(3)].turn(0.0)[0][1]
    assert world.ends[at(1)].take(0.0, row, at(2)) is None
    assert world.ends[at(1)].refused == {"forged": 1}
    assert world.session(1, 2) is None  # and what goes to 2 is under no key that 3 has


def remade(row: bytes, to: Sessions, **changed: int) -> bytes:
    """A handshake's datagram with another head, as a member could make it: the mac is right."""
    names = ("type", "suite", "sender", "receiver", "zero", "count")
    head = _HEAD.pack(*({**dict(zip(names, _HEAD.unpack_from(row), strict=True)), **changed}.values()))
    rest = row[_HEAD.size + 16 :]
    return head + to._mac(head, rest, to._key.public) + rest


@pytest.mark.parametrize("changed", [{"sender": 77}, {"count": 9}, {"suite": CHACHA}])
def test_a_member_cannot_change_another_s_question(changed: dict[str, int]) -> None:
    world = World()
    world.session(1, 2)
    ((_, init),) = world.ends[at(1)].turn(0.0)
    two = world.ends[at(2)]
    assert two.take(0.0, remade(init, two), at(1)) is not None
    assert two.take(0.0, remade(init, two, count=2, **changed) if "count" not in changed else
                    remade(init, two, **changed), at(1)) is None  # fmt: skip
    assert two.refused == {"forged": 1}


def test_a_member_cannot_change_another_s_answer() -> None:
    world = World()
    world.session(1, 2)
    ((_, init),) = world.ends[at(1)].turn(0.0)
    reply = world.ends[at(2)].take(0.0, init, at(1))
    assert reply is not None
    one = world.ends[at(1)]
    one.take(0.0, remade(reply, one, sender=77), at(2))
    assert world.session(1, 2) is None and one.refused == {"forged": 1}
    mine, theirs = world.meet(within_s=2.0)
    assert speak(mine, theirs) == b"fish"


def test_the_crew_s_key_is_part_of_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever could make a mac without it still could not come to keys."""
    world = World(keys={2: b"x" * 32})
    made = Sessions._mac

    def mac(self: Sessions, head: bytes, rest: bytes, to: bytes) -> bytes:
        key, self._crew_key = self._crew_key, CREW
        try:
            return made(self, head, rest, to)
        finally:
            self._crew_key = key

    monkeypatch.setattr(Sessions, "_mac", mac)
    world.session(1, 2)
    world.run(0.02)
    assert [row[0] for _, _, row in world.log] == [INIT, REPLY]
    assert world.session(1, 2) is None and world.ends[at(1)].refused == {"forged": 1}


def test_what_was_for_another_member_costs_no_public_key_operation() -> None:
    world = World(3)
    world.session(1, 3)
    ((_, init),) = world.ends[at(1)].turn(0.0)
    drawn: list[int] = []
    world.ends[at(2)]._random = lambda size: drawn.append(size) or bytes(size)
    assert world.ends[at(2)].take(0.0, init, at(1)) is None and drawn == []


def test_old_counts_stay_old_where_a_peer_has_moved() -> None:
    world = World()
    world.meet()
    init = next(row for _, _, row in world.log if row[0] == INIT)
    world.meet_anew()
    moved = "10.0.9.9", 7000
    world.cards[moved] = world.cards.pop(at(1))
    two = world.ends[at(2)]
    assert two.take(world.now_s, init, moved) is None and two.refused == {"replayed": 1}


def test_questions_that_nobody_goes_on_with_fill_no_table() -> None:
    world = World()
    one, two = world.ends[at(1)], world.ends[at(2)]
    for _ in range(30):
        world.session(1, 2)
        ((_, init),) = one.turn(world.now_s)
        two.take(world.now_s, init, at(1))
        world.run(world.now_s + 100.0)  # the answer is lost, and the question is given up
    assert len(two._by_index) == 1 and len(one._by_index) == 0


def test_a_recorded_handshake_is_worth_nothing() -> None:
    world = World()
    world.meet()
    init = next(row for _, _, row in world.log if row[0] == INIT)
    reply = next(row for _, _, row in world.log if row[0] == REPLY)
    before = world.session(1, 2), world.session(2, 1)
    assert world.ends[at(2)].take(1.0, init, at(1)) == reply, "which its receiver does not take twice"
    assert world.ends[at(1)].take(1.0, reply, at(2)) is None
    assert world.ends[at(2)].take(1.0, reply, at(1)) is None  # reflected
    assert (world.session(1, 2), world.session(2, 1)) == before
    assert sum(end.refused["replayed"] + end.refused["forged"] for end in world.ends.values()) == 2
    world.meet_anew()
    assert world.ends[at(2)].take(1.0, init, at(1)) is None
    assert sum(end.refused["replayed"] + end.refused["forged"] for end in world.ends.values()) == 3


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_damaged_handshake_makes_a_session_and_the_next_attempt_does(data: st.DataObject) -> None:
    world = World()
    kind = data.draw(st.sampled_from([INIT, REPLY]))
    where = data.draw(st.integers(1, DATAGRAM_BYTES - 1))
    by = data.draw(st.integers(1, 255))
    world.session(1, 2)
    ((_, init),) = world.ends[at(1)].turn(0.0)
    row = init if kind == INIT else world.ends[at(2)].take(0.0, init, at(1))
    assert row is not None
    damaged = bytearray(row)
    damaged[where] ^= by
    to, source = (2, 1) if kind == INIT else (1, 2)
    assert world.ends[at(to)].take(0.0, bytes(damaged), at(source)) is None
    assert world.session(1, 2) is None
    mine, theirs = world.meet(within_s=2.0)
    assert speak(mine, theirs) == b"fish"


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=DATAGRAM_BYTES, max_size=DATAGRAM_BYTES))
def test_any_bytes_may_come(row: bytes) -> None:
    world = World()
    assert world.ends[at(1)].take(0.0, row, at(2)) is None
    assert world.ends[at(1)].take(0.0, row, at(99)) is None
    assert world.ends[at(1)].refused["forged"] == 2


def test_a_session_is_replaced_after_a_time_and_old_datagrams_still_open() -> None:
    world = World()
    mine, theirs = world.meet()
    world.run(REKEY_AFTER_S - 1.0)
    assert world.session(1, 2) is mine
    world.run(world.now_s + 2.0)
    assert world.session(1, 2) is mine  # goes on with it meanwhile
    world.run(world.now_s + 1.0)
    new = world.session(1, 2)
    assert new is not mine and new is not None
    assert world.ends[at(2)].under(mine.theirs) is theirs
    other = world.ends[at(2)].under(new.theirs)
    assert other is not None
    world.ends[at(2)].opened(other)
    assert world.session(2, 1) is other
    assert speak(new, other) == b"fish"
    assert world.ends[at(2)].under(mine.theirs) is theirs
    assert world.ends[at(1)].under(mine.ours) is mine


def test_of_two_that_both_have_something_to_say_one_replaces_the_session() -> None:
    world = World()
    world.meet()
    for _ in range(300):
        world.run(world.now_s + 1.0)
        for source, to in ((1, 2), (2, 1)):
            mine = world.session(source, to)
            assert mine is not None
            theirs = world.ends[at(to)].under(mine.theirs)
            assert theirs is not None
            world.ends[at(to)].opened(theirs)
    assert [row[0] for _, _, row in world.log].count(INIT) == 3
    assert {len(end._by_index) for end in world.ends.values()} == {2}, "the one before, and no older one"


def test_where_the_end_that_began_says_nothing_the_other_replaces_the_session_later() -> None:
    world = World()
    world.meet()
    world.run(1.5 * REKEY_AFTER_S - 1.0)
    world.session(2, 1)
    world.run(world.now_s + 0.5)
    assert [source for source, _, row in world.log if row[0] == INIT] == [at(1)]
    world.run(1.5 * REKEY_AFTER_S + 1.0)
    world.session(2, 1)
    world.run(world.now_s + 0.5)
    assert [source for source, _, row in world.log if row[0] == INIT] == [at(1), at(2)]


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_session_is_replaced_after_some_traffic(way: str) -> None:
    world = World()
    mine, _ = world.meet()
    if way == "out":
        mine.sent = REKEY_AFTER
    else:
        mine.came.highest = REKEY_AFTER
    assert world.session(1, 2) is mine
    world.run(world.now_s + 1.0)
    assert world.session(1, 2) is not mine


def test_nothing_is_sent_where_nobody_has_anything_to_say() -> None:
    world = World()
    world.meet()
    sent = len(world.log)
    world.run(10 * REKEY_AFTER_S)
    assert len(world.log) == sent


def test_a_handshake_that_nobody_waits_for_any_more_ends() -> None:
    world = World()
    world.lost = lambda row: True
    world.session(1, 2)
    world.run(1000.0)
    assert len(world.log) == 1 and world.ends[at(1)].due_s == float("inf")


def test_a_peer_that_restarts_at_its_address_has_new_keys() -> None:
    world = World()
    old, _ = world.meet()
    world.start(2, seed=1)
    world.ends[at(2)].unknown(world.now_s, at(1))  # data under the old session reaches the new process
    world.run(world.now_s + 1.0)
    theirs = world.session(2, 1)
    assert theirs is not None
    mine = world.ends[at(1)].under(theirs.theirs)
    assert mine is not None and mine is not old and speak(theirs, mine) == b"fish"
    assert world.ends[at(1)].under(old.ours) is None


def test_nobody_is_asked_before_it_is_known_who_is_there() -> None:
    world = World()
    card = world.cards.pop(at(2))
    assert world.session(1, 2) is None
    world.run(1.0)
    assert world.log == []
    world.cards[at(2)] = card
    world.meet()


@pytest.mark.parametrize("public", [bytes(32), b"\1" + bytes(31)], ids=["zero", "one"])
def test_a_key_that_all_share_a_secret_with_is_nobodys_and_harms_no_other_pair(public: bytes) -> None:
    """A card tells any 32 bytes as its key; these are points of small order (RFC 7748, section 6.1)."""
    world = World(3)
    world.cards[at(3)] = 3, bytes([1]) + public
    for _ in range(5):
        assert world.session(1, 3) is None
        world.run(world.now_s + 1.0)
    me = world.ends[at(1)]
    assert world.log == [] and me.refused["forged"] == 1 and me.due_s == float("inf")
    world.meet()
    world.start(3)
    assert world.session(1, 3) is None
    world.run(world.now_s + 1.0)
    assert world.session(1, 3) is not None, "with a key of its own it is somebody"


def test_datagrams_of_no_session_are_counted_and_a_member_s_bring_one_about() -> None:
    world = World()
    two = world.ends[at(2)]
    two.unknown(0.0, at(9), 3)
    assert two.refused == {"stranger": 3} and two.turn(0.0) == []
    two.unknown(0.0, at(1))
    assert two.refused == {"stranger": 4}
    assert [(address, row[0]) for address, row in two.turn(0.0)] == [(at(1), INIT)]


def test_tables_do_not_outgrow_the_seats() -> None:
    world = World()
    for life in range(50):  # seat 2 is taken by one process after the other, each at an address of its own
        world.start(2, seed=life)
        address = f"10.0.1.{life}", 7000
        world.ends[address], world.cards[address] = world.ends.pop(at(2)), world.cards.pop(at(2))
        world.ends[at(1)].to(world.now_s, address)
        world.run(world.now_s + 1.0)
        assert world.ends[at(1)].to(world.now_s, address) is not None
    me = world.ends[at(1)]
    assert len(me._others) == len(me._where) == 1 and len(me._by_index) == 1


def test_a_pair_uses_the_cipher_that_both_are_fast_at() -> None:
    world = World()
    world.start(2, prefers=CHACHA)
    mine, theirs = world.meet()
    assert mine.suite == theirs.suite == CHACHA and speak(mine, theirs) == b"fish"


# -- The window


@settings(max_examples=200, deadline=None)
@example([[WINDOW + 10], [10, 11, 12], [11, 12]])
@example([[1, 5], [WINDOW + 4], [5]])  # the oldest number of the window
@given(st.lists(st.lists(st.integers(1, 60_000), min_size=1, max_size=40), min_size=1, max_size=12))
def test_a_window_takes_each_number_once_and_none_that_is_too_old(batches: list[list[int]]) -> None:
    window, came, highest = SeenNumbers(), set[int](), 0
    for batch in batches:
        numbers = np.array(batch, np.int64)
        fresh = window.fresh(numbers)
        expected = []
        for at_, number in enumerate(batch):
            old = number <= highest - WINDOW
            expected.append(not old and number not in came and number not in batch[:at_])
        taken = np.flatnonzero(fresh)[window.take(numbers[fresh])]
        assert taken.tolist() == np.flatnonzero(expected).tolist()
        came |= {number for number, new in zip(batch, expected, strict=True) if new}
        highest = max([highest, *(n for n, new in zip(batch, expected, strict=True) if new)])
        assert window.highest == highest


@settings(max_examples=50)
@example(1 << 32, [1, 2, 2 - WINDOW, 1 - WINDOW, WINDOW, 1])
@given(st.integers(0, 1 << 40), st.lists(st.integers(-2 * WINDOW, 2 * WINDOW), max_size=60))
def test_numbers_that_come_one_by_one_are_taken_as_those_that_come_together(
    start: int, ahead: list[int]
) -> None:
    one, other = SeenNumbers(), SeenNumbers()
    for window in (one, other):
        window.take(np.array([start + 1]))
    for step in ahead:
        low = (one.highest + step) & 0xFFFFFFFF
        number = one.fresh_one(low)
        numbers = other.whole(np.array([low], np.uint32))
        assert number == (numbers[0] if other.fresh(numbers)[0] else 0)
        if number:
            one.take_one(number)
            other.take(numbers)
        assert one.highest == other.highest and np.array_equal(one._seen, other._seen)


@given(st.integers(0, 1 << 45), st.integers(-WINDOW, 1 << 20))
def test_the_whole_number_follows_from_its_low_half(highest: int, ahead: int) -> None:
    window = SeenNumbers()
    window.highest = highest
    number = max(1, highest + ahead)
    assert window.whole(np.array([number & 0xFFFFFFFF], np.uint32)).tolist() == [number]
    if ahead > 0:
        assert window.fresh_one(number & 0xFFFFFFFF) == number


def test_a_number_may_be_ahead_by_half_of_what_its_low_half_tells_apart() -> None:
    window = SeenNumbers()
    window.highest = highest = 1 << 40
    low = (highest + (1 << 31)) & 0xFFFFFFFF
    assert window.fresh_one(low) == highest + (1 << 31) == window.whole(np.array([low], np.uint32))[0]
    low = (highest + (1 << 31) + 1) & 0xFFFFFFFF
    assert window.fresh_one(low) == 0
    assert window.whole(np.array([low], np.uint32))[0] == highest - (1 << 31) + 1
