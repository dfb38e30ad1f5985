"""What is to be launched, and what every peer is told of it."""

from __future__ import annotations

import os
import resource
import shlex
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ragtag.app.environment import VARIABLES, Address, Place
from ragtag.app.invitation.token import ADDRESSES_MAX, Token, decode, encode, new_key
from ragtag.app.words import counted
from ragtag.core import trace
from ragtag.core.errors import Error
from ragtag.core.faults import Faults
from ragtag.core.faultspec import check_peers, check_sides, format_faults
from ragtag.core.types import SEATS_MAX, PeerId

OnError = Literal["continue", "stop"]
FILES, FILES_EACH = 128, 6
"""Open files of a launcher: its own, and for each peer two sockets, two pipes, and more while it starts."""
RESTARTS_MAX = 1_000


class LaunchError(Error, ValueError):
    """What was asked for cannot be started; the message says what to change."""


@dataclass(frozen=True, slots=True)
class LaunchSetup:
    """What is to be launched; see ``launch``.

    started_unix_s: when the run began.
    command: what was typed.
    key: the crew's.
    """

    n: int
    argv: tuple[str, ...]
    crew: str
    started_unix_s: float
    run_folder: Path | None
    seed: int
    faults: Faults
    on_error: OnError
    env: dict[str, str]
    grace_s: float
    host: str = "127.0.0.1"
    token: str | None = None
    min_peers: int = 1
    restarts: int = 0
    command: str = ""
    key: bytes = field(default_factory=new_key, repr=False)

    def environment(self, say: Callable[[str], None]) -> dict[str, str]:
        """What all peers have in their environment; what is chosen for them is said."""
        base = dict(os.environ) | self.env
        for name in VARIABLES:  # of a crew that this process itself may be a peer of
            base.pop(name, None)
        base.setdefault("PYTHONUNBUFFERED", "1")
        if "OMP_NUM_THREADS" not in base:
            threads = max(1, cores() // self.n)
            base["OMP_NUM_THREADS"] = str(threads)
            here = f"{counted(self.n, 'peer')}, {counted(cores(), 'core')}"
            each = f"each peer computes with {counted(threads, 'thread')} ({here})"
            say(f"{each}; OMP_NUM_THREADS sets another number")
        return base

    def places(
        self, sockets: Sequence[socket.socket], member_sockets: Sequence[socket.socket], ready_fd: int
    ) -> Iterator[Place]:
        """Each peer's place, by number."""
        peers, members = _addresses(sockets), _addresses(member_sockets)
        token = self.token  # a script gets no key that lets persons in
        if token is not None:
            token = encode(decode(token).for_processes(self.started_unix_s))
        for number, (data, member) in enumerate(zip(sockets, member_sockets, strict=True)):
            place = Place(
                rank=number,
                size=self.n,
                crew=self.crew,
                seed=self.seed,
                run_folder=self.run_folder.absolute() if self.run_folder is not None else None,
                started_unix_s=self.started_unix_s,
                socket_fd=data.fileno(),
                member_fd=member.fileno(),
                ready_fd=ready_fd,
                # the launcher itself stops, slows and kills processes: drivers would do it a second time
                faults=replace(self.faults, crashes=(), freezes=(), slow=()),
                token=token,
            )
            if self.token is None and self.n > 1:
                place = replace(place, peers=peers, members=members, key=self.key)
            elif self.token is None:
                place = replace(place, peers=peers)
            else:  # it listens where the token says, if it is the first, or where the crew reaches it
                place = replace(place, socket_fd=None, member_fd=None)
            yield place

    def place_of_newcomer(
        self, number: PeerId, life: int, sock: socket.socket, through: Sequence[socket.socket], ready_fd: int
    ) -> Place:
        """The place of a peer that was lost and is started again while its crew averages: it is invited.

        life: how often it was started, this time included.
        sock: for its membership.
        through: those of the peers that let it in; its own: it begins the crew anew.
        """
        return Place(
            rank=number,
            size=1,
            crew=self.crew,
            seed=self.seed,
            run_folder=self.run_folder.absolute() if self.run_folder is not None else None,
            started_unix_s=self.started_unix_s,
            member_fd=sock.fileno(),
            ready_fd=ready_fd,
            # of the whole network only: those that name a peer mean its number in the crew, which is new
            faults=replace(self.faults, crashes=(), freezes=(), slow=(), one_way=(), partitions=()),
            token=encode(Token(_addresses(through)[:ADDRESSES_MAX], self.crew, self.key)),
            name=f"peer-{number}-{life}",
        )

    def invitation(self, member_sockets: Sequence[socket.socket]) -> str | None:
        """A token for this crew; ``None``: its peers were invited themselves, or there is but one."""
        if self.token is not None or self.n == 1:
            return self.token
        return encode(Token(_addresses(member_sockets)[:ADDRESSES_MAX], self.crew, self.key))

    def run_record(self, given: trace.Run | None) -> trace.Run:
        """The record that opens the trace: what is ``given``, and what is known here."""
        of = given or trace.Run(t=0.0, world="live", name="", seed=0, peers=0, method="")
        script = self.argv[1] if self.argv[0] == "-m" else self.argv[0]
        return trace.Run(
            t=0.0,
            world="live",
            name=of.name or Path(script).stem,
            seed=self.seed,
            peers=self.n if self.token is None else 0,  # those get their numbers from the crew that they join
            # else the script's peers tell
            method=of.method or ("none" if self.n == 1 and self.token is None else ""),
            config={"faults": format_faults(self.faults), "on_error": self.on_error, **of.config},
            started_unix_s=self.started_unix_s,
            steps_planned=of.steps_planned,
            planned_s=of.planned_s,
            command=of.command or self.command or shlex.join(["python", *self.argv]),
        )


def _addresses(sockets: Sequence[socket.socket]) -> tuple[Address, ...]:
    return tuple(sock.getsockname()[:2] for sock in sockets)


def check_launch(
    n: int, argv: Sequence[str], faults: Faults, *, joins: bool = False, min_peers: int = 1, restarts: int = 0
) -> None:
    """Look for what makes a launch impossible, before anything is started or written.

    joins: the peers join a crew; otherwise they are one.

    Raises:
        LaunchError: the number of peers, the files that they need, the script or a fault's peers.
    """
    if not 1 <= n <= SEATS_MAX:
        raise LaunchError(f"{n} peers: a crew has 1 to {SEATS_MAX}")
    if not 1 <= min_peers <= n:
        raise LaunchError(f"--min-peers {min_peers}: of {counted(n, 'peer')} 1 to {n} can finish")
    if not 0 <= restarts <= RESTARTS_MAX:
        raise LaunchError(f"{restarts} restarts; it must be 0 to {RESTARTS_MAX}")
    _open_files(FILES + n * FILES_EACH)
    try:
        check_peers(faults, n)
        if not joins:
            check_sides(faults, n)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    _check_script(argv)


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _open_files(needed: int) -> None:
    """Have this process (and its peers) open so many files.

    Raises:
        LaunchError: the system does not let it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(f"so many peers need {needed} open files here, {hard} are allowed: see ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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
