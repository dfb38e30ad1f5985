"""The figure of the Moshpit recipe: variance by round."""

from __future__ import annotations

from dataclasses import replace

from ragtag.recipes.base import Figure
from ragtag.recipes.drawing import FAINT, INK, canvas, quiet, svg
from ragtag.recipes.moshpit.plan import ERRORS, ERRORS_AT, Results, within_case

_COLOURS = {"moshpit": "#cf3a3a", "random groups": "#3b4cc0"}


def figures(results: Results) -> list[Figure]:
    """Variance by round, for whole rounds missed and for deaths within the round, beside the reference."""
    drawn = canvas(8.0, 4.2)
    ax = drawn.subplots()
    for method, expected in ERRORS.items():
        colour = _COLOURS[method]
        found = results.variance(replace(ERRORS_AT, method=method))
        ax.semilogy(range(len(found)), found, color=colour, linewidth=1.8, label=method)
        ax.semilogy(range(len(expected)), expected, "o", color=colour, markerfacecolor="white", markersize=6)
        case = within_case(method, ERRORS_AT.n, ERRORS_AT.sides, ERRORS_AT.p)
        if case in results.runs:
            within = results.variance(case)
            label = f"{method}, deaths within the round"
            ax.semilogy(range(len(within)), within, color=colour, linewidth=1.4, linestyle="--", label=label)
    ax.set_xlabel("round", color=FAINT)
    ax.set_ylabel("variance over peers", color=FAINT)
    quiet(ax)
    ax.legend(frameon=False, labelcolor=INK, fontsize=9)
    caption = (
        "1,024 peers in groups of 32, each away with probability 0.005 in a round: variance over peers, mean "
        "over seeds. Circles: the reference."
    )
    return [Figure("variance", caption, svg(drawn))]
