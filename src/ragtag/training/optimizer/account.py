"""What became of the samples of one optimizer, where steps have a target batch (``schedules.target``).

Each sample that was computed is counted (its gradient is in the mean of a step), dropped (for a reason that
is told), or pending. Of a mean that came in part, as where lines lose chunks, the share of the chunks is
taken. Of a chunk that nobody may have a mean of, as its owner died, they stay pending: their gradients go
into the next one (``exchange.dense``). Gradients of a step that the crew has made without this peer are of an
older model: they are dropped, not added to the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ragtag.core.types import Outcome
from ragtag.training.exchange.slow import unheard
from ragtag.training.optimizer.gathering import Gathering

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


@dataclass(frozen=True, slots=True)
class Account:
    """What has become of the samples of one peer, since it began.

    target: of a step of the crew.
    steps: of the crew, in which this peer took part.
    computed: samples that had a gradient here: all of those below.
    counted: those that are in means.
    dropped: by reason (see ``account``).
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


class Accounting:
    """Keeps the account of one optimizer's samples. gathering: what all of this peer's have in common."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self.batch = self.pending = 0.0
        """Samples of the last batch; those gathered and offered to no average yet."""
        self._offered = 0.0  # to the average under way
        self._carried = np.zeros(1)  # to it, too: by chunk, what of the steps before is in no mean yet
        self._round = 0  # that the next average is expected to have
        self._samples = Account(gathering.target)
        self._dropped: dict[str, float] = {}

    def stepped(self, batch: float, overflowed: bool = False) -> bool:
        """A batch of so many samples has been computed, and is gathered unless it ``overflowed``. Returns
        whether it is now to be asked whether the crew's step is due.
        """
        self._samples = replace(self._samples, computed=self._samples.computed + batch)
        if overflowed:
            self._drop(batch, OVERFLOWED)
        else:
            self.batch, self.pending = batch, self.pending + batch
        return self._gathering.stepped(self, overflowed)

    def offers(self) -> float:
        """What is gathered here goes into an average: what it counts there, 1, or 0 where the crew has made
        its step without this peer.
        """
        late, gathered = self._gathering.begins(self), self.pending
        self._offered, self.pending = 0.0 if late else gathered, 0.0
        if late:
            self._drop(gathered, LATE)
        return 0.0 if late else 1.0

    def averaged(self, outcome: Outcome, gave: bool = True) -> None:
        """An average is over. gave: what was gathered here was offered to it."""
        if not gave:
            self.drop(LATE)
        offered, self._offered = self._offered, 0.0
        me, live = self._gathering.me, self._gathering.live
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
        weights = outcome.weight[outcome.averaged]
        step_samples = float(weights.max()) if len(weights) else offered
        steps = before.steps + 1
        over = (step_samples / before.target - 1.0 - before.overshoot) / steps
        self._samples = replace(
            before,
            steps=steps,
            counted=before.counted + counted,
            stale=before.stale + (counted if outcome.round > self._round else 0.0),
            step_samples=step_samples,
            overshoot=before.overshoot + over,
        )
        self._round = outcome.round + 1
        self._gathering.averaged(self, outcome, counted, step_samples, gave)

    def failed(self) -> None:
        """The average that had begun ended with an error: this peer gathers for its step anew."""
        if self._offered > 0:
            self._drop(self._offered + float(self._carried.mean()), FAILED)
            self._offered, self._carried = 0.0, np.zeros(1)
        self._gathering.failed()

    def drop(self, why: str) -> None:
        """What was gathered here will be in no mean. A step that the crew made without this peer leaves what
        is of one that nobody has made.
        """
        pending, self.pending, self._offered = self.pending + self._offered, 0.0, 0.0
        if why != LATE:
            pending, self._carried = pending + float(self._carried.mean()), np.zeros(1)
        self._drop(pending, why)
        self._gathering.dropped(self)

    def ends(self) -> None:
        """Training has ended here: the others are to count on nothing more."""
        self.drop(ENDED)
        self._gathering.ends()

    @property
    def account(self) -> Account:
        """What has become of the samples, so far."""
        of = self._samples
        goodput = of.counted / of.computed * self._gathering.busy if of.computed else 0.0
        pending = self.pending + self._offered + float(self._carried.mean())
        return replace(of, dropped=dict(self._dropped), pending=pending, goodput=goodput)

    def state_dict(self) -> dict[str, Any]:
        """The counts. Gradients gathered are not kept; what would load this has their samples dropped."""
        of = self.account
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
        self.pending = self._offered = 0.0
        self._carried = np.zeros(1)
        self._dropped = {str(why): float(n) for why, n in state["dropped"].items()}
        self._samples = Account(
            self._samples.target,
            steps=int(state["steps"]),
            computed=float(state["computed"]),
            counted=float(state["counted"]),
            stale=float(state["stale"]),
            overshoot=float(state["overshoot"]),
        )
        self._gathering.dropped(self)
        self._gathering.opened()

    def _drop(self, samples: float, why: str) -> None:
        if samples > 0:
            self._dropped[why] = self._dropped.get(why, 0.0) + samples
