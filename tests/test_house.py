"""What holds the house in order: it sees what there is, and turns red when there is more of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", TOOLS / "house.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["house"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_no_worse_than_it_was(house: ModuleType) -> None:
    found = house.looked_at()
    assert house.over(found) == []
    assert sum(files for files, _ in found.rooms.values()) > 300
    assert {"protocols", "training", "(top)"} <= found.rooms.keys()


def test_rings_are_found(house: ModuleType) -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert sorted(house.rings(imports)) == [["a", "b", "c"], ["f", "g"]]


def test_more_than_is_allowed_is_said(house: ModuleType) -> None:
    worse = house.House({}, [("m", 10, "n")] * 1000, [["a", "b"]] * 20, {})
    assert [line.split(":")[0] for line in house.over(worse)] == [
        "one_importer",
        "small_with_one_importer",
        "in_cycles",
    ]
