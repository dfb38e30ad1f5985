"""What a peer keeps beside its model: loaded once, with the options that its optimizers had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.state.keeper import StateKeeper
from tests.training.simulated import TappedCrew

RATES = {"a": 0.1, "b": 0.01}


class Kept:
    """One process with two optimizers, and a scheduler for each that was made after them."""

    def __init__(self, folder: Path) -> None:
        self.folder, transport = folder, TappedCrew(1).transport(0)
        self.keeper = StateKeeper(0, 1, lambda note: None)
        self.optimizers: dict[str, CrewOptimizer] = {}
        self.schedulers: dict[str, LRScheduler] = {}
        for name, lr in RATES.items():
            model = nn.Linear(2, 1)
            inner = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
            self.optimizers[name] = CrewOptimizer(inner, transport, model=model, name=name)
            self.keeper.take_in(self.optimizers[name]._averaged)

    def resume(self) -> None:
        assert self.keeper.resume(self.folder) is not None

    def schedule(self) -> None:
        """Make the schedulers, and keep them."""
        for name, optimizer in self.optimizers.items():
            self.schedulers[name] = LinearLR(optimizer.inner, start_factor=0.5, total_iters=100)
        self.keeper.keep(**self.schedulers)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for name, optimizer in self.optimizers.items():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                self.schedulers[name].step()

    @property
    def rates(self) -> list[float]:
        return [group["lr"] for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    @property
    def counts(self) -> list[int]:
        return [scheduler.last_epoch for scheduler in self.schedulers.values()]


@pytest.fixture
def trained(tmp_path: Path) -> Kept:
    """A process that has taken some steps and saved."""
    made = Kept(tmp_path)
    made.schedule()
    made.train(30)
    made.keeper.save(tmp_path, 1)
    return made


def test_all_optimizers_have_the_rates_that_were_saved(trained: Kept) -> None:
    again = Kept(trained.folder)
    again.resume()
    again.schedule()
    assert again.rates == trained.rates
    again.train(3)
    trained.train(3)
    assert again.rates == trained.rates, "and go on from there"


def test_what_was_found_is_loaded_once(trained: Kept) -> None:
    """Keeping something again, or something more, rolls nothing back."""
    trained.keeper.keep(more=nn.Linear(1, 1))
    trained.keeper.save(trained.folder, 1)
    again = Kept(trained.folder)
    again.resume()
    again.schedule()
    again.train(5)
    rates, counts = again.rates, again.counts
    again.keeper.keep(**again.schedulers)
    again.keeper.keep(new=nn.Linear(1, 1))
    assert (again.rates, again.counts) == (rates, counts) and counts == [35, 35]
    more = nn.Linear(1, 1)
    again.keeper.keep(more=more)
    kept = trained.keeper.extra["more"]
    assert isinstance(kept, nn.Linear) and torch.equal(more.weight, kept.weight), "what was found, at last"
    assert again.rates == rates, "the scheduler has gone on meanwhile"


def test_what_does_not_load_may_be_kept_again(trained: Kept) -> None:
    trained.keeper.keep(more=nn.Linear(1, 1))
    trained.keeper.save(trained.folder, 1)
    again = Kept(trained.folder)
    again.resume()
    more = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="size mismatch"):
        again.keeper.keep(more=nn.Linear(2, 1))
    again.keeper.keep(more=more)
    kept = trained.keeper.extra["more"]
    assert isinstance(kept, nn.Linear) and torch.equal(more.weight, kept.weight)


def test_a_checkpoint_that_does_not_fit_is_named(trained: Kept) -> None:
    """A folder has several, and maybe another training's."""
    again = Kept(trained.folder)
    again.optimizers["a"].param_groups[0]["params"] = []
    with pytest.raises(ValueError, match=r"checkpoint .*/peer-00-step-000030.ragtag does not fit: "):
        again.resume()


def test_a_later_state_is_loaded_into_what_is_kept_already(trained: Kept) -> None:
    again = Kept(trained.folder)
    again.schedule()
    again.train(2)
    again.resume()
    assert (again.rates, again.counts) == (trained.rates, trained.counts)
