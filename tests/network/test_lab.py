"""The lab does to datagrams what it was asked to, and nothing is left of it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.lab import Lab, LabError, probe
from tests.network.labs import ROOT, environment, lab_of

pytestmark = pytest.mark.root

WITHIN = 0.1
"""Of what was asked for."""
PATIENCE_S = 30.0
HOLDER = """
import signal, sys
from benchmarks.lab import Lab
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
signal.signal(signal.SIGINT, signal.default_int_handler)  # or in a shell's background
with Lab(2, rate_mbit=100, delay_ms=1) as lab:
    inside = lab.start(0, ["sleep", "600"])
    print(lab.mark, inside.pid, flush=True)
    sys.stdin.readline()
    raise RuntimeError("it breaks")
"""


def _left(mark: str) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{mark}-")]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _until(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.slow
def test_a_rate_and_a_queue_are_as_asked_and_the_sender_does_not_feel_them() -> None:
    # 200 datagrams of 2,304 bytes in the kernel, more than a socket's 208 kB: one that had to answer for what
    # waits in the queue would block
    with lab_of(2, rate_mbit=40.0, queue_ms=50.0) as lab:
        (found,) = probe(lab, [0], 1, offered_mbit=120.0, count=12_000)
        sender, receiver = lab.counts(0), lab.counts(1)
        assert found.rate_mbit == pytest.approx(40.0, rel=WITHIN)
        # the queue is full after a short while, and stays so
        assert found.delay_ms == pytest.approx(50.0, rel=WITHIN)
        # a sender that felt the queue would block: nothing would be lost, and it would send at 40 Mbit/s
        assert found.sent_mbit > 60.0
        assert sender.up_dropped == round(found.loss * 12_000) > 3_000
        assert (receiver.down_dropped, receiver.lost) == (0, 0)
        assert sender.up == receiver.down == receiver.seen * 1242


def test_incast_meets_a_queue_at_the_receiver() -> None:
    with lab_of(4, rate_mbit=40.0, queue_ms=20.0) as lab:
        found = probe(lab, [1, 2, 3], 0, offered_mbit=35.0, count=4000)
        # each in a middle span of its own, which need not be the same one; without a queue it would be 105
        assert 36.0 < sum(one.rate_mbit for one in found) < 60.0
        delays = sorted(one.delay_ms for one in found)
        assert delays[1] == pytest.approx(20.0, rel=WITHIN)
        assert [lab.counts(peer).up_dropped for peer in (1, 2, 3)] == [0, 0, 0]
        assert lab.counts(0).down_dropped == round(sum(one.loss for one in found) * 4000) > 1_000


@pytest.mark.slow
@pytest.mark.parametrize("queue_bytes", [30 * 1242, pytest.param(400 * 1242, marks=pytest.mark.slow)])
def test_a_queue_holds_so_many_bytes(queue_bytes: int) -> None:
    with lab_of(2, rate_mbit=40.0, queue_bytes=queue_bytes) as lab:
        (found,) = probe(lab, [0], 1, offered_mbit=120.0, count=12_000)
        assert found.delay_ms == pytest.approx(queue_bytes * 8 / 40e3, rel=WITHIN)


@pytest.mark.parametrize("loss", [pytest.param(0.001, marks=pytest.mark.slow), 0.05])
def test_independent_loss_is_as_asked(loss: float) -> None:
    count = 40_000
    with lab_of(2, loss=loss) as lab:
        (found,) = probe(lab, [0], 1, offered_mbit=200.0, count=count, size=200)
        counts = lab.counts(1)
        assert counts.seen == count and counts.lost == round(found.loss * count)
        assert abs(found.loss - loss) < 5 * (loss * (1 - loss) / count) ** 0.5
        # in a row: geometric, of mean 1 / (1 - loss) and variance loss / (1 - loss) ** 2
        assert abs(found.burst - 1 / (1 - loss)) < 5 * (loss / found.bursts) ** 0.5 / (1 - loss)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "burst"), [(0.05, 4.0), pytest.param(0.2, 10.0, marks=pytest.mark.slow)])
def test_bursts_are_as_long_and_lose_as_much_as_asked(loss: float, burst: float) -> None:
    count = 60_000
    with lab_of(2, loss=loss, burst=burst) as lab:
        (found,) = probe(lab, [0], 1, offered_mbit=200.0, count=count, size=200)
        assert lab.counts(1).lost == round(found.loss * count)
        # of a chain of two states, whose states follow each other like (1 - begins - ends) to the distance
        ends = 1 / burst
        kept = 1 - ends - ends * loss / (1 - loss)
        deviation = (loss * (1 - loss) / count * (1 + kept) / (1 - kept)) ** 0.5
        assert abs(found.loss - loss) < 5 * deviation
        assert abs(found.burst - burst) < 5 * burst * ((1 - 1 / burst) / found.bursts) ** 0.5


@pytest.mark.slow
def test_loss_can_be_changed_and_ended() -> None:
    with lab_of(2, loss=0.5) as lab:
        lab.lose(0.0)
        (found,) = probe(lab, [0], 1, offered_mbit=20.0, count=500)
        assert found.loss == 0 and lab.counts(1).lost == 0
        lab.lose(0.3)
        (found,) = probe(lab, [0], 1, offered_mbit=20.0, count=500)
        assert lab.counts(1).lost == round(found.loss * 500) > 0
        assert (lab.counts(0).seen, lab.counts(1).seen) == (0, 500)


@pytest.mark.slow
def test_a_delay_is_as_asked_and_loses_nothing() -> None:
    with lab_of(2, rate_mbit=20.0, delay_ms=25.0) as lab:
        (found,) = probe(lab, [0], 1, offered_mbit=5.0, count=1000)
        assert found.delay_ms == pytest.approx(25.0, rel=WITHIN)
        assert (found.loss, found.overtaken) == (0, 0)
        done = lab.relayed()
        assert (done["passed"], done["dropped"]) == (1000, 0)


@pytest.mark.slow
def test_jitter_lets_datagrams_overtake_each_other() -> None:
    with lab_of(2, delay_ms=100.0, jitter_ms=100.0) as lab:
        (found,) = probe(lab, [0], 1, offered_mbit=5.0, count=1000)
        assert found.delay_ms == pytest.approx(150.0, rel=WITHIN)  # the middle of a uniform draw
        assert found.loss == 0 and found.overtaken > 0.1


@pytest.mark.parametrize("how", ["broken", "SIGTERM", "SIGINT", "SIGHUP"])
def test_nothing_is_left_however_it_ends(how: str, tmp_path: Path) -> None:
    with _held(tmp_path) as holder:
        mark, pid = _said(holder)
        assert len(_left(mark)) == 3 and _lives(pid)
        assert holder.stdin is not None
        if how == "broken":
            holder.stdin.write("\n")
            holder.stdin.flush()
        else:
            holder.send_signal(getattr(signal, how))
        holder.wait(PATIENCE_S)
        assert holder.returncode != 0
        assert not _left(mark) and not _lives(pid)


def test_the_next_start_removes_what_a_killed_one_left_and_no_living_one(tmp_path: Path) -> None:
    with _held(tmp_path) as dead, _held(tmp_path) as living:
        mark, pid = _said(dead)
        others, other_pid = _said(living)
        dead.send_signal(signal.SIGKILL)
        dead.wait(PATIENCE_S)
        assert len(_left(mark)) == 3 and _lives(pid)  # it could not clean up
        with lab_of(1):
            _until(lambda: not _left(mark) and not _lives(pid))
            assert len(_left(others)) == 3 and _lives(other_pid)
        living.send_signal(signal.SIGTERM)
        living.wait(PATIENCE_S)
        assert not _left(others)


def _held(folder: Path) -> subprocess.Popen[str]:
    with lab_of(1):  # or the test is skipped
        pass
    script = folder / "holder.py"
    script.write_text(HOLDER)
    command = [sys.executable, str(script)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe, text=True)


def _said(holder: subprocess.Popen[str]) -> tuple[str, int]:
    assert holder.stdout is not None
    mark, pid = holder.stdout.readline().split()
    return mark, int(pid)


def test_it_kills_what_runs_longer_than_the_lab_may() -> None:
    with lab_of(1, limit_s=0.2) as lab:
        assert lab.start(0, ["sleep", "600"]).wait(PATIENCE_S) == -signal.SIGKILL


def test_what_makes_no_sense_is_refused() -> None:
    for asked in (
        {"peers": 0}, {"peers": 65}, {"rate_mbit": 0.0}, {"loss": 1.0}, {"loss": -0.1}, {"burst": 0.5},
        {"loss": 0.9, "burst": 2.0}, {"delay_ms": -1.0}, {"queue_ms": -1.0}, {"limit_s": 0.0},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            Lab(**asked)  # type: ignore[arg-type]


def test_a_command_that_fails_says_why() -> None:
    with lab_of(1) as lab:
        with pytest.raises(LabError, match="no such thing"):
            lab.run(0, "bash", "-c", "echo no such thing >&2; exit 3")
        with pytest.raises(LabError, match="not within"):
            lab.run(0, "sleep", "60", timeout_s=0.1)
        with pytest.raises(LabError, match="no relay"):
            lab.relayed()


def test_by_hand_a_command_runs_in_each_namespace() -> None:
    with lab_of(1):  # or the test is skipped
        pass
    command = [sys.executable, "-m", "benchmarks.lab", "--peers", "3", "--rate", "50", "--"]
    say = 'echo "$RAGTAG_SIZE $RAGTAG_PEERS"; hostname -I; exit $((RAGTAG_RANK == 1))'
    done = subprocess.run(
        [*command, "bash", "-c", say], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    addresses = [f"10.203.47.{peer + 1}" for peer in range(3)]
    assert done.returncode == 1, done.stderr
    for rank, address in enumerate(addresses):
        assert f"[{rank}] 3 {','.join(f'{one}:4747' for one in addresses)}\n" in done.stdout
        assert f"[{rank}] {address} \n" in done.stdout
        row = next(line.split() for line in done.stdout.splitlines() if line.split()[:1] == [str(rank)])
        assert row[1:3] == [address, str(int(rank == 1))]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may")
def test_without_root_it_says_so() -> None:
    with pytest.raises(LabError, match="root"), Lab(1):
        pass
