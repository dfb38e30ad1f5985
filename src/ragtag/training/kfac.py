"""K-FAC with a crew: what ``optim.kfac`` asks of other peers, by named tensors.

Factors are averaged, weighted by samples; bases are computed at one owner each and published; both by one
``NamedTensors``. Peers whose gradients the crew averages hold the same gradient and the same bases, so that
each preconditions for itself, and nothing more travels: KAISA's communication-optimal placement. Bases come
to peers at different moments, and these are to take the same steps: so all use one from the step on that
follows its publication. Steps are told apart by the rounds of the gradients' averages, which have the same
numbers everywhere, and not by a count of calls: towards a target batch each peer has as many batches as it
likes. A peer that has a basis later is brought into step by comparisons of replicas.

With fewer workers to a layer, bases go to these alone, and preconditioned gradients to all others: by a
second average in each step, to which a layer's workers give its gradient and the others zeros. Each row of
that average carries how many workers' values are in it, by which it is divided. So a row is right whatever
was lost, and wherever peers that see different crews have placed a layer. A row in which no worker is has
not come, and the step is taken with that part of the gradient as it was.

Who owns which basis follows from what it costs: by a formula, or measured. Measured times go along with
averages of factors, and one peer publishes what all are to place by, as an owner publishes a basis. So
placements change at one step for all, a newcomer gets the costs with the bases, and a second owner stands in
for the peer that publishes them. A peer that has them late goes by the older ones: then a basis is made
twice, or is late until its second owner makes it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DENSE, DenseName, fp32, int8
from ragtag.core.types import Outcome
from ragtag.optim.kfac.communicator import Basis, FactorRound, Needs
from ragtag.optim.kfac.placement import LayerSize, MeasuredCosts, cost_of, kaisa, largest_load
from ragtag.protocols.channel.averager import Averager
from ragtag.training.exchange.asked import averaging_of
from ragtag.training.named import Averaging, NamedTensors, Newest
from ragtag.training.optimizer.averaged import AveragedModel
from ragtag.training.transport import PublishingTransport

Placement = Literal["communication", "memory"] | float
"""How many peers precondition a layer's gradient: all, one, or a share of them."""
PlacementCost = Literal["compute", "memory", "measured"]
"""What a decomposition of n rows costs: n^3, n^2, or the time that it takes."""
GIVEN, TIMES, COSTS = "given", "times", "costs"
"""Among the names of factors and of bases, which have dots: which factors a peer gives, what peers measured,
and what all place by."""
GAIN = 0.1
"""Owners change where the busiest one has so much less to do then; times are no more exact than that."""
COMING_MAX = 4
"""Versions of one basis that wait for their step; of more the oldest is passed over."""
AHEAD_OWN_PACE = 3
"""A basis is for so many steps after the next where each peer is at its own pace: the crew may have taken two
since its owner's last one, and all are to have it before they use it."""
AHEAD_MAX = 2 + AHEAD_OWN_PACE
"""A peer in step with others has no basis for a step further ahead: they are in its step, or in the next."""
DIGITS = 3
STAMPS = 2 * DIGITS
"""Values before a basis (see ``_Coming``): numbers as bytes, which bfloat16 has exactly."""
STEPS_MAX = 1 << 8 * DIGITS
"""What is stamped goes modulo this."""


@dataclass(frozen=True, slots=True)
class _Coming:
    """A basis with its stamps.

    begin: the step from which on all use it.
    late: how many averages its factors were behind when it was published.
    """

    newest: Newest
    begin: int
    late: int


@dataclass(frozen=True, slots=True)
class CrewSteps:
    """The steps of an inner optimizer, by the averages of the crew's optimizer that it is in.

    models: of all the crew's optimizers, of which one may be made later than what asks.
    inner: the optimizer that is meant.
    heard_of: the newest round of a channel of which anything has come; -1: none.
    """

    models: Iterable[AveragedModel] = ()
    inner: torch.optim.Optimizer | None = None
    heard_of: Callable[[int], int] = lambda channel: -1

    def _mine(self) -> AveragedModel | None:
        return next((averaged for averaged in self.models if averaged.inner is self.inner), None)

    def _with_all(self) -> AveragedModel | None:
        """The same, where its steps are the same at all peers."""
        averaged = self._mine()
        return averaged if averaged is not None and averaged.averages_gradients else None

    def taken(self) -> int | None:
        """The round of the last average of gradients by which all peers have taken the same step (-1: there
        was none yet); ``None``: each peer takes its own steps.
        """
        averaged = self._with_all()
        if averaged is None:
            return None
        return -1 if averaged.outcome is None else averaged.outcome.round

    def begun(self) -> int:
        """The newest round of these averages that another peer is known to have begun (-1: none)."""
        averaged = self._with_all()
        return -1 if averaged is None else self.heard_of(averaged.channel)

    def in_step(self) -> bool:
        """Whether no peer goes on to its next steps without the others."""
        averaged = self._mine()
        if averaged is None:
            return True
        asked = averaged.asked
        at_once = asked.averager.kind == "at once" and not asked.averager.quorum
        return at_once and asked.between is not None and not asked.partial


class CrewCommunicator:
    """A ``Communicator`` of one K-FAC on a crew's transport.

    placement: "communication" (all peers are workers of all layers), "memory" (one is), or a share between.
    cost: by which bases have their owners; the same on all peers.
    steps: of the optimizer whose gradients it preconditions (``None``: each peer takes its own).
    averager: of factors, and of gradients. codec: how factors and bases travel.
    The others: as for ``NamedTensors``.

    Raises ValueError: the placement or the cost is none, the codec is int8, or the averager mixes chunks and
        gradients travel.
    """

    def __init__(
        self,
        transport: PublishingTransport,
        name: str,
        needs: Needs,
        *,
        placement: Placement = "communication",
        cost: PlacementCost = "compute",
        steps: CrewSteps | None = None,
        averager: Averager | str | None = None,
        codec: Codec | DenseName | None = None,
        seed: int = 0,
        founded: int | None = None,
        away: Callable[[int], bool] = lambda channel: False,
        require_in: Callable[[str], None] = lambda asked: None,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
        on_publish: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport, self._needs = transport, needs
        self._share, self._steps, self.require_in = share_of(placement), steps or CrewSteps(), require_in
        self.taken, self.in_step = self._steps.taken, self._steps.in_step
        if cost not in get_args(PlacementCost):
            raise ValueError(f'K-FAC: cost is {cost!r}; give "compute", "memory" or "measured"')
        if (DENSE[codec] if isinstance(codec, str) else codec) is int8:
            raise ValueError(
                "K-FAC: codec is int8, which leaves too little of eigenvectors and small eigenvalues: give "
                '"bf16" or "fp32"'
            )
        by = averaging_of(averager, None)[0]
        if self._share < 1 and by is not None and by.hadamard:
            raise ValueError(
                f"K-FAC: averager is {by!r}, which mixes rows, and with placement {placement!r} each row of "
                "the gradients says by what it is divided: leave out hadamard, or give "
                'placement="communication"'
            )
        matrices = {
            name: (basis.shape[-1], math.prod(basis.shape[:-2])) for name, basis in needs.computed.items()
        }
        self._formula = {
            name: count * cost_of(rows, "memory" if cost == "memory" else "compute")
            for name, (rows, count) in matrices.items()
        }
        self._measured = MeasuredCosts(matrices) if cost == "measured" else None
        self._publishes_costs = False
        averaged, self._computed = dict(needs.averaged), dict(needs.computed)
        averaged[GIVEN] = torch.zeros(len(needs.averaged), device="cpu")
        if self._measured is not None:
            sizes = torch.zeros(len(self._measured.sizes), device="cpu")
            averaged[TIMES], self._computed[COSTS] = sizes.repeat(2, 1), sizes
        self._costs = self._priced(self._formula)
        """What owners follow from now."""
        self._used: dict[str, _Coming] = {}
        self._coming: dict[str, deque[_Coming]] = {name: deque(maxlen=COMING_MAX) for name in self._computed}
        self._looked: dict[str, tuple[int, int]] = {}
        self.tensors = NamedTensors(
            transport,
            name,
            averaged,
            {name: example.new_zeros(example.numel() + STAMPS) for name, example in self._computed.items()},
            method=averager,
            codec=codec,
            seed=seed,
            settings=f"{needs.settings}, placement {placement}, cost {cost}",
            founded=founded,
            away=away,
            require_in=require_in,
            on_outcome=on_outcome,
            on_publish=on_publish,
        )
        self._rows = Rows(needs.layers, fp32.elements)
        self._gradients: NamedTensors | None = None
        self._seen: frozenset[int] = frozenset()
        self._work: frozenset[str] = frozenset(needs.layers)
        self._standing_in: frozenset[str] = frozenset()
        if self._share < 1:
            self._gradients = NamedTensors(
                transport,
                f"{name}/gradients",
                {"rows": self._rows.shape},
                method=averager,
                seed=seed,
                away=away,
            )
            self._place()

    # -- Factors and bases

    def average(self, values: Mapping[str, Tensor], weight: float) -> FactorRound:
        """Begin an average of factors, and of what decompositions take."""
        factors, told = self._needs.averaged, dict(values)
        told[GIVEN] = torch.tensor([float(name in values) for name in factors], device="cpu")
        told.update({name: torch.zeros_like(one) for name, one in factors.items() if name not in values})
        if self._measured is not None:
            told[TIMES] = torch.tensor(self._measured.told(), device="cpu")
        return _FactorRound(self.tensors.average(told, weight), factors, self._measured)

    def mine(self, step: int) -> list[str]:
        """The bases that this peer owns, and those for whose silent owner it stands in."""
        self._look_at_costs(self._next(step))
        names = self.tensors.mine(self._costs)
        owners = self.tensors.owners(self._costs)
        stood_in = {name for name in names if owners[name].first != self._transport.me}
        self._standing_in = frozenset(
            layer for layer, bases in self._needs.bases.items() if not stood_in.isdisjoint(bases)
        )
        self._publishes_costs = COSTS in names
        return [name for name in names if name != COSTS]

    def publish(
        self, values: Mapping[str, Tensor], took_s: Mapping[str, float], late: int, step: int
    ) -> None:
        """Have all take these, and costs with them where this peer tells these; waits for nobody."""
        given = dict(values)
        if self._measured is not None:
            self._measured.took(took_s)
            if self._publishes_costs:
                given[COSTS] = self._costs_to_come(self._measured)
        # the others may have gone on while this peer was frozen
        following = max(self._next(step), self._steps.begun())
        begin = following + (1 if self.in_step() else AHEAD_OWN_PACE)
        stamps = torch.tensor([*_digits(begin), *_digits(min(late, STEPS_MAX - 1))], device="cpu")
        self.tensors.publish(
            {
                name: torch.cat([stamps.to(one.device), one.reshape(-1).float()])
                for name, one in given.items()
            },
            self._costs,
        )

    def _next(self, step: int) -> int:
        """The number of the step that is to be taken next, by all where they take it together."""
        taken = self.taken()
        return step if taken is None else taken + 1

    def newest(self, name: str, step: int) -> Basis | None:
        """The newest that is to be used at a step; never waits."""
        taken = self.taken()
        return self._used_at(name, step if taken is None else taken, alike=taken is not None)

    def _used_at(self, name: str, step: int, alike: bool) -> Basis | None:
        came, coming = self.tensors.newest(name), self._coming[name]
        if came is not None and self._looked.get(name) != (came.version, came.peer):
            self._looked[name] = came.version, came.peer
            begin, late = (_number(came.tensor[at : at + DIGITS]) for at in (0, DIGITS))
            coming.append(_Coming(came, _nearest(begin, step), late))
        while coming and not (alike and step < coming[0].begin <= step + AHEAD_MAX):
            self._used[name] = coming.popleft()
        used = self._used.get(name)
        if used is None:
            return None
        form = self._computed[name].shape
        age = max(0, self.tensors.clock - used.newest.version) + used.late
        return Basis(used.newest.tensor[STAMPS:].reshape(form), age)

    # -- Costs

    def _priced(self, bases: Mapping[str, float]) -> dict[str, float]:
        """With next to nothing for the costs themselves, where these are measured."""
        least = min(bases.values()) / 1000
        return dict(bases) if self._measured is None else {**bases, COSTS: least}

    def _look_at_costs(self, step: int) -> None:
        """Place by the costs that are to be used at a step."""
        came = None if self._measured is None else self._used_at(COSTS, step, alike=self.taken() is not None)
        if self._measured is None or came is None:
            return
        seconds = came.tensor.nan_to_num(0.0).clamp(-64.0, 64.0)  # of another peer: costs that can be
        costs = self._priced(self._measured.costs(seconds.tolist()) if seconds.any() else self._formula)
        if costs != self._costs:
            self._costs = costs
            if self._gradients is not None:
                self._place()

    def _costs_to_come(self, measured: MeasuredCosts) -> Tensor:
        """What all are to place by: as before, or as measured, where the busiest owner has less to do then.

        Zeros stand for the formula.
        """
        seconds = measured.seconds()
        true = self._priced(measured.costs(seconds))
        now, then = (
            largest_load(true, {name: pair.first for name, pair in self.tensors.owners(costs).items()})
            for costs in (self._costs, true)
        )
        if then < (1 - GAIN) * now:
            return torch.tensor(seconds, device="cpu")
        held = self._used.get(COSTS)
        return torch.zeros(len(measured.sizes), device="cpu") if held is None else held.newest.tensor[STAMPS:]

    # -- Gradients

    def works_on(self) -> Collection[str]:
        """The layers that are placed here, and those of a silent owner that this peer stands in for."""
        if self._gradients is not None and self._transport.live != self._seen:
            self._place()
        return self._work | self._standing_in

    def _place(self) -> None:
        """Whom layers belong to follows from the agreed view; this peer takes the bases that it needs now."""
        self._seen, me = self._transport.live, self._transport.me
        plan = kaisa(self._needs.layers, self._seen, fraction=self._share)
        self._work = frozenset(layer for layer, one in plan.items() if me in one.workers)
        owners = self.tensors.owners(self._costs)
        wanted = {name for name, pair in owners.items() if me in pair or name == COSTS}
        wanted.update(basis for layer in self._work for basis in self._needs.bases[layer])
        self.tensors.only(sorted(wanted))

    def share(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Give and take preconditioned gradients; where all are workers, there is nothing to."""
        if self._gradients is None:
            return own
        mean = self._gradients.average({"rows": self._rows.filled(own)}).result()
        return {**self._rows.read(mean["rows"]), **own}


class _FactorRound:
    """A round of factors, perhaps with what decompositions take at all peers.

    A peer gives zeros for a factor that it has not. How often the others are in its mean is averaged, too.
    """

    def __init__(
        self, under_way: Averaging, factors: Collection[str], measured: MeasuredCosts | None
    ) -> None:
        self._under_way, self._factors, self._measured = under_way, factors, measured

    @property
    def over(self) -> bool:
        return self._under_way.over

    def result(self) -> Mapping[str, Tensor]:
        mean = self._under_way.result()
        if self._measured is not None:
            logs, counts = mean[TIMES].tolist()
            self._measured.hear(logs, counts)
        given = zip(self._factors, mean[GIVEN].tolist(), strict=True)
        return {name: mean[name] / count for name, count in given if count > 0}


class Rows:
    """The gradients of layers as rows of ``elements`` values, as many as a chunk has.

    layers: how large each is. A row's first value says how often the others are in it.
    """

    def __init__(self, layers: Mapping[str, LayerSize], elements: int) -> None:
        self._spans: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        at = 0
        for name, one in layers.items():
            shape = (one.g, one.a) if one.groups == 1 else (one.groups, one.g, one.a)
            rows = -(-math.prod(shape) // (elements - 1))
            self._spans[name] = at, at + rows, shape
            at += rows
        self.shape = (at, elements)

    def filled(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Rows with these gradients, once each, and zeros for other layers."""
        rows = torch.zeros(self.shape, device="cpu")
        for name, gradient in gradients.items():
            first, end, _ = self._spans[name]
            values = torch.zeros((end - first) * (self.shape[1] - 1), device="cpu")
            values[: gradient.numel()] = gradient.detach().reshape(-1).to("cpu", torch.float32)
            rows[first:end, 0] = 1.0
            rows[first:end, 1:] = values.reshape(end - first, -1)
        return rows

    def read(self, mean: Tensor) -> dict[str, Tensor]:
        """The gradients of those layers of which somebody has given a row; NaN in rows that nobody has."""
        found = {}
        for name, (first, end, shape) in self._spans.items():
            rows = mean[first:end]
            given = rows[:, :1] > 0
            if bool(given.any()):
                flat = torch.where(given, rows[:, 1:] / rows[:, :1], math.nan).reshape(-1)
                found[name] = flat[: math.prod(shape)].reshape(shape)
        return found


def _digits(number: int) -> list[float]:
    """The number modulo ``STEPS_MAX``, byte by byte."""
    return [float(byte) for byte in (number % STEPS_MAX).to_bytes(DIGITS, "big")]


def _number(digits: Tensor) -> int:
    """Whatever another peer has sent, it is some number."""
    return int.from_bytes(bytes(map(int, digits.nan_to_num(0.0).clamp(0, 255).tolist())), "big")


def _nearest(stamp: int, step: int) -> int:
    """The number nearest to a step that is stamped so."""
    half = STEPS_MAX // 2
    return step + (stamp - step + half) % STEPS_MAX - half


def share_of(placement: Placement) -> float:
    """The share of the peers that are workers of one layer; 0: one of them.

    Raises ValueError: it is no placement.
    """
    named = {"communication": 1.0, "memory": 1e-9}
    if isinstance(placement, str) and placement in named:
        return named[placement]
    if isinstance(placement, int | float) and not isinstance(placement, bool) and 0 < placement <= 1:
        return float(placement)
    raise ValueError(
        f'K-FAC: placement is {placement!r}; give "communication", "memory", or a share of the peers'
    )


def require_gradients(placement: Placement, steps: CrewSteps) -> None:
    """Raise ValueError where peers would take each other's gradients that are not of one mean."""
    if share_of(placement) < 1 and steps.taken() is None:
        raise ValueError(
            f"K-FAC: with placement {placement!r} peers take preconditioned gradients from each other, which "
            'is for gradients that all of them average: crew.optimizer(..., average="gradients") by '
            'ragtag.RPS() or ragtag.AllReduce(); else give placement="communication"'
        )
