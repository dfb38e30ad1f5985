"""Transcripts of ways into a crew, kept in tests/golden/joining/ and read by people.

To accept a change: ``pytest --regenerate``, and read the difference before it is committed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from ragtag.core.faults import Faults, Partition, Window
from ragtag.core.schema import Schema
from ragtag.core.types import Done, Effect, Event, Left, Met, PeerId, Tell, Visits
from ragtag.protocols.crew.joining import Joining
from ragtag.protocols.membership.roster import Card, Unseated
from ragtag.protocols.node import Node
from ragtag.protocols.rounds.rps import rps
from ragtag.simulation.worlds.crew import NAME
from ragtag.simulation.worlds.newcomer import DEADLINE_S, NewcomerWorld
from ragtag.simulation.worlds.process import Member

COMES_S = 2.0
MEETINGS = {0: "hello", 1: "schema"}
LINE = Faults(latency_s=0.005, jitter_s=0.001)
APART = Partition(frozenset({1}), Window(3.0, 16.0))


class Told(NewcomerWorld):
    """A world that writes down what processes do on their way in, from ``tells_s`` on."""

    def __init__(self, founders: int, faults: Faults, tells_s: float = COMES_S) -> None:
        self.lines: list[str] = []
        self._tells_s, self._passed_before = tells_s, set[tuple[int, str]]()
        self._in: set[int] = set()
        self.strange: set[int] = set()
        super().__init__(founders, rps, faults, 1, step_s=0.2)

    def say(self, member: Member, what: str) -> None:
        if self.now_s >= self._tells_s:
            self.lines.append(f"{self.now_s * 1e3:>9.1f} ms  process {member.index}: {what}")

    def _describe(self, member: Member, card: Card) -> None:
        if card.seat >= 0 and member.index >= self.founders:
            is_in = "averages" if card.averaging else "claims"
            self.say(member, f"{is_in} seat {card.seat}, term {card.term}, of a crew of {card.founded}")
        super()._describe(member, card)

    def _admitted(self, member: Member, node: Node) -> None:
        if member.index >= self.founders:
            self.say(member, f"has a node of {node.n} seats; {self._there(node)}")
        super()._admitted(member, node)

    def schema(self, member: Member) -> Schema:
        mine = super().schema(member)
        return replace(mine, method="ring") if member.index in self.strange else mine

    @staticmethod
    def _there(node: Node) -> str:
        gone = ", ".join(map(str, sorted(node.gone))) or "nobody"
        return f"averages with {', '.join(map(str, sorted(node.live)))}; gone: {gone}"

    def _give(self, member: Member, event: Event) -> None:
        if isinstance(event, Tell) and member.index >= self.founders:
            self.say(member, f"tells its {MEETINGS[event.number]}{', late' if event.late else ''}")
        if isinstance(event, Left | Visits) and member.index >= self.founders and member.node is not None:
            self.say(member, f"is told that seat {event.peer} {type(event).__name__.lower()}")
        super()._give(member, event)
        self._tell_phases()

    def _apply(self, member: Member, effect: Effect) -> None:
        if member.index >= self.founders:
            if isinstance(effect, Met):
                missing = ", ".join(map(str, effect.missing)) or "nobody"
                heard = ", ".join(map(str, effect.blobs)) or "nobody"
                self.say(member, f"met {heard} ({MEETINGS[effect.number]}); missing: {missing}")
            elif isinstance(effect, Done) and member.index not in self._in:
                self._in.add(member.index)
                heard = [p for p in range(64) if int(effect.outcome.heard[0]) >> p & 1]
                self.say(member, f"round {effect.outcome.round} is done, with {', '.join(map(str, heard))}")
        super()._apply(member, effect)
        self._tell_phases()

    def _start(self, index: int, entries: frozenset[int], seat: PeerId) -> Member:
        member = super()._start(index, entries, seat)
        if index >= self.founders:
            self.say(member, "comes")
        return member

    def _tell_phases(self) -> None:
        for index, member in self.members.items():
            for phase, at_s in member.phases.items():
                if index >= self.founders and (index, phase) not in self._passed_before:
                    self._passed_before.add((index, phase))
                    self.lines.append(f"{at_s * 1e3:>9.1f} ms  process {index}: {phase!r} is over")

    def end(self) -> None:
        self._tell_phases()
        for member in self.members.values():
            if member.unseated or member.failed:
                self.say(member, f"ended: {member.failed or member.unseated}")
        self.lines.sort(key=lambda line: float(line.split()[0]))


def one(crew: Told) -> None:
    crew.world.at(COMES_S, lambda: crew.come(4, (0, 1, 2, 3)))
    crew.run(8.0)


def two(crew: Told) -> None:
    for index in (4, 5):
        crew.world.at(COMES_S, lambda index=index: crew.come(index, (0, 1, 2, 3)))  # type: ignore[misc]
    crew.run(9.0)


def lost(crew: Told) -> None:
    """The seat of a peer that is cut off for long is given away."""
    crew.world.at(12.0, lambda: crew.come(4, (0, 2, 3)))
    crew.run(24.0)


def alone(crew: Told) -> None:
    crew.world.at(COMES_S, lambda: crew.come(1, (0,)))
    crew.run(8.0)


def without_state(crew: Told) -> None:
    crew.state_rate = 1e3
    crew.world.at(COMES_S, lambda: crew.come(2, (0, 1)))
    crew.run(COMES_S + 65.0)


def of_another_version(crew: Told) -> None:
    crew.world.at(COMES_S, lambda: crew._come(4, (0, 1, 2, 3), Joining(NAME, "1", DEADLINE_S)))
    crew.run(4.0)


def of_another_schema(crew: Told) -> None:
    crew.strange.add(4)
    crew.world.at(COMES_S, lambda: crew.come(4, (0, 1, 2, 3)))
    crew.run(4.0)


def unseated(crew: Told) -> None:
    crew.world.at(COMES_S, lambda: crew.come(4, (0, 1, 2, 3)))
    crew.run(COMES_S + 0.43)
    crew._take(crew.members[4], Unseated("seat 4 is another's"))
    crew.run(9.0)


CASES: list[tuple[str, Callable[[Told], None], int, Faults, str]] = [
    ("a_newcomer", one, 4, LINE, "Process 4 comes to a crew of four that averages."),
    ("two_want_one_seat", two, 4, LINE, "Processes 4 and 5 come at one instant, and claim the same seat."),
    ("to_a_founder", alone, 1, LINE, "Process 0 has founded a crew by itself; process 1 comes."),
    (
        "a_lost_seat",
        lost,
        4,
        Faults(latency_s=0.005, jitter_s=0.001, partitions=(APART,)),
        "Nobody hears process 1 from 3 s to 16 s. It is declared dead, process 4 takes its seat, and when\n"
        "the line is back process 1 comes in again as process 5.",
    ),
    (
        "of_another_version",
        of_another_version,
        4,
        LINE,
        "Process 4 has another version of Ragtag than the four that it meets.",
    ),
    (
        "of_another_schema",
        of_another_schema,
        4,
        LINE,
        "Process 4 averages by another averager than the four that it meets.",
    ),
    (
        "a_seat_lost_while_it_greets",
        unseated,
        4,
        LINE,
        "The seat of process 4 is another's while it greets: it comes again, as process 5.",
    ),
    (
        "nobody_gives_the_state",
        without_state,
        2,
        LINE,
        "The state of 4 MB comes at 1 kB/s from each of two donors: process 2 goes on without it when its\n"
        "deadline is over.",
    ),
]


@pytest.mark.parametrize(
    ("name", "play", "founders", "faults", "note"), CASES, ids=[case[0] for case in CASES]
)
def test_transcript(
    golden: Callable[[str, str], None],
    name: str,
    play: Callable[[Told], None],
    founders: int,
    faults: Faults,
    note: str,
) -> None:
    crew = Told(founders, faults)
    play(crew)
    crew.end()
    title = f"the way in: {founders} founders, round trips of {2e3 * faults.latency_s:g} ms, seed 1"
    golden(f"joining/{name}", "\n".join([title, note, "", *crew.lines]) + "\n")


def test_every_golden_file_has_its_case() -> None:
    from tests.conftest import GOLDEN

    assert {path.stem for path in (GOLDEN / "joining").glob("*.txt")} == {case[0] for case in CASES}
