"""The trace of a simulated run."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ragtag.app.experiment.setup import ExperimentSetup
from ragtag.app.launch.faults import fault_records
from ragtag.app.tracefile import TraceWriter, peer_file
from ragtag.app.words import counted
from ragtag.core import trace
from ragtag.core.faultspec import format_faults
from ragtag.core.types import Noted, Outcome, PeerId
from ragtag.simulation.link import Traffic

_log = logging.getLogger("ragtag.trace")


class Records:
    """The trace files of a simulated run, or nothing.

    A fault is recorded as soon as virtual time has come to it, so that the crew's file is in order of time
    and a view that follows it shows faults when they happen. What comes after ``leave`` is not recorded.
    """

    def __init__(self, setup: ExperimentSetup, folder: Path | None, command: str, stack: ExitStack) -> None:
        self._writers: dict[PeerId, TraceWriter] = {}
        self._to_come = deque(fault_records(setup.faults))
        if folder is None:
            return
        trouble = _Trouble()
        for peer in range(trace.CREW, setup.peers):
            writer = TraceWriter(folder / peer_file(peer), trouble.tell)
            self._writers[peer] = stack.enter_context(writer)
        self._writers[trace.CREW].write(_run_record(setup, command))
        for peer in range(setup.peers):
            rtt_s = 2 * (setup.faults.latency_s + setup.faults.jitter_s)
            self._write(
                trace.Join(t=0.0, peer=peer, address="simulated", rtt_s=rtt_s, others=setup.peers - 1)
            )

    def round(
        self, peer: PeerId, now_s: float, outcome: Outcome, arrived: float, contributors: float, of: Traffic
    ) -> None:
        """A peer has done a round.

        of: its traffic since the start.
        """
        self._write(
            trace.Round(
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
                bytes_sent=of.bytes_sent,
                bytes_received=of.bytes_received,
            )
        )

    def note(self, peer: PeerId, now_s: float, note: Noted) -> None:
        """A peer's machine has noted something."""
        self._write(trace.Note(t=now_s, peer=peer, what=note.what, other=note.peer, detail=note.detail))

    def leave(
        self, end_s: float, live: Sequence[PeerId], steps: Sequence[int], of: Sequence[Traffic]
    ) -> None:
        """The run is over at ``end_s``.

        steps, of: each peer's local steps and traffic, by number.
        """
        self._faults(end_s)
        for peer in live:
            self._write(
                trace.Leave(
                    t=end_s,
                    peer=peer,
                    steps=steps[peer],
                    bytes_sent=of[peer].bytes_sent,
                    bytes_received=of[peer].bytes_received,
                    datagrams_lost=of[peer].datagrams_lost,
                )
            )
        self._write(trace.Leave(t=end_s))
        self._writers = {}

    def _write(self, record: trace.Record) -> None:
        self._faults(record.t)
        if record.peer in self._writers:
            self._writers[record.peer].write(record)

    def _faults(self, until_t: float) -> None:
        """Record the faults that have begun."""
        while self._to_come and self._to_come[0].t <= until_t:
            fault = self._to_come.popleft()
            if trace.CREW in self._writers:
                self._writers[trace.CREW].write(fault)


class _Trouble:
    """All files lie on one disk: what keeps one of them from being written is told once."""

    def __init__(self) -> None:
        self._told = False

    def tell(self, text: str) -> None:
        if not self._told:
            _log.warning(text)
        self._told = True


def _run_record(setup: ExperimentSetup, command: str) -> trace.Run:
    return trace.Run(
        t=0.0,
        world="simulated",
        name=f"{setup.method}, {counted(setup.peers, 'peer')}",
        seed=setup.seed,
        peers=setup.peers,
        method=setup.method,
        config={
            "values": str(setup.values),
            "rounds": str(setup.rounds),
            "compute_s": f"{setup.compute_s:g}",
            "faults": format_faults(setup.faults),
        },
        started_unix_s=time.time(),
        steps_planned=setup.rounds,
        command=command,
    )
