"""Scales, ticks and words of the charts."""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.app.report import axes
from ragtag.core import trace


def test_ticks_are_round_and_within() -> None:
    assert axes.ticks(0.0, 46.5, 10) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert axes.ticks(0.0, 0.0, 5) == [0.0]
    assert axes.log_ticks(0.1, 3.0) == pytest.approx([0.1, 0.2, 0.5, 1, 2])


@pytest.mark.parametrize("form", ["linear", "log", "error"])
def test_a_scale_keeps_its_order_and_its_ends(form: str) -> None:
    scale = axes.Scale(0.1, 0.99, 300.0, 20.0, form)
    assert scale(0.1) == pytest.approx(300.0) and scale(0.99) == pytest.approx(20.0)
    pixels = [scale(v) for v in np.linspace(0.0, 1.0, 50)]
    assert pixels == sorted(pixels, reverse=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (3e-6, "3 µs"), (0.0221, "22.1 ms"), (5.4, "5.4 s"), (125.0, "2:05"), (7265.0, "2:01:05")],
)
def test_durations_in_words(value: float, text: str) -> None:
    assert axes.seconds(value) == text


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
    assert axes.fault_text(fault) == text
