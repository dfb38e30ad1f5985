"""Reproduces NoPeek: accuracy, distance correlation held out and decoder error, by the weight of the loss.

"Reducing leakage in distributed deep learning for sensitive health data", Vepakomma, Gupta, Dubey, Raskar,
2019: a cut net is trained with a1 dCor(X, Z) + the task's loss. The paper has its figures on medical images
that are not free; what is judged here is what its method is to do, on samples held out: dCor from .9 or more
to .35 or less, and the error of a decoder at least doubled. What that costs in accuracy is shown. US patent
11,481,635 covers this loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ragtag.recipes.base import Figure, Progress, Report, Row, Table, number, require_counts, row
from ragtag.recipes.drawing import FAINT, INK, canvas, style, svg
from ragtag.recipes.jobs import Job, run_jobs
from ragtag.recipes.nopeek.training import CIFAR_EPOCHS, DIGITS_EPOCHS, CutResult, CutSetup, measure_cut
from ragtag.recipes.tasks.cifar import unpacked

WEIGHTS = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0)
FEWER = (0.0, 1.0, 10.0)
JUDGED = 10.0
"""The weight that is held against the goals."""
OPEN, CLOSED, DOUBLED = 0.9, 0.35, 2.0

PAPER = "Vepakomma et al. 2019: what the method is to do"
NOTES = (
    "A convolutional net cut behind its first two layers (16 channels, batch normalisation, max-pooling): "
    "X is a batch of images, Z what the layers below the cut make of it. Adam, 2e-3, batches of 128.",
    "dCor is that of Euclidean distances (not squared ones), unsquared, in float64, of all held-out "
    "samples at once (CIFAR-10: of 2,000). Shuffled: the same with codes beside other samples, which is "
    "how low it gets on so many samples for codes that tell nothing.",
    "The attacker has training samples with their codes, and the better of ridge regression and a net "
    "with two hidden layers, chosen on pairs that it keeps back. MSE and SSIM are its, on held-out "
    "samples; hidden is its MSE over that of the mean training sample.",
    "dCor says less than it seems to: where it is a third, the decoder still has most of the samples' "
    "variance. It falls where distances between codes say little, and a decoder goes by codes.",
    "Trained: dCor of as many training samples as are held out, since it falls with their number. It is no "
    "result. Rows judge the worst of all seeds.",
)
NOT_JUDGED = (
    ("the paper's images and figures", "medical data sets that cannot be had here"),
    ("accuracy lost", "the paper has no bound; a table and the figure show it"),
    ("SSIM", "no figure to compare with; a table shows it"),
    (
        "dCor of training samples below that of others (the method's notebooks: .17 and .46)",
        "of as many samples it is about the same here; a table shows both",
    ),
    (
        "what NoPeek does not stop",
        "gradient inversion, feature-space hijacking and label inference are other attacks; no bound "
        "holds for a single sample",
    ),
)
"""What the method's paper and its users would ask for, and no judged row shows."""


def reproduce(
    *,
    quick: bool = False,
    data: Path | None = None,
    out: Path,
    seeds: int = 3,
    jobs: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Measure everything, compare it, and write ``index.html``, ``results.json`` and the figure to ``out``.

    quick: one seed and three weights.
    data: a tar archive of CIFAR-10 images (``train/CLASS/NAME.jpg``, ``test/CLASS/NAME.jpg``) to train on in
        place of scikit-learn's digits, with three weights.
    jobs: processes side by side.
    progress: called as parts are done.

    Raises:
        ValueError, FileNotFoundError: ``seeds`` or ``jobs`` below 1; ``data`` is not such an archive.
    """
    require_counts(seeds, jobs)
    weights = WEIGHTS if data is None and not quick else FEWER
    epochs = DIGITS_EPOCHS if data is None else CIFAR_EPOCHS
    setups = [CutSetup(w, seed, epochs) for seed in range(1 if quick else seeds) for w in weights]
    with unpacked(data, out) as arrays:
        parts = [
            Job(f"weight {setup.weight:g}, seed {setup.seed}", measure_cut, (setup, arrays))
            for setup in setups
        ]
        results: list[CutResult] = run_jobs(parts, jobs, progress, out)
    task = "digits" if data is None else "CIFAR-10"
    report = Report(
        name="nopeek",
        title="NoPeek: less leakage at a cut (Vepakomma et al., 2019)",
        settings={
            "task": task,
            "weights": len(weights),
            "seeds": len(setups) // len(weights),
            "quick": quick,
        },
        rows=judged(results),
        tables=[by_weight(results), Table("Not judged", ("what", "why"), NOT_JUDGED)],
        figures=[trade_off(results, task)],
        notes=list(NOTES),
        data={"results": [asdict(result) for result in results]},
    )
    report.write(out)
    return report


def of_weight(results: Sequence[CutResult], weight: float) -> list[CutResult]:
    """The runs with this weight, by seed."""
    return [result for result in results if result.setup.weight == weight]


def judged(results: Sequence[CutResult]) -> list[Row]:
    """The worst seed beside what is to come out."""
    plain, hidden = of_weight(results, 0.0), of_weight(results, JUDGED)
    group = f"Samples held out: without NoPeek, and with weight {JUDGED:g}"
    ratios = [b.leak.mse / a.leak.mse for a, b in zip(plain, hidden, strict=True)]
    return [
        row(
            "dCor without",
            min(result.leak.dcor for result in plain),
            OPEN,
            0.0,
            PAPER,
            relation=">=",
            group=group,
        ),
        row(
            "dCor with",
            max(result.leak.dcor for result in hidden),
            CLOSED,
            0.0,
            PAPER,
            relation="<=",
            group=group,
        ),
        row(
            "decoder's squared error with, over that without",
            min(ratios),
            DOUBLED,
            0.0,
            PAPER,
            relation=">=",
            group=group,
        ),
    ]


COLUMNS: dict[str, Callable[[CutResult], float]] = {
    "accuracy": lambda result: result.accuracy,
    "dCor": lambda result: result.leak.dcor,
    "shuffled": lambda result: result.leak.independent_dcor,
    "MSE": lambda result: result.leak.mse,
    "hidden": lambda result: result.leak.hidden,
    "SSIM": lambda result: result.leak.ssim or 0.0,
    "trained": lambda result: result.training_dcor,
}
"""Of each weight. All but the last are of samples held out."""


def by_weight(results: Sequence[CutResult]) -> Table:
    """Means over seeds, with ranges."""
    lines = []
    for weight in dict.fromkeys(result.setup.weight for result in results):
        mine = of_weight(results, weight)
        lines.append(
            (f"{weight:g}", *(_over([read(result) for result in mine]) for read in COLUMNS.values()))
        )
    seeds = len(of_weight(results, 0.0))
    over = f"mean and range over {seeds} seeds" if seeds > 1 else "one seed"
    blind = number(float(np.mean([result.leak.blind_mse for result in results])), 3)
    title = f"Samples held out, by weight a1: {over}; the mean training sample's MSE is {blind}"
    return Table(title, ("a1", *COLUMNS), tuple(lines))


def trade_off(results: Sequence[CutResult], task: str) -> Figure:
    """Accuracy and decoder error against dCor held out, and both dCors by weight."""
    drawn = canvas(11.0, 3.9)
    kept, hidden, correlations = drawn.subplots(1, 3)
    weights = list(dict.fromkeys(result.setup.weight for result in results))
    for ax, name, factor, colour in ((kept, "accuracy", 100, "#3b4cc0"), (hidden, "hidden", 100, "#cf3a3a")):
        read = COLUMNS[name]
        for result in results:
            ax.plot(
                result.leak.dcor, factor * read(result), "o", color=colour, alpha=0.3, markersize=4, mew=0
            )
        means = [
            (_mean(of_weight(results, w), COLUMNS["dCor"]), factor * _mean(of_weight(results, w), read))
            for w in weights
        ]
        ax.plot(*zip(*means, strict=True), "-o", color=colour, linewidth=1.3, markersize=5)
        for weight, at in zip(weights, means, strict=True):
            if ax is kept or weight in (weights[0], weights[-1]):  # the others are close to each other
                left = at[0] < CLOSED
                ax.annotate(
                    f"{weight:g}",
                    at,
                    (-7 if left else 7, -3 if left else -10),
                    ha="right" if left else "left",
                    textcoords="offset points",
                    fontsize=8,
                    color=FAINT,
                )
        ax.axvline(CLOSED, color=INK, linewidth=0.8, linestyle=":")
        ax.margins(y=0.14)
        ax.set_xlim(0, 1)
    style(kept, "What it costs", "dCor of samples held out", "accuracy held out, %")
    style(hidden, "What it hides from a decoder", "dCor of samples held out", "variance hidden, %")
    hidden.set_ylim(0, 100)
    places = np.arange(len(weights))
    for name, colour, label in (
        ("dCor", "#1b1f24", "held out"),
        ("trained", "#e0902b", "trained on: no result"),
        ("shuffled", "#8a949e", "held out, codes of other samples"),
    ):
        values = [_mean(of_weight(results, w), COLUMNS[name]) for w in weights]
        correlations.plot(places, values, "-o", color=colour, linewidth=1.3, markersize=4, label=label)
    correlations.set_xticks(places, [f"{w:g}" for w in weights])
    correlations.set_ylim(0, 1)
    style(correlations, "Distance correlation", "weight a1")
    correlations.legend(frameon=False, fontsize=8, labelcolor=FAINT)
    seeds = len(of_weight(results, 0.0))
    over = f"means over {seeds} seeds, which are the faint points" if seeds > 1 else "one seed"
    caption = (
        f"{task}; numbers beside points are weights a1; {over}. Dotted: the goal for dCor, {CLOSED:g}. "
        "Hidden is the decoder's squared error over that of the mean training sample."
    )
    return Figure("trade_off", caption, svg(drawn))


def _mean(results: Sequence[CutResult], read: Callable[[CutResult], float]) -> float:
    return float(np.mean([read(result) for result in results]))


def _over(values: Sequence[float]) -> str:
    if len(values) == 1:
        return number(values[0], 3)
    return f"{number(float(np.mean(values)), 3)} ({number(min(values), 3)} to {number(max(values), 3)})"
