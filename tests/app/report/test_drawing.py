"""Scales and ticks of the charts."""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.app.report import drawing


def test_ticks_are_round_and_within() -> None:
    assert drawing.ticks(0.0, 46.5, 10) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert drawing.ticks(0.0, 0.0, 5) == [0.0]
    assert drawing.log_ticks(0.1, 3.0) == pytest.approx([0.1, 0.2, 0.5, 1, 2])


@pytest.mark.parametrize("form", ["linear", "log", "error"])
def test_a_scale_keeps_its_order_and_its_ends(form: str) -> None:
    scale = drawing.Scale(0.1, 0.99, 300.0, 20.0, form)
    assert scale(0.1) == pytest.approx(300.0) and scale(0.99) == pytest.approx(20.0)
    pixels = [scale(v) for v in np.linspace(0.0, 1.0, 50)]
    assert pixels == sorted(pixels, reverse=True)
