"""Private steps under a crew: what leaves has noise, what was drawn is counted, bad input is refused."""

from __future__ import annotations

import importlib
import logging
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from ragtag.core.errors import NotFinite
from ragtag.core.seed import generator
from ragtag.core.types import Average
from ragtag.privacy import NoOpacus, NoPeek, NotPrivate, PrivacyLedger, PrivateTraining, epsilon_of
from ragtag.privacy.noise import NoiseStream
from ragtag.simulation.transport import SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.training.simulated import TappedCrew, run_peers

pytest.importorskip("opacus")
SAMPLES, BATCH, RATE = 60, 12, 0.5
NOISE, NORM, DELTA = 1.3, 0.4, 1e-3


def data(samples: int = SAMPLES, seed: int = 0) -> TensorDataset:
    draws = generator(seed, "samples")
    x = torch.from_numpy(draws.normal(size=(samples, 4))).float()
    return TensorDataset(x, (x.sum(1) > 0).long())


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def private_of(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> PrivateTraining:
    how: dict[str, Any] = {
        "loader": DataLoader(data(), batch_size=BATCH),
        "noise_multiplier": NOISE,
        "max_grad_norm": NORM,
        "delta": DELTA,
        "ledger": PrivacyLedger("A"),
        "seed": 5,
    }
    return PrivateTraining(model, optimizer, **(how | more))


def made(**more: Any) -> tuple[nn.Sequential, torch.optim.SGD, PrivateTraining]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    return model, optimizer, private_of(model, optimizer, **more)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def clipped_sum(model: nn.Module, batch: list[Tensor]) -> list[Tensor]:
    """By one backward pass for each sample."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in zip(*batch, strict=True):
        loss = F.cross_entropy(model(x[None]), y[None])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for into, gradient in zip(total, gradients, strict=True):
            into += gradient * min(1.0, NORM / float(norm))
    return total


def test_a_step_warns_of_nothing() -> None:
    """Nobody can do anything about torch's warning of Opacus's hooks, which need no gradients of inputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, private = made()
        step(model, optimizer, next(iter(private)))


# -- Epsilon


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta"),
    [
        (1.1, 0.004, 10_000, 1e-5),
        (0.8, 0.05, 300, 1e-5),
        (4.0, 0.2, 500, 1e-6),
        (1.5, 1.0, 30, 1e-5),
        (20.0, 0.01, 50, 1e-5),
    ],
)
def test_epsilon_is_what_an_independent_accountant_says(
    noise: float, rate: float, steps: int, delta: float
) -> None:
    accounting = pytest.importorskip("dp_accounting")
    event = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(noise))
    told = accounting.rdp.RdpAccountant().compose(event, steps).get_epsilon(delta)
    assert epsilon_of({(noise, rate): steps}, delta) == pytest.approx(told, rel=0.01)


def test_epsilons_of_two_kinds_of_steps_compose_and_lie_above_the_exact_ones() -> None:
    accounting = pytest.importorskip("dp_accounting")
    kinds = {(1.0, 0.05): 200, (2.0, 0.1): 100}
    events = [
        accounting.SelfComposedDpEvent(
            accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(noise)), steps
        )
        for (noise, rate), steps in kinds.items()
    ]
    together = accounting.ComposedDpEvent(events)
    found = epsilon_of(kinds, 1e-5)
    assert found == pytest.approx(
        accounting.rdp.RdpAccountant().compose(together).get_epsilon(1e-5), rel=0.01
    )
    exact = accounting.pld.PLDAccountant().compose(together).get_epsilon(1e-5)
    assert exact < found < 1.2 * exact


def test_nothing_spent_is_nothing() -> None:
    assert epsilon_of({}, 1e-5) == 0.0
    with pytest.raises(ValueError, match="above 0 and below 1"):
        epsilon_of({(1.0, 0.1): 3}, 0.0)


def test_without_opacus_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.grad_sample", None)
    with pytest.raises(NoOpacus, match=r"pip install 'ragtag\[private\]'"):
        made()


def test_opacus_leaves_a_scripts_logging_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import calls ``logging.basicConfig``; here, as it was imported long ago, this stands in for it."""
    real = importlib.import_module("opacus.grad_sample")

    class Importing(ModuleType):
        def __getattr__(self, name: str) -> Any:
            logging.root.addHandler(logging.NullHandler())
            return getattr(real, name)

    before = logging.root.handlers[:]
    monkeypatch.setitem(sys.modules, "opacus.grad_sample", Importing(real.__name__))
    try:
        epsilon_of({(1.0, 0.1): 1}, DELTA)
        assert logging.root.handlers == before
    finally:
        logging.root.handlers[:] = before


# -- Steps


def test_a_step_is_the_clipped_sum_with_noise_over_the_expected_size() -> None:
    model, optimizer, private = made()
    before = [p.detach().clone() for p in model.parameters()]
    noise = NoiseStream.of(5, "private training, noise")
    batch = next(iter(private))
    assert len(batch[0]) != BATCH, "sizes vary; this seed's first is another"
    raw = clipped_sum(net(), batch)
    step(model, optimizer, batch)
    for old, p, total in zip(before, model.parameters(), raw, strict=True):
        drawn = torch.from_numpy(noise.normals(p.numel())).view_as(p) * NOISE * NORM
        torch.testing.assert_close(
            p.detach(), old - RATE * (total + drawn.float()) / BATCH, atol=1e-6, rtol=1e-5
        )


def test_each_sample_is_in_each_batch_by_a_coin_of_its_own() -> None:
    x = torch.arange(200.0)[:, None]
    loader = DataLoader(TensorDataset(x), batch_size=40)
    _, _, private = made(loader=loader, delta=1e-3)
    seen, sizes = torch.zeros(200), []
    for _ in range(80):
        for (batch,) in private:
            seen[batch[:, 0].long()] += 1
            sizes.append(len(batch))
            assert len(batch.unique()) == len(batch)
    draws = len(sizes)
    assert draws == 400 and private.rate == 0.2
    assert np.var(sizes) == pytest.approx(200 * 0.2 * 0.8, rel=0.25)
    apart = (seen - draws * 0.2) / math.sqrt(draws * 0.16)
    assert 0.8 < float(apart.square().mean()) < 1.2


def test_an_empty_batch_takes_a_step_of_noise() -> None:
    model, optimizer, private = made(loader=DataLoader(data(20), batch_size=1), delta=1e-2)
    empty = next(batch for batch in private if len(batch[0]) == 0)
    before = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer, empty)
    moved = torch.cat(
        [(p.detach() - old).flatten() for p, old in zip(model.parameters(), before, strict=True)]
    )
    assert moved.isfinite().all()
    assert float(moved.std()) == pytest.approx(RATE * NOISE * NORM, rel=0.4)


def test_without_a_seed_nobody_can_draw_the_same_again() -> None:
    ends = []
    for seed in (1, 1, None, None):
        model, optimizer, private = made(seed=seed)
        for batch in private:
            step(model, optimizer, batch)
        ends.append(model[0].weight.detach().clone())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[2], ends[3])


def test_it_learns() -> None:
    model, optimizer, private = made(noise_multiplier=0.3, max_grad_norm=1.0)
    for _ in range(30):
        for batch in private:
            step(model, optimizer, batch)
    x, y = data().tensors
    assert float((model(x).argmax(1) == y).float().mean()) > 0.85


# -- Under a crew


@pytest.mark.parametrize("average", ["models", "gradients"])
def test_what_leaves_a_peer_is_noised(average: Any) -> None:
    crew = TappedCrew(2)
    batches: dict[int, list[Tensor]] = {}

    def layer() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 2, bias=False))

    def train(peer: SimulatedTransport) -> None:
        model = layer()
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), RATE), peer, average=average, model=model, align=False
        )
        loader = DataLoader(data(seed=peer.me), batch_size=BATCH)
        private = private_of(model, optimizer, loader=loader, seed=peer.me)
        batches[peer.me] = next(iter(private))
        step(model, optimizer, batches[peer.me])

    run_peers(crew, train)
    asked = [ask for ask in crew.asked if isinstance(ask, Average)]
    assert len(asked) == 2
    for me, ask in enumerate(asked):
        (weight,), (total,) = layer().parameters(), clipped_sum(layer(), batches[me])
        noise = torch.from_numpy(NoiseStream.of(me, "private training, noise").normals(8)).view(2, 4)
        gradient = (total + noise.float() * NOISE * NORM) / BATCH
        expected = weight.detach() - RATE * gradient if average == "models" else gradient
        sent = torch.from_numpy(np.asarray(ask.values).reshape(-1)[:8]).view(2, 4)
        torch.testing.assert_close(sent, expected, atol=1e-6, rtol=1e-5)


def spent_with(loss: float) -> list[tuple[int, float]]:
    def train(peer: SimulatedTransport) -> tuple[int, float]:
        model = net()
        optimizer = CrewOptimizer(torch.optim.SGD(model.parameters(), RATE), peer, model=model, every=2)
        private = private_of(model, optimizer)
        for batch in private:
            step(model, optimizer, batch)
        return private.ledger.steps, private.epsilon

    return run_peers(TappedCrew(2, loss=loss), train)


def test_lost_rounds_are_no_credit() -> None:
    calm = spent_with(0.0)
    assert spent_with(0.3) == calm
    assert calm[0] == (5, pytest.approx(epsilon_of({(NOISE, 0.2): 5}, DELTA)))


def test_a_batch_counts_as_soon_as_it_is_drawn() -> None:
    _, _, private = made()
    told: list[int] = []
    for taken, _ in enumerate(private, 1):
        told.append(private.ledger.steps)
        if taken == 3:
            break  # no step was taken with any of them
    assert told == [1, 2, 3]


# -- The ledger


def test_a_rollback_a_restart_and_a_crash_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "spent.json"
    model, optimizer, private = made(ledger=PrivacyLedger("A", path))
    saved = None
    for batch in private:
        step(model, optimizer, batch)
        saved = saved or private.state_dict()
    spent = private.epsilon
    assert saved is not None and private.ledger.steps == 5
    private.load_state_dict(saved)  # back to the first step
    assert private.epsilon == spent
    private.ledger.close()  # all that a crash leaves is the file
    again = PrivacyLedger("A", path)
    assert again.epsilon(DELTA) == spent
    again.load_state_dict(saved)
    assert again.epsilon(DELTA) == spent
    again.close()


def test_a_checkpoint_brings_back_what_a_lost_file_had(tmp_path: Path) -> None:
    first = PrivacyLedger("A", tmp_path / "lost.json")
    first.spend(1.0, 0.1)
    first.spend(1.0, 0.1)
    found = PrivacyLedger("A", tmp_path / "new.json")
    found.load_state_dict(first.state_dict())
    assert found.spent == {(1.0, 0.1): 2}
    found.close()
    assert PrivacyLedger("A", tmp_path / "new.json").spent == {(1.0, 0.1): 2}


def test_a_newcomer_takes_the_crews_state_and_keeps_its_own_ledger() -> None:
    donor, newcomer = PrivacyLedger("A"), PrivacyLedger("B")
    for _ in range(9):
        donor.spend(1.0, 0.1)
    newcomer.spend(1.0, 0.1)
    newcomer.load_state_dict(donor.state_dict())
    assert newcomer.steps == 1


def test_a_ledger_that_cannot_be_written_hands_out_no_batch(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    _, _, private = made(ledger=PrivacyLedger("A", folder / "spent.json"))
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with pytest.raises(OSError):
        next(iter(private))
    assert private.ledger.steps == 0


COUNTS = """
import sys
from ragtag.privacy import PrivacyLedger
try:
    PrivacyLedger("A", sys.argv[1])
except BlockingIOError as error:
    sys.exit(str(error))
"""


def test_two_processes_cannot_count_in_one_file(tmp_path: Path) -> None:
    def other() -> str:
        path = str(tmp_path / "spent.json")
        run = subprocess.run([sys.executable, "-c", COUNTS, path], capture_output=True, timeout=60)
        return run.stderr.decode()

    first = PrivacyLedger("A", tmp_path / "spent.json")
    assert "another process counts in this ledger: end it" in other()
    first.close()
    assert other() == ""


def test_a_process_that_makes_its_ledger_again_goes_on_counting(tmp_path: Path) -> None:
    """As a notebook's cell that is run again: the old one may still be held somewhere, and count."""
    path = tmp_path / "spent.json"
    first = PrivacyLedger("A", path)
    first.spend(1.0, 0.1)
    again = PrivacyLedger("A", tmp_path / "." / "spent.json")
    again.spend(1.0, 0.1)
    first.spend(1.0, 0.1)
    assert first.steps == again.steps == 3
    with pytest.raises(ValueError, match="ledger of 'A'"):
        PrivacyLedger("B", path)
    first.close()
    again.spend(1.0, 0.1)
    again.close()
    last = PrivacyLedger("A", path)
    assert last.steps == 4, "in the file"
    last.spend(1.0, 0.1)
    first.spend(1.0, 0.1)
    assert last.steps == 6, "what was closed takes nothing back"


def test_another_holders_or_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spent.json"
    first = PrivacyLedger("A", path)
    first.spend(1.0, 0.1)
    first.close()
    with pytest.raises(ValueError, match="ledger of 'A'"):
        PrivacyLedger("B", path)
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match="bring it back from a copy"):
        PrivacyLedger("A", path)


# -- What is refused


class Counting(nn.Module):
    """Keeps a mean of what it has seen, as normalisations do, in a layer that Opacus does not look at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x


NORMED = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
PLAIN = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))


@pytest.mark.parametrize("model", [NORMED, PLAIN])
def test_batch_norm_is_refused_with_what_to_do(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"GroupNorm in its place, .*fix\(model\) does"):
        private_of(model, torch.optim.SGD(model.parameters(), RATE))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"noise_multiplier": 0.0}, "without noise nothing is private"),
        ({"noise_multiplier": math.nan}, "without noise"),
        ({"max_grad_norm": 0.0}, "must be above 0"),
        ({"delta": 1 / SAMPLES}, "below 1/60, as 0.002"),
        ({"delta": 0.0}, "below 1/60"),
        ({"reduction": "none"}, "'mean' or 'sum'"),
        ({"loader": [1, 2]}, "takes the DataLoader of this peer's own samples"),
        ({"loader": DataLoader(data(), batch_size=61)}, "batches of 61 from 60"),
        ({"loader": DataLoader(data(), batch_size=None)}, "without a sampler of its own"),
        (
            {"loader": DataLoader(data(), 5, sampler=WeightedRandomSampler([1.0] * 60, 60))},
            "without a sampler",
        ),
    ],
)
def test_figures_and_loaders_that_are_not_private_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(**more)


def test_a_file_in_the_place_of_a_ledger_is_refused_before_a_batch_is_drawn() -> None:
    with pytest.raises(TypeError, match=r"ledger is 'privacy\.json'; write ledger=PrivacyLedger\("):
        made(ledger="privacy.json")


def test_parameters_that_would_leave_without_noise_are_refused() -> None:
    model, other = net(), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="2 of the optimizer's parameters are not in the model"):
        private_of(model, torch.optim.SGD([*model.parameters(), *other.parameters()], RATE))
    with pytest.raises(ValueError, match="2 of the model's parameters are not the optimizer's"):
        private_of(model, torch.optim.SGD(model[0].parameters(), RATE))


def test_a_target_batch_is_refused() -> None:
    def train(peer: SimulatedTransport) -> None:
        model = net()
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), RATE), peer, model=model, average="gradients", target_batch=8,
            samples=lambda: 1,
        )  # fmt: skip
        with pytest.raises(ValueError, match="target batch is counted by the sizes"):
            private_of(model, optimizer)

    run_peers(TappedCrew(2), train)


def test_a_weight_by_samples_is_refused() -> None:
    def train(peer: SimulatedTransport) -> None:
        model = net()
        inner = torch.optim.SGD(model.parameters(), RATE)
        optimizer = CrewOptimizer(inner, peer, model=model, weight="samples", samples=lambda: 1)
        with pytest.raises(ValueError, match="leave weight= out, or give a number"):
            private_of(model, optimizer)

    run_peers(TappedCrew(2), train)


@pytest.mark.parametrize("layer", ["", "0", "1"])
def test_a_model_that_nopeek_watches_is_refused(layer: str) -> None:
    """Its loss is of the whole batch. It may be made later, too; once it is off the model all is well."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    nopeek = NoPeek(model, layer, weight=1.0)
    with pytest.raises(ValueError, match="distances are between samples"):
        private_of(model, optimizer)
    nopeek.remove()
    private = private_of(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    nopeek = NoPeek(model, layer, weight=1.0)
    x, y = next(iter(private))
    nopeek(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(NotPrivate, match=f"NoPeek watches '{layer}'"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    nopeek.remove()
    step(model, optimizer, next(iter(private)))
    assert not torch.equal(model[0].weight, before[0])


def use_twice(model: nn.Module, batch: list[Tensor]) -> None:
    for _ in range(2):
        F.cross_entropy(model(batch[0]), batch[1]).backward()


def use_half(model: nn.Module, batch: list[Tensor]) -> None:
    F.cross_entropy(model(batch[0][:4]), batch[1][:4]).backward()


def use_a_weight_beside_its_layer(model: nn.Module, batch: list[Tensor]) -> None:
    F.cross_entropy(F.linear(batch[0], model[0].weight)[:, :2], batch[1]).backward()  # type: ignore[index]


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (use_twice, "of 2 backward passes"),
        (use_half, r"of 4 samples, \d+ were drawn"),
        (use_a_weight_beside_its_layer, "none for each sample"),
    ],
)
def test_gradients_of_anything_but_the_batch_are_refused(
    use: Callable[[nn.Module, list[Tensor]], None], said: str
) -> None:
    model, optimizer, private = made()
    before = [p.detach().clone() for p in model.parameters()]
    use(model, next(iter(private)))
    with pytest.raises(NotPrivate, match=said):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_model_in_evaluation_mode_has_no_gradients_to_learn_from() -> None:
    model, _, private = made()
    batch = next(iter(private))
    with pytest.raises(ValueError, match="No activations detected"):  # Opacus says so
        F.cross_entropy(model.eval()(batch[0]), batch[1]).backward()


def test_a_step_needs_a_batch_of_its_own_and_no_closure() -> None:
    model, optimizer, private = made()
    batch = next(iter(private))
    step(model, optimizer, batch)
    with pytest.raises(NotPrivate, match="without a batch that was drawn for it"):
        step(model, optimizer, batch)
    with pytest.raises(NotPrivate, match="closure"):
        optimizer.step(lambda: 0.0)


def test_a_layer_that_learns_statistics_of_samples_is_refused_in_its_first_batch() -> None:
    model = nn.Sequential(Counting(), nn.Linear(4, 2))
    private = private_of(model, torch.optim.SGD(model.parameters(), RATE))
    batch = next(iter(private))
    with pytest.raises(NotPrivate, match=r"buffer '0.mean' learns from samples"):
        model(batch[0])


def test_a_gradient_that_is_not_finite_ends_the_step() -> None:
    poisoned = data()
    poisoned.tensors[0][:] = math.inf
    model, optimizer, private = made(loader=DataLoader(poisoned, batch_size=BATCH))
    with pytest.raises(NotFinite, match=r"'0.weight' for some sample"):
        step(model, optimizer, next(iter(private)))


def test_closed_it_leaves_the_model_as_it_was() -> None:
    model, optimizer, private = made()
    private.close()
    batch = [t[:8] for t in data().tensors]
    plain, other = net(), None
    other = torch.optim.SGD(plain.parameters(), RATE)
    step(model, optimizer, batch)
    step(plain, other, batch)
    assert torch.equal(model[0].weight, plain[0].weight)
    private_of(model, optimizer)
