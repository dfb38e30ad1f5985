"""Runs an experiment in virtual time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from ragtag.app.experiment.figures import ExperimentResult, OpenRound, RoundFigures, Staleness
from ragtag.app.experiment.records import Records
from ragtag.app.experiment.setup import FLOOR_S, ExperimentError, ExperimentSetup
from ragtag.app.tracefile import trace_files
from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core.arrival import arrived, others_in
from ragtag.core.types import Average, Floats, Left, Outcome, PeerId
from ragtag.core.wire import n_chunks
from ragtag.protocols.node import Channel, Node
from ragtag.simulation.check.progress import demand_progress
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.link import OVERHEAD_BYTES
from ragtag.simulation.trials.rounds import DECLARED
from ragtag.simulation.worlds.rounds import World

BEHIND_MAX = 16
"""Rounds that are kept open for peers that are behind; a later one is left out of a round's figures."""

_CHANNEL = 0


def simulate(
    setup: ExperimentSetup,
    run_folder: Path | None = None,
    on_round: Callable[[RoundFigures], None] | None = None,
    command: str = "",
) -> ExperimentResult:
    """Run a setup in virtual time; write its trace to ``run_folder``, where one is given.

    on_round: told of each round once all peers that will do it have.
    command: what runs this again, for the trace and for errors.

    Raises:
        ExperimentError: the folder holds a trace already.
        ragtag.simulation.check.rounds.InvariantBroken: with ``check``, a machine broke a rule.
    """
    if run_folder is not None and list(trace_files(run_folder)):
        raise ExperimentError(f"{run_folder} holds the trace of a run already; give another folder")
    with ExitStack() as stack:
        records = Records(setup, run_folder, command, stack)
        return _Experiment(setup, records, on_round or (lambda figures: None), command).run(run_folder)


class _Experiment:
    def __init__(
        self, setup: ExperimentSetup, records: Records, on_round: Callable[[RoundFigures], None], command: str
    ) -> None:
        self._setup, self._records, self._on_round = setup, records, on_round
        self._cost = ComputeCost(setup.compute_s, sigma=setup.compute_sigma, seed=setup.seed)
        self._chunks = n_chunks(setup.values, fp32.elements)
        self._steps = [0] * setup.peers
        self._open: dict[int, OpenRound] = {}
        self._closed: list[RoundFigures] = []
        self._next = 0
        self._gone: set[PeerId] = set()
        self._times_s: list[float] = []
        self._alone = 0
        self._centred = setup.centred
        self._over = False
        self._stale: Counter[int] = Counter()
        self._groups: tuple[tuple[PeerId, ...], ...] = ()
        nodes = [Node(peer, setup.peers, setup.seed) for peer in range(setup.peers)]
        for node in nodes:
            node.configure(_CHANNEL, self._channel())
        self._world = World(
            nodes,
            setup.line,
            setup.seed,
            check=setup.check,
            on_done=self._done,
            on_note=records.note,
            replay=command,
            grouped=(_CHANNEL,) if setup.in_groups else (),
        )

    def run(self, run_folder: Path | None) -> ExperimentResult:
        setup, world, began_s = self._setup, self._world, time.perf_counter()
        zeros = np.zeros((self._chunks, fp32.elements), np.float32)
        for peer in range(setup.peers):
            if self._centred:  # a first turn takes the state
                world.at(0.0, peer, Average(_CHANNEL, zeros, 0.0))
            else:
                self._compute(peer, 0.0, zeros)
            for crash in setup.faults.crashes if setup.in_groups else ():
                if crash.peer != peer:  # groups are of members: others learn of a death by and by
                    world.at(crash.at_s + DECLARED * max(setup.compute_s, FLOOR_S), peer, Left(crash.peer))
        world.run()
        self._close(setup.rounds)
        result = self._result(world.now_s, time.perf_counter() - began_s, run_folder)
        traffic = [world.traffic(peer) for peer in range(setup.peers)]
        self._records.leave(result.virtual_s, result.live, self._steps, traffic)
        if setup.check and result.live:
            grouped = (
                setup.in_groups
            )  # a peer that is in step with all others computes meanwhile, as in the run
            pause_s = setup.compute_s if grouped else 0.0
            healed = demand_progress(
                world, lambda peer, _: self._ask(peer, zeros), pause_s=pause_s, in_groups=grouped
            )
            result = replace(result, healed_round=healed, wall_s=time.perf_counter() - began_s)
        return result

    def _result(self, virtual_s: float, wall_s: float, run_folder: Path | None) -> ExperimentResult:
        """What the run has come to by now."""
        world, rounds = self._world, tuple(self._closed)
        traffic = [world.traffic(peer) for peer in range(self._setup.peers)]
        late = [figures.disagreement for figures in rounds[len(rounds) // 2 :]]
        times_s = np.asarray(self._times_s or [0.0])
        return ExperimentResult(
            setup=self._setup,
            rounds=rounds,
            live=tuple(sorted(world.live - self._gone)),
            arrived=_weighted(rounds),
            disagreement=float(np.mean(late)) if late else 0.0,
            round_s=(float(np.median(times_s)), float(np.quantile(times_s, 0.95)), float(times_s.max())),
            bytes_sent=sum(line.bytes_sent for line in traffic),
            datagrams_lost=sum(line.datagrams_lost for line in traffic),
            virtual_s=virtual_s,
            wall_s=wall_s,
            events=world.events,
            digest=world.digest(),
            run_folder=run_folder,
            staleness=_staleness(self._stale),
            turns=tuple(self._steps) if self._centred else None,
            groups=self._groups,
            alone=self._alone / len(self._times_s) if self._setup.in_groups and self._times_s else None,
        )

    def _channel(self) -> Channel:
        """What a real crew would have measured before its first round."""
        setup, faults = self._setup, self._setup.faults
        rtt_s = max(2 * (faults.latency_s + faults.jitter_s), FLOOR_S)
        stage_bytes = self._chunks * (fp32.elements * 4 + OVERHEAD_BYTES)
        spread_s = 4 * setup.compute_sigma * setup.compute_s
        probe_s = rtt_s + stage_bytes / faults.rate_bytes_per_s + spread_s
        return Channel(setup.channel_method, fp32, self._chunks, probe_s, rtt_s, floor_s=FLOOR_S)

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
        alone = self._setup.peers > 1 and outcome.stale is None and not others_in(outcome, peer)
        came = arrived(outcome, peer, alone)
        self._times_s.append(outcome.total_s)
        self._alone += alone
        self._stale.update(outcome.stale or ())
        self._groups = outcome.groups or self._groups
        self._records.round(peer, now_s, outcome, came, contributors, self._world.traffic(peer))
        if outcome.round >= self._next:
            self._open.setdefault(outcome.round, OpenRound(self._setup.values)).add(
                now_s, outcome, came, contributors
            )
            self._close(outcome.round - BEHIND_MAX)
        if outcome.round + 1 >= self._setup.rounds:
            self._over = self._centred
        elif not self._over:
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


def _staleness(stale: Counter[int]) -> Staleness | None:
    """Over all updates of blocks; ``None``: there were none."""
    if not stale:
        return None
    versions = np.repeat(*np.array(sorted(stale.items()), np.int64).T)
    return Staleness(float(versions.mean()), float(np.quantile(versions, 0.95)), int(versions[-1]))


def _weighted(rounds: Sequence[RoundFigures]) -> float:
    """The mean share of chunks averaged, over peers and rounds."""
    done = sum(figures.peers for figures in rounds)
    return sum(figures.arrived * figures.peers for figures in rounds) / done if done else 0.0
