"""How a vector is cut into blocks, and which peer owns each block."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise

from ragtag.core import seed as random
from ragtag.core.types import PeerId

NOBODY: frozenset[PeerId] = frozenset()
UNITS_MAX = 61_440
"""A vector is cut by shares at so many places at most: as many names of blocks are free (``rounds.base``)."""


class Layout:
    """``n_chunks`` chunks in ``n_blocks`` consecutive blocks.

    Without shares their sizes differ by at most one chunk. The cut depends only on the size of the crew,
    never on which peers live. So peers that disagree about a death still mean the same values by a block's
    number.

    With shares they differ as these do, and a block is named by where it begins. Its messages say how many
    chunks it has. So peers that cut by other shares take no block for another one: a name and a size mean
    the same values to all of them.

    shares: of each block, in whole numbers that are above 0 together; empty: all are alike.
    starts: the first chunk of each block.
    sizes: how many chunks each block has; of a share of 0 none.
    spans: the chunks of each block, as a slice.
    names: what a block is called in keys.
    """

    __slots__ = ("_numbers", "n_blocks", "n_chunks", "names", "sizes", "spans", "starts")

    def __init__(self, n_chunks: int, n_blocks: int, shares: tuple[int, ...] = ()) -> None:
        self.n_chunks, self.n_blocks = n_chunks, n_blocks
        self.names: tuple[int, ...] = tuple(range(n_blocks))
        self._numbers: dict[int, int] | None = None
        if shares:
            units, total = min(n_chunks, UNITS_MAX), sum(shares)
            edges = [part * units // total for part in accumulate(shares, initial=0)]
            cuts = [unit * n_chunks // units for unit in edges]
            self.names, self.starts = tuple(edges[:-1]), tuple(cuts[:-1])
            self.sizes = tuple(b - a for a, b in pairwise(cuts))
            self._numbers = {name: j for j, name in enumerate(self.names) if self.sizes[j]}
        else:
            size, rest = divmod(n_chunks, n_blocks)
            self.starts = tuple(block * size + min(block, rest) for block in range(n_blocks))
            self.sizes = tuple(size + (block < rest) for block in range(n_blocks))
        self.spans = tuple(slice(a, a + k) for a, k in zip(self.starts, self.sizes, strict=True))

    def number(self, name: int) -> int:
        """The block of a name. Below 0 or too high: there is none of this name."""
        return name if self._numbers is None else self._numbers.get(name, -1)


@lru_cache(maxsize=256)
def layout_of(n_chunks: int, n_blocks: int, shares: tuple[int, ...] = ()) -> Layout:
    """The layout of a vector, made once."""
    return Layout(n_chunks, n_blocks, shares)


@lru_cache(maxsize=256)
def rotating_owners(
    seed: int,
    round_: int,
    n: int,
    live: frozenset[PeerId],
    present: frozenset[PeerId] | None = None,
    auxiliary: frozenset[PeerId] = NOBODY,
) -> tuple[PeerId, ...]:
    """Each block's owner in one round: a permutation drawn afresh every round, the same on every peer.

    A fixed owner is over-weighted in the mean by about (1+(n-1)q)(1-p^n)/(nq), q = 1-p, since its own
    copy never gets lost; rotation takes that bias away (RPS, ICML 2019, algorithm 1). A block whose
    owner is not alive goes to the next live peer of the permutation, so views that differ in one peer
    differ in one block.

    An auxiliary is told which peers have left, and not which of the others the peers that give hold to be
    silent or slow: it hears nothing of other auxiliaries. So what it owns depends on the former alone.

    live: the peers that may own blocks.
    present: those that have not left, as membership tells; ``None``: ``live``.
    auxiliary: those that only own blocks. What is owned by a peer that is present and not live goes to none
        of them.
    """
    return _alive(order_of(seed, round_, n), live, present, auxiliary, _next_of)


def fixed_owners(
    n: int,
    live: frozenset[PeerId],
    present: frozenset[PeerId] | None = None,
    auxiliary: frozenset[PeerId] = NOBODY,
) -> tuple[PeerId, ...]:
    """Block ``j`` is peer ``j``'s, as in a direct all-reduce; else as in ``rotating_owners``, but that each
    block has an order of heirs drawn for it alone. By one order for all, the peer after a row of dead ones
    would own all of their blocks for good, and the next death would take all of these along.
    """
    return _alive(tuple(range(n)), live, present, auxiliary, _heirs)


def order_of(seed: int, round_: int, n: int) -> tuple[PeerId, ...]:
    """The permutation of ``rotating_owners``."""
    return random.permutation(random.stream_key(seed, "owners", round_), n)


@lru_cache(maxsize=256)
def shared_owners(
    order: tuple[PeerId, ...],
    shares: tuple[int, ...],
    live: frozenset[PeerId],
    present: frozenset[PeerId],
    auxiliary: frozenset[PeerId] = NOBODY,
) -> tuple[PeerId, ...]:
    """Each block's owner where shares are unlike: ``order``, as in ``rotating_owners``.

    A block goes to no peer whose share is 0 (it may be one to which nobody can connect) while another is
    there. shares: by peer, as many as ``order`` has places.
    """
    able = frozenset(peer for peer, share in enumerate(shares) if share)
    places = frozenset(order)
    # a peer beyond the shares' places came after they were solved
    order += tuple(sorted((live | present) - places))
    owners = _alive(order, live & able or live, present & able or present, auxiliary, _next_of)
    return owners[: len(shares)]


def _alive(
    order: tuple[PeerId, ...],
    live: frozenset[PeerId],
    present: frozenset[PeerId] | None,
    auxiliary: frozenset[PeerId],
    owners_of: Callable[[tuple[PeerId, ...], frozenset[PeerId]], tuple[PeerId, ...]],
) -> tuple[PeerId, ...]:
    if len(live) == len(order):
        return order
    giving = live - auxiliary
    if not auxiliary or present is None or not giving:
        return owners_of(order, live)
    owners = owners_of(order, present)
    return tuple(
        owner if owner in live else other
        for owner, other in zip(owners, owners_of(order, giving), strict=True)
    )


def _heirs(order: tuple[PeerId, ...], live: frozenset[PeerId]) -> tuple[PeerId, ...]:
    """Of each place the peer that has it, or the first among ``live`` of those drawn for this place."""
    n = len(order)
    return tuple(
        peer if peer in live else next(heir for heir in _drawn_for(j, n) if heir in live)
        for j, peer in enumerate(order)
    )


@lru_cache(maxsize=4096)
def _drawn_for(block: int, n: int) -> tuple[PeerId, ...]:
    return random.permutation(random.stream_key(0, "heirs of a block", block), n)


def _next_of(order: tuple[PeerId, ...], live: frozenset[PeerId]) -> tuple[PeerId, ...]:
    """Of each place the peer that has it, or the next one that is among ``live``."""
    n = len(order)
    return tuple(next(order[(j + k) % n] for k in range(n) if order[(j + k) % n] in live) for j in range(n))
