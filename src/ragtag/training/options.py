"""What a crew's optimizer is asked for, as objects; or a clear error."""

from __future__ import annotations

import torch

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DENSE
from ragtag.optim.outer import Nesterov, Streaming
from ragtag.protocols.allreduce import ring
from ragtag.protocols.method import Method
from ragtag.schedules.base import Schedule
from ragtag.schedules.every import EveryStep, every
from ragtag.training.align_plan import Align
from ragtag.training.modes import Gradients, Mode, Models


def mode_of(average: str, inner: torch.optim.Optimizer) -> Mode:
    """What is averaged. Raises ValueError: neither "models" nor "gradients"."""
    if average == "models":
        return Models(inner)
    if average == "gradients":
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


def align_of(align: Align | bool, average: str, method: Method) -> Align | None:
    """How replicas are kept alike; ``None``: they are not, or need not be.

    Raises TypeError or ValueError: it is asked for where it cannot be.
    """
    if isinstance(align, bool):
        return Align() if align and average == "gradients" and method.crowd is None else None
    if not isinstance(align, Align):
        raise TypeError(f"align is {align!r}; it is ragtag.Align(every=...), or False: never")
    if average != "gradients":
        raise ValueError('averages of models keep replicas together: leave out align, or average="gradients"')
    if method.crowd is not None:
        raise ValueError(
            f"{method.name} averages in groups, each by rounds of its own, so replicas take different "
            "steps in any case; use RPS() or AllReduce(), or leave out align"
        )
    return align


def align_text(align: Align | None, asked: Align | bool) -> str:
    """What peers that average gradients must agree on beyond the usual, to stand behind what they average."""
    if align is None:
        return ", never aligned" if asked is False else ""
    return "" if align == Align() else f", {align.name}"


def codec_of(codec: Codec | str) -> Codec:
    """How values travel. Raises ValueError: there is none of that name."""
    if not isinstance(codec, str):
        return codec
    if codec not in DENSE:
        raise ValueError(f"codec is {codec!r}; it is one of {', '.join(DENSE)}")
    return DENSE[codec]


def schedule_of(schedule: Schedule | None, steps: int | None) -> Schedule:
    """When to average. Raises ValueError: both are given, or steps are below 1."""
    if schedule is not None and steps is not None:
        raise ValueError("give either a schedule or every=..., not both")
    if schedule is not None:
        return schedule
    return EveryStep() if steps is None else every(steps)


def streaming_of(
    outer: Nesterov | Streaming | None, average: str, partial: bool, method: Method, compressed: bool
) -> Streaming | None:
    """Outer steps as they are asked for, all of the model at once being one fragment.

    Raises ValueError where they cannot work.
    """
    if outer is None:
        return None
    _require_outer(average, partial)
    if isinstance(outer, Nesterov):
        return Streaming(outer)
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
