"""A newcomer gets the training state from several donors at once.

It asks all donors how far they are, and then for their snapshots of one round that none has finished yet,
leaving out those that say that they are far ahead of the others. Where donors' replicas are apart it takes
the version that most of them have; for offers that most of them owe it waits as long as their pace explains.
It asks each donor for as many chunks as it has room for, so each gives according to its speed. At the end
fast donors are asked also for chunks that slow ones still owe (as BitTorrent's end game: Cohen, "Incentives
build robustness in BitTorrent", 2003, section 2.4.4). A donor that stalls or breaks off is dropped and tried
again later, while others go on; one that gives a damaged chunk is not asked again. Whatever happens, the
transfer ends by its deadline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ragtag.protocols.channel.far_rounds import CATCH_UP
from ragtag.protocols.transfer.chunks import Chunks
from ragtag.protocols.transfer.donor import PATIENCE, PENDING, SHARE_OF_TIME, Donor, DonorState
from ragtag.protocols.transfer.types import (
    CHUNK_BYTES_MAX,
    CHUNKS_MAX,
    Arm,
    Ask,
    Came,
    Connect,
    Drop,
    Expired,
    Fetch,
    Finished,
    GaveUp,
    Lost,
    Need,
    Offer,
    Offered,
    Outcome,
    Refused,
    Start,
    Told,
    TransferEffect,
    TransferEvent,
)

_LAGGARDS = 3.0
"""Donors have so many times as long as the first one took to say how far they are."""


_ROUNDS_MAX = 1e6
_LATE_SHARE = 0.9
"""Where asking takes more than a tenth of a round, the round under way is left out."""
_SILENT = "did not answer; is its port open to this machine?"


class Transfer:
    """One newcomer's fetch. Give it ``Start`` first. The driver keeps the chunks; this knows which are there.

    Raises:
        ValueError: no donors, or one twice.
    """

    def __init__(self, donors: Sequence[str], need: Need) -> None:
        if not donors or len(set(donors)) < len(donors):
            raise ValueError(f"transfer: donors are {list(donors)!r:.200}; name each once, and at least one")
        self._names, self._need = tuple(donors), need
        self._donors: dict[str, Donor] = {}
        self._began_s = self._deadline_s = 0.0
        self._asked_round: int | None = None
        self._asked_s = self._first_told_s = self._first_offer_s = math.inf
        self._offer: Offer | None = None
        self._chunks = Chunks()
        self._armed_s = math.inf
        self._over = False
        self._effects: list[TransferEffect] = []

    def step(self, now_s: float, event: TransferEvent) -> list[TransferEffect]:
        """Take one event. ``Finished`` or ``GaveUp`` comes once, and nothing after it."""
        if self._over:
            return []
        self._effects = []
        if isinstance(event, Start):
            self._start(now_s, event.deadline_s)
        elif not isinstance(event, Expired):
            donor = self._donors.get(event.donor)
            if donor is not None and donor.state not in (DonorState.OUT, DonorState.AWAY):
                self._heard(now_s, donor, event)
        else:
            self._armed_s = math.inf
        if self._donors:
            self._go_on(now_s)
        return self._effects

    def _heard(self, now_s: float, donor: Donor, event: Told | Offered | Came | Lost | Refused) -> None:
        if isinstance(event, Told):
            self._told(now_s, donor, event)
        elif isinstance(event, Offered):
            self._offered(now_s, donor, event.offer)
        elif isinstance(event, Came):
            self._chunk(now_s, donor, event)
        elif isinstance(event, Lost):
            self._lose(now_s, donor, event.why)
        else:
            self._out(now_s, donor, event.why)

    def _go_on(self, now_s: float) -> None:
        """What follows from the state and the time."""
        self._look_at_clocks(now_s)
        if self._asked_round is None:
            self._choose_round(now_s)
        if self._asked_round is not None and self._offer is None:
            self._choose_offer(now_s)
        if self._offer is not None:
            self._promote(now_s)
            self._ask_for_chunks(now_s)
        if self._chunks.complete:
            self._end(Finished(self._outcome(now_s)))
        elif now_s >= self._deadline_s or all(d.state is DonorState.OUT for d in self._donors.values()):
            outcome = self._outcome(now_s)
            expired = now_s >= self._deadline_s
            self._end(GaveUp(_reason(self._donors.values(), outcome, self._asked_round, expired), outcome))
        else:
            self._arm(now_s)

    # -- Events

    def _start(self, now_s: float, deadline_s: float) -> None:
        self._began_s, self._deadline_s = now_s, deadline_s
        share_s = max(1e-6, (deadline_s - now_s) * SHARE_OF_TIME)
        for name in self._names:
            self._donors[name] = Donor(name, share_s)
            self._connect(now_s, self._donors[name])

    def _connect(self, now_s: float, donor: Donor) -> None:
        donor.to(now_s, DonorState.CONNECTING)
        self._effects.append(Connect(donor.name))

    def _told(self, now_s: float, donor: Donor, event: Told) -> None:
        if donor.state is not DonorState.CONNECTING:
            return
        donor.answer_s = now_s - donor.since_s
        donor.round, donor.round_s = event.round, event.round_s
        donor.to(now_s, DonorState.TOLD)
        self._first_told_s = min(self._first_told_s, now_s)
        if self._asked_round is not None:
            self._ask(now_s, donor)

    def _ask(self, now_s: float, donor: Donor) -> None:
        assert self._asked_round is not None
        donor.to(now_s, DonorState.ASKED)
        self._effects.append(Ask(donor.name, self._offer.round if self._offer else self._asked_round))

    def _offered(self, now_s: float, donor: Donor, offer: Offer) -> None:
        if donor.state is not DonorState.ASKED:
            return
        why = _objection(offer, self._need)
        if not why and self._offer is not None and offer.layout != self._offer.layout:
            why = "has a state of another layout than the other donors"
        if why:
            self._out(now_s, donor, why, close=True)
            return
        donor.offer = offer
        donor.to(now_s, DonorState.READY)
        self._first_offer_s = min(self._first_offer_s, now_s)

    def _chunk(self, now_s: float, donor: Donor, event: Came) -> None:
        if self._offer is None or donor.offer is None or not donor.came(now_s, event.index):
            return
        self._chunks.take(donor, donor.offer, event)
        if not event.intact:
            self._out(now_s, donor, "gave a damaged chunk", close=True)

    def _lose(self, now_s: float, donor: Donor, why: str, *, close: bool = False) -> None:
        """Drop a donor, to be tried again later."""
        self._part(donor, why, close)
        donor.to(now_s + donor.pause_s(), DonorState.AWAY)
        donor.tries += 1

    def _out(self, now_s: float, donor: Donor, why: str, *, close: bool = False) -> None:
        """Drop a donor for good."""
        self._part(donor, why, close)
        donor.to(now_s, DonorState.OUT)

    def _part(self, donor: Donor, why: str, close: bool) -> None:
        for index in donor.outstanding:
            self._chunks.release(donor.name, index)
        donor.outstanding.clear()
        donor.offer, donor.pace, donor.why = None, None, why
        if close:
            self._effects.append(Drop(donor.name, why))

    # -- What follows

    def _look_at_clocks(self, now_s: float) -> None:
        slowest_s = self._slowest_s()
        for donor in self._donors.values():
            if donor.state is DonorState.AWAY and now_s >= donor.since_s:
                self._connect(now_s, donor)
            elif donor.outstanding and now_s >= donor.stalled_s(slowest_s):
                took_s = now_s - donor.front_s
                self._lose(now_s, donor, f"stalled: no chunk came for {took_s:.3g} s", close=True)

    def _choose_round(self, now_s: float) -> None:
        told = [donor for donor in self._donors.values() if donor.state is DonorState.TOLD]
        if told and (not self._standing(DonorState.CONNECTING) or now_s >= self._enough_told_s()):
            self._asked_round = _round_to_ask(now_s, [(donor.since_s, donor) for donor in told])
            self._asked_s = now_s
            for donor in told:
                self._ask(now_s, donor)

    def _enough_told_s(self) -> float:
        wait_s = max(_LAGGARDS * (self._first_told_s - self._began_s), self._share_s() / _LAGGARDS)
        return self._first_told_s + wait_s

    def _choose_offer(self, now_s: float) -> None:
        """Take an offer once all have offered, two have the same of the round asked for, or time is up.

        Two that were spoilt in the same way are rare, so two that are alike are most likely right.
        """
        assert self._asked_round is not None
        offers = [donor.offer for donor in self._donors.values() if donor.offer is not None]
        if (best := _most_offered(offers, self._asked_round)) is None:
            return
        agreed = sum(_same(offer, best) for offer in offers)
        enough = agreed >= 2 and best.round == self._asked_round
        if not enough and self._standing(*PENDING) and now_s < self._enough_offers_s():
            return
        self._offer = best
        self._chunks.expect(best)
        for donor in self._donors.values():
            if donor.offer is not None and donor.offer.layout != best.layout:
                self._out(now_s, donor, "has a state of another layout than most donors", close=True)

    def _enough_offers_s(self) -> float:
        waited_s = self._first_offer_s - self._asked_s
        answer_s = max(donor.answer_s for donor in self._donors.values())
        asked = self._standing(DonorState.ASKED)
        owed_s = self._owed_s(asked) if len(asked) > len(self._standing(DonorState.READY)) else 0.0
        return max(owed_s, self._first_offer_s + max(waited_s, answer_s))

    def _owed_s(self, asked: Sequence[Donor]) -> float:
        """Until when most donors' offers are waited for: they say themselves how long their rounds take. One
        that offers at once, whatever it offers, does not decide alone.
        """
        assert self._asked_round is not None
        takes_s = sorted(
            max(1, self._asked_round - donor.round + 1) * donor.round_s if donor.round_s > 0 else math.inf
            for donor in asked
        )
        half_s = (self._began_s + self._deadline_s) / 2
        return min(half_s, self._asked_s + PATIENCE * takes_s[(len(takes_s) - 1) // 2])

    def _promote(self, now_s: float) -> None:
        """Let donors of the agreed version give, and donors of others only where those are too few."""
        assert self._offer is not None
        agreed = self._offer
        ready = [donor for donor in self._donors.values() if donor.state is DonorState.READY]
        for donor in ready:
            if donor.offer is not None and donor.offer.version == agreed.version:
                donor.to(now_s, DonorState.GIVING)
        others = [d for d in ready if d.state is DonorState.READY]
        others.sort(key=lambda donor: abs(donor.offer.round - agreed.round) if donor.offer else 0)
        while others and len(self._standing(DonorState.GIVING)) < self._need.agreed_min:
            others.pop(0).to(now_s, DonorState.GIVING)

    def _ask_for_chunks(self, now_s: float) -> None:
        """Ask donors for one chunk each in turn, the fastest first, so that few chunks spread over all."""
        giving = sorted(self._standing(DonorState.GIVING), key=lambda donor: donor.typical_s or 0.0)
        slowest_s = self._slowest_s()
        asked = True
        while asked:
            asked = False
            for donor in giving:
                if donor.room <= 0:
                    continue
                index = self._chunks.next_for(now_s, donor, self._donors, slowest_s)
                if index is not None:
                    donor.asked(now_s, index)
                    self._effects.append(Fetch(donor.name, index))
                    asked = True

    # -- Time

    def _arm(self, now_s: float) -> None:
        """Be woken when the next thing falls due."""
        slowest_s = self._slowest_s()
        due_s = [self._deadline_s]
        for donor in self._donors.values():
            if donor.state is DonorState.AWAY:
                due_s.append(donor.since_s)
            elif donor.outstanding:
                due_s += [donor.overdue_s(slowest_s), donor.stalled_s(slowest_s)]
        if self._asked_round is None and self._standing(DonorState.TOLD):
            due_s.append(self._enough_told_s())
        if self._offer is None and self._standing(DonorState.READY):
            due_s.append(self._enough_offers_s())
        at_s = min((at_s for at_s in due_s if at_s > now_s), default=self._deadline_s)
        if at_s < self._armed_s:
            self._armed_s = at_s
            self._effects.append(Arm(at_s))

    def _slowest_s(self) -> float:
        """How long a chunk takes from the slowest donor that has given one; 0: none has."""
        return max((donor.typical_s or 0.0 for donor in self._donors.values()), default=0.0)

    def _share_s(self) -> float:
        return next(iter(self._donors.values())).share_s

    def _standing(self, *stands: DonorState) -> list[Donor]:
        return [donor for donor in self._donors.values() if donor.state in stands]

    # -- The end

    def _end(self, effect: Finished | GaveUp) -> None:
        self._over = True
        self._effects.append(effect)

    def _outcome(self, now_s: float) -> Outcome:
        donors = self._donors.values()
        rounds: Counter[int] = Counter()
        for (round_, _), count in self._chunks.versions.items():
            rounds[round_] += count
        return Outcome(
            offer=self._offer,
            given={donor.name: donor.given for donor in donors if donor.given},
            dropped=_dropped(donors),
            rounds=dict(rounds),
            mixed=self._offer is not None and set(self._chunks.versions) - {self._offer.version} != set(),
            came=self._chunks.came,
            wasted_bytes=self._chunks.wasted_bytes,
            took_s=now_s - self._began_s,
        )


# -- Which round, and which offer


def _round_to_ask(now_s: float, told: Sequence[tuple[float, Donor]]) -> int:
    """The first round that no donor will have finished when it is asked.

    Where rounds are shorter than asking takes, the round is a multiple of a power of two as large as the
    margin. So newcomers that come at once ask for the same round, and donors take one snapshot for all.

    told: donors, and when each said how far it is.
    """
    asking_s = max(donor.answer_s for _, donor in told)
    told = _in_step(now_s + asking_s, told)

    def newest(at_s: float) -> float:
        return max(donor.round + _rounds(at_s - told_s, donor) for told_s, donor in told)

    first = max(0, math.floor(newest(now_s + asking_s) + _LATE_SHARE) + 1)
    step = 1 << max(0, first - math.floor(newest(now_s)) - 1).bit_length()
    return -(-first // step) * step


def _in_step(at_s: float, told: Sequence[tuple[float, Donor]]) -> list[tuple[float, Donor]]:
    """Without the donors that will be further ahead of the middle one than its pace explains (of two, of the
    one behind): what one donor says is not known to be true. A donor that has skipped more than ``CATCH_UP``
    rounds gives nothing to an average, so those in step are no more rounds apart.
    """
    done = [_rounds(at_s - told_s, donor) for told_s, donor in told]
    rounds = [donor.round + more for (_, donor), more in zip(told, done, strict=True)]
    middle, more = sorted(zip(rounds, done, strict=True))[(len(told) - 1) // 2]
    return [each for each, round_ in zip(told, rounds, strict=True) if round_ <= middle + more + CATCH_UP]


def _rounds(took_s: float, donor: Donor) -> float:
    """How many rounds a donor does in so much time, by its own word; bounded."""
    return min(took_s / donor.round_s, _ROUNDS_MAX) if donor.round_s > 0 else 0.0


def _most_offered(offers: Sequence[Offer], asked: int) -> Offer | None:
    """The snapshot that most donors offer. Of equals that of the round asked for, else the newest."""
    return max(
        offers,
        key=lambda one: (
            sum(_same(one, other) for other in offers),
            one.round == asked,
            one.version,
            one.layout,
        ),
        default=None,
    )


def _same(one: Offer, other: Offer) -> bool:
    """Whether two donors offer the same."""
    return (one.version, one.layout) == (other.version, other.layout)


def _objection(offer: Offer, need: Need) -> str:
    """Why an offer cannot be taken; empty: it can."""
    if offer.schema != need.schema:
        return (
            f"has another model (schema {offer.schema:016x}, here {need.schema:016x}); start this peer with "
            "the crew's model, optimiser and version of the script"
        )
    if not 1 <= offer.total_bytes <= need.blob_bytes_max:
        return (
            f"offers a state of {offer.total_bytes} bytes, where at most {need.blob_bytes_max} are taken "
            "(blob_bytes_max)"
        )
    if not 1 <= offer.chunk_bytes <= CHUNK_BYTES_MAX or offer.n_chunks > CHUNKS_MAX:
        return f"offers {offer.total_bytes} bytes in chunks of {offer.chunk_bytes}, which makes no sense"
    return ""


# -- Why a donor, or all of them, did not do: what a user reads


def _dropped(donors: Iterable[Donor]) -> dict[str, str]:
    """The donors that were given up, or were lost and have given nothing since, and why."""
    lost = (DonorState.OUT, DonorState.AWAY, DonorState.CONNECTING)
    return {d.name: d.why or _SILENT for d in donors if d.state in lost or d.tries > 0}


def _reason(donors: Iterable[Donor], outcome: Outcome, asked_round: int | None, expired: bool) -> str:
    """Why there is no state, donor by donor. Donors with the same reason are named together."""
    said: dict[str, list[str]] = {}
    for donor in donors:
        said.setdefault(_complaint(donor, asked_round), []).append(donor.name)
    lines = "; ".join(f"{', '.join(names)}: {why}" for why, names in said.items())
    offer = outcome.offer
    how_far = f"{outcome.came} of {offer.n_chunks} chunks came" if offer else "no chunk came"
    if expired:
        return f"the state was not complete after {outcome.took_s:.3g} s ({how_far}). {lines}"
    return f"no donor is left that could give the state ({how_far}). {lines}"


def _complaint(donor: Donor, asked_round: int | None) -> str:
    if donor.state is DonorState.CONNECTING:
        return donor.why or _SILENT
    if donor.state is DonorState.ASKED and donor.offer is None:
        return (
            f"had finished round {donor.round}, and gave no snapshot of round {asked_round} or later; is it "
            "still training?"
        )
    return donor.why or f"gave {donor.given} bytes"
