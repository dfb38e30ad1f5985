"""A crew whose models lie on a GPU comes to what the same crew comes to on the processor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ragtag.codecs.dense import bf16, int8
from ragtag.core.faults import Faults, Loss
from ragtag.optim.kfac.preconditioner import KFAC
from ragtag.optim.outer import Outer
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.protocols.rounds.robust import TrimmedMean
from ragtag.protocols.rounds.rps import RPS
from ragtag.schedules.asynchronous import Asynchronous
from ragtag.schedules.partial import Partial
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.align.plan import Align
from ragtag.training.coherence import Coherence
from ragtag.training.exchange.central import Centre
from ragtag.training.exchange.compress import TopK
from ragtag.training.kfac import CrewCommunicator, CrewSteps
from ragtag.training.optimizer.optimizer import CrewOptimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GPU, CPU = torch.device("cuda"), torch.device("cpu")
N, STEPS, STEP_S = 3, 12, 0.02
G: dict[str, Any] = {"average": "gradients"}


@pytest.fixture(autouse=True)
def _exactly() -> Iterator[None]:
    """Convolutions in float32, as on the processor."""
    was = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = was


def net(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 16, 40), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(40, 3)).to(device, dtype)


def batch(peer: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * peer + step)
    x = torch.randn(8, 2, 6, 6, generator=draw)
    return x, (x.mean((1, 2, 3)) > 0).long() + (x[:, 0, 0, 0] > 0).long()


def learn(model: nn.Module, peer: int, step: int) -> None:
    """The gradients of a batch, where the model lies."""
    x, y = batch(peer, step)
    device = next(model.parameters()).device
    model.zero_grad()
    functional.cross_entropy(model(x.to(device)), y.to(device)).backward()


def crew(loss: float = 0.02) -> SimulatedCrew:
    lines = Faults(latency_s=0.001, rate_bytes_per_s=1e8, loss=Loss(loss) if loss else None)
    return SimulatedCrew(N, lines, seed=3, cost=ComputeCost(STEP_S, sigma=0.1, seed=3))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().reshape(-1).cpu().float() for value in model.state_dict().values()])


def trained(device: torch.device, options: dict[str, Any], inner: str = "SGD") -> list[torch.Tensor]:
    """Each peer's parameters and buffers at the end."""

    def train(peer: SimulatedTransport) -> torch.Tensor:
        model = net(device)
        how: dict[str, Any] = {"lr": 0.05} if inner == "SGD" else {"lr": 0.01, "fused": inner == "fused"}
        if inner == "SGD" and "compress" not in options and "method" not in options:
            how["momentum"] = 0.9
        kind = torch.optim.SGD if inner == "SGD" else torch.optim.AdamW
        given = dict(options)
        if given.pop("samples", False):
            given["samples"] = lambda: 8 * (step + 1)
        optimizer = CrewOptimizer(kind(model.parameters(), **how), peer, model=model, **given)
        for step in range(STEPS):
            peer.compute()
            learn(model, peer.me, step)
            optimizer.step()
        if "outer" in options or options.get("overlap"):
            optimizer.average()
        assert all(value.device.type == device.type for value in model.state_dict().values())
        return flat(model)

    return crew().run(train)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(G, id="gradients"),
        pytest.param({**G, "codec": int8, "method": AllReduce()}, id="gradients, int8"),
        pytest.param({**G, "overlap": True}, id="gradients, overlapped"),
        pytest.param({**G, "align": Align(2)}, id="gradients, compared often"),
        pytest.param({**G, "guard": TrimmedMean(liars=0.3)}, id="gradients, guarded"),
        pytest.param({**G, "method": RPS(hadamard=4)}, id="gradients, mixed"),
        pytest.param({**G, "coherence": Coherence()}, id="gradients, coherence"),
        pytest.param({**G, "target_batch": 40, "samples": True}, id="gradients, a target batch"),
        pytest.param({**G, "compress": TopK(ratio=0.05, bypass=False)}, id="gradients, top-k"),
        pytest.param(
            {**G, "compress": TopK(ratio=0.05, bypass=False, momentum_correction=0.9)},
            id="gradients, top-k, DGC",
        ),
        pytest.param({}, id="models"),
        pytest.param({"codec": bf16, "every": 3}, id="models, bf16"),
        pytest.param({"overlap": True, "every": 2}, id="models, overlapped"),
        pytest.param({"schedule": Partial()}, id="models, partial"),
        pytest.param({"outer": Outer(), "every": 4}, id="models, outer"),
        pytest.param({"outer": Outer(delay=1), "every": 4}, id="models, outer, delayed"),
        pytest.param({"outer": Outer(fragments=2, delay=1), "every": 4}, id="models, fragments"),
        pytest.param({"compress": TopK(ratio=0.05, bypass=False), "every": 2}, id="models, top-k"),
        pytest.param({"method": Centre(Asynchronous())}, id="models, a centre"),
        pytest.param(
            {"method": Centre(Asynchronous(), compensate=0.1), "buffers": False},
            id="models, a centre, compensated",
        ),
    ],
)
def test_a_crew_comes_to_the_same(options: dict[str, Any]) -> None:
    on_gpu, on_cpu = trained(GPU, options), trained(CPU, options)
    began = flat(net(CPU))
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert (ours - theirs).norm() < 2e-3 * (theirs - began).norm()


@pytest.mark.parametrize("inner", ["fused", "AdamW"])
@pytest.mark.parametrize("average", ["gradients", "models"])
def test_adam_comes_to_the_same(inner: str, average: str) -> None:
    on_gpu, on_cpu = trained(GPU, {"average": average}, inner), trained(CPU, {"average": average}, inner)
    began = flat(net(CPU))
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):  # Adam's first steps go by signs of gradients
        assert (ours - theirs).norm() < 0.02 * (theirs - began).norm()


@pytest.mark.parametrize("average", ["gradients", "models"])
def test_mixed_precision_with_a_scaler(average: str) -> None:
    """Float16 gradients of which one peer's overflow at a step: it takes part all the same."""

    def train(peer: SimulatedTransport) -> tuple[torch.Tensor, float, int]:
        model = net(GPU)
        averages: list[object] = []
        inner = torch.optim.SGD(model.parameters(), 0.05, 0.9)
        optimizer = CrewOptimizer(inner, peer, model=model, average=average, on_outcome=averages.append)  # type: ignore[arg-type]
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for step in range(STEPS):
            peer.compute()
            x, y = batch(peer.me, step)
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = functional.cross_entropy(model(x.to(GPU)), y.to(GPU))
            scaler.scale(loss).backward()
            if (step, peer.me) == (4, 1):
                model[6].weight.grad[0, 0] = torch.inf
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
        return flat(model), scaler.get_scale(), len(averages)

    found = crew(loss=0.0).run(train)
    assert [one[1] for one in found if one] == [1024.0, 512.0, 1024.0]
    assert [one[2] for one in found if one] == [STEPS] * N
    on_cpu = trained(CPU, {"average": average})
    began = flat(net(CPU))
    for one, theirs in zip(found, on_cpu, strict=True):
        assert one is not None
        assert one[0].isfinite().all()
        assert (one[0] - theirs).norm() < 0.3 * (theirs - began).norm()


def test_bf16_models_and_channels_last() -> None:
    def train(peer: SimulatedTransport) -> torch.Tensor:
        model = net(GPU, torch.bfloat16).to(memory_format=torch.channels_last)
        optimizer = CrewOptimizer(torch.optim.SGD(model.parameters(), 0.05, 0.9), peer, model=model)
        for step in range(STEPS):
            x, y = batch(peer.me, step)
            optimizer.zero_grad()
            functional.cross_entropy(model(x.to(GPU, torch.bfloat16)).float(), y.to(GPU)).backward()
            optimizer.step()
        return flat(model)

    found = crew(loss=0.0).run(train)
    assert found[0] is not None
    for one in found[1:]:
        assert one is not None
        assert torch.equal(one, found[0])


def test_a_step_in_a_stream_of_its_own() -> None:
    """What is computed in another stream is in what is sent, and what came is there for the next step."""

    def train(peer: SimulatedTransport) -> torch.Tensor:
        model = net(GPU)
        optimizer = CrewOptimizer(torch.optim.SGD(model.parameters(), 0.05, 0.9), peer, model=model, **G)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step in range(STEPS):
                peer.compute()
                learn(model, peer.me, step)
                torch.cuda._sleep(20_000_000)
                optimizer.step()
        stream.synchronize()
        return flat(model)

    began = flat(net(CPU))
    for ours, theirs in zip(crew().run(train), trained(CPU, G), strict=True):
        assert ours is not None
        assert (ours - theirs).norm() < 2e-3 * (theirs - began).norm()


@pytest.mark.parametrize("placement", ["communication", "memory"])
def test_kfac_comes_to_the_same(placement: Any) -> None:
    def run(device: torch.device) -> list[Any]:
        def train(peer: SimulatedTransport) -> tuple[torch.Tensor, list[int | None]]:
            model = net(device)
            inner = torch.optim.SGD(model.parameters(), 0.05, 0.9)
            optimizer = CrewOptimizer(inner, peer, model=model, method=AllReduce(), **G)

            def joined(needs: Any) -> CrewCommunicator:
                steps = CrewSteps([optimizer._averaged], inner, peer.heard_of)
                how: dict[str, Any] = {"placement": placement, "cost": "compute", "steps": steps}
                return CrewCommunicator(peer, "kfac", needs, averager=AllReduce(), seed=3, **how)

            kfac = KFAC(model, inner, communicator=joined, damping=0.01, factor_every=1, inverse_every=4)
            ages = []
            for step in range(STEPS):
                peer.compute()
                learn(model, peer.me, step)
                kfac.step()
                optimizer.step()
                ages.append(kfac.age)
            return flat(model), ages

        return crew(loss=0.0).run(train)

    began = flat(net(CPU))
    for ours, theirs in zip(run(GPU), run(CPU), strict=True):
        assert ours[1] == theirs[1]
        assert (ours[0] - theirs[0]).norm() < 0.01 * (theirs[0] - began).norm()
