"""Which round numbers are believed to be the crew's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from ragtag.core.types import PeerId

CATCH_UP = 8
"""A peer that skipped more rounds than this gives weight 0 to its first average (of each fragment)."""
JUMP_MAX = 1 << 24
"""How many rounds a peer can have missed. A round further ahead is not believed."""


class FarRounds:
    """Which rounds are believed to be the crew's, though one member may tell any number.

    What two others tell is believed, or the only other; of one alone a number that is no more than
    ``CATCH_UP`` beyond that, and beyond the last round here: a peer that skips no more gives its values.

    A peer that was alone for a while is honest and far ahead, and only the others can come to it. So one is
    believed further, too: at once, the second time when it has told of rounds far ahead, and of none nearer,
    in two rounds here, then in four, and so on. So in n rounds one that lies moves each of the others at most
    log2(n) + 1 times, and uses up no numbers. A peer that has had no round yet begins where it is told.
    """

    def __init__(self) -> None:
        self._told: dict[PeerId, int] = {}
        self._alone: dict[PeerId, tuple[int, int]] = {}
        """In how many rounds here a peer told of far ones, and of no nearer one since; the last of them."""
        self._patience: dict[PeerId, int] = {}
        self._vouched = 0

    def believes(
        self, done: int, number: int, peers: Iterable[PeerId], others: Callable[[], Collection[PeerId]]
    ) -> bool:
        """Whether a number is believed that ``peers`` tell.

        done: the last round here.
        others: the peers that would tell of a later one; asked for where the number is far ahead.
        """
        if number <= max(done, self._vouched) + CATCH_UP:
            for peer in peers if self._alone else ():
                self._alone.pop(peer, None)
            return True
        if number > max(done, 0) + JUMP_MAX:
            return False
        if done < 0:
            return True
        peers, there = tuple(peers), others()
        for peer in peers:
            self._told[peer] = max(number, self._told.get(peer, 0))
        if len(there) < 2:
            return True
        told = sorted(self._told[peer] for peer in there if peer in self._told)
        if len(told) > 1:  # two tell the second highest, or more
            self._vouched = max(self._vouched, told[-2])
        if sum(self._persists(done, peer) for peer in peers):
            self._vouched = max(self._vouched, number)
        return number <= self._vouched + CATCH_UP

    def _persists(self, done: int, peer: PeerId) -> bool:
        times, last = self._alone.get(peer, (0, done - 1))
        self._alone[peer] = times + (done != last), done
        patience = self._patience.get(peer, 1)
        if self._alone[peer][0] < patience:
            return False
        del self._alone[peer]
        self._patience[peer] = 2 * patience
        return True
