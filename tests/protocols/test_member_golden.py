"""Transcripts of one member of a small crew, kept in tests/golden/member/ and read by people.

To accept a change: ``pytest --regenerate``, and read the difference before it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from ragtag.core.faults import Faults, Partition, Window
from ragtag.protocols.membership.types import (
    Changed,
    Entered,
    Failed,
    Join,
    Leave,
    MemberEffect,
    MemberEvent,
    Received,
    Remarked,
    Status,
    Stopped,
    Transmit,
)
from ragtag.protocols.membership.wire import (
    Ack,
    Ask,
    Challenge,
    Introduce,
    Message,
    Page,
    Ping,
    Pull,
    Record,
    Refused,
    Seal,
)
from ragtag.simulation.worlds.members import KEY, Life, MemberWorld, name_of

SEAL = Seal(KEY, 1)


def joining(world: MemberWorld) -> None:
    """Peer 1 enters through peer 0; peer 2 through peer 1."""
    world.start(0, ())
    world.run(0.1)
    world.start(1, (0,))
    world.run(0.3)
    world.start(2, (1,))
    world.run(1.0)


def crew_of_four(world: MemberWorld) -> None:
    world.start(0, ())
    for peer in (1, 2, 3):
        world.start(peer, (0,))
    world.run(9.9)


def death(world: MemberWorld) -> None:
    crew_of_four(world)
    world.crash(3)
    world.run(14.0)


def alone(world: MemberWorld) -> None:
    crew_of_four(world)
    world.run(12.0)


def partition(world: MemberWorld) -> None:
    crew_of_four(world)
    world.run(25.0)


def leaving(world: MemberWorld) -> None:
    crew_of_four(world)
    world.leave(1)
    world.run(11.0)


def twin(world: MemberWorld) -> None:
    crew_of_four(world)
    world.start(4, (0,), name=name_of(1))
    world.run(13.0)


ALONE = (Partition(frozenset({3}), Window(10.0, 10.34)),)
PART = (Partition(frozenset({0, 1}), Window(10.0, 20.0)),)
NEWS_ONLY, ALL = False, True
CASES = [
    (
        "joining",
        joining,
        1,
        (0.0, 0.5),
        ALL,
        Faults(latency_s=0.01),
        "Peer 1 enters through peer 0 with a cookie, and lets peer 2 in itself.",
    ),
    (
        "a_death",
        death,
        0,
        (9.91, 10.57),
        ALL,
        Faults(latency_s=0.01),
        "Peer 3 dies at 9.9 s. It is pinged thrice, others are asked to ping it, it is suspected; as the\n"
        "others agree, the time to refute becomes short, and it is declared dead.",
    ),
    (
        "a_false_accusation",
        alone,
        3,
        (10.3, 10.6),
        ALL,
        Faults(latency_s=0.01, partitions=ALONE),
        "Nobody hears peer 3 for a third of a second, nor it anybody. Then it reads that it is suspected,\n"
        "and refutes it; and so do those whom it has begun to suspect itself.",
    ),
    (
        "leaving",
        leaving,
        1,
        (9.9, 11.0),
        ALL,
        Faults(latency_s=0.01),
        "Peer 1 leaves: it says so thrice, and stops.",
    ),
    (
        "a_partition_heals",
        partition,
        0,
        (9.9, 25.0),
        NEWS_ONLY,
        Faults(latency_s=0.01, partitions=PART),
        "Peers 0 and 1 do not hear 2 and 3 from 10 s to 20 s. Each side holds the other for\n"
        "dead, knocks, and is answered when the line is back.",
    ),
    (
        "two_peers_with_one_name",
        twin,
        4,
        (9.9, 13.0),
        ALL,
        Faults(latency_s=0.01),
        "A peer comes that is called as peer 1 is. It is told who has the name, asks until that one would\n"
        "be known to be dead, and gives up.",
    ),
]


@pytest.mark.parametrize(
    ("name", "play", "me", "span_s", "everything", "faults", "note"), CASES, ids=[case[0] for case in CASES]
)
def test_transcript(
    golden: Callable[[str, str], None],
    name: str,
    play: Callable[[MemberWorld], None],
    me: int,
    span_s: tuple[float, float],
    everything: bool,
    faults: Faults,
    note: str,
) -> None:
    world = MemberWorld(faults, 1)
    lines = [f"membership: round trips of {2e3 * faults.latency_s:g} ms, seed 1. Peer {me} tells.", note, ""]

    def tell(life: Life, event: MemberEvent, effects: list[MemberEffect]) -> None:
        if life.peer != me or not span_s[0] <= world.now_s <= span_s[1]:
            return
        said = [line for effect in effects for line in _effect(effect, everything)]
        heard = _event(event)
        if said or (everything and heard):
            lines.append(f"{world.now_s * 1e3:>8.1f} ms  {heard or 'time passes'}")
            lines.extend(f"{'':13}-> {line}" for line in said)

    world.on_step = tell
    play(world)
    golden(f"member/{name}", "\n".join(lines) + "\n")


def test_every_golden_file_has_its_case() -> None:
    from tests.conftest import GOLDEN

    assert {path.stem for path in (GOLDEN / "member").glob("*.txt")} == {case[0] for case in CASES}


def _event(event: MemberEvent) -> str:
    if isinstance(event, Received):
        return f"from {_who(event.source)}: {_message(event.data)}"
    if isinstance(event, Join):
        return f"asked to join through {', '.join(map(_who, event.entries)) or 'nobody'}"
    return "asked to leave" if isinstance(event, Leave) else ""


def _effect(effect: MemberEffect, everything: bool) -> Iterable[str]:
    if isinstance(effect, Transmit):
        text = _message(effect.data)
        if everything:
            yield f"to {_who(effect.dest)}: {text}"
    elif isinstance(effect, Changed):
        was = "unknown" if effect.was is None else _status(effect.was)
        yield f"{effect.member.name}, {was}, is now {_status(effect.member.status)}"
    elif isinstance(effect, Remarked):
        yield f"note: {effect.name} {effect.what} {effect.detail}".rstrip()
    elif isinstance(effect, Entered):
        yield f"is in the crew, with {effect.others} others"
    elif isinstance(effect, Failed):
        yield f"gives up: {effect.reason}"
    elif isinstance(effect, Stopped):
        yield "stops"


def _who(address: tuple[str, int]) -> str:
    return str(address[1] - 4000)


def _message(data: bytes) -> str:
    opened = Seal(KEY, int.from_bytes(data[16:24], "little")).open(data)
    assert opened is not None
    return _text(opened.message)


def _text(message: Message) -> str:
    if isinstance(message, Introduce):
        return "introduction with a cookie" if message.cookie else "introduction"
    if isinstance(message, Challenge):
        return "challenge with a cookie"
    if isinstance(message, Refused):
        return f"refused: {message.name} is at {message.host}"
    news = ", ".join(map(_record, message.gossip)) or "no news"
    if isinstance(message, Ping):
        return f"ping; {news}"
    if isinstance(message, Ack):
        return f"{'answer' if message.there else 'no answer so far'}; {news}"
    if isinstance(message, Ask):
        return f"request to ping {message.subject}; {news}"
    if isinstance(message, Page):
        return f"all it knows: {news}"
    if isinstance(message, Pull):
        return f"request for all it knows; {news}"
    return f"news: {news}"


def _record(record: Record) -> str:
    status = _status(Status(record.status))
    by = f" by {len(record.accusers)}" if record.accusers else ""
    return f"{record.name.removeprefix('peer-')} {status}{by} ({record.incarnation})"


def _status(status: Status) -> str:
    return ["alive", "suspected", "dead", "gone"][status]
