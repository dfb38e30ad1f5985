"""A trace is followed while it grows."""

from __future__ import annotations

from pathlib import Path

from ragtag.app import tracefile
from ragtag.app.tracefile import CREW_FILE, LineReader, TraceFollower, peer_file
from ragtag.core import trace


def step(t: float, peer: int = 0, n: int = 0) -> trace.Step:
    return trace.Step(t=t, peer=peer, step=n, samples=8 * n, loss=1.0)


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


def test_a_follower_takes_whole_lines_and_new_files(tmp_path: Path) -> None:
    follower = TraceFollower(tmp_path)
    assert follower.poll() == []
    line = trace.encode(step(1.0))
    path = tmp_path / peer_file(0)
    path.write_bytes(line + line[:10])
    assert follower.poll() == [step(1.0)]
    assert follower.poll() == []
    with path.open("ab") as file:
        file.write(line[10:] + b"damage\n")
    (tmp_path / CREW_FILE).write_bytes(trace.encode(trace.Fault(t=0.5, name="loss")))
    assert follower.poll() == [trace.Fault(t=0.5, name="loss"), step(1.0)]
    assert follower.damage.lines == {peer_file(0): 1}


def test_a_follower_reads_a_large_file_in_parts(tmp_path: Path) -> None:
    line = trace.encode(step(1.0))
    (tmp_path / peer_file(0)).write_bytes(line * 20_000)
    follower = TraceFollower(tmp_path)
    sizes = []
    while records := follower.poll(blocks_max=1):
        sizes.append(len(records))
    assert sum(sizes) == 20_000 and len(sizes) > 3
