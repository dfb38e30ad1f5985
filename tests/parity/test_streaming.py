"""Streaming DiLoCo over real sockets is the simulated one of ``ragtag reproduce diloco``."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad

import ragtag
from ragtag.app.crew import transport as module
from ragtag.app.crew.transport import DriverTransport
from ragtag.codecs.dense import fp32
from ragtag.optim.outer import Nesterov
from ragtag.protocols.channel.averager import Channel
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.recipes.diloco.training import Method, Setup, _Crew, train
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.app.test_transport import all_at_once, transports
from tests.network.crew import PATIENCE_S, Crew

N, FRAGMENTS, EVERY, STEPS = 3, 2, 4, 24


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> Path:
    """20 KB of random letters."""
    path: Path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(97, 123, 20_000, np.uint8)))
    return path


class Flat(nn.Module):
    """The simulated crew's model: one vector."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(values.clone())


def live(setup: Setup, text: Path) -> list[torch.Tensor]:
    """The same training over real drivers, each peer in a thread; the peers' models at its end."""
    twin = _Crew(setup, text)  # for its beginning, its texts, its loss and its learning rates
    models = [Flat(values) for values in twin.models.detach()]
    outer = ragtag.Outer(fragments=FRAGMENTS)
    whole: list[bool] = []

    def work(transport: DriverTransport) -> None:
        model = models[transport.me]
        inner, rates = twin._optimiser(model.w, setup.steps)
        optimizer = CrewOptimizer(
            inner,
            transport,
            method=AllReduce(),
            every=EVERY // FRAGMENTS,
            outer=outer,
            model=model,
            on_outcome=lambda outcome: whole.append(bool((outcome.heard == (1 << N) - 1).all())),
        )
        for _ in range(FRAGMENTS):  # all begin alike, so the first averages make that the anchor
            optimizer.average()
        for _ in range(setup.steps):
            x, y = next(twin._text[transport.me])
            model.w.grad = grad(twin._loss)(model.w.detach(), x, y)
            optimizer.step()
            rates.step()

    with Crew(N) as crew:
        came = all_at_once(transports(crew), work)
    assert all(value is None for value in came.values()), came
    assert all(whole)
    assert len(whole) == N * (FRAGMENTS + FRAGMENTS * setup.steps // EVERY)
    return [model.w.detach() for model in models]


def test_live_is_as_simulated(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # no deadline ends a round, however busy the machine is
    monkeypatch.setattr(module, "Channel", partial(Channel, floor_s=PATIENCE_S))
    method = Method("streaming", EVERY, Nesterov(), FRAGMENTS)
    setup = Setup(method, 0, STEPS, 0.01, n=N, width=8, layers=1, length=8, batch=2, looks=2)
    models = live(setup, text)
    twin, simulated = _Crew(setup, text), train(setup, text)
    loss = float(twin._loss(torch.stack(models).mean(0), *twin._held))
    assert loss == pytest.approx(simulated.loss, rel=1e-5)
    plain = train(
        Setup(
            Method("plain", EVERY, Nesterov()),
            *(0, STEPS, 0.01),
            n=N,
            width=8,
            layers=1,
            length=8,
            batch=2,
            looks=2,
        ),
        text,
    )
    assert abs(plain.loss - simulated.loss) > 1e-3 * simulated.loss  # so a wrong fragment would show


def test_a_peer_that_skips_rounds_averages_the_right_fragment() -> None:
    """Each fragment's values are its number; the peer that comes seldom brings whole ones, and finds them."""
    fragments, chunks = 3, 6
    ended, moved = threading.Event(), threading.Condition()
    at = 0

    def is_past(round_: int) -> bool:
        return at >= round_

    def work(transport: DriverTransport) -> list[tuple[int, set[float]]]:
        nonlocal at
        model = Flat(torch.arange(chunks * fp32.elements) // (chunks // fragments * fp32.elements) * 1.0)
        seen: list[tuple[int, set[float]]] = []
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            transport,
            every=1,
            outer=ragtag.Outer(1.0, 0.0, fragments=fragments),
            model=model,
            on_outcome=lambda o: seen.append((o.round, set(o.mean.reshape(-1).tolist()))),
        )
        before = model.w.detach().clone()
        for _ in range(6 if transport.me == 2 else 10_000):
            if transport.me == 2:
                with moved:
                    assert moved.wait_for(partial(is_past, at + 4), PATIENCE_S)
            optimizer.average()
            if transport.me == 0:
                with moved:
                    at += 1
                    moved.notify_all()
            if ended.is_set():
                break
        if transport.me == 2:
            ended.set()
        assert torch.equal(model.w.detach(), before)
        return seen

    with Crew(3) as crew:
        came = all_at_once(transports(crew), work)
    assert all(isinstance(outcomes, list) for outcomes in came.values()), came
    rounds = [round_ for round_, _ in came[2]]
    assert rounds[-1] - rounds[0] > len(rounds)  # it skipped some
    for outcomes in came.values():
        for round_, values in outcomes:
            assert values == {float(round_ % fragments)}
