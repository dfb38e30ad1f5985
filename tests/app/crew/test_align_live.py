"""Real processes that average gradients: after a death, and when the crew has grown, they are one again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from ragtag.app.invitation.token import kept_token
from ragtag.app.report import report_json
from ragtag.app.report.summarise import summarise
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from tests.app.crew.test_newcomer_gradients import SCRIPT, arrived, models, rounds, some_rounds
from tests.app.processes import Place, until

EVERY = 8
ALIGNED = SCRIPT.replace(
    "model=model)", f"model=model, align=ragtag.Align(every={EVERY}, share=0.2))"
).replace("ragtag.AllReduce()", 'getattr(ragtag, os.environ.get("METHOD", "AllReduce"))()')
assert ALIGNED.count("ragtag.Align(") == ALIGNED.count("METHOD") == 1


@pytest.fixture
def place(place: Place) -> Place:
    (place.folder / "train.py").write_text(ALIGNED)
    return place


def comparisons(folder: Path, peer: int) -> list[trace.Align]:
    """What a peer's trace tells of them."""
    return [r for r in read_run(folder).records() if isinstance(r, trace.Align) and r.peer == peer]


def alike(folder: Path, peer: int, n: int, since: int) -> set[int]:
    """The rounds after which a peer saw that it and ``n - 1`` others have the same."""
    return {r.round for r in comparisons(folder, peer) if r.round >= since and not r.apart and r.peers == n}


def one_again(folders: dict[int, Path], since: int) -> set[int]:
    """Wait until all these peers have seen twice that they are one; after which rounds they did."""
    found: set[int] = set()

    def twice() -> bool:
        seen = [alike(folder, peer, len(folders), since) for peer, folder in folders.items()]
        found.update(set.intersection(*seen))
        return len(found) >= 2

    until(twice, f"seen by all of {sorted(folders)} that they are one")
    return found


def require_one(folder: Path, peers: tuple[int, ...], after: set[int]) -> None:
    """After these rounds the models are the same, to the bit."""
    found = {peer: models(folder, peer) for peer in peers}
    for round_ in sorted(after):
        for peer in peers[1:]:
            assert np.array_equal(found[peers[0]][round_], found[peer][round_]), (round_, peer)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["AllReduce", "RPS"])
def test_after_a_death_survivors_are_one(place: Place, method: str) -> None:
    os.environ["METHOD"] = method
    try:
        crew = place.crew(4)
    finally:
        del os.environ["METHOD"]
    some_rounds(place.run, 0, 20)
    os.kill(crew.pid(3), signal.SIGKILL)
    some_rounds(place.run, 0, EVERY)
    since = max(rounds(place.run, 0))
    after = one_again(dict.fromkeys((0, 1, 2), place.run), since)
    place.end()
    require_one(place.folder, (0, 1, 2), after)
    summary = summarise(read_run(place.run))
    assert set(summary.replicas) >= {0, 1, 2}
    assert report_json(place.run)


@pytest.mark.slow
def test_with_a_newcomer_all_are_one(place: Place) -> None:
    crew = place.crew(2)
    joined = place.join(kept_token(place.run), LATE="yes")
    joined.says("heard 0b111")
    run = place.folder / "run-joined"
    since = arrived(run, 2)
    after = one_again({0: place.run, 1: place.run, 2: run}, since)
    place.end()
    assert (crew.code(), joined.code()) == (0, 0), crew.text + joined.text
    require_one(place.folder, (0, 1, 2), after)
