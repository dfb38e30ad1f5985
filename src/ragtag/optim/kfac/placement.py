"""Where the work of K-FAC is done: a pure function of layers' sizes and of who lives, the same on all peers.

A layer's *computers* decompose its factors, A and G; its *workers* take the bases and precondition its
gradient; all other peers, its *receivers*, take the preconditioned gradient from one worker each. KAISA
("KAISA: An Adaptive Second-Order Optimizer Framework for Deep Neural Networks", Pauloski, Huang, Huang,
Venkataraman, Chard, Foster, Zhang, SC 2021) chooses the share of peers that are workers of a layer: all of
them (communication-optimal: no gradient travels), one (memory-optimal: no basis travels), or some.

Peers form a grid. Its columns are groups of workers; a layer belongs to one column, and a peer elsewhere
receives from the worker in its own row. Where peers do not fill the grid, columns differ by one peer, and
rows are counted around.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

Side = Literal["A", "G"]
SIDES: tuple[Side, Side] = ("A", "G")
"""A layer's factors: of its inputs, and of its output gradients."""
VALUE_BYTES = 4
"""All that is counted travels as float32."""

CostModel = Literal["compute", "memory"] | Mapping[int, float]
"""``n**3``, ``n**2``, or measured: seconds to decompose one matrix, by its size."""
DecompositionForm = Literal["eigen", "inverse"]
_LATEST = 5
"""Times of one size that a peer goes by: a middle one of few follows a machine that gets slower."""
_SECONDS_MIN, _SECONDS_MAX = 2.0**-40, 2.0**20
"""A time that a peer tells beyond these is none."""


@dataclass(frozen=True, slots=True)
class LayerSize:
    """How large a layer's factors are.

    a: rows of A: inputs to one output, and 1 more with a bias.
    g: rows of G: outputs of one group.
    groups: how many pairs of factors (a convolution's groups).
    block_rows: a factor of more rows is decomposed in diagonal blocks (``None``: all are whole).
    """

    a: int
    g: int
    groups: int = 1
    block_rows: int | None = None

    def side(self, side: Side) -> int:
        """The rows of one factor."""
        return self.a if side == "A" else self.g

    def blocks(self, side: Side) -> tuple[int, ...]:
        """The rows of what of one factor is decomposed at once: few blocks, and as even as they can be."""
        n = self.side(side)
        count = 1 if self.block_rows is None else -(-n // self.block_rows)
        return tuple(n * (at + 1) // count - n * at // count for at in range(count))

    def factor_bytes(self) -> int:
        """Of A and G."""
        return VALUE_BYTES * self.groups * (self.a**2 + self.g**2)

    def basis_bytes(self, side: Side, form: DecompositionForm) -> int:
        """Of what is computed from one factor: eigenvectors and eigenvalues, or inverses."""
        values = sum(n * n + n if form == "eigen" else n * n for n in self.blocks(side))
        return VALUE_BYTES * self.groups * values

    def gradient_bytes(self) -> int:
        """Of the layer's gradient, its bias's with it."""
        return VALUE_BYTES * self.groups * self.a * self.g


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Who does what for one layer.

    computers: who decomposes A, and who G; both are workers.
    workers: who preconditions its gradient.
    givers: of each other peer, the worker that it takes the preconditioned gradient from.
    """

    computers: Mapping[str, int]
    workers: tuple[int, ...]
    givers: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class SentBytes:
    """What all peers together send.

    factors: in one average, reduced in blocks (each peer sends its copies away, and its block's mean to all).
    bases: in one update of the decompositions.
    gradients: in one step.
    """

    factors: int
    bases: int
    gradients: int


def cost_of(size: int, model: CostModel = "compute") -> float:
    """What decomposing one matrix of ``size`` rows takes.

    Raises ValueError: no rows, an unknown model, or a size that was not measured, or not above 0.
    """
    if size < 1:
        raise ValueError(f"a factor has {size} rows; it must have one at least")
    if model == "compute":
        return float(size**3)
    if model == "memory":
        return float(size**2)
    if isinstance(model, str):
        raise ValueError(f'cost model {model!r}; give "compute", "memory" or seconds by size')
    seconds = model.get(size, math.nan)
    if not 0 < seconds < math.inf:
        raise ValueError(f"no seconds above 0 were measured for a factor of {size} rows: {seconds}")
    return seconds


class MeasuredCosts:
    """What decompositions take where they are made, and what the crew makes of that.

    A peer times its own ones, and tells the middle of the latest of each size, which an average over peers
    brings together. Only ratios count, so times are told as logarithms, less by how much this peer is slower
    than the crew at the sizes that it has made. So a size that slow peers alone have made is not dear for it.

    Averages differ between peers where something was lost. So no peer places by what it has heard: one of
    them publishes what it would place by, and all take that (``training/kfac``).
    """

    def __init__(self, matrices: Mapping[str, tuple[int, int]]) -> None:
        """matrices: of each basis by name, the rows of its matrices, and how many these are."""
        self._matrices = dict(matrices)
        self.sizes = sorted({rows for rows, _ in matrices.values()})
        """What is told is of these, in this order."""
        self._own: dict[int, deque[float]] = {size: deque(maxlen=_LATEST) for size in self.sizes}
        self._heard: list[float | None] = [None] * len(self.sizes)

    def took(self, seconds: Mapping[str, float]) -> None:
        """This peer made these bases."""
        for name, took_s in seconds.items():
            rows, count = self._matrices[name]
            self._own[rows].append(min(max(took_s / count, _SECONDS_MIN), _SECONDS_MAX))

    def told(self) -> tuple[list[float], list[float]]:
        """Of each size log2 of its seconds on a usual peer, and 1; of one that was not made here, 0 and 0."""
        own = [math.log2(median(times)) if times else None for times in self._own.values()]
        slower = [
            log - heard
            for log, heard in zip(own, self._heard, strict=True)
            if log is not None and heard is not None
        ]
        less = fmean(slower) if slower else 0.0
        return [0.0 if log is None else log - less for log in own], [float(log is not None) for log in own]

    def hear(self, logs: Sequence[float], counts: Sequence[float]) -> None:
        """What peers told, averaged. A size that none of them has made stays as it was."""
        low, high = math.log2(_SECONDS_MIN), math.log2(_SECONDS_MAX)
        for at, (log, count) in enumerate(zip(logs, counts, strict=True)):
            if count > 0 and low <= log / count <= high:
                self._heard[at] = log / count

    def seconds(self) -> list[float]:
        """log2 of the seconds of each size, as this peer has heard; all 0: nothing has been measured.

        A size that was never made takes the time of the one next to it, by the cube of rows.
        """
        known = [(size, log) for size, log in zip(self.sizes, self._heard, strict=True) if log is not None]
        found = []
        for size in self.sizes:
            near, log = min(known, key=lambda one: abs(math.log2(one[0] / size)), default=(size, 0.0))
            found.append(log + 3 * math.log2(size / near))
        return found

    def costs(self, seconds: Sequence[float]) -> dict[str, float]:
        """Of each basis, by log2 of the seconds of each size."""
        model = {size: 2.0**log for size, log in zip(self.sizes, seconds, strict=True)}
        return {name: count * cost_of(rows, model) for name, (rows, count) in self._matrices.items()}


def largest_load(costs: Mapping[str, float], owners: Mapping[str, int]) -> float:
    """What the busiest owner has to do: owners: of each name."""
    loads = dict.fromkeys(owners.values(), 0.0)
    for name, owner in owners.items():
        loads[owner] += costs[name]
    return max(loads.values())


def longest_first(costs: Mapping[str, float], bins: Sequence[int]) -> dict[str, int]:
    """Each name's bin: in falling cost, each goes to the bin with the least load per peer (Graham 1969).

    bins: how many peers share each. With one each the fullest has at most 4/3 of what it has at best. Equal
    costs go by name, equal loads by number.
    """
    loads = [0.0] * len(bins)
    placed = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        least = min(range(len(bins)), key=lambda at: (loads[at] / bins[at], at))
        placed[name] = least
        loads[least] += costs[name]
    return placed


def columns_of(peers: Sequence[int], fraction: float) -> list[tuple[int, ...]]:
    """The groups of workers: each of ``fraction`` of the peers, at least one, as nearly as they divide."""
    size = min(len(peers), max(1, round(len(peers) * fraction)))
    columns = max(1, len(peers) // size)
    return [tuple(peers[at::columns]) for at in range(columns)]


def kaisa(
    layers: Mapping[str, LayerSize],
    peers: Iterable[int],
    *,
    fraction: float = 1.0,
    cost: CostModel = "compute",
    together: bool = True,
) -> dict[str, LayerPlan]:
    """Who does what for each layer.

    peers: who lives. fraction: of the peers, how many are workers of one layer: 1 is communication-optimal,
    1 / n (or less) memory-optimal. cost: of decompositions. together: whether one peer decomposes both of a
    layer's factors; else each goes to the least loaded worker of the layer's column.

    Raises ValueError: nobody lives, a peer is named twice, the fraction is not in (0, 1], or a cost is
    unknown.
    """
    alive = sorted(peers)
    if not alive or len(set(alive)) != len(alive):
        raise ValueError(f"peers {alive}: K-FAC needs one at least, each once")
    if not 0 < fraction <= 1:
        raise ValueError(f"gradient-worker fraction {fraction}; it must be above 0 and at most 1")
    columns = columns_of(alive, fraction)
    one = {
        name: {
            side: layer.groups * math.fsum(cost_of(rows, cost) for rows in layer.blocks(side))
            for side in SIDES
        }
        for name, layer in layers.items()
    }
    whole = {name: math.fsum(sides.values()) for name, sides in one.items()}
    column_of = longest_first(whole, [len(column) for column in columns])
    row = {peer: at for column in columns for at, peer in enumerate(column)}
    plans = {}
    for at, workers in enumerate(columns):
        own = {name: cost for name, cost in whole.items() if column_of[name] == at}
        computers = _computers(own, one, workers, together=together)
        givers = {peer: workers[row[peer] % len(workers)] for peer in alive if peer not in workers}
        plans.update({name: LayerPlan(computers[name], workers, givers) for name in own})
    return {name: plans[name] for name in layers}


def _computers(
    own: Mapping[str, float],
    one: Mapping[str, Mapping[Side, float]],
    workers: tuple[int, ...],
    *,
    together: bool,
) -> dict[str, dict[str, int]]:
    if together:
        placed = longest_first(own, [1] * len(workers))
        return {name: dict.fromkeys(SIDES, workers[at]) for name, at in placed.items()}
    apart = longest_first(
        {f"{side}{name}": one[name][side] for name in own for side in SIDES}, [1] * len(workers)
    )
    return {name: {side: workers[apart[f"{side}{name}"]] for side in SIDES} for name in own}


def sent_bytes(
    layers: Mapping[str, LayerSize], plans: Mapping[str, LayerPlan], form: DecompositionForm = "eigen"
) -> SentBytes:
    """What ``plans`` cost, by formula: with n peers, w workers of a layer, and its sizes,

    factors 2 (n - 1) (A and G), bases (w - 1) (one basis each), gradients (n - w) (one gradient).

    A basis is sent as eigenvectors and eigenvalues (of a factor in blocks, each block's), not as the outer
    product of these with the damping: that is a + g values in place of a g, and damping may change between
    decompositions.
    """
    factors = bases = gradients = 0
    for name, layer in layers.items():
        workers, receivers = len(plans[name].workers), len(plans[name].givers)
        factors += 2 * (workers + receivers - 1) * layer.factor_bytes()
        bases += (workers - 1) * sum(layer.basis_bytes(side, form) for side in SIDES)
        gradients += receivers * layer.gradient_bytes()
    return SentBytes(factors, bases, gradients)
