"""A simulated run: peers that take random local steps and average, in virtual time, under faults.

Each peer holds a vector. A local step adds noise of variance 1 to every value, as stochastic gradients do
to a model; averaging pulls the peers' vectors together again. What is left between them after a round is the
disagreement, in units of a step's variance, which averaging over a lossy line keeps bounded
(``Yu et al., ICML 2019``, lemma on the mixing matrix).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ragtag.app.process_faults import fault_records
from ragtag.app.tracefile import TraceWriter, peer_file, trace_files
from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core import trace
from ragtag.core.faults import Faults
from ragtag.core.faultspec import check_peers, format_faults
from ragtag.core.types import PEERS_MAX, Average, Floats, Noted, Outcome, PeerId
from ragtag.core.wire import n_chunks
from ragtag.protocols.allreduce import direct, ring
from ragtag.protocols.method import Method
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rps import rps, rps_repair
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.link import OVERHEAD_BYTES
from ragtag.simulation.progress import demand_progress
from ragtag.simulation.world import World

METHODS: dict[str, Method] = {method.name: method for method in (rps, rps_repair, direct, ring)}
BEHIND_MAX = 16
"""Rounds that are kept open for peers that are behind; who comes later is left out of a round's figures."""

_CHANNEL = 0
_FLOOR_S = 1e-4


class ExperimentError(ValueError):
    """What was asked for cannot be simulated; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A simulated run.

    values: length of each peer's vector. rounds: until round number ``rounds`` is done. compute_s: a local
    step's mean time; compute_sigma: of its logarithm, drawn per peer and step. check: hold the simulator's
    invariants meanwhile, and at the end heal the network and demand that all hear all again.
    """

    peers: int = 16
    values: int = 100_000
    rounds: int = 20
    method: str = "rps"
    faults: Faults = field(default_factory=Faults)
    compute_s: float = 0.1
    compute_sigma: float = 0.1
    seed: int = 0
    check: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ExperimentError(f"no method is called {self.method!r}; there are {', '.join(METHODS)}")
        if not 1 <= self.peers <= PEERS_MAX:
            raise ExperimentError(f"{self.peers} peers: one crew averages 1 to {PEERS_MAX} peers directly")
        for name in ("values", "rounds"):
            if getattr(self, name) < 1:
                raise ExperimentError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not 0 <= self.compute_s < float("inf") or not 0 <= self.compute_sigma < float("inf"):
            raise ExperimentError(
                f"compute takes {self.compute_s} s, sigma {self.compute_sigma}; neither below 0"
            )
        try:
            check_peers(self.faults, self.peers)
        except ValueError as error:
            raise ExperimentError(str(error)) from None


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """One round over the peers that did it.

    peers: how many did. arrived: share of chunks averaged; contributors: mean number of peers in a chunk.
    total_s: median time; slowest_s: the longest. disagreement: variance of a value over the peers, mean over
    values, in units of a step's variance. ended_s: when the last one was done.
    """

    round: int
    peers: int
    arrived: float
    contributors: float
    total_s: float
    slowest_s: float
    disagreement: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulated run came to. Times in ``rounds`` are virtual; ``wall_s`` is real.

    disagreement: mean over the second half of the rounds. round_s: median, 95th percentile and longest over
    peers and rounds. digest: equal for two runs of one setup. healed_round: with ``check``, the round in
    which all live peers heard all others after the network was healed.
    """

    setup: Setup
    rounds: tuple[RoundFigures, ...]
    live: tuple[PeerId, ...]
    arrived: float
    disagreement: float
    round_s: tuple[float, float, float]
    bytes_sent: int
    datagrams_lost: int
    virtual_s: float
    wall_s: float
    events: int
    digest: str
    healed_round: int | None = None
    run_folder: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        plain = {
            k: v for k, v in asdict(replace(self, setup=Setup(), run_folder=None)).items() if k != "setup"
        }
        settings = {name: getattr(self.setup, name) for name in Setup.__dataclass_fields__}
        settings["faults"] = format_faults(self.setup.faults)
        median_s, p95_s, longest_s = self.round_s
        plain["round_s"] = {"median": median_s, "p95": p95_s, "longest": longest_s}
        plain["run_folder"] = None if self.run_folder is None else str(self.run_folder)
        return {"setup": settings, **plain}


def simulate(
    setup: Setup,
    run_folder: Path | None = None,
    on_round: Callable[[RoundFigures], None] | None = None,
    command: str = "",
) -> Result:
    """Run a setup in virtual time; write its trace to ``run_folder``, where one is given.

    on_round: told of each round once all peers that will do it have. command: what runs this again, for the
    trace and for errors.

    Raises:
        ExperimentError: the folder holds a trace already.
        ragtag.simulation.check.InvariantBroken: with ``check``, a machine broke a rule.
    """
    if run_folder is not None and list(trace_files(run_folder)):
        raise ExperimentError(f"{run_folder} holds the trace of a run already; give another folder")
    with ExitStack() as stack:
        records = _Records(setup, run_folder, command, stack)
        return _Experiment(setup, records, on_round or (lambda figures: None), command).run(run_folder)


class _Records:
    """The trace files of a simulated run, or nothing."""

    def __init__(self, setup: Setup, folder: Path | None, command: str, stack: ExitStack) -> None:
        self._writers: dict[PeerId, TraceWriter] = {}
        if folder is None:
            return
        for peer in range(trace.CREW, setup.peers):
            self._writers[peer] = stack.enter_context(TraceWriter(folder / peer_file(peer)))
        config = {
            "values": str(setup.values),
            "rounds": str(setup.rounds),
            "compute_s": f"{setup.compute_s:g}",
            "faults": format_faults(setup.faults),
        }
        self.write(
            trace.Run(
                t=0.0,
                world="simulated",
                name=f"{setup.method}, {setup.peers} peers",
                seed=setup.seed,
                peers=setup.peers,
                method=setup.method,
                config=config,
                started_unix_s=time.time(),
                steps_planned=setup.rounds,
                command=command,
            )
        )
        for peer in range(setup.peers):
            rtt_s = 2 * (setup.faults.latency_s + setup.faults.jitter_s)
            self.write(trace.Join(t=0.0, peer=peer, address="simulated", rtt_s=rtt_s, others=setup.peers - 1))

    def write(self, record: trace.Record, of: PeerId | None = None) -> None:
        writer = self._writers.get(record.peer if of is None else of)
        if writer is not None:
            writer.write(record)


class _Open:
    """A round that some peers have done and others may still do."""

    def __init__(self, values: int) -> None:
        self.sum, self.squares = np.zeros(values), 0.0
        self.arrived: list[float] = []
        self.contributors: list[float] = []
        self.total_s: list[float] = []
        self.ended_s = 0.0

    def add(self, now_s: float, outcome: Outcome, arrived: float, contributors: float) -> None:
        flat = outcome.mean.reshape(-1)[: len(self.sum)].astype(np.float64)
        self.sum += flat
        self.squares += float(flat @ flat)
        self.arrived.append(arrived)
        self.contributors.append(contributors)
        self.total_s.append(outcome.total_s)
        self.ended_s = now_s

    def figures(self, number: int) -> RoundFigures:
        n = len(self.total_s)
        spread = (self.squares - float(self.sum @ self.sum) / n) / max(1, n - 1)
        return RoundFigures(
            round=number,
            peers=n,
            arrived=float(np.mean(self.arrived)),
            contributors=float(np.mean(self.contributors)),
            total_s=float(np.median(self.total_s)),
            slowest_s=max(self.total_s),
            disagreement=max(0.0, spread / len(self.sum)),
            ended_s=self.ended_s,
        )


class _Experiment:
    def __init__(
        self, setup: Setup, records: _Records, on_round: Callable[[RoundFigures], None], command: str
    ) -> None:
        self._setup, self._records, self._on_round = setup, records, on_round
        self._cost = ComputeCost(setup.compute_s, sigma=setup.compute_sigma, seed=setup.seed)
        self._chunks = n_chunks(setup.values, fp32.elements)
        self._steps = [0] * setup.peers
        self._open: dict[int, _Open] = {}
        self._closed: list[RoundFigures] = []
        self._next = 0
        self._gone: set[PeerId] = set()
        self._times_s: list[float] = []
        nodes = [Node(peer, setup.peers, setup.seed) for peer in range(setup.peers)]
        for node in nodes:
            node.configure(_CHANNEL, self._channel())
        self._world = World(
            nodes,
            setup.faults,
            setup.seed,
            check=setup.check,
            on_done=self._done,
            on_note=self._note,
            replay=command,
        )

    def run(self, run_folder: Path | None) -> Result:
        setup, world, began_s = self._setup, self._world, time.perf_counter()
        zeros = np.zeros((self._chunks, fp32.elements), np.float32)
        for peer in range(setup.peers):
            self._compute(peer, 0.0, zeros)
        world.run()
        self._close(setup.rounds)
        virtual_s, events, digest, live = (
            world.now_s,
            world.events,
            world.digest(),
            sorted(world.live - self._gone),
        )
        traffic = [world.traffic(peer) for peer in range(setup.peers)]
        self._leave(virtual_s, live)
        healed = None
        if setup.check and live:
            healed = demand_progress(world, lambda peer, _: self._ask(peer, zeros))
        late = [figures.disagreement for figures in self._closed[len(self._closed) // 2 :]]
        times_s = np.asarray(self._times_s or [0.0])
        return Result(
            setup=setup,
            rounds=tuple(self._closed),
            live=tuple(live),
            arrived=_weighted(self._closed),
            disagreement=float(np.mean(late)) if late else 0.0,
            round_s=(float(np.median(times_s)), float(np.quantile(times_s, 0.95)), float(times_s.max())),
            bytes_sent=sum(line.bytes_sent for line in traffic),
            datagrams_lost=sum(line.datagrams_lost for line in traffic),
            virtual_s=virtual_s,
            wall_s=time.perf_counter() - began_s,
            events=events,
            digest=digest,
            healed_round=healed,
            run_folder=run_folder,
        )

    def _channel(self) -> Channel:
        """What a real crew would have measured before its first round."""
        setup, faults = self._setup, self._setup.faults
        rtt_s = max(2 * (faults.latency_s + faults.jitter_s), _FLOOR_S)
        stage_bytes = self._chunks * (fp32.elements * 4 + OVERHEAD_BYTES)
        spread_s = 4 * setup.compute_sigma * setup.compute_s
        probe_s = rtt_s + stage_bytes / faults.rate_bytes_per_s + spread_s
        return Channel(METHODS[setup.method], fp32, self._chunks, probe_s, rtt_s, floor_s=_FLOOR_S)

    # -- One peer

    def _compute(self, peer: PeerId, now_s: float, values: Floats) -> None:
        """Begin a local step; when it ends, its result is averaged."""
        step = self._steps[peer]
        ends_s = self._cost.ends_s(peer, step, 1, now_s, self._setup.faults)
        if ends_s < float("inf"):
            self._world.at(ends_s, peer, self._ask(peer, values))
        else:  # it crashes meanwhile
            self._gone.add(peer)

    def _ask(self, peer: PeerId, values: Floats) -> Average:
        setup = self._setup
        noise = random.generator(setup.seed, "step", peer, self._steps[peer])
        moved = values.copy()  # a mean may still be on its way to others
        moved.reshape(-1)[: setup.values] += noise.standard_normal(setup.values, np.float32)
        self._steps[peer] += 1
        return Average(_CHANNEL, moved, 1.0)

    def _done(self, peer: PeerId, now_s: float, outcome: Outcome) -> None:
        contributors = float(np.unpackbits(outcome.heard.view(np.uint8)).sum()) / self._chunks
        arrived = float(outcome.averaged.mean())
        self._times_s.append(outcome.total_s)
        self._records.write(self._round_record(peer, now_s, outcome, arrived, contributors))
        if outcome.round >= self._next:
            self._open.setdefault(outcome.round, _Open(self._setup.values)).add(
                now_s, outcome, arrived, contributors
            )
            self._close(outcome.round - BEHIND_MAX)
        if outcome.round + 1 < self._setup.rounds:
            self._compute(peer, now_s, outcome.mean)

    def _close(self, until: int) -> None:
        """Close rounds in order: those that all live peers have done, and all up to ``until``."""
        for number in sorted(self._open):
            if number > until and len(self._open[number].total_s) < len(self._world.live):
                return
            figures = self._open.pop(number).figures(number)
            self._next = number + 1
            self._closed.append(figures)
            self._on_round(figures)

    # -- The trace

    def _round_record(
        self, peer: PeerId, now_s: float, outcome: Outcome, arrived: float, contributors: float
    ) -> trace.Round:
        traffic = self._world.traffic(peer)
        return trace.Round(
            t=now_s,
            peer=peer,
            round=outcome.round,
            scatter_s=outcome.scatter_s,
            gather_s=outcome.gather_s,
            total_s=outcome.total_s,
            arrived=arrived,
            contributors=contributors,
            waited_for=list(outcome.waited_for),
            missed=list(outcome.missed),
            expired=outcome.expired,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
        )

    def _note(self, peer: PeerId, now_s: float, note: Noted) -> None:
        self._records.write(
            trace.Note(t=now_s, peer=peer, what=note.what, other=note.peer, detail=note.detail)
        )

    def _leave(self, end_s: float, live: list[PeerId]) -> None:
        for record in fault_records(self._setup.faults):
            if record.t <= end_s:
                self._records.write(record, of=trace.CREW)
        for peer in live:
            traffic = self._world.traffic(peer)
            self._records.write(
                trace.Leave(
                    t=end_s,
                    peer=peer,
                    steps=self._steps[peer],
                    bytes_sent=traffic.bytes_sent,
                    bytes_received=traffic.bytes_received,
                    datagrams_lost=traffic.datagrams_lost,
                )
            )


def _weighted(rounds: list[RoundFigures]) -> float:
    """The mean share of chunks averaged, over peers and rounds."""
    done = sum(figures.peers for figures in rounds)
    return sum(figures.arrived * figures.peers for figures in rounds) / done if done else 0.0
