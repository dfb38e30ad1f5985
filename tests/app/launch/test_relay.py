"""Peers' output goes through a relay: nobody waits for the launcher, and what is missing is said."""

from __future__ import annotations

import os
import selectors
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.app.launch import launch
from ragtag.app.launch.events import Event, Printed, Remark
from ragtag.app.launch.process import PeerProcess, Stream
from ragtag.app.launch.relay import HOLD_BYTES, HeldOutput, Relay
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from tests.app.processes import PATIENCE_S, Command, Place, until

GAP_S = 20.0


# -- What is held


@given(
    st.lists(st.binary(min_size=1, max_size=200).map(lambda b: b.replace(b"x", b"\n"))), st.integers(1, 300)
)
def test_what_is_held_is_the_newest_and_what_was_dropped_is_counted(pieces: list[bytes], limit: int) -> None:
    held = HeldOutput()
    for piece in pieces:
        held.add(piece, limit)
        assert held.size == sum(map(len, held.pieces))
    given_ = b"".join(pieces)
    dropped, lines = held.dropped_bytes, held.dropped_lines
    kept = b"".join(bytes(piece) for piece in held.pieces)
    assert given_.endswith(kept) and len(given_) == len(kept) + dropped
    assert lines == given_[:dropped].count(b"\n")
    told = list(iter(held.take, None))
    assert [kind for kind, _ in told] == [1] * bool(dropped) + [0] * (len(told) - bool(dropped))


def test_a_gap_ends_with_a_line() -> None:
    held = HeldOutput()
    for n in range(100_000):
        held.add(b"line %06d\n" % n, 500_000)
    assert held.dropped_bytes == 12 * held.dropped_lines
    kept = b"".join(bytes(piece) for piece in held.pieces)
    assert kept.startswith(b"line %06d\n" % held.dropped_lines) and kept.endswith(b"line 099999\n")
    assert 400_000 < held.size <= 500_000


# -- The relay's process


class Launcher:
    """The launcher's side, which reads when it is told to."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.came: list[bytes] = []
        self.gaps: list[tuple[int, int, int]] = []
        self.ended = 0
        self.relay = Relay(self.selector, self._output, self._gap, self._end)
        self.reading, self.writing = os.pipe()
        self.relay.watch(7, self.reading)

    def _output(self, stream: int, data: bytes) -> None:
        assert stream == 7
        self.came.append(data)

    def _gap(self, stream: int, n_bytes: int, n_lines: int) -> None:
        self.gaps.append((len(self.came), n_bytes, n_lines))

    def _end(self) -> None:
        self.ended += 1

    def close(self) -> None:
        self.relay.close()
        os.close(self.reading)
        os.close(self.writing)
        self.selector.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


def write(fd: int, lines: int) -> None:
    """Write numbered lines of 1,000 bytes; it blocks where nobody reads."""
    for n in range(lines):
        os.write(fd, b"%-999d\n" % n)


def in_time(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it waits for the launcher"


def test_a_writer_does_not_wait_for_a_launcher_that_reads_nothing(launcher: Launcher) -> None:
    lines = 2 * HOLD_BYTES // 1000
    in_time(lambda: write(launcher.writing, lines))
    launcher.relay.finish([7], GAP_S)
    came = b"".join(launcher.came)
    ((at, n_bytes, n_lines),) = launcher.gaps
    assert len(came) + n_bytes == 1000 * lines and n_bytes == 1000 * n_lines
    assert HOLD_BYTES // 2 < len(came) < 1.2 * HOLD_BYTES
    numbers = [int(line) for line in came.split(b"\n")[:-1]]
    before = len(b"".join(launcher.came[:at])) // 1000
    assert numbers == [*range(before), *range(before + n_lines, lines)]


def test_of_what_is_taken_in_time_nothing_is_lost(launcher: Launcher) -> None:
    thread = threading.Thread(target=write, args=(launcher.writing, 5_000))
    thread.start()
    while sum(map(len, launcher.came)) < 2_500_000:
        assert launcher.selector.select(PATIENCE_S)
        launcher.relay.read()
    thread.join(PATIENCE_S)
    launcher.relay.finish([7], GAP_S)
    assert [int(line) for line in b"".join(launcher.came).split(b"\n")[:-1]] == list(range(5_000))
    assert not launcher.gaps


def test_a_relay_that_is_ended_says_so_once(launcher: Launcher) -> None:
    os.kill(launcher.relay.pid, signal.SIGKILL)
    assert launcher.selector.select(PATIENCE_S)
    launcher.relay.read()
    launcher.relay.finish([7], GAP_S)
    assert (launcher.relay.alive, launcher.ended) == (False, 1)
    write(launcher.writing, 1)
    assert len(os.read(launcher.reading, 4096)) == 1000  # left to whoever reads it now


def test_where_output_is_missing_a_line_says_so_and_the_rest_is_whole() -> None:
    """As in a launcher that was stopped until its peer had ended."""
    shown: list[tuple[str, bool]] = []
    streams: dict[int, Stream] = {}
    selector = selectors.DefaultSelector()
    relay = Relay(
        selector,
        lambda stream, data: streams[stream].peer.take(streams[stream], data),
        lambda stream, *gap: streams[stream].peer.skip(streams[stream], *gap),
        lambda: None,
    )
    lines = 2 * HOLD_BYTES // 1000
    code = f"import sys\nfor n in range({lines}): sys.stdout.write('%-999d\\n' % n)\nprint('the end', end='')"
    try:
        peer = PeerProcess(
            0, ["-c", code], dict(os.environ), (), selector, lambda *line: shown.append(line), relay, streams
        )
        in_time(lambda: os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT))
        assert peer.reap() == 0
        peer.drain()
    finally:
        relay.close()
        selector.close()
    ((at, told),) = [(at, text) for at, (text, _) in enumerate(shown) if "missing" in text]
    missing = lines - (len(shown) - 2)
    assert told == (
        f"[{missing:,} lines ({1000 * missing:,} bytes) are missing here: nothing took what was printed]"
    )
    assert shown[-1] == ("the end", False)
    numbers = [int(text) for text, _ in shown[:at] + shown[at + 1 : -1]]
    assert numbers == [*range(at), *range(at + missing, lines)]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_a_run_goes_on_without_its_relay(tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text(
        "import os, pathlib, time\nprint('first', flush=True)\n"
        "while not os.path.exists(os.environ['STOP']): time.sleep(0.01)\n"
        "for n in range(20_000): print('line', n)"
    )
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, Printed) and event.text == "first":
            mine = f"PPid:\t{os.getpid()}\n".encode()
            (relay,) = [
                int(path.parent.name)
                for path in Path("/proc").glob("[0-9]*/cmdline")
                if b"relay.py" in _read(path) and mine in _read(path.parent / "status")
            ]
            os.kill(relay, signal.SIGKILL)
        if isinstance(event, Remark) and "relay" in event.text:
            (tmp_path / "stop").touch()

    result = launch(1, [str(script)], on_event=on_event, env={"STOP": str(tmp_path / "stop")})
    assert [(end.status, end.error) for end in result.ends] == [
        (0, "")
    ]  # it never joins, which is told apart
    said = [event.text for event in events if isinstance(event, Printed)]
    assert said == ["first", *(f"line {n}" for n in range(20_000))]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


# -- A launcher that stands still

TALKATIVE = """
import os, sys
import torch, ragtag
torch.set_num_threads(1)
with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = crew.optimizer(sgd, averager=ragtag.AllReduce(), model=model)
    n = 0
    while not os.path.exists(os.environ["STOP"]):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        for _ in range(4):
            print("round", n, "x" * 8_000, flush=True)
            n += 1
    print("printed", n)
"""


def rounds(folder: Path) -> int:
    """The last round that both peers have done."""
    last = {0: -1, 1: -1}
    for record in read_run(folder).records():
        if isinstance(record, trace.Round):
            last[record.peer] = record.round
    return min(last.values())


def numbers(crew: Command, peer: int) -> list[int]:
    return [int(line.split()[1]) for line in crew.lines(peer) if line.startswith("round ")]


@pytest.mark.slow
def test_rounds_go_on_while_the_launcher_is_stopped_and_its_output_comes_after(place: Place) -> None:
    (place.folder / "train.py").write_text(TALKATIVE)
    crew = place.command("crew", "run", "-n", "2", "-o", str(place.run), "train.py")
    crew.says("round 8")
    crew.process.send_signal(signal.SIGSTOP)
    try:
        before = rounds(place.run)
        until(lambda: rounds(place.run) > before + 100, "rounds went on")
        place.stop.touch()
        size = crew.out.stat().st_size
    finally:
        crew.process.send_signal(signal.SIGCONT)
    assert crew.code() == 0, crew.text[-2000:]
    assert crew.out.stat().st_size > size + 2 * 100 * 4 * 8_000
    for peer in (0, 1):
        said = int(crew.lines(peer)[-1].split()[1])
        assert numbers(crew, peer) == list(range(said))
