"""A trace is read in time order, whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragtag.app import tracefile
from ragtag.app.tracefile import TraceWriter, peer_file, read_run
from ragtag.core import trace


def step(t: float, peer: int = 0, n: int = 0) -> trace.Step:
    return trace.Step(t=t, peer=peer, step=n, samples=8 * n, loss=1.0)


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
