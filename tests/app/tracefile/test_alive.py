"""Readers can tell whether anyone still writes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from ragtag.app.tracefile import TraceWriter, peer_file, read_run
from ragtag.app.tracefile.files import is_written
from ragtag.core import trace

SRC = Path(__file__).parents[3] / "src"


def step(t: float, peer: int = 0, n: int = 0) -> trace.Step:
    return trace.Step(t=t, peer=peer, step=n, samples=8 * n, loss=1.0)


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
