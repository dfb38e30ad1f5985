"""Each claim on docs/evidence.md is judged by rows that a stored result has, or says why it is not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "evidence.md").read_text("utf-8")
RECIPES = re.findall(r"^### .*`ragtag reproduce (\w+)`$", PAGE, re.MULTILINE)


def claims(recipe: str) -> list[tuple[str, str]]:
    """Of a recipe's table: each claim, and what judges it."""
    section = re.split(r"^###? ", PAGE.partition(f"`ragtag reproduce {recipe}`\n")[2], flags=re.MULTILINE)[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(claim, by) for claim, by in lines[1:]]


def test_recipes_have_claims() -> None:
    assert RECIPES == ["topk", "staleness"]
    assert all(len(claims(recipe)) > 5 for recipe in RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_claim_is_judged_by_rows_that_there_are_or_says_why_not(recipe: str) -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / f"reproduce_{recipe}.json").read_text("utf-8"))
    judged = {row["quantity"] for row in stored["rows"]}
    for claim, by in claims(recipe):
        if by.startswith("not reproduced: "):
            assert len(by) > 40, claim
        else:
            assert (named := re.findall(r"`([^`]+)`", by)) and set(named) <= judged, claim
