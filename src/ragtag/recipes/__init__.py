"""Recipes: a package for each paper, with the numbers it reports. ``ragtag reproduce NAME`` runs one.

In each, ``recipe`` says what is done, ``compare`` holds it against the paper, ``figure`` draws. Shared:
``base`` (numbers beside what was expected, tables), ``drawing``, ``tasks`` (what is trained), ``jobs``
(parts side by side), ``cache`` (finished parts, for a reproduction that was interrupted), ``lockstep``
(rounds that all peers begin at once).
"""

PAPERS: dict[str, str] = {
    "dedloc": "DeDLOC: one large batch of volunteers (Diskin et al., 2021)",
    "diloco": "DiLoCo and its streaming form (Douillard et al., 2023, 2025)",
    "grouping": "progressive grouping against stragglers (Basu et al., 2018)",
    "internet": "SparseLoCo, NoLoCo, Decoupled DiLoCo and MuLoCo beside DiLoCo",
    "kfac": "K-FAC beside other optimizers, alone and in a crew",
    "moshpit": "Moshpit SGD: averages in groups (Ryabinin et al., 2021)",
    "nopeek": "NoPeek: what codes at a cut tell (Vepakomma et al., 2019)",
    "private": "a survey of private distributed learning (arXiv 1812.03288)",
    "rps": "RPS: averages over unreliable networks (Yu et al., 2019)",
    "split": "split learning beside federated averaging",
    "staleness": "what staleness costs (Dai et al., 2019)",
    "topk": "top-k sparsification (Shi et al., 2019)",
}
"""What each recipe reproduces, in some words."""
RECIPES: dict[str, str] = {name: f"ragtag.recipes.{name}.recipe" for name in PAPERS}
"""Name of a recipe to the module whose ``reproduce`` runs it."""
