"""The top-k recipe's results beside the paper's: rows that are compared, and tables that are shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ragtag.recipes.base import Row, Table, number, row
from ragtag.recipes.topk.plan import LOSSES, RATIOS, Part, Plan, Results, method_of, select
from ragtag.recipes.topk.tasks import IMAGES
from ragtag.recipes.topk.training import Trained

KEPT = 1.03
"""The loss with tickets may be at most so many times that of the run that loses nothing."""
SAVED = 0.995
"""And so many times that of the run in which what was lost is cleared as if it had been sent. Where little is
lost that costs little, so this row tells what tickets do, and the other what is left to lose."""
LOW = 0.5
"""Below this training loss a ratio of losses says more about the seed than about what was lost."""
EXACT = 1e-9
"""What top-k does not choose may differ by so much of |u|^2 from the least possible: float64 is rounded."""
_BAND = (2 / 3, 4 / 3)


def rows(plan: Plan, results: Results, names: dict[str, str], *, quick: bool) -> list[Row]:
    """The numbers that are compared with expected ones."""
    found = []
    for part in plan.parts:
        runs = results.of_part(part)
        found += _bounds(runs, title(part, names))
    found += _same(plan, results)
    if not quick:
        for part in plan.parts:
            found += _lossy(results.of_part(part), title(part, names))
    return found


def tables(plan: Plan, results: Results, names: dict[str, str]) -> list[Table]:
    """The tables beside them."""
    found = []
    for part in plan.parts:
        runs = results.of_part(part)
        found += [_ends(runs, title(part, names))]
        found += [_losing(runs, title(part, names))] if part.lossy_seeds else []
    return [*found, _gaussian(plan, results, names), _claims(plan, results, names), _outer(results)]


def title(part: Part, names: dict[str, str]) -> str:
    """A part in words."""
    return f"{names['images'] if part.task == IMAGES else part.task}, {part.n} peers"


def end_of(runs: Sequence[Trained]) -> float:
    """The training loss of the last quarter of training, mean over seeds."""
    return float(np.mean([x for run in runs for x in run.losses[-max(1, len(run.losses) // 4) :]]))


def _bounds(runs: list[Trained], where: str) -> list[Row]:
    found = []
    for ratio in RATIOS:
        chosen = select(runs, "top-k", ratio)
        left = 1 - chosen[0].k / chosen[0].size
        group = f"Left of u, {ratio:.1%}: {where}"
        off = [x for run in chosen for x in run.off]
        found.append(row("top-k, largest", max(off), left**2, 0.0, "theorem 1", relation="<=", group=group))
        pairs = [pair for run in chosen for pair in zip(run.off_chosen, run.off_least, strict=True)]
        apart = max(abs(x - y) for x, y in pairs)
        source = "the k largest, found by sorting, before values are rounded"
        found.append(row("top-k, beside the least", apart, 0.0, EXACT, source, relation="<=", group=group))
        drawn = np.array([x for run in chosen for x in run.off_random])
        error = float(drawn.std(ddof=1) / math.sqrt(len(drawn)))
        found.append(
            row("random-k, mean", float(drawn.mean()), left, 4 * error, "lemma 1", error=error, group=group)
        )
    return found


def _same(plan: Plan, results: Results) -> list[Row]:
    off = 0.0
    for part in plan.parts:
        runs = results.of_part(part)
        for ratio in RATIOS:
            for one in select(runs, "top-k", ratio):
                two = [r for r in select(runs, "sampled top-k", ratio) if r.setup.seed == one.setup.seed]
                off = max(off, *(abs(one.loss - r.loss) for r in two))
    return [row("loss, SampledTopK less top-k", off, 0.0, 0.0, "both are exact", group="The same training")]


def _lossy(runs: list[Trained], where: str) -> list[Row]:
    """Losses with lost messages, where the loss is no small remainder; ``_losing`` shows the others."""
    found: list[Row] = []
    for loss in LOSSES:
        kept = select(runs, "sampled top-k", RATIOS[-1], loss)
        free = _same_seeds(select(runs, "sampled top-k", RATIOS[-1]), kept)
        if not kept or end_of(free) < LOW:
            continue
        measured = end_of(kept) / end_of(free)
        group = f"Loss, over that without loss: {where}"
        source = "the invariant of error feedback with tickets"
        found.append(
            row(f"tickets, {loss:.0%} lost", measured, KEPT, 0.0, source, relation="<=", group=group)
        )
        cleared = _same_seeds(select(runs, "sampled top-k", RATIOS[-1], loss, False), kept)
        if cleared:
            what = f"tickets, over what is cleared as if sent, {loss:.0%} lost"
            measured = end_of(kept) / end_of(cleared)
            found.append(row(what, measured, SAVED, 0.0, source, relation="<=", group=group))
    return found


def _same_seeds(runs: list[Trained], like: list[Trained]) -> list[Trained]:
    seeds = {r.setup.seed for r in like}
    return [r for r in runs if r.setup.seed in seeds]


def _losing(runs: list[Trained], where: str) -> Table:
    lines = []
    for loss in LOSSES:
        for tickets in (True, False):
            kept = select(runs, "sampled top-k", RATIOS[-1], loss, tickets)
            free = _same_seeds(select(runs, "sampled top-k", RATIOS[-1]), kept)
            ratios = [end_of([a]) / end_of([b]) for a, b in zip(kept, free, strict=True)]
            spread = f" ({number(min(ratios))} to {number(max(ratios))})" if len(ratios) > 1 else ""
            lines.append(
                (
                    f"{loss:.0%} lost, {'tickets' if tickets else 'cleared as if sent'}",
                    number(end_of(kept)),
                    number(end_of(kept) / end_of(free)) + spread,
                    f"{np.mean([r.accuracy for r in kept]) - np.mean([r.accuracy for r in free]):+.3f}",
                )
            )
    columns = ("SampledTopK 1 %", "training loss", "over the run that loses none", "accuracy, difference")
    return Table(f"Messages lost: {where}", columns, tuple(lines))


def _ends(runs: list[Trained], where: str) -> Table:
    names: dict[str, list[Trained]] = {}
    for run in runs:
        if not run.setup.loss:
            names.setdefault(method_of(run.setup), []).append(run)
    lines = []
    for name, group in names.items():
        held, accuracy = (float(np.mean([getattr(r, x) for r in group])) for x in ("held", "accuracy"))
        sent = float(np.mean([run.bytes for run in group])) / 1e6
        lines.append((name, number(end_of(group)), number(held), f"{accuracy:.3f}", f"{sent:.2f}"))
    columns = ("sent", "training loss", "held-out loss", "held-out accuracy", "MB per peer")
    return Table(f"The end of training: {where}", columns, tuple(lines))


def _gaussian(plan: Plan, results: Results, names: dict[str, str]) -> Table:
    lines = []
    for part in plan.parts:
        for ratio in RATIOS:
            chosen = select(results.of_part(part), "gaussian-k", ratio)
            share = _all(chosen, "share")
            low, high = float((share < _BAND[0]).mean()), float((share > _BAND[1]).mean())
            lines.append(
                (
                    f"{title(part, names)}, {ratio:.1%}",
                    f"{np.median(share):.2g} ({share.min():.2g} to {share.max():.2g})",
                    f"{low:.0%}",
                    f"{high:.0%}",
                    *(f"{np.median(_all(chosen, name)):.3g}" for name in ("fit", "leap", "rest", "shape")),
                )
            )
    columns = (
        "GaussianK",
        "selected / k",
        "< 2/3",
        "> 4/3",
        "first t",
        "at t/2",
        "at 3t/2",
        "kurtosis",
    )
    what = "medians; t: the right threshold; at: how many k are above; kurtosis: in excess of a normal's"
    return Table(f"GaussianK: steps that miss k, and why ({what})", columns, tuple(lines))


def reason(runs: Sequence[Trained]) -> str:
    """Why GaussianK misses k, in one sentence from the measurements."""
    fit, leap, rest, shape = (float(np.median(_all(runs, name))) for name in ("fit", "leap", "rest", "shape"))
    share = _all(runs, "share")
    outside = float(((share < _BAND[0]) | (share > _BAND[1])).mean())
    which = "low" if fit < 1 else "high"
    return (
        f"the normal fit's threshold is {fit:.3g} of the right one in the middle step, too {which} (excess "
        f"kurtosis {shape:.3g}), and error feedback has cut off the tail at about the right one: half of it "
        f"lets {leap:.3g} k pass, one and a half times it {rest:.3g} k, so corrections by 1/2 and 3/2 leap "
        f"over the band from 2/3 to 4/3; {outside:.0%} of steps end outside"
    )


def _all(runs: Sequence[Trained], name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    found = np.array([x for run in runs for x in getattr(run, name)], np.float64)
    return found[np.isfinite(found)]


def _claims(plan: Plan, results: Results, names: dict[str, str]) -> Table:
    """The paper's claims beside the measurements. At this size not all of them hold."""
    lines = []
    for part in plan.parts:
        runs = results.of_part(part)
        where = title(part, names)
        dense = end_of(select(runs, "dense", RATIOS[-1]))
        for ratio in RATIOS:
            exact, drawn, fitted = (
                end_of(select(runs, name, ratio)) for name in ("top-k", "random-k", "gaussian-k")
            )
            lines.append(
                (
                    f"{where}, {ratio:.1%}",
                    *(number(x) for x in (exact / dense, drawn / dense, fitted / exact)),
                )
            )
    columns = (
        "loss at the end",
        "top-k / dense",
        "random-k / dense",
        "GaussianK / top-k",
    )
    said = "the paper: close to 1, far above 1, close to 1"
    return Table(f"What the paper says of training, measured here ({said})", columns, tuple(lines))


def _outer(results: Results) -> Table:
    dense = results.local[0]
    lines = []
    for run in results.local:
        sent = run.bytes_at[-1]
        lines.append(
            (
                run.setup.name,
                number(run.losses[-1]),
                number(run.held),
                number(run.losses[-1] / dense.losses[-1]),
                number(sent / 1e6),
                number(dense.bytes_at[-1] / sent),
            )
        )
    s = dense.setup
    columns = ("sent", "training loss", "held-out", "over DiLoCo's", "MB", "fewer bytes")
    where = f"transformer, {s.n} peers, {s.rounds} rounds of {s.local_steps} steps"
    return Table(f"Outer steps after local ones: {where}", columns, tuple(lines))
