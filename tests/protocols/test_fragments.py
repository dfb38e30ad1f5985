"""A channel that averages fragments in turn: the round's number says which; newcomers take each one first."""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.codecs.dense import fp32
from ragtag.core.types import Average, Done, Outcome
from ragtag.protocols.channel.averager import Channel
from ragtag.protocols.groups.channel import Moshpit
from ragtag.protocols.node import CATCH_UP, Node
from ragtag.protocols.rounds.rps import rps

FRAGMENTS, CHUNKS = 3, 2


def alone() -> Node:
    node = Node(0, 1, 0)
    node.configure(0, Channel(rps, fp32, CHUNKS, probe_s=1.0, rtt_s=1e-3, fragments=FRAGMENTS))
    return node


def average(node: Node) -> Outcome:
    values = np.repeat(np.arange(FRAGMENTS), CHUNKS)[:, None] * np.ones((1, fp32.elements))
    effects = node.step(0.0, Average(0, np.ascontiguousarray(values, np.float32), 1.0))
    return next(effect.outcome for effect in effects if isinstance(effect, Done))


def test_the_rounds_number_says_which_fragment() -> None:
    node = alone()
    for round_ in range(2 * FRAGMENTS):
        outcome = average(node)
        assert outcome.round == round_
        assert outcome.mean.shape == (CHUNKS, fp32.elements)
        assert set(outcome.mean.reshape(-1)) == {round_ % FRAGMENTS}


def test_a_newcomer_takes_each_fragment_before_it_gives() -> None:
    node = alone()
    node.resume(0, 4)
    weights = [float(average(node).weight[0]) for _ in range(FRAGMENTS + 2)]
    assert weights == [0.0] * FRAGMENTS + [1.0, 1.0]


def test_so_does_who_was_away_for_long() -> None:
    node = alone()
    average(node)
    node.channels[0].highest = CATCH_UP + 2  # heard of
    outcomes = [average(node) for _ in range(FRAGMENTS + 2)]
    assert outcomes[0].round == CATCH_UP + 2
    assert [float(outcome.weight[0]) for outcome in outcomes] == [0.0] * FRAGMENTS + [1.0, 1.0]


def test_what_does_not_fit_is_refused() -> None:
    node = alone()
    with pytest.raises(ValueError, match="on a channel of"):
        node.step(0.0, Average(0, np.zeros((CHUNKS, fp32.elements), np.float32), 1.0))
    with pytest.raises(ValueError, match="no fragments"):
        node.configure(1, Channel(Moshpit(4), fp32, CHUNKS, 1.0, 1e-3, fragments=2))
