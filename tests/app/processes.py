"""Crews of real processes, by the ``ragtag`` command, in a folder of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ragtag.app.tracefile import read_run
from ragtag.core import trace

SRC = Path(__file__).parents[2] / "src"
PATIENCE_S = 110.0
"""How long a test waits for what processes do on a busy machine: importing torch alone may take a while."""

SCRIPT = """
import os, sys, time
import torch, ragtag
from ragtag.app.crew import finish
finish.LEASES = 0.4  # one that stops while the others go on waits a second for their end, and not ten
torch.set_num_threads(1)
inputs = int(os.environ.get("INPUTS", "4"))
stop = os.environ["STOP"]
with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(inputs, 3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = crew.optimizer(sgd, averager=ragtag.AllReduce(), model=model)
    print("seat", crew.rank, "pid", os.getpid(), flush=True)
    said = None
    while not os.path.exists(stop) and not os.path.exists(f"{stop}.{crew.rank}"):
        optimizer.zero_grad()
        model(torch.ones(2, inputs)).square().mean().backward()
        optimizer.step()
        heard, live = bin(int(optimizer.outcome.heard[0])), sorted(crew.live)
        if (heard, live) != said:
            print("heard", heard, "live", live, flush=True)
            said = heard, live
        time.sleep(0.02)
"""


class Command:
    """A ``ragtag`` command that runs; out: a file with all that it printed."""

    def __init__(self, folder: Path, name: str, args: list[str], env: dict[str, str]) -> None:
        self.out = folder / f"{name}.out"
        with self.out.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ragtag.app.cli.main", *args],
                stdout=file, stderr=subprocess.STDOUT, env=env, cwd=folder,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.out.read_text()

    def lines(self, peer: int) -> list[str]:
        """What a peer printed, by the number its launcher gave it."""
        return [line.partition("] ")[2] for line in self.text.splitlines() if line.startswith(f"[{peer}]")]

    def says(self, what: str, peer: int = 0) -> None:
        """Wait for a line of a peer that contains this."""

        def there() -> bool:
            assert self.process.poll() is None or any(what in line for line in self.lines(peer)), self.text
            return any(what in line for line in self.lines(peer))

        until(there, f"{what!r} said: {self.out.name}")

    def pid(self, peer: int) -> int:
        """The process of a peer."""
        self.says("pid", peer)
        said = next(line for line in self.lines(peer) if "pid" in line)
        return int(said.split()[-1])

    def code(self) -> int:
        """How it ended."""
        return self.process.wait(PATIENCE_S)


def until(true: Callable[[], bool], what: str) -> None:
    """Wait until something is true that files alone tell; fail after ``PATIENCE_S``."""
    tick = threading.Event()
    give_up_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < give_up_s, f"not {what} within {PATIENCE_S:g} s"
        tick.wait(0.05)


class Place:
    """A folder in which crews run one script; all end when it is left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stop, self.run = folder, folder / "stop", folder / "run"
        (folder / "train.py").write_text(SCRIPT)
        self.commands: list[Command] = []

    def command(self, name: str, *args: str, **env: str) -> Command:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RAGTAG_")}
        known = {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "STOP": str(self.stop)}
        made = Command(self.folder, name, list(args), clean | known | env)
        self.commands.append(made)
        return made

    def crew(self, n: int, **env: str) -> Command:
        """``ragtag run`` of n peers; averaging when this returns."""
        crew = self.command("crew", "run", "-n", str(n), "-o", str(self.run), "train.py", **env)
        crew.says(f"heard {bin((1 << n) - 1)}")
        return crew

    def join(self, token: str, name: str = "joined", **env: str) -> Command:
        return self.command(name, "join", "-o", str(self.folder / f"run-{name}"), token, "train.py", **env)

    def end(self) -> None:
        """All scripts are asked to end, and do."""
        self.stop.touch()
        for command in self.commands:
            command.code()

    def close(self) -> None:
        for command in self.commands:
            if command.process.poll() is None:
                command.process.send_signal(signal.SIGTERM)
                try:
                    command.process.wait(20.0)
                except subprocess.TimeoutExpired:
                    command.process.kill()
                    command.process.wait(20.0)


def notes(folder: Path, what: str, peer: int | None = None) -> list[trace.Note]:
    return [
        record
        for record in read_run(folder).records()
        if isinstance(record, trace.Note) and record.what == what and peer in (None, record.peer)
    ]
