"""Tables of measured figures, made from the files in ``benchmarks/results``.

``python tools/figures.py`` writes them between the marks in README.md and docs, from the sentences in
``tools/figures.toml``. ``--check`` exits with 1 where a page differs from what the files give, where a
sentence has a number that no file gives, or where a stored result's code is not named; it needs no git.
``--age`` lists by git which results are older than their code, and exits with 1 where one is. Comments,
docstrings and layout are no code there.

A sentence has placeholders: an expression in Python's syntax, then a colon and Python's format.

- ``{storms.rows(method="rps").seconds:.1f}``: a field of ``storms.json``. A call on a list of rows selects
  those with these fields (``line=not "x"``: those without). Of one row that is left the field is a value, of
  several a list.
- ``{span(churn.join_s):.1f}`` is "1.2 to 3.0"; the functions are ``FUNCTIONS``, beside ``+ - * /``.
- ``{x <= 1.4}`` is "(goal 1.4)", or "(goal 1.4, missed)"; ``{x <= 1.01:1 %}`` names the goal otherwise.
- ``{'8 kills'}`` is a setting, in these words. ``{unstored('8 s')}`` is "8 s (not stored)".
- A block of a result that has ``to_come = true`` (``result = NAME``) says that it was not measured yet.
- ``let.name`` is a name for an expression; other fields of a row or a block are names for texts and numbers.
- In a block's text ``{rows}`` are its rows, and ``{at}`` is the commit at which what is read was measured.

Other digits in a sentence are refused. ``holds`` are expressions that must be true for the words to be.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import re
import statistics
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path("benchmarks") / "results"
TABLE = Path("tools") / "figures.toml"
PLACEHOLDER = re.compile(r"""\{((?:"[^"]*"|'[^']*'|[^{}"':])*)(?::([^{}]*))?\}""")
AT, ROWS = "\0at\0", "\0rows\0"
TWO_COLUMNS = "| | |\n|---|---|\n{rows}"
NOT_STORED, NOT_MEASURED = "not stored", "Not measured yet"
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
FIELDS = {"name", "file", "text", "row", "what", "says", "holds", "let", "unstored", "result"}
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.LtE: operator.le,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.Gt: operator.gt,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


Source = tuple[str, tuple[str, str]]
"""A file, and what is known of a part's commit: "at" or "stored at", and which."""


class Wrong(Exception):
    """The table of sentences, a page or a result is not as it should be; the text says what to do."""


MISREAD = (
    Wrong,
    AttributeError,
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    ZeroDivisionError,
    RecursionError,
)
"""What comes of an expression that takes a result for another than it is."""


@dataclass(frozen=True)
class Span:
    """From the lowest to the highest."""

    low: float
    high: float


@dataclass(frozen=True)
class Words:
    """Text that is printed as it is."""

    text: str


# --- what expressions may call ---------------------------------------------------------------------------


def flat(value: Any) -> list[Any]:
    """Numbers and texts of nested lists."""
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, list) else [value]


def numbers(value: Any) -> list[Any]:
    """The same, and at least one."""
    if not (found := flat(value)):
        raise Wrong("no value is left")
    return found


def of_all(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of all numbers in what it is given."""
    return lambda *given: function(numbers(list(given)))


def where(rows: dict[str, Any], prefix: str = "") -> list[Any]:
    """The values of a mapping whose names begin so."""
    return [value for name, value in rows.items() if name.startswith(prefix)]


def column(report: dict[str, Any], title: str, *place: str) -> list[list[float]]:
    """The numbers in each cell of a recipe's table, in one column.

    title: how the table's begins. place: how the rows begin that count, then the column.
    """
    *row, name = place
    tables = [table for table in report["tables"] if table["title"].startswith(title)]
    if len(tables) != 1 or name not in tables[0]["columns"]:
        raise Wrong(f"{len(tables)} tables begin with {title!r}, or none has a column {name!r}")
    at = tables[0]["columns"].index(name)
    rows = [cells for cells in tables[0]["rows"] if cells[: len(row)] == row]
    found = [[float(text.replace(",", "")) for text in NUMBER.findall(cells[at])] for cells in rows]
    if not found or not all(found):
        raise Wrong(f"no row of {title!r} that begins with {row}, or no number in its column {name!r}")
    return found


def cells(report: dict[str, Any], title: str, *place: str) -> list[float]:
    """The numbers in one cell."""
    (found,) = column(report, title, *place)
    return found


def judged(report: dict[str, Any]) -> Words:
    """How many of a recipe's numbers are within their tolerance."""
    passed, failed = report["passed"], report["failed"]
    return Words(
        f"{passed + failed} numbers compared, {'all' if not failed else passed} within their tolerance"
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": of_all(min),
    "max": of_all(max),
    "sum": of_all(sum),
    "mean": of_all(statistics.fmean),
    "sorted": of_all(sorted),
    "span": of_all(lambda found: Span(min(found), max(found))),
    "size": lambda value: len(flat(value)),
    "abs": lambda value: each(lambda one, _: abs(one), value, 0),
    "dict": dict,
    "where": where,
    "larger": lambda left, right: each(max, left, right),
    "column": lambda *place: [found[0] for found in column(*place)],
    "cells": cells,
    "cell": lambda *place: cells(*place)[0],
    "judged": judged,
    "unstored": lambda text: Words(f"{text} ({NOT_STORED})"),
}


def each(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Of two values, or of each value of a list with the other one, or of two lists in step."""
    if isinstance(left, list) and isinstance(right, list):
        return [each(function, a, b) for a, b in zip(left, right, strict=True)]
    if isinstance(left, list):
        return [each(function, a, right) for a in left]
    if isinstance(right, list):
        return [each(function, left, b) for b in right]
    return function(left, right)


# --- stored results --------------------------------------------------------------------------------------


class Results:
    """The stored files, and of which commit each part of one is.

    A part is of the commit that it or the nearest part around it names. What names none, as files from before
    ``benchmarks/stored.py`` do, is of the commit that stored it: ``stored_at`` in the table.
    """

    def __init__(self, root: Path, table: dict[str, Any]) -> None:
        self.root = root
        self.entries: dict[str, dict[str, Any]] = table
        self.documents = {
            path.stem: json.loads(path.read_text("utf-8")) for path in sorted((root / RESULTS).glob("*.json"))
        }
        self._commit: dict[int, str | None] = {}
        self._file: dict[int, str] = {}
        for name, document in self.documents.items():
            self._learn(name, document, None)

    def _learn(self, name: str, part: Any, commit: str | None) -> None:
        if isinstance(part, dict):
            commit = part.get("commit", commit)
            self._commit[id(part)], self._file[id(part)] = commit, name
            part = list(part.values())
        if isinstance(part, list):
            for item in part:
                self._learn(name, item, commit)

    def source(self, part: dict[str, Any]) -> Source | None:
        """File and commit of a part; ``None``: it is no file's."""
        if (name := self._file.get(id(part))) is None:
            return None
        commit, stored = self._commit[id(part)], self.entries.get(name, {}).get("stored_at")
        if commit is None and stored is None:
            raise Wrong(f"{name}.json names no commit: run it anew, or give stored_at in {TABLE}")
        return name, ("at", short(commit)) if commit is not None else ("stored at", str(stored))

    def is_to_come(self, name: str) -> bool:
        """Whether a result has a command, and was not measured yet."""
        return name not in self.documents and bool(self.entries.get(name, {}).get("to_come"))

    def script(self, name: str) -> str:
        """The benchmark that measures a result: its command's, or the one of the result's name."""
        found = re.search(r"\bbenchmarks[/.](\w+)", " ".join(self.entries.get(name, {}).get("measure", ())))
        return f"{found[1] if found else name}.py"

    def code(self, name: str) -> list[str]:
        """The paths whose change makes a result old."""
        paths = list(self.entries.get(name, {}).get("code", ()))
        script, recipe = (
            f"benchmarks/{self.script(name)}",
            f"src/ragtag/recipes/{name.removeprefix('reproduce_')}",
        )
        own = recipe if name.startswith("reproduce_") else script
        return [*((own,) if (self.root / own).exists() else ()), *paths]

    def without(self, name: str) -> list[str]:
        """Paths below those that a result does not run, so that their change does not make it old."""
        return list(self.entries.get(name, {}).get("without", ()))

    def wrong(self) -> Iterator[str]:
        """What the table lacks or has too much."""
        for name in sorted(self.documents.keys() - self.entries.keys()):
            yield f"{name}.json: name its code in {TABLE}, [results.{name}]"
        for name, entry in self.entries.items():
            if name not in self.documents:
                if not self.is_to_come(name):
                    yield f"[results.{name}]: there is no {RESULTS / name}.json"
                continue
            if entry.get("to_come"):
                yield f"[results.{name}]: {RESULTS / name}.json is there; take to_come away"
            for path in entry.get("code", ()):
                if not (self.root / path).exists():
                    yield f"[results.{name}]: its code {path} does not exist"
            for path in self.without(name):
                if not (self.root / path).exists() or not any(within([path], of) for of in self.code(name)):
                    yield f"[results.{name}]: {path}, which it is without, is not in its code"
            if not entry.get("code"):
                yield f"[results.{name}]: it names no code"
            if not entry.get("measure"):
                yield f"[results.{name}]: it names no command that measures it"
            silent = nameless(self.documents[name]) is not None
            if silent and not commits(self.documents[name]) and "stored_at" not in entry:
                yield f"{name}.json names no commit: run it anew, or give stored_at in {TABLE}"
            if not silent and "stored_at" in entry:
                yield f"[results.{name}]: the file names its commit; take stored_at away"


def short(commit: str) -> str:
    """Seven digits, and the mark of a changed tree."""
    return re.sub(r"^([0-9a-f]{7})[0-9a-f]{5,33}", r"\1", commit)


def commits(part: Any) -> list[str]:
    """All that a document names, in its order."""
    found = [part["commit"]] if isinstance(part, dict) and "commit" in part else []
    for item in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        found += commits(item)
    return list(dict.fromkeys(found))


def nameless(part: Any) -> Any:
    """A document without the parts that name a commit; ``None``: nothing is left of it."""
    if isinstance(part, dict):
        if "commit" in part:
            return None
        return {n: k for n, v in part.items() if (k := nameless(v)) is not None} or None
    if isinstance(part, list):
        return [kept for item in part if (kept := nameless(item)) is not None] or None
    return part


def contains(whole: Any, part: Any) -> bool:
    """Whether all of one document's fields are in another."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in whole and contains(whole[name], value) for name, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return all(any(contains(other, item) for other in whole) for item in part)
    return bool(whole == part)


# --- sentences -------------------------------------------------------------------------------------------


@dataclass
class Sentence:
    """Text with its placeholders filled in, and what it was read from.

    variables: names of texts and numbers.
    aliases: names of expressions.
    sources: file and commit, in the order of reading.
    """

    results: Results
    variables: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    sources: dict[Source, None] = field(default_factory=dict)

    def filled(self, template: str, free: bool = False) -> str:
        """The text. free: digits that no file gives are allowed."""
        bare = PLACEHOLDER.sub("", template)
        if "{" in bare or "}" in bare:
            raise Wrong(f"a placeholder is not closed, or is none: {template}")
        if not free and (typed := re.search(r"\S*\d\S*", bare)):
            raise Wrong(
                f"{typed[0]!r} comes from no result: take it from one, write it as a setting, {{'...'}}, "
                "or as {unstored('...')}"
            )
        return PLACEHOLDER.sub(lambda found: self._placeholder(found[1], found[2]), template)

    def holds(self, expression: str) -> bool:
        """Whether a comparison is true of all its values."""
        if not isinstance(node := self._parsed(expression), ast.Compare):
            raise Wrong(f"no comparison: {expression}")
        try:
            return self._compared(node)
        except MISREAD as error:
            raise Wrong(f"{expression}: {error}") from None

    def check(self, conditions: Iterable[str]) -> None:
        """Hold the words against what must be true for them.

        Raises:
            Wrong: one is not.
        """
        for expression in conditions:
            if not self.holds(expression):
                raise Wrong(f"its words are true no more, since this is not: {expression}")

    def _parsed(self, expression: str) -> ast.expr:
        try:
            return ast.parse(expression.strip(), mode="eval").body
        except SyntaxError as error:
            raise Wrong(f"{expression}: {error.msg}") from None

    def _placeholder(self, expression: str, form: str | None) -> str:
        if (mark := {"at": AT, "rows": ROWS}.get(expression)) is not None:
            return mark
        node = self._parsed(expression)
        try:
            if isinstance(node, ast.Compare):
                met = self._compared(node)
                if form is None and len(node.ops) > 1:
                    raise Wrong("a goal on both sides needs words after a colon")
                goal = form if form is not None else shown(self.value(node.comparators[-1]), "g")
                return f"(goal {goal}{'' if met else ', missed'})"
            return shown(self.value(node), form or "")
        except MISREAD as error:
            raise Wrong(f"{{{expression}}}: {error}") from None

    def _compared(self, node: ast.Compare) -> bool:
        values = [self.value(one) for one in (node.left, *node.comparators)]
        sides = zip(node.ops, values, values[1:], strict=False)
        answers = [each(OPERATORS[type(sign)], left, right) for sign, left, right in sides]
        return all(numbers(answers))

    def value(self, node: ast.expr) -> Any:
        """Of an expression; only fields, rows, numbers, texts and ``FUNCTIONS`` are known."""
        match node:
            case ast.Constant(value=str() | int() | float() as value):
                return value
            case ast.Name(id=name):
                if name in self.variables:
                    return self.variables[name]
                if name in self.aliases:
                    return self.value(self._parsed(self.aliases[name]))
                if name not in self.results.documents:
                    raise Wrong(f"there is no {RESULTS / name}.json")
                return self.results.documents[name]
            case ast.Attribute(value=of, attr=name):
                return self._field(self.value(of), name)
            case ast.Subscript(value=of, slice=at):
                held, key = self.value(of), self.value(at)
                in_row = isinstance(held, list) and isinstance(key, int)
                return held[key] if in_row else self._field(held, key)
            case ast.List(elts=items):
                return [self.value(item) for item in items]
            case ast.UnaryOp(op=ast.USub(), operand=of):
                return each(operator.mul, self.value(of), -1)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
                return each(OPERATORS[type(sign)], self.value(left), self.value(right))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in FUNCTIONS:
                given = [self.value(arg) for arg in args]
                self._note(given)
                return FUNCTIONS[name](*given, **{str(one.arg): self.value(one.value) for one in keywords})
            case ast.Call(func=of, args=[], keywords=keywords):
                return self._selected(self.value(of), keywords)
        raise Wrong(f"{ast.unparse(node)} is not understood")

    def _field(self, held: Any, name: str) -> Any:
        """Of a mapping, or of those mappings of a list that have it."""
        if isinstance(held, list):
            found = [self._field(item, name) for item in flat(held) if name in item]
            if not found:
                raise Wrong(f"none of {len(held)} rows has {name!r}")
            return found[0] if len(found) == 1 else found
        if not isinstance(held, dict) or name not in held:
            raise Wrong(f"there is no {name!r}")
        self._note([held], leaf=held[name])
        return held[name]

    def _selected(self, rows: Any, wanted: list[ast.keyword]) -> list[Any]:
        for one in wanted:
            match one.value:
                case ast.UnaryOp(op=ast.Not(), operand=of):
                    value, negated = self.value(of), True
                case of:
                    value, negated = self.value(of), False
            rows = [row for row in flat(rows) if one.arg in row and (row[one.arg] == value) != negated]
            if not rows:
                raise Wrong(f"no row has {ast.unparse(one)}")
        return list(rows)

    def _note(self, parts: list[Any], leaf: Any = None) -> None:
        """Remember where figures were read. leaf: the field's value; with parts of its own it is none."""
        if any(isinstance(item, dict) for item in [leaf, *(leaf if isinstance(leaf, list) else ())]):
            return
        for part in flat(parts):
            if isinstance(part, dict) and (source := self.results.source(part)):
                self.sources[source] = None

    def at(self) -> str:
        """The commits at which what was read was measured, and those at which it was stored."""
        by: dict[str, dict[str, None]] = {}
        for _, (how, commit) in self.sources:
            by.setdefault(how, {})[commit] = None
        return ", ".join(f"{how} {shown(list(found), '')}" for how, found in by.items())

    def end(self) -> str:
        """What a row ends with: the scripts that measured it, and the commits."""
        names = dict.fromkeys(name for name, _ in self.sources if not name.startswith("reproduce_"))
        own = dict.fromkeys(map(self.results.script, names))
        scripts = [f"`{'' if i else 'benchmarks/'}{name}`" for i, name in enumerate(own)]
        return f"({', '.join([*scripts, self.at()])})"


def shown(value: Any, form: str) -> str:
    """A value by Python's format, a list with "and", a span with "to"."""
    match value:
        case Words(text=text) | str(text):
            return text
        case Span(low=low, high=high):
            ends = [shown(end, form) for end in (low, high)]
            return ends[0] if ends[0] == ends[1] else f"{ends[0].removesuffix(' %')} to {ends[1]}"
        case list():
            *most, last = [shown(item, form) for item in numbers(value)]
            return f"{', '.join(most)} and {last}" if most else last
        case int() | float() if not isinstance(value, bool):
            if not form and value != int(value):
                raise Wrong(f"{value} needs a format, such as :.1f")
            text = format(value, form)
            return re.sub(r"e([-+])0*(?=\d)", r"e\1", text).replace("%", " %")
    raise Wrong(f"{type(value).__name__} is no figure")


# --- pages -----------------------------------------------------------------------------------------------


def variables(of: dict[str, Any]) -> dict[str, Any]:
    """The names that a block or a row gives to texts and numbers."""
    return {name: value for name, value in of.items() if name not in FIELDS}


def row_of(row: dict[str, Any], block: dict[str, Any], whole: Sentence) -> str:
    """One line of a table. What it was read from is added to the whole block's sources."""
    template, reason = row.get("says", block.get("says", "")), row.get("unstored")
    sentence = Sentence(whole.results, variables(block | row), whole.aliases | row.get("let", {}))
    says = sentence.filled(" ".join(template.split()), free=reason is not None)
    sentence.check(row.get("holds", ()))
    if reason is None and not sentence.sources:
        raise Wrong("it reads no result: give a figure's field, or say why there is none (unstored)")
    whole.sources |= sentence.sources
    if "text" not in block:
        says = f"{says} ({NOT_STORED}: {reason})" if reason is not None else f"{says} {sentence.end()}"
    return f"| {' '.join(row['what'].split())} | {says} |"


def made(block: dict[str, Any], results: Results) -> str:
    """What stands between a block's marks: its text, in which ``{rows}`` are its rows.

    Raises:
        Wrong: a result has no such field, a number has no source, or words are no longer true.
    """
    if results.is_to_come(name := block.get("result", "")):
        return f"{NOT_MEASURED}: `python tools/measure.py {name}`."
    whole, lines, reason = (
        Sentence(results, variables(block), block.get("let", {})),
        [],
        block.get("unstored"),
    )
    for row in block.get("row", ()):
        try:
            lines.append(row_of(row, block, whole))
        except Wrong as error:
            what = " ".join(row.get("what", "").split())
            raise Wrong(f"{block['name']}, {what!r}: {error}") from None
    try:
        text = whole.filled(block.get("text", TWO_COLUMNS).strip(), free=reason is not None)
        whole.check(block.get("holds", ()))
    except Wrong as error:
        raise Wrong(f"{block['name']}: {error}") from None
    text = wrapped(text.replace(AT, whole.at())).replace(ROWS, "\n".join(lines))
    return text if reason is None else f"{text}\n\n{NOT_STORED.capitalize()}: {reason}."


def wrapped(text: str) -> str:
    """Paragraphs and points of a list as lines of a page's length; lines of a table as they are."""
    out: list[str] = []
    for line in text.splitlines():
        joins = out and out[-1] and line.strip() and not line.startswith(("|", "- ", ROWS, "#"))
        if joins and not out[-1].startswith("|"):
            out[-1] += " " + line.strip()
        else:
            out.append(line)
    wrap = textwrap.TextWrapper(110, break_long_words=False, break_on_hyphens=False)
    for at, line in enumerate(out):
        if not line.startswith("|"):
            wrap.subsequent_indent = "  " if line.startswith("- ") else ""
            out[at] = wrap.fill(line.replace(" %", "\1%")).replace("\1", " ")
    return "\n".join(out)


def marks(name: str) -> tuple[str, str]:
    """Between which a block stands in its page."""
    return (
        f"<!-- figures {name}: made by tools/figures.py from tools/figures.toml -->",
        f"<!-- end of {name} -->",
    )


def parts(page: str, block: dict[str, Any]) -> tuple[str, str, str]:
    """What is before a block in its page, the block, and what is behind it."""
    begin, end = marks(block["name"])
    if page.count(begin) != 1 or page.count(end) != 1:
        raise Wrong(f"{block['file']} does not have one {begin!r} and one {end!r}")
    before, rest = page.split(begin)
    old, behind = rest.split(end)
    return before + begin + "\n\n", old.strip(), "\n\n" + end + behind


def first_cells(text: str) -> list[str]:
    """Of the rows of a table."""
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]


class Figures:
    """The table of sentences, and the pages that it makes."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        table = tomllib.loads((root / TABLE).read_text("utf-8"))
        self.results = Results(root, table["results"])
        self.blocks: list[dict[str, Any]] = table["block"]

    def check(self) -> list[str]:
        """What is wrong, in words; nothing where pages are as the results say."""
        wrong = list(self.results.wrong())
        for block in self.blocks:
            try:
                _, old, _ = parts((self.root / block["file"]).read_text("utf-8"), block)
                wanted = made(block, self.results)
            except Wrong as error:
                wrong.append(str(error))
                continue
            is_there, is_made = old.splitlines(), wanted.splitlines()
            wrong += [
                f"{block['file']} has, and no result gives: {line}"
                for line in is_there
                if line not in is_made
            ]
            wrong += [f"{block['file']} lacks: {line}" for line in is_made if line not in is_there]
            if not wrong and is_there != is_made:
                wrong.append(f"{block['file']}: the lines of {block['name']} stand in another order")
        return wrong

    def write(self) -> list[str]:
        """Write the pages, and name those that changed.

        Raises:
            Wrong: as ``made``; or a row in a page has no entry, and would be lost.
        """
        changed = []
        for block in self.blocks:
            path = self.root / block["file"]
            page = path.read_text("utf-8")
            before, old, behind = parts(page, block)
            wanted = made(block, self.results)
            for what in first_cells(old):
                if what not in first_cells(wanted):
                    raise Wrong(
                        f"{block['file']}: a row has no entry in {TABLE}; write one, or delete it: {what}"
                    )
            if (new := before + wanted + behind) != page:
                path.write_text(new, "utf-8")
                changed.append(block["file"])
        return list(dict.fromkeys(changed))

    def age(self) -> tuple[list[str], list[str]]:
        """Which results are older than their code, and which are not, in words; by git."""
        old, new = [], []
        for name, document in self.results.documents.items():
            stored = self.results.entries.get(name, {}).get("stored_at")
            named = [(short(commit), "at") for commit in commits(document)]
            for commit, how in [*named, *([(stored, "stored at")] if stored else [])]:
                what = f"{name}, {how} {commit}"
                if how != "at" and (doubt := self._not_stored(name, commit)):
                    old.append(f"{what}: {doubt}")
                    continue
                clean = re.split(r"[-+]", commit)[0]
                left_out = (f":(exclude){path}" for path in self.results.without(name))
                done = self._git("diff", "--name-only", clean, "--", *self.results.code(name), *left_out)
                files = [file for file in done.stdout.splitlines() if self._is_other_code(file, clean)]
                if done.returncode:
                    old.append(f"{what}: git cannot compare: {done.stderr.strip().splitlines()[0]}")
                elif files:
                    by = [f"{n} in {path}" for path in self.results.code(name) if (n := within(files, path))]
                    old.append(f"{what}: {len(files)} files of its code have changed since ({', '.join(by)})")
                else:
                    new.append(what)
        return old, new

    def _is_other_code(self, file: str, commit: str) -> bool:
        """Whether a file that differs from a commit's does so in more than its words."""
        path, then = self.root / file, self._git("show", f"{commit}:{file}")
        if path.suffix != ".py" or then.returncode or not path.exists():
            return True
        return wordless(then.stdout) != wordless(path.read_text("utf-8"))

    def _not_stored(self, name: str, commit: str) -> str:
        """Why the commit is not that at which these figures were stored."""
        path, now = RESULTS / f"{name}.json", nameless(self.results.documents[name])
        then = [self._git("show", f"{commit}{parent}:{path}") for parent in ("", "^")]
        had = [not done.returncode and contains(json.loads(done.stdout), now) for done in then]
        if not had[0]:
            return f"{path} does not have these figures there"
        return f"{path} had these figures before" if had[1] else ""

    def _git(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["git", *words]
        return subprocess.run(
            command, cwd=self.root, capture_output=True, text=True, check=False, timeout=60.0
        )


@cache  # most results are of the same files
def wordless(source: str) -> str:
    """What Python runs of a source: without comments, docstrings, free-standing texts and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [one for one in node.body if not is_text(one)]
    return ast.dump(tree)


def is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a text and nothing else."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def within(files: list[str], path: str) -> int:
    """How many files are a path, or in it."""
    return sum(file == path or file.startswith(path.rstrip("/") + "/") for file in files)


def main(given: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", action="store_true", help="write nothing; 1 where a page is not as it should be"
    )
    mode.add_argument(
        "--age", action="store_true", help="which results are older than their code; 1 where one is"
    )
    asked = parser.parse_args(given)
    figures = Figures()
    if asked.age:
        old, new = figures.age()
        print(
            "\n".join(
                [*(f"older than its code: {one}" for one in old), *(f"as its code: {one}" for one in new)]
            )
        )
        return 1 if old else 0
    if asked.check:
        wrong = figures.check()
        print("\n".join(wrong) or "pages have the figures of the stored results")
        return 1 if wrong else 0
    try:
        changed = figures.write()
    except Wrong as error:
        print(error, file=sys.stderr)
        return 1
    print(f"written: {', '.join(changed)}" if changed else "pages are as the stored results say")
    return 0


if __name__ == "__main__":
    sys.exit(main())
