"""Split learning of docs/privacy.md over sealed datagrams: three processes, of which one client is killed."""

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
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
labels = torch.arange(240) % 4
inputs_of = nn.functional.one_hot(labels, 4) + 0.1 * torch.randn(240, 4)
loader = list(DataLoader(TensorDataset(inputs_of, labels), batch_size=8)) * 5
front, head = nn.Sequential(nn.Linear(4, 64), nn.ReLU()), nn.Linear(64, 4)
crew = ragtag.join()
if crew.rank == 2:
    loader = loader * LONGER
"""
SAID = """
if crew.rank:
    print(f"answered {client.answered} missed {client.missed} loss {float(loss):.3f}", flush=True)
crew.leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize("faults", ["", "kill=2@4"])
def test_the_pages_script_trains(tmp_path: Path, faults: str) -> None:
    text = (ROOT / "docs" / "privacy.md").read_text()
    script = next(part for part in re.findall(r"```python\n(.*?)```", text, re.S) if "SplitServer" in part)
    script = script.replace("serve()", "serve(20.0)")
    given = GIVEN.replace("LONGER", "100" if faults else "1")  # whoever is to be killed is still at it
    (tmp_path / "train.py").write_text(given + script + SAID)
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAGTAG_")}
    env |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "RAGTAG_SEAL": "on"}
    command = [sys.executable, "-m", "ragtag.app.cli.main", "run", "-n", "3"]
    done = subprocess.run(
        [*command, *(["--faults", faults] if faults else []), "train.py"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110.0,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"answered (\d+) missed (\d+) loss ([\d.]+)", done.stdout)
    assert len(told) == (1 if faults else 2), done.stdout + done.stderr
    for answered, missed, loss in told:
        assert int(answered) + int(missed) == 150
        assert int(answered) >= 140
        assert float(loss) < 0.5
