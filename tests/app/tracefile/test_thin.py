"""Traces are bounded however long a run is, and the report of one stays right."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.app.report import build_report, report_json
from ragtag.app.terminal.peers import PeerTable
from ragtag.app.tracefile import CREW_FILE, TraceWriter, peer_file, read_run, thin
from ragtag.core import trace

SCALE = 1024
"""Limits are so many times smaller here."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEVEL_BYTES", "ROUNDS_BYTES", "ALL_BYTES", "LAST_BYTES"):
        monkeypatch.setattr(thin, name, getattr(thin, name) // SCALE)


def records(peer: int, rounds: int) -> Iterator[trace.Known]:
    """A long run of one of three peers."""
    draw = random.Random(peer)
    yield trace.Join(t=0.5, peer=peer)
    sent = 0
    for n in range(rounds):
        t = 1.0 + 0.1 * n
        sent += 4000
        missed = [other for other in range(3) if other != peer and draw.random() < 0.02]
        yield trace.Round(
            t=t, peer=peer, round=n, scatter_s=0.01, gather_s=0.02, total_s=draw.uniform(0.02, 0.2),
            arrived=1.0 - 0.1 * len(missed), contributors=3.0, waited_for=[p for p in range(3) if p != peer],
            missed=missed, expired=bool(missed), bytes_sent=sent, bytes_received=sent,
        )  # fmt: skip
        yield trace.Sparse(
            t=t, peer=peer, round=n, entries=10, density=0.01, bytes=100, dense_bytes=10_000, captured=0.5,
            residual_norm=1.0, committed=9, restored=1, dense=n % 7 == 0,
        )  # fmt: skip
        loss = None if draw.random() < 0.01 else 2.0 * math.exp(-n / rounds)
        told = msgspec.UNSET if n % 11 == 3 else loss
        yield trace.Step(t=t, peer=peer, step=n + 1, samples=8 * (n + 1), loss=told)
        if n % 5 == 0:
            yield trace.Pace(
                t=t, peer=peer, steps=5, averages=5, compute_s=0.3, average_s=0.2, lost_s=0.01,
                waited_for=[(peer + 1) % 3], waited_s=[0.05], stale=[4, 1], coherence=[0.5],
                coherence_steps=[n],
            )  # fmt: skip
        if n % 500 == 0:
            yield trace.Note(t=t, peer=peer, what="silent", other=(peer + 1) % 3, detail=str(n))
    yield trace.Error(t=t, peer=peer, what="a stumble")
    yield trace.Leave(t=t + 1, peer=peer, steps=rounds, samples=8 * rounds, bytes_sent=sent)


def write(folder: Path, rounds: int, thinned: bool) -> int:
    """The run's traces; the size of the largest file while it grew."""
    run = trace.Run(t=0.0, world="live", name="long", seed=0, peers=3, method="rps", started_unix_s=1.0)
    with TraceWriter(folder / CREW_FILE) as crew:
        crew.write(run)
    largest = 0
    for peer in range(3):
        path = folder / peer_file(peer)
        if not thinned:
            path.write_bytes(b"".join(map(trace.encode, records(peer, rounds))))
            continue
        with TraceWriter(path) as writer:
            for record in records(peer, rounds):
                writer.write(record)
        largest = max(largest, path.stat().st_size)
    return largest


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, of in value.items() for k, v in flat(of, f"{name}.{key}").items()}
    if isinstance(value, list):
        return {k: v for at, of in enumerate(value) for k, v in flat(of, f"{name}.{at}").items()}
    return {name: value}


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_long_runs_files_are_bounded_and_its_report_is_right(tmp_path: Path) -> None:
    rounds = 10_000
    size = write(tmp_path / "thin", rounds, thinned=True)
    write(tmp_path / "whole", rounds, thinned=False)
    whole_size = (tmp_path / "whole" / peer_file(0)).stat().st_size
    assert size <= thin.ROUNDS_BYTES + 20_000 < whole_size / 40
    thinned, whole = (flat(report_json(tmp_path / name)) for name in ("thin", "whole"))
    damage = thinned.pop(".damage.0")
    assert "the trace of this long run was thinned as it grew: " in damage and " rounds stand in " in damage
    assert thinned.keys() | {".damage"} == whole.keys() | {".damage"}
    for name, value in whole.items():
        if name == ".damage":
            continue
        median = any(word in name for word in ("median", "p95"))
        if isinstance(value, float) and name != ".coherence.median":
            assert thinned[name] == pytest.approx(value, rel=0.5 if median else 1e-6), name
        elif name != ".coherence.count":  # of these some are left out
            assert thinned[name] == value, name
    build_report(tmp_path / "thin")
    rows = []
    for name in ("thin", "whole"):
        live = PeerTable(3)
        for record in read_run(tmp_path / name).records():
            live.feed(record)
        rows.append([(row.missed, row.step, row.round, row.sent) for row in live.rows.values()])
    assert rows[0] == rows[1]


@pytest.mark.usefixtures("small")
def test_rare_records_are_all_kept(tmp_path: Path) -> None:
    write(tmp_path, 10_000, thinned=True)
    kinds = (trace.Join, trace.Note, trace.Error, trace.Leave)
    kept = [r for r in read_run(tmp_path).records() if r.peer == 1 and isinstance(r, kinds)]
    assert kept == [r for r in records(1, 10_000) if isinstance(r, kinds)]


def test_a_short_runs_trace_is_whole(tmp_path: Path) -> None:
    write(tmp_path, 500, thinned=True)
    for peer in range(3):
        data = (tmp_path / peer_file(peer)).read_bytes()
        assert data == b"".join(map(trace.encode, records(peer, 500)))
    assert report_json(tmp_path)["damage"] == []


@pytest.mark.usefixtures("small")
def test_a_flood_of_notes_ends_at_the_limit_and_is_counted(tmp_path: Path) -> None:
    path = tmp_path / peer_file(0)
    flood = 20_000
    with TraceWriter(path) as writer:
        for n in range(flood):
            writer.write(trace.Note(t=float(n), peer=0, what="silent", other=1, detail="x" * 50))
        writer.write(trace.Error(t=flood + 1.0, peer=0, what="at last"))
        writer.write(trace.Leave(t=flood + 2.0, peer=0))
        assert path.stat().st_size <= thin.ALL_BYTES + 1_000
    *notes, error, full, leave = read_run(tmp_path).records()
    assert isinstance(full, trace.Note) and full.what == "trace full"
    assert full.detail == f"{flood - len(notes)} records were left out: the file is full"
    assert isinstance(error, trace.Error) and isinstance(leave, trace.Leave)


@pytest.mark.usefixtures("small")
def test_what_a_killed_writer_leaves_can_be_read_and_a_next_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / peer_file(0)
    for _ in range(2):
        writer = TraceWriter(path)
        for record in records(0, 3_000):
            if not isinstance(record, trace.Leave):
                writer.write(record)
        size = path.stat().st_size
        assert all(trace.decode(line) for line in path.read_bytes().splitlines())
    rounds = sum(r.of for r in read_run(tmp_path).records() if isinstance(r, trace.Round))
    lost = 2 * 3_000 - rounds
    assert 0 <= lost < 2 * 2 ** (size // thin.LEVEL_BYTES)
    assert size <= thin.ROUNDS_BYTES


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=2, max_size=40), st.data())
def test_how_rounds_are_brought_together_does_not_matter(
    missed: list[list[int]], data: st.DataObject
) -> None:
    rounds = [
        trace.Round(
            t=float(n), peer=9, round=n, scatter_s=0.1, gather_s=0.2, total_s=1.0 + n, arrived=0.5,
            waited_for=[0, 1, 2, 3], missed=sorted(set(who)), expired=n % 3 == 0,
        )
        for n, who in enumerate(missed)
    ]  # fmt: skip
    left = list(rounds)
    while len(left) > 1:
        at = data.draw(st.integers(0, len(left) - 2))
        left[at : at + 2] = [thin._rounds(left[at], left[at + 1])]
    (one,) = left
    assert one.of == len(rounds) and one.round == len(rounds) - 1
    assert one.how_often_missed == Counter(other for r in rounds for other in r.missed)
    assert one.how_often_expired == sum(r.expired for r in rounds)
    assert one.total_s == pytest.approx(sum(r.total_s for r in rounds) / len(rounds))
    assert (one.longest, one.lowest) == (float(len(rounds)), 0.5)
    assert trace.decode(trace.encode(one)) == one


LOSSES = st.sampled_from([msgspec.UNSET, None, 1.0, 2.0, 7.0])


@given(st.lists(LOSSES, min_size=2, max_size=20), st.data())
def test_a_loss_that_was_not_told_or_not_finite_has_no_part_in_the_mean(
    losses: list[float | msgspec.UnsetType | None], data: st.DataObject
) -> None:
    left = [trace.Step(t=float(n), step=n, samples=n, loss=loss) for n, loss in enumerate(losses)]
    while len(left) > 1:
        at = data.draw(st.integers(0, len(left) - 2))
        left[at : at + 2] = [thin._steps(left[at], left[at + 1])]
    (one,) = left
    finite, bad = [x for x in losses if isinstance(x, float)], losses.count(None)
    assert (one.of, one.how_often_good, one.how_often_bad) == (len(losses), len(finite), bad)
    if finite:
        assert one.loss == pytest.approx(sum(finite) / len(finite))
    else:
        assert one.loss == (None if bad else msgspec.UNSET)
    assert trace.decode(trace.encode(one)) == one
