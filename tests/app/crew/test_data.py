"""A peer's splits: which one a loader gets, so that all peers number theirs alike."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch.utils.data import DataLoader

from ragtag.app.crew.data import Data
from tests.training.test_epochs import together
from tests.training.test_split import Crew, Numbers, Seat, Stream, flat


@dataclass
class Chair(Seat):
    """A seat that a newcomer may have."""

    late: bool = False


SIZE = 40


def fresh(batch: int = 2) -> DataLoader[int]:
    return DataLoader(Numbers(SIZE), batch_size=batch, shuffle=True)


class Script:
    """A process whose loop makes loaders where it needs them. log: (split, epoch, sample) of all drawn."""

    def __init__(self, crew: Crew, me: int, late: bool = False) -> None:
        chair: Any = Chair(crew, me, late)
        self.data = Data(chair, 7, 2, round=lambda: -1, busy_s=lambda: 0.0, report=lambda report: None)
        self.log: list[tuple[str, int, int]] = []

    def train(self, n: int, **loaders: Callable[[], DataLoader[int]]) -> Iterator[int]:
        """Go through what each gives, one after the other, in each epoch; stops after each batch."""
        for epoch in self.data.count(n):
            for name, loader in loaders.items():
                for batch in self.data.split(loader(), None, None, None):
                    self.log += [(name, epoch, sample) for sample in flat(batch)]
                    yield epoch
        yield n


def drawn(name: str, epoch: int, *scripts: Script) -> list[int]:
    return sorted(sample for each in scripts for of, at, sample in each.log if (of, at) == (name, epoch))


def advanced(crew: Crew, epoch: int, n: int, **loaders: Any) -> tuple[Script, Iterator[int]]:
    script = Script(crew, 0)
    training = script.train(n, **loaders)
    while next(training) < epoch:
        pass
    return script, training


def test_a_newcomer_draws_with_the_others_whose_loaders_are_made_anew_in_each_epoch() -> None:
    crew = Crew.of(2)
    member, training = advanced(crew, 4, 7, train=fresh)
    newcomer = Script(crew, 1, late=True)
    together(training, newcomer.train(7, train=fresh))
    assert newcomer.log
    for epoch in range(7):
        assert drawn("train", epoch, member, newcomer) == list(range(SIZE))


@pytest.mark.parametrize("kept", ["train", "validation", ""])
def test_several_loaders_keep_to_their_own_splits(kept: str) -> None:
    """Those that are made anew, and one that is made once, of the same form."""
    crew = Crew.of(2)
    once = [fresh(), fresh()]

    def loaders(me: int) -> dict[str, Callable[[], DataLoader[int]]]:
        return {name: (lambda: once[me]) if name == kept else fresh for name in ("train", "validation")}

    first, second = Script(crew, 0), Script(crew, 1)
    for script, loader in zip((first, second), once, strict=True):
        if kept:
            script.data.split(loader, None, None, None)
    together(first.train(4, **loaders(0)), second.train(4, **loaders(1)))
    for epoch in range(4):
        for name in ("train", "validation"):
            assert drawn(name, epoch, first, second) == list(range(SIZE))
    assert len(first.data.epochs.state_dict()["splits"]) == 2


def test_loaders_that_are_gone_leave_nothing_behind() -> None:
    made: list[weakref.ref[DataLoader[int]]] = []

    def loader() -> DataLoader[int]:
        new = fresh()
        made.append(weakref.ref(new))
        return new

    script = Script(Crew.of(1), 0)
    together(script.train(5, train=loader))
    gc.collect()
    assert sum(ref() is not None for ref in made) == 1 and len(made) == 5
    assert list(script.data.epochs.state_dict()["splits"]) == ["0"]
    assert script.data.samples == 5 * SIZE


def test_a_loader_of_another_form_has_a_split_of_its_own() -> None:
    script = Script(Crew.of(1), 0)
    others: list[Callable[[], DataLoader[int]]] = [
        fresh,
        lambda: fresh(4),
        lambda: DataLoader(Numbers(SIZE), batch_size=2),
        lambda: DataLoader(Numbers(SIZE - 1), batch_size=2, shuffle=True),
        lambda: DataLoader(Numbers(SIZE), batch_size=2, shuffle=True, drop_last=True),
        lambda: DataLoader(Stream(SIZE), batch_size=2),
    ]
    numbers = []
    for epoch in script.data.count(2 * len(others)):
        split = script.data.split(others[epoch % len(others)](), None, None, None)
        assert [sample for batch in split for sample in flat(batch)]
        numbers.append(split._portion.ordinal)
    assert numbers == [0, 1, 2, 3, 4, 5] * 2
    for epoch in script.data.count(2 * len(others) + 1):
        split = script.data.split(fresh(), None, epoch, None)
        assert split._portion.ordinal == 6, "and so has one with another seed"


def test_outside_of_epochs_each_loader_has_a_split_of_its_own() -> None:
    data = Script(Crew.of(1), 0).data
    assert [data.split(fresh(), None, None, None)._portion.ordinal for _ in range(3)] == [0, 1, 2]
