"""Reproduces the controlled study of staleness, on small models.

"Toward Understanding the Impact of Staleness in Distributed Machine Learning", Dai, Zhou, Dong, Zhang, Xing,
ICLR 2019 (arXiv 1810.03264): batches to a target against the delay s, by depth, optimiser and number of
workers, and gradient coherence. Multinomial logistic regression, fully connected nets, a ResNet, matrix
factorisation, a variational autoencoder and an LSTM.
"""

from __future__ import annotations

from pathlib import Path

from ragtag.recipes.base import Progress, Report, require_counts
from ragtag.recipes.jobs import run_jobs
from ragtag.recipes.staleness import compare as staleness_compare
from ragtag.recipes.staleness import figure as staleness_figure
from ragtag.recipes.staleness.measure import OPTIMISERS, WORKERS, Plan, Results
from ragtag.recipes.tasks.cifar import unpacked
from ragtag.recipes.tasks.sources import sources
from ragtag.recipes.tasks.texts import describe_text, load_text

NOTES = (
    "The paper's model of delays: each worker's update reaches each copy, its own too, after a delay drawn "
    "from 0 .. s steps; updates are added up, not averaged; optimiser state is each worker's own.",
    "Smaller than the paper: scikit-learn's 1,437 digits for MNIST and (unless --data has them) CIFAR-10, "
    "hidden layers of 64 for 256, 300 users and 200 items with 12,000 ratings that a seed makes in place of "
    "MovieLens, the source of Python's standard library (unless --data has a text) in place of Penn "
    "Treebank. LDA is not here: Gibbs sampling has no gradient to delay.",
    "Grids: depths 0 to 6 for SGD, 1 to 6 for all optimisers (quick: 1, 3, 5); the middle depth, 3, for "
    "workers and coherence; SGD and Adam for the other models. The other models' were fixed before any "
    "delayed run of them; the nets' replace an earlier choice made by results, which had been seen by then.",
    "Learning rates are held for all delays: of the nets .01 for SGD, Momentum and Adagrad, .001 for Adam "
    "and RMSProp; of the other models the smallest of a grid that needs at most twice the fewest batches at "
    "s = 0 (ragtag.recipes.staleness.tune). What is lost depends on them: one table has SGD at faster ones.",
    "A run that does not reach the target counts with all the batches that it had: its slow-down is a lower "
    "bound (marked >).",
    "Stretches of coherence below 0 are compared with others of the same runs where each are a tenth of all. "
    "That rule, and the comparison with s = 0, came after a ResNet had been seen whose coherence is below 0 "
    "nearly all the time.",
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

    quick: two seeds (one for the other models), fewer delays and depths.
    data: a tar archive of CIFAR-10 images for the ResNet, a text for the LSTM, or a folder with one of each
        (see ``sources.sources``).
    jobs: processes side by side.
    progress: called as parts are done.

    Raises:
        ValueError, FileNotFoundError: ``seeds`` or ``jobs`` below 1; ``data`` is none of these.
    """
    require_counts(seeds, jobs)
    archive, text = sources(data)
    if text is not None:
        load_text(text)  # raise for a bad text now, not in a job
    with unpacked(archive, out) as arrays:
        plan = Plan.of(quick=quick, seeds=seeds, arrays=arrays, text=text)
        results = Results.of(plan, run_jobs(plan.jobs(), jobs, progress, out))
        report = Report(
            name="staleness",
            title="What staleness costs (Dai et al., ICLR 2019)",
            settings={
                "images": "digits" if archive is None else "digits; CIFAR-10 for the ResNet",
                "text": describe_text(text),
                "workers": WORKERS,
                "optimisers": len(OPTIMISERS),
                "seeds": f"{len(plan.seeds)} ({len(plan.other_seeds)} of the other models)",
                "quick": quick,
            },
            rows=staleness_compare.rows(plan, results),
            tables=staleness_compare.tables(plan, results),
            figures=[
                staleness_figure.slow_downs(plan, results),
                staleness_figure.other_models(plan, results),
                staleness_figure.coherence(plan, results),
            ],
            notes=[*NOTES, *staleness_compare.failures(plan, results)],
            data=results.to_json(),
        )
    report.write(out)
    return report
