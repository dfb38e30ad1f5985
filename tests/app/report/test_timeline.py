"""The timeline says where each peer's time went, as its records say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.app.report import build_report
from ragtag.app.report.data import AVERAGE, COMPUTE, WAIT, Timeline
from ragtag.app.tracefile import CREW_FILE, TraceWriter, peer_file
from ragtag.core import trace

HALVES = st.lists(st.tuples(*[st.floats(0, 5)] * 3), min_size=1, max_size=20)


def pace(
    t: float, peer: int = 0, compute_s: float = 0.0, average_s: float = 0.0, **more: object
) -> trace.Pace:
    return trace.Pace(
        t=t,
        peer=peer,
        steps=1,
        averages=1,
        compute_s=compute_s,
        average_s=average_s,
        **more,  # type: ignore[arg-type]
    )


def test_a_records_time_lies_in_the_columns_before_its_end() -> None:
    timeline = Timeline([0, 1], 10, 0.0, 10.0)
    timeline.add(pace(5.0, 1, 1.5, 0.5))
    assert not timeline.seconds[0].any()
    np.testing.assert_allclose(timeline.seconds[1, COMPUTE], [0, 0, 0, 0.75, 0.75, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(timeline.seconds[1, AVERAGE], [0, 0, 0, 0.25, 0.25, 0, 0, 0, 0, 0])


@given(HALVES)
def test_all_that_lies_within_is_drawn_and_counted(parts: list[tuple[float, float, float]]) -> None:
    end = sum(map(sum, parts)) + 1.0
    timeline = Timeline([3], 7, 0.0, end)
    t = 0.5
    for compute_s, average_s, wait_s in parts:
        t += compute_s + average_s + wait_s
        timeline.add(pace(t, 3, compute_s, average_s, wait_s=wait_s))
    want = np.array(parts).sum(axis=0)
    np.testing.assert_allclose(timeline.total_s[0], want)
    np.testing.assert_allclose(timeline.seconds[0].sum(axis=1), want, rtol=1e-6, atol=1e-6)


def test_peers_that_are_not_drawn_are_passed_over() -> None:
    timeline = Timeline([0], 4, 0.0, 1.0)
    timeline.add(pace(0.5, 7, 0.5))
    assert not timeline.any
    timeline.add(pace(0.5, 0, 0.25, wait_s=0.25, waited_for=[7, 0], waited_s=[0.2, 0.1]))
    assert timeline.any
    assert timeline.total_s[0, WAIT] == 0.25
    assert dict(timeline.waited_s[0]) == {0: 0.1}


@pytest.fixture
def told(tmp_path: Path) -> str:
    """A page about two peers, the first of which waits for the second."""
    with TraceWriter(tmp_path / CREW_FILE) as writer:
        writer.write(trace.Run(t=0.0, world="live", name="two", seed=1, peers=2, method="rps"))
    for peer in range(2):
        with TraceWriter(tmp_path / peer_file(peer)) as writer:
            for second in range(1, 9):
                waits = {"waited_for": [1], "waited_s": [0.4]} if peer == 0 else {"stale": [3, 0, 0, 1]}
                writer.write(trace.Step(t=second, peer=peer, step=second, samples=second, loss=1.0))
                writer.write(
                    pace(second, peer, 0.6 if peer == 0 else 1.0, 0.4 if peer == 0 else 0.0, **waits)
                )
            writer.write(trace.Leave(t=9.0, peer=peer, steps=8))
    return build_report(tmp_path).read_text(encoding="utf-8")


def test_the_page_tells_who_waited_for_whom(told: str) -> None:
    assert "Who did what when" in told
    assert "60 % computing" in told
    assert "peer 1 (3.2 s)" in told
    assert '<td class="n">0, 4 to 7</td>' in told


def test_a_trace_without_pace_has_no_timeline(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / peer_file(0)) as writer:
        writer.write(trace.Step(t=1.0, peer=0, step=1, samples=1, loss=1.0))
        writer.write(trace.Step(t=2.0, peer=0, step=2, samples=2, loss=1.0))
    assert "Who did what when" not in build_report(tmp_path).read_text(encoding="utf-8")
