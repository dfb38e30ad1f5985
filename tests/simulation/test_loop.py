"""The loop: what happens when, and to which process."""

from __future__ import annotations

import math

import pytest

from ragtag.simulation.loop import Loop, Port


class Listener:
    """A port that keeps what it is given, and when."""

    def __init__(self, loop: Loop, ends_s: float = math.inf, last: type | None = None) -> None:
        self.came: list[tuple[float, object]] = []
        self.dropped: list[int] = []
        self.port = Port(
            lambda event: self.came.append((loop.now_s, event)),
            ends_s=ends_s,
            last=last,
            drop=self.dropped.append,
        )


def test_what_is_planned_first_for_a_time_happens_first() -> None:
    loop = Loop()
    peer = Listener(loop)
    for at_s, event in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        loop.post(at_s, peer.port, event)
    loop.at(1.0, lambda: loop.give(peer.port, "now"))
    assert loop.due_s == 1.0
    loop.run()
    assert peer.came == [(1.0, "a"), (1.0, "b"), (1.0, "now"), (2.0, "c")]
    assert (loop.now_s, loop.events, loop.due_s) == (2.0, 4, math.inf)
    assert not loop.next()


@pytest.mark.parametrize("at_s", [0.5, -math.inf, math.nan])
def test_the_past_cannot_be_planned(at_s: float) -> None:
    loop = Loop()
    loop.run(1.0)
    with pytest.raises(ValueError, match="nothing can be planned for"):
        loop.at(at_s, lambda: None)


def test_what_comes_to_a_process_that_stands_still_waits_and_timers_come_last() -> None:
    loop = Loop()
    peer, other = Listener(loop, last=int), Listener(loop)
    loop.freeze(peer.port, 1.0, 2.0)
    loop.freeze(peer.port, 2.0, 2.0)  # overlaps: it goes on when both are over
    for at_s, event in ((1.0, "a"), (1.5, 7), (3.5, "b"), (4.0, "c")):
        loop.post(at_s, peer.port, event)
        loop.post(at_s, other.port, event)
    loop.run()
    assert peer.came == [(4.0, "a"), (4.0, "b"), (4.0, 7), (4.0, "c")]
    assert other.came == [(1.0, "a"), (1.5, 7), (3.5, "b"), (4.0, "c")]


def test_what_comes_to_a_process_that_has_ended_is_dropped() -> None:
    loop = Loop()
    peer = Listener(loop, ends_s=2.0)
    loop.freeze(peer.port, 1.0, 2.0)
    orders = [loop.post(at_s, peer.port, at_s) for at_s in (0.5, 1.5, 2.5, 3.5)]
    loop.run()
    assert peer.came == [(0.5, 0.5)]
    assert sorted(peer.dropped) == orders[1:]  # also what waited when it ended


def test_after_healing_nothing_stands_still() -> None:
    loop = Loop()
    peer = Listener(loop)
    loop.freeze(peer.port, 1.0, 10.0)
    loop.freeze(peer.port, 5.0, 10.0)
    loop.post(2.0, peer.port, "a")
    loop.post(6.0, peer.port, "b")
    loop.run(3.0)
    assert peer.came == []
    loop.heal()
    loop.run()
    assert peer.came == [(3.0, "a"), (6.0, "b")]


def test_it_stops_at_its_limit() -> None:
    loop = Loop()

    def again() -> None:
        loop.at(loop.now_s, again)

    again()
    with pytest.raises(RuntimeError, match="500 events and not done"):
        loop.run(events_max=500)
    assert loop.events == 500


def test_the_digest_is_of_all_that_was_logged() -> None:
    loops = [Loop() for _ in range(3)]
    for what in (b"a" * 70_000, b"b"):
        loops[0].log(what)
        loops[1].log(what)
    loops[2].log(b"b" + b"a" * 70_000)
    first, second, third = (loop.digest() for loop in loops)
    assert first == second != third
