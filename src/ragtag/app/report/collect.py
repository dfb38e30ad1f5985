"""Takes a trace's records one after the other into a summary."""

from __future__ import annotations

import math

from ragtag.app.report.data import (
    ALL,
    FREEZES,
    MEMBERSHIP,
    Comparisons,
    Item,
    PeerFigures,
    Selections,
    Summary,
    Used,
    Verdicts,
)
from ragtag.app.report.series import Bins
from ragtag.core import trace

ITEMS_MAX = 200
LINKS_MAX = 4096
_TOLD = {
    "has left": "left",
    "put out": "put out",
    "declared dead": "dead",
    "takes part": "elsewhere",
    "assists": "auxiliary",
    "back": "elsewhere",
}


class Collector:
    """Takes one record after the other."""

    def __init__(self, summary: Summary) -> None:
        self._to = summary
        self._row = {peer: at for at, peer in enumerate(summary.charted)}
        self._looks: dict[int, trace.Eval] = {}
        self._strip = Bins([], summary.missed.shape[1], summary.extent.t0, summary.extent.t1)

    def take(self, record: trace.Record) -> None:
        """One record."""
        peer = self._to.peers.get(record.peer)
        if isinstance(record, trace.Fault):
            self._fault(record)
            return
        if peer is not None:
            peer.last_t = max(record.t, peer.last_t or 0.0)
        if isinstance(record, trace.Round) and peer is not None:
            self._round(peer, record)
        elif isinstance(record, trace.Sparse) and peer is not None:
            self._to.sparse.setdefault(record.peer, Selections()).add(record)
        elif isinstance(record, trace.Align) and peer is not None:
            self._to.replicas.setdefault(record.peer, Comparisons()).add(record)
        elif isinstance(record, trace.Guarded) and peer is not None:
            self._judged(record)
        elif isinstance(record, trace.Leaderboard):
            known = self._to.leaderboard  # the one that has heard most
            if known is None or sum(record.samples) >= sum(known.samples):
                self._to.leaderboard = record
        elif isinstance(record, trace.Target) and peer is not None:
            key = record.peer, record.channel
            if key in self._to.gathered or len(self._to.gathered) < LINKS_MAX:
                self._to.gathered[key] = record  # its counts are since the start
        elif isinstance(record, trace.Privacy) and peer is not None:
            self._to.spent[record.peer] = record  # over all runs
        elif isinstance(record, trace.Epoch):
            self._epoch(record)
        elif isinstance(record, trace.Step) and peer is not None:
            self._step(peer, record)
        elif isinstance(record, trace.Pace):
            self._to.timeline.add(record)
            self._coherence(record)
        elif isinstance(record, trace.Eval):
            self._eval(peer, record)
        elif isinstance(record, trace.Join) and peer is not None:
            peer.joined_t, peer.sealed, peer.client = record.t, record.sealed, record.client
        elif isinstance(record, trace.Link):
            if len(self._to.links) < LINKS_MAX:
                self._to.links.append(record)
            else:
                self._to.links_left_out += 1
        elif isinstance(record, trace.Leave) and peer is not None:
            self._leave(peer, record)
        elif isinstance(record, trace.Note):
            if record.what in MEMBERSHIP and record.other in self._to.peers:
                self._to.peers[record.other].told = record.what
            launchers = record.what == "lost" and record.other < 0  # it tells of the peer itself
            about = record.peer if launchers else record.other
            self._item(Item(record.t, record.what, about, record.detail, False, {record.peer}))
        elif isinstance(record, trace.Error):
            self._error(peer, record)
        elif isinstance(record, trace.Result) and len(self._to.results) < ITEMS_MAX:
            self._to.results.append(record)

    def _round(self, peer: PeerFigures, record: trace.Round) -> None:
        to, t, n = self._to, record.t, record.of
        missed = record.how_often_missed
        peer.rounds += n
        to.thinned += n > 1
        to.thinned_rounds += n if n > 1 else 0
        peer.error_t = None  # it went on after all
        peer.misses += missed.total()
        peer.expired += record.how_often_expired
        peer.arrived += n * record.arrived
        peer.bytes_sent = max(peer.bytes_sent, record.bytes_sent)
        peer.bytes_received = max(peer.bytes_received, record.bytes_received)
        peer.round_s.add(record.total_s, n, record.longest)
        to.round_s.add(record.total_s, n, record.longest)
        to.arrival.add(record.arrived, n, record.lowest)
        (to.late_dots if record.expired else to.dots).add(t, record.total_s, n)
        for key in (record.peer, ALL):
            to.arrived.add(key, t, record.arrived, n)
        to.scatter.add(ALL, t, record.scatter_s, n)
        to.gather.add(ALL, t, record.gather_s, n)
        to.round_number.add(ALL, t, record.round)
        column = self._strip.column(t)
        to.rounds[:, column] += n
        own = self._row.get(record.peer)
        if own is not None:
            to.rounds[own, column] -= n
        for other, times in record.how_often_waited_for.items():
            if other in self._row:
                to.waited[self._row[other], column] += times
        for other, times in missed.items():
            if other in to.peers:
                to.peers[other].missed += times
            if other in self._row:
                to.missed[self._row[other], column] += times

    def _judged(self, record: trace.Guarded) -> None:
        self._to.unjudged += record.short
        lists = record.peers, record.values, record.cut, record.far
        for at, (peer, values, cut, far) in enumerate(zip(*lists, strict=False)):
            if peer not in self._to.peers:
                continue
            verdict = self._to.verdicts.setdefault(peer, Verdicts())
            verdict.values += values
            verdict.cut += values * cut
            verdict.far += values * far
            verdict.capped += record.capped[at] if at < len(record.capped) else 0
            verdict.owners.add(record.peer)

    def _epoch(self, record: trace.Epoch) -> None:
        key = record.epoch, record.samples
        if key in self._to.epochs:
            self._to.epochs[key].add(record)
        elif len(self._to.epochs) < LINKS_MAX:
            self._to.epochs[key] = Used((record.missed,) * 2, (record.twice,) * 2)
        else:
            self._to.epochs_left_out += 1

    def _coherence(self, record: trace.Pace) -> None:
        """Measurements are spread evenly over the record's time."""
        lasted_s = record.compute_s + record.average_s + record.wait_s
        for at, mu in enumerate(record.coherence):
            if not math.isfinite(mu):
                continue
            self._to.mu.add(mu)
            t = record.t - lasted_s * (1 - (at + 1) / len(record.coherence))
            for key in (record.peer, ALL):
                self._to.coherence.add(key, t, mu)

    def _step(self, peer: PeerFigures, record: trace.Step) -> None:
        peer.steps = max(peer.steps, record.step)
        peer.samples = max(peer.samples, record.samples)
        bad = record.how_often_bad
        if bad:
            peer.batch_losses_bad += bad
            peer.bad_since_t = record.t if peer.bad_since_t is None else peer.bad_since_t
        if isinstance(record.loss, float) and record.how_often_good:
            for key in (record.peer, ALL):
                self._to.loss.add(key, record.t, record.loss, record.how_often_good)

    def _eval(self, peer: PeerFigures | None, record: trace.Eval) -> None:
        if record.model == "mean":
            self._to.mean_eval = record
            if record.accuracy is not None:
                self._to.mean_accuracy.add(ALL, record.t, record.accuracy)
        elif record.model == "own" and peer is not None:
            peer.loss, peer.accuracy = record.loss, record.accuracy
            if record.accuracy is not None:
                self._to.accuracy.add(record.peer, record.t, record.accuracy)
                if record.peer in self._looks:
                    self._mean_of_looks()
                self._looks[record.peer] = record

    def _mean_of_looks(self) -> None:
        """The mean of peers that looked at the test data once each, not those that stood still or are gone.

        A mean of the latest look of each would mix peers that have just looked with those about to.
        """
        looks, self._looks = self._looks, {}
        accuracies = [look.accuracy for look in looks.values() if look.accuracy is not None]
        if accuracies:
            t = sum(look.t for look in looks.values()) / len(looks)
            self._to.own_mean.add(ALL, t, sum(accuracies) / len(accuracies))

    def _killed(self, peer: int, t: float) -> bool:
        """Whether a peer had been killed by ``t``, and has not joined again since."""
        killed_t = self._to.extent.killed_t.get(peer)
        return killed_t is not None and killed_t <= t and (self._to.peers[peer].joined_t or 0.0) <= killed_t

    def _error(self, peer: PeerFigures | None, record: trace.Error) -> None:
        if peer is not None:
            peer.error_t = record.t
        for earlier in self._to.items[-64:]:  # a peer and its launcher may both tell of one error
            if earlier.error and earlier.about == record.peer and record.t - earlier.t < 10.0:
                a, b = earlier.what, record.what
                if a.endswith(b) or b.endswith(a):
                    earlier.detail = earlier.detail or record.detail
                    return
        self._to.errors += 1
        self._item(Item(record.t, record.what, record.peer, record.detail, True, {record.peer}))

    def _leave(self, peer: PeerFigures, record: trace.Leave) -> None:
        peer.left = not record.failed
        if record.failed:  # what failed is told by an error's own record
            peer.error_t = record.t
        peer.steps = max(peer.steps, record.steps)
        peer.samples = max(peer.samples, record.samples)
        peer.bytes_sent = max(peer.bytes_sent, record.bytes_sent)
        peer.bytes_received = max(peer.bytes_received, record.bytes_received)
        peer.datagrams_lost = record.datagrams_lost
        peer.digest, peer.last_round, peer.refused = record.digest, record.round, record.refused
        peer.relayed = record.relayed

    def _fault(self, record: trace.Fault) -> None:
        if len(self._to.faults) < ITEMS_MAX:
            self._to.faults.append(record)
        else:
            self._to.faults_left_out += 1

    def _item(self, item: Item) -> None:
        items = self._to.items
        meanwhile: set[int] = set()  # peers that have said something else of it since
        for earlier in items[:-65:-1]:  # peers notice the same thing within a moment of each other
            if item.t - earlier.t > 2.0 or item.error:
                break
            if earlier.about != item.about or earlier.error:
                continue
            if earlier.what != item.what:
                meanwhile |= earlier.by
            elif not (earlier.by & item.by) or (
                earlier.detail == item.detail and not (meanwhile & item.by)
            ):  # or the same one says the same again
                earlier.by |= item.by
                return
        if len(items) < ITEMS_MAX:
            items.append(item)
        else:
            self._to.items_left_out += 1

    def settle(self) -> None:
        """Say what became of each peer."""
        self._mean_of_looks()
        frozen = {
            f.peer
            for f in self._to.faults
            if f.name in FREEZES and (f.until_t is None or f.until_t > self._to.extent.t1)
        }
        finished = self._to.finished
        for peer in self._to.peers.values():
            if self._killed(peer.number, math.inf):
                peer.state = "killed"
            elif peer.error_t is not None:
                peer.state = "failed"
            elif peer.left:
                peer.state = "ended"
            elif peer.last_t is None:
                peer.state = _TOLD.get(peer.told, "no trace")
                if peer.auxiliary and peer.state != "auxiliary":
                    peer.state = f"auxiliary, {peer.state}"
            elif finished:
                peer.state = "lost"
            else:
                peer.state = "frozen" if peer.number in frozen else "running"
