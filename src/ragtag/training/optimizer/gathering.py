"""What a crew gathers towards its next step, where steps have a target batch (``schedules.target``).

Three things of one peer are here, since they go by the same counts.

*What it tells*, on the notice board: which step it gathers for, how many samples it has, how many a batch has
and how long one takes. It tells each of the first few batches and then each time that its samples have grown
by a quarter; when it stands by, and when it begins to average. The last makes those begin that do not know
yet that the target is met. A step's number is that of its round.

*What it believes of the others.* Clocks need not agree: of each post the sender's time is told, and the least
difference to the time here of the last posts is the offset (they came fastest); so a post that lay here
while this peer computed is as old as it is. Words that cannot be read, or that cannot be, do not count. Nor
do those of a peer that claimed more than all of the step's weight, that has told a step which there was not,
or whose claims were in no mean twice running: until its words and the rounds fit again.

*What became of its samples.* Each one that was computed is counted (its gradient is in the mean of a step),
dropped (for a reason that is told), or pending. Of a mean that came in part, as where lines lose chunks, the
share of the chunks is taken. Of a chunk that nobody may have a mean of, as its owner died, they stay pending:
their gradients go into the next one (``exchange.dense``). Gradients of a step that the crew has made without
this peer are of an older model: they are dropped, not added to the next step.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

import numpy as np

from ragtag.core.arrival import others_in
from ragtag.core.channels import topic_of
from ragtag.core.types import WEIGHT_MAX, Noted, Outcome, PeerId
from ragtag.schedules.target import Doing, Tally, is_over
from ragtag.training.exchange.slow import unheard
from ragtag.training.optimizer.speeds import SHARE_MAX
from ragtag.training.transport import Peers

LATE, LOST, UNTOLD, OVERFLOWED, FAILED, RESTORED, ENDED = (
    "late",
    "lost",
    "untold",
    "overflowed",
    "failed",
    "restored",
    "ended",
)
"""Why samples were dropped: the crew made their step without this peer; they came too late, or in part, for
its mean; no mean came here, so that this peer cannot tell; gradients overflowed; the average ended with an
error here, as where a gradient is not finite; the model was replaced; training ended."""
GROWTH = 0.25
"""Samples are told each time that they have grown by this share."""
TRUST = 4.0
"""A peer that has stood by for so many times as long as a batch takes it measures anew: what made its batches
long may be over, and a peer that computes none would never know. The others may wait for that batch, so it
trusts a measurement that was right for twice as long."""
_WINDOW = 9
_OFFSETS = 32
_STEP_MAX = 1 << 53
_UNDELIVERED_MAX = 2
_AHEAD_MAX = 4
_IDLE_MAX = 3
_POST = struct.Struct("<BBQdddd")
_VERSION = 1
_ROUNDING = 1e-5
_log = logging.getLogger("ragtag")


@dataclass(frozen=True, slots=True)
class Account:
    """What has become of the samples of one peer, since it began.

    target: of a step of the crew.
    steps: of the crew, in which this peer took part.
    computed: samples that had a gradient here: all of those below.
    counted: those that are in means.
    dropped: by reason (see ``gathering``).
    pending: gathered for the next step.
    stale: of those counted, how many were in a later step than they were computed for.
    step_samples: of all peers, in the last step's mean.
    overshoot: the mean over steps of what they had beyond the target, as a share of it.
    goodput: ``counted`` over what this peer would have computed in the same time, had it neither waited nor
        averaged nor lost any (0: nothing is known yet).
    """

    target: float
    steps: int = 0
    computed: float = 0.0
    counted: float = 0.0
    dropped: Mapping[str, float] = field(default_factory=dict)
    pending: float = 0.0
    stale: float = 0.0
    step_samples: float = 0.0
    overshoot: float = 0.0
    goodput: float = 0.0


@dataclass(slots=True)
class _Heard:
    """What is known of another peer.

    number, tally, at_s: of its newest post; when that was told, by the clock there.
    offsets_s: the time here less the time there, when posts were first seen.
    undelivered: so many steps in a row were its claims in no mean.
    ahead: after so many averages in a row it had told a step that was still to come.
    doubted: why it is not believed (empty: it is).
    """

    number: int
    tally: Tally
    at_s: float
    offsets_s: deque[float] = field(default_factory=lambda: deque(maxlen=_OFFSETS))
    undelivered: int = 0
    ahead: int = 0
    doubted: str = ""


class Gathering:
    """One peer's part in gathering towards its crew's target.

    target: samples of a step.
    name: of the channel.
    note: told of what others say that is not believed, and of a target that does not fit.
    """

    def __init__(
        self, target: float, peers: Peers, name: str, note: Callable[[Noted], None] | None = None
    ) -> None:
        self.target = target
        self.step = 0
        """The crew's step that is gathered for."""
        self._peers, self._topic, self._note = peers, topic_of(f"{name}/samples"), note
        self._took_s: deque[float] = deque(maxlen=_WINDOW)
        self._batch = self._pending = self._told = 0.0
        self._begun: int | None = None  # the step of the average under way
        self._offered = 0.0  # to it
        self._carried = np.zeros(1)  # to it, too: by chunk, what of the steps before is in no mean yet
        self._doing: Doing | None = None  # as it was told last
        self._last_s = self._averaged_s = self._computed_s = peers.now_s()
        self._elapsed_s = self._compute_s = 0.0
        self._trust, self._trusted_s = TRUST, 0.0
        self._posted_s, self._post_s = -math.inf, 0.0
        self._heard: dict[PeerId, _Heard] = {}
        self._said: set[str] = set()
        self._idle = 0
        self._alone = False
        self._gives = True
        self._samples = Account(target)
        self._dropped: dict[str, float] = {}

    # -- This peer

    def opened(self) -> None:
        """The channel is open: what that took is no part of a batch."""
        self._last_s = self._averaged_s = self._computed_s = self._peers.now_s()

    def stepped(self, batch: float, overflowed: bool = False) -> None:
        """A batch of so many samples has been computed, and is gathered unless it ``overflowed``."""
        now_s = self._peers.now_s()
        took_s = now_s - self._last_s
        self._compute_s += took_s
        self._computed_s = now_s
        self._clocked(now_s)
        if took_s > 0:
            if not self._took_s and 2.0 * took_s < self._trusted_s:
                self._trust = TRUST
            self._took_s.append(took_s)
        self._samples = replace(self._samples, computed=self._samples.computed + batch)
        if overflowed:
            self._drop(batch, OVERFLOWED)
            return
        self._batch, self._pending = batch, self._pending + batch
        if batch >= self.target:
            self._say(
                "small",
                f"a batch here counts {batch:g} samples, and target_batch is {self.target:g}: each batch is "
                "a step of the crew; raise target_batch",
            )
        if self._alone and self._took_s:
            step_s = self.target / batch * median_low(self._took_s) if batch else math.inf
            self._say(
                "alone",
                f"nobody else gathers for the target of {self.target:g} samples: this peer goes on alone, "
                f"and takes {step_s:.3g} s for a step",
            )
        elif not self._alone:
            self._said.discard("alone")
        news = self._pending >= (1.0 + GROWTH) * self._told or self._doing is Doing.STANDS_BY
        if news and now_s - self._posted_s >= self._post_s / SHARE_MAX:
            self._post(Doing.COMPUTES)

    def stands_by(self) -> None:
        """This peer computes nothing until the crew averages."""
        idle_s = self._peers.now_s() - self._computed_s
        if self._took_s and idle_s >= self._trust * median_low(self._took_s):
            self._trusted_s, self._trust = median_low(self._took_s), 2.0 * self._trust
            self._took_s.clear()
        if self._doing is not Doing.STANDS_BY:
            self._post(Doing.STANDS_BY)

    def decided(self) -> None:
        """This peer computes again, or averages."""
        self._clocked(self._peers.now_s())

    def begins(self) -> float:
        """An average begins: what the samples gathered here count in it, 1, or 0 where their step is over.

        The others have made that step without this peer, so that its gradients are of an older model.
        """
        others = [tally for peer, tally in self.read().items() if peer != self._peers.me]
        over = is_over(others, self.step)
        if over:
            self.drop(LATE)
        self._gives = not over
        self._post(Doing.AVERAGES)
        self._begun, self.step = self.step, self.step + 1
        self._offered, self._pending = self._pending, 0.0
        self._averaged_s = self._peers.now_s()
        return 0.0 if over else 1.0

    def averaged(self, outcome: Outcome, gave: bool = True) -> None:
        """An average is over. gave: what was gathered here was offered to it."""
        self._clocked(self._peers.now_s())
        self._averaged_s = self._last_s
        if not gave:
            self._gives = False
            self.drop(LATE)
        step = self.step if self._begun is None else self._begun
        offered, self._offered, self._begun = self._offered, 0.0, None
        me, live = self._peers.me, self._peers.live
        told = np.ones_like(outcome.averaged) if outcome.told is None else outcome.told
        chunks = np.zeros(len(told))  # samples in this round
        if offered > 0:
            chunks += offered + self._carried
            self._carried = np.where(told, 0.0, chunks)
        alone = live == {me}
        lost = float((chunks * unheard(outcome, me)).mean())
        untold = 0.0 if alone else float((chunks * (told & ~outcome.averaged)).mean())
        self._drop(lost, LOST)
        self._drop(untold, UNTOLD)
        counted, before = float((chunks * told).mean()) - lost - untold, self._samples
        self._idle = 0 if counted > 0 or not self._gives else self._idle + 1
        if self._idle >= _IDLE_MAX and self._took_s and len(others_in(outcome, me)):
            self._say(
                "slow",
                f"{self._idle} steps of the crew in a row have no sample of this peer, whose batches of "
                f"{self._batch:g} take {median_low(self._took_s):.3g} s: give smaller batches here, or a "
                f"target above {self.target:g}",
            )
        weights = outcome.weight[outcome.averaged]
        step_samples = float(weights.max()) if len(weights) else offered
        steps = before.steps + 1
        over = (step_samples / self.target - 1.0 - before.overshoot) / steps
        self._samples = replace(
            before,
            steps=steps,
            counted=before.counted + counted,
            stale=before.stale + (counted if outcome.round > step else 0.0),
            step_samples=step_samples,
            overshoot=before.overshoot + over,
        )
        self._judge(outcome, step_samples)
        self.step = max(step, outcome.round) + 1
        self._told, self._doing = 0.0, None
        if self._pending:
            self._post(Doing.COMPUTES)

    def failed(self) -> None:
        """The average that had begun ended with an error: this peer gathers for its step anew."""
        if self._offered > 0:
            self._drop(self._offered + float(self._carried.mean()), FAILED)
            self._offered, self._carried = 0.0, np.zeros(1)
        if self._begun is not None:
            self.step, self._begun = self._begun, None
        self._told = 0.0

    def drop(self, why: str) -> None:
        """What was gathered here will be in no mean. A step that the crew made without this peer leaves what
        is of one that nobody has made.
        """
        pending, self._pending, self._offered = self._pending + self._offered, 0.0, 0.0
        if why != LATE:
            pending, self._carried = pending + float(self._carried.mean()), np.zeros(1)
        self._drop(pending, why)
        self._told, self._begun = 0.0, None

    def ends(self) -> None:
        """Training has ended here: the others are to count on nothing more."""
        self.drop(ENDED)
        if self._doing is not None or self._samples.computed:
            self._post(Doing.STANDS_BY)

    @property
    def samples(self) -> Account:
        """What has become of the samples, so far."""
        of = self._samples
        elapsed_s, computed = self._elapsed_s, of.computed
        goodput = of.counted / computed * self._compute_s / elapsed_s if computed and elapsed_s else 0.0
        pending = self._pending + self._offered + float(self._carried.mean())
        return replace(of, dropped=dict(self._dropped), pending=pending, goodput=goodput)

    def state_dict(self) -> dict[str, Any]:
        """The counts. Gradients gathered are not kept; what would load this has their samples dropped."""
        of = self.samples
        dropped = dict(of.dropped)
        if of.pending:
            dropped[RESTORED] = dropped.get(RESTORED, 0.0) + of.pending
        return {
            "computed": of.computed,
            "counted": of.counted,
            "stale": of.stale,
            "steps": of.steps,
            "overshoot": of.overshoot,
            "dropped": dropped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from there."""
        self._pending = self._offered = self._told = 0.0
        self._carried = np.zeros(1)
        self._begun = None
        self._dropped = {str(why): float(n) for why, n in state["dropped"].items()}
        self._samples = Account(
            self.target,
            steps=int(state["steps"]),
            computed=float(state["computed"]),
            counted=float(state["counted"]),
            stale=float(state["stale"]),
            overshoot=float(state["overshoot"]),
        )
        self._last_s = self._peers.now_s()

    def _clocked(self, now_s: float) -> None:
        self._elapsed_s, self._last_s = self._elapsed_s + now_s - self._last_s, now_s

    def _drop(self, samples: float, why: str) -> None:
        if samples > 0:
            self._dropped[why] = self._dropped.get(why, 0.0) + samples

    # -- What is told, and what is believed

    def read(self) -> dict[PeerId, Tally]:
        """What each peer that answers has gathered, as far as it is believed, and this one."""
        now_s, me = self._peers.now_s(), self._peers.me
        notices = self._peers.notices(self._topic)
        tallies = {me: self._mine(Doing.COMPUTES)}
        for peer, posted in notices.posts.items():
            if peer == me or peer in notices.silent:
                continue
            heard = self._hear(peer, posted.number, posted.blob, now_s)
            if heard is not None and not heard.doubted:
                age_s = max(0.0, now_s - heard.at_s - min(heard.offsets_s))
                if heard.tally.step < self.step:  # what it does since began with the average that is over
                    age_s = min(age_s, now_s - self._averaged_s)
                tallies[peer] = replace(heard.tally, age_s=age_s)
        self._alone = len(tallies) == 1 and bool(self._heard)
        return tallies

    def _mine(self, doing: Doing) -> Tally:
        batch_s = median_low(self._took_s) if self._took_s else 1e-3
        return Tally(self.step, self._pending, self._batch, batch_s, doing)

    def _post(self, doing: Doing) -> None:
        """Tell the others; but not what is gathered for the next step while an average is under way, or they
        would take theirs for over.
        """
        if self._begun is not None:
            return
        self._told, self._doing = self._pending, doing
        began_s = self._peers.now_s()
        self._peers.post_soon(self._topic, encode(self._mine(doing), began_s))
        self._posted_s = self._peers.now_s()
        took_s = self._posted_s - began_s
        self._post_s = took_s if self._post_s == 0.0 else self._post_s + (took_s - self._post_s) / 8

    def _hear(self, peer: PeerId, number: int, blob: bytes, now_s: float) -> _Heard | None:
        """Take a peer's newest post; ``None``: nothing that can be has come from it."""
        known = self._heard.get(peer)
        if known is not None and known.number == number:
            return known
        told = decode(blob)
        if told is None:
            self._doubt(peer, "what it tells of its samples cannot be read, or cannot be")
            return None
        tally, at_s = told
        if known is None or number < known.number or at_s < known.at_s:  # it is a new process there
            known = self._heard[peer] = _Heard(number, tally, at_s)
        before = known.tally.samples if tally.step > known.tally.step else known.tally.before
        known.number, known.tally, known.at_s = number, replace(tally, before=before), at_s
        known.offsets_s.append(now_s - at_s)
        return known

    def _judge(self, outcome: Outcome, step_samples: float) -> None:
        """A round is over: what others told before it must fit what came of it."""
        if not outcome.averaged.any():
            return
        came = others_in(outcome, self._peers.me)
        claims = [peer for peer, heard in self._heard.items() if heard.tally.step == outcome.round]
        most = 2 * len(came.intersection(claims)) > len(claims)  # else this peer was early or late itself
        others = [heard.tally for heard in self._heard.values()]
        behind = len(others) > 1 and is_over(others, outcome.round + 1)
        for peer, heard in self._heard.items():
            tally = heard.tally
            if tally.step > outcome.round + 1:
                heard.ahead += not behind
                if heard.ahead >= _AHEAD_MAX:
                    self._disbelieve(peer, heard, f"step {tally.step}, where the crew is at {outcome.round}")
            elif tally.step == outcome.round and peer in came:
                if tally.samples > step_samples * (1.0 + _ROUNDING):
                    what = f"{tally.samples:g} samples, of {step_samples:g} in a step of all"
                    self._disbelieve(peer, heard, what)
                else:
                    heard.doubted, heard.undelivered, heard.ahead = "", 0, 0
            elif most and tally.step == outcome.round and tally.samples > 0:
                heard.undelivered += 1
                if heard.undelivered >= _UNDELIVERED_MAX:
                    what = f"{tally.samples:g} samples, which came to no average, as before"
                    self._disbelieve(peer, heard, what)

    def _disbelieve(self, peer: PeerId, heard: _Heard, what: str) -> None:
        if not heard.doubted:
            self._doubt(peer, f"it told of {what}")
        heard.doubted = what

    def _doubt(self, peer: PeerId, why: str) -> None:
        self._say(f"doubt {peer} {why[:16]}", f"not believed until it fits again: {why}", peer)

    def _say(self, once: str, what: str, peer: PeerId | None = None) -> None:
        """A warning and a note, the first time."""
        if once in self._said:
            return
        self._said.add(once)
        about = "target batch" if peer is None else f"target batch: peer {peer}"
        _log.warning("%s: %s", about, what)
        if self._note is not None:
            self._note(Noted("target batch", self._peers.me if peer is None else peer, what))


def encode(tally: Tally, at_s: float) -> bytes:
    """A post on the notice board. at_s: when it is told, by the teller's clock."""
    return _POST.pack(_VERSION, tally.doing, tally.step, tally.samples, tally.batch, tally.batch_s, at_s)


def decode(blob: bytes) -> tuple[Tally, float] | None:
    """The same back; ``None``: it is of another version, or nothing that can be."""
    if len(blob) != _POST.size:
        return None
    version, doing, step, samples, batch, batch_s, at_s = _POST.unpack(blob)
    if version != _VERSION or doing > max(Doing) or step > _STEP_MAX or not math.isfinite(at_s):
        return None
    if not (0.0 <= samples <= WEIGHT_MAX and 0.0 <= batch <= WEIGHT_MAX):
        return None
    if not (batch_s > 0 and math.isfinite(batch_s)):
        return None
    return Tally(step, samples, batch, batch_s, Doing(doing)), at_s
