"""Recipes: one paper each, with the numbers it reports. ``ragtag reproduce NAME`` runs one."""

RECIPES: dict[str, str] = {
    "grouping": "ragtag.recipes.grouping",
    "rps": "ragtag.recipes.rps",
}
"""Name of a recipe to the module whose ``reproduce`` runs it."""
