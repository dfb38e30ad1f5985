"""Transcripts of a newcomer that fetches the state, kept in tests/golden/transfer/ and read by people.

To accept a change: ``pytest --regenerate``, and read the difference before it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from ragtag.protocols.transfer.types import (
    Arm,
    Ask,
    Came,
    Connect,
    Drop,
    Expired,
    Fetch,
    Finished,
    Lost,
    Offered,
    Outcome,
    Refused,
    Start,
    Told,
    TransferEffect,
    TransferEvent,
)
from ragtag.simulation.worlds.transfer import SimulatedDonor, TransferWorld

MB = 1e6
CASES = [
    (
        "three_donors",
        {"ann": SimulatedDonor(10 * MB), "bob": SimulatedDonor(10 * MB), "cleo": SimulatedDonor(5 * MB)},
        "Three donors; cleo is half as fast as the others, and gives half as much.",
    ),
    (
        "a_death",
        {
            "ann": SimulatedDonor(10 * MB),
            "bob": SimulatedDonor(10 * MB, dies_s=0.35),
            "cleo": SimulatedDonor(10 * MB),
        },
        "Bob's process dies in the middle. Others give what it owed; connected to again, nobody is there.",
    ),
    (
        "a_stall",
        {"ann": SimulatedDonor(10 * MB), "bob": SimulatedDonor(10 * MB, stalls_s=0.35)},
        "Bob falls silent. In the end ann is asked for what bob still owes.",
    ),
    (
        "a_damaged_chunk",
        {"ann": SimulatedDonor(10 * MB), "bob": SimulatedDonor(10 * MB, damages=1)},
        "Bob's second chunk has not the hash that bob gave: bob is not asked again.",
    ),
    (
        "far_ahead",
        {
            "ann": SimulatedDonor(10 * MB),
            "bob": SimulatedDonor(10 * MB),
            "cleo": SimulatedDonor(10 * MB, round=40),
        },
        "Cleo says that she is 40 rounds ahead of ann and bob: theirs is asked for, and they give.",
    ),
    (
        "one_left_of_another_round",
        {
            "ann": SimulatedDonor(10 * MB, round_s=0.01, rtt_s=0.01, dies_s=0.22),
            "bob": SimulatedDonor(10 * MB, round_s=0.01, rtt_s=0.01, dies_s=0.23),
            "cleo": SimulatedDonor(10 * MB, round_s=0.01, rtt_s=0.06),
        },
        "Cleo is far away, and has passed the agreed round when she is asked. As the others die, she gives.",
    ),
    (
        "another_model",
        {"ann": SimulatedDonor(schema=2), "bob": SimulatedDonor(schema=2)},
        "Both train another model.",
    ),
]


@pytest.mark.parametrize(("name", "givers", "note"), CASES, ids=[case[0] for case in CASES])
def test_transcript(
    golden: Callable[[str, str], None], name: str, givers: dict[str, SimulatedDonor], note: str
) -> None:
    world = TransferWorld(givers, total_bytes=1_500_000, chunk_bytes=125_000)
    lines = ["12 chunks of 125,000 bytes, to be there within 10 s.", note, ""]

    def tell(now_s: float, event: TransferEvent, effects: list[TransferEffect]) -> None:
        said = [line for effect in effects for line in _effect(effect)]
        if said or not isinstance(event, Expired):
            lines.append(f"{now_s * 1e3:>7.1f} ms  {_event(event)}")
            lines.extend(f"{'':12}-> {line}" for line in said)

    world.on_step = tell
    world.run(10.0)
    golden(f"transfer/{name}", "\n".join(lines) + "\n")


def test_every_golden_file_has_its_case() -> None:
    from tests.conftest import GOLDEN

    assert {path.stem for path in (GOLDEN / "transfer").glob("*.txt")} == {case[0] for case in CASES}


def _event(event: TransferEvent) -> str:
    if isinstance(event, Start):
        return "starts"
    if isinstance(event, Told):
        return f"{event.donor} has finished round {event.round}, of {event.round_s * 1e3:g} ms each"
    if isinstance(event, Offered):
        return f"{event.donor} offers its snapshot of round {event.offer.round}"
    if isinstance(event, Came):
        return f"{event.donor} gives chunk {event.index}{'' if event.intact else ', damaged'}"
    if isinstance(event, Lost | Refused):
        return f"{event.donor} is lost: {event.why}"
    return "time passes"


def _effect(effect: TransferEffect) -> Iterable[str]:
    if isinstance(effect, Arm):
        return
    if isinstance(effect, Connect):
        yield f"connects to {effect.donor}"
    elif isinstance(effect, Ask):
        yield f"asks {effect.donor} for its snapshot of round {effect.round}"
    elif isinstance(effect, Fetch):
        yield f"asks {effect.donor} for chunk {effect.index}"
    elif isinstance(effect, Drop):
        yield f"drops {effect.donor}: {effect.why}"
    elif isinstance(effect, Finished):
        yield f"has everything: {_outcome(effect.outcome)}"
    else:
        yield f"gives up: {effect.reason}"


def _outcome(outcome: Outcome) -> str:
    given = ", ".join(f"{n} bytes from {name}" for name, n in outcome.given.items())
    rounds = ", ".join(f"{n} chunks of round {round_}" for round_, n in outcome.rounds.items())
    dropped = "".join(f"; without {name} ({why})" for name, why in outcome.dropped.items())
    return f"{given}; {rounds}{dropped}; {outcome.wasted_bytes} bytes came in vain"
