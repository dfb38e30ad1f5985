"""The Moshpit recipe's numbers beside the expected ones."""

from __future__ import annotations

from dataclasses import replace

from ragtag.recipes.base import Row, Table, number, row
from ragtag.recipes.moshpit.plan import (
    ERRORS,
    ERRORS_AT,
    HALF_EMPTY,
    MIXING,
    TABLE,
    WITHIN,
    Line,
    Results,
    all_reduce_law,
    mixed,
    mixing_case,
    table_case,
    within_case,
)
from ragtag.recipes.moshpit.run import ROUNDS_MAX, Case

_SOURCE = "the authors' simulation, mean of 10 seeds"
_REASONS = {
    "gossip": f"{_SOURCE} (neighbours on a ring; here in pairs, there in threes)",
    "push-sum": f"{_SOURCE} (there averages over fixed hops without weights; here weights, drawn targets)",
}
_TENTH = 0.1
_WITHIN = 0.25


def table_rows(results: Results) -> list[Row]:
    """A row for every cell of the table that was run."""
    rows = []
    for line in TABLE:
        for method, expected in line.rounds.items():
            case = table_case(line, method)
            if case in results.runs:
                rows += _cell(results, line, case, expected)
    return rows


def _cell(results: Results, line: Line, case: Case, expected: float) -> list[Row]:
    name, measured, error = case.method, results.mean(case), results.error(case)
    if name == "all-reduce":
        law = all_reduce_law(line.n, line.p, ROUNDS_MAX)
        source = f"law E[min(G, 50)], success (1-p)^N; {_SOURCE}: {expected:g}"
        return [row(name, measured, law, _TENTH * law, source, error=error, group=line.name)]
    relation = "=" if name == "gossip" else "<="
    source = _REASONS.get(name, _SOURCE)
    rows = [
        row(
            name,
            measured,
            expected,
            _TENTH * expected,
            source,
            relation=relation,
            error=error,
            group=line.name,
        )
    ]
    if name in line.coarse:
        wanted, found = line.coarse[name], results.mean(case, "coarse")
        quantity = f"{name}, to variance < 1e-4"
        rows.append(row(quantity, found, wanted, _TENTH * wanted, source, relation="<=", group=line.name))
    return rows


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
    """Variance by round beside the reference's, as ratios, since tolerances are factors."""
    rows = []
    for method, expected in ERRORS.items():
        found = results.variance(replace(ERRORS_AT, method=method))
        for t, wanted in enumerate(expected):
            rows.append(
                row(
                    f"{method}, after {t} rounds: {number(found[t])} / {number(wanted)}",
                    found[t] / wanted,
                    1.0,
                    1.0,
                    _SOURCE,
                    relation="<=",
                    group="Variance by round beside the reference's, 1024 peers, p = 0.005 (ratio)",
                )
            )
    return rows


def grid_rows(results: Results) -> list[Row]:
    """A half-empty grid is recognised, and a grid that follows the number of peers is even better."""
    n, sides, random = HALF_EMPTY
    group = "The grid and the live number of peers"
    rows = [
        row(
            f"{n} peers on {sides[0]}^2: recognised, mixed in random groups",
            results.mean(Case("moshpit", n, sides, chunks=4)),
            random,
            _TENTH * random,
            "random groups there; the half-empty grid itself takes 8.2 to 8.8",
            relation="<=",
            group=group,
        )
    ]
    given = {(line.n, line.sides): line.rounds["moshpit"] for line in TABLE if line.p == 0}
    given[n, sides] = random
    for case in results.runs:
        if case.method == "moshpit, own grid":
            expected = given[case.n, case.sides]
            rows.append(
                row(
                    f"{case.n} peers, groups of at most {case.group}: own grid",
                    results.mean(case),
                    expected,
                    _TENTH * expected,
                    "the grid that is given, p = 0",
                    relation="<=",
                    group=group,
                )
            )
    return rows


def within_rows(results: Results) -> list[Row]:
    """Rows on peers that die within the round."""
    by_line = {(line.n, line.sides, line.p): line for line in TABLE}
    rows = []
    for n, sides, p in WITHIN:
        for method in ("moshpit", "random groups"):
            case = within_case(method, n, sides, p)
            if case not in results.runs:
                continue
            expected = by_line[n, sides, p].rounds[method]
            rows.append(
                row(
                    f"{method}, {n} peers, p = {p:g}",
                    results.mean(case),
                    expected,
                    _WITHIN * expected,
                    "peers missing whole rounds; a death in mid-round also costs what it would reduce",
                    relation="<=",
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
    return [Table("All runs", columns, tuple(body))]
