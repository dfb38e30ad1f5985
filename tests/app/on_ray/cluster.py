"""A real Ray cluster of several raylets on this machine, and peers on it that a test watches."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragtag.app.launch.events import Ended, Event, LaunchResult, Printed, Ready, Remark
from ragtag.app.on_ray.launch import Placement, launch_on_ray

TRAINING = Path(__file__).with_name("training.py")
SRC = Path(__file__).parents[3] / "src"
STORE_BYTES = 80 << 20


class Raylets:
    """A head without a CPU for peers, and raylets with one each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []

    def add(self) -> None:
        """One more raylet."""
        self.nodes.append(self.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES))

    def remove(self, raylet_pid: int) -> None:
        """End a raylet, and all that runs on it, without a word."""
        node = next(node for node in self.nodes if pid_of(node) == raylet_pid)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


def pid_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def parent(pid: int) -> int:
    """Of an actor's process: its raylet."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextmanager
def raylets(n: int) -> Iterator[Raylets]:
    """Of this many raylets; this process is connected to it."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ragtag[ray]'")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SRC), *([before] if before else [])])  # for the workers
    made = Raylets()
    try:
        for _ in range(n):
            made.add()
        ray.init(address=made.cluster.address, log_to_driver=False, logging_level="warning")
        yield made
    finally:
        ray.shutdown()
        made.cluster.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Watched:
    """A run's events as they come; ``on`` is called after each, and acts on the cluster."""

    def __init__(self, on: Callable[[Watched], None] = lambda watched: None) -> None:
        self.events: list[Event] = []
        self.actors: dict[int, int] = {}
        """Each peer's present actor, by its process."""
        self.joins: defaultdict[int, int] = defaultdict(int)
        self.steps: dict[int, int] = {}
        """Since it joined last."""
        self.live: dict[int, int] = {}
        """How many each peer says take part; 0 before it has said so since it joined."""
        self._lost: set[int] = set()
        self._on = on

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Printed) and (found := re.match(r"joined .*actor=(\d+)", event.text)):
            self.actors[event.peer] = int(found[1])
            self.joins[event.peer] += 1
            self._lost.discard(event.peer)
            self.steps[event.peer] = self.live[event.peer] = 0
        elif isinstance(event, Printed) and (found := re.match(r"step=(\d+) live=(\d+)", event.text)):
            self.steps[event.peer] = int(found[1])
            self.live[event.peer] = 0 if event.peer in self._lost else int(found[2])  # a line of before
        self._on(self)

    def all_live(self, n: int) -> bool:
        """Whether n peers train and each of them says that n take part."""
        return len(self.live) == n and all(live == n for live in self.live.values())

    def lose(self, peers: set[int]) -> None:
        """These peers are about to be lost; what they say of before counts no more."""
        self._lost |= peers
        for peer in peers:
            self.live[peer] = 0

    def said(self, part: str) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Remark) and part in event.text]

    def ends(self) -> list[Ended]:
        return [event for event in self.events if isinstance(event, Ended)]

    def ready(self) -> list[Ready]:
        return [event for event in self.events if isinstance(event, Ready)]

    def text(self) -> str:
        """All of it, for a failing test."""
        return "\n".join(map(str, self.events))


def run(watched: Watched, n: int, argv: list[str], folder: Path | None, **placement: Any) -> LaunchResult:
    place = Placement(**({"cpus_per_peer": 0.25} | placement))
    return launch_on_ray(n, argv, placement=place, run_folder=folder, on_event=watched, grace_s=10.0)
