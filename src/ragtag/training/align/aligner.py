"""Replicas that average gradients are kept alike: what differs is found by digests, and then made the same.

All replicas take the same steps as long as every round gives all of them the same mean. A round that is
spoilt (a peer dies in it, chunks are lost for good, the crew grows) gives them different ones, and nothing
in an average of gradients makes up for that: each difference stays, and they add up.

After every ``every`` rounds, by the round's number, so that all peers agree on it without a word, all take
part in one small round more, in which rows travel from all to all (``protocols.rounds.gather``, on a channel
of its own). It begins when the step is taken and runs beside the next step's computation and round. What it
comes to is taken over before the next step is: parameters do not change in between. So no peer waits in a
comparison for one that waits for it in the next round, as it has begun both.

The number of that small round follows from the model's round, too, and not from how many a peer was in:
peers that were parted, or that follow, have been in others. So those that compare after one round of the
model are in one small round, and a peer that missed some leaves them out.

What replicas are apart grows with each step. So a peer for which a round was spoilt, while replicas were
alike, says so on the notice board. Once all have most likely heard of it, they are compared ``SOONER`` times
as often, until ``every`` rounds after that round.

Each peer offers digests of its model and of its optimizer's state, by units (``units``). Where all are the
same that is all, and nothing is written: a crew in which nothing goes wrong stays, bit for bit, what it would
be without. Of a unit that differs the version that most peers have counts (of several that as
many have, one that goes by the unit and the round), since few peers miss something in the same way. A
newcomer that could not get into step has no vote until it has what the others have. One peer that has the
version, another one for each unit, gives it in the next such round, and all others take it. No mean is taken:
of n equal values it may be another one (x + x + x, over 3). So replicas that agree are never moved.

Nothing of this needs agreement. Views that differ, since a row was lost, lead to a unit that nobody gives,
or that two do: of these all take the one with more peers behind it. What is still apart is found at the
next look. A peer gives only what it knows most living peers' digests of.

Of sparse averages rows may come a round late. A peer that has some to come says, with what it gives, which
it has. A peer that takes a unit adds those that the giver lacked, and no other ones of these rounds
(``late``): each counts once.

A unit has parameters and all that an optimizer keeps of them, so that a replica is whole again: with the
parameters alone, a momentum that had another gradient in it would pull them apart anew.

Costs: in calm rounds one row of 1,088 bytes from each peer to all others, once in ``every`` rounds; of large
models ``LOOK_BYTES`` are looked at each time, in turn. While units differ, at most ``share`` of the bytes of
as many rounds in which all is sent, and ``_ROWS_LEAST`` rows at least: such a round moves about ``share *
every / 2`` of the bytes of a whole one. How much is given at once begins low and doubles while it all arrives
in time. What calm rounds did not need of their share is saved up, for ``SOONER`` such rounds at most.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import NoReturn, Protocol

import numpy as np

from ragtag.codecs.base import Codec
from ragtag.core.channels import channel_of, topic_of
from ragtag.core.schema import Schema
from ragtag.core.types import Bytes, Noted, Outcome
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.rounds.gather import gather
from ragtag.training.align.plan import GOLDEN, Align, Aligned, Pace, Wanted, judge
from ragtag.training.align.rows import (
    Came,
    Given,
    View,
    came_rows,
    digest_rows,
    read_digests,
    read_values,
    rows_of,
    value_rows,
)
from ragtag.training.align.units import UNITS_MAX, Look, Units
from ragtag.training.tensors.layout import Part, require_plain, spec_of
from ragtag.training.transport import Pending, Transport

LOOK_BYTES = 1 << 25
"""Parameters that are looked at each time: the whole model in so many turns as that takes."""
_STATES_MAX = 8  # tensors of a parameter's shape that an optimizer may keep of it
SOONER = 8
"""After a spoilt round replicas are compared so many times as often, at most."""
_ROWS_LEAST = 64
"""So many rows (68 KiB) may always be given: small models are made alike in one comparison."""
_POST = struct.Struct("<I")  # the round that was spoilt
_PATIENCE = 4.0  # a comparison may take so many times as long as rounds, or comparisons, usually do
_ROUNDS_SEEN = 32

Patch = tuple[Given, ...]


class Rows(Protocol):
    """A sparse average: rows of a round may come with a later one (see ``late``)."""

    def keep(self, finish: Callable[[], None]) -> None:
        """Replicas will be compared. finish: called when a round is over, before its rows are added."""
        ...

    def came(self) -> Came | None:
        """By round of which more may come: which rows are in here; ``None``: not everywhere the same."""
        ...

    def replaced(self, round_: int, pieces: Iterable[tuple[int, int, int]], came: Came) -> None:
        """After a round these pieces of parameters became those of a replica that had these rows."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What was offered in a comparison.

    number: of the comparison.
    first: the first unit that was looked at.
    mine: uint32, the digests of the units from there on.
    rows_due: how many rows all peers were to give.
    given: how many units this peer gave.
    """

    number: int
    first: int
    mine: np.typing.NDArray[np.uint32]
    rows_due: int
    given: int


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A comparison under way. asked: ``None`` where this peer is not in step, and gave nothing."""

    round: int
    pending: Pending
    asked: _Asked | None = None


class Aligner:
    """One peer's part in keeping replicas alike.

    name: of the optimizer's channel.
    parts: the parameters.
    state: what an optimizer keeps of a parameter.
    deadline_s: bounds each round, where that is asked for.
    rows: the late rows of sparse averages (``late``).
    note: told when replicas are found to differ, and when no longer.
    Raises SchemaMismatch.
    """

    def __init__(
        self,
        align: Align,
        parts: list[Part],
        state: Callable[..., dict[str, object]],
        transport: Transport,
        *,
        name: str = "model",
        deadline_s: float | None = None,
        rows: Rows | None = None,
        note: Callable[[Noted], None] | None = None,
    ) -> None:
        for part in parts:
            require_plain(part, part.find())
        self.every, self._transport = align.every, transport
        self._channel, self._topic = channel_of(f"{name}/replicas"), topic_of(f"{name}/replicas")
        self._sooner, self._said = math.ceil(align.every / SOONER), -align.every
        self._looks = math.ceil(align.every / self._sooner)
        self._deadline_s, self._rows, self._note = deadline_s, rows, note
        if rows is not None:
            rows.keep(self.finish)
        self._units = units = Units(parts, state)
        self._turns = max(1, math.ceil(4 * units.n_values / LOOK_BYTES))
        size = min(units.each, units.n_values) * (1 + _STATES_MAX) + 64
        self._sizes = [size] * units.n
        model_rows = rows_of(units.n_values)
        self._pace = Pace(max(1, int(align.share * align.every * model_rows)))
        self._saved, self._saves, self._looked = float(self._pace.most), align.share * model_rows, -1
        schema = Schema(
            tuple(spec_of(part, part.find()) for part in parts), align.name, gather.name, "replicas"
        )
        most = rows_of(UNITS_MAX) + max(self._pace.most, rows_of(size), _ROWS_LEAST)
        elements = max(1, schema.n_values // most)
        self._rows_most = schema.n_chunks(elements)
        transport.configure(
            self._channel, schema, gather, Codec(align.name, elements, _no, _no, _no, exact=False)
        )
        self._wanted: dict[int, Wanted] = {}
        self._round_s: deque[float] = deque(maxlen=_ROUNDS_SEEN)
        self._whole_s: deque[float] = deque(maxlen=_ROUNDS_SEEN)
        """How long comparisons took that no deadline ended."""
        self._under_way: _Begun | None = None
        self._follows = False
        self._followed: tuple[int, Patch] = (-1, ())
        self._apart: dict[int, int] = {}
        self._votes, self._right = True, 0
        self.aligned: Aligned | None = None
        """What the last comparison that is over came to."""

    # -- What a peer does

    def begin(self, outcome: Outcome) -> None:
        """A round is over and its step is taken: begin to compare, where it is time."""
        self._tell_spoilt(outcome)
        number = self._due(outcome)
        if number is not None:
            self._under_way = self._compare(outcome.round, number)

    def finish(self) -> None:
        """A round is over, and its step is not taken: take what others gave, where replicas were compared."""
        begun, self._under_way = self._under_way, None
        if begun is None:
            return
        if begun.asked is not None and not self._follows:
            self._take(begun, begun.asked)
            return
        patch = tuple(read_values(_rows(self._came(begun)), begun.round, self._sizes))
        self._replaced(patch, begun.round)
        if self._follows:
            self._followed = begun.round, patch
        else:
            self.put(patch)

    @contextmanager
    def following(self) -> Iterator[None]:
        """In a round that is followed: what others took before its step is kept (``followed``), not taken."""
        self._follows, self._followed = True, (-1, ())
        try:
            yield
        finally:
            self._follows = False

    def followed(self, round_: int) -> Patch | None:
        """What others took before the step of the round that was followed, for ``put``; ``None``: they were
        compared after the round before, and this peer took no part.
        """
        compared, patch = self._followed
        if compared == round_ - 1:
            return patch
        return () if self._number(round_ - 1) is None else None

    def follow(self, outcome: Outcome) -> None:
        """``begin`` for a peer that is not in step yet: it gives nothing, and nobody waits for it. It waits
        as long as its channel allows: what it lacked of a comparison it could not make up for.
        """
        number = self._due(outcome)
        if number is not None:
            nothing = np.zeros((0, CHUNK_BYTES), np.uint8)
            pending = self._transport.offer(self._channel, nothing, 0.0, self._deadline_s, number=number)
            self._under_way = _Begun(outcome.round, pending)

    def put(self, patch: Patch) -> tuple[int, float]:
        """Take over the units that are other ones here; how many, and their distance (see ``Aligned``)."""
        changed = was = 0.0
        taken = 0
        for given in patch:
            norms = self._units.put(given.unit, given.form, given.values)
            if norms is not None:
                taken, changed, was = taken + 1, changed + norms[0], was + norms[1]
        return taken, math.sqrt(changed / was) if was else math.sqrt(changed)

    def forget(self) -> None:
        """Another state was restored: what was found before is of none."""
        if self._under_way is not None and self._under_way.asked is not None:
            self._under_way.pending.wait()
            self._under_way = None
        self._wanted.clear()

    def arrived(self, in_step: bool) -> None:
        """This peer came late. Where it is not in step its model counts for nothing, and it gives none of it,
        until it has been found to have what counts in all its parts: two newcomers may have the same.
        """
        self._votes, self._right = in_step, 0

    def digest(self) -> int:
        """32 bits of all that is compared, in all turns: the whole replica is read for it."""
        look, units = Look(), self._units
        return zlib.crc32(np.array([units.digest(unit, look) for unit in range(units.n)], np.uint32).data)

    # -- A comparison

    def _due(self, outcome: Outcome) -> int | None:
        """Which comparison follows a round; ``None``: none does."""
        self._round_s.append(outcome.total_s)
        return self._number(outcome.round)

    def _number(self, round_: int) -> int | None:
        """The number of the comparison after a round; ``None``: there is none.

        It is how many there have been, with all that would be after spoilt rounds. So it is the same whether
        a peer knows of such a round or not. In calm rounds numbers are at most ``SOONER`` apart: peers that
        wait for the next one believe none much farther ahead (``FarRounds``).
        """
        whole, since = divmod(round_ + 1, self.every)
        if since % self._sooner or (since and not self._is_spoilt(round_)):
            return None
        return whole * self._looks + since // self._sooner

    def _tell_spoilt(self, outcome: Outcome) -> None:
        """Say so where a round was spoilt. Rows that have not come may come later (``late``): where they are
        gathered, that spoils no round yet.
        """
        spoilt = outcome.gathered is None and bool(outcome.waited_for) and not outcome.averaged.all()
        if spoilt and not any(self._apart.values()) and outcome.round >= self._said + self.every:
            self._said = outcome.round
            self._transport.post_soon(self._topic, _POST.pack(outcome.round))

    def _is_spoilt(self, round_: int) -> bool:
        """Whether a peer has said so of one of the last rounds, so long ago that all have heard of it."""
        said = [blob for blob in self._transport.posts(self._topic).values() if len(blob) == _POST.size]
        return any(self._sooner <= round_ - _POST.unpack(blob)[0] < self.every for blob in said)

    def _compare(self, round_: int, number: int) -> _Begun:
        """Offer digests of the replica as it is now, and the units that are this peer's to give."""
        me, alone = self._transport.me, len(self._transport.live) < 2
        self._saved += self._saves * (round_ - self._looked)
        self._saved, self._looked = min(self._saved, float(SOONER * self._pace.most)), round_
        turn, n = self._turn(number), self._units.n
        first, stop = turn * n // self._turns, (turn + 1) * n // self._turns
        look = Look()
        mine = np.array([0 if alone else self._units.digest(u, look) for u in range(first, stop)], np.uint32)
        due, rows_due = self._due_now(number)
        own = digest_rows(me, round_, first, mine, self._votes)[: 0 if alone else None]
        gifts, given = self._gifts(due, look, round_, self._rows_most - len(own))
        asked = _Asked(number, first, mine, rows_due, given)
        return _Begun(round_, self._offer(np.concatenate([own, *gifts]), number), asked)

    def _take(self, begun: _Begun, asked: _Asked) -> None:
        """Take what others give, and see what differs."""
        me, round_, first, mine = self._transport.me, begun.round, asked.first, asked.mine
        came = self._came(begun)
        rows = _rows(came)
        patch = read_values(rows, round_, self._sizes)
        others = tuple(gift for gift in patch if gift.sender != me)
        self._replaced(others, round_)
        taken, distance = self.put(others)
        self._pace.learn(asked.rows_due, came)
        view = read_digests(rows, round_, first, len(mine))
        wanted, counts = judge(view, first, asked.number)
        wrong = sum(digest != int(mine[unit - first]) for unit, digest in counts.items())
        self._want(wanted, range(first, first + len(mine)), {gift.unit for gift in patch}, view)
        self.aligned = Aligned(
            round_,
            len(mine),
            len(wanted),
            wrong,
            len(view.digests),
            asked.given,
            taken,
            distance,
            came.expired,
        )
        self._earn(wrong, bool(view.voters - {me}) and me in view.digests)
        self._tell(self._turn(asked.number), len(wanted), len(mine))

    def _earn(self, wrong: int, sure: bool) -> None:
        """A peer without a vote has as many units wrong; ``sure``: others that vote were heard."""
        if not self._votes:
            self._right = self._right + 1 if sure and not wrong else 0
            self._votes = self._right >= self._turns

    def _turn(self, number: int) -> int:
        """Which part of the model a comparison looks at: one after the other in calm rounds, too, whose
        numbers are apart.
        """
        calm, sooner = divmod(number, self._looks)
        return (number if sooner else calm) % self._turns

    def _due_now(self, number: int) -> tuple[dict[int, Wanted], int]:
        """The units that are to be given now, as far as the pace allows, one at least; each is tried once,
        until it is seen to differ again. Which come first goes by the number, so that all have their turn.
        """
        n = self._units.n
        start = int(n * (GOLDEN * number % 1.0))
        due: dict[int, Wanted] = {}
        rows = 0
        for unit in sorted(self._wanted, key=lambda unit: (unit - start) % n):
            more = rows_of(self._units.form(unit).total)
            if due and rows + more > max(_ROWS_LEAST, min(self._pace.now, self._saved)):
                break
            due[unit] = self._wanted.pop(unit)
            rows += more
        self._saved = max(0.0, self._saved - rows)
        return due, rows

    def _gifts(
        self, due: dict[int, Wanted], look: Look, round_: int, rows_most: int
    ) -> tuple[list[Bytes], int]:
        """The rows of those units that are this peer's to give, and how many units these are."""
        gifts: list[Bytes] = []
        mine = [unit for unit, wanted in due.items() if wanted.giver == self._transport.me]
        came = {} if self._rows is None or not mine else self._rows.came()
        if came is None:
            return [], 0
        said = came_rows(self._transport.me, round_, came)
        rows_most -= len(said)
        for unit in mine:
            wanted = due[unit]
            form, values = self._units.values(unit, look)
            rows = rows_of(form.total)
            if rows > rows_most or form.total > self._sizes[unit] or not np.isfinite(values).all():
                continue
            rows_most -= rows
            given = Given(unit, wanted.giver, form.tag, wanted.votes, values, came)
            gifts.append(value_rows(given, round_))
        return [said, *gifts] if gifts else [], len(gifts)

    def _replaced(self, patch: Patch, round_: int) -> None:
        """Of sparse averages, what comes late is not to count twice in what is taken, nor to be lost."""
        if self._rows is not None:
            for giver in sorted({given.sender for given in patch}):
                units = [given for given in patch if given.sender == giver]
                pieces = [piece for given in units for piece in self._units.pieces(given.unit)]
                self._rows.replaced(round_, pieces, units[0].came)

    def _want(self, found: dict[int, Wanted], looked: range, given: set[int], view: View) -> None:
        """What is to be given the next time. What was given just now had been looked at before."""
        most = 2 * len(view.digests.keys() & self._transport.live) > len(self._transport.live)
        for unit in looked:
            self._wanted.pop(unit, None)
            if most and unit in found and unit not in given:
                self._wanted[unit] = found[unit]

    def _offer(self, rows: Bytes, number: int) -> Pending:
        """Begin a comparison. Its channel's own deadlines know little: its rounds are long apart, and short.
        So it may take ``_PATIENCE`` times as long as rounds usually do, or as comparisons that came whole,
        and as long as any of the last rounds: a peer that was slow in that one is waited for as long here.
        """
        usual_s = _PATIENCE * max(median(self._round_s), median(self._whole_s or (0.0,)))
        deadline_s = max(usual_s, *self._round_s)
        if self._deadline_s is not None:
            deadline_s = min(deadline_s, self._deadline_s)
        return self._transport.offer(self._channel, rows, 1.0, deadline_s, number=number)

    def _came(self, begun: _Begun) -> Outcome:
        """Wait for a comparison. One that no deadline ended tells how long the next may take."""
        outcome = begun.pending.wait()
        if not outcome.expired:
            self._whole_s.append(outcome.total_s)
        return outcome

    def _tell(self, turn: int, apart: int, units: int) -> None:
        """A note where replicas are found to differ, and one where they do not any more."""
        before = sum(self._apart.values())
        self._apart[turn] = apart
        now = sum(self._apart.values())
        if self._note is None or bool(before) == bool(now):
            return
        detail = f"{apart} of {units} parts" if now else "bit for bit"
        self._note(Noted("replicas differ" if now else "replicas alike", -1, detail))


def _rows(outcome: Outcome) -> Bytes:
    """The rows of a round; what comes late is of a model that is no more."""
    return np.zeros((0, CHUNK_BYTES), np.uint8) if outcome.gathered is None else outcome.gathered.rows


def _no(*arguments: object) -> NoReturn:
    raise RuntimeError("rows of an alignment are not averaged chunk by chunk")
