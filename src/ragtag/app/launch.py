"""Start N peers of one script on this machine, and see them through to their end.

Each peer is a process in a session of its own, with a UDP socket that the launcher has bound for it: no
port can be taken in between, and datagrams that come early wait in the socket's buffer. The launcher keeps
its copy of each socket, so a dead peer is silent, as on a real network, and nobody else gets its port.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ragtag.app.environment import VARIABLES, Place
from ragtag.app.guard import Guard
from ragtag.app.launch_events import Ended, EndedBy, Event, Injected, LaunchResult, Line, Ready, Said, Started
from ragtag.app.output import SeenErrors, interrupted, last_line
from ragtag.app.peer_process import KILL_S, READ_BYTES, PeerProcess, Stream
from ragtag.app.process_faults import Act, ProcessFaults
from ragtag.app.signals import Signals
from ragtag.app.tracefile import CREW_FILE, TraceWriter, trace_files
from ragtag.core import trace
from ragtag.core.faults import Faults
from ragtag.core.faultspec import check_peers, format_faults
from ragtag.core.types import PEERS_MAX, PeerId

OnError = Literal["continue", "stop"]

TICK_S = 5.0
"""Peers are looked at this often even if no signal told of an end."""
_SIGNAL_OF = {"stop": signal.SIGSTOP, "continue": signal.SIGCONT, "kill": signal.SIGKILL}


class LaunchError(ValueError):
    """What was asked for cannot be started; the message says what to change."""


def launch(
    n: int,
    argv: Sequence[str],
    *,
    run_folder: Path | None = None,
    seed: int = 0,
    faults: Faults | None = None,
    on_error: OnError = "continue",
    env: Mapping[str, str] | None = None,
    crew: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    run: trace.Run | None = None,
    grace_s: float = 5.0,
) -> LaunchResult:
    """Run ``python *argv`` as ``n`` peers of one crew and return once all have ended.

    argv: a script and its arguments, or ``-m``, a module and its arguments.
    run_folder: where the trace goes; it must not hold one already. ``None``: no trace.
    faults: done to the peers' processes here, and passed on to their drivers. Their times count from the
    moment when all running peers have joined (``environment.announce_ready``).
    on_error: what a peer that fails means to the others. env: added to the peers' environment.
    on_event: told of everything, in this thread; without it, nothing is printed.
    run: the record that opens the trace; name, seed, peers and start are filled in.
    grace_s: how long peers may take to end after SIGINT, and again after SIGTERM, before SIGKILL.

    SIGINT, SIGTERM and SIGHUP end all peers within bounded time; a second one kills them at once.

    Raises:
        LaunchError: what was asked for is impossible.
        RuntimeError: not called from the main thread, which alone is told of signals.
        KeyboardInterrupt: a second interrupt came while peers were ending; all are killed.
    """
    faults = faults or Faults()
    check_launch(n, argv, faults)
    if run_folder is not None and list(trace_files(run_folder)):
        raise LaunchError(f"{run_folder} holds the trace of a run already; give another folder")
    setup = _Setup(n, tuple(argv), run_folder, seed, faults, on_error, dict(env or {}), grace_s)
    with ExitStack() as stack:
        return _Launch(setup, crew or _crew_name(), on_event or _ignore, run, stack).run()


def check_launch(n: int, argv: Sequence[str], faults: Faults) -> None:
    """Look for what makes a launch impossible, before anything is started or written.

    Raises:
        LaunchError: the number of peers, the script or a fault's peer.
    """
    if not 1 <= n <= PEERS_MAX:
        raise LaunchError(f"{n} peers: one crew averages 1 to {PEERS_MAX} peers directly")
    try:
        check_peers(faults, n)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    _check_script(argv)


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _Setup:
    n: int
    argv: tuple[str, ...]
    run_folder: Path | None
    seed: int
    faults: Faults
    on_error: OnError
    env: dict[str, str]
    grace_s: float


class _Launch:
    """One run: a loop around a selector with the next deadline as its timeout."""

    def __init__(
        self,
        setup: _Setup,
        crew: str,
        on_event: Callable[[Event], None],
        run: trace.Run | None,
        stack: ExitStack,
    ) -> None:
        self._setup, self._tell = setup, on_event
        self._started_s, self._started_unix_s = time.monotonic(), time.time()
        self._peers: list[PeerProcess] = []
        self._ends: dict[PeerId, Ended] = {}
        self._ready: set[PeerId] = set()
        self._injector: ProcessFaults | None = None
        self._seen = SeenErrors()
        self._stages: list[tuple[float, signal.Signals | None]] | None = None  # of ending the peers
        self._interrupted = 0
        self._crew = crew
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._signals = stack.enter_context(Signals())
        self._selector.register(self._signals.fd, selectors.EVENT_READ, "signals")
        self._sockets = [stack.enter_context(_bound()) for _ in range(setup.n)]
        self._ready_read, self._ready_write = os.pipe()
        stack.callback(os.close, self._ready_read)
        stack.callback(os.close, self._ready_write)
        self._selector.register(self._ready_read, selectors.EVENT_READ, "ready")
        self._trace: TraceWriter | None = None
        if setup.run_folder is not None:
            self._trace = stack.enter_context(TraceWriter(setup.run_folder / CREW_FILE, self._say))
            self._trace.write(self._run_record(run))
        self._guard = Guard()
        stack.callback(self._guard.close)

    def run(self) -> LaunchResult:
        try:
            self._start()
            while self._running():
                self._turn()
        except BaseException:
            self._kill_all()
            raise
        if self._setup.faults != Faults() and self._injector is None and not self._stages:
            self._say("no fault was injected: their times count from when all peers have joined the crew")
        ends = tuple(end for _, end in sorted(self._ends.items()))
        return LaunchResult(ends, self._setup.run_folder, self._now_t(), self._interrupted)

    # -- Starting

    def _start(self) -> None:
        setup = self._setup
        base = dict(os.environ) | setup.env
        for name in VARIABLES:  # of a crew that this process itself may be a peer of
            base.pop(name, None)
        base.setdefault("PYTHONUNBUFFERED", "1")
        if "OMP_NUM_THREADS" not in base:
            threads = max(1, cores() // setup.n)
            base["OMP_NUM_THREADS"] = str(threads)
            self._say(
                f"OMP_NUM_THREADS={threads} in each peer ({setup.n} peers, {cores()} cores); set it otherwise"
            )
        addresses = tuple(sock.getsockname()[:2] for sock in self._sockets)
        for number, sock in enumerate(self._sockets):
            place = Place(
                rank=number,
                size=setup.n,
                crew=self._crew,
                seed=setup.seed,
                run_folder=setup.run_folder.absolute() if setup.run_folder is not None else None,
                started_unix_s=self._started_unix_s,
                peers=addresses,
                socket_fd=sock.fileno(),
                ready_fd=self._ready_write,
                faults=setup.faults,
            )
            self._start_one(number, base | place.variables(), (sock.fileno(), self._ready_write))

    def _start_one(self, number: PeerId, env: dict[str, str], fds: tuple[int, ...]) -> None:
        def show(text: str, error: bool) -> None:
            self._tell(Line(number, text, error))

        peer = PeerProcess(number, self._setup.argv, env, fds, self._selector, show)
        self._guard.watch(peer.pid)
        self._peers.append(peer)
        self._tell(Started(number, peer.pid))

    def _run_record(self, given: trace.Run | None) -> trace.Run:
        setup = self._setup
        of = given or trace.Run(t=0.0, world="live", name="", seed=0, peers=0, method="")
        config = {"faults": format_faults(setup.faults), "on_error": setup.on_error, **of.config}
        return trace.Run(
            t=0.0,
            world="live",
            name=of.name or Path(setup.argv[1] if setup.argv[0] == "-m" else setup.argv[0]).stem,
            seed=setup.seed,
            peers=setup.n,
            method=of.method,
            config=config,
            started_unix_s=self._started_unix_s,
            steps_planned=of.steps_planned,
            planned_s=of.planned_s,
            command=of.command or " ".join(["python", *setup.argv]),
        )

    # -- One turn of the loop

    def _turn(self) -> None:
        now_s = time.monotonic()
        due_s = [now_s + TICK_S]
        held = [peer.tracebacks.until_s for peer in self._running() if self._stages is None]
        due_s += [until_s for until_s in held if until_s is not None]
        if self._stages is not None:
            due_s += [at_s for at_s, _ in self._stages[:1]]
        elif self._injector is not None and self._injector.next_s is not None:
            due_s.append(self._injector.next_s)
        for key, _ in self._selector.select(max(0.0, min(due_s) - now_s)):
            if isinstance(key.data, Stream):
                key.data.peer.read(key.data)
            elif key.data == "ready":
                self._read_ready()
        for number in self._signals.take():
            self._interrupted = self._interrupted or number
            self._stop(f"{signal.Signals(number).name}: ending {len(self._running())} peers")
        now_s = time.monotonic()
        if self._stages is None and self._injector is not None:
            for act in self._injector.due(now_s):
                self._do(act)
        while self._stages and self._stages[0][0] <= now_s:
            self._signal_all(self._stages.pop(0)[1])
        for peer in self._running():
            if self._stages is None:  # else: most likely the KeyboardInterrupt that was asked for
                peer.release(now_s)
            if peer.has_ended():
                self._finish(peer)

    def _running(self) -> list[PeerProcess]:
        return [peer for peer in self._peers if peer.number not in self._ends]

    def _read_ready(self) -> None:
        words = os.read(self._ready_read, READ_BYTES).split()
        known = {str(peer.number).encode() for peer in self._peers}
        self._ready |= {int(word) for word in words if word in known}
        self._start_faults()

    def _start_faults(self) -> None:
        running = {peer.number for peer in self._running()}
        if (
            self._injector is None
            and running
            and running <= self._ready
            and len(self._peers) == self._setup.n
        ):
            self._injector = ProcessFaults(self._setup.faults, time.monotonic(), self._now_t())
            self._tell(Ready(tuple(sorted(running))))

    # -- Faults

    def _do(self, act: Act) -> None:
        if act.peer in self._ends:
            return
        if act.what != "record":
            peer = self._peers[act.peer]
            peer.killed = peer.killed or act.what == "kill"
            peer.signal(_SIGNAL_OF[act.what])
        if act.record is not None:
            self._write(act.record)
            self._tell(Injected(act.record))

    # -- Ending

    def _finish(self, peer: PeerProcess) -> None:
        """A peer has ended but is not reaped yet, so its number still names its process group."""
        peer.signal(signal.SIGKILL)  # what it left behind
        self._guard.release(peer.pid)
        status = peer.reap()
        peer.drain()
        by: EndedBy = "itself"
        if peer.killed and status == -signal.SIGKILL:
            by = "fault"
        elif self._stages is not None and status != 0:
            by = "launcher"
        end = self._ends[peer.number] = self._explain(peer, status, by)
        if end.failed:
            what = last_line(end.error) or end.how
            self._write(trace.Error(t=self._now_t(), peer=peer.number, what=what, detail=end.error))
        self._tell(end)
        if end.failed and self._setup.on_error == "stop":
            self._stop(f"peer {peer.number} failed: ending the other {len(self._running())}")
        self._start_faults()

    def _explain(self, peer: PeerProcess, status: int, by: EndedBy) -> Ended:
        failed = by == "itself" and status != 0
        held = peer.tracebacks.take()
        if held and not failed and not (by == "launcher" and interrupted(held)):
            for text in held.splitlines():
                self._tell(Line(peer.number, text, error=True))
        shown = peer.tracebacks.passed_on if status == 1 and not held else ""  # it took long to end
        error = (held or shown) if failed else ""
        return Ended(peer.number, status, by, error, self._seen.same_as(peer.number, error), bool(shown))

    def _stop(self, why: str) -> None:
        """End all peers: SIGINT now, SIGTERM and SIGKILL to those that are still there later."""
        if self._stages is not None or not self._running():
            return
        now_s, grace_s = time.monotonic(), self._setup.grace_s
        self._stages = [
            (now_s, signal.SIGINT),
            (now_s + grace_s, signal.SIGTERM),
            (now_s + 2 * grace_s, signal.SIGKILL),
            (now_s + 2 * grace_s + KILL_S, None),
        ]
        self._signals.stopping = True
        self._say(why)
        self._write(trace.Note(t=self._now_t(), what="stopping", detail=why))

    def _signal_all(self, number: signal.Signals | None) -> None:
        if number is None:
            pids = ", ".join(str(peer.pid) for peer in self._running())
            raise RuntimeError(f"processes {pids} go on {KILL_S:g} s after SIGKILL; does a device hang?")
        for peer in self._running():
            peer.signal(number)
            peer.signal(signal.SIGCONT)  # a stopped process takes no other signal than SIGKILL

    def _kill_all(self) -> None:
        """The last resort: something went wrong in the launcher itself."""
        for peer in self._running():
            peer.signal(signal.SIGKILL)
        for peer in self._running():
            with suppress(subprocess.TimeoutExpired):  # the guard, closed next, tries again
                peer.reap()
                self._guard.release(peer.pid)

    # -- Small change

    def _now_t(self) -> float:
        return time.monotonic() - self._started_s

    def _say(self, text: str) -> None:
        self._tell(Said(text))

    def _write(self, record: trace.Record) -> None:
        if self._trace is not None:
            self._trace.write(record)


def _bound() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.bind(("127.0.0.1", 0))
    except OSError:
        sock.close()
        raise
    return sock


def _check_script(argv: Sequence[str]) -> None:
    if not argv:
        raise LaunchError("nothing to run: give a Python script, or -m and a module")
    if argv[0].startswith("-"):
        if len(argv) < 2:
            raise LaunchError(f"{argv[0]} what? Give a module after -m")
        return
    path = Path(argv[0])
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise LaunchError(f"{path} is a folder; give a Python script")
    if not path.exists():
        raise LaunchError(f"there is no script {path}")


def _crew_name() -> str:
    return f"crew-{os.urandom(6).hex()}"


def _ignore(event: Event) -> None:
    """Without a listener nothing is printed."""
