"""Lost messages cost next to nothing where what was not delivered is sent again (the benchmark, in small)."""

from __future__ import annotations

import pytest

from benchmarks.sparse_loss import TIGHT_S, trained
from ragtag.training.exchange.compress import TopK

COMPRESS = TopK(ratio=0.02, resync=0, bypass=False)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.1, 0.3])
def test_with_tickets_the_loss_is_within_3_percent_of_the_loss_free_runs(loss: float) -> None:
    free = trained(4, 0.0, 100, 0, COMPRESS, True, TIGHT_S)
    tickets = trained(4, loss, 100, 0, COMPRESS, True, TIGHT_S)
    cleared = trained(4, loss, 100, 0, COMPRESS, False, TIGHT_S)
    repaired = trained(4, loss, 100, 0, COMPRESS, True, None)
    assert free["restored"] == free["given_up"] == 0
    assert tickets["restored"] > 0.5 * loss * tickets["committed"]
    assert tickets["loss"] < 1.03 * free["loss"]
    assert cleared["loss"] > tickets["loss"]
    assert repaired["loss"] < 1.01 * free["loss"]
