"""Reproduces "Understanding Top-k Sparsification in Distributed Deep Learning", on a crew in lockstep.

Shi, Chu, Cheung, See 2019 (arXiv 1911.08772). On images and on text it measures the loss by steps and by
bytes; how much of u = gradient + residual top-k and random-k leave behind, beside the paper's bounds; how
many entries GaussianK selects, and why not k. Beyond the paper it measures the cost of lost messages with
tickets and without, and sparse outer steps after local ones, as in SparseLoCo.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ragtag.recipes.base import Progress, Report, require_counts
from ragtag.recipes.jobs import run_jobs
from ragtag.recipes.topk import compare as topk_compare
from ragtag.recipes.topk import figure as topk_figure
from ragtag.recipes.topk.plan import RATIOS, Plan, Results, select
from ragtag.recipes.topk.tasks import prepared

NOTES = (
    "Aggregates are sums of decoded fragments over all peers, divided by their number. Messages are lost by "
    "a seeded draw for each fragment, for all receivers alike: one aggregate is decided for all.",
    "Bytes are of whole datagrams. A model this small fills one or two: at 0.1 % most of it is padding.",
    "GaussianK corrects its threshold as published, and uses the third correction, which the published code "
    "drops; its count is bounded at 64 k.",
    "Top-k's bound, (1 - k/d)^2, is the paper's theorem for bell-shaped u; random-k's is an expectation.",
    "SampledTopK selects what exact top-k does, bit for bit: its training is the same.",
    "What losing messages costs is compared at the end of a full run: earlier, what was lost is still on its "
    "way, and training lags by that. It is held to 3 % where the loss is above "
    f"{topk_compare.LOW}; below (digits, which the net learns by heart) it is shown beside.",
    "Learning rates are dense training's, held for all methods; the paper's models are 100 times larger.",
)


def reproduce(
    *,
    quick: bool = False,
    data: Path | None = None,
    out: Path,
    seeds: int = 3,
    jobs: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Train everything, compare, and write ``index.html``, ``results.json`` and figures to ``out``.

    quick: one seed, fewer steps, nothing lost.
    data: a tar archive of CIFAR-10 images (``train/CLASS/NAME.jpg``) in place of scikit-learn's digits, a
        text in place of library source, or a folder with both.
    jobs: processes side by side.
    progress: called as runs end.

    Raises:
        ValueError, FileNotFoundError: ``seeds`` or ``jobs`` below 1; ``data`` is nothing of the kind.
    """
    require_counts(seeds, jobs)
    plan = Plan.of(quick=quick, seeds=seeds)
    with prepared(data, out) as found:
        names = found.names
        results = Results.of(run_jobs(plan.jobs(found), jobs, progress, out))
    report = Report(
        name="topk",
        title="Understanding top-k sparsification (Shi, Chu, Cheung, See 2019)",
        settings={
            **names,
            "peers": " and ".join(map(str, sorted({part.n for part in plan.parts}))),
            "seeds": max(part.seeds for part in plan.parts),
            "steps": " and ".join(map(str, sorted({part.steps for part in plan.parts}))),
            "quick": quick,
        },
        rows=topk_compare.rows(plan, results, names, quick=quick),
        tables=topk_compare.tables(plan, results, names),
        figures=topk_figure.figures(plan, results, names),
        notes=[_trained_on(names), *NOTES, *_reasons(plan, results, names)],
        data={
            "runs": [asdict(run) for run in results.runs],
            "outer": [asdict(run) for run in results.local],
        },
    )
    report.write(out)
    return report


def _trained_on(names: dict[str, str]) -> str:
    return (
        f"Images are {names['images']}; text, for the LSTM and the transformer, is {names['text']}. Energy "
        "is looked at before peer 0 selects; the end of training is the mean of its last quarter."
    )


def _reasons(plan: Plan, results: Results, names: dict[str, str]) -> list[str]:
    said = []
    for part in plan.parts:
        for ratio in RATIOS:
            chosen = select(results.of_part(part), "gaussian-k", ratio)
            where = topk_compare.title(part, names)
            said.append(f"GaussianK at {ratio:.1%}, {where}: {topk_compare.reason(chosen)}.")
    return said
