"""A crew's optimizer that sends the largest entries: what is applied, what is kept, what is refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import ragtag
from ragtag import schedules
from ragtag.app.crew.transport import SoloTransport
from ragtag.codecs.sparse.feedback import ErrorFeedback
from ragtag.codecs.sparse.gather import add_rows
from ragtag.codecs.sparse.pack import Values
from ragtag.core.channels import channel_of
from ragtag.core.errors import NotFinite
from ragtag.core.faults import Faults
from ragtag.core.schema import SchemaMismatch
from ragtag.core.types import Average, Gathered, Noted, Offer, Outcome
from ragtag.optim.outer import Nesterov
from ragtag.protocols.groups.channel import Moshpit, RandomGroups
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.protocols.rounds.base import UNSOUND
from ragtag.protocols.rounds.rps import RPS
from ragtag.schedules.base import Decision, Progress, Skip
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.exchange.compress import Compression, TopK
from ragtag.training.exchange.sparse import SparseReplica
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.training.fake_transport import FakeCrew, FakeTransport, run_peers

N = 3
WIDE = 40
plain = functools.partial(TopK, bypass=False)
TIGHT_S = 0.0042
"""A deadline of a round that ends before anything that was lost can come again."""


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDE, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 3))


def loss_of(model: nn.Module, peer: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * peer + step)
    inputs = torch.randn(16, WIDE, generator=draw)
    return F.cross_entropy(model(inputs), (inputs[:, 0] > 0).long())


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, peer: int, until: int, begin: int = 0) -> None:
    for step in range(begin, until):
        loss_of(model, peer, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def trained(
    crew: FakeCrew, rounds: int, models: list[nn.Sequential] | None = None, **options: object
) -> tuple[list[nn.Sequential], list[CrewOptimizer]]:
    models = models or [net() for _ in range(crew.n)]
    momentum = float(options.pop("momentum", 0.0))  # type: ignore[arg-type]

    def train(transport: FakeTransport) -> CrewOptimizer:
        model = models[transport.me]
        optimizer = CrewOptimizer(sgd(model, momentum), transport, model=model, **options)  # type: ignore[arg-type]
        steps(model, optimizer, transport.me, rounds)
        return optimizer

    return models, run_peers(crew, train)


def replica(optimizer: CrewOptimizer) -> SparseReplica:
    found = optimizer._averaged.sparse
    assert isinstance(found, SparseReplica)
    return found


def test_what_could_not_be_sent_is_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that has ended, say: the residual is as it was, and no ticket is open."""
    model = net(1)
    optimizer = CrewOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), SoloTransport(0), model=model, average="gradients",
        compress=plain(ratio=0.05, resync=0), align=False,
    )  # fmt: skip
    steps(model, optimizer, 0, 2)
    found = replica(optimizer)
    loss_of(model, 0, 2).backward()
    before, fails = found.feedback.residual.copy(), RuntimeError("gone")

    def offer(*_: object) -> None:
        raise fails

    with monkeypatch.context() as now, pytest.raises(RuntimeError, match="gone"):
        now.setattr(found._transport, "offer", offer)
        found.begin()
    assert found.feedback.tickets() == []
    np.testing.assert_allclose(found.feedback.residual, before + found._flat, atol=1e-6)


def test_a_sum_that_is_not_finite_is_noted_and_counts_for_nothing() -> None:
    model, notes = net(1), list[Noted]()
    optimizer = CrewOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), SoloTransport(0), model=model, average="gradients",
        compress=plain(ratio=0.05, resync=0), align=False, on_note=notes.append,
    )  # fmt: skip
    steps(model, optimizer, 0, 1)
    found = replica(optimizer)
    found._mean[:] = 1.0
    found._mean[2] = np.inf
    found._leave_out_overflow(7)
    assert notes == [Noted(UNSOUND, -1, "the sum of round 7 has 1 values that are not finite")]
    assert found._mean[2] == 0.0 and (np.delete(found._mean, 2) == 1.0).all()


# -- What is applied


@pytest.mark.parametrize("average", ["gradients", "models"])
def test_all_entries_as_they_are_come_to_what_dense_averaging_does(average: str) -> None:
    everything = plain(ratio=1.0, values="fp32", resync=0)
    sparse, _ = trained(FakeCrew(N), 5, average=average, compress=everything, buffers=False, momentum=0.9)
    dense, _ = trained(FakeCrew(N), 5, average=average, method=AllReduce(), buffers=False, momentum=0.9)
    for one, other in zip(sparse, dense, strict=True):
        torch.testing.assert_close(flat(one), flat(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", ["gradients", "models"])
@pytest.mark.parametrize("values", ["int8", "bf16", "fp32", "2bit"])
def test_replicas_are_the_same_bit_for_bit_after_every_round(average: str, values: str) -> None:
    compress = plain(ratio=0.05, values=values, warm_up=3, resync=4)  # type: ignore[arg-type]
    models, optimizers = trained(
        FakeCrew(N), 10, [net(7 * peer) for peer in range(N)], average=average, compress=compress
    )
    if average == "models":  # begun apart: the first dense average brings them together
        assert torch.equal(flat(models[0]), flat(models[1]))
    for optimizer in optimizers:
        figures = optimizer._averaged.compression
        assert figures is not None
        assert figures.refused == figures.given_up == figures.late == 0
        assert 0 < figures.captured < 1
        assert figures.density == pytest.approx(0.05, rel=0.05)
    twins, _ = trained(FakeCrew(N), 10, average=average, compress=compress, momentum=0.9)
    assert torch.equal(flat(twins[0]), flat(twins[1]))
    assert torch.equal(flat(twins[0]), flat(twins[2]))


def test_it_learns_and_sends_far_fewer_bytes() -> None:
    def run(**options: object) -> tuple[float, int]:
        crew = FakeCrew(N)
        models, _ = trained(crew, 120, average="gradients", **options)
        sent = sum(run.payload.size for run in crew.sent if run.key.channel == channel_of("model"))
        models[0].train()
        return sum(float(loss_of(models[0], 9, at).detach()) for at in range(20)) / 20, sent

    dense_loss, dense_bytes = run()
    sparse_loss, sparse_bytes = run(compress=plain(ratio=0.02, resync=0))
    assert sparse_loss < 1.15 * dense_loss + 0.02
    assert sparse_bytes < 0.35 * dense_bytes, "a fragment is a datagram at least, and a layer has one"


@pytest.mark.parametrize("deadline_s", [None, 0.01, TIGHT_S])
def test_under_loss_nothing_is_lost_and_nothing_counts_twice(deadline_s: float | None) -> None:
    """The sum of all that replicas applied is what was committed, and the rest is pending or residual.

    With a deadline that leaves repairs no time, fragments go back, and rows come late.
    """
    seen: list[list[Compression]] = [[] for _ in range(4)]
    crew = FakeCrew(4, loss=0.25, seed=3)
    models = [net() for _ in range(4)]
    given = [np.zeros(0)] * 4
    applied = [np.zeros(0)] * 4
    optimizers: list[CrewOptimizer | None] = [None] * 4

    def train(transport: FakeTransport) -> None:
        me, model = transport.me, models[transport.me]
        optimizer = optimizers[me] = CrewOptimizer(
            sgd(model),
            transport,
            average="gradients",
            compress=plain(ratio=0.1, values="fp32", resync=0),
            model=model,
            deadline_s=deadline_s,
        )
        optimizer_seen = seen[me]
        inside = replica(optimizer)
        given[me] = np.zeros(len(inside.bucket.flat))
        applied[me] = np.zeros(len(inside.bucket.flat))
        real_difference, real_moved = inside._difference, inside._moved

        def watched():  # type: ignore[no-untyped-def]
            vector = real_difference()
            given[me] += vector
            return vector

        def moved():  # type: ignore[no-untyped-def]
            mean = real_moved()
            assert inside.compression is not None
            optimizer_seen.append(inside.compression)
            applied[me] += mean
            return mean

        inside._difference, inside._moved = watched, moved  # type: ignore[method-assign]
        steps(model, optimizer, me, 25)
        for _ in range(4):  # nothing more is sent: what is late comes, and the last tickets are decided
            optimizer.average()

    run_peers(crew, train)
    feedbacks = [replica(o).feedback for o in optimizers if o is not None]
    kept = [feedback.residual + feedback.pending() for feedback in feedbacks]
    committed = sum(g - k for g, k in zip(given, kept, strict=True)) / 4
    scale = float(np.abs(committed).max())
    behind = [float(np.abs(one - committed).max()) / scale for one in applied]
    counts = {name: sum(getattr(c, name) for one in seen for c in one) for name in Compression._fields[6:]}
    assert counts["committed"] > 100
    assert counts["refused"] == 0
    if counts["given_up"] == 0:  # to rounding
        assert max(behind) < 1e-6
    assert max(behind) < 0.2
    assert (counts["restored"] > 0) == (deadline_s is not None)
    assert counts["late"] > 0 or deadline_s is None


def test_peers_without_gradients_give_nothing_and_take_what_others_have() -> None:
    models = [net() for _ in range(2)]

    def train(transport: FakeTransport) -> torch.Tensor:
        model = models[transport.me]
        optimizer = CrewOptimizer(
            sgd(model), transport, average="gradients", compress=plain(ratio=0.1), model=model
        )
        if transport.me == 0:
            loss_of(model, 0, 0).backward()
        optimizer.step()
        return flat(model)

    one, other = run_peers(FakeCrew(2), train)
    assert torch.equal(one, other)
    assert not torch.equal(one, flat(net()))


def test_outer_momentum_moves_the_anchor_further() -> None:
    compress = plain(ratio=1.0, values="fp32", resync=0)
    moves = []
    for outer in (None, Nesterov(1.0, 0.5)):
        models, _ = trained(FakeCrew(2), 1, compress=compress, buffers=False, outer=outer, every=1)
        moves.append(flat(models[0]) - flat(net()))
    torch.testing.assert_close(moves[1], 1.5 * moves[0], rtol=1e-3, atol=1e-5)


def test_local_steps_send_once_in_so_many() -> None:
    crew = FakeCrew(2)
    trained(crew, 12, compress=plain(ratio=0.1, selection="chunked", decay=0.95, resync=0), every=4)
    assert sum(isinstance(ask, Offer) for ask in crew.asked) == 2 * 3


def test_sparse_loco_learns_with_two_bits_a_value() -> None:
    """Chunked top-k, 2-bit values, decay .95, local steps and outer momentum: as good as dense here."""

    def run(**options: object) -> float:
        models, _ = trained(FakeCrew(N), 160, every=4, outer=Nesterov(0.7, 0.6), buffers=False, **options)
        assert torch.equal(flat(models[0]), flat(models[1]))
        return sum(float(loss_of(models[0], 9, at).detach()) for at in range(20)) / 20

    two_bits = plain(ratio=0.05, selection="chunked", values="2bit", decay=0.95, resync=0)
    assert two_bits.name == "top-k of each 4096 of 0.05, 2bit, decay 0.95, resync 0, bypass False"
    assert run(compress=two_bits) < 1.15 * run() + 0.02


def test_two_bits_a_value_take_fewer_datagrams() -> None:
    vector = np.random.default_rng(1).standard_normal(500_000).astype(np.float32)
    rows = {}
    for values in ("int8", "2bit"):
        compress = TopK(ratio=0.02, selection="chunked", values=values, decay=0.95)  # type: ignore[arg-type]
        rows[values] = len(ErrorFeedback(len(vector), compress.options()).prepare(vector, 0).chunks)
    # 2 in place of 8 bits beside an index of 7 to 16
    assert rows["2bit"] < 0.8 * rows["int8"]


def test_models_are_averaged_densely_every_so_often_with_their_buffers() -> None:
    crew = FakeCrew(2)
    models, _ = trained(crew, 9, average="gradients", compress=plain(ratio=0.1, resync=4))
    assert sum(isinstance(ask, Average) for ask in crew.asked) == 2 * 3  # after rounds 0, 4 and 8
    for (name, one), other in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
        assert torch.equal(one, other), name


@dataclasses.dataclass(frozen=True)
class Away:
    """Averages at each step, of which the first ones go by without this peer."""

    steps: int

    def decide(self, progress: Progress) -> Decision:
        return Skip() if progress.step <= self.steps else schedules.Average()


def test_who_was_away_comes_to_the_same_average_of_whole_models_as_the_others() -> None:
    """The last peer is away in the first ones. Would it begin with these, it would wait there for the others,
    and they for it in the next round.
    """
    ways = {"compress": plain(ratio=0.1, resync=4)}
    crew = SimulatedCrew(4, Faults(latency_s=0.005), 3, cost=ComputeCost(0.1, sigma=0.02, seed=3))
    whole: list[tuple[int, int, float]] = []

    def train(transport: SimulatedTransport) -> None:
        model, me = net(), transport.me
        away = Away(5 * (me == 3))
        optimizer = CrewOptimizer(sgd(model), transport, model=model, schedule=away, **ways)  # type: ignore[arg-type]
        dense = replica(optimizer)._whole
        assert dense is not None
        average = dense.average

        def noted(*args: Any, **options: Any) -> Outcome:
            outcome = average(*args, **options)
            whole.append((me, outcome.round, outcome.total_s))
            return outcome

        dense.average = noted  # type: ignore[method-assign]
        for step in range(14):
            transport.compute()
            loss_of(model, me, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    crew.run(train)
    numbers = [{number for peer, number, _ in whole if peer == me} for me in range(4)]
    assert len(numbers[3]) > 1 and all(numbers[3] < of for of in numbers[:3]) and 0 not in numbers[3]
    assert max(took_s for _, number, took_s in whole if number in numbers[3]) < 0.1


def test_averages_of_whole_models_have_the_deadline_of_their_step() -> None:
    crew = FakeCrew(2)
    trained(crew, 5, average="gradients", compress=plain(ratio=0.1, resync=2), deadline_s=0.7)
    assert any(isinstance(ask, Average) for ask in crew.asked)
    assert {ask.deadline_s for ask in crew.asked} == {0.7}


# -- What is kept


def test_feedback_is_part_of_the_optimizers_state() -> None:
    compress = plain(ratio=0.05, momentum_correction=0.5)
    models, optimizers = trained(FakeCrew(1), 6, average="gradients", compress=compress)
    saved = copy.deepcopy(optimizers[0].state_dict())
    model = copy.deepcopy(models[0])
    again = CrewOptimizer(
        sgd(model), FakeCrew(1).transport(0), average="gradients", compress=compress, model=model
    )
    again.load_state_dict(saved)
    for name, tensor in replica(optimizers[0]).tensors().items():
        assert torch.equal(tensor, replica(again).tensors()[name]), name
    later = CrewOptimizer(sgd(model), FakeCrew(1).transport(0), average="gradients", compress=compress)
    later.load_state_dict(saved)  # before the model is known
    steps(model, later, 0, 1)
    assert replica(later).feedback.round == 6
    smaller = nn.Linear(3, 3)
    other = CrewOptimizer(
        sgd(smaller), FakeCrew(1).transport(0), average="gradients", compress=compress, model=smaller
    )
    with pytest.raises(ValueError, match="residual"):
        replica(other).load_tensors(replica(again).tensors())


# -- What is refused


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("average", ["gradients", "models"])
def test_what_is_not_finite_is_named_nothing_is_sent_and_the_residual_stays(
    average: str, value: float, whole: bool
) -> None:
    crew, models = FakeCrew(2), [net() for _ in range(2)]
    both = threading.Barrier(2)

    def train(transport: FakeTransport) -> None:
        model = models[transport.me]
        optimizer = CrewOptimizer(
            sgd(model),
            transport,
            average=average,  # type: ignore[arg-type]
            compress=TopK(ratio=0.1, resync=0),
            model=model,
        )
        inside = replica(optimizer)
        assert inside._bypass is not None
        steps(model, optimizer, transport.me, 3)
        inside._bypass.on = whole
        both.wait(30)
        if transport.me == 0:
            before, asked = inside.feedback.state_dict(), len(crew.asked)
            kept = copy.deepcopy(model.state_dict())
            bad = next(model.parameters())
            loss_of(model, 0, 3).backward()
            assert bad.grad is not None
            good = bad.grad.clone()
            bad.grad[0, 0] = value
            with pytest.raises(NotFinite, match=r"0\.weight"):
                optimizer.step()
            assert len(crew.asked) == asked
            for name, array in inside.feedback.state_dict().items():
                assert np.array_equal(array, before[name]), name
            model.load_state_dict(kept)
            bad.grad = good
        both.wait(30)
        steps(model, optimizer, transport.me, 5, begin=3)  # and training goes on
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())

    run_peers(crew, train)
    assert torch.equal(flat(models[0]), flat(models[1])) or average == "models"


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ({"ratio": 0.01}, {"ratio": 0.001}, "of 0.01.*of 0.001|of 0.001.*of 0.01"),
        ({"values": "2bit"}, {"values": "int8"}, "2bit.*int8|int8.*2bit"),
        ({"selection": "random"}, {}, "random-k.*sampled top-k|sampled top-k.*random-k"),
        ({"decay": 0.95}, {}, "decay 0.95"),
        ({"warm_up": 9}, {}, "warm-up 9"),
        ({"momentum_correction": 0.9}, {}, "momentum correction 0.9"),
        ({"resync": 0}, {}, "resync 0"),
        ({"bypass": False}, {}, "bypass False"),
    ],
)
def test_a_peer_with_another_ratio_or_codec_is_refused_by_name(
    mine: dict[str, object], theirs: dict[str, object], said: str
) -> None:
    models = [net() for _ in range(2)]

    def train(transport: FakeTransport) -> None:
        compress = TopK(**(mine if transport.me else theirs))  # type: ignore[arg-type]
        CrewOptimizer(sgd(models[transport.me]), transport, compress=compress, model=models[transport.me])

    with pytest.raises(SchemaMismatch, match=said):
        run_peers(FakeCrew(2), train)


def test_one_that_sends_all_and_one_that_selects_are_told() -> None:
    models = [net() for _ in range(2)]

    def train(transport: FakeTransport) -> None:
        compress = TopK() if transport.me else None
        CrewOptimizer(sgd(models[transport.me]), transport, compress=compress, model=models[transport.me])

    with pytest.raises(SchemaMismatch, match=r"averages by (rps, the other gather|gather, the other rps)"):
        run_peers(FakeCrew(2), train)


def test_what_does_not_go_together_is_refused() -> None:
    model, transport = net(), FakeCrew(1).transport(0)
    for method in (Moshpit(4), RandomGroups(4)):
        with pytest.raises(ValueError, match=r"averages in groups.*use RPS\(\) or AllReduce\(\)"):
            CrewOptimizer(sgd(model), transport, method=method, compress=TopK(), model=model)
    with pytest.raises(ValueError, match=r"a ring passes sums on.*use RPS\(\)"):
        CrewOptimizer(sgd(model), transport, method=AllReduce(ring=True), compress=TopK(), model=model)
    with pytest.raises(ValueError, match="momentum to 0"):
        CrewOptimizer(sgd(model, 0.9), transport, compress=TopK(momentum_correction=0.9), model=model)
    with pytest.raises(ValueError, match=r"give model="):
        CrewOptimizer(sgd(model), transport, compress=TopK())
    for wrong in (0.01, "topk", True):
        with pytest.raises(TypeError, match=r"write compress=ragtag\.TopK\(ratio="):
            CrewOptimizer(sgd(model), transport, compress=wrong, model=model)  # type: ignore[arg-type]
    assert not transport.crew.schemas, "nothing was opened"
    for method in (RPS(), RPS(repair=True), AllReduce()):
        made = CrewOptimizer(
            sgd(net()), FakeCrew(1).transport(0), method=method, compress=TopK(), model=net()
        )
        assert made._averaged.compression is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ratio": 0.0}, "a ratio of 0.0: give a share"),
        ({"ratio": -0.1}, "a ratio of -0.1"),
        ({"ratio": 1.5}, "a ratio of 1.5"),
        ({"ratio": float("nan")}, "a ratio of nan"),
        ({"ratio": "1%"}, "ratio is '1%'; it is a share"),
        ({"ratio": True}, "ratio is True"),
        ({"selection": "best"}, "selection is 'best'; it is one of sampled"),
        ({"values": "fp8"}, "values as 'fp8': give one of fp32"),
        ({"resync": -1}, "resync is -1"),
        ({"decay": 0.0}, "a decay of 0.0"),
        ({"warm_up": -1}, "a warm-up of -1"),
        ({"momentum_correction": 1.0}, "a momentum of 1.0"),
    ],
)
def test_options_that_cannot_be_are_named(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TopK(**wrong)  # type: ignore[arg-type]
    assert ragtag.TopK is TopK


@pytest.mark.parametrize("average", ["gradients", "models"])
def test_complex_parameters_are_named_and_integer_buffers_left_alone(average: str) -> None:
    class Odd(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.odd = nn.Parameter(torch.zeros(3, dtype=dtype))
            self.register_buffer("count", torch.tensor(7))

    transport = FakeCrew(1).transport(0)
    model: nn.Module = Odd(torch.complex64)
    for compress in (TopK(), None):
        with pytest.raises(TypeError, match=r"'odd' is torch\.complex64; only floating-point"):
            CrewOptimizer(sgd(model), transport, average=average, compress=compress, model=model)  # type: ignore[arg-type]
    assert not transport.crew.schemas
    model = Odd(torch.float32)
    options: dict[str, object] = {"average": average, "compress": TopK(resync=1)}
    optimizer = CrewOptimizer(sgd(model), FakeCrew(1).transport(0), model=model, **options)  # type: ignore[arg-type]
    model.odd.sum().backward()  # type: ignore[operator, union-attr]
    optimizer.step()
    assert model.count.item() == 7  # type: ignore[operator, union-attr]


# -- Fragments lost, doubled, late and forged


@settings(max_examples=60, deadline=None)
@given(data=st.data(), values=st.sampled_from(["fp32", "bf16", "int8", "2bit"]))
def test_rows_that_are_lost_doubled_or_forged_do_no_harm(data: st.DataObject, values: Values) -> None:
    """What is good counts once, in whatever order; what is not is refused by name; nothing raises."""
    d = 20_000
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    options = TopK(ratio=0.1, values=values).options()
    rows = np.concatenate(
        [
            ErrorFeedback(d, options, peer=peer).prepare(draw.standard_normal(d).astype(np.float32), 5).chunks
            for peer in range(3)
        ]
    )
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=2 * len(rows)))
    plain_total, total = np.zeros(d, np.float32), np.zeros(d, np.float32)
    unique = sorted(set(picked))
    add_rows(plain_total, rows[unique], np.full(len(unique), 0.5, np.float32), values)
    added = add_rows(total, rows[picked], np.full(len(picked), 0.5, np.float32), values)
    assert np.array_equal(total, plain_total)
    assert len(added.refused) == len(picked) - len(unique)
    assert all("came before" in why for why in added.refused)
    forged = rows[picked].copy()
    for row in forged:
        for at in data.draw(st.lists(st.integers(0, 60), max_size=4)):
            row[at] = data.draw(st.integers(0, 255))
    total = np.zeros(d, np.float32)
    added = add_rows(total, forged, np.full(len(forged), 0.5, np.float32), values)
    assert len(added.sender) + len(added.refused) == len(forged)
    assert len(set(zip(added.sender.tolist(), added.fragment.tolist(), strict=True))) == len(added.sender)
    assert np.isfinite(total).all()


def test_what_is_decided_twice_or_after_its_time_changes_nothing() -> None:
    """Own rows that come again, of a round long decided, or of one that never was."""
    _, optimizers = trained(FakeCrew(1), 3, average="gradients", compress=plain(ratio=0.1, resync=0))
    inside = replica(optimizers[0])
    chunks, ticket = inside.feedback.prepare(inside._difference(), 3)
    inside._sent.add(3, ticket, 0, 1)
    ones, whole = np.ones(len(chunks), np.float32), np.ones(1, np.bool_)
    part = Gathered(chunks, ones, np.zeros(len(chunks), np.int64), whole, ~whole)
    inside._take(3, part)
    assert inside.compression is not None
    assert inside.compression.committed == ticket.fragments
    residual, mean = inside.feedback.residual.copy(), inside._mean.copy()
    again = dataclasses.replace(part, late=((3, part), (2, part), (99, part)), given_up=((3, 0), (7, 0)))
    inside._take(4, again)
    found = inside.compression
    assert (found.committed, found.restored) == (0, 0)
    assert found.late == 3 * len(chunks)
    assert np.array_equal(inside.feedback.residual, residual)
    assert np.array_equal(inside._mean, 4 * mean)  # rows of other rounds count: their owners say which are in


@pytest.mark.parametrize("values", ["fp32", "bf16", "int8", "2bit"])
@pytest.mark.parametrize("selection", ["sampled", "random", "chunked", "gaussian-k", "dgc", "reused"])
@pytest.mark.parametrize("d", [1, 16, 5000, 200_000])
def test_no_selection_has_more_rows_than_the_channel_takes(d: int, selection: str, values: str) -> None:
    compress = TopK(ratio=0.01, selection=selection, values=values)  # type: ignore[arg-type]
    feedback = ErrorFeedback(d, compress.options())
    draw = np.random.default_rng(d)
    for at in range(3):
        rows = feedback.prepare(draw.standard_normal(d).astype(np.float32) ** 3, at).chunks
        assert 1 <= len(rows) <= compress.rows_most(d)
