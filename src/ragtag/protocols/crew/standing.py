"""Which peers are behind their crew: what they post while they catch up, and what follows from it.

A peer that was away for long takes the crew's state from a peer that was not, and begins each round once
such a peer has (``replay``). Where all that were ahead have died meanwhile, or nobody was ahead and a round's
number was made up, each would wait for the others. So a peer that is behind posts so, with the round after
which its state was the crew's. It has somebody to wait for as long as a peer lives that has not said the
same, or says it of a newer state. When there is none, its own state is the newest: it goes on, and the others
follow it.

A peer that has come to its end posts so, too, and begins no round any more. Where all have that are not
behind, one that waits for a round waits in vain: the state that they end with is the newest there will be.

Nobody needs to agree. A post is acknowledged with its reader's own newest one, so a peer knows what all that
live say before it goes on; membership says which peers live. Peers whose states are of one round have one
state, and go on together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from ragtag.core.channels import topic_of
from ragtag.core.types import PeerId, Posted
from ragtag.protocols.crew.board import Notices

TOPIC = topic_of("standing")
"""Where peers post on which channels they are behind."""
END = topic_of("finish")
"""Where peers post what they hold once they have come to their end."""
NO_STATE = -1
"""The round of a peer's state that has had none of the crew's."""
AWAY = -2
"""In its place: this peer follows no rounds while it catches up."""
_ENTRY = struct.Struct("<Iq")
_ENTRIES_MAX = 64


class Board(Protocol):
    """The part of a transport that posts."""

    @property
    def me(self) -> int:
        """This peer's number."""
        ...

    def post_soon(self, topic: int, blob: bytes) -> None:
        """Put this peer's newest value of a topic on the notice board."""
        ...

    def notices(self, topic: int) -> Notices:
        """The newest post of each peer on a topic, and which peers answer nothing."""
        ...


class Standing:
    """On which channels this peer is behind, as it tells the others, and which others are.

    living: the other peers that live and average.
    """

    def __init__(self, board: Board, living: Callable[[], Collection[int]]) -> None:
        self._board, self._living = board, living
        self._behind: dict[int, int] = {}

    def behind(self, channel: int, round_: int) -> None:
        """From now on this peer is behind; its state is the crew's after ``round_`` (``NO_STATE``: none is).

        To be called again when it has a newer one.
        """
        self._tell(self._behind | {channel: round_})

    def abreast(self, channel: int) -> None:
        """This peer catches up no longer, whatever came of it."""
        self._tell({c: round_ for c, round_ in self._behind.items() if c != channel})

    def again(self) -> None:
        """This peer has another board: others are told there."""
        if self._behind:
            self._board.post_soon(TOPIC, encode(self._behind))

    def _tell(self, behind: dict[int, int]) -> None:
        if behind == self._behind:
            return
        if len(behind) > _ENTRIES_MAX:
            raise ValueError(
                f"a peer that is behind on {len(behind)} channels: at most {_ENTRIES_MAX} are told"
            )
        self._behind = behind
        self._board.post_soon(TOPIC, encode(behind))

    def known_behind(self, channel: int) -> dict[int, int]:
        """The peers that have said that they are behind on a channel, with the rounds of their states."""
        told = {peer: decode(post.blob) for peer, post in self._board.notices(TOPIC).posts.items()}
        return {peer: behind[channel] for peer, behind in told.items() if channel in behind}

    def ahead(self, channel: int) -> bool:
        """Whether a peer that lives may have a newer state than this one.

        So it is as long as one has not acknowledged this peer's word, is not behind, or has the state of a
        later round. Of those that have none yet, the one with the lowest number is taken to be ahead.
        """
        living = self._living()
        if not living:
            return False
        me, notices = self._board.me, self._board.notices(TOPIC)
        mine = notices.posts.get(me)
        if channel not in self._behind or mine is None or mine.blob != encode(self._behind):
            return True  # the others cannot know yet
        own = self._behind[channel]
        for peer in living:
            if notices.reached.get(peer, 0) < mine.number:
                return True
            told = decode(notices.posts[peer].blob) if peer in notices.posts else {}
            theirs = told.get(channel)
            if theirs is None or theirs > own or (theirs == own == NO_STATE and peer < me):
                return True
        return False

    def over(self, channel: int) -> bool:
        """Whether all others that live, and are not behind on a channel, have come to their end."""
        rest = set(self._living()) - self.known_behind(channel).keys()
        return bool(rest) and rest <= self._board.notices(END).posts.keys()

    def more(self, channel: int) -> bool:
        """Whether a peer that lives may begin another round of a channel, from a newer state."""
        return self.ahead(channel) and not self.over(channel)


def elsewhere(posts: Mapping[PeerId, Posted], channel: int) -> frozenset[PeerId]:
    """The peers that are behind, and follow no rounds of a channel until they have the crew's state.

    posts: of ``TOPIC``.
    """
    told = {peer: decode(post.blob) for peer, post in posts.items() if post.blob}
    return frozenset(p for p, behind in told.items() if behind and behind.get(channel, AWAY) == AWAY)


def encode(behind: dict[int, int]) -> bytes:
    """A post: the channels on which a peer is behind, and the rounds of its states."""
    return b"".join(_ENTRY.pack(channel, round_) for channel, round_ in sorted(behind.items()))


def decode(blob: bytes) -> dict[int, int]:
    """The same back; of what cannot be read nothing is believed: its peer counts as being in step."""
    if len(blob) % _ENTRY.size:
        return {}
    return dict(_ENTRY.iter_unpack(blob))
