"""Reproduces today's recipes for training over the internet: small, in virtual time, beside DiLoCo.

"Communication Efficient LLM Pre-training with SparseLoCo", Sarfi et al., 2025 (arXiv 2508.15706). "NoLoCo:
No-all-reduce Low Communication Training Method for Large Models", Kolehmainen et al., 2025 (arXiv
2506.10911).
"Decoupled DiLoCo for Resilient Distributed Pre-training", Douillard et al., 2026 (arXiv 2604.21428). "MuLoCo:
Muon is a practical inner optimizer for DiLoCo", Thérien et al., 2025 (arXiv 2505.23725).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from ragtag.recipes.base import Progress, Report, require_counts
from ragtag.recipes.diloco.training import Method, Setup
from ragtag.recipes.internet.compare import (
    MISSING,
    WITH_MISSING,
    byte_rows,
    loss_rows,
    spot_rows,
    spot_table,
    time_rows,
    ways_figure,
    ways_table,
)
from ragtag.recipes.internet.spot import SpotSetup, spot
from ragtag.recipes.internet.training import ALONE, EVERY_STEP, MULOCO, SHORT, H, every_of, train_way
from ragtag.recipes.jobs import Job, run_jobs
from ragtag.recipes.tasks.texts import describe_text, load_text

LEARNING_RATE = 0.01
"""Of the inner optimizers, for all: what ``recipes.diloco`` chose for averages at every step."""
LOOKS = 10
"""Evaluations on the way."""
PRETRAINED = 24 / 64
"""Steps that one peer takes by itself before, over those of the crew (DiLoCo's share)."""

NOTES = (
    f"Peers run a user's training loop in virtual time: a step takes .1 s (a fifth more or less), lines have "
    f"an RTT of 100 ms and 100 Mbit/s. All recipes take H = {H} local steps from one average of a value to "
    "the next, the same inner AdamW and learning rate (MuLoCo: Muon for matrices). Outer settings are those "
    f"of the papers, but for {SHORT}: its rate, momentum, decay and share of values are the best of "
    "seventeen tried by hand with seed 0.",
    "A peer that is missing from a round computes on, and is cut off from all others from when that average "
    "is due until its next one is. Who is missing when is drawn from the seed, alike for all recipes with as "
    "many averages.",
    "All begin with one model, which one peer has trained by itself, as in DiLoCo's paper. Each peer has its "
    "own eighth of the text.",
    "Loss is that of the mean of all peers' models on text held out, in nats per byte; ratios are taken seed "
    "by seed. At 42 thousand values and some hundreds of steps a percent from one seed cannot be told from "
    "none, and sparse differences lose what they need not lose at billions.",
    "Bytes are what the lines carried, headers included. Beside them stands DiLoCo's share of averages at "
    "every step, which is known: 1/H.",
    "Computing is the share of the time in which a peer computed; the rest it stood in a round or looked for "
    "a partner. Averages run beside local steps in Decoupled DiLoCo only, until the next one is due.",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs to make."""

    seeds: tuple[int, ...]
    steps: int
    spot: SpotSetup

    @staticmethod
    def of(*, quick: bool, seeds: int) -> Plan:
        """All runs; quick: one seed, fewer steps, 100 spot machines."""
        if quick:
            return Plan((0,), 12 * H, spot=SpotSetup(100))
        return Plan(tuple(range(seeds)), 80 * H, spot=SpotSetup(1000))

    def runs(self) -> list[tuple[Setup, float]]:
        """Each run's setup, and the share of rounds from which a peer is missing."""
        asked = [(way, 0.0) for way in (ALONE, EVERY_STEP, MULOCO, SHORT)]
        asked += [(way, missing) for way in WITH_MISSING for missing in MISSING]
        return [(self.setup(way, seed), missing) for seed in self.seeds for way, missing in asked]

    def setup(self, way: str, seed: int) -> Setup:
        """One run's."""
        method = Method(way, every_of(way))
        pretrained = round(PRETRAINED * self.steps)
        return Setup(method, seed, self.steps, LEARNING_RATE, pretrained=pretrained, looks=LOOKS)


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

    quick: one seed, 12 averages in place of 80, a tenth of the spot machines.
    data: a text (or a folder with one ``.txt``) in place of the source of Python's standard library.
    jobs: processes side by side.
    progress: called as runs end.

    Raises:
        ValueError, FileNotFoundError: ``seeds`` or ``jobs`` below 1; ``data`` is no such text.
        ImportError: this torch has no Muon.
    """
    require_counts(seeds, jobs)
    load_text(data)  # raise for a bad text now, not in a job
    plan = Plan.of(quick=quick, seeds=seeds)
    calls = [
        Job(f"{s.method.name}, {missing:.0%} missing, seed {s.seed}", train_way, (s, missing, data))
        for s, missing in plan.runs()
    ]
    calls.append(Job(f"{plan.spot.peers} spot machines", spot, (plan.spot,)))
    *runs, machines = run_jobs(calls, jobs, progress, out)
    report = Report(
        name="internet",
        title="Training over the internet: SparseLoCo, NoLoCo, Decoupled DiLoCo, MuLoCo (2025, 2026)",
        settings={
            "text": describe_text(data),
            "peers": runs[0].setup.n,
            "steps": plan.steps,
            "values": runs[0].size,
            "seeds": len(plan.seeds),
            "quick": quick,
        },
        rows=[
            *loss_rows(runs),
            *byte_rows(runs),
            *time_rows(runs),
            *spot_rows(machines),
        ],
        tables=[ways_table(runs), spot_table(machines)],
        figures=[ways_figure(runs)],
        notes=list(NOTES),
        data={"runs": [asdict(run) for run in runs], "spot": asdict(machines)},
    )
    report.write(out)
    return report
