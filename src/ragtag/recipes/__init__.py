"""Recipes: one paper each, with the numbers it reports. ``ragtag reproduce NAME`` runs one."""

RECIPES: dict[str, str] = {
    "diloco": "ragtag.recipes.diloco",
    "grouping": "ragtag.recipes.grouping",
    "moshpit": "ragtag.recipes.moshpit",
    "rps": "ragtag.recipes.rps",
    "staleness": "ragtag.recipes.staleness",
    "topk": "ragtag.recipes.topk",
}
"""Name of a recipe to the module whose ``reproduce`` runs it."""
