"""The epoch that a crew is in, which all its peers count together.

Each peer posts the epoch that it begins, or that is next; the crew is in the highest of them that two peers
post, or exceed, or the only other one (``Answers.vouched``): one that lies ends the training for nobody.
Before a peer begins one it posts, and waits until the others have acknowledged that, so it knows all that
they had posted by then (``ragtag.protocols.crew.board``), within the measured patience of
``training.samples.answers``. So a newcomer begins where the crew is, a peer that was away goes on there, and
all end once two have done the last epoch.

Batches come from splits, which draw from pools that have epochs of their own. A split that is gone through in
an epoch begins that epoch of its pool; where the pool is ahead (the crew went on meanwhile) the epoch is
that one from then on. In an epoch in which a peer's splits had nothing for it, it posts nothing: a peer with
an empty shard would end the training for all. Without splits the second peer counts for all, of two peers the
first.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

from ragtag.core.channels import topic_of
from ragtag.training.samples.answers import Answers
from ragtag.training.transport import Peers

NAME = "ragtag.data"
"""Its name among a snapshot's extra state."""
TOPIC = topic_of("epochs")
_POST = struct.Struct("<BQQ")
_VERSION = 1
_COUNT_MAX = 1 << 53
_UNKNOWN = (1 << 64) - 1
"""The epoch in the post of a newcomer that asks where the crew is."""
_LOOK_FIRST_S, _LOOK_MAX_S = 2e-4, 5e-3

_log = logging.getLogger("ragtag")


class Passed(Protocol):
    """What is gone through in an epoch: a split."""

    samples: int

    @property
    def under_way(self) -> bool:
        """Whether it is being gone through: begun, not at its end, not broken off."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Its epoch, and which of its blocks are used."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        ...


class Epochs:
    """The epochs of peer ``peers.me``'s crew, and what is used of the data.

    splits: those there are, by number.
    round: the crew's last round that this peer knows of (-1: none).
    epoch: the one that is under way, or next.
    before: how many rounds the crew had made before this run.
    """

    def __init__(
        self, peers: Peers, splits: Callable[[], Mapping[int, Passed]], round: Callable[[], int]
    ) -> None:
        self.epoch = self.before = 0
        self._peers, self._splits, self._round = peers, splits, round
        self._gone_through: list[Passed] | None = None  # in the epoch under way; None: none is
        self._begun = 0
        self._answers = Answers(peers.me)
        self._loaded = self._entered = self._asks = False
        self._restored: Mapping[str, Any] = {}

    @property
    def step(self) -> int:
        """How many rounds the crew has made in the whole training, over all restarts."""
        return self.before + self._round() + 1

    # -- Epochs

    @property
    def turn(self) -> int:
        """Which epoch of this process is under way, counted from 1; 0: none is."""
        return 0 if self._gone_through is None else self._begun

    def went_through(self, split: Passed) -> bool:
        """Whether a split was begun in the epoch under way."""
        return split in (self._gone_through or ())

    def count(self, n: int, late: bool) -> Generator[int, None, None]:
        """Yield the crew's epoch until it has done ``n``.

        late: the crew has begun before this peer came.
        """
        if not self._enter(late):
            return
        while self.epoch < n:
            self._gone_through, before = [], self._samples()
            self._begun += 1
            try:
                yield self.epoch
            except GeneratorExit:  # the script has broken off; it may save, or count on, later
                self.epoch, self._gone_through = self.position, None
                return
            idle = bool(self._gone_through) and self._samples() == before
            self._gone_through = None
            self.epoch += 1
            if idle:
                self._look(0.0)
                self.epoch = max(self.epoch, self._told()[0])
            else:
                self._agree()

    @property
    def position(self) -> int:
        """The epoch that a checkpoint goes on with.

        That under way, unless its samples, those of the split that was gone through first in it, are over.
        """
        passed = self._gone_through
        return self.epoch + (bool(passed) and not passed[0].under_way) if passed else self.epoch

    def begins(self, split: Passed, epoch: int) -> int:
        """Which epoch a split begins that would begin ``epoch`` by itself.

        Raises RuntimeError: it was gone through already in this epoch.
        """
        if self._gone_through is None:
            return epoch
        if self.went_through(split):
            raise RuntimeError(
                f"this split was gone through already in epoch {self.epoch}: in each epoch of crew.epochs "
                "go through it once; give what needs the samples twice a DataLoader of its own"
            )
        self._gone_through.append(split)
        return max(epoch, self.epoch)

    def ahead(self, by: int) -> None:
        """The crew was found to be so many epochs further than the one that was begun."""
        if self._gone_through is not None:
            self.epoch += by

    def _enter(self, late: bool) -> bool:
        """Find out where the crew is; whether there is anything to go on with."""
        loaded = self.epoch
        if late and not self._entered:  # what a member's state said is of a crew that may be told by itself
            self.epoch, self._asks = 0, True
        told = self._agree()
        self._entered, self._asks = True, False
        if not told:
            self.epoch = loaded
        if late:
            self._peers.post_soon(TOPIC, self._post())
        if told:
            return True
        if late and not self._loaded and self._peers.live <= {self._peers.me}:
            _log.warning("nobody is left of the crew that this peer came to: it has nothing to go on with")
            return False
        return True

    def moved(self) -> None:
        """This peer has another place, and a new notice board."""
        self._answers = Answers(self._peers.me)
        self._peers.post_soon(TOPIC, self._post())

    def _agree(self) -> bool:
        """Tell the others this peer's epoch, and take theirs where it is higher; whether any was told."""
        number, look_s, seen_s = self._peers.post(TOPIC, self._post()), _LOOK_FIRST_S, self._peers.now_s()
        self._answers.moved_on()
        while True:
            now_s = self._peers.now_s()
            self._look(now_s - seen_s)
            if self._answers.enough_know(number):
                break
            seen_s = now_s
            self._peers.pause(look_s)
            look_s = min(_LOOK_MAX_S, 2 * look_s)
        epoch, before, any_told = self._told()
        if epoch > self.epoch or before > self.before:
            self.epoch, self.before = max(epoch, self.epoch), max(before, self.before)
            self._peers.post_soon(TOPIC, self._post())
        return any_told

    def _look(self, since_s: float) -> None:
        self._answers.look(self._peers.notices(TOPIC), self._peers.live, since_s)

    def _post(self) -> bytes:
        return _POST.pack(_VERSION, _UNKNOWN if self._asks else self.epoch, self.before)

    def _told(self) -> tuple[int, int, bool]:
        """The crew's epoch and count of rounds, as others have posted them; whether anybody else has."""
        epochs: dict[int, int] = {}
        befores: dict[int, int] = {}
        for peer, blob in self._peers.posts(TOPIC).items():
            if len(blob) == _POST.size:
                version, epoch, before = _POST.unpack(blob)
                if version == _VERSION and max(epoch, before) <= _COUNT_MAX:
                    epochs[peer], befores[peer] = epoch, before
        vouched = self._answers.vouched
        any_told = bool(epochs.keys() - {self._peers.me})
        return vouched(epochs, self._asks), vouched(befores, self._asks), any_told

    # -- In snapshots

    def state_dict(self) -> dict[str, Any]:
        """The epoch to go on with, the crew's rounds, and what is used of each split's samples.

        Of a split that the script has not made yet that is what was loaded of it.
        """
        made = {str(number): split.state_dict() for number, split in self._splits().items()}
        splits = {**self._restored, **made}
        return {"epoch": self.position, "before": self.before, "step": self.step, "splits": splits}

    def load_state_dict(self, state: Mapping[str, Any], resumed: bool = False) -> None:
        """Go on from there. resumed: with a new run; else as one of the crew that is under way.

        A state of an earlier version is empty: it tells nothing.
        """
        if not state:
            return
        self.before = int(state["step"] if resumed else state["before"])
        if not self._entered:
            self.epoch = int(state["epoch"])
        self._loaded, self._restored = True, state["splits"]
        for number, split in self._splits().items():
            self.restore(number, split)

    def restore(self, number: int, split: Passed) -> None:
        """A split of this number has what was loaded of it."""
        if str(number) in self._restored:
            split.load_state_dict(self._restored[str(number)])

    def _samples(self) -> int:
        return sum(split.samples for split in self._splits().values())
