"""Streaming DiLoCo over real sockets is the simulated one of ``ragtag reproduce diloco``."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ragtag
from ragtag.app.crew import transport as module
from ragtag.app.crew.transport import DriverTransport
from ragtag.codecs.dense import fp32
from ragtag.optim.outer import Nesterov
from ragtag.protocols.channel.averager import Channel
from ragtag.recipes.diloco.training import Method, Setup, Trainee, _Training, train
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.app.drivers import all_at_once, transports
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


def live(setup: Setup, text: Path) -> float:
    """The same peers over real drivers, each in a thread; the loss of the mean of their models at the end."""
    twin = _Training(setup, text)  # for its beginning, its text and its loss

    def work(transport: DriverTransport) -> Trainee:
        transport.compute = lambda: None  # type: ignore[attr-defined]  # live, a step takes what it takes
        peer = Trainee(setup, twin._text, twin._first, transport)  # type: ignore[arg-type]
        for _ in range(setup.steps):
            peer.step()
        return peer

    with Crew(N) as crew:
        came = all_at_once(transports(crew), work)
    peers = list(came.values())
    assert all(isinstance(peer, Trainee) for peer in peers), came
    for peer in peers:
        assert len(peer.averages) == FRAGMENTS * setup.steps // EVERY
        assert all((outcome.heard == (1 << N) - 1).all() for outcome in peer.averages)
    return twin.loss(torch.stack([peer.values for peer in peers]).mean(0))


def test_live_is_as_simulated(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # no deadline ends a round, however busy the machine is
    monkeypatch.setattr(module, "Channel", partial(Channel, floor_s=PATIENCE_S))
    method = Method("streaming", EVERY, Nesterov(), FRAGMENTS)
    setup = Setup(method, 0, STEPS, 0.01, n=N, width=8, layers=1, length=8, batch=2, looks=2)
    simulated = train(setup, text).loss
    assert live(setup, text) == pytest.approx(simulated, rel=1e-5)
    plain = train(replace(setup, method=Method("plain", EVERY, Nesterov())), text)
    assert abs(plain.loss - simulated) > 1e-3 * simulated  # so a wrong fragment would show


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
