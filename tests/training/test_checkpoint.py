"""What is in a checkpoint's folder can always be loaded, whoever dies, fills the disk or flips a bit."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragtag.training.state.capture import capture, restore
from ragtag.training.state.checkpoint import Checkpoints, NoWholeCheckpoint
from ragtag.training.state.checkpoint_file import HEADER_BYTES, Damage, Header, read_whole
from ragtag.training.state.snapshot import Snapshot
from tests.training.test_state import crew, net, sgd, train

PLAIN = {"class": "SGD", "defaults": [], "names": [], "param_groups": [], "state": {}}


def snapshot(step: int, size: int = 10, round: int | None = None) -> Snapshot:
    at = step if round is None else round
    return Snapshot(step, at, 0, {"w": torch.full((size,), float(step))}, PLAIN)


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.rsplit("-", 1)[1]) for path in folder.glob("*.ragtag"))


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".ragtag")


def test_the_newest_is_found_whoever_wrote_it(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    assert Checkpoints(folder).latest() is None
    path = Checkpoints(folder, peer=3).save(snapshot(120))
    assert path == folder / "peer-03-step-000120.ragtag"
    Checkpoints(folder, peer=1).save(snapshot(100), round=130)
    Checkpoints(folder, peer=2).save(snapshot(5), step=101, round=130)
    Checkpoints(folder, peer=70_000).save(snapshot(1))
    (folder / "notes.txt").write_text("mine")
    found = Checkpoints(folder).latest()
    assert found is not None
    assert (found.peer, found.step, found.round, found.damaged) == (2, 101, 130, ())
    assert found.path == folder / "peer-02-step-000101.ragtag"
    assert found.snapshot.step == 5
    assert leftovers(folder) == ["notes.txt"]


def test_each_peer_keeps_its_newest(tmp_path: Path) -> None:
    mine, other = Checkpoints(tmp_path, peer=0, keep=2), Checkpoints(tmp_path, peer=1, keep=1)
    for step in (1, 2, 3, 4):
        mine.save(snapshot(step))
        other.save(snapshot(step + 10))
    assert steps(tmp_path) == [3, 4, 14]
    flip(tmp_path / "peer-00-step-000004.ragtag", 20)
    mine.save(snapshot(2))  # began again from an earlier one
    assert steps(tmp_path) == [2, 3, 14]
    mine.save(snapshot(2, size=3))
    found = mine.latest()
    assert found is not None
    assert found.step == 14
    mine.save(snapshot(2, size=4), round=99)
    found = mine.latest()
    assert found is not None
    assert found.snapshot.model["w"].shape == (4,)


def test_training_goes_on_from_a_checkpoint_with_another_number_of_peers(tmp_path: Path) -> None:
    model = net(1)
    optimizer = crew(sgd(model), model)
    train(model, optimizer, 0, 3)
    Checkpoints(tmp_path, peer=7).save(capture(optimizer._averaged))
    train(model, optimizer, 3, 5)
    found = Checkpoints(tmp_path, peer=0).latest()
    assert found is not None
    other = net(2)
    fresh = crew(sgd(other), other)
    restore(found.snapshot, fresh._averaged)
    train(other, fresh, found.step, 5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    wide = torch.nn.Linear(5, 9)
    with pytest.raises(
        ValueError, match=r"'weight' \(9, 5\) float32 is in this model and not in the snapshot"
    ):
        restore(found.snapshot, crew(sgd(wide), wide)._averaged)


# -- Damage


@given(st.data())
def test_a_flipped_bit_anywhere_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    path = Checkpoints(folder).save(snapshot(1))
    flip(path, data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(0, 7)))
    with pytest.raises(NoWholeCheckpoint, match=r"peer-00-step-000001\.ragtag: ") as raised:
        Checkpoints(folder).latest()
    assert [damaged.path for damaged in raised.value.damaged] == [path]


@given(st.data())
def test_a_file_cut_off_anywhere_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    path = Checkpoints(folder).save(snapshot(1))
    os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    with pytest.raises(NoWholeCheckpoint, match="truncated: "):
        Checkpoints(folder).latest()


@given(st.binary(max_size=200))
def test_bytes_of_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(Damage):
        Header.decode(data)


def test_damaged_ones_are_named_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=10)
    paths = [checkpoints.save(snapshot(step)) for step in range(1, 10)]
    words = b"its hash is right, and it is no snapshot"
    flip(paths[8], paths[8].stat().st_size - 1)
    os.truncate(paths[7], 200)
    paths[6].write_bytes(paths[6].read_bytes() + b"more")
    _other_version(paths[5])
    flip(paths[4], HEADER_BYTES - 1)
    paths[3].unlink()
    os.mkfifo(paths[3])
    paths[2].write_bytes(_whole(words, 3))
    flip(paths[0], HEADER_BYTES + 1)  # older than the one that is taken: not looked at
    with caplog.at_level(logging.WARNING, "ragtag.checkpoint"):
        found = checkpoints.latest()
    assert found is not None
    assert found.step == 2
    assert {damaged.path: damaged.why for damaged in found.damaged} == {
        paths[8]: "the hash of its content differs",
        paths[7]: f"truncated: {200 - HEADER_BYTES} bytes of content, and its header says {_size(paths[1])}",
        paths[6]: "4 bytes follow its content",
        paths[5]: "format version 3, and this ragtag reads 1 to 2",
        paths[4]: "the hash of its header differs",
        paths[3]: "it is no regular file",
        paths[
            2
        ]: f"no snapshot: a header of {int.from_bytes(words[:8], 'little')} bytes; at most 67108864 are read",
    }
    assert all(str(path) in caplog.text for path in paths[2:])
    assert str(found.damaged[0].path) in str(found.damaged[0])


def _size(path: Path) -> int:
    return path.stat().st_size - HEADER_BYTES


def _whole(content: bytes, step: int) -> bytes:
    return Header.of(content, peer=0, step=step, round=step).encode() + content


def _other_version(path: Path) -> None:
    from ragtag.training.state import checkpoint_file as module

    data = path.read_bytes()
    body = data[:8] + (3).to_bytes(4, "little") + data[12 : HEADER_BYTES - 16]
    path.write_bytes(body + module._check(body) + data[HEADER_BYTES:])


def test_what_is_too_large_is_neither_written_nor_read(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(snapshot(1, size=1_000))
    small = Checkpoints(tmp_path, bytes_max=3_000)
    with pytest.raises(NoWholeCheckpoint, match="at most 3000 are read"):
        small.latest()
    with pytest.raises(ValueError, match="checkpoints have at most 3000"):
        small.save(snapshot(2, size=1_000))
    header, content = read_whole(path, 10_000)
    assert (header.step, header.n_bytes) == (1, len(content))


def test_a_link_to_nothing_is_named_and_passed_over(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(snapshot(1))
    link = tmp_path / "peer-01-step-000002.ragtag"
    link.symlink_to(tmp_path / "nowhere")
    found = Checkpoints(tmp_path).latest()
    assert found is not None
    assert (found.step, [damaged.path for damaged in found.damaged]) == (1, [link])
    assert found.damaged[0].why == "it is a link to a file that is not there"
    link.unlink()
    link.symlink_to(link)
    assert "Too many levels of symbolic links" in str(Checkpoints(tmp_path).latest())
    link.unlink()
    (tmp_path / "peer-00-step-000001.ragtag").rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    found = Checkpoints(tmp_path).latest()
    assert found is not None
    assert found.path == link, "a link to a checkpoint is one"


@pytest.mark.parametrize("filled", ["nothing", "the header", "the layout"])
def test_a_file_of_forty_gigabytes_that_was_never_filled(tmp_path: Path, filled: str) -> None:
    """It has its length and no blocks, as one has whose copy was cut. Nobody waits until it is read."""
    Checkpoints(tmp_path).save(snapshot(1))
    content = snapshot(2).to_bytes()
    header = Header.of(content, peer=1, step=2, round=2)._replace(n_bytes=40 << 30)
    path = tmp_path / "peer-01-step-000002.ragtag"
    begin = {"nothing": b"", "the header": header.encode(), "the layout": header.encode() + content}[filled]
    path.write_bytes(begin)
    os.truncate(path, HEADER_BYTES + (40 << 30))
    found = Checkpoints(tmp_path).latest()
    assert found is not None
    assert found.step == 1
    assert [damaged.path for damaged in found.damaged] == [path]
    assert {
        "nothing": "it does not begin as a checkpoint does",
        "the header": "no snapshot: its header is damaged: Input data was truncated",
        "the layout": f"no snapshot: its tensors end at {len(content)}, and it has {40 << 30} bytes",
    }[filled] == found.damaged[0].why


def test_one_that_is_removed_while_it_is_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(snapshot(1))
    real, seen = os.open, []

    def gone(name: Any, *rest: Any, **more: Any) -> int:
        if name == path and len(seen) < 1:
            seen.append(name)
            path.rename(tmp_path / "peer-00-step-000002.ragtag")
        return real(name, *rest, **more)

    monkeypatch.setattr(os, "open", gone)
    found = checkpoints.latest()
    assert found is not None
    assert (found.path, found.damaged, seen) == (tmp_path / "peer-00-step-000002.ragtag", (), [path])


# -- What the disk does


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("call", ["write", "fsync", "open"])
def test_an_error_of_the_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(snapshot(1))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    real = getattr(os, call)
    calls: list[object] = []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        if call == "write" and len(calls) == 1:  # the disk is full in the middle
            return real(arguments[0], arguments[1][:50])
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(
            OSError, match=r"checkpoint not written \(.*\); earlier ones are as they were"
        ) as raised:
            checkpoints.save(snapshot(2))
    assert raised.value.errno == code
    assert raised.value.filename == str(tmp_path / "peer-00-step-000002.ragtag")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    checkpoints.save(snapshot(2))
    assert steps(tmp_path) == [2]


def test_old_ones_that_cannot_be_removed_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(snapshot(1))

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EPERM, "not permitted", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        checkpoints.save(snapshot(2))
    assert steps(tmp_path) == [1, 2]
    assert "old checkpoints of peer 0 cannot be removed: " in caplog.text
    checkpoints.save(snapshot(3))
    assert steps(tmp_path) == [3]


NO_PERMISSION = """
import os, sys
from pathlib import Path
from tests.training.test_checkpoint import Checkpoints, snapshot, steps
folder = Path(sys.argv[1]) / "folder"
checkpoints = Checkpoints(folder, keep=1)
checkpoints.save(snapshot(1))
folder.chmod(0o555)
if os.geteuid() == 0:  # root may write anywhere
    os.seteuid(65_534)
try:
    checkpoints.save(snapshot(2))
except PermissionError as error:
    print(error.strerror)
assert steps(folder) == [1]
assert checkpoints.latest().step == 1
"""


def test_no_permission() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        out, _ = (process := _python(NO_PERMISSION, folder)).communicate(timeout=100)
        (Path(folder) / "folder").chmod(0o755)
    assert process.returncode == 0
    assert out == "checkpoint not written (Permission denied); earlier ones are as they were\n"


def test_a_file_size_limit_is_an_error_like_a_full_disk(tmp_path: Path) -> None:
    script = """
import resource, signal, sys
from tests.training.test_checkpoint import Checkpoints, snapshot
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(snapshot(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
try:
    checkpoints.save(snapshot(2, size=10_000))
except OSError as error:
    print(error.errno)
"""
    done = _python(script, str(tmp_path)).communicate(timeout=100)
    assert int(done[0]) == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["peer-00-step-000001.ragtag"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(NotADirectoryError, match="is no folder"):
        Checkpoints(tmp_path / "x")
    late = Checkpoints(tmp_path / "y")
    (tmp_path / "y").write_text("")
    for use in (lambda: late.save(snapshot(1)), late.latest):
        with pytest.raises(NotADirectoryError, match="is no folder"):
            use()
    under = Checkpoints(tmp_path / "x" / "z")
    with pytest.raises(NotADirectoryError, match="checkpoint not written"):
        under.save(snapshot(1))


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match="peer is -1"):
        Checkpoints(tmp_path, peer=-1)
    with pytest.raises(ValueError, match="step -1"):
        Checkpoints(tmp_path).save(snapshot(1), step=-1)
    assert list(tmp_path.iterdir()) == []


def test_it_is_on_the_disk_before_anything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(snapshot(1))
    calls: list[str] = []
    for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
        real = getattr(owner, name)

        def call(*arguments: Any, real: Any = real, name: str = name, **more: Any) -> Any:
            folder = name == "fsync" and os.path.samestat(os.fstat(arguments[0]), tmp_path.stat())
            calls.append("fsync of the folder" if folder else name)
            return real(*arguments, **more)

        monkeypatch.setattr(owner, name, call)
    checkpoints.save(snapshot(2))
    assert calls == ["fsync", "replace", "fsync of the folder", "unlink", "fsync of the folder"]


# -- Who dies


def _python(script: str, *arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *(p for p in sys.path if p)])
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


AT_EVERY_CALL = """
import os, signal, sys
from pathlib import Path
from ragtag.training.state import atomic
from tests.training.test_checkpoint import Checkpoints, leftovers, snapshot, steps
folder = Path(sys.argv[1])
atomic._PIECE_BYTES = 1_500

def die_at(number):
    count = 0
    def counted(real):
        def call(*arguments, **more):
            nonlocal count
            count += 1
            if count == number:  # before it; after it is before the next
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **more)
        return call
    for owner, names in ((os, ("open", "write", "fsync", "close", "scandir")), (Path, ("replace", "unlink"))):
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))

checkpoints = Checkpoints(folder, keep=2)
checkpoints.save(snapshot(0, 1_000))
killed = 0
for number in range(1, 500):
    before = checkpoints.latest().step
    child = os.fork()
    if child == 0:
        die_at(number)
        checkpoints.save(snapshot(before + 1, 1_000))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found = checkpoints.latest()
    assert found.damaged == (), found.damaged
    assert found.step in (before, before + 1), (before, found.step)
    assert found.snapshot.model["w"].tolist() == [float(found.step)] * 1_000
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    killed += 1
    checkpoints.save(snapshot(found.step + 1, 1_000))
    assert leftovers(folder) == [] and len(steps(folder)) == 2, (number, list(folder.iterdir()))
else:
    raise AssertionError("a save never comes to its end")
assert found.step == before + 1
assert leftovers(folder) == [] and len(steps(folder)) == 2
print(killed)
"""


def test_killed_at_any_call_the_folder_stays_loadable_and_is_tidied(tmp_path: Path) -> None:
    out, _ = (process := _python(AT_EVERY_CALL, str(tmp_path))).communicate(timeout=100)
    assert process.returncode == 0
    assert int(out) > 15


SAVE_ON = """
import itertools, sys
from tests.training.test_checkpoint import Checkpoints, snapshot
for step in itertools.count(int(sys.argv[2])):
    Checkpoints(sys.argv[1], keep=2).save(snapshot(step, 300_000))
    print(step, flush=True)
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_the_last_that_was_acknowledged(tmp_path: Path) -> None:
    last = -1
    for after_s in (0.0, 0.003, 0.011):
        process = _python(SAVE_ON, str(tmp_path), str(last + 1))
        assert process.stdout is not None
        try:
            for _ in range(2):  # it is at work
                last = int(process.stdout.readline())
            threading.Event().wait(after_s)
        finally:
            os.kill(process.pid, signal.SIGKILL)
        rest, _ = process.communicate(timeout=60)
        last = int(rest.split("\n")[-2]) if rest.count("\n") else last
        found = Checkpoints(tmp_path).latest()
        assert found is not None
        assert found.damaged == ()
        assert found.step in (last, last + 1)
        last = found.step
    Checkpoints(tmp_path, peer=1).save(snapshot(0))
    assert leftovers(tmp_path) == []


# -- More than one at a time


def test_many_writers_and_a_reader(tmp_path: Path) -> None:
    """Two peers, and two that believe to be the same one."""
    errors: list[BaseException] = []
    done = threading.Event()

    def write(peer: int, offset: int) -> None:
        try:
            checkpoints = Checkpoints(tmp_path, peer=peer, keep=2)
            for step in range(15):
                checkpoints.save(snapshot(2 * step + offset, 2_000))
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        try:
            last = -1
            while not done.is_set():
                found = Checkpoints(tmp_path).latest()
                if found is not None:
                    assert found.damaged == ()
                    assert found.step >= last
                    last = found.step
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=each) for each in ((0, 0), (1, 1), (1, 1))]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join(60)
    done.set()
    reader.join(60)
    assert errors == []
    assert len(steps(tmp_path)) == 4
    assert leftovers(tmp_path) == []


def test_a_living_writers_file_is_not_removed_and_a_dead_ones_is(tmp_path: Path) -> None:
    living = tmp_path / ".peer-01-step-000001.ragtag.1-0.tmp"
    dead = tmp_path / ".peer-02-step-000001.ragtag.1-0.tmp"
    strange = tmp_path / ".other.1-0.tmp"
    for path in (living, dead, strange):
        path.write_bytes(b"half")
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Checkpoints(tmp_path).save(snapshot(1))
        assert leftovers(tmp_path) == sorted([living.name, strange.name])
    Checkpoints(tmp_path).save(snapshot(2))
    assert leftovers(tmp_path) == [strange.name]


def test_without_locks_files_are_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / ".peer-01-step-000001.ragtag.1-0.tmp"
    left.write_bytes(b"half")

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", none)
    Checkpoints(tmp_path).save(snapshot(1))
    assert leftovers(tmp_path) == [left.name]
    assert steps(tmp_path) == [1]
