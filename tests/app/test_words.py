"""Numbers, peers and faults in plain English."""

from __future__ import annotations

import pytest

from ragtag.app.words import counted, fault_text, seconds, these_peers
from ragtag.core import trace


def test_a_number_agrees_with_its_noun() -> None:
    assert [counted(n, "peer") for n in (0, 1, 2, 1200)] == ["0 peers", "1 peer", "2 peers", "1,200 peers"]
    assert [counted(n, "process", "processes") for n in (1, 2)] == ["1 process", "2 processes"]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([], "no peer"),
        ([2], "peer 2"),
        ([1, 0], "peers 0 and 1"),
        ([0, 1, 2], "peers 0 to 2"),
        ([5, 0, 1, 2, 7, 7], "peers 0 to 2, 5 and 7"),
        ([0, 2, 3, 4, 5], "peers 0 and 2 to 5"),
    ],
)
def test_which_peers(numbers: list[int], said: str) -> None:
    assert these_peers(numbers) == said


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (3e-6, "3 µs"),
        (0.0221, "22.1 ms"),
        (0.9996, "1 s"),
        (5.4, "5.4 s"),
        (125.0, "2:05"),
        (7265.0, "2:01:05"),
    ],
)
def test_durations_in_words(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (trace.Fault(t=0, name="loss", detail="loss=0.1"), "loss 10 %"),
        (trace.Fault(t=0, name="loss", detail="loss=odd"), "loss=odd"),
        (trace.Fault(t=0, name="slow", detail="slow=2x3"), "slowed 3\N{MULTIPLICATION SIGN}"),
        (trace.Fault(t=0, name="delay", detail="delay=0.01"), "delay 10 ms"),
        (trace.Fault(t=0, name="jitter", detail="jitter=2"), "jitter 2 s"),
        (trace.Fault(t=0, name="duplicate", detail="duplicate=0.02"), "duplicate 2 %"),
        (trace.Fault(t=0, name="reorder", detail="reorder=0.5/0.1"), "reorder 50 %"),
        (trace.Fault(t=0, name="oneway", detail="oneway=0>1"), "oneway=0>1"),
        (trace.Fault(t=0, name="partition", detail="0 1 | 2 3"), "partition: 0 1 | 2 3"),
        (trace.Fault(t=0, name="partition"), "partition"),
    ],
)
def test_faults_in_words(fault: trace.Fault, text: str) -> None:
    assert fault_text(fault) == text
