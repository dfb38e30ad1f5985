"""A peer of a DDP crew that was away for many rounds, in virtual time: how it gets into step again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import ragtag
from ragtag.core.channels import channel_of
from ragtag.core.types import Outcome
from ragtag.hooks.crew_hook import MODELS_EVERY, CrewState, has_come, models_due
from tests.training.fake_transport import FakeCrew, FakeTransport, run_peers

MODELS = channel_of("gradients/models")
GOES, STEPS = 21, 230
BACK_S = 30.0


@dataclass
class Member:
    """What the hook needs of a crew, and what it told."""

    transport: FakeTransport
    models: list[Outcome] = field(default_factory=list)

    @property
    def _peer(self) -> Member:
        return self

    def take_name(self, name: str | None, kind: str) -> str:
        return kind if name is None else name

    def averages(self, what: Any) -> None:
        pass

    def enter(self, channel: int) -> bool:
        return False

    def stepped_by_hook(self, channel: int) -> None:
        pass

    def record_round(self, outcome: Outcome) -> None:
        if outcome.channel == MODELS:
            self.models.append(outcome)


@dataclass
class Seen:
    rounds: list[int]
    behind: list[bool]
    models: list[Outcome]
    weights: torch.Tensor


def away(comes: int) -> list[Seen]:
    """Peer 1 of three goes at its step ``GOES``, and is back when the others begin their step ``comes``."""
    crew, back = FakeCrew(3), threading.Event()

    def train(transport: FakeTransport) -> Seen:
        me, member = transport.me, Member(transport)
        torch.manual_seed(me)
        module = torch.nn.Linear(40, 40)
        state = CrewState(member, module)
        ddp = ragtag.hooks.ddp(module, state)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        source = torch.Generator().manual_seed(me)
        rounds, behind = [], []
        for step in range(STEPS if me != 1 else GOES + STEPS - comes):
            if (me, step) == (1, GOES):
                crew.leave(1)
                assert back.wait(BACK_S)
            if (me, step) == (0, comes):
                with crew._changed:
                    crew.present.add(1)  # from now on the others wait for it to begin
                back.set()
            optimizer.zero_grad()
            ddp(torch.randn(8, 40, generator=source)).square().mean().backward()
            optimizer.step()
            assert state.outcome is not None
            rounds.append(state.outcome.round)
            behind.append(state.behind)
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        return Seen(rounds, behind, member.models, weights)

    return run_peers(crew, train)


@pytest.mark.parametrize("comes", [100, 150, 159, 160, 161])
def test_one_that_was_away_gives_nothing_until_it_has_the_others_model(comes: int) -> None:
    """What it has of their rounds of models is as old as its own model, and its count of them, too."""
    seen = away(comes)
    late = seen[1]
    came = late.behind.index(True)
    assert came <= GOES + 2
    steps = late.behind.index(False, came) - came
    assert steps <= 2 * MODELS_EVERY, "it takes the model of the next round, or of the one after"
    others = {outcome.round: outcome for outcome in seen[0].models if outcome.round}
    since = [outcome for outcome in late.models if outcome.round >= models_due(comes, MODELS_EVERY)]
    takes = next(at for at, outcome in enumerate(since) if outcome.averaged.all())
    assert (since[takes].heard == 0b101).all(), "it gives nothing"
    for outcome in since[takes + 1 :]:
        assert (outcome.heard == 0b111).all(), "from then on it is one of them"
    assert since[-1].round == max(others)
    for outcome in others.values():  # where it takes it may still be late, as owner of a block
        assert outcome.round == since[takes].round or outcome.averaged.all(), "no round of theirs is spoilt"


def test_where_all_were_away_nobody_waits_for_a_model() -> None:
    """Each has skipped many rounds, by the other's word; the next round of models makes them peers again."""
    crew = FakeCrew(2)

    def train(transport: FakeTransport) -> tuple[bool, bool]:
        member = Member(transport)
        module = torch.nn.Linear(40, 40)
        state = CrewState(member, module)
        state._averaged.behind = True
        both = state.average_models()
        state._averaged.behind = True
        if transport.me == 1:
            return has_come(both), False
        crew.leave(1)
        state.average_models()
        return has_come(both), state.behind

    assert run_peers(crew, train) == [(True, True), (True, False)]


def test_all_begin_with_the_integers_of_one() -> None:
    """Floats are averaged; a permutation, or a step's count, is one peer's on all, as DDP has it."""

    def begun(transport: FakeTransport) -> torch.nn.Module:
        torch.manual_seed(transport.me)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        module.register_buffer("order", torch.randperm(12) + (1 << 40))
        module[1].num_batches_tracked += 7 * transport.me
        CrewState(Member(transport), module)
        return module

    first, *others = run_peers(FakeCrew(3), begun)
    for other in others:
        for name, value in first.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name


def test_one_that_takes_the_others_model_takes_their_integers() -> None:
    """What is beyond float32 stays its own; those that are not behind keep theirs."""

    def mixed(transport: FakeTransport) -> torch.nn.Module:
        me = transport.me
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        module.register_buffer("order", torch.randperm(12))
        module.register_buffer("begun", torch.tensor([True, False]))
        module.register_buffer("large", torch.tensor([(1 << 40) + 1]))
        state = CrewState(Member(transport), module)
        if me == 2:
            module.order.copy_(module.order.flip(0))  # type: ignore[operator, union-attr]
            module.begun.logical_not_()  # type: ignore[operator, union-attr]
            module.large += 5
            state._averaged.behind = True
        module[1].num_batches_tracked += (700, 704, 3)[me]
        state.average_models()
        return module

    first, second, late = run_peers(FakeCrew(3), mixed)
    for name in ("order", "begun"):
        assert torch.equal(late.get_buffer(name), first.get_buffer(name)), name
    assert late.large == (1 << 40) + 6
    counts = [int(module[1].num_batches_tracked) for module in (first, second, late)]
    assert counts == [700, 704, 702]
