"""Traces are written whole, and survive a full disk."""

from __future__ import annotations

import logging
import resource
import threading
from pathlib import Path

import pytest

from ragtag.app.tracefile import TraceWriter, peer_file, read_run
from ragtag.core import trace


def step(t: float, peer: int = 0, n: int = 0) -> trace.Step:
    return trace.Step(t=t, peer=peer, step=n, samples=8 * n, loss=1.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_each_record_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "new" / "peer-00.jsonl") as writer:
        for n in range(3):
            writer.write(step(float(n), n=n))
            assert len(writer.path.read_bytes().splitlines()) == n + 1


def test_threads_do_not_cut_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / peer_file(3)
    with TraceWriter(path) as writer:
        threads = [
            threading.Thread(
                target=lambda peer=peer: [writer.write(step(n / 10, peer, n)) for n in range(300)]
            )
            for peer in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
    run = read_run(tmp_path)
    records = list(run.records())
    assert len(records) == 1200 and run.damage.messages() == []
    assert len({(r.peer, r.t) for r in records}) == 1200


def test_a_full_disk_stops_tracing_with_one_message_and_it_resumes(small_disk: Path) -> None:
    said: list[str] = []
    clock = Clock()
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 40_960)
    writer = TraceWriter(small_disk / peer_file(0), said.append, clock=clock)
    for n in range(1000):
        clock.now_s += 0.01  # ten seconds of a full disk: it is tried again about ten times
        writer.write(step(n / 100, n=n))
    assert len(said) == 1
    assert str(writer.path) in said[0] and "the disk is full: make room" in said[0]
    dropped = writer.dropped
    assert 0 < dropped < 1000

    ballast.unlink()
    clock.now_s += 1.0
    writer.write(step(10.0, n=1000))
    writer.close()
    assert writer.dropped == dropped and len(said) == 1
    run = read_run(small_disk)
    records = list(run.records())
    assert run.damage.messages() == []
    assert len([r for r in records if isinstance(r, trace.Step)]) == 1001 - dropped
    (note,) = [r for r in records if isinstance(r, trace.Note)]
    assert note.what == "trace resumed" and note.detail == f"{dropped} records were dropped"


def test_a_disk_that_fills_twice_is_reported_twice(small_disk: Path) -> None:
    said: list[str] = []
    clock = Clock()
    ballast = small_disk / "ballast"
    writer = TraceWriter(small_disk / peer_file(0), said.append, clock=clock)
    for turn in (1, 2):
        with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        for n in range(200):
            writer.write(step(float(n), n=n))
        assert len(said) == turn
        ballast.unlink()
        clock.now_s += 1.0
        writer.write(step(0.0))
    writer.close()


def test_dev_full_never_raises() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    said: list[str] = []
    clock = Clock()
    with TraceWriter("/dev/full", said.append, clock=clock) as writer:
        for n in range(50):
            clock.now_s += 0.5
            writer.write(step(float(n)))
    assert writer.dropped == 50 and len(said) == 1


def test_a_limit_on_file_size_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TraceWriter(tmp_path / peer_file(0), clock=Clock()) as writer:
        writer.write(step(0.0))
        size = writer.path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
        try:
            with caplog.at_level(logging.WARNING):
                writer.write(step(1.0))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ulimit -f" in caplog.text
    assert writer.path.stat().st_size == size  # the part that did fit was taken back
    assert writer.dropped == 1


def test_a_wrong_path_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        TraceWriter(tmp_path / "file" / "peer-00.jsonl")


def test_what_is_written_after_close_is_counted(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / peer_file(0))
    writer.close()
    writer.close()
    writer.write(step(0.0))
    assert writer.dropped == 1


def test_a_writer_mends_the_torn_line_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / peer_file(0)
    path.write_bytes(trace.encode(step(1.0)) + trace.encode(step(2.0))[:20])
    with TraceWriter(path) as writer:
        writer.write(step(3.0))
    run = read_run(tmp_path)
    assert [r.t for r in run.records()] == [1.0, 3.0]
    assert run.damage.lines == {"peer-00.jsonl": 1}
