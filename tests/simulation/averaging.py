"""Peers in virtual time that do nothing but average."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ragtag.codecs.dense import fp32
from ragtag.core.channels import channel_of
from ragtag.core.schema import Schema, TensorSpec
from ragtag.core.types import Floats, Outcome
from ragtag.protocols.channel.averager import Averager
from ragtag.simulation.transport import SimulatedTransport

CHANNEL, CHUNKS, ROUNDS = channel_of("numbers"), 12, 6
VALUES = CHUNKS * fp32.elements
Train = Callable[[SimulatedTransport], list[Outcome]]


def numbers(peer: int, round_: int) -> Floats:
    """Whole numbers, so that sums are exact in whatever order."""
    draws = np.random.default_rng([peer, round_]).integers(-99, 99, (CHUNKS, fp32.elements))
    return draws.astype(np.float32)


def averages(by: Averager, rounds: int = ROUNDS) -> Train:
    """A peer that averages its numbers, round by round."""
    schema = Schema((TensorSpec("numbers", (VALUES,), "float32"),), "fp32", by.name)

    def train(peer: SimulatedTransport) -> list[Outcome]:
        peer.configure(CHANNEL, schema, by, fp32)
        came = []
        for round_ in range(rounds):
            peer.compute()
            came.append(peer.start(CHANNEL, numbers(peer.me, round_), 1.0).wait())
        return came

    return train
