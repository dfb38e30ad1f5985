"""What is judged, shown and drawn of crews with a target batch, and of roles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from ragtag.recipes.base import Figure, Row, Table, number, row, worst
from ragtag.recipes.dedloc.mixes import BOUND, PROGRAM, RIVALS, RULES, MixRates, RandomMixes
from ragtag.recipes.dedloc.training import (
    CALM,
    CHANGING,
    FAULTY,
    GATHERS,
    LOCKSTEP,
    SAMPLE_S,
    CrewRun,
    window_means,
)
from ragtag.recipes.drawing import FAINT, GRID, PALETTE, canvas, style, svg

PAPER = "Diskin et al., NeurIPS 2021"
GOAL = "goal"
WINDOW = 10
"""Steps over which losses are averaged before they are compared."""
LOSS = 0.6
"""The time until the loss on samples held out is so low is compared."""
DROPPED = {CALM: 0.001, FAULTY: 0.1, CHANGING: 0.1}
WORLDS = tuple(DROPPED)
SOONER = 0.75
"""A crew with a target is to reach ``LOSS`` in this share of the time that lockstep takes, or less."""
NEAR_BEST = 0.95
EXACT = 1e-6
REPLAYED = 1e-5
"""How far two losses on the same samples may be apart."""

NOT_JUDGED = (
    ("goodput", "how much a crew averages and waits is its lines' and its peers' as well as the method's"),
    (
        "overlap of averages and computing (delayed parameter updates)",
        "a test of the library holds what it saves",
    ),
    ("rounds by the plan's shares", "blocks of a crew are of one size as yet: rates are computed, not run"),
    ("the paper's models and its volunteers", "ALBERT and SwAV take days of many GPUs"),
)


@dataclass(slots=True)
class Outcomes:
    """What all parts came to.

    alone: losses of one process with the large batch, by seed.
    crews: by rule and world; an entry for each seed.
    brute_up_to: peers of random mixes that were held against brute force.
    """

    alone: list[list[float]]
    crews: dict[tuple[str, str], list[CrewRun]]
    mixes: list[MixRates]
    at_random: RandomMixes
    brute_up_to: int


@dataclass(frozen=True, slots=True)
class Span:
    """The band of one process's losses in a window: from the lowest to the highest of the seeds, and their
    standard deviation on either side.
    """

    low: float
    high: float
    apart: float

    def has(self, loss: float) -> bool:
        """Whether a loss lies within."""
        return self.low - self.apart <= loss <= self.high + self.apart


def spans(alone: Sequence[list[float]], size: int = WINDOW) -> list[Span]:
    """The band, window by window."""
    by_window = zip(*(window_means(losses, size) for losses in alone), strict=True)
    return [Span(min(seen), max(seen), stdev(seen)) for seen in by_window]


def crew_windows(runs: Sequence[CrewRun]) -> list[float]:
    """A crew's losses by windows, mean over its seeds."""
    shortest = min(len(run.losses) for run in runs)
    return window_means(np.mean([run.losses[:shortest] for run in runs], axis=0).tolist(), WINDOW)


def outside_band(runs: Sequence[CrewRun], alone: Sequence[list[float]]) -> int:
    """Windows in which a crew lies outside the band, or that it did not come to."""
    band = spans(alone)
    inside = sum(span.has(loss) for span, loss in zip(band, crew_windows(runs), strict=False))
    return len(band) - inside


def all_rows(found: Outcomes) -> list[Row]:
    """What is judged: losses and times by their mean over seeds of crews, samples by the worst of these."""
    return _loss_rows(found) + _sample_rows(found) + _time_rows(found) + _role_rows(found)


def _loss_rows(found: Outcomes) -> list[Row]:
    group = f"Loss against steps, beside {len(found.alone)} seeds of one process with the large batch"
    source = f"{PAPER}, section 3.1: equal to large-batch training"
    rows = [
        row(
            f"{world}: of {len(spans(found.alone))} windows, outside the band",
            outside_band(found.crews[GATHERS, world], found.alone),
            0.0,
            0.0,
            source,
            group=group,
        )
        for world in WORLDS
    ]
    apart = worst(run.replay_apart for run in found.crews[GATHERS, CALM])
    what = f"{CALM}: beside one process's on the samples that were counted, farthest"
    rows.append(row(what, apart, 0.0, REPLAYED, "float error", group=group))
    return rows


def _sample_rows(found: Outcomes) -> list[Row]:
    group, rows = "Samples of steps with a target", list[Row]()
    for world in WORLDS:
        runs = found.crews[GATHERS, world]
        setup = runs[0].setup
        limit = setup.peers * setup.batch / 2 / setup.target
        most = worst(run.overshoot for run in runs)
        what = f"{world}: beyond the target, a share of it"
        rows.append(
            row(what, most, limit, 0.0, f"{GOAL}: half of all peers' batches", relation="<=", group=group)
        )
        share = worst(sum(run.dropped.values()) / run.computed for run in runs)
        what = f"{world}: dropped, of those computed"
        rows.append(row(what, share, DROPPED[world], 0.0, GOAL, relation="<=", group=group))
        what = f"{world}: neither counted, dropped nor pending"
        lost = worst(run.unaccounted for run in runs)
        rows.append(row(what, lost, 0.0, EXACT, "no sample is lost unreported", group=group))
    ratios = [run.counted / sum(run.samples) for run in found.crews[GATHERS, CALM]]
    farthest = max(ratios, key=lambda ratio: abs(ratio - 1))
    what = f"{CALM}: counted by peers, over those in means"
    rows.append(row(what, farthest, 1.0, EXACT, "no sample counts twice", group=group))
    return rows


def _sooner(runs: Sequence[CrewRun], lockstep: Sequence[CrewRun]) -> float:
    """The share of lockstep's time to the loss; NaN, which fails, where lockstep does not come to it."""
    least = fmean(_reached(lockstep))
    return fmean(_reached(runs)) / least if math.isfinite(least) else math.nan


def _time_rows(found: Outcomes) -> list[Row]:
    group = "Beside a crew in lockstep, with speeds of 1 to 4"
    return [
        row(
            f"{world}: time to a loss of {LOSS:g}, over lockstep's",
            _sooner(found.crews[GATHERS, world], found.crews[LOCKSTEP, world]),
            SOONER,
            0.0,
            GOAL,
            relation="<=",
            group=group,
        )
        for world in (CALM, FAULTY)
    ]


def _role_rows(found: Outcomes) -> list[Row]:
    group, rows = "Roles by the linear program, computed rates", list[Row]()
    for mix in found.mixes:
        what = f"{mix.name}: averages over the best of the three rules'"
        rows.append(row(what, mix.over_rivals, 1.0, EXACT, PAPER, relation=">=", group=group))
    bounds = [mix.averages[PROGRAM] / mix.averages[BOUND] for mix in found.mixes]
    worst = max(bounds, key=lambda ratio: abs(ratio - 1))
    rows.append(row("all of these: over the paper's own program", worst, 1.0, EXACT, PAPER, group=group))
    at_random = found.at_random
    what = f"{len(at_random.over_rules)} random mixes: averages over the best rule's, lowest"
    least = min(at_random.program_over_rules)
    rows.append(row(what, least, 1.0, EXACT, PAPER, relation=">=", group=group))
    what = f"over all 2^n, {len(at_random.over_brute)} mixes of at most {found.brute_up_to} peers, lowest"
    rows.append(row(what, min(at_random.over_brute), NEAR_BEST, 0.0, GOAL, relation=">=", group=group))
    return rows


def _reached(runs: Sequence[CrewRun]) -> list[float]:
    return [run.reached_s(LOSS) for run in runs]


# -- What is shown


def all_tables(found: Outcomes) -> list[Table]:
    """Losses by window, crews, roles, and what is not judged."""
    return [
        _losses(found),
        _crews(found),
        _mixes(found),
        _random(found),
        Table("Not judged", ("what", "why"), NOT_JUDGED),
    ]


def _losses(found: Outcomes) -> Table:
    crews = [found.crews[GATHERS, world] for world in WORLDS]
    seen = [[window_means(run.losses, WINDOW) for run in runs] for runs in crews]
    lines = []
    for at, span in enumerate(spans(found.alone)):
        cells = [", ".join(f"{of[at]:.4f}" for of in runs if at < len(of)) for runs in seen]
        first = WINDOW * at + 1
        band = f"{span.low:.4f} to {span.high:.4f}, {span.apart:.4f}"
        lines.append((f"{first} to {first + WINDOW - 1}", *cells, band))
    columns = ("steps", *WORLDS, "one process: lowest to highest, deviation")
    return Table("Loss on samples held out, mean over ten steps, by seed", columns, tuple(lines))


def _crews(found: Outcomes) -> Table:
    lines = []
    for (rule, world), runs in found.crews.items():
        dropped = [sum(run.dropped.values()) / run.computed for run in runs if run.computed]
        lines.append(
            (
                f"{rule}; {world}",
                f"{fmean(run.goodput for run in runs):.1%}",
                f"{fmean(run.used for run in runs):.1%}",
                number(fmean(_reached(runs)), 3),
                f"{fmean(fmean(run.samples) for run in runs):.0f}",
                f"{fmean(dropped):.1%}" if dropped else "",
                f"{fmean(run.survivors for run in runs):.0f}",
            )
        )
    setup = found.crews[GATHERS, CALM][0].setup
    ideal = setup.peers / sum(setup.speeds(CALM))
    title = (
        f"Goodput, and virtual time: {setup.peers} peers, {setup.samples_per_s(CALM):.0f} samples a second "
        f"in all (a step at the pace of the slowest can have {ideal:.0%} of that)"
    )
    reached = f"s to a loss of {LOSS:g}"
    heads = ("crew", "goodput", "of the living's", reached, "samples a step", "dropped", "peers at the end")
    return Table(title, heads, tuple(lines))


def _mixes(found: Outcomes) -> Table:
    rules = [*RULES, PROGRAM, BOUND]
    lines = [
        (mix.name, *(number(mix.averages[rule], 3) for rule in rules), f"{mix.computing}")
        for mix in found.mixes
    ]
    title = "Averages of 100 MB per minute, all computing; peers that compute by the plan"
    return Table(title, ("mix", *rules, "plan"), tuple(lines))


def _random(found: Outcomes) -> Table:
    gains, fewer = found.at_random.over_rules, found.at_random.fewer
    cells = [f"{np.quantile(gains, q):.3f}" for q in (0.1, 0.5, 0.9, 1.0)]
    line = (f"{len(gains)}", *cells, f"{fewer}")
    heads = ("mixes", "a tenth below", "half", "nine tenths", "most", "some do not compute")
    return Table("Random mixes: the plan's steps over the best rule's", heads, (line,))


# -- What is drawn


def training_figure(found: Outcomes) -> Figure:
    """How far crews' losses lie from one process's, and losses in virtual time."""
    drawn = canvas(11.0, 4.2)
    by_step, by_time = drawn.subplots(1, 2)
    each = spans(found.alone, 1)
    steps = np.arange(1, len(each) + 1)
    middle = np.mean(found.alone, axis=0)
    low, high = (1e3 * (np.array(edge) - middle) for edge in _edges(each))
    by_step.fill_between(
        steps, low, high, color=GRID, linewidth=0, label="one process: its band in each step"
    )
    looks = {
        (GATHERS, CALM): (PALETTE[6], "-"),
        (GATHERS, FAULTY): (PALETTE[3], "-"),
        (GATHERS, CHANGING): (PALETTE[2], "-"),
        (LOCKSTEP, CALM): (PALETTE[7], "--"),
        (LOCKSTEP, FAULTY): (PALETTE[4], "--"),
    }
    for (rule, world), (colour, line) in looks.items():
        for at, run in enumerate(found.crews[rule, world]):
            label = f"{rule}, {world}" if at == 0 else None
            how = {"color": colour, "linestyle": line, "linewidth": 1.4}
            by_time.plot(run.ended_s, run.losses, label=label, **how)
            if rule == GATHERS:
                apart = 1e3 * (np.array(run.losses) - middle[: len(run.losses)])
                by_step.plot(steps[: len(apart)], apart, label=world if at == 0 else None, **how)
    by_time.axhline(LOSS, color=FAINT, linewidth=0.8, linestyle=":")
    style(by_step, "By steps, with a target", "steps of the crew", "loss above its mean, thousandths")
    style(by_time, "By time", "seconds of virtual time", "loss on samples held out")
    for ax, where in ((by_step, "lower left"), (by_time, "upper right")):
        ax.legend(frameon=False, fontsize=8, labelcolor=FAINT, loc=where)
    setup, seeds = found.crews[GATHERS, CALM][0].setup, len(found.crews[GATHERS, CALM])
    caption = (
        f"{setup.peers} peers of speeds 1 to 4, {setup.target:,} samples a step, {SAMPLE_S:g} s for one at "
        f"speed 1; {seeds} seed{'s' if seeds > 1 else ''} of crews, {len(found.alone)} of one process."
    )
    return Figure("training", caption, svg(drawn))


def _edges(each: Sequence[Span]) -> tuple[list[float], list[float]]:
    return [span.low - span.apart for span in each], [span.high + span.apart for span in each]


def roles_figure(found: Outcomes) -> Figure:
    """Averages by each rule, over those by the linear program."""
    drawn = canvas(11.0, 3.2)
    ax = drawn.subplots()
    width = 0.8 / len(RIVALS)
    for at, (rule, colour) in enumerate(zip(RIVALS, (PALETTE[9], PALETTE[2], PALETTE[6]), strict=True)):
        shares = [mix.averages[rule] / mix.averages[PROGRAM] for mix in found.mixes]
        places = np.arange(len(shares)) + (at - (len(RIVALS) - 1) / 2) * width
        ax.bar(places, shares, 0.9 * width, color=colour, label=rule)
        for x, share in zip(places, shares, strict=True):
            ax.annotate(
                f"{share:.2f}", (x, share), (0, 2), textcoords="offset points", ha="center", fontsize=8
            )
    ax.axhline(1.0, color=FAINT, linewidth=0.8)
    style(ax, "Averages a minute, over the linear program's", "")
    ax.set_ylim(0, 1.15)
    ax.set_xticks(range(len(found.mixes)), [mix.name for mix in found.mixes])
    ax.legend(
        frameon=False, fontsize=8, labelcolor=FAINT, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.12)
    )
    return Figure("roles", "Rates of steady streams on the paper's mixes, all computing.", svg(drawn))
