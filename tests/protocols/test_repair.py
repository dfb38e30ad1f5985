"""Requests for repair: what is missing, in bitmaps that each decode alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Faults, Loss
from ragtag.core.types import Average, Bools, MessageKey, Outcome, Run
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.groups.channel import Moshpit
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.rounds.base import NACK
from ragtag.protocols.rounds.repair import BITS, request, requested
from ragtag.protocols.rounds.rps import rps_repair
from ragtag.simulation.worlds.rounds import World

KEY = MessageKey(1, 2, 0, 3)
HOLES = st.tuples(
    st.sampled_from([1, 7, BITS - 1, BITS, BITS + 1, 2 * BITS + 5]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.001, 0.1, 0.9]),
)


def holes(drawn: tuple[int, int, float]) -> Bools:
    total, seed, rate = drawn
    return np.random.default_rng(seed).random(total) < rate


def parts(run: Run, total: int) -> list[int]:
    """Which part of the bitmap each row of a request carries; there are several copies of each."""
    k = -(-total // BITS)
    return [(run.first + i) % k for i in range(len(run.payload))]


@given(HOLES)
def test_a_request_names_the_holes(drawn: tuple[int, int, float]) -> None:
    missing = holes(drawn)
    run = request(5, KEY, missing)
    assert (run.peer, run.key) == (5, KEY._replace(stage=NACK))
    assert run.payload.shape == (run.total, CHUNK_BYTES)
    assert set(parts(run, len(missing))) == set(range(-(-len(missing) // BITS)))
    assert np.array_equal(requested(run, len(missing)), missing)


@given(HOLES, st.data())
def test_what_arrives_of_a_request_names_its_part(drawn: tuple[int, int, float], data: st.DataObject) -> None:
    """A part is lost only with all its copies, and costs its own 8,704 chunks and no others."""
    missing = holes(drawn)
    run = request(5, KEY, missing)
    first = data.draw(st.integers(0, run.total - 1))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=run.total, max_size=run.total)))[first:]
    part = replace(run, first=first, payload=run.payload[first:], mask=mask)
    arrived = {j for j, there in zip(parts(part, len(missing)), mask, strict=True) if there}
    named = np.isin(np.arange(len(missing)) // BITS, list(arrived))
    assert np.array_equal(requested(part, len(missing)), missing & named)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("method", [rps_repair, direct, Moshpit(4)], ids=lambda method: method.name)
def test_where_delays_are_zero_repair_takes_some_time_all_the_same(method: Averager) -> None:
    """A measured round trip of no time is no pause: the same would be asked for ever, at one virtual time."""
    nodes = [Node(peer, 4, 1) for peer in range(4)]
    values = np.ones((16, fp32.elements), np.float32)
    done = [0] * 4

    def again(peer: int, at_s: float, outcome: Outcome) -> None:
        done[peer] += 1
        world.at(at_s + 0.01, peer, Average(0, values, 1.0))

    for node in nodes:
        node.configure(0, Channel(method, fp32, 16, probe_s=0.05, rtt_s=1e-3))
    world = World(nodes, Faults(latency_s=0.0, loss=Loss(0.3)), 1, on_done=again)
    for peer in range(4):
        world.at(0.0, peer, Average(0, values, 1.0))
    world.run(1.0)
    assert min(done) >= 5
