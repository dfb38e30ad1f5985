"""What is done to processes when, in virtual time."""

from __future__ import annotations

from ragtag.app.launch.faults import SLICE_S, ProcessFaults, fault_records
from ragtag.core.faultspec import parse_faults


def _acts(text: str, until_s: float) -> list[tuple[float, int, str]]:
    faults = ProcessFaults(parse_faults(text), start_s=100.0, start_t=7.0)
    acts: list[tuple[float, int, str]] = []
    while (next_s := faults.next_s) is not None and next_s <= 100.0 + until_s:
        acts += [(round(next_s - 100.0, 6), act.peer, act.what) for act in faults.due(next_s)]
    return acts


def test_a_freeze_stops_and_continues_and_a_kill_kills() -> None:
    assert _acts("freeze=3@10+4,kill=5@12", 100) == [(10, 3, "stop"), (12, 5, "kill"), (14, 3, "continue")]


def test_a_peer_that_is_frozen_twice_goes_on_once_both_have_ended() -> None:
    stops = [act for act in _acts("freeze=0@1+5,freeze=0@2+1", 100) if act[2] != "record"]
    assert stops == [(1, 0, "stop"), (6, 0, "continue")]


def test_a_slow_peer_runs_its_share_of_each_slice() -> None:
    acts = [act for act in _acts("slow=2x4@1+0.25", 100) if act[2] != "record"]
    stopped_s = sum(b[0] - a[0] for a, b in zip(acts[::2], acts[1::2], strict=True))
    assert [what for _, _, what in acts] == ["stop", "continue"] * 3
    assert acts[0][0] == 1.0
    assert abs(stopped_s - 3 * SLICE_S * 3 / 4) < 1e-9


def test_an_endless_slowdown_plans_one_slice_at_a_time() -> None:
    faults = ProcessFaults(parse_faults("slow=0x2"), start_s=0.0, start_t=0.0)
    assert [act.what for act in faults.due(0.0)] == ["record", "stop"]
    late = faults.due(1000.0)  # the launcher stood still: no thousand slices are made up for
    assert [act.what for act in late] == ["continue", "stop"]
    assert faults.next_s is not None
    assert faults.next_s > 1000.0


def test_what_has_not_come_yet_is_known_in_order_of_time() -> None:
    faults = ProcessFaults(parse_faults("kill=1@30,loss=0.1,freeze=0@20+5"), start_s=0.0, start_t=0.0)
    faults.due(19.0)
    assert [record.detail for record in faults.left] == ["freeze=0@20+5", "kill=1@30"]
    faults.due(20.0)
    assert [record.detail for record in faults.left] == ["kill=1@30"]


def test_every_fault_gets_its_record_on_the_traces_clock() -> None:
    text = "loss=0.1,delay=0.05,oneway=1>2@5+3,partition=0-2@6,kill=5@20,freeze=3@10+4,slow=4x3@0+9"
    records = fault_records(parse_faults(text), start_t=100.0)
    assert [(r.t, r.peer, r.name, r.detail, r.until_t) for r in records] == [
        (100.0, -1, "loss", "loss=0.1", None),
        (100.0, -1, "delay", "delay=0.05", None),
        (100.0, 4, "slow", "slow=4x3@0+9", 109.0),
        (105.0, 2, "oneway", "oneway=1>2@5+3", 108.0),
        (106.0, -1, "partition", "partition=0-2@6", None),
        (110.0, 3, "freeze", "freeze=3@10+4", 114.0),
        (120.0, 5, "kill", "kill=5@20", None),
    ]
