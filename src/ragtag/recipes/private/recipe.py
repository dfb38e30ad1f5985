"""Reproduces the survey's comparison of private distributed deep learning, measured here on one task.

"No Peek: A Survey of private distributed deep learning", Vepakomma, Swedish, Raskar, Gupta, Dubey, 2018
(arXiv 1812.03288), compares federated averaging, large-batch SGD and split learning by what a client
computes, sends and leaks; "Detailed comparison of communication efficiency of split learning and federated
learning", Singh, Vepakomma, Gupta, Raskar, 2019 (arXiv 1909.09145), has the formulas. Beside these stand
NoPeek, differential privacy and secure averages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ragtag.privacy.split import crossover_clients
from ragtag.recipes.base import Figure, Progress, Report, Row, Table, number, require_counts, row, worst
from ragtag.recipes.drawing import FAINT, INK, canvas, style, svg
from ragtag.recipes.jobs import Job, run_jobs
from ragtag.recipes.private.accounting import RENYI, STEP
from ragtag.recipes.private.training import (
    BATCH,
    CLIENTS,
    COLUMNS,
    DELTA,
    METHODS,
    NOISE,
    NOPEEK,
    NOPEEK_NORM,
    NORM,
    PRIVATE_BATCH,
    PrivateResult,
    PrivateSetup,
    averaged_payload,
    direct_bytes,
    of_method,
    train_by,
)

EPOCHS, NOPEEK_EPOCHS = 15, 30
COUNTED = 0.01
"""How far what is counted may be from its formula."""
LOST = 0.02
"""How much worse than federated averaging a way may be that only moves data otherwise."""
PAID = 0.2
"""The same, of ways that pay by accuracy: NoPeek, and the noise of differential privacy."""
TOLD, HIDDEN = 0.2, 0.8
"""The share of variance that is hidden, at most where all is told, at least where noise hides it."""
DOUBLED = 2.0
SUMMED = 1e-6
"""How far a secure sum may be from the sum, of its norm."""

SECURE = "federated, secure"
SURVEY = "Vepakomma et al., arXiv 1812.03288"
FORMULAS = "Singh et al., arXiv 1909.09145"
DIRECT = "2 (K - 1) N: each client owns a part, and sends the others theirs"
SECURED = (
    "2 (K - 1) N: masked blocks to owners, sums to all; and masked sums to one peer, but for its own block"
)
MIRONOV = "arXiv 1908.10530, the integral; no credit, no loss"
GOPI = "Gopi et al., arXiv 2106.02848; Renyi orders lie above it"
GEIPING = "Geiping et al., NeurIPS 2020: plain updates give their samples away"
NOTES = (
    f"One net (two convolutions, group normalisation, two linear layers) on digits, {CLIENTS} clients "
    f"with equal parts, {EPOCHS} epochs, batches of {BATCH} ({PRIVATE_BATCH} expected with differential "
    "privacy), SGD. Each client is a user's loop in virtual time over lines that lose nothing.",
    "Counted: payload as machines send it (chunks padded to whole ones), of all clients in an epoch; of "
    "split learning with what the server sends them; messages of split learning and of secure averages "
    "without their heads and padding. Labels are not in the formulas, and left out. "
    "Survey: its formula, by which all goes through a server. In a crew without one a client's own part "
    "need not travel: 2 (K - 1) N in place of 2 K N.",
    "Computed: of a client for a sample, forward and backward, by torch's count of multiplications and "
    "additions in layers (of split learning in a client's first batch); processor time is all that a "
    "client's thread takes in an epoch, masks, noise and NoPeek's term with it.",
    "Leakage of a cut: the better of ridge regression and a net with two hidden layers, on samples held "
    "out. Leakage of updates: gradient inversion (cosine, total variation, known labels) of the first "
    "update of one sample, for federated averaging, large batches and differential privacy; with more "
    "samples behind an update it gets less. With secure averages all peers see a sum over the "
    "clients, each with one sample, of other classes. Both are judged by the squared error over that of "
    "the mean sample.",
    f"Differential privacy: noise {NOISE:g}, norm {NORM:g}, epsilon at delta {DELTA:g} for a sample of a "
    f"client, of which each has 352. NoPeek has weight {NOPEEK:g}, and otherwise the net and optimizer of "
    f"all ways here. Its gradient grows as codes shrink, so clients clip theirs to a norm of "
    f"{NOPEEK_NORM:g}, and train for {NOPEEK_EPOCHS} epochs. Without that training was chaotic: the worst of "
    "three seeds lost 19 points on one processor and 46 on another. The recipe nopeek trains another net "
    "(batch normalisation), by Adam, in batches of 128, for 60 epochs; its figures may differ from these.",
    "Learning rates, noise, and NoPeek's norm and epochs were chosen on seeds that are not measured. Rows "
    "judge the worst seed.",
)
NOT_JUDGED = (
    (
        "the survey's figures",
        "they are of VGG and ResNet on CIFAR, with up to 500 clients; the table is its form",
    ),
    ("homomorphic encryption", "not here"),
    (
        "secure averages with distributed noise",
        "for whole clients, of which four are too few to learn under it",
    ),
    (
        "stronger attacks",
        "an attack that fails proves nothing; no bound but epsilon holds for a single sample",
    ),
    ("an active server", "what it can do to split learning and to averages is in tests, not here"),
)
"""What the survey's readers would ask for, and no judged row shows."""


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

    quick: one seed.
    jobs: processes side by side.
    progress: called as parts are done.

    Raises ValueError: ``seeds`` or ``jobs`` below 1, or ``data``, since it is of digits only.
    """
    require_counts(seeds, jobs)
    if data is not None:
        raise ValueError("reproduce private: it is of digits; leave --data out")
    setups = [
        PrivateSetup(way, seed, NOPEEK_EPOCHS if "NoPeek" in way else EPOCHS)
        for seed in range(1 if quick else seeds)
        for way in METHODS
    ]
    parts = [Job(f"{setup.method}, seed {setup.seed}", train_by, (setup,)) for setup in setups]
    results: list[PrivateResult] = run_jobs(parts, jobs, progress, out)
    split = of_method(results, "split")[0]
    few, many = around(split)
    counted = run_jobs(
        [Job(f"{n} clients", averaged_payload, (n, 0)) for n in (few, many)], jobs, progress, out
    )
    report = Report(
        name="private",
        title="Private distributed deep learning: what each way costs and tells (Vepakomma et al., 2018)",
        settings={
            "task": "digits",
            "clients": CLIENTS,
            "epochs": EPOCHS,
            "seeds": len(setups) // len(METHODS),
            "quick": quick,
        },
        rows=[
            *payload(results, dict(zip((few, many), counted, strict=True))),
            *learned(results),
            *told(results),
        ],
        tables=[comparison(results), Table("Not judged", ("what", "why"), NOT_JUDGED)],
        figures=[drawn(results)],
        notes=list(NOTES),
        data={"results": [asdict(result) for result in results]},
    )
    report.write(out)
    return report


def around(split: PrivateResult) -> tuple[int, int]:
    """The numbers of clients just below and just above which split learning sends less, in a crew.

    By the survey they are around K = p q / N; without a server, around that and 1.
    """
    at = crossover_clients(split.samples, split.width, split.parameters) + 1
    return math.floor(at), math.floor(at) + 1


def payload(results: Sequence[PrivateResult], averaged: dict[int, int]) -> list[Row]:
    """What was counted beside the formulas, and where two ways cross.

    averaged: by clients, what one average among so many was counted to send.
    """
    group = "Payload of an epoch, counted over its formula"
    source = {"federated, secure": SECURED, "split": f"{FORMULAS}: 2 p q"}
    found = []
    for method in METHODS:
        ratios = [result.counted_bytes / result.formula_bytes for result in of_method(results, method)]
        farthest = max(ratios, key=lambda ratio: abs(ratio - 1))
        why = source.get(method, source["split"] if method.startswith("split") else DIRECT)
        found.append(row(method, farthest, 1.0, COUNTED, why, group=group))
    split = of_method(results, "split")[0]
    group = "Split learning over federated averaging, counted, around the crossover K = pq/N"
    few, many = sorted(averaged)
    for clients, relation in ((few, ">="), (many, "<=")):
        ratio = split.counted_bytes / averaged[clients]
        # a ratio of 1 lies between the two; what is counted may be off by its tolerance
        found.append(
            row(f"{clients} clients", ratio, 1.0, 2 * COUNTED, FORMULAS, relation=relation, group=group)
        )
    ratio = averaged[many] / direct_bytes(many, split.parameters)
    found.append(row(f"an average of {many}, over its formula", ratio, 1.0, COUNTED, DIRECT, group=group))
    return found


def learned(results: Sequence[PrivateResult]) -> list[Row]:
    """Accuracies beside federated averaging's, what clients compute, and what was spent."""
    group = "Accuracy held out, beside federated averaging's"
    base = of_method(results, "federated")
    found = []
    for method in METHODS[1:]:
        pays = "private" in method or "NoPeek" in method
        apart = [a.accuracy - b.accuracy for a, b in zip(of_method(results, method), base, strict=True)]
        most = PAID if pays else LOST
        found.append(row(method, min(apart), -most, 0.0, SURVEY, relation=">=", group=group))
    group = "What a client computes"
    split = of_method(results, "split")[0]
    found.append(
        row(
            "split over federated, a sample",
            split.flops / base[0].flops,
            1.0,
            0.0,
            SURVEY,
            relation="<=",
            group=group,
        )
    )
    group = "Differential privacy"
    planned, exact = [], []
    for result in of_method(results, "federated, private"):
        assert result.planned_epsilon is not None and result.exact_epsilon is not None
        for epsilon in (result.epsilon, result.least_epsilon):
            assert epsilon is not None
            planned.append(epsilon / result.planned_epsilon)
            exact.append(epsilon / result.exact_epsilon)
    ratio = max(planned, key=lambda ratio: abs(ratio - 1))
    found.append(row("epsilon over that of all planned steps", ratio, 1.0, STEP, MIRONOV, group=group))
    middle = 1 + RENYI / 2  # below 1 would be credit for nothing
    ratio = max(exact, key=lambda ratio: abs(ratio - middle))
    found.append(row("epsilon over the exact one", ratio, middle, RENYI / 2, GOPI, group=group))
    return found


def told(results: Sequence[PrivateResult]) -> list[Row]:
    """What attackers do not get: the share of variance, in the worst seed."""
    group = "Variance of samples that the attacker does not get"
    hidden = {method: [result.hidden for result in of_method(results, method)] for method in METHODS}
    alone, noised = "federated, an update of one sample", "federated, private"
    why = "noise of the norm of one sample"
    found = [
        row(alone, max(hidden["federated"]), TOLD, 0.0, GEIPING, relation="<=", group=group),
        row(noised, min(hidden[noised]), HIDDEN, 0.0, why, relation=">=", group=group),
        row("split, codes", max(hidden["split"]), TOLD, 0.0, SURVEY, relation="<=", group=group),
    ]
    ratios = [b / a for a, b in zip(hidden["split"], hidden["split, NoPeek"], strict=True)]
    found.append(
        row(
            "split, NoPeek over plain", min(ratios), DOUBLED, 0.0, "Vepakomma et al. 2019: at least doubled",
            relation=">=", group=group,
        )
    )  # fmt: skip
    sums = [b - a for a, b in zip(hidden["federated"], hidden[SECURE], strict=True)]
    found.append(
        row(
            "a sum over clients, less an update alone", min(sums), 0.0, 0.0, "more samples behind it",
            relation=">=", group=group,
        )
    )  # fmt: skip
    apart = worst(math.nan if r.sum_apart is None else r.sum_apart for r in of_method(results, SECURE))
    group, what = "Secure averages", "sums that were inverted, beside those of updates: apart, of their norm"
    found.append(row(what, apart, 0.0, SUMMED, "whole steps, and float error", group=group))
    return found


LEAVES = {
    "federated": "models",
    "large batch": "gradients",
    "split": "codes, labels",
    "split, NoPeek": "codes, labels",
    "federated, private": "noised models",
    "federated, secure": "sums of changes",
}
"""What leaves a client in the clear."""


def comparison(results: Sequence[PrivateResult]) -> Table:
    """The survey's table: means over seeds."""
    lines = []
    for method in METHODS:
        mine = of_method(results, method)
        cells = [[read(result) for result in mine] for read in COLUMNS.values()]
        texts = (
            number(float(np.mean([v for v in values if v is not None])), 3) if None not in values else "none"
            for values in cells
        )
        lines.append((method, *texts, LEAVES[method]))
    seeds = len(of_method(results, METHODS[0]))
    over = f"means over {seeds} seeds" if seeds > 1 else "one seed"
    return Table(f"{CLIENTS} clients: {over}", ("way", *COLUMNS, "what leaves"), tuple(lines))


def drawn(results: Sequence[PrivateResult]) -> Figure:
    """What is hidden and sent against accuracy, and bytes by the number of clients."""
    picture = canvas(11.0, 3.9)
    trade, cross = picture.subplots(1, 2)
    colours = ("#3b4cc0", "#8a949e", "#cf3a3a", "#e0902b", "#1b1f24", "#2a9d5c")
    for method, colour in zip(METHODS, colours, strict=True):
        mine = of_method(results, method)
        hidden, right = ([100 * value for value in values] for values in zip(
            *((result.hidden, result.accuracy) for result in mine), strict=True
        ))  # fmt: skip
        trade.plot(hidden, right, "o", color=colour, label=method, markersize=6)
    trade.set_xlim(-3, 103)
    style(trade, "What is hidden, and what is learned", "variance hidden from the attacker, %", "accuracy, %")
    trade.legend(frameon=False, fontsize=8, labelcolor=FAINT)
    split = of_method(results, "split")[0]
    clients = np.arange(1, 33)
    values = 2 * split.parameters * 4 / 1e6
    cross.plot(
        clients, values * clients, color=colours[0], linewidth=1.3, label="federated, through a server: 2KN"
    )
    cross.plot(
        clients, values * (clients - 1), color=FAINT, linewidth=1.3, label="federated, in a crew: 2(K-1)N"
    )
    cross.axhline(split.formula_bytes / 1e6, color=colours[2], linewidth=1.3, label="split: 2pq")
    at = crossover_clients(split.samples, split.width, split.parameters)
    cross.axvline(at, color=INK, linewidth=0.8, linestyle=":")
    style(cross, "Bytes of an epoch", "clients", "MB, all clients")
    cross.legend(frameon=False, fontsize=8, labelcolor=FAINT)
    caption = (
        f"Points are seeds. Dotted: the crossover K = pq/N = {number(at, 3)}, with all samples the same."
    )
    return Figure("comparison", caption, svg(picture))
