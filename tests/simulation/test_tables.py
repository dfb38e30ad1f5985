"""Peer after peer comes to a crew and goes: no table of one that stays grows with their number."""

from __future__ import annotations

from collections import Counter

import pytest

from ragtag.core.faults import Faults
from ragtag.core.types import Post
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.groups.channel import Moshpit
from ragtag.protocols.membership.probe import NONCES_MAX
from ragtag.protocols.membership.types import Limits
from ragtag.protocols.rounds.rps import rps
from ragtag.simulation.worlds.crew import CrewWorld
from tests.tables import tables

GRAVES = 8
"""So many of the dead are remembered here, so that this limit is reached soon; it is 1,024 else."""
SENT = "membership._prober._sent"
"""Numbers that may come back in answers: halved whenever there are too many, so not alike at two moments."""
FEW, MANY = 20, 60
SLACK = 24
"""Entries by which one moment differs from another: a round is under way, or samples are not all in yet."""


def held_after(method: Averager, leaves: bool) -> tuple[Counter[str], Counter[str]]:
    """What the first peer holds after few comings, and after many."""
    crew = CrewWorld(3, method, Faults(latency_s=0.002), 7, step_s=0.5, limits=Limits(graves_max=GRAVES))
    crew.run(2.0)
    stays, held = crew.members[0], list[Counter[str]]()
    for index in range(3, 3 + MANY):
        crew.come(index, (0, 1))
        member, give_up_s = crew.members[index], crew.now_s + 20.0
        while member.node is None and crew.now_s < give_up_s:
            crew.run(crew.now_s + 0.1)
        assert member.node is not None, member.failed
        for poster in (member, stays):
            assert poster.node is not None
            for effect in poster.node.step(crew.now_s, Post(1, index.to_bytes(2))):
                crew._apply(poster, effect)
        crew.run(crew.now_s + 0.3)
        (crew.leave if leaves else crew.crash)(index)
        crew.run(crew.now_s + 0.2)
        if index - 2 in (FEW, MANY):
            life, node = stays.life, stays.node
            held.append(tables(node=node, roster=stays.roster, membership=life.machine, reach=stays.reach))
    return held[0], held[1]


@pytest.mark.parametrize("leaves", [False, True], ids=["crash", "leave"])
@pytest.mark.parametrize("method", [rps, Moshpit(4)], ids=lambda method: method.name)
def test_no_table_grows_with_the_number_of_those_that_came(method: Averager, leaves: bool) -> None:
    few, many = held_after(method, leaves)
    assert few["membership._view.graves"] == GRAVES
    assert many[SENT] <= NONCES_MAX
    passing = (
        "machine",
        "rounds",
        "values",
        "mean",
        "last",
        "group",
        SENT,
    )  # of a round under way
    grown = {
        path: (few[path], n)
        for path, n in many.items()
        if n > few[path] + SLACK and not any(part in path for part in passing)
    }
    assert not grown
