"""Peers as processes: their place, and what cannot be started."""

from __future__ import annotations

import errno
import resource
import signal
import socket
import threading
from pathlib import Path

import pytest

from ragtag.app.launch import LaunchError, launch
from ragtag.app.launch.events import Ended, Event, Printed, Remark
from ragtag.core.faultspec import parse_faults
from tests.app.launch.launched import JOIN, PATIENCE_S, SRC, lines, run


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "peer.py"


def test_each_peer_gets_its_place_and_a_socket_that_takes_what_comes_early(script: Path) -> None:
    text = """
import socket
from ragtag.app.environment import place_from_environment
place = place_from_environment()
sock = socket.socket(fileno=place.socket_fd)
assert sock.getsockname() == place.peers[me]
assert not place.faults.freezes + place.faults.crashes + place.faults.slow  # these are the launcher's to do
sock.settimeout(20)
sock.sendto(b"from %d" % me, place.peers[1 - me])  # the other may not run yet
print(place.crew, place.seed, place.faults.loss.p, sock.recv(100).decode(), sys.argv[1:])
"""
    script.write_text(JOIN + text)
    events: list[Event] = []
    env = {"PYTHONPATH": str(SRC)}
    faults = parse_faults("loss=0.25,freeze=0@90+4,kill=1@95,slow=0x2@90+1")
    argv = [str(script), "--lr", "0.1"]
    result = launch(2, argv, seed=5, faults=faults, env=env, crew="otters", on_event=events.append)
    assert result.failed == (), events
    assert lines(events, 0) == ["otters 5 0.25 from 1 ['--lr', '0.1']"]
    assert lines(events, 1) == ["otters 5 0.25 from 0 ['--lr', '0.1']"]


def test_more_peers_are_started_than_average_directly(script: Path) -> None:
    script.write_text(
        "import os\nprint(os.environ['RAGTAG_RANK'], len(set(os.environ['RAGTAG_PEERS'].split(','))), "
        "len(set(os.environ['RAGTAG_MEMBERS'].split(','))))"
    )
    events: list[Event] = []
    result = launch(66, [str(script)], on_event=events.append)
    assert result.failed == ()
    assert [lines(events, peer) for peer in range(66)] == [[f"{peer} 66 66"] for peer in range(66)]


def test_so_many_peers_that_the_system_forbids_their_files_are_refused(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text("")
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits))
    with pytest.raises(LaunchError, match="so many peers need 1328 open files here, 1000 are allowed"):
        launch(200, [str(script)])
    assert launch(50, [str(script)]).failed == ()
    assert asked == [(428, 1000)]


def test_a_dead_peers_port_stays_taken(script: Path) -> None:
    script.write_text("import os; print(os.environ['RAGTAG_PEERS'])")
    peers: list[str] = []
    refused: list[int | None] = []

    def on_event(event: Event) -> None:
        if isinstance(event, Printed):
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
    said = [e.text for e in events if isinstance(e, Remark)]
    assert len(said) == 1
    assert said[0].startswith(f"each peer computes with {lines(events, 0)[0]} thread")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    _, events = run(script, "print(os.environ['OMP_NUM_THREADS'])", 1)
    assert lines(events, 0) == ["7"]
    assert not [e for e in events if isinstance(e, Remark)]


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
    assert launch(1, argv, env={"PYTHONPATH": str(tmp_path)}, on_event=events.append).failed == ()
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
    for n in (0, 1025):
        with pytest.raises(LaunchError, match=f"{n} peers: a crew has 1 to 1024"):
            launch(n, [str(script)])
    with pytest.raises(LaunchError, match="names peer 2, but the 2 peers"):
        launch(2, [str(script)], faults=parse_faults("kill=2@1"))
    for min_peers in (0, 3):
        with pytest.raises(LaunchError, match=f"--min-peers {min_peers}: of 2 peers 1 to 2 can finish"):
            launch(2, [str(script)], min_peers=min_peers)
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
