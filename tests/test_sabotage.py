"""Each case of sabotage still finds what it breaks: ``make sabotage``, which would say so, takes hours."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_each_case_finds_what_it_breaks_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    for case in import_module("sabotage").SABOTAGES:
        assert (ROOT / case.file).read_text("utf-8").count(case.text) == 1, case.name


def test_each_case_runs_tests_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word of ``-k`` that is in no name of a test selects nothing, and shows nothing."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    for case in import_module("sabotage").SABOTAGES:
        paths = [ROOT / word.partition("::")[0] for word in case.tests if word.startswith("tests")]
        files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
        text = "".join(file.read_text("utf-8") for file in files).lower()
        at = case.tests.index("-k") + 1 if "-k" in case.tests else len(case.tests)
        words = {word for said in case.tests[at : at + 1] for word in re.findall(r"[\w-]+", said)}
        missing = [word for word in words - {"and", "or", "not"} if word.lower() not in text]
        assert files and not missing, (case.name, missing)
