"""Slow peers in partial averages: the others do not wait, and what the slow one learned is not lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import nn

from ragtag.codecs.dense import fp32
from ragtag.core.channels import topic_of
from ragtag.core.faults import Faults, Freeze
from ragtag.core.types import Floats, Outcome, nobodys
from ragtag.protocols.groups.channel import Moshpit
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.protocols.rounds.rps import RPS
from ragtag.schedules import DSSP, SSP, LocalSteps, Partial
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.exchange.base import Layer
from ragtag.training.exchange.dense import Replica
from ragtag.training.exchange.slow import SlowPeer
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.optimizer.scheduling import Scheduling
from ragtag.training.optimizer.weight import BySamples, weight_of
from ragtag.training.tensors.bucket import Bucket
from ragtag.training.tensors.layout import Part
from tests.training.fake_transport import FakeCrew, FakeTransport


@dataclass
class Scripted(FakeTransport):
    """Rounds whose averages are given: ``None``, nothing came. late: numbers of rounds (from 1 on) that were
    over for the others when this peer's values came. newest: the last round that others have begun.
    """

    means: list[float | None] = field(default_factory=list)
    late: tuple[int, ...] = ()
    over: bool = True
    newest: int = 1_000
    offered: list[tuple[float, float, frozenset[int]]] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)

    def heard_of(self, channel: int) -> int:
        return self.newest

    def start(
        self,
        channel: int,
        values: Floats,
        weight: float,
        deadline_s: float | None = None,
        aside: frozenset[int] = frozenset(),
        due: int = -1,
        number: int = -1,
    ) -> Scripted:
        self.offered.append((float(values.reshape(-1)[0]), weight, aside))
        self.deadlines.append(deadline_s)
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


def slow(
    means: list[float | None], late: tuple[int, ...] = (), deadline_s: float | None = None
) -> tuple[Scripted, Callable[[float], float]]:
    """Peer 2 of 3, which knows itself to be slow; the function takes a step and returns the weight."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    transport = Scripted(FakeCrew(3), 2, means=means, late=late)
    optimizer = CrewOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), transport, schedule=Partial(), model=model,
        deadline_s=deadline_s,
    )  # fmt: skip
    optimizer._averaged.scheduling = Told(Partial(), transport, "model")

    def step(by: float) -> float:
        model.weight.grad = torch.full_like(model.weight, -by)
        optimizer.step()
        return float(model.weight.detach())

    return transport, step


def test_a_slow_peer_brings_what_it_learned_to_where_the_crew_is() -> None:
    transport, step = slow([1.0, 9.0])
    assert step(0.5) == 1.0  # the first average: nothing to have gone on from
    assert step(-3.0) == 6.0  # it takes 9, and computes on while it offers 6
    aside = frozenset({2})
    assert transport.offered == [(0.5, 1.0, aside), (1.0, 0.0, aside), (6.0, 1.0, aside)]


def test_all_its_rounds_have_the_callers_deadline() -> None:
    transport, step = slow([1.0, 9.0], deadline_s=5.0)
    step(0.5)
    step(-3.0)
    assert transport.deadlines == [5.0] * 3


def test_what_its_offer_came_to_it_takes_at_its_next_turn() -> None:
    transport, step = slow([1.0, 9.0, 9.5, 12.0])
    step(0.5)
    step(-3.0)
    assert step(-1.0) == 11.0  # the offer's average is 9.5; the newest is 12, and one step was taken since
    assert [value for value, *_ in transport.offered[3:]] == [9.5, 11.0]


def test_where_nobody_is_past_the_next_round_it_takes_no_average_and_waits_for_nobody() -> None:
    """Under a bound on staleness they may wait for its next step, and so not come to that round."""
    transport, step = slow([1.0, 9.0, 12.0])
    step(0.5)  # round 1
    transport.newest = 2
    assert step(-3.0) == -2.0  # the offer to round 2
    transport.newest = 3
    assert step(-1.0) == 8.0  # that came to 9: less a step, to round 3
    assert [offer[:2] for offer in transport.offered] == [(0.5, 1.0), (-2.0, 1.0), (8.0, 1.0)]
    assert step(-1.0) == 11.0  # round 3 came to 12
    assert transport.offered[-1][1] == 1.0
    transport.means, transport.newest = [20.0, 30.0], 6
    assert step(-1.0) == 29.0  # round 4 came to 20; the others have begun round 6, so round 5 is over
    assert [weight for _, weight, _ in transport.offered[4:]] == [0.0, 1.0]


def test_a_round_of_which_nothing_came_is_not_the_one_that_it_goes_on_from() -> None:
    """Else it would offer to round after round what it has built on an old average."""
    transport, step = slow([1.0, None, 20.0, 30.0])
    step(0.5)  # round 1
    transport.newest = 2
    assert step(-3.0) == -2.0  # the offer to round 2, of which nothing comes
    transport.newest = 3
    assert step(-1.0) == 19.0  # the others are past round 2: the average of round 3, and one step
    assert [weight for _, weight, _ in transport.offered] == [1.0, 1.0, 0.0, 1.0]


def test_where_nothing_came_it_is_kept_for_the_next_time() -> None:
    transport, step = slow([1.0, None, 9.0])
    step(0.0)
    assert step(-3.0) == -2.0  # 1 - 3: nothing of the crew's came
    assert len(transport.offered) == 2
    assert step(-1.0) == 5.0
    assert [value for value, *_ in transport.offered[2:]] == [1.0, 5.0]  # 9 - 3 - 1


def test_what_came_too_late_for_its_round_is_offered_again() -> None:
    transport, step = slow([1.0, 9.0, 8.0, 7.0, 2.0, 0.5], late=(3,))
    step(0.5)
    assert step(-3.0) == 6.0
    assert step(-1.0) == 3.0  # the offer's average was 8, without its 3; it takes 7: 7 - 3 - 1
    assert [value for value, *_ in transport.offered[2:]] == [6.0, 8.0, 3.0]
    assert step(-1.0) == -0.5  # that one came: 0.5 - 1
    assert [value for value, *_ in transport.offered[5:]] == [2.0, -0.5]


def test_while_its_round_is_under_way_it_computes_on() -> None:
    transport, step = slow([1.0, 9.0, 9.5, 12.0])
    step(0.5)
    step(-3.0)
    transport.over = False
    assert step(-1.0) == 5.0
    assert len(transport.offered) == 3
    transport.over = True
    assert step(-1.0) == 10.0  # 12, and two steps
    assert [weight for _, weight, _ in transport.offered[3:]] == [0.0, 1.0]


def test_a_first_turn_has_nothing_to_measure_what_was_learned_by() -> None:
    transport, step = slow([1.0], late=(1,))
    assert step(0.5) == 1.0
    assert len(transport.offered) == 1


class Rounds(Layer):
    """An exchange of one parameter of two chunks whose averages are given, at peer 2 of 3, of whose rounds
    the others are far ahead.
    """

    def __init__(self, parameter: nn.Parameter, outcomes: list[tuple[list[float], Outcome]]) -> None:
        part = Part("w", "parameter", lambda: parameter)
        self.transport = Scripted(FakeCrew(3), 2)
        super().__init__(Replica([part], self.transport, RPS(), fp32, share=False))
        self._bucket = Bucket([part], 4, share=False)
        self.parameter, self.outcomes, self.weights = parameter, outcomes, list[float]()

    @property
    def bucket(self) -> Bucket:
        return self._bucket

    def average(self, weight: float = 1.0, deadline_s: object = None, aside: object = None) -> Outcome:
        return self.end(self.begin(weight))

    def begin(self, weight: float = 1.0, deadline_s: object = None, aside: object = None) -> int:
        self.weights.append(weight)
        return 0

    def end(self, begun: object) -> Outcome:
        values, outcome = self.outcomes.pop(0)
        fresh = torch.from_numpy(outcome.averaged.repeat(4)[:8])
        with torch.no_grad():
            self.parameter.copy_(torch.where(fresh, torch.tensor(values), self.parameter))
        return outcome

    def forget(self) -> None:
        pass


def two_chunks(heard: tuple[int, int], averaged: tuple[bool, bool] = (True, True)) -> Outcome:
    outcome = nobodys(0, np.zeros((2, 4), np.float32), np.ones(2, np.float32), np.zeros(2, np.uint64), None)
    return replace(outcome, averaged=np.array(averaged), heard=np.array(heard, np.uint64))


def test_only_what_no_average_had_is_kept() -> None:
    parameter = nn.Parameter(torch.zeros(8))
    all_of_it, half = two_chunks((7, 7)), two_chunks((3, 7))
    script = [([1.0] * 8, all_of_it), ([9.0] * 8, two_chunks((3, 3))), ([8.0] * 8, half), ([7.0] * 8, half)]
    rounds = Rounds(parameter, script)
    exchange = SlowPeer(rounds, [parameter], rounds.transport)
    aside = frozenset({2})
    exchange.average(1.0, None, aside)
    with torch.no_grad():
        parameter.sub_(3.0)
    exchange.average(1.0, None, aside)
    assert rounds.weights == [1.0, 0.0, 1.0]
    assert exchange.kept
    assert parameter.tolist() == [5.0] * 4 + [8.0] * 4  # 8 - 3 where the average is without it
    exchange.average(1.0, None, frozenset())
    assert rounds.weights == [1.0, 0.0, 1.0, 1.0] and not exchange.kept
    assert parameter.tolist() == [7.0] * 8


def test_where_too_little_of_the_crew_came_all_that_was_learned_is_kept_and_said_to_be() -> None:
    parameter = nn.Parameter(torch.zeros(8))
    nobody = two_chunks((0, 0), (False, False))
    rounds = Rounds(parameter, [([1.0] * 8, two_chunks((7, 7))), ([0.0] * 8, nobody)])
    exchange = SlowPeer(rounds, [parameter], rounds.transport)
    aside = frozenset({2})
    exchange.average(1.0, None, aside)
    with torch.no_grad():
        parameter.sub_(3.0)
    exchange.average(1.0, None, aside)
    assert rounds.weights == [1.0, 0.0] and exchange.kept
    assert parameter.tolist() == [-2.0] * 8


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
    for wrong in (-1, math.nan):
        with pytest.raises(ValueError, match="the weight of this peer is"):
            weight_of(wrong, None)
    assert weight_of(2.5, None)() == 2.5


# -- In virtual time


def paced(
    schedule: SSP | DSSP | Partial,
    steps: int,
    speed: tuple[float, ...],
    freezes: tuple[Freeze, ...] = (),
    came: list[float] | None = None,
) -> tuple[list[float], list[list[int]], int]:
    """Peers in steps of a second on quiet lines. Returns when each ends, how far ahead of the slowest each
    was after its steps, and in how many rounds of peer 0 the last peer was heard.

    came: gets the share that was averaged of what the last peer offered, by round.
    """
    faults = Faults(latency_s=1e-4, freezes=freezes)
    crew = SimulatedCrew(len(speed), faults, cost=ComputeCost(1.0, speed=speed, sigma=0.03))
    taken = [0] * len(speed)
    leads: list[list[int]] = [[] for _ in speed]
    heard = 0

    def train(transport: SimulatedTransport) -> float:
        me = transport.me
        torch.manual_seed(0)
        model = nn.Linear(4, 4)

        def told(outcome: Outcome) -> None:
            nonlocal heard
            heard += me == 0 and bool((outcome.heard >> np.uint64(len(speed) - 1) & np.uint64(1)).any())
            if me == len(speed) - 1 and came is not None:
                came.append(float(outcome.averaged.mean()))

        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            transport,
            schedule=schedule,
            model=model,
            on_outcome=told,
        )
        while taken[me] < steps:
            transport.compute()
            taken[me] += 1
            leads[me].append(taken[me] - min(taken))
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return transport.now_s()

    ends = crew.run(train)
    return [end for end in ends if end is not None], leads, heard


@pytest.mark.parametrize(("schedule", "bound"), [(SSP(4), 4), (DSSP(2, 6), 6)], ids=repr)
def test_a_bound_on_staleness_holds_and_costs_what_the_slowest_needs(
    schedule: SSP | DSSP, bound: int
) -> None:
    """Fast peers wait for the slow one's steps, so the slow one must not wait for them. What it learns is in
    all averages but the first ones.
    """
    steps = 60
    ends, leads, heard = paced(schedule, steps, (1.0, 1.0, 1.0, 0.25))
    assert max(ends) < 1.01 * 4 * steps
    assert max(map(max, leads)) == bound + 1  # the step that is waited with counts
    assert heard >= steps - bound - 2


@pytest.mark.parametrize("speed", [(1.0, 1.0, 0.4), (1.0,) * 7 + (0.25,)], ids=["three", "eight"])
def test_a_slow_peer_sees_what_came_of_its_offers(speed: tuple[float, ...]) -> None:
    """It computes on for a step of its own, and the others' next round comes after one of theirs. An offer
    that ended before that was in their average, and was offered again: it counted twice.
    """
    came: list[float] = []
    ends, _, heard = paced(Partial(), 100, speed, came=came)
    there = came[: int(min(ends) * speed[-1]) - 1]  # while the others were
    assert len(there) > 20 and heard > 0.9 * len(there)
    assert sum(there) >= len(there) - 2  # of the first one it cannot know for how long it goes on


@pytest.mark.parametrize("schedule", [SSP(2), DSSP(2, 4)], ids=repr)
def test_a_crew_does_not_stop_for_what_a_frozen_peer_has_missed(schedule: SSP | DSSP) -> None:
    """It comes back 30 steps behind. The others wait for its next steps, as before, and not for these 30."""
    steps, at_s, away = 60, 10.5, 30
    ends, leads, _ = paced(schedule, steps, (1.0, 1.0, 1.0, 0.5), (Freeze(3, at_s, float(away)),))
    at_its_pace = steps - away - at_s / 2
    assert max(ends[:3]) < 1.05 * (at_s + away + 2 * (at_its_pace + 6)) < at_s + 2 * (steps - at_s / 2)
    assert max(map(max, leads)) <= away + 3


def test_a_slow_peer_computes_on_while_the_others_come_to_its_round() -> None:
    steps = 24
    ends, _, _ = paced(Partial(), steps, (1.0, 1.0, 1.0, 0.25))
    assert max(ends[:3]) < 1.2 * steps
    assert ends[3] < 1.05 * 4 * steps


@pytest.mark.parametrize("least", [0, 5])
def test_a_straggler_that_follows_the_others_costs_them_little(least: int) -> None:
    """Half as fast, it averages after five steps where the others take ten. Else they wait for its ten.

    Each owns something, and so learns how late others come.
    """
    n, for_s, step_s = 4, 20.0, 0.05
    cost = ComputeCost(step_s, speed=[1.0] * (n - 1) + [0.5], sigma=0.1, seed=1)

    def train(peer: SimulatedTransport) -> tuple[int, list[bool]]:
        taken, heard = 0, list[bool]()
        model = nn.Linear(3000, 1, bias=False)
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), peer, model=model, schedule=LocalSteps(10, least),
            weight="samples", samples=lambda: 8 * taken,
            on_outcome=lambda outcome: heard.append(bool((outcome.heard == (1 << n) - 1).all())),
        )  # fmt: skip
        until_s = peer.now_s() + for_s
        while peer.now_s() < until_s:
            peer.compute()
            taken += 1
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        return taken, heard

    ends = [end for end in SimulatedCrew(n, Faults(latency_s=0.005), cost=cost).run(train) if end is not None]
    share = min(taken for taken, _ in ends[:-1]) * step_s / for_s
    assert share > 0.8 if least else share < 0.6, share
    if least:
        assert all(sum(heard) >= 0.8 * len(heard) for _, heard in ends)
