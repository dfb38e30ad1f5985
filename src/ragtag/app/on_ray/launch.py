"""Starting a run of N peers of one script on a Ray cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragtag.app.launch.events import Event, LaunchResult, Remark
from ragtag.app.launch.setup import LaunchError, LaunchSetup, OnError, check_launch
from ragtag.app.on_ray.library import load_ray
from ragtag.app.on_ray.loop import RayLaunch
from ragtag.app.tracefile import trace_files
from ragtag.core.faults import Faults
from ragtag.core.faultspec import format_faults

RESTARTS = 10


@dataclass(frozen=True, slots=True)
class Placement:
    """What each peer takes of the cluster.

    restarts: how often Ray may start a lost peer again.
    working_dir: a folder whose files Ray brings to every node; the script is a path inside it. ``None``: the
        script has the same path on all nodes.
    placed_s: how long to wait for the cluster to have room for all before the crew begins with fewer, and for
        a place when none has one.
    """

    cpus_per_peer: float = 1.0
    gpus_per_peer: float = 0.0
    restarts: int = RESTARTS
    working_dir: Path | None = None
    placed_s: float = 120.0

    def __post_init__(self) -> None:
        if self.cpus_per_peer < 0 or self.gpus_per_peer < 0:
            raise LaunchError("a peer takes 0 or more CPUs and GPUs")
        if self.restarts < 0:
            raise LaunchError(f"{self.restarts} restarts; it must be 0 or more")

    def options(self, number: int) -> dict[str, Any]:
        """As Ray calls them. SPREAD: over all nodes, so that one node's end takes few peers."""
        return {
            "num_cpus": self.cpus_per_peer,
            "num_gpus": self.gpus_per_peer,
            "max_restarts": self.restarts,
            "max_concurrency": 2,  # a signal does not wait for the follower of the output
            "scheduling_strategy": "SPREAD",
            "name": f"ragtag-peer-{number}-{os.urandom(4).hex()}",
        }


def launch_on_ray(
    n: int,
    argv: Sequence[str],
    *,
    placement: Placement | None = None,
    run_folder: Path | None = None,
    seed: int = 0,
    faults: Faults | None = None,
    on_error: OnError = "continue",
    on_event: Callable[[Event], None] | None = None,
    grace_s: float = 5.0,
    min_peers: int = 1,
    command: str = "",
) -> LaunchResult:
    """Run ``python *argv`` as ``n`` peers of one crew on a Ray cluster, and return once all have ended.

    The cluster is the one that this process is connected to, else the one that ``ray.init()`` finds
    (``RAY_ADDRESS``, one that runs on this machine), else a new one on this machine. The rest is as for
    ``ragtag.app.launch.launch``; a peer whose actor or script is killed is started again by Ray, and joins
    anew. Peers' traces come to ``run_folder`` on this machine.

    Raises:
        LaunchError: what was asked for is impossible, or the cluster has room for no peer.
        ragtag.app.on_ray.library.NoRay: Ray is not installed.
        RuntimeError: not called from the main thread, which alone is told of signals.
    """
    placement, faults = placement or Placement(), faults or Faults()
    check_on_ray(n, argv, placement, faults, min_peers)
    if run_folder is not None and list(trace_files(run_folder)):
        raise LaunchError(f"{run_folder} holds the trace of a run already; give another folder")
    tell = on_event or _ignore
    with connected(placement, tell) as ray, ExitStack() as stack:
        setup = LaunchSetup(
            n,
            _found_argv(argv, placement),
            f"crew-{os.urandom(6).hex()}",
            time.time(),
            run_folder,
            seed,
            faults,
            on_error,
            {},
            grace_s,
            min_peers=min_peers,
            command=command,
        )
        return RayLaunch(ray, setup, placement.options, placement.placed_s, tell, stack).run()


@contextmanager
def connected(placement: Placement, tell: Callable[[Event], None]) -> Iterator[Any]:
    """Ray, connected to its cluster; disconnected again if it was not before."""
    ray = load_ray()
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if placement.working_dir is not None:
        options["runtime_env"] = {"working_dir": str(placement.working_dir.absolute())}
    context = ray.init(include_dashboard=False, **options) if _alone() else ray.init(**options)
    try:
        nodes = sum(node["Alive"] for node in ray.nodes())
        cpus = ray.cluster_resources().get("CPU", 0.0)
        address = context.address_info.get("address") or "this machine"
        tell(Remark(f"Ray at {address}: {nodes} node{'s' * (nodes != 1)}, {cpus:g} CPUs"))
        yield ray
    finally:
        ray.shutdown()


def _alone() -> bool:
    """Whether nothing says where a cluster is (then Ray looks on this machine, or starts one)."""
    return not os.environ.get("RAY_ADDRESS")


def check_on_ray(
    n: int, argv: Sequence[str], placement: Placement, faults: Faults, min_peers: int = 1
) -> None:
    """Look for what makes a launch impossible, before anything is started or written.

    Raises:
        LaunchError: the number of peers, the script, a fault, the folder for the nodes.
        ragtag.app.on_ray.library.NoRay: Ray is not installed.
    """
    load_ray()
    folder = placement.working_dir
    if folder is not None and not folder.is_dir():
        raise LaunchError(f"there is no folder {folder} to bring to the cluster's nodes")
    inside = [str(folder / argv[0]), *argv[1:]] if folder and argv and not argv[0].startswith("-") else argv
    if folder is not None and argv and Path(argv[0]).is_absolute():
        raise LaunchError(f"the script {argv[0]} must be a path inside {folder}, which the nodes get")
    check_launch(n, inside, faults, min_peers=min_peers)
    one_peers = (faults.one_way, faults.partitions, faults.crashes, faults.freezes, faults.slow)
    if any(one_peers):
        raise LaunchError(
            f"faults {format_faults(faults)}: on Ray there are only those of the whole network (loss, burst, "
            "delay, ...), since a peer that comes back may have another number"
        )


def _found_argv(argv: Sequence[str], placement: Placement) -> tuple[str, ...]:
    """The script's path as the nodes see it."""
    if placement.working_dir is not None or argv[0].startswith("-"):
        return tuple(argv)
    return (str(Path(argv[0]).absolute()), *argv[1:])


def _ignore(event: Event) -> None:
    """Without a listener nothing is printed."""
