"""Which peers meet when a crew begins on Ray, and through which members later ones enter. Pure.

The peers that have come when the crew begins are a crew as ``ragtag run`` makes one: each knows the addresses
of all. One that comes after that (an actor that Ray has restarted, or had no room for at first) gets an
invitation to those that live.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ragtag.app.environment import Address, Place
from ragtag.app.invitation.token import ADDRESSES_MAX, Token, encode, new_key
from ragtag.core.types import SEATS_MAX, PeerId


@dataclass(frozen=True, slots=True)
class PeerAddresses:
    """A peer that has come: where it takes data, and where its membership listens."""

    data: Address
    member: Address


class Register:
    """A crew of ``n`` that is to begin, or has begun.

    key: 32 bytes; a new one unless given.

    Raises:
        ValueError: ``n`` is out of range.
    """

    def __init__(self, n: int, crew: str, seed: int = 0, key: bytes | None = None) -> None:
        if not 1 <= n <= SEATS_MAX:
            raise ValueError(f"{n} peers: a crew has 1 to {SEATS_MAX}")
        self.n, self.crew, self.seed = n, crew, seed
        self._key = key or new_key()
        self._living: dict[int, PeerAddresses] = {}  # the one that was heard last comes last
        self._founders: dict[int, PeerAddresses] | None = None
        self._times: Counter[int] = Counter()

    @property
    def begun(self) -> bool:
        """Whether the crew has begun."""
        return self._founders is not None

    @property
    def complete(self) -> bool:
        """Whether all have come that are expected."""
        return len(self._living) >= self.n

    @property
    def living(self) -> frozenset[int]:
        """The peers that have come and not gone."""
        return frozenset(self._living)

    def come(self, number: int, arrival: PeerAddresses) -> None:
        """A peer has come; the one that had its number before is no more."""
        self._living.pop(number, None)
        self._living[number] = arrival
        self._times[number] += 1

    def heard(self, number: int) -> None:
        """A peer was heard just now."""
        if number in self._living:
            self._living[number] = self._living.pop(number)

    def gone(self, number: int) -> None:
        """A peer is no more."""
        self._living.pop(number, None)

    def begin(self) -> None:
        """The crew begins, with those that have come. A crew of one begins by its own invitation."""
        assert self._founders is None
        many = len(self._living) > 1
        self._founders = dict(sorted(self._living.items())) if many else {}

    def resume(self) -> None:
        """The crew had begun already, as it is now learned: peers that come are invited."""
        assert self._founders is None
        self._founders = {}

    def place(self, number: int) -> Place:
        """The place of a peer that has come, once the crew has begun."""
        assert self._founders is not None
        founders, mine = self._founders, self._living[number]
        if founders.get(number) is mine:
            rank: PeerId = list(founders).index(number)
            return Place(
                rank=rank,
                size=len(founders),
                crew=self.crew,
                seed=self.seed,
                peers=tuple(arrival.data for arrival in founders.values()),
                key=self._key,
                members=tuple(arrival.member for arrival in founders.values()),
            )
        return Place(
            rank=number,
            size=1,
            crew=self.crew,
            seed=self.seed,
            token=encode(self.invitation(number)),
            name=f"peer-{number}-{self._times[number]}",
        )

    def invitation(self, number: int | None = None) -> Token:
        """An invitation through those that live, the last heard first; for ``number``, through the others.

        A peer that is alone is invited by itself: it begins the crew anew.
        """
        others = [arrival.member for peer, arrival in self._living.items() if peer != number]
        addresses = others[::-1][:ADDRESSES_MAX]
        if not addresses and number is not None:
            addresses = [self._living[number].member]
        return Token(tuple(addresses), self.crew, self._key, begins=not others)
