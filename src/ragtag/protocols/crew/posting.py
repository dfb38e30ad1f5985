"""A notice board as training sees it, where a post is on the board once it was given to the node."""

from __future__ import annotations

from collections.abc import Callable

from ragtag.core.types import PeerId, Post
from ragtag.protocols.crew.board import Board, Notices


class Posting:
    """Peer ``me``'s side of its node's board: for a transport whose node steps in the caller's own thread.

    give: has the node take a post, now.
    """

    def __init__(self, me: PeerId, board: Board, give: Callable[[Post], object]) -> None:
        self.me = me
        self._board, self._give = board, give

    def post(self, topic: int, blob: bytes) -> int:
        """Put this peer's newest value of a topic on the notice board; the post's number."""
        self._give(Post(topic, blob))
        return self.notices(topic).posts[self.me].number

    def post_soon(self, topic: int, blob: bytes) -> None:
        """The same, as ``training.transport.Peers`` has it: here no number is waited for."""
        self._give(Post(topic, blob))

    def posts(self, topic: int) -> dict[PeerId, bytes]:
        """Every peer's newest value of a topic, one's own included."""
        return self.notices(topic).blobs()

    def notices(self, topic: int) -> Notices:
        """The same with numbers: who has acknowledged what, and who answers nothing."""
        return self._board.notices(topic)
