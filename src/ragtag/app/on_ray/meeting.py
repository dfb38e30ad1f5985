"""A crew of a Ray program's own tasks and actors: an actor of ours in which they find each other.

The meeting knows which peers have come and which live, and carries no training traffic. Should it be lost,
the crew trains on. Ray starts it again, and it learns from signs of life which peers live.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragtag.app.crew.crew import Crew
from ragtag.app.crew.join import JoinError, join_as
from ragtag.app.crew.peer import Peer
from ragtag.app.environment import Place
from ragtag.app.invitation.token import new_key
from ragtag.app.on_ray.library import load_ray, own_host
from ragtag.app.on_ray.register import PeerAddresses, Register
from ragtag.network.link.udp import bound_at

ALIVE_S = 2.0
"""How often a peer gives the meeting a sign of life."""
SILENT_S = 5 * ALIVE_S
"""Nobody is invited through a peer that has given no sign for so long."""
NUMBERS_MAX = 65_536
"""More tasks and actors cannot have come to one meeting."""


class MeetingActor:
    """A meeting of ``n``; its methods run one at a time in Ray's event loop."""

    def __init__(self, n: int, name: str, seed: int, key: bytes) -> None:
        self._register = Register(n, name, seed, key)
        self._numbers: dict[str, int] = {}
        self._alive_s: dict[int, float] = {}
        self._begun = asyncio.Event()

    async def come(self, who: str, arrival: PeerAddresses, patience_s: float) -> Place:
        """Come to the meeting, and wait until the crew begins: with all, or when one's patience ends."""
        if len(self._numbers) >= NUMBERS_MAX:
            raise RuntimeError(f"{NUMBERS_MAX} tasks and actors have come to this crew; make another one")
        number = self._numbers.setdefault(who, len(self._numbers))
        self._forget_silent()
        self._register.come(number, arrival)
        self._alive_s[number] = time.monotonic()
        if self._register.complete:
            self._begin()
        try:
            await asyncio.wait_for(self._begun.wait(), patience_s)
        except TimeoutError:
            self._begin()
        return self._register.place(number)

    async def alive(self, who: str, arrival: PeerAddresses) -> None:
        """A peer of the crew lives; a meeting that was started again learns of it so."""
        number = self._numbers.setdefault(who, len(self._numbers))
        if number not in self._register.living:
            self._register.come(number, arrival)
            if not self._register.begun:
                self._register.resume()
                self._begun.set()
        self._register.heard(number)
        self._alive_s[number] = time.monotonic()

    async def left(self, who: str) -> None:
        """A peer has left its crew."""
        self._register.gone(self._numbers.get(who, -1))

    def _begin(self) -> None:
        if not self._register.begun:
            self._register.begin()
            self._begun.set()

    def _forget_silent(self) -> None:
        """Of those that wait for the crew to begin no sign is asked."""
        if self._register.begun:
            for number in self._register.living:
                if time.monotonic() - self._alive_s[number] > SILENT_S:
                    self._register.gone(number)


@dataclass(frozen=True, slots=True)
class RayCrew:
    """A crew to be joined from Ray tasks and actors; pass it to them, or give them ``env()``.

    It lasts as long as its maker keeps it, as any Ray actor does.
    """

    actor: Any
    namespace: str
    name: str
    n: int

    def env(self) -> dict[str, str]:
        """For ``runtime_env={"env_vars": ...}``: tasks and actors that have it join by ``ragtag.join()``."""
        return {"RAGTAG_RAY": f"{self.namespace}/{self.name}/{self.n}"}

    def join(self, *, deadline_s: float = 120.0) -> Crew:
        """Join from a task or actor. An actor that Ray has started again joins anew, and gets what it missed.

        deadline_s: how long to wait. Once half of it is over the crew begins with those that have come.
        ``RAGTAG_RUN`` in the environment names a folder for the trace, on this node.

        Raises:
            JoinError: nobody lets this peer in, or the meeting is lost.
        """
        ray = load_ray()
        until_s = time.monotonic() + deadline_s
        who, folder = _who(ray), os.environ.get("RAGTAG_RUN")
        while True:
            left_s = until_s - time.monotonic()
            host = own_host()
            with bound_at(host) as data, bound_at(host) as member:
                arrival = PeerAddresses(data.getsockname()[:2], member.getsockname()[:2])
                place = self._place(ray, who, arrival, left_s)
                one_try_s = (
                    left_s if place.token is None else deadline_s / 4
                )  # the members that it names may be dead
                place = replace(place, run_folder=Path(folder) if folder else None)
                fds = os.dup(data.fileno()), member.fileno()
                try:
                    crew = join_as(replace(place, socket_fd=fds[0], member_fd=fds[1]), min(one_try_s, left_s))
                except JoinError:
                    if place.token is None or time.monotonic() >= until_s:
                        raise
                    continue
            threading.Thread(
                target=_sign,
                args=(self.actor, who, arrival, weakref.ref(crew._peer)),
                name="ragtag-alive",
                daemon=True,
            ).start()
            return crew

    def _place(self, ray: Any, who: str, arrival: PeerAddresses, left_s: float) -> Place:
        try:
            answer = self.actor.come.remote(who, arrival, 0.5 * max(0.0, left_s))
            place = ray.get(answer, timeout=max(0.1, left_s))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise JoinError(
                f"the meeting of crew {self.name!r} does not answer ({type(error).__name__}); does whoever "
                "made it, by ragtag.ray.crew, still live, and keep it?"
            ) from None
        assert isinstance(place, Place)
        return place


def make(n: int, *, seed: int = 0) -> RayCrew:
    """A crew of ``n`` Ray tasks or actors, which join it; more can join later.

    Raises:
        ValueError: ``n`` is out of range.
        ragtag.app.on_ray.library.NoRay: Ray is not installed.
    """
    ray = load_ray()
    name = f"ragtag-{os.urandom(6).hex()}"
    key = new_key()
    Register(n, name, seed, key)  # refuses what is out of range here, not in an actor
    options = {"num_cpus": 0, "name": name, "max_restarts": -1, "max_concurrency": 1024}
    actor = ray.remote(MeetingActor).options(**options).remote(n, name, seed, key)
    return RayCrew(actor, ray.get_runtime_context().namespace, name, n)


def crew_named(text: str) -> RayCrew:
    """The crew that ``RayCrew.env`` has told of.

    Raises:
        JoinError: there is none, any more.
    """
    ray = load_ray()
    namespace, _, rest = text.partition("/")
    name, _, n = rest.partition("/")
    try:
        return RayCrew(ray.get_actor(name, namespace=namespace), namespace, name, int(n))
    except ValueError:
        raise JoinError(
            f"RAGTAG_RAY is {text[:120]!r}, and there is no such crew (any more): whoever makes it, by "
            "ragtag.ray.crew, must keep it as long as peers may join"
        ) from None


def _who(ray: Any) -> str:
    """Names this actor, also when it has been started again, or this task."""
    context = ray.get_runtime_context()
    return str(context.get_actor_id() or context.get_task_id() or f"driver-{os.getpid()}")


def _sign(actor: Any, who: str, arrival: PeerAddresses, peer: weakref.ref[Peer]) -> None:
    """Tell the meeting that this peer lives until it leaves its crew."""
    while (here := peer()) is not None and not here.left:
        del here
        actor.alive.remote(who, arrival)
        time.sleep(ALIVE_S)
    actor.left.remote(who)
