"""Where peers begin and end with one model: they tell each other what they hold, and take one peer's.

Between peers a training is over when each has said so. One that paused (to evaluate, save or compile) is
waited for: the others' processes would be gone when it comes to average what it has. What is left of local
steps goes into one last mean, to which only peers give that have kept up with the others; then digests are
compared, and where they differ all take the values of one peer (``training.whole``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Protocol, TypeVar

import msgspec
import torch
from msgspec import Meta

from ragtag.app.crew.transport import DriverTransport, SoloTransport
from ragtag.app.words import these_peers
from ragtag.core.channels import channel_of
from ragtag.core.types import PEERS_MAX, OpenedTogether, PeerId
from ragtag.protocols.crew.standing import END
from ragtag.training.samples.blocks import LEASE_S
from ragtag.training.state.fixed import Fixed, formed_alike
from ragtag.training.state.snapshot import Progress
from ragtag.training.state.whole import (
    Finished,
    Stand,
    Stands,
    Whole,
    alike,
    is_current,
    joined_digest,
    last_round,
    reached,
    source_of,
)

NOTHING = Progress(-1, -1)
"""How far a peer has come that resumes no checkpoint."""
TRIES = 3
"""So often peers take one peer's values, or tell on whom they count; a chunk that is lost in spite of repair
leaves them different."""
LEASES = 4.0
"""A peer that still trains is waited for so many times as long as it claims samples ahead,"""
SHARE = 0.1
"""or by this share of the time that was trained: peers of like speed end within it."""
_LOOK_FIRST_S, _LOOK_MAX_S = 1e-3, 2e-2
_SAY_AFTER_S = 2.0
_BESIDE = "frozen parameters, others that are not averaged, or integers in buffers"
_log = logging.getLogger("ragtag")
_Told = dict[PeerId, dict[str, Stand]]
_Seat = Annotated[int, Meta(ge=0, lt=PEERS_MAX)]
_T = TypeVar("_T")


class Held(Protocol):
    """What peers compare, and take from one of them."""

    name: str

    @property
    def whole(self) -> Whole | Fixed | None:
        """Its values (``None``: there are none yet)."""
        ...

    def stand(self) -> Stand:
        """Where this peer stands with it."""
        ...


class Averaged(Held, Protocol):
    """An optimizer or a hook: something that peers average."""

    @property
    def whole(self) -> Whole | None:
        """All that it averages (``None``: it has not begun)."""
        ...

    @property
    def counters(self) -> Fixed | None:
        """Integers that its model has in buffers (``None``: none)."""
        ...

    def settle(self) -> None:
        """End what is under way."""
        ...


class Beginning(Averaged, Protocol):
    """An optimizer whose averages begin."""

    def fixed(self, elsewhere: Iterable[torch.Tensor] = ()) -> Fixed:
        """What its models have beside what is averaged, here or ``elsewhere``."""
        ...

    def anchor_here(self) -> None:
        """The values, as they are now, are what all peers begin with."""
        ...


class _AtFirst:
    """What an optimizer averages, as those compare and take it that begin (``Whole.at_first``)."""

    def __init__(self, what: Beginning) -> None:
        self.name, self.stand = what.name, what.stand
        self.whole = None if what.whole is None else what.whole.at_first()


class _Counters:
    """Integers in a model's buffers. All take those of a peer that has come as far as the crew.

    stand: where this peer stands with the model.
    """

    def __init__(self, name: str, whole: Fixed, stand: Stand) -> None:
        self.name, self.whole, self._stand = f"{name}/counters", whole, stand

    def stand(self) -> Stand:
        """The model's, with a digest of these."""
        return msgspec.structs.replace(self._stand, digest=self.whole.stand().digest)


Transport = DriverTransport | SoloTransport


def begin_alike(
    transport: Transport,
    what: Beginning,
    mine: Stand,
    deadline_s: float,
    elsewhere: Iterable[torch.Tensor] = (),
) -> None:
    """Compare what peers begin with; where it differs, all take what the lowest peer has.

    mine: with the digest of this peer's initial values. What no average is of (``Fixed``) is compared, too.
    elsewhere: parameters that other optimizers of this peer have.
    """
    fixed = what.fixed(elsewhere)
    stands = {what.name: mine, fixed.name: fixed.stand()}
    together = OpenedTogether(deadline_s)
    told = _tell(transport, f"begin/{what.name}", stands, together)
    first = _AtFirst(what)
    for held, called in ((first, "weights"), (fixed, _BESIDE)):
        begun = _of(told, held.name)
        if alike(begun):
            continue
        if not _can_mix(transport, told):
            why = f"in a crew of more than {PEERS_MAX} nobody takes another's"
        elif held is fixed and not formed_alike(begun):
            why = "of other names, types or shapes none are taken"
        else:
            after = _make_alike(transport, [held], f"begin/{held.name}", told, min, together)
            if held is first:
                what.anchor_here()
            why = "" if alike(_of(after, held.name)) else "some values were lost on the way"
        _say_apart(transport.me, called, begun, why)


def _say_apart(me: PeerId, called: str, begun: Stands, why: str) -> None:
    """Tell that peers began with different values. why: they go on so (empty: all have the lowest peer's)."""
    lowest = min(begun)
    others = sorted(peer for peer, stand in begun.items() if stand.digest != begun[lowest].digest)
    take = "takes" if len(others) == 1 else "take"
    _log.log(
        logging.WARNING if me == lowest else logging.INFO,
        "peers begin with different %s: %s %s peer %d%s. To begin alike, build the model from the same seed, "
        "or load the same file, on every peer",
        *(called, these_peers(others), "had others than" if why else f"{take} those of", lowest),
        why and f", and {why}",
    )


def tell_progress(transport: DriverTransport, meeting: str, mine: Progress) -> dict[PeerId, Progress]:
    """How far each peer has come, by the checkpoint that it resumes, this one included."""
    told = {transport.me: mine}
    for peer, blob in transport.meet(meeting, msgspec.msgpack.encode(mine), transport.deadline_s).items():
        try:
            told[peer] = msgspec.msgpack.decode(blob, type=Progress)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("what peer %d tells of its checkpoint cannot be read: %s", peer, error)
    return told


def finish(
    transport: Transport,
    averaged: Sequence[Averaged],
    deadline_s: float,
    trained_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> Finished:
    """One last agreed mean, and the same model on all peers that come to their end.

    deadline_s: how long peers that pause are waited for.
    trained_s: how long this peer has trained. Those that still train are waited for by ``SHARE`` of what the
        peer has trained that has longest, of those that have ended.
    meanwhile: called now and then while others are waited for.

    Raises ragtag.NotFinite where a value to be averaged is none.
    """
    ours = [what for what in averaged if what.whole is not None]
    if not ours:
        return Finished(peers=(transport.me,))
    for what in ours:
        what.settle()
    before = [(what, what.whole.copy()) for what in ours if what.whole is not None]
    mine = {what.name: what.stand() for what in ours}
    counters = [
        _Counters(what.name, what.counters, mine[what.name]) for what in ours if what.counters is not None
    ]
    held: list[Held] = [*ours, *counters]
    end = TrainingOver(max(stand.round for stand in mine.values()), trained_s)
    ended = _gathered(transport, end, [channel_of(name) for name in mine], deadline_s, meanwhile)
    ended = _agreed(transport, ended, deadline_s)
    together = OpenedTogether(deadline_s, ended)
    mine |= {what.name: what.stand() for what in counters}
    first = told = _tell(transport, "finish/0", mine, together)
    mixed = (
        [what for what in ours if _any_steps_left(_of(told, what.name))] if _can_mix(transport, told) else []
    )
    for what in mixed:
        stands = _of(told, what.name)
        assert what.whole is not None
        what.whole.mix(1.0 if is_current(stands[transport.me], stands) else 0.0, together)
    if mixed:
        told = _told_by(transport, held, "finish/1", together)
    told = _make_alike(transport, held, "finish", told, source_of, together)
    digests = {what.name: told[transport.me][what.name].digest for what in ours}
    newest = {what.name: reached(_of(first, what.name)) for what in ours}
    behind = {
        peer: late
        for peer, stands in sorted(first.items())
        if (late := max(newest[name] - stand.current for name, stand in stands.items() if name in newest)) > 0
    }
    return Finished(
        digest=joined_digest([*digests.values()]),
        alike=all(stands.keys() == mine.keys() for stands in told.values())
        and all(alike(_of(told, name)) for name in mine),
        peers=tuple(sorted(told)),
        behind=behind,
        moved=max(what.whole.moved(values) for what, values in before if what.whole is not None),
        rounds={what.name: last_round(_of(first, what.name)) for what in ours},
        trained=any(stand.trained for stands in first.values() for stand in stands.values()),
    )


class TrainingOver(msgspec.Struct, frozen=True):
    """What a peer posts that has come to its end.

    round: the last one that it has made.
    trained_s: how long it has trained.
    """

    round: Annotated[int, Meta(ge=-1)] = -1
    trained_s: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0


def _gathered(
    transport: Transport,
    end: TrainingOver,
    channels: Sequence[int],
    deadline_s: float,
    meanwhile: Callable[[], None],
) -> frozenset[PeerId]:
    """Say that this peer has come to its end, and wait for the others. Returns the peers that have said so.

    Each of these comes to the meetings that follow, if later: it may not know yet that a peer is dead. The
    wait is counted from the last end of which a post tells. So peers that have ended, one after the other or
    not, give up together on one that does not: one that gave up before would end with a model of its own.
    """
    number = transport.post(END, msgspec.msgpack.encode(end))
    ended: dict[PeerId, int] = {}
    newest, training_s = -1, max(LEASES * LEASE_S, SHARE * end.trained_s)
    since_s, busy_s, said_s, look_s = transport.now_s(), None, 0.0, _LOOK_FIRST_S
    while True:
        coming = transport.coming  # posts of their seats are of peers that had them before
        notices, now_s = transport.notices(END), transport.now_s()
        there = (notices.peers - transport.absent(END)) | coming
        missing = (there - notices.posts.keys()) | coming
        if news := {p: post for p, post in notices.posts.items() if ended.get(p) != post.number}:
            ended |= {peer: post.number for peer, post in news.items()}
            ends = [_end_of(peer, post.blob) for peer, post in news.items()]
            training_s = max(training_s, *(SHARE * one.trained_s for one in ends))
            # a round of one that has ended tells nothing of those that have not, whenever it comes here
            newest = max(newest, _newest(transport, channels), *(one.round for one in ends))
            since_s, busy_s, said_s = now_s, None, 0.0
        # a peer that leaves before the others know that it came to its end is taken for one that never did
        if not missing and all(notices.reached.get(peer, 0) >= number for peer in there):
            break
        if missing and busy_s is None and _newest(transport, channels) > newest:
            busy_s = now_s  # some of them go on with rounds: they train, and do not pause
        if now_s - since_s >= deadline_s or (busy_s is not None and now_s - busy_s >= training_s):
            if missing:  # else all have ended, and one has not said that it knows of this peer's end
                _log.warning("this peer ends without %s: no sign of an end there", these_peers(missing))
            break
        at_most_s = deadline_s if busy_s is None else min(deadline_s, training_s)
        if missing and said_s != at_most_s and now_s - since_s >= _SAY_AFTER_S:
            said_s = at_most_s
            why = "" if busy_s is None else ", as others still train"
            _log.warning(
                "this peer is done; it waits for %s, %g s at most%s",
                *(these_peers(missing), round(at_most_s, 1), why),
            )
        meanwhile()
        transport.pause(look_s)
        look_s = min(_LOOK_MAX_S, 2 * look_s)
    return frozenset(notices.posts) - coming


def _agreed(transport: Transport, ended: frozenset[PeerId], deadline_s: float) -> frozenset[PeerId]:
    """The peers that end together, the same on all of these.

    A peer that stood still or was cut off as others ended is counted on by some and not by others. These
    would have other owners, and wait for each other. Where they tell of different ones, all take each that
    any of them counts on. Only what these tell counts, as all of them hear that. One on which nobody counts
    ends by itself.
    """
    if transport.n > PEERS_MAX:
        return ended  # each meets a few others only, and nothing is averaged at the end
    for attempt in range(TRIES):
        own = msgspec.msgpack.encode(sorted(ended))
        blobs = transport.meet(f"finish/ended {attempt}", own, deadline_s, there=ended)
        told = [
            _decoded(peer, blob, frozenset[_Seat], "those that end") or frozenset()
            for peer, blob in blobs.items()
            if peer in ended
        ]
        if all(one == ended for one in told):
            break
        if not any(transport.me in one for one in told):
            others = these_peers(ended - {transport.me})
            _log.warning("this peer ends without %s: they ended as nothing was heard of it", others)
            return frozenset({transport.me})
        ended = ended.union(*told)
    return ended


def _decoded(peer: PeerId, blob: bytes, of: type[_T], what: str) -> _T | None:
    """What a peer told. Where that cannot be read it is logged, and there is nothing."""
    try:
        return msgspec.msgpack.decode(blob, type=of)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _log.warning("what peer %d tells of %s cannot be read: %s", peer, what, error)
        return None


def _end_of(peer: PeerId, blob: bytes) -> TrainingOver:
    return _decoded(peer, blob, TrainingOver, "its end") or TrainingOver()


def _newest(transport: Transport, channels: Sequence[int]) -> int:
    return max(transport.heard_of(channel) for channel in channels)


def _read(peer: PeerId, blob: bytes, mine: Mapping[str, Stand]) -> _Told:
    theirs = _decoded(peer, blob, dict[str, Stand], "its model") or {}
    return {peer: theirs} if theirs.keys() & mine.keys() else {}


def _make_alike(
    transport: Transport,
    averaged: Sequence[Held],
    phase: str,
    told: _Told,
    source: Callable[[Stands], PeerId],
    together: OpenedTogether,
) -> _Told:
    """Where values differ all take those of one peer. Returns what peers told of theirs at last."""
    for attempt in range(TRIES):
        differing = [what for what in averaged if not alike(_of(told, what.name))]
        if not differing or not _can_mix(transport, told):
            break
        for what in differing:
            _average(what, 1.0 if source(_of(told, what.name)) == transport.me else 0.0, together)
        told = _told_by(transport, averaged, f"{phase}/alike {attempt}", together)
    return told


def _can_mix(transport: Transport, told: _Told) -> bool:
    """Whether there are others, and no more than average all at once."""
    return len(told) > 1 and transport.n <= PEERS_MAX


def _any_steps_left(stands: Stands) -> bool:
    return any(stand.since and is_current(stand, stands) for stand in stands.values())


def _average(what: Held, weight: float, together: OpenedTogether) -> None:
    assert what.whole is not None
    what.whole.average(weight, together)


def _told_by(
    transport: Transport,
    averaged: Sequence[Held],
    meeting: str,
    together: OpenedTogether,
) -> _Told:
    return _tell(transport, meeting, {what.name: what.stand() for what in averaged}, together)


def _tell(
    transport: Transport,
    meeting: str,
    mine: Mapping[str, Stand],
    together: OpenedTogether,
) -> _Told:
    """Tell where this peer stands and hear of the others, this one included."""
    told: _Told = {transport.me: dict(mine)}
    own = msgspec.msgpack.encode(mine)
    for peer, blob in transport.meet(meeting, own, together.deadline_s, there=together.peers).items():
        told |= _read(peer, blob, mine)
    return told


def _of(told: _Told, name: str) -> dict[PeerId, Stand]:
    """Where peers stand with one of several."""
    return {peer: stands[name] for peer, stands in told.items() if name in stands}
