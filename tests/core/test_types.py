"""What is said of a round in a line."""

from __future__ import annotations

import numpy as np

from ragtag.core.types import Outcome, nobodys


def test_an_outcome_is_one_line_for_people() -> None:
    """Three of four chunks came, of three, two, one and (own values) one peer."""
    heard = np.array([0b111, 0b101, 0b010, 0b001], np.uint64)
    outcome = Outcome(
        channel=0,
        round=7,
        mean=np.zeros((4, 2), np.float32),
        weight=np.ones(4, np.float32),
        heard=heard,
        averaged=np.array([True, True, True, False]),
        missed=(1, 2),
        waited_for=(1, 2),
        started_s=0.0,
        scatter_s=0.01,
        gather_s=0.002,
        total_s=0.012,
        expired=True,
    )
    assert str(outcome) == "round 7: 75.0% averaged, of 1.75 peers on average; missed: 1, 2; 12.0 ms"


def test_so_is_one_without_others_and_one_without_values() -> None:
    ones = np.ones(0, np.float32)
    outcome = nobodys(0, np.zeros((0, 2), np.float32), ones, np.zeros(0, np.uint64), None)
    assert str(outcome) == "round 0: 0.0% averaged, of 0 peers on average; missed: nobody; 0.0 ms"
