"""Clients over real sockets on loopback: what they give is averaged by others, and comes back."""

from __future__ import annotations

import numpy as np
import pytest

import ragtag
from ragtag.protocols.channel.averager import Averager
from tests.network.crew import Crew, values_of

CHUNKS = 60


@pytest.mark.parametrize(
    "method", [ragtag.RPS(repair=True), ragtag.AllReduce(), ragtag.AllReduce(shares="measured")], ids=repr
)
def test_the_mean_is_that_of_all_and_clients_send_their_values_alone(method: Averager) -> None:
    with Crew(6, CHUNKS, method=method, clients=(4, 5)) as crew:
        crew.meet()
        for round_ in range(3):
            asked = [crew.ask(peer, values_of(peer, CHUNKS, round_)) for peer in range(6)]
            outcomes = [future.result(60.0) for future in asked]
            mean = np.mean([values_of(peer, CHUNKS, round_) for peer in range(6)], axis=0)
            for outcome in outcomes:
                assert outcome.averaged.all() and (outcome.heard == 0b111111).all() and not outcome.missed
                np.testing.assert_allclose(outcome.mean, mean, atol=1e-6)
            for outcome in outcomes[1:]:
                np.testing.assert_array_equal(outcome.mean, outcomes[0].mean)
        sent = [crew.drivers[peer].traffic().bytes_sent for peer in range(6)]
    # a client sends all of the vector once; one of four owners three quarters of it, and a quarter to five
    assert max(sent[4:]) < 0.65 * min(sent[:4])
