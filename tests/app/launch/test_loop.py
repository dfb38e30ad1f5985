"""Peers as processes: their output, their errors, their faults."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ragtag.app.environment import Reached
from ragtag.app.invitation.token import Token, encode, new_key
from ragtag.app.launch.events import Ended, Injected, Printed, Ready, Remark, Seated
from ragtag.app.report import report_json
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from ragtag.core.faultspec import parse_faults
from tests.app.launch.launched import PATIENCE_S, SRC, ends, lines, run


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "peer.py"


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
average()
print("lunch")
"""


def test_the_same_error_of_several_peers_comes_once_and_the_others_go_on(
    script: Path, tmp_path: Path
) -> None:
    result, events = run(script, RAISES, 3, run_folder=tmp_path / "run")
    failed = [end for end in ends(events) if end.failed]
    assert (result.exit_code, result.failed, result.finished) == (1, (0, 2), (1,))
    assert sorted(end.peer for end in failed) == [0, 2]
    assert failed[0].error.splitlines()[-1] == "ValueError: no such thing as a free lunch"
    assert failed[0].same_as is None
    assert failed[1].same_as == failed[0].peer
    assert not [e for e in events if isinstance(e, Printed) and e.error]  # only in Ended, not as lines too
    assert lines(events, 1) == ["lunch"]
    records = list(read_run(tmp_path / "run").records())
    assert isinstance(records[-1], trace.Leave)  # the launcher has seen it to its end
    assert records[-1].peer == trace.CREW
    errors = [r for r in records if isinstance(r, trace.Error)]
    assert [(r.peer, r.what) for r in errors] == [
        (end.peer, "ValueError: no such thing as a free lunch") for end in failed
    ]


def test_on_error_stop_ends_the_others(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragtag.app.terminal.output.HOLD_S", 0.01)  # peers take longer to end than that
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
    assert result.failed == ()
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
average()
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
from ragtag.app.environment import Announcer, Reached, place_from_environment
place = place_from_environment()
Announcer(place.rank, place.ready_fd).tell(Reached.READY, "ring")
"""
    _, events = run(script, text, 2, run_folder=tmp_path / "run", env={"PYTHONPATH": str(SRC)}, seed=4)
    assert not [e for e in events if isinstance(e, Printed)]
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
    token = encode(Token((("127.0.0.1", 4321),), "otters", new_key()))
    run(script, "join()", 1, run_folder=tmp_path / "invited", token=token)
    for name, method, peers in (("given", "rps", 1), ("alone", "none", 1), ("invited", "", 0)):
        (record,) = [r for r in read_run(tmp_path / name).records() if isinstance(r, trace.Run)]
        assert (record.method, record.peers) == (method, peers)


def test_without_a_crew_no_fault_is_injected_and_it_is_said(script: Path) -> None:
    result, events = run(script, "", 2, faults=parse_faults("kill=0@0"))
    assert result.failed == ()
    assert [e.text for e in events if isinstance(e, Remark)][-1].startswith("no fault was injected")


def test_faults_that_come_after_a_peers_end_or_the_runs_are_named(script: Path) -> None:
    faults = parse_faults("kill=0@2,kill=1@2.1,freeze=1@300+2,kill=1@301")
    _, events = run(script, "join()\nif me == 1:\n    time.sleep(60)", 2, faults=faults)
    assert [e.record.detail for e in events if isinstance(e, Injected)] == ["kill=1@2.1"]
    said = [e.text for e in events if isinstance(e, Remark)][-1]
    assert said.startswith("not injected"), said
    assert said.endswith(": kill=0@2, freeze=1@300+2, kill=1@301"), said


def test_peers_that_ended_before_the_others_joined_are_not_waited_for(script: Path) -> None:
    result, events = run(
        script, "if me == 0: sys.exit(0)\njoin(); time.sleep(60)", 2, faults=parse_faults("kill=1@0")
    )
    assert result.ends[1].by == "fault"
    assert [e.peers for e in events if isinstance(e, Ready)] == [(1,)]


# -- Who finished, who is lost, who is started again


@pytest.mark.parametrize(
    ("text", "reached"),
    [("", Reached.STARTED), ("tell('joined', me)", Reached.JOINED), ("join()", Reached.READY)],
)
def test_peers_that_average_nothing_have_not_finished(script: Path, text: str, reached: Reached) -> None:
    result, _ = run(script, text, 2)
    assert [(end.status, end.reached, end.finished) for end in result.ends] == [(0, reached, False)] * 2
    assert result.exit_code == 1


def test_one_peer_alone_that_averages_with_itself_has_finished(script: Path) -> None:
    assert run(script, "average()", 1)[0].exit_code == 0


DIES = """
average()
if me == 1:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("min_peers", "code"), [(1, 0), (2, 0), (3, 1)])
def test_a_lost_peer_is_no_failure_where_enough_finish(
    script: Path, tmp_path: Path, min_peers: int, code: int
) -> None:
    result, _ = run(script, DIES, 3, min_peers=min_peers, run_folder=tmp_path / "run")
    assert (result.exit_code, result.failed, result.finished) == (code, (), (0, 2))
    assert [end.lost for end in result.ends] == [False, True, False]
    records = list(read_run(tmp_path / "run").records())
    assert [(r.peer, r.what, r.detail) for r in records if isinstance(r, trace.Note)] == [
        (1, "lost", "ended by SIGKILL")
    ]
    assert not [r for r in records if isinstance(r, trace.Error)]


def test_a_script_that_fails_makes_the_run_fail_however_many_finish(script: Path) -> None:
    result, _ = run(script, "average()\nif me == 1: sys.exit(3)", 3)
    assert (result.exit_code, result.failed, result.finished) == (1, (1,), (0, 2))


def test_on_error_stop_ends_the_others_of_a_lost_peer_and_the_run_has_failed(script: Path) -> None:
    result, events = run(
        script, "average()\nif me == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)", 2, on_error="stop"
    )
    assert (result.exit_code, result.stopped, result.ends[0].by) == (1, True, "launcher")
    assert "peer 1 is lost: ending the other 1" in [e.text for e in events if isinstance(e, Remark)]


AGAIN = """
import contextlib
from pathlib import Path
place = {name: os.environ.get("RAGTAG_" + name) for name in ("TOKEN", "MEMBERS", "NAME")}
print("newcomer" if place["TOKEN"] else "founder", place["NAME"], flush=True)
lives = Path(sys.argv[0]).with_name(f"lives-{me}")
life = len(lives.read_text()) + 1 if lives.exists() else 1
def wait_for(peer, lives):
    file, until = Path(sys.argv[0]).with_name(f"lives-{peer}"), time.monotonic() + 20
    while (not file.exists() or len(file.read_text()) < lives) and time.monotonic() < until:
        time.sleep(0.01)
lives.write_text("x" * life)
"""


def test_a_lost_peer_is_started_again_as_a_newcomer_so_many_times_in_all(script: Path) -> None:
    text = AGAIN + "average()\nif me == 1: os.kill(os.getpid(), 9)\nwait_for(1, 3)"
    result, events = run(script, text, 2, restarts=2)
    assert lines(events, 0) == ["founder None"]
    assert lines(events, 1) == ["founder None", "newcomer peer-1-2", "newcomer peer-1-3"]
    said = [e.text for e in events if isinstance(e, Remark) if "started again" in e.text]
    assert said == [f"peer 1 is lost (ended by SIGKILL) and started again ({k} of 2)" for k in (1, 2)]
    assert [e.peer for e in events if isinstance(e, Ended)] in ([0, 1], [1, 0])  # each ends once
    assert (result.restarts, result.finished, result.ends[1].lost, result.exit_code) == (2, (0,), True, 0)


def test_a_peer_that_a_fault_kills_is_started_again_too_and_may_finish(script: Path) -> None:
    text = (
        AGAIN + "average()\nif me == 1 and life == 1: time.sleep(60)\n"
        "if life == 2: lives.write_text('xxx')\nif me == 0: wait_for(1, 3)"  # else it might come too late
    )
    result, _ = run(script, text, 2, restarts=1, faults=parse_faults("kill=1@0"))
    assert (result.restarts, result.finished, result.exit_code) == (1, (0, 1), 0)


def test_a_peer_that_is_lost_before_it_joined_takes_its_first_place_again(script: Path) -> None:
    text = AGAIN + "if life == 1: os.kill(os.getpid(), 9)\naverage()\nwait_for(1 - me, 2)"  # else it is over
    result, events = run(script, text, 2, restarts=2)
    assert lines(events, 0) == lines(events, 1) == ["founder None"] * 2
    assert (result.restarts, result.finished) == (2, (0, 1))


def test_a_peer_alone_is_started_again_in_its_place(script: Path) -> None:
    result, events = run(script, AGAIN + "average()\nif life == 1: os.kill(os.getpid(), 9)", 1, restarts=1)
    assert (lines(events, 0), result.finished) == (["founder None"] * 2, (0,))


def test_once_the_others_have_finished_one_that_comes_too_late_is_ended_and_no_failure(script: Path) -> None:
    """It waited for members that had left, and failed: so did the run, although the training was done."""
    text = (
        AGAIN + "if life == 2: time.sleep(60)\naverage()\nif me == 1: os.kill(os.getpid(), 9)\nwait_for(1, 2)"
    )
    result, events = run(script, text, 2, restarts=1)
    late = "the training is over: peer 1, started again, came too late and is ended"
    assert late in [e.text for e in events if isinstance(e, Remark)]
    assert (result.finished, result.failed, result.exit_code) == ((0,), (), 0)
    assert (result.ends[1].by, result.ends[1].status) == ("launcher", -15) and result.wall_s < 30


def test_once_the_others_have_finished_nobody_is_started_again(script: Path) -> None:
    """It began the crew anew, alone."""
    text = (
        AGAIN
        + """
average()
pid = Path(sys.argv[0]).with_name("pid")
if me == 0:
    pid.write_text(f"{os.getpid()} .")
else:
    until = time.monotonic() + 20
    while not (pid.exists() and pid.read_text().endswith(".")) and time.monotonic() < until:
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):  # the launcher has taken note of its end then
        while time.monotonic() < until:
            os.kill(int(pid.read_text().split()[0]), 0)
            time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""
    )
    result, events = run(script, text, 2, restarts=1)
    assert lines(events, 1) == ["founder None"]
    assert (result.finished, result.restarts, result.exit_code) == ((0,), 0, 0)


def test_a_script_that_fails_is_not_started_again(script: Path) -> None:
    result, _ = run(script, "average()\nsys.exit(2)", 1, restarts=3)
    assert (result.restarts, result.exit_code) == (0, 1)


def test_where_all_are_lost_one_begins_the_crew_anew_and_the_others_enter_through_it(script: Path) -> None:
    text = (
        AGAIN
        + """
from ragtag.app.invitation.token import decode
if life == 2:
    print(sorted(port for _, port in decode(place["TOKEN"]).addresses))
elif me == 1:
    average()
    wait_for("0-joined", 1)  # else it finds nobody to invite it
    os.kill(os.getpid(), 9)
else:
    average()
    lives.with_name("lives-0-joined").write_text("x")
    wait_for(1, 2)  # the other is a newcomer by now
    os.kill(os.getpid(), 9)
"""
    )
    env = {"PYTHONPATH": str(SRC)}
    _, events = run(script, text, 2, restarts=2, env=env)
    (through_0,), (through_1,) = ([lines(events, peer)[-1]] for peer in (1, 0))
    assert lines(events, 0)[0] == "founder None"
    assert through_0.startswith("[") and through_1.startswith("[")
    # peer 1 was invited by peer 0; peer 0, of which nobody was left, by itself: at the same address
    assert through_0 == through_1


def test_the_number_in_the_crew_is_told_whenever_it_changes(script: Path) -> None:
    _, events = run(script, "tell('joined', 4)\ntell('averaged')\ntell('joined', 9)", 1)
    assert [(e.peer, e.seat) for e in events if isinstance(e, Seated)] == [(0, 4), (0, 9)]


def told_of_errors(folder: Path) -> list[tuple[int, str]]:
    return [(r.peer, r.what) for r in read_run(folder).records() if isinstance(r, trace.Error)]


def test_the_trace_names_a_peer_by_its_number_in_the_crew(script: Path, tmp_path: Path) -> None:
    text = (
        AGAIN
        + """
tell("joined", me + 4 * (life - 1))
tell("averaged")
if me == 0:
    time.sleep(60)
if life == 3:
    raise ValueError("no luck")
os.kill(os.getpid(), 9)
"""
    )
    run(script, text, 2, restarts=2, on_error="stop", run_folder=tmp_path / "run")
    notes = [r for r in read_run(tmp_path / "run").records() if isinstance(r, trace.Note)]
    assert [(r.peer, r.what) for r in notes] == [(1, "lost"), (5, "lost"), (-1, "stopping")]
    assert told_of_errors(tmp_path / "run") == [(9, "ValueError: no luck")]


def test_one_that_ends_before_it_has_joined_anew_is_no_peer_of_the_crew(script: Path, tmp_path: Path) -> None:
    text = (
        AGAIN
        + """
if life == 3:
    sys.exit(3)
if life == 1:
    average()
if me == 0:
    time.sleep(60)
os.kill(os.getpid(), 9)
"""
    )
    run(script, text, 2, restarts=2, on_error="stop", run_folder=tmp_path / "run")
    notes = [r for r in read_run(tmp_path / "run").records() if isinstance(r, trace.Note)]
    assert [(r.peer, r.what) for r in notes] == [
        (1, "lost"),
        (-1, "peer 1 of this launcher is lost before it joined"),
        (-1, "stopping"),
    ]
    assert told_of_errors(tmp_path / "run") == [
        (-1, "peer 1 of this launcher, before it joined: exit status 3")
    ]


def test_a_fault_of_a_process_is_written_of_its_number_in_the_crew(script: Path, tmp_path: Path) -> None:
    text = "tell('joined', 4 + me)\ntell('ready')\ntime.sleep(60 * (me == 0))"
    run(script, text, 2, faults=parse_faults("oneway=1>0,kill=0@0"), run_folder=tmp_path / "run")
    records = list(read_run(tmp_path / "run").records())
    assert [(r.peer, r.name) for r in records if isinstance(r, trace.Fault)] == [(0, "oneway"), (4, "kill")]
