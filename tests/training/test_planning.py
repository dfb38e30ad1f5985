"""Shares from measured rates: planned while a crew trains, where it pays, by whoever can."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import ragtag
from ragtag.core.channels import channel_of
from ragtag.core.faults import Crash, Faults, Loss, OwnLine
from ragtag.core.types import Noted, Outcome
from ragtag.protocols.channel.shares import Line, Plan, Plans, write_line, write_plans
from ragtag.protocols.crew.board import RATES, SHARES
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer

MBIT = 1e6 / 8
SLOW, FAST = 5 * MBIT, 100 * MBIT
VALUES = 40_000


class Trained:
    """A crew that has trained: notes, each trainer's outcomes, and the shares that it knows at the end."""

    def __init__(
        self,
        up: list[float],
        rounds: int,
        *,
        auxiliaries: int = 0,
        clients: int = 0,
        method: Any = None,
        rates: dict[int, dict[int, float]] | None = None,
        lies: dict[int, Plan] | None = None,
        **faults: Any,
    ) -> None:
        self.notes: list[tuple[int, Noted]] = []
        lines = tuple(OwnLine(peer, rate, 0.0, 10 * rate) for peer, rate in enumerate(up))
        n = len(up) - auxiliaries
        faulty = Faults(latency_s=0.005, lines=lines, **faults)
        options = {"auxiliaries": auxiliaries, "clients": clients}
        crew = SimulatedCrew(n, faulty, 1, on_note=self._noted, **options)
        self.outcomes: list[list[Outcome]] = [[] for _ in range(n)]

        def train(transport: SimulatedTransport) -> float:
            weight = torch.nn.Parameter(torch.full((VALUES,), float(transport.me)))
            me = transport.me
            if rates is not None and me in rates:
                transport.rates = lambda: rates[me]  # type: ignore[method-assign]
            if lies is not None and me in lies:
                transport.post(SHARES, write_plans([lies[me]]))
            optimizer = CrewOptimizer(
                torch.optim.SGD([weight], lr=0.0),
                transport,
                method=method or ragtag.AllReduce(shares="measured"),
                every=1,
                on_outcome=self.outcomes[me].append,
                on_note=lambda note: self.notes.append((me, note)),
            )
            for _ in range(rounds):
                weight.grad = torch.zeros_like(weight)
                optimizer.step()
            transport.pause(1.0)
            return float(weight.detach().mean())

        self.results = crew.run(train)
        self.crew, self.channel = crew, channel_of("model")

    def _noted(self, peer: int, now_s: float, note: Noted) -> None:
        self.notes.append((peer, note))

    def told(self, what: str) -> list[tuple[int, str]]:
        return [(peer, note.detail) for peer, note in self.notes if note.what == what]

    def shares(self, peer: int) -> tuple[int, ...]:
        known = Plans()
        for poster, posted in self.crew.nodes[peer].board.notices(SHARES).posts.items():
            known.take(poster, posted.blob)
        return known.shares(self.channel, 1 << 20)


@pytest.mark.parametrize("auxiliaries", [0, 1])
def test_a_crew_of_unlike_lines_takes_the_work_from_the_slow(auxiliaries: int) -> None:
    found = Trained([SLOW, FAST, FAST, FAST, *[FAST] * auxiliaries], 16, auxiliaries=auxiliaries)
    assert [peer for peer, _ in found.told("shares")] == [1]  # the lowest of the fast
    assert not found.told("apart")
    for node in range(4 + auxiliaries):  # an auxiliary goes by them, too
        shares = found.shares(node)
        assert shares[0] == 0 and min(shares[1:]) > 0 and len(shares) == 4 + auxiliaries
    first, last = found.outcomes[0][1], found.outcomes[0][-1]
    assert last.total_s < 0.8 * first.total_s
    assert all(o.averaged.all() and not o.missed for outcomes in found.outcomes for o in outcomes)
    assert all((o.heard == 0b1111).all() for outcomes in found.outcomes for o in outcomes)
    assert found.results == [1.5] * 4


def test_clients_are_planned_for_as_such_however_fast_their_lines_are() -> None:
    found = Trained([SLOW, FAST, FAST, FAST], 16, clients=1)
    assert found.told("shares") and not found.told("apart")
    assert all(found.shares(node)[0] == 0 and found.shares(node)[3:] in ((), (0,)) for node in range(4))
    assert all(o.averaged.all() and not o.missed for outcomes in found.outcomes for o in outcomes)
    assert all((o.heard == 0b1111).all() for outcomes in found.outcomes for o in outcomes)
    assert found.results == [1.5] * 4


@pytest.mark.parametrize("first_round", [0, 1 << 31])
def test_a_plan_that_one_alone_tells_is_nobodys_and_keeps_the_crew_from_none(first_round: int) -> None:
    """Neither one by which it would own all, nor one that is to begin when nobody trains any more."""
    lie = Plan(channel_of("model"), first_round, (0, 0, 0, 1))
    found = Trained([SLOW, FAST, FAST, FAST], 16, lies={3: lie})
    assert [peer for peer, _ in found.told("shares")] == [1] and not found.told("apart")
    for node in range(4):
        assert found.shares(node)[0] == 0 and min(found.shares(node)[1:]) > 0
    assert all((o.heard == 0b1111).all() for outcomes in found.outcomes for o in outcomes)
    assert found.outcomes[0][-1].total_s < 0.8 * found.outcomes[0][1].total_s


def test_a_planner_that_is_left_with_auxiliaries_goes_by_its_plan_and_makes_it_once() -> None:
    """Nobody is left to repeat it. It counted for rounds, and not for the planner, which made it anew."""
    found = Trained([FAST, FAST, SLOW, FAST], 60, auxiliaries=2, crashes=(Crash(1, 0.3),))
    assert len(found.told("shares")) == 1 and len(found.outcomes[0]) == 60
    known = found.crew.nodes[0].crew
    plan = known.plans.told(0, found.channel)
    assert plan is not None and known.shares(found.channel, 60, True, True) == plan.shares


def test_a_crew_of_like_lines_stays_as_it_is() -> None:
    found = Trained([FAST] * 4, 12)
    assert not found.told("shares") and found.shares(0) == ()


def test_loss_and_the_planners_death_leave_averages_whole() -> None:
    """Peer 0 plans, and dies once all go by its plan; the others tell it all the same.

    A slow peer's rates come after some rounds only, as they wait behind its shares: so the plan of a crew
    that does the same, and in which nobody dies, says when.
    """
    lines, loss = [FAST, SLOW, FAST, FAST, FAST], Loss(0.05)
    calm = Trained(lines, 16, loss=loss)
    plan = calm.crew.nodes[0].crew.plans.told(0, calm.channel)
    assert plan is not None and [peer for peer, _ in calm.told("shares")] == [0]
    begun_s = max(outcomes[plan.first_round].started_s for outcomes in calm.outcomes)
    found = Trained(lines, 40, loss=loss, crashes=(Crash(0, begun_s),))
    planners = [peer for peer, _ in found.told("shares")]
    assert planners[0] == 0 and found.results[0] is None
    assert all(found.crew.nodes[2].crew.plans.told(peer, found.channel) == plan for peer in (1, 2, 3, 4))
    for outcomes in found.outcomes[1:]:
        last = outcomes[-2]  # after the last one peers leave, and what they repair is lost
        assert last.averaged.all() and (last.heard == 0b11110).all(), last


def test_without_scipy_all_own_as_much_and_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scipy" else whole(name))
    found = Trained([SLOW, FAST, FAST], 10)
    told = found.told("equal shares")
    assert not found.told("shares") and found.shares(0) == ()
    assert sorted(peer for peer, _ in told) == [0, 1, 2]
    assert all("pip install 'ragtag[roles]'" in detail for _, detail in told)


def test_a_peer_without_rates_and_absurd_rates_are_named_and_nothing_is_planned() -> None:
    found = Trained([SLOW, FAST, FAST], 8, rates={2: {}})
    assert found.shares(0) == ()
    assert [detail for _, detail in found.told("equal shares")] == [
        "peer 2 measures no rates (rate control is off), so all own as much"
    ]
    line = write_line(Line({0: 3.0}))
    absurd = line.replace(b"\xcb\x40\x08", b"\xcb\xff\x08")
    assert absurd != line

    def posts(transport: SimulatedTransport) -> None:
        transport.post(RATES, absurd)

    crew = SimulatedCrew(2)
    crew.run(posts)
    from ragtag.training.planning import Planner

    notes: list[Noted] = []
    Planner(crew.transport(0), 1, notes.append)._lines()
    assert "rates of peer" in notes[0].detail and "not believed" in notes[0].detail


def test_shares_that_do_not_pay_are_given_back() -> None:
    """Rates that are told wrong promise what rounds do not keep: all own as much again."""
    lies = {peer: dict.fromkeys(range(4), SLOW if peer == 0 else FAST) for peer in range(4)}
    found = Trained([FAST, SLOW, FAST, FAST], 30, rates=lies)
    said = [detail for _, detail in found.told("shares")]
    assert len(said) == 2 and "shorter" in said[0] and "no shorter" in said[1]
    assert found.shares(0) == ()
