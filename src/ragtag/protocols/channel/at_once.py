"""All rounds of a channel that all peers average at once.

It begins rounds, feeds them with what comes and ends them, and it finds the round for a peer that is ahead,
behind or new. What happens in one round is a machine of its own (``base.Round``), which the averager brings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from ragtag.core.types import (
    LARGER_CREWS,
    PEERS_MAX,
    Arrived,
    Assisted,
    Average,
    Begin,
    Bytes,
    Done,
    Effect,
    Event,
    Expired,
    Floats,
    Joined,
    Left,
    Noted,
    Offer,
    Outcome,
    PeerId,
    PeerSet,
    Run,
    Send,
    Visits,
)
from ragtag.core.wire import CHUNK_BYTES, DATAGRAM_BYTES
from ragtag.protocols.channel.averager import Averager, Opening, Setting
from ragtag.protocols.channel.budgets import HEADROOM, Budgets
from ragtag.protocols.channel.far_rounds import CATCH_UP, FarRounds
from ragtag.protocols.membership.pace import INITIAL_RTO_S
from ragtag.protocols.rounds.asking import ANSWER, ANSWERS, NEVER, QUESTION, QUESTIONS, here, question
from ragtag.protocols.rounds.base import (
    BLOCK_BITS,
    BY_SHARES,
    GATHER,
    NO_VALUES,
    SCATTER,
    Lesson,
    Patience,
    Reordering,
    Round,
    peers_in,
    require_rows,
)
from ragtag.protocols.rounds.layout import NOBODY

TARDY_MAX = 4
"""How many rounds in a row a peer may begin after others ended them; then it takes itself for behind."""
AHEAD = 2
"""How many rounds are received before this peer has begun them."""
BEHIND = 2
"""How many rounds are kept after they are done, to answer requests for repair. Each has memory for a mean, so
of an averager that repairs nothing the last one alone is kept, which its trainer may still read."""
RARE_MAX = 8
"""A peer that was missing for long comes to so many rounds before an auxiliary waits for it again."""
UNOWNED = "no owner"
"""The note on a crew in which only clients are left."""
ONLY_CLIENTS = (
    "only clients are left, so they average among themselves as well as their lines allow; start a peer that "
    "is none"
)
ROUND_MAX = (1 << 32) - 1
"""Round numbers travel in 32 bits."""
_ZERO: Floats = np.zeros((1, 1), np.float32)
_NO_ROWS: Bytes = np.zeros((0, CHUNK_BYTES), np.uint8)


class Rounds:
    """One peer's part in all rounds of a channel that is averaged by all at once.

    make: makes the machine of one round.
    done: the last round that is over.
    active: the round under way.
    highest: the newest round that was heard of.
    rounds: the machines of the round under way, of ``BEHIND`` that are over (they answer requests for repair)
        and of ``AHEAD`` to come.
    """

    def __init__(self, opening: Opening, make: Callable[[Setting], Round]) -> None:
        self.me, self._number, self._crew, self._make = opening.me, opening.number, opening.crew, make
        self._channel = opening.channel
        self._ready_s = opening.now_s
        """When others may have begun to compute for this channel's first round."""
        self.budgets = Budgets(opening.channel)
        self.patience = Patience()
        self._reordering = Reordering()
        self.done = self.highest = -1
        self._far = FarRounds()
        self._newest: dict[PeerId, int] = {}
        """The newest round that each peer was seen in before it was begun here, or after it was over."""
        self.active: int | None = None
        self.rounds: dict[int, Round] = {}
        self._spare: list[Floats] = []
        self._given: tuple[float, Average | Offer, int] | None = None
        """What the trainer asked for last, when that was, and how many rounds then were to weigh nothing."""
        self._in_next: set[PeerId] = set()
        """Peers that were seen in the round after the one under way."""
        self._ahead: set[PeerId] = set()
        """Peers that were seen ahead of the round under way."""
        self._outrun = False
        """Whether a peer that was asked for a message of the round under way said that it comes no more."""
        self._behind = False
        """Whether others were ahead when this peer's last round ended."""
        self._alone = False
        """Whether nothing came from anybody that was waited for in this peer's last round."""
        self._tardy = 0
        """How many rounds in a row others had ended when this peer began them."""
        self._withheld: frozenset[PeerId] = frozenset()
        self._set_aside: frozenset[PeerId] = NOBODY
        """Peers that the trainer has set aside."""
        self._aside = self._apart
        """Those, and others that take no part: the newest round does not wait for them."""
        self._newcomer = False
        self._serves = not opening.crew.role.gives
        self._planned: tuple[int, ...] = ()
        """The shares of the newest round that was begun."""
        self._numbered = False
        """Whether the trainer says which round each is."""
        self._unowned = False
        """Whether clients own the newest round's blocks, as nobody else is left."""
        self._rare: dict[PeerId, int] = {}
        """At an auxiliary: in how many more rounds than not a peer was missing lately, up to ``RARE_MAX``."""
        self._taking = 0
        """How many rounds to come this peer gives weight 0, one for each fragment."""
        self._crew.steps.opened(self._number)

    def probed(self, probe_s: float, now_s: float) -> None:
        """One exchange of the whole vector takes this long; peers begin from now on."""
        self._channel = replace(self._channel, probe_s=probe_s)
        self._ready_s, self.budgets = now_s, Budgets(self._channel)

    def resume(self, round_: int) -> None:
        """The next round comes after ``round_``, and this peer gives nothing in it (of each fragment)."""
        self._newcomer = True
        self.done = max(self.done, round_)

    def newer(self) -> bool:
        """Whether others are past this peer's last round."""
        return self.highest > self.done

    def shows(self, now_s: float, peer: PeerId, number: int) -> bool:
        """Whether a sender takes part: a message of a round long done shows that it lives, but is behind.

        Two are behind whom waiting brings into the round. Alone, a peer has rounds faster than others can
        come after it: to one that waits for nobody all take part. And where a line is longer than rounds are
        without the peer at its end, that one is as late as the line is, and a step.
        """
        if number >= self.done or not self._waiting:
            return True
        line_s = HEADROOM * self._crew.shortest_s.get(peer, 0.0)
        return self.budgets.age_s(number, now_s) <= line_s + self._crew.step_s

    def budgets_s(self) -> tuple[float, float]:
        """How long the next round may scatter, and gather."""
        return self.budgets.next_s(self._crew.rtt_s.values(), self._crew.trip_s, self._line_s)

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event. Runs that arrive belong to one round, or all ask whether this peer is there."""
        effects = self._take(now_s, event)
        return effects + self._serve(now_s) if self._serves else effects

    def _take(self, now_s: float, event: Event) -> list[Effect]:
        if isinstance(event, Arrived):
            return self._arrived(now_s, event)
        if isinstance(event, Expired):
            return self._route(now_s, event.timer.round, event)
        if isinstance(event, Average | Offer):
            return self._begin(now_s, event)
        if isinstance(event, Joined):
            self._rare.pop(event.peer, None)
            self._newest.pop(event.peer, None)  # a new process may begin anew
        if isinstance(event, Left | Visits):
            self._recut(self._crew.growth)
        if isinstance(event, Left):
            under_way = [] if self.active is None else [self.active]
            return [
                effect
                for number in under_way + self._to_come()
                for effect in self._route(now_s, number, event)
            ]
        return []

    def _arrived(self, now_s: float, event: Arrived) -> list[Effect]:
        first = event.runs[0].key
        if first.stage & QUESTION:
            return [effect for run in event.runs for effect in self._asked(now_s, run)]
        machine = self.rounds.get(first.round)
        if machine is None and self._crew.n > PEERS_MAX:
            return []  # a probe from before the crew grew so large
        growth = self._crew.growth if machine is None else machine.spec.growth
        if self._channel.averager.cuts and growth == BY_SHARES:
            return self._deliver_alike(now_s, first.round, event)
        for run in event.runs:
            cut = run.key.block >> BLOCK_BITS
            if cut != growth and not (self._channel.averager.cuts and cut >= BY_SHARES):
                return self._deliver_apart(now_s, first.round, event)
        return self._deliver_alike(now_s, first.round, event)

    # -- Which round

    def _next(self, due: int = -1) -> int:
        """The round that begins now: the newest heard of, or the one after the last; not before ``due``."""
        heard = -1 if self._numbered else self.highest
        return max(self.done + 1, heard, due)

    def _now(self) -> int:
        """The round under way, or the one that begins next: this peer sends nothing new of earlier ones."""
        return self._next() if self.active is None else self.active

    def _to_come(self) -> list[int]:
        """Rounds that have not begun here, and from which something has come already."""
        return sorted(r for r in self.rounds if r > self.done and r != self.active)

    def _admits(self, number: int, runs: Iterable[Run]) -> bool:
        """Whether messages of this round are taken: no round that is made up, and few that are to come."""
        if not self._believes(number, runs):
            return False
        if number <= self.done or number in self.rounds or number == self.active:
            return True
        ahead = self._to_come()
        if len(ahead) >= AHEAD:  # a peer that fell behind keeps what is newest
            if number < ahead[0]:
                return False
            del self.rounds[ahead[0]]
        return True

    def _believes(self, number: int, runs: Iterable[Run]) -> bool:
        """Peers were heard in a round. It is not believed if that may be made up (``FarRounds``), or is of a
        crew that this peer could not catch up with.

        A question tells as much as values do. One that owns nothing, and follows while it comes in, hears
        nothing else of a round before its end: and the owners, which ask it for its copies, wait for them.
        """
        if not self._far.believes(self.done, number, (run.peer for run in runs), self._tellers):
            return False
        self.highest = max(self.highest, number)
        for run in runs:
            self._newest[run.peer] = max(number, self._newest.get(run.peer, -1))
        return True

    def _recut(self, growth: int) -> None:
        """Rounds to come whose vector was cut for more peers than there are now begin anew."""
        for number in self._to_come():
            if growth < self.rounds[number].spec.growth < BY_SHARES:
                del self.rounds[number]

    def _end(self, outcome: Outcome, lesson: Lesson) -> None:
        """The round under way is over."""
        self.done, self.active = outcome.round, None
        self._reordering.over()
        self._withheld = lesson.withheld
        self._alone = not any(lesson.owed.values())
        self._behind = bool(self._ahead) or self._outrun
        self._outrun = False
        self._ahead.clear()
        for number in [r for r, old in self.rounds.items() if r <= outcome.round - _kept(old)]:
            old = self.rounds.pop(number)
            if self._channel.reuse and old.outcome is not None and not self._spare:
                self._spare.append(old.outcome.mean)

    # -- Begin and end

    @property
    def _apart(self) -> frozenset[PeerId]:
        """The peers that live, and take no part on this channel, or not yet."""
        among, elsewhere = self._channel.among, self._crew.elsewhere(self._number)
        apart = elsewhere if among is None else elsewhere | (self._crew.live - among)
        return apart - {self.me}

    def _begin(self, now_s: float, ask: Average | Offer) -> list[Effect]:
        """Begin the next round."""
        self._require(ask)
        self._given = now_s, ask, self._taking
        self._set_aside = ask.aside
        ask = replace(ask, aside=ask.aside | self._apart)
        self._in_next.clear()
        number = self._which(ask)
        if number > ROUND_MAX:
            raise RuntimeError(f"channel {ask.channel} has had {number} rounds, as many as can be numbered")
        new, skipped = self.done < 0, 0 if self._numbered else number - self.done - 1
        self._aside = ask.aside
        recut = self._replan(number)
        machine = self._machine(number)
        rtts_s = self._crew.rtt_s.values()
        computed_s = max(0.0, now_s - max(self._ready_s, self._crew.met_s))
        if self._serves and new:
            self.budgets.others_computed(computed_s)
        times = self.budgets.begin(
            number,
            now_s,
            computed_s if new and ask.due <= 0 else 0.0,
            ask.deadline_s,
            rtts_s,
            self._crew.trip_s,
            self._line_s,
            self._owns,
            ask.overlap_s,
        )
        scatter_s, gather_s = times.scatter_s, times.gather_s
        # no average comes to one that serves, so it cannot measure how long that takes
        if self._serves:
            gather_s = max(gather_s, scatter_s)
        self.active = number
        self._behind |= skipped > 0 and number > ask.due  # what went by as it meant to is no lag
        if self._newcomer or (skipped > CATCH_UP and not new):
            self._taking = self._channel.fragments
            self._given = now_s, ask, self._taking
        self._newcomer = False
        weight = ask.weight if self._taking == 0 else 0.0
        self._taking = max(0, self._taking - 1)
        effects: list[Effect] = []
        if skipped > 0 and not new and self.me not in ask.aside and not self._serves:
            effects.append(Noted("skipped", self.me, f"{skipped} round{'s' * (skipped > 1)}, to {number}"))
        effects += self._look_for_owners()
        # one that is two rounds ahead is done with this one, if the trainer has numbered it
        past = {peer for peer, newest in self._newest.items() if newest > number + 1}
        waiting = self._waiting - ask.aside - past
        part = self._channel.part(number)
        values, rows = (NO_VALUES, ask.rows) if isinstance(ask, Offer) else (ask.values[part], None)
        if self.budgets.computed_s > 0:
            self._crew.computed_s[self._number] = self.budgets.computed_s
        step_s = 0.0 if self._alone else self._crew.step_s  # those that did not come in one may be dead
        grace_s = min((scatter_s or gather_s) + step_s, times.left_s)
        answer_s = ANSWER * max((self._crew.rtt_s.get(peer, 0.0) for peer in waiting), default=0.0)
        answer_s = self.patience.factor * (answer_s or ANSWER * self._channel.rtt_s)
        if machine.spec.shares:  # an answer waits behind its peer's copies, which take longer than averages
            answer_s = max(answer_s, self.budgets.scatter.budget_s())
        if self._serves:  # copies are all that come to it: what averages take tells it nothing
            answer_s = max(answer_s, scatter_s)
        begin = Begin(
            values,
            weight,
            waiting,
            scatter_s,
            gather_s,
            withheld=self._withheld,
            rows=rows,
            grace_s=grace_s,
            # of a probe nothing is known yet
            usual_scatter_s=INITIAL_RTO_S if self._channel.passing else self.budgets.usual_scatter_s,
            usual_gather_s=INITIAL_RTO_S if self._channel.passing else self.budgets.usual_gather_s,
            answer_s=answer_s,
            cycle_s=times.cycle_s,
            met=self._channel.passing,
        )
        for peer in sorted(recut):
            effects += machine.apart(now_s, peer)
        effects += machine.step(now_s, begin)
        until_s = now_s + scatter_s + gather_s
        for peer in sorted(self._unheard()):
            effects.append(Send(question(peer, machine.spec.key(GATHER, 0)), until_s))
        return self._settle(effects)

    def _which(self, ask: Average | Offer) -> int:
        """The round that begins with this.

        Where the trainer numbers rounds, nothing that is heard of others changes that: its state is of this
        one, and those of the same state are in it. Nor is it one of its step's rounds (``StepOrder``).
        """
        if ask.number >= 0:
            self._numbered = True
            return self._next(ask.number)
        number, steps = self._next(ask.due), self._crew.steps
        of_steps = not self._serves and not self._channel.passing  # it begins what others have; it is a probe
        if of_steps:
            number = steps.number(self._number, number)
        early = self.rounds.get(number)
        self._tardy = self._tardy + 1 if early is not None and early.told else 0
        if self._leaves_it(number, ask):
            number, self._tardy = number + 1, 0
        if of_steps:
            steps.begins(self._number, number, ask.weight > 0)
        return number

    def _shares(self, number: int) -> tuple[int, ...]:
        """A round's shares, by peer; empty: all own as much."""
        averager, assisted = self._channel.averager, self._channel.assisted
        return self._crew.shares(self._number, number, averager.planned, assisted) if averager.cuts else ()

    @property
    def _line_s(self) -> float:
        """How long this peer's part of a stage takes: one block to each other peer. Rows may be few, and
        blocks of planned shares are of other sizes.
        """
        channel, owners = self._channel, self._crew.owning(self._channel.assisted)
        if channel.averager.gathers or self._planned:
            return 0.0
        return self._crew.line_s(channel.n_chunks * DATAGRAM_BYTES / len(owners))

    @property
    def _owns(self) -> bool:
        """Whether this peer may own blocks of the next round."""
        return self._crew.role.owns or self.me in self._crew.owning(self._channel.assisted)

    @property
    def _waiting(self) -> frozenset[PeerId]:
        """The peers that a round waits for: a client is owed nothing by other clients."""
        waiting = self._crew.presence.waiting
        return waiting if self._owns else waiting - self._crew.clients

    def _tellers(self) -> frozenset[PeerId]:
        """The peers from which this one would hear of a later round. On a ring it hears one neighbour alone,
        and whatever an auxiliary tells it has from others.
        """
        if not self._channel.averager.owned:
            return NOBODY
        return self._waiting - self._crew.auxiliary or self._waiting

    def _replan(self, number: int) -> frozenset[PeerId]:
        """A round begins. Where a plan came since something of the round did, that is lost: which peers sent
        it. Deadlines that were learned with other shares grow by a step.
        """
        shares = self._shares(number)
        if shares != self._planned:
            self._planned = shares
            self.budgets.recut()
        early = self.rounds.get(number)
        if early is None or early.spec.shares == shares:
            return NOBODY
        del self.rounds[number]
        return frozenset(peer for peer, came in early.lesson().owed.items() if came)

    def _look_for_owners(self) -> list[Effect]:
        """Say where clients come to average among themselves, as all others are gone or silent."""
        was, owners = self._unowned, self._crew.owning(self._channel.assisted)
        self._unowned = owners <= self._crew.clients and not self._channel.passing
        return [Noted(UNOWNED, self.me, ONLY_CLIENTS)] if self._unowned and not was else []

    def _unheard(self) -> frozenset[PeerId]:
        """Auxiliaries that were silent for long. They send nothing where nothing comes, and nothing is sent
        to them any more: so they are asked in each round whether they are there.
        """
        presence = self._crew.presence
        return presence.auxiliary - presence.assisting if self._channel.assisted else NOBODY

    def _serve(self, now_s: float) -> list[Effect]:
        """An auxiliary begins a round once something of it has come, for it has no trainer that does.

        Its deadlines count from then on. So it is no sign that a peer comes which comes to few rounds: such a
        one may be far ahead of the others.
        """
        early = None if self.active is not None else self.rounds.get(self._next())
        if early is None or self._crew.n > PEERS_MAX:
            return []
        aside = frozenset(peer for peer, missed in self._rare.items() if missed)
        came = {peer for peer, it_came in early.lesson().owed.items() if it_came}
        if came <= aside and self._waiting - aside:
            return []
        nothing: Average | Offer
        if self._channel.averager.gathers:
            nothing = Offer(self._number, _NO_ROWS, 0.0, aside=aside)
        else:
            shape = self._channel.fragments * self._channel.n_chunks, self._channel.codec.elements
            nothing = Average(self._number, np.broadcast_to(_ZERO, shape), 0.0, aside=aside)
        return self._begin(now_s, nothing)

    def _count_rare(self, owed: dict[PeerId, bool]) -> None:
        """An auxiliary is not told whom others set aside. It waits for no peer that comes to few rounds."""
        for peer, came in owed.items():
            missed = self._rare.get(peer, 0) + (-1 if came else 1)
            self._rare[peer] = min(RARE_MAX, max(0, missed))

    def _leaves_it(self, number: int, ask: Average | Offer) -> bool:
        """Whether this peer leaves out the newest round that it heard of, and begins the one after.

        It does so where an owner has told its average of that round already: a slow peer that gives, and a
        peer that is behind. A peer that is one round behind whenever it begins is never heard in time, though
        it computes as fast as the others. A peer that only takes joins the newest round, for its averages.
        The other channels of its step go with it (``StepOrder``).
        """
        if ask.weight <= 0 or not self._tardy:
            return False
        skipped = number - self.done - 1
        behind = self._behind or skipped > 0 or self._tardy > TARDY_MAX
        return self.me in ask.aside or (
            behind and self.done >= 0 and skipped <= CATCH_UP and not self._taking
        )

    def _require(self, ask: Average | Offer) -> None:
        """Check what the trainer asks for.

        Raises:
            RuntimeError: the crew has grown too large, or a round is under way.
            ValueError: the channel takes rows rather than values or the reverse, or their form is wrong.
        """
        channel, number = self._channel, self._number
        if self._crew.n > PEERS_MAX:
            raise RuntimeError(f"the crew has grown to {self._crew.n} seats; {LARGER_CREWS}")
        if self.active is not None:
            raise RuntimeError(f"round {self.active} of channel {number} is not done yet; one at a time")
        if isinstance(ask, Offer) != channel.averager.gathers:
            takes = "rows (Offer)" if channel.averager.gathers else "values (Average)"
            raise ValueError(f"channel {number} is one of {channel.averager.name}, which takes {takes}")
        if isinstance(ask, Offer):
            require_rows(ask.rows, channel.n_chunks)
            return
        want = (channel.fragments * channel.n_chunks, channel.codec.elements)
        if ask.values.shape != want:
            raise ValueError(f"values of shape {ask.values.shape} on a channel of {want}")
        if ask.values.dtype != np.float32 or not (ask.values.flags.c_contiguous or self._serves):
            raise ValueError(f"values of {ask.values.dtype}, or not in one piece; give contiguous float32")

    def _machine(self, number: int, came: Iterable[Run] = ()) -> Round:
        """A round's machine, made by what is known now. came: what has come of the round, and makes it."""
        crew, machine = self._crew, self.rounds.get(number)
        if machine is None:
            auxiliary = crew.auxiliary
            assisting = crew.presence.assisting if self._channel.assisted else NOBODY
            live = crew.live - self._set_aside - self._apart or crew.live
            was_away = 0 <= self.done < number - 1 - CATCH_UP and not self._numbered
            # it owns nothing to the others, but to those that have heard of it meanwhile and send it shares
            if was_away and not self._serves and all(run.key.stage != SCATTER for run in came):
                live = live - {self.me} or live
            setting = Setting(
                me=self.me,
                n=crew.cut,
                seed=crew.seed,
                channel=self._number,
                round=number,
                live=live | assisting,
                present=(frozenset(range(crew.cut)) - crew.gone) | auxiliary,
                n_chunks=self._channel.n_chunks,
                codec=self._channel.codec,
                repair_s=max(crew.rtt_s.values(), default=self._channel.rtt_s),
                growth=crew.growth,
                scratch=self._spare.pop() if self._spare else None,
                earlier=tuple(self.rounds[r] for r in sorted(self.rounds) if r < number),
                patience=self.patience,
                reordering=self._reordering,
                guard=self._channel.averager.guard,
                quorum=self._channel.averager.quorum,
                enough=self._channel.averager.enough,
                hadamard=self._channel.averager.hadamard,
                edges=self._channel.edges,
                auxiliary=auxiliary,
                clients=crew.clients,
                shares=self._shares(number),
            )
            machine = self.rounds[number] = self._make(setting)
        return machine

    def _settle(self, effects: list[Effect]) -> list[Effect]:
        """A machine has taken an event: is the round under way over?"""
        machine = None if self.active is None else self.rounds[self.active]
        if machine is None or machine.outcome is None:
            return effects
        outcome, lesson, presence = machine.outcome, machine.lesson(), self._crew.presence
        if self._serves:
            self._count_rare(lesson.owed)
        owed = {peer: came for peer, came in lesson.owed.items() if peer not in self._aside}
        self._end(outcome, lesson)
        if not self._alone:
            self._crew.met_s = max(self._crew.met_s, outcome.started_s + outcome.total_s)
        self.budgets.learn(
            outcome,
            {peer for peer, came in owed.items() if came and peer not in lesson.in_vain},
            lesson.came_s or (outcome.scatter_s, outcome.gather_s),
        )
        effects = effects + presence.count_silence(owed, lesson.answered, lesson.unanswered)
        if not lesson.owns and outcome.averaged.any():
            effects += presence.vouched(_in_any(outcome.heard))
        if self._serves:
            return [Assisted(outcome) if isinstance(effect, Done) else effect for effect in effects]
        return effects

    # -- What comes

    def _asked(self, now_s: float, run: Run) -> list[Effect]:
        """A peer asks whether this one is there, or answers that it is."""
        number = run.key.round
        if run.key.stage in QUESTIONS:  # the asker waits in that round; an earlier one may wait for it
            rtt_s = self._crew.rtt_s.get(run.peer, self._channel.rtt_s)
            self._believes(number, (run,))
            machine = self.rounds.get(number)
            never = number < self._now() or (machine is not None and machine.goes_elsewhere(run))
            answer = here(now_s, run, rtt_s, never)
            return [answer, *self._asked_from(now_s, number, run.peer)]
        if run.key.stage not in ANSWERS:
            return []
        self.patience.answered(now_s, run.peer, number)
        if run.peer in self._unheard():  # no trainer may still keep it from taking part
            return self._crew.presence.hear(run.peer)
        self._outrun |= run.key.stage == NEVER and number == self.active
        return self._route(now_s, number, Arrived([run])) if number == self.active else []

    def _asked_from(self, now_s: float, number: int, peer: PeerId) -> list[Effect]:
        """A peer asks in a round: it began that long ago, and has left the rounds before it."""
        if number - 1 != self.active or self._behind:
            return self._see_ahead(now_s, number, [peer])
        if self._moves_on(number, [peer]):
            return self._move_on(now_s)
        return self._settle(self.rounds[self.active].asked_from_next(now_s, peer))

    def _deliver_alike(self, now_s: float, number: int, event: Arrived) -> list[Effect]:
        """Runs of one round, whose senders cut the vector as this peer does."""
        if number == self.active:  # most are of the round under way
            return self._settle(self.rounds[number].step(now_s, event))
        if not self._admits(number, event.runs):
            return []
        if number <= self.done:
            if number == self.done and any(run.peer not in self._aside for run in event.runs):
                self.budgets.late(now_s, number)
        else:
            self._machine(number, event.runs)
        effects = self._route(now_s, number, event)
        return effects + self._see_ahead(now_s, number, _seen_in(event.runs))

    def _deliver_apart(self, now_s: float, number: int, event: Arrived) -> list[Effect]:
        """Some senders cut the vector otherwise: they, or this peer, already know of newcomers.

        Their chunks mean other values here, so this round goes on without them. A peer that knows of fewer
        newcomers takes over the larger number from its next round on, so that at most one round is spoilt. It
        does so only if it has heard that a peer comes to that place: a number alone can be made up. A peer
        that knows that the last place is empty goes by the smaller number, and so do the others once they
        have heard of it.
        """
        crew = self._crew
        growths = {id(run): run.key.block >> BLOCK_BITS for run in event.runs}
        believed = [g for g in growths.values() if crew.founded + g <= PEERS_MAX]
        news = [g for g in believed if crew.comes_or_is(crew.founded + g - 1)]
        crew.grow(crew.founded + max(news, default=0))
        early = self.rounds.get(number) if number != self.active and number > self.done else None
        if early is not None and early.spec.growth < crew.growth:
            del self.rounds[number]  # early runs of peers that knew of fewer newcomers
        machine = self.rounds.get(number)
        growth = crew.growth if machine is None else machine.spec.growth
        alike = [run for run in event.runs if growths[id(run)] == growth]
        apart = [run.peer for run in event.runs if growths[id(run)] in believed and run not in alike]
        effects: list[Effect] = []
        if number == self.active:
            for peer in apart:
                if self.active == number:
                    effects += self._settle(self.rounds[number].passed(now_s, peer))
        return effects + (self._deliver_alike(now_s, number, Arrived(alike)) if alike else [])

    def _see_ahead(self, now_s: float, number: int, peers: list[PeerId]) -> list[Effect]:
        """Peers are in this round: do not wait for those that are far enough ahead of the round here."""
        if self._moves_on(number, peers):
            return self._move_on(now_s)
        if self.active is None or number <= self.active + (not self._behind):
            return []
        ahead = [peer for peer in peers if peer not in self._ahead and peer != self.me]
        return self._pass(now_s, ahead)

    def _moves_on(self, number: int, peers: list[PeerId]) -> bool:
        """Peers are in the round after the one under way: whether most have gone on to it without this peer.

        No message has overtaken others then: peers end a round without an owner only where they waited for
        it in vain. A channel of which each step has a round is none to do this in: the step's other rounds
        would be those of the step before, and the next step comes soon. Nor is one whose rounds belong to
        those of another (rows are of the state after one; a round may be due): its peer would come to the
        next before its time, and all would wait for each other in every one from then on.
        """
        if self._channel.averager.gathers or self._serves or self._crew.steps.has(self._number):
            return False
        if self.active is None or number != self.active + 1:
            return False
        if self._given is None or self._given[1].due >= self.active:
            return False
        self._in_next.update(peers)
        waiting = self._waiting - self._aside
        most = 2 * len(self._in_next & waiting) > len(waiting)
        return most and self.rounds[self.active].is_left()

    def _move_on(self, now_s: float) -> list[Effect]:
        """Give in the round in which the others are what this peer has given in one that they have left.

        One that was away may begin a round that is long over. They wait for it in theirs, and its trainer
        would come to that some steps later.
        """
        assert self.active is not None and self._given is not None
        begun_s, ask, self._taking = self._given
        if ask.deadline_s is not None:
            ask = replace(ask, deadline_s=max(0.0, ask.deadline_s - (now_s - begun_s)))
        del self.rounds[self.active]
        self.done, self.active, self._behind = self.active, None, True
        self._ahead.clear()
        return self._begin(now_s, ask)

    def _pass(self, now_s: float, peers: list[PeerId]) -> list[Effect]:
        """These peers are ahead and send nothing of this round any more: end it soon, and catch up.

        A peer that is two rounds ahead is certainly done with this one. A message of the next round may have
        overtaken others, so only a peer that knows itself to be behind believes it.
        """
        effects: list[Effect] = []
        for peer in peers:
            if self.active is None:
                break
            if peer not in self._ahead:
                self._ahead.add(peer)
                effects += self._settle(self.rounds[self.active].passed(now_s, peer))
        return effects

    def _route(self, now_s: float, number: int, event: Arrived | Expired | Left) -> list[Effect]:
        machine = self.rounds.get(number)
        return [] if machine is None else self._settle(machine.step(now_s, event))


def _kept(old: Round) -> int:
    """How many rounds after its end a round is kept."""
    return 1 if old.spec.repair_s is None else BEHIND


def _seen_in(runs: Iterable[Run]) -> list[PeerId]:
    """The peers in the round of these runs: their senders, and the contributors to owners' averages.

    A peer that owns nothing sends to owners only. A peer that owns nothing either hears of it in this way
    alone.
    """
    peers: dict[PeerId, None] = {}
    for run in runs:
        peers[run.peer] = None
        if run.key.stage == GATHER and len(run.heard):
            peers.update(dict.fromkeys(_in_any(run.heard)))
    return list(peers)


def _in_any(heard: PeerSet) -> list[PeerId]:
    """The peers that are in any of these sets."""
    return peers_in(int(np.bitwise_or.reduce(heard)))


def at_once(
    name: str,
    make: Callable[[Setting], Round],
    *,
    patience: float = 1.0,
    gathers: bool = False,
    guards: bool = False,
    owned: bool = True,
    written: str = "",
) -> Averager:
    """An averager by which all peers average in each round. make: makes the machine of one round."""
    return Averager(
        name,
        lambda opening: Rounds(opening, make),
        "at once",
        patience,
        gathers,
        PEERS_MAX,
        written,
        guards,
        owned=owned,
    )
