"""Peers as processes: a loop around a selector with the next deadline as its timeout.

Each peer is a process in a session of its own, with a UDP socket that the launcher has bound for it: no
port can be taken in between, and datagrams that come early wait in the socket's buffer. The launcher keeps
its copy of each socket, so a dead peer is silent, as on a real network, and nobody else gets its port.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import msgspec

from ragtag.app.disk import Spare
from ragtag.app.environment import read_announcements
from ragtag.app.guard import Guard
from ragtag.app.launch.ending import Ending
from ragtag.app.launch.setup import Setup
from ragtag.app.launch_events import Ended, EndedBy, Event, Injected, LaunchResult, Line, Ready, Said, Started
from ragtag.app.output import SeenErrors, interrupted, last_line
from ragtag.app.peer_process import KILL_S, READ_BYTES, PeerProcess, Stream
from ragtag.app.process_faults import Act, ProcessFaults
from ragtag.app.relay import Relay
from ragtag.app.signals import Signals
from ragtag.app.token import keep_token
from ragtag.app.tracefile import CREW_FILE, TraceWriter
from ragtag.core import trace
from ragtag.core.faults import Faults
from ragtag.core.types import PeerId
from ragtag.network.udp import bound_at

TICK_S = 5.0
"""Peers are looked at this often even if no signal told of an end."""
_SIGNAL_OF = {"stop": signal.SIGSTOP, "continue": signal.SIGCONT, "kill": signal.SIGKILL}


class Launch:
    """One run; what it opens is closed with ``stack``. on_event, run: as for ``launch``."""

    def __init__(
        self,
        setup: Setup,
        on_event: Callable[[Event], None],
        run: trace.Run | None,
        stack: ExitStack,
    ) -> None:
        self._setup, self._tell = setup, on_event
        self._started_s = time.monotonic()
        self._peers: list[PeerProcess] = []
        self._ends: dict[PeerId, Ended] = {}
        self._ready: set[PeerId] = set()
        self._injector: ProcessFaults | None = None
        self._seen = SeenErrors()
        self._ending: Ending | None = None
        self._interrupted = 0
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._signals = stack.enter_context(Signals())
        self._selector.register(self._signals.fd, selectors.EVENT_READ, "signals")
        self._sockets = [stack.enter_context(bound_at(setup.host)) for _ in range(setup.n)]
        self._member_sockets = [stack.enter_context(bound_at(setup.host)) for _ in range(setup.n)]
        self._ready_read, self._ready_write = os.pipe()
        stack.callback(os.close, self._ready_read)
        stack.callback(os.close, self._ready_write)
        self._selector.register(self._ready_read, selectors.EVENT_READ, "ready")
        self._trace: TraceWriter | None = None
        self._record = setup.run_record(run)
        if setup.run_folder is not None:
            self._trace = stack.enter_context(TraceWriter(setup.run_folder / CREW_FILE, self._say))
            self._trace.write(self._record)
        self._spare = Spare("the invitation to this crew in the run's folder", self._say)
        self._kept = setup.run_folder is None or self._spare.write(self._keep_invitation)
        self._guard = Guard()
        stack.callback(self._guard.close)
        self._streams: dict[int, Stream] = {}
        self._relay = Relay(self._selector, self._output, self._gap, self._unrelayed)
        stack.callback(self._relay.close)

    def run(self) -> LaunchResult:
        """Start all peers, and return once all have ended."""
        try:
            self._start()
            while self._running():
                self._turn()
        except BaseException:
            self._kill_all()
            raise
        if self._setup.faults != Faults() and self._injector is None and self._ending is None:
            self._say("no fault was injected: their times count from when all peers have joined the crew")
        self._write(trace.Leave(t=self._now_t()))
        ends = tuple(end for _, end in sorted(self._ends.items()))
        return LaunchResult(ends, self._setup.run_folder, self._now_t(), self._interrupted)

    # -- Starting

    def _start(self) -> None:
        base = self._setup.environment(self._say)
        for place in self._setup.places(self._sockets, self._member_sockets, self._ready_write):
            sockets = self._sockets[place.rank], self._member_sockets[place.rank]
            fds = (*(sock.fileno() for sock in sockets), self._ready_write)
            self._start_one(place.rank, base | place.variables(), fds)

    def _start_one(self, number: PeerId, env: dict[str, str], fds: tuple[int, ...]) -> None:
        def show(text: str, error: bool) -> None:
            self._tell(Line(number, text, error))

        peer = PeerProcess(
            number, self._setup.argv, env, fds, self._selector, show, self._relay, self._streams
        )
        self._guard.watch(peer.pid)
        self._peers.append(peer)
        self._tell(Started(number, peer.pid))

    # -- One turn of the loop

    def _turn(self) -> None:
        now_s = time.monotonic()
        for key, _ in self._selector.select(max(0.0, self._due_s(now_s) - now_s)):
            if isinstance(key.data, Stream):
                key.data.peer.read(key.data)
            elif isinstance(key.data, Relay):
                key.data.read()
            elif key.data == "ready":
                self._read_ready()
        for number in self._signals.take():
            self._interrupted = self._interrupted or number
            self._stop(f"{signal.Signals(number).name}: ending {len(self._running())} peers")
        now_s = time.monotonic()
        self._kept = self._kept or self._spare.write(self._keep_invitation)
        if self._ending is not None:
            for due in self._ending.due(now_s):
                self._signal_all(due)
        elif self._injector is not None:
            for act in self._injector.due(now_s):
                self._do(act)
        for peer in self._running():
            if self._ending is None:  # else: most likely the KeyboardInterrupt that was asked for
                peer.release(now_s)
            if peer.has_ended():
                self._finish(peer)

    def _due_s(self, now_s: float) -> float:
        """When there is something to do, whatever comes in until then."""
        due_s: list[float | None] = [now_s + TICK_S]
        if self._ending is not None:
            due_s.append(self._ending.next_s)
        else:
            due_s += [peer.tracebacks.until_s for peer in self._running()]
            due_s.append(self._injector.next_s if self._injector is not None else None)
        return min(at_s for at_s in due_s if at_s is not None)

    def _running(self) -> list[PeerProcess]:
        return [peer for peer in self._peers if peer.number not in self._ends]

    def _read_ready(self) -> None:
        known = {peer.number for peer in self._peers}
        for number, method in read_announcements(os.read(self._ready_read, READ_BYTES)):
            if number in known:
                self._ready.add(number)
                self._averaging(method)
        self._start_faults()

    def _averaging(self, method: str) -> None:
        """What peers average by is known once the first one says so: the run's record comes again, whole."""
        if method and not self._record.method:
            self._record = msgspec.structs.replace(self._record, t=self._now_t(), method=method)
            self._write(self._record)

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

    # -- Output

    def _output(self, stream: int, data: bytes) -> None:
        self._streams[stream].peer.take(self._streams[stream], data)

    def _gap(self, stream: int, n_bytes: int, n_lines: int) -> None:
        self._streams[stream].peer.skip(self._streams[stream], n_bytes, n_lines)

    def _unrelayed(self) -> None:
        """Somebody has ended the relay: read what peers print here."""
        self._say("the relay of the peers' output was ended; should this process be stopped, they may be too")
        for stream in self._streams.values():
            if stream.peer.number not in self._ends:
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)

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
        elif self._ending is not None and status != 0:
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
        if self._ending is not None or not self._running():
            return
        self._ending = Ending(time.monotonic(), self._setup.grace_s)
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

    def _keep_invitation(self) -> None:
        """Raises OSError."""
        assert self._setup.run_folder is not None
        keep_token(self._setup.run_folder, self._setup.invitation(self._member_sockets))

    def _now_t(self) -> float:
        return time.monotonic() - self._started_s

    def _say(self, text: str) -> None:
        self._tell(Said(text))

    def _write(self, record: trace.Record) -> None:
        if self._trace is not None:
            self._trace.write(record)
