"""Mutates the code by rule, and counts what the tests do not notice: mutmut, on a sample that a seed draws.

    python tools/mutants.py                         # every room of tools/mutants.toml; an hour or more
    python tools/mutants.py codecs optim --draw 50  # these, with so many mutants of each
    python tools/mutants.py codecs --store          # and write benchmarks/results/mutants.json

``make mutants ROOMS="codecs optim"`` installs mutmut first (``pip install ragtag[mutants]``). The tree is
copied, all mutants of a room are made, and some are drawn, each with the same chance. For each of them the
tests run that mutmut saw reach its function, until one fails. A mutant that changes only the words of an
error is not drawn. Decorated functions (properties, numba's kernels) and constants of modules are not
mutated: mutmut cannot.

A survivor needs a test that kills it, or a reason in ``tools/mutants.toml``; ends with 1 where one has
neither.
``--reasons`` runs nothing: it takes the reasons of stored survivors anew from there.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sabotage import COPIED, ROOT, copied

sys.path.insert(0, str(ROOT))  # first: other packages (Opacus) bring a package named benchmarks, too
from benchmarks.stored import how, machine, pace
from ragtag.core import seed as random

TABLE = ROOT / "tools" / "mutants.toml"
STORED = ROOT / "benchmarks" / "results" / "mutants.json"
UNSEEN = (0, 5, 33)
"""Exit codes of a mutant that lives: all tests passed, or none reaches it (5, 33)."""
TIMED_OUT = (36, -24, 24, 152, 255)
"""Exit codes of a mutant that was stopped: it loops, so it was seen."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one function.

    name: mutmut's, unique in its room.
    file: the module, below the root.
    function: with its class.
    change: the lines that differ, as Python's ``ast.unparse`` writes them, "-" before and "+" after.
    """

    name: str
    file: str
    function: str
    change: str


class Wordless(ast.NodeTransformer):
    """Takes the words out of errors."""

    def visit_Raise(self, node: ast.Raise) -> ast.Raise:
        """Without the arguments of what is raised."""
        if isinstance(node.exc, ast.Call):
            return ast.Raise(ast.Call(node.exc.func, [], []), node.cause)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        """Without its message."""
        return ast.Assert(node.test, None)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Of a check of a whole number (``schedules.base.whole``) what is checked, not what it is called."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "whole":
            return ast.Call(node.func, node.args[1:3], node.keywords)
        return node


def changed(before: ast.FunctionDef, after: ast.FunctionDef) -> str:
    """The lines in which two forms of a function differ; empty: only in the words of an error."""
    texts = []
    for form in (before, after):
        same = ast.FunctionDef("f", form.args, form.body, [], form.returns, lineno=1)
        wordless = Wordless().visit(ast.parse(ast.unparse(ast.fix_missing_locations(same))))
        texts.append((ast.unparse(wordless).splitlines(), ast.unparse(same).splitlines()))
    if texts[0][0] == texts[1][0]:
        return ""
    lines = difflib.ndiff(texts[0][1], texts[1][1])
    return "\n".join(f"{line[0]} {line[2:].strip()}" for line in lines if line[0] in "-+")


def mutants_of(file: str, text: str) -> tuple[list[Mutant], int]:
    """What mutmut makes of a module, and how many of these change the words of an error only."""
    from mutmut.mutation.file_mutation import mutate_file_contents

    made = mutate_file_contents(file, text)
    forms = {node.name: node for node in ast.walk(ast.parse(made.code)) if isinstance(node, ast.FunctionDef)}
    module, found = file.removeprefix("src/").removesuffix(".py").replace("/", "."), []
    for name in made.mutant_names:
        base = name.rpartition("__mutmut_")[0]
        if change := changed(forms[f"{base}__mutmut_orig"], forms[name]):
            function = base.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
            found.append(Mutant(f"{module}.{name}", file, function, change))
    return found, len(made.mutant_names) - len(found)


def drawn(mutants: Sequence[Mutant], n: int, room: str, number: int) -> list[Mutant]:
    """``n`` of them without repetition, each with the same chance. number: the seed."""
    order = random.permutation(random.stream_key(number, f"mutants/{room}"), len(mutants))
    return [mutants[at] for at in sorted(order[:n])]


def reason(mutant: Mutant, reasons: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The entry that says why a mutant may live, if there is one."""
    for one in reasons:
        lines = [line.strip() for line in one["change"].strip().splitlines()]
        if one["file"] == mutant.file and lines == mutant.change.splitlines():
            return one
    return None


def mutmut(tree: Path, *words: str, limit_s: float) -> str:
    """Run mutmut in a tree. Returns what it printed. Raises RuntimeError: it ended otherwise than with 0."""
    paths = os.pathsep.join((str(tree / "mutants" / "src"), str(tree / "mutants")))
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mutmut", *words]
    done = subprocess.run(
        command, cwd=tree, env=env, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).replace("\r", "\n").splitlines()[-30:])
        raise RuntimeError(f"mutmut {words[0]} ended with {done.returncode}:\n{said}")
    return done.stdout


def prepared(tree: Path, files: Sequence[str], tests: Sequence[str]) -> None:
    """A copy of this tree that tells mutmut what to mutate, and which tests to run."""
    copied(tree)
    (tree / "mutants" / "src").mkdir(
        parents=True
    )  # before Python starts: it does not look again where nothing was
    setting = {
        "source_paths": list(files),
        "also_copy": list(COPIED),
        "pytest_add_cli_args": ["-m", "not slow", "-p", "no:cacheprovider"],
        "pytest_add_cli_args_test_selection": list(tests),
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in setting.items()]
    with (tree / "pyproject.toml").open("a", encoding="utf-8") as table:
        table.write(
            "\n".join(["", "[tool.mutmut]", *lines, "timeout_multiplier = 4.0", "timeout_constant = 2.0"])
        )


def files_of(room: dict[str, Any], root: Path = ROOT) -> list[str]:
    """The modules of a room, below the root, without those that it leaves out."""
    found: list[Path] = []
    for name in room["code"]:
        found += sorted((root / name).rglob("*.py")) if (root / name).is_dir() else [root / name]
    names = [str(path.relative_to(root)) for path in found if path.name != "__init__.py"]
    return [name for name in names if name not in room.get("without", {})]


def run(name: str, table: dict[str, Any], n: int, number: int, limit_s: float) -> dict[str, Any]:
    """Make, draw and try the mutants of a room.

    Raises:
        RuntimeError: mutmut failed, for example because a test fails without any mutant.
    """
    room, began_s = table["room"][name], time.monotonic()
    files = files_of(room)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        prepared(tree, files, room["tests"])
        made = [mutants_of(file, (tree / file).read_text("utf-8")) for file in files]
        every = [mutant for mutants, _ in made for mutant in mutants]
        chosen = drawn(every, n, name, number)
        mutmut(tree, "run", "--max-children", "1", *(one.name for one in chosen), limit_s=limit_s)
        codes: dict[str, int | None] = {}
        for file in {one.file for one in chosen}:
            codes |= json.loads(Path(f"{tree / 'mutants' / file}.meta").read_text("utf-8"))[
                "exit_code_by_key"
            ]
    ended = {one: codes[one.name] for one in chosen}
    lived = [one for one in chosen if ended[one] in UNSEEN]
    return {
        "room": name,
        "mutants": len(every),
        "words_only": sum(words for _, words in made),
        "drawn": len(chosen),
        "seed": number,
        "killed": len(chosen) - len(lived),
        "of_these_timed_out": sum(code in TIMED_OUT for code in ended.values()),
        "equivalent": sum(bool((reason(one, table["survivor"]) or {}).get("equivalent")) for one in lived),
        "unexplained": sum(reason(one, table["survivor"]) is None for one in lived),
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        "modules": [
            counted(file, chosen, lived) for file in files if any(one.file == file for one in chosen)
        ],
        "survivors": [told(one, ended[one], table["survivor"]) for one in lived],
    }


def counted(file: str, chosen: Sequence[Mutant], lived: Sequence[Mutant]) -> dict[str, Any]:
    """A module's row."""
    n, left = (sum(one.file == file for one in some) for some in (chosen, lived))
    return {"module": file, "drawn": n, "killed": n - left}


def told(one: Mutant, code: int | None, reasons: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A survivor's row. reached: some test came through its function."""
    why = (reason(one, reasons) or {}).get("reason", "")
    at = {"module": one.file, "function": one.function, "change": one.change}
    return at | {"reached": code == 0, "reason": why}


def main(given: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    table = tomllib.loads(TABLE.read_text("utf-8"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(table['room'])}; none: all")
    parser.add_argument("--draw", type=int, default=150, help="mutants of each room (default: %(default)d)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)d)")
    parser.add_argument("--limit-min", type=float, default=60.0, help="of one room (default: %(default)g)")
    parser.add_argument("--store", action="store_true", help=f"write {STORED.relative_to(ROOT)}")
    parser.add_argument("--reasons", action="store_true", help="take those of stored survivors anew")
    asked = parser.parse_args(given)
    if asked.reasons:
        return explained(table["survivor"])
    if unknown := sorted(set(asked.rooms) - table["room"].keys()):
        parser.error(f"there is no room {', '.join(unknown)}; there are {', '.join(table['room'])}")
    if find_spec("mutmut") is None:
        parser.error("mutmut is not installed: pip install ragtag[mutants]")
    unexplained = 0
    for name in asked.rooms or table["room"]:
        at = how()
        found = run(name, table, asked.draw, asked.seed, 60.0 * asked.limit_min)
        print(
            f"{name}: {found['killed']} of {found['drawn']} killed, drawn of {found['mutants']}; "
            f"{found['minutes']} minutes",
            flush=True,
        )
        for one in found["survivors"]:
            unexplained += not one["reason"]
            where = "" if one["reached"] else ", which no test reaches"
            print(f"  {one['module']} {one['function']}{where}: {one['reason'] or 'WITHOUT A REASON'}")
            print("\n".join(f"    {line}" for line in one["change"].splitlines()), flush=True)
        if asked.store:
            stored(found | {"commit": at["commit"]}, at)
    return 1 if unexplained else 0


def explained(reasons: Sequence[dict[str, Any]]) -> int:
    """Write the reasons of stored survivors anew; returns 1 where one has none."""
    document = json.loads(STORED.read_text("utf-8"))
    for room in document["rooms"]:
        entries = []
        for one in room["survivors"]:
            why = reason(Mutant("", one["module"], one["function"], one["change"]), reasons)
            one["reason"] = why["reason"] if why else ""
            entries.append(why or {})
        room["equivalent"] = sum(bool(why.get("equivalent")) for why in entries)
        room["unexplained"] = sum(not why for why in entries)
    written(document)
    return int(any(room["unexplained"] for room in document["rooms"]))


def written(document: dict[str, Any]) -> None:
    """Store it."""
    STORED.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")


def stored(found: dict[str, Any], at: dict[str, Any]) -> None:
    """Put a room's figures in the place of its older ones."""
    old = json.loads(STORED.read_text("utf-8"))["rooms"] if STORED.exists() else []
    rooms = [room for room in old if room["room"] != found["room"]] + [found]
    document = {
        "command": "python tools/mutants.py --store",
        "machine": machine() | pace(),
        "rooms": sorted(rooms, key=lambda room: str(room["room"])),
    }
    written(document)


if __name__ == "__main__":
    sys.exit(main())
