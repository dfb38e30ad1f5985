"""Outer steps on fragments in turn: the round's number says which; local steps may go on meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import ragtag
from ragtag.codecs.dense import fp32
from ragtag.core.channels import channel_of
from ragtag.core.schema import SchemaMismatch
from ragtag.core.types import Outcome
from ragtag.optim.outer import Nesterov, Streaming
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.state.capture import capture, restore
from tests.training.fake_transport import FakeCrew, FakeTransport, run_peers
from tests.training.test_optimizer import net, sgd

CHUNKS = 7


class Flat(nn.Module):
    """One parameter of ``CHUNKS`` chunks, the last one not full."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(CHUNKS * fp32.elements - 32, generator=draw))


def shift(seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1_000 + seed)
    return torch.randn(CHUNKS * fp32.elements - 32, generator=draw)


def part(round_: int, fragments: int) -> slice:
    """Where a round's values lie in ``Flat``."""
    rows = -(-CHUNKS // fragments) * fp32.elements
    at = round_ % fragments
    return slice(at * rows, (at + 1) * rows)


def crew_of(model: nn.Module, transport: FakeTransport, outer: object, **options: object) -> CrewOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"every": 1, "outer": outer, **options}
    return CrewOptimizer(inner, transport, model=model, **options)  # type: ignore[arg-type]


def take(model: Flat, optimizer: CrewOptimizer, seed: int) -> None:
    """A local step that moves the model by ``shift(seed)``."""
    model.w.grad = -shift(seed)
    optimizer.step()


def peers(n: int, rounds: int, outer: Streaming | Nesterov, every: int = 1) -> tuple[list[Flat], FakeCrew]:
    models, crew = [Flat(peer) for peer in range(n)], FakeCrew(n)

    def train(transport: FakeTransport) -> None:
        optimizer = crew_of(models[transport.me], transport, outer, every=every)
        for step in range(rounds * every):
            take(models[transport.me], optimizer, step * n + transport.me)

    run_peers(crew, train)
    return models, crew


def by_hand(n: int, rounds: int, outer: Streaming) -> list[torch.Tensor]:
    """The same in the paper's words, a peer after the other, with torch's SGD as outer optimizer."""
    models = [Flat(peer).w.detach().clone() for peer in range(n)]
    anchors: dict[int, nn.Parameter] = {}
    optimizers: dict[int, torch.optim.SGD] = {}
    for round_ in range(rounds):
        for peer, model in enumerate(models):
            model += shift(round_ * n + peer)
        at, fragment = part(round_, outer.fragments), round_ % outer.fragments
        mean = torch.stack([model[at] for model in models]).mean(0)
        if fragment not in anchors:
            anchors[fragment] = nn.Parameter(mean.clone())
            rule = outer.rule
            optimizers[fragment] = torch.optim.SGD(
                [anchors[fragment]], lr=rule.learning_rate, momentum=rule.momentum, nesterov=True
            )
        else:
            anchors[fragment].grad = anchors[fragment].detach() - mean
            optimizers[fragment].step()
        for model in models:
            model[at] = anchors[fragment].detach()
    return models


@pytest.mark.parametrize("fragments", [1, 2, 3, CHUNKS])
def test_each_round_steps_one_fragment(fragments: int) -> None:
    outer = Streaming(Nesterov(), fragments)
    models, _ = peers(3, 3 * fragments + 1, outer)
    for model, aim in zip(models, by_hand(3, 3 * fragments + 1, outer), strict=True):
        torch.testing.assert_close(model.w.detach(), aim, rtol=1e-4, atol=1e-4)


def test_a_round_moves_a_fragments_bytes() -> None:
    def sent(fragments: int) -> int:
        _, crew = peers(2, 4, Streaming(Nesterov(), fragments))
        return sum(run.payload.nbytes for run in crew.sent if run.key.channel == channel_of("model"))

    assert sent(CHUNKS) * CHUNKS == sent(1)


def skipping(
    rounds_of: Callable[[int], bool], fragments: int, rounds: int
) -> tuple[list[Flat], list[Outcome]]:
    """Peer 2 of 3 takes part where ``rounds_of`` says; its outcomes. Each fragment holds its own number."""
    crew, models = FakeCrew(3), [Flat(0) for _ in range(3)]
    optimizers = []
    for peer, model in enumerate(models):
        for round_ in range(fragments):
            model.w.data[part(round_, fragments)] = float(round_)
        optimizers.append(crew_of(model, crew.transport(peer), ragtag.Outer(1.0, 0.0, fragments=fragments)))
    seen: list[Outcome] = []
    for round_ in range(rounds):
        there = [0, 1, 2] if rounds_of(round_) else [0, 1]
        crew.present = set(there)

        def average(transport: FakeTransport, there: list[int] = there) -> None:
            if transport.me in there:
                outcome = optimizers[transport.me].average()
                if transport.me == 2:
                    seen.append(outcome)

        run_peers(crew, average)
    return models, seen


@pytest.mark.parametrize("skipped", [1, 4, 11])
def test_a_peer_that_skips_rounds_agrees_which_fragment_is_next(skipped: int) -> None:
    """A fragment's values are its number: averaged with another one's they would not be whole."""
    fragments = 3
    models, outcomes = skipping(lambda r: r < 2 or r > 2 + skipped, fragments, 2 + skipped + 5)
    numbers = [outcome.round for outcome in outcomes]
    assert numbers[:2] == [0, 1]
    assert numbers[-1] - numbers[1] > len(numbers) - 2  # it did skip
    assert any(outcome.averaged.all() and outcome.round > 2 + skipped for outcome in outcomes)
    for outcome in outcomes:
        start = part(outcome.round, fragments).start
        filled = max(0, min(outcome.mean.size, len(models[0].w) - start))
        assert set(outcome.mean.reshape(-1)[:filled].tolist()) == {float(outcome.round % fragments)}
    for model in models:
        for round_ in range(fragments):
            assert set(model.w[part(round_, fragments)].tolist()) == {float(round_)}


def test_local_steps_go_on_while_a_fragment_is_averaged() -> None:
    """Of what the fragment becomes in ``delay`` steps a share is kept, and all of what the others become."""
    n, every, delay, kept = 2, 4, 2, 0.25
    outer = Streaming(Nesterov(1.0, 0.0), 2, delay, kept)
    models = [Flat(peer) for peer in range(n)]
    crew = FakeCrew(n)

    def train(transport: FakeTransport) -> None:
        optimizer = crew_of(models[transport.me], transport, outer, every=every)
        for step in range(3 * every + delay):
            take(models[transport.me], optimizer, step * n + transport.me)

    run_peers(crew, train)
    aims = [Flat(peer).w.detach().clone() for peer in range(n)]
    sent = [aim.clone() for aim in aims]
    for step in range(1, 3 * every + delay + 1):
        for peer, aim in enumerate(aims):
            aim += shift((step - 1) * n + peer)
        round_, since = divmod(step, every)
        if since == 0 and round_ <= 3:
            sent = [aim.clone() for aim in aims]
        if since == delay and round_ >= 1:
            at = part(round_ - 1, 2)
            mean = torch.stack([s[at] for s in sent]).mean(0)
            for aim in aims:
                aim[at] = kept * aim[at] + (1 - kept) * mean
    for model, aim in zip(models, aims, strict=True):
        torch.testing.assert_close(model.w.detach(), aim, rtol=1e-4, atol=1e-4)


def test_the_last_average_can_be_waited_for() -> None:
    model = Flat()
    outcomes: list[Outcome] = []
    optimizer = crew_of(
        model, FakeCrew(1).transport(0), ragtag.Outer(delay=3), every=5, on_outcome=outcomes.append
    )
    for step in range(6):
        take(model, optimizer, step)
    assert outcomes == []
    assert optimizer._averaged.progress == (6, 1)
    optimizer.average()
    assert [outcome.round for outcome in outcomes] == [0, 1]
    for step in range(5):
        take(model, optimizer, step)
    restore(
        capture(optimizer._averaged), optimizer._averaged
    )  # an average under way is of what was here before
    optimizer.average()
    assert outcomes[-1].round == 3
    assert len(outcomes) == 3


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_who_resumes_amid_the_fragments_goes_on_as_if_never_stopped(rounds: int) -> None:
    """Rounds are counted anew after a restart: here they are made to begin with the fragment that is due."""
    fragments, models = 3, [Flat(), Flat(5)]
    optimizers = [crew_of(m, FakeCrew(1).transport(0), ragtag.Outer(fragments=fragments)) for m in models]
    for step in range(rounds):
        take(models[0], optimizers[0], step)
    for _ in range(rounds % fragments):
        optimizers[1].average()
    restore(capture(optimizers[0]._averaged), optimizers[1]._averaged)
    state = optimizers[1]._averaged.outer_state
    assert state["begun"] == [at < rounds for at in range(fragments)]
    for step in range(rounds, rounds + 6):
        for model, optimizer in zip(models, optimizers, strict=True):
            take(model, optimizer, step)
    assert torch.equal(models[0].w, models[1].w)


def test_another_number_of_fragments_takes_what_all_have() -> None:
    """Once all fragments have an anchor it does not matter how many there are; before, all begin anew."""
    model = Flat()
    optimizer = crew_of(model, FakeCrew(1).transport(0), ragtag.Outer(fragments=3))
    other = crew_of(Flat(), FakeCrew(1).transport(0), ragtag.Outer(fragments=2))
    for step in range(3):
        take(model, optimizer, step)
        other._averaged.outer_state = optimizer._averaged.outer_state
        assert bool(other._averaged.outer_state) == (step == 2)
    assert torch.equal(
        other._averaged.outer_state["anchor"]["w"], optimizer._averaged.outer_state["anchor"]["w"]
    )


def test_tensors_that_do_not_live_in_the_table_keep_what_is_not_the_rounds() -> None:
    """A float64 and a bfloat16 parameter, in fragments that end in the midst of them."""
    model = nn.Module()
    model.a = nn.Parameter(torch.randn(1_000, dtype=torch.float64))  # type: ignore[assignment]
    model.b = nn.Parameter(torch.randn(1_000).to(torch.bfloat16))  # type: ignore[assignment]
    before = copy.deepcopy(model.state_dict())
    optimizer = crew_of(model, FakeCrew(1).transport(0), ragtag.Outer(1.0, 0.0, fragments=4))
    for _ in range(4):
        optimizer.average()
    assert torch.equal(model.b, before["b"])
    torch.testing.assert_close(model.a.detach(), before["a"], rtol=1e-6, atol=1e-6)


def test_buffers_take_their_part_of_the_average() -> None:
    models = [net(), net()]
    for at, model in enumerate(models):
        model[1].running_mean.fill_(float(at))

    def train(transport: FakeTransport) -> None:
        model = models[transport.me]
        outer = ragtag.Outer(fragments=1, delay=1)
        optimizer = CrewOptimizer(sgd(model), transport, outer=outer, every=2, model=model)
        optimizer.average()

    run_peers(FakeCrew(2), train)
    assert models[0][1].running_mean.tolist() == [0.5] * 8 == models[1][1].running_mean.tolist()


def test_what_cannot_be_is_refused() -> None:
    crew = FakeCrew(2)
    crew_of(Flat(), crew.transport(0), ragtag.Outer(fragments=2))
    with pytest.raises(SchemaMismatch, match="one part in 3, the other 2"):
        crew_of(Flat(), crew.transport(1), ragtag.Outer(fragments=3))
    with pytest.raises(ValueError, match=f"at most {CHUNKS}"):
        crew_of(Flat(), FakeCrew(1).transport(0), ragtag.Outer(fragments=CHUNKS + 1))
    with pytest.raises(ValueError, match="averages in groups"):
        crew_of(Flat(), FakeCrew(1).transport(0), ragtag.Outer(fragments=2), method=ragtag.Moshpit())
    with pytest.raises(ValueError, match="compress"):
        crew_of(Flat(), FakeCrew(1).transport(0), ragtag.Outer(delay=1), compress=ragtag.TopK(ratio=0.1))
    for options in ({"fragments": 0}, {"fragments": 1.5}, {"delay": -1}, {"delay": 1, "kept": 1.5}):
        with pytest.raises(ValueError, match=r"from|or more"):
            ragtag.Outer(**options)  # type: ignore[arg-type]
    assert ragtag.Outer() == Nesterov()
    assert np.isclose(ragtag.Outer(fragments=2).kept, 0.5)  # type: ignore[union-attr]
