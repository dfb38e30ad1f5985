"""Peers as processes: their end, whatever becomes of their launcher."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from ragtag.app.launch.process import KILL_S
from ragtag.app.launch.signals import Shutdown
from ragtag.app.terminal.dashboard import watch
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from tests.app.launch.launched import JOIN, PATIENCE_S, SRC


def test_peers_are_asked_then_told_then_killed() -> None:
    ending = Shutdown(10.0, grace_s=5.0)
    sent = []
    while (at_s := ending.next_s) is not None:
        assert ending.due(at_s - 0.01) == []
        sent += [(at_s, number) for number in ending.due(at_s)]
    assert sent == [
        (10.0, signal.SIGINT),
        (15.0, signal.SIGTERM),
        (20.0, signal.SIGKILL),
        (20.0 + KILL_S, None),
    ]
    late = Shutdown(0.0, grace_s=1.0)
    assert late.due(1.5) == [signal.SIGINT, signal.SIGTERM]


LAUNCHER = """
import json, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
signal.signal(signal.SIGINT, signal.default_int_handler)  # or in a shell's background
from dataclasses import asdict
from pathlib import Path
from ragtag.app.launch import launch
from ragtag.core.faultspec import parse_faults
def tell(event):
    print(json.dumps([type(event).__name__, asdict(event)], default=str), flush=True)
script, n, faults, run_folder = sys.argv[1:]
options = dict(faults=parse_faults(faults), run_folder=Path(run_folder), on_event=tell, grace_s=0.3)
result = launch(int(n), [script], **options)
sys.exit(result.exit_code)
"""

# Each peer and its child hold a FIFO open: its reader sees the end once all of them have ended.
HOLDS = """
import signal, subprocess
held = os.open(os.environ["HELD"], os.O_WRONLY)
if me == 2:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[held])
print("up", flush=True)
join()  # whoever is the last to join may be stopped at once
time.sleep(60)
"""


class Launcher:
    """A launcher in a process of its own, whose events are read with a deadline."""

    def __init__(self, tmp_path: Path, n: int, faults: str = "", text: str = HOLDS) -> None:
        script, self.run_folder = tmp_path / "peer.py", tmp_path / "run"
        script.write_text(JOIN + text)
        fifo = tmp_path / "held"
        os.mkfifo(fifo)
        self.held = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(script), str(n), faults, str(self.run_folder)],
            stdout=subprocess.PIPE,
            env=dict(os.environ) | {"PYTHONPATH": str(SRC), "HELD": str(fifo), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._rest = b""

    def events(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Events until the launcher ends; fails after ``PATIENCE_S``."""
        assert self.process.stdout is not None
        fd, until_s = self.process.stdout.fileno(), time.monotonic() + PATIENCE_S
        while True:
            while b"\n" in self._rest:
                line, self._rest = self._rest.split(b"\n", 1)
                kind, fields = json.loads(line)
                yield kind, fields
            readable, _, _ = select.select([fd], [], [], max(0.0, until_s - time.monotonic()))
            assert readable, "the launcher says nothing"
            data = os.read(fd, 65536)
            if not data:
                return
            self._rest += data

    def until(self, *kinds: str) -> None:
        """Wait for these events, in any order."""
        missing = list(kinds)
        for kind, fields in self.events():
            name = f"{kind} {fields['text']}" if kind == "Printed" else kind
            if name in missing:
                missing.remove(name)
            if not missing:
                return
        raise AssertionError(f"the launcher ended without {missing}")

    def all_ended(self) -> bool:
        """Whether all that held the FIFO end in time."""
        until_s = time.monotonic() + PATIENCE_S
        while select.select([self.held], [], [], max(0.0, until_s - time.monotonic()))[0]:
            if not os.read(self.held, 4096):
                return True
        return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        os.close(self.held)


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Launcher]:
    """Three peers with a child each: number 0 is frozen, number 2 takes neither SIGINT nor SIGTERM."""
    launcher = Launcher(tmp_path, 3, "freeze=0@0+60")
    try:
        launcher.until("Printed up", "Printed up", "Printed up", "Injected")
        yield launcher
    finally:
        launcher.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_all_peers_even_stopped_and_deaf_ones_and_the_trace_is_whole(
    crew: Launcher, number: signal.Signals
) -> None:
    os.kill(crew.process.pid, number)
    ended = {str(fields["peer"]): fields for kind, fields in crew.events() if kind == "Ended"}
    assert crew.process.wait(PATIENCE_S) == 128 + number
    assert crew.all_ended()
    assert {fields["by"] for fields in ended.values()} == {"launcher"}
    assert ended["2"]["status"] == -signal.SIGKILL
    assert ended["1"]["status"] == -signal.SIGINT
    run_trace = read_run(crew.run_folder)
    notes = [r.detail for r in run_trace.records() if isinstance(r, trace.Note)]
    assert notes == [f"{number.name}: ending 3 peers"]
    assert not run_trace.damage.messages()


def test_a_second_interrupt_ends_all_at_once(crew: Launcher) -> None:
    os.kill(crew.process.pid, signal.SIGINT)
    crew.until("Remark")
    os.kill(crew.process.pid, signal.SIGINT)
    assert crew.process.wait(PATIENCE_S) in (-signal.SIGINT, 130)
    assert crew.all_ended()


def test_a_launcher_that_is_killed_leaves_no_orphans(crew: Launcher) -> None:
    crew.process.kill()
    assert crew.all_ended()  # the stopped one, the deaf one and their children
    found = read_run(crew.run_folder)
    assert not [r for r in found.records() if isinstance(r, trace.Leave)]
    assert not found.damage.messages()


def test_a_view_of_a_run_ends_when_its_launcher_is_killed(crew: Launcher) -> None:
    out, waits = io.StringIO(), []

    def wait(seconds: float) -> None:
        """The launcher is killed while the view waits; its peers are killed by its guard."""
        waits.append(seconds)
        if len(waits) == 3:
            crew.process.kill()
            crew.process.wait(PATIENCE_S)
            assert crew.all_ended()

    last = watch(crew.run_folder, console=Console(file=out, width=80), wait=wait)
    assert len(waits) == 4  # one more look, to be sure
    assert last.abandoned
    said = " ".join(out.getvalue().split())
    assert f"nothing writes to {crew.run_folder} any more, and peer 0, 1, 2 had not ended" in said


def test_a_launcher_whose_listener_fails_leaves_no_orphans(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, 2)
    try:
        launcher.until("Printed up", "Printed up")
        assert launcher.process.stdout is not None
        launcher.process.stdout.close()  # the next event breaks the pipe
        os.kill(launcher.process.pid, signal.SIGTERM)
        assert launcher.all_ended()
        assert launcher.process.wait(PATIENCE_S) != 0
    finally:
        launcher.close()
