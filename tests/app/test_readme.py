"""The README's scripts run as they are printed, alone and as a crew, to their end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/privacy.md")
PATIENCE_S = 110.0
"""How long a test waits for processes on a busy machine."""

GIVEN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
labels = torch.arange(240) % 4
inputs_of = nn.functional.one_hot(labels, 4) + 0.1 * torch.randn(240, 4)
loader = DataLoader(TensorDataset(inputs_of, labels), batch_size=8, shuffle=True)
model = nn.Linear(4, 4)
"""
JOINED = "import ragtag\ncrew = ragtag.join()\n"
SAID = """
done = (model(inputs_of).argmax(1) == labels).float().mean()
rate = optimizer.param_groups[0]["lr"]
print(f"epoch {epoch}, step {crew.step}, right {done:.2f}, rate {rate:.2f}", flush=True)
"""


def scripts() -> list[str]:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    return re.findall(r"```python\n(.*?)```", text, re.S)


def run(folder: Path, script: str, *command: str) -> list[str]:
    """What the script printed, a line a peer."""
    (folder / "train.py").write_text(script)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAGTAG_")}
    env = clean | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *command, "train.py"],
        cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"epoch \d+, step .*", done.stdout)


CREW = ("-m", "ragtag.app.cli.main", "run", "-n", "2")


@pytest.mark.parametrize("command", [(), CREW])
def test_the_first_script(tmp_path: Path, command: tuple[str, ...]) -> None:
    script = scripts()[0]
    assert script.startswith("import ragtag")
    said = run(tmp_path, GIVEN + script + SAID, *command)
    assert len(said) == (2 if command else 1)
    for line in said:
        assert "epoch 9" in line
        assert "right 1.00" in line


@pytest.mark.slow
@pytest.mark.parametrize("command", [(), CREW])
def test_the_script_with_checkpoints_goes_on_with_them(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Once to epoch 4, then to the end, then there is nothing left to do."""
    n = 2 if command else 1
    whole = GIVEN + JOINED + scripts()[1]
    cut = whole.replace("crew.epochs(10)", "crew.epochs(4)")
    assert cut != whole
    began = run(tmp_path, cut + SAID, *command)
    ended = run(tmp_path, whole + SAID, *command)
    after = run(
        tmp_path,
        whole.replace("crew.resume", "epoch = -1; crew.resume") + SAID.replace("epoch {epoch}", "epoch 99"),
        *command,
    )
    assert [line.split(",")[0] for line in began] == ["epoch 3"] * n
    assert [line.split(",")[0] for line in ended] == ["epoch 9"] * n
    assert len(after) == n
    steps = [
        max(int(re.findall(r"step (\d+)", line)[0]) for line in lines) for lines in (began, ended, after)
    ]
    assert 4 * 30 / n <= steps[0] < steps[1] == steps[2]
    if n == 1:
        assert steps == [120, 300, 300], "each batch once, over both runs"
    assert all("rate 0.10" in line for line in ended), "the schedule went on"


@pytest.mark.slow
def test_the_script_with_private_steps(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    script = next(part for part in scripts() if "crew.private" in part)
    assert '"privacy.json"' in script
    script = script.replace('"privacy.json"', 'f"privacy-{crew.rank}.json"')  # two sites in one folder
    for _ in range(2):
        run(tmp_path, GIVEN + JOINED + script.replace("print(", "print('epoch 0, step', ") + SAID, *CREW)
    spent = [json.loads((tmp_path / f"privacy-{rank}.json").read_text())["spent"] for rank in range(2)]
    assert all(steps >= 2 * 30 for ((_, _, steps),) in spent), "both runs count"


def test_no_example_keys_a_ledger_by_a_rank() -> None:
    """A peer may have another's seat after a restart, and would find no ledger, or another's."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    made = [
        (path.name, line)
        for path in files
        for line in path.read_text().splitlines()
        if re.search(r"PrivacyLedger\(.", line)
    ]
    assert {"privacy.md", "crew.py"} <= {name for name, _ in made}
    assert not [line for _, line in made if "rank" in line]
