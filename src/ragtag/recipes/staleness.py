"""Reproduces the controlled study of staleness, on handwritten digits.

"Toward Understanding the Impact of Staleness in Distributed Machine Learning", Dai, Zhou, Dong, Zhang, Xing,
ICLR 2019 (arXiv 1810.03264): batches to a target against the delay s, by depth, optimiser and number of
workers, and gradient coherence. Multinomial logistic regression and fully connected nets.
"""

from __future__ import annotations

from pathlib import Path

from ragtag.recipes import staleness_compare, staleness_figure
from ragtag.recipes.base import Progress, Report, require_counts
from ragtag.recipes.jobs import run_jobs
from ragtag.recipes.staleness_measure import OPTIMISERS, WORKERS, Plan, Results

NOTES = (
    "The paper's model of delays: each worker's update reaches each copy, its own too, after a delay drawn "
    "from 0 .. s steps; updates are added up, not averaged; optimiser state is each worker's own.",
    "Smaller than the paper: scikit-learn's 1,437 digits for MNIST, hidden layers of 64 for 256. Its "
    "ResNets, matrix factorisation, VAE, LSTM and LDA are not here.",
    "Learning rates are held for all delays: .01 for SGD, Momentum and Adagrad, .001 for Adam and RMSProp. "
    "How much is lost depends on them: the last table has SGD at faster ones, where it suffers far "
    "more than at its own.",
    "Optimisers are compared on nets of one and two hidden layers; with three (full runs show it), Adagrad "
    "suffers about as much as RMSProp at these rates.",
    "A run that does not reach the target counts with all the batches that it had: its slow-down is a lower "
    "bound (marked >).",
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

    quick: two seeds, fewer delays and optimisers' depths. jobs: processes side by side. progress: called as
    parts are done.

    Raises:
        ValueError: ``seeds`` or ``jobs`` below 1; ``data`` is given (this recipe trains on digits only).
    """
    require_counts(seeds, jobs)
    if data is not None:
        raise ValueError("staleness trains on scikit-learn's digits only; leave --data out")
    plan = Plan.of(quick=quick, seeds=seeds)
    results = Results.of(plan, run_jobs(plan.jobs(), jobs, progress))
    report = Report(
        name="staleness",
        title="What staleness costs (Dai et al., ICLR 2019)",
        settings={
            "task": "digits",
            "workers": WORKERS,
            "optimisers": len(OPTIMISERS),
            "seeds": len(plan.seeds),
            "quick": quick,
        },
        rows=staleness_compare.rows(plan, results),
        tables=staleness_compare.tables(plan, results),
        figures=[staleness_figure.slow_downs(plan, results), staleness_figure.coherence(plan, results)],
        notes=list(NOTES),
        data=results.to_json(),
    )
    report.write(out)
    return report
