"""What a peer writes of itself into its trace."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import numpy as np

from ragtag.app.company import ALONE_AFTER, Company
from ragtag.app.environment import Place
from ragtag.app.tracefile import TraceWriter
from ragtag.core import trace
from ragtag.core.arrival import arrived
from ragtag.core.types import Noted, Outcome, PeerId
from ragtag.network.driver import Driver
from ragtag.training.optimizer import CrewOptimizer
from ragtag.training.split import EpochReport

_log = logging.getLogger("ragtag")
PACE_EVERY_S = 0.5
"""Records of where the time went are at least so far apart."""


class Logbook:
    """The records of one peer, wherever it stands in its crew; without a folder for its run, none."""

    def __init__(
        self, place: Place, driver: Driver | None, writer: TraceWriter | None, origin_s: float
    ) -> None:
        self._place, self._driver, self._writer, self._origin_s = place, driver, writer, origin_s
        self._steps = self._samples = self._rounds = 0
        self._company = Company()

    @property
    def rank(self) -> PeerId:
        """This peer's number. One that was out of reach for so long that its place was given away gets a new
        one when it comes back.
        """
        return self._place.rank

    def now_s(self) -> float:
        """Seconds since the run began, as in the trace."""
        return time.time() - self._origin_s

    def record(self, record: trace.Known) -> None:
        """Write a record to this peer's trace (nothing where the run has no folder)."""
        if self._writer is not None:
            self._writer.write(record)

    def log_step(self, loss: float, samples: int, steps: int = 1) -> None:
        """Record local steps: the last one's loss, how many samples they had, and how many they were."""
        self._steps += steps
        self._samples += samples
        self.record(
            trace.Step(
                t=self.now_s(), peer=self.rank, step=self._steps, samples=self._samples, loss=float(loss)
            )
        )

    def log_eval(self, accuracy: float, loss: float | None = None, n: int = 0, model: str = "own") -> None:
        """Record how good a model is: this peer's own, or the mean of all."""
        self.record(
            trace.Eval(
                t=self.now_s(),
                peer=self.rank,
                model=model,
                step=self._steps,
                accuracy=accuracy,
                loss=loss,
                n=n,
            )
        )

    def _record_sparse(self, optimizer: CrewOptimizer, outcome: Outcome) -> None:
        """What sending less came to."""
        found = optimizer.compression
        if self._writer is None or found is None:
            return
        figures: dict[str, Any] = found._asdict() | {"residual_norm": min(1e9, found.residual_norm)}
        del figures["refused"]
        where: dict[str, Any] = {"peer": self.rank, "round": outcome.round, "channel": outcome.channel}
        self.record(trace.Sparse(t=self.now_s(), **where, **figures))

    def _record_align(self, optimizer: CrewOptimizer, outcome: Outcome) -> None:
        """What comparing the replicas came to, where that has just been done."""
        found = optimizer.aligned
        if self._writer is None or found is None or found.round != outcome.round:
            return
        figures: dict[str, Any] = dataclasses.asdict(found) | {"distance": min(1e9, found.distance)}
        self.record(trace.Align(t=self.now_s(), peer=self.rank, channel=outcome.channel, **figures))

    def _record_pace(self, optimizer: CrewOptimizer, least_s: float = PACE_EVERY_S) -> None:
        """Where the time went, at most twice a second."""
        if self._writer is None or optimizer.conduct.spent.total_s < least_s:
            return
        spent = optimizer.conduct.take_spent()
        self.record(
            trace.Pace(
                t=self.now_s(),
                peer=self.rank,
                steps=spent.steps,
                averages=spent.averages,
                compute_s=spent.compute_s,
                average_s=spent.average_s,
                wait_s=spent.wait_s,
                lost_s=spent.lost_s,
                waited_for=list(spent.for_peer_s),
                waited_s=list(spent.for_peer_s.values()),
                stale=spent.stale,
                coherence=[mu for _, mu in spent.coherence],
                coherence_steps=[step for step, _ in spent.coherence],
            )
        )

    def _write_round(self, outcome: Outcome) -> None:
        """Write a round to this peer's trace; say, once, where this peer is alone, and where no longer."""
        self._rounds += 1
        live = () if self._driver is None else self._driver.node.live
        said = self._company.round(self.now_s(), self.rank, live, outcome)
        if said is not None:
            _log.warning("peer %d: %s %s", self.rank, said.what, said.detail)
            self.note(said)
        if self._writer is None:
            return
        traffic = self._driver.traffic() if self._driver is not None else None
        contributors = float(np.unpackbits(outcome.heard.view(np.uint8)).sum()) / max(1, len(outcome.heard))
        self.record(
            trace.Round(
                t=self.now_s(),
                peer=self.rank,
                channel=outcome.channel,
                round=outcome.round,
                scatter_s=outcome.scatter_s,
                gather_s=outcome.gather_s,
                total_s=outcome.total_s,
                arrived=arrived(outcome, self.rank, self._company.alone),
                contributors=contributors,
                waited_for=list(outcome.waited_for),
                missed=list(outcome.missed),
                expired=outcome.expired,
                bytes_sent=traffic.bytes_sent if traffic else 0,
                bytes_received=traffic.bytes_received if traffic else 0,
            )
        )

    def record_join(self, met: int) -> None:
        """Write to the trace that this peer is in, and how many others it met."""
        driver = self._driver
        rtts = list(driver.rtt_s().values()) if driver is not None else []
        host, port = driver.endpoint.address if driver is not None else ("", 0)
        self.record(
            trace.Join(
                t=self.now_s(),
                peer=self.rank,
                address=f"{host}:{port}",
                rtt_s=sum(rtts) / len(rtts) if rtts else None,
                others=met,
            )
        )

    def _record_phase(self, ended_unix_s: float, name: str, took_s: float) -> None:
        """A part of this peer's way in is over."""
        self.record(trace.Phase(t=ended_unix_s - self._origin_s, peer=self.rank, name=name, took_s=took_s))

    def _record_epoch(self, report: EpochReport) -> None:
        counts = {"samples": report.samples, "missed": report.missed, "twice": report.twice}
        self.record(trace.Epoch(t=self.now_s(), peer=self.rank, epoch=report.epoch, **counts))

    def note(self, note: Noted) -> None:
        """Record what the node noted."""
        self._company.noted(note)
        self.record(
            trace.Note(t=self.now_s(), peer=self.rank, what=note.what, other=note.peer, detail=note.detail)
        )

    def _write_leave(self, lost: int, sent: int, received: int, failed: bool) -> None:
        """The last record. Rounds that were spent alone averaged nothing: that is said once more."""
        alone = self._company.rounds
        if self._company.said or alone >= ALONE_AFTER:
            now = ", and ends alone" if self._company.said else ""
            _log.warning("peer %d spent %d of its %d rounds alone%s", self.rank, alone, self._rounds, now)
        if self._writer is not None:
            self._writer.write(
                trace.Leave(
                    t=self.now_s(),
                    peer=self.rank,
                    steps=self._steps,
                    samples=self._samples,
                    bytes_sent=sent,
                    bytes_received=received,
                    datagrams_lost=lost,
                    failed=failed,
                    rounds_alone=alone,
                )
            )
            self._writer.close()
