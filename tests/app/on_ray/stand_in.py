"""Stands in for Ray where a test looks at the launcher's side: actors are objects of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragtag.app.launch.events import Event, LaunchResult
from ragtag.app.launch.setup import LaunchSetup, OnError
from ragtag.app.on_ray import actor as actor_module
from ragtag.app.on_ray.actor import News
from ragtag.app.on_ray.loop import RayLaunch
from ragtag.core.faults import Faults


class RayError(Exception):
    """As Ray has it."""


class ActorUnavailableError(RayError):
    """As Ray has it."""


class RayActorError(RayError):
    """As Ray has it."""


class RayTaskError(RayError):
    """As Ray has it."""


class Handle:
    """An actor; ``kill`` makes it anew, as Ray starts one again."""

    def __init__(self, ray: StandIn, make: Callable[[], Any]) -> None:
        self._ray, self._make = ray, make
        self.restart()

    def restart(self) -> None:
        """The object is another one from now on."""
        self._actor = self._make()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(
            remote=lambda *given: self._ray.pool.submit(getattr(self._actor, name), *given)
        )


class StandIn:
    """What ``RayLaunch`` asks of the module ``ray``.

    trouble: what is raised, once, in place of the answer of an actor that has nothing new.
    """

    exceptions = SimpleNamespace(
        RayError=RayError,
        ActorUnavailableError=ActorUnavailableError,
        RayActorError=RayActorError,
        RayTaskError=RayTaskError,
    )

    def __init__(self, trouble: RayError | None) -> None:
        self.pool = ThreadPoolExecutor()
        self._trouble = trouble

    def remote(self, kind: type) -> Any:
        """Of an actor's class."""
        return SimpleNamespace(options=lambda: SimpleNamespace(remote=lambda: Handle(self, kind)))

    def wait(self, asked: list[Future[Any]], num_returns: int, timeout: float) -> tuple[Any, Any]:
        """As Ray's."""
        when = FIRST_COMPLETED if num_returns == 1 else "ALL_COMPLETED"
        return wait(asked, timeout, when)

    def get(self, asked: Future[Any]) -> Any:
        """As Ray's, of what is answered."""
        answer = asked.result(0)
        trouble = self._trouble
        if trouble is not None and answer == News():
            self._trouble = None
            raise trouble
        return answer

    def kill(self, handle: Handle, no_restart: bool) -> None:
        """As Ray's."""
        if not no_restart:
            handle.restart()

    def cluster_resources(self) -> dict[str, float]:
        """As Ray's."""
        return {"CPU": 2.0}


def launched(
    monkeypatch: pytest.MonkeyPatch,
    script: Path,
    n: int,
    run_folder: Path | None = None,
    trouble: RayError | None = None,
    on_error: OnError = "continue",
) -> tuple[LaunchResult, list[Event]]:
    """What becomes of ``n`` peers of a script, and what was told of them."""
    monkeypatch.setattr(actor_module, "own_host", lambda: "127.0.0.1")
    events: list[Event] = []
    setup = LaunchSetup(n, (str(script),), "crew", 0.0, run_folder, 0, Faults(), on_error, {}, grace_s=5.0)
    ray = StandIn(trouble)
    with ray.pool, ExitStack() as stack:
        return RayLaunch(ray, setup, lambda number: {}, 20.0, events.append, stack).run(), events
