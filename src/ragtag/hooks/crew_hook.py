"""A communication hook that averages DDP's gradients through Ragtag's own transport.

Gradients are averaged over the peers that are heard within measured deadlines; a peer that is killed, frozen
or slow is left out. Peers that missed a gradient have other models, so models are averaged every so often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public all the same
from torch.futures import Future

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DENSE, DenseName, fp32
from ragtag.core.channels import channel_of
from ragtag.core.deadline import require_deadline
from ragtag.core.errors import NotFinite
from ragtag.core.types import Outcome
from ragtag.hooks.backward import Names, after_backward
from ragtag.hooks.integers import Integers
from ragtag.hooks.table import Table
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import CATCH_UP
from ragtag.protocols.rounds.rps import RPS
from ragtag.training.exchange.asked import averaging_of, require_kinds
from ragtag.training.exchange.dense import Replica
from ragtag.training.optimizer.weight import Weight, weight_of
from ragtag.training.state.fixed import Fixed
from ragtag.training.state.whole import Stand, Whole, kept_up
from ragtag.training.tensors.finite import require_weight
from ragtag.training.tensors.layout import Part
from ragtag.training.tensors.modules import buffer_parts, counter_parts, fixed_parts
from ragtag.training.transport import Transport

MODELS_EVERY = 32


class PeerLike(Protocol):
    """What the hook needs of this peer of a crew."""

    @property
    def transport(self) -> Transport:
        """How peers are reached."""
        ...

    def record_round(self, outcome: Outcome) -> None:
        """Write a round to the trace."""
        ...

    def stepped_by_hook(self, channel: int) -> None:
        """Count a step: a hook has averaged the gradients of a backward pass."""
        ...

    def take_name(self, name: str | None, kind: str) -> str:
        """A name for what is averaged: the one given, or one of its kind that is free."""
        ...

    def averages(self, what: Any) -> None:
        """This hook's model is one that peers end with."""
        ...

    def enter(self, channel: int) -> bool:
        """Take part on a channel; whether the crew has averaged on it before this peer came."""
        ...


class CrewLike(Protocol):
    """What ``ragtag.join()`` returns."""

    @property
    def _peer(self) -> PeerLike:
        """This peer, behind what users see."""
        ...


@dataclass(slots=True)
class _Waiting:
    """A bucket that has come, and is to be filled with the average."""

    numbers: Sequence[int]
    buffer: Tensor
    future: Future[Tensor]


class CrewState:
    """What ``average`` remembers on one peer.

    crew: of ``ragtag.join()``.
    model: the module inside DDP. With it, peers compare their models here and now, and all begin with the
        model of the lowest peer that is there (DDP's constructor does that otherwise). Models, with
        floating-point buffers, are averaged every ``models_every`` rounds, before the next forward: what
        peers missed drifts no further. In the beginning, where deadlines rest on little, they are after 1, 2,
        4, 8, ... rounds (``models_due``). Without it only gradients are averaged.
    averager: ``ragtag.RPS(repair=True)`` unless given.
    codec: how gradients travel ("fp32", "bf16", "int8"); models always as fp32.
    weight: how much this peer counts (a number, or a function called every step).
    deadline_s: bounds a round; by default its bound comes from measurement.
    name: of what is averaged, the same on all peers; of several models, each has its own (by default they are
        numbered in the order in which they are made).

    Raises SchemaMismatch, naming the first tensor that differs, where another peer has another model.
    """

    def __init__(
        self,
        crew: CrewLike,
        model: torch.nn.Module | None = None,
        *,
        averager: Averager | str | None = None,
        codec: Codec | DenseName = fp32,
        weight: float | Callable[[], float] = 1.0,
        models_every: int = MODELS_EVERY,
        deadline_s: float | None = None,
        name: str | None = None,
    ) -> None:
        if not hasattr(crew, "_peer"):
            raise TypeError(f"crew is a {type(crew).__name__}; give what ragtag.join() returned")
        require_kinds(model=model)
        require_deadline(deadline_s)
        if isinstance(codec, str) and codec not in DENSE:
            raise ValueError(f"codec is {codec!r}; it is one of {', '.join(DENSE)}")
        if not isinstance(models_every, int) or models_every < 1:
            raise ValueError(f"models_every is {models_every}: give a number of rounds, 1 or more")
        method = averaging_of(averager, None)[0] or RPS(repair=True)
        if method.kind == "central":
            raise ValueError(
                f"{method} keeps a state that updates are added to, and gradients would be mixed with those "
                "of earlier steps: give RPS() or AllReduce()"
            )
        self._averaged = AveragedGradients(
            crew._peer,
            model,
            averager=method,
            codec=DENSE[codec] if isinstance(codec, str) else codec,
            weight=weight_of(weight, None),
            models_every=models_every,
            deadline_s=deadline_s,
            name=name,
        )

    @property
    def name(self) -> str:
        """Of what is averaged."""
        return self._averaged.name

    @property
    def outcome(self) -> Outcome | None:
        """What the last average of gradients came to (``None``: there was none yet)."""
        return self._averaged.outcome

    @property
    def behind(self) -> bool:
        """Whether this peer missed much: it has no weight until models are averaged."""
        return self._averaged.behind

    def average_models(self) -> Outcome:
        """Average models and buffers with the crew, now; every peer is to do so after the same round.

        Raises RuntimeError where no model was given.
        """
        return self._averaged.average_models()


class AveragedGradients:
    """One model's gradients and, now and then, the model itself, averaged with a crew: behind ``CrewState``.

    Its arguments are those of ``CrewState``, checked.
    """

    def __init__(
        self,
        peer: PeerLike,
        model: torch.nn.Module | None,
        *,
        averager: Averager,
        codec: Codec,
        weight: Weight,
        models_every: int,
        deadline_s: float | None,
        name: str | None,
    ) -> None:
        self._peer = peer
        self._transport = peer.transport
        self._averager, self._codec = averager, codec
        self._weight, self._deadline_s = weight, deadline_s
        self.name = peer.take_name(name, "gradients")
        self._channel = channel_of(self.name)
        self._models_every = models_every
        self._names = Names(model)
        self._waiting: list[_Waiting] = []
        self._table: Table | None = None
        self._models: Replica | None = None
        self._integers = Integers(())
        self.counters: Fixed | None = None
        """Integers in the model's buffers (``None``: none)."""
        self._due = False
        self._round: int | None = None
        self._missed = 0  # rounds, since models were averaged
        self._asked_for = 0  # rounds of models, by the script
        self._current, self._since = -1, 0
        self.whole: Whole | None = None
        """The model, to be compared with other peers' (``None``: none was given)."""
        self.behind = False
        """Whether this peer missed much: it has no weight until models are averaged."""
        self.outcome: Outcome | None = None
        """What the last average of gradients came to."""
        if model is not None:
            self._open()
            self._begin(model)

    # -- What DDP calls

    def take(self, bucket: GradBucket) -> Future[Tensor]:
        """Take one bucket; with the last one, average all. See ``average``."""
        if bucket.index() == 0:
            self._waiting.clear()  # of a backward that came to no end
        future: Future[Tensor] = Future()
        numbers = self._names.numbers(bucket.parameters())
        self._waiting.append(_Waiting(numbers, bucket.buffer(), future))
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            self._average(waiting)
            for each in waiting:
                each.future.set_result(each.buffer)
        return future

    def _average(self, waiting: Sequence[_Waiting]) -> None:
        table = self._table if self._table is not None else self._open()
        if len(self._names.names) > len(table.parts):
            raise RuntimeError(
                f"DDP has a gradient of {self._names.described(len(table.parts))}, which the peers have not "
                "agreed on: give CrewState the module that is inside DDP, with all its parameters"
            )
        for each in waiting:
            table.put(each.numbers, each.buffer)
        fault = table.fault()
        if fault is not None:
            after_backward(lambda: _refuse(fault))
            return
        weight = require_weight(self._weight())
        weight = 0.0 if self.behind else weight
        outcome = self._transport.start(self._channel, table.values, weight, self._deadline_s).wait()
        for each in waiting:
            table.take(outcome.mean, each.numbers, each.buffer)
        self._note(outcome)

    def _note(self, outcome: Outcome) -> None:
        """Whether this peer missed rounds, and whether models are averaged next."""
        self._peer.record_round(outcome)
        self._peer.stepped_by_hook(self._channel)
        self._since += 1
        self._current = kept_up(self._current, outcome, self._transport.me)
        if self._models is not None:
            last = outcome.round - 1 if self._round is None else self._round
            self._missed += outcome.round - last - 1
            self.behind = self.behind or self._missed > CATCH_UP
            # one that skipped the others' round of models makes up for it: their mean may have come already;
            # not one that is behind, since what has come of that mean is as old as this peer's model
            since = outcome.round - 1 if self.behind else last
            every = self._models_every
            self._due = models_due(outcome.round + 1, every) > models_due(since + 1, every)
        self._round, self.outcome = outcome.round, outcome

    # -- Models

    def _open(self) -> Table:
        """Agree with the crew on what is averaged."""
        table = self._table = Table(
            self._names.names, self._names.parameters, self._codec, self._averager.name
        )
        self._transport.configure(self._channel, table.schema, self._averager, self._codec)
        self.behind = self._peer.enter(self._channel)
        return table

    def _begin(self, model: torch.nn.Module) -> None:
        """All peers begin with the model of one."""
        parts = [
            Part(name, "parameter", lambda p=parameter: p)  # type: ignore[misc]
            for name, parameter in model.named_parameters()
        ]
        parts += buffer_parts([model])[0]
        name = f"{self.name}/models"
        self.whole = Whole(self.name, parts, self._transport)
        self._peer.averages(self)
        integers = fixed_parts(model.parameters(), [model], buffers=True)
        if counters := counter_parts([model]):
            self.counters = Fixed(f"{self.name}/counters", counters, self._transport)
        self._integers = Integers(integers)
        parts += self._integers.parts
        self._models = Replica(parts, self._transport, RPS(repair=True), fp32, name=name)
        if self._peer.enter(self._models.channel):
            self.behind = True  # the others' next round of models brings theirs
            model.register_forward_pre_hook(self._before_forward)
            return
        first = min(self._transport.live) == self._transport.me
        outcome = self._models.average(1.0 if first else 0.0)
        self._peer.record_round(outcome)
        self.behind = not first and not bool(outcome.averaged.all())
        if integers:
            Fixed(name, integers, self._transport).average(1.0 if first else 0.0)
        model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, _module: torch.nn.Module, _inputs: Any) -> None:
        if self._due and torch.is_grad_enabled():
            self._mix()

    def average_models(self) -> Outcome:
        """See ``CrewState.average_models``."""
        if self._models is None:
            raise RuntimeError("average_models: give CrewState the model: CrewState(crew, model)")
        self._asked_for += 1
        return self._mix()

    def _mix(self) -> Outcome:
        assert self._models is not None
        self._due = False
        rounds = 0 if self._round is None else self._round + 1
        # one that was away would begin with a round that the others had long ago, and spoil theirs
        due = models_due(rounds, self._models_every) + self._asked_for
        was_behind = self.behind
        self._integers.put()
        outcome = self._models.average(0.0 if was_behind else 1.0, due=due)
        self._peer.record_round(outcome)
        self.behind = was_behind and not has_come(outcome)
        if was_behind and not self.behind:
            self._integers.take()
        self._missed = self._since = 0
        return outcome

    # -- The end

    def stand(self) -> Stand:
        """Where this peer stands. Raises RuntimeError where no model was given."""
        if self.whole is None:
            raise RuntimeError("no model was given")
        round_ = -1 if self._round is None else self._round
        return Stand(self.whole.digest(), self._current, self._since, round_)

    def settle(self) -> None:
        """Nothing is under way between steps."""


def has_come(outcome: Outcome) -> bool:
    """Whether a peer that took part in a round of models, and gave nothing, has the crew's model now.

    All of it has come; or no peer that took part gave any: all are behind, and would wait for each other's
    model for ever. One that met nobody has its own old one.
    """
    if outcome.averaged.any():
        return bool(outcome.averaged.all())
    return bool(set(outcome.waited_for) - set(outcome.missed))


def models_due(rounds: int, every: int) -> int:
    """How many times models have been due after so many rounds of gradients: after each power of two below
    ``every``, and after each multiple of that.
    """
    return rounds // every + min(rounds, every - 1).bit_length()


def _refuse(fault: str) -> None:
    raise NotFinite(
        f"{fault}. Nothing was sent, the other peers go on; take no step with this gradient. Lower the "
        "learning rate or clip gradients"
    )


def average(state: CrewState, bucket: GradBucket) -> Future[Tensor]:
    """Average DDP's gradients with a crew.

    ``model.register_comm_hook(ragtag.hooks.CrewState(crew, module), ragtag.hooks.average)``

    All buckets of a backward pass are one round on one channel, which begins with the last bucket; so DDP may
    deal its buckets as it likes. What no average came for keeps this peer's own gradient. For DDP to send
    nothing itself it must have a process group of its own: see ``ragtag.hooks.ddp``.

    Raises NotFinite, from ``backward()``, naming the parameter: on the peer that has such a gradient only.
    """
    return state._averaged.take(bucket)


# DDP compares the annotations themselves, not their texts
average.__annotations__ = {"state": CrewState, "bucket": GradBucket, "return": Future[Tensor]}
