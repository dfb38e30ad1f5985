"""Starting N peers of one script as processes, and one loop until all have ended.

Each peer is a process in a session of its own, with a UDP socket that the launcher has bound for it: no
port can be taken in between, and datagrams that come early wait in the socket's buffer. The launcher keeps
its copy of each socket, so a dead peer is silent, as on a real network, and nobody else gets its port. The
loop selects with the next deadline as its timeout.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from ragtag.app.disk import Spare
from ragtag.app.environment import Announcement, Place, Reached, read_announcements
from ragtag.app.invitation.token import keep_token
from ragtag.app.launch.events import (
    Ended,
    EndedBy,
    Event,
    Injected,
    LaunchResult,
    Printed,
    Ready,
    Remark,
    Started,
)
from ragtag.app.launch.faults import Act, ProcessFaults
from ragtag.app.launch.guard import Guard
from ragtag.app.launch.process import KILL_S, READ_BYTES, PeerProcess, Stream
from ragtag.app.launch.relay import Relay
from ragtag.app.launch.seats import Seats
from ragtag.app.launch.setup import LaunchError, LaunchSetup, OnError, check_launch
from ragtag.app.launch.signals import Shutdown, Signals
from ragtag.app.terminal.output import SeenErrors, interrupted
from ragtag.app.tracefile import CREW_FILE, TraceWriter, trace_files
from ragtag.app.words import counted
from ragtag.core import trace
from ragtag.core.faults import Faults
from ragtag.core.types import PeerId
from ragtag.network.link.udp import bound_at

TICK_S = 5.0
"""Peers are looked at this often even if no signal told of an end."""
_SIGNAL_OF = {"stop": signal.SIGSTOP, "continue": signal.SIGCONT, "kill": signal.SIGKILL}


class Launch:
    """One run; what it opens is closed with ``stack``.

    on_event, run: as for ``launch``.
    """

    def __init__(
        self,
        setup: LaunchSetup,
        on_event: Callable[[Event], None],
        run: trace.Run | None,
        stack: ExitStack,
    ) -> None:
        self._setup, self._tell = setup, on_event
        self._started_s = time.monotonic()
        self._peers: dict[PeerId, PeerProcess] = {}
        self._ends: dict[PeerId, Ended] = {}
        self._reached: dict[PeerId, Reached] = {}
        self._seats = Seats()
        self._lives: Counter[PeerId] = Counter()
        self._newcomers: set[PeerId] = set()
        self._too_late: set[PeerId] = set()
        """Newcomers that had not joined when the training was over."""
        self._beginner: PeerId | None = None
        self._stopped = False
        self._injector: ProcessFaults | None = None
        self._too_late_faults: list[trace.Fault] = []
        self._seen = SeenErrors()
        self._ending: Shutdown | None = None
        self._interrupted = 0
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._signals = stack.enter_context(Signals())
        self._selector.register(self._signals.fd, selectors.EVENT_READ, "signals")
        self._sockets = [stack.enter_context(bound_at(setup.host)) for _ in range(setup.n)]
        self._member_sockets = [stack.enter_context(bound_at(setup.host)) for _ in range(setup.n)]
        self._ready_read, self._ready_write = os.pipe()
        stack.callback(os.close, self._ready_read)
        stack.callback(os.close, self._ready_write)
        os.set_blocking(self._ready_read, False)
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
        self._say_what_never_came()
        self._write(trace.Leave(t=self._now_t()))
        ends = tuple(end for _, end in sorted(self._ends.items()))
        return LaunchResult(
            ends,
            self._setup.run_folder,
            self._now_t(),
            self._interrupted,
            self._stopped,
            self._setup.min_peers,
            self._restarts,
        )

    # -- Starting

    def _start(self) -> None:
        self._environment = self._setup.environment(self._say)
        self._places = list(self._setup.places(self._sockets, self._member_sockets, self._ready_write))
        for place in self._places:
            self._start_one(place)

    def _start_one(self, place: Place) -> None:
        number = place.rank

        def show(text: str, error: bool) -> None:
            self._tell(Printed(number, text, error))

        fds = (self._sockets[number].fileno(), self._member_sockets[number].fileno(), self._ready_write)
        env = self._environment | place.variables()
        peer = PeerProcess(
            number, self._setup.argv, env, fds, self._selector, show, self._relay, self._streams
        )
        self._guard.watch(peer.pid)
        self._peers[number] = peer
        self._lives[number] += 1
        self._reached[number] = Reached.STARTED
        self._seats.begin(number, place)
        self._tell(Started(number, peer.pid))

    @property
    def _restarts(self) -> int:
        """How often a peer was started again so far."""
        return self._lives.total() - len(self._lives)

    def _start_again(self, lost: Ended) -> None:
        """Start a lost peer anew: in its first place where it had not joined yet, else as a newcomer."""
        number = lost.peer
        so_far = f"{self._restarts + 1} of {self._setup.restarts}"
        self._say(f"peer {number} is lost ({lost.how}) and started again ({so_far})")
        first = self._places[number]
        invitable = first.key is not None  # else it is the only peer, or was invited itself
        if not invitable or (lost.reached < Reached.JOINED and number not in self._newcomers):
            self._start_one(first)
            return
        self._newcomers.add(number)
        self._start_one(self._place_of_newcomer(number))

    def _place_of_newcomer(self, number: PeerId) -> Place:
        """The peers that are in the crew invite it. Where none is left, it begins the crew anew, or enters
        through the one that does. It listens where it did before: what earlier newcomers know holds good.
        """
        others = [peer.number for peer in self._running() if peer.number != number]
        hosts = [peer for peer in others if self._reached[peer] >= Reached.JOINED]
        if not hosts and self._beginner not in others:
            self._beginner = number
        hosts = hosts or [peer for peer in others if peer == self._beginner]
        sock, life = self._member_sockets[number], self._lives[number] + 1
        through = [self._member_sockets[peer] for peer in hosts] or [sock]
        return self._setup.place_of_newcomer(number, life, sock, through, self._ready_write)

    def _is_over(self, lost: PeerId | None = None) -> bool:
        """Whether a peer has finished, and none is left in the crew that another could join."""
        inside = [
            p for p in self._running() if p.number != lost and self._reached[p.number] >= Reached.JOINED
        ]
        return not inside and any(end.finished for end in self._ends.values())

    def _end_late(self) -> None:
        """Once the training is over, end those that were started again and have not joined: they would wait
        for members that have left, and fail.
        """
        for peer in self._running() if self._is_over() else []:
            if peer.number in self._newcomers - self._too_late:
                self._too_late.add(peer.number)
                self._say(
                    f"the training is over: peer {peer.number}, started again, came too late and is ended"
                )
                peer.signal(signal.SIGTERM)

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
            self._stop(f"{signal.Signals(number).name}: ending {counted(len(self._running()), 'peer')}")
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
                peer.release(now_s, self._seen)
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
        return [peer for peer in self._peers.values() if peer.number not in self._ends]

    def _read_ready(self) -> None:
        with suppress(BlockingIOError):
            for told in read_announcements(os.read(self._ready_read, READ_BYTES)):
                if told.number in self._peers:
                    self._take(told)
        self._start_faults()

    def _take(self, told: Announcement) -> None:
        """A peer has come further. One that joins anew has another number in the crew from then on."""
        self._reached[told.number] = max(self._reached[told.number], told.reached)
        if told.reached is Reached.READY:
            self._averaging(told.detail)
        elif (seated := self._seats.take(told.number, told)) is not None:
            self._tell(seated)

    def _averaging(self, method: str) -> None:
        """What peers average by is known once the first one says so: the run's record comes again, whole."""
        if method and not self._record.method:
            self._record = msgspec.structs.replace(self._record, t=self._now_t(), method=method)
            self._write(self._record)

    def _start_faults(self) -> None:
        running = {peer.number for peer in self._running()}
        ready = {number for number, reached in self._reached.items() if reached >= Reached.READY}
        if self._injector is None and running and running <= ready and len(self._peers) == self._setup.n:
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

    def _say_what_never_came(self) -> None:
        """A run that was over before its faults has shown nothing of them."""
        if self._ending is not None:
            return
        if self._injector is None:
            if self._setup.faults != Faults():
                self._say("no fault was injected: their times count from when all peers have joined the crew")
            return
        if late := [*self._too_late_faults, *self._injector.left]:
            details = ", ".join(record.detail for record in late)
            self._say(f"not injected, as the peer or the run had ended before: {details}")

    def _do(self, act: Act) -> None:
        if act.peer in self._ends:
            if act.record is not None:
                self._too_late_faults.append(act.record)
            return
        if act.what != "record":
            peer = self._peers[act.peer]
            peer.killed = peer.killed or act.what == "kill"
            peer.signal(_SIGNAL_OF[act.what])
        if act.record is not None:
            self._write(self._seats.fault(act.record))
            self._tell(Injected(act.record))

    # -- Ending

    def _finish(self, peer: PeerProcess) -> None:
        """A peer has ended but is not reaped yet, so its number still names its process group."""
        peer.signal(signal.SIGKILL)  # what it left behind
        self._guard.release(peer.pid)
        status = peer.reap()
        peer.drain()
        self._read_ready()  # its last words
        by: EndedBy = "itself"
        if peer.killed and status == -signal.SIGKILL:
            by = "fault"
        elif (self._ending is not None or peer.number in self._too_late) and status != 0:
            by = "launcher"
        end = self._explain(peer, status, by)
        if end.failed:
            self._write(self._seats.error(self._now_t(), end))
        elif end.lost and by != "fault":  # a fault has its own record
            self._write(self._seats.lost(self._now_t(), peer.number, end.how))
        over = self._ending is not None or self._is_over(lost=peer.number)
        if end.lost and not over and self._restarts < self._setup.restarts:
            self._start_again(end)
            return
        self._ends[peer.number] = end
        self._tell(end)
        self._end_late()
        bad = end.failed or (end.lost and by != "fault")
        if bad and self._setup.on_error == "stop" and self._ending is None and self._running():
            self._stopped = True
            what = "failed" if end.failed else "is lost"
            self._stop(f"peer {peer.number} {what}: ending the other {len(self._running())}")
        self._start_faults()

    def _explain(self, peer: PeerProcess, status: int, by: EndedBy) -> Ended:
        failed = by == "itself" and status != 0
        held = peer.tracebacks.take()
        if held and not failed and not (by == "launcher" and interrupted(held)):
            for text in held.splitlines():
                self._tell(Printed(peer.number, text, error=True))
        shown = peer.tracebacks.passed_on if status == 1 and not held else ""  # it took long to end
        error = (held or shown) if failed else ""
        same_as = self._seen.same_as(peer.number, error)
        return Ended(peer.number, status, by, error, same_as, bool(shown), self._reached[peer.number])

    def _stop(self, why: str) -> None:
        """End all peers: SIGINT now, SIGTERM and SIGKILL to those that are still there later."""
        if self._ending is not None or not self._running():
            return
        self._ending = Shutdown(time.monotonic(), self._setup.grace_s)
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
        self._tell(Remark(text))

    def _write(self, record: trace.Record) -> None:
        if self._trace is not None:
            self._trace.write(record)


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
    host: str = "127.0.0.1",
    token: str | None = None,
    min_peers: int = 1,
    restarts: int = 0,
    command: str = "",
) -> LaunchResult:
    """Run ``python *argv`` as ``n`` peers of one crew and return once all have ended.

    argv: a script and its arguments, or ``-m``, a module and its arguments.
    run_folder: where the trace goes; it must not hold one already. ``None``: no trace.
    faults: those of processes (freeze, kill, slow) are done here, the others by the peers' drivers. Times
    count from the moment when all running peers are ready (``environment.Reached``); the drivers'
    own from when each began.
    on_error: what a peer that fails means to the others.
    env: added to the peers' environment.
    on_event: told of everything, in this thread; without it, nothing is printed.
    run: the record that opens the trace; name, seed, peers and start are filled in.
    grace_s: how long peers may take to end after SIGINT, and again after SIGTERM, before SIGKILL.
    host: the address of this machine on which peers listen; with loopback nobody comes from elsewhere.
    token: an invitation; the peers join that crew instead of being one of their own.
    min_peers: so many must finish for the result's exit code to be 0.
    restarts: how often, in all, a peer is started again that a signal or a fault has ended. It joins its crew
    as a newcomer; one that had not joined yet takes its first place. Once a peer has finished and nobody is
    left to join, the training is over: no other is started again, and one that is on its way is ended.
    command: what was typed, for the trace.

    SIGINT, SIGTERM and SIGHUP end all peers within bounded time; a second one kills them at once.

    Raises:
        LaunchError: what was asked for is impossible.
        RuntimeError: not called from the main thread, which alone is told of signals.
        KeyboardInterrupt: a second interrupt came while peers were ending; all are killed.
    """
    faults = faults or Faults()
    check_launch(n, argv, faults, joins=token is not None, min_peers=min_peers, restarts=restarts)
    if run_folder is not None and list(trace_files(run_folder)):
        raise LaunchError(f"{run_folder} holds the trace of a run already; give another folder")
    setup = LaunchSetup(
        n,
        tuple(argv),
        crew or f"crew-{os.urandom(6).hex()}",
        time.time(),
        run_folder,
        seed,
        faults,
        on_error,
        dict(env or {}),
        grace_s,
        host,
        token,
        min_peers,
        restarts,
        command,
    )
    with ExitStack() as stack:
        return Launch(setup, on_event or _ignore, run, stack).run()


def _ignore(event: Event) -> None:
    """Without a listener nothing is printed."""
