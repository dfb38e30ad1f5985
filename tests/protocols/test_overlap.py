"""For how long a trainer goes on beside a round: the time until it first asks, and the shortest of late."""

from __future__ import annotations

from ragtag.protocols.channel.overlap import WINDOW, Overlap


def test_what_is_not_measured_yet_is_nothing() -> None:
    overlap = Overlap()
    assert overlap.begins(5.0) == 0.0
    assert overlap.begins(6.0) == 0.0, "of a round that nobody asked for nothing is known"


def test_the_first_question_counts() -> None:
    """A trainer that looks at each step whether its average is there needed it when it looked first."""
    overlap = Overlap()
    overlap.asked(0.5)
    overlap.begins(1.0)
    for step in range(WINDOW + 1):
        overlap.asked(1.5 + step)
    assert overlap.begins(10.0) == 0.5
    overlap.asked(13.0)
    assert overlap.begins(14.0) == 0.5


def test_the_shortest_of_the_last_counts() -> None:
    overlap = Overlap()
    for took_s in [0.25, *[1.0] * (WINDOW - 1)]:
        overlap.begins(0.0)
        overlap.asked(took_s)
    assert overlap.begins(0.0) == 0.25
    overlap.asked(1.0)
    assert overlap.begins(0.0) == 1.0
