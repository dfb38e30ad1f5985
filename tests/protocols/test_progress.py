"""Which shares a round waits for, and what ends that: the rules of ``progress``, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.core.types import Arm, Begin, Effect
from ragtag.protocols.rounds.base import GATHER, NO_VALUES, SCATTER, Spec
from ragtag.protocols.rounds.layout import Layout
from ragtag.protocols.rounds.progress import Waiting
from tests.protocols.harness import TINY


def waiting(n: int) -> Waiting:
    """Of peer 0, which owns block 0, right after its round has begun."""
    everybody = frozenset(range(n))
    found = Waiting(Spec(0, 0, 0, Layout(n, n), tuple(range(n)), everybody, TINY), everybody)
    giving = found.begin(0.0, Begin(NO_VALUES, 1.0, everybody - {0}, scatter_s=1.0, gather_s=1.0))
    assert giving == list(range(1, n))
    for peer in giving:
        found.owe((peer, SCATTER, 0))
    return found


@pytest.mark.parametrize(("withheld", "giving"), [({2}, [1, 3]), ({1, 2, 3}, [1, 2, 3])])
def test_copies_that_were_withheld_are_not_waited_for_but_where_all_were(
    withheld: set[int], giving: list[int]
) -> None:
    """An owner that got none was away itself, and the others know of it by now."""
    everybody = frozenset(range(4))
    found = Waiting(Spec(0, 0, 0, Layout(4, 4), (0, 1, 2, 3), everybody, TINY), everybody)
    others = everybody - {0}
    begin = Begin(NO_VALUES, 1.0, others, scatter_s=1.0, gather_s=1.0, withheld=frozenset(withheld))
    assert found.begin(0.0, begin) == giving


def test_a_share_that_goes_to_another_owner_is_not_waited_for() -> None:
    there = waiting(3)
    there.elsewhere(2, 0)
    assert there.owed == {(1, SCATTER, 0)}
    there.owe((2, SCATTER, 0))  # as where its copies came before the round began here
    assert there.owed == {(1, SCATTER, 0)}
    assert there.missed() == ()  # it gave elsewhere: nobody missed it


@pytest.mark.parametrize(
    ("n", "without", "ends"),
    [(3, 1, False), (4, 1, False), (4, 2, True), (6, 2, False), (6, 3, True)],
)
def test_most_of_the_others_must_have_gone_on_without_a_peer(n: int, without: int, ends: bool) -> None:
    """The last peer owes its share. Of the others, so many tell an average without it."""
    there, last = waiting(n), n - 1
    for peer in range(1, last):
        there.closed(0.0, (peer, SCATTER, 0))
    all_ = (1 << n) - 1
    for owner in range(1, last):
        heard = all_ & ~(1 << last) if owner <= without else all_
        there.outvoted(owner, np.array([heard, 0], np.uint64))
    assert (there.owed == set()) == ends
    assert there.missed() == ((last,) if ends else ())


def test_an_average_that_comes_in_parts_is_without_a_peer_that_none_of_them_names() -> None:
    """Of one chunk of an owner's a peer's copy may be lost, and of the others not."""
    there = waiting(4)
    for peer in (1, 2):
        there.closed(0.0, (peer, SCATTER, 0))
    without, whole = np.array([0b0111], np.uint64), np.array([0b1111], np.uint64)
    there.outvoted(1, without)
    there.outvoted(1, whole)
    there.outvoted(2, without)
    assert there.owed == {(3, SCATTER, 0)}, "it is in the average of one of the two"
    there.outvoted(1, without)
    assert there.owed == {(3, SCATTER, 0)}


def test_a_peer_that_is_past_the_round_owes_nothing_of_it_and_is_not_missed() -> None:
    there = waiting(3)
    there.passed(2)
    assert there.owed == {(1, SCATTER, 0)}
    assert there.missed() == ()


@pytest.mark.parametrize(("owners", "missing", "again"), [({3}, {3}, True), ({2, 3}, {3}, False)])
def test_a_peer_that_owns_nothing_waits_once_more_for_most_of_the_owners(
    owners: set[int], missing: set[int], again: bool
) -> None:
    """In a small model few own anything. Such a one may wait for a peer that it has learned to be late, and
    no other peer knows of that.
    """
    everybody = frozenset(range(4))
    there = Waiting(Spec(0, 0, 0, Layout(1, 4), (3, 2, 1, 0), everybody, TINY), frozenset(owners))
    begin = Begin(NO_VALUES, 1.0, everybody - {0}, scatter_s=1.0, gather_s=1.0, grace_s=5.0)
    there.begin(0.0, begin)
    there.turn_over(0.0)
    for owner in missing:
        there.owe((owner, GATHER, 0))
    assert (there.wants_more(2.0) is not None) is again
    assert there.until_s == (7.0 if again else 2.0)
    assert there.wants_more(7.0) is None


@pytest.mark.parametrize(("missing", "again"), [(2, False), (3, True)])
def test_an_owner_waits_once_more_for_most_of_all_that_give(missing: int, again: bool) -> None:
    """Two of five own something: an owner waits for the shares of four, not for the other owner alone."""
    everybody = frozenset(range(5))
    there = Waiting(Spec(0, 0, 0, Layout(2, 2), (0, 1), everybody, TINY), frozenset({0, 1}))
    begin = Begin(NO_VALUES, 1.0, everybody - {0}, scatter_s=1.0, gather_s=1.0, grace_s=5.0)
    for peer in there.begin(0.0, begin)[:missing]:
        there.owe((peer, SCATTER, 0))
    assert (there.wants_more(1.0) is not None) is again


def test_answers_are_due_where_another_question_would_come_too_late() -> None:
    """All were asked, as most were missing. Few are by then, and their next turn is past the deadline."""
    everybody = frozenset(range(5))
    there = Waiting(Spec(0, 0, 0, Layout(5, 5), tuple(range(5)), everybody, TINY), everybody)
    begin = Begin(
        NO_VALUES, 1.0, everybody - {0}, scatter_s=1.0, gather_s=1.0, usual_scatter_s=0.3, usual_gather_s=0.4
    )
    for peer in there.begin(0.0, begin):
        there.owe((peer, SCATTER, 0))
    assert _armed(there.count(0.0)) == [0.3]
    asked = there.asks(0.3, "ask scatter")
    assert asked is not None and _armed(asked) == [0.7]
    for peer in (1, 2):
        there.spoke(peer)
        there.closed(0.65, (peer, SCATTER, 0))
    there.spoke(3)
    assert there.look_around(0.65) == []  # at 1.05 s it is too late
    assert there.unanswered(0.7, "answer scatter")
    assert there.owed == {(3, SCATTER, 0)} and there.missed() == (4,)


def _armed(effects: list[Effect]) -> list[float]:
    return [effect.at_s for effect in effects if isinstance(effect, Arm)]
