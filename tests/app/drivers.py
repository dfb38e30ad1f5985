"""Transports over drivers in one process, and peers that use them each in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from ragtag.app.crew.transport import DriverTransport
from tests.network.crew import PATIENCE_S, Crew

Train = Callable[[DriverTransport], Any]


def transports(crew: Crew, deadline_s: float = PATIENCE_S) -> dict[int, DriverTransport]:
    return {peer: DriverTransport(driver, deadline_s) for peer, driver in crew.drivers.items()}


def all_at_once(of: Mapping[int, DriverTransport], work: Train | Mapping[int, Train]) -> dict[int, Any]:
    """Each peer's work in a thread of its own; what it returned, or the error that it raised."""
    with ThreadPoolExecutor(len(of)) as pool:
        futures: dict[int, Future[Any]] = {
            peer: pool.submit(work if callable(work) else work[peer], transport)
            for peer, transport in of.items()
        }
        done = {peer: (future.exception(2 * PATIENCE_S), future) for peer, future in futures.items()}
    return {peer: error if error is not None else future.result() for peer, (error, future) in done.items()}


def tiny(hidden: int = 5, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2)).to(dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
