"""What a crew's optimizer is asked for, as objects; or a clear error."""

from __future__ import annotations

from types import UnionType
from typing import cast

import torch

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DENSE, fp32
from ragtag.core.names import named
from ragtag.optim.outer import Nesterov, Streaming
from ragtag.protocols.allreduce import ring
from ragtag.protocols.method import Method
from ragtag.schedules.base import Schedule
from ragtag.schedules.centre import Centre
from ragtag.schedules.every import EveryStep, LocalSteps
from ragtag.schedules.every import every as every_so_many
from ragtag.schedules.grouping import ProgressiveGrouping
from ragtag.schedules.names import SCHEDULES
from ragtag.training.align_plan import Align
from ragtag.training.averager import AVERAGERS
from ragtag.training.centre import is_centred, is_rule
from ragtag.training.coherence import Coherence
from ragtag.training.compress import TopK
from ragtag.training.modes import Gradients, Mode, Models

AnySchedule = Schedule | Centre | ProgressiveGrouping


def averaging_of(averager: object, schedule: object) -> tuple[Method | None, AnySchedule | None]:
    """By what, and when: objects, or their names (``AVERAGERS``, ``SCHEDULES``).

    ``Centre()`` is an averager, and may stand in the schedule's place. Raises TypeError: something else
    stands where these belong; ValueError: nothing of that name. Both say what to write.
    """
    method, when = _averager_of(averager), _schedule_of(schedule)
    if not isinstance(when, Method):
        return method, when
    if method is not None:
        raise ValueError(f"schedule={when!r} is an averager, beside averager={method!r}: give one of them")
    return when, None


def _averager_of(averager: object) -> Method | None:
    if averager is None or isinstance(averager, Method):
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


def _schedule_of(schedule: object) -> AnySchedule | Method | None:
    """An averager that may take the schedule's place is handed through."""
    if schedule is None or (isinstance(schedule, Method) and is_centred(schedule)):
        return schedule
    if isinstance(schedule, str) and schedule.partition("=")[0] not in AVERAGERS:
        return named(schedule, SCHEDULES, "schedule")
    if isinstance(schedule, str | Method):
        raise TypeError(f"schedule={schedule!r} is an averager; write averager={schedule!r}")
    if isinstance(schedule, int):
        raise TypeError(
            f"schedule is {schedule}; to average after so many local steps write every={schedule}"
        )
    if isinstance(schedule, type) and _is_schedule(schedule):
        raise TypeError(f"schedule is a class; make one: schedule={_shown(schedule)}")
    if not _is_schedule(schedule):
        raise TypeError(
            f"schedule is {schedule!r}; write every=10, one of ragtag.schedules, as "
            f"ragtag.schedules.Partial(), or a name: {', '.join(map(repr, SCHEDULES))}"
        )
    return cast(AnySchedule, schedule)


def _is_schedule(it: object) -> bool:
    return is_rule(it) or callable(getattr(it, "decide", None))


def _shown(it: object) -> str:
    """How a script writes it; what was not called yet, called."""
    name = getattr(it, "__name__", None)
    return repr(it) if name is None else f"{name}()"


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
}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def mode_of(average: str, inner: torch.optim.Optimizer, method: Method) -> Mode:
    """What is averaged. Raises ValueError: neither "models" nor "gradients", or gradients in groups.

    Models of peers that average in groups come closer in each round. With gradients each group takes steps of
    its own, from models that differ already, and nothing brings these together again.
    """
    if average == "models":
        return Models(inner)
    if average == "gradients":
        if method.crowd is not None:
            raise ValueError(
                f"{method!r} averages in groups: each takes steps by gradients of its own, and models drift "
                'apart; use average="models", or RPS() or AllReduce()'
            )
        return Gradients(inner)
    raise ValueError(f'average is {average!r}; it is "models" or "gradients"')


def require_partial(average: str, method: Method) -> None:
    """Raise ValueError where a schedule that does not wait for all cannot work."""
    if average != "models":
        raise ValueError(
            "this schedule lets slow peers miss rounds, and who misses gradients has another model from then "
            'on; use average="models"'
        )
    if method.crowd is not None or method.name == ring.name:
        raise ValueError(
            f"this schedule lets slow peers miss rounds, which {method.name} cannot; use RPS() or AllReduce()"
        )


def align_of(align: Align | bool, average: str) -> Align | None:
    """How replicas are kept alike; ``None``: they are not, or need not be.

    Raises TypeError or ValueError: it is asked for where it cannot be.
    """
    if isinstance(align, bool):
        return Align() if align and average == "gradients" else None
    if not isinstance(align, Align):
        raise TypeError(f"align is {align!r}; it is ragtag.Align(every=...), or False: never")
    if average != "gradients":
        raise ValueError('averages of models keep replicas together: leave out align, or average="gradients"')
    return align


def align_text(align: Align | None, asked: Align | bool) -> str:
    """What peers that average gradients must agree on beyond the usual, to stand behind what they average."""
    if align is None:
        return ", never aligned" if asked is False else ""
    return "" if align == Align() else f", {align.name}"


def codec_of(codec: Codec | str | None, compress: TopK | None = None) -> Codec:
    """How values travel.

    Raises TypeError: it is no codec. ValueError: there is none of that name, or selections have their own.
    """
    if codec is None:
        return fp32
    if compress is not None:
        raise ValueError(
            f"compress= sends selected values in a form of its own, so codec={_name(codec)!r} would be of no "
            f"effect; leave it out, and say by ragtag.TopK(values=...) how they travel"
        )
    if not isinstance(codec, str | Codec):
        raise TypeError(f"codec is {_short(codec)}; it is one of {', '.join(DENSE)}")
    if isinstance(codec, Codec):
        return codec
    if codec not in DENSE:
        raise ValueError(f"codec is {codec!r}; it is one of {', '.join(DENSE)}")
    return DENSE[codec]


def _name(codec: object) -> object:
    return getattr(codec, "name", codec)


def schedule_of(schedule: Schedule | None, steps: int | None) -> Schedule:
    """When to average. Raises ValueError: both are given, or steps are below 1."""
    if schedule is not None and steps is not None:
        raise ValueError("give either a schedule or every=..., not both")
    if schedule is not None:
        return schedule
    return EveryStep() if steps is None else every_so_many(steps)


def streaming_of(
    outer: Nesterov | Streaming | None,
    average: str,
    when: Schedule | None,
    every: int | None,
    partial: bool,
    method: Method,
    compressed: bool,
) -> Streaming | None:
    """Outer steps as they are asked for, all of the model at once being one fragment.

    when, every: as they were given. Raises ValueError where outer steps cannot work.
    """
    if outer is None:
        return None
    _require_outer(average, partial)
    if when is None and every is None:
        raise ValueError(
            "outer= steps by what a number of local steps have moved the model: say how many, as every=50 "
            "(after single steps its momentum comes on top of the optimizer's, and makes steps too long)"
        )
    if isinstance(outer, Nesterov):
        return Streaming(outer)
    between = when.k if isinstance(when, LocalSteps) else 1 if isinstance(when, EveryStep) else every
    if between is not None and outer.delay > between:
        raise ValueError(
            f"Outer(delay={outer.delay}) with an average every {between} local steps: one is used before the "
            f"next begins; make delay {between} at most, or every={outer.delay}"
        )
    if compressed:
        raise ValueError("fragments and delays are of whole averages: give either them or compress=...")
    if method.crowd is not None and outer.fragments > 1:
        raise ValueError(
            f"{method.name} averages in groups, each by rounds of its own, so peers would differ in which "
            "fragment is next; use RPS() or AllReduce()"
        )
    return outer


def _require_outer(average: str, partial: bool) -> None:
    if average != "models":
        raise ValueError('outer momentum is on what models were moved by; use average="models"')
    if partial:
        raise ValueError(
            "outer momentum needs all peers to take the same outer steps; a schedule that lets slow peers "
            "miss rounds cannot have it. Use every=..., or ragtag.schedules.Matched()"
        )
