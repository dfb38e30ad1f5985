"""``ragtag leak``: what a cut's codes tell, of a user's own net or of nets trained on digits."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ragtag.core.errors import Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from ragtag.privacy.meters import Leakage

CutText = Annotated[
    str | None,
    typer.Argument(
        metavar="CUT",
        help="FILE.py:FUNCTION or MODULE:FUNCTION that gives (cut, train_x, held_x); none: nets on digits.",
    ),
]
Weight = Annotated[
    float,
    typer.Option("--weight", min=0.0, metavar="A1", help="Of NoPeek, for the second of the nets on digits."),
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
    import torch

    place, _, name = text.rpartition(":")
    if not place or not name:
        raise CutError(f"CUT {text!r}: write FILE.py:FUNCTION or MODULE:FUNCTION")
    file = Path(place)
    if place.endswith(".py") and not file.is_file():
        raise FileNotFoundError(f"there is no script {file}")
    with _importable(file.resolve().parent if place.endswith(".py") else Path.cwd()):
        try:
            if place.endswith(".py"):
                function = runpy.run_path(str(file))[name]
            else:
                function = getattr(importlib.import_module(place), name)
        except KeyError:
            raise CutError(f"CUT {text}: {file} has no {name!r}") from None
        except (ImportError, AttributeError) as error:
            raise CutError(f"CUT {text}: {error}") from error
        given = function()
    if not isinstance(given, tuple) or len(given) != 3 or not callable(given[0]):
        raise CutError(f"CUT {text}: it must give (cut, train_x, held_x); it gave a {type(given).__name__}")
    if not all(isinstance(x, torch.Tensor) for x in given[1:]):
        raise CutError(f"CUT {text}: train_x and held_x must be tensors [n, ...]")
    return given


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


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
