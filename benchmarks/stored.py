"""What a stored result says of how it came to be: the command, the commit, the machine, its load and pace.

A benchmark calls ``how()`` before it measures, and stores that with its figures. README's rows name the
commit (``tools/figures.py``), and ``make figures-age`` compares it with the code as it is.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("numpy", "torch")


def how() -> dict[str, Any]:
    """The fields that every stored result has. Call it before measuring: the load is then that of others."""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine() | pace(),
    }


def keep_run(file: Path, run: dict[str, Any]) -> None:
    """Put a run into a file of several, each by a command of its own: in place of the one by that command,
    or behind them. run: with the fields of ``how``.
    """
    runs = json.loads(file.read_text("utf-8"))["runs"] if file.exists() else []
    at = next((i for i, old in enumerate(runs) if old.get("command") == run["command"]), len(runs))
    file.write_text(json.dumps({"runs": [*runs[:at], run, *runs[at + 1 :]]}, indent=1) + "\n", "utf-8")


def machine() -> dict[str, Any]:
    """What it runs on."""
    return {
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def pace() -> dict[str, Any]:
    """How many processes wanted to run in the last minute, and how fast this machine computes now.

    Machines of one name differ by a factor of four, and change within minutes: without their pace, results in
    seconds of two of them cannot be told from those of two commits.
    """
    return {
        "load_average_1min": round(os.getloadavg()[0], 2),
        "million_additions_ms": round(1e3 * statistics.median(_million_additions_s() for _ in range(5)), 1),
    }


def _million_additions_s() -> float:
    began_s, total = time.perf_counter(), 0
    for number in range(1_000_000):
        total += number
    return time.perf_counter() - began_s


def commit(root: Path = ROOT) -> str:
    """The checkout's, with "-dirty" where code has changes that no commit has; "unknown" without git. A copy
    on another machine is told its own by ``RAGTAG_COMMIT``.

    Stored results may have changed: a run that stores several files is of one commit.
    """
    if told := os.environ.get("RAGTAG_COMMIT"):
        return told
    try:
        at = git(root, "rev-parse", "--short=7", "HEAD")
        changed = git(root, "status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{at}-dirty" if changed else at


def git(root: Path, *words: str) -> str:
    """What git answers."""
    command = ["git", *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60.0)
    return done.stdout.strip()
