"""The figure of the Moshpit recipe: variance by round."""

from __future__ import annotations

import io
from dataclasses import replace

from ragtag.recipes.base import Figure
from ragtag.recipes.moshpit_plan import ERRORS, ERRORS_AT, Results, within_case

_COLOURS = {"moshpit": "#cf3a3a", "random groups": "#3b4cc0"}
_INK, _FAINT, _GRID = "#1b1f24", "#57606a", "#e6e9ed"


def figures(results: Results) -> list[Figure]:
    """Variance by round, for whole rounds missed and for deaths within the round, beside the reference."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(8.0, 4.2), layout="constrained")
    ax = canvas.subplots()
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
    ax.set_xlabel("round", color=_FAINT)
    ax.set_ylabel("variance over peers", color=_FAINT)
    ax.grid(axis="y", color=_GRID)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.legend(frameon=False, labelcolor=_INK, fontsize=9)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ragtag"}):
        canvas.savefig(buffer, format="svg", metadata={"Date": None})
    caption = (
        "1,024 peers in groups of 32, each away with probability 0.005 in a round: variance over peers, mean "
        "over seeds. Circles: the reference."
    )
    return [Figure("variance", caption, buffer.getvalue())]
