"""A target batch in virtual time: what a step is made of, and what becomes of every sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ragtag.core.errors import NotFinite
from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.core.types import Outcome, nobodys
from ragtag.schedules.target import Doing, Tally
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.align.plan import Align
from ragtag.training.optimizer import account, gathering
from ragtag.training.optimizer.account import Account, Accounting
from ragtag.training.optimizer.gathering import Gathering
from ragtag.training.optimizer.modes import Gradients
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.training.fake_transport import FakeCrew
from tests.training.test_pace import Board

DIM = 12
SPEEDS = (1.0, 1.6, 2.3, 4.0)
ROWS = np.zeros((4, 8), np.float32)
MEANT = torch.linspace(-1, 1, DIM)


@cache
def samples_of(peer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A peer's own."""
    draw = torch.Generator().manual_seed(peer)
    x = torch.randn(20_000, DIM, generator=draw)
    return x, x @ MEANT + 0.1 * torch.randn(20_000, generator=draw)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(DIM, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def gradient(model: nn.Module, ids: list[tuple[int, int]]) -> None:
    """The mean loss of these samples (peer, number), backwards."""
    x = torch.stack([samples_of(peer)[0][number] for peer, number in ids])
    y = torch.stack([samples_of(peer)[1][number] for peer, number in ids])
    model.zero_grad()
    (model(x).squeeze(1) - y).square().mean().backward()


@dataclass
class Peer:
    """What one peer has seen: which of its samples were counted in which step, and what it ends with."""

    counted: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: Account = field(default_factory=lambda: Account(0.0))
    computed: int = 0


def train(
    transport: SimulatedTransport,
    steps: int,
    target: float = 96,
    batch: Callable[[int], int] = lambda me: 4 + me,
    each: Callable[[CrewOptimizer, int], None] = lambda optimizer, number: None,
    **options: Any,
) -> Peer:
    """Train until the crew has made so many steps. each: called after each batch."""
    me, seen = transport.me, Peer()
    model, inner = made()
    here: list[tuple[int, int]] = []
    size = batch(me)

    def over(outcome: Outcome) -> None:
        seen.outcomes.append(outcome)
        counted, before = optimizer.samples, seen.samples
        assert counted is not None
        if counted.counted - before.counted == len(here) and here:
            seen.counted[outcome.round] = list(here)
        seen.samples = counted
        seen.weights[outcome.round] = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
        here.clear()

    options = {"method": "allreduce", "weight": lambda: size, **options}
    optimizer = CrewOptimizer(
        inner, transport, model=model, average="gradients", target_batch=target, on_outcome=over,
        on_note=lambda note: seen.notes.append(note.detail), **options,
    )  # fmt: skip
    number = 0
    while len(seen.outcomes) == 0 or seen.outcomes[-1].round < steps - 1:
        transport.compute(size)
        ids = [(me, seen.computed + i) for i in range(size)]
        here += ids
        seen.computed += size
        gradient(model, ids)
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        each(optimizer, number)
    optimizer._averaged.settle()
    assert optimizer.samples is not None
    seen.samples = optimizer.samples
    return seen


def accounted(peer: Peer) -> None:
    """Each sample is counted, dropped or pending, once."""
    of = peer.samples
    assert of.computed == peer.computed
    assert of.counted + sum(of.dropped.values()) + of.pending == pytest.approx(of.computed)
    assert all(n >= 0 for n in of.dropped.values()) and of.pending == 0, "training has ended"


def test_steps_are_those_of_one_process_on_the_samples_that_they_count() -> None:
    steps = 8
    crew = SimulatedCrew(
        4, Faults(latency_s=0.005), seed=2, cost=ComputeCost(0.01, SPEEDS, 0.3, seed=4), check=True
    )
    peers = [peer for peer in crew.run(lambda transport: train(transport, steps)) if peer is not None]
    for peer in peers:
        accounted(peer)
        assert not peer.samples.dropped.keys() - {account.ENDED}
        assert torch.equal(peer.weights[steps - 1], peers[0].weights[steps - 1])
    model, inner = made()
    for step in range(steps):
        ids = [one for peer in peers for one in peer.counted.get(step, [])]
        assert 96 <= len(ids) == peers[0].outcomes[step].weight.max(), "all of the step's weight"
        gradient(model, ids)
        inner.step()
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        torch.testing.assert_close(peers[0].weights[step], weights, rtol=1e-4, atol=1e-6)
    used = [one for peer in peers for ids in peer.counted.values() for one in ids]
    assert len(used) == len(set(used))
    fastest, slowest = peers[3].samples.counted, peers[0].samples.counted
    assert fastest > 2.5 * slowest, "each at its own pace"


def test_a_step_has_the_target_and_little_more() -> None:
    crew = SimulatedCrew(
        4, Faults(latency_s=0.005), seed=3, cost=ComputeCost(0.01, SPEEDS, 0.2, seed=1), check=True
    )
    peers = [p for p in crew.run(lambda t: train(t, 10, 256, lambda me: 4)) if p is not None]
    weights = [float(outcome.weight.max()) for outcome in peers[0].outcomes]
    assert min(weights) >= 256
    assert sum(weights) / len(weights) <= 256 + 2 * 4, "two batches of one peer more, of four peers"
    assert peers[0].samples.overshoot == pytest.approx(sum(weights) / len(weights) / 256 - 1)
    for peer in peers:
        assert peer.samples.goodput > 0.75


@pytest.mark.parametrize(
    ("method", "repairs"), [("allreduce", True), pytest.param("rps", False, marks=pytest.mark.slow)]
)
def test_through_loss_freezes_and_death_each_sample_has_one_fate(method: str, repairs: bool) -> None:
    faults = Faults(
        latency_s=0.005, loss=Loss(0.05), crashes=(Crash(1, 1.8),), freezes=(Freeze(2, 1.3, 1.2),)
    )
    crew = SimulatedCrew(
        6, faults, seed=7, cost=ComputeCost(0.01, (1, 2, 2, 2, 3, 4), 0.3, seed=2), check=True
    )
    found = crew.run(lambda transport: train(transport, 16, 128, lambda me: 4, method=method))
    assert found[1] is None
    peers = [peer for peer in found if peer is not None]
    assert len(peers) == 5
    for peer in peers:
        accounted(peer)
    stayed = [peer.samples for at, peer in enumerate(found) if peer is not None and at != 2]
    dropped = sum(sum(of.dropped.values()) for of in stayed)
    computed = sum(of.computed for of in stayed)
    assert dropped <= (0.05 if repairs else 0.3) * computed, dropped / computed
    if not repairs:
        assert any(of.dropped.get(account.LOST, 0) > 0 for of in stayed)
    frozen = peers[1].samples  # peer 2
    assert frozen.steps < peers[0].samples.steps, "steps were made without it"
    weights = sorted(float(outcome.weight.max()) for outcome in peers[0].outcomes)
    if repairs:
        assert weights[5] >= 128 and weights[0] >= 0.7 * 128, "a peer that dies was counted for little"
    assert sum(weights) / len(weights) >= 0.8 * 128


@pytest.mark.parametrize("overlap", [False, True])
def test_what_an_owner_that_died_was_given_is_in_the_mean_after_it(overlap: bool) -> None:
    """The gradient of each sample of peer p is 1 at value p, so that a step's mean, times its weight, counts
    the samples of each peer in it. All values are in one chunk, and peer 0 owns it.
    """
    in_means, seen = np.zeros(DIM), dict[int, Account]()
    untold: list[int] = []

    def body(transport: SimulatedTransport) -> Account:
        me, size = transport.me, 4 + transport.me
        model = nn.Linear(DIM, 1, bias=False)
        last = [0]

        def over(outcome: Outcome) -> None:
            last[0] = outcome.round
            if me == 3 and outcome.averaged[0]:
                in_means[:] += outcome.mean[0, :DIM] * outcome.weight[0]
            elif me == 3:
                untold.append(outcome.round)
            assert optimizer.samples is not None
            seen[me] = optimizer.samples

        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3), transport, model=model, average="gradients",
            target_batch=96, on_outcome=over, method="allreduce", weight=lambda: size, overlap=overlap,
            align=False,
        )  # fmt: skip
        while last[0] < 12:
            transport.compute(size)
            optimizer.zero_grad()
            model.weight[0, me].backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return seen[me]

    faults = Faults(latency_s=0.01, crashes=(Crash(0, 1.7),))
    SimulatedCrew(4, faults, 5, cost=ComputeCost(0.02, SPEEDS, 0.2, 5)).run(body)
    assert untold, "rounds went on without an owner"
    for peer in (1, 2, 3):
        of = seen[peer]
        assert of.counted == pytest.approx(float(in_means[peer]), rel=1e-5)
        assert "untold" not in of.dropped
        assert of.counted + of.pending + sum(of.dropped.values()) == pytest.approx(of.computed)


def test_a_peer_too_slow_for_the_target_keeps_in_step_and_says_so() -> None:
    crew = SimulatedCrew(4, Faults(latency_s=0.005), seed=1, cost=ComputeCost(0.05, (0.1, 4, 4, 4), 0.1))
    peers = [
        p for p in crew.run(lambda t: train(t, 20, 48, lambda me: 4, align=Align(every=5))) if p is not None
    ]
    assert torch.equal(peers[0].weights[19], peers[3].weights[19])
    assert any("give smaller batches here, or a target above 48" in note for note in peers[0].notes)
    assert peers[0].samples.counted < 0.1 * peers[3].samples.counted
    slow_s = sum(outcome.total_s for outcome in peers[3].outcomes[2:])
    assert slow_s < 18 * 0.15, "nobody waits for its batches, of 2 s"


def test_a_target_below_one_batch_is_said() -> None:
    crew = SimulatedCrew(2, Faults(latency_s=0.005), cost=ComputeCost(0.01))
    peers = [p for p in crew.run(lambda t: train(t, 4, 3, lambda me: 4)) if p is not None]
    for peer in peers:
        assert any("a batch here counts 4 samples, and target_batch is 3" in note for note in peer.notes)
        accounted(peer)


def test_the_last_peer_goes_on_alone_and_says_how_long_a_step_takes() -> None:
    faults = Faults(latency_s=0.005, crashes=(Crash(1, 1.0), Crash(2, 1.0), Crash(3, 1.0)))
    crew = SimulatedCrew(4, faults, seed=1, cost=ComputeCost(0.01))
    (peer,) = [p for p in crew.run(lambda t: train(t, 12, 64, lambda me: 4)) if p is not None]
    accounted(peer)
    assert any("goes on alone, and takes 0.64 s for a step" in note for note in peer.notes)
    assert all(float(o.weight.max()) == 64 for o in peer.outcomes[-3:])
    assert peer.samples.dropped.get(account.UNTOLD, 0) <= 3 * 64, "once they count as dead all counts"


class Liar:
    """A transport of a peer whose posts of samples say something else. says: the tally, changed."""

    def __init__(
        self, transport: SimulatedTransport, says: Callable[[Tally], Tally | bytes], clock_s: float
    ) -> None:
        self._transport, self._says, self._clock_s = transport, says, clock_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def now_s(self) -> float:
        return self._transport.now_s() + self._clock_s

    def post_soon(self, topic: int, blob: bytes) -> None:
        if topic == gathering.POSTS:
            told = gathering.decode(blob)
            assert told is not None
            says = self._says(told[0])
            blob = says if isinstance(says, bytes) else gathering.encode(says, told[1])
        self._transport.post_soon(topic, blob)


def changed(tally: Tally, **to: Any) -> Tally:
    fields = {name: getattr(tally, name) for name in ("step", "samples", "batch", "batch_s", "doing")}
    return Tally(**{**fields, **to})


LIES: dict[str, tuple[Callable[[Tally], Tally | bytes], str]] = {
    "an absurd pace": (lambda t: changed(t, batch=1e13, batch_s=1e-12), ""),
    "no pace at all": (lambda t: changed(t, batch_s=math.nan), "cannot be read, or cannot be"),
    "other bytes": (lambda t: b"what", "cannot be read, or cannot be"),
    "more than there is": (lambda t: changed(t, samples=1e6), "it told of 1e+06 samples, of"),
    "a step far ahead": (lambda t: changed(t, step=t.step + (1 << 40)), "it told of step 10995116277"),
    "another doing": (lambda t: changed(t, doing=Doing.STANDS_BY), ""),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_is_said_and_the_crew_goes_on(lie: str) -> None:
    says, note = LIES[lie]
    crew = SimulatedCrew(4, Faults(latency_s=0.005), seed=1, cost=ComputeCost(0.01, sigma=0.1))

    def body(transport: SimulatedTransport) -> Peer:
        lied = Liar(transport, says, 0.0) if transport.me == 1 else transport
        return train(lied, 9, 96, lambda me: 4)  # type: ignore[arg-type]

    peers = [peer for peer in crew.run(body) if peer is not None]
    assert len(peers) == 4
    for at, peer in enumerate(peers):
        accounted(peer)
        if note and at != 1:
            assert any(note in said for said in peer.notes), peer.notes
    weights = [float(outcome.weight.max()) for outcome in peers[0].outcomes]
    assert sorted(weights)[2] >= 0.7 * 96, weights
    assert sum(weights[-5:]) / 5 >= 0.8 * 96, "and is hardly the worse for it"


def test_clocks_need_not_agree() -> None:
    def weights(clock_s: float) -> list[float]:
        crew = SimulatedCrew(4, Faults(latency_s=0.005), seed=1, cost=ComputeCost(0.01, SPEEDS, 0.2))

        def body(transport: SimulatedTransport) -> Peer:
            shifted = Liar(transport, lambda tally: tally, clock_s * transport.me)
            return train(shifted, 5)  # type: ignore[arg-type]

        peers = [peer for peer in crew.run(body) if peer is not None]
        return [float(outcome.weight.max()) for outcome in peers[0].outcomes]

    assert weights(0.0) == weights(4096.0)


@pytest.mark.slow
def test_a_peer_that_is_away_for_hours_gives_nothing_of_then() -> None:
    faults = Faults(latency_s=0.005, freezes=(Freeze(2, 1.02, 7200.0),))
    crew = SimulatedCrew(3, faults, seed=1, cost=ComputeCost(0.01))

    def each(optimizer: CrewOptimizer, number: int) -> None:
        peers = optimizer._averaged.scheduling._peers
        if peers.me != 2 and number == 30:
            peers.pause(7205.0 - peers.now_s())

    peers = [p for p in crew.run(lambda t: train(t, 12, 48, lambda me: 4, each)) if p is not None]
    for peer in peers:
        accounted(peer)
    late = peers[2].samples
    assert late.stale == 0 and late.dropped.get(account.LATE, 0) > 0
    assert late.counted > 0.2 * peers[0].samples.counted, "and gives again what is of now"


def test_sample_counts_survive_a_checkpoint_and_what_was_pending_is_said() -> None:
    model, inner = made()
    optimizer = CrewOptimizer(
        inner, FakeCrew(1).transport(0), model=model, average="gradients", target_batch=10, weight=4
    )

    def batch() -> None:
        gradient(model, [(0, 0)])
        optimizer.step()
        optimizer.zero_grad()

    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        batch()
    assert all(map(torch.equal, before, model.parameters())), "8 of 10: nothing has moved"
    batch()
    assert not all(map(torch.equal, before, model.parameters()))
    batch()
    of = optimizer.samples
    assert of is not None and (of.steps, of.counted, of.pending, of.step_samples) == (1, 12, 4, 12)
    state = optimizer.state_dict()
    other, inner = made()
    resumed = CrewOptimizer(
        inner, FakeCrew(1).transport(0), model=other, average="gradients", target_batch=10, weight=4
    )
    resumed.load_state_dict(state)
    of = resumed.samples
    assert of is not None
    assert (of.computed, of.counted, of.dropped, of.pending) == (16, 12, {account.RESTORED: 4}, 0)
    optimizer._averaged.settle()
    assert optimizer.samples is not None and optimizer.samples.dropped == {account.ENDED: 4}


@dataclass
class Posts(Board):
    """A board on which others told of their samples, and what this peer told."""

    mine: list[Tally] = field(default_factory=list)

    def post_soon(self, topic: int, blob: bytes) -> None:
        told = gathering.decode(blob)
        assert told is not None
        self.mine.append(told[0])


def accounting_of(peers: Any) -> Accounting:
    """Of the only optimizer of a peer."""
    gathering = Gathering(64, peers)
    gathering.joined()
    return Accounting(gathering)


def at_step(step: int, doing: Doing = Doing.COMPUTES) -> bytes:
    return gathering.encode(Tally(step, 10.0, 10.0, 1.0, doing), 0.0)


def test_gradients_of_a_step_that_was_made_without_this_peer_are_given_to_none() -> None:
    board = Posts(n=4, told={1: at_step(1), 2: at_step(1), 3: at_step(0)})
    here = accounting_of(board)
    here.stepped(10)
    assert here.offers() == 0.0
    assert here.account.dropped == {account.LATE: 10} and here.account.pending == 0
    assert board.mine[-1].doing is Doing.AVERAGES and board.mine[-1].samples == 0
    board = Posts(n=4, told={1: at_step(1), 2: at_step(0), 3: at_step(0)})
    here = accounting_of(board)
    here.stepped(10)
    assert here.offers() == 1.0 and here.account.pending == 10, "one peer alone has gone ahead"


def test_a_peer_whose_training_has_ended_is_counted_on_by_nobody() -> None:
    board = Posts(n=4)
    here = accounting_of(board)
    here.stepped(10)
    here.ends()
    assert here.account.dropped == {account.ENDED: 10}
    last = board.mine[-1]
    assert last.towards(0, 100.0) == 0 and last.doing is Doing.STANDS_BY


def test_of_a_mean_that_came_in_part_the_share_counts() -> None:
    crew = FakeCrew(3)
    here = accounting_of(crew.transport(1))
    for _ in range(4):
        here.stepped(10)
    assert here.offers() == 1.0
    one, two = np.uint64(0b101), np.uint64(0b111)
    heard, averaged = np.array([two, two, one, two]), np.array([True, True, True, False])
    here.averaged(replace(nobodys(0, ROWS, np.full(4, 70, np.float32), heard, None), averaged=averaged))
    of = here.account
    assert (of.computed, of.counted, of.pending) == (40, 20, 0)
    assert of.dropped == {account.LOST: 10, account.UNTOLD: 10}
    assert (of.step_samples, of.steps, here._gathering.step) == (70, 1, 1)


def test_gradients_that_overflow_are_dropped_and_said() -> None:
    model, inner = made()
    optimizer = CrewOptimizer(
        inner, FakeCrew(1).transport(0), model=model, average="gradients", target_batch=10, weight=4
    )
    optimizer._averaged.step(None, skipped=True)
    of = optimizer.samples
    assert of is not None and of.dropped == {account.OVERFLOWED: 4} and of.pending == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_samples_of_an_average_that_failed_are_dropped_and_said(overlap: bool) -> None:
    """The script goes on from it, as from one bad batch."""

    def body(transport: SimulatedTransport) -> None:
        model, inner = made()
        optimizer = CrewOptimizer(
            inner, transport, model=model, average="gradients", target_batch=8, weight=4, overlap=overlap
        )

        def batch(spoilt: bool) -> Account:
            transport.compute(4)
            gradient(model, [(0, 0)])
            if spoilt:
                next(model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
            try:
                optimizer.step()
            except NotFinite:
                raised.append(True)
            of = optimizer.samples
            assert of is not None
            assert of.counted + of.pending + sum(of.dropped.values()) == of.computed
            return of

        raised: list[bool] = []
        before = [p.detach().clone() for p in model.parameters()]
        batch(True)
        of = batch(False)
        assert raised == [True] and of.dropped == {account.FAILED: 8} and of.pending == 0
        assert all(map(torch.equal, before, model.parameters()))
        for _ in range(6):
            of = batch(False)
        assert raised == [True] and of.dropped == {account.FAILED: 8}
        assert of.computed == 32 and of.counted >= 16
        assert not any(map(torch.equal, before, model.parameters()))

    SimulatedCrew(1, Faults(latency_s=0.005), cost=ComputeCost(0.01)).run(body)


def test_a_peer_whose_average_failed_gathers_for_the_same_step_and_tells_so() -> None:
    board = Posts(n=4)
    here = accounting_of(board)
    here.stepped(10)
    here.offers()
    here.stepped(4)
    here.failed()
    assert here.account.dropped == {account.FAILED: 10} and here.account.pending == 4
    here.stepped(10)
    last = board.mine[-1]
    assert (last.step, last.samples, last.doing) == (0, 14, Doing.COMPUTES)


def test_an_average_under_way_that_fails_takes_nothing_of_the_next_step_along() -> None:
    def body(transport: SimulatedTransport) -> None:
        model, inner = made()
        optimizer = CrewOptimizer(
            inner, transport, model=model, average="gradients", target_batch=8, weight=4, overlap=True
        )

        def batch() -> Account:
            gradient(model, [(0, 0)])
            optimizer.step()
            assert optimizer.samples is not None
            return optimizer.samples

        class Interrupted:
            over = False

            def wait(self) -> Outcome:
                raise KeyboardInterrupt

        batch()
        batch()
        optimizer._averaged._under_way = Interrupted()
        before = batch()
        assert before.pending == 12
        Interrupted.over = True
        with pytest.raises(KeyboardInterrupt):
            batch()
        of = optimizer.samples
        assert of is not None and (of.pending, of.dropped) == (8, {account.FAILED: 8})
        sums = optimizer._averaged._mode
        assert isinstance(sums, Gradients) and sums._gathered == 8
        assert all(bool(total.any()) for total in sums._sums)

    SimulatedCrew(1, Faults(latency_s=0.005)).run(body)


def test_without_a_target_there_is_no_account() -> None:
    model, inner = made()
    assert CrewOptimizer(inner, FakeCrew(1).transport(0), model=model).samples is None


def test_what_opening_the_channel_takes_is_no_part_of_a_batch() -> None:
    """Else a peer takes its first batch for longer than the crew's steps, and never computes another one."""
    took_s: list[float] = []

    def each(optimizer: CrewOptimizer, number: int) -> None:
        gathering = optimizer._averaged.gathering
        assert gathering is not None
        if number == 1:
            took_s.append(gathering._mine(Doing.COMPUTES).batch_s)

    crew = SimulatedCrew(2, Faults(latency_s=0.1), seed=1, cost=ComputeCost(0.01))
    crew.run(lambda t: train(t, 3, 24, lambda me: 4, each))
    assert took_s == pytest.approx([0.04, 0.04])


def test_a_peer_whose_first_batch_was_long_measures_again() -> None:
    """It stood by for good: a batch of 2 s brings less than the others compute meanwhile."""
    faults = Faults(latency_s=0.005, freezes=(Freeze(0, 0.05, 2.0),))
    crew = SimulatedCrew(8, faults, seed=1, cost=ComputeCost(0.05, sigma=0.1))
    peers = crew.run(lambda t: train(t, 48, 48, lambda me: 4, align=Align(every=5)))
    assert peers[0] is not None and peers[3] is not None
    assert peers[0].samples.counted > 0.3 * peers[3].samples.counted


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_batches_go_on_behind_the_average_of_a_step(loss: float) -> None:
    """Delayed parameter updates: each sample still has one fate, and replicas take the same steps.

    All compute .26 s for a step, and a round takes .2 s.
    """
    faults = Faults(loss=Loss(loss), latency_s=0.1)
    step_s, counted = {}, {}
    for overlap in (False, True):
        crew = SimulatedCrew(4, faults, seed=3, cost=ComputeCost(0.02, (1, 2, 3, 4), 0.1))
        found = crew.run(lambda t, overlap=overlap: train(t, 16, 128, lambda me: 8, overlap=overlap))
        peers = [peer for peer in found if peer is not None]
        for peer in peers:
            accounted(peer)
        if not loss:
            assert all(torch.equal(peer.weights[15], peers[0].weights[15]) for peer in peers)
        began_s = [outcome.started_s for outcome in peers[0].outcomes]
        step_s[overlap] = (began_s[-1] - began_s[4]) / (len(began_s) - 5)
        counted[overlap] = sum(peer.samples.counted for peer in peers)
    assert counted[True] > 0.9 * counted[False]
    assert step_s[True] < 0.75 * step_s[False], step_s


def test_the_next_step_is_told_of_once_the_average_under_way_is_over() -> None:
    """Else the others take the step that this peer averages for to be over, and drop their gradients."""
    crew = FakeCrew(2)
    transport = crew.transport(0)
    here = accounting_of(transport)

    def told() -> Tally:
        found = gathering.decode(transport.posts(gathering.POSTS)[0])
        assert found is not None
        return found[0]

    here.stepped(40)
    here.offers()
    here.stepped(30)
    here._gathering.stands_by()
    assert (told().step, told().samples, told().doing) == (0, 40, Doing.AVERAGES)
    assert here.account.pending == 70
    both = np.full(4, 0b11, np.uint64)
    here.averaged(nobodys(0, ROWS, np.full(4, 70, np.float32), both, None))
    assert (told().step, told().samples, told().doing) == (1, 30, Doing.COMPUTES)
    assert here.account.pending == 30


@dataclass
class Clock:
    """A peer alone with a clock that a test sets."""

    me: int = 0
    at_s: float = 0.0

    def now_s(self) -> float:
        return self.at_s

    def post_soon(self, topic: int, blob: bytes) -> None:
        """Nobody reads it."""


def test_a_measurement_that_was_right_is_trusted_twice_as_long_and_a_wrong_one_as_at_first() -> None:
    clock = Clock()
    here = accounting_of(clock)
    stood_by_s = []
    for batch_s in (8.0, 8.0, 2.0):
        here._gathering.decided()
        clock.at_s += batch_s
        here.stepped(4)
        began_s = clock.at_s
        while here._gathering._took_s:
            clock.at_s += 1.0
            here._gathering.stands_by()
        stood_by_s.append(clock.at_s - began_s)
    assert stood_by_s == [4 * 8.0, 2 * 4 * 8.0, 4 * 2.0]
