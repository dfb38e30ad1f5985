"""What all recipes share: numbers beside expected ones, tables, figures, and how they are shown.

A recipe's module has ``reproduce(...) -> Report``. ``ragtag.recipes.RECIPES`` names the module.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from ragtag.recipes.cache import ResultCache

FORMAT = 1
"""Version of ``results.json``."""

_DIGITS_MAX = 8
_WIDE = 150  # a terminal of so many columns shows ranges in tables
_PROSE_WORDS = 5
"""A cell with so many words is a sentence."""
_WORD = re.compile(r"[A-Za-z]{2,}")
_RANGE = re.compile(r" \([^()]* to [^()]*\)")

Progress = Callable[[int, int, str], None]
"""Called with the number of parts that are done, the number of all parts, and the last part's name."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number beside the expected one.

    source: where the expected value comes from.
    relation: "=" (within the tolerance of the expected value), "<=" (at most expected + tolerance) or
        ">=" (at least expected - tolerance).
    error: the measurement's standard error; ``None``: it has none.
    group: the heading under which the row is shown.
    """

    quantity: str
    expected: float
    tolerance: float
    measured: float
    source: str
    ok: bool
    relation: str = "="
    error: float | None = None
    group: str = ""

    @property
    def wanted(self) -> str:
        """The expected value in words."""
        sign = {"=": "", "<=": "at most ", ">=": "at least "}[self.relation]
        return f"{sign}{number(self.expected)}"

    @property
    def found(self) -> str:
        """The measured value with its error, with enough digits to tell a failed one from its limit."""
        limits = (self.expected - self.tolerance, self.expected + self.tolerance)
        digits = 4
        while (
            not self.ok
            and digits < _DIGITS_MAX
            and any(number(self.measured, digits) == number(limit, digits) for limit in limits)
        ):
            digits += 1
        return number(self.measured, digits) + (f" ± {self.error:.1g}" if self.error is not None else "")

    @property
    def allowed(self) -> str:
        """The tolerance in words."""
        sign = {"=": "±", "<=": "+", ">=": "-"}[self.relation]
        return f"{sign} {number(self.tolerance)}" if self.tolerance else "none"


def row(
    quantity: str,
    measured: float,
    expected: float,
    tolerance: float,
    source: str,
    *,
    relation: str = "=",
    error: float | None = None,
    group: str = "",
) -> Row:
    """Compare a measurement with what was expected. One that is not finite fails."""
    if relation not in ("=", "<=", ">="):
        raise ValueError(f"row {quantity!r}: relation {relation!r}; it is =, <= or >=")
    low = -math.inf if relation == "<=" else expected - tolerance
    high = math.inf if relation == ">=" else expected + tolerance
    ok = math.isfinite(measured) and low <= measured <= high
    return Row(quantity, expected, tolerance, measured, source, ok, relation, error, group)


def worst(values: Iterable[float]) -> float:
    """The largest; NaN, which no row passes, where one of them is, or where there are none."""
    found = list(values)
    return max(found) if found and not any(map(math.isnan, found)) else math.nan


@dataclass(frozen=True, slots=True)
class Table:
    """A table to be shown. Nothing in it passes or fails."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def prose(self) -> frozenset[int]:
        """The columns of sentences, which begin at the left; numbers end at the right."""
        return frozenset(
            at
            for cells in self.rows
            for at, cell in enumerate(cells)
            if len(_WORD.findall(cell)) >= _PROSE_WORDS
        )


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture (an SVG document) with its caption."""

    name: str
    caption: str
    svg: str


@dataclass(slots=True)
class Report:
    """The results of a recipe, as they are shown and written."""

    name: str
    title: str
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every number lies within its tolerance."""
        return all(r.ok for r in self.rows)

    def print(self, console: Console) -> None:
        """Print every number beside the expected one, then the tables and the notes."""
        table = RichTable(title=self.title, title_justify="left", header_style="bold")
        table.add_column("quantity", overflow="fold")
        for name in ("expected", "measured", "tolerance"):
            table.add_column(name, justify="right")
        table.add_column("")
        group = ""
        for r in self.rows:
            if r.group != group:
                group = r.group
                table.add_section()
                table.add_row(f"[bold]{group}[/bold]", "", "", "", "")
            mark = "[green]pass[/green]" if r.ok else "[bold red]FAIL[/bold red]"
            table.add_row(r.quantity, r.wanted, r.found, r.allowed, mark)
        console.print(table)
        for shown in self.tables:
            console.print(_rich(shown, ranges=console.width >= _WIDE))
        for note in self.notes:
            console.print(f"· {note}", style="dim", highlight=False)
        failed = sum(not r.ok for r in self.rows)
        verdict = f"[bold red]{failed} fail[/bold red]" if failed else "[green]all pass[/green]"
        console.print(f"{len(self.rows)} numbers compared, {verdict}.")
        for path in self.files:
            console.print(f"{path}", soft_wrap=True)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values (``FORMAT``). Numbers that are not finite become ``None``."""
        plain: dict[str, Any] = _plain(
            {
                "format": FORMAT,
                "recipe": self.name,
                "title": self.title,
                "ok": self.ok,
                "settings": self.settings,
                "rows": [asdict(r) for r in self.rows],
                "tables": [asdict(t) for t in self.tables],
                "notes": self.notes,
                "data": self.data,
                "files": [str(path) for path in self.files],
            }
        )
        return plain

    def write(self, out: Path) -> None:
        """Write ``results.json``, ``index.html`` and the figures to the folder ``out``, and delete the cache
        of parts, which is of no more use.
        """
        out.mkdir(parents=True, exist_ok=True)
        self.files = [out / "index.html", out / "results.json"]
        for figure in self.figures:
            self.files.append(out / f"{figure.name}.svg")
            self.files[-1].write_text(figure.svg, "utf-8")
        (out / "results.json").write_text(json.dumps(self.to_json(), indent=1, allow_nan=False), "utf-8")
        (out / "index.html").write_text(_page(self), "utf-8")
        ResultCache.of(out).forget()


def require_counts(seeds: int, jobs: int) -> None:
    """Check a recipe's arguments. Raises ValueError: ``seeds`` or ``jobs`` is below 1."""
    if seeds < 1 or jobs < 1:
        raise ValueError(f"reproduce: seeds is {seeds} and jobs is {jobs}; both must be 1 or more")


def number(x: float, digits: int = 4) -> str:
    """A number with so many significant digits, one less where it has an exponent."""
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    return f"{x:.{digits - 2}e}" if abs(x) < 1e-4 or abs(x) >= 1e5 else f"{x:.{digits}g}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _rich(shown: Table, ranges: bool) -> RichTable:
    """A table for a terminal. ranges: show the ranges in brackets behind numbers."""
    table = RichTable(
        title=shown.title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for i, column in enumerate(shown.columns):
        if i == 0:
            table.add_column(column, min_width=16)
        else:
            justify: Literal["left", "right"] = "left" if i in shown.prose else "right"
            table.add_column(column, justify=justify, overflow="fold")
    for cells in shown.rows:
        table.add_row(*(cell if ranges else _RANGE.sub("", cell) for cell in cells))
    return table


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1b1f24;max-width:1080px;margin:2.5rem auto;padding:0 1.2rem}
h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:2.2rem 0 .6rem}p.sub{color:#57606a;margin:0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.28rem .6rem;border-bottom:1px solid #e6e9ed;text-align:right}
th:first-child,td:first-child,.prose{text-align:left}
th{color:#57606a;font-weight:600}tr.group td{font-weight:600;padding-top:1rem;border-bottom-color:#b8c0c8}
.pass{color:#1a7f37}.fail{color:#cf222e;font-weight:700}td.src{color:#57606a;font-size:.85em;text-align:left}
.rows th:last-child{text-align:left}
.rows td+td:not(.src){white-space:nowrap}
figure{margin:1.5rem 0}figure svg{width:100%;height:auto}figcaption,li{color:#57606a}
"""


def _page(report: Report) -> str:
    e = html.escape
    failed = sum(not r.ok for r in report.rows)
    verdict = f'<span class="fail">{failed} fail</span>' if failed else '<span class="pass">all pass</span>'
    said = [f"{k} {v}" for k, v in report.settings.items() if k != "quick"]
    settings = ", ".join(said + ["quick form"] * bool(report.settings.get("quick")))
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{e(report.title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{e(report.title)}</h1>"
        f'<p class="sub">{len(report.rows)} numbers compared, {verdict} · {e(settings)}</p>'
    ]
    for figure in report.figures:
        svg = figure.svg[figure.svg.index("<svg") :]
        parts.append(f"<figure>{svg}<figcaption>{e(figure.caption)}</figcaption></figure>")
    parts.append("<h2>Measured beside expected</h2>" + _rows_html(report.rows))
    for table in report.tables:
        body = [_tr(cells, left=table.prose) for cells in table.rows]
        head = _tr(table.columns, "th", table.prose)
        parts.append(f"<h2>{e(table.title)}</h2><table>{head}{''.join(body)}</table>")
    if report.notes:
        parts.append("<h2>Notes</h2><ul>" + "".join(f"<li>{e(n)}</li>" for n in report.notes) + "</ul>")
    return "\n".join(parts) + "\n</html>\n"


def _rows_html(rows: Sequence[Row]) -> str:
    parts = [_tr(("quantity", "expected", "measured", "tolerance", "", "source"), "th")]
    group = ""
    for r in rows:
        if r.group != group:
            group = r.group
            parts.append(f'<tr class="group"><td colspan="6">{html.escape(group)}</td></tr>')
        cells = "".join(f"<td>{html.escape(c)}</td>" for c in (r.quantity, r.wanted, r.found, r.allowed))
        verdict = '<td class="pass">pass</td>' if r.ok else '<td class="fail">FAIL</td>'
        parts.append(f'<tr>{cells}{verdict}<td class="src">{html.escape(r.source)}</td></tr>')
    return f'<table class="rows">{"".join(parts)}</table>'


def _tr(cells: Sequence[str], tag: str = "td", left: Collection[int] = ()) -> str:
    shown = [
        f"<{tag}{' class=prose' * (i in left)}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(cells)
    ]
    return "<tr>" + "".join(shown) + "</tr>"
