"""Pieces of the report's page, as HTML text. Everything that comes from a trace is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

NONE = "\N{EN DASH}"


def cell(text: object, style: str = "") -> str:
    """One table cell; a number that is not known is a dash."""
    shown = NONE if text is None else escape(str(text))
    return f'<td class="{style}">{shown}</td>' if style else f"<td>{shown}</td>"


def table(heads: Sequence[tuple[str, str]], rows: Iterable[str], style: str = "") -> str:
    """A table that scrolls sideways where it is too wide.

    heads: (text, CSS class).
    """
    head = "".join(f'<th scope="col" class="{of}">{escape(text)}</th>' for text, of in heads)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="card scroll"><table class="{style}">{inner}</table></div>'


def figure(title: str, caption: str, legend: str, drawn: Sequence[str]) -> str:
    """A chart in its wide and its narrow form; the page's style shows one of them."""
    return (
        f'<section class="figure"><h2>{title}</h2><p class="cap">{caption}</p>{legend}'
        f'<div class="card">{"".join(drawn)}</div></section>'
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Keys for lines: (CSS class, name)."""
    keys = (
        f'<span><svg width="30" height="12" aria-hidden="true"><path class="line {style}" d="M1 6H29"/></svg>'
        f"{escape(name)}</span>"
        for style, name in entries
    )
    return f'<div class="legend">{"".join(keys)}</div>'
