from collections.abc import Callable

import numpy as np
import pytest

from ragtag.core.faults import Crash, Faults, Loss
from ragtag.protocols.groups.tree import TreeAllReduce
from tests.protocols.group_crews import RTT_S, GroupCrew, channel


def crew(
    n: int,
    rounds: int = 1,
    faults: Faults | None = None,
    weight: Callable[[int], float] = lambda peer: 1.0,
) -> GroupCrew:
    return GroupCrew(
        n,
        lambda me, view: TreeAllReduce(me, view, 0, channel()),
        rounds=rounds,
        faults=faults or Faults(latency_s=RTT_S / 2),
        exact=False,
        weight=weight,
    ).run()


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 100])
def test_all_have_the_mean_after_one_round(n: int) -> None:
    c = crew(n, rounds=2)
    assert np.allclose(np.stack(c.values), c.start.mean(axis=0), atol=1e-5)
    assert all(o.weight[0] == n for outcomes in c.outcomes.values() for o in outcomes if n > 1)


@pytest.mark.parametrize("dead", [0, 5, 14])
def test_without_one_peer_nobody_has_anything_and_all_end(dead: int) -> None:
    c = crew(15, rounds=3, faults=Faults(latency_s=RTT_S / 2, crashes=(Crash(dead, 0.0),)))
    for peer in set(range(15)) - {dead}:
        assert np.array_equal(c.values[peer], c.start[peer]) and len(c.outcomes[peer]) == 3
        assert all(o.expired and not o.averaged.any() for o in c.outcomes[peer])


def test_weights_count_and_what_was_sent_is_not_written_to() -> None:
    c = crew(8, weight=float)
    expected = np.average(c.start, axis=0, weights=range(8))
    assert np.allclose(np.stack(c.values), expected, atol=1e-5)


def test_a_loss_anywhere_is_a_failure_that_is_seen() -> None:
    c = crew(16, rounds=6, faults=Faults(loss=Loss(0.05), latency_s=RTT_S / 2))
    assert all(len(outcomes) == 6 for outcomes in c.outcomes.values())
    failed = [o for outcomes in c.outcomes.values() for o in outcomes if not o.averaged.any()]
    assert failed and all(o.expired for o in failed)
