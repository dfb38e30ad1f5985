"""The checker catches what breaks a rule: each of these worlds runs to its end unless it is checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ragtag.core.faults import Faults, Loss
from ragtag.core.types import (
    Arm,
    Arrived,
    Average,
    Bools,
    Done,
    Effect,
    Event,
    Joined,
    MessageKey,
    Outcome,
    Run,
    Send,
    Timer,
)
from ragtag.protocols.node import Node
from ragtag.protocols.rounds.base import Incoming
from ragtag.protocols.rounds.rps import rps
from ragtag.simulation.check.rounds import InvariantBroken
from ragtag.simulation.worlds.rounds import World
from tests.simulation.scripted import Crew, Scripted, message, nodes

LATE = Faults(latency_s=0.01)


class Bent:
    """A node whose events or effects are bent on their way."""

    def __init__(
        self,
        node: Node,
        event: Callable[[float, Event], Event] = lambda now_s, event: event,
        effects: Callable[[float, Event, list[Effect]], list[Effect]] = lambda now_s, event, effects: effects,
    ) -> None:
        self._node, self._event, self._effects = node, event, effects

    def step(self, now_s: float, event: Event) -> list[Effect]:
        return self._effects(now_s, event, self._node.step(now_s, self._event(now_s, event)))


def broken_by(what: str, make: Callable[[bool], Crew]) -> None:
    """A crew that nobody checks does its rounds; a checked one raises."""
    make(False).run()
    with pytest.raises(InvariantBroken, match=what) as caught:
        make(True).run()
    assert caught.value.seed == 1 and "seed 1; replay: World(nodes, faults=Faults(" in str(caught.value)


def bent(check: bool, faults: Faults = LATE, peer: int = 1, **how: Any) -> Crew:
    crew = nodes(4, rps, 13, seed=1)
    machines: list[Any] = [*crew]
    machines[peer] = Bent(crew[peer], **how)
    return Crew(4, rps, faults, rounds=3, check=check, machines=machines)


def of_outcomes(change: Callable[[Outcome], Outcome]) -> Callable[..., list[Effect]]:
    def effects(now_s: float, event: Event, effects: list[Effect]) -> list[Effect]:
        return [Done(change(e.outcome)) if isinstance(e, Done) else e for e in effects]

    return effects


def of_runs(change: Callable[[Run], Run]) -> Callable[..., list[Effect]]:
    def effects(now_s: float, event: Event, effects: list[Effect]) -> list[Effect]:
        return [Send(change(e.run), e.deadline_s) if isinstance(e, Send) else e for e in effects]

    return effects


def test_an_honest_crew_is_checked_and_passes() -> None:
    crew = Crew(4, rps, Faults(loss=Loss(0.2), latency_s=0.01), rounds=3)
    checker = crew.run().checker
    assert checker is not None and checker.outcomes == checker.means == 12


def test_a_payload_that_changes_in_flight() -> None:
    def effects(now_s: float, event: Event, effects: list[Effect]) -> list[Effect]:
        if isinstance(event, Joined):
            held[0].payload[:] ^= 1
        held.extend(e.run for e in effects if isinstance(e, Send))
        return effects

    def make(check: bool) -> Crew:
        held.clear()
        crew = bent(check, effects=effects)
        crew.world.at(0.005, 1, Joined(0))
        return crew

    held: list[Run] = []
    broken_by("changed in flight", make)


def test_contributors_that_change_in_flight() -> None:
    def effects(now_s: float, event: Event, effects: list[Effect]) -> list[Effect]:
        held.extend(e.run for e in effects if isinstance(e, Send))
        if isinstance(event, Joined):
            held[0].heard[:] = 0
        return effects

    def make(check: bool) -> Crew:
        held.clear()
        crew = bent(check, effects=effects)
        crew.world.at(0.005, 1, Joined(0))
        return crew

    held: list[Run] = []
    broken_by("changed in flight", make)


def test_values_that_change_while_they_are_averaged() -> None:
    """The scatter has arrived by then, so nothing changes in flight; kept values would still be wrong."""

    def event(now_s: float, event: Event) -> Event:
        if isinstance(event, Average):
            asked.append(event)
        if isinstance(event, Joined):
            asked[0].values[:] += 1
        return event

    def make(check: bool) -> Crew:
        asked.clear()
        crew = bent(check, event=event)
        crew.world.at(0.015, 1, Joined(0))
        return crew

    asked: list[Average] = []
    broken_by("values changed while they were averaged", make)


def test_a_weight_that_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bitmap of what has come, a duplicate is added up again."""

    def fresh(self: Incoming, run: Run) -> list[tuple[int, int]]:
        self.left, self.closed = 0, True
        return [(0, len(run.payload))] if len(run.payload) else []

    monkeypatch.setattr(Incoming, "fresh", fresh)
    faults = Faults(latency_s=0.01, duplicate=0.5, jitter_s=0.02)
    broken_by("carries weight", lambda check: Crew(4, rps, faults, rounds=5, check=check))


def test_a_message_that_reaches_the_wrong_round() -> None:
    """A copy of the round before stands in for that of this round: the weights add up, the values do not."""
    old: dict[tuple[int, int], Run] = {}

    def event(now_s: float, event: Event) -> Event:
        if not isinstance(event, Arrived):
            return event
        run = event.runs[0]
        name = (run.peer, len(run.payload))
        stale = old.get(name)
        if run.key.stage == 0:
            old[name] = run
        if stale is None or stale.key.round == run.key.round:
            return event
        return Arrived((replace(stale, key=run.key),))

    def make(check: bool) -> Crew:
        old.clear()
        return bent(check, event=event)

    broken_by(r"not that of \[0, 1, 2, 3\], whom it names|carries weight", make)


def test_a_mean_that_is_off() -> None:
    broken_by(
        "not that of",
        lambda check: bent(check, effects=of_outcomes(lambda o: replace(o, mean=o.mean * 1.001))),
    )


def test_a_mean_of_nan() -> None:
    broken_by(
        "not that of",
        lambda check: bent(check, effects=of_outcomes(lambda o: replace(o, mean=o.mean * np.nan))),
    )


def test_a_contributor_who_is_no_member() -> None:
    def stranger(run: Run) -> Run:
        return replace(run, heard=run.heard | np.uint64(1 << 40))

    broken_by(r"\[40\] have not begun", lambda check: bent(check, effects=of_runs(stranger)))


def test_a_contributor_who_has_not_begun() -> None:
    def make(check: bool) -> Crew:
        crew = bent(check, effects=of_outcomes(lambda o: replace(o, heard=o.heard | np.uint64(0b1000))))
        crew.world = world_without(crew, 3, check)
        return crew

    def world_without(crew: Crew, absent: int, check: bool) -> World:
        world = World(crew.world.nodes, LATE, 1, check=check)
        for peer in range(4):
            if peer != absent:
                world.at(0.0, peer, crew.ask(peer, 0.0))
        return world

    broken_by(r"\[3\] have not begun", make)


def test_a_weight_that_was_not_asked_for() -> None:
    broken_by(
        "carries weight 2.0, its contributors",
        lambda check: bent(check, effects=of_runs(lambda run: replace(run, weight=run.weight * 2))),
    )


def test_own_values_that_are_not_own() -> None:
    """All is lost, so all is kept."""

    def change(outcome: Outcome) -> Outcome:
        mean = outcome.mean.copy()
        mean[~outcome.averaged] += 1
        return replace(outcome, mean=mean)

    faults = Faults(loss=Loss(1.0), latency_s=0.01)
    broken_by("are not the peer's own", lambda check: bent(check, faults, effects=of_outcomes(change)))


def test_an_outcome_that_comes_twice() -> None:
    def effects(now_s: float, event: Event, effects: list[Effect]) -> list[Effect]:
        return effects + [e for e in effects if isinstance(e, Done)]

    def make(check: bool) -> Crew:
        crew = bent(check, effects=effects)
        crew.rounds = 1
        return crew

    broken_by("came twice", make)


def test_a_message_of_a_round_that_has_not_begun() -> None:
    def ahead(run: Run) -> Run:
        return replace(run, key=run.key._replace(round=run.key.round + 5)) if run.key.stage else run

    broken_by("its sender has not begun", lambda check: bent(check, effects=of_runs(ahead)))


def scripted(effects: list[Effect]) -> World:
    world = World(
        [Scripted(lambda now_s, event: effects if isinstance(event, Average) else [])] * 3, check=True
    )
    world.at(0.0, 0, Average(0, np.zeros((4, 272), np.float32), 1.0))
    return world


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (message(0), "no other member"),
        (message(3), "no other member"),
        (replace(message(1, 3), total=2), "does not fit its message"),
        (replace(message(1, 3), first=1), "does not fit its message"),
        (replace(message(1, 3), weight=np.ones(2, np.float32)), "does not fit its message"),
        (replace(message(1, 3), mask=np.ones(2, np.bool_)), "mask that does not fit"),
    ],
)
def test_runs_that_cannot_be(run: Run, what: str) -> None:
    with pytest.raises(InvariantBroken, match=what):
        scripted([Send(run, math.inf)]).run()


def test_a_request_without_an_answer() -> None:
    with pytest.raises(InvariantBroken, match="neither sends, waits nor ends"):
        scripted([]).run()


def outcome(n_chunks: int, averaged: Bools, number: int = 0) -> Outcome:
    return Outcome(
        channel=0,
        round=number,
        mean=np.zeros((n_chunks, 272), np.float32),
        weight=np.ones(n_chunks, np.float32),
        heard=np.ones(n_chunks, np.uint64),
        averaged=averaged,
        missed=(),
        waited_for=(),
        started_s=0.0,
        scatter_s=0.0,
        gather_s=0.0,
        total_s=0.0,
        expired=False,
    )


def test_an_outcome_of_another_shape_or_round() -> None:
    scripted([Done(outcome(4, np.ones(4, np.bool_)))]).run()
    with pytest.raises(InvariantBroken, match="of shape"):
        scripted([Done(outcome(3, np.ones(3, np.bool_)))]).run()
    with pytest.raises(InvariantBroken, match="not asked for"):
        scripted([Arm(Timer(0, 1, "t"), 1.0), Done(outcome(4, np.ones(4, np.bool_)))]).run()


def test_two_requests_at_once() -> None:
    world = scripted([Arm(Timer(0, 0, "t"), 5.0)])
    world.at(1.0, 0, Average(0, np.zeros((4, 272), np.float32), 1.0))
    with pytest.raises(InvariantBroken, match="two averages at once"):
        world.run()


def test_a_round_that_is_begun_twice() -> None:
    world = scripted([Done(outcome(4, np.ones(4, np.bool_)))])
    world.at(1.0, 0, Average(0, np.zeros((4, 272), np.float32), 1.0))
    with pytest.raises(InvariantBroken, match="began round 0 of channel 0 twice"):
        world.run()


def test_what_is_kept_of_old_rounds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragtag.simulation.check.rounds.ROUNDS_KEPT", 8)
    monkeypatch.setattr("ragtag.simulation.check.rounds.VALUES_KEPT", 4)
    crew = Crew(2, rps, Faults(latency_s=0.001), rounds=30, n_chunks=2)
    checker = crew.run().checker
    assert checker is not None and checker.means == 60
    assert len(checker._rounds) == 8 and sum(r.values is not None for r in checker._rounds.values()) == 4
    assert not checker._flying and not checker._pending


def test_more_peers_than_a_chunk_can_name_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="65 peers cannot be checked"):
        World([Scripted()] * 65, check=True)


def test_a_given_command_replaces_the_expression() -> None:
    world = World([Scripted()], seed=9, replay="make it again")
    assert str(world.broken("odd")) == "odd\n  seed 9; replay: make it again"
    assert MessageKey(0, 0, 0, 0) in {message(1).key}
