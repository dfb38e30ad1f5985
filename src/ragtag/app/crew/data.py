"""A peer's part of the crew's data: a split for each loader, and the epochs that all count together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader

from ragtag.app.crew.transport import DriverTransport, SoloTransport
from ragtag.training.samples.deal import Indices
from ragtag.training.samples.epochs import Epochs
from ragtag.training.samples.ledger import EpochReport
from ragtag.training.samples.loader import loader_form, require_loader
from ragtag.training.samples.portion import Portion
from ragtag.training.samples.sizes import BatchSizes
from ragtag.training.samples.split import Split
from ragtag.training.samples.together import together

_log = logging.getLogger("ragtag")


@dataclass(frozen=True, slots=True)
class _Made:
    """A split that a script holds, what is behind it, and the options that it was made with.

    form: of its loader.
    turn: the epoch of this process in which its loader was first given (0: in none).
    """

    split: Split
    portion: Portion
    asked: tuple[Any, ...]
    form: tuple[Any, ...]
    turn: int


class Data:
    """The splits and epochs of one peer.

    founded: how many peers the crew began with.
    round: the crew's last round that this peer knows of (-1: none).
    busy_s: how long this peer has computed.
    report: told what an epoch of a split came to.
    target: samples of a step of all, where an optimizer has a target batch.
    """

    def __init__(
        self,
        transport: DriverTransport | SoloTransport,
        seed: int,
        founded: int,
        *,
        round: Callable[[], int],
        busy_s: Callable[[], float],
        report: Callable[[EpochReport], None],
        target: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._transport, self._seed, self._founded = transport, seed, founded
        self._busy_s, self._report, self._target = busy_s, report, target
        self._splits: dict[DataLoader[Any], _Made] = {}
        self.epochs = Epochs(transport, self._by_number, round)

    @property
    def _portions(self) -> list[Portion]:
        return [made.portion for made in self._splits.values()]

    def _by_number(self) -> dict[int, Portion]:
        return {portion.ordinal: portion for portion in self._portions}

    @property
    def samples(self) -> int:
        """How many this peer was given by its splits."""
        return sum(portion.samples for portion in self._portions)

    def count(self, n: int) -> Generator[int, None, None]:
        """Yield the crew's epochs until it has done ``n``."""
        return self.epochs.count(n, self._transport.late)

    def split(
        self,
        loader: DataLoader[Any],
        shards: Sequence[Sequence[int] | Indices] | None,
        seed: int | None,
        sizes: BatchSizes | None,
    ) -> Split:
        """The split of this loader, made where there is none yet (see ``Crew.split``)."""
        require_loader(loader)
        asked = shards, seed, sizes
        made = self._splits.get(loader)
        if made is None:
            made = self._splits[loader] = self._made_anew(loader, asked) or self._make(loader, *asked)
            return made.split
        for name, now, before in zip(("shards", "seed", "sizes"), asked, made.asked, strict=True):
            if now is not None and now is not before and (name == "shards" or now != before):
                raise ValueError(
                    f"this loader is split already, by other {name}; give them once, or the same"
                )
        return made.split

    def _made_anew(self, loader: DataLoader[Any], asked: tuple[Any, ...]) -> _Made | None:
        """Where a script makes its loader in each epoch, the split of the one before goes on with it.

        Else the crew's splits would be numbered by epochs, which a peer that comes late has not been through;
        and none would ever end.
        """
        turn, form, (shards, *others) = self.epochs.turn, loader_form(loader), asked
        for before, made in sorted(self._splits.items(), key=lambda item: item[1].portion.ordinal):
            alike = made.form == form and made.asked[0] is shards and [*made.asked[1:]] == others
            if alike and 0 < made.turn < turn and not self.epochs.went_through(made.portion):
                made.portion.take(loader)
                del self._splits[before]
                return replace(made, turn=turn)
        return None

    def _make(
        self,
        loader: DataLoader[Any],
        shards: Sequence[Sequence[int] | Indices] | None,
        seed: int | None,
        sizes: BatchSizes | None,
    ) -> _Made:
        transport, ordinal = self._transport, len(self._splits)
        portion = Portion(
            loader,
            transport.me,
            transport,
            seed=self._seed if seed is None else seed,
            shards=shards,
            ordinal=ordinal,
            on_epoch=self._report,
            sizes=sizes,
            founded=self._founded,
            epochs=self.epochs,
            busy_s=self._busy_s,
            late=transport.late,
        )
        self.epochs.restore(ordinal, portion)
        live = transport.live
        if ordinal == 0 and len(live) > 1 and transport.me == min(live) and not transport.late:
            # by one peer, and where it is seen
            _log.warning("%s", together(portion, len(live), self._target()))
        return _Made(Split(portion), portion, (shards, seed, sizes), loader_form(loader), self.epochs.turn)

    def moved(self) -> None:
        """This peer has another number."""
        for portion in self._portions:
            portion.moved(self._transport.me)
        self.epochs.moved()

    def give_back(self) -> None:
        """Others may use what this peer has claimed and not drawn."""
        for portion in self._portions:
            portion.give_back()

    def close(self) -> None:
        """This peer ends: it claims no more samples."""
        for portion in self._portions:
            portion.close()
