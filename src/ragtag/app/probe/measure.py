"""What selecting and coding cost on this machine, for a vector of the user's size: `ragtag probe`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DENSE, fp32
from ragtag.codecs.sparse.advice import Cost
from ragtag.codecs.sparse.density import Density
from ragtag.codecs.sparse.feedback import ErrorFeedback
from ragtag.codecs.sparse.gather import SparseSum
from ragtag.codecs.sparse.options import Options
from ragtag.codecs.sparse.reused import add, reused
from ragtag.codecs.sparse.selection import Selection, Selector, State
from ragtag.codecs.sparse.threshold import dgc_sampling, gaussian
from ragtag.codecs.sparse.topk import chunked, exact, sampled
from ragtag.codecs.sparse.wire import Format, decode, encode
from ragtag.core import fast
from ragtag.core.seed import generator
from ragtag.core.types import Floats
from ragtag.core.wire import CHUNK_BYTES

Values = Literal["fp32", "bf16", "int8", "2bit"]
Tell = Callable[[int, int, str], None]

RUNS_MIN, RUNS_MAX = 3, 9
BUDGET_S = 1.0
"""Runs of one call stop after this long, once there were ``RUNS_MIN``."""
DENSE_PART = 1 << 22
"""Dense codecs cost the same for each value: of longer vectors this much is timed."""
SYNTHETIC_ROUNDS = 4
SIZE_MAX = 1 << 30

SPARSE: tuple[tuple[str, Selector, Values], ...] = (
    ("sampled top-k, int8", sampled, "int8"),
    ("sampled top-k, 2-bit", sampled, "2bit"),
    ("reused threshold, int8", reused, "int8"),
    ("chunked top-k, 2-bit", chunked(), "2bit"),
    ("DGC sampling, int8", dgc_sampling, "int8"),
    ("GaussianK, int8", gaussian, "int8"),
    ("exact top-k, int8", exact, "int8"),
)
"""What is measured, by the name that is shown."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """What is selected from: a residual and the gradient that comes on top.

    origin: whose they are.
    """

    residual: Floats
    gradient: Floats
    origin: str

    @property
    def size(self) -> int:
        """How many values."""
        return len(self.gradient)


def vectors_of(gradients: Iterable[Floats], ratio: float, origin: str) -> Vectors:
    """What error feedback at this ratio makes of gradients that follow each other.

    Raises ValueError: there is none, or their sizes differ; NotFinite: NaN or infinity in one.
    """
    feedback, before, last = None, np.zeros(0, np.float32), None
    for round_, gradient in enumerate(gradients):
        if feedback is None:
            feedback = ErrorFeedback(len(gradient), Options(Density(ratio), values="fp32"))
        before = feedback.residual.copy()
        feedback.commit(feedback.prepare(gradient, round_).ticket)
        last = gradient
    if last is None:
        raise ValueError("no gradient to select from")
    return Vectors(before, last, origin)


def synthetic(size: int, ratio: float) -> Vectors:
    """Of ``size`` values with long tails, after some rounds of error feedback. Raises ValueError."""
    if not 1 <= size <= SIZE_MAX:
        raise ValueError(f"{size:,} parameters: give 1 to {SIZE_MAX:,}")

    def heavy(round_: int) -> Floats:
        drawn = generator(round_, "probe").standard_normal(size, np.float32)
        return np.asarray(drawn * drawn * drawn, np.float32)

    gradients = (heavy(round_) for round_ in range(SYNTHETIC_ROUNDS))
    return vectors_of(gradients, ratio, "drawn, with long tails")


def measure(vectors: Vectors, ratio: float, tell: Tell | None = None) -> tuple[Cost, list[Cost]]:
    """What dense fp32 costs, and what each way of sending less does beyond that."""
    tell = tell or (lambda done, total, what: None)
    others = [codec for codec in DENSE.values() if codec is not fp32]
    total = len(others) + len(SPARSE)
    costs = []
    for codec in others:
        costs.append(_dense(codec, vectors.gradient))
        tell(len(costs), total, codec.name)
    for name, selector, values in SPARSE:
        costs.append(_sparse(name, selector, values, vectors, ratio))
        tell(len(costs), total, name)
    return Cost("fp32", _dense_bytes(fp32, vectors.size), dense=True), costs


def compiled() -> bool:
    """Whether numba is there: without it all of this takes several times as long."""
    return fast.available()


def _dense_bytes(codec: Codec, size: int) -> int:
    return -(-size // codec.elements) * CHUNK_BYTES


def _dense(codec: Codec, gradient: Floats) -> Cost:
    """Beyond fp32: encoding a vector, and adding up one that came."""
    part = gradient[:DENSE_PART]
    scale = len(gradient) / len(part)
    ours, theirs = (_dense_times_s(c, part) for c in (codec, fp32))
    encode_s, decode_s = (max(0.0, scale * (a - b)) for a, b in zip(ours, theirs, strict=True))
    bytes_ = _dense_bytes(codec, len(gradient))
    return Cost(codec.name, bytes_, encode_s=encode_s, decode_s=decode_s, dense=True)


def _dense_times_s(codec: Codec, part: Floats) -> tuple[float, float]:
    rows = -(-len(part) // codec.elements)
    table = np.zeros((rows, codec.elements), np.float32)
    table.reshape(-1)[: len(part)] = part
    total, weight, chunks = np.zeros_like(table), np.ones(rows, np.float32), codec.encode(table).copy()
    encode_s = time_s(lambda _: codec.encode(table))
    return encode_s, time_s(lambda _: codec.accumulate(chunks, weight, total))


def _sparse(name: str, selector: Selector, values: Values, vectors: Vectors, ratio: float) -> Cost:
    d = vectors.size
    form = Format(d, Density(ratio).k(d, 0), values)
    state = selector.init()
    u = vectors.residual + vectors.gradient
    chosen = selector.select(u, form.k, state, 0)
    sent = encode(chosen, form, 0, 1)
    zeros = np.zeros(d, np.float32)

    def read(gathered: SparseSum) -> None:
        if refused := gathered.add(1, sent.chunks):
            raise RuntimeError(f"a fragment was refused: {refused[0]}")

    def fresh() -> SparseSum:
        gathered = SparseSum(form, 0, (1,))
        gathered.total = zeros
        return gathered

    def code(_: None) -> None:  # what is fed back is what a receiver decodes
        decode(encode(chosen, form, 0, 1).chunks, form)

    return Cost(
        name,
        sent.chunks.size,
        select_s=_select_s(selector, vectors, u, form.k, state),
        encode_s=time_s(code),
        decode_s=time_s(read, fresh),
    )


def _select_s(selector: Selector, vectors: Vectors, u: Floats, k: int, state: State) -> float:
    """Adding the gradient to the residual, and selecting."""
    if selector.fused is not None:
        fused = selector.fused

        def one_pass(began: tuple[Floats, State]) -> Selection:
            return fused(began[0], vectors.gradient, k, began[1], 0)

        return time_s(one_pass, lambda: (vectors.residual.copy(), state.copy()))
    zeros = np.zeros_like(u)
    add_s = time_s(lambda _: add(u, zeros))
    return add_s + time_s(lambda began: selector.select(u, k, began, 0), state.copy)


def time_s(call: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None) -> float:
    """The shortest of some runs, after one that warms up; what ``prepare`` does is not counted."""
    call(prepare())
    best, spent, runs = float("inf"), 0.0, 0
    while runs < RUNS_MIN or (runs < RUNS_MAX and spent < BUDGET_S):
        given = prepare()
        begin_s = time.perf_counter()
        call(given)
        took_s = time.perf_counter() - begin_s
        best, spent, runs = min(best, took_s), spent + took_s, runs + 1
    return best
