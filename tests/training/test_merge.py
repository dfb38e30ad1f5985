"""Slow peers in partial averages: the others do not wait, and what the slow one learned is not lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import nn

from ragtag.core.channels import topic_of
from ragtag.core.types import Floats, Outcome, nobodys
from ragtag.protocols.groups.channel import Moshpit
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.protocols.rounds.rps import RPS
from ragtag.schedules import SSP, LocalSteps, Partial
from ragtag.training.exchange.slow import Merge
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.optimizer.scheduling import Scheduling
from ragtag.training.optimizer.weight import BySamples, weight_of
from tests.training.fake_transport import FakeCrew, FakeTransport


def test_what_was_learned_is_added_to_where_the_crew_is() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    merge = Merge([parameter])
    assert not merge.marked
    merge.mark()
    with torch.no_grad():
        parameter.add_(torch.tensor([0.5, -0.5]))  # own steps
    merge.lift()
    assert parameter.tolist() == [1.0, 2.0]
    with torch.no_grad():
        parameter.copy_(torch.tensor([10.0, 20.0]))  # the crew's average
    merge.land()
    assert parameter.tolist() == [10.5, 19.5]
    merge.lift()  # as learned against the crew's average
    assert parameter.tolist() == [10.0, 20.0]
    merge.land()
    assert parameter.tolist() == [10.5, 19.5]


@dataclass
class Scripted(FakeTransport):
    """Rounds whose averages are given: ``None``, nothing came. late: numbers of rounds (from 1 on) that were
    over for the others when this peer's values came.
    """

    means: list[float | None] = field(default_factory=list)
    late: tuple[int, ...] = ()
    offered: list[tuple[float, float, frozenset[int]]] = field(default_factory=list)

    def start(
        self,
        channel: int,
        values: Floats,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[int] = frozenset(),
        due: int = -1,
    ) -> Scripted:
        self.offered.append((float(values.reshape(-1)[0]), weight, aside))
        self.values = values
        return self

    def wait(self) -> Outcome:
        mean, chunks = self.means.pop(0), len(self.values)
        came = mean is not None
        table = self.values.copy()
        table.reshape(-1)[0] = mean if mean is not None else table.reshape(-1)[0]
        others = 3 if len(self.offered) in self.late else 7
        heard = np.full(chunks, others if came else 1 << self.me, np.uint64)
        ones = np.ones(chunks, np.float32)
        averaged = np.full(chunks, came)
        return Outcome(
            0, len(self.offered), table, ones, heard, averaged, (), (0, 1), 0, 0, 0.01, 0.01, not came
        )


def slow(means: list[float | None], late: tuple[int, ...] = ()) -> tuple[Scripted, Callable[[float], float]]:
    """Peer 2 of 3, which knows itself to be slow; the function takes a step and returns the weight."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    transport = Scripted(FakeCrew(3), 2, means, late=late)
    optimizer = CrewOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), transport, schedule=Partial(), model=model
    )
    optimizer._averaged.scheduling = Told(Partial(), transport, "model")

    def step(by: float) -> float:
        model.weight.grad = torch.full_like(model.weight, -by)
        optimizer.step()
        return float(model.weight.detach())

    return transport, step


def test_a_slow_peer_brings_what_it_learned_to_where_the_crew_is() -> None:
    transport, step = slow([1.0, 9.0, 9.5])
    assert step(0.5) == 1.0  # the first average: no anchor yet
    assert step(-3.0) == 9.5
    aside = frozenset({2})
    assert transport.offered == [(0.5, 1.0, aside), (1.0, 0.0, aside), (6.0, 1.0, aside)]


def test_where_nothing_came_it_is_kept_for_the_next_time() -> None:
    transport, step = slow([1.0, None, 9.0, 7.0])
    step(0.0)
    assert step(-3.0) == -2.0  # 1 - 3: nothing of the crew's came
    assert len(transport.offered) == 2
    assert step(-1.0) == 7.0
    assert [value for value, *_ in transport.offered[2:]] == [1.0, 5.0]  # 9 - 3 - 1


def test_what_came_too_late_for_one_round_is_offered_to_the_next() -> None:
    transport, step = slow([1.0, 9.0, 8.0, 5.5], late=(3,))
    step(0.5)
    assert step(-3.0) == 5.5
    assert [value for value, *_ in transport.offered[1:]] == [1.0, 6.0, 5.0]  # taken: 9 - 3, late: 8 - 3
    assert [weight for _, weight, _ in transport.offered[1:]] == [0.0, 1.0, 1.0]


def test_what_came_too_late_twice_is_kept_for_the_next_turn() -> None:
    transport, step = slow([1.0, 9.0, 8.0, 7.0, 2.0, 1.5], late=(3, 4))
    step(0.5)
    assert step(-3.0) == 4.0  # 7 - 3
    assert step(-1.0) == 1.5
    assert [value for value, *_ in transport.offered[4:]] == [7.0, -2.0]  # 2 - 3 - 1


def test_a_first_turn_has_nothing_to_measure_what_was_learned_by() -> None:
    transport, step = slow([1.0], late=(1,))
    assert step(0.5) == 1.0
    assert len(transport.offered) == 1


def test_only_what_no_average_had_is_kept() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    merge = Merge([parameter])
    merge.mark()
    with torch.no_grad():
        parameter.add_(torch.tensor([0.5, -0.5]))

    def average(weight: float) -> Outcome:
        rounds.append(weight)
        with torch.no_grad():
            parameter.copy_(torch.tensor([10.0, 20.0]))
        return outcome

    rounds: list[float] = []
    two = np.ones(2, np.bool_)
    outcome = nobodys(0, np.zeros((2, 1), np.float32), np.ones(2, np.float32), np.zeros(2, np.uint64), None)
    outcome = replace(outcome, averaged=two)
    merge.give(average, 2.0, lambda _: np.array([True, False]), lambda _, lost: torch.from_numpy(lost))
    assert rounds == [0.0, 2.0, 2.0]
    assert merge.kept
    assert parameter.tolist() == [10.5, 20.0]
    merge.lift()
    assert parameter.tolist() == [10.0, 20.0]


def test_where_too_little_of_the_crew_came_all_that_was_learned_is_kept_and_said_to_be() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    merge = Merge([parameter])
    merge.mark()
    with torch.no_grad():
        parameter.add_(torch.tensor([0.5, -0.5]))
    nobody = nobodys(0, np.zeros((2, 1), np.float32), np.ones(2, np.float32), np.zeros(2, np.uint64), None)
    rounds: list[float] = []

    def average(weight: float) -> Outcome:
        rounds.append(weight)
        return nobody

    merge.give(average, 2.0, lambda _: np.ones(2, np.bool_), lambda _, lost: torch.from_numpy(lost))
    assert rounds == [0.0] and merge.kept
    assert parameter.tolist() == [1.5, 1.5]
    merge.lift()
    assert parameter.tolist() == [1.0, 2.0]


class Told(Scheduling):
    """Peer 2 is known to be slow."""

    def begin(self) -> frozenset[int]:
        self._aside = frozenset({2})
        return self._aside


# -- What is refused


def test_gradients_cannot_be_missed() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match='use average="models"'):
        CrewOptimizer(optimizer, FakeCrew(1).transport(0), schedule=SSP(2), average="gradients")


@pytest.mark.parametrize("method", [Moshpit(), AllReduce(ring=True)], ids=lambda m: m.name)
def test_methods_that_need_everybody_are_refused(method: object) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="use RPS"):
        CrewOptimizer(optimizer, FakeCrew(1).transport(0), schedule=Partial(), method=method)  # type: ignore[arg-type]


def test_a_schedule_that_needs_no_speeds_posts_none() -> None:
    crew = FakeCrew(1)
    model = nn.Linear(2, 2)
    for schedule, posts in ((LocalSteps(2), 0), (Partial(), 1)):
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            crew.transport(0),
            schedule=schedule,
            method=RPS(),
            model=model,
        )
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert len(crew.transport(0).posts(topic_of("model/pace"))) == posts


# -- Weights by samples


def test_samples_since_the_last_average() -> None:
    total = [0]
    weight = BySamples(lambda: total[0])
    with pytest.raises(RuntimeError, match=r"crew\.split"):
        weight()
    seen = []
    for more in (16, 32, 0, 8):
        total[0] += more
        seen.append(weight())
    assert seen == [16.0, 32.0, 32.0, 8.0]


def test_weights_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="'steps'; it is a number"):
        weight_of("steps", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples="):
        weight_of("samples", None)
    assert weight_of(2.5, None)() == 2.5
