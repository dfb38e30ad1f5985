"""Recipes: a package for each paper, with the numbers it reports. ``ragtag reproduce NAME`` runs one.

In each, ``recipe`` says what is done, ``compare`` holds it against the paper, ``figure`` draws. Shared:
``base`` (numbers beside what was expected, tables), ``drawing``, ``tasks`` (what is trained), ``jobs``
(parts side by side), ``cache`` (finished parts, for a reproduction that was interrupted), ``lockstep``
(rounds that all peers begin at once).
"""

RECIPES: dict[str, str] = {
    name: f"ragtag.recipes.{name}.recipe"
    for name in (
        "dedloc",
        "diloco",
        "grouping",
        "internet",
        "kfac",
        "moshpit",
        "nopeek",
        "private",
        "rps",
        "split",
        "staleness",
        "topk",
    )
}
"""Name of a recipe to the module whose ``reproduce`` runs it."""
