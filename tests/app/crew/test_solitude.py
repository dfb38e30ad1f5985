"""A peer that hears nobody says so once, says when that is over, and is not alone where all said good-bye."""

from __future__ import annotations

from dataclasses import replace

from ragtag.app.crew.logbook import ALONE_AFTER, Solitude
from ragtag.core.types import Noted
from tests.core.test_arrival import outcome

ME = 1
WITH, WITHOUT = outcome([{0, 1, 2}]), replace(outcome([{1}]), missed=(0, 2, 3))


def rounds(solitude: Solitude, *outcomes: object, live: tuple[int, ...] = (ME,)) -> list[str]:
    """What is said, a second after another."""
    said = [solitude.round(10.0 + i, ME, live, of) for i, of in enumerate(outcomes)]  # type: ignore[arg-type]
    return [f"{note.what}: {note.detail}" for note in said if note is not None]


def test_it_is_said_once_and_when_it_is_over() -> None:
    solitude = Solitude()
    assert rounds(solitude, WITH, *[WITHOUT] * 9, WITH, WITH) == [
        "alone: since 11.0 s: peers 0 and 2 are not heard",
        "no longer alone: after 9 rounds and 9.0 s: peers 0 and 2 are heard",
    ]
    assert solitude.rounds == 9 and not solitude.said
    assert len(rounds(solitude, *[WITHOUT] * 9)) == 1, "and again the next time"
    assert solitude.rounds == 18 and solitude.said and solitude.alone


def test_a_round_or_two_are_counted_and_not_said() -> None:
    solitude = Solitude()
    assert rounds(solitude, WITH, *([WITHOUT] * (ALONE_AFTER - 1) + [WITH]) * 5) == []
    assert solitude.rounds == 5 * (ALONE_AFTER - 1)


def test_a_crew_of_one_is_not_alone() -> None:
    solitude = Solitude()
    assert rounds(solitude, *[WITHOUT] * 9) == [] and solitude.rounds == 0 and not solitude.alone


def test_who_believes_that_others_live_and_hears_none_is_alone() -> None:
    solitude = Solitude()
    assert len(rounds(solitude, *[WITHOUT] * 9, live=(0, ME))) == 1


def test_where_all_have_said_good_bye_nobody_is_missed() -> None:
    solitude = Solitude()
    rounds(solitude, WITH)
    solitude.noted(Noted("left", 0))
    solitude.noted(Noted("has left", 2, "peer-2"))
    assert rounds(solitude, *[WITHOUT] * 9) == [] and solitude.rounds == 0
    solitude.noted(Noted("takes part", 0))
    assert len(rounds(solitude, *[WITHOUT] * 9)) == 1, "one is back, and is not heard"
    solitude.noted(Noted("left", 0))
    assert rounds(solitude, WITHOUT) == ["no longer alone: after 9 rounds and 0.0 s: the others have left"]


def test_who_was_declared_dead_has_not_said_good_bye() -> None:
    """Of a peer that is cut off all others are."""
    solitude = Solitude()
    rounds(solitude, WITH)
    for peer in (0, 2):
        solitude.noted(Noted("declared dead", peer))
        solitude.noted(Noted("left", peer))
    assert len(rounds(solitude, *[WITHOUT] * 9)) == 1
    assert solitude.others == {0, 2}


def test_who_owns_all_of_a_central_state_hears_nobody_and_is_not_alone() -> None:
    solitude = Solitude()
    own = replace(outcome([{1}], (), [True]), stale=(0,))
    assert rounds(solitude, *[own] * 9, live=(0, ME)) == []
    assert len(rounds(solitude, *[own] * 9, live=(ME,))) == 1


def test_of_many_peers_that_are_not_heard_it_says_how_many() -> None:
    for live, named in (
        ((0, ME), "peer 0 is"),
        (tuple(range(9)), "peers 0 and 2 to 8 are"),
        (tuple(range(10)), "9 peers are"),
    ):
        said = rounds(Solitude(), *[WITHOUT] * ALONE_AFTER, live=live)
        assert [text.split(": ")[-1] for text in said] == [f"{named} not heard"]


def test_a_peer_that_owes_another_nothing_is_not_missed() -> None:
    """A model of one block has one owner: where that dies the others hear nothing, and are two."""
    solitude, without_owner = Solitude(), replace(outcome([{1}], (0, 2)), missed=(0,))
    assert rounds(solitude, WITH, *[without_owner] * 9, WITH) == []
    assert solitude.rounds == 0
    assert len(rounds(solitude, *[WITHOUT] * 9, *[without_owner] * 9)) == 1, "nor is it heard"
    assert solitude.rounds == 18
