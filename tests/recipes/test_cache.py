from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from ragtag.recipes.base import Report
from ragtag.recipes.cache import ResultCache, decode
from ragtag.recipes.jobs import Job, run_jobs

CALLS: list[int] = []


@dataclass
class Inner:
    name: str
    pair: tuple[int, float] = (1, 2.0)


@dataclass
class Outer:
    inner: Inner
    counts: dict[int, int] = field(default_factory=dict)
    curve: list[tuple[float, str]] = field(default_factory=list)
    sizes: tuple[int, ...] = ()
    none: Inner | None = None
    best: float = math.inf


@dataclass(frozen=True)
class Data:
    arrays: Path
    text: Path | None


def _made_of(data: Data) -> str:
    return "found"


def _make(x: int) -> Outer:
    CALLS.append(x)
    return Outer(Inner("a"), {3: x}, [(0.5, "b")], (1, 2, 3))


def _several(count: int) -> list[Outer]:
    return [_make(x) for x in range(count)]


def _jobs(n: int) -> list[Job]:
    return [Job(f"job {x}", _make, (x,)) for x in range(n)]


def test_parts_that_were_done_are_not_done_again_and_come_back_as_they_were(tmp_path) -> None:
    CALLS.clear()
    first = run_jobs(_jobs(2), 1, out=tmp_path)
    told: list[tuple[int, int, str]] = []
    again = run_jobs(_jobs(4), 1, lambda *what: told.append(what), out=tmp_path)
    assert CALLS == [0, 1, 2, 3] and again[:2] == first and again[3].counts == {3: 3}
    assert [(done, total) for done, total, _ in told] == [(2, 4), (3, 4), (4, 4)]
    Report("cut", "What was cut", {}).write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "results.json"]
    run_jobs(_jobs(1), 1, out=tmp_path)
    assert CALLS[4:] == [0]


def test_a_list_of_results_comes_back(tmp_path) -> None:
    ResultCache(tmp_path).store(_several, (3,), _several(3))
    assert ResultCache(tmp_path).find(_several, (3,)) == (True, _several(3))


def test_a_job_that_raises_leaves_the_others_kept(tmp_path) -> None:
    jobs = [*_jobs(2), Job("bad", decode, (int, "x"))]
    for _ in range(2):
        CALLS.clear()
        with pytest.raises(TypeError, match="'x' is not of type"):
            run_jobs(jobs, 1, out=tmp_path)
    assert CALLS == []


def test_a_path_stands_for_what_lies_there(tmp_path) -> None:
    keep, here, there = (tmp_path / name for name in ("parts", "here", "there"))
    for folder in (here, there):
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "x.npy").write_bytes(b"12")
    ResultCache(keep).store(_made_of, (Data(here / "inner", here),), "found")
    assert ResultCache(keep).find(_made_of, (Data(there / "inner", there),)) == (True, "found")
    assert ResultCache(keep).find(_made_of, (Data(there / "inner", None),)) == (False, None)
    (there / "inner" / "x.npy").write_bytes(b"13")
    assert ResultCache(keep).find(_made_of, (Data(there / "inner", there),)) == (False, None)
    (there / "inner" / "x.npy").write_bytes(b"12")
    (there / "inner" / "x.npy").rename(there / "inner" / "y.npy")
    assert ResultCache(keep).find(_made_of, (Data(there / "inner", there),)) == (False, None)
    with pytest.raises(FileNotFoundError):
        ResultCache(keep).find(_made_of, (Data(tmp_path / "none", None),))


def test_other_source_finds_nothing(tmp_path, monkeypatch) -> None:
    cache = ResultCache(tmp_path)
    cache.store(_make, (1,), _make(1))
    assert cache.find(_make, (1,)) == (True, _make(1)) and cache.find(_make, (2,)) == (False, None)
    monkeypatch.setattr("ragtag.recipes.cache._source", lambda: "other")
    assert cache.find(_make, (1,)) == (False, None)


@pytest.mark.parametrize("text", ["", "{}", "[1]", json.dumps({"inner": {"name": 1, "pair": [1, 2.0]}})])
def test_a_file_that_is_no_result_is_said_to_be_none(tmp_path, text) -> None:
    cache = ResultCache(tmp_path)
    cache.store(_make, (1,), _make(1))
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    with pytest.raises(ValueError, match="delete it"):
        cache.find(_make, (1,))


def test_what_is_not_known_is_refused() -> None:
    for kind, value in ((set[int], [1]), (int, 1.5), (str, None), (bool, "x")):
        with pytest.raises(TypeError, match="is not of type"):
            decode(kind, value)
    assert math.isnan(decode(float, math.nan)) and decode(float | None, None) is None


def _of_a_kind_that_json_does_not_know() -> set[int]:
    return {1}


def test_what_would_not_come_back_is_not_kept(tmp_path) -> None:
    with pytest.raises(TypeError):
        ResultCache(tmp_path).store(_of_a_kind_that_json_does_not_know, (), [1])
    assert list(tmp_path.iterdir()) == []


def test_literals_come_back() -> None:
    kind = Literal["fp32", "int8"] | None
    assert decode(kind, "int8") == "int8" and decode(kind, None) is None
    with pytest.raises(TypeError, match="'fp8' is not of type"):
        decode(kind, "fp8")
