"""Runs benchmarks again and stores what they find, then writes the tables of figures anew.

    python tools/measure.py                    # every result that is older than its code, or to come
    python tools/measure.py averaging storms   # these
    python tools/measure.py --list             # what would run, and what it needs; runs nothing

The commands stand in ``tools/figures.toml`` as ``measure``, and what not every machine has as ``needs``:
root, or a value of ``--with`` (``--with data=FOLDER``), which also replaces ``{data}`` in a command. Results
that need what is not there are left as they are, and said. So are those whose command fails or takes longer
than ``--limit-min``; the others go on, and the exit status is 1.

Figures are of a commit, so a tree with changes in src or benchmarks is refused. Timings are of this machine
as it is: nothing else should run on it. Most recipes in full take an hour or more.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import RESULTS, ROOT, TABLE, Figures, Wrong

sys.path.insert(0, str(ROOT))  # first: other packages (Opacus) bring a package named benchmarks, too
from benchmarks.stored import commit

CLEAN_UP_S = 30.0
"""How long a command that takes too long may clean up; ``ragtag run`` gives its peers 10 s."""


@dataclass(frozen=True, slots=True)
class Job:
    """One result, and how it comes to be. lacks: what it needs and is not here; empty: it can run."""

    name: str
    commands: list[list[str]]
    lacks: str


def job(name: str, entry: dict[str, Any], given: dict[str, str]) -> Job:
    """How to measure a result.

    Raises:
        Wrong: the table has no command for it.
    """
    if not entry.get("measure"):
        raise Wrong(f"{TABLE}, [results.{name}]: give its command as measure = [...]")
    wanting = [
        need
        for need in entry.get("needs", ())
        if (os.geteuid() != 0 if need == "root" else need not in given)
    ]
    said = [need if need == "root" else f"--with {need}=..." for need in wanting]
    commands = [shlex.split(command.format_map(Named(given))) for command in entry["measure"]]
    return Job(name, commands, ", ".join(said))


class Named(dict[str, str]):
    """What ``--with`` gives; a name that it does not give stays as it is."""

    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"


def run(wanted: Job, root: Path, limit_s: float) -> str:
    """Run a result's commands one after the other. Returns why it is not stored; empty: it is."""
    path = root / RESULTS / f"{wanted.name}.json"
    until_s = time.monotonic() + limit_s
    for command in wanted.commands:
        program = [sys.executable, *command[1:]] if command[0] == "python" else command
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
        before = path.read_bytes() if path.exists() else b""
        process = subprocess.Popen(program, cwd=root, env=env, start_new_session=True)
        try:
            code = process.wait(max(1.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"{shlex.join(command)} took longer than {limit_s / 60:g} minutes"
        finally:
            end(process)
        if (path.read_bytes() if path.exists() else b"") == before:
            return f"{shlex.join(command)} ended with {code} and stored nothing"
    return ""


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command and all that it has started: what goes on would be measured with the next one.

    It is interrupted as by Ctrl-C, so that it can clean up (namespaces, peers in sessions of their own).
    """
    for how in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(CLEAN_UP_S)


def main(given: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="of results; none: those older than their code, or to come"
    )
    parser.add_argument("--list", action="store_true", help="only say what would run")
    parser.add_argument("--with", dest="given", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--limit-min", type=float, default=120.0, help="of one result (default: %(default)g)")
    asked = parser.parse_args(given)
    figures = Figures(root)
    values = dict(one.partition("=")[::2] for one in asked.given)
    entries = figures.results.entries
    if unknown := sorted(set(asked.names) - entries.keys()):
        parser.error(f"there is no result {', '.join(unknown)}; there are {', '.join(entries)}")
    old = {line.split(",")[0] for line in figures.age()[0]} | set(filter(figures.results.is_to_come, entries))
    try:
        jobs = [job(name, entries[name], values) for name in asked.names or [n for n in entries if n in old]]
    except Wrong as error:
        print(error, file=sys.stderr)
        return 1
    if asked.list:
        for one in jobs:
            print(f"{one.name}{f' (needs {one.lacks})' if one.lacks else ''}")
            print("\n".join(f"    {shlex.join(command)}" for command in one.commands))
        return 0
    if (at := commit(root)).endswith("-dirty"):
        print("src or benchmarks have changes that no commit has: commit them first", file=sys.stderr)
        return 1
    failed = []
    for number, one in enumerate(jobs, 1):
        print(f"== {number} of {len(jobs)}: {one.name}, at {at}", flush=True)
        began_s = time.monotonic()
        why = f"it needs {one.lacks}" if one.lacks else run(one, root, 60.0 * asked.limit_min)
        print(
            f"== {one.name}: {why or 'stored'}, {(time.monotonic() - began_s) / 60:.1f} minutes", flush=True
        )
        failed += [f"{one.name}: {why}"] if why else []
    try:
        changed = Figures(root).write()
    except Wrong as error:
        failed.append(str(error))
    else:
        print(f"== written: {', '.join(changed) or 'no page changed'}")
    print("\n".join(["== not measured:", *failed] if failed else ["== all measured"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
