"""A peer as a Ray actor: it runs the script in a process of its own, and tells what comes of it.

The script has a process to itself (its main thread, its signals, its environment, its output) and shares the
actor's fate: a guard kills it when the actor dies, however that happens.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ragtag.app.on_ray.library import own_host
from ragtag.app.on_ray.register import Arrival
from ragtag.app.on_ray.script import News, Script
from ragtag.network.link.udp import bound_at


@dataclass(frozen=True, slots=True)
class Came:
    """An actor is there. life: names this process of it; a restarted actor has another."""

    life: str
    host: str
    arrival: Arrival


class PeerActor:
    """One peer. Its sockets are bound before the script starts: datagrams that come early wait in them."""

    def __init__(self) -> None:
        self._life = secrets.token_hex(8)
        self._host = own_host()
        self._data, self._member = bound_at(self._host), bound_at(self._host)
        self._script: Script | None = None

    def come(self) -> Came:
        """Where this peer is."""
        arrival = Arrival(self._data.getsockname()[:2], self._member.getsockname()[:2])
        return Came(self._life, self._host, arrival)

    def start(
        self, life: str, argv: Sequence[str], place: dict[str, str], cwd: str | None, traced: bool
    ) -> int | None:
        """Start the script; its process. ``None``: the actor has been restarted since ``life``.

        Raises:
            FileNotFoundError: the script is not on this node.
        """
        if life != self._life or self._script is not None:
            return None
        if cwd is not None and Path(cwd).is_dir():
            os.chdir(cwd)
        if argv[0] != "-m" and not Path(argv[0]).exists():
            raise FileNotFoundError(
                f"there is no script {argv[0]} on the node {self._host}; give --working-dir, whose files Ray "
                "brings to every node, or have the script under the same path on each"
            )
        fds = self._data.fileno(), self._member.fileno()
        place = place | {"RAGTAG_FD": str(fds[0]), "RAGTAG_MEMBER_FD": str(fds[1])}
        self._script = Script(argv, place, fds, traced)
        return self._script.pid

    def follow(self, life: str, wait_s: float) -> News | None:
        """What is new of the script. ``None``: the actor has been restarted since ``life``."""
        if life != self._life or self._script is None:
            return None
        return self._script.take(wait_s)

    def signal(self, life: str, number: int) -> None:
        """Send the script a signal."""
        if life == self._life and self._script is not None:
            self._script.signal(number)
