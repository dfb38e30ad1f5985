"""Whole drivers over lines in virtual time: what repair costs, and what a share that is enough saves."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.lab.drivers import Drivers
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.rps import RPS


def times(averager: Averager) -> tuple[float, float, float]:
    """The median round over the line's limit, and the shares averaged and heard at least."""
    drivers = Drivers(averager, mbit=100.0, mb=2.0, loss=0.05)
    rounds = [drivers.average() for _ in range(5)][2:]
    drivers.close()
    took = median(one.s / one.limit_s for one in rounds)
    return took, min(one.averaged for one in rounds), min(one.heard for one in rounds)


@pytest.mark.slow
def test_repair_costs_little_and_less_where_a_share_is_enough() -> None:
    plain, _, heard = times(RPS())
    assert heard < 0.95
    whole, averaged, heard = times(RPS(repair=True))
    assert averaged == heard == 1.0
    part, averaged, heard = times(RPS(repair=0.98))
    assert averaged >= 0.98 and 0.96 <= heard < 1.0
    print(plain, part, whole)
    assert part < whole < 1.35 * plain
