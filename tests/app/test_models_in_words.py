"""Whether peers ended with the same model, in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragtag.app.report import build_report, report_json
from ragtag.app.terminal.run_view import models
from ragtag.app.tracefile import TraceWriter, last_leaves, peer_file
from ragtag.app.words import Final, models_in_words
from ragtag.core import trace

A, B = "a1b2c3d4e5f6" + "0" * 52, "c3d4" * 16


@pytest.mark.parametrize(
    ("finals", "said"),
    [
        ({}, ""),
        ({0: Final(A, 9)}, ""),
        ({0: Final("", 9), 1: Final("", 9)}, ""),
        ({0: Final("\x1b[2J", 9), 1: Final(A, 9)}, ""),
        ({0: Final(A, 9), 1: Final(A, 9), 2: Final(A, 8)}, "3 peers hold the same model (a1b2c3d4e5f6)"),
        (
            {0: Final(A, 9), 1: Final(A, 9), 2: Final(B, 5)},
            "replicas differ: peers 0 and 1 hold a1b2c3d4e5f6; peer 2 holds c3d4c3d4c3d4 (4 rounds behind)",
        ),
        (  # peer 1 has taken peer 0's, and peer 2 has not
            {0: Final(A, 9), 1: Final(A, 2), 2: Final(B, 8)},
            "replicas differ: peers 0 and 1 hold a1b2c3d4e5f6; peer 2 holds c3d4c3d4c3d4 (1 round behind)",
        ),
        (
            {0: Final(B, 8), 1: Final(A, 9), 2: Final("", 9)},
            "replicas differ: peer 0 holds c3d4c3d4c3d4 (1 round behind); peer 1 holds a1b2c3d4e5f6; "
            "of peer 2 it is not known",
        ),
        (
            {0: Final(A, 9), 1: Final(B, -1)},
            "replicas differ: peer 0 holds a1b2c3d4e5f6; peer 1 holds c3d4c3d4c3d4 (never averaged)",
        ),
    ],
)
def test_alike(finals: dict[int, Final], said: str) -> None:
    assert models_in_words(finals) == said


def test_of_many_that_all_differ_some_are_named() -> None:
    finals = {peer: Final(f"{peer:012x}", 9) for peer in range(20)}
    said = models_in_words(finals)
    assert said.endswith("; peer 3 holds 000000000003; 16 more peers hold others")


def write(folder: Path, peer: int, *records: trace.Record) -> None:
    with TraceWriter(folder / peer_file(peer)) as writer:
        for record in records:
            writer.write(record)


def step(peer: int, n: int) -> trace.Step:
    return trace.Step(t=n * 0.01, peer=peer, step=n, samples=n, loss=1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of five: one has failed, one was killed after an earlier life that left."""
    many = [step(0, n) for n in range(1, 2000)]
    write(tmp_path, 0, *many, trace.Leave(t=30.0, peer=0, steps=1999, digest=A, round=99))
    write(tmp_path, 1, step(1, 1), trace.Leave(t=30.0, peer=1, steps=1, digest=B, round=90))
    write(tmp_path, 2, trace.Leave(t=9.0, peer=2, digest=B, round=7, failed=True))
    write(tmp_path, 3, trace.Leave(t=9.0, peer=3, digest=A, round=7), step(3, 9))
    write(tmp_path, 4, step(4, 1), trace.Leave(t=30.0, peer=4, digest=A, round=99))
    (tmp_path / peer_file(5)).write_text("torn")
    write(
        tmp_path,
        -1,
        trace.Run(t=0.0, world="live", name="x", seed=0, peers=5, method="rps"),
        trace.Leave(t=31.0),
    )
    return tmp_path


SAID = "eplicas differ: peers 0 and 4 hold a1b2c3d4e5f6; peer 1 holds c3d4c3d4c3d4 (9 rounds behind)"


def test_the_last_records_of_those_that_left_are_found(folder: Path) -> None:
    assert {peer: leave.round for peer, leave in last_leaves(folder).items()} == {0: 99, 1: 90, 2: 7, 4: 99}
    assert models(folder) == f"r{SAID}"


def test_the_report_says_so_too(folder: Path) -> None:
    (folder / peer_file(3)).unlink()
    assert f"R{SAID}." in build_report(folder).read_text()
    found = {peer["peer"]: (peer["digest"], peer["last_round"]) for peer in report_json(folder)["per_peer"]}
    assert found[0] == (A, 99) and found[1] == (B, 90)
