"""What all tests share: golden files, and quiet numerical libraries."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Tests run beside each other's child processes: threads of BLAS and torch would only fight for the cores.
# Set before torch is imported, and inherited by children.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# The same examples on every run; a slow machine is no reason to fail.
settings.register_profile("ragtag", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("ragtag")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate", action="store_true", help="write tests/golden/*.txt anew instead of comparing"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with ``tests/golden/NAME.txt``, or write it there with ``--regenerate``."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--regenerate"):
            path.write_text(text, encoding="utf-8")
            return
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            lines = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), f"golden/{path.name}", "now", lineterm=""
            )
            pytest.fail("\n".join([*lines, "", "if this is meant: pytest --regenerate"]), pytrace=False)

    return check
