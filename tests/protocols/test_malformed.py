"""Runs that fit no message of the round: nothing changes, nothing is raised."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.types import Arrived, Average, Done, Effect, MessageKey, Outcome, Run
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.base import BLOCK_BITS, BY_SHARES, GATHER, NACK, SCATTER
from ragtag.protocols.rounds.layout import layout_of
from ragtag.protocols.rounds.rps import rps, rps_repair
from tests.protocols.harness import TINY, vectors

METHODS = pytest.mark.parametrize("method", [rps, rps_repair, direct, ring], ids=lambda m: m.name)
N, N_CHUNKS = 4, 14
SIZES = layout_of(N_CHUNKS, N).sizes


def junk(peer: int, key: MessageKey, first: int, total: int, k: int, width: int = TINY.elements * 4) -> Run:
    """A run that no one should take: its values would show in any average."""
    payload = np.full((k, width), 0x7E, np.uint8)
    return Run(
        peer, key, first, total, payload, np.full(k, 1e9, np.float32), np.full(k, 15, np.uint64), ended=True
    )


STAGES = st.sampled_from([SCATTER, GATHER])


@st.composite
def malformed(draw: st.DrawFn) -> Run:
    """One thing wrong with each, the rest as it should be."""
    peer, block, stage = draw(st.integers(1, N - 1)), draw(st.integers(0, N - 1)), draw(STAGES)
    what = draw(st.sampled_from(["block", "total", "first", "length", "peer", "stage", "channel"]))
    size = SIZES[block]
    first, total, k, channel = 0, size, size, 0
    if what == "block":
        # a growth that can be true is believed (test_growth): it changes the cut, and no value. So is a cut
        # by shares (test_clients): it changes who is missed
        block = draw(st.integers(N, 63) | st.integers(61 << BLOCK_BITS, (BY_SHARES << BLOCK_BITS) - 1))
    elif what == "total":
        total = draw(st.integers(0, 2**32 - 1).filter(lambda t: t != size))
    elif what == "first":
        first, k = draw(st.integers(size, 2**32 - 1)), draw(st.integers(1, size))
    elif what == "length":
        first, k = draw(st.integers(1, size)), size
    elif what == "peer":
        peer = draw(st.sampled_from([0, N, 63, 64, 2**16 - 1]))
    elif what == "stage":
        stage = draw(st.integers(2, 0x7F) | st.integers(0x82, 0xFF))
    elif what == "channel":
        channel = draw(st.integers(1, 254))
    return junk(peer, MessageKey(channel, 0, stage, block), first, total, k)


@st.composite
def malformed_requests(draw: st.DrawFn) -> Run:
    """Requests for repair of what was never sent, in no sensible shape."""
    block = draw(st.integers(0, 2 * N))
    key = MessageKey(0, 0, draw(STAGES) | NACK, block)
    k = draw(st.integers(0, 4))
    first, total = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**32 - 1))
    return junk(draw(st.integers(0, 2**16 - 1)), key, first, total, k, width=CHUNK_BYTES)


def finished(method: Averager, before: list[Run], during: list[Run]) -> Outcome:
    """Node 0's round when all others take part, with strays before and after it begins."""
    nodes = [Node(i, N, seed=1) for i in range(N)]
    for node in nodes:
        node.configure(0, Channel(method, TINY, N_CHUNKS, probe_s=0.1, rtt_s=0.01))
    inputs = vectors(N, N_CHUNKS)
    for run in before:
        nodes[0].step(0.0, Arrived((run,)))
    queue: list[tuple[int, Effect]] = []
    for i, node in enumerate(nodes):
        queue += [(i, effect) for effect in node.step(0.0, Average(0, inputs[i], 1.0))]
    for run in during:
        queue += [(0, effect) for effect in nodes[0].step(0.0, Arrived((run,)))]
    while queue:
        source, effect = queue.pop(0)
        if isinstance(effect, Done) and source == 0:
            return effect.outcome
        to = getattr(getattr(effect, "run", None), "peer", None)
        if to is not None and to < N:
            run = replace(effect.run, peer=source)  # type: ignore[union-attr]
            queue += [(to, more) for more in nodes[to].step(0.0, Arrived((run,)))]
    raise AssertionError("the round did not end")


def content(outcome: Outcome) -> tuple[Any, ...]:
    arrays = (outcome.mean, outcome.weight, outcome.heard, outcome.averaged)
    return (*(array.tobytes() for array in arrays), outcome.missed, outcome.expired)


@METHODS
def test_malformed_runs_change_nothing(method: Averager) -> None:
    plain = content(finished(method, [], []))

    @given(st.lists(malformed(), max_size=4), st.lists(malformed(), max_size=4))
    def strays(before: list[Run], during: list[Run]) -> None:
        assert content(finished(method, before, during)) == plain

    strays()


@METHODS
def test_malformed_requests_change_nothing(method: Averager) -> None:
    """They may be answered, where they name what was sent; they never reach an average."""
    plain = content(finished(method, [], []))

    @given(st.lists(malformed_requests(), max_size=3), st.lists(malformed_requests(), max_size=3))
    def strays(before: list[Run], during: list[Run]) -> None:
        assert content(finished(method, before, during)) == plain

    strays()


ANY_RUN = st.builds(
    lambda peer, round_, stage, block, first, total, k, mask, ended: replace(
        junk(peer, MessageKey(0, round_, stage, block), first, total, k, CHUNK_BYTES if stage & NACK else 16),
        mask=np.array(mask[:k], np.bool_) if mask is not None else None,
        ended=ended,
    ),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(0, 255),
    st.integers(0, 5),
    st.integers(0, 6),
    st.integers(0, 6),
    st.integers(0, 5),
    st.none() | st.lists(st.booleans(), min_size=5, max_size=5),
    st.booleans(),
)


@METHODS
def test_no_sequence_of_runs_raises(method: Averager) -> None:
    """Any runs a peer of the crew could send, sensible or not, in any order, before and during a round."""

    @given(st.lists(ANY_RUN, max_size=25), st.lists(ANY_RUN, max_size=25))
    def strays(before: list[Run], during: list[Run]) -> None:
        node = Node(0, N, seed=1)
        node.configure(0, Channel(method, TINY, N_CHUNKS, probe_s=0.1, rtt_s=0.01))
        for run in before:
            node.step(0.0, Arrived((run,)))
        own = vectors(N, N_CHUNKS)[0]
        kept = copy.deepcopy(own)
        node.step(0.0, Average(0, own, 1.0))
        for run in during:
            node.step(0.0, Arrived((run,)))
        assert np.array_equal(own, kept)

    strays()
