"""Whole drivers over lines in virtual time: what repair costs, what a share that is enough saves, and how
soon rounds are whole on lines of which nothing was known."""

from __future__ import annotations

from statistics import mean, median

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


def test_a_crew_far_apart_does_not_take_its_own_queue_for_others() -> None:
    """Each path claimed what it had found while the others waited, and kept up with rivals that were its
    crew: on a line that loses nothing a sixth of the third round was lost.
    """
    drivers = Drivers(RPS(), mbit=100.0, mb=4.0, rtt_s=0.05)
    rounds = [drivers.average() for _ in range(3)]
    drivers.close()
    assert rounds[2].heard > 0.97


@pytest.mark.parametrize("n", [2, 3])
def test_rounds_are_whole_once_rate_control_has_found_what_the_lines_carry(n: int) -> None:
    """Peers that were alone take a round for one of milliseconds. On these lines it takes hundreds of them.

    Their deadlines cut all messages off, so hardly a round was over in time, to learn from. After fourteen
    rounds a quarter of what four peers gave was averaged, which is each peer's own.
    """
    drivers = Drivers(RPS(), n, mbit=20.0, queue_ms=100.0, rtt_s=1e-3, mb=0.5, probe_s=0.002)
    rounds = [drivers.average() for _ in range(9)]
    drivers.close()
    assert rounds[0].averaged < 0.6  # as nothing is known
    late = rounds[5:]
    assert mean(one.averaged for one in late) > 0.9 and mean(one.heard for one in late) > 0.9
    assert max(one.s for one in late) < 2.5 * rounds[0].limit_s  # no peer waits in vain
