"""A channel on one peer: its rounds under way, and how long they may take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from ragtag.core.deadline import Deadline
from ragtag.core.types import Floats, Outcome, PeerId
from ragtag.protocols.channel.averager import Channel
from ragtag.protocols.rounds.base import Round
from ragtag.protocols.rounds.hail import Patience

HEADROOM = 1.5
"""A stage may take this many times what nine in ten recent ones took."""
LEAP = 2.0
"""So many times what is typical is learned from one round. A patient method's deadline is twelve times that:
two rounds that took all of it would teach one of minutes."""
AHEAD = 2
"""Rounds that are taken in before this peer has begun them."""
BEHIND = 2
"""Rounds that are kept after they are done, to answer requests for repair."""
JUMP_MAX = 1 << 24
"""Rounds that a peer can have missed; what is further ahead is not believed."""


@dataclass(slots=True)
class Lane:
    """A channel's state on one peer.

    done: the last round that is over; active: the one under way; highest: the newest that was heard of.
    passed: the peers that were seen to be ahead of the round under way; behind: whether this peer knows
    itself to be. aside: the peers that its newest round does not wait for, by what its own peer said.
    taking: to so many rounds to come this peer adds weight 0, one for each fragment. tardy: how many rounds
    in a row were over for others when this peer began them.
    """

    channel: Channel
    ready_s: float = 0.0
    done: int = -1
    highest: int = -1
    active: int | None = None
    passed: set[PeerId] = field(default_factory=set)
    behind: bool = False
    withheld: frozenset[PeerId] = frozenset()
    aside: frozenset[PeerId] = frozenset()
    taking: int = 0
    tardy: int = 0
    rounds: dict[int, Round] = field(default_factory=dict)
    spare: list[Floats] = field(default_factory=list)
    patience: Patience = field(default_factory=Patience)
    scatter: Deadline = field(init=False)
    gather: Deadline = field(init=False)
    _budgets_s: tuple[float, float] = (0.0, 0.0)
    _begun_s: dict[int, float] = field(default_factory=dict)
    _late_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._restart()

    def probed(self, channel: Channel, now_s: float) -> None:
        """The first round may take as long as ``channel`` says; peers begin from now on."""
        self.channel, self.ready_s = channel, now_s
        self._restart()

    def _restart(self) -> None:
        headroom = HEADROOM * self.channel.averager.patience
        self.scatter = Deadline(self.channel.probe_s, headroom=headroom)
        self.gather = Deadline(self.channel.probe_s, headroom=headroom)

    # -- Rounds

    def next(self, due: int = -1) -> int:
        """The round that begins now: the newest that was heard of, or one after the last, and none before
        the one that is ``due``.
        """
        return max(self.done + 1, self.highest, due)

    def now(self) -> int:
        """The round under way, or that begins next: of those before this peer sends nothing new."""
        return self.next() if self.active is None else self.active

    def machine(self, number: int, make: Callable[[], Round]) -> Round:
        """The machine of a round."""
        machine = self.rounds.get(number)
        if machine is None:
            machine = self.rounds[number] = make()
        return machine

    def admits(self, number: int) -> bool:
        """Whether a message of this round is taken: none that is made up, and few of rounds to come."""
        if number > max(self.done, 0) + JUMP_MAX:
            return False  # made up, or of a crew that this peer could not catch up with
        self.highest = max(self.highest, number)
        if number <= self.done or number in self.rounds or number == self.active:
            return True
        ahead = sorted(r for r in self.rounds if r > self.done and r != self.active)
        if len(ahead) >= AHEAD:  # a peer that fell behind keeps what is newest
            if number < ahead[0]:
                return False
            del self.rounds[ahead[0]]
        return True

    def grown(self, number: int, growth: int) -> bool:
        """Whether a round has a machine that was made when the crew was known to be smaller."""
        machine = self.rounds.get(number)
        return machine is not None and machine.spec.growth < growth

    def recut(self, growth: int) -> None:
        """Rounds to come, of which something has been taken in already, were begun by another cut."""
        ahead = [r for r in self.rounds if r > self.done and r != self.active]
        for number in [r for r in ahead if self.rounds[r].spec.growth > growth]:
            del self.rounds[number]

    def end(self, outcome: Outcome) -> None:
        """The round under way is over."""
        self.done, self.active = outcome.round, None
        self.withheld = self.rounds[outcome.round].withheld()
        self.behind = bool(self.passed)
        self.passed.clear()
        for number in [r for r in self.rounds if r <= outcome.round - BEHIND]:
            old = self.rounds.pop(number)
            self._begun_s.pop(number, None)
            if self.channel.reuse and old.outcome is not None and not self.spare:
                self.spare.append(old.outcome.mean)

    # -- Time

    def budgets_s(self, rtts_s: Iterable[float]) -> tuple[float, float]:
        """How long the next round may scatter, and gather.

        A deadline below a round trip, as it is measured now, would cut off what has been sent.
        """
        ranked = sorted(rtts_s)
        floor_s = max(self.channel.floor_s, ranked[len(ranked) // 2] if ranked else 0.0)
        self.scatter.floor_s = self.gather.floor_s = floor_s
        return self.scatter.budget_s(), self.gather.budget_s()

    def begin(
        self, number: int, now_s: float, deadline_s: float | None, rtts_s: Iterable[float]
    ) -> tuple[float, float]:
        """A round begins: how long it may scatter, and gather. deadline_s bounds both together."""
        self._learn_late()
        scatter_s, gather_s = self.budgets_s(rtts_s)
        if self.done < 0:  # no history: others may still compute what this peer took this long to compute
            scatter_s += self.channel.averager.patience * (now_s - self.ready_s)
        if deadline_s is not None:
            scatter_s = min(scatter_s, deadline_s / 2)
            gather_s = min(gather_s, deadline_s - scatter_s)
        self.active = number
        self._begun_s[number] = now_s
        self._budgets_s = scatter_s, gather_s
        return self._budgets_s

    def learn(self, outcome: Outcome, slow: Collection[PeerId]) -> None:
        """How long a round took teaches how long the next may take.

        slow: the peers that more time would have helped, if they were missed.
        """
        if not outcome.waited_for:
            return
        if outcome.expired:
            if any(peer in slow for peer in outcome.missed):  # silence alone lengthens nothing
                self.scatter.missed()
                self.gather.missed()
            return
        scatter_s, gather_s = self._budgets_s
        # a stage that outlasts its deadline, and yet did not run into it, was slept through
        for stage, took_s, most_s in (
            (self.scatter, outcome.scatter_s, scatter_s),
            (self.gather, outcome.gather_s, scatter_s + gather_s),
        ):
            if took_s > 0:  # else there was nothing to wait for, which says nothing about waiting
                stage.completed(min(took_s, most_s, LEAP * stage.typical_s()))

    def late(self, now_s: float, number: int) -> None:
        """A message came after its round was done: remember by how much, once a round."""
        begun_s = self._begun_s.get(number)
        if begun_s is not None and number == self.done:
            self._late_s[number] = now_s - begun_s

    def _learn_late(self) -> None:
        for late_s in self._late_s.values():
            self.scatter.late(late_s)
        self._late_s.clear()
