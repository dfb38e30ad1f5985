"""The dense codecs in every method of averaging, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import bf16, fp32, int8
from ragtag.core.faults import Faults, Loss
from ragtag.core.seed import generator
from ragtag.core.types import Floats, Outcome
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.rps import rps, rps_repair
from ragtag.recipes.lockstep import LATENCY_S, run_rounds

N, CHUNKS, ROUNDS = 4, 9, 3
OFF = {"fp32": 1e-6, "bf16": 2.0**-8, "int8": 0.501 / 127}
"""What one encoding may change, relative to the largest value."""


def values_of(codec: Codec, round_: int) -> list[Floats]:
    shape = (CHUNKS, codec.elements)
    return [generator(round_, "values", p).standard_normal(shape).astype(np.float32) for p in range(N)]


def averaged(method: Averager, codec: Codec, loss: float) -> list[list[Outcome]]:
    """Outcomes by round and peer."""
    rounds: list[list[Outcome]] = []

    def then(done: int, outcomes: list[Outcome]) -> list[Floats] | None:
        rounds.append([replace(o, mean=o.mean.copy(), heard=o.heard.copy()) for o in outcomes])
        return values_of(codec, done + 1) if done + 1 < ROUNDS else None

    faults = Faults(loss=Loss(loss) if loss else None, latency_s=LATENCY_S)
    run_rounds(values_of(codec, 0), then, method=method, faults=faults, seed=4, codec=codec)
    return rounds


@pytest.mark.parametrize("codec", [fp32, bf16, int8], ids=lambda c: c.name)
@pytest.mark.parametrize("method", [rps, rps_repair, direct, ring], ids=lambda m: m.name)
@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_every_method_averages_what_the_codec_can_say(method, codec, loss) -> None:
    """Each peer's mean is that of the peers it names, up to one rounding per encoding on the way; all peers
    that got an average from the same contributors hold the same, bit for bit.
    """
    hops = N if method is ring else 2
    for round_, outcomes in enumerate(averaged(method, codec, loss)):
        values = np.stack(values_of(codec, round_))
        bound = OFF[codec.name] * float(np.abs(values).max()) * hops
        for outcome in outcomes:
            for chunk in np.flatnonzero(outcome.averaged).tolist():
                peers = [p for p in range(N) if int(outcome.heard[chunk]) >> p & 1]
                mean = values[peers, chunk].mean(axis=0)
                assert np.abs(outcome.mean[chunk] - mean).max() <= bound
        both = np.logical_and.reduce([o.averaged for o in outcomes])
        assert both.any()
        for other in outcomes[1:]:
            assert np.array_equal(other.mean[both], outcomes[0].mean[both])
        if not loss or method is not rps:
            assert both.all()
