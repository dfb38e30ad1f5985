"""Rounds without a selection, where selecting, coding and sending would take longer than sending all.

Each peer measures: what selecting, coding and adding up took in the last rounds, how many bytes that came
to, and the link's speed in rounds that were sent whole (their second stage, in which every peer sends its
block's average to all). From these come the two times of a round (``codecs.sparse.advice``), corrected by
what this peer's own rounds of either kind took (``Corrected``): waiting, and the work of machines that are
busy, are in none of the parts. In the middle of every ``WINDOW`` rounds a peer posts its times; at its end
all take the middle of what was posted for it, and so come to one choice for the rounds that follow.

No round is split by that: each peer's choice travels in the round itself. A peer that would send all offers
one row that says so in place of its selection (``codecs.sparse.gather.whole_mark``). The round is sent whole
if most of the peers whose rows came say so; the rows' owners decide which came, for all alike. A peer that
had selected by then sends all but its selection, so that the sum is the same. So a disagreement costs time
and nothing else. It ends with the round: from then on all choose what most chose.

The link is measured in the first round (of models, or, where these are never averaged densely, of what is
sent). After that one round of the kind that was not chosen is tried in so many that this takes ``TRIALS_MAX``
of the time at most.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median, median_low

import numpy as np

from ragtag.codecs.dense import fp32
from ragtag.codecs.sparse.advice import Choice, Cost, choose_for
from ragtag.codecs.sparse.gather import senders, whole_marks
from ragtag.core.channels import channel_of, topic_of
from ragtag.core.schema import Schema
from ragtag.core.types import Bools, Floats, Gathered, Noted, Outcome, PeerId
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.rounds.gather import gather
from ragtag.protocols.rounds.rps import rps_repair
from ragtag.training.transport import Transport

WINDOW = 16
"""Rounds between choices."""
TRIALS_MAX = 0.01
"""Trying rounds of the kind that was not chosen takes at most this share of the time of the others."""
_METHOD = replace(rps_repair, patience=gather.patience)  # all replicas share it: worth standing by for
_SEEN = 5  # measurements of which the middle one counts
_POST = struct.Struct("<BIdd")
_VERSION = 1

_log = logging.getLogger("ragtag")


class Corrected:
    """How far the rounds of a kind were from what was estimated for them, by the last ``_SEEN`` of them.

    What they took beyond the estimate is added, for it is there at any rate of the link; where they took
    less, the estimate is too long by a factor.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=_SEEN)

    @property
    def seen(self) -> bool:
        """Whether any round of this kind was measured."""
        return bool(self._seen)

    def took(self, took_s: float, estimated_s: float) -> None:
        """A round took so long, and so much was estimated."""
        self._seen.append((took_s, estimated_s))

    def correct(self, estimated_s: float, other: Corrected) -> float:
        """What a round takes, by a new estimate. other: of the other kind, for which one has none of its own:
        what its rounds took beyond the estimates is in all rounds.
        """
        if not self._seen:
            return estimated_s + other._beyond_s()
        took_s, expected_s = self._middle()
        return estimated_s * min(1.0, took_s / expected_s) + self._beyond_s()

    def _beyond_s(self) -> float:
        if not self._seen:
            return 0.0
        took_s, expected_s = self._middle()
        return max(0.0, took_s - expected_s)

    def _middle(self) -> tuple[float, float]:
        return median(t for t, _ in self._seen), median(e for _, e in self._seen)


class Bypass:
    """One peer's part in choosing, and the channel for what is sent whole.

    name: of the channel that selections travel on.
    schema: of what is selected from.
    selection: its name, for the log.
    measured: whether something else measures the link in the first round.
    note: told of each change.
    Raises SchemaMismatch.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        schema: Schema,
        *,
        selection: str,
        measured: bool,
        note: Callable[[Noted], None] | None = None,
    ) -> None:
        self._transport, self._selection, self._note = transport, selection, note
        self._channel, self._topic = channel_of(f"{name}/whole"), topic_of(f"{name}/whole")
        whole = Schema(schema.tensors, fp32.name, _METHOD.name, f"{schema.content}, whole")
        self.message_bytes = whole.n_chunks(fp32.elements) * CHUNK_BYTES
        transport.configure(self._channel, whole, _METHOD, fp32)
        self.on = False
        """Whether rounds are to be sent whole, by the last choice."""
        self._trial = not measured  # the next round is of the kind that was not chosen
        self._chosen = self._posted = 0
        self._last_at = {True: 0, False: 0}  # round of each kind (whole or not)
        self._own = {True: Corrected(), False: Corrected()}
        self._select_s: deque[float] = deque(maxlen=_SEEN)
        self._decode_s: deque[float] = deque(maxlen=_SEEN)
        self._sparse_bytes: deque[int] = deque(maxlen=_SEEN)
        self._rate_bytes_per_s: deque[float] = deque(maxlen=_SEEN)

    # -- A round

    @property
    def wanted(self) -> bool:
        """Whether this peer is for sending the next round whole."""
        return self.on != self._trial and len(self._transport.live) > 1

    def agreed(self, gathered: Gathered) -> tuple[bool, bool]:
        """Whether the round is sent whole, and whether this peer's word (so, its values) counted in it."""
        marks = whole_marks(gathered.rows)
        whole, selected = senders(gathered.rows[marks]), senders(gathered.rows[~marks])
        most = len(whole) > len(selected - whole)
        if (whole or selected) and most != self.on and not self._trial:
            self._turn(most, "as most others do")
        return most, self._transport.me in whole | selected

    def average(self, values: Floats, weight: float, deadline_s: float | None) -> Outcome:
        """Average float32 ``[n_chunks * elements]`` with the crew; ``values`` may not change meanwhile."""
        table = values.reshape(-1, fp32.elements)
        outcome = self._transport.start(self._channel, table, weight, deadline_s).wait()
        self.sent_whole(self.message_bytes, outcome)
        return outcome

    # -- What is measured

    def selected(self, took_s: float, n_bytes: int) -> None:
        """Selecting and coding a message of so many bytes took so long."""
        self._select_s.append(took_s)
        self._sparse_bytes.append(n_bytes)

    def added(self, took_s: float) -> None:
        """Decoding and adding up all that came in a round took so long."""
        self._decode_s.append(took_s)

    def sent_whole(self, n_bytes: int, outcome: Outcome) -> None:
        """A round of vectors of so many bytes, averaged chunk by chunk, is over."""
        n = len(self._transport.live)
        if n > 1 and not outcome.expired and outcome.gather_s > 0:
            self._rate_bytes_per_s.append(n_bytes * (n - 1) / n / outcome.gather_s)

    @property
    def tried(self) -> bool:
        """Whether a round with a selection has told what it takes."""
        return self._own[False].seen

    def took(self, whole: bool, took_s: float) -> None:
        """A round of one kind took so long, from selecting to what came of it."""
        found = self._by_parts()
        if found is not None and took_s > 0:
            self._own[whole].took(took_s, max(1e-9, found.dense_s if whole else found.sparse_s))

    def estimate(self) -> Choice | None:
        """The two times of a round, as this peer has measured; ``None``: not enough is measured."""
        found = self._by_parts()
        if found is None:
            return None
        dense_s = self._own[True].correct(found.dense_s, self._own[False])
        sparse_s = self._own[False].correct(found.sparse_s, self._own[True])
        return Choice(sparse_s < dense_s, dense_s, sparse_s, found.break_even_bytes_per_s)

    def _by_parts(self) -> Choice | None:
        n = len(self._transport.live)
        if n < 2 or not (self._select_s and self._decode_s and self._rate_bytes_per_s):
            return None
        others = n - 1
        cost = Cost(
            self._selection,
            median_low(self._sparse_bytes),
            select_s=median(self._select_s),
            decode_s=median(self._decode_s) / others,
        )
        whole = Cost(fp32.name, self.message_bytes, dense=True)
        return choose_for(whole, cost, n, median(self._rate_bytes_per_s))

    # -- Choosing

    def posts_after(self, round_: int) -> bool:
        """Whether this peer's times are posted when this round is over."""
        window, at = divmod(round_ + 1, WINDOW)
        return at >= WINDOW // 2 and self._posted <= window

    def ended(self, round_: int, whole: bool) -> None:
        """A round is over. whole: whether anything in it was sent whole, so that the link was measured."""
        window = (round_ + 1) // WINDOW
        self._trial = False
        self._last_at[whole] = round_
        if self.posts_after(round_):
            found = self.estimate()
            if found is not None:
                post = _POST.pack(_VERSION, window, found.dense_s, found.sparse_s)
                self._transport.post_soon(self._topic, post)
            self._posted = window + 1
        if window != self._chosen:
            self._chosen = window
            self._choose(round_, window - 1)

    def _choose(self, round_: int, window: int) -> None:
        times = [
            found for blob in self._transport.posts(self._topic).values() if (found := read(blob, window))
        ]
        if not times:
            self._trial = not self.on  # the link's speed is not known yet
            return
        dense_s, sparse_s = median(t[0] for t in times), median(t[1] for t in times)
        whole = dense_s <= sparse_s
        if whole != self.on:
            self._turn(
                whole, f"{1e3 * dense_s:.3g} ms against {1e3 * sparse_s:.3g} ms with {self._selection}"
            )
        chosen_s, other_s = (dense_s, sparse_s) if whole else (sparse_s, dense_s)
        self._trial = TRIALS_MAX * (round_ - self._last_at[not whole]) * chosen_s >= other_s

    def _turn(self, whole: bool, why: str) -> None:
        self.on = whole
        what = "all is sent from now on" if whole else "a selection is sent from now on"
        _log.info("%s: %s", what, why)
        if self._note is not None:
            self._note(Noted("by-pass" if whole else "by-pass ends", self._transport.me, why))


def read(blob: bytes, window: int) -> tuple[float, float] | None:
    """The times that a peer posted for a window; ``None``: of another one, or none that can be."""
    if len(blob) != _POST.size:
        return None
    version, of, dense_s, sparse_s = _POST.unpack(blob)
    if version != _VERSION or of != window:
        return None
    good = all(math.isfinite(t) and t >= 0 for t in (dense_s, sparse_s))
    return (dense_s, sparse_s) if good else None


def delivered(outcome: Outcome, me: PeerId, weight: float) -> tuple[Bools, Bools]:
    """What became of a vector that was sent whole: bool ``[n_chunks]`` twice.

    First, where ``outcome.mean`` goes into the sum; second, where this peer's values were not taken in, and
    are kept. Where no average came, nobody here knows whether others have one with this peer's values: these
    stand for it (``outcome.mean`` has them), as in RPS, and are not sent again. Where nobody else was heard
    at all, the round was none.
    """
    mine = (outcome.heard >> np.uint64(me)) & np.uint64(1) == 1
    alone = not (outcome.heard & ~np.uint64(1 << me)).any()
    if alone or weight <= 0:
        into = outcome.averaged & (not alone)
        return into, np.ones_like(into)
    return np.ones_like(mine), outcome.averaged & ~mine
