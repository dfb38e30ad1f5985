"""Who averages which share, planned from the rates that peers measure, while they train.

Each peer tells its line on the notice board: what rate control has found of its way to each other peer. Of
the living peers that can solve a plan (scipy is there) the one with the fastest line does, after an average
of its own: where lines are slow, posts wait behind shares. Rates within a factor of two are as good, and the
lowest peer goes first. It takes the best of a peer's ways out for what that peer can send, and the better of
that and of the best way to it for what it can receive. ``optim.roles.even_shares`` makes shares of that, and
a post tells them to all, auxiliaries too. Those that see it plan repeat what it tells, and a plan counts once
two tell it (``protocols.channel.shares``). So one that lies plans for nobody, unless it lies about its line,
too. A planner waits for its own plan to begin, and for no other.

It changes shares only where that pays. A change costs about a round, since a peer that hears of it too late
is apart in one, and the time of solving. It brings the predicted part of each round from then on. A crew that
was as it is for k rounds is taken to stay so for k more. After ``WINDOW`` rounds the plan is held against
what was measured before it: where rounds are no shorter, all own as much again, until the crew or its rates
change.

The first round of a plan is named: the next but three, and later by as many rounds as four of the board's
timeouts take: it is told, and told again. What happens to a peer that the post does not reach by then,
``protocols.channel.shares`` says.
"""

from __future__ import annotations

import importlib.util
import math
from collections import deque
from collections.abc import Callable
from statistics import median

from ragtag.core.types import Noted, Outcome, PeerId
from ragtag.optim.roles import Capacity, Mix, assess, even_shares
from ragtag.protocols.channel.shares import (
    PLANS_MAX,
    Line,
    Plan,
    Plans,
    read_line,
    read_plans,
    whole_shares,
    write_line,
    write_plans,
)
from ragtag.protocols.crew.board import RATES, SHARES
from ragtag.training.transport import Transport

WINDOW = 8
"""So many rounds tell how long one takes."""
_Key = tuple[tuple[PeerId, Capacity], ...]


class Planner:
    """One peer's part in planning the shares of a channel.

    note: told once of what keeps the crew from planning, and of each plan.
    """

    def __init__(self, transport: Transport, channel: int, note: Callable[[Noted], None] | None) -> None:
        self._transport, self._channel, self._note = transport, channel, note
        self._able = _solves()
        self._told: Line | None = None
        self._noted: set[str] = set()
        self._rounds_s: deque[float] = deque(maxlen=WINDOW)
        """How long the newest rounds took that went by the same shares."""
        self._ended_s = -math.inf
        self._cycle_s = math.inf
        self._shares: tuple[int, ...] = ()
        self._key: _Key = ()
        self._calm = 0
        """For how many rounds the crew and its rates have been as they are."""
        self._found: tuple[tuple[float, ...], float, float] = (), 0.0, 0.0
        """Shares that were solved for them, seconds a byte of these, and how long solving took."""
        self._before_s = math.inf
        """How long rounds took by the shares before these; infinite: these are held against nothing."""
        self._vain: _Key = ()

    def averaged(self, outcome: Outcome) -> None:
        """A round is over: tell what is measured, and plan where this peer is the one that does."""
        now_s, transport = self._transport.now_s(), self._transport
        self._cycle_s, self._ended_s = now_s - self._ended_s, now_s
        line = Line(transport.rates(), solves=self._able)
        if line.differs(self._told):
            self._told = line
            transport.post_soon(RATES, write_line(line))
        lines = self._lines()
        able = [p for p in transport.live if p in lines and lines[p].solves]
        leads = min(able, key=lambda peer: (-_octave(lines[peer]), peer), default=None)
        if leads is None and all(peer in lines for peer in transport.live):
            self._say("no peer has scipy, so all own as much; pip install 'ragtag[roles]' on one")
        known = self._plans() if leads is not None else Plans()
        if leads == transport.me:
            self._lead(outcome, lines, known)
            return
        self._calm, self._before_s = 0, math.inf
        self._rounds_s.clear()
        if leads is not None:
            self._repeat(outcome, known.told(leads, self._channel), known)

    def _lines(self) -> dict[PeerId, Line]:
        found = {}
        for peer, blob in self._transport.posts(RATES).items():
            try:
                found[peer] = read_line(blob)
            except ValueError as error:
                self._say(f"rates of peer {peer} are not believed: {error}")
        return found

    def _plans(self) -> Plans:
        known = Plans()
        for peer, blob in self._transport.posts(SHARES).items():
            try:
                known.take(peer, blob)
            except ValueError:
                continue  # its node has noted that it is refused
        return known

    def _repeat(self, outcome: Outcome, plan: Plan | None, known: Plans) -> None:
        """Tell what the planner tells, unless it begins later than any that one makes now."""
        told = known.told(self._transport.me, self._channel)
        if plan is not None and plan != told and plan.first_round <= outcome.round + _AHEAD_MAX:
            self._post(plan)

    def _lead(self, outcome: Outcome, lines: dict[PeerId, Line], known: Plans) -> None:
        own = known.told(self._transport.me, self._channel)
        if own is not None and own.first_round > outcome.round:
            return  # a change is under way
        trainers = len(self._transport.live - self._transport.auxiliary)
        shares = known.shares(self._channel, outcome.round, trainers)
        if shares != self._shares:
            self._shares = shares
            self._rounds_s.clear()
        self._rounds_s.append(outcome.total_s)
        key = self._measured(lines)
        if not key:
            return
        if key != self._key:
            self._key, self._calm, self._before_s = key, 0, math.inf
            self._found = self._solved(key)
        self._calm += 1
        if self._tried_in_vain():
            self._vain, self._before_s = key, math.inf
            self._change(outcome, (), "rounds were no shorter by measured shares: all own as much again")
            return
        gain = 0.0 if key == self._vain else self._gain(key)
        round_s, solve_s = median(self._rounds_s), self._found[2]
        if gain * round_s * self._calm > round_s + solve_s:
            whole = whole_shares(_by_seat([peer for peer, _ in key], self._found[0]))
            if whole != shares:
                self._before_s = round_s
                self._change(outcome, whole, f"rounds may be {gain:.0%} shorter")

    def _tried_in_vain(self) -> bool:
        """Whether rounds by these shares are no shorter than before."""
        if self._before_s == math.inf or not self._shares or len(self._rounds_s) < WINDOW:
            return False
        before_s, self._before_s = self._before_s, math.inf
        return median(self._rounds_s) >= before_s

    def _measured(self, lines: dict[PeerId, Line]) -> _Key:
        """The crew with its rates; empty: some are not known yet."""
        live = self._transport.live
        helpers = {peer for peer in self._transport.auxiliary if peer in lines and lines[peer].auxiliary}
        seats, clients = sorted(live | helpers), self._transport.clients
        if clients >= set(seats):
            return ()  # they own alike what nobody else is there to own
        key = []
        for peer in seats:
            if peer not in lines:
                return ()
            if not lines[peer].rates:
                self._say(f"peer {peer} measures no rates (rate control is off), so all own as much")
                return ()
            up = max(lines[peer].rates.values())
            into = max((lines[other].rates.get(peer, 0.0) for other in seats if other in lines), default=0.0)
            owns_none = peer in clients
            key.append((peer, Capacity(up, max(up, into), float(peer not in helpers), owns_none)))
        return tuple(key)

    def _solved(self, key: _Key) -> tuple[tuple[float, ...], float, float]:
        begun_s = self._transport.now_s()
        mix = Mix(tuple(capacity for _, capacity in key), 1.0, 1.0)
        roles = even_shares(mix, mix.able)
        return roles.shares, 1 / roles.averaging_per_s, self._transport.now_s() - begun_s

    def _gain(self, key: _Key) -> float:
        """The part of a round that the solved shares are predicted to save."""
        mix = Mix(tuple(capacity for _, capacity in key), 1.0, 1.0)
        equal = [int(not capacity.client) for _, capacity in key]
        now = [self._shares[peer] if peer < len(self._shares) else 0 for peer, _ in key]
        now = [share * owns for share, owns in zip(now, equal, strict=True)]
        now = now if any(now) else equal
        current = [share / sum(now) for share in now]
        return 1 - self._found[1] * assess(mix, mix.able, current).averaging_per_s

    def _change(self, outcome: Outcome, shares: tuple[int, ...], why: str) -> None:
        rto_s = self._transport.notices(SHARES).rto_s
        ahead = math.ceil(4 * rto_s / self._cycle_s) if 0 < self._cycle_s < math.inf else 1
        first = outcome.round + min(4 + ahead, _AHEAD_MAX)
        self._post(Plan(self._channel, first, shares))
        if self._note is not None:
            self._note(Noted("shares", self._transport.me, f"from round {first} on: {why}"))

    def _post(self, plan: Plan) -> None:
        """Tell a plan to all, beside those of other channels that this peer has told."""
        own = self._transport.posts(SHARES).get(self._transport.me)
        others = [] if own is None else [p for p in read_plans(own) if p.channel != plan.channel]
        self._transport.post_soon(SHARES, write_plans([*others[: PLANS_MAX - 1], plan]))

    def _say(self, what: str) -> None:
        if what not in self._noted and self._note is not None:
            self._note(Noted("equal shares", self._transport.me, what))
        self._noted.add(what)


_AHEAD_MAX = 1000
"""So many rounds ahead a plan begins at most. Where rounds take no time it is not put off for ever."""


def _octave(line: Line) -> int:
    """How fast a line is, so coarsely that peers do not change places whenever one measures anew."""
    return math.frexp(max(line.rates.values(), default=0.0))[1]


def _by_seat(seats: list[PeerId], shares: tuple[float, ...]) -> list[float]:
    found = [0.0] * (max(seats) + 1)
    for peer, share in zip(seats, shares, strict=True):
        found[peer] = share
    return found


def _solves() -> bool:
    """Whether this peer can solve a plan. scipy takes a second to import, so it is before rounds begin."""
    if importlib.util.find_spec("scipy") is None:
        return False
    importlib.import_module("scipy.optimize")
    return True
