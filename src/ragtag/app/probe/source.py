"""Where `ragtag probe` takes a vector from: a script's first steps or a model's size; and a link's rate."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np

from ragtag.app.function import NoFunction, function_of
from ragtag.app.probe.measure import SIZE_MAX, Vectors
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from ragtag.core.errors import Error
from ragtag.core.types import PeerId

_UNITS = {"bit": 0.125, "B": 1.0}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_SAID_MAX = 2000


class ProbeError(Error, ValueError):
    """There is nothing to probe with; the message says what to do."""


def rate_of(text: str) -> float:
    """Bytes per second of ``50Mbit``, ``1Gbit/s`` or ``6.25MB/s``. Raises ProbeError."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)\s*([kMG]?)(bit|B)(?:/s)?", text.strip())
    rate = float(found[1]) * _PREFIXES[found[2]] * _UNITS[found[3]] if found else 0.0
    if rate <= 0:
        raise ProbeError(f"a rate of {text!r}: write bits or bytes per second, as 50Mbit, 1Gbit or 6.25MB")
    return rate


def rate_of_run(folder: Path) -> tuple[float, str]:
    """What a crew's slowest peer sent per second of its rounds, and in words where that is from.

    In the middle round of each peer: bytes since the last round over the round's duration. A link's rate is
    this or more: rounds also wait for others.

    Raises:
        FileNotFoundError: there is no trace.
        ProbeError: it has no two rounds of one peer.
    """
    last: dict[PeerId, int] = {}
    rates: dict[PeerId, list[float]] = defaultdict(list)
    for record in read_run(folder).records():
        if not isinstance(record, trace.Round):
            continue
        before = last.get(record.peer)
        last[record.peer] = record.bytes_sent
        if before is not None and record.bytes_sent > before and record.total_s > 0:
            rates[record.peer].append((record.bytes_sent - before) / (record.of * record.total_s))
    if not rates:
        raise ProbeError(f"{folder}: no peer has sent anything in two rounds; give --rate instead")
    rate, peer = min((median(found), peer) for peer, found in rates.items())
    return rate, f"peer {peer} of {folder.name}, the slowest, in its middle round (its link may do more)"


def size_of_model(name: str) -> int:
    """How many values train in what a function makes (``function_of``). Raises ProbeError, saying why not."""
    import torch

    try:
        with function_of(name) as function:
            made = function()
    except (NoFunction, TypeError) as error:
        raise ProbeError(f"--model {name}: {error}") from error
    if not isinstance(made, torch.nn.Module):
        raise ProbeError(f"--model {name}: it made a {type(made).__name__}, not a torch.nn.Module")
    size = sum(p.numel() for p in made.parameters() if p.requires_grad)
    if not 1 <= size <= SIZE_MAX:
        raise ProbeError(f"--model {name}: {size:,} values train in it; 1 to {SIZE_MAX:,} can be probed")
    return size


def vectors_of_script(
    script: Path, arguments: list[str], ratio: float, steps: int, deadline_s: float
) -> Vectors:
    """The residual and gradient after a script's first ``steps`` steps, which run in a process of its own.

    The script trains alone, whatever it joins, and is ended after those steps.

    Raises:
        FileNotFoundError: there is no such script.
        ProbeError: it fails, makes no step with a torch.optim.Optimizer, or takes longer than ``deadline_s``.
    """
    if not script.is_file():
        raise FileNotFoundError(f"there is no script {script}")
    ours = ("RAGTAG_", "TORCHELASTIC_")
    alone = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in alone}
    with tempfile.TemporaryDirectory(prefix="ragtag-probe-") as folder:
        out = Path(folder)
        command = [sys.executable, "-m", "ragtag.app.probe.script", folder, str(steps), str(ratio)]
        with (out / "said").open("wb") as said:
            process = subprocess.Popen(
                [*command, str(script), *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                raise ProbeError(
                    f"{script} made no {steps} steps within {deadline_s:g} s; give it longer with "
                    "--patience, or fewer --steps"
                ) from None
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(10.0)
        found = [out / "residual.npy", out / "gradient.npy"]
        if status or not all(path.exists() for path in found):
            raise ProbeError(_why(script, status, (out / "said").read_bytes()))
        residual, gradient = (np.load(path, allow_pickle=False) for path in found)
    return Vectors(residual, gradient, f"of {script.name}, after {steps} steps")


def _why(script: Path, status: int, said: bytes) -> str:
    if status == 0:
        return (
            f"{script} ended without enough steps of a torch.optim.Optimizer; lower --steps, or give "
            "--parameters or --model"
        )
    tail = said[-_SAID_MAX:].decode(errors="replace").strip().splitlines()
    return f"{script} failed (status {status}): {tail[-1] if tail else 'it said nothing'}"
