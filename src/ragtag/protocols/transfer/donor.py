"""What a newcomer knows of one donor: its state, and how fast its chunks come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from ragtag.core.deadline import Deadline
from ragtag.protocols.transfer.types import OUTSTANDING_MAX, Offer

PATIENCE = 4.0
"""A donor is given up when a chunk takes so many times as long as it may."""
SHARE_OF_TIME = 1.0 / 64
"""A donor is given up no sooner than after this share of all the time, since it must be found again."""


class DonorState(Enum):
    """A donor's state, as a newcomer sees it."""

    AWAY = auto()  # tried again later
    CONNECTING = auto()
    TOLD = auto()  # has said how far it is
    ASKED = auto()  # asked for a snapshot
    READY = auto()  # has a snapshot that is not used, or not yet
    GIVING = auto()
    OUT = auto()  # given up for good


PENDING = (DonorState.CONNECTING, DonorState.TOLD, DonorState.ASKED)


@dataclass(slots=True)
class Donor:
    """One donor.

    share_s: ``SHARE_OF_TIME`` of the time for everything.
    since_s: when its state changed; ``AWAY``: when it is tried again.
    answer_s: the time from connecting to its first answer.
    round, round_s: the last round that it has finished, and how long one takes.
    outstanding: the chunks that it is asked for, and when.
    front_s: since when the chunk that comes next is on its way.
    pace: how long its chunks take.
    tries: how often it was lost since its last chunk.
    given: bytes that came from it.
    why: why it was lost.
    """

    name: str
    share_s: float
    state: DonorState = DonorState.AWAY
    since_s: float = 0.0
    answer_s: float = 0.0
    round: int = -1
    round_s: float = 0.0
    offer: Offer | None = None
    outstanding: dict[int, float] = field(default_factory=dict)
    front_s: float = 0.0
    pace: Deadline | None = None
    tries: int = 0
    given: int = 0
    why: str = ""

    @property
    def typical_s(self) -> float | None:
        """How long one chunk takes; ``None``: none has come yet."""
        return None if self.pace is None else self.pace.typical_s()

    @property
    def room(self) -> int:
        """How many more chunks it may be asked for: enough that it is never idle during a round trip."""
        typical_s = self.typical_s
        if self.state is not DonorState.GIVING:
            return 0
        window = 2 if not typical_s else 1 + -(-self.answer_s // typical_s)
        return int(min(OUTSTANDING_MAX, max(2, window))) - len(self.outstanding)

    def to(self, now_s: float, stand: DonorState) -> None:
        """Change its state."""
        self.state, self.since_s = stand, now_s

    def asked(self, now_s: float, index: int) -> None:
        """It is asked for a chunk."""
        if not self.outstanding:
            self.front_s = now_s
        self.outstanding[index] = now_s

    def came(self, now_s: float, index: int) -> bool:
        """A chunk came; ``False``: it had not been asked for."""
        if self.outstanding.pop(index, None) is None:
            return False
        took_s = max(0.0, now_s - self.front_s)
        if self.pace is None:
            self.pace = Deadline(max(took_s, 1e-9))
        self.pace.completed(took_s)
        self.front_s, self.tries = now_s, 0
        return True

    def overdue_s(self, others_s: float) -> float:
        """When its next chunk is overdue: others may then be asked for it. others_s: see ``_allowed_s``."""
        return self.front_s + self._allowed_s(others_s)

    def stalled_s(self, others_s: float) -> float:
        """When it is given up."""
        least_s = max(self.share_s, PATIENCE * self.answer_s)
        return self.front_s + max(least_s, PATIENCE * self._allowed_s(others_s))

    def _allowed_s(self, others_s: float) -> float:
        """How long one chunk may take. others_s: how long the slowest other donor takes; 0: unknown."""
        if self.pace is not None:
            return self.pace.budget_s()
        return max(self.answer_s, PATIENCE * others_s if others_s > 0 else 8 * self.share_s)

    def remaining_s(self, now_s: float, index: int, others_s: float) -> float:
        """How long until it will have sent a chunk that it was asked for; infinite: unknown, or overdue."""
        if now_s >= self.overdue_s(others_s):
            return float("inf")
        typical_s = self.typical_s
        if typical_s is None:
            return float("inf")
        place = list(self.outstanding).index(index) + 1
        return max(0.0, place * typical_s - (now_s - self.front_s))

    def pause_s(self) -> float:
        """How long to wait before it is tried again: twice as long each time."""
        first_s = PATIENCE * self.answer_s if self.answer_s > 0 else self.share_s
        return float(first_s * 2.0 ** min(self.tries, 32))
