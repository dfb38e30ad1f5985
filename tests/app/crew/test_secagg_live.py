"""The secure average of docs/privacy.md over sealed datagrams: five processes, of which one is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GIVEN = """
import ragtag, torch
torch.set_num_threads(1)
crew = ragtag.join()
update = torch.full((1000,), 0.1 * crew.rank)
"""
AGAIN = """
turns = 0
while turns < LAST:
    mean = secure.average({"update": update})
    expected = sum(0.1 * peer for peer in mean.clients) / len(mean.clients)
    assert abs(mean["update"] - expected).max() < 1e-6
    turns += 1
    if len(mean.clients) < 5:
        break
print(f"turns {turns} clients {mean.clients}", flush=True)
crew.leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize("faults", ["", "kill=4@4"])
def test_the_pages_script_averages(tmp_path: Path, faults: str) -> None:
    text = (ROOT / "docs" / "privacy.md").read_text()
    parts = re.findall(r"```python\n(.*?)```", text, re.S)
    script = next(part for part in parts if "crew.secure_average" in part)
    script = script.replace("dropouts=1)", "dropouts=1, deadline_s=3.0)")
    (tmp_path / "train.py").write_text(GIVEN + script + AGAIN.replace("LAST", "3000" if faults else "20"))
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAGTAG_")}
    env |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "RAGTAG_SEAL": "on"}
    command = [sys.executable, "-m", "ragtag.app.cli.main", "run", "-n", "5"]
    done = subprocess.run(
        [*command, *(["--faults", faults] if faults else []), "train.py"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150.0,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"turns (\d+) clients (.*)", done.stdout)
    assert len(told) == (4 if faults else 5), done.stdout + done.stderr
    for turns, clients in told:
        if faults:
            assert "(0, 1, 2, 3)" in clients
        else:
            assert int(turns) == 20 and "(0, 1, 2, 3, 4)" in clients
