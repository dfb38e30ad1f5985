"""How a vector is cut into blocks, and which peer owns each block."""

from __future__ import annotations

from functools import lru_cache

from ragtag.core import seed as random
from ragtag.core.types import PeerId

NOBODY: frozenset[PeerId] = frozenset()


class Layout:
    """``n_chunks`` chunks in ``n_blocks`` consecutive blocks whose sizes differ by at most one chunk.

    The cut depends only on the size of the crew, never on which peers live. So peers that disagree about a
    death still mean the same values by a block's number.

    starts: the first chunk of each block.
    sizes: how many chunks each block has.
    spans: the chunks of each block, as a slice.
    """

    __slots__ = ("n_blocks", "n_chunks", "sizes", "spans", "starts")

    def __init__(self, n_chunks: int, n_blocks: int) -> None:
        size, rest = divmod(n_chunks, n_blocks)
        self.n_chunks, self.n_blocks = n_chunks, n_blocks
        self.starts = tuple(block * size + min(block, rest) for block in range(n_blocks))
        self.sizes = tuple(size + (block < rest) for block in range(n_blocks))
        self.spans = tuple(slice(a, a + k) for a, k in zip(self.starts, self.sizes, strict=True))


@lru_cache(maxsize=256)
def layout_of(n_chunks: int, n_blocks: int) -> Layout:
    """The layout of a vector, made once."""
    return Layout(n_chunks, n_blocks)


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
    order = random.permutation(random.stream_key(seed, "owners", round_), n)
    return _alive(order, live, present, auxiliary)


def fixed_owners(
    n: int,
    live: frozenset[PeerId],
    present: frozenset[PeerId] | None = None,
    auxiliary: frozenset[PeerId] = NOBODY,
) -> tuple[PeerId, ...]:
    """Block ``j`` is peer ``j``'s, as in a direct all-reduce; else as in ``rotating_owners``."""
    return _alive(tuple(range(n)), live, present, auxiliary)


def _alive(
    order: tuple[PeerId, ...],
    live: frozenset[PeerId],
    present: frozenset[PeerId] | None,
    auxiliary: frozenset[PeerId],
) -> tuple[PeerId, ...]:
    if len(live) == len(order):
        return order
    giving = live - auxiliary
    if not auxiliary or present is None or not giving:
        return _next_of(order, live)
    owners = _next_of(order, present)
    return tuple(
        owner if owner in live else other
        for owner, other in zip(owners, _next_of(order, giving), strict=True)
    )


def _next_of(order: tuple[PeerId, ...], live: frozenset[PeerId]) -> tuple[PeerId, ...]:
    """Of each place the peer that has it, or the next one that is among ``live``."""
    n = len(order)
    return tuple(next(order[(j + k) % n] for k in range(n) if order[(j + k) % n] in live) for j in range(n))
