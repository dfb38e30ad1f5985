"""The Moshpit recipe's numbers beside the expected ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ragtag.codecs.dense import fp32
from ragtag.recipes.base import Row, Table, number, row
from ragtag.recipes.moshpit.plan import (
    ERRORS,
    ERRORS_AT,
    HALF_EMPTY,
    MIXING,
    OWN,
    TABLE,
    UNSEEN,
    WITHIN,
    Line,
    Results,
    all_reduce_law,
    groups_law,
    mixed,
    mixing_case,
    push_sum_law,
    ring_law,
    table_case,
    within_case,
)
from ragtag.recipes.moshpit.run import ROUNDS_MAX, Case

_LAW = "the definition as arithmetic, without messages; tolerance: four deviations of such a mean"
_ALL_REDUCE = 0.1
"""Relative tolerance of all-reduce's law. Its rounds vary as much as their mean: a geometric law."""
_WITHIN = 0.25
_AFTER = 10
"""Rounds of push-sum after which its potential is compared."""
_POTENTIAL = 0.04
"""Relative tolerance of push-sum's potential. What targets are drawn moves it by 1 % (768 peers, 5 runs)."""


def table_rows(results: Results) -> list[Row]:
    """A row or two for every cell of the table that was run."""
    rows = []
    for line in TABLE:
        for method, expected in line.rounds.items():
            case = table_case(line, method)
            if case in results.runs:
                rows += _CELLS.get(method, _groups)(results, line, case, expected)
    return rows


def _groups(results: Results, line: Line, case: Case, expected: float) -> list[Row]:
    name = case.method
    coarse = f"{_LAW}; the authors' simulation: {line.coarse[name]:g}"
    return [
        _rounds(name, results, case, case, f"{_LAW}; the authors' simulation: {expected:g}", line.name),
        _rounds(f"{name}, to variance < 1e-4", results, case, case, coarse, line.name, "coarse"),
    ]


def _rounds(
    quantity: str, results: Results, case: Case, defined: Case, source: str, group: str, what: str = "rounds"
) -> Row:
    """A case's rounds beside those of a definition."""
    law = groups_law(defined)[what][0]
    tolerance = max(law.tolerance(len(results.runs[case])), UNSEEN)
    measured, error = results.mean(case, what), results.error(case, what)
    return row(quantity, measured, law.mean, tolerance, source, error=error, group=group)


def _all_reduce(results: Results, line: Line, case: Case, expected: float) -> list[Row]:
    law = all_reduce_law(line.n, line.p, ROUNDS_MAX)
    source = f"law E[min(G, 50)], success (1-p)^N; the authors' simulation: {expected:g}"
    measured, error = results.mean(case), results.error(case)
    tolerance = _ALL_REDUCE * law
    return [row(case.method, measured, law, tolerance, source, error=error, group=line.name)]


def _push_sum(results: Results, line: Line, case: Case, expected: float) -> list[Row]:
    """Not its rounds: the authors' has fixed hops and no weights."""
    law = push_sum_law(line.n, _AFTER)
    runs = [found.potential[_AFTER] / found.potential[0] for found in results.runs[case]]
    what = f"push-sum: potential after {_AFTER} rounds"
    source = "Kempe et al., lemma 2.3, for targets that are others; exact in expectation"
    return [row(what, float(np.mean(runs)), law, _POTENTIAL * law, source, group=line.name)]


def _gossip(results: Results, line: Line, case: Case, expected: float) -> list[Row]:
    """Not its rounds: 50 is where they are cut off."""
    law = ring_law(line.n, ROUNDS_MAX, len(results.runs[case]) * case.chunks * fp32.elements)
    source = f"W^T W of the ring's edges in turn, exact; the authors' simulation: not in {expected:g} rounds"
    what = f"gossip: variance after {ROUNDS_MAX} rounds"
    found = results.variance(case)[ROUNDS_MAX]
    return [row(what, found, law.mean, law.tolerance(1), source, group=line.name)]


_CELLS: dict[str, Callable[[Results, Line, Case, float], list[Row]]] = {
    "all-reduce": _all_reduce,
    "push-sum": _push_sum,
    "gossip": _gossip,
}


def mixing_rows(results: Results) -> list[Row]:
    """The exact mixing factor of random groups."""
    rows = []
    for n, group, t in MIXING:
        case = mixing_case(n, group, t)
        if case not in results.runs:
            continue
        found, r = mixed(results.runs[case]), n // group
        expected = ((r - 1) / (n - 1)) ** t
        bound = ((r - 1) / n + r / n**2) ** t
        rows.append(
            row(
                f"{n} peers, {r} groups, after {t} round{'s' * (t > 1)}",
                found.factor[t - 1],
                expected,
                0.03 * expected,
                f"((r-1)/(N-1))^T, exact; the paper's has {number(bound)}",
                error=found.error[t - 1],
                group="Mixing factor of random groups",
            )
        )
    return rows


def error_rows(results: Results) -> list[Row]:
    """Variance by round. It differs between runs by factors, so logarithms are compared."""
    rows = []
    for method, expected in ERRORS.items():
        case = replace(ERRORS_AT, method=method)
        seeds, laws = len(results.runs[case]), groups_law(case)["log variance"]
        for t, wanted in enumerate(expected[1:], start=1):
            measured, error = results.log_variance(case, t)
            rows.append(
                row(
                    f"{method}, after {t} rounds",
                    measured,
                    laws[t].mean,
                    laws[t].tolerance(seeds),
                    f"{_LAW}; the authors' simulation: {math.log10(wanted):.2f}, of a mean over runs",
                    error=error,
                    group=f"Decimal logarithm of the variance, {case.n} peers, p = {case.p:g}",
                )
            )
    return rows


def grid_rows(results: Results) -> list[Row]:
    """A half-empty grid is recognised, and a grid that follows the number of peers is the smallest."""
    group = "The grid and the live number of peers"
    n, sides = HALF_EMPTY
    case = Case("moshpit", n, sides, chunks=4)
    source = f"{_LAW}: random groups; the half-empty grid takes 8.2 to 8.8"
    what = f"{n} peers on {sides[0]}^2: recognised, mixed in random groups"
    rows = [_rounds(what, results, case, replace(case, method="random groups"), source, group)]
    for case in results.runs:
        if case.method == "moshpit, own grid":
            own = OWN[case.n] if len(case.sides) == 2 else case.sides
            defined = replace(case, method="moshpit", sides=own)
            what = f"{case.n} peers, groups of at most {case.group}: own grid"
            source = f"{_LAW}: the grid {' x '.join(map(str, own))}"
            rows.append(_rounds(what, results, case, defined, source, group))
    return rows


def within_rows(results: Results) -> list[Row]:
    """Rows on peers that die within the round."""
    rows = []
    for n, sides, p in WITHIN:
        for method in ("moshpit", "random groups"):
            case = within_case(method, n, sides, p)
            if case not in results.runs:
                continue
            expected = groups_law(replace(case, within=False))["rounds"][0].mean
            rows.append(
                row(
                    f"{method}, {n} peers, p = {p:g}",
                    results.mean(case),
                    expected,
                    _WITHIN * expected,
                    "the definition, peers missing whole rounds; a death in mid-round also costs what the "
                    "peer would reduce",
                    error=results.error(case),
                    group="Peers die within the round",
                )
            )
    return rows


def tables(results: Results) -> list[Table]:
    """Tables without expected values: other methods, and the effect of deaths."""
    columns = ("runs", "seeds", "rounds", "to 1e-4", "drift of the mean", "mosaics", "not averaged")
    body = []
    for case, found in results.runs.items():
        if case.until == 0.0:
            continue
        name = f"{case.method}, {case.n}, {'x'.join(map(str, case.sides))}, p = {case.p:g}"
        body.append(
            (
                name + (", within" if case.within else ""),
                str(len(found)),
                f"{results.mean(case):.2f}",
                f"{results.mean(case, 'coarse'):.2f}",
                f"{results.mean(case, 'drift'):.1e}",
                f"{results.mean(case, 'mosaic'):.1%}",
                f"{results.mean(case, 'failed'):.1%}",
            )
        )
    return [Table("All runs", columns, tuple(body)), Table("Not judged", ("what", "why"), NOT_JUDGED)]


NOT_JUDGED = (
    ("push-sum's rounds", "the reference's has fixed hops and no weights; its potential here is judged"),
    ("gossip and push-sum with peers away", "there is no law to hold them to"),
    ("drift of the mean, mosaics", "the page has no figures; a test demands that mosaics are told of"),
    ("training: 1.3 and 1.5 times as fast", "ResNet-50 and ALBERT-large take days of many GPUs"),
)
"""What the page names and no judged row shows."""
