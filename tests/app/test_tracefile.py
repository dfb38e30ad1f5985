"""Traces are written whole, survive a full disk, and are read in time order whatever is wrong with them."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ragtag.app import tracefile
from ragtag.app.tracefile import LineReader, TraceWriter, peer_file, read_run
from ragtag.app.tracefile.alive import is_written
from ragtag.core import trace

SRC = Path(__file__).parents[2] / "src"


def step(t: float, peer: int = 0, n: int = 0) -> trace.Step:
    return trace.Step(t=t, peer=peer, step=n, samples=8 * n, loss=1.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


# -- Writing


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


# -- Who writes


def test_a_file_is_written_as_long_as_one_of_its_writers_is_open(tmp_path: Path) -> None:
    path = tmp_path / peer_file(0)
    first, second = TraceWriter(path), TraceWriter(path)
    assert is_written(path) is True
    first.close()
    assert is_written(path) is True
    second.close()
    assert is_written(path) is False
    assert is_written(tmp_path / "nothing") is None


def test_a_writer_whose_reader_asked_at_that_moment_says_so_with_its_next_record(tmp_path: Path) -> None:
    path = tmp_path / peer_file(0)
    with path.open("wb") as asking:
        fcntl.flock(asking, fcntl.LOCK_EX)
        writer = TraceWriter(path)
        writer.write(step(0.0))
    assert is_written(path) is False
    writer.write(step(1.0))
    assert is_written(path) is True
    writer.close()
    assert [r.t for r in read_run(tmp_path).records()] == [0.0, 1.0]


def test_a_writer_that_is_killed_writes_no_more(tmp_path: Path) -> None:
    code = """
import sys, time
from ragtag.app.tracefile import TraceWriter
writer = TraceWriter(sys.argv[1])
print("open", flush=True)
time.sleep(60)
"""
    path = tmp_path / peer_file(0)
    command = [sys.executable, "-c", code, str(path)]
    env = dict(os.environ) | {"PYTHONPATH": str(SRC)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        assert is_written(path) is True
        process.kill()
    assert is_written(path) is False


# -- Reading


def test_files_are_merged_in_time_order(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / tracefile.CREW_FILE) as crew:
        crew.write(trace.Run(t=0.0, world="live", name="x", seed=1, peers=3, method="rps"))
        crew.write(trace.Fault(t=5.05, peer=1, name="kill"))
    for peer in range(3):
        with TraceWriter(tmp_path / peer_file(peer)) as writer:
            for n in range(100):
                writer.write(step(n / 10 + peer / 100, peer, n))
            writer.write(step(9.85, peer))  # a thread that was a little late
    run = read_run(tmp_path)
    assert run.run is not None and run.run.peers == 3
    for _ in range(2):  # it can be read again
        times = [r.t for r in run.records()]
        assert len(times) == 305 and times == sorted(times)


def test_damage_is_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / peer_file(0)
    good = trace.encode(step(1.0))
    long = b'{"kind":"note","t":1,"what":"' + b"x" * (trace.LINE_BYTES_MAX + 100_000) + b'"}\n'
    newer = b'{"kind":"weather","t":2}\n{"kind":"leave","t":3,"peer":0,"mood":"fine"}\n'
    path.write_bytes(good + b"\x00\x00garbage\n" + good + long + good + b"\n" + newer + good[:30])
    run = read_run(tmp_path)
    records = list(run.records())
    assert [trace.kind_of(r) for r in records] == ["step"] * 3 + ["weather", "leave"]
    assert run.damage.lines == {"peer-00.jsonl": 2}
    assert run.damage.torn == ["peer-00.jsonl"]
    said = "\n".join(run.damage.messages())
    assert "trace line 2: not a record" in said
    assert f"trace line 4: longer than {trace.LINE_BYTES_MAX} bytes" in said
    assert "unknown kind 'weather'" in said and "leave.mood" in said


def test_a_writer_mends_the_torn_line_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / peer_file(0)
    path.write_bytes(trace.encode(step(1.0)) + trace.encode(step(2.0))[:20])
    with TraceWriter(path) as writer:
        writer.write(step(3.0))
    run = read_run(tmp_path)
    assert [r.t for r in run.records()] == [1.0, 3.0]
    assert run.damage.lines == {"peer-00.jsonl": 1}


def test_a_whole_last_record_without_line_feed_counts(tmp_path: Path) -> None:
    (tmp_path / peer_file(0)).write_bytes(trace.encode(step(1.0))[:-1])
    run = read_run(tmp_path)
    assert [r.t for r in run.records()] == [1.0] and run.damage.messages() == []


def test_a_folder_without_a_trace_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has neither crew\.jsonl nor peer-"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        read_run(tmp_path / "nowhere")


def test_a_newer_version_is_refused_with_advice(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / tracefile.CREW_FILE) as crew:
        crew.write(trace.Run(t=0.0, world="live", name="x", seed=1, peers=3, method="rps", version=99))
    with pytest.raises(ValueError, match=r"version 99.*update Ragtag"):
        read_run(tmp_path)


def test_peers_above_99_are_read_in_order(tmp_path: Path) -> None:
    for peer in (100, 9, 20):
        (tmp_path / peer_file(peer)).write_bytes(trace.encode(step(0.0, peer)))
    assert [path.name for path in read_run(tmp_path).files] == [peer_file(9), peer_file(20), peer_file(100)]


def test_a_growing_file_is_followed_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one\ntw")
    reader = LineReader(path)
    assert reader.read() == [(1, b"one")]
    assert reader.read() is None and reader.rest == b"tw"
    with path.open("ab") as file:
        file.write(b"o\n")
    assert reader.read() == [(2, b"two")]
    path.write_bytes(b"new\n")  # shorter: begun anew
    assert reader.read() == [(1, b"new")]


def test_reading_holds_a_block_and_not_the_file(tmp_path: Path) -> None:
    path = tmp_path / peer_file(0)
    line = trace.encode(step(1.0))
    path.write_bytes(line * 20_000)  # 1.4 MB: several blocks
    reader = LineReader(path)
    most = 0
    while (lines := reader.read()) is not None:
        most = max(most, sum(len(text or b"") for _, text in lines))
    assert 0 < most <= tracefile.BLOCK_BYTES
    assert reader.number == 20_000
