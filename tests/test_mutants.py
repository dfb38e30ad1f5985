"""What counts as a mutant, which are drawn, and that each survivor that may live has a reason."""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TABLE = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text("utf-8"))


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    return import_module("mutants")


def function(text: str) -> ast.FunctionDef:
    found = ast.parse(text).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ("return a + b", "return a - b", "- return a + b\n+ return a - b"),
        ("raise ValueError(f'{a} is wrong')", "raise ValueError(None)", ""),
        ("assert a, 'wrong'", "assert a, 'XXwrongXX'", ""),
        ("whole('a', a, 1, 'peers')", "whole('a', a, 1, None)", ""),
        (
            "whole('a', a, 1, 'peers')",
            "whole('a', a, 2, 'peers')",
            "- whole('a', a, 1, 'peers')\n+ whole('a', a, 2, 'peers')",
        ),
        ("assert a, 'wrong'", "assert b, 'wrong'", "- assert a, 'wrong'\n+ assert b, 'wrong'"),
        (
            "raise ValueError(a) from error",
            "raise TypeError(a) from error",
            "- raise ValueError(a) from error\n+ raise TypeError(a) from error",
        ),
    ],
)
def test_a_mutant_is_more_than_the_words_of_an_error(
    mutants: ModuleType, before: str, after: str, change: str
) -> None:
    forms = [function(f"def x_f__mutmut_{n}(a, b):\n    {body}") for n, body in enumerate((before, after))]
    assert mutants.changed(*forms) == change


def test_a_default_value_is_part_of_a_function(mutants: ModuleType) -> None:
    change = mutants.changed(function("def f(a, b=1): return a"), function("def f(a, b=2): return a"))
    assert change == "- def f(a, b=1):\n+ def f(a, b=2):"


def test_the_draw_is_decided_by_its_seed_and_takes_none_twice(mutants: ModuleType) -> None:
    every = [mutants.Mutant(str(n), "m.py", "f", "- a\n+ b") for n in range(50)]
    first, again, other, of_another = (
        mutants.drawn(every, 20, room, seed)
        for room, seed in (("codecs", 0), ("codecs", 0), ("codecs", 1), ("rounds", 0))
    )
    assert first == again and first != other and first != of_another
    assert len(set(first)) == 20 and set(first) <= set(every)
    assert mutants.drawn(every, 99, "codecs", 0) == every


def test_rooms_name_what_is_there(mutants: ModuleType) -> None:
    for room in TABLE["room"].values():
        assert mutants.files_of(room)
        paths = [*room["code"], *room["tests"], *room.get("without", ())]
        for path in paths:
            name = path.removeprefix("--deselect=").partition("::")
            assert (ROOT / name[0]).exists()
            assert not name[2] or f"def {name[2]}(" in (ROOT / name[0]).read_text("utf-8")


def test_reasons_are_of_mutants_of_these_rooms(mutants: ModuleType) -> None:
    known = {file for room in TABLE["room"].values() for file in mutants.files_of(room)}
    for one in TABLE["survivor"]:
        assert one["file"] in known
        assert len(one["reason"]) > 10
        before = [line.strip()[2:] for line in one["change"].splitlines() if line.strip().startswith("- ")]
        now = ast.unparse(ast.parse((ROOT / one["file"]).read_text("utf-8"))).splitlines()
        assert before and {line.strip() for line in now} >= set(before), "its code has changed: look again"


def test_a_survivor_has_a_reason_or_is_told(
    mutants: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives: dict[str, Any] = {"module": "m.py", "function": "f", "change": "- a\n+ b", "reached": True}
    path = tmp_path / "mutants.json"
    path.write_text(json.dumps({"rooms": [{"room": "r", "survivors": [lives]}]}))
    monkeypatch.setattr(mutants, "STORED", path)
    assert mutants.explained([{"file": "m.py", "change": "- a\n+ c", "reason": "another"}]) == 1
    assert json.loads(path.read_text())["rooms"][0]["unexplained"] == 1
    assert (
        mutants.explained([{"file": "m.py", "change": "\n- a\n+ b\n", "reason": "so", "equivalent": True}])
        == 0
    )
    (room,) = json.loads(path.read_text())["rooms"]
    assert (room["equivalent"], room["unexplained"], room["survivors"][0]["reason"]) == (1, 0, "so")


def test_mutmut_makes_them(mutants: ModuleType) -> None:
    pytest.importorskip("mutmut", reason="pip install ragtag[mutants]")
    text = "def f(a):\n    if a < 0:\n        raise ValueError('negative')\n    return a + 1\n"
    found, words = mutants.mutants_of("src/ragtag/m.py", text)
    assert words >= 1
    assert "- return a + 1\n+ return a - 1" in [one.change for one in found]
    assert all(one.name.startswith("ragtag.m.x_f__mutmut_") and one.function == "f" for one in found)
