"""Each claim on docs/evidence.md is judged by rows and tests that there are, or says why it is not."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from ragtag.recipes import RECIPES as KNOWN
from ragtag.recipes.rps import compare as rps_compare
from ragtag.recipes.rps import measure as rps_measure
from ragtag.recipes.rps.faulty import FAULTS, Weights
from ragtag.recipes.rps.theory import Estimate, Mixing
from ragtag.recipes.rps.training import Curve, Point

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "evidence.md").read_text("utf-8")
RECIPES = re.findall(r"^### .*`ragtag reproduce (\w+)`$", PAGE, re.MULTILINE)


def claims(recipe: str) -> list[tuple[str, str]]:
    """Of a recipe's table: each claim, and what judges it."""
    section = re.split(r"^##", PAGE.partition(f"`ragtag reproduce {recipe}`\n")[2], flags=re.MULTILINE)[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(claim, by) for claim, by in lines[1:]]


def rps_rows() -> set[str]:
    """The rows of the full form, whatever is measured."""
    plan, results = rps_measure.Plan.of(quick=False, digits=True, seeds=1), rps_measure.Results()
    some = Estimate(0.1, 0.01)
    results.mixing = dict.fromkeys(rps_measure.LOSSES, Mixing(some, some, some, some))
    results.fixed = results.bursts = results.mixing[rps_measure.FIXED_P]
    results.by_n = dict.fromkeys(plan.sizes, results.fixed)
    results.steady = dict.fromkeys(rps_measure.STEADY, some)
    results.faulty = dict.fromkeys(FAULTS, Weights(0.0, 0.0, 0))
    results.differences = {"direct": 0.0, "ring": 0.0}
    for key, setup in plan._setups():
        results.curves[key].append(Curve(setup, [Point(600, 0.1, 0.9, 0.9, 0.1, 0.9, 0.1)]))
    results.extras = dict.fromkeys(plan._extras(), results.curves[key][0])
    rows = [*rps_compare.mixing_rows(results), *rps_compare.training_rows(plan, results)]
    return {row.quantity for row in rows}


def stored_rows(recipe: str) -> set[str]:
    stored = json.loads((ROOT / "benchmarks" / "results" / f"reproduce_{recipe}.json").read_text("utf-8"))
    return {row["quantity"] for row in stored["rows"]}


def test_recipes_have_claims() -> None:
    assert set(RECIPES) == set(KNOWN)
    assert all(len(claims(recipe)) > 5 for recipe in RECIPES)


FULL_ONLY = "full form only: "
"""Before rows that no stored run has."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_claim_is_judged_by_rows_that_there_are_or_says_why_not(recipe: str) -> None:
    stored, full = stored_rows(recipe), rps_rows() if recipe == "rps" else set()
    for claim, by in claims(recipe):
        if by.startswith("not reproduced: "):
            assert len(by) > 40, claim
            continue
        assert re.search(r"`[^`]+`", by), claim
        shown, _, unstored = by.partition(FULL_ONLY)
        for part, judged in ((shown, stored), (unstored, full - stored)):
            for name in re.findall(r"`([^`]+)`", part):
                if name.startswith("tests/"):
                    path, _, test = name.partition("::")
                    assert f"\ndef {test}(" in (ROOT / path).read_text("utf-8"), name
                else:
                    assert any(fnmatchcase(row, name) for row in judged), name


def test_three_seeds_of_diloco_hardly_tell_one_percent_apart() -> None:
    """What the page says of differences of less than 1 %: Student's t of two degrees of freedom is 4.30."""
    stored = json.loads((ROOT / "benchmarks" / "results" / "reproduce_diloco.json").read_text("utf-8"))
    assert stored["settings"]["seeds"] == 3 and "of three seeds is mostly wider" in PAGE
    wide = [4.30 * row["error"] > 0.01 for row in stored["rows"] if row["group"].startswith("Final loss")]
    assert len(wide) == 5 and sum(wide) > 2.5
