"""Where runs are kept."""

from __future__ import annotations

import re
import time
from pathlib import Path

RUNS = Path("runs")


def new_run_folder(name: str, under: Path = RUNS) -> Path:
    """Make a new folder for a run: ``runs/NAME-DATE-TIME``, with a number where that is taken.

    Raises:
        OSError: the folder cannot be made.
    """
    safe = re.sub(r"[^\w.+-]+", "-", name).strip("-.")[:60] or "run"
    base = f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        folder = under / (base if number == 1 else f"{base}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{under / base} and 998 more are taken; give a folder with --run-folder")
