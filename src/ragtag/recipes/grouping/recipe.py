"""Reproduces progressive grouping, beside other methods, in virtual time.

"Balancing Stragglers Against Staleness in Distributed Deep Learning", Basu, Saxena, Panja, Verma, HiPC 2018:
the time T(g) of g groups, and progressive grouping with one of 16 peers delayed, beside synchronous and
asynchronous training, backup workers, DropCompute, n-softsync, Ringmaster, random groups and AD-PSGD on
the same work; and how much an update counts, by its samples and by its staleness. And
"Staleness-aware Async-SGD", Zhang, Gupta, Lian, Liu, IJCAI 2016: n-softsync's staleness.
"""

from __future__ import annotations

from pathlib import Path

from ragtag.recipes.base import Progress, Report, require_counts
from ragtag.recipes.grouping import compare as grouping_compare
from ragtag.recipes.grouping import figure as grouping_figure
from ragtag.recipes.grouping import measure as grouping_measure
from ragtag.recipes.jobs import run_jobs

NOTES = (
    "Every peer runs a user's training loop: CrewOptimizer over simulated lines, with the library's "
    "schedules, central state, barriers and deadlines. AD-PSGD alone is a simulation of its own.",
    "T0 is synchronous training (one group) without delay. All methods use the same number of samples from "
    "one shared pool, in batches of one size; a run ends when they have gone into the model.",
    "Steps take 1 s, times a lognormal jitter of 3 % (.5 % where time alone is measured, 10 % for "
    "n-softsync), and a message .1 ms: waiting is compared with staleness, not bandwidth. The state is one "
    "block.",
    "Every method moves the model as far per sample as synchronous training does, at one learning rate that "
    "suits that (asynchronous updates are an n-th of a step each); nothing is tuned to a method.",
    "Speeds are what peers' steps were seen to take; no method is told who is slow. DropCompute's threshold "
    "is set by its algorithm 2 from the first four steps. Times of methods are of the second half of a run: "
    "in the first steps a central state has no deadlines but a probe's, and counts few updates.",
    "A group's update counts by the group's part of the samples per second, and no more than 1/staleness. "
    "That is less only in a large group that many small ones overtake. There, on a parabola, the correction "
    "decides whether training converges. On digits it does not show at rates that suit synchronous training, "
    "as all updates that are under way add up to one step.",
    "Delay compensation (DC-ASGD, constant lambda) is measured on asynchronous training, where all updates "
    "are stale, at a learning rate at which staleness does no harm and at one where training begins to fail.",
    "The paper is public as an abstract only; how groups are chosen is this project's.",
    "n-softsync is measured where n divides the number of learners: elsewhere floor(lambda/n) updates to a "
    "step are another n's, and the mean staleness is lambda / floor(lambda/n).",
    "AD-PSGD's accuracy is of the mean of all peers' models, which is better than each. Random groups' is of "
    "one peer's own.",
    "Accuracy is the mean of the last fifth of the looks, on 360 samples held out. Its difference between "
    "two methods varies by .5 points from seed to seed. Bands are ranges over seeds, which name weights, "
    "batches and jitter.",
)


def reproduce(
    *,
    quick: bool = False,
    data: Path | None = None,
    out: Path,
    seeds: int = 5,
    jobs: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Measure everything, compare it, and write ``index.html``, ``results.json`` and figures to ``out``.

    quick: two seeds, the longest delay only, fewer epochs.
    jobs: processes side by side.
    progress: called as parts are done.

    Raises:
        ValueError: ``seeds`` or ``jobs`` below 1; ``data`` is given (this recipe trains on digits only).
    """
    require_counts(seeds, jobs)
    if data is not None:
        raise ValueError("grouping trains on scikit-learn's digits only; leave --data out")
    plan = grouping_measure.Plan.of(quick=quick, seeds=seeds)
    results = plan.sort(run_jobs(plan.jobs(), jobs, progress, out))
    report = Report(
        name="grouping",
        title="Progressive grouping: stragglers against staleness (Basu et al., HiPC 2018)",
        settings={
            "task": "digits",
            "peers": grouping_measure.N,
            "seeds": len(plan.seeds),
            "epochs": plan.epochs,
            "quick": quick,
        },
        rows=grouping_compare.rows(plan, results),
        tables=grouping_compare.tables(plan, results),
        figures=[grouping_figure.methods(plan, results), grouping_figure.staleness(results)],
        notes=list(NOTES),
        data=results.to_json(),
    )
    report.write(out)
    return report
