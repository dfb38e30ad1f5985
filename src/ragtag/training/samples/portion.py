"""What one peer draws of a loader whose samples are one pool for the crew: behind ``Split``."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from ragtag.core import seed as random
from ragtag.core.errors import HasLeft
from ragtag.core.types import PEERS_MAX
from ragtag.protocols.crew.district import district_of, districts
from ragtag.training.samples.deal import Indices, cut, every_nth, shuffled
from ragtag.training.samples.drawing import Drawer
from ragtag.training.samples.epochs import Epochs
from ragtag.training.samples.ledger import EpochReport
from ragtag.training.samples.loader import (
    Order,
    drawn_alike,
    fitting,
    indices_of,
    plain,
    rebuilt,
    require_loader,
    samples_in,
    size_of,
)
from ragtag.training.samples.sizes import BatchSizes, Sizer
from ragtag.training.transport import Peers

_log = logging.getLogger("ragtag")


class Portion:
    """What this peer draws of a loader, epoch by epoch; iterating begins the next one.

    loader: its batch size, collation, workers, pinning and drop_last stay as they are, and whether it
        shuffles. A plain ``BatchSampler`` is what a loader makes itself.
    me: this peer.
    peers: which are alive, and the notice board on which they tell what they draw.
    seed: the order follows from it and from the epoch, the same on every peer.
    shards: the indices of each peer, where they are not one pool. A peer that comes when the crew has grown
        gives the same list, and draws of dead peers' shards.
    ordinal: which split of this process it is; peers make theirs in the same order.
    on_epoch: is told what each epoch came to, once all are done with it: usually in the next one.
    sizes: batches follow each peer's speed (``training.samples.sizes``).
    busy_s: how long this peer has computed so far, which its speed follows from.
    founded: how many peers the crew had when it began, on all peers the same. Of more than 64 each district
        (``protocols.crew.district``) has a pool of its own, a part of each epoch's order as large as its
        share of the peers, or the shards of its peers. What an epoch came to is then told of that part.
    epochs: where the script counts them (see ``training.samples.epochs``).
    late: the crew has begun before this peer.

    The order is cut into blocks, of a batch each (several, in an epoch of more than 16,384). Every peer
    begins at its own part of the order; it claims blocks a little ahead of use (about a second of its work).
    What it had claimed and not yet reported as used when it died is missed, and counted as such (``report``).
    With workers, "used" means drawn.

    Raises ValueError for a loader that is split already, and for shards that do not fit it; TypeError for
    what is no DataLoader.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        me: int,
        peers: Peers,
        *,
        seed: int = 0,
        shards: Sequence[Sequence[int] | Indices] | None = None,
        ordinal: int = 0,
        on_epoch: Callable[[EpochReport], None] | None = None,
        sizes: BatchSizes | None = None,
        busy_s: Callable[[], float] | None = None,
        founded: int = 1,
        epochs: Epochs | None = None,
        late: bool = False,
    ) -> None:
        if not 0 <= me < peers.n:
            raise ValueError(f"peer {me} of {peers.n}: a peer's number lies between 0 and {peers.n - 1}")
        require_loader(loader)
        if sizes is not None and not isinstance(sizes, BatchSizes):
            raise TypeError(f"sizes is {sizes!r}; write sizes=ragtag.BatchSizes()")
        self._closed, self._late = False, late
        self.epoch = 0
        """The epoch that begins next."""
        self.samples = 0
        """How many samples this peer has been given, in all epochs."""
        self.report: EpochReport | None = None
        """What the last epoch came to that all are done with."""
        self._me, self._peers, self._seed, self._on_epoch = me, peers, seed, on_epoch
        self.ordinal, self._founded, self._epochs = ordinal, founded, epochs
        self._pass: weakref.ref[_Counted] | None = None
        self._restored: Mapping[str, Any] | None = None
        self._order = Order(self._begin)
        self.take(loader)
        self._shards: list[Indices] | None = None
        if shards is not None:
            if self._all is None:
                raise ValueError("shards take the sampler's place: give a loader without one of its own")
            self._shards = fitting(shards, peers.n, size_of(loader))
        self._sizer: Sizer | None = None
        self._handed: deque[int] = deque()
        if sizes is not None:
            if self._all is None or self._source.batch_size is None:
                raise ValueError("sizes need a loader that makes batches, with no sampler of its own")
            self._sizer = Sizer(peers, sizes, self._source.batch_size, busy_s or (lambda: 0.0), ordinal)
        if self._all is not None:
            self._deal(self._all, ordinal)

    def take(self, loader: DataLoader[Any]) -> None:
        """Draw from this loader, from the next epoch on: the first one, or one of the same form in its place.

        Raises ValueError for a loader that is split already.
        """
        self._source = self._loader = loader = plain(loader)
        if isinstance(loader.sampler, DistributedSampler):
            raise ValueError("the loader is split already, by its DistributedSampler: give a plain one")
        stream = isinstance(loader.dataset, IterableDataset)
        self._all = None if stream else indices_of(loader)
        self._shuffle = not isinstance(loader.sampler, SequentialSampler)
        if not stream:
            self._loader = rebuilt(loader, self._order)

    @property
    def _seats(self) -> slice:
        """The founders' seats whose part this peer draws: its district's, or an earlier's for a later one."""
        n, at = districts(self._founded), district_of(self._me)
        return slice(PEERS_MAX * (at % n), PEERS_MAX * (at % n + 1)) if n > 1 else slice(None)

    def _part(self, whole: Indices) -> Indices:
        """What of an epoch's order this peer's district draws."""
        start, stop, _ = self._seats.indices(self._founded)
        return whole[len(whole) * start // self._founded : len(whole) * stop // self._founded]

    def _deal(self, everything: Indices, ordinal: int) -> None:
        """Cut the order into blocks."""
        first, size = PEERS_MAX * district_of(self._me), self._source.batch_size
        n = min(PEERS_MAX, self._peers.n - first)
        if self._sizer is not None:
            size = self._sizer.grain
        name, seats = f"{ordinal}/{self._seed}", self._seats
        if seats.start is not None:
            name += f"/{seats.start} of {self._founded}"
        if district_of(self._me) >= districts(self._founded):
            _log.warning(
                "peer %d: the crew has grown beyond the seats whose pools it began with; what this peer and "
                "those beside it draw, others draw, too",
                self._me,
            )
        if self._shards is not None:
            lengths = [len(shard) for shard in self._shards[seats]]
        else:
            lengths = [len(self._part(everything))]
        drop = size is not None and self._source.drop_last
        deck, self._starts = cut(lengths, n, size or 1, drop, self._shards is not None, name=name)
        self._deck = replace(deck, arcs=((0, 0),) * first + deck.arcs)
        self._drawer = Drawer(self._me, self._peers, self._deck, ordinal, self._take_report, self._late)
        self._order_of = lru_cache(maxsize=2)(self._draw_order)
        self._restore()

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch.

        Raises HasLeft once it is closed: the crew was left; RuntimeError for a second time in one epoch of
        ``crew.epochs``.
        """
        self.require_in()
        if self._epochs is not None:
            self.epoch = self._epochs.begins(self, self.epoch)
        self._order.epoch, self.epoch = self.epoch, self.epoch + 1
        self._handed.clear()
        if isinstance(self._source.dataset, IterableDataset):
            begun = _Counted(self._every_nth(self._order.epoch), self)
        else:
            begun = _Counted(iter(self._loader), self)
        self._pass = weakref.ref(begun)
        return begun

    def require_in(self) -> None:
        """Raise HasLeft once it is closed."""
        if self._closed:
            raise HasLeft("drawing from a split")

    def __len__(self) -> int:
        """About how many batches an epoch has on this peer, if all are as fast and nobody dies or returns."""
        living = self._live()
        if self._all is None:
            return -(-len(self._source) // len(living))
        living = frozenset(peer for peer in living if district_of(peer) == district_of(self._me))
        size = self._source.batch_size or 1
        if self._sizer is not None and self._shards is None:
            return -(-sum(self._deck.sizes) // (size * len(living)))
        batches = [sum(-(-samples // size) for samples in self._deck.sizes[a:b]) for a, b in self._deck.arcs]
        dead = sum(count for peer, count in enumerate(batches) if peer not in living)
        if self._shards is None:
            return -(-sum(batches) // len(living))
        mine = batches[self._me] if self._me < len(batches) else 0
        return mine + -(-dead // len(living))

    @property
    def under_way(self) -> bool:
        """Whether an epoch is being gone through: begun, not at its end, not broken off."""
        begun = None if self._pass is None else self._pass()
        return begun is not None and not begun.over

    def state_dict(self) -> dict[str, Any]:
        """The epoch under way, or next; which of its blocks are used, by whomever, as far as is known here.

        used: uint8, 8 blocks each (``numpy.packbits``); identity: of the order and the blocks. What a peer
        has drawn and not told yet is not known to others, and is drawn again after a restart: about a second
        of its work.
        """
        epoch = self.epoch - self.under_way
        if self._all is None:
            return {"epoch": epoch, "identity": 0, "used": torch.zeros(0, dtype=torch.uint8, device="cpu")}
        used = torch.from_numpy(np.packbits(self._drawer.used(epoch)))
        return {"epoch": epoch, "identity": self._deck.identity, "used": used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that epoch, and with what of it is not used; where the blocks are others, with all."""
        self._restored = state
        if self._pass is None:
            self.epoch = int(state["epoch"])
        self._restore()

    def _restore(self) -> None:
        state = self._restored
        if state is None or self._all is None:
            return
        blocks = len(self._deck.sizes)
        if state["identity"] != self._deck.identity or len(state["used"]) != -(-blocks // 8):
            _log.warning("epoch %d begins anew: the samples, batch size or seed are others", state["epoch"])
            return
        used = np.unpackbits(np.asarray(state["used"]), count=blocks).astype(np.bool_)
        self._drawer.restore(int(state["epoch"]), used)

    def moved(self, me: int) -> None:
        """This peer has another number: what it draws under the old one ends, the next epoch begins anew."""
        self._me, self._late = me, True
        if self._all is not None:
            self._drawer.stop()
            self._deal(self._all, self.ordinal)

    def give_back(self) -> None:
        """Others may use what is claimed here and was not drawn."""
        if self._all is not None:
            self._drawer.give_back()

    def close(self, deadline_s: float = 1.0) -> None:
        """Nothing more will be drawn: give back what is claimed, and report what epochs came to.

        deadline_s: how long to wait for others to say that they are done with the last one.
        """
        self._closed = True
        if self._all is not None:
            self._drawer.close(deadline_s)

    @property
    def dataset(self) -> Any:
        """The loader's."""
        return self._source.dataset

    @property
    def batch_size(self) -> int | None:
        """The loader's."""
        return self._source.batch_size

    def _live(self) -> frozenset[int]:
        return self._peers.live | {self._me}

    def _take_report(self, report: EpochReport) -> None:
        self.report = report
        level = logging.WARNING if report.missed or report.twice else logging.INFO
        _log.log(
            level,
            "epoch %d: %s samples, %s of them drawn here, %s missed, %s used twice",
            report.epoch,
            *(f"{n:,}" for n in (report.samples, report.used_by_me, report.missed, report.twice)),
        )
        if self._on_epoch is not None:
            self._on_epoch(report)

    def _draw_order(self, epoch: int) -> Indices:
        """All indices of one epoch, in its order."""
        if self._shards is None:
            assert self._all is not None
            order = shuffled(self._all, self._seed, "split", epoch) if self._shuffle else self._all
            return self._part(order)
        here = self._shards[self._seats]
        if not self._shuffle:
            return np.concatenate(here)
        first = self._seats.start or 0
        return np.concatenate(
            [shuffled(s, self._seed, "shard", epoch, first + i) for i, s in enumerate(here)]
        )

    def _begin(self, epoch: int) -> Iterator[Any]:
        """One epoch's batches of indices (single indices where the loader makes no batches)."""
        size = self._source.batch_size
        if self._all is None:
            yield from self._every_nth(epoch)
            return
        if self._sizer is not None:
            yield from self._sized(epoch, self._sizer)
            return
        for indices in self._blocks(epoch):
            if size is None:
                yield from indices
            else:
                yield from (indices[at : at + size] for at in range(0, len(indices), size))

    def _every_nth(self, epoch: int) -> Iterator[Any]:
        """This peer's of what all draw alike."""
        key = random.stream_key(self._seed, "sampler", self.ordinal, epoch)
        return every_nth(self._me, self._peers.n, self._live, drawn_alike(self._source, key))

    def _blocks(self, epoch: int) -> Iterator[list[int]]:
        """The indices of each block that this peer draws."""
        for of, block in self._drawer.draw(epoch):
            self._look_ahead()
            start = int(self._starts[block])
            yield self._order_of(of)[start : start + self._deck.sizes[block]].tolist()
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Where the pool is ahead of the epoch that was begun, so is this split, and the crew."""
        ahead = self._drawer.epoch + 1 - self.epoch
        if ahead > 0:
            self.epoch += ahead
            if self._epochs is not None:
                self._epochs.ahead(ahead)

    def _sized(self, epoch: int, sizer: Sizer) -> Iterator[list[int]]:
        """Batches of whole blocks (of parts of them, where an epoch has so many that blocks are large)."""
        batch: list[int] = []
        size = self._next_size(sizer)
        for indices in self._blocks(epoch):
            batch += indices
            while len(batch) >= size:
                self._handed.append(size)
                yield batch[:size]
                batch, size = batch[size:], self._next_size(sizer)
        if batch:
            self._handed.append(len(batch))
            yield batch

    def _next_size(self, sizer: Sizer) -> int:
        size = sizer.size()
        self._drawer.draws_at_once(max(1, size // max(self._deck.sizes, default=1)))
        return size

    def handed(self, batch: Any) -> None:
        """A batch is handed out: its samples count."""
        samples = self._handed.popleft() if self._handed else samples_in(batch, self._source)
        self.samples += samples
        if self._sizer is not None:
            self._sizer.handed(samples)


class _Counted:
    """Batches, whose samples are counted as they are handed out."""

    def __init__(self, batches: Iterator[Any], of: Portion) -> None:
        self._batches, self._of, self.over = batches, of, False

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        self._of.require_in()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.over = True
            raise
        self._of.handed(batch)
        return batch
