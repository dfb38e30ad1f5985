"""Reproduces "Distributed Learning over Unreliable Networks" (RPS), in virtual time.

Yu, Tang, Renggli, Kassing, Singla, Alistarh, Zhang, Liu, ICML 2019 (arXiv 1810.07766). It measures the
machines that ``ragtag run`` drives over UDP: the mixing matrix, the steady disagreement, the 1/n law,
equality with all-reduce where nothing is lost, and training with models or gradients averaged.
"""

from __future__ import annotations

from pathlib import Path

from ragtag.recipes.base import Progress, Report, require_counts
from ragtag.recipes.jobs import run_jobs
from ragtag.recipes.rps import compare as rps_compare
from ragtag.recipes.rps import figure as rps_figure
from ragtag.recipes.rps import measure as rps_measure
from ragtag.recipes.tasks.cifar import unpacked

NOTES = (
    "The paper loses whole blocks; Ragtag's unit of loss is the datagram. The mixing matrix is measured "
    "chunk by chunk (each is lost on its own, so each is a block of the paper's). The training figure has "
    "one chunk per block, so that a datagram is the paper's message; the last table shows finer loss.",
    "Deadlines are measured, as they are over UDP; the line delays everything alike, so that what is missing "
    "was lost, never late (the share that does not come is compared).",
    "Loss and accuracy are means over the peers' own models unless the mean of all models is named. "
    "Optimiser state stays local unless named.",
    "The end of training is its last quarter: single looks at label-sorted training vary by a factor of two.",
    "Replicas are trained in one batched call; a test trains users' optimizers beside them, which lose the "
    "same messages and have the same models. What averages are made of while a peer or a line fails is read "
    "from users' optimizers.",
    "Seeds name initial weights, shards, batches and losses. Bands are the range over seeds; no tolerance "
    "follows from them. One figure of the earlier run is one seed's.",
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
    """Measure everything, compare it, and write ``index.html``, ``results.json`` and figures to ``out``.

    quick: one seed, fewer rates of arrival, fewer steps.
    data: a tar archive of CIFAR-10 images (``train/CLASS/NAME.jpg``, ``test/CLASS/NAME.jpg``) to train on in
        place of scikit-learn's digits.
    jobs: processes side by side.
    progress: called as parts of the work are done.

    Raises:
        ValueError, FileNotFoundError: ``seeds`` or ``jobs`` below 1; ``data`` is not such an archive.
    """
    require_counts(seeds, jobs)
    plan = rps_measure.Plan.of(quick=quick, digits=data is None, seeds=seeds)
    with unpacked(data, out) as arrays:
        results = plan.sort(run_jobs(plan.jobs(arrays), jobs, progress, out))
    report = Report(
        name="rps",
        title="RPS: distributed learning over unreliable networks (Yu et al., ICML 2019)",
        settings={
            "task": plan.task,
            "peers": rps_measure.N,
            "seeds": len(plan.seeds),
            "steps": plan.steps,
            "quick": quick,
        },
        rows=[*rps_compare.mixing_rows(results), *rps_compare.training_rows(plan, results)],
        tables=rps_compare.tables(plan, results),
        figures=[
            rps_figure.training(results.panels(), plan.task),
            rps_figure.mixing(results.mixing, results.by_n, rps_measure.N, rps_measure.SIZES_P),
        ],
        notes=list(NOTES),
        data=results.to_json(),
    )
    report.write(out)
    return report
