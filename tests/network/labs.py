"""A lab, for tests: skips them where there can be none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab import Lab, why_not

ROOT = Path(__file__).parents[2]


@contextmanager
def lab_of(peers: int, **how: Any) -> Iterator[Lab]:
    """A lab, by ``Lab``'s arguments."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Lab(peers, **how) as lab:
        yield lab


def environment() -> dict[str, str]:
    """For scripts in a lab that import the library, the tests and the benchmarks."""
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
