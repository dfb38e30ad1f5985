"""What the house looks like: lines by room, modules with one importer, cycles, names used twice.

``python tools/house.py`` prints it. ``--check`` exits with 1 where there are more modules with one importer,
cycles or doubled names than ``tools/house.toml`` allows: so that what was put in order stays so. Lower the
numbers there when the counts go down.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "ragtag"
SMALL_LINES = 60


@dataclass(frozen=True)
class House:
    """What there is.

    rooms: files and lines of each.
    one_importer: module, its lines and its importer.
    cycles: modules that import each other when they run.
    doubled: public names that several modules define.
    """

    rooms: dict[str, tuple[int, int]]
    one_importer: list[tuple[str, int, str]]
    cycles: list[list[str]]
    doubled: dict[str, list[str]]

    @property
    def small(self) -> list[tuple[str, int, str]]:
        """Of the modules with one importer, those that are short."""
        return [entry for entry in self.one_importer if entry[1] < SMALL_LINES]

    def counts(self) -> dict[str, int]:
        """What ``house.toml`` bounds."""
        return {
            "one_importer": len(self.one_importer),
            "small_with_one_importer": len(self.small),
            "in_cycles": sum(map(len, self.cycles)),
            "doubled_names": len(self.doubled),
        }


def looked_at() -> House:
    """Read the source."""
    graph = grimp.build_graph("ragtag", cache_dir=None, exclude_type_checking_imports=True)
    lines = {module_of(path): len(path.read_text().splitlines()) for path in SRC.rglob("*.py")}
    imports = {
        module: {other for other in graph.find_modules_directly_imported_by(module) if other in lines}
        for module in graph.modules
        if module in lines
    }
    importers: dict[str, set[str]] = defaultdict(set)
    for module, others in imports.items():
        for other in others:
            importers[other].add(module)
    rooms: dict[str, tuple[int, int]] = {}
    for path in SRC.rglob("*.py"):
        at = path.relative_to(SRC).parts
        room = at[0] if len(at) > 1 else "(top)"
        files, total = rooms.get(room, (0, 0))
        rooms[room] = files + 1, total + lines[module_of(path)]
    single = [
        (module, lines[module], next(iter(by)))
        for module, by in sorted(importers.items())
        if len(by) == 1 and lines[module] > 0 and not is_package(module)
    ]
    return House(rooms, single, rings(imports), doubled_names())


def module_of(path: Path) -> str:
    """A file's dotted name."""
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_package(module: str) -> bool:
    """Whether a module is a package's ``__init__``, which its users reach by other modules."""
    return (SRC.parent / Path(*module.split(".")) / "__init__.py").exists()


def rings(imports: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected parts of more than one module (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in imports.get(module, ()):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            part = []
            while True:
                part.append(stack.pop())
                if part[-1] == module:
                    break
            if len(part) > 1:
                found.append(sorted(part))

    sys.setrecursionlimit(10_000)
    for module in sorted(imports):
        if module not in index:
            visit(module)
    return found


def doubled_names() -> dict[str, list[str]]:
    """Public classes and functions that more than one module defines at its top, by name."""
    where: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                where[node.name].append(module_of(path))
    return {name: modules for name, modules in sorted(where.items()) if len(modules) > 1}


def shown(house: House) -> str:
    """In words."""
    out = ["room           files   lines"]
    for room, (files, lines) in sorted(house.rooms.items()):
        out.append(f"{room:14} {files:5} {lines:7,}")
    total = [sum(column) for column in zip(*house.rooms.values(), strict=True)]
    out.append(f"{'all':14} {total[0]:5} {total[1]:7,}")
    out.append(f"\n{len(house.one_importer)} modules with one importer, {len(house.small)} of them short:")
    out += [f"  {module} ({lines}) <- {by}" for module, lines, by in house.one_importer]
    out.append(f"\n{len(house.cycles)} cycles:")
    out += [f"  {', '.join(ring)}" for ring in house.cycles]
    out.append(f"\n{len(house.doubled)} public names that several modules define:")
    out += [f"  {name}: {', '.join(modules)}" for name, modules in house.doubled.items()]
    return "\n".join(out)


def over(house: House) -> list[str]:
    """What is more than ``house.toml`` allows, in words."""
    most = tomllib.loads((ROOT / "tools" / "house.toml").read_text())
    return [
        f"{name}: {count}, and tools/house.toml allows {most[name]}"
        for name, count in house.counts().items()
        if count > most[name]
    ]


if __name__ == "__main__":
    found = looked_at()
    print(shown(found))
    wrong = over(found) if "--check" in sys.argv else []
    print("\n".join(wrong), file=sys.stderr)
    sys.exit(bool(wrong))
