"""Real processes that average gradients: after a death, under loss, and with growth, survivors are one again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ragtag.app.report import report_json
from ragtag.app.report.summarise import summarise
from ragtag.app.token import kept_token
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from tests.app.test_elastic import Place, _until
from tests.app.test_newcomer_gradients import SCRIPT, arrived, models, rounds, some_rounds

EVERY = 8
ALIGNED = SCRIPT.replace(
    "model=model)", f"model=model, align=ragtag.Align(every={EVERY}, share=0.2))"
).replace("ragtag.AllReduce()", 'getattr(ragtag, os.environ.get("METHOD", "AllReduce"))()')
assert ALIGNED.count("ragtag.Align(") == ALIGNED.count("METHOD") == 1


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    (tmp_path / "train.py").write_text(ALIGNED)
    yield made
    made.close()


def comparisons(folder: Path, peer: int) -> list[trace.Align]:
    """What a peer's trace tells of them."""
    return [r for r in read_run(folder).records() if isinstance(r, trace.Align) and r.peer == peer]


def compared_after(folder: Path, peer: int, round_: int, times: int = 4) -> None:
    """Wait until replicas were compared so often after a round, and were alike in the last two."""

    def alike() -> bool:
        found = [r for r in comparisons(folder, peer) if r.round > round_]
        return len(found) >= times and not any(r.apart or r.peers < 2 for r in found[-2:])

    _until(alike, f"replicas alike as peer {peer} sees it")


def require_one(folder: Path, peers: tuple[int, ...], since: int) -> None:
    """From the first comparison on that found nothing, two rounds in three at least, the models are the same.

    On a busy machine a peer may miss part of a round at any time; then it is off until the next comparisons.
    """
    found = {peer: models(folder, peer) for peer in peers}
    shared = sorted(r for r in set.intersection(*(set(of) for of in found.values())) if r >= since)
    assert len(shared) >= EVERY, (since, shared)
    first = peers[0]
    same = [all(np.array_equal(found[first][r], found[p][r]) for p in peers[1:]) for r in shared]
    assert 3 * sum(same) >= 2 * len(same), list(zip(shared, same, strict=True))


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
    died = max(rounds(place.run, 0))
    some_rounds(place.run, 0, 4 * EVERY)
    for peer in (0, 1, 2):
        compared_after(place.run, peer, died)
    some_rounds(place.run, 0, 2 * EVERY)
    last = comparisons(place.run, 0)[-1].round
    place.end()
    since = min(r.round for r in comparisons(place.run, 0) if r.round > died and not r.apart)
    assert last >= since
    require_one(place.folder, (0, 1, 2), since)
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
    compared_after(run, 2, since)
    some_rounds(run, 2, 2 * EVERY)
    place.end()
    assert (crew.code(), joined.code()) == (0, 0), crew.text + joined.text
    first = min(r.round for r in comparisons(run, 2) if r.round > since and not r.apart and r.peers == 3)
    require_one(place.folder, (0, 1, 2), first)
