"""Reproduces DiLoCo, many local steps and then an outer step, and its streaming form.

"DiLoCo: Distributed Low-Communication Training of Language Models", Douillard et al., 2023 (arXiv
2311.08105): inner AdamW for H steps, outer Nesterov on the mean of the peers' differences. "Streaming DiLoCo
with overlapping communication", Douillard et al., 2025 (arXiv 2501.18512): the model in fragments, one
averaged at a time. The recipe measures the end of training beside averaging at every step, and the bytes that
a peer sends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ragtag.optim.outer import Nesterov
from ragtag.recipes.base import Progress, Report, Row, Table, number, require_counts, row
from ragtag.recipes.diloco.figure import training
from ragtag.recipes.diloco.training import Method, Run, Setup, train
from ragtag.recipes.jobs import Job, run_jobs
from ragtag.recipes.tasks.texts import describe_text, load_text

H = 50
FRAGMENTS = 5
LEARNING_RATE = 0.01
"""Of the inner AdamW, for all methods: the best of .001, .003 and .01 for averaging at every step (600 steps,
on a seed that is not measured)."""
PRETRAINED = 24 / 64
"""Steps that one peer takes by itself before, over those of the crew: the paper's share."""
EVERY_GRADIENT = Method("gradients, every step", 1, gradients=True)
EVERY_MODEL = Method("models, every step", 1)
LOCAL = Method(f"models, every {H} steps", H)
DILOCO = Method(f"DiLoCo, every {H} steps", H, Nesterov())
STREAMING = Method(f"streaming DiLoCo, {FRAGMENTS} fragments", H, Nesterov(), FRAGMENTS)
ALONE = Method("no averages", 0)
METHODS = (EVERY_GRADIENT, EVERY_MODEL, LOCAL, DILOCO, STREAMING, ALONE)
BY_LENGTH = (EVERY_GRADIENT, EVERY_MODEL, DILOCO)
WITHIN = 1.01
"""The final loss may be so many times that of averaging at every step."""

PAPER = "Douillard et al., arXiv 2311.08105"
STREAMED = "Douillard et al., arXiv 2501.18512"
NOTES = (
    "Each peer runs a user's training loop with the product's optimizer (``CrewOptimizer``) in virtual time: "
    "every average is a round of direct all-reduce over simulated lines without loss, and a run in which a "
    "peer missed another's values fails. Bytes are what these lines carried, headers included.",
    "The first average (of each fragment) is taken as it is, and is what outer steps begin from.",
    "Each peer has its own eighth of the text. Inner AdamW (weight decay .01, 5 % warm-up, cosine to a "
    "tenth), its state each peer's own; outer Nesterov with the paper's .7 and .9, not tuned.",
    "Averaging gradients at every step takes one AdamW step on eight peers' samples; averaging models at "
    "every step lets each peer take a step on its own samples first. Both send as much.",
    "Streaming: fragments are equal consecutive parts of the model; each is averaged once in H steps, and "
    "its peers' values are replaced at once (the paper may overlap with tau steps of computing).",
    "All methods begin with one model, which one peer has trained by itself (the paper begins its runs so, "
    "at 24 of 88 thousand steps). Losses are compared at the end of a full run only: the outer momentum "
    "takes tens of averages to pay (see the table by length).",
    "Loss is that of the mean of all peers' models on text held out, in nats per byte; without averages, the "
    "mean of the peers' own losses. Differences are taken seed by seed.",
)
NOT_JUDGED = (
    ("bandwidth down 100 times and more", f"H is {H} here: bytes fall so many times"),
    (
        "overlap with computing, 4 bits",
        "the library's have tests of their own; here fragments are replaced at once",
    ),
    ("peers that miss averages", "`ragtag reproduce internet`"),
    ("unlike shards, other H, other numbers of workers", "each takes as many long runs again"),
)
"""What the papers claim and no judged row shows."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs to make.

    compared: losses are compared with expected ones.
    shorter: lengths of further runs, of the first seed and of ``BY_LENGTH``, that show how losses depend on
        it.
    """

    seeds: tuple[int, ...]
    steps: int
    compared: bool
    shorter: tuple[int, ...] = ()

    @staticmethod
    def of(*, quick: bool, seeds: int) -> Plan:
        """All runs; quick: enough to see how they go."""
        if quick:
            return Plan((0,), 12 * H, compared=False)
        return Plan(tuple(range(seeds)), 80 * H, compared=True, shorter=(12 * H, 30 * H))

    def setups(self) -> list[Setup]:
        """All runs."""
        asked = [(method, seed, self.steps) for seed in self.seeds for method in METHODS]
        asked += [(method, self.seeds[0], steps) for steps in self.shorter for method in BY_LENGTH]
        return [
            Setup(method, seed, steps, LEARNING_RATE, pretrained=round(PRETRAINED * steps))
            for method, seed, steps in asked
        ]


def reproduce(
    *,
    quick: bool = False,
    data: Path | None = None,
    out: Path,
    seeds: int = 3,
    jobs: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Train everything, compare, and write ``index.html``, ``results.json`` and a figure to ``out``.

    quick: one seed, fewer steps.
    data: a text (or a folder with one ``.txt``) in place of the source of Python's standard library.
    jobs: processes side by side.
    progress: called as runs end.

    Raises:
        ValueError, FileNotFoundError: ``seeds`` or ``jobs`` below 1; ``data`` is no such text.
    """
    require_counts(seeds, jobs)
    load_text(data)  # raise for a bad text now, not in a job
    plan = Plan.of(quick=quick, seeds=seeds)
    setups = plan.setups()
    calls = [Job(f"{s.method.name}, {s.steps} steps, seed {s.seed}", train, (s, data)) for s in setups]
    every: list[Run] = run_jobs(calls, jobs, progress, out)
    longest = max(run.setup.steps for run in every)
    runs = [run for run in every if run.setup.steps == longest]
    report = Report(
        name="diloco",
        title="DiLoCo: few averages, an outer step on each (Douillard et al. 2023, 2025)",
        settings={
            "text": describe_text(data),
            "peers": setups[0].n,
            "steps": plan.steps,
            "values": runs[0].size,
            "seeds": len(plan.seeds),
            "quick": quick,
        },
        rows=[*(losses(runs) if plan.compared else ()), *traffic(runs)],
        tables=[
            _table(runs),
            *((_lengths(every),) if plan.shorter else ()),
            Table("Not judged", ("what", "why"), NOT_JUDGED),
        ],
        figures=[training(runs)],
        notes=list(NOTES),
        data={"runs": [asdict(run) for run in every]},
    )
    report.write(out)
    return report


def of(runs: Sequence[Run], method: Method) -> list[Run]:
    """A method's runs, by seed."""
    return [run for run in runs if run.setup.method == method]


def ratios(runs: Sequence[Run], method: Method, base: Method) -> list[float]:
    """A method's final losses over another method's, seed by seed."""
    return [a.loss / b.loss for a, b in zip(of(runs, method), of(runs, base), strict=True)]


def losses(runs: Sequence[Run]) -> list[Row]:
    """The end of training beside that of averaging at every step."""
    group = "Final loss over that of averaging models at every step"
    found: list[Row] = []
    for method, source in ((DILOCO, PAPER), (STREAMING, STREAMED)):
        found.append(_mean(method.name, ratios(runs, method, EVERY_MODEL), WITHIN, "<=", source, group))
    source = "averaging has to matter"
    found.append(_mean(ALONE.name, ratios(runs, ALONE, EVERY_MODEL), WITHIN, ">=", source, group))
    group = "Final loss over that of averaging gradients at every step"
    for method, source in ((DILOCO, PAPER), (STREAMING, STREAMED)):
        found.append(_mean(method.name, ratios(runs, method, EVERY_GRADIENT), WITHIN, "<=", source, group))
    return found


def traffic(runs: Sequence[Run]) -> list[Row]:
    """The bytes that are sent, in all and in one round."""
    found: list[Row] = []
    group = "Bytes that a peer sends"
    every, seldom, streamed = (of(runs, m)[0] for m in (EVERY_MODEL, DILOCO, STREAMING))
    share = 1.0 / H
    for run, source in ((seldom, PAPER), (streamed, STREAMED)):
        what = f"{run.setup.method.name}: over averaging at every step"
        # fragments are whole chunks, so up to 3 % are padding
        found.append(row(what, run.bytes / every.bytes, share, 0.03 * share, source, group=group))
    what, peak = "streaming: its largest round over DiLoCo's", streamed.largest_bytes / seldom.largest_bytes
    source = f"{STREAMED}: 1 / fragments"
    found.append(row(what, peak, 1 / FRAGMENTS, 0.03 / FRAGMENTS, source, group=group))
    return found


def _mean(what: str, values: Sequence[float], expected: float, sign: str, source: str, group: str) -> Row:
    error = float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    mean = float(np.mean(values))
    return row(what, mean, expected, 0.0, source, relation=sign, error=error, group=group)


def _table(runs: Sequence[Run]) -> Table:
    lines = []
    for method in METHODS:
        mine = of(runs, method)
        lines.append(
            (
                method.name,
                number(float(np.mean([run.loss for run in mine]))),
                *(_percent(ratios(runs, method, base)) for base in (EVERY_MODEL, EVERY_GRADIENT)),
                f"{mine[0].bytes / 1e6:,.2f}",
                f"{mine[0].round_bytes / 1e6:.3f}",
                f"{mine[0].rounds:,}",
            )
        )
    columns = (
        "method",
        "final loss",
        "beside models",
        "beside gradients",
        "MB sent per peer",
        "MB in a round",
        "rounds",
    )
    over = f"mean over {len(of(runs, DILOCO))} seeds" if len(of(runs, DILOCO)) > 1 else "one seed"
    return Table(f"The end of training: {over}", columns, tuple(lines))


def _lengths(runs: Sequence[Run]) -> Table:
    """How far DiLoCo is from averaging at every step, by the length of the whole run; one seed."""
    lines = []
    for steps in sorted({run.setup.steps for run in runs}):
        some = [run for run in runs if run.setup.steps == steps and run.setup.seed == runs[0].setup.seed]
        apart = (_percent(ratios(some, DILOCO, base)) for base in (EVERY_MODEL, EVERY_GRADIENT))
        lines.append((f"{steps:,}", f"{steps // H}", number(of(some, DILOCO)[0].loss), *apart))
    columns = ("steps", "averages", "final loss", "beside models", "beside gradients")
    return Table("DiLoCo by length of the run: one seed", columns, tuple(lines))


def _percent(values: Sequence[Any]) -> str:
    return f"{100 * (float(np.mean(values)) - 1):+.2f} %"
