"""A residual is its peer's own, in no snapshot that others take; anchor and momentum are in all of them."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ragtag.core.types import Noted
from ragtag.optim.outer import Nesterov
from ragtag.protocols.transfer.snapshots import Shelf
from ragtag.training.exchange.compress import TopK
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.state.compression_state import CompressionState
from ragtag.training.state.keeper import COMPRESSION, StateKeeper
from ragtag.training.state.snapshot import Snapshot
from tests.training.simulated import SimulatedTransport, TappedCrew, run_peers
from tests.training.test_sparse import flat, loss_of, net, replica, sgd, steps

N = 2
COMPRESS = TopK(ratio=0.05, values="2bit", selection="chunked", decay=0.95, resync=0, bypass=False)


def optimizer_of(model: nn.Module, transport: SimulatedTransport, average: str = "models") -> CrewOptimizer:
    options: dict[str, object] = {"average": average, "compress": COMPRESS}
    if average == "models":
        options |= {"outer": Nesterov(0.7, 0.6), "every": 2}
    return CrewOptimizer(sgd(model), transport, model=model, **options)  # type: ignore[arg-type]


def keeper(me: int, optimizer: CrewOptimizer, notes: list[Noted] | None = None) -> StateKeeper:
    made = StateKeeper(me, 1, (notes if notes is not None else []).append)
    made.take_in(optimizer._averaged)
    return made


def train(crew: TappedCrew, models: list[nn.Sequential], average: str, at: int = 6) -> list[CrewOptimizer]:
    def one(transport: SimulatedTransport) -> CrewOptimizer:
        optimizer = optimizer_of(models[transport.me], transport, average)
        steps(models[transport.me], optimizer, transport.me, at)
        return optimizer

    return run_peers(crew, one)


@pytest.mark.parametrize("average", ["models", "gradients"])
def test_who_resumes_goes_on_bit_for_bit_with_its_own_residual(tmp_path: Path, average: str) -> None:
    models = [net() for _ in range(N)]

    def to_the_end(transport: SimulatedTransport) -> None:
        me = transport.me
        optimizer = optimizer_of(models[me], transport, average)
        steps(models[me], optimizer, me, 6)
        keeper(me, optimizer).save(tmp_path, 3)
        steps(models[me], optimizer, me, 12, begin=6)

    run_peers(TappedCrew(N), to_the_end)
    again = [net(seed=5) for _ in range(N)]
    notes: list[Noted] = []

    def resumed(transport: SimulatedTransport) -> float:
        me = transport.me
        optimizer = optimizer_of(again[me], transport, average)
        found = keeper(me, optimizer, notes).resume(tmp_path)
        assert found is not None
        assert found.step == 6
        norm = float(np.linalg.norm(replica(optimizer).feedback.residual))
        steps(again[me], optimizer, me, 12, begin=6)
        return norm

    norms = run_peers(TappedCrew(N), resumed)
    assert norms[0] != norms[1], "each has its own, whichever peer's checkpoint was the newest"
    assert min(norms) > 0
    assert [note.what for note in notes] == ["resumed"] * N
    for one, other in zip(models, again, strict=True):
        torch.testing.assert_close(flat(one), flat(other), rtol=1e-5, atol=1e-6)


def test_without_a_checkpoint_of_its_own_a_peer_begins_with_no_residual(tmp_path: Path) -> None:
    models = [net() for _ in range(N)]
    optimizers = train(TappedCrew(N), models, "models")
    path = keeper(0, optimizers[0]).save(tmp_path, 3)
    notes: list[Noted] = []
    model = net(seed=5)
    optimizer = optimizer_of(model, TappedCrew(1).transport(0))
    kept = keeper(1, optimizer, notes)
    kept.resume(tmp_path)
    inside, theirs = replica(optimizer), replica(optimizers[0])
    assert not inside.feedback.residual.any(), "peer 0's is peer 0's"
    assert np.array_equal(inside._anchor, theirs._anchor)
    assert np.array_equal(inside._momentum, theirs._momentum)
    assert inside._momentum.any()
    assert [note.what for note in notes] == ["resumed", "no residual"]
    keeper(1, optimizers[1]).save(tmp_path, 3)
    own = next(p for p in tmp_path.iterdir() if p.name.startswith("peer-01"))
    own.write_bytes(own.read_bytes()[:-9])
    path.touch()
    kept.resume(tmp_path)
    assert "damaged checkpoint" in [note.what for note in notes]
    assert not inside.feedback.residual.any()


class Wanted(Shelf):
    """A shelf that a newcomer stands at."""

    def __init__(self) -> None:
        self.blob = b""

    def wanted(self, round_: int) -> bool:
        return True

    def put(self, round_: int, step: int, schema: int, layout: int, blob: bytes, replica: int = 0) -> bool:
        self.blob = blob
        return True


@pytest.mark.parametrize("average", ["models", "gradients"])
def test_a_newcomer_gets_anchor_and_momentum_and_no_donors_residual(average: str) -> None:
    models = [net() for _ in range(N)]
    optimizers = train(TappedCrew(N), models, average)
    donors = []
    for me, optimizer in enumerate(optimizers):
        shelf, kept = Wanted(), keeper(me, optimizer)
        kept.serve(shelf)
        kept.offer(3)
        donors.append(Snapshot.from_bytes(shelf.blob))
        assert replica(optimizer).feedback.residual.any()
        assert set(donors[-1].extra[COMPRESSION]) == {"shared"}
    assert len(donors[0].to_bytes()) == len(donors[1].to_bytes()), "donors' files are alike"
    model = net(seed=5)
    optimizer = optimizer_of(model, TappedCrew(1).transport(0), average)
    kept = keeper(2, optimizer)
    kept._load(optimizer._averaged, donors[0])
    inside, theirs = replica(optimizer), replica(optimizers[0])
    assert not inside.feedback.residual.any()
    assert inside.feedback.round == -1
    assert torch.equal(flat(model), flat(models[0]))
    assert np.array_equal(inside._anchor, theirs._anchor)
    assert np.array_equal(inside._momentum, theirs._momentum)
    assert inside._momentum.any() == (average == "models")


def test_who_fetches_the_state_anew_keeps_its_own_residual() -> None:
    models = [net() for _ in range(N)]
    optimizers = train(TappedCrew(N), models, "models")
    before = replica(optimizers[1]).feedback.residual.copy()
    donor = keeper(0, optimizers[0])
    from ragtag.training.state.capture import capture

    snapshot = capture(optimizers[0]._averaged, donor._extra(own=False))
    keeper(1, optimizers[1])._load(optimizers[1]._averaged, Snapshot.from_bytes(snapshot.to_bytes()))
    assert np.array_equal(before, replica(optimizers[1]).feedback.residual)


def test_a_state_that_does_not_fit_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    models = [net() for _ in range(N)]
    optimizers = train(TappedCrew(N), models, "models")
    part = CompressionState(optimizers[0]._averaged, own=True)
    state = part.state_dict()
    anchor, residual = replica(optimizers[0])._anchor.copy(), replica(optimizers[0]).feedback.residual.copy()
    for part_name, name, wrong, said in (
        ("shared", "anchor", torch.zeros(3), r"the state's anchor is \(3,\) float32"),
        ("shared", "outer momentum", state["shared"]["outer momentum"] / 0, "not finite"),
        ("own", "residual", torch.zeros(3), "'residual' is float32"),
        ("own", "selector_name", torch.tensor(list(b"best"), dtype=torch.uint8), "selector 'best'"),
    ):
        bad = {key: dict(tensors) for key, tensors in state.items()}
        bad[part_name][name] = wrong
        bad["shared"]["anchor"] = bad["shared"]["anchor"] + 1
        with pytest.raises(ValueError, match=said):
            part.load_state_dict(bad)
        assert np.array_equal(anchor, replica(optimizers[0])._anchor)
        assert np.array_equal(residual, replica(optimizers[0]).feedback.residual)


def test_before_the_model_is_known_it_waits() -> None:
    models = [net() for _ in range(N)]
    optimizers = train(TappedCrew(N), models, "gradients")
    state = CompressionState(optimizers[0]._averaged, own=True).state_dict()
    model = net()
    later = CrewOptimizer(sgd(model), TappedCrew(1).transport(0), average="gradients", compress=COMPRESS)
    assert CompressionState(later._averaged, own=True).state_dict() == {}
    CompressionState(later._averaged, own=True).load_state_dict(state)
    loss_of(model, 0, 0).backward()
    later.step()
    assert replica(later).feedback.round == replica(optimizers[0]).feedback.round + 1


def test_only_where_nothing_but_averaged_models_belongs_to_the_training_need_nothing_be_fetched() -> None:
    """A peer that was away has the models' mean by its first average; what else there is it must ask for."""

    def kept(**options: object) -> StateKeeper:
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=float(options.pop("momentum", 0.0)))  # type: ignore[arg-type]
        transport = SimulatedTransport(TappedCrew(1), 0)
        optimizer = CrewOptimizer(inner, transport, model=model, **options)  # type: ignore[arg-type]
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return keeper(0, optimizer)

    assert kept().only_model
    assert not kept(momentum=0.9).only_model
    assert not kept(average="gradients").only_model
    assert not kept(every=1, outer=Nesterov(0.7, 0.6)).only_model
    beside = kept()
    beside.keep(more=nn.Linear(1, 1))
    assert not beside.only_model
    assert not StateKeeper(0, 1, [].append).only_model
