import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from ragtag.recipes import RECIPES
from ragtag.recipes.base import Figure, Report, Table, number, row, worst


def _report() -> Report:
    return Report(
        "x",
        "A <title>",
        {"peers": 3, "quick": True},
        rows=[
            row("near", 1.05, 1.0, 0.1, "paper", error=0.01, group="first"),
            row("far & off", 1.2, 1.0, 0.1, "paper", group="second"),
        ],
        tables=[Table("a table", ("name", "value"), (("one", "1"),))],
        figures=[Figure("fig", "a caption", '<?xml version="1.0"?>\n<svg width="1"></svg>')],
        notes=["a note"],
        data={"nan": math.nan},
    )


@pytest.mark.parametrize(
    ("relation", "measured", "ok"),
    [
        ("=", 1.1, True),
        ("=", 1.2, False),
        ("=", 0.8, False),
        ("<=", 0.0, True),
        ("<=", 1.1, True),
        ("<=", 1.2, False),
        (">=", 9.0, True),
        (">=", 0.9, True),
        (">=", 0.8, False),
        ("<=", math.nan, False),
        (">=", math.inf, False),
    ],
)
def test_a_row_passes_within_its_tolerance_only(relation: str, measured: float, ok: bool) -> None:
    assert row("q", measured, 1.0, 0.1000001, "s", relation=relation).ok is ok


@pytest.mark.parametrize(
    ("measured", "found"), [(1.01, "1.01"), (1.01019, "1.0102"), (1.0100000001, "1.01"), (math.nan, "nan")]
)
def test_what_fails_is_told_from_its_limit(measured: float, found: str) -> None:
    assert row("q", measured, 1.0, 0.01, "s", relation="<=").found == found


def test_an_unknown_relation_is_refused() -> None:
    with pytest.raises(ValueError, match="relation"):
        row("q", 1.0, 1.0, 0.0, "s", relation="!=")


def test_one_row_that_fails_makes_the_report_fail() -> None:
    report = _report()
    assert not report.ok
    del report.rows[1]
    assert report.ok


def test_print_shows_every_number_beside_the_expected_one() -> None:
    console = Console(record=True, width=120)
    _report().print(console)
    text = console.export_text()
    for part in ("near", "1.05 ± 0.01", "± 0.1", "pass", "FAIL", "second", "a table", "a note", "1 fail"):
        assert part in text


def test_write_makes_a_page_that_needs_nothing_else(tmp_path) -> None:
    report = _report()
    report.write(tmp_path / "out")
    page = (tmp_path / "out/index.html").read_text("utf-8")
    assert "<svg" in page and "far &amp; off" in page and "A &lt;title&gt;" in page and "FAIL" in page
    assert "peers 3, quick form" in page
    assert "src=" not in page and "href=" not in page and "<?xml" not in page
    loaded = json.loads((tmp_path / "out/results.json").read_text("utf-8"))
    assert loaded["ok"] is False and loaded["rows"][0]["measured"] == 1.05 and loaded["data"]["nan"] is None
    assert all(path.exists() for path in report.files)


def test_sentences_begin_at_the_left_and_numbers_end_at_the_right(tmp_path: Path) -> None:
    rows = (("one", "why this was not judged here", "1.5 (1 to 2)"), ("two", "no reason", "10.25 (9 to 11)"))
    report = Report("x", "a paper", {}, tables=[Table("a table", ("what", "why", "found"), rows)])
    console = Console(record=True, width=80)
    report.print(console)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    one, two = (next(line for line in lines if line.startswith(f" {name} ")) for name in ("one", "two"))
    assert one.index("why this") == two.index("no reason")
    assert len(one) == len(two) and one.endswith("  1.5") and two.endswith(" 10.25")
    report.write(tmp_path)
    assert "<td class=prose>no reason</td><td>10.25" in (tmp_path / "index.html").read_text("utf-8")


def test_numbers_keep_four_digits() -> None:
    assert [number(x) for x in (0.0, 0.0011359, 1.45e-7, 12.0, math.inf)] == [
        "0",
        "0.001136",
        "1.45e-07",
        "12",
        "inf",
    ]


def test_every_recipe_can_be_imported_and_run() -> None:
    import importlib

    for module in RECIPES.values():
        assert callable(importlib.import_module(module).reproduce)


def test_the_worst_of_values_is_nan_where_one_is_or_there_are_none() -> None:
    assert worst([0.1, 0.3, 0.2]) == 0.3
    for found in ([0.1, math.nan], [math.nan, 0.1], []):
        assert not row("errors", worst(found), 1.0, 0.0, "here", relation="<=").ok
