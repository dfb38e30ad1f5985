"""The launcher's side of peers on Ray, with objects of this process for actors, and real scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragtag.app.invitation.token import decode, kept_token
from ragtag.app.launch.events import Remark, Seated
from ragtag.app.on_ray.loop import FOLLOW_S
from ragtag.app.tracefile import crews, read_run, trace_files
from ragtag.core import trace
from tests.app.launch.launched import JOIN, lines
from tests.app.on_ray.stand_in import ActorUnavailableError, RayActorError, launched

LIVES = """
from pathlib import Path
lives = Path(sys.argv[0]).with_name(f"lives-{me}")
life = len(lives.read_text()) + 1 if lives.exists() else 1
lives.write_text("x" * life)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "peer.py"


def test_a_peer_that_ends_at_once_has_told_how_far_it_came(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(JOIN + "average()")
    for _ in range(3):
        result, _ = launched(monkeypatch, script, 2)
        assert result.finished == (0, 1)


def test_what_a_lost_peer_said_last_is_shown(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
average()
if life == 1:
    print("Traceback (most recent call last):\\n  of a library\\nRuntimeError: device", file=sys.stderr)
    os.kill(os.getpid(), 6)
"""
    script.write_text(JOIN + LIVES + text)
    result, events = launched(monkeypatch, script, 1)
    assert (result.restarts, result.finished) == (1, (0,))
    assert lines(events, 0, error=True)[-1] == "RuntimeError: device"


def test_the_trace_names_a_peer_by_its_number_in_the_crew(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
if life == 4:
    sys.exit(3)
tell("joined", 4 * life)
tell("averaged")
if life == 3:
    raise ValueError("no luck")
os.kill(os.getpid(), 9)
"""
    script.write_text(JOIN + LIVES + text)
    _, events = launched(monkeypatch, script, 1, tmp_path / "run")
    assert [e.seat for e in events if isinstance(e, Seated)] == [4, 8, 12]
    records = list(read_run(tmp_path / "run").records())
    assert [(r.peer, r.what) for r in records if isinstance(r, trace.Note)] == [(4, "lost"), (8, "lost")]
    assert [(r.peer, r.what) for r in records if isinstance(r, trace.Error)] == [(12, "ValueError: no luck")]


def test_the_traces_of_all_crews_that_a_script_forms_come_to_the_runs_folder(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import pathlib
folder = pathlib.Path(os.environ["RAGTAG_RUN"])
(folder / "crew-2").mkdir()
for number, where in enumerate((folder, folder / "crew-2"), 1):
    (where / f"peer-{me:02d}.jsonl").write_text(f"of crew {number}\\n")
average()
"""
    script.write_text(JOIN + text)
    launched(monkeypatch, script, 2, tmp_path / "run")
    first, second = crews(tmp_path / "run")
    assert [path.name for path in trace_files(first)] == ["crew.jsonl", "peer-00.jsonl", "peer-01.jsonl"]
    assert [path.read_text() for path in trace_files(second)] == ["of crew 2\n"] * 2


def test_a_peer_whose_actor_was_cut_off_for_a_while_goes_on(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for until it had been started again, which did not happen."""
    script.write_text(JOIN + LIVES + f"average()\ntime.sleep({1.5 * FOLLOW_S})\nprint('life', life)")
    result, events = launched(monkeypatch, script, 1, tmp_path / "run", ActorUnavailableError())
    assert (lines(events, 0), result.restarts, result.finished) == (["life 1"], 0, (0,))
    notes = [r for r in read_run(tmp_path / "run").records() if isinstance(r, trace.Note)]
    assert [(r.what, max(r.peer, r.other)) for r in notes] == [("lost", 0), ("back", 0)]


def test_the_invitation_in_the_runs_folder_is_through_peers_that_live(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import socket
average()
print(socket.socket(fileno=int(os.environ["RAGTAG_MEMBER_FD"])).getsockname()[1])
sys.stdout.flush()
if life == 1:
    os.kill(os.getpid(), 9)
"""
    script.write_text(JOIN + LIVES + text)
    _, events = launched(monkeypatch, script, 1, tmp_path / "run")
    first, second = map(int, lines(events, 0))
    assert first != second
    assert decode(kept_token(tmp_path / "run")).addresses == (("127.0.0.1", second),)


def test_a_peer_whose_actor_is_not_started_again_is_noted_as_lost(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(JOIN + f"average()\ntime.sleep({1.5 * FOLLOW_S})")
    result, _ = launched(monkeypatch, script, 1, tmp_path / "run", RayActorError("it died"))
    assert [end.lost for end in result.ends] == [True]
    notes = [r for r in read_run(tmp_path / "run").records() if isinstance(r, trace.Note)]
    assert [(r.what, r.peer, r.detail) for r in notes] == [("lost", 0, "its actor: it died")]


def test_one_that_is_lost_for_good_ends_the_others_where_an_error_does(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(JOIN + "average()\ntime.sleep(20)")
    result, events = launched(monkeypatch, script, 2, None, RayActorError("it died"), "stop")
    (lost,) = [end.peer for end in result.ends if end.lost]
    assert (result.stopped, result.ends[1 - lost].by) == (True, "launcher")
    said = f"peer {lost} is lost: ending the other 1"
    assert said in [event.text for event in events if isinstance(event, Remark)]
