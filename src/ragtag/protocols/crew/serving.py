"""What an auxiliary must know of its crew's channels, and how it comes to know it.

A peer that averages has a script, and knows from it what it averages. An auxiliary has none. So each peer
that opens a channel posts its form on the notice board, on topics (``PAGES``) that go to auxiliaries, too,
also while they are on their way in. Of the forms that living peers post for a channel, an auxiliary takes the
one that most of them post: these refuse the others, too (``joining.ChannelWay``).

An auxiliary opens the channels that there are before it tells that it takes part, and later ones as soon as
it hears of them: their peers compare schemas and measure first, so it is there when they begin.

    averages by                 an auxiliary
    ------------------------------------------------------------------------------------
    RPS, AllReduce              owns its share of the blocks
    rows (TopK)                 owns its share of the rows
    AllReduce(ring=True)        has no part in it: a ring has no owners
    groups                      has no part in it: a group is of peers that have values
    a central state             has no part in it: owners take steps, and keep the state
    none (computed tensors)     has no part in it: it computes nothing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ragtag.codecs.base import Codec
from ragtag.core.schema import FRAGMENTS_MAX, VALUES_MAX
from ragtag.core.types import PeerId
from ragtag.protocols.channel.averager import Averager, Channel, guarded
from ragtag.protocols.crew.board import PAGES
from ragtag.protocols.node import Node
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.protocols.rounds.gather import gather
from ragtag.protocols.rounds.robust import CentredClipping, RobustMean, TrimmedMean
from ragtag.protocols.rounds.rps import RPS

FORMS_MAX = 8
"""Forms on a page: they fit a post."""
_U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
_WORD_MAX = 24
_Word = Annotated[str, Meta(max_length=_WORD_MAX)]
_Shares = Literal["equal", "measured"]
_AVERAGERS: Mapping[str, Callable[[int, float, _Shares], Averager]] = {
    "rps": lambda quorum, enough, shares: RPS(quorum=quorum, shares=shares),
    "rps+repair": lambda quorum, enough, shares: RPS(repair=enough, quorum=quorum, shares=shares),
    "allreduce": lambda quorum, enough, shares: AllReduce(shares=shares),
    "gather": lambda quorum, enough, shares: gather,
}
_GUARDS: Mapping[str, Callable[[float, float], RobustMean]] = {
    "trimmed mean": TrimmedMean,
    "centred clipping": CentredClipping,
}


class ChannelForm(msgspec.Struct, array_like=True, frozen=True):
    """A channel, as an auxiliary needs to know it.

    channel: its number.
    hash32: what its datagrams carry of its schema.
    by: its averager's name; quorum, guard, liars, heaviest, planned, enough: the averager's.
    assisted: whether auxiliaries own blocks of it; else they have no part in it.
    codec: its dense codec's name; empty: rows are gathered, which no owner decodes, or it is not assisted.
    chunks, fragments: as ``averager.Channel`` has them.
    """

    channel: _U32
    hash32: _U32
    by: _Word
    assisted: bool
    codec: _Word
    chunks: Annotated[int, Meta(ge=1, le=VALUES_MAX)]
    fragments: Annotated[int, Meta(ge=1, le=FRAGMENTS_MAX)] = 1
    quorum: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    guard: _Word = ""
    liars: float = 0.0
    heaviest: float = 0.0
    planned: bool = False
    enough: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0

    def averager(self) -> Averager:
        """The averager. Raises ValueError: there is none of this form here."""
        if self.by not in _AVERAGERS or (self.guard and self.guard not in _GUARDS):
            raise ValueError(f"an auxiliary knows no averager {self.by!r} with guard {self.guard!r}")
        averager = _AVERAGERS[self.by](self.quorum, self.enough, "measured" if self.planned else "equal")
        return guarded(averager, _GUARDS[self.guard](self.liars, self.heaviest)) if self.guard else averager

    def opened(self, codec: Codec, rtt_s: float) -> Channel:
        """The channel, as an auxiliary opens it. Its first deadlines come from a round trip alone.

        None is shorter: an auxiliary begins a round with the first share, so that where all come at once it
        sees none of the time that they were on their way, by which shares' times differ.

        Raises ValueError: there is no averager of this form here.
        """
        return Channel(
            self.averager(),
            codec,
            self.chunks,
            probe_s=2 * rtt_s,
            rtt_s=rtt_s,
            floor_s=rtt_s,
            fragments=self.fragments,
            assisted=True,
        )


def form_of(
    channel: int, hash32: int, averager: Averager, codec: str, chunks: int, fragments: int
) -> ChannelForm:
    """The form of a channel, of which auxiliaries own blocks if they can make the same averager from it.

    codec: the name of its codec, if that is one of Ragtag's dense ones; else empty.
    """
    by, guard = averager.name.partition(",")[0][:_WORD_MAX], averager.guard
    codec = "" if averager.gathers else codec
    robust = ("", 0.0, 0.0)
    if guard is not None:
        robust = guard.name.partition(" (")[0][:_WORD_MAX], guard.liars, guard.heaviest
    form = ChannelForm(
        channel,
        hash32,
        by,
        True,
        codec,
        chunks,
        fragments,
        averager.quorum,
        *robust,
        averager.planned,
        averager.enough,
    )
    try:
        known = bool(codec or averager.gathers) and form.averager() == averager
    except ValueError:
        known = False
    return form if known else ChannelForm(channel, hash32, by, False, "", chunks, fragments)


class Forms:
    """The forms of the channels that a peer has opened, as it posts them."""

    def __init__(self) -> None:
        self._forms: list[ChannelForm] = []

    def add(self, form: ChannelForm) -> tuple[ChannelForm, int, bytes]:
        """One more channel is open, or open anew: its form, the topic to post on, and what.

        A channel beyond all pages is not assisted, and is not posted: its topic is -1.
        """
        at = next((i for i, other in enumerate(self._forms) if other.channel == form.channel), None)
        if at is None and len(self._forms) == FORMS_MAX * len(PAGES):
            return msgspec.structs.replace(form, assisted=False), -1, b""
        if at is None:
            at = len(self._forms)
            self._forms.append(form)
        self._forms[at] = form
        page = at // FORMS_MAX
        on_it = self._forms[page * FORMS_MAX : (page + 1) * FORMS_MAX]
        return form, PAGES[page], msgspec.msgpack.encode(on_it)


_decoder = msgspec.msgpack.Decoder(list[ChannelForm])


def read_forms(blob: bytes) -> list[ChannelForm]:
    """The forms in a post. Raises ValueError: it has none."""
    try:
        return _decoder.decode(blob)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no forms of channels: {error}") from None


def told_by_most(posts: Collection[tuple[PeerId, bytes]]) -> dict[int, ChannelForm]:
    """The form of each channel that most of the peers that post one for it do; of two that as many post, the
    lowest peer's.
    """
    told: dict[int, dict[PeerId, ChannelForm]] = {}
    for peer, blob in sorted(posts):
        try:
            forms = read_forms(blob)
        except ValueError:
            continue  # of another version of Ragtag, say: peers that understand it refuse its peer
        for form in forms:
            told.setdefault(form.channel, {})[peer] = form
    return {channel: Counter(by_peer.values()).most_common(1)[0][0] for channel, by_peer in told.items()}


class Serving:
    """The channels that an auxiliary knows of, as the living peers tell them.

    known: the form of each, by its number.
    """

    def __init__(self) -> None:
        self.known: dict[int, ChannelForm] = {}

    def look(self, node: Node) -> list[ChannelForm]:
        """A post came: the forms that are new, or other than they were."""
        posts = [
            (peer, posted.blob)
            for page in PAGES
            for peer, posted in node.board.notices(page).posts.items()
            if peer in node.live
        ]
        news = [form for form in told_by_most(posts).values() if self.known.get(form.channel) != form]
        self.known.update({form.channel: form for form in news})
        return news
