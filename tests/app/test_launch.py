"""Peers as processes: their place, their output, their errors, their faults, and their end."""

from __future__ import annotations

import errno
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from ragtag.app.dashboard import watch
from ragtag.app.launch import LaunchError, launch
from ragtag.app.launch_events import Ended, Event, Injected, LaunchResult, Line, Ready, Said
from ragtag.app.report import report_json
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from ragtag.core.faultspec import parse_faults

SRC = Path(__file__).parents[2] / "src"
PATIENCE_S = 30.0

JOIN = """
import os, sys, time
me, n = int(os.environ["RAGTAG_RANK"]), int(os.environ["RAGTAG_SIZE"])
def join():
    os.write(int(os.environ["RAGTAG_READY_FD"]), b"%d\\n" % me)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "peer.py"


def run(script: Path, text: str, n: int, **options: object) -> tuple[LaunchResult, list[Event]]:
    script.write_text(JOIN + text)
    events: list[Event] = []
    result = launch(n, [str(script)], on_event=events.append, **options)  # type: ignore[arg-type]
    return result, events


def lines(events: list[Event], peer: int, error: bool = False) -> list[str]:
    return [e.text for e in events if isinstance(e, Line) and e.peer == peer and e.error == error]


def ends(events: list[Event]) -> list[Ended]:
    return [e for e in events if isinstance(e, Ended)]


# -- Starting


def test_each_peer_gets_its_place_and_a_socket_that_takes_what_comes_early(script: Path) -> None:
    text = """
import socket
from ragtag.app.environment import place_from_environment
place = place_from_environment()
sock = socket.socket(fileno=place.socket_fd)
assert sock.getsockname() == place.peers[me]
sock.settimeout(20)
sock.sendto(b"from %d" % me, place.peers[1 - me])  # the other may not run yet
print(place.crew, place.seed, place.faults.loss.p, sock.recv(100).decode(), sys.argv[1:])
"""
    script.write_text(JOIN + text)
    events: list[Event] = []
    env = {"PYTHONPATH": str(SRC)}
    faults = parse_faults("loss=0.25")
    argv = [str(script), "--lr", "0.1"]
    result = launch(2, argv, seed=5, faults=faults, env=env, crew="otters", on_event=events.append)
    assert result.exit_code == 0, events
    assert lines(events, 0) == ["otters 5 0.25 from 1 ['--lr', '0.1']"]
    assert lines(events, 1) == ["otters 5 0.25 from 0 ['--lr', '0.1']"]


def test_a_dead_peers_port_stays_taken(script: Path) -> None:
    script.write_text("import os; print(os.environ['RAGTAG_PEERS'])")
    peers: list[str] = []
    refused: list[int | None] = []

    def on_event(event: Event) -> None:
        if isinstance(event, Line):
            peers.append(event.text)
        if isinstance(event, Ended):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                try:
                    sock.bind(("127.0.0.1", int(peers[0].rpartition(":")[2])))
                except OSError as error:
                    refused.append(error.errno)

    launch(1, [str(script)], on_event=on_event)
    assert refused == [errno.EADDRINUSE]


def test_threads_are_shared_out_and_said_once(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _, events = run(script, "print(os.environ['OMP_NUM_THREADS'])", 2)
    said = [e.text for e in events if isinstance(e, Said)]
    assert len(said) == 1
    assert said[0].startswith(f"OMP_NUM_THREADS={lines(events, 0)[0]} in each peer (2 peers")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    _, events = run(script, "print(os.environ['OMP_NUM_THREADS'])", 1)
    assert lines(events, 0) == ["7"]
    assert not [e for e in events if isinstance(e, Said)]


def test_a_peers_place_is_not_inherited_by_a_crew_that_it_starts(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGTAG_RUN", "/elsewhere")
    _, events = run(script, "print(os.environ.get('RAGTAG_RUN'))", 1)
    assert lines(events, 0) == ["None"]


def test_a_module_runs_too(tmp_path: Path) -> None:
    (tmp_path / "someones_module.py").write_text("import sys; print(sys.argv[1:])")
    events: list[Event] = []
    argv = ["-m", "someones_module", "-x"]
    assert launch(1, argv, env={"PYTHONPATH": str(tmp_path)}, on_event=events.append).exit_code == 0
    assert lines(events, 0) == ["['-x']"]


def test_what_cannot_be_started_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.write_text("")
    with pytest.raises(LaunchError, match=r"there is no script nowhere\.py"):
        launch(2, ["nowhere.py"])
    with pytest.raises(LaunchError, match="is a folder"):
        launch(2, [str(tmp_path)])
    with pytest.raises(LaunchError, match="nothing to run"):
        launch(2, [])
    for n in (0, 65):
        with pytest.raises(LaunchError, match=f"{n} peers: one crew averages 1 to 64"):
            launch(n, [str(script)])
    with pytest.raises(LaunchError, match="names peer 2, but the 2 peers"):
        launch(2, [str(script)], faults=parse_faults("kill=2@1"))
    (tmp_path / "crew.jsonl").write_text("")
    with pytest.raises(LaunchError, match="holds the trace of a run already"):
        launch(2, [str(script)], run_folder=tmp_path)


def test_only_the_main_thread_launches(script: Path) -> None:
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            run(script, "", 1)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(PATIENCE_S)
    assert "main thread" in str(caught[0])


def test_signal_handlers_are_as_before(script: Path) -> None:
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in watched]
    run(script, "", 1)
    assert [signal.getsignal(number) for number in watched] == before


# -- Output and errors


def test_output_comes_line_by_line_with_its_peer_and_stream(script: Path) -> None:
    _, events = run(script, "print('out', me); print('err', me, file=sys.stderr); print('end', end='')", 2)
    for peer in (0, 1):
        assert lines(events, peer) == [f"out {peer}", "end"]
        assert lines(events, peer, error=True) == [f"err {peer}"]


def test_a_line_of_a_megabyte_is_cut_and_comes_whole(script: Path) -> None:
    _, events = run(script, "sys.stdout.write('x' * 1_000_000)", 1)
    assert "".join(lines(events, 0)) == "x" * 1_000_000


RAISES = """
if me != 1:
    raise ValueError("no such thing as a free lunch")
print("lunch")
"""


def test_the_same_error_of_several_peers_comes_once_and_the_others_go_on(
    script: Path, tmp_path: Path
) -> None:
    result, events = run(script, RAISES, 3, run_folder=tmp_path / "run")
    failed = [end for end in ends(events) if end.failed]
    assert (result.exit_code, result.failed) == (1, (0, 2))
    assert sorted(end.peer for end in failed) == [0, 2]
    assert failed[0].error.splitlines()[-1] == "ValueError: no such thing as a free lunch"
    assert failed[0].same_as is None
    assert failed[1].same_as == failed[0].peer
    assert not [e for e in events if isinstance(e, Line) and e.error]  # only in Ended, not as lines too
    assert lines(events, 1) == ["lunch"]
    records = list(read_run(tmp_path / "run").records())
    assert isinstance(records[-1], trace.Leave)  # the launcher has seen it to its end
    assert records[-1].peer == trace.CREW
    errors = [r for r in records if isinstance(r, trace.Error)]
    assert [(r.peer, r.what) for r in errors] == [
        (end.peer, "ValueError: no such thing as a free lunch") for end in failed
    ]


def test_on_error_stop_ends_the_others(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragtag.app.output.HOLD_S", 0.01)  # peers take longer to end than that
    text = """
import atexit, socket
sock = socket.socket(fileno=int(os.environ["RAGTAG_FD"]))
host, port = os.environ["RAGTAG_PEERS"].split(",")[0].split(":")
if me == 0:
    sock.settimeout(20)
    sock.recv(1), sock.recv(1)  # the others run
    raise ValueError("enough")
atexit.register(time.sleep, 0.2)
sock.sendto(b"x", (host, int(port)))
time.sleep(60)
"""
    result, events = run(script, text, 3, on_error="stop")
    assert [end.by for end in result.ends] == ["itself", "launcher", "launcher"]
    assert (result.exit_code, result.failed) == (1, (0,))
    for peer in (1, 2):
        assert lines(events, peer, error=True) == []  # no tracebacks of KeyboardInterrupt
    assert result.wall_s < PATIENCE_S


def test_a_traceback_that_a_peer_survives_is_passed_on(script: Path) -> None:
    result, events = run(
        script, "import logging\ntry: 1/0\nexcept ZeroDivisionError: logging.exception('x')", 1
    )
    assert result.exit_code == 0
    assert lines(events, 0, error=True)[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("sys.exit(3)", "exit status 3"),
        ("sys.exit('with words')", "exit status 1"),
        ("import signal; os.kill(os.getpid(), signal.SIGABRT)", "ended by SIGABRT"),
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL"),
    ],
)
def test_other_bad_ends_are_told(script: Path, text: str, how: str) -> None:
    result, events = run(script, text, 1)
    assert [end.how for end in ends(events)] == [how]
    assert result.exit_code == 1


def test_what_a_peer_has_started_ends_with_it(script: Path) -> None:
    text = """
import subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
"""
    result, _ = run(script, text, 1)  # the child holds the pipes: the launcher would wait for it
    assert result.wall_s < PATIENCE_S


# -- Faults


def test_a_peer_is_frozen_and_one_killed_once_all_have_joined(script: Path, tmp_path: Path) -> None:
    text = """
join()
if me == 0:
    before = time.monotonic()
    longest, until = 0.0, before + 20
    while longest < 0.2 and (now := time.monotonic()) < until:
        longest, before = max(longest, now - before), now
        time.sleep(0.005)
    print(longest >= 0.2)
if me == 1:
    time.sleep(60)
"""
    faults = parse_faults("freeze=0@0.05+0.3,kill=1@0.1,loss=0.1")
    result, events = run(script, text, 3, faults=faults, run_folder=tmp_path / "run", seed=9)
    assert lines(events, 0) == ["True"]
    assert (result.exit_code, result.ends[1].by, result.ends[1].status) == (0, "fault", -9)
    ready = next(e for e in events if isinstance(e, Ready))
    assert {0, 1} <= set(ready.peers)
    run_trace = read_run(tmp_path / "run")
    assert run_trace.run is not None
    assert (run_trace.run.seed, run_trace.run.peers, run_trace.run.name) == (9, 3, "peer")
    records = [r for r in run_trace.records() if isinstance(r, trace.Fault)]
    assert [(r.name, r.peer) for r in records] == [("loss", -1), ("freeze", 0), ("kill", 1)]
    assert records[1].until_t == pytest.approx(records[1].t + 0.3)
    assert records == [e.record for e in events if isinstance(e, Injected)]
    assert not run_trace.damage.messages()


def test_the_run_record_comes_again_once_a_peer_says_by_what_it_averages(
    script: Path, tmp_path: Path
) -> None:
    text = """
from ragtag.app.environment import announce_ready, place_from_environment
announce_ready(place_from_environment(), "ring")
"""
    _, events = run(script, text, 2, run_folder=tmp_path / "run", env={"PYTHONPATH": str(SRC)}, seed=4)
    assert not [e for e in events if isinstance(e, Line)]
    found = read_run(tmp_path / "run")
    first, again = [r for r in found.records() if isinstance(r, trace.Run)]
    assert (first.t, first.method, again.method) == (0.0, "", "ring")
    assert again == msgspec.structs.replace(first, t=again.t, method="ring")
    assert found.run == again
    assert report_json(tmp_path / "run")["damage"] == []  # it is one run


def test_a_method_that_is_given_stands_and_one_peer_averages_with_nobody(
    script: Path, tmp_path: Path
) -> None:
    given = trace.Run(t=0.0, world="live", name="x", seed=0, peers=0, method="rps")
    run(script, "join()", 1, run_folder=tmp_path / "given", run=given)
    run(script, "join()", 1, run_folder=tmp_path / "alone")
    for name, method in (("given", "rps"), ("alone", "none")):
        (record,) = [r for r in read_run(tmp_path / name).records() if isinstance(r, trace.Run)]
        assert record.method == method


def test_without_a_crew_no_fault_is_injected_and_it_is_said(script: Path) -> None:
    result, events = run(script, "", 2, faults=parse_faults("kill=0@0"))
    assert result.exit_code == 0
    assert [e.text for e in events if isinstance(e, Said)][-1].startswith("no fault was injected")


def test_peers_that_ended_before_the_others_joined_are_not_waited_for(script: Path) -> None:
    result, events = run(
        script, "if me == 0: sys.exit(0)\njoin(); time.sleep(60)", 2, faults=parse_faults("kill=1@0")
    )
    assert result.ends[1].by == "fault"
    assert [e.peers for e in events if isinstance(e, Ready)] == [(1,)]


# -- Ends, from outside

LAUNCHER = """
import json, sys
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
join()
print("up", flush=True)
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
            name = f"{kind} {fields['text']}" if kind == "Line" else kind
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
        launcher.until("Line up", "Line up", "Line up", "Injected")
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
    crew.until("Said")
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
        launcher.until("Line up", "Line up")
        assert launcher.process.stdout is not None
        launcher.process.stdout.close()  # the next event breaks the pipe
        os.kill(launcher.process.pid, signal.SIGTERM)
        assert launcher.all_ended()
        assert launcher.process.wait(PATIENCE_S) != 0
    finally:
        launcher.close()
