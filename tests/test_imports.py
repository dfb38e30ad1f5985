"""The layers hold, and the contracts that say so would notice if they did not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent

VIOLATIONS = {
    "core imports no other room, and nothing that does I/O": ("core/bad.py", "import time"),
    "protocols are machines: core and codecs only, no torch, no I/O": (
        "protocols/bad.py",
        "from asyncio import Queue",
    ),
    "protocols know what a codec is, not which there are": (
        "protocols/worse.py",
        "from ragtag.codecs.dense import fp32",
    ),
    "codecs and schedules import core only": ("codecs/bad.py", "import ragtag.protocols.rounds.rps"),
    "optim imports core only": ("optim/bad.py", "import ragtag.training.tensors.bucket"),
    "codecs and schedules know no optim": ("schedules/worse.py", "import ragtag.optim.outer"),
    "codecs and schedules never meet": ("schedules/bad.py", "import ragtag.codecs.base"),
    "network and simulation never meet": ("network/bad.py", "import ragtag.simulation"),
    "network and simulation import core and protocols only": (
        "simulation/bad.py",
        "def late():\n    import torch.nn",
    ),
    "training knows no transport": ("training/bad.py", "import ragtag.network"),
    "only the command knows the recipes": ("app/bad.py", "from ragtag import recipes"),
    "privacy imports training and what is below it: no transport, no command": (
        "privacy/bad.py",
        "import ragtag.app.crew.crew",
    ),
    "privacy is optional: only the command, the recipes and scripts import it": (
        "training/nosy.py",
        "import ragtag.privacy.nopeek",
    ),
    "hooks import training and what is below it: no transport, no command": (
        "hooks/bad.py",
        "import ragtag.app.crew.crew",
    ),
    "hooks are for users: no other room imports them": (
        "training/worse.py",
        "import ragtag.hooks.sparse_hook",
    ),
}


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command as run; run()",
            "--no-cache",
        ],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_contract_is_kept() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_contract_notices_a_violation(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in contracts} == set(VIOLATIONS)
    for path, source in VIOLATIONS.values():
        (tmp_path / "src" / "ragtag" / path).write_text(source + "\n")
    done = lint_imports(tmp_path)
    assert done.returncode != 0
    for name in VIOLATIONS:
        assert re.search(rf"^{re.escape(name)} BROKEN", done.stdout, re.MULTILINE), done.stdout
