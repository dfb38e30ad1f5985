"""Rows that come a round late count once, also where replicas were made alike in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ragtag.codecs.sparse.density import Density
from ragtag.codecs.sparse.feedback import ErrorFeedback
from ragtag.codecs.sparse.options import Options
from ragtag.core.types import Bools, Bytes, Floats, Gathered
from ragtag.protocols.channel.at_once import BEHIND
from ragtag.training.align.late import Late
from ragtag.training.align.plan import Align
from ragtag.training.exchange.compress import TopK
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.tensors.bucket import Bucket
from ragtag.training.tensors.layout import Part
from tests.training.fake_transport import FakeTransport, run_peers
from tests.training.replicas import Mortal

D = 50
WHOLE, HALF = np.array([True, True]), np.array([True, False])


def gathered(whole: Bools, *late: tuple[int, Gathered]) -> Gathered:
    none = np.zeros((0, 1088), np.uint8)
    return Gathered(none, np.zeros(0, np.float32), np.zeros(0, np.int64), whole, ~whole, late)


# -- What may still come


def test_a_replica_is_settled_when_nothing_more_will_come() -> None:
    late = Late()
    assert late.settled
    late.saw(5, gathered(HALF))
    assert not late.settled
    late.saw(6, gathered(WHOLE, (5, gathered(HALF))))
    assert not late.settled
    late.saw(6, gathered(WHOLE, (5, gathered(WHOLE))))
    assert late.settled
    late.saw(6, gathered(WHOLE, (6 - BEHIND, gathered(HALF))))
    assert late.settled, "that round is forgotten: what did not come of it never will"


def fragments(values: Floats, round_: int, sender: int = 0) -> tuple[Bytes, Floats]:
    """All of a peer's values, by rows, and half their weight."""
    feedback = ErrorFeedback(D, Options(Density(1.0), values="fp32"), peer=sender)
    rows: Bytes = feedback.prepare(values, round_).chunks
    return rows, np.full(len(rows), 0.5, np.float32)


def test_what_was_taken_from_another_is_not_added_again() -> None:
    values: Floats = np.arange(1, D + 1, dtype=np.float32)
    rows, factor = fragments(values, 7)
    late = Late()
    late.replaced(7, np.arange(D) < 10, {})
    late.replaced(7, np.arange(D) >= 40, {})

    def added(round_: int) -> list[int]:
        total = np.ones(D, np.float32)
        assert len(late.add(total, round_, rows, factor, "fp32").fragment) == len(rows)
        assert set(total.tolist()) <= {1.0, *(1 + values / 2).tolist()}
        return [int(at) for at in np.flatnonzero(total != 1)]

    assert added(7) == added(6) == list(range(10, 40))
    assert added(8) == list(range(D)), "of rounds after it"
    late.saw(7 + BEHIND - 1, gathered(WHOLE))
    assert added(7) == list(range(10, 40))
    late.saw(7 + BEHIND, gathered(WHOLE))
    assert added(7) == list(range(D)), "nothing of that round comes any more, and nothing is kept of it"


class Replica:
    """Adds the rows of two senders (each a block of its own), in their round or up to ``BEHIND`` later."""

    def __init__(self) -> None:
        self.late, self.sum = Late(), np.zeros(D, np.float32)
        self.late.keeps = True
        self.there: dict[int, Bools] = {}

    def step(self, round_: int, draw: Callable[[], Bools]) -> None:
        """draw: of which senders the row of a round comes now."""
        found = []
        for number in [round_, *sorted(self.there)]:
            before = self.there.get(number, ~WHOLE)
            now = before | (draw() if number > round_ - BEHIND else WHOLE)
            self.there[number] = now
            found.append((number, self._part(number, now & ~before, now)))
        for number, part in found:
            self.late.add(self.sum, number, part.rows, part.factor, "fp32")
        self.late.add_again(self.sum, "fp32")
        self.late.saw(round_, replace(found[0][1], late=tuple(found[1:])))
        self.there = {number: there for number, there in self.there.items() if not there.all()}

    def _part(self, round_: int, fresh: Bools, whole: Bools) -> Gathered:
        sent = [fragments(*row_of(round_, sender)) for sender in np.flatnonzero(fresh).tolist()]
        rows = np.concatenate([np.zeros((0, 1088), np.uint8), *(rows for rows, _ in sent)])
        factor = np.concatenate([np.zeros(0, np.float32), *(factor for _, factor in sent)])
        return replace(gathered(whole), rows=rows, factor=factor)


def row_of(round_: int, sender: int) -> tuple[Floats, int, int]:
    """What a sender gives in a round: whole numbers, so that sums are exact in whatever order."""
    values = np.random.default_rng([round_, sender]).integers(1, 1000, D)
    return (2 * values).astype(np.float32), round_, sender


@given(st.data())
def test_each_row_counts_once_whoever_takes_from_whom(data: st.DataObject) -> None:
    """Whatever comes late to whom, and whatever is taken, after any round, from one that lacks something."""
    replicas, rounds = [Replica() for _ in range(3)], 6
    places = st.integers(0, D)
    for round_ in range(rounds):
        for replica in replicas:
            replica.step(
                round_, lambda: np.array(data.draw(st.tuples(st.booleans(), st.booleans()), "comes"))
            )
        giver = data.draw(st.sampled_from([None, 0, 1, 2]), "giver")
        came = None if giver is None else replicas[giver].late.came()
        if giver is None or came is None:
            continue
        for taker in {0, 1, 2} - {giver}:
            where = np.zeros(D, np.bool_)
            where[slice(*sorted(data.draw(st.tuples(places, places), "where")))] = True
            replicas[taker].sum[where] = replicas[giver].sum[where]
            replicas[taker].late.replaced(round_, where, came)
    for replica in replicas:
        replica.step(rounds, lambda: WHOLE)
    right = sum(row_of(round_, sender)[0] / 2 for round_ in range(rounds + 1) for sender in range(2))
    for replica in replicas:
        assert np.array_equal(replica.sum, right)


@pytest.mark.parametrize("turned", [False, True])
def test_places_of_pieces_in_the_table(turned: bool) -> None:
    tensors = [torch.zeros(3), torch.zeros(5, 4), torch.zeros(0)]
    if turned:
        tensors[1] = torch.zeros(4, 5).t()
    bucket = Bucket([Part(f"p{at}", "parameter", lambda t=t: t) for at, t in enumerate(tensors)], 8)
    where = bucket.where([(0, 1, 2), (1, 3, 6), (2, 0, 0)])
    bucket.flatten()
    bucket.restore(where.reshape(bucket.values.shape).astype(np.float32), np.ones(len(bucket.values), bool))
    assert tensors[0].tolist() == [0, 1, 0]
    assert tensors[1].reshape(-1).tolist() == [0] * 3 + [1] * 3 + [0] * 14
    assert where.sum() == 4


# -- A crew


@pytest.mark.parametrize(("deadline_s", "every"), [(0.01, 4), pytest.param(0.008, 2, marks=pytest.mark.slow)])
def test_late_rows_count_once_where_replicas_are_compared(deadline_s: float, every: int) -> None:
    """A quarter of all is lost, deadlines leave little time for repair, and what is late is then taken from
    others, too, also from those that lack some: all the same, in the end replicas have moved by the mean of
    what was committed.
    """
    late = taken = 0
    for seed in range(5):
        come = Spoilt(deadline_s, every, seed)
        for moved in come.moved:
            np.testing.assert_allclose(moved, come.committed, atol=1e-4, err_msg=f"seed {seed}")
        late, taken = late + come.late, taken + come.taken
    assert late > 20 and taken > 20


class Spoilt:
    """What a crew of four comes to: late: rows; taken: units; moved: each replica's values; committed: their
    mean.
    """

    def __init__(self, deadline_s: float, every: int, seed: int) -> None:
        n, ill, rounds = 4, 40, 48 + 4 * every
        crew = Mortal(n, {}, loss=0.25, seed=seed)
        models = [nn.Linear(40, 30, bias=False) for _ in range(n)]
        gave = [np.zeros(40 * 30) for _ in range(n)]
        self.late = self.taken = 0

        def train(transport: FakeTransport) -> CrewOptimizer:
            me, weight = transport.me, models[transport.me].weight
            torch.nn.init.zeros_(weight)
            optimizer = CrewOptimizer(
                torch.optim.SGD([weight], lr=1.0), transport, average="gradients", model=models[me],
                compress=TopK(0.5, values="fp32", resync=0, bypass=False), deadline_s=deadline_s,
                align=Align(every, 1.0),
            )  # fmt: skip
            draw = torch.Generator().manual_seed(me)
            for round_ in range(rounds):
                if round_ == ill and me == 0:
                    crew.heal()
                weight.grad = torch.randn(weight.shape, generator=draw) * (round_ < ill)
                gave[me] += weight.grad.reshape(-1).numpy()
                optimizer.step()
                assert optimizer._averaged.compression is not None and optimizer.outcome is not None
                self.late += optimizer._averaged.compression.late
                if (
                    optimizer._averaged.aligned is not None
                    and optimizer._averaged.aligned.round == optimizer.outcome.round - 1
                ):
                    self.taken += optimizer._averaged.aligned.taken
            return optimizer

        optimizers = run_peers(crew, train)
        feedbacks = [
            optimizer._averaged.sparse.feedback
            for optimizer in optimizers
            if optimizer._averaged.sparse is not None
        ]
        kept = [(feedback.residual + feedback.pending())[: 40 * 30] for feedback in feedbacks]
        self.committed = sum(g - k for g, k in zip(gave, kept, strict=True)) / n
        self.moved = [-model.weight.detach().reshape(-1).numpy() for model in models]
