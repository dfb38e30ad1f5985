"""Progress after healing: honest crews make it, crews that are stuck or deaf are named."""

from __future__ import annotations

from typing import Any

import pytest

from ragtag.core.faults import Crash, Faults, Freeze, Loss, Partition, Window
from ragtag.core.types import Arrived, Effect, Event
from ragtag.protocols.node import Node
from ragtag.protocols.rounds.rps import rps
from ragtag.simulation.check.progress import demand_progress
from ragtag.simulation.check.rounds import InvariantBroken
from tests.simulation.scripted import Crew, nodes

HARD = Faults(
    loss=Loss(0.5),
    latency_s=0.01,
    partitions=(Partition(frozenset({0, 1}), Window()),),
    freezes=(Freeze(2, 0.3, 1e6),),
    crashes=(Crash(4, 0.5),),
)


class Deaf:
    """A node that hears nothing of what arrives from ``deaf_to``."""

    def __init__(self, node: Node, *deaf_to: int) -> None:
        self._node, self._deaf_to = node, deaf_to

    def step(self, now_s: float, event: Event) -> list[Effect]:
        if isinstance(event, Arrived) and event.runs[0].peer in self._deaf_to:
            return []
        return self._node.step(now_s, event)


class Stuck:
    """A node that ends no round."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def step(self, now_s: float, event: Event) -> list[Effect]:
        return [e for e in self._node.step(now_s, event) if type(e).__name__ != "Done"]


def crew_of(faults: Faults, **instead: Any) -> Crew:
    crew: list[Any] = nodes(5, rps, 13, seed=1)
    for name, make in instead.items():
        peer = int(name.removeprefix("peer"))
        crew[peer] = make(crew[peer])
    return Crew(5, rps, faults, rounds=4, machines=crew, check=False)


def test_a_healed_crew_goes_on_and_all_hear_all() -> None:
    crew = crew_of(HARD)
    world = crew.run(until_s=20.0)
    before = [len(outcomes) for outcomes in crew.outcomes]
    met = demand_progress(world, crew.ask, rounds=5, pause_s=0.5)
    assert met >= 1 and world.live == {0, 1, 2, 3}
    assert [len(outcomes) for outcomes in crew.outcomes] == before  # its own callback was left alone
    assert world.on_done == crew._done


def test_a_peer_that_hears_nothing_is_named() -> None:
    crew = crew_of(HARD, peer1=lambda node: Deaf(node, 0, 2, 3))
    with pytest.raises(
        InvariantBroken, match=r"in no round did all of \[0, 1, 2, 3\] hear all.*1: \[0, 2, 3\]"
    ):
        demand_progress(crew.run(until_s=20.0), crew.ask, pause_s=0.5)


def test_a_peer_that_is_stuck_is_named() -> None:
    crew = crew_of(HARD, peer3=Stuck)
    with pytest.raises(InvariantBroken, match=r"rounds done of 6 demanded, by peer: \{3: 0\}"):
        demand_progress(crew.run(until_s=20.0), crew.ask, pause_s=0.5, within_s=100.0)
    assert "replay" in str(crew.world.broken("x"))


def test_a_partition_that_does_not_heal_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragtag.core.faults.Faults.healed", lambda self: self)
    crew = crew_of(HARD)
    with pytest.raises(InvariantBroken, match="after healing"):
        demand_progress(crew.run(until_s=20.0), crew.ask, pause_s=0.5, within_s=100.0)
