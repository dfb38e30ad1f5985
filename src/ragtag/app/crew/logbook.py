"""What a peer writes of itself into its trace."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from ragtag.app.environment import Place
from ragtag.app.tracefile import TraceWriter
from ragtag.app.words import these_peers
from ragtag.core import trace
from ragtag.core.arrival import arrived, others_in
from ragtag.core.channels import topic_of
from ragtag.core.types import Audited, Noted, Outcome, PeerId
from ragtag.network.driver.driver import Driver
from ragtag.network.link.sealed import SealedLink
from ragtag.optim.kfac.preconditioner import KFAC
from ragtag.protocols.rounds.robust import RobustMean, shares_for
from ragtag.training.align.plan import Aligned
from ragtag.training.optimizer.averaged import AveragedModel
from ragtag.training.samples.ledger import EpochReport
from ragtag.training.state.whole import Finished, Stand, joined_digest

if TYPE_CHECKING:
    from ragtag.privacy.dp import PrivateTraining

_log = logging.getLogger("ragtag")
PACE_EVERY_S = 0.5
"""Records of where the time went are at least so far apart."""
PRIVACY_EVERY_S = 5.0
"""Records of what was spent of privacy are at least so far apart, and one comes at the end."""
AUDIT_EVERY_S = 10.0
"""Records of what a guard made of shares are at least so far apart, and one comes at the end."""
PERSONS_EVERY_S = 10.0
"""Records of each person's samples are at least so far apart, and one comes at the end."""
PROCESSES_MAX = 1 << 12
"""Processes of persons that are told apart; what older ones have told stays in their persons' sums."""
ALONE_AFTER = 3
"""Rounds without others in a row after which a peer calls itself alone. One or two are a peer that was early
or late, or a group that did not come together."""
_SAMPLES_MAX = (1 << 62) - 1
_Samples = Annotated[int, Meta(ge=0, lt=1 << 50)]
_PERSONS = topic_of("persons")
NAMED_MAX = 8
"""Of more peers than this, a warning says how many they are."""
LINKS_MAX = 64
"""Ways to other peers that a peer records when it ends."""


class Logbook:
    """The records of one peer, wherever it stands in its crew; without a folder for its run, none.

    origin_s: when the run began, on ``time.monotonic``.
    names: what is averaged on which channel.
    drawn: how many samples this peer was given by its splits.
    """

    def __init__(
        self,
        place: Place,
        driver: Driver | None,
        writer: TraceWriter | None,
        origin_s: float,
        names: Mapping[int, str],
        drawn: Callable[[], int],
    ) -> None:
        self._place, self._driver, self._writer, self._origin_s = place, driver, writer, origin_s
        self._names, self._drawn = names, drawn
        self._steps = self._samples = 0  # as the script tells
        self._taken: dict[int, int] = {}  # by each of the crew's optimizers, or hooks
        self._by_script = False
        self._loss: Any = None  # of a step that no record has yet
        self._accuracy: float | None = None  # the same
        self._told_s, self._told_steps = -math.inf, 0
        self._kfac_s: dict[int, float] = {}  # when the last such record was written, by channel
        self._target_s: dict[int, float] = {}  # the same
        self._aligned: dict[int, Aligned] = {}  # the last comparison that was recorded, by channel
        self._private: PrivateTraining | None = None
        self._private_s = -math.inf
        self._audits: dict[int | str, Audit] = {}  # by what is averaged
        self._unguarded = set[int]()  # channels of which there is no average, by their guard
        self._contributions = Contributions()
        self._whose: dict[PeerId, tuple[str, int]] = {}  # each seat's person and process: the last one's
        self._persons_s = self._looked_s = -math.inf  # when they were recorded, and looked at
        self._told_samples = 0
        self._rounds = 0
        self._solitude = Solitude()

    def moved(self, place: Place, driver: Driver, writer: TraceWriter | None) -> None:
        """This peer has another place."""
        if self._writer is not None and self._writer is not writer:
            self._writer.close()
        self._place, self._driver, self._writer = place, driver, writer

    @property
    def _rank(self) -> PeerId:
        return self._place.rank

    def now_s(self) -> float:
        """Seconds since the run began, as in the trace."""
        return time.monotonic() - self._origin_s

    def record(self, record: trace.Known) -> None:
        """Write a record to this peer's trace (nothing where the run has no folder)."""
        if self._writer is not None:
            self._writer.write(record)

    def log(self, *, loss: Any = None, accuracy: float | None = None) -> None:
        """See ``Crew.log``."""
        for name, figure in (("loss", loss), ("accuracy", accuracy)):
            if figure is not None and not _is_one(figure):
                kind = type(figure).__name__
                raise TypeError(f"{name} is a {kind}; it is a number, or a tensor of one element")
        if accuracy is not None and not 0 <= float(accuracy) <= 1:
            raise ValueError(
                f"accuracy is {float(accuracy):g}; it is a share from 0 to 1, as 0.975 for 97.5 %"
            )
        self._loss = self._loss if loss is None else _detached(loss)
        self._accuracy = self._accuracy if accuracy is None else float(accuracy)
        self._tell()

    def stepped(self, optimizer: int, loss: Any = None) -> None:
        """One of the crew's optimizers has taken a local step; its closure returned ``loss``.

        optimizer: its number; of a hook its channel.
        """
        self._taken[optimizer] = self._taken.get(optimizer, 0) + 1
        if loss is not None and _is_one(loss):
            self._loss = _detached(loss)
        self._tell()

    def _tell(self, least_s: float = PACE_EVERY_S) -> None:
        """Record what is new, unless that was done a moment ago."""
        now_s = time.monotonic()
        if self._writer is None or now_s - self._told_s < least_s:
            return
        self._told_s = now_s
        loss, self._loss = self._loss, None
        accuracy, self._accuracy = self._accuracy, None
        news = not self._by_script and self._steps_so_far() > self._told_steps
        if news or loss is not None:
            self._record_step(msgspec.UNSET if loss is None else float(loss))
        if accuracy is not None:
            self.log_eval(accuracy)

    def _record_step(self, loss: float | msgspec.UnsetType) -> None:
        steps, samples = self._steps_so_far(), self.samples_so_far()
        self._told_steps = steps
        self.record(trace.Step(t=self.now_s(), peer=self._rank, step=steps, samples=samples, loss=loss))

    def _steps_so_far(self) -> int:
        """Local steps of the optimizer that took most, or, without one, those that the script has logged."""
        return max(self._taken.values(), default=self._steps)

    def samples_so_far(self) -> int:
        """Samples that this peer was given by its splits, or, without splits, that it has logged."""
        return self._drawn() or self._samples

    def log_step(self, loss: float, samples: int, steps: int = 1) -> None:
        """See ``Crew.log_step``."""
        self._by_script = True
        self._steps += steps
        self._samples += samples
        self._told_s, self._loss = time.monotonic(), None
        self._record_step(float(loss))

    def log_eval(self, accuracy: float, loss: float | None = None, n: int = 0, model: str = "own") -> None:
        """See ``Crew.log_eval``."""
        self.record(
            trace.Eval(
                t=self.now_s(),
                peer=self._rank,
                model=model,
                step=self._steps_so_far(),
                accuracy=accuracy,
                loss=loss,
                n=n,
            )
        )

    def _name_of(self, outcome: Outcome) -> int | str:
        """What an outcome is of, by the name of its channel (or the number, where that has no name here)."""
        return self._names.get(outcome.channel, outcome.channel)

    def record_sparse(self, averaged: AveragedModel, outcome: Outcome) -> None:
        """What sending less came to."""
        found = averaged.compression
        if self._writer is None or found is None:
            return
        figures: dict[str, Any] = found._asdict() | {"residual_norm": min(1e9, found.residual_norm)}
        del figures["refused"]
        where: dict[str, Any] = {"peer": self._rank, "round": outcome.round}
        where["channel"] = self._name_of(outcome)
        self.record(trace.Sparse(t=self.now_s(), **where, **figures))

    def record_align(self, averaged: AveragedModel) -> None:
        """What comparing the replicas came to, once for each comparison."""
        found = averaged.aligned
        if self._writer is None or found is None or found is self._aligned.get(averaged.channel):
            return
        self._aligned[averaged.channel] = found
        figures: dict[str, Any] = dataclasses.asdict(found) | {"distance": min(1e9, found.distance)}
        self.record(trace.Align(t=self.now_s(), peer=self._rank, channel=averaged.name, **figures))

    def record_target(self, averaged: AveragedModel, least_s: float = PACE_EVERY_S) -> None:
        """What has become of this peer's samples, where steps have a target batch; at most twice a second."""
        now_s, accounting = time.monotonic(), averaged.accounting
        if self._writer is None or accounting is None:
            return
        if now_s - self._target_s.get(averaged.channel, -math.inf) < least_s:
            return
        self._target_s[averaged.channel] = now_s
        of = accounting.account
        self.record(
            trace.Target(
                t=self.now_s(),
                peer=self._rank,
                round=-1 if averaged.outcome is None else averaged.outcome.round,
                channel=averaged.name,
                target=of.target,
                steps=of.steps,
                computed=of.computed,
                counted=of.counted,
                pending=of.pending,
                stale=of.stale,
                dropped=dict(of.dropped),
                step_samples=of.step_samples,
                overshoot=of.overshoot,
                goodput=of.goodput,
            )
        )

    def record_privacy(self, private: PrivateTraining, least_s: float = PRIVACY_EVERY_S) -> None:
        """What was spent of the privacy of this peer's samples, now and then: adding it up takes a while."""
        now_s, self._private = time.monotonic(), private
        if self._writer is None or now_s - self._private_s < least_s:
            return
        self._private_s = now_s
        self.record(
            trace.Privacy(
                t=self.now_s(),
                peer=self._rank,
                holder=private.ledger.holder,
                steps=private.ledger.steps,
                epsilon=private.epsilon,
                delta=private.delta,
                noise_multiplier=private.noise_multiplier,
                rate=private.rate,
            )
        )

    def record_kfac(self, kfac: KFAC, outcome: Outcome) -> None:
        """How old the bases are that gradients are preconditioned by, at most twice a second."""
        now_s = time.monotonic()
        if self._writer is None or now_s - self._kfac_s.get(outcome.channel, -math.inf) < PACE_EVERY_S:
            return
        self._kfac_s[outcome.channel] = now_s
        ages = [age for age in kfac.ages().values() if age is not None]
        self.record(
            trace.Kfac(
                t=self.now_s(),
                peer=self._rank,
                round=outcome.round,
                channel=self._name_of(outcome),
                step=kfac.steps,
                layers=len(kfac.layers),
                plain=len(kfac.plain),
                dropped=kfac.dropped,
                bases=len(ages),
                age_rounds=max(ages, default=0),
            )
        )

    def record_persons(self, least_s: float = PERSONS_EVERY_S) -> None:
        """Tell the crew this peer's samples, and record each person's; nothing where it takes no persons.

        They are told whenever they have grown by a quarter, as a peer may end without a word.
        """
        now_s, driver = time.monotonic(), self._driver
        if driver is None or now_s - self._looked_s < min(least_s, PACE_EVERY_S):
            return
        self._looked_s = now_s
        persons, samples = driver.persons(), self.samples_so_far()
        if self._rank not in persons:
            return
        late = now_s - self._persons_s >= least_s
        mine = msgspec.msgpack.encode((persons[self._rank][1], samples))
        if (self._told_samples < samples >= 1.25 * self._told_samples) or late:
            self._told_samples = samples
            driver.post(_PERSONS, mine)
        self._whose |= persons  # a process that has left meanwhile has told its last samples as it went
        for peer, blob in (driver.posts(_PERSONS) | {self._rank: mine}).items():
            if peer in self._whose:
                self._contributions.hear(*self._whose[peer], blob)
        if late:
            self._persons_s = now_s
            self.record(self._contributions.told(self.now_s(), self._rank))

    def record_guarded(self, guard: RobustMean, outcome: Outcome) -> None:
        """A round by a guard is over: of fewer peers than it takes there is no average, which is said."""
        peers = 0 if self._driver is None else len(self._driver.node.live)
        least, channel = shares_for(guard, peers), outcome.channel
        if outcome.averaged.any():
            if channel in self._unguarded:
                self._unguarded.discard(channel)
                self._say(Noted("guarded again", self._rank, f"by averages of {peers} peers"))
        elif 1 < peers < least and channel not in self._unguarded:
            self._unguarded.add(channel)
            why = (
                f"as {peers} peers are left: {least // 2} may lie, and an average takes the shares of {least}"
            )
            self._say(Noted("unguarded", self._rank, f"{why}; there is none until others come"))

    def record_guard(self, outcome: Outcome) -> None:
        """What a guard made of the shares that came to this peer, every ``AUDIT_EVERY_S``."""
        if self._writer is None or outcome.judged is None:
            return
        name = self._name_of(outcome)
        audit = self._audits.setdefault(name, Audit(self.now_s()))
        audit.add(outcome.round, outcome.judged)
        if self.now_s() - audit.since_s >= AUDIT_EVERY_S:
            self._record_audit(name)

    def _record_audit(self, name: int | str) -> None:
        audit, now_s = self._audits[name], self.now_s()
        self._audits[name] = Audit(now_s)
        self.record(audit.told(now_s, self._rank, name))

    def record_pace(self, averaged: AveragedModel, least_s: float = PACE_EVERY_S) -> None:
        """Where the time went, at most twice a second."""
        if self._writer is None or averaged.scheduling.spent.total_s < least_s:
            return
        spent = averaged.scheduling.take_spent()
        self.record(
            trace.Pace(
                t=self.now_s(),
                peer=self._rank,
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

    def record_round(self, outcome: Outcome) -> None:
        """Write a round to this peer's trace; say, once, where this peer is alone, and where no longer."""
        self._rounds += 1
        live = () if self._driver is None else self._driver.node.live
        self._say(self._solitude.round(self.now_s(), self._rank, live, outcome))
        if self._writer is None:
            return
        traffic = self._driver.traffic() if self._driver is not None else None
        contributors = float(np.unpackbits(outcome.heard.view(np.uint8)).sum()) / max(1, len(outcome.heard))
        self.record(
            trace.Round(
                t=self.now_s(),
                peer=self._rank,
                channel=self._name_of(outcome),
                round=outcome.round,
                scatter_s=outcome.scatter_s,
                gather_s=outcome.gather_s,
                total_s=outcome.total_s,
                arrived=arrived(outcome, self._rank, self._solitude.alone),
                contributors=contributors,
                waited_for=list(outcome.waited_for),
                missed=list(outcome.missed),
                expired=outcome.expired,
                bytes_sent=traffic.bytes_sent if traffic else 0,
                bytes_received=traffic.bytes_received if traffic else 0,
            )
        )

    def record_run(self) -> None:
        """Write to the trace what run this is, where no launcher does: of a crew that is not its first."""
        place = self._place
        self.record(
            trace.Run(
                t=self.now_s(),
                world="live",
                name=place.crew,
                seed=place.seed,
                peers=place.size,
                method="",
                config={},
                started_unix_s=self._origin_s,
            )
        )

    def record_join(self, met: int) -> None:
        """Write to the trace that this peer is in, and how many others it met."""
        driver = self._driver
        rtts = list(driver.rtt_s().values()) if driver is not None else []
        host, port = driver.link.address if driver is not None else ("", 0)
        self.record(
            trace.Join(
                t=self.now_s(),
                peer=self._rank,
                address=f"{host}:{port}",
                rtt_s=sum(rtts) / len(rtts) if rtts else None,
                others=met,
                sealed=isinstance(driver.link, SealedLink) if driver is not None else False,
                client=driver is not None and not driver.node.crew.role.owns,
            )
        )

    def record_phase(self, ended_s: float, name: str, took_s: float) -> None:
        """A part of this peer's way in is over."""
        self.record(trace.Phase(t=ended_s - self._origin_s, peer=self._rank, name=name, took_s=took_s))

    def record_epoch(self, report: EpochReport) -> None:
        """What an epoch of a split came to."""
        counts = {"samples": report.samples, "missed": report.missed, "twice": report.twice}
        self.record(trace.Epoch(t=self.now_s(), peer=self._rank, epoch=report.epoch, **counts))

    def note(self, note: Noted) -> None:
        """Record what the node noted."""
        self._solitude.noted(note)
        self.record(
            trace.Note(t=self.now_s(), peer=self._rank, what=note.what, other=note.peer, detail=note.detail)
        )

    def record_finished(self, found: Finished) -> None:
        """How the training has ended. One that ends with others is not alone, as its last rounds may be."""
        if others := set(found.peers) - {self._rank}:
            self._say(self._solitude.over(self.now_s(), self._rank, others))
        self.note(Noted("finished", self._rank, str(found)))

    def _say(self, said: Noted | None) -> None:
        """Tell where this peer is alone, and where no longer."""
        if said is not None:
            _log.warning("peer %d: %s %s", self._rank, said.what, said.detail)
            self.note(said)

    def record_leave(self, failed: bool, stands: Sequence[Stand]) -> None:
        """The last record.

        stands: where this peer stands with all that it averages.
        """
        alone = self._solitude.rounds
        if self._solitude.said or alone >= ALONE_AFTER:
            now = ", and ends alone" if self._solitude.said else ""
            _log.warning("peer %d spent %d of its %d rounds alone%s", self._rank, alone, self._rounds, now)
        if self._writer is not None:
            if not failed:  # else what went wrong is the last word
                self._tell(0.0)
            for name in [name for name, audit in self._audits.items() if audit.rounds]:
                self._record_audit(name)
            if self._private is not None:
                self.record_privacy(self._private, 0.0)
            traffic = None if self._driver is None else self._driver.traffic()
            self._record_links()
            self._writer.write(
                trace.Leave(
                    t=self.now_s(),
                    peer=self._rank,
                    steps=self._steps_so_far(),
                    samples=self.samples_so_far(),
                    bytes_sent=traffic.bytes_sent if traffic else 0,
                    bytes_received=traffic.bytes_received if traffic else 0,
                    datagrams_lost=traffic.datagrams_lost if traffic else 0,
                    failed=failed,
                    digest=joined_digest([stand.digest for stand in stands]),
                    round=max((stand.current for stand in stands), default=-1),
                    rounds_alone=alone,
                    refused={} if self._driver is None else self._driver.refusals(),
                    relayed=0 if self._driver is None else self._driver.relayed(),
                )
            )
            self._writer.close()

    def _record_links(self) -> None:
        """What is known of the ways to the others: of those to which most was sent."""
        ways = [] if self._driver is None else self._driver.directions()
        for way in sorted(ways, key=lambda way: way.sent, reverse=True)[:LINKS_MAX]:
            self.record(
                trace.Link(
                    t=self.now_s(),
                    peer=self._rank,
                    other=way.peer,
                    sent=way.sent,
                    lost=way.lost,
                    late=way.late,
                    rate_bytes_per_s=way.rate_bytes_per_s,
                    rtt_s=way.rtt_s,
                    min_rtt_s=way.min_rtt_s,
                    datagram_bytes=way.datagram_bytes,
                    through=way.through,
                    protocol="tcp" if way.streamed else "udp",
                    held_s=dict(way.held_s),
                )
            )


class Contributions:
    """How many samples each person has contributed, as the person's own peers tell."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._earlier: dict[str, list[int]] = {}  # samples and processes

    def hear(self, person: str, process: int, blob: bytes) -> None:
        """A process of a person told its number, and how many samples it has had.

        What is no such thing is not heard, nor what a process told that had the seat before.
        """
        try:
            told_by, samples = msgspec.msgpack.decode(blob, type=tuple[int, _Samples])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if told_by != process:
            return
        self._of[person, process] = max(samples, self._of.get((person, process), 0))
        self._of.move_to_end((person, process))
        while len(self._of) > PROCESSES_MAX:
            (before, _), had = self._of.popitem(last=False)
            if before in self._earlier or len(self._earlier) < PROCESSES_MAX:
                sums = self._earlier.setdefault(before, [0, 0])
                sums[0] += had
                sums[1] += 1

    def told(self, t: float, me: PeerId) -> trace.Leaderboard:
        """The record: the persons with most samples first."""
        sums = {person: list(each) for person, each in self._earlier.items()}
        for (person, _), samples in self._of.items():
            each = sums.setdefault(person, [0, 0])
            each[0] += samples
            each[1] += 1
        order = sorted(sums, key=lambda person: (-sums[person][0], person))[:PROCESSES_MAX]
        return trace.Leaderboard(
            t=t,
            peer=me,
            persons=order,
            samples=[min(sums[person][0], _SAMPLES_MAX) for person in order],
            processes=[sums[person][1] for person in order],
        )


class Audit:
    """What a guard made of the shares that came to one peer, summed over rounds: four numbers for each peer.

    since_s: when it began.
    rounds: how many are in it.
    """

    def __init__(self, since_s: float) -> None:
        self.since_s, self.rounds = since_s, 0
        self._round = self._short = 0
        self._sums: dict[PeerId, list[float]] = {}  # values, values cut, distance times values, chunks capped

    def add(self, round_: int, judged: Audited) -> None:
        """One round more."""
        self.rounds += 1
        self._round = round_
        self._short += judged.short
        columns = judged.peers, judged.values, judged.cut, judged.far, judged.capped
        for peer, values, cut, far, capped in zip(*columns, strict=True):
            sums = self._sums.setdefault(peer, [0.0] * 4)
            for at, more in enumerate((values, values * cut, values * far, capped)):
                sums[at] += more

    def told(self, t: float, me: PeerId, name: int | str) -> trace.Guarded:
        """The record. Cut and distance are means over values."""
        peers = sorted(self._sums)
        sums = [self._sums[peer] for peer in peers]
        return trace.Guarded(
            t=t,
            peer=me,
            channel=name,
            round=self._round,
            rounds=self.rounds,
            peers=peers,
            values=[int(of[0]) for of in sums],
            cut=[min(1.0, max(0.0, of[1] / of[0])) for of in sums],
            far=[min(1e9, of[2] / of[0]) for of in sums],
            capped=[int(of[3]) for of in sums],
            short=self._short,
        )


def _is_one(figure: Any) -> bool:
    """Whether it is a number, or a tensor or an array that holds one."""
    count = getattr(figure, "numel", getattr(figure, "size", None))
    return isinstance(figure, int | float) or (count() if callable(count) else count) == 1


def _detached(figure: Any) -> Any:
    """Without the graph that it came from; it is read, which waits for a device, only when it is recorded."""
    detach = getattr(figure, "detach", None)
    return detach() if callable(detach) else figure


class Solitude:
    """What one peer has seen of the others, and whether it is alone: it hears of no other peer of its crew,
    though some have said no good-bye.

    rounds: in so many rounds nobody else was heard while there were others.
    in_a_row: so many of these were the last ones.
    since_s: when they began.

    A peer that is cut off cannot tell whether the others have died. So one that was there counts until it
    has said good-bye; one that was declared dead has not.
    """

    def __init__(self) -> None:
        self._seen: set[PeerId] = set()
        self._dead: set[PeerId] = set()
        self._gone: set[PeerId] = set()
        self.rounds = self.in_a_row = 0
        self.since_s = 0.0

    @property
    def others(self) -> frozenset[PeerId]:
        """The other peers that were there, and have not said good-bye."""
        return frozenset(self._seen - self._gone)

    @property
    def alone(self) -> bool:
        """Whether nobody else was heard in the last round, although there are others."""
        return self.in_a_row > 0

    @property
    def said(self) -> bool:
        """Whether this has been said to be so."""
        return self.in_a_row >= ALONE_AFTER

    def noted(self, note: Noted) -> None:
        """What this peer has noted of another one (in the driver's thread)."""
        if note.what == "declared dead":
            self._dead.add(note.peer)
        elif note.what in ("takes part", "back"):
            self._dead.discard(note.peer)
            self._gone.discard(note.peer)
        elif note.what == "has left" or (note.what == "left" and note.peer not in self._dead):
            self._gone.add(note.peer)

    def round(self, now_s: float, me: PeerId, live: Collection[PeerId], outcome: Outcome) -> Noted | None:
        """A round is over. Returns what is to be said, if anything.

        live: the peers believed to take part.
        """
        came = others_in(outcome, me)
        self._seen |= came | (set(live) - {me})
        # at a central state a peer may own all blocks, and hear nothing that its average shows
        met = came or (set(live) - {me} if outcome.stale is not None else set())
        if met or not self.others:
            return self.over(now_s, me, met)
        if not self.in_a_row and set(outcome.waited_for) - set(outcome.missed):
            return None  # of two that own no block neither sends to the other: they miss but the owner
        if not self.in_a_row:
            self.since_s = now_s - outcome.total_s
        self.rounds += 1
        self.in_a_row += 1
        if self.in_a_row != ALONE_AFTER:
            return None
        lost = f"{_named(self.others)} {_is(self.others)} not heard"
        return Noted("alone", me, f"since {self.since_s:.1f} s: {lost}")

    def over(self, now_s: float, me: PeerId, met: Collection[PeerId]) -> Noted | None:
        """This peer is alone no longer: it has met others, or all have left. Returns what is to be said."""
        was_said, rounds, self.in_a_row = self.said, self.in_a_row, 0
        if not was_said:
            return None
        how = f"after {rounds} rounds and {now_s - self.since_s:.1f} s"
        who = f"{_named(met)} {_is(met)} heard" if met else "the others have left"
        return Noted("no longer alone", me, f"{how}: {who}")


def _named(peers: Collection[PeerId]) -> str:
    return these_peers(peers) if len(peers) <= NAMED_MAX else f"{len(peers):,} peers"


def _is(peers: Collection[PeerId]) -> str:
    return "is" if len(peers) == 1 else "are"
