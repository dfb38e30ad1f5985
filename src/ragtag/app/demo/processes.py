"""The demo's plan, and its runs one after the other: each a launch of peers that leave their figures."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from ragtag.app.demo.peer import PeerResult, result_file
from ragtag.app.launch import launch
from ragtag.app.launch.events import Ended, Event, LaunchResult, Printed
from ragtag.app.terminal.dashboard import watch
from ragtag.app.words import seconds
from ragtag.core import trace
from ragtag.core.errors import Error
from ragtag.core.faults import Crash, Faults, Freeze, Loss


class DemoError(Error, RuntimeError):
    """A run of the demo did not end as it should; the message says which, and where its output lies."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What the demo does. Faults come, and last, in parts of the time that the calm run took to train: in
    seconds, those of one machine would come after the training of another.

    frozen_at, frozen_for, killed_at: such parts. The death leaves the survivors a third of that time, so that
        it comes amid training even where the machine is half as fast again as in the calm run.
    """

    peers: int = 6
    rounds: int = 130
    every: int = 8
    seed: int = 0
    loss: float = 0.1
    frozen: int = 2
    frozen_at: float = 0.3
    frozen_for: float = 0.2
    killed: int = 4
    killed_at: float = 0.65

    def faults(self, calm_s: float) -> Faults:
        """All that goes wrong, where the calm run trained for ``calm_s``."""
        return Faults(
            loss=Loss(self.loss),
            freezes=(Freeze(self.frozen, self.frozen_at * calm_s, self.frozen_for * calm_s),),
            crashes=(Crash(self.killed, self.killed_at * calm_s),),
        )

    @property
    def survivors(self) -> tuple[int, ...]:
        """The peers that are not killed."""
        return tuple(peer for peer in range(self.peers) if peer != self.killed)

    def story(self, calm_s: float) -> str:
        """What goes wrong, in words, where the calm run trained for ``calm_s``."""
        return (
            f"{self.loss:.0%} of datagrams dropped, peer {self.frozen} frozen for "
            f"{seconds(self.frozen_for * calm_s)}, peer {self.killed} killed"
        )


SAID_MAX = 200
"""So many lines of a run's output are kept, to be shown should it fail."""


@dataclass(slots=True)
class DemoRun:
    """One run of the demo: its folder, and what its peers left there."""

    name: str
    folder: Path
    ended: dict[int, PeerResult]
    wall_s: float

    def accuracy(self, peers: Sequence[int]) -> list[float]:
        """Of these peers' own models."""
        return [self.ended[peer].accuracy for peer in peers]

    @property
    def trained_s(self) -> float:
        """How long the slowest process trained."""
        return max(ended.trained_s for ended in self.ended.values())

    def samples(self) -> int:
        """That all processes trained on."""
        return sum(ended.samples for ended in self.ended.values())

    def batch(self) -> int:
        """Mean samples per step of a run of one process."""
        (ended,) = self.ended.values()
        return max(1, round(ended.samples / ended.steps))


class Processes:
    """Runs the demo's processes, shows them while they train, and gathers what they leave.

    folder: where each run gets a folder of its own, by its name.
    """

    def __init__(self, plan: DemoPlan, folder: Path, console: Console, live: bool) -> None:
        self._plan, self._folder, self._console, self._live = plan, folder, console, live

    def crew(self, name: str, faults: Faults, story: str) -> DemoRun:
        """Run all peers."""
        plan = self._plan
        must_end = plan.survivors if faults.crashes else tuple(range(plan.peers))
        return self._run(name, plan.peers, plan.rounds, faults, story, must_end, [])

    def single(self, name: str, rounds: int, story: str, alone_with: int | None = None) -> DemoRun:
        """Run one process."""
        more = [] if alone_with is None else ["--alone-with", str(alone_with), "--of", str(self._plan.peers)]
        return self._run(name, 1, rounds, Faults(), story, (0,), more)

    def _run(
        self,
        name: str,
        n: int,
        rounds: int,
        faults: Faults,
        story: str,
        must_end: Sequence[int],
        more: list[str],
    ) -> DemoRun:
        plan, folder = self._plan, self._folder / name
        folder.mkdir(parents=True)
        argv = ["-m", "ragtag.app.demo.peer", "--out", str(folder), "--seed", str(plan.seed)]
        argv += ["--rounds", str(rounds), "--every", str(plan.every), *more]
        said: list[str] = []
        live = self._live and n > 1
        if not live:  # else that is the table's title
            self._console.print(f"[bold]{name}[/]: {story}")
        with self._shown(folder, f"{name}: {story}", live):
            result = self._launch(n, argv, folder, faults, _record(plan, n, rounds, story), said)
        if result.signal:
            raise KeyboardInterrupt
        missing = [peer for peer in must_end if not result_file(folder, peer).exists()]
        if missing:
            raise DemoError(
                f"{name}: peer {', '.join(map(str, missing))} did not end as it should:\n"
                + "\n".join(said[-40:])
            )
        files = {peer: result_file(folder, peer) for peer in must_end}
        ended = {
            peer: msgspec.json.decode(path.read_bytes(), type=PeerResult) for peer, path in files.items()
        }
        return DemoRun(name, folder, ended, result.wall_s)

    def _launch(
        self, n: int, argv: list[str], folder: Path, faults: Faults, record: trace.Run, said: list[str]
    ) -> LaunchResult:
        def on_event(event: Event) -> None:
            if isinstance(event, Printed) and len(said) < SAID_MAX:
                said.append(f"[{event.peer}] {event.text}")
            if isinstance(event, Ended) and event.failed and event.error and not event.shown:
                said.append(f"[{event.peer}] {event.error}")

        # One thread in all runs: a net this small gains nothing from more.
        env = {"OMP_NUM_THREADS": "1"}
        return launch(
            n,
            argv,
            run_folder=folder,
            seed=self._plan.seed,
            faults=faults,
            env=env,
            on_event=on_event,
            run=record,
        )

    @contextmanager
    def _shown(self, folder: Path, title: str, live: bool) -> Iterator[None]:
        """Show the peers in a thread of its own."""
        if not live:
            yield
            return
        over = threading.Event()
        options = {"console": self._console, "title": title, "begun": True}
        viewer = threading.Thread(target=watch, args=(folder, over.is_set), kwargs=options, daemon=True)
        viewer.start()
        try:
            yield
        finally:
            over.set()
            viewer.join(5.0)


def _record(plan: DemoPlan, n: int, rounds: int, story: str) -> trace.Run:
    return trace.Run(
        t=0.0,
        world="live",
        name=f"demo: {story}",
        seed=plan.seed,
        peers=n,
        method="rps" if n > 1 else "none",
        config={"rounds": str(rounds), "local steps": str(plan.every), "faults": story},
        steps_planned=rounds * plan.every,
        command=f"ragtag demo --seed {plan.seed}",
    )
