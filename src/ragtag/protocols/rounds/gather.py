"""Rows of all peers to all peers, through owners that decide which rows are in: for sparse averages.

Peers offer rows, each of which decodes alone (``codecs.sparse.wire``). Their number differs, and may be none.
Row i of peer p belongs to block (p + i) mod n. Stage SCATTER: every peer sends each block's owner its rows of
the block. Stage GATHER: the owner sends all peers the rows that it has, unchanged. A row that it left out is
in no peer's sum.

Why through owners, and not each row straight to all: receivers lose different rows, and replicas that add
different sums drift apart for good. With one owner per row, the owner's message is the decision (as in RPS,
ICML 2019): receivers learn which rows to add, senders which fragments to commit and which to roll back. A
direct all-gather would need receipts from all: of 16 peers, at 10 % loss, all others get a row in one case of
five. The detour costs one n-th of the bytes: k s (n - 1) (1 + 1/n) for k entries of s bytes.

Owners do not decode, so no arithmetic runs in a driver's thread. Nor do they select again. That would send
less (2 k s (n - 1)/n; Li, Hoefler, "Near-optimal sparse allreduce", PPoPP 2022) but needs error feedback of
its own, and at density .001 with up to 16 peers a round's rows are a hundredth of a dense average.

A row counts by its sender's weight, over the weight of all peers that the owner heard or waited for. A lost
row comes back by its sender's error feedback, and must then count as much.

A peer goes on asking for what it lacks of an owner's message for some rounds after the deadline. Rows that
come while the machine is kept (``at_once.BEHIND`` rounds) are part of a later outcome (``Gathered.late``). So
all replicas add the same rows, some of them a round later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

import numpy as np

from ragtag.core.types import (
    Begin,
    Bools,
    Bytes,
    Effect,
    Floats,
    Gathered,
    Outcome,
    PeerId,
    PeerSet,
    Run,
    Send,
    nobodys,
)
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.channel.at_once import BEHIND, at_once
from ragtag.protocols.channel.averager import Setting
from ragtag.protocols.rounds.base import GATHER, NO_VALUES, SCATTER, Incoming, Round, Spec, bit, whole_message
from ragtag.protocols.rounds.layout import layout_of, rotating_owners
from ragtag.protocols.rounds.progress import SCATTERING
from ragtag.protocols.rounds.repair import Repairer
from ragtag.protocols.rounds.stages import Result, Stages

_NO_ROWS: Bytes = np.zeros((1, CHUNK_BYTES), np.uint8)
_PATIENCE = 4.0  # a sum that all replicas share is worth standing by for
_REPAIR_AFTER = 4.0  # rows are sent and asked for so many times as long as a round may take


def _counted(heard: PeerSet) -> Floats:
    """How many peers are in each set."""
    counts: Floats = np.unpackbits(heard.view(np.uint8)).reshape(len(heard), -1).sum(1, np.float32)
    return counts


def nothing_gathered(channel: int) -> Outcome:
    """The outcome in place of a round: no peer has any rows, and all that was offered goes back."""
    one, gone = np.ones(1, np.bool_), np.zeros(1, np.bool_)
    nothing = Gathered(_NO_ROWS[:0], np.zeros(0, np.float32), np.zeros(0, np.int64), one, gone)
    return nobodys(channel, NO_VALUES, np.zeros(1, np.float32), np.zeros(1, np.uint64), nothing)


class _Message:
    """What has come of one message. came, fresh: bool, rows that are there, and those not handed out yet."""

    __slots__ = ("came", "fresh", "heard", "incoming", "rows", "weight")

    def __init__(self, total: int) -> None:
        self.incoming = Incoming(total)
        self.rows: Bytes = np.empty((total, CHUNK_BYTES), np.uint8)
        self.weight = np.zeros(total, np.float32)
        self.heard = np.zeros(total, np.uint64)
        self.came: Bools = np.zeros(total, np.bool_)
        self.fresh: Bools = np.zeros(total, np.bool_)

    def take(self, run: Run) -> None:
        for a, b in self.incoming.fresh(run):
            to = slice(run.first + a, run.first + b)
            self.rows[to] = run.payload[a:b]
            self.weight[to], self.heard[to] = run.weight[a:b], run.heard[a:b]
            self.came[to] = self.fresh[to] = True

    def handed(self) -> Bools:
        """The rows that have come since the last call, without fillers and rows of an impossible factor."""
        rows, self.fresh = (
            self.fresh & (self.weight > 0) & (self.weight <= 1.0),
            np.zeros(len(self.fresh), np.bool_),
        )
        return rows


class Rows:
    """What a round of rows exchanges. Runs may come after it is over, too.

    ``spec.layout`` has a block for each peer, and as many chunks as a peer may offer rows.
    """

    def __init__(self, spec: Spec, earlier: tuple[Round, ...] = ()) -> None:
        self.spec = spec
        self.mine = [j for j, owner in enumerate(spec.owners) if owner == spec.me]
        self._earlier = earlier
        self._scattered: dict[tuple[PeerId, int], _Message] = {}
        self._gathered: dict[tuple[PeerId, int], _Message] = {}
        self._whole = False

    def owners(self) -> AbstractSet[PeerId]:
        """See ``stages.Content``."""
        return set(self.spec.owners) - {self.spec.me}

    # -- Begin: rows to the owners

    def scatter(self, stages: Stages) -> Iterator[Send]:
        """See ``stages.Content``."""
        for block, owner in stages.turn():
            if owner != self.spec.me:
                share = self._share(owner, block, stages.begun)
                yield stages.send(share, stages.shares_until_s)

    def _own(self, block: int, begin: Begin) -> Bytes:
        """This peer's rows of a block."""
        assert begin.rows is not None
        return begin.rows[(block - self.spec.me) % len(self.spec.owners) :: len(self.spec.owners)]

    def _share(self, owner: PeerId, block: int, begin: Begin) -> Run:
        """The message to a block's owner. One row without a contributor says that there is none to send."""
        rows = self._own(block, begin)
        heard = bit(self.spec.me) if len(rows) else np.uint64(0)
        rows = rows if len(rows) else _NO_ROWS
        k, weight = len(rows), begin.weight
        key = self.spec.key(SCATTER, block)
        return whole_message(owner, key, rows, np.full(k, weight, np.float32), np.full(k, heard, np.uint64))

    # -- Arrivals

    def take(
        self, stages: Stages, now_s: float, run: Run, block: int
    ) -> tuple[Incoming | None, list[Effect]]:
        """See ``stages.Content``."""
        stage, most = run.key.stage, self.spec.layout.n_chunks
        if stage == SCATTER:
            if self.spec.owners[block] != self.spec.me or stages.waiting.stage > SCATTERING:
                return None, []
            table = self._scattered
        elif stage == GATHER:
            stages.tellers.add(run.peer)
            table, most = self._gathered, most * len(self.spec.owners)
        else:
            return None, []
        message = table.get((run.peer, block))
        total = run.total if message is None else message.incoming.total
        if not 0 < run.total == total <= max(1, most) or run.first + len(run.payload) > total:
            return None, []
        if message is None:
            message = table[run.peer, block] = _Message(total)
        message.take(run)
        if stage == GATHER and self.spec.owners[block] == self.spec.me:
            return message.incoming, stages.owns_it_too(now_s, run, block)
        return message.incoming, []

    # -- Decide: tell every member which rows of this peer's blocks came

    def reduce(self, stages: Stages) -> Iterator[Send]:
        """See ``stages.Content``."""
        spec = self.spec
        for block in self.mine:
            decided = self._decided(block, stages)
            self._gathered[spec.me, block] = decided
            for peer in stages.others():
                run = whole_message(
                    peer, spec.key(GATHER, block), decided.rows, decided.weight, decided.heard
                )
                yield stages.send(run, stages.waiting.until_s + stages.repair_after_s)

    def awaited(self) -> Iterable[tuple[int, PeerId, Incoming | None]]:
        """See ``stages.Content``."""
        for block, owner in enumerate(self.spec.owners):
            message = self._gathered.get((owner, block))
            yield block, owner, None if message is None else message.incoming

    def _decided(self, block: int, stages: Stages) -> _Message:
        """A block's rows with their factors. Each row names all the peers that this owner heard."""
        begin = stages.begun
        own = self._own(block, begin)
        parts, weights = [own], [np.full(len(own), begin.weight, np.float32)]
        of = {self.spec.me: float(begin.weight)} if self.spec.gives else {}
        for peer in stages.others():
            message = self._scattered.get((peer, block))
            if message is None or not message.came.any():
                continue
            of[peer] = float(message.weight[message.came][0])
            some = message.came & (message.heard > 0)
            parts.append(message.rows[some])
            weights.append(message.weight[some])
        unheard = len(set(stages.waiting.waited_for) - of.keys())
        total = sum(of.values()) * (1 + unheard / max(1, len(of)))
        factor: Floats = np.concatenate(weights) / np.float32(total if total > 0 else 1)
        rows: Bytes = np.concatenate(parts)[factor > 0]
        factor = factor[factor > 0]
        if not len(rows):
            rows, factor = _NO_ROWS, np.zeros(1, np.float32)
        roll = np.full(len(rows), sum(1 << peer for peer in of), np.uint64)
        decided = _Message(len(rows))
        decided.take(whole_message(self.spec.me, self.spec.key(GATHER, block), rows, factor, roll))
        return decided

    def result(self, stages: Stages) -> Result:
        """See ``stages.Content``."""
        gathered, heard = self._collect(), np.zeros(len(self.spec.owners), np.uint64)
        for (_, block), message in self._gathered.items():
            heard[block] |= np.bitwise_or.reduce(message.heard[message.came], initial=np.uint64(0))
        return Result(NO_VALUES, _counted(heard), heard, gathered.whole, gathered)

    # -- What came

    def _collect(self) -> Gathered:
        late: list[tuple[int, Gathered]] = []
        given_up: list[tuple[int, int]] = []
        for machine in self._earlier:
            rows = machine.content if isinstance(machine, Stages) else None
            if isinstance(rows, Rows) and machine.outcome is not None:
                was_whole, number, found = rows._whole, machine.spec.round, rows._fresh()
                if len(found.rows) or not was_whole:
                    late.append((number, found))
                if number <= self.spec.round - BEHIND:  # forgotten when this round ends
                    given_up += [(number, int(block)) for block in np.flatnonzero(~found.whole)]
        self._earlier = ()
        new = self._fresh()
        return Gathered(new.rows, new.factor, new.block, new.whole, new.none, tuple(late), tuple(given_up))

    def _fresh(self) -> Gathered:
        """The rows that came since the last call, in the order of blocks."""
        n = len(self.spec.owners)
        whole, none = np.ones(n, np.bool_), np.ones(n, np.bool_)
        rows, factor, block = [_NO_ROWS[:0]], [np.zeros(0, np.float32)], [np.zeros(0, np.int64)]
        for (peer, j), message in sorted(self._gathered.items(), key=lambda entry: entry[0][::-1]):
            which = message.handed()
            whole[j] &= message.incoming.left == 0
            if peer == self.spec.owners[j]:  # another that takes itself for the owner decides nothing here
                none[j] = not message.came.any()
            rows.append(message.rows[which])
            factor.append(message.weight[which])
            block.append(np.full(int(which.sum()), j, np.int64))
        whole &= ~none
        self._whole = bool(whole.all())
        return Gathered(np.concatenate(rows), np.concatenate(factor), np.concatenate(block), whole, none)

    def scattered_of(self, peer: PeerId, block: int) -> Incoming | None:
        """See ``stages.Content``."""
        message = self._scattered.get((peer, block))
        return None if message is None else message.incoming


def _make(setting: Setting) -> Round:
    spec = Spec(
        me=setting.me,
        channel=setting.channel,
        round=setting.round,
        layout=layout_of(setting.n_chunks, setting.n),
        owners=rotating_owners(setting.seed, setting.round, setting.n, *setting.owning, setting.auxiliary),
        members=frozenset(range(setting.n)),
        codec=setting.codec,
        repair_s=setting.repair_s,
        growth=setting.growth,
        patience=setting.patience,
        reordering=setting.reordering,
        auxiliary=setting.auxiliary,
    )
    return Stages(spec, Rows(spec, setting.earlier), Repairer(spec), _REPAIR_AFTER)


gather = at_once("gather", _make, patience=_PATIENCE, gathers=True)
"""Rows through owners, with repair while the deadline allows."""
