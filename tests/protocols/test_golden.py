"""Transcripts of one peer in a small crew, kept in tests/golden/ and read by people.

A change of what a machine does shows there as a change of prose. To accept it: ``pytest --regenerate``,
and read the difference before it is committed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.layout import fixed_owners, rotating_owners
from ragtag.protocols.rounds.rps import rps
from tests.protocols.harness import World, vectors
from tests.protocols.transcript import transcript

N, N_CHUNKS = 3, 12
EVERYONE = frozenset(range(N))
CASES = [
    ("rps_without_loss", rps, 0.0, 1, (), "Nothing is lost: two stages of one one-way delay (2 ms) each."),
    (
        "rps_with_loss",
        rps,
        0.2,
        2,
        (),
        "One datagram in five is lost. What came is averaged, chunk by chunk; where no average came, own\n"
        "values stay; an end marker closes each message, so nobody waits for a deadline.",
    ),
    (
        "rps_with_a_dead_peer",
        rps,
        0.0,
        1,
        (2,),
        "Peer 2 is dead. It is waited for once, for as long as the probe allows (1.5 x 50 ms), and no more.",
    ),
    (
        "allreduce_with_repair",
        direct,
        0.1,
        12,
        (),
        "One datagram in ten is lost. Holes are asked for again as soon as a message has ended.",
    ),
    (
        "ring_without_loss",
        ring,
        0.0,
        1,
        (),
        "Two turns of n-1 hops: sums, then averages, to the next peer only.",
    ),
]


@pytest.mark.parametrize(
    ("name", "method", "loss", "seed", "dead", "note"), CASES, ids=lambda case: str(case)[:24]
)
def test_transcript(
    golden: Callable[[str, str], None],
    name: str,
    method: Averager,
    loss: float,
    seed: int,
    dead: tuple[int, ...],
    note: str,
) -> None:
    world = World(N, method, N_CHUNKS, loss=loss, seed=seed)
    world.dead.update(dict.fromkeys(dead, 0.0))
    world.once(vectors(N, N_CHUNKS))
    owners = rotating_owners(seed, 0, N, EVERYONE) if method is rps else fixed_owners(N, EVERYONE)
    title = f"{method.name}: {N} peers, {N_CHUNKS} chunks in {N} blocks, seed {seed}. Peer 0 tells."
    if method is not ring:
        title += f" Block 0 is peer {owners[0]}'s, 1 peer {owners[1]}'s, 2 peer {owners[2]}'s."
    golden(name, transcript(world, 0, title, note))


def test_every_golden_file_has_its_case() -> None:
    from tests.conftest import GOLDEN

    assert {path.stem for path in GOLDEN.glob("*.txt")} == {case[0] for case in CASES}
