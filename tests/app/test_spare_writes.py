"""What serves looking on stops no training: a full disk, no file to open, an output that takes nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ragtag.app.disk import Spare
from ragtag.app.invitation.token import TOKEN_FILE, Token, decode, encode, keep_token, new_key
from ragtag.app.launch import launch
from ragtag.app.launch.events import Ended, Event, Printed
from ragtag.app.terminal.console import RETRY_S, SparedConsole

SRC = Path(__file__).parents[2] / "src"
SCRIPT = """
import os, resource, signal, time
import torch, ragtag
torch.set_num_threads(1)
TROUBLE
with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = crew.optimizer(sgd, averager=ragtag.AllReduce(), model=model)
    together = alone = 0
    while not os.path.exists(os.environ["STOP"]):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        heard = int(optimizer.outcome.heard[0])
        together += heard == 0b111
        if together == 5 and heard == 0b111:
            trouble()
        if together >= 20 and crew.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if 1 not in crew.live and heard == 0b101:
            alone += 1
            if alone == 20:
                print("went on", flush=True)
        time.sleep(0.02)
"""
FULL_DISK = """
def trouble():
    try:
        with open(os.path.join(os.environ["RAGTAG_RUN"], f"ballast-{crew.rank}"), "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
    except OSError as error:
        print(error.strerror)
"""
NO_FILES = """
taken = []
def trouble():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    try:
        while True:
            taken.append(open("/dev/null"))
    except OSError as error:
        print(error.strerror)
"""


def run_in_trouble(folder: Path, run_folder: Path, trouble: str) -> tuple[dict[int, Ended], list[Event]]:
    """A crew of three that meets with this trouble, and then loses peer 1."""
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("TROUBLE", trouble))
    events: list[Event] = []
    stop = folder / "stop"

    def on_event(event: Event) -> None:
        events.append(event)
        if all("went on" in printed(events, peer, error=False) for peer in (0, 2)):
            stop.touch()

    env = {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "STOP": str(stop)}
    result = launch(3, [str(script)], run_folder=run_folder, on_event=on_event, env=env)
    return {end.peer: end for end in result.ends}, events


def printed(events: list[Event], peer: int, error: bool) -> list[str]:
    return [e.text for e in events if isinstance(e, Printed) and e.peer == peer and e.error == error]


@pytest.mark.slow
def test_a_crew_on_a_full_disk_outlives_a_death(small_disk: Path, tmp_path: Path) -> None:
    ends, events = run_in_trouble(tmp_path, small_disk / "run", FULL_DISK)
    assert [ends[peer].status for peer in (0, 1, 2)] == [0, -9, 0], events
    for peer in (0, 2):
        assert printed(events, peer, error=False) == ["No space left on device", "went on"]
        warnings = printed(events, peer, error=True)
        assert [w for w in warnings if "invitation" in w and "the disk is full" in w][1:] == [], warnings
        assert [w for w in warnings if "tracing" in w and "the disk is full" in w][1:] == [], warnings
        assert "invitation" in "".join(warnings)
    token = decode((small_disk / "run" / TOKEN_FILE).read_text())
    assert len(token.addresses) in (2, 3)  # whole, though one page of the disk may have become free
    assert not [path for path in (small_disk / "run").iterdir() if path.suffix == ".tmp"]


@pytest.mark.slow
def test_a_crew_without_files_to_open_outlives_a_death(tmp_path: Path) -> None:
    ends, events = run_in_trouble(tmp_path, tmp_path / "run", NO_FILES)
    assert [ends[peer].status for peer in (0, 1, 2)] == [0, -9, 0], events
    for peer in (0, 2):
        assert printed(events, peer, error=False) == ["Too many open files", "went on"]
        (warning,) = [w for w in printed(events, peer, error=True) if "invitation" in w]
        assert "too many files open: raise the limit (ulimit -n). The run goes on." in warning


# -- The invitation


TOKEN = encode(Token((("127.0.0.1", 4321),), "otters", new_key()))


def test_an_invitation_is_written_whole_or_not_at_all(small_disk: Path) -> None:
    keep_token(small_disk, TOKEN)
    with pytest.raises(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(OSError):
        keep_token(small_disk, TOKEN.upper())
    assert (small_disk / TOKEN_FILE).read_text() == TOKEN + "\n"
    assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", TOKEN_FILE]


def test_what_cannot_be_written_is_told_once_and_tried_again_later() -> None:
    said: list[str] = []
    now_s, full, tried = 0.0, True, 0

    def write() -> None:
        nonlocal tried
        tried += 1
        if full:
            raise OSError(errno.EMFILE, "Too many open files")

    spare = Spare("the invitation", said.append, retry_s=1.0, clock=lambda: now_s)
    for _ in range(100):
        assert not spare.write(write)
        now_s += 0.1
    assert tried == 10
    full = False
    now_s += 1.0
    assert spare.write(write) and spare.write(write)
    assert said == [
        "the invitation cannot be written: this process has too many files open: raise the limit (ulimit -n)."
        " The run goes on.",
        "the invitation is written again",
    ]


def test_an_error_that_is_not_the_file_systems_is_raised() -> None:
    def write() -> None:
        raise ValueError("a fault of this program")

    with pytest.raises(ValueError, match="this program"):
        Spare("the invitation", print).write(write)


# -- The launcher's output


@pytest.mark.parametrize("where", ["a full disk", "nobody reads"])
@pytest.mark.slow
def test_an_output_that_takes_nothing_stops_no_run(tmp_path: Path, where: str) -> None:
    script = tmp_path / "chatty.py"
    script.write_text(
        "import os, pathlib, torch, ragtag\nfor n in range(2000): print('line', n)\n"
        "with ragtag.join() as crew:\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    crew.optimizer(torch.optim.SGD(model.parameters()), model=model).average()\n"
        "pathlib.Path(os.environ['RAGTAG_RUN'], f\"done-{os.environ['RAGTAG_RANK']}\").touch()"
    )
    if where == "a full disk":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        read, out = os.pipe()
        os.close(read)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAGTAG_")} | {"PYTHONPATH": str(SRC)}
    command = [
        sys.executable,
        "-m",
        "ragtag.app.cli.main",
        "run",
        "-n",
        "2",
        "-o",
        str(tmp_path / "run"),
        str(script),
    ]
    done = subprocess.run(command, stdout=out, stderr=out, env=clean, cwd=tmp_path, timeout=60)
    os.close(out)
    assert done.returncode == 0
    assert {path.name for path in (tmp_path / "run").glob("done-*")} == {"done-0", "done-1"}


def test_what_was_lost_is_said_when_printing_works_again(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("ragtag.app.terminal.console.time.monotonic", lambda: now_s)
    ballast = small_disk / "ballast"
    with (small_disk / "log").open("w") as log:
        console = SparedConsole(file=log, width=200)
        with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        for n in range(50):
            console.print(n)
        assert console.lost == 50
        ballast.unlink()
        now_s += RETRY_S
        console.print("again")
    lines = (small_disk / "log").read_text().splitlines()
    assert lines[-1] == "again"
    assert "ragtag: 50 lines could not be printed here (the disk is full" in lines[-2]
