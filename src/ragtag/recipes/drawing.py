"""What the figures of all recipes share."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

INK, FAINT, GRID = "#1b1f24", "#57606a", "#e6e9ed"
PALETTE = (
    "#1b1f24",
    "#8c6d31",
    "#e0902b",
    "#cf3a3a",
    "#e08a8a",
    "#7b4fa3",
    "#3b4cc0",
    "#8fa4e8",
    "#1f8fb5",
    "#8a949e",
    "#2a9d5c",
)
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 10, "fontweight": "bold", "color": INK}


def canvas(width: float, height: float) -> Canvas:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(width, height), layout="constrained")


def style(ax: Axes, title: str, x: str, y: str = "") -> None:
    """Titles and quiet axes."""
    ax.set_title(title, **TITLE)
    ax.set_xlabel(x, color=FAINT)
    if y:
        ax.set_ylabel(y, color=INK)
    quiet(ax)


def quiet(ax: Axes) -> None:
    """Make axes less visible than the data."""
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color("#b8c0c8")
    ax.tick_params(colors=FAINT, labelsize=9, which="both")


def band(ax: Axes, x: Sequence[float], by_seed: Sequence[Sequence[float]], **how: Any) -> None:
    """Draw mean and range over seeds. by_seed: one series per seed."""
    table = np.asarray(by_seed, np.float64)
    ax.plot(x, table.mean(0), **how)
    if len(table) > 1:
        ax.fill_between(x, table.min(0), table.max(0), color=how["color"], alpha=0.14, linewidth=0)


def svg(drawn: Canvas) -> str:
    """The figure as SVG. Text stays text, and the document does not depend on when it was made."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ragtag"}):
        drawn.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
