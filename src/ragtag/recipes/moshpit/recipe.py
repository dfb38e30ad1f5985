"""Reproduces "Moshpit SGD" (decentralized training on heterogeneous unreliable devices): its averaging.

Ryabinin, Gorbunov, Plokhotnyuk, Pekhimenko, NeurIPS 2021 (arXiv 2103.03239), section 4.1: how many rounds of
averaging it takes until up to 1,024 peers agree, some of them away, beside all-reduce, gossip, push-sum and
random groups. All numbers come from machines in a simulated world, with matchmaking, messages and deadlines.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ragtag.recipes.base import Figure, Progress, Report, require_counts
from ragtag.recipes.drawing import FAINT, INK, canvas, quiet, svg
from ragtag.recipes.jobs import run_jobs
from ragtag.recipes.moshpit import compare as moshpit_compare
from ragtag.recipes.moshpit.plan import ERRORS, ERRORS_AT, Plan, Results, within_case

SEEDS, SEEDS_QUICK = 10, 3
"""The reference has ten."""

NOTES = (
    "Variance is over all peers, those that are away too, about their own mean, as in the reference; how far "
    "that mean has drifted from the true one stands in the last table.",
    "What Moshpit and random groups are held against is their definition as arithmetic, over 200 runs of its "
    "own: without messages, matchmaking or deadlines. It agrees with the reference's table within a tenth. "
    "Tolerances are four standard deviations, by the definition, of a mean over as many runs; where its runs "
    "do not differ, nine in 200 of a round. Too many rounds are as wrong as too few.",
    "Vectors have 1 to 8 chunks of 272 values, each value a scalar of its own; rounds are counted for each.",
    "Where random groups come to nearly the same as a grid, as after one round or to 1e-4 in the lines for "
    "which both take three rounds, Moshpit's rows do not tell one from the other.",
    "All-reduce succeeds when nobody is away: rounds are geometric, their standard deviation is as large "
    "as the mean: ten draws cannot tell 2.0 from the exact 2.79. It is held against the exact law.",
    "Push-sum in the reference mixes over fixed hops, normalised by rows and without weights, whose rate "
    "depends on N. Here it is Kempe's, with weights and random targets, and is held against what his lemma "
    "says of its potential. Gossip is a ring, too slow for 50 rounds: its variance after them is compared. "
    "With peers away there is no such law for either, and they are not run.",
    "A peer that dies within a round dies at a moment drawn uniformly over an undisturbed round. What it "
    "would have reduced stays as it was with the others of its group, and the outcome says so (mosaics).",
    "The reference keeps cells fixed; so do keys here while no two members of a group want one index.",
)

_COLOURS = {"moshpit": "#cf3a3a", "random groups": "#3b4cc0"}


def reproduce(
    *,
    quick: bool = False,
    data: Path | None = None,
    out: Path,
    seeds: int = SEEDS,
    jobs: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Run the table, compare it, and write ``index.html``, ``results.json`` and figures to ``out``.

    quick: four lines of the table with 3 seeds (some with more), all-reduce only where it does not vary.
    seeds: at least the reference's ten, since means of ten are compared.
    jobs: processes side by side.
    progress: called as parts are done.

    Raises:
        ValueError: ``seeds`` or ``jobs`` below 1; ``data`` is given: this recipe takes none.
    """
    require_counts(seeds, jobs)
    if data is not None:
        raise ValueError(
            "reproduce moshpit takes no data: it averages numbers that it draws; leave --data out"
        )
    plan = Plan.of(quick=quick, seeds=SEEDS_QUICK if quick else max(SEEDS, seeds))
    results = plan.sort(run_jobs(plan.jobs(), jobs, progress, out))
    report = Report(
        name="moshpit",
        title="Moshpit All-Reduce (Ryabinin et al., NeurIPS 2021): rounds until peers agree",
        settings={
            "quick": quick,
            "runs": sum(plan.seeds.values()),
            "events": sum(found.events for runs in results.runs.values() for found in runs),
        },
        rows=[
            *moshpit_compare.table_rows(results),
            *moshpit_compare.mixing_rows(results),
            *moshpit_compare.error_rows(results),
            *moshpit_compare.grid_rows(results),
            *moshpit_compare.within_rows(results),
        ],
        tables=moshpit_compare.tables(results),
        figures=[variance_figure(results)],
        notes=list(NOTES),
        data={"runs": results.to_json()},
    )
    report.write(out)
    return report


def variance_figure(results: Results) -> Figure:
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
    return Figure("variance", caption, svg(drawn))
