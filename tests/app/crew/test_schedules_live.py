"""Schedules that go by speed, over real drivers: a slow peer holds nobody up, and its work counts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from ragtag.app.crew.transport import DriverTransport
from ragtag.core.types import Outcome
from ragtag.schedules import SSP, Matched, Partial
from ragtag.schedules.base import Schedule
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.app.drivers import all_at_once, step, tiny, transports
from tests.network.crew import PATIENCE_S, Crew

SLOW, SLOWER, STEPS = 2, 10, 6
"""Peer 2 of 3 takes ``STEPS`` steps, each as long as ``SLOWER`` of peer 0's."""
STEP_S, NEVER = 0.01, threading.Event()
"""A step takes long against a message, as steps do; nobody sets the event."""


class Course:
    """How far peer 0 has come, and whether the slow one is done."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.steps, self.done = 0, False

    def stepped(self) -> bool:
        with self.changed:
            self.steps += 1
            self.changed.notify_all()
            return self.done

    def stand_by(self) -> None:
        """As long as ``SLOWER`` steps of peer 0 take."""
        with self.changed:
            until = self.steps + SLOWER
            assert self.changed.wait_for(lambda: self.steps >= until, PATIENCE_S)

    def end(self) -> None:
        with self.changed:
            self.done = True


def run(schedule: Schedule) -> dict[int, list[Outcome]]:
    """The outcomes of each peer."""
    course, models = Course(), [tiny(seed=0) for _ in range(3)]
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    ended = threading.Event()

    def train(transport: DriverTransport) -> list[Outcome]:
        model, me = models[transport.me], transport.me
        seen: list[Outcome] = []
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            transport,
            schedule=schedule,
            model=model,
            on_outcome=seen.append,
        )
        for _ in range(STEPS if me == SLOW else 5000):
            if me == SLOW:
                course.stand_by()
            NEVER.wait(STEP_S)
            step(model, optimizer, inputs)
            if me == 0 and course.stepped():
                ended.set()
            if me != SLOW and ended.is_set():
                break
        if me == SLOW:
            optimizer._averaged.settle()  # as its crew does: what its last step taught is under way
            course.end()
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        return seen

    with Crew(3) as crew:
        came = all_at_once(transports(crew), train)
    assert all(isinstance(outcomes, list) for outcomes in came.values()), came
    return came


def with_slow(outcomes: list[Outcome]) -> int:
    """In how many of them the slow peer's values are."""
    return sum(bool(np.any(o.heard & np.uint64(1 << SLOW))) for o in outcomes)


@pytest.mark.slow  # on a busy machine a slow peer's few shares may all come between rounds: 2 of 60 times
def test_partial_averages_wait_for_the_fast_and_take_what_the_slow_brings() -> None:
    came = run(Partial())
    tail = came[0][4 * SLOWER :]  # by then all have posted how slow they are
    assert len(tail) > SLOWER
    waited = sum(SLOW in outcome.waited_for for outcome in tail)
    assert waited == 0
    assert with_slow(came[0]) + with_slow(came[1]) >= STEPS // 2  # most of its turns are in both
    assert len(came[SLOW]) == STEPS


def test_matched_steps_bring_all_to_the_same_rounds() -> None:
    came = run(Matched())
    tail = came[0][2 * SLOWER :]  # by then all know of the slow one's speed, which peer 0 is at pace with
    assert len(came[0]) < SLOWER * STEPS // 2
    assert with_slow(tail) >= len(tail) // 2


def test_bounded_staleness_holds_once_speeds_are_known() -> None:
    """A fast peer that is too far ahead waits: its clock and the slow one's stay together."""
    bound, models = 3, [tiny(seed=0) for _ in range(2)]
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    clock = 0
    ahead: list[int] = []

    def train(transport: DriverTransport) -> None:
        nonlocal clock
        model, slow = models[transport.me], transport.me == 1
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), transport, schedule=SSP(bound), model=model
        )
        while clock < 40 if slow else ahead[-1:] != [-1]:
            NEVER.wait((3 if slow else 1) * STEP_S)
            step(model, optimizer, inputs)
            if slow:
                clock = optimizer._averaged.progress[0]
            else:
                ahead.append(-1 if clock >= 40 else optimizer._averaged.progress[0] - clock)

    with Crew(2) as crew:
        came = all_at_once(transports(crew), train)
    assert all(value is None for value in came.values()), came
    assert len(ahead) <= 1.4 * 40  # 44, and more where a busy machine outlasts a wait; without a bound 120
