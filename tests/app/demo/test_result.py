"""The demo's figures are those of its traces, and its verdicts those of its figures."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ragtag.app.demo import DemoError, DemoPlan, DemoResult, RoundTimes, Times
from ragtag.app.demo.run import checks, demo_round_times, ended_alike, rounds_around, show
from ragtag.app.tracefile import CREW_FILE, TraceWriter, peer_file
from ragtag.core import trace
from ragtag.core.faults import Crash, Freeze, Loss


def round_of(t: float, number: int, total_s: float = 0.1, peer: int = 0, arrived: float = 0.9) -> trace.Round:
    return trace.Round(
        t=t, peer=peer, round=number, scatter_s=0.0, gather_s=0.0, total_s=total_s, arrived=arrived
    )


def test_faults_come_at_their_parts_of_the_calm_run_on_any_machine() -> None:
    plan = DemoPlan()
    faults = plan.faults(20.0)
    assert faults.loss == Loss(0.1)
    assert faults.freezes == (Freeze(2, 6.0, 4.0),)
    assert faults.crashes == (Crash(4, 13.0),)
    fast = plan.faults(2.0)
    assert fast.freezes == (Freeze(2, 0.6, 0.4),)
    assert fast.crashes == (Crash(4, 1.3),)
    assert plan.survivors == (0, 1, 2, 3, 5)
    assert plan.story(20.0) == "10% of datagrams dropped, peer 2 frozen for 4 s, peer 4 killed"
    assert plan.story(2.0) == "10% of datagrams dropped, peer 2 frozen for 400 ms, peer 4 killed"


def test_rounds_around_the_faults_are_those_of_the_survivor_that_took_fewest(tmp_path: Path) -> None:
    ends = {0: (1.0, 2.0, 3.0, 6.0, 7.0, 8.0, 9.0), 2: (1.5, 2.0, 7.5, 9.0), 4: (1.0, 8.5)}
    for peer, times in ends.items():
        with TraceWriter(tmp_path / peer_file(peer)) as writer:
            for number, t in enumerate(times):
                writer.write(round_of(t, number, peer=peer))
    with TraceWriter(tmp_path / CREW_FILE) as writer:
        writer.write(trace.Fault(t=0.0, peer=-1, name="loss"))
        writer.write(trace.Fault(t=2.5, peer=2, name="freeze", until_t=6.5))
        writer.write(trace.Fault(t=8.0, peer=4, name="kill"))
    assert rounds_around(tmp_path, (0, 2)) == {"freeze": (2, 2), "kill": (3, 1)}
    assert rounds_around(tmp_path, (0,)) == {"freeze": (2, 3), "kill": (5, 1)}


def test_round_times_leave_out_what_a_peer_slept_through_and_other_peers(tmp_path: Path) -> None:
    ends = [1.0, 1.5, 2.1, 6.4, 6.9, 7.6]  # frozen from 2.5 to 6: the round that ended at 6.4
    with TraceWriter(tmp_path / peer_file(0)) as writer:
        for number, t in enumerate(ends):
            writer.write(round_of(t, number, total_s=0.1 * (number + 1)))
        writer.write(replace_channel(round_of(9.0, 0)))
    with TraceWriter(tmp_path / peer_file(1)) as writer:
        writer.write(round_of(50.0, 0, peer=1))
    with TraceWriter(tmp_path / CREW_FILE) as writer:
        writer.write(trace.Fault(t=2.5, peer=0, name="freeze", until_t=6.0))
    times = demo_round_times(tmp_path, (0,))
    assert times.whole.n == 4
    assert times.whole.median_s == pytest.approx(np.median([0.5, 0.6, 0.5, 0.7]))
    assert times.whole.longest_s == pytest.approx(0.7)
    assert times.averaging.n == 5
    assert times.averaging.longest_s == pytest.approx(0.6)
    assert times.arrived == pytest.approx(0.9)
    with pytest.raises(DemoError, match="no rounds were traced"):
        demo_round_times(tmp_path, (2,))


def replace_channel(record: trace.Round) -> trace.Round:
    """As of the probe, whose rounds do not count."""
    return trace.Round(
        t=record.t, peer=0, round=0, scatter_s=0.0, gather_s=0.0, total_s=9.0, arrived=0.0, channel=254
    )


@pytest.mark.parametrize(
    ("digests", "alike"),
    [(("aa", "bb", "aa"), True), (("aa", "bb", "cc"), False), (("aa", "bb"), False), (("", "bb", ""), False)],
)
def test_survivors_are_alike_if_all_have_ended_with_one_model(
    digests: tuple[str, ...], alike: bool, tmp_path: Path
) -> None:
    for peer, digest in enumerate(digests):
        with TraceWriter(tmp_path / peer_file(peer)) as writer:
            writer.write(round_of(1.0, 0, peer=peer))
            writer.write(trace.Leave(t=2.0, peer=peer, digest=digest))
    assert ended_alike(tmp_path, (0, 2)) is alike


CALM = Times(100, 0.1, 0.15, 0.2)
GOOD = DemoResult(
    survivors=0.95,
    survivors_lowest=0.94,
    survivors_mean=0.96,
    calm=0.955,
    calm_mean=0.96,
    alone=0.3,
    all_data=0.97,
    samples={"crew": 9, "calm": 10, "alone": 2, "all-data": 10},
    round_times=RoundTimes(Times(100, 0.1, 0.2, 0.5), CALM, 0.9),
    calm_round_times=RoundTimes(CALM, CALM, 1.0),
    around={"freeze": (10, 60), "kill": (80, 10)},
    training_s={"crew": 30.0, "calm": 60.0},
    alike=True,
    story="peer 4 was killed",
    report=Path("report.html"),
    folder=Path(),
)


AMID = "the freeze and the death at least 10 rounds from start and end"


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, None),
        ({"survivors": 0.9449}, "survivors within 1 point of the calm run"),
        (
            {"round_times": RoundTimes(Times(9, 0.1, 0.2001, 0.5), CALM, 0.9)},
            "95 % of rounds within 2 medians",
        ),
        ({"round_times": RoundTimes(Times(9, 0.1, 0.2, 0.5001), CALM, 0.9)}, "the longest within 5 medians"),
        ({"alike": False}, "the survivors end with the same model"),
        ({"around": {"freeze": (10, 10), "kill": (99, 9)}}, AMID),
        ({"around": {"freeze": (9, 99), "kill": (99, 10)}}, AMID),
        ({"around": {"freeze": (99, 99)}}, AMID),
        ({"around": {"kill": (99, 99)}}, AMID),
        (
            {"round_times": RoundTimes(Times(9, 0.1501, 0.2, 0.5), CALM, 0.9)},
            "the median round within 1.5 calm ones",
        ),
    ],
)
def test_each_promise_is_kept_or_named(change: dict[str, object], broken: str | None) -> None:
    result = replace(GOOD, **change)  # type: ignore[arg-type]
    found = checks(result)
    assert [name for name, ok in found.items() if not ok] == ([broken] if broken else [])
    result = replace(result, checks=found)
    assert result.ok is (broken is None)
    assert json.loads(json.dumps(result.to_json()))["ok"] is result.ok
    out = io.StringIO()
    show(DemoPlan(), result, Console(file=out, width=120))
    text = out.getvalue()
    assert ("  no   " in text) is (broken is not None)
    for words in (
        "5 survivors of 6: peer 4 was killed",
        "95.5%",
        "30.0%",
        "97.0%",
        "All runs together trained for 90 s.",
        "Report: report.html",
    ):
        assert words in text
