"""The launcher's side of peers on Ray: one loop over what the actors answer, and what it writes of that."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from ragtag.app.disk import explain
from ragtag.app.environment import Announcement, Reached
from ragtag.app.invitation.token import Token, encode, keep_token
from ragtag.app.launch.events import (
    Ended,
    EndedBy,
    Event,
    LaunchResult,
    Printed,
    Ready,
    Remark,
    Started,
)
from ragtag.app.launch.seats import Seats
from ragtag.app.launch.setup import LaunchError, LaunchSetup
from ragtag.app.launch.signals import Shutdown, Signals
from ragtag.app.on_ray.actor import ActorCame, End, News, PeerActor, variables
from ragtag.app.on_ray.register import Register
from ragtag.app.terminal.output import SeenErrors, interrupted
from ragtag.app.tracefile import CREW_FILE, TraceWriter
from ragtag.app.words import counted
from ragtag.core import trace
from ragtag.core.faultspec import format_faults
from ragtag.core.types import PeerId


class Stage(Enum):
    """How far a peer is."""

    COMING = "coming"
    """Ray is looking for a place for its actor, or starts it again."""
    HERE = "here"
    """It waits for the crew to begin."""
    STARTING = "starting"
    RUNNING = "running"
    OVER = "over"


@dataclass(slots=True)
class RayPeer:
    """One peer.

    actor: Ray's handle.
    came: where its present process is. killed: which is about to end, as its script has.
    again_s: when to ask for it again.
    starts: how often the script was started.
    reached: how far the peer has come since the last start.
    """

    number: PeerId
    actor: Any
    stage: Stage = Stage.COMING
    came: ActorCame | None = None
    killed: bool = False
    again_s: float | None = None
    starts: int = 0
    reached: Reached = Reached.STARTED

    @property
    def joined(self) -> bool:
        """Whether it averages with its crew."""
        return self.reached >= Reached.READY

    @property
    def up(self) -> bool:
        """Whether its script runs, or is about to."""
        return self.stage in (Stage.STARTING, Stage.RUNNING)


def peer_ended(peer: RayPeer, end: End, by: EndedBy, seen: SeenErrors) -> Ended:
    """How a peer's script ended, as an event."""
    number = peer.number
    failed = by == "itself" and end.status != 0
    shown = end.passed_on if end.status == 1 and not end.held else ""  # it took long to end
    error = (end.held or shown) if failed else ""
    same_as = seen.same_as(number, error)
    return Ended(number, end.status, by, error, same_as, bool(shown), peer.reached)


class RunBook:
    """The run's folder, if it has one. What cannot be written is told, and stops no run."""

    def __init__(self, setup: LaunchSetup, say: Callable[[str], None], stack: ExitStack) -> None:
        self._folder, self._say = setup.run_folder, say
        self._started_s = time.monotonic()
        self._broken = False
        self._run = setup.run_record(None)
        self._trace: TraceWriter | None = None
        if self._folder is not None:
            self._trace = stack.enter_context(TraceWriter(self._folder / CREW_FILE, say))
            self._trace.write(self._run)

    def now_t(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started_s

    def write(self, record: trace.Known) -> None:
        """Write a record of the crew's."""
        if self._trace is not None:
            self._trace.write(record)

    def averaging(self, method: str) -> None:
        """What peers average by is known once the first one says so: the run's record comes again, whole."""
        if method and not self._run.method:
            self._run = msgspec.structs.replace(self._run, t=self.now_t(), method=method)
            self.write(self._run)

    def keep(self, token: Token) -> None:
        """Keep an invitation, for ``ragtag invite``."""
        if self._folder is None:
            return
        try:
            keep_token(self._folder, encode(token))
        except OSError as error:
            self._say(f"no invitation to this crew could be kept: {explain(error)}")

    def append(self, name: str, data: bytes) -> None:
        """Append a piece of a peer's trace."""
        if self._folder is None or self._broken:
            return
        path = self._folder / name
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(data)
        except OSError as error:
            self._broken = True
            self._say(f"the peers' traces are not kept any more: {explain(error)}")


TURN_S = 0.2
"""How long one turn waits for answers; signals are looked for in between."""
FOLLOW_S = 1.0
"""How long an actor waits for something to tell before it answers all the same."""


class RayLaunch:
    """One run.

    options: Ray's, for a peer's actor, by number.
    placed_s: as in ``Placement``.
    """

    def __init__(
        self,
        ray: Any,
        setup: LaunchSetup,
        options: Callable[[int], dict[str, Any]],
        placed_s: float,
        on_event: Callable[[Event], None],
        stack: ExitStack,
    ) -> None:
        self._ray, self._setup, self._tell, self._placed_s = ray, setup, on_event, placed_s
        self._started_s = self._last_up_s = time.monotonic()
        self._register = Register(setup.n, setup.crew, setup.seed, setup.key)
        self._ends: dict[int, Ended] = {}
        self._seats = Seats()
        self._seen = SeenErrors()
        self._ending: Shutdown | None = None
        self._interrupted = 0
        self._told_ready = self._stopped = False
        self._asked: dict[Any, RayPeer] = {}
        self._book = RunBook(setup, self._say, stack)
        self._signals = stack.enter_context(Signals())
        remote = ray.remote(PeerActor)
        self._peers = [RayPeer(i, remote.options(**options(i)).remote()) for i in range(setup.n)]
        stack.callback(self._kill_actors)

    def run(self) -> LaunchResult:
        """Follow all peers to their ends."""
        for peer in self._peers:
            self._ask(peer, peer.actor.come.remote())
        self._say_room()
        while self._left():
            self._turn()
        self._book.write(trace.Leave(t=self._book.now_t()))
        ends = tuple(end for _, end in sorted(self._ends.items()))
        return LaunchResult(
            ends,
            self._setup.run_folder,
            self._book.now_t(),
            self._interrupted,
            self._stopped,
            self._setup.min_peers,
            sum(max(0, peer.starts - 1) for peer in self._peers),
        )

    # -- One turn of the loop

    def _turn(self) -> None:
        now_s = time.monotonic()
        for peer in self._left():
            if peer.again_s is not None and now_s >= peer.again_s:
                peer.again_s = None
                self._ask(peer, peer.actor.come.remote())
        for ref in self._answers():
            self._answered(self._asked.pop(ref), ref)
        for number in self._signals.take():
            self._interrupted = self._interrupted or number
            self._stop(f"{signal.Signals(number).name}: ending {counted(len(self._left()), 'peer')}")
        now_s = time.monotonic()
        if self._ending is not None:
            for due in self._ending.due(now_s):
                self._signal_all(due)
        elif not self._register.begun:
            self._begin(now_s - self._started_s >= self._placed_s)
        elif any(peer.up for peer in self._peers):
            self._last_up_s = now_s
        else:
            self._give_up(now_s)

    def _answers(self) -> list[Any]:
        """All that has been answered, as soon as anything is."""
        if not self._asked:  # the actors that are left are to be asked again in a moment
            time.sleep(TURN_S)
            return []
        answered, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=TURN_S)
        if answered:
            answered, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        return list(answered)

    def _left(self) -> list[RayPeer]:
        return [peer for peer in self._peers if peer.stage is not Stage.OVER]

    def _ask(self, peer: RayPeer, ref: Any) -> None:
        self._asked[ref] = peer

    def _answered(self, peer: RayPeer, ref: Any) -> None:
        if peer.stage is Stage.OVER:
            return
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(ref)
        except errors.ActorUnavailableError:
            self._lost(peer)
        except errors.RayActorError as error:
            self._say(f"the actor of peer {peer.number} is lost: {_brief(error)}")
            if peer.up:  # else it was told already, when Ray was to start it again
                how = f"its actor: {_brief(error)}"
                self._book.write(self._seats.lost(self._book.now_t(), peer.number, how))
            self._finish(peer, End(-signal.SIGKILL, "", ""))
        except errors.RayTaskError as error:  # the actor's own: the script is not there, the disk is full
            self._finish(peer, End(1, str(error.cause), ""))
        else:
            self._take(peer, answer)

    def _take(self, peer: RayPeer, answer: ActorCame | News | int | None) -> None:
        if isinstance(answer, ActorCame):
            self._take_came(peer, answer)
        elif isinstance(answer, News):
            self._news(peer, answer)
        elif answer is None:  # it was restarted in between
            self._come_again(peer)
        else:
            peer.stage = Stage.RUNNING
            self._tell(Started(peer.number, answer))
            self._follow(peer)

    def _take_came(self, peer: RayPeer, came: ActorCame) -> None:
        same = peer.came is not None and came.life == peer.came.life
        if same and peer.killed:
            self._come_again(peer)
            return
        peer.came, peer.killed, peer.stage = came, False, Stage.HERE
        self._register.come(peer.number, came.arrival)
        if self._register.begun:
            self._book.keep(self._register.invitation())
        if came.runs:  # it was cut off from here alone
            self._say(f"peer {peer.number} is there again, and was all the time")
            self._book.write(self._seats.back(self._book.now_t(), peer.number))
            peer.stage = Stage.RUNNING
            self._follow(peer)
        elif self._register.begun:
            self._start(peer)

    # -- Beginning

    def _begin(self, late: bool) -> None:
        """The crew begins once all have come; if it is late, with those that have."""
        here = [peer for peer in self._left() if peer.stage is Stage.HERE]
        if len(here) < len(self._left()) and not late:
            return
        if not here:
            raise LaunchError(
                f"the cluster had room for no peer within {self._placed_s:g} s; it has {self._resources()}: "
                "ask for less with --cpus-per-peer and --gpus-per-peer"
            )
        if len(here) < len(self._left()):
            begin = "1 peer begins" if len(here) == 1 else f"{len(here)} peers begin"
            self._say(f"{begin}; the others join when the cluster has room for them")
        self._register.begin()
        self._book.keep(self._register.invitation())
        for peer in here:
            self._start(peer)

    def _start(self, peer: RayPeer) -> None:
        assert peer.came is not None
        place = self._register.place(peer.number)
        self._seats.begin(peer.number, place)
        env = variables(place) | {
            "RAGTAG_STARTED": str(self._setup.started_unix_s),
            "RAGTAG_SEED": str(self._setup.seed),
        }
        if faults := format_faults(self._setup.faults):
            env["RAGTAG_FAULTS"] = faults
        peer.stage, peer.starts, peer.reached = Stage.STARTING, peer.starts + 1, Reached.STARTED
        cwd = str(Path.cwd())
        traced = self._setup.run_folder is not None
        self._ask(peer, peer.actor.start.remote(peer.came.life, list(self._setup.argv), env, cwd, traced))

    def _say_room(self) -> None:
        n = self._setup.n
        wait = "1 peer waits for its place" if n == 1 else f"{n} peers wait for their places"
        self._say(f"{wait}; the cluster has {self._resources()}")

    def _resources(self) -> str:
        has = self._ray.cluster_resources()
        cpus, gpus = has.get("CPU", 0), has.get("GPU", 0)
        return f"{cpus:g} CPU{'s' * (cpus != 1)} and {gpus:g} GPU{'s' * (gpus != 1)}"

    # -- News

    def _follow(self, peer: RayPeer) -> None:
        assert peer.came is not None
        self._ask(peer, peer.actor.follow.remote(peer.came.life, FOLLOW_S))

    def _news(self, peer: RayPeer, news: News) -> None:
        self._register.heard(peer.number)
        if news.dropped:
            lines = counted(news.dropped, "line")
            self._say(f"{lines} of peer {peer.number} not shown: the output came too fast")
        for text, error in news.lines:
            self._tell(Printed(peer.number, text, error))
        for name, data in news.trace:
            self._book.append(name, data)
        for told in news.told:
            self._heard(peer, told)
        if news.end is None:
            self._follow(peer)
        elif news.end.status < 0 and self._ending is None:
            how = Ended(peer.number, news.end.status, "itself").how
            self._ray.kill(peer.actor, no_restart=False)
            peer.killed = True
            self._print(peer, news.end.held)
            self._lost(peer, how)
        else:
            self._finish(peer, news.end)

    def _heard(self, peer: RayPeer, told: Announcement) -> None:
        """A peer has come further."""
        peer.reached = max(peer.reached, told.reached)
        if told.reached is Reached.READY:
            self._ready(peer, told.detail)
        elif (seated := self._seats.take(peer.number, told)) is not None:
            self._tell(seated)

    def _ready(self, peer: RayPeer, method: str) -> None:
        if peer.starts > 1:
            self._say(f"peer {peer.number} has joined again")
        self._book.averaging(method)
        if not self._told_ready and all(other.joined for other in self._peers if other.up):
            self._told_ready = True
            self._tell(Ready(tuple(other.number for other in self._peers if other.up)))

    # -- Losing a peer

    def _lost(self, peer: RayPeer, how: str = "") -> None:
        """Ray starts its actor again, if it may."""
        if self._ending is not None:
            self._finish(peer, End(-signal.SIGKILL, "", ""), "launcher")
            return
        if peer.stage is not Stage.COMING:
            self._say(f"peer {peer.number} is lost{how and f' ({how})'}; Ray starts it again")
            self._book.write(self._seats.lost(self._book.now_t(), peer.number, how))
        self._come_again(peer)

    def _come_again(self, peer: RayPeer) -> None:
        self._register.gone(peer.number)
        peer.stage, peer.again_s = Stage.COMING, time.monotonic() + TURN_S

    def _give_up(self, now_s: float) -> None:
        """No script runs: a peer that waits for a place has nobody to join, or has waited for long."""
        done = any(end.status == 0 for end in self._ends.values())
        if not done and now_s - self._last_up_s < self._placed_s:
            return
        for peer in self._left():
            if done:
                self._finish(peer, End(1, "", ""), "launcher")
            else:
                self._finish(peer, End(1, f"the cluster had no place for it within {self._placed_s:g} s", ""))

    # -- Ending

    def _finish(self, peer: RayPeer, end: End, by: EndedBy = "itself") -> None:
        peer.stage = Stage.OVER
        self._register.gone(peer.number)
        with suppress(self._ray.exceptions.RayError):  # it is gone already
            self._ray.kill(peer.actor, no_restart=True)
        if self._ending is not None and end.status != 0:
            by = "launcher"
        ended = self._ends[peer.number] = peer_ended(peer, end, by, self._seen)
        if end.held and not ended.failed and not (by == "launcher" and interrupted(end.held)):
            self._print(peer, end.held)
        if ended.failed:
            self._book.write(self._seats.error(self._book.now_t(), ended))
        self._tell(ended)
        bad = ended.failed or ended.lost
        if bad and self._setup.on_error == "stop" and self._ending is None and self._left():
            self._stopped = True
            what = "failed" if ended.failed else "is lost"
            self._stop(f"peer {peer.number} {what}: ending the other {len(self._left())}")

    def _stop(self, why: str) -> None:
        """End all peers: SIGINT now, SIGTERM and SIGKILL to those that are still there later."""
        if self._ending is not None or not self._left():
            return
        self._ending = Shutdown(time.monotonic(), self._setup.grace_s)
        self._signals.stopping = True
        self._say(why)
        self._book.write(trace.Note(t=self._book.now_t(), what="stopping", detail=why))
        for peer in self._left():
            if not peer.up:
                self._finish(peer, End(1, "", ""), "launcher")

    def _signal_all(self, number: signal.Signals | None) -> None:
        for peer in self._left():
            if number is None:  # an actor that answers no more
                self._finish(peer, End(-signal.SIGKILL, "", ""), "launcher")
            elif peer.came is not None:
                peer.actor.signal.remote(peer.came.life, int(number))
                peer.actor.signal.remote(peer.came.life, int(signal.SIGCONT))

    def _kill_actors(self) -> None:
        for peer in self._left():
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(peer.actor, no_restart=True)

    # -- Small change

    def _print(self, peer: RayPeer, held: str) -> None:
        """Its last words, which are no error of its own."""
        for text in held.splitlines():
            self._tell(Printed(peer.number, text, error=True))

    def _say(self, text: str) -> None:
        self._tell(Remark(text))


def _brief(error: BaseException) -> str:
    """What Ray says of it, without its advice."""
    return " ".join(str(error).split())[:500]
