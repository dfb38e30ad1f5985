"""``ragtag leak``: what a cut's codes or a model's updates tell, by three attacks.

The decoder reads codes as they are, the hijacker is a server that trains the cut for its own ends, and the
inversion has a model's updates. Each takes what a user's function gives; the first two also nets on digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ragtag.app.function import NoFunction, function_of
from ragtag.core.errors import Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from ragtag.privacy.hijacking import Hijacking
    from ragtag.privacy.inversion import Inversion
    from ragtag.privacy.meters import Leakage


class Attack(StrEnum):
    """Who looks, and at what."""

    DECODER = "decoder"
    HIJACKING = "hijacking"
    INVERSION = "inversion"


GIVES = {
    Attack.DECODER: "(cut, train_x, held_x)",
    Attack.HIJACKING: "(cut, private_x, public_x)",
    Attack.INVERSION: "(model, x, y) or (model, x, y, updates)",
}
"""What a user's function gives for each attack."""
CutText = Annotated[
    str | None,
    typer.Argument(
        metavar="CUT",
        help="FILE.py:FUNCTION or MODULE:FUNCTION that gives (cut, train_x, held_x), or what the attack "
        "takes; none: nets on digits.",
    ),
]
AttackName = Annotated[
    Attack,
    typer.Option(
        "--attack",
        metavar="NAME",
        help="decoder: reads codes. hijacking: a server that trains the cut for its own ends; FUNCTION gives "
        "(cut, private_x, public_x). inversion: has updates; FUNCTION gives (model, x, y), where "
        "the first dimension of samples x and labels y is the update and the second the batch; and a dict of "
        "the updates by parameter, if they are not the gradients.",
    ),
]
WEIGHT = 10.0
"""Of NoPeek, where none is given."""
Weight = Annotated[
    float | None,
    typer.Option(
        "--weight",
        min=0.0,
        metavar="A1",
        help="Of NoPeek: of the second net on digits, of a hijacked client.",
        show_default=f"{WEIGHT:g}",
    ),
]

Steps = Annotated[
    int | None,
    typer.Option("--steps", min=1, metavar="N", help="Of hijacking (800 if not said) or inversion (200)."),
]


class CutError(Error, ValueError):
    """There is no cut to measure; the message says what to do."""


def cut_of(text: str) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """A user's cut with samples that it was trained on, and samples held out.

    text: ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``, whose call without arguments gives the three.

    Raises:
        FileNotFoundError: there is no such file.
        CutError: what is wrong with it.
    """
    cut, train_x, held_x = _given(text, Attack.DECODER)
    if not callable(cut):
        raise CutError(f"CUT {text}: its first is a {type(cut).__name__}, and no cut that takes samples")
    _require_tensors(text, train_x=train_x, held_x=held_x)
    return cut, train_x, held_x


def hijacked_of(text: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A client's layers, its samples, and a server's own. Raises as ``cut_of`` does."""
    cut, private_x, public_x = _given(text, Attack.HIJACKING)
    _require_module(text, cut)
    _require_tensors(text, private_x=private_x, public_x=public_x)
    return cut, private_x, public_x


def updates_of(text: str) -> tuple[nn.Module, Tensor, Tensor, dict[str, Tensor] | None]:
    """A model, the samples behind its updates, their labels, and the updates; ``None``: the gradients.

    Raises as ``cut_of`` does.
    """
    model, x, y, *rest = _given(text, Attack.INVERSION)
    _require_module(text, model)
    _require_tensors(text, x=x, y=y)
    if not rest:
        return model, x, y, None
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    if not isinstance(rest[0], Mapping) or set(rest[0]) != names:
        raise CutError(f"CUT {text}: updates must be a dict with a tensor for each of the model's parameters")
    _require_tensors(text, **{f"update of {name}": value for name, value in rest[0].items()})
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, value in rest[0].items():
        if tuple(value.shape) != (len(x), *shapes[name]):
            raise CutError(
                f"CUT {text}: the updates of {name} are {list(value.shape)}; they must be [updates, ...], "
                f"{[len(x), *shapes[name]]}"
            )
    return model, x, y, dict(rest[0])


def _require_module(text: str, model: object) -> None:
    import torch

    if not isinstance(model, torch.nn.Module):
        raise CutError(f"CUT {text}: its first is a {type(model).__name__}; it must be a torch.nn.Module")


def _require_tensors(text: str, **given: object) -> None:
    import torch

    if not all(isinstance(x, torch.Tensor) for x in given.values()):
        raise CutError(f"CUT {text}: {' and '.join(given)} must be tensors [n, ...]")


def _given(text: str, attack: Attack) -> tuple[Any, ...]:
    """What a user's function gives, of the right number."""
    try:
        with function_of(text) as function:
            given = function()
    except NoFunction as error:
        raise CutError(f"CUT {text}: {error}") from error
    if not isinstance(given, tuple) or len(given) not in (3, 4 if attack is Attack.INVERSION else 3):
        of = f" of {len(given)}" if isinstance(given, tuple) else ""
        raise CutError(
            f"CUT {text}: for --attack {attack} it must give {GIVES[attack]}; it gave a "
            f"{type(given).__name__}{of}"
        )
    return given


def to_json(found: Mapping[str, Leakage], accuracy: Mapping[str, float]) -> dict[str, Any]:
    """By cut, as plain values. accuracy: on held-out samples, of those cuts of which it is known."""
    from dataclasses import asdict

    return {
        "measured_on": "samples held out",
        "cuts": [
            {"cut": name, **asdict(leak), "hidden": leak.hidden, "accuracy": accuracy.get(name)}
            for name, leak in found.items()
        ],
    }


def rebuilt_json(attack: Attack, found: Mapping[str, Hijacking | Inversion]) -> dict[str, Any]:
    """What an attacker rebuilt, by cut or model, as plain values."""
    from dataclasses import asdict

    measured = "the client's samples" if attack is Attack.HIJACKING else "the samples behind the updates"
    return {
        "attack": str(attack),
        "measured_on": measured,
        "cuts": [{"cut": name, **asdict(one), "hidden": one.hidden} for name, one in found.items()],
    }


def show_rebuilt(attack: Attack, found: Mapping[str, Hijacking | Inversion], console: Console) -> None:
    """A table with a column for each cut or model, then what its lines mean."""
    from ragtag.privacy.inversion import Inversion

    hijacks = attack is Attack.HIJACKING
    blind = "  mean public sample" if hijacks else "  mean sample"
    title = "What a server gets that hijacks the cut" if hijacks else "What updates tell of their samples"
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    table.add_column("rebuilt", no_wrap=True)
    for name in found:
        table.add_column(name, justify="right")
    several = list(found.values())
    table.add_row("squared error", *(f"{one.mse:.4g}" for one in several))
    table.add_row(blind, *(f"{one.blind_mse:.4g}" for one in several), style="dim")
    table.add_row("variance that stays hidden", *(f"{100 * one.hidden:.0f} %" for one in several))
    if all(one.ssim is not None for one in several):
        table.add_row("SSIM", *(f"{one.ssim:.3f}" for one in several))
        table.add_row(blind, *(f"{one.blind_ssim:.3f}" for one in several), style="dim")
    first = several[0]
    if isinstance(first, Inversion):
        cosines = [one.cosine for one in several if isinstance(one, Inversion)]
        table.add_row("cosine of updates found", *(f"{cosine:.3f}" for cosine in cosines))
        about = f"{first.updates:,} updates of {first.batch:,} samples each, whose labels the attacker knows"
    else:
        correlations = [one.dcor for one in several if not isinstance(one, Inversion)]
        table.add_row("distance correlation", *(f"{dcor:.3f}" for dcor in correlations))
        about = (
            f"{first.samples:,} samples of a client that trained on {first.steps:,} batches; the server has "
            f"{first.public:,} samples of its own, and saw none of the client's"
        )
    console.print(table)
    for note in (about, "a stronger attack may get more; no bound holds for a single sample"):
        console.print(f"· {note}", style="dim", highlight=False)


def show_leaks(found: Mapping[str, Leakage], accuracy: Mapping[str, float], console: Console) -> None:
    """A table with a column for each cut, then what its lines mean."""
    table = Table(
        title="What codes tell of samples held out",
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
    )
    table.add_column("held out", no_wrap=True)
    for name in found:
        table.add_column(name, justify="right")
    leaks = list(found.values())

    def line(what: str, cells: list[str], **how: Any) -> None:
        table.add_row(what, *cells, **how)

    if accuracy:
        line("accuracy", [f"{100 * accuracy[name]:.1f} %" for name in found], end_section=True)
    line("distance correlation", [f"{leak.dcor:.3f}" for leak in leaks])
    line("  codes beside other samples", [f"{leak.independent_dcor:.3f}" for leak in leaks], style="dim")
    table.add_section()
    line("decoder's squared error", [f"{leak.mse:.4g}" for leak in leaks])
    line("  mean training sample", [f"{leak.blind_mse:.4g}" for leak in leaks], style="dim")
    line("variance that stays hidden", [f"{100 * leak.hidden:.0f} %" for leak in leaks])
    if all(leak.ssim is not None for leak in leaks):
        line("decoder's SSIM", [f"{leak.ssim:.3f}" for leak in leaks])
        line("  mean training sample", [f"{leak.blind_ssim:.3f}" for leak in leaks], style="dim")
    console.print(table)
    first = leaks[0]
    notes = [
        f"measured on {first.held:,} samples held out; the attacker has {first.pairs:,} leaked pairs of code "
        f"and sample, and its best decoder is {_listed(sorted({leak.decoder for leak in leaks}))}",
        "a stronger decoder may read more; no bound holds for a single sample",
    ]
    if first.shared:
        notes.insert(1, f"{first.shared:,} held-out samples were trained on as well, and are left out")
    for note in notes:
        console.print(f"· {note}", style="dim", highlight=False)


def _listed(names: list[str]) -> str:
    return " or ".join(f"the {name} one" for name in names)
