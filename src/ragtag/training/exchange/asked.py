"""What a crew's optimizer is asked for, as objects; or a clear error."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import UnionType
from typing import cast

import torch

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DENSE, fp32
from ragtag.core.names import named
from ragtag.core.types import Noted
from ragtag.optim.outer import Nesterov, Streaming
from ragtag.protocols.channel.averager import Averager, guarded
from ragtag.protocols.channel.averagers import AVERAGERS
from ragtag.protocols.rounds.robust import CentredClipping, RobustMean, TrimmedMean, require_enough
from ragtag.protocols.rounds.rps import RPS
from ragtag.schedules.base import Schedule
from ragtag.schedules.centre import Centre
from ragtag.schedules.every import EveryStep
from ragtag.schedules.every import every as every_so_many
from ragtag.schedules.grouping import ProgressiveGrouping
from ragtag.schedules.names import SCHEDULES, called
from ragtag.schedules.target import TargetBatch
from ragtag.training.align.aligner import Aligner
from ragtag.training.align.plan import Align
from ragtag.training.coherence import Coherence
from ragtag.training.exchange.aligned import Aligning
from ragtag.training.exchange.base import Exchange, layer
from ragtag.training.exchange.central import centred, is_centred, is_rule, rated
from ragtag.training.exchange.combine import Asked, require_together
from ragtag.training.exchange.compress import TopK
from ragtag.training.exchange.dense import Corrections, Replica
from ragtag.training.exchange.outer import Outer
from ragtag.training.exchange.slow import SlowPeer
from ragtag.training.exchange.sparse import SparseReplica
from ragtag.training.optimizer.modes import Gradients, Mode, Models
from ragtag.training.tensors.layout import Part
from ragtag.training.tensors.modules import parameters_of
from ragtag.training.transport import Transport

AnySchedule = Schedule | Centre | ProgressiveGrouping


def averaging_of(averager: object, schedule: object) -> tuple[Averager | None, AnySchedule | None]:
    """By what, and when: objects, or their names (``AVERAGERS``, ``SCHEDULES``).

    ``Centre()`` is an averager, and may stand in the schedule's place. Raises TypeError: something else
    stands where these belong; ValueError: nothing of that name. Both say what to write.
    """
    method, when = _averager_of(averager), _schedule_of(schedule)
    if not isinstance(when, Averager):
        return method, when
    if method is not None:
        raise ValueError(f"schedule={when!r} is an averager, beside averager={method!r}: give one of them")
    return when, None


def _averager_of(averager: object) -> Averager | None:
    if averager is None or isinstance(averager, Averager):
        return averager
    if isinstance(averager, str) and averager.partition("=")[0] not in SCHEDULES:
        return named(averager, AVERAGERS, "averager")
    if isinstance(averager, str) or _is_schedule(averager):
        shown = _shown(averager)
        raise TypeError(f"averager={shown} is a schedule; write schedule={shown}")
    if callable(averager):
        raise TypeError(f"averager is a function; call it: averager={_shown(averager)}")
    raise TypeError(
        f"averager is {averager!r}; write ragtag.RPS(), ragtag.Moshpit(group=8), or a name: "
        f"{', '.join(map(repr, AVERAGERS))}"
    )


def _schedule_of(schedule: object) -> AnySchedule | Averager | None:
    """An averager that may take the schedule's place is handed through."""
    if schedule is None or (isinstance(schedule, Averager) and is_centred(schedule)):
        return schedule
    if isinstance(schedule, str) and schedule.partition("=")[0] not in AVERAGERS:
        return named(schedule, SCHEDULES, "schedule")
    if isinstance(schedule, str | Averager):
        raise TypeError(f"schedule={schedule!r} is an averager; write averager={schedule!r}")
    if isinstance(schedule, int):
        raise TypeError(
            f"schedule is {schedule}; to average after so many local steps write every={schedule}"
        )
    if isinstance(schedule, type) and _is_schedule(schedule):
        raise TypeError(f"schedule is the class {called(schedule)}; make one: schedule={_shown(schedule)}")
    if not _is_schedule(schedule):
        raise TypeError(
            f"schedule is {schedule!r}; write every=10, one of ragtag.schedules, as "
            f"ragtag.schedules.Partial(), or a name: {', '.join(map(repr, SCHEDULES))}"
        )
    return cast(AnySchedule, schedule)


def _is_schedule(it: object) -> bool:
    return is_rule(it) or callable(getattr(it, "decide", None))


def _shown(it: object) -> str:
    """How a script writes it; what was not called yet, called, with what it cannot do without."""
    name = getattr(it, "__name__", None)
    if name is None or not callable(it):
        return repr(it)
    needed = (p.name for p in inspect.signature(it).parameters.values() if p.default is p.empty)
    return f"{name}({', '.join(f'{argument}=...' for argument in needed)})"


def require_kinds(**given: object) -> None:
    """Raise TypeError where something else stands in the place of one of these, and say what to write."""
    for name, value in given.items():
        kind, write = _KINDS[name]
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} is {_short(value)}; write {name}={write}")


_KINDS: dict[str, tuple[type | UnionType, str]] = {
    "model": (torch.nn.Module, "your torch.nn.Module, or leave it out"),
    "outer": (Nesterov | Streaming, "ragtag.Outer(), with every=50"),
    "coherence": (Coherence, "ragtag.Coherence()"),
    "compress": (TopK, "ragtag.TopK(ratio=0.001)"),
    "guard": (TrimmedMean | CentredClipping, "ragtag.TrimmedMean(liars=0.2)"),
}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def asked_of(
    inner: torch.optim.Optimizer,
    n: int,
    *,
    averager: object,
    average: str,
    schedule: object,
    every: int | None,
    outer: Nesterov | Streaming | None,
    codec: Codec | str | None,
    compress: TopK | None,
    align: Align | bool,
    overlap: bool,
    guard: RobustMean | None,
    has_model: bool,
    target_batch: float | None = None,
    late: bool = False,
) -> Asked:
    """What an optimizer of a crew of ``n`` is asked for, names looked up and checked to go together.

    late: whether the crew averaged before this peer came. It goes by what the others began with: a crew that
        one peer began may not have enough for its guard yet.

    Raises TypeError: something else stands where an option belongs. ValueError: there is nothing of that
    name, two options do not go together (``exchange.combine``), or the crew is too small for its guard (a
    crew of one goes on alone).
    """
    require_kinds(outer=outer, compress=compress, guard=guard)
    if average not in ("models", "gradients"):
        raise ValueError(f'average is {average!r}; it is "models" or "gradients"')
    if not isinstance(align, bool | Align):
        raise TypeError(f"align is {align!r}; it is ragtag.Align(every=...), or False: never")
    if not isinstance(overlap, bool):
        raise TypeError(f"overlap is {overlap!r}; it is True or False")
    if codec is not None:
        codec_of(codec)
    method, when = centred(*averaging_of(averager, schedule))
    asked = Asked(
        inner=inner,
        averager=RPS() if method is None else method,
        average=average,
        schedule=when,
        every=every,
        outer=outer,
        codec=codec,
        compress=compress,
        align=align,
        overlap=overlap,
        guard=guard,
        has_model=has_model,
        target=None if target_batch is None else TargetBatch(target_batch),
    )
    require_together(asked)
    if guard is not None and n > 1 and not late:
        require_enough(guard, n)
    return replace(asked, averager=rated(asked.averager, inner, n))


def mode_of(asked: Asked, weigh: Callable[[], float]) -> Mode:
    """Models after the local step, or gradients before it. weigh: how much a peer counts, or its last batch
    where there is a target.
    """
    if asked.average == "models":
        return Models(asked.inner)
    return Gradients(asked.inner, None if asked.target is None else weigh)


def schedule_of(asked: Asked) -> Schedule:
    """When to average. Raises ValueError: steps are below 1."""
    if asked.target is not None:
        return asked.target
    if asked.schedule is not None:
        return asked.schedule
    return EveryStep() if asked.every is None else every_so_many(asked.every)


def exchange_of(
    asked: Asked,
    mode: Mode,
    names: Sequence[str],
    buffers: Sequence[Part],
    transport: Transport,
    *,
    name: str,
    seed: int,
    deadline_s: float | None,
    corrections: Corrections,
    note: Callable[[Noted], None] | None,
) -> Exchange:
    """The exchange that was asked for: one with the crew, and the layers around it.

    names: of the parameters. buffers: those that are averaged with them. name: of what is averaged.
    seed: of random selections. deadline_s: bounds each comparison of replicas. corrections: by all of this
    peer's exchanges. note: told of what is odd.
    Raises SchemaMismatch where other peers have other tensors, or are asked for something else.
    """
    outer, align, models = _streaming_of(asked), _align_of(asked), Models(asked.inner)
    content = mode.content if outer is None else f"{mode.content}, {outer.rule}"
    content += _align_text(asked)
    if asked.target is not None:
        content += f", {asked.target.samples:g} samples a step"
    if asked.guard is not None:
        content += f", guarded by a {asked.guard.name}"
    exchange: Exchange
    if asked.compress is not None:
        exchange = SparseReplica(
            mode.parts(names, ()),
            transport,
            asked.compress,
            name=name,
            content=content,
            whole=models.parts(names, buffers),
            outer=None if outer is None else outer.rule,
            seed=seed,
            note=note,
        )
    else:
        exchange = dense = Replica(
            mode.parts(names, buffers),
            transport,
            asked.averager if asked.guard is None else guarded(asked.averager, asked.guard),
            codec_of(asked.codec),
            name=name,
            content=content,
            fragments=1 if outer is None else outer.fragments,
            corrects=corrections if asked.overlap else None,
            carries=asked.target is not None,
        )
        if outer is not None:
            exchange = Outer(dense, outer, len(names))
    if asked.partial:
        exchange = SlowPeer(exchange, parameters_of(asked.inner.param_groups), transport)
    if align is not None:
        aligner = Aligner(
            align,
            models.parts(names, ()),
            lambda parameter: asked.inner.state.get(parameter, {}),
            transport,
            name=name,
            deadline_s=deadline_s,
            rows=layer(exchange, SparseReplica),
            note=note,
        )
        exchange = Aligning(exchange, aligner)
    return exchange


def _align_of(asked: Asked) -> Align | None:
    """How replicas are kept alike; ``None``: they are not, or need not be."""
    if isinstance(asked.align, Align):
        return asked.align
    return Align() if asked.align and asked.average == "gradients" else None


def _align_text(asked: Asked) -> str:
    """What peers that average gradients must agree on beyond the usual, to stand behind what they average."""
    align = _align_of(asked)
    if align is None:
        return "" if asked.align else ", never aligned" if asked.average == "gradients" else ""
    return "" if align == Align() else f", {align.name}"


def codec_of(codec: object) -> Codec:
    """The codec that is asked for, itself or by its name; ``None``: fp32.

    Raises TypeError: something else stands where one belongs. ValueError: there is nothing of that name.
    """
    if isinstance(codec, Codec):
        return codec
    if not isinstance(codec, str | None):
        raise TypeError(f"codec is {_short(codec)}; it is one of {', '.join(DENSE)}")
    if codec is not None and codec not in DENSE:
        raise ValueError(f"codec is {codec!r}; it is one of {', '.join(DENSE)}")
    return fp32 if codec is None else DENSE[codec]


def _streaming_of(asked: Asked) -> Streaming | None:
    """Outer steps, all of the model at once being one fragment."""
    return Streaming(asked.outer) if isinstance(asked.outer, Nesterov) else asked.outer
